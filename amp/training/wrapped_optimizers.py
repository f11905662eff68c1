"""Wrappers around optimizers: which one steps, and which methods a wrapper adds.

A wrapper, such as SAM, Lookahead, apex's LARC or Accelerate's, holds the optimizer that steps, and
shares its groups. It may be a `torch.optim.Optimizer` itself.
"""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

import torch

from amp.kernels import host_lists

ATTACHED = "_amp_attached"
"""The attribute of an optimizer in a session that has its `AttachedOptimizer`."""


class Optimizer(Protocol):
    """The attributes of an optimizer, or of a wrapper around one, for type checkers; `is_optimizer`."""

    @property
    def param_groups(self) -> list[Any]:
        """The groups of parameters, each with its options."""
        ...

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each parameter."""
        ...

    @property
    def step(self) -> Callable[..., Any]:
        """The method that updates the parameters."""
        ...

    @property
    def zero_grad(self) -> Callable[..., Any]:
        """The method that clears the gradients."""
        ...


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer, or a wrapper that looks like one, such as apex's LARC."""
    return isinstance(value, torch.optim.Optimizer) or (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and callable(getattr(value, "zero_grad", None))
        and isinstance(getattr(value, "param_groups", None), list)
        and isinstance(getattr(value, "state", None), dict)
    )


def chain_of(optimizer: Any) -> list[Any]:
    """Return an optimizer and what it wraps, outermost first; the last one steps."""
    chain = [optimizer]
    while (inner := _held_by(chain[-1])) is not None and all(inner is not each for each in chain):
        chain.append(inner)
    return chain


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps: `optimizer` itself, or what it wraps."""
    return chain_of(optimizer)[-1]


def _held_by(optimizer: Any) -> Any:
    """Return the optimizer that another one holds and shares its groups with, or None."""
    held = getattr(optimizer, "__dict__", {}).values()
    inner = (x for x in held if x is not optimizer and is_optimizer(x) and _share_groups(optimizer, x))
    return next(inner, None)


def _share_groups(a: Any, b: Any) -> bool:
    ours, theirs = getattr(a, "param_groups", None), b.param_groups
    has_groups = isinstance(ours, list) and bool(ours)
    return ours is theirs or (has_groups and host_lists.lists.are_same(ours, theirs))


def own_methods(optimizer: Any) -> Iterator[str]:
    """Yield the names of an optimizer's public methods that `torch.optim.Optimizer` does not have."""
    for cls in type(optimizer).__mro__:
        for name, value in vars(cls).items():
            is_method = isinstance(value, FunctionType) and not name.startswith("_")
            if is_method and not hasattr(torch.optim.Optimizer, name):
                yield name


def inherits(optimizer: Any, name: str) -> bool:
    """Whether a method is that of `torch.optim.Optimizer`, which ignores a wrapped optimizer."""
    return getattr(type(optimizer), name, None) is getattr(torch.optim.Optimizer, name)
