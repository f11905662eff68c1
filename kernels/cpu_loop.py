"""The optimizer step of large tensor lists on the CPU: a rule's formula as one C++ loop.

Memory bandwidth limits a step, and eager torch goes through memory for each operation of a formula. The
loop reads and writes each tensor once, on as many threads as torch uses, and one call steps all tensors
of a list. The formula is the one that eager torch runs: it is called once, with C++ expressions in
place of tensors. Vectors and conversions are those of torch's own CPU kernels. Compiled loops are kept
for later processes.

`torch.compile` makes a loop of the formula too, but for one tensor: each of hundreds would take a call
with guards and views, and the first step would import and run all of Inductor.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp.kernels.backend import requested
from amp.kernels.changes import Change
from amp.kernels.compiled_library import load
from amp.kernels.rule import Formula, Prepared, Streams
from amp.kernels.tables import are_flat
from amp.kernels.tensor_lists import are_plain

logger = logging.getLogger("amp")

WORTH_COMPILING = 2**20
"""The number of elements from which the loop soon saves more time than its compilation takes."""
PARALLEL = 2**15
"""The number of elements from which a tensor is divided among threads."""
TYPES = {torch.float32: "float", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}

_SOURCE = """\
#include <ATen/cpu/vec/vec.h>
using namespace at::vec;
using Floats = VectorizedN<float, 2>;  // as many numbers as there are in one vector of 16-bit floats
constexpr int64_t WIDTH = Floats::size();

template <class T> static inline Floats read(const T *memory, int64_t n)
{
    constexpr int vectors = sizeof(T) / 2;
    return convert<float, 2, T, vectors>(VectorizedN<T, vectors>::loadu(memory, n));
}

template <class T> static inline void write(const Floats &x, T *memory, int64_t n)
{
    convert<T, sizeof(T) / 2, float, 2>(x).store(memory, n);
}

/* Step n elements of a tensor from i on, a vector of them or fewer. */
C10_ALWAYS_INLINE static void step_vector(const int64_t *row, int64_t i, int64_t n,
                                          const Floats *numbers)
{
    %(body)s
}

/* A row has the addresses and the size of a tensor. */
extern "C" void step(const int64_t *row, int64_t tensors, const float *numbers, int threads)
{
    Floats vectors[%(numbers)d];
    for (int k = 0; k < %(numbers)d; k++) vectors[k] = Floats(numbers[k]);
    for (; tensors > 0; tensors--, row += %(streams)d + 1) {
        const int64_t size = row[%(streams)d], tail = size %% WIDTH;
        #pragma omp parallel for num_threads(threads) if (size >= %(parallel)d)
        for (int64_t i = 0; i < size - tail; i += WIDTH) step_vector(row, i, WIDTH, vectors);
        if (tail) step_vector(row, size - tail, tail, vectors);
    }
}
"""


def _binary(symbol: str) -> Any:
    return lambda x, y: _Expression(f"({x.code} {symbol} {y.code})")


class _Expression:
    """A C++ expression of a vector, passed to a formula in place of a tensor."""

    __add__, __sub__, __mul__, __truediv__ = map(_binary, "+-*/")

    def __init__(self, code: str) -> None:
        self.code = code

    def sqrt(self) -> _Expression:
        return _Expression(f"{self.code}.sqrt()")

    def sign(self) -> _Expression:
        return _Expression(f"({self.code}.gt(Floats(0)) - {self.code}.lt(Floats(0)))")


def plan_loop(
    formula: Formula, lists: Streams, indices: Sequence[int], numbers: Prepared
) -> tuple[Sequence[int], Change | None]:
    """Return the indices that are left to eager torch, and the change that steps the other tensors.

    Left are tensors with gaps between their elements, or whose strides differ from list to list, and
    all tensors if the loop cannot be compiled. `suits_loop` must be true for the tensors.

    Args:
        formula: uses only the element-wise operations that `_Expression` has.
        lists: tensors on the CPU.
        indices: the tensors to step, all of one combination of dtypes.
        numbers: what to multiply the gradients by, and the prepared numbers of the formula.
    """
    types = tuple([(name, TYPES[tensors[indices[0]].dtype]) for name, tensors in lists.items()])
    loop = _compile(formula, types, tuple([number is not None for number in numbers]))
    if loop is None:
        return indices, None
    flat = indices
    if any(tensors.kind.orders is not None for tensors in lists.values()):
        flat = [i for i in indices if are_flat([tensors[i] for tensors in lists.values()])]
    sizes = [lists["param"].kind.sizes[i] for i in flat]
    addresses = [[tensors.addresses[i] for i in flat] for tensors in lists.values()]
    rows = list(itertools.chain.from_iterable(zip(*addresses, sizes, strict=True)))
    integers = (ctypes.c_int64 * len(rows))(*rows)
    present = [number for number in numbers if number is not None]
    floats = (ctypes.c_float * len(present))(*present)
    left = [] if flat is indices else sorted(set(indices) - set(flat))
    return left, functools.partial(loop, integers, len(flat), floats, torch.get_num_threads())


def suits_loop(lists: Streams, indices: Sequence[int], backend: str | None) -> bool:
    """Whether to try the loop for tensors of one device and combination of dtypes."""
    firsts = [tensors[indices[0]] for tensors in lists.values()]
    return (
        firsts[0].device.type == "cpu"
        and {first.dtype for first in firsts} <= TYPES.keys()
        and sum(map(Tensor.numel, lists["param"])) >= WORTH_COMPILING
        and all(map(are_plain, lists.values()))  # others keep their values elsewhere
        and not any(map(Tensor.is_neg, lists["grad"]))  # their memory holds the negated numbers
        and not requested(backend)[0]
    )


@functools.cache
def _compile(formula: Formula, types: Sequence[tuple[str, str]], there: Sequence[bool]) -> Any:
    """Return the loop; if it cannot be compiled, log why and return None.

    The host takes some seconds, or an instant if an earlier process has compiled it.

    Args:
        formula: see `plan_loop`.
        types: the name of each list, and its C++ type.
        there: which of the numbers are not None.
    """
    try:
        loop = load(source_of(formula, types, there), "the optimizer step").step
    except Exception as error:  # from the compiler, the folder, or this release of torch
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        logger.warning(
            "the optimizer step could not be compiled, so eager torch runs it, slower: %s", reason
        )
        return None
    loop.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    loop.restype = None
    return loop


def source_of(formula: Formula, types: Sequence[tuple[str, str]], there: Sequence[bool]) -> str:
    """Return the loop in C++; the arguments are those of `_compile`."""
    body = []
    for k, (name, cpp) in enumerate(types):
        body.append(f"auto {name}_at = reinterpret_cast<{cpp} *>(row[{k}]) + i;")
    read = [name for name, _ in types if name != "model"]
    body += [f"const Floats {name} = read({name}_at, n);" for name in read]
    count = itertools.count()
    scale, *numbers = [_Expression(f"numbers[{next(count)}]") if x else None for x in there]
    p, g, *moments = map(_Expression, read)
    p, new = formula(p, g * scale, tuple(moments), numbers, _Expression.sqrt)
    results = {**dict(zip(read[2:], new, strict=True)), "param": p, "model": _Expression("new_param")}
    written = [name for name, _ in types if name != "grad"]
    body += [f"const Floats new_{name} = {results[name].code};" for name in written]
    body += [f"write(new_{name}, {name}_at, n);" for name in written]
    counts = {"numbers": sum(there), "streams": len(types), "parallel": PARALLEL}
    return _SOURCE % {"body": "\n    ".join(body), **counts}
