"""Gradients that a block has made: find them, check them, unscale them, and add them to earlier ones.

Everything that turns 16 bits into FP32 between backward and step:

| from                   | to                        | when                    | function             |
|------------------------|---------------------------|-------------------------|----------------------|
| gradients of a block   | FP32 of masters, and sums | the block ends, scaled  | `_unscale`           |
| the same, with a graph | operations of autograd    | the same                | `_unscale_in_graph`  |
| the same               | FP32 of masters, added    | the block ends, scale 1 | `add_to_masters`     |
| deferred gradients     | FP32 sums                 | a later block ends      | `Deferral.defer`     |
| the same               | FP32 of their own         | something reads one     | `unscaled`           |
| what a script stores   | FP32 of both sides        | the next look           | `Pairs.follow_grads` |

Gradients that a parameter of the model keeps, and adds to no others, are unscaled where they are.
Masters become 16-bit weights, and take over what was written to these, in `amp.masters.agreement`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import place_gradients, shard_like
from amp.dtypes import LOW_PRECISION, SCALABLE
from amp.errors import AmpTypeError
from amp.kernels import host_lists
from amp.kernels.host_lists import store_grads
from amp.kernels.interrupts import at_once, without_grad
from amp.kernels.tensor_lists import TensorList, are_plain, local_shards
from amp.lazy import kernels
from amp.masters.agreement import Pairs
from amp.training.parameters import ParameterNames, Parameters

if TYPE_CHECKING:
    from amp.kernels.launch_plans import BadSteps
    from amp.training.recorder import Names
    from amp.training.scaler import LossScaler

_grad = operator.attrgetter("grad")
_NONE = TensorList([])


class SideGradients(NamedTuple):
    """Gradients that backward has left in some parameters of a model.

    Attributes:
        parameters: those that have one.
        grads: their gradients; of a DTensor this rank's shard.
        are_dense: whether these are dense, hold values themselves, and have dtypes that can be
            unscaled.
        bad_steps: where to log which of them are bad.
    """

    parameters: Sequence[Tensor]
    grads: TensorList
    are_dense: bool
    bad_steps: BadSteps | None = None

    def logged(self, scaler: LossScaler, names: Names) -> SideGradients:
        """Return the same, to be logged for a scaler; `names` returns the names of parameters."""
        return self._replace(bad_steps=scaler.bad_steps_of(self.parameters, names))

    def find_inf(self, factor: Tensor, found_inf: Tensor) -> None:
        """Set `found_inf`, float32 `[1]`, if a gradient is inf or NaN, and log which. No host sync.

        Products with `factor`, float32 `[1]`, count too.
        """
        if self.grads:
            parts = self.grads if self.are_dense else without_complex(self.grads)
            kernels.unscale.check(parts, factor, found_inf, bad_steps=self.bad_steps)


_NO_GRADIENTS = SideGradients((), _NONE, are_dense=True)


class NewGradients(NamedTuple):
    """The gradients that backward has left in the parameters of an optimizer.

    Attributes:
        pairs: those whose parameter has a gradient.
        of_masters: the gradients of these parameters.
        own: those of parameters without a master.
        have_graphs: whether backward has made any of them with `create_graph=True`.
        will_be_deferred: whether `of_masters` stay scaled until the step.
    """

    pairs: Pairs
    of_masters: SideGradients
    own: SideGradients
    have_graphs: bool
    will_be_deferred: bool = False

    @classmethod
    def of(cls, parameters: Parameters, claimed: Collection[int], are_final: bool) -> NewGradients:
        """Return the gradients that backward has made.

        Args:
            parameters: what the optimizer's groups hold.
            claimed: ids of parameters whose gradients another optimizer handles.
            are_final: whether they are unscaled next. Then partial gradients of DTensors are first
                summed over the ranks, as torch's optimizers would do.
        """
        pairs, unmastered = parameters.pairs, parameters.unmastered
        of_masters = own = _NO_GRADIENTS
        if pairs.models:
            there, of_masters = _gradients_of(
                parameters, pairs.models, pairs.model_list, claimed, are_final
            )
            if not all(there):
                pairs = pairs.only(there)
                of_masters = of_masters._replace(parameters=pairs.models)  # the same list each time
        if unmastered:
            like = parameters.unmastered_list
            _, own = _gradients_of(parameters, unmastered, like, claimed, are_final)
        every = [*of_masters.grads, *own.grads]
        have_graphs = parameters.are_plain and not host_lists.lists.train(every, [False] * len(every))
        return cls(pairs, of_masters, own, have_graphs)

    def refuse_unscalable(self, names: ParameterNames) -> None:
        """Raise if a gradient cannot be unscaled; `names` names parameters in messages.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved.
        """
        if self.of_masters.grads and not self.will_be_deferred:  # else the step checks each of them
            self.pairs.check_devices()
        for found in (self.own, self.of_masters):
            both = () if found.are_dense else zip(found.parameters, found.grads, strict=True)
            for parameter, grad in both:
                if grad.dtype not in SCALABLE:
                    raise AmpTypeError(
                        f"the gradient of {names.called(parameter)} is {grad.dtype} and cannot be "
                        "unscaled: loss scaling takes float16, bfloat16, float32 and float64. Freeze "
                        "the parameter, leave it out of the optimizer, or use a loss_scale of 1."
                    )

    def unscale(
        self, totals: dict[Tensor, Tensor], inv_scale: Tensor, found_inf: Tensor | None
    ) -> None:
        """Unscale the gradients, and add them to those of earlier blocks. No host sync.

        Gradients that will be deferred are left alone. Others of masters go to the masters' `.grad`.
        Bad ones are not logged if some become sums and others do not.

        Args:
            totals: unscaled gradients of earlier blocks, of parameters without a master. Those that are
                added are removed.
            inv_scale: float32 `[1]`, what to multiply by.
            found_inf: float32 `[1]`, set to 1 on overflow; None checks nothing.
        """
        moves, bad_steps = [], self.of_masters.bad_steps
        parameters, own, are_dense, of_own = self.own
        if not self.will_be_deferred:
            of = zip(self.pairs.masters, self.pairs.models, self.of_masters.grads, strict=True)
            moves = [Move(master, model, grad, master.grad) for master, model, grad in of]
        if are_dense and not totals and not self.have_graphs:
            if own:
                kernels.unscale.unscale(own, own, inv_scale, found_inf, bad_steps=of_own)
        else:
            bad_steps = None
            moves += [Move(p, p, p.grad, totals.pop(p, None)) for p in parameters]
        if self.have_graphs:
            _unscale_in_graph(moves, inv_scale, found_inf)
        elif moves:
            _unscale(moves, inv_scale, found_inf, bad_steps)


def _gradients_of(
    parameters: Parameters,
    some: list[Tensor],
    like: TensorList,
    claimed: Collection[int],
    are_final: bool,
) -> tuple[list[bool], SideGradients]:
    """Return whether each of some parameters has a gradient to take, and these; see `NewGradients`.

    `like` has tensors of the kind that the gradients mostly are of.
    """
    is_placed = parameters.are_plain or not are_final
    grads: list[Any] = list(map(_grad, some)) if is_placed else place_gradients(some)
    there = [grad is not None for grad in grads]
    if claimed:
        there = [has and id(each) not in claimed for has, each in zip(there, some, strict=True)]
    grads = list(compress(grads, there))
    if not parameters.are_plain:
        grads = local_shards(grads)
    found = TensorList(grads, like=like) if grads else _NONE
    holders = some if all(there) else list(compress(some, there))
    are_dense = are_plain(found) and host_lists.lists.are_floats(found)
    return there, SideGradients(holders, found, are_dense)


def without_complex(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, complex ones as views of their two parts."""
    return [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]


