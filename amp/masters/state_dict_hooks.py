"""Hooks that save, load and copy a model with master weights in FP32, with its masters' values.

Each module has them. A copy in 16 bits could not take part in an average: see `amp.masters.averages`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp.casting.memory_checks import check_range
from amp.distributed import set_values
from amp.dtypes import LOW_PRECISION
from amp.masters.fp32_values import pair_of, values_of
from amp.masters.master_weights import MasterWeights
from amp.own_tensors import own_tensors
from amp.undo import Undo


def install_hooks(masters: MasterWeights, models: Iterable[nn.Module], undo: Undo) -> None:
    """Make `state_dict()` and deep copies FP32, and `load_state_dict()` refresh the masters."""
    pretrained: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    modules: Iterable[Any] = chain.from_iterable(model.modules() for model in models)
    for module in modules:
        hook = _InFloat32(masters, weakref.ref(module))
        undo.callback(module.register_state_dict_post_hook(hook).remove)
        undo.callback(module.register_load_state_dict_pre_hook(hook.refresh).remove)
        if isinstance(module, pretrained):
            vars(module)["save_pretrained"] = functools.partial(_save_pretrained, module)
            undo.callback(vars(module).pop, "save_pretrained", None)


class _InFloat32:
    """Hooks on one module: it saves and loads masters, or FP32 copies, for its 16-bit entries.

    `copy.deepcopy` copies them after the module's own tensors, and this then makes their copies FP32.
    Copied hooks have no masters: the copied module saves its own values.
    """

    def __init__(self, masters: MasterWeights | None = None, module: Any = lambda: None) -> None:
        self._masters, self._module = masters or MasterWeights(), module

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        """Make 16-bit entries of a state dict FP32."""
        masters = self._masters
        for name, tensor in own_tensors(module):
            entry = state_dict.get(prefix + name)
            pair = masters.pair(tensor)
            if pair is not None and isinstance(entry, Tensor):
                with masters.lock:
                    state_dict[prefix + name] = masters.to_save(pair, state_dict)
            elif isinstance(entry, Tensor) and entry.dtype in LOW_PRECISION:
                state_dict[prefix + name] = entry.float()
        if not prefix:
            masters.has_saved()

    def refresh(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Let masters take the values of a state dict unrounded, before the module loads it.

        With lean masters the host waits for a device that has values for float16 weights.
        """
        if not self._masters.are_whole:  # of the whole model, before any of it is loaded
            named = own_tensors(module) if prefix else module.named_parameters()
            pairs = ((prefix + name, self._masters.pair(tensor)) for name, tensor in named)
            halves = [x for x, pair in pairs if pair is not None and pair.dtype is torch.float16]
            check_range((x, y) for x in halves if isinstance(y := state_dict.get(x), Tensor))
        for name, tensor in own_tensors(module):
            value = state_dict.get(prefix + name)
            pair = self._masters.pair(tensor)
            if pair is not None and isinstance(value, Tensor) and value.shape == tensor.shape:
                with self._masters.lock:
                    state_dict[prefix + name] = pair.load(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _InFloat32:
        module = self._module()
        for name, tensor in () if module is None else own_tensors(module):
            _widen_copy(module, name, tensor, memo)
        return _InFloat32()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _InFloat32, ()


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


# Models of transformers.


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
