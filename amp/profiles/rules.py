"""A user's own precision rules: for an op or for modules, as a profile's `rules:` writes them.

rules:
  - {op: torch.nn.functional.softmax, cast: float32}
  - {op: torch.fft.*, cast: float32}
  - {module: "head.*", cast: float32}
  - {module: torch.nn.LayerNorm, cast: float32}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import nn

from amp.errors import AmpTypeError, AmpValueError, brief, did_you_mean
from amp.profiles.keys import OneOf, shown

Kind = Literal["op", "module"]
_KEYS = (*get_args(Kind), "cast")
_parse_cast = OneOf(torch.float16, torch.bfloat16, torch.float32, None)


@dataclass(frozen=True)
class Rule:
    """What precision an op or some modules run in.

    Attributes:
        kind: `op` or `module`.
        pattern: for an op, its full dotted name, where the last part may be a glob. For modules, a glob
            over their names in the model, or the name of a class, dotted or not.
        dtype: what they run in; None lets an op follow its input.
        source: where the rule was written, for people.
    """

    kind: Kind
    pattern: str
    dtype: torch.dtype | None
    source: str = "rules"

    def __str__(self) -> str:
        return f"{self.kind} {self.pattern}: {shown(self.dtype).lower()}"

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the rule is for this module, which has this name in its model."""
        return self.kind == "module" and (
            fnmatchcase(name, self.pattern)
            or any(self.pattern in _names_of(cls) for cls in type(module).__mro__[:-1])
        )


def _names_of(cls: type) -> tuple[str, ...]:
    """Return the names of a module's class, with `torch.nn.LayerNorm` as torch documents it."""
    where = "torch.nn" if getattr(nn, cls.__name__, None) is cls else cls.__module__
    full = f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__, cls.__qualname__, full, f"{where}.{cls.__name__}"


def parse_rules(name: str, value: object, sources: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules in a list of mappings, or of `Rule`; `sources` say where each was written."""
    if value is None:
        return ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise AmpTypeError(
            f"{name}={brief(value)} is a {type(value).__name__}; give a list of {{op: ..., cast: ...}} "
            "and {module: ..., cast: ...}"
        )
    rules = []
    for i, item in enumerate(value):
        source = sources[i] if i < len(sources) else f"{name}[{i}]"
        try:
            rules.append(item if isinstance(item, Rule) else _parse(item, source))
        except (AmpTypeError, AmpValueError) as error:
            raise type(error)(f"{source}: {error}") from None
    return tuple(rules)


def _parse(item: Any, source: str) -> Rule:
    if not isinstance(item, Mapping):
        raise AmpTypeError(
            f"{item!r} is a {type(item).__name__}; a rule is a mapping such as "
            "{op: torch.nn.functional.softmax, cast: float32}"
        )
    for key in item:
        if key not in _KEYS:
            raise AmpTypeError(
                f"a rule has no key '{key}'; allowed: {', '.join(_KEYS)}{did_you_mean(str(key), _KEYS)}"
            )
    kinds = [kind for kind in get_args(Kind) if item.get(kind) is not None]
    if len(kinds) != 1 or "cast" not in item:
        raise AmpValueError(
            f"{dict(item)!r} must have 'cast' and one of 'op' and 'module', "
            "such as {op: torch.fft.*, cast: float32}"
        )
    kind, pattern = kinds[0], item[kinds[0]]
    if not isinstance(pattern, str) or not pattern.strip():
        raise AmpTypeError(f"{kind}={pattern!r} is not a name")
    if kind == "op" and any(letter in pattern.rpartition(".")[0] for letter in "*?["):
        raise AmpValueError(f"op '{pattern}': only the last part of an op may be a glob")
    return Rule(kind, pattern.strip(), _parse_cast("cast", item["cast"]), source)