class Move(NamedTuple):
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


def _unscale(
    moves: Sequence[Move], inv_scale: Tensor, found_inf: Tensor | None, bad_steps: BadSteps | None
) -> None:
    """Unscale gradients by kernels; `bad_steps` has an entry for each."""
    is_sum = [
        move.total is not None and not (move.total.is_sparse or move.source.is_sparse) for move in moves
    ]
    adding, moving = list(compress(moves, is_sum)), moves
    if adding:
        moving = list(compress(moves, map(operator.not_, is_sum)))
        totals: list[Any] = [move.total for move in adding]
        sources = [move.source for move in adding]
        bad_steps = None if moving else bad_steps
        kernels.axpby.axpby(inv_scale, sources, 1.0, totals, totals, found_inf, bad_steps=bad_steps)
    new = [move.source for move in moving]
    targets = list(new)
    for i, move in enumerate(moving):
        if move.stepped is not move.parameter:  # a master
            dtype, is_sparse = torch.float32, new[i].is_sparse
            targets[i] = new[i].to(dtype) if is_sparse else torch.empty_like(new[i], dtype=dtype)
    kernels.unscale.unscale(new, targets, inv_scale, found_inf, bad_steps=bad_steps)
    if not are_plain([move.stepped for move in moving]):
        for i, move in enumerate(moving):
            if move.stepped is not move.parameter:
                targets[i] = shard_like(targets[i], move.stepped)
    for move in moves:
        move.parameter.grad = None
        if move.total is not None:
            move.stepped.grad = move.total
    for move, target in zip(moving, targets, strict=True):
        if move.stepped.grad is None:
            move.stepped.grad = target
        else:
            add_grad(move.stepped, target)


