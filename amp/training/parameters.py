"""The parameters that an optimizer trains: what its groups hold, and their names in the models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from amp.distributed import groups_of_meshes
from amp.errors import AmpRuntimeError, first_few, warn
from amp.kernels.tensor_lists import TensorList, are_plain, local_shards
from amp.masters.agreement import Pairs, called_by_shape
from amp.masters.master_weights import MasterWeights
from amp.names import bare_names


class Parameters:
    """The parameters of an optimizer's groups at one time, each once, in their order.

    Args:
        in_groups: a list for each group.
        named: knows the session's masters, and how to call a parameter in a message.

    Attributes:
        in_groups: the parameters of each group.
        dtypes: of `unmastered`.
        stepped: all of them: masters, and parameters without a master.
        pairs: the pairs of the masters.
        masters, models: the two sides of the pairs.
        unmastered: the parameters without a master.
        unmastered_list: the same as a `TensorList`, of local shards.
        of_model: the parameters of the model, with a master and without.
        are_plain: whether none is a DTensor, or of another class with its values elsewhere.
        process_groups: the process groups whose ranks hold parts or copies of any of `stepped`.
    """

    def __init__(self, in_groups: Sequence[Sequence[Tensor]], named: ParameterNames) -> None:
        self.in_groups = list(map(list, in_groups))
        self.stepped = list(dict.fromkeys(chain.from_iterable(in_groups)))
        both = [(each, named.masters.pair(each)) for each in self.stepped]
        held = [pair for each, pair in both if pair is not None and pair.master is each]
        self.pairs = Pairs(held, named.called)
        self.masters, self.models = self.pairs.masters, self.pairs.models
        self.unmastered = [each for each, pair in both if pair is None or pair.master is not each]
        self.of_model = [*self.models, *self.unmastered]
        self.dtypes = [each.dtype for each in self.unmastered]
        self.process_groups = groups_of_meshes(self.stepped)
        self.are_plain = self.pairs.are_plain and are_plain(self.unmastered)
        self.unmastered_list = TensorList(local_shards(self.unmastered))

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """The ids of all parameters, masters and the model's."""
        return frozenset(map(id, (*self.stepped, *self.models)))


class ParameterNames:
    """The model's parameters in the groups of one optimizer, as they were when they were added.

    Args:
        optimizer: the optimizer.
        owner: the session. Its `named_parameters` returns the parameters that the models have now, by
            the number of the model and the name in it.

    Attributes:
        masters: those of the session.
    """

    def __init__(self, optimizer: Any, owner: Any) -> None:
        self._optimizer = optimizer
        self.masters: MasterWeights = owner.masters
        self._named_parameters: Callable[[], dict[tuple[int, str], Tensor]] = owner.named_parameters
        self._by_name: dict[tuple[int, str], Tensor] = {}
        self._has_warned_of_forward = False

    def note_names(self, parameters: Iterable[Tensor]) -> None:
        """Note under which names the models have these parameters now."""
        ids = set(map(id, parameters))
        found = self._named_parameters().items()
        self._by_name |= {name: parameter for name, parameter in found if id(parameter) in ids}

    def keys_of(self, parameters: Iterable[Tensor]) -> list[tuple[int, str] | None]:
        """Return the number of each parameter's model and its name there, None for unknown ones."""
        key_of = {id(parameter): key for key, parameter in reversed(self._named_parameters().items())}
        return [key_of.get(id(parameter)) for parameter in parameters]

    def bare_names_of(self, stepped: Iterable[Tensor]) -> list[str | None]:
        """Return what `keys_of` does, also of masters, as one text each without names of wrappers."""
        bare = bare_names(self._named_parameters())
        models = [model if (model := self.masters.model(p)) is not None else p for p in stepped]
        return [None if key is None else f"{key[0]}.{bare[key]}" for key in self.keys_of(models)]

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """Return each parameter's name, with the number of its model if there are several, or shape."""
        several = len({model for model, _ in self._named_parameters()}) > 1
        names = [key and f"model {key[0]}: " * several + key[1] for key in self.keys_of(parameters)]
        return [name or called_by_shape(x) for name, x in zip(names, parameters, strict=True)]

    def called(self, parameter: Tensor) -> str:
        """Return how to call a parameter in a message: by its name in quotes, or by its shape."""
        [key] = self.keys_of([parameter])
        return called_by_shape(parameter) if key is None else f"'{key[1]}'"

    def forward_has_missed_masters(self) -> None:
        """Warn, once, that masters have changed since the forward whose loss is about to be scaled."""
        if not self._has_warned_of_forward:
            self._has_warned_of_forward = True
            warn(
                "master weights were changed outside of optimizer.step, and the last forward did not "
                "see it, as in compiled code: it ran on the old weights. Change the model's parameters "
                "instead, under torch.no_grad(): masters follow them in the next step"
            )

    def add_hint(self, error: RuntimeError, models: Iterable[Tensor]) -> None:
        """Say what to do about an error of torch's in a block or a step, where there are masters."""
        models, text = list(models), str(error)
        if "hook" in text and any(model._backward_hooks for model in models):
            error.add_note(
                "amp: a hook of a 16-bit parameter is given a 16-bit gradient, and must return one of "
                "that dtype: return (grad * mask).to(grad.dtype)"
            )
        if "not have been used in the graph" in text and models:
            error.add_note(
                "amp: the graph has the model's parameters, and not the FP32 masters that "
                "optimizer.param_groups holds and amp.master_params yields. Differentiate for "
                "model.parameters(), or choose a level without masters, such as 'O1' or 'O4'"
            )

    def check_not_replaced(self) -> None:
        """Raise AmpRuntimeError if a model has replaced one of these by a parameter with a gradient.

        `fully_shard` and `parallelize_module` replace parameters. So does FSDP2 during a forward, but
        by parameters without gradients.
        """
        now = self._named_parameters()
        lost = [
            key[1]
            for key, parameter in self._by_name.items()
            if (new := now.get(key)) is not None and new is not parameter and new.grad is not None
        ]
        if lost:
            raise AmpRuntimeError(
                f"this {type(self._optimizer).__name__} would not train {first_few(lost, repr, 3)}: "
                "the model has other parameters of these names since amp.initialize, as after "
                "fully_shard, parallelize_module, to_empty, and where a layer was replaced or deleted. "
                "Wrap the model first, or change its layers, then make the optimizer of its "
                "parameters, then call amp.initialize"
            )
