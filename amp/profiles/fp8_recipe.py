"""How linear layers run in FP8 or FP4: the value of the keys `fp8` and `fp4`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from amp.errors import AmpValueError, brief, did_you_mean
from amp.profiles import keys
from amp.profiles.keys import OneOf, key, or_none, parse_count, wrong_type

if TYPE_CHECKING:
    from amp.kernels.fp8 import AnyGranularity

RECIPES = {
    "current": ("tensorwise", "float8currentscaling"),
    "delayed": ("delayedscaling",),
    "rowwise": (),
    "rowwise_gw_hp": ("rowwise_with_gw_hp",),
    "block": ("blockwise", "float8blockscaling"),
    "mxfp8": ("mxfp8blockscaling",),
    "nvfp4": ("nvfp4blockscaling", "nvfp4trainingconfig", "e2m1"),
    "mxfp4": ("mxfp4blockscaling",),
}
"""The recipes, and the names that torchao, Megatron and Transformer Engine have for them."""

FP4 = ("nvfp4", "mxfp4")
"""The recipes with two values in a byte."""

GRANULARITIES: "dict[str, tuple[AnyGranularity, AnyGranularity, AnyGranularity]]" = {
    "current": ("tensor", "tensor", "tensor"),
    "delayed": ("tensor", "tensor", "tensor"),
    "rowwise": ("row", "row", "row"),
    "rowwise_gw_hp": ("row", "row", "tensor"),
    "block": ("1x128", "128x128", "128x128"),
    "mxfp8": ("1x32", "1x32", "1x32"),
    "nvfp4": ("1x16", "16x16", "16x16"),
    "mxfp4": ("1x32", "1x32", "1x32"),
}
"""The granularity of scales: of inputs and gradients, of the weight in forward, and in backward."""

MULTIPLES = {"mxfp8": 32, "nvfp4": 32, "mxfp4": 32, "block": 128}
"""The number that must divide both dimensions of a weight, by recipe; 16 for the other recipes."""


def is_small(recipe: str, outputs: int, inputs: int) -> bool:
    """Whether a layer is too small to be faster with a recipe than in half precision.

    The limits are those of torchao's `_auto_filter_for_recipe`, measured on an H100 under
    `torch.compile`: for scales of tensors, and for scales of rows, which stand in for smaller blocks.
    """
    if recipe in ("current", "delayed"):
        return outputs <= 1024 and inputs <= 4096
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


_ALIASES = {alias: name for name, aliases in RECIPES.items() for alias in aliases}
_ALL_E4M3 = ("rowwise", "rowwise_gw_hp", "block", "mxfp8")
_HISTORY = {"amax_history": 16, "amax_algo": "max", "margin": 0, "reduce_amax": True}
"""The defaults of the fields that only `delayed` has."""

_OF_FP4 = {
    "hadamard": True,
    "stochastic_rounding": True,
    "square_weights": True,
    "forward": "fp4",
    "grad_input": "fp4",
    "seed": 0,
}
"""The defaults of the fields that only recipes of FP4 have."""

_LOW_OR_HIGH = {True: "low", False: "high"}
_FIRST_AND_LAST = {True: ("first", "last"), False: ()}
LARGEST_SEED = 2**53
SKIP_WORDS = ("first", "last", "tied", "small")
"""The words of `skip` that are no names, globs or counts."""
_COUNTED = re.compile(r"(first|last) +(\d+) *(%?)")


_parse_exponent = or_none(partial(parse_count, least=0, most=16))
_parse_history = or_none(partial(parse_count, most=2**16))  # Transformer Engine's default is 1024
_parse_seed = or_none(partial(parse_count, least=0, most=LARGEST_SEED))
_parse_places = OneOf("fp8", "fp4", "high", means={**_LOW_OR_HIGH, None: None})


def _parse_skip(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        remedy = (
            "give a list of first, last, tied, small, counts such as 'last 2' and 'last 15%', and "
            "globs over module names: [last, 'blocks.0.*']"
        )
        raise wrong_type(name, value, remedy)
    # torchtitan's word, a flag among the names that it filters
    return tuple(
        "small" if item == "auto_filter_small_kn" else item for item in keys.parse_globs(name, value)
    )


class Counted(NamedTuple):
    """Blocks at the beginning or the end of a model that an item of `skip` means.

    Attributes:
        end: `first` or `last`.
        number: how many, or how many percent of them, rounded up.
        is_share: whether the number is in percent.
    """

    end: str
    number: int
    is_share: bool

    def of(self, total: int) -> int:
        """Return how many of `total` blocks are meant."""
        return min(-(-self.number * total // 100) if self.is_share else self.number, total)


def counted(item: str) -> Counted | None:
    """Return what an item of `skip`, such as `last 15%`, counts; None for a name or a glob."""
    found = _COUNTED.fullmatch(item.strip().lower())
    return Counted(found[1], int(found[2]), bool(found[3])) if found else None


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """How linear layers run in FP8 or FP4; see docs/fp8.md and docs/fp4.md.

    Fields that are None when it is made get the recipe's own value, or stay None where they would do
    nothing.

    Attributes:
        recipe: which numbers share a scale, and where the scale comes from.
        format: hybrid has gradients in E5M2, with more range and less precision.
        power_of_2_scales: scales are rounded down to powers of 2; false follows Transformer Engine and
            torchao exactly.
        amax_history: `delayed`: how many earlier iterations the scale considers.
        amax_algo: `delayed`: the largest of them, or the newest.
        margin: `delayed`: how many powers of 2 the scale stays below what would just fit.
        reduce_amax: `delayed`: ranks share the largest magnitudes that they saw.
        grad_weight: gradients of weights are computed in FP8 or FP4, or in the level's half precision;
            `fp8_wgrad: false` is high.
        skip: layers that stay in half precision: the first, the last, the blocks of `last 15%` or
            `first 2`, those that share their weight with an embedding, those too small to gain, and
            globs over names.
        eval: modules in evaluation run in FP8 or FP4, or in half precision;
            `use_autocast_during_eval: false` is high.
        hadamard: FP4: the operands of weights' gradients get a random Hadamard transform.
        stochastic_rounding: FP4: gradients are rounded stochastically.
        square_weights: `nvfp4`: 16 x 16 numbers of a weight share a scale, so that forward and backward
            use the same weight.
        forward: FP4: outputs are computed in FP4, or in half precision, as for the end of a training.
        grad_input: FP4: gradients of inputs are computed in FP4, or in half precision.
        seed: FP4: the seed of the random bits.
        all_gather: `current`: FSDP2 gathers weights in E4M3, by scales that ranks agree on.
        keep_weights: quantized weights are kept from the forward to the backward, which then does not
            quantize them again: a byte more for each weight, or about half a byte in FP4;
            `force_recompute_fp8_weight_in_bwd: false` is true. With `step` they are kept for all
            forwards in training until the next step, which takes twice as much memory: a write that
            torch does not count, as through `.data`, has no effect until then. Not for `delayed`.

    Raises:
        AmpValueError: a field is not in its range, or does nothing under the recipe.
        AmpTypeError: a field is something else.
    """

    recipe: Literal[
        "current", "delayed", "rowwise", "rowwise_gw_hp", "block", "mxfp8", "nvfp4", "mxfp4"
    ] = key("current", OneOf(*RECIPES, means=_ALIASES), aliases=("fp8_recipe", "fp4_recipe"))
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
    grad_weight: Literal["fp8", "fp4", "high"] | None = key(None, _parse_places)
    skip: tuple[str, ...] = key(("last", "tied"), _parse_skip)
    eval: Literal["fp8", "fp4", "high"] | None = key(None, _parse_places)
    hadamard: bool | None = key(None, OneOf(True, False, None), aliases=("rht", "use_rht"))
    stochastic_rounding: bool | None = key(
        None, OneOf(True, False, None), aliases=("use_stochastic_rounding",)
    )
    square_weights: bool | None = key(
        None, OneOf(True, False, None), aliases=("use_2d_quantization", "weight_2d_scaling")
    )
    forward: Literal["fp8", "fp4", "high"] | None = key(None, _parse_places)
    grad_input: Literal["fp8", "fp4", "high"] | None = key(None, _parse_places)
    seed: int | None = key(None, _parse_seed)
    all_gather: bool = key(
        False, OneOf(True, False, means={None: False}), aliases=("enable_fsdp_float8_all_gather",)
    )

    keep_weights: bool | Literal["step"] = key(
        False, OneOf(True, False, "step", means={None: False}), aliases=("keep_fp8_transpose_cache",)
    )

    def __post_init__(self) -> None:
        keys.parse_fields(self, FP8_KEYS)
        low = "fp4" if self.is_fp4 else "fp8"
        own = {
            "format": "e4m3" if self.recipe in _ALL_E4M3 else "hybrid",
            "power_of_2_scales": True,
            "grad_weight": None if self.recipe == "rowwise_gw_hp" else low,
            "eval": low,
            **(_HISTORY if self.recipe == "delayed" else dict.fromkeys(_HISTORY)),
            **(_OF_FP4 if self.is_fp4 else dict.fromkeys(_OF_FP4)),
        }
        if self.is_fp4:
            own |= {"format": None, "power_of_2_scales": None if self.recipe == "nvfp4" else True}
        if self.recipe == "mxfp4":
            own["square_weights"] = None
        for name, value in own.items():
            given = getattr(self, name)
            if given == "low":
                given = low
                object.__setattr__(self, name, low)
            is_fixed = name == "power_of_2_scales" and self.recipe in ("mxfp8", "mxfp4")
            is_other = given in ("fp8", "fp4") and given != low
            if given is None:
                object.__setattr__(self, name, value)
            elif given != value and (value is None or is_fixed or is_other):
                remedy = ", or take recipe: delayed" if name in _HISTORY else ""
                remedy = ", or take recipe: nvfp4" if name in _OF_FP4 else remedy
                remedy = ": its scales are powers of 2" if is_fixed else remedy
                remedy = f": say {low} or high" if is_other and value is not None else remedy
                raise AmpValueError(
                    f"fp8 has {name}: {given}, which does nothing under {self.recipe}; "
                    f"leave it out{remedy}"
                )

        if self.all_gather and self.recipe != "current":
            raise AmpValueError(
                f"fp8 has all_gather: True, which is for recipe: current and not for {self.recipe}; "
                "leave it out, or take recipe: current"
            )
        if self.all_gather and self.eval == "high":
            raise AmpValueError(
                "fp8 has all_gather: True and eval: high, and a weight that was gathered in FP8 has no "
                "high precision; leave out one of them"
            )
        if self.keep_weights and (self.all_gather or self.recipe == "rowwise_gw_hp"):
            other = "all_gather: True" if self.all_gather else "recipe: rowwise_gw_hp"
            why = (
                "FSDP2 frees a gathered weight" if self.all_gather else "its backward has other scales"
            )
            raise AmpValueError(
                f"fp8 has keep_weights: {self.keep_weights} and {other}, and {why}; leave out "
                "keep_weights"
            )
        if self.keep_weights == "step" and self.recipe == "delayed":
            raise AmpValueError(
                "fp8 has keep_weights: step and recipe: delayed, whose scales may change in each "
                "forward; take keep_weights: True"
            )

    @property
    def is_fp4(self) -> bool:
        """Whether layers run in FP4."""
        return self.recipe in FP4

    @property
    def number_format(self) -> str:
        """`FP8` or `FP4`, for messages."""
        return "FP4" if self.is_fp4 else "FP8"

    @property
    def draws(self) -> bool:
        """Whether gradients are rounded stochastically."""
        return bool(self.stochastic_rounding) and "fp4" in (self.grad_input, self.grad_weight)

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
        AmpValueError: an unknown name, a value that is not allowed, or a recipe of FP8 for `fp4`.
        AmpTypeError: a value of the wrong type, or an unknown key.
    """
    found = _parsed(name, value)
    if name == "fp4" and found is not None and not found.is_fp4:
        raise AmpValueError(
            f"fp4={brief(value)} is not one of {', '.join(FP4)}; for FP8 say fp8={found.recipe}"
        )
    return found


