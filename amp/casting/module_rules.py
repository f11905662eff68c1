"""How modules that a user's rules match run in FP32 at O1 and O4.

A matched module's class is replaced by a subclass of the same name, whose `forward`
casts its inputs up and disables casts. Hooks could not disable them: an interrupt calls no hooks, and
Dynamo traces a `with` statement, but not a region that one hook opens and another closes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

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
from amp.profiles.rules import Rule


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
