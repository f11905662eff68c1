"""Resolving levels, aliases, files of profiles and overrides to properties, and what fits together.

A level is a file in `configs/` with its name, and its `aliases` are other names for it; the only other
list of levels is `options.Level`, for type checkers. Properties are checked together, not one after
another as in apex, so that a legal combination does not depend on the order in which its parts are
given. The keys of a file are checked where it is read, in `profile_file.py`.
"""

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from amp.dtypes import DTYPES, LOW_PRECISION
from amp.errors import (
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
    ProfileNotFoundError,
    brief,
    did_you_mean,
)
from amp.profiles.keys import find_key, shortened, shown
from amp.profiles.options import OptLevel
from amp.profiles.profile_file import ProfileFile
from amp.profiles.properties import OVERRIDE_KEYS, SCALE_BOUNDS, Properties, check_once, hint_at
from amp.profiles.yaml_syntax import read_mapping

CONFIGS = Path(__file__).parents[1] / "configs"
_BY_NUMBER = sorted(CONFIGS.glob("*.yaml"), key=lambda path: (len(path.stem), path.stem))
LEVELS: dict[Any, Path] = {path.stem: path for path in _BY_NUMBER}
"""The files of the levels, by name."""
_OF_SESSIONS = ("num_losses", "verbosity", "process_group")
"""The arguments of a session that are no properties."""


@functools.cache
def aliases() -> dict[str, str]:
    """Return the aliases, each with its level."""
    return {
        alias: level
        for level, path in LEVELS.items()
        for alias in read_mapping(path)[0].get("aliases", ())
    }


def levels_with(name: str) -> str:
    """Return the levels where a property is true, for messages: `'O2' (float16) or 'O5' (bfloat16)`."""
    profiles = [p for p in map(load_profile, LEVELS) if getattr(p, name) and p.fp8 is None]
    return " or ".join(f"'{p.opt_level}' ({shown(compute_dtype(p))})" for p in profiles)


def compute_dtype(p: Properties) -> torch.dtype | Literal[False] | None:
    """Return the dtype of matrix products outside of FP8; None or False for that of the inputs."""
    return p.patch_torch_functions_type or p.cast_model_type


def load_profile(name_or_path: OptLevel) -> Properties:
    """Return the properties of a level, an alias or a YAML file.

    Args:
        name_or_path: a level such as `"O2"`; an alias such as `"16-mixed"`; or a path, with a suffix
            or a directory in it, to a YAML file, which may `extends:` any of these.

    Raises:
        AmpRuntimeError: an unknown level, or properties that do not fit together.
        AmpValueError, AmpTypeError, AmpAssertionError: an error in the file.
        ProfileNotFoundError: there is no file at the path.
    """
    return _load(_locate(name_or_path, "opt_level"), ())


def resolve(opt_level: OptLevel, overrides: Mapping[str, Any]) -> Properties:
    """Return the profile's properties with every override that is not None on top.

    `rules` are added to the profile's rules and take precedence. `min_loss_scale` and `max_loss_scale`
    bound the loss scaling of the profile, or of `loss_scale`.

    Raises:
        AmpTypeError: an override that does not exist.
        AmpError: the profile, a value or the combination is not valid.
    """
    properties = load_profile(opt_level)
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        key = find_key(name, OVERRIDE_KEYS, "there is no property", _OF_SESSIONS, hint_at)
        if value is not None:
            check_once(key, overrides)
            changes[key.field] = key.parse(key.name, value)
    if "rules" in changes:
        changes["rules"] = properties.rules + changes["rules"]
    bounds = {SCALE_BOUNDS[name]: changes.pop(name) for name in SCALE_BOUNDS if name in changes}
    own, low, high = changes.get("loss_scaling"), bounds.get("min") or 0.0, bounds.get("max", math.inf)
    if own is not None and not own.dynamic and not low <= own.init <= high:
        raise AmpValueError(
            f"loss_scale={own.init:g} is a fixed scale, and not between min_loss_scale={low:g} and "
            f"max_loss_scale={high:g}; leave these out, or pass loss_scale='dynamic'"
        )
    changes["loss_scaling"] = replace(own or properties.loss_scaling, **bounds)
    return _changed(properties, changes)


# Files.


