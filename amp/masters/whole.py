"""FP32 master weights: make them, keep them in sync with the model's weights, release them.

A master is an FP32 `nn.Parameter` that replaces a float16 or bfloat16 parameter of the model in the
optimizer. It costs 4 bytes for each parameter, and 4 more for its gradient from the block to
`zero_grad`, unless the optimizer takes scaled gradients. Masters are made from the values that the
model had before it was cast, so no bit is lost (in one process; see `acquire`), and they exist as soon
as `initialize` returns.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amp import distributed
from amp.errors import AmpRuntimeError
from amp.kernels.grad_mode import without_grad
from amp.kernels.tensor_lists import are_plain, has_no_memory, local
from amp.lazy import kernels
from amp.masters.freezing import Freezing
from amp.masters.traces import UNSEEN, Traces, trace_of
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
        traces: what each parameter was like when it last equalled its rounded master.
        write_backs: the `WriteBack` of each optimizer, weakly.
        common_grads: of masters of several optimizers, the gradient that each last had in common with
            its parameter.
        given_out: masters that other code was given since the last step, and may have written to.
        are_ahead: whether a step, or a method of an optimizer, may have changed masters and not yet the
            weights. A signal handler may save the model meanwhile.
    """

    are_whole = True
    """Whether masters hold FP32 values at all times."""

    def __init__(self) -> None:
        self.memory = CastMemory()
        self.lock = threading.RLock()
        self._master_of: dict[Tensor, nn.Parameter] = {}
        self._model_of: dict[Tensor, Tensor] = {}
        self._addresses: _Addresses | None = None
        self._dtype_before: dict[Tensor, torch.dtype] = {}
        self._users: defaultdict[Tensor, set[object]] = defaultdict(set)
        self._stepped: set[Tensor] = set()
        self.are_ahead = False
        self.write_backs: list[weakref.ref[Any]] = []
        self.common_grads: dict[Tensor, Tensor | None] = {}
        self.given_out: set[Tensor] = set()
        self._freezing = Freezing()
        self.traces = Traces()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return MasterWeights, ()

    def renew_lock(self) -> None:
        """Make a new lock, in a forked process: no thread there would release the old one."""
        self.lock = threading.RLock()

    def master(self, parameter: Tensor) -> nn.Parameter | None:
        """Return the master of a model's parameter, if it has one."""
        return self._master_of.get(parameter)

    def model(self, master: Tensor) -> Tensor | None:
        """Return the model's parameter that `master` stands for, if it is a master."""
        return self._model_of.get(master)

    def master_at(self, values: Tensor) -> Tensor | None:
        """Return the master of the parameter with the memory of `values`, as `p.detach()` has."""
        addresses = self._addresses
        if addresses is None:  # another thread may reset it meanwhile
            addresses = self._addresses = _Addresses(self._model_of)
        return addresses.master_at(values)

    # Making and releasing masters.

    def note_casts(self, before: Mapping[Tensor, Contents]) -> None:
        """Note the dtypes that parameters had before they were cast."""
        self._dtype_before |= {tensor: contents.data.dtype for tensor, contents in before.items()}

    def forget_casts(self) -> None:
        """Forget these dtypes, and the parameters: all masters are released."""
        self._dtype_before.clear()

    def acquire(
        self, parameter: Tensor, before: Mapping[Tensor, Contents], user: object
    ) -> nn.Parameter:
        """Return the master of a 16-bit parameter for one more optimizer; make it if there is none.

        Args:
            parameter: a parameter of the model.
            before: what parameters held before they were cast.
            user: stands for the optimizer, as in `release`.
        """
        master = self._master_of.get(parameter)
        if master is None:
            data, grad = before.get(parameter) or Contents(parameter.detach(), parameter.grad)
            if distributed.world_size() > 1 and not distributed.is_sharded(parameter):
                # DDP is about to make the ranks' 16-bit weights equal. Masters made of 16-bit weights
                # will then be equal in every bit; masters made of each rank's own FP32 weights would
                # differ.
                data = data.to(parameter.dtype)
            master = self._make(parameter, data)
            if HAS_GRAD_DTYPE:
                parameter.grad, parameter.grad_dtype = None, None  # it may have its master's gradient
            if grad is not None:
                master.grad = grad.to(torch.float32, copy=True)
                parameter.grad = master.grad if HAS_GRAD_DTYPE else None
            # What a script attaches to one is at the other.
            object.__setattr__(master, "__dict__", parameter.__dict__)
            self._master_of[parameter], self._model_of[master] = master, parameter
            self.traces.forget([master])
            self._freezing.note(master)
            self._addresses = None
        self._users[master].add(user)
        if len(self._users[master]) > 1:
            self.common_grads.setdefault(master, master.grad)
        return master

    def _make(self, parameter: Tensor, data: Tensor) -> nn.Parameter:
        """Return a new master of a parameter, whose values before the cast are `data`."""
        return nn.Parameter(data.to(torch.float32, copy=True), parameter.requires_grad)

    def release(self, master: Tensor, user: object) -> None:
        """Release a master for one optimizer; the last release deletes it. Idempotent.

        A parameter that was cast gets its master's values, in the dtype that it had before the cast.
        """
        parameter = self._model_of.get(master)
        if parameter is None:
            return
        dtype = self._dtype_before.get(parameter)
        if dtype is not None and parameter.dtype is not dtype:
            self.follow(master)
            data = self.memory.cast(parameter, dtype, self.values(master))
            Contents.cast(parameter, dtype, data).put_into(parameter)
        self._addresses = None
        self._users[master].discard(user)
        if len(self._users[master]) == 1:
            self.common_grads.pop(master, None)
        if not self._users[master]:
            object.__setattr__(master, "__dict__", dict(parameter.__dict__))
            self.traces.remove(master)
            self._freezing.forget(master)
            self.given_out.discard(master)
            self._users.pop(master, None)
            self._master_of.pop(parameter, None)
            self._model_of.pop(master, None)  # last: while it is there, release is not done

    def any_is_shared(self, masters: Iterable[Tensor]) -> bool:
        """Whether any of these masters is in several optimizers."""
        return bool(self.common_grads) and any(master in self.common_grads for master in masters)

    # Gradients of masters, after a step.

    def drop_grads(self, masters: Iterable[Tensor]) -> None:
        """Free the gradients of masters, which a step has used.

        Another optimizer that shares a master may still need its gradient. That gradient is freed when
        the next block of any of these optimizers begins.
        """
        for master in masters:
            if master in self.common_grads:
                self._stepped.add(master)
            else:
                master.grad = None

    def drop_stepped_grads(self, masters: Iterable[Tensor]) -> None:
        """Free the gradients of those shared masters that a step has used."""
        for master in masters if self._stepped else ():
            if master in self._stepped:
                self._stepped.discard(master)
                master.grad = None

    # Masters and the model's weights.

    def run_step(self, optimizer: Any, masters: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run an optimizer's step, in which its masters hold FP32 values, and return its result."""
        return step()

    @contextmanager
    def as_float32(self, masters: Iterable[Tensor]) -> Iterator[None]:
        """Let masters hold FP32 values inside the block. No host sync."""
        yield

    @contextmanager
    def as_they_are_kept(self) -> Iterator[None]:
        """Keep masters in the block as they are outside of `as_float32`. No host sync."""
        yield

    def narrow(self) -> None:
        """Keep all masters as they are kept outside of `as_float32`, from now on. No host sync."""

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor] | None:
        """Return the low halves of masters that are kept in 16 bits; None where they are whole."""
        return None

    def write_back(self, masters: Iterable[Tensor]) -> None:
        """Copy masters to the model's parameters, rounding to nearest even. No host sync."""
        sources = list(masters)
        models = [self._model_of[master] for master in sources]
        kernels.master_copy.master_copy(sources, models)
        self._note(sources)

    def _note(self, masters: Sequence[Tensor]) -> None:
        """Note that the parameters of these masters now equal the rounded masters."""
        traces = [trace_of(self._model_of[master]) for master in masters]
        if masters:
            self.traces.agree(list(map(id, masters)), *zip(*traces, strict=True))

    def follow_all(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Do `follow` for masters that are about to be stepped, if any parameter has changed."""
        if list(map(self.traces.of, masters)) != list(map(trace_of, models)):
            for master in masters:
                self.follow(master, stepping=True)

    def follow_requires_grad(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Freeze and unfreeze masters as their parameters are, or parameters as their masters.

        What other code has changed counts. Writes to a frozen parameter may have left no trace, so on
        unfreezing its master is compared with it.
        """
        for master in self._freezing.agree(masters, models):
            self.traces.forget([master])
            self.follow(master, stepping=True)

    @without_grad
    def follow(self, master: Tensor, stepping: bool = False, compares: bool = False) -> None:
        """Update a master from values that other code wrote to its parameter. No host sync.

        Such code is DDP's broadcast, `nn.init`, a clamp, `parameter.data = ...`. Where a weight still
        equals the rounded master, the master keeps all its bits. DDP's broadcast and writes through
        `parameter.data` leave no trace, so they are noticed only until the first step, which passes
        `stepping`, after `suspect`, and with `compares`.
        """
        parameter = self._model_of[master]
        known, now = self.traces.of(master), trace_of(parameter)
        if known == now and (self.are_ahead or not compares):
            return
        may_be_newer = self.are_whole and known in (now, UNSEEN)
        if may_be_newer and (self._is_newer(master) or (known == now and master in self.given_out)):
            return  # than its parameter, which is about to get its values
        if has_no_memory(local(parameter)):
            return  # the step names it
        check_device(master, parameter)
        self._take_over(master, parameter)
        if stepping or known != UNSEEN:
            self.traces.note(master, now)

    def _is_newer(self, master: Tensor) -> bool:
        """Whether other code has changed a master since it was written to its parameter."""
        writers = filter(None, [reference() for reference in self.write_backs])
        return any(writer.has_changed(master) for writer in writers)

    def may_have_changed(self, master: Tensor) -> bool:
        """Whether other code was given a master, and has not written its parameter since."""
        return master in self.given_out and self.traces.of(master) == trace_of(self._model_of[master])

    def was_written_unseen(self, master: Tensor) -> bool:
        """Whether a parameter was written in a way that torch does not count. The host waits."""
        parameter = self._model_of[master]
        has_none = parameter.is_meta or has_no_memory(local(parameter))
        if has_none or not self.are_whole or self.traces.of(master) != trace_of(parameter):
            return False
        return not torch.allclose(local(master).to(parameter.dtype), local(parameter), 0.0, 0.0, True)

    def _take_over(self, master: Tensor, parameter: Tensor) -> None:
        """Copy values of a parameter that differ from the rounded master into the master."""
        ours = local(master).data  # see `load`
        ours.copy_(merged(ours, local(parameter)))

    # Saving and loading.

    def values(self, master: Tensor) -> Tensor:
        """Return a master's values, float32. No host sync."""
        return master.detach()

    def load(self, master: Tensor, values: Tensor) -> Tensor:
        """Set a master's values, and return the values that its parameter must then hold.

        The write goes through `.data`, because a new version of a master means a change by other code.
        """
        master.data.copy_(values.detach())
        return values


def merged(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a master's values, but those of its parameter where this is not the rounded master."""
    return torch.where(ours.to(theirs.dtype) == theirs, ours, theirs.to(ours.dtype))


class _Addresses:
    """Addresses of the masters' parameters, by which `p.detach()` and `p.data` have a master too.

    Args:
        model_of: the parameter of each master.
    """

    def __init__(self, model_of: Mapping[Tensor, Tensor]) -> None:
        self._pairs = [pair for pair in model_of.items() if are_plain(pair)]
        self._sizes = {parameter.numel() for _, parameter in self._pairs}
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def master_at(self, values: Tensor) -> Tensor | None:
        """Return the master of the parameter that has the memory of `values`, in the same shape."""
        if values.numel() not in self._sizes:
            return None
        try:
            address = values.data_ptr()
        except RuntimeError:  # it has no memory of its own: a sparse one, or one under vmap
            return None
        master, parameter = self._known.get(address, (None, values))
        if master is None or parameter.data_ptr() != address:  # parameters move when a model does
            self._known = {pair[1].data_ptr(): pair for pair in self._pairs}
            master, parameter = self._known.get(address, (None, values))
        is_as_it_is = values.shape == parameter.shape and values.stride() == parameter.stride()
        return master if address and is_as_it_is else None


def check_device(master: Tensor, parameter: Tensor) -> None:
    """Raise if the model was moved after its masters were made."""
    if master.device != parameter.device:
        raise AmpRuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and its FP32 "
            f"master on {master.device}: the model was moved after amp.initialize. Move it first."
        )
