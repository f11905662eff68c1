"""The check that a model still has the parameters which an optimizer is to train."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from amp.errors import AmpRuntimeError, first_few


class ParameterCheck:
    """The model's parameters in the groups of one optimizer, by their names in the model.

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
        self._known: dict[tuple[int, str], Tensor] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note under which names the models have these parameters now."""
        ids = set(map(id, parameters))
        found = self._named_parameters().items()
        self._known |= {name: parameter for name, parameter in found if id(parameter) in ids}

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter, in quotes, if a model has it."""
        names = [name for (_, name), each in self._named_parameters().items() if each is parameter]
        return f"'{names[0]}'" if names else None

    def check(self) -> None:
        """Raise AmpRuntimeError if a model has other parameters, with gradients, in place of these.

        `fully_shard` and `parallelize_module` exchange them. So does FSDP2 for the time of a forward,
        but those that it shows then have no gradients.
        """
        now = self._named_parameters()
        lost = [
            key[1]
            for key, parameter in self._known.items()
            if (new := now.get(key)) is not None and new is not parameter and new.grad is not None
        ]
        if lost:
            raise AmpRuntimeError(
                f"this {type(self._optimizer).__name__} would not train {first_few(lost, repr, 3)}: "
                "the model has other parameters of these names since amp.initialize, as after "
                "fully_shard and parallelize_module. Wrap the model first, then make the optimizer of "
                "its parameters, then call amp.initialize"
            )
