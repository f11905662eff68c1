"""Lean masters, stored as the model's 16-bit weights and 16 more bits; see `amp.kernels.split`.

The optimizer holds a placeholder with a master's shape and gradient. Its values are NaN, except while
an optimizer that does not know halves is stepping. A fused optimizer joins the halves in registers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amp.distributed import set_values, shard_like
from amp.interrupts import followed_by
from amp.kernels.grad_mode import without_grad
from amp.kernels.tensor_lists import local
from amp.lazy import kernels
from amp.masters.whole import MasterWeights
from amp.profiles.properties import LeanMasters


class LeanMasterWeights(MasterWeights):
    """The masters of one session, stored as the model's own weights and 16 more bits."""

    are_whole = False

    def __init__(self, kind: LeanMasters) -> None:
        super().__init__()
        self.kind: LeanMasters = kind
        self._low_of: dict[Tensor, Tensor] = {}
        self._in_float32: set[Tensor] = set()

    @without_grad
    def _make(self, parameter: Tensor, data: Tensor) -> nn.Parameter:
        master = nn.Parameter(_placeholder(parameter), parameter.requires_grad)
        dtype = kernels.split.low_dtype(self.kind, parameter.dtype)
        low = self._low_of[master] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        kernels.split.split([data.to(torch.float32)], [parameter.detach()], [low])
        return master

    def release(self, master: Tensor, user: object) -> None:
        """Release a master for one optimizer; the last release deletes the low half as well."""
        super().release(master, user)
        if self.model(master) is None:
            self._low_of.pop(master, None)

    def run_step(self, optimizer: Any, masters: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run an optimizer's step group by group, while the masters of the group hold FP32 values."""
        if "param_groups" not in vars(optimizer):  # a wrapper: it has no groups itself
            with self.as_float32(masters):
                return step()
        groups = optimizer.param_groups

        def run() -> Any:
            result = None
            for group in groups:
                optimizer.param_groups = [group]
                with self.as_float32(group["params"]):
                    result = step()
            return result

        return followed_by(run, lambda: setattr(optimizer, "param_groups", groups))

    @contextmanager
    def as_float32(self, masters: Iterable[Tensor]) -> Iterator[None]:
        """Let masters hold FP32 values inside the block, and split them at its end. No host sync."""
        lean = [m for m in masters if m in self._low_of and m not in self._in_float32]
        try:
            try:
                self._widen(lean)
                yield
            finally:
                self._narrow(lean)
        finally:
            self._narrow(lean)  # again: an interrupt may have come before

    @contextmanager
    def as_they_are_kept(self) -> Iterator[None]:
        """Split masters that hold FP32 values, and join them at the end of the block. No host sync."""
        wide = list(self._in_float32)
        try:
            self._narrow(wide)
            yield
        finally:
            self._widen(wide)

    def _widen(self, masters: Sequence[Tensor]) -> None:
        parameters = [self._model_of[master] for master in masters]
        for master, parameter in zip(masters, parameters, strict=True):
            set_values(master, torch.empty_like(parameter, dtype=torch.float32, requires_grad=False))
        kernels.split.join(parameters, self.low_halves(masters), masters)
        self._in_float32.update(masters)

    def _narrow(self, masters: Sequence[Tensor]) -> None:
        """Split those masters that hold FP32 values. Idempotent."""
        wide = [master for master in masters if master in self._in_float32]
        self._split(wide)
        for master in wide:
            self._in_float32.discard(master)  # first: from here on the halves are valid
            set_values(master, _placeholder(self._model_of[master]))

    def narrow(self) -> None:
        """Split all masters that hold FP32 values. No host sync."""
        self._narrow(list(self._in_float32))

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """Return the low halves of masters."""
        return [self._low_of[master] for master in masters]

    def write_back(self, masters: Iterable[Tensor]) -> None:
        """Split masters that hold FP32 values into weights and low halves. No host sync."""
        sources = list(masters)
        self._split([master for master in sources if master in self._in_float32])
        self._note(sources)

    def _split(self, masters: Sequence[Tensor]) -> None:
        models = [self._model_of[master] for master in masters]
        kernels.split.split(masters, models, self.low_halves(masters))

    def _take_over(self, master: Tensor, parameter: Tensor) -> None:
        """Clear the low bits of weights that other code has written, and of zeros."""
        if master in self._in_float32:
            super()._take_over(master, parameter)
            return
        weights, low = local(parameter), local(self._low_of[master])
        high, _ = kernels.split.encode(kernels.split.decode(weights, low), weights.dtype, low.dtype)
        low.copy_(torch.where((high == weights) & (weights != 0), low, 0))

    def values(self, master: Tensor) -> Tensor:
        """Return a master's values, float32; in new memory if it is split now. No host sync."""
        if master in self._in_float32:
            return master.detach()
        parameter = self._model_of[master]
        values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        kernels.split.join([parameter], [self._low_of[master]], [values])
        return values

    def load(self, master: Tensor, values: Tensor) -> Tensor:
        """Set a master's values, and return the weights that its parameter must then hold."""
        parameter = self._model_of[master]
        wide = values.detach().to(device=parameter.device, dtype=torch.float32)
        weights = parameter.detach().clone()
        kernels.split.split([wide], [weights], [self._low_of[master]])
        return weights


def _placeholder(parameter: Tensor) -> Tensor:
    """Return a tensor of NaN with the shape of a master and the memory of one number."""
    nan = torch.full((), torch.nan, dtype=torch.float32, device=parameter.device)
    return shard_like(nan.expand(local(parameter).shape), parameter)
