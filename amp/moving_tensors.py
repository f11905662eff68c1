"""A watch of the first steps for 16-bit buffers and frozen weights that training moves.

Such are statistics of observations, centres, codebooks, counts, and a teacher that follows its student.
In 16 bits a count stands still at 256 or 2048, and an average never arrives.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import _disable_current_modes

from amp.casting.cast_hooks import EXACT_INTEGERS
from amp.casting.matching_rules import ruled_tensors
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import first_few, warn
from amp.kernels.interrupts import without_grad
from amp.kernels.tensor_lists import are_plain
from amp.masters.averages import is_exact
from amp.observers import Observer
from amp.own_tensors import tensors_in
from amp.training.recorder import HostCopies
from amp.training.step import unattached

_STEPS = 5
"""For how many steps the watch lasts."""


class _Key(NamedTuple):
    """A tensor by the number of its model and its name there, because a script may replace it."""

    model: int
    name: str


class MovingTensors(Observer):
    """Warns once, by name, of 16-bit tensors that are written in several steps, but not by optimizers.

    To find writes, sums of the values are compared: a write through `.data` shows nowhere else. A
    tensor that is moved, or set to the values that it has, does not count. Neither does one that is
    written once, such as a cache that the first forward makes or a loaded checkpoint, nor a cache that
    grows. The host does not wait for a CUDA device.

    Args:
        models: the models to watch.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._clock: Any = lambda: None
        self._steps = 0
        self._shapes: dict[_Key, torch.Size] = {}
        self._sums: dict[_Key, float] = {}
        self._sums_underway = HostCopies()
        self._writes: Counter[_Key] = Counter()
        self._named: set[_Key] = set()
        self._stepped: set[int] = set()
        """The parameters that optimizers of the session step, by id."""

    def step_begins(self, attached: Any, closure: Callable[[], Any] | None) -> Any:
        """Note which parameters are about to be stepped: hooks of the step may remove gradients."""
        self._stepped |= {id(x) for x in attached.gradients.parameters.of_model if x.grad is not None}
        return closure

    def step_ends(self, attached: Any) -> None:
        """Look for writes since the last step of the optimizer that steps first."""
        self.step_begins(attached, None)  # after a closure, which makes gradients
        if self._clock() is None:
            self._clock = weakref.ref(attached)
        if self._clock() is not attached:
            return
        self._steps += 1
        if self._steps == _STEPS:
            attached.owner.observers.remove(self)
        found = dict(self._unstepped(attached.owner))
        for key, x in found.items():
            if self._shapes.setdefault(key, x.shape) != x.shape:
                self._writes[key] = -_STEPS  # a cache that grows
        self._compare_sums(found)
        new = {key: x for key, x in found.items() if key not in self._named}
        if moved := {key: x for key, x in new.items() if self._writes[key] > 1}:
            self._named |= moved.keys()
            self._warn(moved)

    def _unstepped(self, session: Any) -> Iterator[tuple[_Key, Tensor]]:
        """Yield the 16-bit tensors that no optimizer steps, and that no rule for tensors names."""
        groups = [group for optimizer in unattached.known for group in optimizer.param_groups]
        stepped = self._stepped | {id(x) for group in groups for x in group["params"]}
        found, may_be_half, memory = dict[Tensor, _Key](), set[Tensor](), set[int]()
        for i, model in enumerate(reference() for reference in self._models):
            if model is None:
                continue
            ruled = ruled_tensors(model, session.properties.rules)
            may_be_half |= {x for x, rule in ruled.items() if rule.kind == "tensor"}
            may_be_half |= {x for module in model.modules() for x in _may_be_half(module, session)}
            for name, x in tensors_in(model):
                if x.dtype not in LOW_PRECISION or x.layout is not torch.strided or not are_plain([x]):
                    continue
                has_master = session.masters.master(x) is not None
                if id(x) in stepped or (has_master and x.requires_grad):
                    memory.add(x.untyped_storage().data_ptr())
                elif not (x.is_inference() or is_exact(x)):
                    found.setdefault(x, _Key(i, name))
        for x, key in found.items():
            if x not in may_be_half and x.untyped_storage().data_ptr() not in memory:
                yield key, x

    @without_grad
    def _compare_sums(self, tensors: Mapping[_Key, Tensor]) -> None:
        """Count the tensors that have changed, as far as the host knows, and send it their sums."""
        devices = defaultdict(list)
        for key, x in tensors.items():
            if x.device.type in ("cpu", "cuda") and not (x.is_cuda and _is_capturing()):
                devices[x.device].append(key)
        with _disable_current_modes():  # modes that watch the model should not see these ops
            for keys in devices.values():
                sums = [tensors[key].detach().view(torch.int16).sum() for key in keys]
                self._sums_underway.send(torch.stack(sums), keys)
        for keys, values in self._sums_underway.arrived():
            for key, value in zip(keys, values, strict=True):
                self._writes[key] += self._sums.get(key, value) != value
                self._sums[key] = value

    def _warn(self, moved: Mapping[_Key, Tensor]) -> None:
        of_models = len(self._models) > 1
        called = {key: f"models[{key.model}].{key.name}" if of_models else key.name for key in moved}
        weights = [called[key] for key, x in moved.items() if isinstance(x, nn.Parameter)]
        buffers = [called[key] for key, x in moved.items() if not isinstance(x, nn.Parameter)]
        which = [f"the buffers {first_few(buffers)}"] if buffers else []
        which += [f"the parameters {first_few(weights)}, which no optimizer steps"] if weights else []
        dtype, rules = next(iter(moved.values())).dtype, self._rules(moved)
        low, first = dtype_name(dtype), next(iter(moved)).name
        or_all = ", or all buffers by buffer_dtype='float32'" if buffers else ""
        warn(
            f"the training writes to {' and '.join(which)}, in each step. They are {low}, which loses "
            f"small changes: a count stands still at {EXACT_INTEGERS[dtype]}, and an average never "
            f"arrives. Keep them in FP32 by rules=[{', '.join(rules)}], in amp.initialize or in a "
            f"profile{or_all}. If 16 bits are enough, say so: {{'tensor': '{first}', 'cast': '{low}'}}"
        )

    def _rules(self, moved: Collection[_Key]) -> list[str]:
        """Return rules that keep tensors in FP32, one for a module of which all 16-bit weights move.

        Names that differ by the numbers of blocks alone get one rule, if it matches nothing else.
        """
        alike: dict[tuple[str, str], set[str]] = {}
        for key in moved:
            model, parts = self._models[key.model](), key.name.split(".")
            paths = [".".join(parts[:n]) for n in range(1, len(parts))]
            path = next((x for x in paths if model and _are_all_in(moved, key.model, model, x)), None)
            kind, name = ("tensor", key.name) if path is None else ("module", path)
            alike.setdefault((kind, re.sub(r"\b\d+\b", "*", name)), set()).add(name)
        models = [model for reference in self._models if (model := reference()) is not None]
        everything = {
            "tensor": {name for model in models for name, _ in tensors_in(model)},
            "module": {name for model in models for name, _ in model.named_modules()},
        }
        rules = []
        for (kind, glob), names in alike.items():
            inside = tuple(f"{name}." for name in names)
            others = [x for x in everything[kind] - names if not x.startswith(inside)]
            is_sure = len(names) > 1 and not any(fnmatchcase(name, glob) for name in others)
            patterns = [glob] if is_sure else sorted(names)
            rules += [str({kind: pattern, "cast": "float32"}) for pattern in patterns]
        return rules


def _may_be_half(module: nn.Module, session: Any) -> Iterator[Tensor]:
    """Yield buffers that a module writes, and for which 16 bits are enough, or the user says so."""
    is_norm = isinstance(module, _NormBase) and session.properties.keep_batchnorm_fp32 is False
    if is_norm or isinstance(module, _SpectralNorm):  # which begins its vectors anew from the weight
        yield from module.buffers(recurse=False)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield from (getattr(module, f"{hook.name}_{vector}") for vector in "uv")


def _are_all_in(moved: Collection[_Key], number: int, model: nn.Module, path: str) -> bool:
    """Whether the 16-bit parameters of a module of a model are all among some tensors."""
    named = model.get_submodule(path).named_parameters(prefix=path)
    return all(_Key(number, name) in moved for name, x in named if x.dtype in LOW_PRECISION)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
