"""FP32 master weights of a session: make them, find them, release them.

A master is an FP32 `nn.Parameter` that replaces a float16 or bfloat16 parameter of the model in the
optimizer. It costs 4 bytes for each parameter, and 4 more for its gradient from the block to
`zero_grad`, unless the optimizer takes scaled gradients. Masters are made from the values that the
model had before it was cast, so no bit is lost (in one process; see `acquire`), and they exist as soon
as `initialize` returns.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp import distributed
from amp.kernels.interrupts import followed_by, without_grad
from amp.kernels.tensor_lists import are_plain, local
from amp.lazy import kernels
from amp.masters.agreement import Pairs
from amp.masters.lean import clear_low, join, joined_of, split
from amp.masters.pair import Master, Pair, register_master
from amp.profiles.properties import LeanMasters
from amp.shared_memory import CastMemory
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.undo import Contents


class MasterWeights:
    """The masters of one session, each shared by all the optimizers that hold its parameter.

    A copy or a pickle of this object has no masters.

    Args:
        kind: the profile's `master_weights`: the encoding of lean masters (`amp.masters.lean`); True
            keeps whole ones, in FP32, and False or None makes none.

    Attributes:
        are_used: whether 16-bit parameters get masters.
        are_whole: whether masters hold FP32 values at all times.
        memory: gives parameters memory in the dtype from before the cast.
        lock: held by a step, in which masters and weights differ, and by code that compares the two,
            perhaps in another thread that saves the model.
        are_ahead: whether a step, or a method of an optimizer, may have changed masters and not yet the
            weights. A signal handler may save the model meanwhile.
    """

    def __init__(self, kind: LeanMasters | bool | None = None) -> None:
        self.are_used = bool(kind)
        self._kind = kind if isinstance(kind, str) else None
        self.are_whole = self._kind is None
        self.memory = CastMemory()
        self.lock = threading.RLock()
        self.are_ahead = False
        self._pair_of: dict[Tensor, Pair] = {}
        self._pair_at: dict[int, Pair] = {}
        """Pairs by the addresses of parameters, as they were when one was last looked for."""
        self._sizes: set[int] = set()
        self._dtype_before: dict[Tensor, torch.dtype] = {}
        self._saving: tuple[Callable[[], Any], frozenset[Pair]] = _nothing, frozenset()
        """The state dict that is made now, weakly, and the pairs that differed when it was begun."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return MasterWeights, ()

    def renew_lock(self) -> None:
        """Make a new lock, in a forked process: no thread there would release the old one."""
        self.lock = threading.RLock()

    # Finding masters.

    def pair(self, tensor: Tensor) -> Pair | None:
        """Return the pair of a parameter or of a master, if it has one."""
        return self._pair_of.get(tensor)

    def master(self, parameter: Tensor) -> Any:
        """Return the master of a model's parameter, if it has one."""
        pair = self._pair_of.get(parameter)
        return None if pair is None or pair.parameter is not parameter else pair.master

    def model(self, master: Tensor) -> Tensor | None:
        """Return the model's parameter that `master` stands for, if it is a master."""
        pair = self._pair_of.get(master)
        return None if pair is None or pair.master is not master else pair.parameter

    def pair_at(self, values: Tensor) -> Pair | None:
        """Return the pair of the parameter with the memory of `values`, as `p.detach()` has."""
        if values.numel() not in self._sizes:
            return None
        try:
            address = values.data_ptr()
        except RuntimeError:  # it has no memory of its own: a sparse one, or one under vmap
            return None
        pair = self._pair_at.get(address)
        if pair is None or pair.parameter.data_ptr() != address:  # parameters move when a model does
            known = [each for each in self._pairs() if are_plain((each.parameter, each.master))]
            self._pair_at = {each.parameter.data_ptr(): each for each in known}
            pair = self._pair_at.get(address)
        if pair is None or not address:
            return None
        parameter = pair.parameter
        is_as_it_is = values.shape == parameter.shape and values.stride() == parameter.stride()
        return pair if is_as_it_is else None

    def _pairs(self) -> list[Pair]:
        return list(dict.fromkeys(self._pair_of.values()))

    # Making and releasing masters.

    def note_casts(self, before: Mapping[Tensor, Contents]) -> None:
        """Note the dtypes that parameters had before they were cast."""
        self._dtype_before |= {tensor: contents.data.dtype for tensor, contents in before.items()}

    def forget_casts(self) -> None:
        """Forget these dtypes, and the parameters: all masters are released."""
        self._dtype_before.clear()

    def acquire(self, parameter: Tensor, before: Mapping[Tensor, Contents], user: object) -> Pair:
        """Return the pair of a 16-bit parameter for one more optimizer; make it if there is none.

        Args:
            parameter: a parameter of the model.
            before: what parameters held before they were cast.
            user: stands for the optimizer, as in `release`.
        """
        pair = self._pair_of.get(parameter)
        if pair is None:
            data, grad = before.get(parameter) or Contents(parameter.detach(), parameter.grad)
            if distributed.world_size() > 1 and not distributed.is_sharded(parameter):
                # DDP is about to make the ranks' 16-bit weights equal. Masters made of 16-bit weights
                # will then be equal in every bit; masters made of each rank's own FP32 weights would
                # differ.
                data = data.to(parameter.dtype)
            # Halves are only made of the values.
            master = Master(data.to(torch.float32, copy=self.are_whole), parameter.requires_grad)
            if HAS_GRAD_DTYPE:
                parameter.grad, parameter.grad_dtype = None, None  # it may have its master's gradient
            if grad is not None:
                master.grad = grad.to(torch.float32, copy=True)
                parameter.grad = master.grad if HAS_GRAD_DTYPE else None
            # What a script attaches to one is at the other.
            object.__setattr__(master, "__dict__", parameter.__dict__)
            pair = Pair(parameter, master)
            if self._kind is None:
                register_master()
            else:
                dtype = kernels.split.low_dtype(self._kind, parameter.dtype)
                pair.low = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                split([pair])
            self._pair_of[parameter] = self._pair_of[master] = pair
            self._sizes.add(parameter.numel())
        if user not in pair.users:
            pair.users.append(user)
        return pair

    def release(self, master: Tensor, user: object) -> None:
        """Release a master for one optimizer; the last release deletes it. Idempotent.

        A parameter that was cast gets its master's values, in the dtype that it had before the cast.
        """
        pair = self._pair_of.get(master)
        if pair is None:
            return
        parameter, dtype = pair.parameter, self._dtype_before.get(pair.parameter)
        if dtype is not None and parameter.dtype is pair.dtype and dtype is not pair.dtype:
            one = Pairs([pair])
            one.resolve(one.differences(at_grads=False))
            one.merge()
            data = self.memory.cast(parameter, dtype, pair.values())
            Contents.cast(parameter, dtype, data).put_into(parameter)
        self._pair_at = {}
        if user in pair.users:
            pair.users.remove(user)
        if not pair.users:
            object.__setattr__(master, "__dict__", dict(parameter.__dict__))
            self._pair_of.pop(parameter, None)
            self._pair_of.pop(master, None)  # last: while it is there, release is not done

    # In a step.

    def run_step(
        self, optimizer: Any, masters: Sequence[Tensor], step: Callable[[], Any], has_closure: bool
    ) -> Any:
        """Run an optimizer's step group by group, while the masters of the group hold FP32 values.

        With a closure, which concerns all groups, it runs once, while all masters hold them.
        """
        if has_closure or "param_groups" not in vars(optimizer):  # a wrapper: it has no groups itself
            with self.as_float32(masters, may_write=has_closure):
                result = step()
                self.split_joined()  # the closure's writes are in the masters that were stepped
                return result
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
        """Let masters hold FP32 values inside the block. No host sync.

        Args:
            masters: the masters.
            may_write: whether the script's code runs in the block, which may write to parameters too.
        """
        found = () if self.are_whole else filter(None, map(self.pair, masters))
        to_join = [pair for pair in found if pair.holder is pair.parameter]
        try:
            try:
                join(to_join)
                yield
            finally:
                split(to_join, may_write)
        finally:
            split(to_join)  # again: an interrupt may have come before

    @contextmanager
    def as_split(self) -> Iterator[None]:
        """Split lean masters that hold FP32 values, and join them after the block. No host sync."""
        joined = joined_of(self._pairs())
        try:
            split(joined, may_be_written=True)
            yield
        finally:
            join(joined)

    def split_joined(self) -> None:
        """Split lean masters that hold FP32 values. No host sync."""
        split(self._pairs())

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor] | None:
        """Return the low halves of masters that are kept in 16 bits; None where they are whole."""
        return None if self.are_whole else [self._pair_of[master].low for master in masters]

    # Saving.

    @without_grad
    def merged(self, pair: Pair) -> Tensor:
        """Return a master's values, float32, and its parameter's where these differ. No host sync.

        The result is in new memory, and the master does not change: a script often writes an average to
        the model and takes it back.
        """
        self.reconcile([pair])
        parameter = pair.parameter
        if not (self.are_whole or self.are_ahead or pair.holder is pair.master):
            clear_low([pair])  # of zeros that were written without a trace
        if not self.are_whole or self.are_ahead or parameter.is_meta or not pair.has_memory:
            return pair.values()  # the upper half of a lean one is its parameter
        merged = kernels.master_copy.merged(local(parameter), local(pair.master))
        return distributed.shard_like(merged, pair.master)

    def to_save(self, pair: Pair, state_dict: Any) -> Tensor:
        """Return a master's values, float32, as a state dict has them.

        They are a whole master itself where its parameter is the rounded master, so that what is
        written to the entry reaches the model. The host waits once for each state dict, and once more
        if any parameter differs from its master.

        Args:
            pair: the pair.
            state_dict: the state dict that is being made.
        """
        if not self.are_whole:
            return self.merged(pair)
        known, differing = self._saving
        if known() is not state_dict:
            every = self._pairs()
            self.reconcile(every)
            differing = frozenset() if self.are_ahead else Pairs(every).differing()
            of = weakref.ref(state_dict) if isinstance(state_dict, OrderedDict) else _nothing
            self._saving = of, differing
        if pair in differing:
            return self.merged(pair)
        pair.note_given()
        return pair.master.detach()

    def has_saved(self) -> None:
        """Note that a state dict is complete: the same object may be filled a second time."""
        self._saving = _nothing, frozenset()

    def reconcile(self, pairs: Sequence[Pair]) -> None:
        """Let both sides of some pairs agree, unless a step has them. No host sync."""
        if not self.are_ahead:
            some = Pairs(pairs)
            some.resolve(some.differences(at_grads=False))


def _nothing() -> None:
    return None
