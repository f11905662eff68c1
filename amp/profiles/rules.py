"""A user's own precision rules for ops, modules and tensors: the `rules:` of a profile.

rules:
  - {op: torch.nn.functional.softmax, cast: float32}
  - {op: torch.fft.*, cast: float32}
  - {module: "head.*", cast: float32}
  - {module: torch.nn.LayerNorm, cast: float32}
  - {tensor: "*.running_count", cast: float32}
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import nn

from amp.errors import AmpTypeError, AmpValueError, brief, did_you_mean
from amp.names import unwrapped_name
from amp.profiles.keys import Key, OneOf, find_key, parse_glob, shown, wrong_type

Kind = Literal["op", "module", "tensor"]
_parse_kind = OneOf(*get_args(Kind))
_parse_cast = OneOf(torch.float16, torch.bfloat16, torch.float32, None)
_parse_optional = OneOf(True, False)
_KEYS = {kind: Key(parse_glob, kind) for kind in get_args(Kind)}
_KEYS |= {"cast": Key(_parse_cast, "cast"), "optional": Key(_parse_optional, "optional")}


@dataclass(frozen=True)
class Rule:
    """The precision of an op, or of some modules, or of some parameters and buffers.

    Attributes:
        kind: `op`, `module` or `tensor`.
        pattern: for an op, its full dotted name, whose last part may be a glob. For modules, a glob
            over their names in the model, or the name of a class, dotted or not. For parameters and
            buffers, a glob over their names in the model.
        dtype: the dtype that they run in, or that tensors have; None lets an op follow its input.
        source: where the rule was written, for messages.
        optional: whether a rule for modules or tensors may match none.

    Raises:
        AmpValueError: a value that is not allowed.
        AmpTypeError: a value of the wrong type.
    """

    kind: Kind
    pattern: str
    dtype: torch.dtype | None
    source: str = "rules"
    optional: bool = False

    def __post_init__(self) -> None:
        kind = _parse_kind("kind", self.kind)
        pattern = parse_glob(kind, self.pattern)
        if kind == "op" and any(letter in pattern.rpartition(".")[0] for letter in "*?["):
            raise AmpValueError(f"op {brief(pattern)}: only the last part of an op may be a glob")
        if not isinstance(self.source, str):
            raise AmpTypeError(f"source={brief(self.source)} of a rule is no text")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "dtype", _parse_cast("cast", self.dtype))
        object.__setattr__(self, "optional", _parse_optional("optional", self.optional))

    def __str__(self) -> str:
        return f"{self.kind} {self.pattern}: {shown(self.dtype).lower()}"

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the rule is for this module, whose name in its model is `name`."""
        return self.kind == "module" and (
            self._has_name(name)
            or any(self.pattern in _names_of(cls) for cls in type(module).__mro__[:-1])
        )

    def matches_tensor(self, name: str) -> bool:
        """Whether the rule is for the parameter or buffer of this name in its model."""
        return self.kind == "tensor" and self._has_name(name)

    def _has_name(self, name: str) -> bool:
        return any(fnmatchcase(x, self.pattern) for x in (name, unwrapped_name(name)))


def _names_of(cls: type) -> tuple[str, ...]:
    """Return the names of a module's class, with torch's public one, such as `torch.nn.LayerNorm`."""
    where = "torch.nn" if getattr(nn, cls.__name__, None) is cls else cls.__module__
    full = f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__, cls.__qualname__, full, f"{where}.{cls.__name__}"


def parse_rules(name: str, value: object, sources: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules in a list of mappings or `Rule` objects; `sources` has the place of each."""
    if value is None:
        return ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        remedy = "give a list of {op: ..., cast: ...}, {module: ..., ...} and {tensor: ..., ...}"
        raise wrong_type(name, value, remedy)
    sources = sources or [f"{name}[{i}]" for i in range(len(value))]
    return tuple(map(_parse, value, sources))


def _parse(item: Any, source: str) -> Rule:
    if isinstance(item, Rule):
        return item
    try:
        return _from_mapping(item, source)
    except (AmpTypeError, AmpValueError) as error:
        raise type(error)(f"{source}: {error}") from None


_MEANT = {
    **dict.fromkeys(("dtype", "precision", "type", "to"), "cast"),
    **dict.fromkeys(("layer", "layers", "class", "name"), "module"),
    **dict.fromkeys(("parameter", "param", "buffer", "weight"), "tensor"),
    **dict.fromkeys(("function", "func", "fn"), "op"),
}
"""What to write for a key of another name."""


def _hint(name: str, known: Iterable[str]) -> str:
    return f"; did you mean '{_MEANT[name]}'?" if name in _MEANT else did_you_mean(name, known)


def _from_mapping(item: Any, source: str) -> Rule:
    if not isinstance(item, Mapping):
        raise AmpTypeError(
            f"{brief(item)} is a {type(item).__name__}; a rule is a mapping such as "
            "{op: torch.nn.functional.softmax, cast: float32}"
        )
    for key in item:
        find_key(key, _KEYS, "a rule has no key", hint_at=_hint)
    kinds = [kind for kind in get_args(Kind) if item.get(kind) is not None]
    if len(kinds) != 1 or "cast" not in item:
        raise AmpValueError(
            f"{brief(dict(item))} must have 'cast' and one of 'op', 'module' and 'tensor', "
            "such as {op: torch.fft.*, cast: float32}"
        )
    return Rule(kinds[0], item[kinds[0]], item["cast"], source, item.get("optional", False))
