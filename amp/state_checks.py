"""Checks of state dicts: the type, shape and range of each entry, before anything is loaded.

A `load_state_dict` makes a `StateChecks`, reads every entry through it, calls `finish`, and then loads
what it has read. The tensors that it has loaded are copies, which share no memory with the state dict,
the model or each other. An error names the entry by its path in the dict, shows what is there, and says
what is expected.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from amp.dtypes import SCALABLE, dtype_name
from amp.errors import AmpError, AmpTypeError, AmpValueError, brief, is_out_of_memory

LARGEST_COUNT = 2**31
"""The largest count in a state dict. Counters are int32 in other libraries. Here and in torch they are
float32, which rounds the largest int32 up to this number."""

_NUMBERS = SCALABLE | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
FLOAT32_MAX = torch.finfo(torch.float32).max


class _Values(NamedTuple):
    """The extremes of a tensor, `[2]`, on its device, and the range in which they have to be."""

    path: str
    key: Any
    extremes: Tensor
    expected: str
    low: float
    high: float
    is_whole: bool
    may_be_inf: bool


class StateChecks:
    """The checks of one state dict.

    The values in tensors are checked by `finish`, where the host waits once for each device.

    Raises:
        AmpValueError: every method raises this if an entry is not as expected.
    """

    def __init__(self) -> None:
        self._values: list[_Values] = []

    def fail(self, path: str, key: Any, found: str, expected: str) -> NoReturn:
        """Raise an AmpValueError about the entry `key` of what is at `path`."""
        raise AmpValueError(
            f"{path} has no usable {brief(key)}: {found}; expected {expected}. Nothing was loaded: "
            "repair the entry, or use another checkpoint"
        )

    def entry(self, holder: Mapping[Any, Any], key: Any, path: str, expected: str) -> Any:
        """Return an entry of a mapping."""
        if key not in holder:
            self.fail(path, key, "it is missing", expected)
        return holder[key]

    def mapping(self, holder: Any, key: Any, path: str, expected: str) -> dict[Any, Any]:
        """Return an entry that is a mapping, as a plain dict."""
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, Mapping):
            self.fail(path, key, brief(value), expected)
        try:
            return dict(value)
        except Exception as error:
            self.fail(path, key, f"a mapping that cannot be read: {brief(error)}", expected)

    def items(
        self, holder: Any, key: Any, path: str, expected: str, length: int | None = None
    ) -> Sequence[Any]:
        """Return an entry that is a list or tuple, with `length` items if that is given."""
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            self.fail(path, key, brief(value), expected)
        return value

    def flag(self, holder: Any, key: Any, path: str) -> bool:
        """Return an entry that is a bool."""
        value = self.entry(holder, key, path, "a bool")
        if not isinstance(value, bool):
            self.fail(path, key, brief(value), "a bool")
        return value

    def number(
        self,
        holder: Any,
        key: Any,
        path: str,
        low: float = -math.inf,
        high: float = math.inf,
        is_whole: bool = False,
    ) -> float:
        """Return an entry that is a finite number on the host, `low <= number <= high`."""
        expected = f"a {'whole' if is_whole else 'finite'} number{_range(low, high)}"
        value = self.entry(holder, key, path, expected)
        is_right = float.is_integer if is_whole else math.isfinite
        number = as_float(value)
        if number is None or not (low <= number <= high and is_right(number)):
            self.fail(path, key, brief(value), expected)
        return int(number) if is_whole else number

    def count(self, holder: Any, key: Any, path: str, high: int = LARGEST_COUNT) -> int:
        """Return an entry that is a whole number on the host, from 0 to `high`."""
        return int(self.number(holder, key, path, 0, high, is_whole=True))

    def scalar(
        self,
        holder: Any,
        key: Any,
        path: str,
        low: float = -FLOAT32_MAX,
        high: float = FLOAT32_MAX,
        is_whole: bool = False,
        takes_tensors: bool = True,
    ) -> Any:
        """Return an entry that is a number or a tensor of one element, `low <= number <= high`.

        The default range is that of float32. A tensor is copied, in float64 if it is that, else in
        float32.
        """
        expected = f"a {'whole' if is_whole else 'finite'} number{_range(low, high)}"
        value = self.entry(holder, key, path, f"{expected}, or a tensor of one")
        if not isinstance(value, Tensor) or not takes_tensors:
            return self.number(holder, key, path, low, high, is_whole)
        is_plain = value.layout is torch.strided and not value.is_meta
        if value.numel() != 1 or not is_plain or value.dtype not in _NUMBERS:
            self.fail(path, key, brief(value), f"{expected}, or a tensor of one")
        value = self._readable(key, path, value, expected)
        self._values.append(_Values(path, key, _extremes(value), expected, low, high, is_whole, False))
        return value.to(torch.float64 if value.dtype is torch.float64 else torch.float32, copy=True)

    def tensor_like(
        self,
        holder: Any,
        key: Any,
        path: str,
        like: Tensor,
        dtype: torch.dtype | None = None,
        low: float = -math.inf,
        may_be_inf: bool = False,
        copies: bool = True,
    ) -> Tensor:
        """Return a copy of an entry that is a floating-point tensor with the shape of `like`.

        The copy has the device and the strides of `like`. It is complex if `like` is.

        Args:
            holder: the mapping.
            key: the key of the entry.
            path: the path of the mapping.
            like: a tensor.
            dtype: the dtype of the copy, in whose range the values have to be; None is that of `like`.
            low: the smallest value that is allowed.
            may_be_inf: whether inf is allowed; NaN never is.
            copies: False returns the values themselves, for a caller that converts them.
        """
        dtype = dtype or like.dtype
        kind = "complex" if like.is_complex() else "floating-point"
        expected = f"a dense {kind} tensor of shape {tuple(like.shape)}"
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, Tensor) or value.is_complex() != like.is_complex():
            self.fail(path, key, brief(value), expected)
        if value.dtype not in SCALABLE and not value.is_complex():
            self.fail(path, key, brief(value), expected)
        if value.is_nested or value.layout is not torch.strided or value.shape != like.shape:
            self.fail(path, key, brief(value), expected)
        has, needs = (tuple(_on_this_rank(each).shape) for each in (value, like))
        if has != needs:
            expected += f", whose part on this rank has {needs}: amp.set_state_dict loads whole ones"
            self.fail(path, key, f"{brief(value)}, whose part on this rank has {has}", expected)
        if value.is_meta and not like.is_meta:
            self.fail(path, key, "a tensor on the device meta, which has no values", expected)
        value = self._readable(key, path, value, expected)
        if value.numel() and not value.is_meta:
            high = torch.finfo(dtype).max
            expected = f"finite numbers{_range(low, high)}, for {dtype_name(dtype)}"
            low = max(low, -high)
            extremes = _extremes(value)
            self._values.append(_Values(path, key, extremes, expected, low, high, False, may_be_inf))
        return _copied(value, like, dtype) if copies else value

    def _readable(self, key: Any, path: str, value: Tensor, expected: str) -> Tensor:
        """Return a tensor whose memory holds its values; that of a conjugate view, say, does not."""
        value = value.detach()
        if type(value) is not Tensor or value.is_meta:
            return value
        if value._is_zerotensor():
            return value.clone()
        if value.numel():
            steps = zip(value.shape, value.stride(), strict=True)
            last = value.storage_offset() + sum((size - 1) * stride for size, stride in steps)
            if value.untyped_storage().nbytes() < (last + 1) * value.itemsize:
                self.fail(path, key, f"{brief(value)} whose memory has been freed", expected)
        return value.resolve_conj().resolve_neg()

    def finish(self) -> None:
        """Check the values of all tensors so far. The host waits once for each device."""
        alike: dict[Any, list[_Values]] = {}
        for each in self._values:
            alike.setdefault((each.extremes.device, each.extremes.dtype), []).append(each)
        self._values = []
        for found in alike.values():
            extremes = torch.stack([each.extremes for each in found]).tolist()
            for each, (least, most) in zip(found, extremes, strict=True):
                is_inf = each.may_be_inf and most == math.inf
                fits = each.low <= least and (is_inf or (most <= each.high and math.isfinite(most)))
                if not fits or (each.is_whole and not most.is_integer()):
                    found_there = "a tensor with NaN"
                    if least == least:
                        found_there = f"a tensor of values from {least:g} to {most:g}"
                    self.fail(each.path, each.key, found_there, each.expected)


def as_float(value: Any) -> float | None:
    """Return a real number, Python's or NumPy's, as a float; None for anything else.

    Integers beyond int64, and fractions beyond float64, become infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    infinity = math.copysign(math.inf, value > 0 or -1)  # type: ignore[operator]
    if isinstance(value, numbers.Integral) and int(value).bit_length() > 63:
        return infinity
    try:
        return float(value)
    except OverflowError:  # a fraction
        return infinity