def _parsed(name: str, value: object) -> Fp8Recipe | None:
    word = keys.word_of(value)
    if value is False or keys.is_none(value) or word in ("false", "no", "off"):
        return None
    if isinstance(value, Fp8Recipe):
        return value
    is_on = value is True or word in ("true", "yes", "on")
    if name == "fp4" and is_on:
        return Fp8Recipe(recipe="nvfp4")
    recipes = ", ".join(RECIPES)
    if isinstance(value, Mapping):
        own: dict[str, Any] = {"recipe": "nvfp4"} if name == "fp4" else {}
        return Fp8Recipe(**own | keys.fields_of(name, _with_skip(name, value), _fields)[0])
    if is_on or not isinstance(value, str):
        hint = "; did you mean 'current', the recipe of O6 and O7?" if is_on else ""
        raise wrong_type(name, value, f"allowed: one of {recipes}, a mapping, or none{hint}")
    if word in ("hybrid", "e4m3"):
        return Fp8Recipe(format=word)  # type: ignore[arg-type]
    if word in (*RECIPES, *_ALIASES):
        return Fp8Recipe(recipe=word)  # type: ignore[arg-type]
    hint = did_you_mean(word, (*RECIPES, *_ALIASES))
    raise AmpValueError(
        f"{name}={brief(value)} is not one of {recipes}; a mapping or none will do too{hint}"
    )


