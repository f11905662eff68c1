"""What the groups of an optimizer hold: pairs of parameters and masters, and parameters without one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from amp.distributed import groups_of_meshes
from amp.errors import AmpRuntimeError
from amp.kernels.tensor_lists import TensorList, are_plain, local
from amp.masters.agreement import Pairs, cast_text
from amp.masters.master_weights import MasterWeights

_dtype = operator.attrgetter("dtype")


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
