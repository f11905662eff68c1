"""Reading attributes of all tensors of a list, and going over their elements on the CPU, in C++.

A step reads addresses, versions, gradients, dtypes and devices of all tensors many times, and what is
recorded of each. In Python that is a call for each tensor, and most of the host's work. `lists` reads
them, and on the CPU it copies, unscales, checks, adds and merges whole lists. It is `InPython` until
`load_in_background` has loaded the same functions from `host_lists.cpp`. These find a tensor's pointer
in its Python object, at a place that is looked for when they are loaded: if it is not found, as in
another release of torch, Python goes on.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import operator
import os
import sysconfig
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from itertools import repeat, starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp.kernels.compiled_library import in_background, load, load_kept, read_source

logger = logging.getLogger("amp")

_device = operator.attrgetter("device")
_dtype = operator.attrgetter("dtype")
_grad = operator.attrgetter("grad")
_grad_dtype = operator.attrgetter("grad_dtype")
_layout = operator.attrgetter("layout")
_trains = operator.attrgetter("requires_grad")
_version = operator.attrgetter("_version")
_STRIDED = frozenset((torch.strided,))
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

_LIB = Path(torch.__file__).parent / "lib"
_IS_NEW_ABI = int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))  # before torch 2.7 it may be False
_FLAGS = (
    *(f"-I{sysconfig.get_path('include')}", f"-D_GLIBCXX_USE_CXX11_ABI={_IS_NEW_ABI}"),
    *("-fno-strict-aliasing", f"-L{_LIB}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{_LIB}"),
)


@functools.cache
def has_own_values(cls: Any) -> bool:
    """Whether tensors of a class have their values, and do not keep them elsewhere, as DTensor does."""
    return cls.__torch_dispatch__ is Tensor.__torch_dispatch__  # pyright: ignore


_USUAL = {Tensor, torch.nn.Parameter}


class InPython:
    """The functions, in Python.

    Tensors in their lists are dense, and hold their values themselves, but for those of `shards`.
    """

    @staticmethod
    def addresses(tensors: list[Tensor]) -> array[int]:
        """Return the address of each tensor's elements, 64-bit numbers; 0 without memory."""
        return array("q", map(Tensor.data_ptr, tensors))

    @staticmethod
    def are_at(tensors: list[Tensor], addresses: array[int] | list[int]) -> bool:
        """Whether the elements of each tensor are at the address in the other list."""
        return list(map(Tensor.data_ptr, tensors)) == list(addresses)

    @staticmethod
    def have_memory(tensors: list[Tensor]) -> bool:
        """Whether each tensor that has elements has memory for them."""
        return all(tensor.data_ptr() or not tensor.numel() for tensor in tensors)

    @staticmethod
    def are_whole(tensors: list[Tensor]) -> bool:
        """Whether no tensor is a view of another one."""
        return not any(map(Tensor._is_view, tensors))

    @staticmethod
    def versions(tensors: list[Tensor]) -> list[int]:
        """Return how often torch has counted a write to each tensor."""
        return list(map(_version, tensors))

    @staticmethod
    def have_grads(tensors: list[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether the `.grad` of each tensor is the one in the other list."""
        return not any(map(operator.is_not, map(_grad, tensors), grads))

    @staticmethod
    def with_grad(tensors: list[Tensor]) -> list[bool]:
        """Return for each tensor whether it has a gradient."""
        return [grad is not None for grad in map(_grad, tensors)]

    @staticmethod
    def take_any_grad(tensors: list[Tensor]) -> bool:
        """Whether each tensor takes a gradient of any dtype, from torch 2.10 on."""
        return not any(map(_grad_dtype, tensors))

    @staticmethod
    def clear_grads(tensors: list[Tensor]) -> None:
        """Set the `.grad` of each tensor to None."""
        for tensor in tensors:
            tensor.grad = None

    @staticmethod
    def set_grads(tensors: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Set the `.grad` of each tensor; return whether that was done. No interrupt comes in between.

        C++ looks at no tensor's `grad_dtype`, and leaves what it does not take to Python.
        """
        each = zip(tensors, repeat("grad", len(tensors)), grads, strict=True)
        deque(starmap(setattr, each), maxlen=0)
        return True

    @staticmethod
    def train(tensors: list[Tensor], flags: list[bool]) -> bool:
        """Whether each tensor requires a gradient, or not, as its flag says."""
        return list(map(_trains, tensors)) == flags

    @staticmethod
    def are_together(some: list[Tensor], others: list[Tensor]) -> bool:
        """Whether each tensor is on the device of the other one."""
        return list(map(_device, some)) == list(map(_device, others))

    @staticmethod
    def have_dtypes(tensors: list[Tensor], dtypes: list[torch.dtype]) -> bool:
        """Whether each tensor has the dtype in the other list."""
        return list(map(_dtype, tensors)) == dtypes

    @staticmethod
    def kind(tensors: list[Tensor]) -> tuple[tuple[int, ...], tuple[torch.dtype, ...], bool]:
        """Return each tensor's number of elements, its dtype, and whether all are contiguous."""
        are_contiguous = all(map(Tensor.is_contiguous, tensors))
        return tuple(map(Tensor.numel, tensors)), tuple(map(_dtype, tensors)), are_contiguous

    @staticmethod
    def are_of_kind(tensors: list[Tensor], sizes: tuple[int, ...], dtypes: tuple[Any, ...]) -> bool:
        """Whether each tensor is contiguous, and of the size and dtype in the other lists."""
        return InPython.kind(tensors) == (sizes, dtypes, True)

    @staticmethod
    def go_together(lists: list[list[Tensor]]) -> bool:
        """Whether lists go to an operation of torch on the CPU as they are.

        All tensors are there, strided and with memory, and have their values themselves. Each list has
        one floating-point dtype, and the i-th tensors of all lists have one shape. The environment asks
        for no backend.
        """
        shapes = [tensor.shape for tensor in lists[0]]
        return bool(shapes and not os.environ.get("AMP_KERNELS")) and all(
            all(map(has_own_values, set(map(type, tensors))))
            and len(of := set(map(_dtype, tensors))) == 1
            and of <= FLOATS
            and all(map(_is_strided_on_cpu, tensors))
            and all(InPython.addresses(tensors))
            and [tensor.shape for tensor in tensors] == shapes
            for tensors in lists
        )

    @staticmethod
    def go_over(name: str, lists: list[list[Tensor]], a: Any, b: Any, flag: Any, threads: int) -> bool:
        """Make a pass over lists on the CPU, and return whether that was done; here it never is.

        C++ takes tensors that lie in memory alike, in float32 or 16 bits, if it writes no memory of
        another one, and no class or mode watches operations. It leaves all others to torch. No
        interrupt comes in between.

        Args:
            name: `copy`, `unscale`, `check`, `axpby` or `merge`, as functions of `amp.kernels` are.
            lists: the tensors.
            a: the factor, a number or float32 `[1]` on the CPU.
            b: the second factor of an `axpby`.
            flag: float32 `[1]` on the CPU, to be set, or None.
            threads: how many threads there are.
        """
        return False

    @staticmethod
    def rows(lists: list[list[Tensor]]) -> array[int] | None:
        """Return the addresses of tensors, list after list, and then the sizes of the first list.

        C++ returns None where the i-th tensors of all lists do not lie on the CPU alike and without
        gaps, where the memory of one holds negated numbers, and for what `go_together` refuses, but for
        other dtypes and tensors without elements. Here it is always None.
        """
        return None

    @staticmethod
    def are_floats(tensors: list[Tensor]) -> bool:
        """Whether all tensors are strided, and of a floating-point dtype that kernels take."""
        return FLOATS.issuperset(map(_dtype, tensors)) and _STRIDED.issuperset(map(_layout, tensors))

    increment = staticmethod(torch.autograd.graph.increment_version)
    """Raises the version of each tensor by one."""

    @staticmethod
    def shards(tensors: list[Tensor]) -> list[Tensor] | None:
        """Return the shard of each DTensor that this rank holds, and other tensors themselves.

        Return None if one of these is of another class than `Tensor` and `Parameter`, as one is whose
        values are still on their way.
        """
        values = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return values if set(map(type, values)) <= _USUAL else None

    @staticmethod
    def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether two lists or tuples hold the same objects in the same order."""
        return len(some) == len(others) and all(map(operator.is_, some, others))

    @staticmethod
    def are_all_same(some: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> bool:
        """Whether two lists or tuples hold lists or tuples of the same objects in the same order."""
        return len(some) == len(others) and all(map(InPython.are_same, some, others))

    @staticmethod
    def read_slot(objects: list[Any], name: str) -> list[Any]:
        """Return what each object, all of one class, has in a slot."""
        return list(map(operator.attrgetter(name), objects))

    @staticmethod
    def write_slot(objects: list[Any], name: str, values: list[Any]) -> None:
        """Set a slot of each object, all of one class, to its value."""
        for each, value in zip(objects, values, strict=True):
            setattr(each, name, value)

    @staticmethod
    def agree(
        pairs: list[Any],
        masters: list[Tensor],
        parameters: list[Tensor],
        values: list[Tensor],
        dtypes: list[torch.dtype],
        at_grads: bool,
    ) -> bool:
        """Whether masters and parameters are as their pairs record them; here it is always False.

        Args:
            pairs: objects with slots `grad`, `trains`, `version`, `address` and `given`; see `Pair`.
            masters: the master of each.
            parameters: the parameter of each.
            values: what holds the values of each master.
            dtypes: what each parameter should have.
            at_grads: whether both should have the recorded gradient.
        """
        return False

    @staticmethod
    def items(mappings: list[Any], key: object) -> list[Any]:
        """Return what each mapping has under a key."""
        return list(map(operator.itemgetter(key), mappings))

    @staticmethod
    def numbers(tensors: list[Tensor]) -> list[float]:
        """Return the numbers of tensors, float32 `[]` each, on the CPU."""
        return torch.stack(tensors).tolist()

    @staticmethod
    def put(tensor: Tensor, numbers: list[float]) -> bool:
        """Write numbers to a tensor `[n]`, float32 on the CPU; return whether that was done.

        C++ leaves other tensors to torch; here it never is.
        """
        return False

    add = staticmethod(torch._foreach_add_)
    """Adds a number to each tensor, float32 `[]`, on the CPU. No interrupt comes in between."""


def _is_strided_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided


lists: Any = InPython
_has_begun = False

_GRAD: Any = Tensor.grad


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the `.grad` of each tensor."""
    return list(map(_GRAD.__get__, tensors))


def have_grads(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor has a gradient."""
    every = list(tensors)
    return not lists.have_grads(every, [None] * len(every))


def store_grads(tensors: Iterable[Tensor], grads: Iterable[Tensor | None] | None = None) -> None:
    """Set the `.grad` of each tensor; by default None."""
    if grads is None:
        lists.clear_grads(list(tensors))
        return
    both = list(tensors), list(grads)
    if not lists.set_grads(*both):
        InPython.set_grads(*both)


def load_in_background() -> None:
    """Load the functions in C++: now if they are kept from an earlier process, else compile them.

    A thread compiles them, once in a process, and nothing waits for it.
    """
    global _has_begun
    if _has_begun or os.environ.get("AMP_KERNELS") == "reference":
        return
    _has_begun = True
    kept = load_kept(_source(), _FLAGS, _open)
    if kept is None:
        in_background(_compile)
    else:
        try:
            _use(kept)
        except RuntimeError:  # tensors that are made under a transform of torch.func have no address
            _has_begun = False


def _source() -> str:
    return read_source("host_lists.cpp", {})


def _open(path: str) -> Any:
    """Return an extension module of Python."""
    loader = ExtensionFileLoader("host_lists", path)
    module = importlib.util.module_from_spec(ModuleSpec("host_lists", loader, origin=path))
    loader.exec_module(module)
    return module


def compiled() -> Any:
    """Return the module in C++, which is compiled now if no earlier process has kept it.

    Raises:
        OSError, RuntimeError: it cannot be compiled, or does not read tensors rightly.
    """
    module = load(_source(), "", _FLAGS, _open)
    if not _reads_rightly(module):
        raise RuntimeError("the places of tensors in their Python objects were not found")
    return module


def _compile() -> None:
    global lists
    try:
        lists = compiled()
    except Exception as error:  # from the compiler, the folder, or this release of torch
        logger.debug("lists of tensors are read in Python: %s", error)


def _use(module: Any) -> None:
    """Use a loaded module if it reads tensors rightly."""
    global lists
    if _reads_rightly(module):
        lists = module


def _reads_rightly(module: Any) -> bool:
    whole, leaf = torch.empty(3, device="cpu"), torch.nn.Parameter(torch.ones(2, 2, device="cpu"))
    tensors: list[Any] = [whole, leaf, whole[1:], *[leaf.detach().to(dtype) for dtype in FLOATS]]
    return module.prepare(torch._C.TensorBase, tensors) and all(
        getattr(module, name)(tensors) == getattr(InPython, name)(tensors)
        for name in ("addresses", "versions", "kind")
    )