_NOT = {True: False, False: True}
_FLAGS: dict[str, tuple[str, Mapping[bool, Any]]] = {
    "fp8_wgrad": ("grad_weight", _LOW_OR_HIGH),
    "use_autocast_during_eval": ("eval", _LOW_OR_HIGH),
    "disable_rht": ("hadamard", _NOT),
    "disable_stochastic_rounding": ("stochastic_rounding", _NOT),
    "disable_2d_quantization": ("square_weights", _NOT),
    "force_recompute_fp8_weight_in_bwd": ("keep_weights", _NOT),
    "filter_first_and_last_linear_layers": ("skip", _FIRST_AND_LAST),
}
"""Boolean options of other libraries: the field that each sets, and its values."""

_OF_MEGATRON = {"num_layers_at_start_in_bf16": "first", "num_layers_at_end_in_bf16": "last"}
"""Megatron's counts of layers in half precision, and the items of `skip` that they are."""
_OTHERS = (*_FLAGS, "first_last_layers_bf16", *_OF_MEGATRON, "fp4_format", "backward_override")

_REFUSED = {
    "4over6|four_?over_?six": "a block's largest number is scaled to 6 only; leave it out",
    "row_?scal": "NVFP4 has one scale for a tensor and one for each block; leave it out",
    "fp4_?param|param.*fp4": "weights are kept in the level's dtype, and are quantized when they are "
    "used; leave it out, and take master_weights='split24' to save memory",
}
"""Options of other libraries for FP4 that are refused, by a pattern, and the advice of the error."""


