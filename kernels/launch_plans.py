"""Plans of kernel launches: lists of tensors as tables of addresses that a kernel can read.

An operation on parallel lists of n tensors takes one launch for each device and combination of dtypes
among them. The tables of a launch lie on its device: `rows` has the addresses and the size of each
tensor, and `chunks` says which program does which piece. They go to the device through pinned memory,
so the host does not wait for it. An `Elementwise` operation runs by such a plan, or at once in plain
torch, where its tensors are plain ones on the CPU.

Plans are cached. The key is all that a plan depends on: the operation's chunk size, the device, the
stream on which the tables were sent, whether Triton runs there, and the kind of each list
(`amp.kernels.tensor_lists`). Under a key are plans for a few sets of addresses. For tensors that have
moved, as gradients do, a plan under the same key is copied with the new addresses. Plans for plain
torch have no tables, and serve any addresses.

While a CUDA graph is captured, the cache is not used: the graph includes the upload of the tables, from
pinned memory that is kept for good, so each replay restores the tables that it reads.
"""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from amp.kernels import host_lists
from amp.kernels.backend import uses_triton
from amp.kernels.host_lists import FLOATS
from amp.kernels.interrupts import without_grad
from amp.kernels.language import launch
from amp.kernels.tensor_lists import TensorList, dense

_TAKEN = FLOATS | {torch.int8, torch.int16}
"""The dtypes that kernels take; the last two are of low halves and packed moments."""
_CACHE_SIZE = 64
_uploaded_in_graphs: list[Tensor] = []
"""Pinned tables that the replays of CUDA graphs upload again."""
_PLACES = 4
"""How many plans are cached under one key, each with other addresses."""

T = TypeVar("T")


class UnsupportedTensorError(TypeError):
    """A tensor that no kernel takes."""


class Launch(NamedTuple):
    """One launch of a kernel, and the tensors of parallel lists that it processes.

    Attributes:
        indices: where in the lists they are.
        device: the tensors' device.
        dtypes: their dtypes, one for each list.
        rows: int64 `[n, lists + 2]`: each tensor's addresses, its number of elements, and its index.
        chunks: int32 `[n_chunks, 2]`: each chunk's tensor, and the chunk's number in that tensor.
        firsts: int32 `[n + 1]`: each tensor's first chunk, and at the end the number of chunks.
        rows_on_host: `rows`, on the CPU.
    """

    indices: tuple[int, ...]
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    rows: Tensor
    chunks: Tensor
    firsts: Tensor
    rows_on_host: Tensor

    def run(self, kernel: Any, **arguments: Any) -> None:
        """Run a kernel of `rows`, `chunks`, `DTYPES` and arguments, a program for each chunk."""
        arguments |= {"rows": self.rows, "chunks": self.chunks, "DTYPES": self.dtypes}
        launch(kernel, self.chunks.shape[0], self.device, **arguments)

    def at(self, addresses: Tensor) -> Launch:
        """Return this launch for other addresses: int64 `[tensors of the lists, lists]`."""
        rows = self.rows_on_host.clone()
        rows[:, :-2] = addresses[rows[:, -1]]
        return self._replace(rows=upload(rows, self.device), rows_on_host=rows)


class Plan(NamedTuple):
    """How an operation on parallel lists of tensors runs.

    Attributes:
        launches: the tensors for Triton.
        fallback: the indices of tensors for plain torch, those of one device and combination of dtypes
            together: tensors on devices without Triton, with gaps between their elements, or whose
            strides differ from list to list.
    """

    launches: tuple[Launch, ...]
    fallback: tuple[tuple[int, ...], ...]

    def at(self, addresses: Sequence[array[int]]) -> Plan:
        """Return this plan for tensors of the same kind at other addresses. The host does not wait."""
        table = torch.tensor(list(map(list, addresses)), dtype=torch.int64, device="cpu").t()
        return self._replace(launches=tuple([launch.at(table) for launch in self.launches]))


