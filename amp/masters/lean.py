"""Masters kept in 16 bits beside the model's weights; see `amp.kernels.split`.

What stands in the optimizer has a master's shape and gradient, and NaN for values unless an optimizer
that knows nothing of halves is stepping. A fused optimizer puts the halves together in registers.
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
from amp.masters.parameter import make_master
from amp.masters.whole import MasterWeights
from amp.profiles.properties import LeanMasters


class LeanMasterWeights(MasterWeights):
    """The masters of one session, as the model's own weights and 16 bits more."""

    are_whole = False

    def __init__(self, kind: LeanMasters) -> None:
        super().__init__()
        self.kind: LeanMasters = kind
        self._low_of: dict[Tensor, Tensor] = {}
        self._in_float32: set[Tensor] = set()

    @without_grad
    def _make(self, parameter: Tensor, data: Tensor, takes_scaled: bool) -> nn.Parameter:
        master = make_master(_placeholder(parameter), parameter.requires_grad, takes_scaled)
        dtype = kernels.split.low_dtype(self.kind, parameter.dtype)
        low = self._low_of[master] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        kernels.split.split([data.to(torch.float32)], [parameter.detach()], [low])
        return master

    def release(self, master: Tensor, user: object) -> None:
        """Let one optimizer go, as with whole masters; the last one takes the low half as well."""
        super().release(master, user)
        if self.model(master) is None:
            self._low_of.pop(master, None)

    def run_step(self, optimizer: Any, masters: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run an optimizer's step on one group at a time, whose masters then hold FP32 values."""
        if "param_groups" not in vars(optimizer):  # a wrapper: the groups are another's
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
            self._narrow(lean)  # if an interrupt came before it was done

    @contextmanager
    def as_they_are_kept(self) -> Iterator[None]:
        """Let masters that hold FP32 values be split inside the block. No host sync."""
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
        """Split those masters that are wide. It may be called again."""
        wide = [master for master in masters if master in self._in_float32]
        self._split(wide)
        for master in wide:
            self._in_float32.discard(master)  # first: what it holds does not count from here on
            set_values(master, _placeholder(self._model_of[master]))

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """Return the low halves of masters."""
        return [self._low_of[master] for master in masters]

    def write_back(self, masters: Iterable[Tensor]) -> None:
        """Round those masters to their weights that hold FP32 values now. No host sync."""
        sources = list(masters)
        self._split([master for master in sources if master in self._in_float32])
        self.agree(list(map(id, sources)), [self._model_of[master]._version for master in sources])

    def _split(self, masters: Sequence[Tensor]) -> None:
        models = [self._model_of[master] for master in masters]
        kernels.split.split(masters, models, self.low_halves(masters))

    def _take_over(self, master: Tensor, parameter: Tensor) -> None:
        """Clear the low bits of zeros, and those that do not round to a weight: it was written to."""
        weights, low = local(parameter), local(self._low_of[master])
        high, _ = kernels.split.encode(kernels.split.decode(weights, low), weights.dtype, low.dtype)
        low.copy_(torch.where((high == weights) & (weights != 0), low, 0))

    def values(self, master: Tensor) -> Tensor:
        """Return what a master stands for, float32, in new memory. No host sync."""
        if master in self._in_float32:
            return master.detach()
        parameter = self._model_of[master]
        values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        kernels.split.join([parameter], [self._low_of[master]], [values])
        return values

    def load(self, master: Tensor, values: Tensor) -> Tensor:
        """Make a master stand for other values, and return what its parameter is to hold."""
        parameter = self._model_of[master]
        wide = values.detach().to(device=parameter.device, dtype=torch.float32)
        weights = parameter.detach().clone()
        kernels.split.split([wide], [weights], [self._low_of[master]])
        return weights


def _placeholder(parameter: Tensor) -> Tensor:
    """Return what has the shape of a master and the memory of one number, which is NaN."""
    nan = torch.full((), torch.nan, dtype=torch.float32, device=parameter.device)
    return shard_like(nan.expand(local(parameter).shape), parameter)
