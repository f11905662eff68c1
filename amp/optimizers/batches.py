"""Batches of an optimizer's parameters, each for one call of `amp.kernels.stepping.step`."""

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from amp.distributed import WHOLE, Cut, cut_of, place_gradients
from amp.kernels.tensor_lists import TensorList, are_all_same, are_plain, are_same, local

_APART = 0x3504F333, 0x2545F491
"""The distances between seeds of groups, and of shards: far larger than a group's parameter count."""


@dataclass
class Batch:
    """Parameters of one group that are stepped together.

    Attributes:
        index: the index of the group.
        stepped: the parameters or masters in the group, which are the keys of the state.
        places: the index of each in the group.
        positions: the index of each among the masters of the `StepInputs`; None for parameters without
            a master.
        has_all: whether these are all masters of the `StepInputs`, in their order.
        cut: how each is sharded over ranks.
        entries: the index of each in the optimizer's state; None if it has no state yet.
        checked: the kinds and devices of the lists that last passed `check_batch`.
    """

    index: int
    stepped: list[Tensor]
    places: list[int]
    positions: list[int] | None
    has_all: bool
    cut: Cut
    entries: list[int | None] = field(default_factory=list)
    checked: list[Any] = field(default_factory=list)
    _references: list[weakref.ref[Tensor]] = field(default_factory=list)
    _known: list[TensorList] = field(default_factory=list)
    """What `own_lists` returned last: weak references to the tensors, and the lists without them."""

    def seeds(self, seed: int) -> list[int]:
        """Return a seed of 31 bits for each parameter, from the group's seed and its place."""
        first = seed + _APART[0] * self.index + _APART[1] * self.cut.shard
        return [(first + place) % 2**31 for place in self.places]

    def tensors(self, inputs: Any) -> dict[str, Any]:
        """Return `params`, `grads`, `models` and `lows` for `amp.kernels.stepping.step`.

        A list is a `TensorList` unless its tensors are of a class that keeps its values elsewhere.
        """
        if self.positions is None:
            stepped: list[Any] = self.stepped
            if self.cut.groups:
                place_gradients(stepped)
            own: list[Any] = [parameter.grad for parameter in stepped]
            if self.cut.groups:
                stepped, own = list(map(local, stepped)), list(map(local, own))
            if not are_plain(own) or not are_plain(stepped):
                return {"params": stepped, "grads": own}
            params = TensorList(stepped)  # whose dtype and order a user may have changed
            return {"params": params, "grads": TensorList(own, like=params)}
        masters, grads, models = [self._of(x) for x in (inputs.params, inputs.grads, inputs.models)]
        if inputs.lows is None:
            return {"params": masters, "grads": grads, "models": models}
        return {"params": models, "grads": grads, "lows": [inputs.lows[i] for i in self.positions]}

    def _of(self, shown: TensorList) -> TensorList:
        return shown if self.has_all else shown.at(self.positions or ())

    def own_lists(self, lists: Sequence[Sequence[Tensor]]) -> list[TensorList]:
        """Return lists of tensors that belong to the optimizer alone, such as its state.

        The lists of the last step are reused if the tensors are the same objects at the same addresses.
        """
        tensors = list(chain.from_iterable(lists))
        if self.cut.groups:
            lists = [list(map(local, tensors)) for tensors in lists]
        if are_same(tensors, list(map(operator.call, self._references))):
            pairs = zip(self._known, lists, strict=True)
            result = [known.with_tensors(tensors).now() for known, tensors in pairs]
        else:
            result = list(map(TensorList, lists))
            self._references = list(map(weakref.ref, tensors))
        self._known = [x.with_tensors(()) for x in result]
        return result


def kinds_of(lists: Sequence[Any]) -> list[Any]:
    """Return the kinds and devices of lists, for comparison; an empty list if one has no kind."""
    try:
        return [(x.kind, x.device) for x in lists] if all([x.has_memory for x in lists]) else []  # noqa: C419
    except (AttributeError, RuntimeError):  # of a class with its values elsewhere, or sparse
        return []


class Batches:
    """The batches of an optimizer's steps, kept until its groups, gradients or state change."""

    def __init__(self) -> None:
        self._lists: list[list[Tensor]] = []
        """The groups' parameters in the last step."""
        self._given: Sequence[Tensor] = ()
        """The masters that had a gradient in the last step."""
        self._others: list[Tensor] = []
        """Parameters whose gradients are in their `.grad`, if they have any."""
        self._has_own: list[bool] = []
        self._keys: list[Any] = []
        self._batches: list[Batch] = []

    def of(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], inputs: Any
    ) -> list[Batch]:
        """Return the batches of one step with a `StepInputs`. Nothing is written."""
        lists = [group["params"] for group in groups]
        is_new = inputs.stepped is not self._given or not are_all_same(lists, self._lists)
        if is_new:
            self._lists, self._given = list(map(list, lists)), inputs.stepped
            given = set(map(id, inputs.stepped))
            self._others = [p for params in lists for p in params if id(p) not in given]
        has_own = [parameter.grad is not None for parameter in self._others]
        if is_new or has_own != self._has_own:
            self._has_own = has_own
            own = {id(p) for p, has in zip(self._others, has_own, strict=True) if has}
            self._batches = list(_batches(lists, inputs.stepped, own))
            self._keys = []
        keys = list(state)
        if not self._keys or not are_same(keys, self._keys):
            self._keys = keys
            place_of = {id(key): i for i, key in enumerate(keys)}
            for batch in self._batches:
                batch.entries = [place_of.get(id(parameter)) for parameter in batch.stepped]
        return self._batches


def _batches(
    groups: Sequence[Sequence[Tensor]], masters: Sequence[Tensor], own: set[int]
) -> Iterator[Batch]:
    """Yield the batches; `own` has the ids of parameters with a gradient in their `.grad`."""
    position_of = {id(master): i for i, master in enumerate(masters)}
    for index, params in enumerate(groups):
        place_of = {id(parameter): place for place, parameter in enumerate(params)}
        for cut, alike in _cut_alike(params):
            given = [parameter for parameter in alike if id(parameter) in position_of]
            others = [parameter for parameter in alike if id(parameter) in own]
            positions = [position_of[id(parameter)] for parameter in given]
            for stepped, shown in ((given, positions), (others, None)):
                if stepped:
                    places = [place_of[id(parameter)] for parameter in stepped]
                    has_all = shown == list(range(len(masters)))
                    yield Batch(index, stepped, places, shown, has_all, cut)


def _cut_alike(params: Sequence[Tensor]) -> Iterable[tuple[Cut, Sequence[Tensor]]]:
    """Return the parameters of a group, together those that are sharded over ranks in the same way."""
    if are_plain(params):
        return [(WHOLE, params)]
    alike: dict[Cut, list[Tensor]] = {}
    for parameter in params:
        alike.setdefault(cut_of(parameter), []).append(parameter)
    return alike.items()
