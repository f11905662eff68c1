"""The names of `apex.amp`."""

from typing import Any

from amp import frontend
from amp.casting.regions import disable_casts
from amp.casting.registry import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp.compat import lists
from amp.compat.handle import AmpHandle, init
from amp.compat.state import ApexProperties as Properties  # noqa: F401 (a name of apex.amp.frontend)
from amp.compat.state import Stash, _amp_state
from amp.frontend import load_state_dict, master_params, scale_loss
from amp.training.attached_optimizer import AttachedOptimizer

__all__ = [
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


def initialize(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Call `amp.initialize`, and set the private attributes that apex sets on optimizers."""
    lists.heed()
    kwargs.setdefault("allow_incoming_model_not_fp32", _amp_state.allow_incoming_model_not_fp32)
    result = frontend.initialize(models, optimizers, *args, **kwargs)
    session = frontend.get_session()
    if session.properties.patch_torch_functions:
        _amp_state.handle = AmpHandle(session)
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in given:
        attached = AttachedOptimizer.of(optimizer)
        if attached is not None:
            optimizer._amp_stash = stash = Stash(optimizer)
            optimizer._prepare_amp_backward = stash.prepare_amp_backward
            optimizer._post_amp_backward = stash.post_amp_backward
            optimizer._lazy_init_maybe_master_weights = _nothing
            optimizer._amp_lazy_init = _nothing
            optimizer._master_params_to_model_params = attached.gradients.reconcile
    return result


def state_dict(destination: Any = None) -> Any:
    """Return `amp.state_dict()` without the level, so that scripts find only entries of loss scalers.

    The entries are written to `destination`, if it is given.
    """
    state = frontend.state_dict()
    state.pop("opt_level", None)
    if destination is None:
        return state
    destination.update(state)
    return destination


def _nothing() -> None:
    """Do nothing: `initialize` makes the masters."""
