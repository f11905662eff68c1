"""What is asked of each of hundreds of tensors, at every step.

In Python one such question takes the host 30 to 80 ns a tensor, and a step asks some thirty.
`bulk.cpp` asks them in 1 to 15 ns, with the same answers. It is compiled in the background, with the
C++ compiler of the machine (`CXX`, c++, g++ or clang++) and torch's headers, and is kept for later
processes; see `amp.kernels.compiling`. Until it is there, and where it cannot be compiled, the
functions run in Python.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import logging
import operator
import sysconfig
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from amp.kernels import compiling

logger = logging.getLogger("amp")

T = TypeVar("T")

WORTH_COMPILING = 32
"""Tensors in a list from which on it is compiled."""

_GRAD = operator.attrgetter("grad")
_DTYPE = operator.attrgetter("dtype")
_LAYOUT = operator.attrgetter("layout")
_VERSION = operator.attrgetter("_version")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def types(objects: Sequence[Any]) -> set[type]:
    """Return the classes of objects."""
    return set(map(type, objects))


def dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor."""
    return tuple(map(_DTYPE, tensors))


def layouts(tensors: Sequence[Tensor]) -> set[torch.layout]:
    """Return the layouts of tensors, by which sparse ones are told."""
    return set(map(_LAYOUT, tensors))


def addresses(tensors: Sequence[Tensor]) -> bytes:
    """Return where each tensor's elements are: int64."""
    return array("q", map(Tensor.data_ptr, tensors)).tobytes()


def sizes(tensors: Sequence[Tensor]) -> bytes:
    """Return how many elements each tensor has: int64."""
    return array("q", map(Tensor.numel, tensors)).tobytes()


def orders(tensors: Sequence[Tensor]) -> bytes | None:
    """Return each tensor's dimensions, shape and strides: int64; None if all are contiguous."""
    if all(map(Tensor.is_contiguous, tensors)):
        return None
    numbers = [(tensor.dim(), *tensor.shape, *tensor.stride()) for tensor in tensors]
    return array("q", itertools.chain.from_iterable(numbers)).tobytes()


def versions(tensors: Sequence[Tensor]) -> bytes:
    """Return how often each tensor was written to, as autograd counts it: int64."""
    return array("q", map(_VERSION, tensors)).tobytes()


def require_grad(tensors: Sequence[Tensor]) -> bytes:
    """Return whether each tensor requires a gradient: int64."""
    return array("q", map(_REQUIRES_GRAD, tensors)).tobytes()


def grads(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the `.grad` of each tensor."""
    return list(map(_GRAD, tensors))


def have_grads(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor has a gradient."""
    return any([grad is not None for grad in map(_GRAD, tensors)])  # noqa: C419 (twice as fast)


def clear_grads(tensors: Sequence[Tensor]) -> None:
    """Set the `.grad` of each tensor to None."""
    for tensor in tensors:
        tensor.grad = None


def entries(mappings: Sequence[Mapping[str, T]], name: str) -> list[T]:
    """Return what each mapping has by a name.

    Raises:
        KeyError: one has nothing.
    """
    return [mapping[name] for mapping in mappings]


def written(tensors: Iterable[Tensor]) -> None:
    """Count that tensors were written to: a graph of autograd may have saved them."""
    torch.autograd.graph.increment_version(tensors)


IN_PYTHON: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(are_same, types, dtypes, layouts, addresses, sizes, orders, versions, require_grad),
        *(grads, have_grads, clear_grads, entries, written),
    )
}
"""The functions that `bulk.cpp` has as well."""


@functools.cache
def compile_soon() -> threading.Thread:
    """Start to compile `bulk.cpp`, once in a process, and return the thread that does. No wait."""
    thread = threading.Thread(target=_compile_and_use, name="amp-compile", daemon=True)
    with suppress(RuntimeError):  # no more threads are allowed, or the interpreter ends
        thread.start()
        atexit.register(_give_up, thread)
    return thread


def _give_up(thread: threading.Thread) -> None:
    """Stop the compiler, at the end of a process that is over before."""
    compiling.stop()
    thread.join(timeout=10)


def _compile_and_use() -> None:
    try:
        functions = compiled()
    except (OSError, ImportError) as error:
        reason = str(error).splitlines()[0]
        logger.info("the host goes through lists of tensors in Python, slower: %s", reason)
    else:
        globals().update({name: getattr(functions, name) for name in IN_PYTHON})


def compiled() -> Any:
    """Return `bulk.cpp` as a module, compiled if that has not been done on this machine.

    Raises:
        OSError: it could not be compiled.
        ImportError: it could not be loaded, or the interpreter has no GIL, which it relies on.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError("bulk.cpp relies on a GIL")
    headers = Path(torch.__file__).with_name("include")
    libraries = Path(torch.__file__).with_name("lib")
    flags = [
        *("-std=c++20", "-O2", "-w", "-shared", "-fPIC"),
        *(f"-I{headers}", f"-I{sysconfig.get_paths()['include']}"),
        *(f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]
    builds = torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")
    source = Path(__file__).with_suffix(".cpp").read_text()
    return compiling.library(compiling.CPP, source, flags, _load, _announce, depends_on=builds)


def _announce(compiler: str) -> None:
    logger.info("compiling in the background with %s: about 10 s, once", compiler)


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("bulk", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
