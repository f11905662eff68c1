"""What the kernels share: Triton where it is installed, and the few words they are written in.

A kernel gets a list of tensors as a table of addresses, cut into chunks of BLOCK elements, one
program each (`amp.kernels.tables`). Of its chunk a program does the elements that can move 128 bits
at a time in one go, and what remains in a loop, STEP elements a turn: the last few of an odd size,
or everything where an address is not a multiple of 16. The mask of the first part ends at a multiple
of VECTOR elements, which is how the compiler knows that neighbours share their fate. That an address
is a multiple of 16 has to be said where it becomes a pointer: said of an argument, it is forgotten.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch

OLDEST_TRITON = 3, 6
MISSING = "Triton is not installed (pip install 'triton>=3.6')"
"""Why `triton` is None, should it be: then `amp.kernels.backend` chooses plain torch."""

try:
    import triton
    import triton.language as tl

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        MISSING = f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
        raise ImportError(MISSING)
except ImportError:
    triton = None
    tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Whether Triton runs kernels on the CPU, in Python. Triton looks when a kernel is defined."""


def jit(function: Any, multiples_of_16: Sequence[str] = ()) -> Any:
    """Do what `triton.jit` does, or nothing without Triton.

    A kernel is compiled for its constants and for the dtypes of its other arguments, but for no value
    of a number and no alignment of an address, each of which would be compiled on its own.

    Args:
        function: the kernel's function.
        multiples_of_16: numbers and addresses that always are, which is how Triton learns it.
    """
    if triton is None:
        return function
    of = function.__annotations__
    names = inspect.signature(function).parameters
    variables = [name for name in names if "constexpr" not in str(of.get(name))]
    unknown = [name for name in variables if name not in multiples_of_16]
    return triton.jit(do_not_specialize=unknown)(function)


def plain(function: Any) -> Any:
    """Return the Python function that a kernel's function was made of."""
    return getattr(function, "fn", function)


def constant(value: float) -> Any:
    """Return a number that kernels may read from their module."""
    return value if triton is None else tl.constexpr(value)


_INTERPRETED = constant(INTERPRETED)
VECTOR = constant(8)
STEP = constant(1024)
ALIGNMENT = constant(16)
OPTIONS = {"enable_fp_fusion": False}
WARPS = 8
"""How many warps a program has."""


_compiled: dict[Any, Any] = {}
"""What `launch` has compiled, by kernel, device, and all that a kernel is compiled for; see `jit`."""


def launch(
    kernel: Any, programs: int, device: torch.device, warps: int = WARPS, **arguments: Any
) -> None:
    """Run a kernel on a device, on its current stream. The host does not wait for the device.

    Products are rounded before they are added: which of them the compiler would fuse depends on what
    is around them, and a step on split masters must be the step on whole ones, bit for bit.
    """
    is_cuda = device.index is not None and device.type == "cuda"
    if is_cuda and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, device, warps, **arguments)
        return
    values = [arguments[name] for name in kernel.arg_names]
    # Triton finds its variants by itself, in twice the time. It hashes functions slowly, too.
    variant = [getattr(value, "dtype", None) or getattr(value, "fn", value) for value in values]
    compiled = _compiled.get(key := (plain(kernel), device, *variant))
    if compiled is None:
        values = [in_triton(value) for value in values]
        _compiled[key] = kernel[(programs,)](*values, num_warps=warps, **OPTIONS)
    else:
        compiled[(programs, 1, 1)](*values)