def _unscale_in_graph(moves: Sequence[Move], inv_scale: Tensor, found_inf: Tensor | None) -> None:
    """Unscale gradients by operations that autograd sees: their derivatives are unscaled too."""
    if found_inf is not None:
        kernels.unscale.check([move.source.detach() for move in moves], inv_scale, found_inf)
    with torch.enable_grad():
        for move in moves:
            dtype = move.source.dtype if move.stepped is move.parameter else torch.float32
            grad = (move.source.to(torch.float32) * inv_scale.reshape(())).to(dtype)
            move.parameter.grad = None
            move.stepped.grad = grad if move.total is None else grad + move.total


def unscaled(grads: Sequence[Tensor], inv_scale: Tensor | None) -> list[Tensor]:
    """Return dense gradients in FP32, multiplied by `inv_scale`, float32 `[1]`. No host sync."""
    targets = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    if inv_scale is None:
        if not kernels.master_copy.copy_in_cpp(grads, targets):
            torch._foreach_copy_(targets, list(grads))
    else:
        kernels.unscale.unscale(grads, targets, inv_scale, None)
    return targets


@without_grad
def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add an unscaled gradient to a parameter's `.grad`. No host sync."""
    _adding(parameter, grad)()


@without_grad
def add_to_masters(pairs: Pairs) -> None:
    """Add the gradients of 16-bit parameters, which are unscaled, to those of masters. No host sync.

    An interrupt finds each in exactly one place.
    """
    pairs.check_devices()
    models = pairs.models
    every: list[Any] = list(map(_grad, models)) if pairs.are_plain else place_gradients(models)
    there = [grad is not None for grad in every]
    pairs, grads, lists = pairs.only(there), list(compress(every, there)), host_lists.lists
    masters, nothing = pairs.masters, [None] * len(grads)
    half = next((grad.dtype for grad in grads if grad.dtype in LOW_PRECISION), None)
    are_alike = half is not None and lists.have_dtypes(grads, [half] * len(grads))
    are_dense = {Tensor}.issuperset(map(type, grads)) and are_alike and lists.are_floats(grads)
    if are_dense and lists.train(grads, [False] * len(grads)):
        new = unscaled(grads, None)
    else:
        with torch.enable_grad():  # some may have a graph
            new = [grad.to(torch.float32) for grad in grads]
    if lists.have_grads(masters, nothing):
        store_grads([*masters, *pairs.models], [*new, *nothing])
        return
    removed = map(setattr, pairs.models, repeat("grad"), nothing)
    at_once(*map(_adding, masters, new), partial(deque, removed, 0))


def _adding(parameter: Tensor, grad: Tensor) -> Callable[[], object]:
    """Return a function that adds a gradient to a parameter's `.grad`, by one call into C++."""
    total = parameter.grad
    if total is not None and not (total.is_sparse or grad.is_sparse):
        return partial(torch._foreach_add_, [total], [grad])
    if total is not None:
        grad = grad + total if total.is_sparse else total + grad
    return partial(setattr, parameter, "grad", grad)
