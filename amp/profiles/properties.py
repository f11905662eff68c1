"""What a profile and the overrides on top of it resolve to: one frozen value, checked as a whole.

Because the whole is checked, and not one field after another as in apex, no legal combination
depends on the order in which its parts were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args

import torch

from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpAssertionError, AmpRuntimeError, AmpValueError, did_you_mean
from amp.profiles.keys import (
    find_key,
    is_false,
    key,
    keys_of,
    optional,
    parse_bool,
    parse_castable,
    parse_positive,
)
from amp.profiles.loss_scaling import LossScaling, parse_loss_scale
from amp.profiles.rules import Rule, parse_rules

LeanMasters = Literal["split16", "kahan"]
"""How FP32 masters may be kept in 16 bits beside the weights; see `amp.kernels.split`."""


def _parse_model_type(name: str, value: object) -> torch.dtype | Literal[False] | None:
    return False if is_false(value) else optional(parse_castable)(name, value)


def _parse_patching(name: str, value: object) -> bool:
    return bool(optional(parse_bool)(name, value))


def _parse_keep_batchnorm(name: str, value: object) -> Any:
    try:
        return optional(parse_bool)(name, value)
    except AmpValueError as error:
        raise AmpAssertionError(f"{error}, None") from None  # as apex did


def _parse_masters(name: str, value: object) -> Any:
    word = value.strip().lower() if isinstance(value, str) else value
    if word == "float32" or word in get_args(LeanMasters):
        return word == "float32" or word
    try:
        return optional(parse_bool)(name, value)
    except AmpValueError:
        raise AmpValueError(
            f"{name}={value!r} is not one of True, False, float32, split16, kahan"
            f"{did_you_mean(str(value), ('float32', *get_args(LeanMasters)))}"
        ) from None


def _parse_state_dtype(name: str, value: object) -> torch.dtype | None:
    dtype = optional(parse_castable)(name, value)
    if dtype not in (None, torch.bfloat16, torch.float32):
        raise AmpValueError(
            f"{name}={value!r} is not one of bfloat16, and float32 or None for the dtype of what "
            "the optimizer steps"
        )
    return torch.bfloat16 if dtype is torch.bfloat16 else None


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Everything that an opt level decides, as `amp.load_profile` shows it; see docs/profiles.md.

    Attributes:
        opt_level: the level this derives from, such as `"O2"`, or None for a profile of its own.
        brief: one line that says what it is.
        enabled: False makes `initialize` and `scale_loss` do nothing.
    """

    opt_level: str | None = None
    brief: str = ""
    enabled: bool = True
    cast_model_type: torch.dtype | Literal[False] | None = key(
        None,
        _parse_model_type,
        "dtype of weights and inputs; false casts neither",
        values="float16, bfloat16, float32, none, false",
    )
    patch_torch_functions: bool = key(
        False,
        _parse_patching,
        "functions cast their arguments; O1 and O4 only",
        values="true, false",
    )
    patch_torch_functions_type: torch.dtype | None = key(
        None,
        optional(parse_castable),
        "the dtype of the ops that gain from half precision; each level has its own",
        values="float16, bfloat16",
    )
    keep_batchnorm_fp32: bool | None = key(
        None,
        _parse_keep_batchnorm,
        "norms with running statistics stay FP32 in a cast model",
        values="true, false, none",
    )
    keep_norm_fp32: bool | None = key(
        None,
        optional(parse_bool),
        "all norms do: Layer-, Group-, RMS- and InstanceNorm too",
        values="true, false, none",
    )
    master_weights: bool | LeanMasters | None = key(
        None,
        _parse_masters,
        "the optimizer steps FP32 copies of 16-bit weights; [split16 and kahan](optimizers.md) keep "
        "them in 16 bits",
        values="true or float32, split16, kahan, false, none",
    )
    state_dtype: torch.dtype | None = key(
        None,
        _parse_state_dtype,
        "the moments of a [fused optimizer](optimizers.md), bfloat16 with stochastic rounding",
        values="bfloat16, float32",
    )
    loss_scaling: LossScaling = key(
        LossScaling(mode="static", init=1.0),
        parse_loss_scale,
        "see below",
        values="dynamic, a number, a mapping",
        name="loss_scale",
    )
    cast_model_outputs: torch.dtype | None = key(
        None,
        optional(parse_castable),
        "dtype of the model's outputs; none is FP32 where the model is cast",
        values="a dtype, none",
    )
    rules: tuple[Rule, ...] = key(
        (),
        lambda name, value: parse_rules(value),
        "[precision of single ops and modules](ops.md#rules-of-your-own)",
        values="a list of `{op: name, cast: dtype}`, `{module: name, cast: dtype}`",
    )

    @property
    def loss_scale(self) -> float | Literal["dynamic"]:
        """The loss scale as apex wrote it: `"dynamic"` or a number."""
        return "dynamic" if self.loss_scaling.dynamic else self.loss_scaling.init

    @property
    def casts_model(self) -> bool:
        """Whether the model's weights are cast to a dtype."""
        return isinstance(self.cast_model_type, torch.dtype)

    def describe(self) -> str:
        """Return one line per property, for people."""
        rows: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        del rows["brief"], rows["loss_scaling"], rows["rules"]
        rows["loss_scale"] = self.loss_scale
        if self.rules:
            rows["rules"] = "; ".join(map(str, self.rules))
        return "\n".join(
            f"{name:26} : {dtype_name(value) if isinstance(value, torch.dtype) else value}"
            for name, value in rows.items()
        )