def stream_of(device: torch.device) -> int | None:
    """Return the current stream of a device, on which tensors that are uploaded now can be read.

    None while a CUDA graph is captured: tensors made then belong to the graph, and must not be cached.
    """
    if not torch.cuda.is_initialized():
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def cached(make: Callable[..., T]) -> Callable[..., T]:
    """Cache the latest results of a function of a device for its current stream.

    Results made while a CUDA graph is captured are not cached.
    """

    @functools.lru_cache(maxsize=_CACHE_SIZE)
    def cache(stream: int, device: torch.device, *args: Any) -> T:
        return make(device, *args)

    @functools.wraps(make)
    def get(device: torch.device, *args: Any) -> T:
        stream = stream_of(device)
        return make(device, *args) if stream is None else cache(stream, device, *args)

    get.cache_clear = cache.cache_clear  # type: ignore[attr-defined]
    return get


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _places(*key: object) -> deque[tuple[list[array[int]], Plan]]:
    """Return the plans under a key, the latest first, each with the addresses that it is for."""
    return deque(maxlen=_PLACES)


def takes_at_once(lists: Sequence[Sequence[Tensor]], backend: str | None = None) -> bool:
    """Whether plain torch can take lists on the CPU without a plan, which launches need.

    That is so if each list has one floating-point dtype, and tensors with values, dense and of plain
    classes, and all have the shapes of the first, and if no backend is asked for, here or by the
    environment. `plan` checks all other lists, and says what is wrong.
    """
    if backend or torch.compiler.is_compiling():
        return False
    given = [tensors if isinstance(tensors, list) else list(tensors) for tensors in lists]
    return host_lists.lists.go_together(given)  # type: ignore[no-any-return]


