"""Checks of state dicts: all of one is looked at before any of it is taken over.

Whoever loads a state dict makes a `StateChecks`, reads every entry through it, and applies what it has
read after `finish`. Tensors that it returns are copies in memory of their own: what is loaded shares
none with the state dict, the model or another entry, however those tensors were made. An error names
the entry by its path in the dict, shows what is there, and says what is expected.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from amp.dtypes import SCALABLE, dtype_name
from amp.errors import AmpError, AmpTypeError, AmpValueError, brief

LARGEST_COUNT = 2**31
"""Counters are int32 in other libraries, and float32 here and in torch, which rounds up to this."""

_NUMBERS = SCALABLE | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
FLOAT32_MAX = torch.finfo(torch.float32).max
_MISSING: Any = object()


class _Values(NamedTuple):
    """What the elements of a tensor on some device have to be, and their extremes, `[2]`."""

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

    What lies in tensors is looked at by `finish`, where the host waits once for each device.

    Raises:
        AmpValueError: from every method, if an entry is not what is expected.
    """

    def __init__(self) -> None:
        self._values: list[_Values] = []

    def fail(self, path: str, key: Any, found: str, expected: str) -> NoReturn:
        """Raise an AmpValueError about the entry `key` of what is at `path`."""
        raise AmpValueError(
            f"{path} has no usable {brief(key)}: {found}; expected {expected}. Nothing was loaded: "
            "repair the entry, or take another checkpoint"
        )

    def entry(self, holder: Any, key: Any, path: str, expected: str, default: Any = _MISSING) -> Any:
        """Return an entry of a mapping; `default`, if there is one, where it is missing."""
        if not isinstance(holder, Mapping):
            self.fail(path, key, f"instead of a mapping there is {brief(holder)}", expected)
        value = holder.get(key, default)
        if value is _MISSING:
            self.fail(path, key, "it is missing", expected)
        return value

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
        """Return an entry that is a list or tuple, of a length if that is given."""
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            self.fail(path, key, brief(value), expected)
        return value

    def flag(self, holder: Any, key: Any, path: str, default: Any = _MISSING) -> bool:
        """Return an entry that is a bool."""
        value = self.entry(holder, key, path, "a bool", default)
        if value is not default and not isinstance(value, bool):
            self.fail(path, key, brief(value), "a bool")
        return bool(value)

    def number(
        self,
        holder: Any,
        key: Any,
        path: str,
        low: float = -math.inf,
        high: float = math.inf,
        default: Any = _MISSING,
    ) -> float:
        """Return an entry that is a finite number on the host, `low <= number <= high`."""
        expected = f"a finite number{_range(low, high)}"
        value = self.entry(holder, key, path, expected, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        number = as_float(value)
        if number is None or not (low <= number <= high and math.isfinite(number)):
            self.fail(path, key, brief(value), expected)
        return number

    def count(
        self, holder: Any, key: Any, path: str, high: int = LARGEST_COUNT, default: Any = _MISSING
    ) -> int:
        """Return an entry that is a whole number on the host, from 0 to `high`."""
        expected = f"a whole number{_range(0, high)}"
        value = self.entry(holder, key, path, expected, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        number = as_float(value)
        if number is None or not (0 <= number <= high and number.is_integer()):
            self.fail(path, key, brief(value), expected)
        return int(number)

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

        By default it is what float32 can hold. A tensor is copied, in float64 or else in float32.
        """
        expected = f"a {'whole' if is_whole else 'finite'} number{_range(low, high)}"
        value = self.entry(holder, key, path, f"{expected}, or a tensor of one")
        if not isinstance(value, Tensor) or not takes_tensors:
            if is_whole:
                return self.count(holder, key, path, int(high))
            return self.number(holder, key, path, low, high)
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
        shape: Sequence[int] | None = None,
    ) -> Tensor:
        """Return a copy of an entry that is a floating-point tensor with the shape of another.

        It is on the device of the other, and in memory in the same order. The state of a complex
        parameter is complex.

        Args:
            holder: the mapping.
            key: of the entry in it.
            path: of the holder.
            like: what has the shape, the device and the strides.
            dtype: what the values are cast to, whose range they have to be in; by default that of
                `like`.
            low: the smallest value that is allowed.
            may_be_inf: whether inf is allowed; NaN is not.
            shape: another shape.
        """
        dtype, shape = dtype or like.dtype, tuple(like.shape if shape is None else shape)
        kind = "complex" if like.is_complex() else "floating-point"
        expected = f"a dense {kind} tensor of shape {shape}"
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, Tensor) or value.is_complex() != like.is_complex():
            self.fail(path, key, brief(value), expected)
        if value.dtype not in SCALABLE and not value.is_complex():
            self.fail(path, key, brief(value), expected)
        if value.is_nested or value.layout is not torch.strided or value.shape != shape:
            self.fail(path, key, brief(value), expected)
        if value.is_meta and not like.is_meta:
            self.fail(path, key, "a tensor on the device meta, which has no values", expected)
        value = self._readable(key, path, value, expected)
        if value.numel() and not value.is_meta:
            high = torch.finfo(dtype).max
            expected = f"finite numbers{_range(low, high)}, for {dtype_name(dtype)}"
            low = max(low, -high)
            extremes = _extremes(value)
            self._values.append(_Values(path, key, extremes, expected, low, high, False, may_be_inf))
        return _copied(value, like, dtype)

    def _readable(self, key: Any, path: str, value: Tensor, expected: str) -> Tensor:
        """Return a tensor whose memory holds its values, which that of a view by torch may not."""
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
        """Look at the values of all tensors so far. The host waits once for each device."""
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
    """Return a number as a float, or None for anything else; inf for what is beyond int64.

    Numbers are Python's, and NumPy's that are real.
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
    """Return a number as Python's int or float, also in a list or tuple; anything else as it is."""
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else _plain(value)


def _plain(value: Any) -> Any:
    number = as_float(value)
    if number is None or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, numbers.Integral) else number


def as_dict(value: Any, expected: str) -> dict[Any, Any]:
    """Return what was passed as a state dict as a plain dict; AmpTypeError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise AmpTypeError(f"expected {expected}, a dict, and got a {type(value).__name__}")
    try:
        return dict(value)
    except Exception as error:
        kind = type(value).__name__
        raise AmpTypeError(
            f"expected {expected}, a dict, and got a {kind} that cannot be read: {brief(error)}"
        ) from error


@contextmanager
def all_or_nothing(optimizer: Any) -> Iterator[None]:
    """Give an optimizer its attributes, groups and state back if loading fails inside the block."""
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    entries_of = [*attributes.values(), optimizer.state, *optimizer.state.values()]
    state = [(entry, dict(entry)) for entry in entries_of if isinstance(entry, dict)]
    try:
        yield
    except BaseException as error:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, entries, params in groups:
            group.clear()
            group.update(entries)
            group["params"][:] = params
        for mapping, entries in state:
            mapping.clear()
            mapping.update(entries)
        if isinstance(error, AmpError) or not isinstance(error, Exception):
            raise
        raise AmpValueError(
            f"{type(optimizer).__name__} cannot load this state dict: {type(error).__name__}: {error}. "
            "Nothing was loaded: take what the state_dict() of such an optimizer, with the same "
            "groups, has returned"
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
    """Return the values in new memory, in the order of `like` where that has the shape."""
    if type(value) is not Tensor or hasattr(like, "_local_tensor"):
        return value.to(like.device, dtype, copy=True)
    if value.shape != like.shape:
        return torch.empty(value.shape, dtype=dtype, device=like.device).copy_(value)
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(value)


def _extremes(tensor: Tensor) -> Tensor:
    """Return the least and the largest value, `[2]`, in FP32 but for FP64; NaN if one is."""
    tensor = _on_this_rank(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    if not tensor.numel():  # this rank has nothing of it
        return torch.zeros(2, dtype=wide, device=tensor.device)
    return torch.stack(list(torch.aminmax(tensor))).to(wide)
