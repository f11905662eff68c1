"""Reading a YAML mapping by YAML 1.2's rules, with the line of each key.

PyYAML follows YAML 1.1, where `no` and `off` are False, `1e-3` is a string and `010` is 8. Here a
plain scalar is read by the core schema of YAML 1.2. PyYAML is imported on first use, and constructs no
objects. A damaged file raises an error with file and line. What its keys mean is checked by
`profile_file.py` for profiles, and by `amp.casting.policy` for op tables.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from amp.errors import AmpValueError, brief
from amp.profiles.keys import shortened

Lines = dict[tuple[str, ...], int]
"""The line of each key of a file, by the path of keys to it. In the path, an item of a list is named by
its text, or by its position if it is a list or mapping itself."""


def read_mapping(path: Path) -> tuple[dict[str, Any], Lines]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        AmpValueError: the file is not such a file, is larger than any profile, or has what profiles do
            not use. The message begins with file and line.
    """
    import yaml

    text = _text_of(path)
    reader = _Reader(path)
    try:
        top = yaml.compose(text, yaml.BaseLoader)
        if top is None:
            return {}, {}
        if not isinstance(top, yaml.MappingNode):
            reader.fail(top, "expected a mapping of 'property: value' lines")
        return reader.value(top, ()), reader.lines
    except AmpValueError:
        raise
    except RecursionError:
        raise _error(path, 0, "values are nested too deeply, or one holds its own alias") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: from odd escapes
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = shortened(getattr(error, "problem", error))  # it may repeat a name of any length
        raise _error(path, mark.line if mark else 0, f"not valid YAML: {problem}") from None


LARGEST_FILE = 2**16
"""In bytes: a hundred times the size of a profile."""


def _error(path: Path, above: int, problem: str) -> AmpValueError:
    """Return an error in the line of a file that has `above` lines above it."""
    return AmpValueError(f"{path}:{above + 1}: {problem}")


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _error(path, 0, f"the file cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        what = f"the file is larger than {LARGEST_FILE} bytes, which no profile is"
        raise _error(path, 0, f"{what}; give the path of a profile")
    text = content.decode("utf-8", "surrogateescape")
    bad = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
    if bad:
        problem = f"not a text file in UTF-8: it has the character {bad[0]!r}; save it as UTF-8"
        raise _error(path, text.count("\n", 0, bad.start()), problem)
    return text


class _Reader:
    """Reads the nodes of one file, and records the lines of its keys."""

    _TAGS: ClassVar = {"scalar": "str", "sequence": "seq", "mapping": "map"}
    """The default tag of each kind of node."""

    def __init__(self, path: Path) -> None:
        self.lines: Lines = {}
        self._path = path

    def fail(self, node: Any, problem: str) -> NoReturn:
        """Raise an AmpValueError that begins with file and line."""
        raise _error(self._path, node.start_mark.line, problem)

    def value(self, node: Any, above: tuple[str, ...]) -> Any:
        """Return the value of a node; `above` are the keys that lead to it."""
        self._check_tag(node)
        if node.id == "scalar":
            return node.value if node.style else self._plain(node)
        if node.id == "sequence":
            for i, item in enumerate(node.value):
                name = item.value if isinstance(item.value, str) else str(i)
                self.lines[*above, name] = item.start_mark.line + 1
            return [self.value(item, (*above, str(i))) for i, item in enumerate(node.value)]
        value = {}
        for key_node, inner in node.value:
            key = self._key(key_node)
            if key in value:
                line = self.lines[*above, key]
                self.fail(key_node, f"{brief(key)} was set on line {line} already")
            self.lines[*above, key] = key_node.start_mark.line + 1
            value[key] = self.value(inner, (*above, key))
        return value

    def _key(self, node: Any) -> str:
        if not isinstance(node.value, str):
            self.fail(node, "a list or mapping stands where a key should be; write a name")
        self._check_tag(node)
        if node.value == "<<":
            self.fail(node, "merge keys ('<<') are not allowed; write 'extends:', or each key")
        return str(node.value)

    def _check_tag(self, node: Any) -> None:
        """Refuse a node with a tag other than the default one of its kind."""
        if node.tag != f"tag:yaml.org,2002:{self._TAGS[node.id]}":
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.fail(node, f"not valid YAML here: the tag {brief(tag)}; leave it out")

    def _plain(self, node: Any) -> Any:
        """Return the value of a scalar without quotes, by the core schema of YAML 1.2."""
        text = node.value
        for pattern, read in _CORE_SCHEMA.items():
            if re.fullmatch(pattern, text):
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
