"""The check that a model still has the parameters that an optimizer trains, in the same dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.casting.sharded import is_of_fsdp1
from amp.errors import AmpRuntimeError, first_few, warn
from amp.profiles.levels import levels_with


class ParameterCheck:
    """The model's parameters in the groups of one optimizer, as they were when they were added.

    Args:
        optimizer: the optimizer.
        named_parameters: returns the parameters that the models have now, by the number of the model
            and the name in it.
    """

    def __init__(
        self, optimizer: Any, named_parameters: Callable[[], Mapping[tuple[int, str], Tensor]]
    ) -> None:
        self._optimizer = optimizer
        self._named_parameters = named_parameters
        self._by_name: dict[tuple[int, str], Tensor] = {}
        self._dtypes: dict[int, tuple[Tensor, torch.dtype]] = {}
        """By the id of the parameter, which is kept so that no other tensor gets its id."""

    def note_dtypes(self, parameters: Iterable[Tensor]) -> None:
        """Note the dtypes that parameters have now."""
        self._dtypes.update({id(p): (p, p.dtype) for p in parameters})

    def note_names(self, parameters: Iterable[Tensor]) -> None:
        """Note under which names the models have these parameters now."""
        ids = set(map(id, parameters))
        found = self._named_parameters().items()
        self._by_name |= {name: parameter for name, parameter in found if id(parameter) in ids}

    def names_of(self, parameters: Iterable[Tensor]) -> list[str | None]:
        """Return the name of each parameter in its model, or None if the models do not have it."""
        names: dict[int, str] = {}
        for (i, name), parameter in self._named_parameters().items():
            names.setdefault(id(parameter), f"{i}.{name}")
        return [names.get(id(parameter)) for parameter in parameters]

    def called(self, parameter: Tensor) -> str:
        """Return how to call a parameter in a message: by its name in quotes, or by its shape."""
        names = [name for (_, name), each in self._named_parameters().items() if each is parameter]
        return f"'{names[0]}'" if names else f"a parameter of shape {tuple(parameter.shape)}"

    def name(self, parameter: Tensor) -> str:
        """Return the name of a parameter, without quotes."""
        return self.called(parameter).strip("'")

    def dtypes(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Raise AmpRuntimeError if one of some parameters, or of all, was cast after `initialize`."""
        ids = self._dtypes if parameters is None else map(id, parameters)
        for parameter, dtype in filter(None, map(self._dtypes.get, ids)):
            if parameter.dtype is not dtype:
                raise AmpRuntimeError(
                    f"{self.called(parameter)} is {parameter.dtype} and was {dtype} at "
                    "amp.initialize: the model was cast after it, by .half(), .float() or .to(), or "
                    ".data was given such values, as torch.nn.utils.vector_to_parameters does. Leave "
                    "out the cast, or do it before; write FP32 values to amp.master_params(optimizer)"
                )

    def wrappers(self, parameters: Iterable[Tensor]) -> None:
        """Raise AmpRuntimeError if FullyShardedDataParallel holds parameters that have masters."""
        if any(map(is_of_fsdp1, parameters)):
            raise AmpRuntimeError(
                "the model was wrapped in FullyShardedDataParallel after amp.initialize, and its flat "
                "shards cannot have masters. Before amp.initialize cut the model by "
                "torch.distributed.fsdp.fully_shard instead, or take "
                f"opt_level={levels_with('patch_torch_functions')}"
            )

    def hooks(self, masters: Iterable[Tensor]) -> None:
        """Warn if a master has a hook, which no backward runs."""
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if any(getattr(master, name) for master in masters for name in hooks):
            warn(
                "a hook was registered on what optimizer.param_groups holds or amp.master_params "
                "yields, which are FP32 masters: no backward reaches them. Register it on the model's "
                "parameter"
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

    def names(self) -> None:
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
