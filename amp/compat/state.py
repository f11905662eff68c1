"""What scripts read of apex's insides: `_amp_state`, its loss scalers, and an optimizer's stash."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp import frontend, scaler
from amp.binding import OptimizerBinding
from amp.fp16_utils.groups import MasterGroups

__all__ = ["LossScaler", "_amp_state"]


class LossScaler:
    """apex's `amp.scaler.LossScaler`, as a face of one of the session's.

    Args:
        ours: the scaler.
    """

    def __init__(self, ours: scaler.LossScaler) -> None:
        self._ours = ours

    def loss_scale(self) -> float:
        """Return the scale. The host waits for the device."""
        return self._ours.loss_scale()

    @property
    def _loss_scale(self) -> float:
        return self._ours.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._ours.set_scale(value)

    @property
    def _unskipped(self) -> int:
        return int(self._ours.state_dict()["unskipped"])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        state = self._ours.state_dict()
        self._ours.load_state_dict({**state, "unskipped": value})

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return self._ours.config.dynamic

    @property
    def _min_loss_scale(self) -> float | None:
        return self._ours.config.min

    @property
    def _max_loss_scale(self) -> float:
        return self._ours.config.max

    @property
    def _scale_seq_len(self) -> int:
        return self._ours.config.growth_interval


class AmpState:
    """apex's `_amp_state`: the default session's.

    Attributes:
        hard_override: kept, and not looked at.
        allow_incoming_model_not_fp32: likewise.
        verbosity: likewise.
    """

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1

    @property
    def opt_properties(self) -> Any:
        """The properties of the default session."""
        return self._session().properties

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scalers of the default session."""
        return [LossScaler(ours) for ours in self._session().scalers]

    @property
    def min_loss_scale(self) -> float | None:
        """The floor of the first scale."""
        return self.loss_scalers[0]._min_loss_scale

    @property
    def max_loss_scale(self) -> float:
        """The ceiling of the first scale."""
        return self.loss_scalers[0]._max_loss_scale

    def _session(self) -> Any:
        return frontend.get_session()


_amp_state = AmpState()


class Stash(MasterGroups):
    """apex's `optimizer._amp_stash`: which parameters of an optimizer are masters of which.

    Args:
        optimizer: that `initialize` has prepared.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.lazy_init_called = True
        self.already_patched = False

    def _optimizer_of_groups(self) -> Any:
        return self._optimizer

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether there are gradients that wait for unscaling."""
        binding = OptimizerBinding.of(self._optimizer)
        return binding is not None and binding.is_pending

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The parameters without a master, by the name that they have where none has one."""
        return self.all_fp32_from_fp32_params
