"""apex's first API: `amp.init`, the handle that it returns, and `wrap_optimizer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from amp.casting.by_op import CastOps
from amp.casting.regions import disable_casts
from amp.compat import lists
from amp.compat.state import _amp_state
from amp.errors import AmpNotImplementedError, AmpRuntimeError, brief, truth_of
from amp.profiles.options import Level
from amp.session import Session

_LEVELS: dict[torch.dtype, Level] = {torch.float16: "O1", torch.bfloat16: "O4"}


def init(
    enabled: bool = True,
    loss_scale: float | Literal["dynamic"] = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Make torch's functions cast their arguments in this process, without a model.

    Args:
        enabled: False does nothing.
        loss_scale: the scale of the optimizers that the handle wraps.
        enable_caching: has no effect: casts of weights are cached for each forward of a model.
        verbose: has no effect.
        allow_banned: whether functions that refuse half arguments run in FP32 instead.
        patch_type: the dtype to cast to, float16 or bfloat16, as in ROCm's apex.

    Returns:
        A handle, whose `_deactivate()` restores the functions. It is also in `_amp_state.handle`.

    Raises:
        AmpRuntimeError: `patch_type` is another dtype.
    """
    allow_banned = truth_of("allow_banned", allow_banned)
    if not truth_of("enabled", enabled):
        return NoOpHandle()
    if not isinstance(patch_type, torch.dtype) or patch_type not in _LEVELS:
        raise AmpRuntimeError(
            f"patch_type={brief(patch_type)} is not one of {', '.join(map(str, _LEVELS))}"
        )
    banned = lists.functional_overrides.BANNED_FUNCS if allow_banned else []
    rules = [{"op": f"torch.nn.functional.{name}", "cast": torch.float32} for name, _ in banned]
    lists.heed()
    session = Session(_LEVELS[patch_type], loss_scale=loss_scale, verbosity=0, rules=rules)
    session.initialize(None)
    handle = _amp_state.handle = AmpHandle(session, enable_caching, verbose)
    return handle


class _Handle:
    """The base class of both handles.

    Args:
        session: the session whose functions cast.
        enable_caching: the value of `has_cache`.
        verbose: the value of `verbose`.
    """

    def __init__(self, session: Session, enable_caching: bool = True, verbose: bool = False) -> None:
        self._session = session
        self._casts_off = ExitStack()
        self.has_cache = enable_caching
        self.verbose = verbose

    def is_active(self) -> bool:
        """Whether functions cast at this point, in this thread."""
        caster = self._session.casts
        return isinstance(caster, CastOps) and caster.casts_ops

    @property
    def _is_active(self) -> bool:
        """The same; scripts set it to False for a while, as `disable_casts` does."""
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        self._casts_off.close()
        if not value:
            self._casts_off.enter_context(disable_casts())

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer with its own `scale_loss`, and a scale for each of `num_loss` losses."""
        return OptimWrapper(optimizer, self, num_loss)

    _disable_casts = staticmethod(disable_casts)
    _clear_cache = staticmethod(torch.clear_autocast_cache)

    def _deactivate(self) -> None:
        self._session.casts.stop()


class AmpHandle(_Handle):
    """The handle that `init` returns, and that `apex.amp.initialize` sets."""

    def scale_loss(self, loss: Tensor, optimizer: Any) -> NoReturn:
        """Raise AmpRuntimeError: apex removed this method in 2019."""
        raise AmpRuntimeError(
            "amp_handle.scale_loss is of apex's first API. Use amp.initialize and amp.scale_loss, or "
            "optimizer = amp_handle.wrap_optimizer(optimizer) and optimizer.scale_loss(loss)"
        )

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """An empty dict: casts of weights are cached elsewhere, for one forward."""
        return {}

    def remove_cache(self, param: Tensor) -> None:
        """Clear torch's cache of casts of weights."""
        torch.clear_autocast_cache()


class NoOpHandle(_Handle):
    """The handle that `init(enabled=False)` returns: it casts and scales nothing."""

    def __init__(self) -> None:
        super().__init__(Session(enabled=False), enable_caching=False)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Yield the loss."""
        return nullcontext(loss)


class OptimWrapper:
    """An optimizer with its own `scale_loss`.

    Between two steps, the first call of `scale_loss` is for the first loss, and so on. All other
    attributes are the optimizer's.

    Args:
        optimizer: the optimizer.
        amp_handle: the handle that `init` returned.
        num_loss: how many losses have their own scale.
    """

    def __init__(self, optimizer: Any, amp_handle: _Handle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._next_loss = 0
        self._session = amp_handle._session
        if self._session.properties.enabled:
            scale = self._session.properties.loss_scale
            self._session = Session(
                "O0", cast_model_type=False, loss_scale=scale, num_losses=num_loss, verbosity=0
            )
            self._session.initialize(None, optimizer)

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the scaled loss, and unscale the gradients when the block ends."""
        with self._session.scale_loss(loss, self._optimizer, self._next_loss) as scaled_loss:
            yield scaled_loss
        self._next_loss += 1

    def step(self, closure: Any = None) -> Any:
        """Step, or skip the step after an overflow.

        Raises:
            AmpNotImplementedError: a closure is given.
        """
        if closure is not None:
            raise AmpNotImplementedError(
                "an optimizer of amp_handle.wrap_optimizer takes no closure; use amp.initialize"
            )
        self._next_loss = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
