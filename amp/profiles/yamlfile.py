"""A YAML mapping with the line of each key, read by YAML 1.2's rules.

PyYAML follows YAML 1.1, where `no` and `off` are False, `1e-3` is a string and `010` is 8. Here a
plain scalar is what version 1.2's core schema says it is. PyYAML is imported on first use, and
constructs nothing. What a damaged or a hostile file may hold ends in an error with file and line.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from amp.errors import AmpValueError, brief


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
    """Read a YAML file whose top is a mapping. Time and memory are bounded, whatever is in the file.

    Raises:
        AmpValueError: it is no such file, or holds what no profile needs. The message begins with file
            and line.
    """
    import yaml

    text = _text_of(path)
    try:
        top = yaml.compose(text, _loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise AmpValueError(f"{path}:{line}: not valid YAML: {_short(error.problem)}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of odd escapes and directives
        raise AmpValueError(f"{path}:1: not valid YAML: {_short(error)}") from None
    if top is None:
        return []
    reader = _Reader(path)
    if not isinstance(top, yaml.MappingNode):
        reader.fail(top, "expected a mapping of 'property: value' lines")
    reader.check_tag(top, "map")
    entries = []
    for key, node, line in reader.pairs(top):
        lines: dict[tuple[str, ...], int] = {}
        entries.append(Entry(key, reader.value(node, (), lines), line, lines))
    return entries


LARGEST_FILE = 2**16
"""In bytes: a hundred times what a profile has."""
_DEEPEST = 20
_MOST_VALUES = 5000
"""In a file, and in what its aliases stand for."""
_MOST_DIGITS = 400


def _short(problem: object) -> str:
    """Return what PyYAML says, which may repeat a name of any length."""
    text = str(problem)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file whose read gives None where it would wait, as that of /proc/kmsg."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _text_of(path: Path) -> str:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            content = file.read(LARGEST_FILE + 1)
            is_made_up = content is None or (content and not os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise AmpValueError(f"{path}:1: the file cannot be read: {error.strerror}") from None
    if is_made_up:  # by the kernel, as those in /proc
        raise AmpValueError(f"{path}:1: this is no regular file; give the path of a profile")
    if len(content) > LARGEST_FILE:
        raise AmpValueError(
            f"{path}:1: the file is larger than {LARGEST_FILE} bytes, which no profile is; give the "
            "path of a profile"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise AmpValueError(
            f"{path}:{line}: not a text file in UTF-8: {error.reason}; save it as UTF-8"
        ) from None
    bad = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
    if bad:
        line = text.count("\n", 0, bad.start()) + 1
        raise AmpValueError(
            f"{path}:{line}: not a text file in UTF-8: it has the character {bad[0]!r}; save it "
            "as UTF-8"
        )
    return text


@functools.cache
def _loader() -> Any:
    """Return a loader that constructs nothing, and stops at what is too deep or too much."""
    import yaml

    class Loader(yaml.BaseLoader):
        depth = count = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            self.count += 1
            if self.depth > _DEEPEST or self.count > _MOST_VALUES:
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                what = (
                    f"more than {_DEEPEST} levels deep"
                    if self.depth > _DEEPEST
                    else f"more than {_MOST_VALUES} values"
                )
                raise yaml.MarkedYAMLError(problem=f"{what}, which no profile is", problem_mark=mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader


class _Reader:
    """What reads the nodes of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left = _MOST_VALUES
        self._letters_left = LARGEST_FILE
        self._inside: set[int] = set()
        """The nodes that are being read now, by their ids: an alias may be inside of what it names."""

    def fail(self, node: Any, problem: str) -> NoReturn:
        """Raise an AmpValueError that begins with file and line."""
        raise AmpValueError(f"{self.path}:{node.start_mark.line + 1}: {problem}")

    def check_tag(self, node: Any, kind: str) -> None:
        """Refuse what has another tag than its kind of node: no tag makes anything here."""
        if node.tag != f"tag:yaml.org,2002:{kind}":
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.fail(node, f"not valid YAML here: the tag {brief(tag)}; leave it out")

    def pairs(self, mapping: Any) -> Iterator[tuple[str, Any, int]]:
        """Yield the keys of a mapping's node, with the nodes of their values and their lines."""
        seen: dict[str, int] = {}
        for key_node, node in mapping.value:
            if not isinstance(key_node.value, str):
                self.fail(key_node, "a list or mapping stands in the place of a key; write a name")
            self.check_tag(key_node, "str")
            self._spend(key_node)
            key, line = key_node.value, key_node.start_mark.line + 1
            if key == "<<":
                self.fail(
                    key_node, "a merge key ('<<') is not understood; write 'extends:', or each key"
                )
            if key in seen:
                self.fail(key_node, f"{brief(key)} was set on line {seen[key]} already")
            seen[key] = line
            yield key, node, line

    def _spend(self, node: Any) -> None:
        """Count a scalar's characters: aliases may repeat a long one as often as there are values."""
        self._letters_left -= len(node.value)
        if self._letters_left < 0:
            self.fail(
                node, f"aliases stand for more than {LARGEST_FILE} characters, which no profile has"
            )

    def value(self, node: Any, above: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Any:
        """Return what a node holds, and put the lines of what is inside it into `lines`."""
        self._left -= 1
        if self._left < 0:
            self.fail(node, f"aliases stand for more than {_MOST_VALUES} values, which no profile has")
        if id(node) in self._inside or len(above) > _DEEPEST:
            self.fail(node, "an alias stands inside of what it names, or too deep; write the value out")
        if isinstance(node.value, str):
            self.check_tag(node, "str")
            self._spend(node)
            return node.value if node.style else self._plain(node)
        self._inside.add(id(node))
        try:
            return self._container(node, above, lines)
        finally:
            self._inside.remove(id(node))

    def _container(self, node: Any, above: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Any:
        import yaml

        if isinstance(node, yaml.MappingNode):
            self.check_tag(node, "map")
            value = {}
            for key, inner, line in self.pairs(node):
                lines[*above, key] = line
                value[key] = self.value(inner, (*above, key), lines)
            return value
        self.check_tag(node, "seq")
        for i, item in enumerate(node.value):
            name = item.value if isinstance(item.value, str) else str(i)
            lines[*above, name] = item.start_mark.line + 1
        return [self.value(item, (*above, str(i)), lines) for i, item in enumerate(node.value)]

    def _plain(self, node: Any) -> Any:
        """Return what version 1.2's core schema says that a scalar without quotes is."""
        text = node.value
        for pattern, read in _CORE_SCHEMA.items():
            if re.fullmatch(pattern, text):
                if len(text) > _MOST_DIGITS:
                    self.fail(node, f"a number of {len(text)} digits, which no property is")
                return read(text)
        return text


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_CORE_SCHEMA: dict[str, Callable[[str], Any]] = {
    r"~|null|Null|NULL|": lambda text: None,
    r"true|True|TRUE|false|False|FALSE": lambda text: text.lower() == "true",
    r"[-+]?[0-9]+": int,
    r"0o[0-7]+|0x[0-9a-fA-F]+": lambda text: int(text, 0),
    _NUMBER: float,
    r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)": lambda text: float(text.replace(".", "")),
}
