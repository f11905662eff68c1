"""`Properties`: the frozen object that a profile, with overrides on top, resolves to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from amp.errors import AmpAssertionError, AmpTypeError, AmpValueError, beginning_with, brief
from amp.other_names import hint_at_keyword
from amp.profiles.fp8_recipe import Fp8Recipe, parse_fp8
from amp.profiles.keys import Key, OneOf, key, keys_of, parse_globs, shown
from amp.profiles.loss_scaling import SCALING_KEYS, LossScaling, parse_loss_scale
from amp.profiles.rules import Rule, parse_rules

LeanMasters = Literal["split16", "split24", "kahan"]
"""The ways to keep FP32 masters in 8 or 16 extra bits for each weight; see `amp.kernels.split`."""

StateDtype = torch.dtype | Literal["packed16"]
"""How a fused optimizer keeps its moments: in bfloat16, or in 16 bits for a parameter."""

CastInputs = bool | tuple[str, ...]
"""Whether a cast model casts its inputs; or the names of the arguments and modules that it exempts."""


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


def excepting(arguments: Iterable[str], now: CastInputs = True) -> str:
    """Return, as YAML, `cast_model_inputs` that exempts more arguments than it does now."""
    names = dict.fromkeys([*(() if isinstance(now, bool) else now), *arguments])
    quoted = (name if name.replace(".", "_").isidentifier() else f"'{name}'" for name in names)
    return f"cast_model_inputs: {{except: [{', '.join(quoted)}]}}"


FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
_DTYPE = OneOf(FLOAT16, BFLOAT16, FLOAT32, None)
_MASTERS = OneOf(
    True,
    FLOAT32,
    "split16",
    "split24",
    "kahan",
    False,
    None,
    means={FLOAT32: True},
    error=AmpValueError,
)
STATE_DTYPES = BFLOAT16, "packed16"
"""The ways to keep moments in fewer bits."""
_STATE = OneOf(BFLOAT16, FLOAT32, "packed16", None, means={FLOAT32: None})


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Everything that an opt level decides, as `amp.load_profile` shows it; see docs/profiles.md.

    Attributes:
        opt_level: the level this derives from, such as `"O2"`, or None if it extends no level.
        brief: one line that says what it is.
        enabled: False makes `initialize` and `scale_loss` do nothing.
        cast_model_type: dtype of weights and inputs; false casts neither.
        patch_torch_functions: torch's functions cast their arguments, as at O1 and O4.
        patch_torch_functions_type: the dtype of the ops that gain from half precision; each level has
            its own.
        keep_batchnorm_fp32: norms with running statistics stay FP32 in a cast model.
        keep_norm_fp32: all norms stay FP32 in a cast model: LayerNorm, GroupNorm, RMSNorm and
            InstanceNorm too.
        buffer_dtype: float32 keeps all floating-point buffers of a cast model in FP32, and norms with
            running statistics; none casts buffers like weights.
        master_weights: the optimizer steps FP32 copies of 16-bit weights; split16 and kahan keep them
            in 16 bits, split24 in 8 bits with stochastic rounding.
        state_dtype: the moments of a fused optimizer, rounded stochastically: bfloat16, or packed16,
            16 bits for both moments of Adam together.
        reduce_dtype: dtype in which FSDP2 reduces gradients of a cast model; none is FP32.
        loss_scaling: see `LossScaling`.
        protect_buffers: where gradients are checked, running statistics that an overflow has made inf
            or NaN get their last finite values back.
        diagnose: after a streak of overflows amp diagnoses a step, and logs the cause.
        fp8: linear layers run in FP8 or FP4, on top of a half-precision level.
        cast_model_inputs: a cast model casts floating-point inputs; `{except: [positions, rope.*]}`
            exempts arguments and modules with these names.
        cast_model_outputs: dtype of the model's outputs; none is FP32 where the model is cast.
        rules: precision of single ops, modules, parameters and buffers.
    """

    opt_level: str | None = None
    brief: str = ""
    enabled: bool = True
    cast_model_type: torch.dtype | Literal[False] | None = key(
        None, OneOf(FLOAT16, BFLOAT16, FLOAT32, None, False)
    )
    patch_torch_functions: bool = key(False, OneOf(True, False, None, means={None: False}))
    patch_torch_functions_type: torch.dtype | None = key(None, _DTYPE)
    keep_batchnorm_fp32: bool | None = key(None, OneOf(True, False, None, error=AmpAssertionError))
    keep_norm_fp32: bool | None = key(None, OneOf(True, False, None))
    buffer_dtype: torch.dtype | None = key(None, OneOf(FLOAT32, None))
    master_weights: bool | LeanMasters | None = key(None, _MASTERS)
    state_dtype: StateDtype | None = key(None, _STATE)
    reduce_dtype: torch.dtype | None = key(None, _DTYPE)
    loss_scaling: LossScaling = key(
        LossScaling(mode="static", init=1.0), parse_loss_scale, name="loss_scale"
    )
    protect_buffers: bool = key(True, OneOf(True, False))
    diagnose: Literal["on_overflow"] | None = key(None, OneOf("on_overflow", None))
    fp8: Fp8Recipe | None = key(None, parse_fp8)
    cast_model_inputs: CastInputs = key(True, _parse_cast_inputs)
    cast_model_outputs: torch.dtype | None = key(None, _DTYPE)
    rules: tuple[Rule, ...] = key((), parse_rules)

    @property
    def loss_scale(self) -> float | Literal["dynamic"]:
        """The loss scale in apex's form: `"dynamic"` or a number."""
        return "dynamic" if self.loss_scaling.dynamic else self.loss_scaling.init

    @property
    def has_half(self) -> bool:
        """Whether weights are in 16 bits, or have FP32 masters."""
        return bool(self.master_weights) or self.cast_model_type in (FLOAT16, BFLOAT16)

    @property
    def casts_model(self) -> bool:
        """Whether the model's weights are cast to a dtype."""
        return isinstance(self.cast_model_type, torch.dtype)

    def describe(self) -> str:
        """Return a text with one line per property."""
        rows: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        del rows["brief"], rows["loss_scaling"], rows["rules"]
        rows["loss_scale"] = self.loss_scale
        if self.rules:
            rows["rules"] = "; ".join(map(str, self.rules))
        return "\n".join(f"{name:26} : {shown(value)}" for name, value in rows.items())


