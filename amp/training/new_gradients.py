"""Find, check and unscale the gradients that a block's backward has made for one optimizer."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp.dtypes import SCALABLE
from amp.errors import AmpTypeError
from amp.kernels.tensor_lists import TensorList, are_plain, local
from amp.masters.agreement import Pairs
from amp.training import unscaling
from amp.training.bad_gradients import Names
from amp.training.group_contents import Groups
from amp.training.parameter_check import ParameterCheck
from amp.training.scaler import LossScaler

if TYPE_CHECKING:
    from amp.kernels.launch_plans import BadSteps


_DTYPE = operator.attrgetter("dtype")
_GRAD = operator.attrgetter("grad")
_LAYOUT = operator.attrgetter("layout")
_PLAIN = {Tensor}
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


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
        found, own_found = list(map(_GRAD, groups.models)), list(map(_GRAD, groups.unmastered))
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
        have_graphs = groups.are_plain and any(map(_REQUIRES_GRAD, chain(new, own)))
        if not groups.are_plain:
            new, own = list(map(local, new)), list(map(local, own))
        of_masters = groups.pairs.only(there)
        return cls(
            of_masters,
            TensorList(new, like=of_masters.model_list),
            unmastered,
            TensorList(own, like=groups.unmastered_list),
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
        if not self.will_be_deferred:  # else the step checks each of them
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
        if self.grads and not self.will_be_deferred:
            grads = self.grads if self.are_dense else list(self.grads)
            unscaling.check(grads, one, found_inf, logs.of_masters)
        if self.own_grads:
            grads = self.own_grads if self.own_are_dense else list(self.own_grads)
            unscaling.check(grads, one, found_inf, logs.of_own)

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
            if self.own_grads:
                unscaling.unscale_in_place(self.own_grads, inv_scale, found_inf, logs.of_own)
        else:
            bad_steps = None
            moves += [unscaling.Move(p, p, p.grad, totals.get(p)) for p in self.unmastered]
        unscaling.unscale(moves, inv_scale, found_inf, bad_steps, have_graphs=self.have_graphs)


def _are_dense(grads: Sequence[Tensor]) -> bool:
    """Whether gradients are dense, with values of their own, in dtypes that can be unscaled."""
    if not (_PLAIN.issuperset(map(type, grads)) or are_plain(grads)):
        return False
    return SCALABLE.issuperset(map(_DTYPE, grads)) and {torch.strided}.issuperset(map(_LAYOUT, grads))
