"""From lists of tensors to what a kernel can read: tables of addresses, and chunks.

An operation on lists of n tensors runs once for each device and combination of dtypes among them: a
`Part`. A part's tables lie on its device. `rows` has the addresses and the size of each tensor and
depends on where the tensors lie; `chunks` says which program does which piece and depends on the sizes
alone. Both are kept, and made again only for addresses or sizes that were not seen lately. They go to
the device through pinned memory, so the host does not wait for it.

In CUDA graph capture nothing is taken from what is kept: the upload is captured with the rest, from
pinned memory that torch sets aside for good, and each replay restores the tables that it reads.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from amp.kernels import bulk
from amp.kernels.backend import uses_triton
from amp.kernels.language import INTERPRETED

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_TAKEN = {*FLOATING, torch.int16}  # the low bits of masters, see amp.kernels.split

T = TypeVar("T")

_KEPT = 64
_PLAIN = {Tensor, torch.nn.Parameter}
_Kind = tuple[torch.device, tuple[torch.dtype, ...]]


class UnsupportedTensorError(TypeError):
    """A tensor that no kernel takes.

    Attributes:
        index: where in its list it is.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Part(NamedTuple):
    """The tensors of a list, or of several parallel lists, that one launch can do.

    Attributes:
        indices: where in the lists they are.
        device: theirs.
        dtypes: theirs, one for each list.
        rows: int64 `[n, lists + 2]`, each tensor's addresses, number of elements and index; the address
            of its number, if the plan has them, is another list's.
        chunks: int32 `[n_chunks, 2]`, each chunk's tensor and its number in that tensor.
        firsts: int32 `[n + 1]`, each tensor's first chunk, and the number of chunks.
        rows_on_host: `rows`, on the CPU.
    """

    indices: tuple[int, ...]
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    rows: Tensor
    chunks: Tensor
    firsts: Tensor
    rows_on_host: Tensor

    def relocated(self, column: int, addresses: Tensor) -> Part:
        """Return this part for one list whose tensors lie elsewhere; `addresses` has all of them."""
        rows = self.rows_on_host.clone()
        rows[:, column] = addresses[rows[:, -1]]
        return self._replace(rows=upload(rows, self.device), rows_on_host=rows)


class Plan(NamedTuple):
    """How an operation on lists of tensors runs.

    Attributes:
        parts: what Triton does.
        rest: indices of what plain torch does, those of one device and combination of dtypes together:
            tensors with gaps between their elements, or whose strides differ from list to list, and
            devices without Triton.
        streams: the streams, by device, on which the tables may be read.
    """

    parts: tuple[Part, ...]
    rest: tuple[tuple[int, ...], ...]
    streams: tuple[tuple[torch.device, int], ...]

    def is_readable(self) -> bool:
        """Whether the current streams are those that the tables went to the devices on."""
        return all(stream_of(device) == stream for device, stream in self.streams)

    def relocated(self, column: int, addresses: bytes) -> Plan:
        """Return this plan for one list whose tensors lie elsewhere. The host does not wait.

        Args:
            column: which list.
            addresses: where its tensors are; else they are as they were, and on the same devices.
        """
        table = torch.frombuffer(bytearray(addresses), dtype=torch.int64)
        return self._replace(parts=tuple(part.relocated(column, table) for part in self.parts))


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: what is made now is the graph's, and not to be kept."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def kept(make: Callable[..., T]) -> Callable[..., T]:
    """Keep the latest results of a function, except in the capture of a CUDA graph."""
    keep = functools.lru_cache(maxsize=_KEPT)(make)

    @functools.wraps(make)
    def get(*args: Any) -> T:
        return make(*args) if is_capturing() else keep(*args)

    get.cache_clear = keep.cache_clear  # type: ignore[attr-defined]
    return get


_plans: dict[object, Plan] = {}
_latest: dict[object, Plan] = {}
"""For single lists the plans that hold but for the addresses, which gradients change with each step."""
_plans_lock = threading.Lock()


