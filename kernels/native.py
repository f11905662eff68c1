"""Loops in C over lists of CPU tensors, compiled for this machine when they are first needed.

A loop reads and writes each tensor once, in pieces that stay in the first-level cache, and finds the
tensors by a table of their addresses, as the Triton kernels do. It runs on as many threads as torch's
own operations. Compiling takes a second or two with the C compiler of the machine (`CC`, cc, gcc or
clang), is announced, and is kept in the user's cache folder (`XDG_CACHE_HOME`), see
`amp.kernels.compiling`. Where it fails, a message says so, and callers go on in plain torch.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import torch
from torch import Tensor

from amp.kernels.backend import requested
from amp.kernels.compiling import C, library
from amp.kernels.tables import are_plain

logger = logging.getLogger("amp")

WORTH_COMPILING = 2**18
"""Elements from which training with a loop saves more time than its compilation takes."""
PIECE = 256
"""Elements of a piece."""
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-w",
    "-lm",
)

C_TYPES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}

_SOURCE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

typedef struct { uint16_t bits; } float16;
typedef struct { uint16_t bits; } bfloat16;

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float with_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

static inline void widen_bfloat16(const bfloat16 *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = with_bits((uint32_t)x[i].bits << 16);
}

static inline void narrow_bfloat16(const float *x, bfloat16 *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]);
        uint32_t nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        y[i].bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : nearest;
    }
}

static inline void widen_float16(const float16 *x, float *y, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    for (; i < n; i++) y[i] = _cvtsh_ss(x[i].bits);
#else
    for (; i < n; i++) { _Float16 h; memcpy(&h, x + i, 2); y[i] = (float)h; }
#endif
}

static inline void narrow_float16(const float *x, float16 *y, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
    for (; i < n; i++) y[i].bits = _cvtss_sh(x[i], 0);
#else
    for (; i < n; i++) { _Float16 h = (_Float16)x[i]; memcpy(y + i, &h, 2); }
#endif
}

/* Elements first to last of n tensors, counted through; a row has addresses and the size. */
int64_t loop(const int64_t *rows, int64_t n, int64_t first, int64_t last, const float *of_tensors)
{
    %(before)s
    for (int64_t tensor = 0; tensor < n && last > 0; tensor++, rows += %(lists)d + 1) {
        const float *numbers = of_tensors + tensor * %(numbers)d;
        const int64_t size = rows[%(lists)d], end = last < size ? last : size;
        for (int64_t start = first > 0 ? first : 0; start < end; start += %(piece)d) {
            const int64_t length = end - start < %(piece)d ? end - start : %(piece)d;
            %(pointers)s
            %(body)s
        }
        first -= size;
        last -= size;
    }
    return %(result)s;
}
"""


class Loop:
    """A loop over parallel lists of dense tensors.

    Args:
        source: C that defines `loop`.

    Raises:
        OSError: it could not be compiled or loaded.
    """

    def __init__(self, source: str) -> None:
        self._run = library(C, source, _FLAGS, ctypes.CDLL, _announce).loop
        self._run.restype = ctypes.c_int64
        self._run.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def __call__(
        self, lists: Sequence[Sequence[Tensor]], numbers: Iterable[Sequence[float]] = ()
    ) -> list[int]:
        """Run over all elements, and return what each thread's part returned.

        Args:
            lists: for each type, tensors of it without gaps; the i-th are alike in shape and strides.
            numbers: those of each tensor, read as FP32.
        """
        sizes = [tensor.numel() for tensor in lists[0]]
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
        rows = array.array("q", [x for row in zip(*addresses, sizes, strict=True) for x in row])
        floats = array.array("f", itertools.chain.from_iterable(numbers))

        def run(first: int, last: int) -> int:
            """Run over a part; an interrupted caller must not take the tensors and tables along."""
            table, constants = rows.buffer_info()[0], floats.buffer_info()[0]
            result: int = self._run(table, len(lists[0]), first, last, constants)
            return result

        total, threads = sum(sizes), torch.get_num_threads()
        bounds = [total * i // threads // PIECE * PIECE for i in range(threads)] + [total]
        return _in_threads(run, list(itertools.pairwise(bounds)))


@functools.cache
def loop(
    types: Sequence[str], body: str, *, numbers: int = 0, before: str = "", result: str = "0"
) -> Loop | None:
    """Return a loop, or None, and say why, if it cannot be compiled here.

    Args:
        types: the C type of the elements of each list, a tuple.
        body: C, for one piece: `length` elements at the pointers `x0`, `x1`, ...; its tensor's
            `numbers` are there.
        numbers: how many there are for each tensor.
        before: C, run first.
        result: C, an int64 to return.
    """
    pointers = [f"{kind} *restrict x{i} = ({kind} *)rows[{i}] + start;" for i, kind in enumerate(types)]
    source = _SOURCE % {
        "before": before,
        "lists": len(types),
        "numbers": numbers,
        "piece": PIECE,
        "pointers": "\n            ".join(pointers),
        "body": body,
        "result": result,
    }
    try:
        return Loop(source)
    except OSError as error:
        reason = str(error).splitlines()[0]
        logger.warning("no loop could be compiled for this CPU; plain torch runs, slower: %s", reason)
        return None


def is_worth_a_loop(tensors: Sequence[Tensor], backend: str | None) -> bool:
    """Whether a loop over these tensors, and others like them, is wanted and can be.

    They have to be on the CPU and many, of dtypes in `C_TYPES` and of no class with values elsewhere.
    """
    return (
        sum(map(Tensor.numel, tensors)) >= WORTH_COMPILING
        and tensors[0].device.type == "cpu"
        and {tensor.dtype for tensor in tensors} <= C_TYPES.keys()
        and are_plain(tensors)
        and not any(map(Tensor.is_neg, tensors))  # whose memory holds other numbers
        and not requested(backend)[0]
        and not torch.compiler.is_compiling()
    )


def _announce(compiler: str) -> None:
    logger.warning("compiling a loop for this CPU with %s: a second or two, once", compiler)


def _in_threads(run: Callable[[int, int], int], parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return what a function makes of each part; all have come to their end then, come what may."""
    others: list[Future[int]] = []
    try:
        with suppress(RuntimeError):  # no thread starts while the interpreter ends
            for part in parts[1:]:  # one by one: those that were started are waited for
                others.append(_pool(os.getpid(), len(parts) - 1).submit(run, *part))  # noqa: PERF401
        own = [run(*part) for part in (parts[0], *parts[1 + len(others) :])]
    finally:
        wait(others)
    return [*own, *(other.result() for other in others)]


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads of a process; those of the one it was forked from do not run in it."""
    return ThreadPoolExecutor(threads, thread_name_prefix="amp")
