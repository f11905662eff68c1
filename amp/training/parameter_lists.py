"""Lists of an optimizer's parameters, which stay the same objects while its groups do not change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, compress
from typing import Any

from torch import Tensor

from amp.distributed import groups_of_meshes
from amp.errors import AmpRuntimeError
from amp.kernels.tensor_lists import TensorList, are_all_same, are_plain, are_same, local
from amp.masters.whole import MasterWeights


class ParameterLists:
    """The parameters of an optimizer's groups at one time, each once.

    Attributes:
        in_groups: a list for each group, with the duplicates that torch allows.
        stepped: each parameter once, in the order of the groups: masters, and those without a master.
        masters, master_ids: the masters.
        models: the model's parameter of each master.
        unmastered: the parameters without a master.
        are_plain: whether none is a DTensor, or of another class with its values elsewhere.
        process_groups: the process groups whose ranks hold parts or copies of any of `stepped`.
        master_list, model_list, unmastered_list: the same as `TensorList`s, of local shards. `now`
            brings the first two up to date.
    """

    def __init__(self, in_groups: Sequence[Sequence[Tensor]], masters: MasterWeights) -> None:
        self._registry = masters
        self._part: ParameterLists | None = None
        self.in_groups = list(map(list, in_groups))
        self.stepped = list(dict.fromkeys(chain.from_iterable(in_groups)))
        models = [masters.model(parameter) for parameter in self.stepped]
        both = list(zip(self.stepped, models, strict=True))
        self.masters: list[Any] = [parameter for parameter, model in both if model is not None]
        self.models: list[Tensor] = [model for model in models if model is not None]
        self.unmastered = [parameter for parameter, model in both if model is None]
        self.process_groups = groups_of_meshes(self.stepped)
        self.are_plain = are_plain([*self.stepped, *self.models])
        self.master_list = _values_of(self.masters)
        self.model_list = _values_of(self.models)
        self.unmastered_list = _values_of(self.unmastered)
        self.master_ids = list(map(id, self.masters))

    @cached_property
    def ids(self) -> frozenset[int]:
        """The ids of all parameters, masters and the model's."""
        return frozenset(map(id, (*self.stepped, *self.models)))

    @classmethod
    def of(
        cls, optimizer: Any, masters: MasterWeights, known: ParameterLists | None = None
    ) -> ParameterLists:
        """Return the lists of an optimizer; `known` itself if its groups still hold the same.

        Raises:
            AmpRuntimeError: since `known` a parameter has taken the place of its master.
        """
        in_groups = [group["params"] for group in optimizer.param_groups]
        if known is not None and are_all_same(in_groups, known.in_groups):
            return known
        lists = cls(in_groups, masters)
        if known is not None and any(masters.master(each) is not None for each in lists.unmastered):
            raise AmpRuntimeError(
                f"the param_groups of this {type(optimizer).__name__} hold 16-bit parameters of the "
                "model, which have FP32 masters: they were assigned after amp.initialize. Assign what "
                "was there, or amp.master_params(optimizer); add others by add_param_group"
            )
        return lists

    def now(self) -> ParameterLists:
        """Update the addresses of the masters and the model's parameters, and return these lists."""
        self.master_list = self._now(self.master_list, self.masters)
        self.model_list = self._now(self.model_list, self.models)
        return self

    def _now(self, known: TensorList, tensors: Sequence[Tensor]) -> TensorList:
        if self.are_plain or are_same(list(map(local, tensors)), known.tensors):
            return known.now()
        return _values_of(tensors)  # a DTensor has another shard

    def only(self, chosen: Sequence[bool]) -> ParameterLists:
        """Return the lists of the chosen masters alone; for the same masters, the same object again."""
        if all(chosen):
            return self
        masters = list(compress(self.masters, chosen))
        if self._part is None or not are_same(masters, self._part.masters):
            self._part = ParameterLists([masters], self._registry)
        return self._part


def _values_of(tensors: Sequence[Tensor]) -> TensorList:
    return TensorList(tensors if are_plain(tensors) else list(map(local, tensors)))
