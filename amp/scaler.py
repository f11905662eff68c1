"""The loss scaler: one state machine, with its state in one small tensor on the loss's device.

Static scaling and no scaling are members of the same family: they check nothing and never move, and
no caller has to ask which kind it holds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.dtypes import LOW_PRECISION
from amp.errors import AmpValueError
from amp.kernels import update_scale as kernel
from amp.properties import LossScaling


class ScaleSnapshot(NamedTuple):
    """The scale that a loss was scaled by, which may have moved since."""

    scaler: LossScaler
    version: int
    inv_scale: Tensor

    def is_current(self, scaler: LossScaler) -> bool:
        """Whether a loss scaled by `scaler` now would have this same scale. No host sync."""
        return self.scaler is scaler and self.version == scaler.version


class LossScaler:
    """Scales one loss and follows the overflows of its gradients.

    Attributes:
        config: how the scale starts and moves.
        loss_id: its number in the session.
        version: counts the times the scale may have changed, so that two scaled losses can be told
            to share one scale without asking the device.
    """

    def __init__(self, config: LossScaling, loss_id: int = 0) -> None:
        self.config = config
        self.loss_id = loss_id
        self.version = 0
        self._state = torch.zeros(kernel.STATE_SIZE, dtype=torch.float32)
        self._set(config.start, 0, config.hysteresis)

    @property
    def is_identity(self) -> bool:
        """Whether scaling by it changes nothing."""
        return not self.config.dynamic and self.config.init == 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss * scale`, float32 for a 16-bit loss. The host does not wait for the device."""
        wide = loss.float() if loss.dtype in LOW_PRECISION else loss
        if self.is_identity:
            return wide
        if self._state.device != loss.device:
            self._state = self._state.to(loss.device)
        return wide * self._state[kernel.SCALE]

    def snapshot(self) -> ScaleSnapshot:
        """Return the scale of this moment, for the gradients of a loss scaled at this moment."""
        inverse = self._state[kernel.INVERSE : kernel.INVERSE + 1].clone()
        return ScaleSnapshot(self, self.version, inverse)

    @property
    def found_inf(self) -> Tensor | None:
        """Where a check reports, float32 `[1]`; None for a scaler that checks nothing."""
        if not self.config.dynamic:
            return None
        return self._state[kernel.FOUND_INF : kernel.FOUND_INF + 1]

    def update(self) -> None:
        """Move the scale by what was found since the last update. No host sync."""
        self.version += 1
        config = self.config
        kernel.update_scale(
            self._state,
            growth_factor=config.growth_factor if config.dynamic else 1.0,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            hysteresis=config.hysteresis,
            reset_each_step=config.consecutive_hysteresis,
            floor=config.floor,
            ceiling=max(config.max, config.start),
        )

    def loss_scale(self) -> float:
        """Return the current scale. The host waits for the device."""
        return float(self._state[kernel.SCALE])

    def overflows_in_a_row(self) -> int:
        """Return how many updates in a row saw an overflow. The host waits for the device."""
        return int(self._state[kernel.OVERFLOWS])

    def state_dict(self) -> dict[str, Any]:
        """Return apex's two entries and what an exact resume needs besides. The host waits."""
        scale, _, good, left, _, overflows = self._state.tolist()
        return {
            "loss_scale": scale,
            "unskipped": int(good),
            "dynamic": self.config.dynamic,
            "hysteresis_left": int(left),
            "overflows_in_a_row": int(overflows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, ours or apex's.

        A static scaler keeps the scale it was configured with, and a dynamic one does not take over
        the scale of a static one. A scale outside `min` and `max` is brought within them, such as
        the 0 that apex could reach.
        """
        dynamic = state.get("dynamic", self.config.dynamic)
        if not self.config.dynamic or not dynamic:
            return
        scale = state["loss_scale"]
        if not isinstance(scale, (int, float)) or math.isnan(scale) or scale < 0:
            raise AmpValueError(f"loss_scale={scale!r} in the state dict is not a number above 0")
        ceiling = max(self.config.max, self.config.start)
        left = int(state.get("hysteresis_left", self.config.hysteresis))
        overflows = int(state.get("overflows_in_a_row", 0))
        scale = min(max(float(scale), self.config.floor), ceiling)
        self._set(scale, int(state["unskipped"]), min(left, self.config.hysteresis), overflows)

    def _set(self, scale: float, good: int, left: int, overflows: int = 0) -> None:
        self.version += 1
        values = [scale, 1.0 / scale, good, left, 0.0, overflows]
        self._state.copy_(torch.tensor(values, dtype=torch.float32))
