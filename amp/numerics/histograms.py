"""Histograms of a live model's activations and gradients, by exponents of 2, without host waits.

Source: the histograms of gradients in Micikevicius et al. 2018.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp.casting.containers import map_tensors
from amp.errors import AmpTypeError, AmpValueError
from amp.kernels.interrupts import without_grad
from amp.numerics.formats import Format, as_format
from amp.numerics.rounding import FormatLike
from amp.numerics.scaling import GRADIENT_FORMATS, SCALES, GradientSurvival, survival_of
from amp.profiles.keys import parse_count
from amp.terminal.text import Printer
from amp.training.attached_optimizer import AttachedOptimizer

LOWEST, HIGHEST = -149, 127
_BINS = HIGHEST - LOWEST + 1
_ZERO, _NOT_FINITE = _BINS, _BINS + 1


@dataclass(frozen=True)
class Histogram:
    """How many numbers have each exponent of 2.

    Attributes:
        counts: for each exponent `e` that occurred, how many numbers had `2**e <= abs(x) < 2**(e+1)`.
        zeros: how many were 0.
        not_finite: how many were inf or NaN.
    """

    counts: dict[int, int]
    zeros: int
    not_finite: int

    @classmethod
    def of(cls, x: Tensor) -> Histogram:
        """Return the histogram of a floating tensor of any shape. The host waits for the device."""
        return _histogram(_tally(x))

    @property
    def total(self) -> int:
        """How many numbers there are in all."""
        return sum(self.counts.values()) + self.zeros + self.not_finite

    def __add__(self, other: Histogram) -> Histogram:
        counts = Counter(self.counts) + Counter(other.counts)
        return Histogram(
            dict(sorted(counts.items())), self.zeros + other.zeros, self.not_finite + other.not_finite
        )

    def fates(self, fmt: Format, scale: float = 1.0) -> tuple[int, int, int]:
        """Return how many numbers, times a scale, become 0, become subnormal and overflow in a format.

        Only exponents are known, so all numbers of an exponent count like the majority of the format's
        numbers with that exponent.
        """
        shift = math.frexp(scale)[1] - 1
        normal = fmt.min_exponent if fmt.has_zero else -math.inf

        def count(low: float, high: float) -> int:
            return sum(n for exponent, n in self.counts.items() if low <= exponent + shift < high)

        subnormal = normal - fmt.mantissa_bits - 1
        too_large = count(fmt.max_exponent + 1, math.inf)
        return count(-math.inf, subnormal), count(subnormal, normal), too_large + self.not_finite


NOTHING = Histogram({}, 0, 0)


@dataclass(frozen=True)
class WatchedLayer:
    """The histograms of one layer.

    Attributes:
        activations: its outputs.
        activation_gradients: the gradients of its outputs, unscaled if the optimizer is known.
        weight_gradients: the gradients of its parameters, without those of submodules, unscaled if the
            optimizer is known.
    """

    activations: Histogram
    activation_gradients: Histogram
    weight_gradients: Histogram


_UNSEEN = WatchedLayer(NOTHING, NOTHING, NOTHING)


@dataclass(frozen=True)
class WatchReport:
    """The result of a `Watch`.

    Attributes:
        layers: the histograms of each layer, by its name in the model.
        steps: how many forwards were watched.
    """

    layers: dict[str, WatchedLayer]
    steps: int

    @property
    def gradients(self) -> Histogram:
        """The histogram of all gradients, of activations and of weights."""
        pairs = ((layer.activation_gradients, layer.weight_gradients) for layer in self.layers.values())
        return sum((histogram for pair in pairs for histogram in pair), NOTHING)

    def describe(self, fmt: FormatLike = "float16", scale: float = 1.0) -> str:
        """Return a table: for each layer, what a format would lose of its gradients times a scale."""
        fmt = as_format(fmt)
        rows = []
        for name, layer in self.layers.items():
            for what in ("activation", "weight"):
                histogram: Histogram = getattr(layer, f"{what}_gradients")
                count = histogram.total - histogram.zeros
                if count:
                    lost = [f"{part / count:.2%}" for part in histogram.fates(fmt, scale)]
                    low, high = min(histogram.counts, default=0), max(histogram.counts, default=0)
                    rows.append((name or "(model)", what, f"2^{low}", f"2^{high}", *lost))
        header = ("layer", "gradients of", "from", "to", "become 0", "subnormal", "overflow")
        text = io.StringIO()
        Printer(text).table(header, rows)
        return text.getvalue()

    def survival(
        self, scales: Sequence[float] = SCALES, formats: Sequence[FormatLike] = GRADIENT_FORMATS
    ) -> GradientSurvival:
        """Return what each scale would lose of the gradients, known to within a factor of 2."""
        found = self.gradients
        count = found.total - found.zeros
        return survival_of(found.fates, scales, formats, count, found.zeros, found.not_finite)


class Watch(AbstractContextManager["Watch"]):
    """Collects histograms from a model until it is closed; see `watch`."""

    def __init__(self, model: nn.Module, every: int, optimizer: Any) -> None:
        self._every = every
        self._binding = AttachedOptimizer.of(optimizer)
        self._forwards = 0
        self._steps = 0
        self._looks = False
        self._shift: Tensor | None = None
        self._due: dict[Tensor, Tensor | None] = {}  # parameters whose next gradient is to be counted
        self._owner: dict[Tensor, str] = {}
        self._tallies: dict[tuple[str, str], Tensor] = {}
        self._names: list[str] = []
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for name, module in model.named_modules():
            if not any(module.children()) or any(True for _ in module.parameters(recurse=False)):
                self._names.append(name)
                self._handles.append(module.register_forward_hook(partial(self._see_output, name)))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._looks = False
        if torch.is_grad_enabled():
            self._looks = self._forwards % self._every == 0
            self._forwards += 1
        if not self._looks:
            return
        self._steps += 1
        self._shift = None
        if self._binding is not None:
            scale = self._binding.owner.scalers[0].scale_on_device
            self._shift = torch.frexp(scale)[1].long() - 1
        for name, parameter in module.named_parameters():  # a tied one has its first name
            if parameter.requires_grad:
                self._due[parameter] = self._shift
                if parameter not in self._owner:
                    self._owner[parameter] = name.rpartition(".")[0]
                    hook = partial(self._see_weight, parameter)
                    self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._looks = False

    def _see_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._looks:
            map_tensors(partial(self._see_activation, name), output)

    def _see_activation(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel():
            self._count((name, "activations"), None, tensor)
            if tensor.requires_grad:
                hook = partial(self._count, (name, "activation_gradients"), self._shift)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    def _see_weight(self, parameter: Tensor, grad: Tensor) -> None:
        if parameter in self._due:
            shift = self._due.pop(parameter)
            values = grad.coalesce().values() if grad.is_sparse else grad
            self._count((self._owner[parameter], "weight_gradients"), shift, values)

    @without_grad
    def _count(self, key: tuple[str, str], shift: Tensor | None, tensor: Tensor) -> None:
        tally = _tally(tensor, shift)
        held = self._tallies.get(key)
        self._tallies[key] = tally if held is None else tally + held.to(tally.device)

    def report(self) -> WatchReport:
        """Return the histograms so far. The host waits for the device."""
        layers = {}
        for name in self._names:
            tallies = [self._tallies.get((name, field.name)) for field in fields(WatchedLayer)]
            layer = WatchedLayer(*map(_histogram, tallies))
            if layer != _UNSEEN:
                layers[name] = layer
        return WatchReport(layers, self._steps)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
        self._looks = False
        self._due.clear()
        self._owner.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()


def watch(model: nn.Module, every: int = 1, optimizer: Any = None) -> Watch:
    """Count the exponents of a live model's activations and gradients, layer by layer.

        with amp.numerics.watch(model, every=10, optimizer=optimizer) as seen:
            train(model)
        print(seen.report().survival().formats["float16"].recommended)

    The host does not wait for the device until `report`. Counting a tensor takes a few passes over it,
    and temporarily 8 bytes for each element.

    Args:
        model: the model that the training loop calls, not compiled. A part of it will not do.
        every: watch one of so many forwards with gradients, and its backward.
        optimizer: an optimizer from `amp.initialize`. Gradients are then divided by the scale of its
            session's first loss; without it they are counted with any scale that they have.

    Raises:
        AmpTypeError: `model` is not a module.
        AmpValueError: `every` is not an integer of at least 1, or the optimizer is not initialized.
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"watch needs a torch.nn.Module, and got {type(model).__name__}")
    every = parse_count("every", every)
    if optimizer is not None and AttachedOptimizer.of(optimizer) is None:
        raise AmpValueError(
            f"this {type(optimizer).__name__} did not come out of amp.initialize: there is no scale to "
            "take out of its gradients. Leave optimizer= out"
        )
    return Watch(model, every, optimizer)


@without_grad
def _tally(x: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return how many numbers are in each bin, by exponent minus `shift`: int64 `[_BINS + 2]`."""
    values = x.detach().flatten().float()
    bins = torch.frexp(values).exponent.long() - 1 - LOWEST
    if shift is not None:
        bins -= shift.to(bins.device)
    bins = bins.clamp(0, _BINS - 1)
    bins = torch.where(values == 0, _ZERO, torch.where(values.isfinite(), bins, _NOT_FINITE))
    tally = torch.zeros(_BINS + 2, dtype=torch.int64, device=bins.device)
    one = torch.ones((), dtype=torch.int64, device=bins.device)
    return tally.scatter_add_(0, bins, one.expand_as(bins))


def _histogram(tally: Tensor | None) -> Histogram:
    if tally is None:
        return NOTHING
    *counts, zeros, not_finite = tally.tolist()
    return Histogram({i + LOWEST: n for i, n in enumerate(counts) if n}, zeros, not_finite)
