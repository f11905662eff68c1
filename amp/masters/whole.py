"""FP32 master weights: make them, keep them in sync with the model's weights, release them.

A master is an FP32 `nn.Parameter` that replaces a float16 or bfloat16 parameter of the model in the
optimizer. It costs 4 bytes for each parameter, and 4 more for its gradient between `scale_loss`
and `step` unless the optimizer takes scaled gradients. Masters are made from the values that the
model had before it was cast, so no bit is lost (in one process; see `acquire`), and they
exist as soon as `initialize` returns.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from amp import distributed
from amp.errors import AmpRuntimeError
from amp.kernels.grad_mode import without_grad
from amp.kernels.tensor_lists import are_plain, local
from amp.lazy import kernels
from amp.masters.parameter import make_master
from amp.undo import Contents

_UNSEEN = -1
"""The version of a parameter that has not been compared with its master yet."""


class MasterWeights:
    """The masters of one session, each shared by all the optimizers that hold its parameter.

    This class keeps them as FP32 tensors; `amp.masters.lean` keeps them in 16 bits beside the weights.
    A copy or a pickle of this object has no masters.

    Attributes:
        lock: held by a step, in which masters and weights differ, and by code that compares the two,
            perhaps in another thread that saves the model.
    """

    are_whole = True
    """Whether masters hold FP32 values at all times."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._master_of: dict[Tensor, nn.Parameter] = {}
        self._model_of: dict[Tensor, Tensor] = {}
        self._addresses: _Addresses | None = None
        self._dtype_before: MutableMapping[Tensor, torch.dtype] = {}
        self._users: defaultdict[Tensor, set[object]] = defaultdict(set)
        self._shared: set[Tensor] = set()
        self._stepped: set[Tensor] = set()
        self._noted_versions: dict[int, int] = {}
        self._new_versions: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        """What `agree` noted and `_versions` has not merged yet, by the id of the list of ids."""

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

    @property
    def _versions(self) -> dict[int, int]:
        """The version of each master's parameter when the two last agreed, by the master's id.

        `agree` is called at each step and this is read rarely, so new versions are merged here.
        """
        for ids, versions in self._new_versions.values():
            self._noted_versions.update(zip(ids, versions, strict=True))
        self._new_versions.clear()
        return self._noted_versions

    # Making and releasing masters.

    def note_casts(self, before: Mapping[Tensor, Contents]) -> None:
        """Note the dtypes that parameters had before they were cast."""
        dtypes = {parameter: contents.data.dtype for parameter, contents in before.items()}
        self._dtype_before = WeakIdKeyDictionary({**self._dtype_before, **dtypes})

    def acquire(
        self, parameter: Tensor, before: Mapping[Tensor, Contents], user: object, takes_scaled: bool
    ) -> nn.Parameter:
        """Return the master of a 16-bit parameter for one more optimizer; make it if there is none.

        Args:
            parameter: a parameter of the model.
            before: what parameters held before they were cast.
            user: stands for the optimizer, as in `release`.
            takes_scaled: whether the optimizer takes scaled gradients.
        """
        master = self._master_of.get(parameter)
        if master is None:
            data, grad = before.get(parameter) or Contents(parameter.detach(), parameter.grad)
            if distributed.world_size() > 1 and not distributed.is_sharded(parameter):
                # DDP is about to make the ranks' 16-bit weights equal. Masters made of 16-bit weights
                # will then be equal in every bit; masters made of each rank's own FP32 weights would
                # differ.
                data = data.to(parameter.dtype)
            master = self._make(parameter, data, takes_scaled)
            if grad is not None:
                master.grad, parameter.grad = grad.to(torch.float32, copy=True), None
            self._master_of[parameter] = master
            self._model_of[master] = parameter
            self._versions[id(master)] = _UNSEEN
            self._addresses = None
        self._users[master].add(user)
        if len(self._users[master]) > 1:
            self._shared.add(master)
        return master

    def _make(self, parameter: Tensor, data: Tensor, takes_scaled: bool) -> nn.Parameter:
        """Return a new master of a parameter, whose values before the cast are `data`."""
        return make_master(data.to(torch.float32, copy=True), parameter.requires_grad, takes_scaled)

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
            contents = Contents.cast(parameter, dtype)
            contents._replace(data=self.values(master).to(dtype)).put_into(parameter)
        self._addresses = None
        self._users[master].discard(user)
        if len(self._users[master]) == 1:
            self._shared.discard(master)
        if not self._users[master]:
            self._versions.pop(id(master), None)
            self._users.pop(master, None)
            self._master_of.pop(parameter, None)
            self._model_of.pop(master, None)  # last: while it is there, release is not done

    def any_is_shared(self, masters: Iterable[Tensor]) -> bool:
        """Whether any of these masters is in several optimizers."""
        return bool(self._shared) and any(master in self._shared for master in masters)

    # Gradients of masters, after a step.

    def drop_grads(self, masters: Iterable[Tensor]) -> None:
        """Free the gradients of masters, which a step has used.

        Another optimizer that shares a master may still need its gradient. That gradient is freed when
        the next block of any of these optimizers begins.
        """
        for master in masters:
            if self._shared and master in self._shared:
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

    def low_halves(self, masters: Iterable[Tensor]) -> list[Tensor] | None:
        """Return the low halves of masters that are kept in 16 bits; None where they are whole."""
        return None

    def write_back(self, masters: Iterable[Tensor]) -> None:
        """Copy masters to the model's parameters, rounding to nearest even. No host sync."""
        sources = list(masters)
        models = [self._model_of[master] for master in sources]
        kernels.master_copy.master_copy(sources, models)
        self.agree(list(map(id, sources)), [model._version for model in models])

    def agree(self, ids: Sequence[int], versions: Sequence[int]) -> None:
        """Note that the parameters of the masters with these ids now equal the rounded masters.

        While the parameters have these versions, `follow` does nothing.
        """
        if not ids:
            return  # nothing to note
        self._new_versions.pop(id(ids), None)  # the last note counts
        self._new_versions[id(ids)] = ids, versions

    def follow_all(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Do `follow` for masters that are about to be stepped, if any parameter has changed."""
        known = [self._versions[id(master)] for master in masters]
        if known != [model._version for model in models]:
            for master in masters:
                self.follow(master, stepping=True)

    def follow_requires_grad(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Freeze and unfreeze masters as their parameters are.

        Writes to a frozen parameter may have left no trace, so on unfreezing its master is compared
        with it.
        """
        for master, model in zip(masters, models, strict=True):
            if master.requires_grad is not model.requires_grad:
                if model.requires_grad:
                    self._versions[id(master)] = _UNSEEN
                    self.follow(master, stepping=True)
                master.requires_grad_(model.requires_grad)

    @without_grad
    def follow(self, master: Tensor, stepping: bool = False) -> None:
        """Update a master from values that other code wrote to its parameter. No host sync.

        Such code is DDP's broadcast, `nn.init`, a clamp. Where a weight still equals the rounded
        master, the master keeps all its bits. DDP's broadcast and writes through `parameter.data` leave
        no trace, so they are noticed only until the first step, which passes `stepping`.
        """
        parameter = self._model_of[master]
        known = self._versions[id(master)]
        if known == parameter._version:
            return
        check_device(master, parameter)
        self._take_over(master, parameter)
        if stepping or known != _UNSEEN:
            self._versions[id(master)] = parameter._version

    def _take_over(self, master: Tensor, parameter: Tensor) -> None:
        """Copy values of a parameter that differ from the rounded master into the master."""
        ours, theirs = local(master).data, local(parameter)  # see `load`
        same = ours.to(theirs.dtype) == theirs
        ours.copy_(torch.where(same, ours, theirs.to(ours.dtype)))

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
