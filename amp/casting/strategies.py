"""The list of casting strategies, in the order in which they prepare a model."""

from amp.casting.by_model import CastModel
from amp.casting.by_op import CastOps
from amp.casting.fp8_strategy import Fp8Linears
from amp.casting.strategy import Strategy
from amp.profiles.properties import Properties

STRATEGIES: tuple[type[Strategy], ...] = (CastModel, CastOps, Fp8Linears)


def strategies_for(properties: Properties) -> list[Strategy]:
    """Return the strategies that a profile asks for."""
    return [strategy(properties) for strategy in STRATEGIES if strategy.is_asked_for(properties)]
