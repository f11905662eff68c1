"""The base class of casting strategies, with the methods that a session calls.

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
    """One way to give models their precision.

    A session calls the methods of each of its strategies in the order in which they are defined here.
    The methods of this base class do nothing.

    Args:
        properties: the session's resolved profile.
    """

    state_key = ""
    """The key of the strategy's state in `amp.state_dict()`; empty for a strategy without state."""

    def __init__(self, properties: Properties) -> None:
        self.properties = properties

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

    def finish(self) -> str:
        """Return a log line about all prepared models. May warn."""
        return ""

    @property
    def casts_ops(self) -> bool:
        """Whether functions cast their arguments at this point, in this thread."""
        return False

    def check_loss(self, loss: Tensor) -> None:
        """Warn if a loss, before it is scaled, cannot come from the models as they were prepared."""

    def stop(self) -> None:
        """Restore patched functions, and leave models as they are."""

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