def as_plain(value: Any) -> Any:
    """Return a number as Python's int or float, also in a list or tuple; other values unchanged."""
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else _plain(value)


def _plain(value: Any) -> Any:
    number = as_float(value)
    if number is None or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, numbers.Integral) else number


def as_dict(value: Any, expected: str) -> dict[Any, Any]:
    """Return a state dict as a plain dict; raise AmpTypeError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise AmpTypeError(f"expected {expected}, a dict, and got a {type(value).__name__}")
    try:
        return dict(value)
    except Exception as error:
        kind = type(value).__name__
        raise AmpTypeError(
            f"expected {expected}, a dict, and got a {kind} that cannot be read: {brief(error)}"
        ) from error


def remember(mappings: Iterable[Any]) -> Callable[[], None]:
    """Return a function that restores the entries that dicts have now; other objects are left out."""
    before = [(mapping, dict(mapping)) for mapping in mappings if isinstance(mapping, dict)]

    def take_back() -> None:
        for mapping, entries in before:
            mapping.clear()
            mapping.update(entries)

    return take_back


@contextmanager
def all_or_nothing(optimizer: Any) -> Iterator[None]:
    """Restore an optimizer's attributes, groups and state if loading fails inside the block."""
    own, groups, state = vars(optimizer), optimizer.param_groups, optimizer.state
    take_back = remember([own, *own.values(), *groups, state, *state.values()])
    params = [(group["params"], list(group["params"])) for group in groups]
    try:
        yield
    except BaseException as error:
        take_back()
        for held, before in params:
            held[:] = before
        if isinstance(error, AmpError) or not isinstance(error, Exception) or is_out_of_memory(error):
            raise
        raise AmpValueError(
            f"{type(optimizer).__name__} cannot load this state dict: {type(error).__name__}: {error}. "
            "Nothing was loaded: use a state_dict() of an optimizer of the same class, with the same "
            "groups"
        ) from error


def _range(low: float, high: float) -> str:
    if low == -math.inf and high == math.inf:
        return ""
    if high == math.inf:
        return f" of at least {low:g}"
    return f" from {max(low, -high):g} to {high:g}"


def _on_this_rank(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor that this rank holds; any other tensor itself."""
    shard: Any = getattr(tensor, "_local_tensor", tensor).detach()
    return shard.wait() if hasattr(shard, "wait") else shard  # type: ignore[no-any-return]


def _copied(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of the values, with the strides of `like`, or their own if that has none."""
    if type(value) is not Tensor or hasattr(like, "_local_tensor"):
        return value.to(like.device, dtype, copy=True)
    strided = value if 0 in like.stride() else like  # a lean master is one number, expanded
    return torch.empty_like(strided, dtype=dtype, device=like.device, requires_grad=False).copy_(value)


def _extremes(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest value, `[2]`, float64 for a float64 tensor, else float32.

    Both are NaN if any value is.
    """
    tensor = _on_this_rank(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    if not tensor.numel():  # this rank has no part of it
        return torch.zeros(2, dtype=wide, device=tensor.device)
    return torch.stack(list(torch.aminmax(tensor))).to(wide)