def plan(
    *lists: Sequence[Tensor],
    block: int,
    numbers: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> Plan:
    """Return how an operation on parallel lists of tensors runs. The host does not wait.

    Args:
        *lists: dense tensors, see `real_values`; the i-th of each list have one shape and one device.
        block: the number of elements of a chunk.
        numbers: a tensor of one element for each of the list's, on its device.
        backend: see `amp.kernels.backend`.

    Raises:
        ValueError: the lists' lengths, shapes or devices differ.
        UnsupportedTensorError: a dtype other than float16, bfloat16, float32 and float64.
    """
    if is_capturing():
        return _make_plan(lists, block, numbers, backend)
    if not lists[0]:
        check_lists(*lists)
        return Plan((), (), ())
    in_triton = uses_triton(lists[0][0].device, backend)
    sign = _signature if in_triton else _signature_without_addresses
    signatures: list[Any] = []
    for i, tensors in enumerate(lists):
        in_place = i > 0 and tensors is lists[i - 1]
        signatures.append("same" if in_place else sign(tensors))
    if numbers is not None:
        signatures.append(bulk.addresses(numbers) if in_triton else sign(numbers))
    key = (block, backend, os.environ.get("AMP_KERNELS"), *signatures)
    known = _plans.get(key)
    if known is None or not known.is_readable():
        like = known = None
        if in_triton and len(signatures) == 1:
            addresses, *kinds = signatures[0]
            like = (*key[:3], *kinds, tuple([tensor.device for tensor in lists[0]]))
            alike = _latest.get(like)
            if alike is not None and alike.is_readable():
                known = alike.relocated(0, addresses)
        if known is None:
            known = _make_plan(lists, block, numbers, backend)
        if known.parts and not in_triton:
            return known  # a list that begins on one device and goes on on another: addresses matter
        _keep(_plans, key, known)
        if like is not None:
            _keep(_latest, like, known)
    return known


def _keep(plans: dict[object, Plan], key: object, plan: Plan) -> None:
    with _plans_lock:
        plans.pop(key, None)
        while len(plans) >= _KEPT:
            del plans[next(iter(plans))]
        plans[key] = plan


class Located(list[Tensor]):
    """Dense tensors of no class of their own that stay where they are for as long as this is used.

    What a plan depends on is looked up once, however many operations the list goes through.
    """

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """What `_signature` returns for them."""
        return _signature([*self])


class Whereabouts(NamedTuple):
    """What has to stay as it is for a plan to hold for another call.

    Attributes:
        same: the addresses of lists that hold the same tensors at each call.
        dtypes: of the first of these.
        orders: likewise, see `bulk.orders`.
        others: the addresses of tensors that need not be the same, None where no kernel reads them.
        kinds: what else there is to know of those.
    """

    same: list[bytes]
    dtypes: tuple[torch.dtype, ...]
    orders: bytes | None
    others: bytes | None
    kinds: list[object]

    @classmethod
    def of(
        cls, same: Sequence[Sequence[Tensor]], others: Sequence[Tensor], backend: str | None = None
    ) -> Whereabouts | None:
        """Return the whereabouts of tensors, or None where no plan may be kept.

        It takes less than `plan` looks at: the lists are taken to be alike in shape, and what holds the
        same tensors, the first list apart, to change no dtype or order where it lies.

        Args:
            same: lists of dense tensors, the same at each call.
            others: dense tensors, which need not be the same.
            backend: see `amp.kernels.backend`.
        """
        if is_capturing() or not (are_plain(same[0]) and are_plain(others)):
            return None
        addresses, *kinds = _signature(others)
        return cls(
            list(map(bulk.addresses, same)),
            bulk.dtypes(same[0]),
            bulk.orders(same[0]),
            addresses if uses_triton(others[0].device, backend) else None,
            kinds,
        )

    def moved(self, before: Whereabouts) -> bool:
        """Whether all is as it was before, but for the addresses that need not be the same."""
        if self.others is None or before.others is None:
            return False
        return self._replace(others=None) == before._replace(others=None)

    def know_all_of(self, plan: Plan) -> bool:
        """Whether nothing that a plan has tables of is missing here."""
        return self.others is not None or not plan.parts


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is of a class of its own, which may have its values elsewhere."""
    return bulk.types(tensors) <= _PLAIN


def real_values(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return dense tensors on the same memory: a sparse one's values, a DTensor's local shard."""
    if isinstance(tensors, Located):
        return tensors
    if are_plain(tensors) and bulk.layouts(tensors) <= {torch.strided}:
        return tensors
    return [t._values() if t.is_sparse else t for t in local_shards(tensors)]


def local_shards(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return dense tensors on the same memory: of a DTensor, the local shard."""
    if are_plain(tensors):
        return tensors
    return [getattr(t, "_local_tensor", t) for t in tensors]  # to_local() would be differentiable


def check_lists(*lists: Sequence[Tensor]) -> None:
    """Raise what `plan` raises for lists that no operation takes."""
    if len({len(tensors) for tensors in lists}) > 1:
        raise ValueError(f"the lists have {', '.join(str(len(t)) for t in lists)} tensors")
    for i, tensors in enumerate(zip(*lists, strict=True)):
        for tensor in tensors:
            if tensor.dtype not in _TAKEN:
                raise UnsupportedTensorError(
                    f"tensor {i} of shape {tuple(tensor.shape)} is {tensor.dtype}; kernels take "
                    "float16, bfloat16, float32 and float64",
                    i,
                )
        if len({tensor.shape for tensor in tensors}) > 1:
            raise ValueError(
                f"tensors {i} have shapes {', '.join(str(list(t.shape)) for t in tensors)}"
            )
        if len({tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"tensors {i} are on {', '.join(str(t.device) for t in tensors)}")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host waits only if that is the CPU and the tensor is not."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@contextmanager
def flag_on(device: torch.device, flag: Tensor | None) -> Iterator[Any]:
    """Yield a flag, float32 `[1]`, that lies on a device, and merge it into `flag` afterwards."""
    if flag is None or flag.device == device:
        yield flag
    else:
        local = torch.zeros(1, dtype=torch.float32, device=device)
        yield local
        torch.maximum(flag, to_device(local, flag.device), out=flag)


def _signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return all that a plan depends on; addresses tell devices apart."""
    if isinstance(tensors, Located):
        return tensors.signature
    return (
        bulk.addresses(tensors),
        bulk.sizes(tensors),
        bulk.dtypes(tensors),
        bulk.orders(tensors),
    )


def _signature_without_addresses(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return all that a plan without tables depends on. On the CPU, gradients move with each step."""
    return (
        tuple([tensor.shape for tensor in tensors]),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([tensor.device for tensor in tensors]),
    )


def _make_plan(
    lists: Sequence[Sequence[Tensor]],
    block: int,
    numbers: Sequence[Tensor] | None,
    backend: str | None,
) -> Plan:
    check_lists(*lists)
    columns = lists if numbers is None else [*lists, numbers]
    for i, number in enumerate(numbers or ()):
        if number.dtype is not torch.float32 or number.device != lists[0][i].device:
            raise ValueError(
                f"number {i} is {number.dtype} on {number.device}; it must be float32 on the tensor's "
                f"device, {lists[0][i].device}"
            )
    groups: defaultdict[_Kind, list[int]] = defaultdict(list)
    rest: defaultdict[_Kind, list[int]] = defaultdict(list)
    for i, tensors in enumerate(zip(*lists, strict=True)):
        if tensors[0].numel():
            device = tensors[0].device
            in_triton = uses_triton(device, backend) and are_flat(tensors)
            same = groups if in_triton else rest
            same[device, tuple(tensor.dtype for tensor in tensors)].append(i)
    parts = []
    for (device, dtypes), indices in groups.items():
        sizes = tuple(lists[0][i].numel() for i in indices)
        rows = [[*(t[i].data_ptr() for t in columns), lists[0][i].numel(), i] for i in indices]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        on_device = upload(table, device)
        chunks, firsts = _chunks(sizes, block, device, stream_of(device))
        parts.append(Part(tuple(indices), device, dtypes, on_device, chunks, firsts, table))
    if parts and len(lists[0]) >= bulk.WORTH_COMPILING and not INTERPRETED:
        bulk.compile_soon()
    streams = {part.device: stream_of(part.device) for part in parts}
    return Plan(tuple(parts), tuple(map(tuple, rest.values())), tuple(streams.items()))


@kept
def _chunks(
    sizes: tuple[int, ...], block: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    counts = (torch.tensor(sizes, device="cpu") + block - 1) // block
    firsts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tensor = torch.repeat_interleave(counts)
    chunks = torch.stack([tensor, torch.arange(len(tensor), device="cpu") - firsts[tensor]], dim=1)
    return upload(chunks.int(), device), upload(firsts.int(), device)


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device. The host does not wait."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


@kept
def numbers_on(
    device: torch.device, stream: int, numbers: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """Return numbers as a tensor `[n]` that was sent to a device on its stream; not to be written."""
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def stream_of(device: torch.device) -> int:
    """Return the current stream of a device: what is kept was sent there on one, and is read on it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def are_flat(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors' elements lie in one order in memory, without gaps or overlaps."""
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    strides = tensors[0].stride()
    kept = torch.empty_like(tensors[0], device="meta").stride() == strides
    return kept and all(tensor.stride() == strides for tensor in tensors)
