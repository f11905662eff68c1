"""What fits a GPU: rows of memory to compare, activations of a transformer, and an answer in words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from amp.errors import AmpValueError, did_you_mean
from amp.numerics.memory import TERMS, Footprint, check_sharding, footprint
from amp.profiles.levels import LEVELS, compute_dtype, load_profile
from amp.terminal.text import bytes_in_words


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        memory: its bytes.
        has_bfloat16: whether it computes in bfloat16.
        has_fp8: whether it has FP8 tensor cores.
        has_fp4: whether it has FP4 tensor cores.
    """

    memory: float
    has_bfloat16: bool = True
    has_fp8: bool = False
    has_fp4: bool = False

    def runs(self, level: Any) -> bool:
        """Whether it computes in the formats of a level, without emulation."""
        profile = load_profile(level)
        if profile.fp8 is not None:
            return self.has_fp4 if profile.fp8.is_fp4 else self.has_fp8
        return self.has_bfloat16 or compute_dtype(profile) is not torch.bfloat16


GPUS = {
    "V100": Gpu(32e9, has_bfloat16=False),
    "T4": Gpu(16e9, has_bfloat16=False),
    "A10": Gpu(24e9),
    "A100": Gpu(80e9),
    "A100-40GB": Gpu(40e9),
    "RTX3090": Gpu(24e9),
    "L4": Gpu(24e9, has_fp8=True),
    "L40S": Gpu(48e9, has_fp8=True),
    "RTX4090": Gpu(24e9, has_fp8=True),
    "H100": Gpu(80e9, has_fp8=True),
    "H200": Gpu(141e9, has_fp8=True),
    "B200": Gpu(180e9, has_fp8=True, has_fp4=True),
    "MI250X": Gpu(64e9),  # each of its two devices
    "MI300X": Gpu(192e9, has_fp8=True),
}
"""Kinds of GPU, with the memory of the largest version unless the name says another one."""


def as_gpu(name: str) -> Gpu:
    """Return the GPU of a name, in upper or lower case.

    Raises:
        argparse.ArgumentTypeError: it is not known.
    """
    known = {each.lower(): gpu for each, gpu in GPUS.items()}
    if name.lower() not in known:
        hint = did_you_mean(name.upper(), GPUS, cutoff=0.7) or f"; known are {', '.join(GPUS)}"
        raise argparse.ArgumentTypeError(f"{name!r} is not known; give --gpu-memory{hint}")
    return known[name.lower()]


_UNITS = {"": 1e9, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40, "m": 1e6, "g": 1e9, "t": 1e12}


def as_bytes(text: str) -> float:
    """Return the bytes of a size such as 80GB, 40GiB or 80, which is GB.

    Raises:
        argparse.ArgumentTypeError: it is no such size.
    """
    bare = text.strip().lower()
    digits = bare.rstrip("bgikmt ")
    try:
        return float(digits) * _UNITS[bare.removeprefix(digits).strip()]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 80GB, 40GiB or 80") from None


