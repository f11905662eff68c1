"""How linear layers run in FP8: the value of the key `fp8`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from amp.errors import AmpTypeError, AmpValueError, brief, did_you_mean
from amp.profiles import keys
from amp.profiles.keys import OneOf, Parser, key, parse_count

RECIPES = {
    "current": ("tensorwise", "float8currentscaling"),
    "delayed": ("delayedscaling",),
    "rowwise": (),
    "rowwise_gw_hp": ("rowwise_with_gw_hp",),
    "block": ("blockwise", "float8blockscaling"),
    "mxfp8": ("mxfp8blockscaling",),
}
"""The recipes, and what torchao, Megatron and Transformer Engine call them."""

_ALL_E4M3 = ("rowwise", "rowwise_gw_hp", "block", "mxfp8")
_HISTORY_KEYS = ("amax_history", "amax_algo", "margin", "reduce_amax")


def _word(*words: str, **also: str) -> Parser:
    """Return a parser of some words in any case, and of other words for them."""
    parse = OneOf(*words)

    def parse_word(name: str, value: object) -> Any:
        if isinstance(value, (str, bool)):
            value = also.get(str(value).strip().lower(), value)
        return parse(name, value)

    return parse_word


def _optional(parse: Parser) -> Parser:
    return lambda name, value: None if value is None else parse(name, value)


def _parse_exponent(name: str, value: object) -> int:
    number = keys.parse_number(name, value)
    if isinstance(value, bool) or not 0 <= number <= 16 or not number.is_integer():
        raise AmpValueError(f"{name}={brief(value)} must be an integer from 0 to 16")
    return int(number)


_LONGEST_HISTORY = 2**16
"""In iterations; Transformer Engine's default is 1024."""


def _parse_history(name: str, value: object) -> int:
    count = parse_count(name, value)
    if count > _LONGEST_HISTORY:
        raise AmpValueError(f"{name}={brief(value)} must be at most {_LONGEST_HISTORY} iterations")
    return count


def _parse_skip(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise AmpTypeError(
            f"{name}={brief(value)} is a {type(value).__name__}; give a list of first, last, tied, and "
            "globs over the names of modules, such as [last, 'blocks.0.*']"
        )
    for pattern in value:
        if not isinstance(pattern, str) or not pattern.strip():
            raise AmpTypeError(f"{name} has {brief(pattern)}, which is not first, last, tied or a glob")
    return keys.parse_globs(name, value)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """How linear layers run in FP8; docs/fp8.md has the fields.

    Fields that are None when it is made get the recipe's own value, or stay None where they would do
    nothing.

    Raises:
        AmpValueError: a field is not in its range, or does nothing under the recipe.
        AmpTypeError: a field is something else.
    """

    recipe: Literal["current", "delayed", "rowwise", "rowwise_gw_hp", "block", "mxfp8"] = key(
        "current",
        _word(*RECIPES, **{alias: name for name, others in RECIPES.items() for alias in others}),
        "what gets a scale of its own, and where that comes from",
        values=", ".join(RECIPES),
        aliases=("fp8_recipe",),
    )
    format: Literal["hybrid", "e4m3"] | None = key(
        None,
        _optional(_word("hybrid", "e4m3")),
        "hybrid has gradients in E5M2, with more range and less precision",
        values="hybrid, e4m3",
        aliases=("fp8_format",),
    )
    power_of_2_scales: bool | None = key(
        None,
        OneOf(True, False, None),
        "scales are rounded down to powers of 2; false follows Transformer Engine and torchao exactly",
        values="true, false",
        aliases=("round_scales_to_power_of_2", "force_pow_2_scales"),
    )
    amax_history: int | None = key(
        None,
        _optional(_parse_history),
        "`delayed`: how many iterations the scale looks back on",
        values="a count up to 65536",
        aliases=("amax_history_len", "fp8_amax_history_len"),
    )
    amax_algo: Literal["max", "most_recent"] | None = key(
        None,
        _optional(_word("max", "most_recent")),
        "`delayed`: the largest of them, or the newest",
        values="max, most_recent",
        aliases=("amax_compute_algo", "fp8_amax_compute_algo"),
    )
    margin: int | None = key(
        None,
        _optional(_parse_exponent),
        "`delayed`: how many powers of 2 the scale stays below what would just fit",
        values="a count",
        aliases=("fp8_margin",),
    )
    reduce_amax: bool | None = key(
        None,
        OneOf(True, False, None),
        "`delayed`: ranks share the largest magnitudes that they saw",
        values="true, false",
    )
    grad_weight: Literal["fp8", "high"] | None = key(
        None,
        _optional(_word("fp8", "high", true="fp8", false="high")),
        "gradients of weights are computed in FP8, or in the level's half precision; "
        "`fp8_wgrad: false` is high",
        values="fp8, high",
    )
    skip: tuple[str, ...] = key(
        ("last", "tied"),
        _parse_skip,
        "layers that stay in half precision: the first, the last, those that share their weight with "
        "an embedding, and globs over names",
        values="a list of first, last, tied, globs",
    )
    eval: Literal["fp8", "high"] = key(
        "fp8",
        _word("fp8", "high", true="fp8", false="high"),
        "modules in evaluation run in FP8, or in half precision; `use_autocast_during_eval: false` is "
        "high",
        values="fp8, high",
    )

    def __post_init__(self) -> None:
        for each in FP8_KEYS.values():
            parsed = each.parse(each.name, getattr(self, each.field))
            object.__setattr__(self, each.field, parsed)
        for name, value in self._own():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
            elif getattr(self, name) != value and (value is None or self._is_fixed(name)):
                raise AmpValueError(
                    f"fp8 has {name}: {getattr(self, name)}, which does nothing under "
                    f"{self.recipe}; leave it out{self._who_has(name)}"
                )

    def _own(self) -> Iterator[tuple[str, Any]]:
        """Yield what the recipe makes of fields that are not given; None for those that do nothing."""
        yield "format", "e4m3" if self.recipe in _ALL_E4M3 else "hybrid"
        yield "power_of_2_scales", True
        yield "grad_weight", None if self.recipe == "rowwise_gw_hp" else "fp8"
        values = (16, "max", 0, True) if self.recipe == "delayed" else (None,) * 4
        yield from zip(_HISTORY_KEYS, values, strict=True)

    def _is_fixed(self, name: str) -> bool:
        return name == "power_of_2_scales" and self.recipe == "mxfp8"

    def _who_has(self, name: str) -> str:
        if name in _HISTORY_KEYS:
            return ", or take recipe: delayed"
        return ": its scales are powers of 2" if self._is_fixed(name) else ""

    def __str__(self) -> str:
        defaults = Fp8Recipe(recipe=self.recipe)
        changed = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if each.name != "recipe" and getattr(self, each.name) != getattr(defaults, each.name)
        ]
        return f"{self.recipe}({', '.join(changed)})" if changed else self.recipe


