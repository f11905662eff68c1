"""Which tensors of an optimizer go into which launch of its step.

A step finds them anew only when something about them has changed, because asking each of hundreds of
tensors takes the host longer than a GPU takes for the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from amp.scaledgrads import StepInputs

_PLAIN = {Tensor, nn.Parameter}


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
        states: the state of each, empty where there is none yet.
        recall: how the last step's plan is found again; None for parameters of a class of their own.
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
        from amp.kernels.tables import Recall  # loads Triton

        self.index = index
        self.number = number
        self.stepped = stepped
        self.params = stepped if lows is None or models is None else models
        self.models = models if lows is None else None
        self.lows = lows
        self.sources = sources
        self.states: list[dict[str, Tensor]] = []
        self.recall = Recall() if set(map(type, self.params)) <= _PLAIN else None

    def grads(self, inputs: StepInputs) -> Sequence[Tensor]:
        """Return the gradients, scaled or not."""
        if self.sources is None:
            return [parameter.grad for parameter in self.stepped]  # type: ignore[misc]
        if self.sources == list(range(len(inputs.grads))):
            return inputs.grads
        return [inputs.grads[i] for i in self.sources]


class Launches:
    """The launches of an optimizer's steps."""

    def __init__(self) -> None:
        self._key: object = None
        self._state_ids: list[int] | None = None
        self._launches: list[Launch] = []

    def of(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, dict[str, Tensor]],
        inputs: StepInputs,
    ) -> list[Launch]:
        """Return the launches of one step, with the states that there are. Nothing is written."""
        lists: list[list[Tensor]] = [group["params"] for group in groups]
        has_own = [
            [parameter.grad is not None for parameter in params]
            for params in (lists if len(inputs.stepped) < sum(map(len, lists)) else ())
        ]
        given = (*lists, inputs.stepped, inputs.models, inputs.lows or ())
        key = ([list(map(id, tensors)) for tensors in given], inputs.lows is None, has_own)
        if key != self._key:
            self._launches = list(_launches(lists, inputs, has_own))
            self._key = key
            self._state_ids = None
        state_ids = list(map(id, state.values()))
        if state_ids != self._state_ids:
            for launch in self._launches:
                launch.states = [state.get(parameter, {}) for parameter in launch.stepped]
            self._state_ids = state_ids
        return self._launches


def _launches(
    lists: Sequence[list[Tensor]], inputs: StepInputs, has_own: Sequence[Sequence[bool]]
) -> Iterator[Launch]:
    source_of = {id(parameter): i for i, parameter in enumerate(inputs.stepped)}
    masters = len(inputs.models)
    for index, params in enumerate(lists):
        own = has_own[index] if has_own else itertools.repeat(False)
        of_kind: dict[tuple[bool, bool], tuple[list[Tensor], list[int]]] = {}
        for parameter, has in zip(params, own, strict=False):
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
