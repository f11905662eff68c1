"""Levels, aliases and files of the user's own, as properties.

A level is a file in `configs/`, named as it is: nothing else lists them. Its `aliases` are other
names for it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp.errors import (
    AmpError,
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
    ProfileNotFoundError,
    did_you_mean,
)
from amp.profiles.keys import find_key
from amp.profiles.properties import PROPERTY_KEYS, Properties, changed, override
from amp.profiles.rules import parse_rules
from amp.profiles.yamlfile import Entry, read_mapping

CONFIGS = Path(__file__).parents[1] / "configs"
LEVELS = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
"""The files of the levels, by name."""


@functools.cache
def aliases() -> dict[str, str]:
    """Return the level of each alias."""
    return {
        alias: level
        for level, path in LEVELS.items()
        for entry in read_mapping(path)
        if entry.key == "aliases"
        for alias in entry.value
    }


def load_profile(name_or_path: str | os.PathLike[str]) -> Properties:
    """Return what a level, an alias or a YAML file resolves to.

    Args:
        name_or_path: a level such as `"O2"`; an alias such as `"16-mixed"`; or a path, with a suffix
            or a directory in it, to a YAML file, which may `extends:` any of these.

    Raises:
        AmpRuntimeError: an unknown level, or properties that do not fit together.
        AmpValueError, AmpTypeError, AmpAssertionError: an error in the file.
        ProfileNotFoundError: there is no file at the path.
    """
    return _load(_locate(name_or_path, "opt_level"), ())


def resolve(opt_level: str | os.PathLike[str], overrides: Mapping[str, Any]) -> Properties:
    """Return the profile's properties with the overrides on top.

    Raises:
        AmpTypeError: an override that does not exist.
        AmpError: whatever `load_profile` and the check of the whole raise.
    """
    return override(load_profile(opt_level), overrides)


def _locate(name_or_path: object, what: str, beside: Path | None = None) -> Path:
    """Return the file of a level, an alias or a path, which may be relative to the file `beside`."""
    if isinstance(name_or_path, str):
        if name_or_path in LEVELS:
            return LEVELS[name_or_path]
        if name_or_path in aliases():
            return LEVELS[aliases()[name_or_path]]
    if isinstance(name_or_path, (str, os.PathLike)):
        path = Path(name_or_path)
        if path.suffix or len(path.parts) > 1:
            if beside is not None:
                path = beside.parent / path
            if not path.is_file():
                raise ProfileNotFoundError(
                    f"{what}={str(name_or_path)!r}: there is no file {path.absolute()}"
                )
            return path
    raise AmpRuntimeError(
        f"{what}={name_or_path!r} is not one of {', '.join(LEVELS)}{_hint(name_or_path)}"
    )


def _hint(name: object) -> str:
    """Say which level was probably meant: '02', 'o2', '2' and 2 all mean 'O2'."""
    text = str(name).strip()
    digit = re.fullmatch(r"[oO0]?([oO\d])", text)
    probably = digit and f"O{digit[1].upper().replace('O', '0')}"
    if probably in LEVELS:
        return f"; did you mean '{probably}' (letter O)?"
    return (
        did_you_mean(text, (*LEVELS, *aliases()))
        or f", the aliases {', '.join(aliases())}, or a path to a YAML file"
    )


def _load(path: Path, chain: tuple[Path, ...]) -> Properties:
    """Read `path`; `chain` holds the files that extend it, outermost first."""
    chain = (*chain, path.resolve())
    entries = {entry.key: entry for entry in read_mapping(path)}
    base = Properties()
    if "extends" in entries:
        entry = entries.pop("extends")
        try:
            parent = _locate(entry.value, "extends", path)
        except (AmpRuntimeError, ProfileNotFoundError) as error:
            raise type(error)(f"{path}:{entry.line}: {error}") from None
        if parent.resolve() in chain:
            names = " -> ".join(p.name for p in (*chain, parent))
            raise AmpValueError(f"{path}:{entry.line}: 'extends' goes in a circle: {names}")
        base = _load(parent, chain)
    changes: dict[str, Any] = {"brief": ""}
    if path in LEVELS.values():
        changes["opt_level"] = path.stem
        entries.pop("aliases", None)
    for entry in entries.values():
        try:
            changes |= _fields(entry, path, base)
        except AmpError as error:
            line = _line_of(entry, str(error))
            where = "" if str(error).startswith(f"{path}:") else f"{path}:{line}: "
            raise type(error)(f"{where}{error}") from None
    try:
        return changed(base, changes)
    except AmpRuntimeError as error:
        culprit = entries.get(error.property_name or "")
        raise AmpRuntimeError(f"{path}:{culprit.line if culprit else 1}: {error}") from None


def _fields(entry: Entry, path: Path, base: Properties) -> dict[str, Any]:
    if entry.key == "brief":
        return {"brief": str(entry.value)}
    if entry.key == "rules":
        sources = [f"{path}:{line}" for line in entry.item_lines]
        return {"rules": base.rules + parse_rules(entry.value, sources)}
    if entry.key == "opt_level":
        raise AmpTypeError("there is no property 'opt_level'; did you mean 'extends'?")
    key = find_key(entry.key, PROPERTY_KEYS, "there is no property", ("extends", "brief"))
    return {key.field: key.parse(key.name, entry.value)}


def _line_of(entry: Entry, message: str) -> int:
    """Return the line of the inner key that the message names, or else the entry's own."""
    for keys, line in entry.lines.items():
        key = keys[-1]
        if re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", message.partition(";")[0]):
            return line
    return entry.line
