"""A YAML mapping with the line of each key, read by YAML 1.2's rules.

PyYAML follows YAML 1.1, where `no` and `off` are False, `1e-3` is a string and `010` is 8. Here a
plain scalar is what version 1.2's core schema says it is. PyYAML is imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from amp.errors import AmpValueError


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a YAML mapping, and where it stands."""

    key: str
    value: Any
    line: int
    lines: Mapping[tuple[str, ...], int]  # of what is inside: by keys, list items by their own text
    item_lines: tuple[int, ...] = ()  # where the value is a list: of each item


def read_mapping(path: Path) -> list[Entry]:
    """Read a YAML file whose top is a mapping, with the line of every key.

    Raises:
        AmpValueError: it is no such file; the message has file and line.
    """
    import yaml

    try:
        loader = _loader_class()(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise AmpValueError(f"{path}:1: not a text file in UTF-8: {error}") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            line = node.start_mark.line + 1
            raise AmpValueError(f"{path}:{line}: expected a mapping of 'property: value' lines")
        entries = []
        for key, value_node, line in _pairs(loader, node, path):
            lines = dict(_lines(loader, value_node, path))
            items = value_node.value if isinstance(value_node, yaml.SequenceNode) else ()
            item_lines = tuple(item.start_mark.line + 1 for item in items)
            value = loader.construct_object(value_node, deep=True)
            entries.append(Entry(key, value, line, lines, item_lines))
        return entries
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise AmpValueError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    finally:
        loader.dispose()


def _pairs(loader: Any, node: Any, path: Path) -> Iterator[tuple[str, Any, int]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(loader.construct_object(key_node)), key_node.start_mark.line + 1
        if key in seen:
            raise AmpValueError(f"{path}:{line}: '{key}' was set on line {seen[key]} already")
        seen[key] = line
        yield key, value_node, line


def _lines(
    loader: Any, node: Any, path: Path, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the line of every key and plain list item in `node`, under the keys that lead to it."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value_node, line in _pairs(loader, node, path):
            yield (*above, key), line
            yield from _lines(loader, value_node, path, (*above, key))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if isinstance(item, yaml.ScalarNode):
                yield (*above, item.value), item.start_mark.line + 1


@cache
def _loader_class() -> Any:
    """Return a safe loader that resolves plain scalars by YAML 1.2's core schema."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Knows no plain scalar but those added below."""

    Loader.yaml_implicit_resolvers = {}

    def scalar(tag: str, pattern: str, first: str, construct: Any) -> None:
        Loader.add_implicit_resolver(tag, re.compile(rf"(?:{pattern})\Z"), list(first))
        Loader.add_constructor(tag, lambda _, node: construct(getattr(node, "value", "")))

    core = "tag:yaml.org,2002:"
    scalar(f"{core}null", r"~|null|Null|NULL|", "~nN\0", lambda text: None)
    Loader.add_implicit_resolver(f"{core}null", re.compile(r"\Z"), [""])
    scalar(f"{core}bool", r"true|True|TRUE|false|False|FALSE", "tTfF", lambda t: t.lower() == "true")
    digits = "-+0123456789"
    scalar(f"{core}int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", digits, _integer)
    number = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    special = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    scalar(f"{core}float", f"{number}|{special}", f"{digits}.", _real)
    return Loader


def _integer(text: str) -> int:
    bases = {"0o": 8, "0x": 16}
    return int(text[2:], bases[text[:2]]) if text[:2] in bases else int(text)


def _real(text: str) -> float:
    return float(re.sub(r"\.(?=[infa]{3}$)", "", text.lower()))
