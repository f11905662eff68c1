"""Cheap looks at every step of a training: at dtypes, buffers that a cast has rounded, and calls."""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp.diagnosis import advice
from amp.diagnosis.attaching import Training
from amp.diagnosis.findings import Finding, exact
from amp.diagnosis.places import user_line
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.names import unwrapped_name
from amp.training.attached_optimizer import AttachedOptimizer

COMPENSATION = re.compile("kahan|compensation")
"""In the names of optimizer state that has what the weights have lost."""


@dataclass(eq=False)
class Rounded:
    """A buffer that a cast has rounded.

    Attributes:
        module: its module.
        name: its name there.
        tensor: the buffer, as it is after the cast.
        exact: what it was before.
        version: how often torch had counted a write to it then.
        finding: what is said of it.
    """

    module: weakref.ref[nn.Module]
    name: str
    tensor: Tensor
    exact: Tensor
    version: int
    finding: Finding

    @property
    def is_as_it_was(self) -> bool:
        """Whether the script has neither set it anew nor written to it: only then its loss matters."""
        module = self.module()
        is_there = module is not None and module._buffers.get(self.name) is self.tensor
        return is_there and self.tensor._version == self.version


class Looks:
    """Notes what can be seen of a training without a shadow.

    Args:
        training: follows the training, and passes on its events.

    Attributes:
        has_scaler: whether the script has a gradient scaler of torch's.
        scaled_by: the scale that a gradient scaler has given the gradients, which they still have.
        rounded: buffers that a cast has rounded.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.has_scaler = self._is_half = False
        self.scaled_by: Tensor | None = None
        self.rounded: list[Rounded] = []
        self._noted: dict[tuple[str, str], Finding] = {}  # by cause and advice
        self._not_updated: set[int] = set()  # the ids of optimizers that a scaler has stepped
        self._is_stale = False  # whether weights have changed since autocast's cache was empty

    @property
    def attached(self) -> list[AttachedOptimizer]:
        """The optimizers that have been through `initialize`."""
        return list(filter(None, map(AttachedOptimizer.of, self._training.optimizers)))

    def found_in(self, models: Iterable[nn.Module]) -> tuple[list[Finding], list[Finding]]:
        """Return what was seen of the buffers of models, and all else."""
        named = (each for model in models for each in model.named_modules())
        paths = {id(module): unwrapped_name(name) for name, module in named}
        buffers = [
            replace(one.finding, module=paths[id(one.module())])
            for one in self.rounded
            if one.is_as_it_was and id(one.module()) in paths
        ]
        # A scaler may have been used only after this was noted, as in a GAN.
        noted = [x for x in self._noted.values() if x.cause != "loss scale" or not self.has_scaler]
        return buffers, sorted(noted, key=lambda x: x.phase)

    def _note(self, cause: str, phase: str, what: str, todo: str) -> None:
        if (cause, todo) not in self._noted:
            file, line = user_line(in_packages=False)
            self._noted[cause, todo] = Finding(cause, what, todo, phase, file=file, line=line)

    def root_called(self, model: nn.Module) -> None:
        """Look whether autocast computes in float16."""
        device = next((x.device.type for x in model.parameters()), "cpu")
        if torch.is_autocast_enabled(device) and torch.is_grad_enabled():
            self._is_half |= torch.get_autocast_dtype(device) is torch.float16
            if self._is_stale:
                what = "a forward runs in the autocast block in which optimizer.step() has run before: "
                what += "it takes the weights of before the step, whose casts autocast keeps"
                todo = "Leave the autocast block in each step, or pass cache_enabled=False to it."
                self._note("order", "forward", what, todo)

    def backward_begins(self, losses: list[Tensor]) -> None:
        """Look at the dtype of what the backward starts from, and at autocast."""
        for loss in (each.detach() for each in losses):
            if torch.is_autocast_enabled(loss.device.type):
                what = (
                    "backward() runs inside of autocast, which casts its ops by other rules than the "
                )
                todo = "Leave the autocast block before loss.backward()."
                self._note("order", "backward", f"{what}forward's", todo)
            is_half = loss.dtype in LOW_PRECISION and loss.numel() == 1 and not self.attached
            if is_half and math.isfinite(float(loss)):
                x = loss.abs()
                apart = torch.nextafter(x, torch.full_like(x, torch.inf)).double() - x.double()
                what = f"backward() starts from a loss in {dtype_name(loss.dtype)}: {float(loss):.6g}"
                todo = "Compute the loss in float32, as in loss_of(output.float(), target)."
                what = f"{what} has neighbours {float(apart):g} apart"
                self._note("loss dtype", "backward", what, todo)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Look for a gradient scaler that is missing, or passed over."""
        scale = 1.0 if self.scaled_by is None else float(self.scaled_by)
        if scale != 1.0 and not self._training.is_in_scaler:
            what = f"optimizer.step() takes gradients that are scaled by {exact(scale)}"
            todo = "Call scaler.step(optimizer) in its place, and scaler.update() after it."
            self._note("order", "step", what, todo)
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        devices = {p.device.type for p in params if p.dtype is torch.float32}
        has_cache = torch.is_autocast_cache_enabled() and not self.attached
        self._is_stale |= has_cache and any(map(torch.is_autocast_enabled, devices))
        dtypes = {p.grad.dtype for p in params if p.grad is not None}
        is_half = torch.float16 in dtypes or (self._is_half and bool(dtypes))
        if is_half and not self.has_scaler and not self.attached:
            what = "gradients are computed in float16, and no GradScaler scales the loss: those below "
            self._note("loss scale", "step", f"{what}6e-8 are 0", advice.scale_loss(None))

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Look at the dtypes of what the optimizer holds."""
        held = Counter[tuple[str, torch.dtype]]()
        for state in optimizer.state.values() if not self.attached else ():
            for name, value in state.items() if isinstance(state, dict) else ():
                is_half = isinstance(value, Tensor) and value.dtype in LOW_PRECISION
                if is_half and not COMPENSATION.search(name):
                    held[name, value.dtype] += 1
        if held:
            is_half = any(p.dtype in LOW_PRECISION for x in optimizer.param_groups for p in x["params"])
            names = " and ".join(f"'{name}'" for name, _ in held)
            (_, dtype), count = held.most_common(1)[0]
            what = f"{type(optimizer).__name__} holds {names} of {count} parameters in "
            what += f"{dtype_name(dtype)}, where small changes of a running mean are lost"
            todo = advice.KEEP_MASTERS if is_half else "Keep the optimizer's state in float32."
            self._note("state", "step", what, todo)

    def autocast_left(self) -> None:
        """Note that no cast of weights is kept."""
        self._is_stale = False

    def scaler_called(self, name: str, scaler: Any, given: Any) -> None:
        """Look at the order of a scaler's calls."""
        self.has_scaler = True
        self.scaled_by = torch.tensor(scaler.get_scale()) if name == "scale" else None
        if name == "step":
            if id(given) in self._not_updated:
                what = "GradScaler.step is called again, and update was not: the loss scale stays"
                todo = "Call scaler.update() after the scaler.step of all optimizers."
                self._note("order", "step", what, todo)
            self._not_updated.add(id(given))
        elif name == "update":
            self._not_updated.clear()

    def module_cast(self, module: nn.Module, before: dict[str, Tensor]) -> None:
        """Look for buffers that a cast has rounded."""
        for name, old in before.items():
            new = module._buffers.get(name)
            if new is None or new.dtype not in LOW_PRECISION:
                continue
            for one in self.rounded:
                if one.tensor is old:  # it has moved to another device
                    one.tensor, one.exact, one.version = new, one.exact.to(new.device), new._version
            there = old.to(new.device)
            if old.dtype.itemsize > 2 and bool((new.to(old.dtype) != there).any()):
                found = _of_rounding(module, name, there, new)
                one = Rounded(weakref.ref(module), name, new, there, new._version, found)
                self.rounded.append(one)


def _of_rounding(module: nn.Module, name: str, before: Tensor, after: Tensor) -> Finding:
    """Return the finding of a buffer that a script has cast."""
    off = (after.to(before.dtype) - before).abs()
    most = float((off / before.abs().clamp_min(torch.finfo(torch.float32).tiny)).max())
    what = f"a cast to {dtype_name(after.dtype)} has rounded the buffer '{name}' of "
    what += f"{type(module).__name__}, by up to {most:.2%}"
    todo = f"Keep it in float32: set module.{name} again after the cast, or compute it in the forward."
    if not before.dim():
        todo = "Make it a Python number: one float32 number leaves ops with 16-bit tensors in 16 bits."
    file, line = user_line(in_packages=False)
    return Finding("buffer", what, todo, file=file, line=line)
