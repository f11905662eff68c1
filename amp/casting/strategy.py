"""The base class of casting strategies, with the methods that a session calls.

A strategy is one class in one file of this package, listed in `amp.casting.strategies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp.casting.regions import DEVICE_TYPES, forwards
from amp.errors import warn
from amp.profiles.levels import compute_dtype
from amp.profiles.properties import Properties
from amp.state_checks import StateChecks
from amp.undo import Undo


class Strategy:
    """One way to give models their precision.

    `initialize` calls `check_model`, `begin`, `prepare_model` and `summary`, in this order. The methods
    of this base class do nothing.

    Args:
        properties: the session's resolved profile.
    """

    state_key = ""
    """The key of the strategy's state in `amp.state_dict()`; empty for a strategy without state."""

    def __init__(self, properties: Properties) -> None:
        self.properties = properties
        scaling = properties.loss_scaling
        is_scaled = scaling.dynamic or scaling.init != 1
        self.minds_regions = not is_scaled and compute_dtype(properties) is torch.bfloat16
        """Whether a float16 region around a model still gets a warning."""

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile asks for this strategy."""
        return False

    def check_model(self, model: nn.Module) -> None:
        """Raise an AmpError if the model cannot be prepared. Called before anything is changed."""

    def begin(self, undo: Undo) -> None:
        """Prepare what all models share. Called once for each `initialize`."""

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Cast, patch and hook a model, and register on `undo` how to undo that."""

    def summary(self) -> str:
        """Return a log line about all prepared models. May warn."""
        return ""

    def check_region(self) -> None:
        """Warn once if a forward begins in the user's float16 region, and losses are not scaled."""
        if not (self.minds_regions and torch.is_grad_enabled()):
            return
        for kind in DEVICE_TYPES:
            is_float16 = torch.get_autocast_dtype(kind) is torch.float16
            if is_float16 and torch.is_autocast_enabled(kind) and not forwards.is_in_one():
                self.minds_regions = False
                warn(
                    f"a model at opt_level={self.properties.opt_level!r} was called in a region "
                    f"torch.autocast('{kind}', torch.float16), and its losses are not scaled: float16 "
                    "gradients below 6e-8 are 0 without it. Leave out the region, or take "
                    "opt_level='O1' or 'O2', which scale losses"
                )

    def check_loss(self, loss: Tensor) -> None:
        """Warn if a loss, before it is scaled, cannot come from the models as they were prepared."""

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resume needs: tensors and plain values. An empty state is not saved."""
        return {}

    @staticmethod
    def checked_state(state: dict[Any, Any], path: str, checks: StateChecks) -> dict[str, Any]:
        """Check a saved state, and return a copy of it for `load_state_dict`.

        Error messages call the state `path`.
        """
        return state

    def differences(self, state: Mapping[str, Any] | None) -> str:
        """Return what the user should know about a state before it is loaded, or an empty string."""
        return ""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a state that `checked_state` returned; None if the checkpoint has none."""
