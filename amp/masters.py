"""FP32 master weights: build them, gather gradients into them, write them back.

A master is an FP32 `nn.Parameter` that stands in the optimizer for a float16 or bfloat16 parameter
of the model. It costs 4 bytes per parameter, and 4 more for its gradient between `scale_loss` and
`step`. Masters are made from the values that the model had before it was cast, so no bit is lost on
the way (in one process; see `acquire`), and they exist as soon as `initialize` returns.

Lean masters are kept as the model's own weights and 16 bits more (`amp.kernels.split`). What stands in
the optimizer has the master's shape and gradient, and NaN for values but while it is spread out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp import distributed
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpRuntimeError
from amp.kernels import bulk
from amp.properties import LeanMasters


class Contents(NamedTuple):
    """What a parameter or buffer held at one time."""

    data: Tensor
    grad: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> Contents:
        """Return what `tensor` holds now."""
        return cls(tensor.data, tensor.grad)

    def put_into(self, tensor: Tensor) -> None:
        """Make these the contents of `tensor`, whatever its dtype was."""
        tensor.grad = None
        tensor.data = self.data
        tensor.grad = self.grad


_UNSEEN = -1
"""The version of a parameter that has not been compared with its master yet."""


class MasterWeights:
    """The masters of one session, each shared by all the optimizers that hold its parameter.

    Args:
        lean: how masters are kept in 16 bits beside the weights; None keeps them whole.
    """

    def __init__(self, lean: LeanMasters | None = None) -> None:
        self.lean: LeanMasters | None = lean
        self._low_of: dict[Tensor, Tensor] = {}
        self._spread_out: set[Tensor] = set()
        self._master_of: dict[Tensor, nn.Parameter] = {}
        self._model_of: dict[Tensor, Tensor] = {}
        self._holders: Counter[Tensor] = Counter()
        self._version: dict[int, int] = {}
        self._written: tuple[Sequence[Tensor], bytes] | None = None  # newer than _version
        self._shared: set[Tensor] = set()
        self._stepped: set[Tensor] = set()

    def master(self, parameter: Tensor) -> nn.Parameter | None:
        """Return the master of a model's parameter, if it has one."""
        return self._master_of.get(parameter)

    def model(self, master: Tensor) -> Tensor | None:
        """Return the model's parameter that `master` stands for, if it is a master."""
        return self._model_of.get(master)

    def acquire(self, parameter: Tensor, before: Mapping[Tensor, Contents]) -> nn.Parameter:
        """Return the master of a 16-bit parameter for one more optimizer, made now if there is none.

        Args:
            parameter: a float16 or bfloat16 parameter, trainable or frozen.
            before: what parameters held before they were cast.
        """
        master = self._master_of.get(parameter)
        if master is None:
            data, grad = before.get(parameter) or Contents(parameter.detach(), parameter.grad)
            if distributed.world_size() > 1:
                # DDP is about to make the ranks' 16-bit weights equal. Masters made of those are
                # equal in every bit; ones that know each rank's own FP32 weights are not.
                data = data.to(parameter.dtype)
            wide = data.to(torch.float32, copy=True) if self.lean is None else _placeholder(parameter)
            master = nn.Parameter(wide, requires_grad=parameter.requires_grad)
            if self.lean is not None:
                self._low_of[master] = _new_low(parameter, data, self.lean)
            if grad is not None:
                master.grad, parameter.grad = grad.to(torch.float32, copy=True), None
            self._master_of[parameter] = master
            self._model_of[master] = parameter
            self._version[id(master)] = _UNSEEN
        self._holders[master] += 1
        if self._holders[master] > 1:
            self._shared.add(master)
        return master

    def release(self, master: Tensor) -> None:
        """Let one optimizer go; the last one takes the master with it."""
        self._holders[master] -= 1
        if self._holders[master] == 1:
            self._shared.discard(master)
        if not self._holders[master]:
            self._note_versions()
            del self._holders[master], self._version[id(master)]
            self._low_of.pop(master, None)
            del self._master_of[self._model_of.pop(master)]

    def any_is_shared(self, masters: Iterable[Tensor]) -> bool:
        """Whether several optimizers step one of these masters."""
        return bool(self._shared) and any(master in self._shared for master in masters)

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

    def write_back(self, masters: Iterable[Tensor]) -> None:
        """Copy masters to the model's parameters, rounding to nearest even. No host sync."""
        from amp.kernels.master_copy import master_copy  # loads Triton

        sources = list(masters)
        models = [self._model_of[master] for master in sources]
        if self.lean is not None:
            self._fold(master for master in sources if master in self._spread_out)
        else:
            master_copy(sources, models)
        self.were_written_back(sources, models)

    def were_written_back(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Note that the model's parameters are rounded masters, so that `follow` looks no closer."""
        if self._written is not None and not bulk.are_same(masters, self._written[0]):
            self._note_versions()
        self._written = masters, bulk.versions(models)

    def _note_versions(self) -> None:
        """Note for each master what is known of those that were written back last."""
        if self._written is not None:
            masters, versions = self._written
            self._version.update(zip(map(id, masters), array("q", versions), strict=True))
            self._written = None

    def follow_all(self, masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Do `follow` for masters that are about to be stepped, where there is anything to do."""
        if self._written is not None and bulk.are_same(masters, self._written[0]):
            known = self._written[1]
        else:
            self._note_versions()
            known = array("q", map(self._version.__getitem__, map(id, masters))).tobytes()
        if known != bulk.versions(models) or bulk.require_grad(masters) != bulk.require_grad(models):
            for master in masters:
                self.follow(master, stepping=True)

    @torch.no_grad()
    def follow(self, master: Tensor, stepping: bool = False) -> None:
        """Bring a master up to date with what was done to its parameter from outside.

        It takes over `requires_grad`, and those values that somebody wrote to the parameter: DDP's
        broadcast, `nn.init`, a clamp. Values that are still the rounded master keep all their bits.
        No host sync. DDP's broadcast and writes through `parameter.data` leave no trace, so they are
        seen only until the first step, which says so by `stepping`.
        """
        parameter = self._model_of[master]
        unfrozen = parameter.requires_grad and not master.requires_grad
        self._note_versions()
        if unfrozen or self._version[id(master)] != parameter._version:
            check_device(master, parameter)
            if self.lean is not None:
                _forget_stale_bits(parameter, self._low_of[master])
            else:
                same = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(same, master, parameter.to(master.dtype)))
            if stepping or self._version[id(master)] != _UNSEEN:
                self._version[id(master)] = parameter._version
        if master.requires_grad is not parameter.requires_grad:
            master.requires_grad_(parameter.requires_grad)

    # Lean masters.

    def low(self, master: Tensor) -> Tensor:
        """Return the low half of a lean master."""
        return self._low_of[master]

    def values(self, master: Tensor) -> Tensor:
        """Return what a master holds, float32; a lean one's is new memory. No host sync."""
        if self.lean is None or master in self._spread_out:
            return master.detach()
        from amp.kernels.split import join  # loads Triton

        parameter = self._model_of[master]
        values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        join([parameter], [self._low_of[master]], [values])
        return values

    @contextmanager
    def spread_out(self, masters: Iterable[Tensor]) -> Iterator[None]:
        """Let lean masters hold FP32 values, and write those back at the end. No host sync."""
        from amp.kernels.split import join  # loads Triton

        lean = [m for m in masters if m in self._low_of and m not in self._spread_out]
        parameters = [self._model_of[master] for master in lean]
        for master, parameter in zip(lean, parameters, strict=True):
            master.data = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        join(parameters, [self._low_of[master] for master in lean], lean)
        self._spread_out.update(lean)
        try:
            yield
        finally:
            self._fold(lean)
            self._spread_out.difference_update(lean)
            for master, parameter in zip(lean, parameters, strict=True):
                master.data = _placeholder(parameter)

    def _fold(self, masters: Iterable[Tensor]) -> None:
        from amp.kernels.split import split  # loads Triton

        sources = list(masters)
        split(sources, [self._model_of[m] for m in sources], [self._low_of[m] for m in sources])

    def load(self, master: Tensor, values: Tensor) -> Tensor:
        """Make a master hold other values, and return what its parameter is to hold."""
        if self.lean is None:
            master.detach().copy_(values)
            return values
        parameter = self._model_of[master]
        wide = values.detach().to(device=parameter.device, dtype=torch.float32)
        weights = parameter.detach().clone()
        _split_one(wide, weights, self._low_of[master])
        return weights

    def install_state_dict_hooks(self, model: nn.Module) -> list[RemovableHandle]:
        """Make `model.state_dict()` hold FP32 and `load_state_dict()` refresh the masters."""
        handles = []
        for module in model.modules():
            handles.append(module.register_state_dict_post_hook(_Widen(self)))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(_Refresh(self)))  # type: ignore[no-untyped-call]
        return handles


class _StateDictHook:
    """A hook on one module of a cast model, for the module's own tensors.

    A copy or a pickle of the model has no masters: its state dict holds its own weights, widened.
    """

    def __init__(self, masters: MasterWeights | None = None) -> None:
        self.masters = MasterWeights() if masters is None else masters

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateDictHook:
        copied = type(self)()
        copied.__dict__.update({k: v for k, v in vars(self).items() if k != "masters"})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "masters": MasterWeights()}