@dataclass(frozen=True)
class Transformer:
    """The shape of a GPT: blocks of attention and of an MLP four times as wide, and an embedding.

    Attributes:
        layers: how many blocks.
        width: numbers for each token.
        sequence: tokens of a sequence.
        batch: sequences of a batch.
        vocabulary: different tokens.
        heads: heads of attention; 0 takes one for 64 numbers.
        checkpointing: whether blocks keep only their inputs, and run again in the backward.
        flash: whether attention keeps no scores.
    """

    layers: int
    width: int
    sequence: int
    batch: int
    vocabulary: int = 50304
    heads: int = 0
    checkpointing: bool = False
    flash: bool = True

    @property
    def parameters(self) -> int:
        """How many parameters it has, with tied embeddings."""
        blocks = self.layers * (12 * self.width**2 + 13 * self.width)
        return blocks + (self.vocabulary + self.sequence + 2) * self.width

    @property
    def activations(self) -> tuple[float, float]:
        """The number of elements kept for backward: inputs of linear layers, and others.

        A block keeps for each token and hidden unit the inputs of its linear layers (1 of q, k and v
        together, 1 of the output, 1 and 4 of the MLP), those of two norms, q, k and v, and 4 of the
        GELU. The loss keeps the logarithms of probabilities, in FP32.
        """
        tokens = self.sequence * self.batch
        unit, heads = tokens * self.width, self.heads or max(1, self.width // 64)
        scores = 0 if self.flash else 2 * heads * self.sequence * tokens
        blocks = 1 if self.checkpointing else self.layers
        inputs = self.layers * unit if self.checkpointing else 0
        return blocks * 7 * unit, blocks * (9 * unit + scores) + inputs + 2 * tokens * self.vocabulary

    def cache(self, size: int) -> int:
        """Return the bytes of keys and values of inference, in numbers of so many bytes."""
        return 2 * self.layers * self.width * self.sequence * self.batch * size


class Row(NamedTuple):
    """A way to train.

    Attributes:
        levels: the levels that need the same memory.
        optimizer: the optimizer, and how it keeps masters and moments.
        footprint: the memory.
    """

    levels: tuple[str, ...]
    optimizer: str
    footprint: Footprint


def rows_of(parameters: float, optimizer: str, gpu: Gpu | None = None, **options: Any) -> Iterator[Row]:
    """Yield ways to train, those of equal memory as one; for an Adam also with lean masters.

    Args:
        parameters: how many.
        optimizer: its name, as in `footprint`.
        gpu: leaves out levels that it emulates.
        **options: `activations`, `linear_inputs`, `world_size`, `sharding`.
    """
    ways: list[tuple[str, str, dict[str, Any]]] = [(optimizer, optimizer, {})]
    name = optimizer.lower().replace("_", "")
    if name in ("adam", "adamw", "fusedadam"):
        fused = [] if name == "fusedadam" else [("FusedAdam", "FusedAdam", dict[str, Any]())]
        lean = {"master_weights": "split16"}
        small = {**lean, "state_dtype": "bfloat16"}
        ways += [*fused, ("FusedAdam, split16", "FusedAdam", lean)]
        ways += [("FusedAdam, split16, BF16 moments", "FusedAdam", small)]
        least = {"master_weights": "split24", "state_dtype": "packed16"}
        ways += [("FusedAdam, split24, packed moments", "FusedAdam", least)]
    elif name.startswith("fused"):
        ways += [(f"{optimizer}, split16", optimizer, {"master_weights": "split16"})]
    found: dict[Any, Row] = {}
    for level in LEVELS:
        has_masters = bool(load_profile(level).master_weights)
        for text, which, more in ways if gpu is None or gpu.runs(level) else ():
            if has_masters or (which == optimizer and not more):
                one = footprint(parameters, level, which, **options, **more)
                key = (text, *(getattr(one, term) for term in TERMS))
                same = found.get(key)
                levels = (*(same.levels if same else ()), level)
                found[key] = Row(levels, text, same.footprint if same else one)
    yield from found.values()


FIRST = ("O5", "O2", "O4", "O1", "O0")
"""The levels to take, the first one that fits."""
_ELSE = {**dict.fromkeys(("O6", "O7"), "in FP8"), **dict.fromkeys(("O8", "O9"), "in FP4")}
_ELSE |= {"O3": "without masters"}
"""The others, and why they are not recommended."""
_KEYS = {
    **{kind: f"master_weights: {kind}" for kind in ("split16", "split24")},
    "BF16 moments": "state_dtype: bfloat16",
    "packed moments": "state_dtype: packed16",
}
"""The keys of a profile that the name of a row stands for."""


def recommended(rows: Sequence[Row], limit: float) -> tuple[str, Row] | None:
    """Return the level to take and its row, or None if none of the levels to take fits."""
    fitting = [row for row in rows if row.footprint.total <= limit]
    return next(((x, row) for x in FIRST for row in fitting if x in row.levels), None)


def answer(rows: Sequence[Row], limit: float, has_activations: bool) -> Iterator[str]:
    """Yield sentences that say what fits in so many bytes."""
    size = f"With {limit / 1e9:.4g} GB:"
    if (found := recommended(rows, limit)) is not None:
        level, row = found
        rest = bytes_in_words(limit - row.footprint.total)
        what = "to spare" if has_activations else "for activations"
        yield f"{size} {level} with {row.optimizer} fits, with {rest} {what}."
        if keys := [key for name, key in _KEYS.items() if name in row.optimizer]:
            yield f"Its keys in a profile: {'; '.join(keys)}."
        if has_activations:
            yield f"Activations take {bytes_in_words(row.footprint.activations)} of it."
        return
    least = min(rows, key=lambda row: row.footprint.total)
    fitting = [x for x in _ELSE for row in rows if x in row.levels and row.footprint.total <= limit]
    if fitting:
        others = " and ".join(f"{level} ({_ELSE[level]})" for level in dict.fromkeys(fitting))
        order = [level for level in FIRST if any(level in row.levels for row in rows)]
        yield f"{size} none of {', '.join(order)} fits; {others} would."
        yield f"Activations take {bytes_in_words(least.footprint.activations)}."
        return
    yield f"{size} nothing fits. {least.levels[0]} with {least.optimizer} is the smallest, and needs"
    yield f"{bytes_in_words(least.footprint.total)}, of which activations take"
    yield f"{bytes_in_words(least.footprint.activations)}."


def least_gpus(parameters: float, optimizer: str, limit: float, options: dict[str, Any]) -> int | None:
    """Return how many GPUs hold it at O5 or O2 by FSDP2, a power of 2, or None if 1024 do not."""
    for count in (2**i for i in range(1, 11)):
        sharded = {**options, "world_size": count, "sharding": "fsdp2"}
        if footprint(parameters, "O5", optimizer, **sharded).total <= limit:
            return int(count)
    return None


_OF_A_MODEL = ("layers", "width", "sequence", "batch", "checkpointing", "no_flash")
_INSTEAD = {"script": ("params", "model", "activations"), "model": ("activations", "linear_inputs")}
"""Options that another one replaces."""


def check_options(given: dict[str, Any]) -> None:
    """Raise AmpValueError if an option has no effect because another one is missing or is given."""
    are_given = {name for name, value in given.items() if value not in (None, False)}
    name_of = {name: f"--{name.replace('_', '-')}" for name in given}
    for name in _OF_A_MODEL if given["model"] is None else ():
        if name in are_given:
            raise AmpValueError(f"{name_of[name]} is of a model: give --model gpt too, or leave it out")
    for name, others in _INSTEAD.items():
        for other in others if name in are_given else ():
            if other in are_given:
                raise AmpValueError(
                    f"--{name} counts what {name_of[other]} says: leave one of the two out"
                )
    if given["sharding"] is not None:
        check_sharding(given["sharding"])
    if given["sharding"] not in (None, "none") and given["world_size"] is None:
        sharding = f"--sharding {given['sharding']}"
        raise AmpValueError(f"{sharding} is over processes: give --world-size too, as --world-size 8")


def check_shape(shape: dict[str, Any]) -> None:
    """Raise AmpValueError if a part of a transformer's shape is missing or no positive number."""
    for name in ("layers", "width", "sequence", "batch"):
        value = shape.get(name)
        if value is None:
            raise AmpValueError(
                f"--model gpt needs --{name} too, as in --model gpt --layers 32 --width 4096 "
                "--sequence 4096 --batch 4"
            )
        if not 1 <= value < math.inf:
            raise AmpValueError(f"--{name} {value}: give a whole number of at least 1")
