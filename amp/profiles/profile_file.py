"""Reading a file of a profile: every key is checked here, and an error names the file and the line."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amp.errors import AmpError, AmpRuntimeError, AmpTypeError, AmpValueError
from amp.profiles.keys import find_key, wrong_type
from amp.profiles.properties import PROPERTY_KEYS, check_once, hint_at
from amp.profiles.rules import parse_rules
from amp.profiles.yaml_syntax import read_mapping


class ProfileFile:
    """A YAML file with keys of a profile.

    Args:
        path: the path of the file.

    Attributes:
        path: the same.
        extends: the value of `extends`; see `has_parent`.

    Raises:
        AmpValueError: the file has no keys, or is no YAML as profiles are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values, self._lines = read_mapping(path)
        if not self._values:
            what = "the file has no keys; write 'extends: O2', or another level, and what is to change"
            raise AmpValueError(f"{path}:1: {what}")
        self.extends = self._values.pop("extends", None)

    @property
    def has_parent(self) -> bool:
        """Whether the file extends something."""
        return ("extends",) in self._lines

    def changes(self, is_level: bool) -> dict[str, Any]:
        """Return the checked value of each field that the file sets; `rules` are its own alone.

        Args:
            is_level: whether this is the file of a level, which may have `aliases`.

        Raises:
            AmpError: a key or a value is not valid. The message begins with file and line.
        """
        changes: dict[str, Any] = {"brief": ""}
        for name, value in self._values.items():
            if name == "aliases" and is_level:
                continue
            with self.errors_at(name):
                if name == "rules":
                    changes[name] = parse_rules(name, value, self._sources_of(name))
                else:
                    changes |= _field(name, value, self._values)
        return changes

    def _sources_of(self, name: str) -> list[str]:
        """Return file and line of each item of a list."""
        lines = self._lines.items()
        return [f"{self.path}:{line}" for keys, line in lines if keys[0] == name and len(keys) == 2]

    @contextmanager
    def errors_at(self, name: str) -> Iterator[None]:
        """Add file and line to errors: the line of a key, or of the nested key that an error names."""
        try:
            yield
        except AmpError as error:
            message = str(error)
            if message.startswith(f"{self.path}:"):
                raise
            what, lines = message.partition(";")[0], self._lines
            inside = [keys for keys in lines if keys[0] == name and keys[1:]]
            named = [lines[keys] for keys in inside if _is_word_of(what, keys[-1])] or [lines[name,]]
            raise type(error)(f"{self.path}:{named[0]}: {message}") from None

    @contextmanager
    def misfits_at_their_line(self) -> Iterator[None]:
        """Add file and line to an error about properties that do not fit together."""
        try:
            yield
        except AmpRuntimeError as error:  # its message begins with the name of the property
            line = self._lines.get((str(error).partition("=")[0],), 1)
            raise AmpRuntimeError(f"{self.path}:{line}: {error}") from None


def _is_word_of(text: str, word: str) -> bool:
    """Whether a text contains a word, as a whole word."""
    return word in text and bool(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text))


def _field(name: str, value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that a key of a profile sets; `values` has them all."""
    if name == "brief":
        if isinstance(value, (list, dict)):
            raise wrong_type(name, value, "give a line of text")
        return {name: str(value)}
    if name in ("opt_level", "level"):
        raise AmpTypeError(f"there is no property '{name}'; did you mean 'extends'?")
    key = find_key(name, PROPERTY_KEYS, "there is no property", ("extends", "brief"), hint_at)
    check_once(key, values)
    return {key.field: key.parse(key.name, value)}
