"""Which modules and tensors a user's rules match, and how modules run in FP32 at O1 and O4.

At these levels a matched module's class is replaced by a subclass of the same name, whose `forward`
casts its inputs up and disables casts. Hooks could not disable them: an interrupt calls no hooks, and
Dynamo traces a `with` statement, but not a region that one hook opens and another closes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp.active import Caster
from amp.casting.containers import cast_tensors
from amp.casting.regions import disable_casts
from amp.casting.subclassing import (
    has_forward_of_its_own,
    has_forward_of_ours,
    subclass_of,
    swap_classes,
)
from amp.dtypes import LOW_PRECISION
from amp.errors import warn
from amp.own_tensors import own_tensors
from amp.profiles.rules import Rule


def ruled_modules(model: nn.Module, rules: Iterable[Rule]) -> dict[nn.Module, Rule]:
    """Return the modules that rules match, and all their submodules, each with its last rule."""
    ruled: dict[nn.Module, Rule] = {}
    for rule in rules:
        for name, module in model.named_modules():
            if rule.matches(name, module):
                ruled.update(dict.fromkeys(module.modules(), rule))
    return ruled


def tensors_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model, shared ones by each of their names."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield from ((prefix + name, tensor) for name, tensor in own_tensors(module))


def ruled_tensors(model: nn.Module, rules: Iterable[Rule]) -> dict[Tensor, Rule]:
    """Return the parameters and buffers that rules match, or whose modules they match, by last rule."""
    ruled: dict[Tensor, Rule] = {}
    named = list(tensors_in(model))
    for rule in rules:
        for name, module in model.named_modules() if rule.kind == "module" else ():
            if rule.matches(name, module):
                ruled.update(dict.fromkeys((*module.parameters(), *module.buffers()), rule))
        ruled.update((tensor, rule) for name, tensor in named if rule.matches_tensor(name))
    return ruled


def run_in_float32(model: nn.Module, rules: Sequence[Rule], caster: Caster) -> Callable[[], None]:
    """Run modules that the rules name in FP32 while the caster is live; return a function to undo it.

    Warns of a module whose `forward` is not its class's, because a rule has no effect there.
    """
    chosen = []
    for name, module in model.named_modules():
        rule = next((rule for rule in reversed(rules) if rule.matches(name, module)), None)
        if rule is None or rule.dtype is not torch.float32 or has_forward_of_ours(module):
            continue
        if has_forward_of_its_own(module):
            warn(
                f"{rule.source}: the rule for modules '{rule.pattern}' cannot hold for '{name}' "
                f"({type(module).__name__}), whose forward is scripted, lazy, or set on the module "
                "itself"
            )
        else:
            chosen.append(module)
    # Only after all warnings: a warning may raise.
    return swap_classes(chosen, functools.partial(_float32_class, caster=caster))


def _float32_class(base: Any, caster: Caster) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not caster.live:
            return base.forward(self, *args, **kwargs)
        args = cast_tensors(args, LOW_PRECISION, torch.float32)
        kwargs = cast_tensors(kwargs, LOW_PRECISION, torch.float32)
        with disable_casts():
            return base.forward(self, *args, **kwargs)

    return subclass_of(base, forward=forward)
