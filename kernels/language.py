"""The common part of the kernels: Triton where it is installed, and helper functions.

A kernel gets a list of tensors as a table of addresses, cut into chunks of BLOCK elements, one program
each (`amp.kernels.launch_plans`). A program first processes the elements of its chunk that can move
128 bits at a time, all at once. It processes the rest in a loop, STEP elements a turn: the last few of
an odd size, or the whole chunk if an address is not a multiple of 16. The mask of the first part ends
at a multiple of VECTOR elements, so the compiler knows that neighbours are masked alike. The compiler
must be told that an address is a multiple of 16 where the address becomes a pointer: it forgets a hint
on an argument.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch

OLDEST_TRITON = 3, 6
MISSING = "Triton is not installed (pip install 'triton>=3.6')"
"""Why `triton` is None, if it is; `amp.kernels.backend` then chooses plain torch."""

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
"""Whether Triton runs kernels on the CPU, in Python. Triton reads the variable when a kernel is
defined."""


def jit(function: Any, multiples_of_16: Sequence[str] = ()) -> Any:
    """Do what `triton.jit` does, or nothing without Triton.

    A kernel is compiled for its constants and for the dtypes of its other arguments. It is not
    specialized for values of numbers or alignments of addresses, each of which would take a
    compilation.

    Args:
        function: the kernel's function.
        multiples_of_16: names of numbers and addresses that always are, as Triton may then assume.
    """
    if triton is None:
        return function
    names = inspect.signature(function).parameters
    pairs = zip(names, are_constant(function), strict=True)
    unknown = [name for name, is_constant in pairs if not (is_constant or name in multiples_of_16)]
    return triton.jit(do_not_specialize=unknown)(function)


@functools.cache
def are_constant(function: Any) -> tuple[bool, ...]:
    """Return which arguments of a kernel's Python function are constants, which it is compiled for."""
    of = function.__annotations__
    return tuple(["constexpr" in str(of.get(name)) for name in inspect.signature(function).parameters])


def plain(function: Any) -> Any:
    """Return the Python function that `jit` was given."""
    return getattr(function, "fn", function)


def constant(value: float) -> Any:
    """Return a number in the form in which kernels may read it from their module."""
    return value if triton is None else tl.constexpr(value)


WITHOUT_FMA = constant(INTERPRETED)
"""Whether `tl.fma` rounds twice, as NumPy does."""
_INTERPRETED = constant(INTERPRETED)
VECTOR = constant(8)
STEP = constant(1024)
ALIGNMENT = constant(16)
OPTIONS = {"enable_fp_fusion": False}
WARPS = 8
"""How many warps a program has."""


_compiled: dict[Any, Any] = {}
"""The kernels that `launch` has compiled, by kernel, device, constants and dtypes; see `jit`."""


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    warps: int = WARPS,
    registers: Any = None,
    **arguments: Any,
) -> Any:
    """Run a kernel on a device, on its current stream. The host does not wait for the device.

    On NVIDIA's GPUs a thread takes at most `registers`, unless None. Returns what was compiled, which
    is None in the interpreter.

    Multiplications and additions are not fused: which ones the compiler would fuse depends on the code
    around them, and a step on split masters must equal the step on whole ones bit for bit.
    """
    is_cuda = device.index is not None and device.type == "cuda"
    if is_cuda and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, device, warps, registers, **arguments)
    values = [arguments[name] for name in kernel.arg_names]
    # Triton's own search for a compiled variant takes twice the time, and hashes functions slowly.
    function = plain(kernel)
    variant = map(_variant_of, values, are_constant(function))
    compiled = _compiled.get(key := (function, device, *variant))
    if compiled is None:
        values = [in_triton(value) for value in values]
        is_nvidia = is_cuda and torch.version.hip is None
        limit = {"maxnreg": registers} if registers and is_nvidia else {}
        _compiled[key] = kernel[(programs,)](*values, num_warps=warps, **OPTIONS, **limit)
    else:
        compiled[(programs, 1, 1)](*values)
    return _compiled[key]


