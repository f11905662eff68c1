"""The passes of quantization over matrices on the CPU, in C++: each reads and writes memory once.

Eager torch goes through memory for each operation of a formula, and its cast from FP8 is a loop over
single numbers. These passes do what `amp.kernels.fp8` and `amp.kernels.fp4` do, with the same bits.
Compiled passes are kept for later processes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp.kernels.backend import is_eager, requested
from amp.kernels.compiled_library import load_or_log, read_source
from amp.kernels.philox import MULTIPLIERS, ROUNDS, WEYL, Draw

WORTH_COMPILING = 2**16
"""The number of elements from which the passes soon save more time than their compilation takes."""
PARALLEL = 2**15
"""The number of elements from which a matrix is divided among threads."""

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.uint8: 2}
_SIGNATURES = {
    "amaxes": "pillllpi",
    "scales": "plfipppp",
    "two_levels": "plppp",
    "to_fp8": "pillllpipi",
    "to_fp4": "pillllpplllpi",
    "transform": "pilllppi",
    "decode": "pillllppi",
    "transpose": "pilllpi",
}
"""The arguments of each pass: pointers, 64-bit integers, ints and floats."""


@functools.cache
def _library() -> Any:
    """Return the passes; if they cannot be compiled, log why and return None."""
    numbers: dict[str, Any] = {"PARALLEL": PARALLEL, "ROUNDS": ROUNDS}
    numbers |= {f"WEYL{i}": f"{word}u" for i, word in enumerate(WEYL)}
    numbers |= {f"MULTIPLIER{i}": f"{word}u" for i, word in enumerate(MULTIPLIERS)}
    types = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
    library = load_or_log(read_source("cpu_passes.cpp", numbers), "quantization to FP8 and FP4")
    for name, signature in _SIGNATURES.items() if library is not None else ():
        function = getattr(library, name)
        function.argtypes, function.restype = [types[each] for each in signature], None
    return library


def take(*tensors: Tensor | None, backend: str | None = None) -> bool:
    """Whether these passes take tensors: on the CPU, with values, contiguous, not in compiled code.

    Where a mode watches operations, as that of a diagnosis does, eager torch runs them.
    """
    if not is_eager() or requested(backend)[0]:
        return False
    given = [each for each in tensors if each is not None]
    for each in given:
        if type(each) not in (Tensor, torch.nn.Parameter) or each.device.type != "cpu":
            return False
        if not each.is_contiguous() or not each.numel():
            return False
    is_known = _library.cache_info().currsize > 0
    is_worth_it = max(each.numel() for each in given) >= WORTH_COMPILING
    return (is_known or is_worth_it) and _library() is not None


def _run(name: str, *arguments: Any) -> None:
    """Run a pass, which takes the addresses of tensors."""
    own = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    getattr(_library(), name)(*own)


def _sides(x: Tensor, counts: Sequence[int], columns: int) -> tuple[int, int, int, int]:
    """Return the rows and columns of a matrix, and the height and width of its blocks."""
    return len(x), columns, len(x) // counts[0], columns // counts[1]


def amax_of(x: Tensor, counts: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each of `counts` blocks, float32; inf where one is inf or NaN."""
    largest = torch.empty(counts, dtype=torch.float32, device="cpu")
    _run("amaxes", x, _TYPES[x.dtype], *_sides(x, counts, x.shape[1]), largest, _threads())
    return largest


def scales(
    amax: Tensor, largest: float, power_of_2: bool, as_exponents: bool, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the factors of blocks, and their inverse, float32, or E8M0 in uint8.

    Args:
        amax: float32, of blocks.
        largest: FP8's largest number.
        power_of_2: whether factors are powers of 2.
        as_exponents: whether to return E8M0.
        given: a factor, float32 `[]`, to use where it is larger than 0.
    """
    factors = torch.empty_like(amax)
    inverse = torch.empty_like(amax, dtype=torch.uint8 if as_exponents else torch.float32)
    to = (None, inverse) if as_exponents else (inverse, None)
    _run("scales", amax, amax.numel(), largest, power_of_2, given, factors, *to)
    return factors, inverse


def two_levels(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do `amp.kernels.fp4.two_levels`."""
    of_blocks, factors = torch.empty_like(amax, dtype=torch.float8_e4m3fn), torch.empty_like(amax)
    outer = torch.empty((), dtype=torch.float32, device="cpu")
    _run("two_levels", amax, amax.numel(), of_blocks, factors, outer)
    return of_blocks, factors, outer


def to_fp8(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in FP8, times the float32 factors `[down, across]` of its blocks."""
    values = torch.empty(x.shape, dtype=dtype, device="cpu")
    sides = _sides(x, factors.shape, x.shape[1])
    to = dtype is torch.float8_e4m3fn, values, _threads()
    _run("to_fp8", x, _TYPES[x.dtype], *sides, factors, *to)
    return values


def to_fp4(x: Tensor, factors: Tensor, draw: Draw | None) -> Tensor:
    """Return a matrix in FP4, uint8 `[R, C / 2]`, times the factors `[down, across]` of its blocks."""
    values = torch.empty(len(x), x.shape[1] // 2, dtype=torch.uint8, device="cpu")
    sides = _sides(x, factors.shape, x.shape[1])
    of_draw: tuple[Any, ...] = (None, 0, 0, 0)
    if draw is not None:
        of_draw = draw.calls, draw.seed, draw.name, draw.last_word
    to = *of_draw, values, _threads()
    _run("to_fp4", x, _TYPES[x.dtype], *sides, factors, *to)
    return values


def transformed(x: Tensor, padded: int, signs: tuple[int, ...]) -> Tensor:
    """Return the transpose `[K, padded]` with the Hadamard transform of each 16 numbers, bfloat16."""
    values = torch.empty(x.shape[1], padded, dtype=torch.bfloat16, device="cpu")
    to = (ctypes.c_float * 16)(*signs), values, _threads()
    _run("transform", x, _TYPES[x.dtype], *x.shape, padded, *to)
    return values


def decoded(values: Tensor, scales: Tensor | None, columns: int) -> Tensor:
    """Return values times the float32 scales `[down, across]` of their blocks, float32 `[R, C]`.

    Args:
        values: FP8, or FP4 in uint8, two values each.
        scales: float32 `[down, across]`; None is 1.
        columns: of the result.
    """
    if scales is None:
        scales = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    result = torch.empty(len(values), columns, dtype=torch.float32, device="cpu")
    sides = _sides(values, scales.shape, columns)
    _run("decode", values, _FORMATS[values.dtype], *sides, scales, result, _threads())
    return result


def transposed(x: Tensor, padded: int) -> Tensor:
    """Return the transpose of a matrix, its rows padded with zeros; elements have 1, 2 or 4 bytes."""
    result = torch.empty(x.shape[1], padded, dtype=x.dtype, device="cpu")
    _run("transpose", x, x.element_size(), *x.shape, padded, result, _threads())
    return result


def _threads() -> int:
    return torch.get_num_threads()