def _locate(name_or_path: object, what: str, beside: Path | None = None) -> Path:
    """Return the file of a level, an alias or a path, which may be relative to the file `beside`."""
    if isinstance(name_or_path, str):
        level = name_or_path if name_or_path in LEVELS else aliases().get(name_or_path)
        if level is not None:
            return LEVELS[level]
    if isinstance(name_or_path, (str, os.PathLike)):
        try:
            text = os.fsdecode(name_or_path)
        except TypeError as error:  # from a PathLike that returns no path
            raise AmpTypeError(f"{what}={brief(name_or_path)} is no path: {error}") from None
        path = Path(text)
        if path.suffix or len(path.parts) > 1:
            path = beside.parent / path if beside else path
            if not os.path.isfile(path):  # noqa: PTH113  Path.is_file raises if the name is too long
                where = path.absolute() if len(str(path)) < 1000 else "of so long a name"
                raise ProfileNotFoundError(f"{what}={brief(text)}: there is no file {where}")
            return path
    if isinstance(name_or_path, Mapping):
        level = name_or_path.get("extends", "O1")
        others = [f"{key}={value!r}" for key, value in name_or_path.items() if key != "extends"]
        given = shortened(", ".join([f"opt_level={level!r}", *others]))
        raise AmpTypeError(
            f"{what} takes a level, or the path of a YAML file, and got {brief(name_or_path)}. Write "
            f"the keys into a file, or pass them as keywords: {given}"
        )
    raise AmpRuntimeError(
        f"{what}={brief(name_or_path)} is not one of {', '.join(LEVELS)}{_hint(name_or_path)}"
    )


def _hint(name: object) -> str:
    """Return a hint at the level that was probably meant: '02', 'o2', '2' and 2 all mean 'O2'."""
    text = name.strip() if isinstance(name, str) else brief(name)
    digit = re.fullmatch(r"[oO0]?([oO\d])", text)
    probably = digit and f"O{digit[1].upper().replace('O', '0')}"
    if probably in LEVELS:
        return f"; did you mean '{probably}' (letter O)?"
    return (
        _levels_of(text)
        or did_you_mean(text, (*LEVELS, *aliases()))
        or f", the aliases {', '.join(aliases())}, or a path to a YAML file"
    )


_FORMATS = {**DTYPES, "16": torch.float16, "32": torch.float32, "fp8": "FP8", "float8": "FP8"}
_FORMATS |= {"fp4": "FP4", "nvfp4": "FP4", "float4": "FP4"}
_FORMATS |= {"no": torch.float32, "none": torch.float32, "transformer": "FP8", "engine": "FP8"}


def _format_of(p: Properties) -> object:
    """Return the format of most matrix products."""
    return p.fp8.number_format if p.fp8 else compute_dtype(p)


def _levels_of(text: str) -> str:
    """Return a hint at the levels that match a number format, or a word such as `mixed`."""
    profiles = list(map(load_profile, LEVELS))
    for word in re.split("[-_ ]", text.lower().removeprefix("torch.")):
        if word in ("amp", "autocast", "mixed"):
            wanted = [p for p in profiles if p.patch_torch_functions]
        elif word in ("pure", "true"):
            wanted = [p for p in profiles if not p.patch_torch_functions]
        elif word in _FORMATS:
            wanted = [p for p in profiles if _format_of(p) == _FORMATS[word]]
        else:
            return ""
        profiles = wanted or profiles
    return "; did you mean " + " or ".join(f"'{p.opt_level}' ({p.brief})" for p in profiles) + "?"


def _load(path: Path, outer: tuple[Path, ...]) -> Properties:
    """Resolve the file `path`; `outer` holds the files that extend it, outermost first."""
    outer = (*outer, path.resolve())
    file = ProfileFile(path)
    base = Properties()
    if file.has_parent:
        with file.errors_at("extends"):
            parent = _locate(file.extends, "extends", path)
            names = [each.name for each in (*outer, parent)]
            if parent.resolve() in outer:
                raise AmpValueError(f"'extends' goes in a circle: {' -> '.join(names)}")
        base = _load(parent, outer)
    is_level = path in LEVELS.values()
    changes = file.changes(is_level)
    if is_level:
        changes["opt_level"] = path.stem
    if "rules" in changes:
        changes["rules"] = base.rules + changes["rules"]
    with file.misfits_at_their_line():
        return _changed(base, changes)


# What fits together.