class Bound:
    """A launch whose number of programs, sizes and constants are known: only tensors are to be given.

    From the second call on it looks nothing up, and takes less than half of the time of `launch`.

    Args:
        kernel: its first arguments are tensors or None.
        programs: how many there are.
        device: of the tensors.
        warps: of a program.
        rest: the kernel's last arguments.
    """

    def __init__(
        self, kernel: Any, programs: int, device: torch.device, warps: int, rest: Sequence[Any]
    ) -> None:
        self._of_launch = kernel, programs, device, warps
        self._rest = tuple(rest)
        self._index = device.index if device.type == "cuda" else None
        self._run: Any = None

    def __call__(self, *tensors: Any) -> None:
        """Run the kernel, as `launch` does.

        Args:
            *tensors: of the same dtypes at each call, and None in the same places. FP8 is taken as
                bytes.
        """
        is_elsewhere = self._index is not None and self._index != torch.cuda.current_device()
        if self._run is not None and not is_elsewhere:
            self._run(*tensors, *self._rest)
            return
        kernel, programs = self._of_launch[:2]
        given = [x.view(torch.uint8) if is_fp8(x) else x for x in tensors]
        arguments = zip(kernel.arg_names, (*given, *self._rest), strict=True)
        compiled = launch(*self._of_launch, **dict(arguments))
        if compiled is not None and not is_elsewhere:
            self._run = compiled[(programs, 1, 1)]


def is_fp8(x: Any) -> bool:
    """Whether an argument is a tensor in FP8."""
    return isinstance(x, torch.Tensor) and x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _variant_of(value: Any, is_constant: bool) -> Any:
    """Return the property of an argument that a kernel is compiled for: of a number, only its type."""
    if not is_constant and type(value) is int:
        return "int32" if -(2**31) <= value < 2**31 else "int64"
    if not is_constant and type(value) is float:
        return float
    return getattr(value, "dtype", None) or getattr(value, "fn", value)


def in_triton(value: Any) -> Any:
    """Return an argument as a kernel takes it: dtypes become Triton's own."""
    if isinstance(value, tuple):
        return tuple(map(in_triton, value))
    return getattr(tl, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value


@jit
def locate(chunks, rows, ADDRESSES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the table row of this program's tensor, and its chunk's start and length.

    See `amp.kernels.launch_plans.Launch` for the tables. ADDRESSES: how many addresses a row begins
    with.
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
    """Call DO for each part of this program's chunk, and return the sum of its results.

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
    """Return `x` in float32, or in float64 if its dtype or `other` is float64."""
    return x.to(tl.float64 if x.dtype == tl.float64 or other == tl.float64 else tl.float32)


@jit
def narrow(x, dtype: tl.constexpr):
    """Return `x` in a dtype, rounded to nearest even; FP64 by way of FP32, as in torch."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's own cast truncates (triton 3.7). Adding half of the last kept bit, less one
        # if that bit is even, rounds to nearest even.
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)
        return high.to(tl.bfloat16, bitcast=True)
    if x.dtype == tl.float64 and dtype != tl.float64:
        x = x.to(tl.float32)
    return x.to(dtype)


@jit
def widened(x):
    """Return `x`, of 16 or 32 bits, in float32."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter's own cast changes subnormal numbers (triton 3.7).
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def bits(x):
    """Return the patterns of float32 numbers, int32."""
    return x.to(tl.int32, bitcast=True)


@jit
def number(x):
    """Return the float32 numbers of patterns, int32."""
    return x.to(tl.float32, bitcast=True)


@jit
def real(x):
    """Return int32 as float32."""
    return x.to(tl.float32)


@jit
def whole(x):
    """Return float32 as int32, rounded towards 0."""
    return x.to(tl.int32)


@jit
def least(x, y):
    """Return the smaller ones."""
    return tl.minimum(x, y)


@jit
def most(x, y):
    """Return the larger ones."""
    return tl.maximum(x, y)


@jit
def if_less(x, y, one, other):
    """Return `one` where x is less than y, and else `other`."""
    return tl.where(x < y, one, other)


@jit
def if_number(x, one, other):
    """Return `other` where x, float32, is NaN, and else `one`."""
    return tl.where(x == x, one, other)


@jit
def not_finite(x):
    """Return where a block is inf or NaN."""
    y = wide(x, x.dtype)
    return (y != y) | (tl.abs(y) == float("inf"))


@jit
def report(report_to, mask, LISTS: tl.constexpr):
    """If an element of a mask is true, set a flag, and write the step to the tensor's entry.

    report_to: the flag, or None; the entries, or None; the step; and the tables of `locate`. The
    entry's address is computed here, and not before, so that no register holds it.
    """
    found_inf, bad_steps, step, rows, chunks = report_to
    if found_inf is not None:
        if tl.max(mask.to(tl.int32), axis=0) != 0:
            tl.store(found_inf, 1.0)
            if bad_steps is not None:
                row = rows + tl.load(chunks + 2 * tl.program_id(0)) * (LISTS + 2)
                tl.store(bad_steps + tl.load(row + LISTS + 1), tl.load(step))
