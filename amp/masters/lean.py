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
from amp.kernels.interrupts import followed_by, without_grad
from amp.kernels.tensor_lists import local
from amp.lazy import kernels
from amp.masters.agreement import merge_joined, split
from amp.masters.master_weights import MasterWeights
from amp.masters.pair import Master, Pair
from amp.profiles.properties import LeanMasters


class LeanMasterWeights(MasterWeights):
    """The masters of one session, stored as the model's own weights and 16 more bits."""

    are_whole = False

    def __init__(self, kind: LeanMasters) -> None:
        super().__init__()
        self.kind: LeanMasters = kind
        self._joined: dict[Pair, None] = {}

    @without_grad
    def _make(self, parameter: Tensor, data: Tensor) -> tuple[nn.Parameter, Tensor | None]:
        master = Master(_placeholder(parameter), parameter.requires_grad)
        dtype = kernels.split.low_dtype(self.kind, parameter.dtype)
        low = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        kernels.split.split([data.to(torch.float32)], [parameter.detach()], [low])
        return master, low

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
    def as_float32(self, masters: Iterable[Tensor], may_write: bool = False) -> Iterator[None]:
        """Let masters hold FP32 values inside the block, and split them at its end. No host sync."""
        found = filter(None, map(self.pair, masters))
        split = [pair for pair in found if not pair.is_joined]
        try:
            try:
                self._join(split)
                yield
            finally:
                if may_write:
                    self._merge(split)
                self._split(split)
        finally:
            self._split(split)  # again: an interrupt may have come before

    @contextmanager
    def as_split(self) -> Iterator[None]:
        """Split masters that hold FP32 values, and join them at the end of the block. No host sync."""
        joined = list(self._joined)
        try:
            self._merge(joined)
            self._split(joined)
            yield
        finally:
            self._join(joined)

    def _join(self, pairs: Sequence[Pair]) -> None:
        parameters, masters = [pair.parameter for pair in pairs], [pair.master for pair in pairs]
        for master, parameter in zip(masters, parameters, strict=True):
            set_values(master, torch.empty_like(parameter, dtype=torch.float32, requires_grad=False))
        kernels.split.join(parameters, _lows(pairs), masters)
        for pair in pairs:
            pair.is_joined = True
            pair.note_agreement()
        self._joined.update(dict.fromkeys(pairs))

    def _merge(self, pairs: Iterable[Pair]) -> None:
        """Let masters that are unchanged since they were joined take what parameters were given."""
        for pair in pairs:
            if pair.is_joined and not pair.has_changed:
                merge_joined(pair)

    def _split(self, pairs: Iterable[Pair]) -> None:
        """Split those masters that hold FP32 values. Idempotent."""
        joined = [pair for pair in pairs if pair.is_joined]
        split(joined)
        for pair in joined:
            pair.is_joined = False  # first: from here on the halves are valid
            self._joined.pop(pair, None)
            pair.note_agreement()
            set_values(pair.master, _placeholder(pair.parameter))

    def split_joined(self) -> None:
        """Split lean masters that hold FP32 values. No host sync."""
        self._split(list(self._joined))

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """Return the low halves of masters."""
        return _lows([self._pair_of[master] for master in masters])

    def values(self, pair: Pair) -> Tensor:
        """Return a master's values, float32; in new memory if it is split now. No host sync."""
        if pair.is_joined:
            return pair.master.detach()
        values = torch.empty_like(pair.parameter, dtype=torch.float32, requires_grad=False)
        kernels.split.join([pair.parameter], _lows([pair]), [values])
        return values

    def merged(self, pair: Pair) -> Tensor:
        """Return a master's values, float32: its upper half is what was written to its parameter."""
        self.reconcile([pair])
        return self.values(pair)

    def to_save(self, pair: Pair, state_dict: Any) -> Tensor:
        """Return a master's values, float32, as a state dict has them. No host sync."""
        return self.merged(pair)


def _lows(pairs: Iterable[Pair]) -> list[Any]:
    return [pair.low for pair in pairs]


def _placeholder(parameter: Tensor) -> Tensor:
    """Return a tensor of NaN with the shape of a master and the memory of one number."""
    nan = torch.full((), torch.nan, dtype=torch.float32, device=parameter.device)
    return shard_like(nan.expand(local(parameter).shape), parameter)