def _changed(base: Properties, changes: Mapping[str, Any]) -> Properties:
    """Return properties with some fields changed, if the result fits together."""
    properties = replace(base, **changes)
    where = properties.opt_level or "a profile with patch_torch_functions"
    by_op = base.patch_torch_functions_type if base.opt_level else properties.patch_torch_functions
    misfits = _by_op_misfits(properties, base) if by_op else _misfits(properties)
    for name, value, remedy in chain(misfits, _fp8_misfits(properties)):
        raise AmpRuntimeError(f"{name}={shortened(value)} does not fit {where}: {remedy}")
    return properties


Misfit = tuple[str, object, str]
"""A property, its value that does not fit the others, and what to do."""


def _by_op_misfits(p: Properties, base: Properties) -> Iterator[Misfit]:
    """Yield what does not fit a profile that casts functions, made of `base`."""
    if p.cast_model_type not in (None, False, torch.float32):
        take = f"Take opt_level={levels_with('master_weights')} instead."
        yield "cast_model_type", p.cast_model_type, f"weights stay FP32 there. {take}"
    for name in ("keep_batchnorm_fp32", "keep_norm_fp32"):
        if getattr(p, name) is not None:
            yield name, getattr(p, name), "norms are FP32 there already. Leave it out."
    if p.buffer_dtype is not None:
        yield "buffer_dtype", p.buffer_dtype, "buffers keep their dtype there. Leave it out."
    if p.master_weights is not None:
        take = f"Leave it out, or take opt_level={levels_with('master_weights')}."
        yield "master_weights", p.master_weights, f"the weights are FP32 themselves there. {take}"
    dtype = p.patch_torch_functions_type
    if base.opt_level and dtype not in (None, base.patch_torch_functions_type):
        take = f"Take opt_level={levels_with('patch_torch_functions')}."
        yield "patch_torch_functions_type", dtype, f"each level casts to its own dtype. {take}"
    if p.patch_torch_functions and dtype not in LOW_PRECISION:
        yield "patch_torch_functions_type", dtype, "say float16 or bfloat16."
    for rule in p.rules:
        # At a level with FP8, a rule for the level's own dtype keeps modules out of FP8.
        allowed = (torch.float32, dtype) if p.fp8 and rule.kind == "module" else (torch.float32,)
        if rule.kind != "op" and rule.dtype not in allowed:
            names, kind = " and ".join(map(shown, allowed)), rule.kind
            remedy = f"weights are FP32 there, so {kind}s can be cast to {names} only; ops to anything."
            yield "rules", rule, remedy


def _misfits(p: Properties) -> Iterator[Misfit]:
    """Yield properties that do not fit a profile that casts no functions."""
    names = ("patch_torch_functions", "patch_torch_functions_type")
    of_functions: list[tuple[str, object]] = [(name, getattr(p, name)) for name in names]
    of_functions += [("rules", rule) for rule in p.rules if rule.kind == "op"]
    for name, value in of_functions:
        if value:
            levels = levels_with("patch_torch_functions")
            yield name, value, f"functions cast only at opt_level={levels}. Take one of these."
    if p.buffer_dtype is not None and not p.casts_model:
        yield "buffer_dtype", p.buffer_dtype, "no buffer is cast there. Leave it out."
    has_16_bits = any(rule.kind != "op" and rule.dtype in LOW_PRECISION for rule in p.rules)
    if isinstance(p.master_weights, str) and p.cast_model_type is torch.float32 and not has_16_bits:
        take = f"Leave it out, or take opt_level={levels_with('master_weights')}."
        yield "master_weights", p.master_weights, f"the weights are FP32 themselves there. {take}"
    for rule in p.rules:
        if rule.kind != "op" and rule.dtype is None:
            what = "a module's weights have" if rule.kind == "module" else "a tensor has"
            yield "rules", rule, f"{what} to have some dtype. Say float32, float16 or bfloat16."
        elif rule.kind == "tensor" and not p.casts_model:
            yield "rules", rule, "no parameter or buffer is cast there. Leave it out."


def _fp8_misfits(p: Properties) -> Iterator[Misfit]:
    """Yield `fp8` if the rest of the model does not run in half precision."""
    dtype = p.patch_torch_functions_type if p.patch_torch_functions else p.cast_model_type
    if p.fp8 is not None and dtype not in LOW_PRECISION:
        levels = " or ".join(repr(level) for level in LEVELS if load_profile(level).fp8)
        low = p.fp8.number_format
        where = f"linear layers run in {low} where the rest of the model is float16 or bfloat16"
        take = f"Take opt_level={levels}, or fp8 on top of a level of half precision."
        yield "fp8", p.fp8, f"{where}. {take}"
