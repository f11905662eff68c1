"""The losses and gradients that a shadow has seen, and their scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp.diagnosis.memories import Memories, own_part
from amp.diagnosis.places import Place, is_called_by_amp, user_line
from amp.diagnosis.records import Gradient
from amp.diagnosis.twins import difference, floats_in, is_finite, is_float


class SeenGradients:
    """The losses that backwards start from, and the gradients that they accumulate.

    Args:
        memories: those of the shadow.
        open_scale: see `Shadow`.

    Attributes:
        known: the gradients that were accumulated, by the name of the parameter.
        in_place: parameters whose gradients were written to while they were scaled, and where.
        mixed: parameters whose gradient, the sum of two of different scales, was unscaled; these
            scales, and where the backward was called that has added the second.
        bad_loss: the number of the op that made the inf or NaN of a loss; 0 if none did.
        losses: the numbers of the ops that made the losses.
        scale: the loss scale of the last backward.
        scales: those of all backwards.
        unscaled_by: the scale that a gradient scaler has taken away, which is not known before; or 1.
    """

    def __init__(self, memories: Memories, open_scale: Callable[..., Tensor | None]) -> None:
        self.known: dict[str, Gradient] = {}
        self.in_place: dict[str, Place] = {}
        self.mixed: dict[str, tuple[float, float, Place]] = {}
        self.bad_loss, self.losses = 0, list[int]()
        self.scale, self.scales = 1.0, set[float]()
        self.unscaled_by = 1.0
        self._memories, self._open_scale = memories, open_scale
        self._backward = Place("", "", "", 0)  # where the last one was called

    @property
    def bad(self) -> dict[str, int]:
        """For each parameter whose gradient is not finite, the number of the op that made it so."""
        return {name: grad.made for name, grad in self.known.items() if grad.is_bad}

    def note_losses(self, losses: Sequence[Tensor]) -> None:
        """Note the losses that a backward starts from; none for `torch.autograd.grad`."""
        scale = self._open_scale(losses)
        self._backward = Place("", "", *user_line(in_packages=False))
        self.scale = 1.0 if scale is None else float(scale)
        self.scales.add(self.scale)
        self.note_results(losses)

    @torch.no_grad()
    def note_results(self, results: Any) -> None:
        """Note losses, or the results of a forward that no backward follows."""
        for x in floats_in(results):
            self.losses.append(self._memories[x].made)
            if not is_finite(x):
                self.bad_loss = self._memories[x].bad or self.bad_loss

    def note_accumulated(self, name: str, parameter: Tensor) -> None:
        """Note the gradient that a backward has accumulated in a parameter."""
        grad = own_part(parameter.grad)
        if not is_float(grad):
            return
        memory = self._memories[grad]
        if memory.scale not in (None, self.scale):
            memory.mixed = memory.scale or 1.0, self.scale, self._backward
        memory.gradient, memory.written, memory.scale = name, None, self.scale
        if not is_finite(grad):
            self.known[name] = Gradient(memory.bad, is_bad=True)
        elif name not in self.bad:
            exact = self._memories.twin(grad)
            gone = ((grad == 0) & (exact != 0)).count_nonzero() / exact.count_nonzero().clamp_min(1)
            norm, off = float(torch.linalg.vector_norm(exact)), difference(grad, exact)
            size = norm / math.sqrt(exact.numel())
            self.known[name] = Gradient(memory.made, False, off, size, float(gone), norm)

    def note_unscale(self, grads: Iterable[Tensor], inv_scale: Any) -> None:
        """Note gradients that a gradient scaler unscales."""
        if float(inv_scale) in (0.0, 1.0):
            return
        self.scale = self.unscaled_by = 1 / float(inv_scale)
        self.scales = self.scales - {1.0} | {self.scale}
        for memory in map(self._memories.__getitem__, grads):
            memory.scale = 1.0
            if memory.mixed is not None:
                self.mixed.setdefault(memory.gradient, memory.mixed)
            if memory.written is not None:
                self.in_place.setdefault(memory.gradient, memory.written)

    def note_write(self, written: Iterable[Tensor], place: Place) -> None:
        """Note gradients that are written to after their backward."""
        changed = [memory for memory in map(self._memories.__getitem__, written) if memory.gradient]
        if changed and not is_called_by_amp():
            is_scaled = self._open_scale() is not None and self.scale != 1.0
            for memory in changed:
                memory.written = place
                if "zero" in place.op:
                    memory.scale = memory.mixed = None
                if is_scaled:
                    self.in_place.setdefault(memory.gradient, place)