def in_triton(value: Any) -> Any:
    """Return what a kernel is given for an argument: dtypes are Triton's own."""
    if isinstance(value, tuple):
        return tuple(map(in_triton, value))
    return getattr(tl, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value


@jit
def locate(chunks, rows, ADDRESSES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the table row of this program's tensor, and its chunk's start and length.

    See `amp.kernels.tables.Launch` for the tables. ADDRESSES: how many a row begins with.
    """
    program = tl.program_id(0)
    row = rows + tl.load(chunks + 2 * program) * (ADDRESSES + 2)
    # Multiplied here: a loaded start would have no known alignment.
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * BLOCK
    length = tl.minimum(tl.load(row + ADDRESSES) - start, BLOCK).to(tl.int32)
    return row, start, length


@jit
def vector_length(addresses, length):
    """Return how many of `length` elements move 128 bits at a time, given the addresses' bitwise or."""
    return tl.where(addresses % ALIGNMENT == 0, length // VECTOR, 0) * VECTOR


@jit
def load_all(pointer, N: tl.constexpr):
    """Return a tuple of N numbers, from a pointer on."""
    numbers = ()
    for k in tl.static_range(N):
        numbers = numbers + (tl.load(pointer + k),)  # type: ignore[assignment]  # noqa: RUF005
    return numbers


@jit
def pointers_to(addresses, start, DTYPES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to a chunk's elements in each list, given where its tensors begin.

    ALIGNED says that the addresses are multiples of 16, as those of the vector part are.
    """
    pointers = ()
    for k in tl.static_range(len(DTYPES)):
        pointer = addresses[k].to(tl.pointer_type(DTYPES[k]))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, ALIGNMENT)
        pointers = pointers + (pointer + start,)  # type: ignore[assignment]  # noqa: RUF005
    return pointers


@jit
def chunk_addresses(row, length, LISTS: tl.constexpr):
    """Return where the tensors of a row begin, and the length of a chunk's vector part."""
    addresses = load_all(row, LISTS)
    together = addresses[0]
    for k in tl.static_range(1, LISTS):
        together |= addresses[k]
    return addresses, vector_length(together, length)


@jit
def each_part(DO: tl.constexpr, rows, chunks, arguments, DTYPES: tl.constexpr, BLOCK: tl.constexpr):
    """Do this program's chunk, and return the sum of what DO returns for each part of it.

    DO: a function of pointers to the chunk in each list, offsets, their mask, and `arguments`.
    """
    row, start, length = locate(chunks, rows, len(DTYPES), BLOCK)
    addresses, vectors = chunk_addresses(row, length, len(DTYPES))
    i = tl.arange(0, BLOCK)
    result = DO(pointers_to(addresses, start, DTYPES, True), i, i < vectors, arguments)
    for first in range(vectors, length, STEP):
        j = first + tl.arange(0, STEP)
        result += DO(pointers_to(addresses, start, DTYPES, False), j, j < length, arguments)
    return result


@jit
def wide(x, other: tl.constexpr):
    """Return `x` in the precision to compute in: float32, or float64 if its or the other dtype is."""
    return x.to(tl.float64 if x.dtype == tl.float64 or other == tl.float64 else tl.float32)


@jit
def narrow(x, dtype: tl.constexpr):
    """Return `x` in a dtype, rounded to nearest even; FP64 by way of FP32, as by torch."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's own cast truncates (triton 3.7). Half of the last bit kept, less one if
        # that bit is even, carries into it when the rest is more than half, or half and it is odd.
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)
        return high.to(tl.bfloat16, bitcast=True)
    if x.dtype == tl.float64 and dtype != tl.float64:
        x = x.to(tl.float32)
    return x.to(dtype)


@jit
def not_finite(x):
    """Return where a block is inf or NaN."""
    y = wide(x, x.dtype)
    return (y != y) | (tl.abs(y) == float("inf"))


@jit
def report(report_to, mask, LISTS: tl.constexpr):
    """Where an element of a mask is true, set a flag, and write the step to the tensor's entry.

    report_to: the flag, or None; the entries, or None; the step; and the tables of `locate`. Where the
    entry is, is found out here, and not before, so that no register holds it.
    """
    found_inf, bad_steps, step, rows, chunks = report_to
    if found_inf is not None:
        if tl.max(mask.to(tl.int32), axis=0) != 0:
            tl.store(found_inf, 1.0)
            if bad_steps is not None:
                row = rows + tl.load(chunks + 2 * tl.program_id(0)) * (LISTS + 2)
                tl.store(bad_steps + tl.load(row + LISTS + 1), tl.load(step))