def _fields(written: str, value: Any) -> dict[str, Any]:
    """Return the fields that an item of a mapping sets."""
    if written in _FLAGS:
        field, means = _FLAGS[written]
        return {field: OneOf(True, False, means=means)(written, value)}
    if written == "fp4_format":
        OneOf("e2m1", None)(written, value)
        return {}
    if written == "backward_override":
        high = {"grad_weight": "high", "grad_input": "high"}
        return dict(
            OneOf("high_precision", None, means={"high_precision": high, None: {}})(written, value)
        )
    for pattern, why in _REFUSED.items():
        if re.search(pattern, written.lower()):
            raise AmpValueError(f"fp8 does not offer {written}: {why}")
    found = keys.find_key(written, FP8_KEYS, "fp8 has no key", _OTHERS)
    return {} if value is None else {found.field: value}


def _with_skip(name: str, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping with `skip` instead of the three keys with which Megatron says it."""
    rest = dict(mapping)
    counts = {}
    for written, end in _OF_MEGATRON.items():
        if (count := rest.pop(written, None)) is not None:
            counts[end] = parse_count(written, count, least=0)
    is_on = OneOf(True, False, None)("first_last_layers_bf16", rest.pop("first_last_layers_bf16", None))
    if is_on is None and not counts:
        return rest
    if "skip" in rest:
        first = "first_last_layers_bf16" if is_on is not None else next(iter(_OF_MEGATRON))
        raise AmpValueError(f"{name} has both '{first}' and 'skip', which are one thing; keep one")
    items = [f"{end} {counts[end]}" if end in counts else end for end in ("first", "last")]
    if is_on is None:
        items = [f"{end} {count}" for end, count in counts.items()]
    return {**rest, "skip": items if is_on is not False else []}
