"""Repair of the running statistics of normalization layers after a forward with an inf or NaN."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp.kernels.interrupts import without_grad
from amp.kernels.tensor_lists import are_plain
from amp.lazy import kernels
from amp.undo import Undo


class RunningStatistics:
    """The running means and variances of normalization layers, and their last finite values.

    Where one of them is not finite after a backward, it gets its last finite value back. Without that,
    one bad batch makes the model evaluate to NaN although its step is skipped. Costs a copy of all of
    them, and four small operations for each device and dtype after each backward. The host
    does not wait for the device.

    A copy or a pickle of this object, as in the hooks of a copied model, watches nothing.

    Attributes:
        modules: the layers, weakly.
    """

    def __init__(self) -> None:
        self.modules: list[weakref.ref[nn.Module]] = []
        self._finite: dict[Any, Tensor] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RunningStatistics, ()

    def watch(self, models: Iterable[nn.Module], undo: Undo) -> None:
        """Keep the statistics that models have now, and those that are loaded, until `undo`."""
        for module in chain.from_iterable(model.modules() for model in models):
            if not isinstance(module, torch.jit.ScriptModule) and _buffers_of(module):
                self.modules.append(weakref.ref(module))
                register: Any = module.register_load_state_dict_post_hook
                undo.callback(register(self.snapshot).remove)
        undo.callback(self.modules.clear)
        self.snapshot()

    @without_grad
    def snapshot(self, *_: object) -> None:
        """Take the current statistics as the last finite values; also the hook for loaded ones."""
        self._finite = {key: _joined(buffers) for key, buffers in self._groups().items()}

    @without_grad
    def repair(self) -> None:
        """Replace values that are not finite by the last finite ones. No host sync."""
        for key, buffers in self._groups().items():
            values, finite = _joined(buffers), self._finite.get(key)
            is_finite = values.isfinite()
            are_good = kernels.backend.is_on_host(values) and bool(is_finite.all())
            if are_good or finite is None or finite.shape != values.shape:  # the model has moved
                self._finite[key] = values
                continue
            self._finite[key] = finite = torch.where(is_finite, values, finite)
            pieces = torch.split(finite, [buffer.numel() for buffer in buffers])
            # Through `.data`: a graph that has saved the buffers stays valid.
            targets = [buffer.data.view(-1) for buffer in buffers]
            torch._foreach_copy_(targets, pieces)

    def _groups(self) -> dict[Any, list[Tensor]]:
        """Return the buffers by device and dtype."""
        groups = defaultdict(list)
        for module in filter(None, [reference() for reference in self.modules]):
            for buffer in _buffers_of(module):
                if buffer.is_floating_point() and are_plain([buffer]) and not is_lazy(buffer):
                    groups[buffer.device, buffer.dtype].append(buffer)
        return groups


def _buffers_of(module: nn.Module) -> list[Tensor]:
    found = [module._buffers.get(name) for name in ("running_mean", "running_var")]
    return [buffer for buffer in found if buffer is not None]


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])
