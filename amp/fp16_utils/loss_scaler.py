"""Static and dynamic loss scalers with the names of `apex.fp16_utils`, on this library's scaler."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp.lazy import kernels
from amp.profiles.keys import LARGEST_SCALE, parse_positive
from amp.profiles.loss_scaling import LossScaling
from amp.training import scaler


class LossScaler:
    """A static loss scale.

    Args:
        scale: the loss scale.

    Raises:
        AmpValueError: `scale` is not a finite number above 0.
    """

    def __init__(self, scale: float = 1) -> None:
        self._scaler = scaler.LossScaler(LossScaling(mode="static", init=scale))

    @property
    def loss_scale(self) -> float:
        """The scale. The host waits for the device."""
        return self.cur_scale

    @property
    def cur_scale(self) -> float:
        """The scale; may be set. The host waits for the device."""
        return self._scaler.loss_scale()

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._scaler.set_scale(value)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a static scaler does not check gradients."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(
        self, module: Any, grad_in: tuple[Tensor | None, ...], grad_out: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return gradients times the scale: a backward hook of a module."""
        return tuple(None if grad is None else self._scaler.scale(grad) for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward of a loss times the scale. The host does not wait for the device."""
        self._scaler.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {"cur_scale": self.cur_scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["cur_scale"])  # type: ignore[misc]


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off after an overflow, grows after good updates, and stays at least 1.

    Args:
        init_scale: the first scale.
        scale_factor: the factor by which the scale grows and backs off.
        scale_window: good updates in a row before the scale grows.

    Attributes:
        scale_factor: the argument.
        scale_window: the argument.
        cur_iter: how many updates there were.
        last_overflow_iter: the last update with an overflow, counted from 0; -1 if there was none.

    Raises:
        AmpValueError: a number is out of its range.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1
        config = LossScaling(
            init=init_scale,
            growth_factor=scale_factor,
            backoff_factor=backoff_of(scale_factor),
            growth_interval=scale_window,
            min=1.0,
            max=LARGEST_SCALE,
        )
        self._scaler = scaler.LossScaler(config)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of these parameters is inf or NaN. The host waits for the device."""
        return is_not_finite([p.grad for p in params if p.grad is not None])

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return is_not_finite([x])

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after an iteration with or without overflow. The host does not wait."""
        self._scaler.found_inf.fill_(float(overflow))  # type: ignore[union-attr]
        self._scaler.update()
        self._scaler.recorder.learn()
        self._scaler.recorder.warn_if_endless()
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def __getstate__(self) -> dict[str, Any]:
        names = ("scale_factor", "scale_window", "cur_iter", "last_overflow_iter")
        return {"cur_scale": self.cur_scale, **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["cur_scale"], state["scale_factor"], state["scale_window"])  # type: ignore[misc]
        self.cur_iter, self.last_overflow_iter = state["cur_iter"], state["last_overflow_iter"]
        good = (self.cur_iter - self.last_overflow_iter - 1) % self.scale_window
        self._scaler.load_state_dict({"loss_scale": state["cur_scale"], "unskipped": good})


def backoff_of(scale_factor: Any) -> float:
    """Return the backoff factor, the inverse of `scale_factor`; raise AmpValueError if it has none."""
    return 1 / parse_positive("scale_factor", scale_factor)


class SavedLossScaler:
    """A scaler unpickled from a checkpoint of apex's `FP16_Optimizer`, with data but without methods.

    It has `_loss_scale` and `_unskipped`.
    """


SAFE_GLOBALS: list[Any] = [
    (SavedLossScaler, "apex.amp.scaler.LossScaler"),
    (LossScaler, "apex.fp16_utils.loss_scaler.LossScaler"),
    (DynamicLossScaler, "apex.fp16_utils.loss_scaler.DynamicLossScaler"),
]
"""The classes that `torch.load` must allow to read old checkpoints of `FP16_Optimizer` safely:

    with torch.serialization.safe_globals(amp.fp16_utils.SAFE_GLOBALS):
        checkpoint = torch.load(path, weights_only=True)
"""


def is_not_finite(tensors: list[Tensor]) -> bool:
    """Whether a value in any of the tensors is inf or NaN. The host waits for the device."""
    if not tensors:
        return False
    found_inf = torch.zeros(1, dtype=torch.float32, device=tensors[0].device)
    kernels.unscale.check(tensors, torch.ones_like(found_inf), found_inf)
    return found_inf.item() > 0
