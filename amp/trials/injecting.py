"""Running a script that does not use amp at a level, without an edit.

The script's own precision is taken away: autocast and gradient scalers are disabled, and models are not
cast to 16 bits. Then `initialize` is called before the first forward after an optimizer was made, and
each backward runs inside of `scale_loss`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from amp.casting.containers import cast_tensors
from amp.diagnosis.attaching import Training, models_in_memory, replace_in
from amp.diagnosis.places import is_called_by_amp
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpRuntimeError
from amp.session import Session

_REFUSED = {
    "DeepSpeedEngine": "DeepSpeed steps in its own engine: use its own precision",
    "DistributedDataParallel": "DDP was made before amp could be injected: run one process without it",
    "LightningModule": "Lightning calls no forward of its module: use amp.integrations.lightning",
}


class Injected(Training):
    """Makes a session drive a script while it is open.

    Args:
        level: a level, an alias or a YAML profile.

    Attributes:
        notes: remarks for the user.
    """

    def __init__(self, level: Any) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._level = level
        self._not_entered: list[Any] = []  # the script's autocast regions that are open
        self._session: Session | None = None
        self._is_busy = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._until_begun = ExitStack()  # torch.compile traces no replaced call
        self._open.callback(self._until_begun.close)
        replace_in(self._until_begun, nn.Module, "__call__", self._call)
        replace_in(self._open, torch.amp.GradScaler, "__init__", _disabled)
        replace_in(self._open, torch.autocast, "__enter__", self._enter_autocast)
        replace_in(self._open, torch.autocast, "__exit__", self._leave_autocast)
        for name in ("half", "bfloat16", "to"):
            replace_in(self._open, nn.Module, name, _in_float32)
        replace_in(self._open, torch, "set_default_dtype", _in_float32)
        return self

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, after `initialize` if it is the first."""
        if self.optimizers and torch.is_grad_enabled():
            self._initialize()
        return original(module, *args, **kwargs)

    def _initialize(self) -> None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise AmpRuntimeError("a script of several processes without amp: only one can be compared")
        models, optimizers = models_in_memory(self.optimizers)[0], self.optimizers
        for model in models:
            for kind in type(model).__mro__:
                if kind.__name__ in _REFUSED:
                    raise AmpRuntimeError(f"{_REFUSED[kind.__name__]} (reamp doctor needs none)")
        dtypes = {p.dtype for model in models for p in model.parameters()} & LOW_PRECISION
        if dtypes:
            names = ", ".join(sorted(map(dtype_name, dtypes)))
            self.notes.append(
                f"weights are in {names} from the start: all levels begin with rounded values"
            )
        self._until_begun.close()  # `initialize` may call modules
        session = Session(self._level, verbosity=0)
        session.initialize(models, optimizers, allow_incoming_model_not_fp32=True)
        self._session = session
        self._open.callback(session.close)
        for model in models:
            hook = model.register_forward_pre_hook(_widen, with_kwargs=True, prepend=True)
            self._open.callback(hook.remove)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward inside of `scale_loss`."""
        session = self._session
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if session is None or self._is_busy or is_called_by_amp():
            return original(tensors, *args, **kwargs)
        if len(losses) != 1 or losses[0].numel() != 1:
            raise AmpRuntimeError("a backward from several tensors, or no scalar, cannot be compared")
        self._is_busy = True  # a backward may run others, as reentrant checkpoints do
        try:
            with session.scale_loss(losses[0], self.optimizers) as scaled_loss:
                return original(scaled_loss, *args, **kwargs)
        finally:
            self._is_busy = False

    def _enter_autocast(self, original: Any, region: Any) -> Any:
        """Do not enter a region of the script, unless it is not enabled, to protect its ops."""
        if not region._enabled or is_called_by_amp():
            return original(region)
        self._not_entered.append(region)
        return region

    def _leave_autocast(self, original: Any, region: Any, *exception: Any) -> Any:
        if self._not_entered and self._not_entered[-1] is region:
            self._not_entered.pop()
            return None
        return original(region, *exception)


def _widen(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook that casts 16-bit inputs to float32."""
    return cast_tensors((args, kwargs), LOW_PRECISION, torch.float32)


def _disabled(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
    """Make a gradient scaler that is not enabled."""
    original(scaler, *args[:1], **{**kwargs, "enabled": False})


def _in_float32(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that casts, with float32 instead of 16 bits."""
    if original.__name__ in ("half", "bfloat16"):
        return args[0].float()

    def widened(x: Any) -> Any:
        return torch.float32 if isinstance(x, torch.dtype) and x in LOW_PRECISION else x

    if not is_called_by_amp():
        args = tuple(map(widened, args))
        kwargs = {key: widened(x) for key, x in kwargs.items()}
    return original(*args, **kwargs)
