"""What the groups of an optimizer hold, and the gradients that a block's backward has made there.

`Groups` are pairs of parameters and masters, and parameters without one. `NewGradients` are found in
them when a block is left, checked, and unscaled by `amp.training.unscaling`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.distributed import groups_of_meshes
from amp.dtypes import SCALABLE
from amp.errors import AmpRuntimeError, AmpTypeError
from amp.kernels.tensor_lists import TensorList, are_plain, local
from amp.lazy import kernels
from amp.masters.agreement import Pairs, cast_text
from amp.masters.master_weights import MasterWeights
from amp.training import unscaling
from amp.training.parameter_check import ParameterCheck
from amp.training.recorder import Names
from amp.training.scaler import LossScaler

if TYPE_CHECKING:
    from amp.kernels.launch_plans import BadSteps

_dtype = operator.attrgetter("dtype")
_grad = operator.attrgetter("grad")
_layout = operator.attrgetter("layout")
_needs_graph = operator.attrgetter("requires_grad")
_PLAIN, _NONE = {Tensor}, TensorList([])


class Groups:
    """The parameters of an optimizer's groups at one time, each once, in their order.

    Args:
        in_groups: a list for each group.
        masters: the session's.
        called: returns how to call a parameter in a message.

    Attributes:
        stepped: all of them: masters, and parameters without a master.
        pairs: the pairs of the masters.
        masters, models: the two sides of the pairs.
        unmastered: the parameters without a master.
        unmastered_list: the same as a `TensorList`, of local shards.
        are_plain: whether none is a DTensor, or of another class with its values elsewhere.
        process_groups: the process groups whose ranks hold parts or copies of any of `stepped`.
    """

    def __init__(
        self,
        in_groups: Sequence[Sequence[Tensor]],
        masters: MasterWeights,
        called: Callable[[Tensor], str],
    ) -> None:
        self._in_groups = list(map(list, in_groups))
        self._called = called
        self.stepped = list(dict.fromkeys(chain.from_iterable(in_groups)))
        found = [masters.pair(each) for each in self.stepped]
        both = list(zip(self.stepped, found, strict=True))
        held = [pair for each, pair in both if pair is not None and pair.master is each]
        self.pairs = Pairs(held, called)
        self.masters, self.models = self.pairs.masters, self.pairs.models
        self.unmastered = [each for each, pair in both if pair is None or pair.master is not each]
        self._replaced = any(pair is not None and pair.parameter is each for each, pair in both)
        self._dtypes = list(map(_dtype, self.unmastered))
        self.process_groups = groups_of_meshes(self.stepped)
        self.are_plain = self.pairs.are_plain and are_plain(self.unmastered)
        of_rank = self.unmastered if self.are_plain else list(map(local, self.unmastered))
        self.unmastered_list = TensorList(of_rank)

    @cached_property
    def ids(self) -> frozenset[int]:
        """The ids of all parameters, masters and the model's."""
        return frozenset(map(id, (*self.stepped, *self.models)))

    def are_current(self, optimizer: Any) -> bool:
        """Whether the groups of the optimizer still hold these, uncast."""
        now, known = [group["params"] for group in optimizer.param_groups], self._in_groups
        return (
            list(map(len, now)) == list(map(len, known))
            and all(map(is_, chain.from_iterable(now), chain.from_iterable(known)))
            and list(map(_dtype, self.unmastered)) == self._dtypes
        )

    def now(self, optimizer: Any, masters: MasterWeights) -> Groups:
        """Return what the groups hold now: this object, if they hold the same.

        Raises:
            AmpRuntimeError: a parameter has taken the place of its master, or was cast after
                `initialize`.
        """
        if self.are_current(optimizer):
            return self
        for parameter, dtype in zip(self.unmastered, self._dtypes, strict=True):
            if parameter.dtype is not dtype:
                raise AmpRuntimeError(cast_text(self._called(parameter), parameter, dtype))
        groups = Groups([group["params"] for group in optimizer.param_groups], masters, self._called)
        if groups._replaced:
            raise AmpRuntimeError(
                f"the param_groups of this {type(optimizer).__name__} hold 16-bit parameters of the "
                "model, which have FP32 masters: they were assigned after amp.initialize. Assign what "
                "was there, or amp.master_params(optimizer); add others by add_param_group"
            )
        return groups


class Logs(NamedTuple):
    """Where kernels log which gradients are bad, if the host does not find out by itself."""

    of_masters: BadSteps | None = None
    of_own: BadSteps | None = None


