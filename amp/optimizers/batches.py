"""Batches of an optimizer's parameters, each for one call of `amp.kernels.stepping.step`."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp.distributed import Cut, cut_of, place_gradients, shard_in_whole
from amp.kernels import host_lists
from amp.kernels.host_lists import grads_of
from amp.kernels.rule import Origin, Origins
from amp.kernels.tensor_lists import Layout, TensorList, local_shards
from amp.names import bare_names


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
        names: the bare name of each in its model; its place in the groups if that is unknown.
        entries: the index of each in the optimizer's state; None if it has no state yet.
        layouts: those of its lists in the last step, by name, which have passed `check_batch`.
    """

    index: int
    stepped: list[Tensor]
    places: list[int]
    positions: list[int] | None
    has_all: bool
    cut: Cut
    names: list[str]
    entries: list[int | None]
    layouts: dict[str, Layout] = field(default_factory=dict)
    _origins: dict[int, Origins] = field(default_factory=dict)  # of the last seed

    def origins(self, seed: int) -> Origins:
        """Return where the random bits of each parameter begin, from the group's seed and its name.

        They do not depend on how a parameter is divided among ranks.

        Raises:
            AmpTypeError: see `shard_in_whole`.
        """
        if seed not in self._origins:
            seeds = [zlib.crc32(f"{seed} {name}".encode()) % 2**31 for name in self.names]
            shards = map(shard_in_whole, self.stepped)
            origins = (Origin(x, *y) for x, y in zip(seeds, shards, strict=True))
            self._origins = {seed: Origins(origins)}
        return self._origins[seed]

    def tensors(self, inputs: Any) -> dict[str, Any]:
        """Return `params`, `grads`, `models` and `lows` for `amp.kernels.stepping.step`."""
        if self.positions is None:
            stepped: list[Any] = self.stepped
            own: list[Any] = place_gradients(stepped) if self.cut.groups else grads_of(stepped)
            params = self.shards("params", stepped)
            return {"params": params, "grads": TensorList(local_shards(own), like=params)}
        of, grads = inputs.deferred.of, inputs.deferred.grads
        masters, models = of.master_list, of.model_list
        if not self.has_all:
            masters, grads, models = [x.at(self.positions) for x in (masters, grads, models)]
        if inputs.lows is None:
            return {"params": masters, "grads": grads, "models": models}
        lows = self.shards("lows", [inputs.lows[i] for i in self.positions])
        return {"params": models, "grads": grads, "lows": lows}

    def shards(self, name: str, tensors: Sequence[Tensor]) -> TensorList:
        """Return what each parameter has under a name; of DTensors the shards that this rank holds."""
        here = local_shards(tensors) if self.cut.groups else tensors
        return TensorList(here, before=self.layouts.get(name))


def layouts_of(lists: Mapping[str, TensorList]) -> dict[str, Layout]:
    """Return the layouts of lists; none at all if one list has none, or no memory."""
    try:
        layouts = {name: layout for name, x in lists.items() if (layout := x.layout) is not None}
        return layouts if len(layouts) == len(lists) else {}
    except (RuntimeError, AttributeError, TypeError):  # of sparse tensors, and of what is none
        return {}


def are_alike(some: Mapping[str, Layout], others: Mapping[str, Layout]) -> bool:
    """Whether layouts are those of lists of the same names, kinds and devices."""
    if list(some) != list(others):
        return False
    both = zip(some.values(), others.values(), strict=True)
    return all([x is y or (x.kind is y.kind and x.device == y.device) for x, y in both])  # noqa: C419


class Batches:
    """The batches of an optimizer's steps, kept until its groups, gradients or state change."""

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []
        """The groups' parameters in the last step, and the keys of the state."""
        self._given: Sequence[Tensor] = ()
        """The masters that had a gradient in the last step."""
        self._others: list[Tensor] = []
        """Parameters whose gradients are in their `.grad`, if they have any."""
        self._have_own: list[bool] = []
        self._batches: list[Batch] = []

    def of(self, optimizer: Optimizer, inputs: Any) -> list[Batch]:
        """Return the batches of one step with a `StepInputs`. Nothing is written."""
        lists = [*[group["params"] for group in optimizer.param_groups], list(optimizer.state)]
        stepped = inputs.deferred.of.masters
        is_new = stepped is not self._given or not host_lists.lists.are_all_same(lists, self._lists)
        if is_new:
            self._lists, self._given = list(map(list, lists)), stepped
            given = set(map(id, stepped))
            self._others = [p for params in lists[:-1] for p in params if id(p) not in given]
        have_own = host_lists.lists.with_grad(self._others)
        if is_new or have_own != self._have_own:
            self._have_own = have_own
            own = {id(p) for p, has in zip(self._others, have_own, strict=True) if has}
            self._batches = list(_batches(optimizer, inputs, own))
        return self._batches


def _batches(optimizer: Optimizer, inputs: Any, own: set[int]) -> Iterator[Batch]:
    """Yield the batches; `own` has the ids of parameters with a gradient in their `.grad`."""
    position_of = {id(master): i for i, master in enumerate(inputs.stepped)}
    entry_of = {id(key): i for i, key in enumerate(optimizer.state)}
    of_groups = zip(optimizer.param_groups, _names(optimizer, inputs), strict=True)
    for index, (group, names) in enumerate(of_groups):
        params = group["params"]
        alike: dict[Cut, list[int]] = {}
        for place, parameter in enumerate(params):
            alike.setdefault(cut_of(parameter), []).append(place)
        for cut, all_places in alike.items():
            given = [i for i in all_places if id(params[i]) in position_of]
            others = [i for i in all_places if id(params[i]) in own]
            positions = [position_of[id(params[i])] for i in given]
            for places, shown in ((given, positions), (others, None)):
                if places:
                    stepped = [params[i] for i in places]
                    has_all = shown == list(range(len(position_of)))
                    own_names = [names[i] for i in places]
                    entries = [entry_of.get(id(parameter)) for parameter in stepped]
                    yield Batch(index, stepped, places, shown, has_all, cut, own_names, entries)


def _names(optimizer: Optimizer, inputs: Any) -> Iterator[list[str]]:
    """Yield the names of the parameters of each group, on which their random bits depend."""
    groups = [(group["params"], group.get("param_names") or ()) for group in optimizer.param_groups]
    in_models = iter(inputs.names_of([each for params, _ in groups for each in params]))
    bare = bare_names((0, name) for _, own in groups for name in own)
    for index, (params, own) in enumerate(groups):
        others = [f"0.{bare[0, name]}" for name in own[: len(params)]]
        others += [f"{index}.{i}" for i in range(len(others), len(params))]
        yield [name or other for other, name in zip(others, in_models, strict=False)]