def plan(
    *lists: Sequence[Tensor],
    block: int,
    numbers: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> Plan:
    """Return how an operation on parallel lists of tensors runs. The host does not wait.

    Args:
        *lists: dense tensors; the i-th of each list have one shape and one device.
        block: the number of elements of a chunk.
        numbers: one more list: a float32 tensor of one element for each tensor, on its device.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: the lists' lengths, shapes or devices differ.
        UnsupportedTensorError: a dtype other than float16, bfloat16, float32, float64, and int16 for
            low halves of masters.
        ReleasedMemoryError: a tensor with elements has no memory.
    """
    columns = [
        tensors if isinstance(tensors, TensorList) else dense(tensors)
        for tensors in (lists if numbers is None else (*lists, numbers))
    ]
    for column in columns:
        column.check_memory()
    device = columns[0].device
    stream = None if device is None else stream_of(device)
    if device is None or stream is None or any([column.device != device for column in columns]):  # noqa: C419
        return _make_plan(columns, len(lists), block, backend)
    in_triton = uses_triton(device, backend)
    kinds = [column.kind for column in columns]
    places = _places(block, len(lists), device, stream, in_triton, *kinds)
    addresses = [column.addresses for column in columns] if in_triton else []
    for at, known in tuple(places):  # another thread may add one
        if at == addresses:
            return known
    found = places[0][1].at(addresses) if places else _make_plan(columns, len(lists), block, backend)
    places.appendleft((addresses, found))
    return found


def _make_plan(columns: Sequence[TensorList], lists: int, block: int, backend: str | None) -> Plan:
    _check(columns[:lists], columns[lists:])
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    fallback: defaultdict[Any, list[int]] = defaultdict(list)
    for i, tensors in enumerate(zip(*columns[:lists], strict=True)):
        if tensors[0].numel():
            device = tensors[0].device
            in_triton = uses_triton(device, backend) and are_flat(tensors)
            same = groups if in_triton else fallback
            same[device, tuple([tensor.dtype for tensor in tensors])].append(i)
    launches = []
    for (device, dtypes), indices in groups.items():
        sizes = tuple([columns[0][i].numel() for i in indices])
        addresses = [[column.addresses[i] for i in indices] for column in columns]
        table = torch.tensor([*addresses, sizes, indices], dtype=torch.int64, device="cpu").t()
        rows = table.contiguous()
        tables = upload(rows, device), *_chunks(device, sizes, block), rows
        launches.append(Launch(tuple(indices), device, dtypes, *tables))
    return Plan(tuple(launches), tuple(map(tuple, fallback.values())))


def _check(lists: Sequence[TensorList], numbers: Sequence[TensorList]) -> None:
    """Raise what `plan` raises."""
    if len({len(tensors) for tensors in lists}) > 1:
        raise ValueError(f"the lists have {', '.join(str(len(t)) for t in lists)} tensors")
    for i, tensors in enumerate(zip(*lists, strict=True)):
        for tensor in tensors:
            if tensor.dtype not in _TAKEN:
                raise UnsupportedTensorError(
                    f"tensor {i} of shape {tuple(tensor.shape)} is {tensor.dtype}; kernels take "
                    "float16, bfloat16, float32 and float64"
                )
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise ValueError(f"tensors {i} have shapes {shapes}")
        if len({tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"tensors {i} are on {', '.join(str(t.device) for t in tensors)}")
    for i, (number, tensor) in enumerate(zip(*numbers, lists[0], strict=True) if numbers else ()):
        is_right = number.dtype is torch.float32 and number.device == tensor.device
        if not is_right or number.numel() != 1:
            raise ValueError(
                f"number {i} is {number.dtype} of shape {tuple(number.shape)} on {number.device}; it "
                f"must be one float32 on the tensor's device, {tensor.device}"
            )


def are_flat(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors' elements lie in one order in memory, without gaps or overlaps."""
    if all([tensor.is_contiguous() for tensor in tensors]):  # noqa: C419 (a list is faster)
        return True
    strides = tensors[0].stride()
    preserved = torch.empty_like(tensors[0], device="meta").stride() == strides
    return preserved and all(tensor.stride() == strides for tensor in tensors)


# Copies to a device.


@cached
def _chunks(device: torch.device, sizes: tuple[int, ...], block: int) -> tuple[Tensor, Tensor]:
    counts = (torch.tensor(sizes, device="cpu") + block - 1) // block
    firsts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tensor = torch.repeat_interleave(counts)
    chunks = torch.stack([tensor, torch.arange(len(tensor), device="cpu") - firsts[tensor]], dim=1)
    return upload(chunks.int(), device), upload(firsts.int(), device)


@cached
def numbers_on(
    device: torch.device, numbers: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return numbers as a tensor `[n]` on a device; not to be written."""
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device. The host does not wait."""
    if device.type == "cpu":
        return table
    pinned = table.pin_memory()
    if stream_of(device) is None:
        _uploaded_in_graphs.append(pinned)
    return pinned.to(device, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host waits only for a copy to the CPU."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def number_on(device: torch.device, number: float | Tensor | None) -> Tensor | None:
    """Return a number, or a tensor of one, as a read-only tensor on a device; None for None."""
    if isinstance(number, (int, float)):
        return numbers_on(device, (float(number),))
    return None if number is None else to_device(number, device)


class BadSteps(NamedTuple):
    """Where Triton's kernels record the tensors that are not finite; plain torch records nothing.

    Attributes:
        of_tensors: float32 `[n]`, for each tensor of a list the last step at which it was not finite.
        step: float32 `[1]`, the number of this step, on the same device.
    """

    of_tensors: Tensor
    step: Tensor

    @staticmethod
    def on(device: torch.device, noted: BadSteps | None) -> dict[str, Tensor | None]:
        """Return the arguments of a kernel that runs on a device: None if it records nothing."""
        if noted is None or noted.of_tensors.device != device:
            return {"bad_steps": None, "step": None}
        return {"bad_steps": noted.of_tensors, "step": noted.step}


def flag_on(device: torch.device, flag: Tensor | None) -> Any:
    """Return a flag, float32 `[1]`, to set on a device: `flag` if it is there, else one to merge."""
    is_there = flag is None or flag.device == device
    return flag if is_there else torch.zeros(1, dtype=torch.float32, device=device)


def merge_flag(flag: Any, found: Any) -> None:
    """Set `flag` if `found`, which `flag_on` returned for it on a device, was set."""
    if found is not flag:
        torch.maximum(flag, to_device(found, flag.device), out=flag)


# Operations that go element by element.


class Elementwise(NamedTuple):
    """An operation on the corresponding elements of lists of tensors: unscale, axpby, copies, merges.

    Attributes:
        kernel: for Triton, with the arguments `rows, chunks, ..., DTYPES, BLOCK`; see
            `amp.kernels.language`.
        reference: the same in plain torch, on lists of tensors of one device and combination of dtypes,
            where the flags are too.
        writes: how many lists are written and get a new version; they are the last ones.
        block: the number of elements of a chunk.
        flag: the name of the argument, float32 `[1]` or None, that kernel and reference set.
        in_cpp: its name for `go_over` of `amp.kernels.host_lists`, if that does the same on the CPU.
    """

    kernel: Any
    reference: Callable[..., None]
    writes: int
    block: int
    flag: str = "found_inf"
    in_cpp: str = ""

    def run(
        self,
        lists: Sequence[Sequence[Tensor]],
        backend: str | None,
        bad_steps: BadSteps | None = None,
        **arguments: Any,
    ) -> None:
        """Run it. The host does not wait for the device.

        Args:
            lists: the tensors; sparse ones and DTensors are replaced by the dense ones that they hold.
            backend: see `amp.kernels.backend`.
            bad_steps: where a check records the tensors that are not finite.
            **arguments: numbers, or float32 `[1]` each, or None, for kernel and reference alike.
        """
        if not self.run_in_cpp(lists, backend, **arguments):
            self._run(lists, backend, bad_steps, **arguments)

    def run_in_cpp(
        self, lists: Sequence[Sequence[Tensor]], backend: str | None = None, **arguments: Any
    ) -> bool:
        """Run it in C++, if all tensors are on the CPU and C++ takes them; return whether it has."""
        is_there = self.in_cpp and lists[0] and lists[0][0].is_cpu
        if backend or not is_there or torch.compiler.is_compiling():
            return False
        flag = arguments.pop(self.flag, None)
        a, b, *_ = *arguments.values(), 1.0, 1.0
        given = [x if isinstance(x, list) else list(x) for x in lists]
        done: bool = host_lists.lists.go_over(self.in_cpp, given, a, b, flag, torch.get_num_threads())
        return done

    @without_grad
    def _run(
        self,
        lists: Sequence[Sequence[Tensor]],
        backend: str | None,
        bad_steps: BadSteps | None,
        **arguments: Any,
    ) -> None:
        flag = arguments.get(self.flag)
        if (flag is None or flag.is_cpu) and takes_at_once(lists, backend):
            self.reference(*lists, **arguments)
            return
        known = {id(tensors): dense(tensors) for tensors in lists}  # a list given twice: once
        columns = [known[id(tensors)] for tensors in lists]
        todo = plan(*columns, block=self.block, backend=backend)
        for each in todo.launches:
            here = {name: number_on(each.device, value) for name, value in arguments.items()}
            if self.flag in arguments:
                here[self.flag] = flag_on(each.device, flag)
            if "found_inf" in arguments:
                here |= BadSteps.on(each.device, bad_steps)
            each.run(self.kernel, **here, BLOCK=self.block)
            merge_flag(flag, here.get(self.flag))
        for same in todo.fallback:
            chosen = [[tensors[i] for i in same] for tensors in columns]
            if self.flag in arguments:
                arguments[self.flag] = flag_on(chosen[0][0].device, flag)
            self.reference(*chosen, **arguments)
            merge_flag(flag, arguments.get(self.flag))
        torch.autograd.graph.increment_version(list(chain(*lists[len(lists) - self.writes :])))
