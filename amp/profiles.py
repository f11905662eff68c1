"""YAML -> `Properties`: levels, aliases, a user's files, `extends`.

Every error in a file names the file and the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
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
from amp.properties import (
    OVERRIDE_KEYS,
    PROPERTY_KEYS,
    Properties,
    override,
    parse_loss_scale,
    parse_property,
)
from amp.rules import parse_rules
from amp.yamlfile import Entry, read_mapping

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
ALIASES = {"32-true": "O0", "16-mixed": "O1", "16-true": "O3", "bf16-mixed": "O4"}

CONFIGS = Path(__file__).with_name("configs")
_FILE_KEYS = ("extends", "brief", *PROPERTY_KEYS)


def load_profile(name_or_path: str | os.PathLike[str]) -> Properties:
    """Return what a level, an alias or a YAML file resolves to.

    Args:
        name_or_path: `"O0"` to `"O5"`; `"32-true"`, `"16-mixed"`, `"16-true"`, `"bf16-mixed"`; or a
            path (with a suffix or a directory in it) to a YAML file, which may `extends:` any of
            these and set any property.

    Returns:
        The frozen `Properties`.

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
    for name in overrides:
        if name not in OVERRIDE_KEYS:
            raise AmpTypeError(
                f"there is no property '{name}'; allowed: {', '.join(OVERRIDE_KEYS)}"
                f"{did_you_mean(name, OVERRIDE_KEYS)}"
            )
    return override(load_profile(opt_level), overrides)


def _locate(name_or_path: object, what: str, beside: Path | None = None) -> Path:
    """Return the file of a level, an alias or a path, which may be relative to the file `beside`."""
    if isinstance(name_or_path, str):
        name = ALIASES.get(name_or_path, name_or_path)
        if name in LEVELS:
            return CONFIGS / f"{name}.yaml"
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
    digits = re.fullmatch(r"[oO0]?([oO0-5])", text)
    if digits:
        return f"; did you mean 'O{digits[1].upper().replace('O', '0')}' (letter O)?"
    return (
        did_you_mean(text, (*LEVELS, *ALIASES))
        or f", the aliases {', '.join(ALIASES)}, or a path to a YAML file"
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
    if path.parent == CONFIGS:
        changes["opt_level"] = path.stem
    for entry in entries.values():
        try:
            changes |= _fields(entry, path, base)
        except AmpError as error:
            line = _line_of(entry, str(error))
            where = "" if str(error).startswith(f"{path}:") else f"{path}:{line}: "
            raise type(error)(f"{where}{error}") from None
    try:
        return replace(base, **changes)
    except AmpRuntimeError as error:
        culprit = entries.get(error.property_name or "")
        raise AmpRuntimeError(f"{path}:{culprit.line if culprit else 1}: {error}") from None


def _fields(entry: Entry, path: Path, base: Properties) -> dict[str, Any]:
    if entry.key == "brief":
        return {"brief": str(entry.value)}
    if entry.key not in PROPERTY_KEYS:
        raise AmpTypeError(
            f"there is no property '{entry.key}'; allowed: {', '.join(_FILE_KEYS)}"
            + ("; did you mean 'extends'?" if entry.key == "opt_level" else "")
            + did_you_mean(entry.key, _FILE_KEYS)
        )
    if entry.key == "loss_scale":
        return {"loss_scaling": parse_loss_scale(entry.value)}
    if entry.key == "rules":
        sources = [f"{path}:{line}" for line in entry.item_lines]
        return {"rules": base.rules + parse_rules(entry.value, sources)}
    return parse_property(entry.key, entry.value)


def _line_of(entry: Entry, message: str) -> int:
    """Return the line of the inner key that the message names, or else the entry's own."""
    for keys, line in entry.lines.items():
        key = keys[-1]
        if re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", message.partition(";")[0]):
            return line
    return entry.line
