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
from torch import Tensor, nn

from amp import distributed
from amp.kernels.interrupts import without_grad
from amp.kernels.tensor_lists import are_plain, has_no_memory, local
from amp.lazy import kernels
from amp.masters.agreement import Pairs, load
from amp.masters.pair import Master, Pair, register_master
from amp.shared_memory import CastMemory
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.undo import Contents


class MasterWeights:
    """The masters of one session, each shared by all the optimizers that hold its parameter.

    This class keeps them as FP32 tensors; `amp.masters.lean` keeps them in 16 bits beside the weights.
    A copy or a pickle of this object has no masters.

    Attributes:
        memory: gives parameters memory in the dtype from before the cast.
        lock: held by a step, in which masters and weights differ, and by code that compares the two,
            perhaps in another thread that saves the model.
        are_ahead: whether a step, or a method of an optimizer, may have changed masters and not yet the
            weights. A signal handler may save the model meanwhile.
    """

    are_whole = True
    """Whether masters hold FP32 values at all times."""

    def __init__(self) -> None:
        self.memory = CastMemory()
        self.lock = threading.RLock()
        self.are_ahead = False
        self._pair_of: dict[Tensor, Pair] = {}
        self._addresses: _Addresses | None = None
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
        addresses = self._addresses
        if addresses is None:  # another thread may reset it meanwhile
            addresses = self._addresses = _Addresses(
                {id(x): x for x in self._pair_of.values()}.values()
            )
        return addresses.pair_at(values)

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
            master, low = self._make(parameter, data)
            if HAS_GRAD_DTYPE:
                parameter.grad, parameter.grad_dtype = None, None  # it may have its master's gradient
            if grad is not None:
                master.grad = grad.to(torch.float32, copy=True)
                parameter.grad = master.grad if HAS_GRAD_DTYPE else None
            # What a script attaches to one is at the other.
            object.__setattr__(master, "__dict__", parameter.__dict__)
            pair = Pair(parameter, master, low, self._dtype_before.get(parameter))
            self._pair_of[parameter] = self._pair_of[master] = pair
            self._addresses = None
        if user not in pair.users:
            pair.users.append(user)
        return pair

    def _make(self, parameter: Tensor, data: Tensor) -> tuple[nn.Parameter, Tensor | None]:
        """Return a parameter's new master and its low half. `data` is the values before the cast."""
        register_master()
        return Master(data.to(torch.float32, copy=True), parameter.requires_grad), None

    def release(self, master: Tensor, user: object) -> None:
        """Release a master for one optimizer; the last release deletes it. Idempotent.

        A parameter that was cast gets its master's values, in the dtype that it had before the cast.
        """
        pair = self._pair_of.get(master)
        if pair is None:
            return
        parameter, dtype = pair.parameter, pair.dtype_before
        if dtype is not None and parameter.dtype is pair.dtype and dtype is not pair.dtype:
            one = Pairs([pair])
            one.resolve(one.differences(at_grads=False))
            one.merge()
            data = self.memory.cast(parameter, dtype, self.values(pair))
            Contents.cast(parameter, dtype, data).put_into(parameter)
        self._addresses = None
        if user in pair.users:
            pair.users.remove(user)
        if not pair.users:
            object.__setattr__(master, "__dict__", dict(parameter.__dict__))
            self._pair_of.pop(parameter, None)
            self._pair_of.pop(master, None)  # last: while it is there, release is not done

    # In a step.

    def run_step(self, optimizer: Any, masters: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run an optimizer's step, in which its masters hold FP32 values, and return its result."""
        return step()

    @contextmanager
    def as_float32(self, masters: Iterable[Tensor], may_write: bool = False) -> Iterator[None]:
        """Let masters hold FP32 values inside the block. No host sync.

        Args:
            masters: the masters.
            may_write: whether other code runs in the block, which may write to parameters too.
        """
        yield

    @contextmanager
    def as_split(self) -> Iterator[None]:
        """Keep lean masters split in the block, as they are outside of `as_float32`. No host sync."""
        yield

    def split_joined(self) -> None:
        """Split lean masters that hold FP32 values. No host sync."""

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor] | None:
        """Return the low halves of masters that are kept in 16 bits; None where they are whole."""
        return None

    # Saving and loading.

    def values(self, pair: Pair) -> Tensor:
        """Return a master's values, float32. No host sync."""
        return pair.master.detach()

    @without_grad
    def merged(self, pair: Pair) -> Tensor:
        """Return a master's values, float32, and its parameter's where these differ. No host sync.

        The result is in new memory, and the master stays as it is: an average that is written to the
        model is often taken back.
        """
        self.reconcile([pair])
        parameter = pair.parameter
        if self.are_ahead or parameter.is_meta or has_no_memory(local(parameter)):
            return self.values(pair)
        merged = kernels.master_copy.merged(local(parameter), local(pair.master))
        return distributed.shard_like(merged, pair.master)

    def to_save(self, pair: Pair, state_dict: Any) -> Tensor:
        """Return a master's values, float32, as a state dict has them.

        They are the master itself where its parameter is the rounded master, so that what is written to
        the entry reaches the model. The host waits once for each state dict, and once more if any
        parameter differs from its master.

        Args:
            pair: the pair.
            state_dict: the state dict that is being made.
        """
        known, differing = self._saving
        if known() is not state_dict:
            every = list(dict.fromkeys(self._pair_of.values()))
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

    def load(self, pair: Pair, values: Tensor) -> Tensor:
        """Set a master's values, and return the values that its parameter must then hold."""
        return load(pair, values)


def _nothing() -> None:
    return None


class _Addresses:
    """Addresses of parameters, by which `p.detach()` and `p.data` have a master too.

    Args:
        pairs: the pairs of a session.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = [pair for pair in pairs if are_plain((pair.parameter, pair.master))]
        self._sizes = {pair.parameter.numel() for pair in self._pairs}
        self._known: dict[int, Pair] = {}

    def pair_at(self, values: Tensor) -> Pair | None:
        """Return the pair of the parameter that has the memory of `values`, in the same shape."""
        if values.numel() not in self._sizes:
            return None
        try:
            address = values.data_ptr()
        except RuntimeError:  # it has no memory of its own: a sparse one, or one under vmap
            return None
        pair = self._known.get(address)
        if pair is None or pair.parameter.data_ptr() != address:  # parameters move when a model does
            self._known = {each.parameter.data_ptr(): each for each in self._pairs}
            pair = self._known.get(address)
        if pair is None or not address:
            return None
        parameter = pair.parameter
        is_as_it_is = values.shape == parameter.shape and values.stride() == parameter.stride()
        return pair if is_as_it_is else None
