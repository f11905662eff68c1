"""FP32 master weights: make them, keep them and the model's weights in step, give them up.

A master is an FP32 `nn.Parameter` that stands in the optimizer for a float16 or bfloat16 parameter
of the model. It costs 4 bytes for each parameter, and 4 more for its gradient between `scale_loss`
and `step` unless the optimizer takes scaled gradients. Masters are made from the values that the
model had before it was cast, so no bit is lost on the way (in one process; see `acquire`), and they
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
    A copy or a pickle has no masters.

    Attributes:
        lock: held by a step, and by whoever compares masters with weights, perhaps in another thread
            that saves the model meanwhile. In a step the two do not agree.
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
        """What `agree` was told and nobody has asked for yet, by the id of the list of ids."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return MasterWeights, ()

    def renew_lock(self) -> None:
        """Take a new lock, in a forked process: nobody in it would release that of another thread."""
        self.lock = threading.RLock()

    def master(self, parameter: Tensor) -> nn.Parameter | None:
        """Return the master of a model's parameter, if it has one."""
        return self._master_of.get(parameter)

    def model(self, master: Tensor) -> Tensor | None:
        """Return the model's parameter that `master` stands for, if it is a master."""
        return self._model_of.get(master)

    def master_at(self, values: Tensor) -> Tensor | None:
        """Return the master of the parameter whose memory this is, as that of `p.detach()`."""
        addresses = self._addresses
        if addresses is None:  # another thread may forget them meanwhile
            addresses = self._addresses = _Addresses(self._model_of)
        return addresses.master_at(values)

    @property
    def _versions(self) -> dict[int, int]:
        """Of each master's parameter when the two were last known to agree, by the master's id.

        `agree` is told at each step, and this is asked rarely: what it was told is sorted in here.
        """
        for ids, versions in self._new_versions.values():
            self._noted_versions.update(zip(ids, versions, strict=True))
        self._new_versions.clear()
        return self._noted_versions

    # Making them and giving them up.

    def note_casts(self, before: Mapping[Tensor, Contents]) -> None:
        """Note the dtypes that parameters had before they were cast."""
        dtypes = {parameter: contents.data.dtype for parameter, contents in before.items()}
        self._dtype_before = WeakIdKeyDictionary({**self._dtype_before, **dtypes})

    def acquire(
        self, parameter: Tensor, before: Mapping[Tensor, Contents], user: object, takes_scaled: bool
    ) -> nn.Parameter:
        """Return the master of a 16-bit parameter for one more optimizer, made now if there is none.

        Args:
            parameter: of the model.
            before: what parameters held before they were cast.
            user: what `release` will be given.
            takes_scaled: whether the optimizer takes scaled gradients.
        """
        master = self._master_of.get(parameter)
        if master is None:
            data, grad = before.get(parameter) or Contents(parameter.detach(), parameter.grad)
            if distributed.world_size() > 1 and not distributed.is_sharded(parameter):
                # DDP is about to make the ranks' 16-bit weights equal. Masters made of those are
                # equal in every bit; ones that know each rank's own FP32 weights are not.
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
        """Let one optimizer go; the last one takes the master with it. Idempotent.

        A parameter that was cast gets its master's values, in the dtype that it had before.
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
            self._model_of.pop(master, None)  # last: it says that there is something left to do

    def any_is_shared(self, masters: Iterable[Tensor]) -> bool:
        """Whether several optimizers step one of these masters."""
        return bool(self._shared) and any(master in self._shared for master in masters)

    # Their gradients, after a step.

    def drop_grads(self, masters: Iterable[Tensor]) -> None:
        """Free the gradients of masters that were stepped on.

        Another optimizer that shares a master may still want to step on it; then it goes when the
        next block of any of them begins.
        """
        for master in masters:
            if self._shared and master in self._shared:
                self._stepped.add(master)
            else:
                master.grad = None

    def drop_stepped_grads(self, masters: Iterable[Tensor]) -> None:
        """Free the gradients of those shared masters that were stepped on."""
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
        """Let masters be inside the block what they are outside of `as_float32`. No host sync."""
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
        """Note that the parameters of the masters with these ids are the rounded masters now.

        At these versions of the parameters `follow` looks no closer.
        """
        if not ids:
            return  # nobody would ever ask
        self._new_versions.pop(id(ids), None)  # what is noted last counts
        self._new_versions[id(ids)] = ids, versions

    def follow_all(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Do `follow` for masters that are about to be stepped, where there is anything to do."""
        known = [self._versions[id(master)] for master in masters]
        if known != [model._version for model in models]:
            for master in masters:
                self.follow(master, stepping=True)

    def follow_requires_grad(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Freeze and unfreeze masters as their parameters were.

        What was written to a frozen parameter may have left no trace, so its master is compared
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
        """Bring a master up to date with what was written to its parameter from outside. No host sync.

        It takes over DDP's broadcast, `nn.init`, a clamp. Values that are still the rounded master keep
        all their bits. DDP's broadcast and writes through `parameter.data` leave no trace, so they are
        seen only until the first step, which says so by `stepping`.
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
        """Let a master have the values of its parameter that are not its own, rounded."""
        ours, theirs = local(master).data, local(parameter)  # see `load`
        same = ours.to(theirs.dtype) == theirs
        ours.copy_(torch.where(same, ours, theirs.to(ours.dtype)))

    # What is saved.

    def values(self, master: Tensor) -> Tensor:
        """Return what a master holds, float32. No host sync."""
        return master.detach()

    def load(self, master: Tensor, values: Tensor) -> Tensor:
        """Make a master hold other values, and return what its parameter is to hold.

        It is written through `.data`: the version of a master moves when somebody else changes it.
        """
        master.data.copy_(values.detach())
        return values


class _Addresses:
    """Where the parameters of masters are, by which `p.detach()` and `p.data` have a master too.

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
        if master is None or parameter.data_ptr() != address:  # they move when a model does
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