PROPERTY_KEYS = {**keys_of(Properties), "fp4": Key(parse_fp8, name="fp4", field="fp8")}
"""The keys of a YAML profile, besides `extends` and `brief`, by name."""

SCALE_BOUNDS = {"min_loss_scale": "min", "max_loss_scale": "max"}
"""The overrides that change one field of the resulting `LossScaling`."""

OVERRIDE_KEYS = {
    "enabled": Key(OneOf(True, False), name="enabled", field="enabled"),
    **PROPERTY_KEYS,
    **{name: replace(SCALING_KEYS[key], name=name, field=name) for name, key in SCALE_BOUNDS.items()},
}
"""The overrides that a caller may pass, by name."""


_OF_INITIALIZE = {"enabled", "num_losses", "verbosity", "process_group"}
"""Arguments that people write into a file."""


def hint_at(name: str, takes: Iterable[str]) -> str:
    """Return what a key or keyword that does not exist may mean, or an empty text."""
    if any(name in (key.name, *key.aliases) for key in SCALING_KEYS.values()):
        return f"; it belongs under loss_scale, which takes a mapping such as {{'{name}': ...}}"
    takes = list(takes)
    if name in _OF_INITIALIZE:
        return "; it is an argument of amp.initialize, and no property"
    hint = hint_at_keyword(name, takes, "extends" if "extends" in takes else "opt_level")
    if not hint and (meant := beginning_with(name, SCALING_KEYS)):
        hint = f"{meant.removesuffix('?')}, under loss_scale?"
    return hint


def check_once(key: Key, given: Mapping[str, Any]) -> None:
    """Raise AmpValueError if both keys of one property are given."""
    if key.field == "fp8" and given.get("fp8") is not None and given.get("fp4") is not None:
        raise AmpValueError("fp8 and fp4 are given, which are one property; keep one")
