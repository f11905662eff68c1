"""The optimizer step of tensor lists on the CPU: a rule's formula as one C++ loop.

Memory bandwidth limits a step, and eager torch goes through memory for each operation of a formula. The
loop reads and writes each tensor once, on as many threads as torch uses, and one call steps all tensors
of a list. The formula is the one that eager torch runs: it is called once, with C++ expressions instead
of tensors. Vectors and conversions are those of torch's own CPU kernels. Compiled loops are kept
for later processes.

`torch.compile` makes a loop of the formula too, but for one tensor: each of hundreds would take a call
with guards and views, and the first step would import and run all of Inductor.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.backend import requested
from amp.kernels.compiled_library import in_background, load_kept, load_or_log, read_source
from amp.kernels.interrupts import Change
from amp.kernels.language import plain
from amp.kernels.launch_plans import are_flat
from amp.kernels.rule import Formula, Origin, Streams
from amp.kernels.stochastic_rounding import (
    TO_NEAREST,
    Functions,
    bfloat16_bits,
    join_halves,
    mixed,
    pack,
    part_halves,
    unpack,
)
from amp.kernels.tensor_lists import TensorList, are_plain

WORTH_COMPILING = 2**20
"""The number of elements from which the loop soon saves more time than its compilation takes."""
LONG = 100
"""After how many steps the loop for fewer elements is compiled beside the training."""
PARALLEL = 2**15
"""The number of elements from which a tensor is divided among threads."""
TYPES = {torch.float32: "float", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
TYPES |= {torch.int16: "int16_t", torch.int8: "int8_t"}


def _operators(*symbols: str, is_swapped: bool = False) -> Any:
    return [lambda x, y, symbol=s: x._with(symbol, y, is_swapped) for s in symbols]


class _Expression:
    """A vector in C++, passed to a formula instead of a tensor. Each new operation adds a statement.

    Args:
        body: the names of the values so far, by how they are computed.
        code: an expression in C++.
        of: its type, `"Floats"` or `"Ints"`.
    """

    __add__, __sub__, __mul__, __truediv__, __lshift__, __rshift__ = _operators(*"+-*/", "<<", ">>")
    __and__, __or__, __xor__ = _operators(*"&|^")
    __radd__, __rsub__, __rmul__, __rtruediv__ = _operators(*"+-*/", is_swapped=True)
    __rand__, __ror__ = _operators(*"&|", is_swapped=True)

    def __init__(self, body: dict[str, str], code: str, of: str = "Floats") -> None:
        self.body, self.of = body, of
        self.name = body.setdefault(f"const {of} &%s = {code};", f"x{len(body)}")

    def _with(self, symbol: str, other: Any, is_swapped: bool = False) -> _Expression:
        number = repr(other)
        if symbol not in ("<<", ">>"):
            number = f"{self.of}({'(int32_t)' if self.of == 'Ints' else ''}{number})"
        both = [self.name, other.name if isinstance(other, _Expression) else number]
        return _Expression(self.body, f" {symbol} ".join(both[::-1] if is_swapped else both), self.of)

    def call(self, function: str, *others: Any, of: str = "") -> _Expression:
        names = [x.name if isinstance(x, _Expression) else f"{self.of}({x})" for x in (self, *others)]
        return _Expression(self.body, f"{function}({', '.join(names)})", of or self.of)

    def sqrt(self) -> _Expression:
        return _Expression(self.body, f"{self.name}.sqrt()")

    def sign(self) -> _Expression:
        return _Expression(self.body, f"({self.name}.gt(Floats(0)) - {self.name}.lt(Floats(0)))")

    def __neg__(self) -> Any:
        return 0 - self

    def __invert__(self) -> Any:
        return self ^ -1


_IN_CPP = Functions(
    bits=lambda x: x.call("bits", of="Ints"),
    number=lambda x: x.call("number", of="Floats"),
    real=lambda x: x.call("real", of="Floats"),
    whole=lambda x: x.call("whole", of="Ints"),
    least=lambda x, y: x.call("minimum", y),
    most=lambda x, y: x.call("maximum", y),
    if_less=lambda x, y, one, other: x.call("if_less", y, one, other),
    if_number=lambda x, one, other: one.call("if_number", x, other),
    sqrt=_Expression.sqrt,
    inverse=lambda x: 1.0 / x,
)


def _plus_product(x: _Expression, factor: _Expression, y: _Expression) -> _Expression:
    return x.call("plus_product", factor, y)


class Update(NamedTuple):
    """The change of a step to all elements of some tensors.

    Attributes:
        formula: uses only the element-wise operations that `_Expression` has.
        numbers: what to multiply the gradients by, and the prepared numbers of the formula.
        merges: see `amp.kernels.stepping.step`.
        own_bits: the keys of the random bits of all tensors, int32 `[n]` on the CPU, and their origins;
            None rounds to nearest.
    """

    formula: Formula
    numbers: Sequence[Any]
    merges: bool
    own_bits: tuple[Tensor, Sequence[Origin]] | None = None


def plan_loop(
    update: Update, lists: Streams, indices: Sequence[int], backend: str | None
) -> tuple[Sequence[int], Change | None]:
    """Return the indices that are left to eager torch, and the change that steps the other tensors.

    Left are tensors with gaps between their elements, or whose strides differ from list to list; and
    all of them elsewhere than on the CPU, in other dtypes, or if the loop cannot be compiled.

    Args:
        update: the step.
        lists: the tensors.
        indices: which of them to step, all of one device and combination of dtypes.
        backend: see `amp.kernels.backend`.
    """
    dtypes = {name: tensors[indices[0]].dtype for name, tensors in lists.items()}
    is_known = set(dtypes.values()) <= TYPES.keys() and dtypes.get("low") is not dtypes["param"]
    flat: Sequence[int] = indices
    are_all = len(indices) == len(lists["param"])  # in order
    rows = host_lists.lists.rows([*lists.values()]) if are_all and is_known and not backend else None
    if rows is None:
        flat = _flat(lists, indices) if is_known and not requested(backend)[0] else ()
        if not flat:
            return indices, None
        rows = _rows_of([*lists.values()], flat)
    types = tuple([(name, TYPES[dtype]) for name, dtype in dtypes.items()])
    elements = sum(lists["param"].kind.sizes)
    made_of = update.formula, types, len(update.numbers), update.own_bits is not None, update.merges
    loop = loop_for(made_of, elements)
    if loop is None:
        return indices, None
    if update.own_bits is not None:
        keys, origins = update.own_bits[0].tolist(), update.own_bits[1]
        for column in zip(*[(keys[i], *origins[i][1:]) for i in flat], strict=True):
            rows.extend(column)
    floats = array("f", update.numbers)
    left = () if flat is indices else sorted(set(indices) - set(flat))
    arguments = _pointer(rows), len(flat), _pointer(floats), torch.get_num_threads()
    return left, functools.partial(loop, *arguments)


def _flat(lists: Streams, indices: Sequence[int]) -> Sequence[int]:
    """Return the indices of tensors that the loop can step, if they are of a dtype that it takes."""
    if lists["param"][indices[0]].device.type != "cpu" or not all(map(are_plain, lists.values())):
        return ()
    if any(map(Tensor.is_neg, lists["grad"])):  # their memory holds the negated numbers
        return ()
    if all(tensors.kind.orders is None for tensors in lists.values()):
        return indices
    return [i for i in indices if are_flat([tensors[i] for tensors in lists.values()])]


def _rows_of(lists: Sequence[TensorList], indices: Sequence[int]) -> array[int]:
    """Return rows for a loop, column by column: the addresses of tensors, and their sizes."""
    columns = [*[tensors.addresses for tensors in lists], lists[0].kind.sizes]
    return array("q", [column[i] for column in columns for i in indices])


def _pointer(numbers: array[Any]) -> Any:
    """Return a pointer to numbers, which keeps them."""
    return (ctypes.c_char * (len(numbers) * numbers.itemsize)).from_buffer(numbers)


_loops: dict[tuple[Any, ...], Any] = {}
"""The loaded loops, by the arguments that make them; None for one that cannot be compiled."""
_asked: Counter[tuple[Any, ...]] = Counter()
"""How often loops that are not loaded were asked for."""


def loop_for(made_of: tuple[Any, ...], elements: int) -> Any:
    """Return a loop, or None: if it cannot be compiled, which is logged, or is not compiled yet.

    For many elements it is compiled now, which takes some seconds. For few it is loaded if an earlier
    process has compiled it; if none has, it is compiled in another thread in a long training.

    Args:
        made_of: the arguments of `source_of`.
        elements: how many elements it is to go through.
    """
    if made_of in _loops:
        return _loops[made_of]
    _asked[made_of] += 1
    if elements >= WORTH_COMPILING:
        _load(made_of)
    elif _asked[made_of] == 1:
        _load(made_of, compiles=False)
    elif _asked[made_of] == LONG:
        in_background(_load, made_of)
    return _loops.get(made_of)


def _load(made_of: tuple[Any, ...], compiles: bool = True) -> None:
    """Load a loop; if it `compiles` nothing, only one that is compiled already."""
    source = source_of(*made_of)
    library = load_or_log(source, "the optimizer step") if compiles else load_kept(source)
    if library is not None:
        library.run.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        library.run.restype = None
    if compiles or library is not None:
        _loops[made_of] = library and library.run


def source_of(
    formula: Formula,
    types: Sequence[tuple[str, str]],
    numbers: int,
    is_random: bool,
    merges: bool = False,
) -> str:
    """Return the loop in C++.

    Args:
        formula: see `Update`.
        types: the name of each list, and its C++ type.
        numbers: how many numbers the formula takes, with the scale.
        is_random: whether tensors have origins.
        merges: see `Update`.
    """
    type_of, moments = dict(types), [name for name, _ in types if name.startswith("moment")]
    low, is_packed = type_of.get("low"), type_of.get("moment0") == "int16_t"
    body: dict[str, str] = {}

    def read(name: str, is_bits: bool = False) -> _Expression:
        if not is_bits:
            return _Expression(body, f"read({name}_at, n)")
        pointer = (
            f"reinterpret_cast<{'int8_t' if type_of[name] == 'int8_t' else 'int16_t'} *>({name}_at)"
        )
        return _Expression(body, f"read_bits({pointer}, n)", "Ints")

    scale, *prepared = [_Expression(body, f"numbers[{k}]") for k in range(numbers)]
    of_low = type_of["param"] == "c10::Half", 8 if low == "int8_t" else 16
    p = join_halves(read("param", True), read("low", True), *of_low, _IN_CPP) if low else read("param")
    if merges:
        p = _Expression(body, f"merged<{type_of['model']}>({p.name}, {read('model').name})")
    old = unpack(read("moment0", True), _IN_CPP) if is_packed else tuple(map(read, moments))
    first: Any = TO_NEAREST
    second = first
    if is_random:
        origin = f"row + {len(types) + 1}"
        key = _Expression(body, f"Ints((int32_t)({origin})[0])", "Ints")
        first = plain(mixed)(_Expression(body, f"index_of({origin}, i)", "Ints") + key)
        second = plain(mixed)(first + key)
    functions = _Expression.sqrt, operator.truediv, _plus_product
    p, new = formula(p, read("grad") * scale, old, prepared, *functions)
    results: dict[str, Any] = {"model": p, "param": p}
    if is_packed:
        m, v = new
        results["moment0"] = pack(m, v, first, _IN_CPP)
    else:
        for k, (name, moment) in enumerate(zip(moments, new, strict=True)):
            results[name] = moment
            if is_random and type_of[name] == "c10::BFloat16":
                results[name] = plain(bfloat16_bits)(
                    moment, first >> 16 * (1 - k) & 0xFFFF, _IN_CPP.bits, _IN_CPP.if_number
                )
    if low:
        own = second if len(moments) == 2 else first
        results["param"], results["low"] = part_halves(p, own, *of_low, _IN_CPP)
    lines = [
        f"auto {x}_at = reinterpret_cast<{cpp} *>(row[{k}]) + i;" for k, (x, cpp) in enumerate(types)
    ]
    lines += [statement % name for statement, name in body.items()]
    lines += [f"write({results[x].name}, {x}_at, n);" for x, _ in types if x != "grad"]
    macros = {"BODY": " ".join(lines), "PARALLEL": PARALLEL, "NUMBERS": numbers}
    macros |= {"STREAMS": len(types), "COLUMNS": len(types) + 1 + 4 * is_random}
    return read_source("cpu_loop.cpp", macros)
