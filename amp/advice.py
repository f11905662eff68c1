"""What `initialize` says of a set-up that is allowed, and that does not do what its author wants."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from amp.dtypes import LOW_PRECISION
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule


def advise_on_float64(models: Sequence[nn.Module], properties: Properties) -> Iterator[str]:
    """Yield a message for each model that is to be cast, and would stay float64 as a whole."""
    casts = properties.patch_torch_functions or properties.cast_model_type in LOW_PRECISION
    for model in models if casts else ():
        dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
        if dtypes == {torch.float64}:
            by_default = torch.get_default_dtype() is torch.float64
            yield (
                f"all parameters of this {type(model).__name__} are float64"
                f"{', the default dtype' if by_default else ''}. No level casts that: it trains in "
                "float64. For mixed precision call model.float() before amp.initialize"
            )


def advise_on_rules(rules: Sequence[Rule], models: Sequence[nn.Module]) -> Iterator[str]:
    """Yield a message for each rule for modules that is for none of the models' modules."""
    for rule in rules if models else ():
        if rule.kind == "module" and not any(
            rule.matches(name, module) for model in models for name, module in model.named_modules()
        ):
            yield (
                f"{rule.source}: no module of the model is named '{rule.pattern}' or of a class of "
                "that name; the rule does nothing"
            )


def advise_on_eps(optimizer: Any) -> Iterator[str]:
    """Yield a message if an Adam that steps 16-bit weights themselves would divide by zero."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        dtypes = {parameter.dtype for parameter in group["params"]} & LOW_PRECISION
        for dtype in dtypes if isinstance(eps, float) and eps > 0 else ():
            if torch.tensor(eps, dtype=dtype, device="cpu") == 0:
                yield (
                    f"{type(optimizer).__name__} has eps={eps:g}, which is 0 in {dtype}: its steps may "
                    "divide by zero. Give it eps=1e-4, or use master_weights=True."
                )
