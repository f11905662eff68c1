"""Checks of state dicts: all of one is looked at before any of it is taken over.

Whoever loads a state dict makes a `StateChecks`, reads every entry through it, and applies what it has
read after `finish`. An error names the entry by its path in the dict, shows what is there, and says
what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from amp.dtypes import SCALABLE, dtype_name
from amp.errors import AmpError, AmpTypeError, AmpValueError, brief
from amp.kernels.grad_mode import without_grad

LARGEST_COUNT = 2**31
"""Counters are int32 in other libraries, and float32 here and in torch, which rounds up to this."""

_NUMBERS = SCALABLE | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
FLOAT32_MAX = torch.finfo(torch.float32).max
_MISSING: Any = object()


class _Values(NamedTuple):
    """What the elements of a tensor on some device have to be."""

    path: str
    key: Any
    tensor: Tensor
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
        self._at: dict[tuple[torch.device, int], str] = {}
        """Where tensors lie, of those that are taken over."""

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

    def mapping(self, holder: Any, key: Any, path: str, expected: str) -> Mapping[Any, Any]:
        """Return an entry that is a mapping."""
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, Mapping):
            self.fail(path, key, brief(value), expected)
        return value

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

        By default it is what float32 can hold.
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
        self._values.append(_Values(path, key, value, expected, low, high, is_whole, False))
        return value

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
        """Return an entry that is a floating-point tensor with the shape of another.

        Args:
            holder: the mapping.
            key: of the entry in it.
            path: of the holder.
            like: what has the shape.
            dtype: what the values are cast to, whose range they have to be in; by default that of
                `like`.
            low: the smallest value that is allowed.
            may_be_inf: whether inf is allowed; NaN is not.
            shape: another shape.
        """
        dtype, shape = dtype or like.dtype, tuple(like.shape if shape is None else shape)
        expected = f"a dense floating-point tensor of shape {shape}"
        value = self.entry(holder, key, path, expected)
        if not isinstance(value, Tensor) or value.dtype not in SCALABLE:
            self.fail(path, key, brief(value), expected)
        if value.layout is not torch.strided or value.shape != shape:
            self.fail(path, key, brief(value), expected)
        if value.is_meta and not like.is_meta:
            self.fail(path, key, "a tensor on the device meta, which has no values", expected)
        self._check_memory(key, path, value, expected)
        if value.numel() and not value.is_meta:
            high = torch.finfo(dtype).max
            expected = f"finite numbers{_range(low, high)}, for {dtype_name(dtype)}"
            self._values.append(_Values(path, key, value, expected, low, high, False, may_be_inf))
        return value

    def _check_memory(self, key: Any, path: str, value: Tensor, expected: str) -> None:
        """Check that no element of a tensor is another one too, here or in an earlier tensor."""
        values = _on_this_rank(value)
        if values.is_meta or not values.numel():
            return
        steps = zip(values.shape, values.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in steps):
            self.fail(path, key, f"{brief(value)} whose elements share memory", f"{expected}; clone it")
        called = f"{path}[{brief(key)}]"
        other = self._at.setdefault((values.device, values.data_ptr()), called)
        if other is not called:
            self.fail(path, key, f"it is the same memory as {other}", f"{expected}; clone it")

    def finish(self) -> None:
        """Look at the values of all tensors so far. The host waits once for each device."""
        alike: dict[Any, list[tuple[_Values, Tensor]]] = {}
        for each in self._values:
            tensor = _on_this_rank(each.tensor)
            if tensor.numel():
                is_double = tensor.dtype is torch.float64
                alike.setdefault((tensor.device, is_double), []).append((each, tensor))
        self._values = []
        for found in alike.values():
            extremes = torch.stack([_extremes(tensor) for _, tensor in found]).tolist()
            for (each, _), (least, most) in zip(found, extremes, strict=True):
                is_inf = each.may_be_inf and most == math.inf
                fits = each.low <= least and (is_inf or (most <= each.high and math.isfinite(most)))
                if not fits or (each.is_whole and not most.is_integer()):
                    found_there = "a tensor with NaN"
                    if least == least:
                        found_there = f"a tensor of values from {least:g} to {most:g}"
                    self.fail(each.path, each.key, found_there, each.expected)


def as_float(value: Any) -> float | None:
    """Return a Python number as a float, or None for anything else; inf for what is beyond int64."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and value.bit_length() > 63:
        return math.inf if value > 0 else -math.inf
    return float(value)


def check_mapping(value: Any, expected: str) -> None:
    """Raise AmpTypeError unless what was passed as a state dict is a mapping."""
    if not isinstance(value, Mapping):
        raise AmpTypeError(f"expected {expected}, a dict, and got a {type(value).__name__}")


@contextmanager
def all_or_nothing(optimizer: Any) -> Iterator[None]:
    """Give an optimizer its attributes, groups and state back if loading fails inside the block."""
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    entries_of = [optimizer.state, *optimizer.state.values()]
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


@without_grad
def _extremes(tensor: Tensor) -> Tensor:
    """Return the least and the largest value, `[2]`, in FP32 but for FP64; NaN if one is."""
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return torch.stack(list(torch.aminmax(tensor))).to(wide)