FP8_KEYS = keys.keys_of(Fp8Recipe)


def parse_fp8(name: str, value: object) -> Fp8Recipe | None:
    """Return the recipe that a name or a mapping asks for; None for False and None.

    A mapping has the keys of `Fp8Recipe`, or other libraries' names for them. Of Transformer Engine's,
    accelerate's and Megatron's formats, `hybrid` and `e4m3` alone mean `current` in that format.
    """
    if value is None or value is False or keys.is_none(value):
        return None
    if isinstance(value, Fp8Recipe):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(name, value)
    if not isinstance(value, str):
        raise AmpTypeError(
            f"{name}={brief(value)} is a {type(value).__name__}; allowed: one of {', '.join(RECIPES)}, "
            "a mapping, or none"
        )
    word = value.strip().lower()
    if word in ("false", "no", "off"):
        return None
    if word in ("hybrid", "e4m3"):
        return Fp8Recipe(format=word)  # type: ignore[arg-type]
    if word not in RECIPES and not any(word in others for others in RECIPES.values()):
        spellings = [*RECIPES, *(alias for others in RECIPES.values() for alias in others)]
        raise AmpValueError(
            f"{name}={brief(value)} is not one of {', '.join(RECIPES)}; a mapping or none will do too"
            f"{did_you_mean(word, spellings)}"
        )
    return Fp8Recipe(recipe=word)  # type: ignore[arg-type]


_IN_OTHER_WORDS: dict[str, tuple[str, dict[bool, Any]]] = {
    "fp8_wgrad": ("grad_weight", {True: "fp8", False: "high"}),
    "use_autocast_during_eval": ("eval", {True: "fp8", False: "high"}),
    "first_last_layers_bf16": ("skip", {True: ("first", "last"), False: ()}),
    "filter_first_and_last_linear_layers": ("skip", {True: ("first", "last"), False: ()}),
}
"""Truth values of other libraries: the field that each sets, and to what."""


def _from_mapping(name: str, mapping: Mapping[Any, Any]) -> Fp8Recipe:
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key_, value in mapping.items():
        written = keys.written(key_)
        if written in _IN_OTHER_WORDS:
            field, meanings = _IN_OTHER_WORDS[written]
            value = meanings[OneOf(True, False)(written, value)]
        else:
            each = keys.find_key(written, FP8_KEYS, f"{name} has no key", tuple(_IN_OTHER_WORDS))
            field = each.field
        if field in found:
            raise AmpValueError(
                f"{name} has both '{spelled[field]}' and '{written}', which are one thing; keep one"
            )
        if value is not None:
            found[field], spelled[field] = value, written
    return Fp8Recipe(**found)