class NewGradients(NamedTuple):
    """Gradients as backward has left them.

    Attributes:
        of_masters, grads: the pairs whose parameter has a gradient, and these gradients.
        unmastered, own_grads: parameters without a master that have a gradient, and these gradients; of
            a DTensor this rank's shard.
        own_are_dense: whether `own_grads` are dense, in dtypes that a kernel can unscale.
        are_dense: whether `grads` are.
        have_graphs: whether backward has made any of them with `create_graph=True`.
        will_be_deferred: whether `grads` stay as they are until the step.
    """

    of_masters: Pairs
    grads: TensorList
    unmastered: Sequence[Tensor]
    own_grads: TensorList
    own_are_dense: bool
    are_dense: bool
    have_graphs: bool = False
    will_be_deferred: bool = False

    @classmethod
    def of(cls, groups: Groups, claimed: Collection[int]) -> NewGradients:
        """Return the gradients that backward has made, and change nothing.

        Args:
            groups: what the optimizer's groups hold.
            claimed: ids of parameters whose gradients another optimizer handles.
        """
        found, own_found = list(map(_grad, groups.models)), list(map(_grad, groups.unmastered))
        there = [grad is not None for grad in found]
        own_there = [grad is not None for grad in own_found]
        if claimed:
            there, own_there = [
                [has and id(p) not in claimed for has, p in zip(have, parameters, strict=True)]
                for have, parameters in ((there, groups.models), (own_there, groups.unmastered))
            ]
        new: list[Any] = list(compress(found, there))
        own: list[Any] = list(compress(own_found, own_there))
        unmastered = groups.unmastered
        if len(own) < len(unmastered):
            unmastered = list(compress(unmastered, own_there))
        have_graphs = groups.are_plain and any(map(_needs_graph, chain(new, own)))
        if not groups.are_plain:
            new, own = list(map(local, new)), list(map(local, own))
        of_masters = groups.pairs if all(there) else groups.pairs.only(there)
        return cls(
            of_masters,
            TensorList(new, like=of_masters.model_list) if new else _NONE,
            unmastered,
            TensorList(own, like=groups.unmastered_list) if own else _NONE,
            not own or _are_dense(own),
            not new or _are_dense(new),
            have_graphs,
        )

    def check(self, check: ParameterCheck) -> None:
        """Raise if a gradient cannot be unscaled; `check` names parameters in messages.

        Raises:
            AmpTypeError: a gradient's dtype cannot be unscaled.
            AmpRuntimeError: the model was moved.
        """
        if self.grads and not self.will_be_deferred:  # else the step checks each of them
            self.of_masters.check_devices()
        gradients: list[tuple[Tensor, Any]] = []
        if not self.own_are_dense:
            gradients += zip(self.unmastered, self.own_grads, strict=True)
        if not self.are_dense:
            gradients += zip(self.of_masters.models, self.grads, strict=True)
        for parameter, grad in gradients:
            if grad.dtype not in SCALABLE:
                raise AmpTypeError(
                    f"the gradient of {check.called(parameter)} is {grad.dtype} and cannot be "
                    "unscaled: loss scaling takes float16, bfloat16, float32 and float64. Freeze the "
                    "parameter, leave it out of the optimizer, or use a loss_scale of 1."
                )

    def logs(self, scaler: LossScaler, groups: Groups, names: Names) -> Logs:
        """Return where kernels log which gradients are bad; `names` names parameters of `groups`."""
        masters = own = None
        if of := self.of_masters.models:
            masters = scaler.bad_steps_of(of, names)
        if self.unmastered and self.unmastered is groups.unmastered:
            own = scaler.bad_steps_of(self.unmastered, names)
        return Logs(masters, own)

    def check_finite(self, one: Tensor, found_inf: Tensor, logs: Logs) -> None:
        """Set `found_inf`, float32 `[1]`, if a gradient at a scale of 1 is inf or NaN. No host sync."""
        to_check = [(self.own_grads, self.own_are_dense, logs.of_own)]
        if not self.will_be_deferred:
            to_check.append((self.grads, self.are_dense, logs.of_masters))
        for grads, are_dense, bad_steps in to_check:
            if grads:
                parts = grads if are_dense else without_complex(grads)
                kernels.unscale.check(parts, one, found_inf, bad_steps=bad_steps)

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
        moves, bad_steps = [], logs.of_masters
        if not self.will_be_deferred:
            of = zip(self.of_masters.masters, self.of_masters.models, self.grads, strict=True)
            moves = [unscaling.Move(master, model, grad, master.grad) for master, model, grad in of]
        if self.own_are_dense and not totals and not self.have_graphs:
            if own := self.own_grads:
                kernels.unscale.unscale(own, own, inv_scale, found_inf, bad_steps=logs.of_own)
        else:
            bad_steps = None
            moves += [unscaling.Move(p, p, p.grad, totals.get(p)) for p in self.unmastered]
        if moves:
            unscaling.unscale(moves, inv_scale, found_inf, bad_steps, have_graphs=self.have_graphs)


def _are_dense(grads: Sequence[Tensor]) -> bool:
    """Whether gradients are dense, with values of their own, in dtypes that can be unscaled."""
    if not (_PLAIN.issuperset(map(type, grads)) or are_plain(grads)):
        return False
    return SCALABLE.issuperset(map(_dtype, grads)) and {torch.strided}.issuperset(map(_layout, grads))


def without_complex(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, complex ones as views of their two parts."""
    return [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
