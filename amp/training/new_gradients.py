"""Find, check and unscale the gradients that a block's backward has made for one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import shard_like
from amp.dtypes import SCALABLE
from amp.errors import AmpTypeError
from amp.kernels.tensor_lists import Kind, TensorList, are_plain, local
from amp.lazy import kernels
from amp.masters.grads import store_grads
from amp.masters.whole import check_device
from amp.training.parameter_check import ParameterCheck
from amp.training.parameter_lists import ParameterLists
from amp.training.scaler import LossScaler
from amp.training.unscaling import add_grad

if TYPE_CHECKING:
    from amp.kernels.tables import BadSteps


_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Logs(NamedTuple):
    """Where kernels log which gradients are bad, if the host does not find out by itself."""

    of_masters: BadSteps | None = None
    of_own: BadSteps | None = None


class NewGradients(NamedTuple):
    """Gradients as backward has left them.

    Attributes:
        of_masters, grads: masters and the model's parameters that have a gradient, and these gradients.
        unmastered, own_grads: parameters without a master that have a gradient, and these gradients; of
            a DTensor this rank's shard.
        own_are_dense: whether `own_grads` are dense, in dtypes that a kernel can unscale.
        are_dense: whether `grads` are.
        have_graphs: whether backward has made any of them with `create_graph=True`.
        will_be_deferred: whether `grads` stay as they are until the step.
    """

    of_masters: ParameterLists
    grads: TensorList
    unmastered: Sequence[Tensor]
    own_grads: TensorList
    own_are_dense: bool
    are_dense: bool
    have_graphs: bool = False
    will_be_deferred: bool = False

    @classmethod
    def of(cls, lists: ParameterLists, check: ParameterCheck, claimed: Collection[int]) -> NewGradients:
        """Return the gradients that backward has made, and change nothing.

        Args:
            lists: what the optimizer's groups hold.
            check: raises if the model was cast.
            claimed: ids of parameters whose gradients another optimizer handles.
        """
        found = [parameter.grad for parameter in lists.models]
        there = _are_there(lists.models, found, claimed)
        of_masters = lists.only(there)
        new: list[Any] = list(compress(found, there))
        grads = TensorList(
            new if lists.are_plain else list(map(local, new)), like=of_masters.model_list
        )
        kind = _kind_of(grads)
        if kind is not lists.model_list.kind:
            check.dtypes()  # not needed for equal kinds: no parameter was cast
        check.dtypes(lists.unmastered)
        own: list[Any] = [parameter.grad for parameter in lists.unmastered]
        there = _are_there(lists.unmastered, own, claimed)
        unmastered = lists.unmastered
        if not all(there):
            unmastered, own = list(compress(unmastered, there)), list(compress(own, there))
        own_grads = TensorList(
            own if lists.are_plain else list(map(local, own)), like=lists.unmastered_list
        )
        own_are_dense = _are_scalable(_kind_of(own_grads)) and not any(g.is_sparse for g in own_grads)
        have_graphs = lists.are_plain and any(map(_REQUIRES_GRAD, chain(new, own)))
        are_dense = _are_scalable(kind)
        return cls(of_masters, grads, unmastered, own_grads, own_are_dense, are_dense, have_graphs)

    def check(self, check: ParameterCheck) -> None:
        """Raise if a gradient cannot be unscaled; `check` names parameters in messages.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved.
        """
        masters, models = self.of_masters.masters, self.of_masters.models
        gradients: list[tuple[Tensor, Any]] = []
        if not self.own_are_dense:
            gradients += zip(self.unmastered, self.own_grads, strict=True)
        if self.will_be_deferred:  # the step checks each of them
            masters, models = masters[:1], models[:1]
        else:
            gradients += zip(models, self.grads, strict=True)
        for master, parameter in zip(masters, models, strict=True):
            check_device(master, parameter)
        for parameter, grad in gradients:
            if grad.dtype not in SCALABLE:
                raise AmpTypeError(
                    f"the gradient of {check.called(parameter)} is {grad.dtype} and cannot be "
                    "unscaled: loss scaling takes float16, bfloat16, float32 and float64. Freeze the "
                    "parameter, leave it out of the optimizer, or use a loss_scale of 1."
                )

    def logs(self, scaler: LossScaler, lists: ParameterLists, name: Callable[[Tensor], str]) -> Logs:
        """Return where kernels log which gradients are bad; `name` names a parameter of `lists`."""
        masters = own = None
        if of := self.of_masters.models:
            masters = scaler.bad_steps_of(of, name)
        if self.unmastered and self.unmastered is lists.unmastered:
            own = scaler.bad_steps_of(self.unmastered, name)
        return Logs(masters, own)

    def check_finite(self, one: Tensor, found_inf: Tensor, logs: Logs) -> None:
        """Set `found_inf`, float32 `[1]`, if a gradient at a scale of 1 is inf or NaN. No host sync."""
        masters = () if self.will_be_deferred else self.grads
        for grads, bad_steps in ((masters, logs.of_masters), (self.own_grads, logs.of_own)):
            real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
            kernels.unscale.check(real, one, found_inf, bad_steps=bad_steps)

    def unscale(
        self, totals: Mapping[Tensor, Tensor], inv_scale: Tensor, found_inf: Tensor | None, logs: Logs
    ) -> None:
        """Unscale the gradients, and add them to those of earlier blocks. No host sync.

        Gradients that will be deferred are left alone. Others of masters go to the masters' `.grad`.

        Args:
            totals: unscaled gradients of earlier blocks, of parameters without a master.
            inv_scale: float32 `[1]`, what to multiply by.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
            logs: where to log which gradients are bad.
        """
        moves = []
        if not self.will_be_deferred:
            of = self.of_masters
            pairs = zip(of.masters, of.models, self.grads, strict=True)
            moves = [_Move(master, model, grad, master.grad) for master, model, grad in pairs]
        bad_steps = logs.of_masters
        if self.have_graphs:
            moves += [_Move(p, p, p.grad, totals.get(p)) for p in self.unmastered]
            _unscale_in_graph(moves, inv_scale, found_inf)
            return
        if self.own_are_dense and not totals:
            own = self.own_grads
            kernels.unscale.unscale(own, own, inv_scale, found_inf, bad_steps=logs.of_own)
        else:
            bad_steps = None
            moves += [_Move(p, p, p.grad, totals.get(p)) for p in self.unmastered]
        _unscale_moves(moves, inv_scale, found_inf, bad_steps)


class _Move(NamedTuple):
    """One gradient that is unscaled from `source` to the `.grad` of `stepped`.

    Attributes:
        stepped: what the optimizer updates, a master or a parameter of the model.
        parameter: the model's parameter.
        source: the scaled gradient.
        total: the unscaled gradient of earlier blocks, to add to.
    """

    stepped: Tensor
    parameter: Tensor
    source: Any
    total: Tensor | None

    def is_dense_sum(self) -> bool:
        """Whether there is something to add to, and both are dense."""
        return self.total is not None and not self.total.is_sparse and not self.source.is_sparse

    def target(self) -> Tensor:
        """Return where the unscaled gradient goes: for a master, new memory in FP32."""
        if self.stepped is self.parameter or self.source.is_sparse:
            is_own = self.stepped is self.parameter
            return self.source if is_own else self.source.to(torch.float32)  # type: ignore[no-any-return]
        return shard_like(torch.empty_like(local(self.source), dtype=torch.float32), self.stepped)


def _unscale_moves(
    moves: Sequence[_Move], inv_scale: Tensor, found_inf: Tensor | None, bad_steps: BadSteps | None
) -> None:
    """Unscale gradients into their targets. `bad_steps` has an entry for each move.

    It is not written if some of the targets are sums and others are not.
    """
    if not moves:
        return
    adding = [move for move in moves if move.is_dense_sum()]
    moving = [move for move in moves if not move.is_dense_sum()]
    logged = {"bad_steps": None if adding and moving else bad_steps}
    totals = [move.total for move in adding if move.total is not None]
    sources = [move.source for move in adding]
    kernels.axpby.axpby(inv_scale, sources, 1.0, totals, totals, found_inf, **logged)
    targets = [move.target() for move in moving]
    kernels.unscale.unscale([move.source for move in moving], targets, inv_scale, found_inf, **logged)
    store_grads([move.parameter for move in moves])
    there = [move for move in moves if move.total is not None]
    store_grads([move.stepped for move in there], [move.total for move in there])
    for move, target in zip(moving, targets, strict=True):
        add_grad(move.stepped, target)


def _unscale_in_graph(moves: Sequence[_Move], inv_scale: Tensor, found_inf: Tensor | None) -> None:
    """Unscale gradients by operations that autograd sees: their derivatives are unscaled too."""
    if found_inf is not None:
        kernels.unscale.check([move.source.detach() for move in moves], inv_scale, found_inf)
    with torch.enable_grad():
        for move in moves:
            is_own = move.stepped is move.parameter
            grad = (move.source.to(torch.float32) * inv_scale.reshape(())).to(
                move.source.dtype if is_own else torch.float32
            )
            move.parameter.grad = None
            move.stepped.grad = grad if move.total is None else grad + move.total


def _are_there(
    parameters: Sequence[Tensor], grads: Sequence[Tensor | None], claimed: Collection[int]
) -> list[bool]:
    """Return which gradients exist and are not claimed."""
    there = [grad is not None for grad in grads]
    if claimed:
        there = [has and id(p) not in claimed for has, p in zip(there, parameters, strict=True)]
    return there


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