class _Widen(_StateDictHook):
    """After `state_dict`: 16-bit entries become the FP32 master, or an FP32 copy without one."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for name, tensor in _own_tensors(module):
            entry = state_dict.get(prefix + name)
            master = self.masters.master(tensor)
            if master is not None and isinstance(entry, Tensor):
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
                with torch.no_grad():
                    state_dict[prefix + name] = self.masters.load(master, value)


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _placeholder(parameter: Tensor) -> Tensor:
    """Return what has the shape of a master and the memory of one number, which is NaN."""
    if type(parameter) not in (Tensor, nn.Parameter):
        raise AmpRuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is a {type(parameter).__name__}, of which "
            "only whole masters are kept. Use master_weights=True."
        )
    return torch.full((), torch.nan, dtype=torch.float32, device=parameter.device).expand(
        parameter.shape
    )


@torch.no_grad()
def _new_low(parameter: Tensor, data: Tensor, lean: LeanMasters) -> Tensor:
    """Return the low half of a new master, whose values `data` has."""
    from amp.kernels.split import low_dtype  # loads Triton

    low = torch.empty_like(parameter, dtype=low_dtype(lean, parameter.dtype), requires_grad=False)
    _split_one(data.to(torch.float32), parameter.detach(), low)
    return low


def _split_one(master: Tensor, weight: Tensor, low: Tensor) -> None:
    from amp.kernels.split import split  # loads Triton

    split([master], [weight], [low])


@torch.no_grad()
def _forget_stale_bits(parameter: Tensor, low: Tensor) -> None:
    """Set to 0 the low bits of zeros, and those that do not round to the weight: it was written to."""
    from amp.kernels.split import decode, encode  # load Triton

    high, _ = encode(decode(parameter, low), parameter.dtype, low.dtype)
    low.copy_(torch.where((high == parameter) & (parameter != 0), low, 0))


def check_device(master: Tensor, parameter: Tensor) -> None:
    """Raise if the model was moved after its masters were made."""
    if master.device != parameter.device:
        raise AmpRuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and its FP32 "
            f"master on {master.device}: the model was moved after amp.initialize. Move it first."
        )
