"""The steps by which a session gives models their precision, and the strategies that take them.

A strategy is one class in one file of this package, listed in `amp.casting.strategies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from amp.profiles.properties import Properties
from amp.state_checks import StateChecks
from amp.undo import Undo


class Strategy:
    """One way in which models get their precision.

    A session takes every step of each of its strategies, in the order in which they stand here. The
    steps of this class do nothing.

    Args:
        properties: what the session's profile resolved to.
    """

    state_key = ""
    """The key of its state in `amp.state_dict()`, for a strategy that has any."""

    def __init__(self, properties: Properties) -> None:
        self.properties = properties

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile asks for this strategy."""
        return False

    def check_model(self, model: nn.Module) -> None:
        """Raise an AmpError if the model cannot be prepared. Nothing has been touched yet."""

    def begin(self, undo: Undo) -> None:
        """Prepare what all models share, once for each `initialize`."""

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Cast, patch and hook a model. How to take that back goes onto `undo`."""

    def finish(self) -> str:
        """Return what the log should say of all models that were prepared. May warn."""
        return ""

    @property
    def casts_ops(self) -> bool:
        """Whether functions cast their arguments, here and now."""
        return False

    def check_loss(self, loss: Tensor) -> None:
        """Warn if a loss that is to be scaled cannot have come of models as they were prepared."""

    def stop(self) -> None:
        """Give functions back, and leave models as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resume needs: tensors and plain values. Empty is not saved."""
        return {}

    @staticmethod
    def checked_state(state: dict[Any, Any], path: str, checks: StateChecks) -> dict[str, Any]:
        """Return what `load_state_dict` is to be given, in memory of its own, after checks.

        Errors call the state `path`.
        """
        return state

    def differences(self, state: Mapping[str, Any] | None) -> str:
        """Return what the user should know of a state that is to be loaded, or an empty string."""
        return ""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` returned; None, where a checkpoint has nothing of it.

        `checked_state` has returned it.
        """
