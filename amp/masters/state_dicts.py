"""The model's state dict under master weights: FP32 values out, and into the masters."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp.dtypes import LOW_PRECISION
from amp.kernels.changes import Changes
from amp.masters.whole import MasterWeights
from amp.profiles.properties import Properties


def install_state_dict_hooks(
    masters: MasterWeights, models: Iterable[nn.Module], properties: Properties
) -> Iterator[RemovableHandle]:
    """Make `model.state_dict()` hold FP32 and `load_state_dict()` refresh the masters."""
    if properties.cast_model_type in LOW_PRECISION or properties.master_weights:
        for module in chain.from_iterable(model.modules() for model in models):
            yield module.register_state_dict_post_hook(_Widen(masters))  # type: ignore[no-untyped-call]
            yield module.register_load_state_dict_pre_hook(_Refresh(masters))  # type: ignore[no-untyped-call]


class _StateDictHook:
    """A hook on one module of a cast model, for the module's own tensors.

    In a copy or a pickle of the model it has no masters: the state dict holds its own weights, widened.
    """

    def __init__(self, masters: MasterWeights) -> None:
        self.masters = masters


class _Widen(_StateDictHook):
    """After `state_dict`: 16-bit entries become the FP32 master, or an FP32 copy without one."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for name, tensor in _own_tensors(module):
            entry = state_dict.get(prefix + name)
            master = self.masters.master(tensor)
            if master is not None and isinstance(entry, Tensor):
                with self.masters.lock:
                    self.masters.follow_requires_grad([master], [tensor])
                    self.masters.follow(master)
                    state_dict[prefix + name] = self.masters.values(master)
            elif isinstance(entry, Tensor) and entry.dtype in LOW_PRECISION:
                state_dict[prefix + name] = entry.float()


class _Refresh(_StateDictHook):
    """Before `load_state_dict`: masters take the values to be loaded, before those are rounded."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in _own_tensors(module):
            value = state_dict.get(prefix + name)
            master = self.masters.master(tensor)
            if master is not None and isinstance(value, Tensor) and value.shape == master.shape:
                with self.masters.lock:
                    state_dict[prefix + name] = _load(self.masters, master, tensor, value)


def _load(masters: MasterWeights, master: Tensor, tensor: Tensor, value: Tensor) -> Tensor:
    """Load a value into a master and its weight: an interrupt finds them equal."""
    weights: list[Tensor] = []
    changes = Changes()
    changes.add(lambda: weights.append(masters.load(master, value)))
    changes.add(lambda: tensor.data.copy_(weights[-1]))
    changes.make()
    return weights[-1]


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
