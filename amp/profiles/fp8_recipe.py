"""How linear layers run in FP8: the value of the key `fp8`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from amp.errors import AmpValueError, brief, did_you_mean
from amp.profiles import keys
from amp.profiles.keys import OneOf, key, or_none, parse_count, wrong_type

if TYPE_CHECKING:
    from amp.kernels.fp8 import Granularity

RECIPES = {
    "current": ("tensorwise", "float8currentscaling"),
    "delayed": ("delayedscaling",),
    "rowwise": (),
    "rowwise_gw_hp": ("rowwise_with_gw_hp",),
    "block": ("blockwise", "float8blockscaling"),
    "mxfp8": ("mxfp8blockscaling",),
}
"""The recipes, and the names that torchao, Megatron and Transformer Engine have for them."""

GRANULARITIES: "dict[str, tuple[Granularity, Granularity, Granularity]]" = {
    "current": ("tensor", "tensor", "tensor"),
    "delayed": ("tensor", "tensor", "tensor"),
    "rowwise": ("row", "row", "row"),
    "rowwise_gw_hp": ("row", "row", "tensor"),
    "block": ("1x128", "128x128", "128x128"),
    "mxfp8": ("1x32", "1x32", "1x32"),
}
"""The granularity of scales: of inputs and gradients, of the weight in forward, and in backward."""

_ALIASES = {alias: name for name, aliases in RECIPES.items() for alias in aliases}
_ALL_E4M3 = ("rowwise", "rowwise_gw_hp", "block", "mxfp8")
_HISTORY = {"amax_history": 16, "amax_algo": "max", "margin": 0, "reduce_amax": True}
"""The defaults of the fields that only `delayed` has."""

_FP8_OR_HIGH = {True: "fp8", False: "high"}
_FIRST_AND_LAST = {True: ("first", "last"), False: ()}


_parse_exponent = or_none(partial(parse_count, least=0, most=16))
_parse_history = or_none(partial(parse_count, most=2**16))  # Transformer Engine's default is 1024


def _parse_skip(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        remedy = "give a list of first, last, tied, and globs over module names: [last, 'blocks.0.*']"
        raise wrong_type(name, value, remedy)
    return keys.parse_globs(name, value)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """How linear layers run in FP8; see docs/fp8.md.

    Fields that are None when it is made get the recipe's own value, or stay None where they would do
    nothing.

    Attributes:
        recipe: what gets a scale of its own, and where that comes from.
        format: hybrid has gradients in E5M2, with more range and less precision.
        power_of_2_scales: scales are rounded down to powers of 2; false follows Transformer Engine and
            torchao exactly.
        amax_history: `delayed`: how many iterations the scale looks back on.
        amax_algo: `delayed`: the largest of them, or the newest.
        margin: `delayed`: how many powers of 2 the scale stays below what would just fit.
        reduce_amax: `delayed`: ranks share the largest magnitudes that they saw.
        grad_weight: gradients of weights are computed in FP8, or in the level's half precision;
            `fp8_wgrad: false` is high.
        skip: layers that stay in half precision: the first, the last, those that share their weight
            with an embedding, and globs over names.
        eval: modules in evaluation run in FP8, or in half precision; `use_autocast_during_eval: false`
            is high.

    Raises:
        AmpValueError: a field is not in its range, or does nothing under the recipe.
        AmpTypeError: a field is something else.
    """

    recipe: Literal["current", "delayed", "rowwise", "rowwise_gw_hp", "block", "mxfp8"] = key(
        "current", OneOf(*RECIPES, means=_ALIASES), aliases=("fp8_recipe",)
    )
    format: Literal["hybrid", "e4m3"] | None = key(
        None, OneOf("hybrid", "e4m3", means={None: None}), aliases=("fp8_format",)
    )
    power_of_2_scales: bool | None = key(
        None, OneOf(True, False, None), aliases=("round_scales_to_power_of_2", "force_pow_2_scales")
    )
    amax_history: int | None = key(
        None, _parse_history, aliases=("amax_history_len", "fp8_amax_history_len")
    )
    amax_algo: Literal["max", "most_recent"] | None = key(
        None,
        OneOf("max", "most_recent", means={None: None}),
        aliases=("amax_compute_algo", "fp8_amax_compute_algo"),
    )
    margin: int | None = key(None, _parse_exponent, aliases=("fp8_margin",))
    reduce_amax: bool | None = key(None, OneOf(True, False, None))
    grad_weight: Literal["fp8", "high"] | None = key(
        None, OneOf("fp8", "high", means={**_FP8_OR_HIGH, None: None})
    )
    skip: tuple[str, ...] = key(("last", "tied"), _parse_skip)
    eval: Literal["fp8", "high"] = key("fp8", OneOf("fp8", "high", means=_FP8_OR_HIGH))

    def __post_init__(self) -> None:
        keys.parse_fields(self, FP8_KEYS)
        own = {
            "format": "e4m3" if self.recipe in _ALL_E4M3 else "hybrid",
            "power_of_2_scales": True,
            "grad_weight": None if self.recipe == "rowwise_gw_hp" else "fp8",
            **(_HISTORY if self.recipe == "delayed" else dict.fromkeys(_HISTORY)),
        }
        for name, value in own.items():
            given = getattr(self, name)
            is_fixed = name == "power_of_2_scales" and self.recipe == "mxfp8"
            if given is None:
                object.__setattr__(self, name, value)
            elif given != value and (value is None or is_fixed):
                remedy = ", or take recipe: delayed" if name in _HISTORY else ""
                remedy = ": its scales are powers of 2" if is_fixed else remedy
                raise AmpValueError(
                    f"fp8 has {name}: {given}, which does nothing under {self.recipe}; "
                    f"leave it out{remedy}"
                )

    def __str__(self) -> str:
        defaults = Fp8Recipe(recipe=self.recipe)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = [f"{name}={x}" for name, x in values.items() if x != getattr(defaults, name)]
        return f"{self.recipe}({', '.join(changed)})" if changed else self.recipe


FP8_KEYS = keys.keys_of(Fp8Recipe)


def parse_fp8(name: str, value: object) -> Fp8Recipe | None:
    """Return the recipe that a name or a mapping asks for; None for False, None and words for them.

    A mapping has the keys of `Fp8Recipe`, or other libraries' names for them. As in Transformer Engine,
    accelerate and Megatron, the value may be a format: `hybrid` and `e4m3` mean `current` in it.

    Raises:
        AmpValueError: an unknown name, or a value that is not allowed.
        AmpTypeError: a value of the wrong type, or an unknown key.
    """
    word = keys.word_of(value)
    if value is False or keys.is_none(value) or word in ("false", "no", "off"):
        return None
    if isinstance(value, Fp8Recipe):
        return value
    recipes = ", ".join(RECIPES)
    if isinstance(value, Mapping):
        return Fp8Recipe(**keys.fields_of(name, value, _fields)[0])
    if not isinstance(value, str):
        raise wrong_type(name, value, f"allowed: one of {recipes}, a mapping, or none")
    if word in ("hybrid", "e4m3"):
        return Fp8Recipe(format=word)  # type: ignore[arg-type]
    if word in (*RECIPES, *_ALIASES):
        return Fp8Recipe(recipe=word)  # type: ignore[arg-type]
    hint = did_you_mean(word, (*RECIPES, *_ALIASES))
    raise AmpValueError(
        f"{name}={brief(value)} is not one of {recipes}; a mapping or none will do too{hint}"
    )


_FLAGS: dict[str, tuple[str, Mapping[bool, Any]]] = {
    "fp8_wgrad": ("grad_weight", _FP8_OR_HIGH),
    "use_autocast_during_eval": ("eval", _FP8_OR_HIGH),
    "first_last_layers_bf16": ("skip", _FIRST_AND_LAST),
    "filter_first_and_last_linear_layers": ("skip", _FIRST_AND_LAST),
}
"""Boolean options of other libraries: the field that each sets, and its values."""


def _fields(written: str, value: Any) -> dict[str, Any]:
    """Return the field that an item of a mapping sets."""
    if written in _FLAGS:
        field, means = _FLAGS[written]
        return {field: OneOf(True, False, means=means)(written, value)}
    found = keys.find_key(written, FP8_KEYS, "fp8 has no key", tuple(_FLAGS))
    return {} if value is None else {found.field: value}
