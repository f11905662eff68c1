"""What a profile and the overrides on top of it resolve to: one frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from amp.errors import AmpAssertionError, AmpTypeError, AmpValueError, brief
from amp.profiles.fp8_recipe import Fp8Recipe, parse_fp8
from amp.profiles.keys import Key, OneOf, key, keys_of, parse_globs, shown
from amp.profiles.loss_scaling import SCALING_KEYS, LossScaling, parse_loss_scale
from amp.profiles.rules import Rule, parse_rules

LeanMasters = Literal["split16", "kahan"]
"""How FP32 masters may be kept in 16 bits beside the weights; see `amp.kernels.split`."""

CastInputs = bool | tuple[str, ...]
"""Whether a cast model casts what it is given; names are those of what it leaves alone."""


def _parse_cast_inputs(name: str, value: object) -> CastInputs:
    if isinstance(value, bool):
        return value
    names = value.get("except") if isinstance(value, Mapping) and len(value) == 1 else value
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(x, str) and x.strip() for x in names):
        raise AmpTypeError(
            f"{name}={brief(value)} is not true, false, or {{except: [...]}} with names of arguments "
            "and modules"
        )
    return parse_globs(name, names) or True


FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32


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
        OneOf(FLOAT16, BFLOAT16, FLOAT32, None, False),
        "dtype of weights and inputs; false casts neither",
    )
    patch_torch_functions: bool = key(
        False,
        OneOf(True, False, None, means={None: False}),
        "torch's functions cast their arguments, as at O1 and O4",
    )
    patch_torch_functions_type: torch.dtype | None = key(
        None,
        OneOf(FLOAT16, BFLOAT16, FLOAT32, None),
        "the dtype of the ops that gain from half precision; each level has its own",
        values="float16, bfloat16",
    )
    keep_batchnorm_fp32: bool | None = key(
        None,
        OneOf(True, False, None, error=AmpAssertionError),  # as apex did
        "norms with running statistics stay FP32 in a cast model",
    )
    keep_norm_fp32: bool | None = key(
        None,
        OneOf(True, False, None),
        "all norms do: LayerNorm, GroupNorm, RMSNorm and InstanceNorm too",
    )
    master_weights: bool | LeanMasters | None = key(
        None,
        OneOf(
            True, FLOAT32, "split16", "kahan", False, None, means={FLOAT32: True}, error=AmpValueError
        ),
        "the optimizer steps FP32 copies of 16-bit weights; [split16 and kahan](optimizers.md) keep "
        "them in 16 bits",
    )
    state_dtype: torch.dtype | None = key(
        None,
        OneOf(BFLOAT16, FLOAT32, None, means={FLOAT32: None}),
        "the moments of a [fused optimizer](optimizers.md), bfloat16 with stochastic rounding",
    )
    reduce_dtype: torch.dtype | None = key(
        None,
        OneOf(FLOAT16, BFLOAT16, FLOAT32, None),
        "dtype in which [FSDP2](distributed.md) reduces gradients of a cast model; none is FP32",
    )
    loss_scaling: LossScaling = key(
        LossScaling(mode="static", init=1.0),
        parse_loss_scale,
        "see [below](#the-loss-scale)",
        values="dynamic, a number, a mapping",
        name="loss_scale",
    )
    protect_buffers: bool = key(
        True,
        OneOf(True, False),
        "running statistics that an overflow has made inf or NaN get their last finite values back, "
        "where gradients are checked",
    )
    diagnose: Literal["on_overflow"] | None = key(
        None,
        OneOf("on_overflow", None),
        "a step after a streak of overflows is [watched](diagnosis.md), and what was wrong is logged",
    )
    fp8: Fp8Recipe | None = key(
        None,
        parse_fp8,
        "linear layers run in [FP8](fp8.md), on top of a half-precision level",
        values="a recipe's name, a mapping, none",
    )
    cast_model_inputs: CastInputs = key(
        True,
        _parse_cast_inputs,
        "a cast model casts floating inputs; `{except: [positions, rope.*]}` leaves arguments and "
        "modules of these names alone",
        values="true, false, a mapping",
    )
    cast_model_outputs: torch.dtype | None = key(
        None,
        OneOf(FLOAT16, BFLOAT16, FLOAT32, None),
        "dtype of the model's outputs; none is FP32 where the model is cast",
    )
    rules: tuple[Rule, ...] = key(
        (),
        parse_rules,
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
        return "\n".join(f"{name:26} : {shown(value)}" for name, value in rows.items())


PROPERTY_KEYS = keys_of(Properties)
"""What a YAML profile may set, besides `extends` and `brief`, by name."""

SCALE_BOUNDS = {"min_loss_scale": "min", "max_loss_scale": "max"}
"""The overrides that change one field of whatever `LossScaling` results."""

OVERRIDE_KEYS = {
    "enabled": Key(OneOf(True, False), "False does nothing", name="enabled", field="enabled"),
    **PROPERTY_KEYS,
    **{name: replace(SCALING_KEYS[key], name=name, field=name) for name, key in SCALE_BOUNDS.items()},
}
"""What a caller may set on top of a profile, by name."""