PROPERTY_KEYS = keys_of(Properties)
"""What a YAML profile may set, besides `extends` and `brief`, by name."""

_BOUNDS = {"min_loss_scale": "min", "max_loss_scale": "max"}
OVERRIDE_KEYS = ("enabled", *PROPERTY_KEYS, *_BOUNDS)


class Overrides(TypedDict, total=False):
    """What a caller may set on top of a profile, for type checkers; None stands for "not given"."""

    enabled: bool
    cast_model_type: torch.dtype | str | Literal[False] | None
    patch_torch_functions: bool | str | None
    patch_torch_functions_type: torch.dtype | str | None
    keep_batchnorm_fp32: bool | str | None
    keep_norm_fp32: bool | str | None
    master_weights: bool | str | None
    state_dtype: torch.dtype | str | None
    loss_scale: float | str | Mapping[str, Any] | LossScaling | None
    cast_model_outputs: torch.dtype | str | None
    rules: Sequence[Mapping[str, Any] | Rule] | None
    min_loss_scale: float | None
    max_loss_scale: float | None


def override(properties: Properties, overrides: Mapping[str, Any]) -> Properties:
    """Return `properties` with every override that is not None applied, checked as a whole.

    `rules` come on top of the profile's; `min_loss_scale` and `max_loss_scale` bound whatever loss
    scaling results.

    Raises:
        AmpTypeError: there is no such override.
        AmpRuntimeError: the result does not fit together.
        AmpValueError, AmpTypeError, AmpAssertionError: a value is not one that its key takes.
    """
    changes: dict[str, Any] = {}
    bounds: dict[str, Any] = {}
    for name, value in overrides.items():
        if name in _BOUNDS and value is not None:
            bounds[_BOUNDS[name]] = parse_positive(name, value)
        elif name == "enabled" and value is not None:
            changes[name] = parse_bool(name, value)
        elif name not in ("enabled", *_BOUNDS):
            found = find_key(name, PROPERTY_KEYS, "there is no property", ("enabled", *_BOUNDS))
            if value is not None:
                changes[found.field] = found.parse(name, value)
    if "rules" in changes:
        changes["rules"] = properties.rules + changes["rules"]
    if bounds:
        scaling = changes.get("loss_scaling", properties.loss_scaling)
        changes["loss_scaling"] = replace(scaling, **bounds)
    return changed(properties, changes)


def changed(base: Properties, changes: Mapping[str, Any]) -> Properties:
    """Return properties with some fields changed.

    Raises:
        AmpRuntimeError: the result does not fit together.
    """
    properties = replace(base, **changes)
    own = base.patch_torch_functions_type if base.opt_level else properties.patch_torch_functions_type
    by_op = own is not None if base.opt_level else properties.patch_torch_functions
    where = properties.opt_level or "a profile with patch_torch_functions"
    for name, value, remedy in _by_op_misfits(properties, own) if by_op else _misfits(properties):
        shown = dtype_name(value) if isinstance(value, torch.dtype) else value
        error = AmpRuntimeError(f"{name}={shown} does not fit {where}: {remedy}")
        error.property_name = name
        raise error
    return properties


Misfit = tuple[str, object, str]
"""A property, its value that does not fit the others, and what to do."""


def _by_op_misfits(p: Properties, own: torch.dtype | None) -> Iterator[Misfit]:
    """Yield what does not fit a profile that casts functions, to `own`."""
    dtype = p.patch_torch_functions_type
    if p.cast_model_type not in (None, False, torch.float32):
        take = "Take opt_level='O2' (float16) or 'O5' (bfloat16) instead."
        yield "cast_model_type", p.cast_model_type, f"weights stay FP32 there. {take}"
    for name, remedy in (
        ("keep_batchnorm_fp32", "batch norm is FP32 there already. Leave it out."),
        ("keep_norm_fp32", "norms are FP32 there already. Leave it out."),
        (
            "master_weights",
            "the weights are FP32 themselves there. Leave it out, or take opt_level='O2' or 'O5'.",
        ),
    ):
        if getattr(p, name) is not None:
            yield name, getattr(p, name), remedy
    if dtype not in (None, own):
        yield "patch_torch_functions_type", dtype, "take O1 for float16 and O4 for bfloat16."
    if p.patch_torch_functions and dtype not in LOW_PRECISION:
        yield "patch_torch_functions_type", dtype, "say float16 or bfloat16."
    for rule in p.rules:
        if rule.kind == "module" and rule.dtype is not torch.float32:
            remedy = "weights are FP32 there, so modules can be cast to float32 only; ops to anything."
            yield "rules", rule, remedy


def _misfits(p: Properties) -> Iterator[Misfit]:
    """Yield what does not fit a profile that leaves functions alone."""
    remedy = "only O1 and O4 cast functions. Take opt_level='O1' (float16) or 'O4' (bfloat16) instead."
    if p.patch_torch_functions:
        yield "patch_torch_functions", True, remedy
    if p.patch_torch_functions_type is not None:
        yield "patch_torch_functions_type", p.patch_torch_functions_type, remedy
    for rule in p.rules:
        if rule.kind == "op":
            yield "rules", rule, remedy
        elif rule.dtype is None:
            dtypes = "Say float32, float16 or bfloat16."
            yield "rules", rule, f"a module's weights have to have some dtype. {dtypes}"
