"""What the backward of one block has made for one optimizer, looked at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.dtypes import SCALABLE
from amp.errors import AmpTypeError
from amp.kernels.tensor_lists import Kind, TensorList, are_plain, local
from amp.lazy import kernels
from amp.masters.whole import check_device
from amp.training.parameter_lists import KnownDtypes, ParameterLists

if TYPE_CHECKING:
    from amp.kernels.tables import BadSteps


class Notes(NamedTuple):
    """Where checks note whose gradients are bad, if the host does not find out by itself."""

    of_masters: BadSteps | None = None
    of_own: BadSteps | None = None


class Newest(NamedTuple):
    """Gradients as backward has left them.

    Attributes:
        of_masters, grads: masters and the model's parameters that have a gradient, and these gradients.
        unmastered, own_grads: parameters without a master that have one, and what is in their `.grad`;
            of a DTensor what this rank has of it.
        own_are_dense: whether these are dense numbers.
        are_dense: whether the masters' gradients are dense numbers, which a kernel can unscale later.
        will_be_held: whether they stay as they are until the step.
    """

    of_masters: ParameterLists
    grads: TensorList
    unmastered: Sequence[Tensor]
    own_grads: TensorList
    own_are_dense: bool
    are_dense: bool
    will_be_held: bool = False

    def check_finite(self, one: Tensor, found_inf: Tensor, notes: Notes) -> None:
        """Set `found_inf`, float32 `[1]`, if a gradient at a scale of 1 is inf or NaN. No host sync."""
        masters = () if self.will_be_held else self.grads
        for grads, bad_steps in ((masters, notes.of_masters), (self.own_grads, notes.of_own)):
            real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
            kernels.unscale.check(real, one, found_inf, bad_steps=bad_steps)

    def check(self, dtypes: KnownDtypes) -> None:
        """Raise if one of them cannot be unscaled; `dtypes` says how to call a parameter.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved.
        """
        masters, models = self.of_masters.masters, self.of_masters.models
        gradients: list[tuple[Tensor, Any]] = []
        if not self.own_are_dense:
            gradients += zip(self.unmastered, self.own_grads, strict=True)
        if self.will_be_held:  # the step looks at each of them
            masters, models = masters[:1], models[:1]
        else:
            gradients += zip(models, self.grads, strict=True)
        for master, parameter in zip(masters, models, strict=True):
            check_device(master, parameter)
        for parameter, grad in gradients:
            _check_gradient(parameter, grad, dtypes)


def look_at_newest(lists: ParameterLists, dtypes: KnownDtypes, claimed: Collection[int]) -> Newest:
    """Return what backward has made, and change nothing.

    Args:
        lists: what the optimizer's groups hold.
        dtypes: which raise if the model was cast.
        claimed: ids of parameters whose gradients another optimizer sees to.
    """
    found = [parameter.grad for parameter in lists.models]
    there = [grad is not None for grad in found]
    if claimed:
        there = [has and id(p) not in claimed for has, p in zip(there, lists.models, strict=True)]
    of_masters = lists.only(there)
    new: list[Any] = list(compress(found, there))
    grads = TensorList(new if lists.are_plain else list(map(local, new)), like=of_masters.model_list)
    kind = _kind_of(grads)
    if kind is not lists.model_list.kind:
        dtypes.check()  # where gradients are what their parameters were, so are these
    dtypes.check(lists.unmastered)
    own: list[Any] = [parameter.grad for parameter in lists.unmastered]
    there = [grad is not None for grad in own]
    if claimed:
        there = [has and id(p) not in claimed for has, p in zip(there, lists.unmastered, strict=True)]
    unmastered = lists.unmastered if all(there) else list(compress(lists.unmastered, there))
    own = own if all(there) else list(compress(own, there))
    own_grads = TensorList(
        own if lists.are_plain else list(map(local, own)), like=lists.unmastered_list
    )
    own_are_dense = _are_scalable(_kind_of(own_grads)) and not any(g.is_sparse for g in own_grads)
    return Newest(of_masters, grads, unmastered, own_grads, own_are_dense, _are_scalable(kind))


def _are_scalable(kind: Kind | None) -> bool:
    return kind is not None and set(kind.dtypes) <= SCALABLE


def _kind_of(grads: TensorList) -> Kind | None:
    """Return the kind of gradients; None if one is sparse, or of a class with values elsewhere."""
    if not are_plain(grads):
        return None
    try:
        return grads.kind
    except RuntimeError:  # a sparse tensor does not know whether it is contiguous
        return None


def _check_gradient(parameter: Tensor, grad: Any, dtypes: KnownDtypes) -> None:
    if grad.dtype not in SCALABLE:
        raise AmpTypeError(
            f"the gradient of {dtypes.called(parameter)} is {grad.dtype} and cannot be "
            "unscaled: loss scaling takes float16, bfloat16, float32 and float64. Freeze the "
            "parameter, leave it out of the optimizer, or use a loss_scale of 1."
        )
