"""timm: `AmpScaler`, a loss scaler for its training loop, like `NativeScaler` and `ApexScaler`."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from amp.integrations import missing

try:
    from timm.utils.clip_grad import dispatch_clip_grad
except ImportError as error:
    raise missing(__name__, "timm", "timm") from error

import amp
from amp.session import Session
from amp.training.clipping import clip_by_weights


class AmpScaler:
    """A loss scaler that timm's scripts call for backward, clipping and the step.

    Call it after `amp.initialize`, like timm's own scalers. timm's `CheckpointSaver` and
    `resume_checkpoint` save and load its state under "amp", as for `ApexScaler`.

    Args:
        session: the session whose state is saved; None is the session of the last `initialize`.
    """

    state_dict_key = "amp"

    def __init__(self, session: Session | None = None) -> None:
        self._stateful = amp.Stateful(session)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run backward, clip unscaled gradients, and step; `amp.scale_loss` says when the host waits.

        Args:
            loss: a floating tensor of one element.
            optimizer: an optimizer from `amp.initialize`.
            clip_grad: the norm, value or factor to clip by; None does not clip.
            clip_mode: "norm", "value" or "agc".
            parameters: the model's parameters whose gradients are clipped, through their masters if
                they have them. None clips the gradients of all parameters of the optimizer.
            create_graph: as in `Tensor.backward`.
            need_update: False accumulates gradients for a later call, and makes no step.
        """
        with amp.scale_loss(loss, optimizer, delay_unscale=not need_update) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            given = amp.master_params(optimizer) if parameters is None else parameters
            clip_by_weights("AmpScaler", dispatch_clip_grad, given, clip_grad, mode=clip_mode)
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as from `amp.state_dict`. The host waits for the device."""
        return self._stateful.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, or one that `ApexScaler` saved."""
        self._stateful.load_state_dict(state_dict)
