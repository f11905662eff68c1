"""Which tensors of an optimizer go into which launch of its step.

A step finds them anew only when something about them has changed, because asking each of hundreds of
tensors takes the host longer than a GPU takes for the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amp.kernels import bulk
from amp.scaledgrads import StepInputs

if TYPE_CHECKING:
    from amp.kernels.tables import Plan, Whereabouts


class Launch:
    """Parameters of one group that have gradients, and are all masters or none of them.

    Args:
        index: of the group.
        number: of the launch, in its group.
        stepped: what is in the group and has the state: parameters or masters.
        models: 16-bit weights of each master; None where these are no masters.
        lows: the low halves of masters that have no other place, in the order of the weights.
        sources: where the gradient of each is in `StepInputs.grads`; None if it is in its `.grad`.

    Attributes:
        params: what the kernel steps: the same, or weights that are masters with their `lows`.
        places: where in the optimizer's state each has its own; None where there is none yet.
    """

    def __init__(
        self,
        index: int,
        number: int,
        stepped: list[Tensor],
        models: list[Tensor] | None,
        lows: list[Tensor] | None,
        sources: list[int] | None,
    ) -> None:
        self.index = index
        self.number = number
        self.stepped = stepped
        self.params = stepped if lows is None or models is None else models
        self.models = models if lows is None else None
        self.lows = lows
        self.places: list[int | None] = []
        self._sources = sources
        self._takes_all = sources == list(range(len(stepped)))
        self._known: tuple[Whereabouts, Plan] | None = None

    def grads(self, inputs: StepInputs) -> Sequence[Tensor]:
        """Return the gradients, scaled or not."""
        if self._sources is None:
            return [parameter.grad for parameter in self.stepped]  # type: ignore[misc]
        if self._takes_all and len(self.stepped) == len(inputs.grads):
            return inputs.grads
        return [inputs.grads[i] for i in self._sources]

    def states(self, of_all: list[Any]) -> list[Any]:
        """Return the state of each, given that of all parameters; None where there is none yet."""
        return [None if i is None else of_all[i] for i in self.places]

    def plan(self, whereabouts: Whereabouts | None, grads: Sequence[Tensor]) -> Plan | None:
        """Return the plan of the last step if all tensors are where they were, gradients apart."""
        if self._known is None or whereabouts is None:
            return None
        known, plan = self._known
        if not plan.is_readable():
            return None
        if known == whereabouts:
            return plan
        from amp.kernels.stepping import GRADS  # loads Triton

        if whereabouts.moved(known) and all(
            grad.device == parameter.device for grad, parameter in zip(grads, self.params, strict=True)
        ):
            return plan.relocated(GRADS, whereabouts.others or b"")
        return None

    def keep(self, plan: Plan, whereabouts: Whereabouts | None) -> None:
        """Keep the plan of a step."""
        holds = whereabouts is not None and whereabouts.know_all_of(plan)
        self._known = (whereabouts, plan) if whereabouts is not None and holds else None


class Launches:
    """The launches of an optimizer's steps."""

    def __init__(self) -> None:
        self._lists: list[Sequence[Tensor]] = []
        self._has_own: list[bool] = []
        self._all_are_given = False
        self._keys: list[Any] = []
        self._launches: list[Launch] = []

    def of(
        self,
        groups: Sequence[Mapping[str, Any]],
        keys: list[Any],
        inputs: StepInputs,
    ) -> list[Launch]:
        """Return the launches of one step. Nothing is written.

        Args:
            groups: the optimizer's.
            keys: of its state.
            inputs: what it is shown.
        """
        params: list[list[Tensor]] = [list(group["params"]) for group in groups]
        lists = [*params, inputs.stepped, inputs.models, inputs.lows or ()]
        is_new = len(lists) != len(self._lists) or not all(map(bulk.are_same, lists, self._lists))
        if is_new:
            self._lists = lists
            given = set(map(id, inputs.stepped))
            self._all_are_given = given.issuperset(map(id, itertools.chain(*params)))
        has_own: list[bool] = []
        if not self._all_are_given:
            has_own = [parameter.grad is not None for parameter in itertools.chain(*params)]
        is_new = is_new or has_own != self._has_own
        if is_new:
            self._has_own = has_own
            self._launches = list(_launches(params, inputs, has_own))
        if is_new or not bulk.are_same(keys, self._keys):
            self._keys = keys
            place_of = {id(key): i for i, key in enumerate(keys)}
            for launch in self._launches:
                launch.places = [place_of.get(id(parameter)) for parameter in launch.stepped]
        return self._launches


def _launches(
    lists: Sequence[list[Tensor]], inputs: StepInputs, has_own: Sequence[bool]
) -> Iterator[Launch]:
    source_of = {id(parameter): i for i, parameter in enumerate(inputs.stepped)}
    masters = len(inputs.models)
    own = iter(has_own)
    for index, params in enumerate(lists):
        of_kind: dict[tuple[bool, bool], tuple[list[Tensor], list[int]]] = {}
        for parameter in params:
            has = next(own, False)
            source = source_of.get(id(parameter), -1)
            if source >= 0 or has:
                kind = (source >= 0, 0 <= source < masters)
                stepped, sources = of_kind.setdefault(kind, ([], []))
                stepped.append(parameter)
                sources.append(source)
        for number, ((is_given, has_master), (stepped, sources)) in enumerate(of_kind.items()):
            lows = inputs.lows
            yield Launch(
                index,
                number,
                stepped,
                [inputs.models[i] for i in sources] if has_master else None,
                [lows[i] for i in sources] if has_master and lows is not None else None,
                sources if is_given else None,
            )
