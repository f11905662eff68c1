"""A YAML mapping with the line of each key, read by YAML 1.2's rules.

PyYAML follows YAML 1.1, where `no` and `off` are False, `1e-3` is a string and `010` is 8. Here a
plain scalar is what version 1.2's core schema says it is. PyYAML is imported on first use.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp.errors import AmpValueError


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a YAML mapping, and where it stands.

    Attributes:
        key: the key.
        value: its value.
        line: the line of the key.
        lines: the lines of what is inside the value, by the keys that lead to it. An item of a list
            goes by its text, or by its position if it is a list or mapping itself.
    """

    key: str
    value: Any
    line: int
    lines: dict[tuple[str, ...], int]


def read_mapping(path: Path) -> list[Entry]:
    """Read a YAML file whose top is a mapping. AmpValueErrors begin with file and line."""
    import yaml

    try:
        top = yaml.compose(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise AmpValueError(f"{path}:1: not a text file in UTF-8: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise AmpValueError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    if top is None:
        return []
    if not isinstance(top, yaml.MappingNode):
        raise AmpValueError(f"{path}:{_line(top)}: expected a mapping of 'property: value' lines")
    entries = []
    for key, node, line in _pairs(top, path):
        lines: dict[tuple[str, ...], int] = {}
        entries.append(Entry(key, _value(node, path, (), lines), line, lines))
    return entries


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _pairs(mapping: Any, path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield the keys of a mapping's node, with the nodes of their values and their lines."""
    seen: dict[str, int] = {}
    for key_node, node in mapping.value:
        key, line = str(key_node.value), _line(key_node)
        if key in seen:
            raise AmpValueError(f"{path}:{line}: '{key}' was set on line {seen[key]} already")
        seen[key] = line
        yield key, node, line


def _value(node: Any, path: Path, above: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Any:
    """Return what a node holds, and put the lines of what is inside it into `lines`."""
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == "map":
        value = {}
        for key, inner, line in _pairs(node, path):
            lines[*above, key] = line
            value[key] = _value(inner, path, (*above, key), lines)
        return value
    if kind == "seq":
        for i, item in enumerate(node.value):
            lines[*above, item.value if isinstance(item.value, str) else str(i)] = _line(item)
        return [_value(item, path, (*above, str(i)), lines) for i, item in enumerate(node.value)]
    if kind != "str":
        raise AmpValueError(f"{path}:{_line(node)}: not valid YAML here: the tag {node.tag}")
    return node.value if node.style else _plain(node.value)


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_CORE_SCHEMA: dict[str, Callable[[str], Any]] = {
    r"~|null|Null|NULL|": lambda text: None,
    r"true|True|TRUE|false|False|FALSE": lambda text: text.lower() == "true",
    r"[-+]?[0-9]+": int,
    r"0o[0-7]+|0x[0-9a-fA-F]+": lambda text: int(text, 0),
    _NUMBER: float,
    r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)": lambda text: float(text.replace(".", "")),
}


def _plain(text: str) -> Any:
    """Return what version 1.2's core schema says that a scalar without quotes is."""
    for pattern, read in _CORE_SCHEMA.items():
        if re.fullmatch(pattern, text):
            return read(text)
    return text
