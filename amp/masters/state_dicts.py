"""Hooks that save, load and copy a model with master weights in FP32, with its masters' values.

Each module has them. A copy in 16 bits could not take part in an average: see `amp.masters.averages`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp.distributed import set_values
from amp.dtypes import LOW_PRECISION
from amp.kernels.interrupts import Changes
from amp.masters.fp32_values import pair_of, values_of
from amp.masters.master_weights import MasterWeights
from amp.masters.pair import Pair
from amp.undo import Undo


def install_hooks(masters: MasterWeights, models: Iterable[nn.Module], undo: Undo) -> None:
    """Make `state_dict()` and deep copies FP32, and `load_state_dict()` refresh the masters."""
    for module in chain.from_iterable(model.modules() for model in models):
        register_saving: Any = module.register_state_dict_post_hook
        register_loading: Any = module.register_load_state_dict_pre_hook
        undo.callback(register_saving(_Widen(masters, module)).remove)
        undo.callback(register_loading(_Refresh(masters)).remove)
        if _is_pretrained(module):
            vars(module)["save_pretrained"] = functools.partial(_save_pretrained, module)
            undo.callback(vars(module).pop, "save_pretrained", None)


class _Widen:
    """A hook on one module: makes 16-bit entries of its `state_dict` FP32 masters, or FP32 copies.

    `copy.deepcopy` copies it after the module's own tensors, and it then makes their copies FP32. The
    copied hook has no masters: the copied module saves its own values.
    """

    def __init__(self, masters: MasterWeights | None = None, module: nn.Module | None = None) -> None:
        self._masters = MasterWeights() if masters is None else masters
        self._module = None if module is None else weakref.ref(module)

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        masters = self._masters
        for name, tensor in _own_tensors(module):
            entry = state_dict.get(prefix + name)
            pair = masters.pair(tensor)
            if pair is not None and isinstance(entry, Tensor):
                with masters.lock:
                    state_dict[prefix + name] = masters.to_save(pair, state_dict)
            elif isinstance(entry, Tensor) and entry.dtype in LOW_PRECISION:
                state_dict[prefix + name] = entry.float()
        if not prefix:
            masters.has_saved()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Widen:
        module = None if self._module is None else self._module()
        for name, tensor in () if module is None else _own_tensors(module):
            _widen_copy(module, name, tensor, memo)
        return _Widen()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Widen, ()


def _widen_copy(module: Any, name: str, tensor: Tensor, memo: dict[int, Any]) -> None:
    """Make the copy of a 16-bit tensor FP32, in the memo of `copy.deepcopy`.

    A copy of the optimizer, made before or after, updates the copied model.
    """
    copied = memo.get(id(tensor))
    if copied is None or copied.dtype not in LOW_PRECISION:  # shared, and done already
        return
    values, found = values_of(tensor).clone(), pair_of(tensor)
    stepped = None if found is None else memo.setdefault(id(found[1].master), copied)
    if stepped is None or stepped is copied:
        set_values(copied, values)
    else:
        stepped.detach().copy_(values)
        memo[id(tensor)] = memo[id(module._parameters)][name] = stepped


class _Refresh:
    """A hook on one module: before it loads a state dict, masters take the values unrounded."""

    def __init__(self, masters: MasterWeights | None = None) -> None:
        self._masters = MasterWeights() if masters is None else masters

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in _own_tensors(module):
            value = state_dict.get(prefix + name)
            pair = self._masters.pair(tensor)
            if pair is not None and isinstance(value, Tensor) and value.shape == tensor.shape:
                with self._masters.lock:
                    state_dict[prefix + name] = _load(self._masters, pair, value)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Refresh, ()  # a copy has no masters


def _load(masters: MasterWeights, pair: Pair, value: Tensor) -> Tensor:
    """Load a value into a master and its weight. An interrupt cannot leave them different."""
    weights: list[Tensor] = []
    changes = Changes()
    changes.add(lambda: weights.append(masters.load(pair, value)))
    changes.add(lambda: pair.parameter.data.copy_(weights[-1]))
    changes.make()
    return weights[-1]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


# Models of transformers.


def _is_pretrained(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers.modeling_utils")
    return isinstance(module, getattr(transformers, "PreTrainedModel", ()))


def _save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model, with a configuration that names the dtype of the saved weights.

    `from_pretrained` uses that dtype. The saved weights are FP32, from `state_dict()`, but transformers
    would write the dtype of the model.
    """
    result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if (Path(save_directory) / "config.json").is_file():
        weights = kwargs.get("state_dict") or {}
        dtypes = (value.dtype for value in weights.values() if value.is_floating_point())
        model.config.dtype = next(dtypes, torch.float32)
        model.config.save_pretrained(save_directory)
    return result
