"""What a check of `reamp selftest` is, and the list of all checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp.kernels import backend


class SkipError(Exception):
    """A check does not apply here; the text says why."""


class Outcome(NamedTuple):
    """The result of a check that has passed.

    Attributes:
        figure: a number to show, with its unit, or an empty text.
        bits: tensors whose bits go into the digest of the report.
    """

    figure: str = ""
    bits: Sequence[Tensor] = ()


class Check(NamedTuple):
    """One check.

    Attributes:
        name: what it is called in the report, with its section before a colon.
        run: checks a device, and raises AssertionError if something is wrong, or `SkipError`.
        seconds: how long it may take.
        is_full: whether only `--full` runs it.
    """

    name: str
    run: Callable[[torch.device], Outcome | None]
    seconds: float
    is_full: bool


CHECKS: dict[str, Check] = {}
"""The checks of the modules that were imported."""


def all_checks() -> dict[str, Check]:
    """Return all checks by their names, in the order in which they run."""
    for name in ("of_kernels", "of_steps", "of_fp8", "of_training", "of_sessions", "of_bandwidth"):
        importlib.import_module(f"amp.selftest.{name}")
    return CHECKS


Function = Callable[[torch.device], Outcome | None]


def check(name: str, seconds: float = 30.0, full: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a check."""

    def register(function: Function) -> Function:
        CHECKS[name] = Check(name, function, seconds, full)
        return function

    return register


def needs_gpu(device: torch.device, what: str) -> None:
    """Raise SkipError on a CPU, which does not have `what`."""
    if device.type != "cuda":
        raise SkipError(f"needs a GPU: {what}")


def needs_triton(device: torch.device, otherwise: str) -> None:
    """Raise SkipError where plain torch runs the step, because the host waits then."""
    if not backend.uses_triton(device):
        raise SkipError(f"plain torch runs, and makes the host wait: {otherwise}")


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Raise AssertionError if tensors differ in any bit; NaNs are alike."""
    assert len(found) == len(expected), f"{what}: {len(found)} tensors for {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        a = a.cpu()
        assert a.shape == b.shape, f"{what}: tensor {i} has the shape {tuple(a.shape)}"
        assert a.dtype is b.dtype, f"{what}: tensor {i} is {a.dtype} and not {b.dtype}"
        differs = (_as_bits(a) != _as_bits(b)).logical_and(~(_is_nan(a) & _is_nan(b)))
        if differs.any():
            at = int(differs.flatten().nonzero()[0])
            values = a.flatten()[at].item(), b.flatten()[at].item()
            count = int(differs.sum())
            raise AssertionError(
                f"{what}: tensor {i} of {a.numel()} elements differs in {count}; element {at} is "
                f"{values[0]!r} and not {values[1]!r}"
            )


def _as_bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _is_nan(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return tensor.float().isnan()
