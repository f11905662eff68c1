"""Advice about a finding, in the terms of the script: those of its level, or of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from amp.casting.policy import load_policy
from amp.diagnosis.findings import rule_for, short_path, without_number
from amp.diagnosis.places import Place
from amp.dtypes import dtype_name
from amp.profiles.properties import Properties

SMALLER = "Make its inputs smaller, as by subtracting their maximum: FP32 does not hold it either."
ANOTHER_WAY = (
    "Compute it in another way, as by logsumexp, logsigmoid or expm1, by a sum of logarithms in place\n"
    "of a product, or by a difference that is squared instead of squares that are subtracted.\n"
    "FP32 loses it too. A constant has to be larger, as in clamp(1e-6, 1 - 1e-6). Or take float64."
)
ITSELF = (
    "Take away from its inputs what they have in common, or compute it in float64; torch.cdist has\n"
    "compute_mode='donot_use_mm_for_euclid_dist'."
)
IN_ONE_CALL = {
    ("_softmax", "log"): "torch.log_softmax",
    ("sigmoid", "log"): "F.logsigmoid or F.binary_cross_entropy_with_logits",
    ("exp", "log"): "torch.logsumexp or F.softplus",
    ("exp", "sub"): "torch.expm1",
    ("add", "log"): "torch.log1p",
    ("_linalg_det", "log"): "torch.linalg.slogdet",
}
"""What computes two ops in one call, of which the first loses what the second needs."""
EPS_INSIDE = {
    "sqrt": "torch.sqrt(x + 1e-6)",
    "rsqrt": "torch.rsqrt(x + 1e-6)",
    "pow": "(x + 1e-6).pow(exponent)",
    "log": "torch.log(x + 1e-6)",
    "div": "x / (y + 1e-6)",
    "reciprocal": "1 / (x + 1e-6)",
    "acos": "torch.acos(x.clamp(-0.999, 0.999))",
    "asin": "torch.asin(x.clamp(-0.999, 0.999))",
}
"""How to keep functions, and their derivatives, from where they are infinite."""
UNMASK = (
    "Do not mask whole rows, or set these rows to 0 afterwards; subtract the maximum before an\n"
    "exponential."
)
EARLIER = (
    "It was so before this step: look at how it was saved and loaded, and at the steps before, as by\n"
    "reamp doctor --at 1,2,3. Running statistics belong in float32: .half() and .bfloat16() cast them."
)
KEEP_AVERAGES = "Keep averages in float32: average.lerp_(weight.float(), 1 - decay)."
KEEP_WIDE = "Make these numbers in float32, as by dtype=torch.float32."
KEEP_MASTERS = (
    "Keep what training changes in float32: load the model in float32, and use torch.autocast; or\n"
    "amp.initialize(model, optimizer, opt_level='O5'), which keeps float32 masters."
)
WITH_MASTERS = (
    "Keep FP32 masters: master_weights: true, as at O2 and O5; where they are, write to those of\n"
    "amp.master_params(optimizer). What is no weight belongs in float32."
)


def keep_buffers(names: Iterable[str], has_amp: bool) -> str:
    """Return how to keep buffers, given by their names, in FP32: masters are for weights alone."""
    if not has_amp:
        return "Keep buffers in float32: leave out .bfloat16() and .half(), and use torch.autocast."
    names = list(names)
    rules = dict.fromkeys(filter(None, [rule_for(name.rpartition(".")[0]) for name in names]))
    what = "its module" if rules else "it"
    rules = rules or dict.fromkeys(rule_for(name, "tensor") for name in names)
    return f"Keep {what} in FP32, since masters are of weights alone:\nrules: [{', '.join(rules)}]"


def filled(dtype: torch.dtype) -> str:
    """Return how to mask without an -inf."""
    least = f"torch.finfo(torch.{dtype_name(dtype)}).min"
    return (
        "Give a mask of bools, and fill in the least number of the format in the place of -inf, as by\n"
        f"scores.masked_fill(mask, {least}): tried in FP64, the result is finite."
    )


def with_range(properties: Properties | None) -> str:
    """Return the level that computes in bfloat16 what the level in force computes in float16, or ''."""
    if properties is None or not properties.enabled:
        return ""
    if properties.patch_torch_functions:
        return "O4" if properties.patch_torch_functions_type is torch.float16 else ""
    return "O5" if properties.cast_model_type is torch.float16 else ""


def keep_wide(
    place: Place,
    properties: Properties | None,
    overflowed: torch.dtype | None = None,
    until: Place | None = None,
) -> str:
    """Return how to compute in FP32 what a place computes.

    Args:
        place: where it is computed.
        properties: those of the session, or None for a script without one.
        overflowed: the dtype that a number was too large for, if that is the cause.
        until: where digits are needed that were lost, if that is the cause.
    """
    at = f" at {short_path(place.file)}:{place.line}" if place.file else ""
    line = f"x.float(){at}, then .to(x.dtype) where the numbers fit"
    if until is not None:
        stays = f"line {until.line}" if until.file else "what needs its digits"
        line = f"x.float(){at}, and keep float32 until after {stays}"
    is_cast = place.op.rpartition(".")[2] in ("to", "float", "half", "bfloat16", "type")
    category = _category(place.op)
    is_cast_back = category in ("native", "half", "recurrent")
    has_range = overflowed is torch.float16
    if properties is None:
        either = ", or train in bfloat16, which has the range of float32" if has_range else ""
        level, name = "O4" if has_range else "O1", without_number(place.module)
        by_rule = f"\nWith amp: rules=[{{'module': '{name}', 'cast': 'float32'}}]" if name else ""
        by_level = f"\nWith amp: opt_level='{level}' runs such functions in float32."
        if is_cast_back:
            line = f"where autocast is on, inside of torch.autocast(..., enabled=False), {line}"
        by_amp = by_level if category == "float" else by_rule
        return f"Compute it in float32: {line}{either}.{by_amp}"
    rule, level = rule_for(place.module), with_range(properties)
    keep = f"Keep it in FP32:\nrules: [{rule}]\nor compute" if rule else "Compute"
    if is_cast and has_range and level:
        return f"Make the numbers smaller, or take {level}: bfloat16 has the range of FP32."
    if is_cast_back and properties.patch_torch_functions:
        line = f"amp.disable_casts() and {line}"
    either = f"\nor take {level}: bfloat16 has the range of FP32" if has_range and level else ""
    return f"{keep} it with {line}{either}."


def _category(op: str) -> str | None:
    """Return how levels that cast by op, and torch.autocast, treat a function; None leaves it alone."""
    name = f"torch.{op}" if op.startswith("Tensor.") else op
    rules = load_policy(torch.float16).rules
    # A function that amp has patched is known by its last name.
    return next((x.category for x in rules if name in (x.op, x.op.rpartition(".")[2])), None)


def scale_loss(properties: Properties | None) -> str:
    """Return how to keep gradients in float16 from becoming 0."""
    if properties is None:
        return (
            "Scale the loss: torch.amp.GradScaler, with float32 weights and autocast; or use bfloat16."
        )
    level = with_range(properties)
    if properties.cast_model_type is torch.float16 and not properties.master_weights:
        return f"Take {level}, with FP32 masters: float16 weights stand still at any loss scale."
    if properties.loss_scaling.dynamic:
        return "Call backward() of the loss that `with amp.scale_loss(loss, optimizer)` gives."
    return "Take loss_scale='dynamic'" + (f", or {level}." if level else ".")


def after_unscaling(properties: Properties | None) -> str:
    """Return where gradients may be changed."""
    if properties is None:
        return "Change gradients after scaler.unscale_(optimizer), and before scaler.step(optimizer)."
    return (
        "Clip gradients after the scale_loss block, over amp.master_params(optimizer); with a "
        "GradScaler after scaler.unscale_(optimizer)."
    )
