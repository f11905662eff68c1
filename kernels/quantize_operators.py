"""`quantize` and `quantize_fp4` as operators of torch, for code under torch.compile.

Dynamo cannot trace what launches a kernel. Without an operator it traces the formulas, and Inductor
makes kernels of them. Where a tensor or a block has one scale, these are more launches, and more reads
of the matrix: Inductor writes the matrix and its transpose in a kernel each. Where each row has one,
they are fewer, for the kernels here find the amaxes of rows in a launch of its own: formulas remain.

An operator runs the kernels of code that is not compiled. It looks at the address of its matrix when it
runs, and computes the formulas if that is not aligned.
"""

from typing import Any, cast

import torch
from torch import Tensor

from amp.kernels import fp4_tiles, quantize_tiles
from amp.kernels.backend import uses_triton
from amp.kernels.fp4 import QuantizeFp4Arguments
from amp.kernels.fp4 import quantize_reference as quantize_fp4_reference
from amp.kernels.fp8 import (
    Fp4Granularity,
    Granularity,
    Operand,
    QuantizeArguments,
    Quantized,
    Seen,
    quantize_reference,
    swizzle,
)
from amp.kernels.philox import Draw


def take(x: Tensor, granularity: str, backend: str | None) -> bool:
    """Whether compiled code quantizes a contiguous matrix by an operator."""
    is_compiled = torch.compiler.is_compiling() and backend is None and granularity != "row"
    return is_compiled and x.shape[1] % 16 == 0 and x.numel() > 0 and _has_kernels(x.device)


@torch.compiler.assume_constant_result
def _has_kernels(device: torch.device) -> bool:
    return uses_triton(device)


def _parts(x: Tensor, operand: Operand | None) -> tuple[Tensor, ...]:
    """Return an operand's values, inverse scales and outer scale; empty tensors for what is missing.

    An operator returns tensors alone, each in memory of its own.
    """
    parts = (None,) * 3 if operand is None else (operand.values, operand.inverse, operand.outer)
    return tuple([x.new_empty(0) if part is None else part for part in parts])


# FP8.


def quantize(x: Tensor, wanted: QuantizeArguments) -> Quantized:
    """Do `amp.kernels.quantize.quantize` in compiled code, for a matrix that `take` allows."""
    granularity, has_one = wanted.granularity, wanted.granularity == "tensor"
    of_tensor = wanted.factor, wanted.is_known, *(wanted.seen or (None, None))
    found = torch.ops.amp.quantize(x, *wanted[:5], *of_tensor)
    rows, columns, inverse, of_columns, factor = found
    if has_one:  # Dynamo does not take a tensor twice as input of a Function: the second one is a view
        of_columns = inverse.detach()
    return Quantized(
        Operand(rows, inverse, granularity, wanted.power_of_2) if wanted.by_row else None,
        Operand(columns, of_columns, granularity, wanted.power_of_2) if wanted.by_column else None,
        factor if has_one else None,
    )


@torch.library.custom_op("amp::quantize", mutates_args=("seen",))
def _quantize(
    x: Tensor,
    dtype: torch.dtype,
    granularity: str,
    by_row: bool,
    by_column: bool,
    power_of_2: bool,
    factor: Tensor | None,
    is_known: bool,
    seen: Tensor | None,
    divisor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return values by row and by column, inverse scales by row and by column, and a factor."""
    of_seen = None if seen is None else Seen(seen, divisor)
    options = by_row, by_column, power_of_2, factor, is_known, None, of_seen
    wanted = QuantizeArguments(dtype, cast(Granularity, granularity), *options)
    if quantize_tiles.take(x, None):
        return _of_fp8(x, quantize_tiles.run(x, wanted))
    both, swizzles = quantize_reference(x, wanted), granularity == "1x32"
    rows, columns = [y and y._replace(inverse=swizzle(y.inverse)) if swizzles else y for y in both[:2]]
    return _of_fp8(x, Quantized(rows, columns, both.factor))


@_quantize.register_fake
def _(x: Tensor, dtype: torch.dtype, granularity: Granularity, *options: Any) -> tuple[Tensor, ...]:
    both = quantize_tiles.new_operands(x, QuantizeArguments(dtype, granularity, *options[:4]))
    return _of_fp8(x, Quantized(*both, x.new_empty((), dtype=torch.float32)))


def _of_fp8(x: Tensor, result: Quantized) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (rows, inverse, nothing), (columns, of_columns, _) = [_parts(x, each) for each in result[:2]]
    some = result.by_row or result.by_column
    if some is not None and some.granularity == "tensor" and result.factor is not None:
        return rows, columns, some.inverse, nothing, result.factor  # both have one scale
    return rows, columns, inverse, of_columns, nothing


# FP4.


def quantize_fp4(x: Tensor, wanted: QuantizeFp4Arguments) -> Quantized:
    """Do `amp.kernels.quantize_fp4.quantize_fp4` in compiled code, for a matrix that `take` allows."""
    granularity, draw = wanted.granularity, wanted.draw
    of_draw = (None, 0, 0, 0) if draw is None else (draw.calls, draw.seed, draw.name, draw.rank)
    found = torch.ops.amp.quantize_fp4(x, *wanted[:4], *of_draw)
    rows, columns = [
        Operand(values, inverse, granularity, outer=None if granularity == "1x32" else outer)
        for values, inverse, outer in (found[:3], found[3:])
    ]
    return Quantized(rows if wanted.by_row else None, columns if wanted.by_column else None)


@torch.library.custom_op("amp::quantize_fp4", mutates_args=())
def _quantize_fp4(
    x: Tensor,
    granularity: str,
    by_row: bool,
    by_column: bool,
    hadamard: bool,
    calls: Tensor | None,
    seed: int,
    name: int,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the values, the inverse scales and the outer scale by row, and then by column."""
    draw = None if calls is None else Draw(calls, seed, name, rank)
    options = by_row, by_column, hadamard, draw, None
    wanted = QuantizeFp4Arguments(cast(Fp4Granularity, granularity), *options)
    takes = quantize_tiles.take(x, None)
    rows, columns, _ = fp4_tiles.run(x, wanted) if takes else quantize_fp4_reference(x, wanted)
    return (*_parts(x, rows), *_parts(x, columns))  # type: ignore[return-value]


@_quantize_fp4.register_fake
def _(x: Tensor, granularity: Fp4Granularity, *options: Any) -> tuple[Tensor, ...]:
    by_row, by_column, hadamard = options[:3]
    wanted = QuantizeFp4Arguments(granularity, by_row, by_column, hadamard, None, None)
    rows, columns = fp4_tiles.new_operands(x, wanted)
    return (*_parts(x, rows), *_parts(x, columns))
