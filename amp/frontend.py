"""The functions that scripts call, shaped as in apex; the only module that holds a default session."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from amp import checkpoint
from amp.arguments import as_optimizers_of_a_loss, foreign_optimizer
from amp.errors import AmpRuntimeError, AmpTypeError, did_you_mean
from amp.profiles.loss_scaling import LossScaling
from amp.profiles.properties import OVERRIDE_KEYS
from amp.profiles.rules import Rule
from amp.session import Session
from amp.training.attachment import AttachedOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_APEX_MAX_LOSS_SCALE = 2.0**24
_ARGUMENTS = (
    *("models", "optimizers", "opt_level", "num_losses", "verbosity", "process_group"),
    "allow_incoming_model_not_fp32",
)


class _Default:
    """The session of the last `initialize`, and a loaded state dict that nothing has used yet."""

    session: Session | None = None
    waiting_state: Mapping[str, Any] | None = None


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str | os.PathLike[str] = "O1",
    cast_model_type: torch.dtype | str | Literal[False] | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | Mapping[str, Any] | LossScaling | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = _APEX_MAX_LOSS_SCALE,
    *,
    patch_torch_functions_type: torch.dtype | str | None = None,
    keep_norm_fp32: bool | str | None = None,
    state_dtype: torch.dtype | str | None = None,
    rules: Sequence[Mapping[str, Any] | Rule] | None = None,
    process_group: ProcessGroup | Sequence[ProcessGroup] | None = None,
    allow_incoming_model_not_fp32: bool = False,
    **unknown: Any,
) -> Any:
    """Prepare models and optimizers for mixed-precision training.

    Models and optimizers stay the same objects: the model is cast in place, and the optimizer's
    methods are wrapped. Call it after the model is on its device and before it is wrapped in
    `DistributedDataParallel` or `DataParallel`.

    Calling it again is legal and makes another session: the optimizers of the earlier one go on
    working, and functions are cast from then on as the new session says. If it raises, nothing was
    changed.

    Args:
        models: a module, a list of modules, or None.
        optimizers: an optimizer, a list of optimizers, or None.
        enabled: False makes this and `scale_loss` do nothing.
        opt_level: `"O0"` to `"O5"`, an alias, or a path to a YAML profile.
        cast_model_type: the dtype to cast weights and inputs to; False casts nothing.
        patch_torch_functions: whether torch's functions cast their arguments (O1, O4).
        keep_batchnorm_fp32: whether norms with running statistics stay FP32.
        master_weights: whether the optimizer steps FP32 copies of 16-bit weights, which cost 4 bytes
            per parameter, and 4 more for gradients between `scale_loss` and `step` unless the optimizer
            is a fused one. `"split16"` and `"kahan"` keep them in 2; see docs/optimizers.md.
        loss_scale: `"dynamic"`, a number, or a mapping; see `amp.LossScaling`.
        cast_model_outputs: the dtype of the model's outputs, FP32 if None and the model is cast.
        num_losses: how many losses have a scale of their own, by `loss_id`.
        verbosity: 0 logs nothing, 1 logs on rank 0 to the logger `amp`.
        min_loss_scale: the floor of a dynamic loss scale.
        max_loss_scale: the ceiling of a dynamic loss scale; a profile's own `max` wins over the
            default here.
        patch_torch_functions_type: the dtype that functions cast to, as in ROCm's apex.
        keep_norm_fp32: whether all norms stay FP32 in a cast model.
        state_dtype: `bfloat16` keeps the moments of a fused optimizer in 16 bits.
        rules: a list of `{op: name, cast: dtype}` and `{module: name, cast: dtype}`, on top of the
            profile's; see docs/profiles.md.
        process_group: whose ranks skip a step together; see `amp.Session`.
        allow_incoming_model_not_fp32: whether a model may hold 16-bit weights already, which are then
            taken as they are; apex had it in `_amp_state`.
        **unknown: refused, with the nearest name that exists.

    Returns:
        `models` if `optimizers` is None, else `(models, optimizers)`, each as it was passed.

    Raises:
        AmpRuntimeError: an unknown level, properties that do not fit together, a model that is
            wrapped or 16-bit already, an optimizer of a live session.
        AmpTypeError: something that is no model or optimizer, or an unknown argument.
        AmpValueError: a value that a property does not take.
    """
    for name in unknown:
        hint = did_you_mean(name, (*_ARGUMENTS, *OVERRIDE_KEYS))
        raise AmpTypeError(
            f"initialize() got an unexpected keyword argument '{name}'"
            f"{hint or '; leave it out. It takes ' + ', '.join((*_ARGUMENTS, *OVERRIDE_KEYS))}"
        )
    session = Session(
        opt_level,
        num_losses=num_losses,
        verbosity=verbosity,
        process_group=process_group,
        enabled=_as_bool(enabled),
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        patch_torch_functions_type=patch_torch_functions_type,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        keep_norm_fp32=keep_norm_fp32,
        master_weights=master_weights,
        state_dtype=state_dtype,
        rules=rules,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        min_loss_scale=min_loss_scale or None,
        max_loss_scale=None if max_loss_scale == _APEX_MAX_LOSS_SCALE else max_loss_scale,
    )
    if _Default.waiting_state is not None:
        session.load_state_dict(_Default.waiting_state)
    result = session.initialize(
        models, optimizers, allow_incoming_model_not_fp32=allow_incoming_model_not_fp32
    )
    _Default.waiting_state = None
    if _Default.session is not None:
        _Default.session.stop_casting_ops()
    _Default.session = session
    return result


def _as_bool(enabled: object) -> bool:
    """Read `enabled`, the third position, where `initialize(model, optimizer, "O2")` puts a level."""
    if isinstance(enabled, str):
        raise AmpTypeError(f"enabled={enabled!r} is not a bool; did you mean opt_level={enabled!r}?")
    return bool(enabled)


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Scale a loss for its backward, and unscale the gradients when the block ends.

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    After the block, gradients are unscaled, and added to those of earlier blocks;
    `amp.master_params(optimizer)` is what to clip. If an inf or nan was among them, the next `step`
    of each of the optimizers is skipped and a dynamic scale goes down. If the block raises, its
    gradients are dropped. Nothing here makes the host wait for the device. Under dynamic scaling
    `step` does, once for each block, for 4 bytes; not with torch's fused optimizers, which skip on the
    device, except in their first step and with a closure.

    Args:
        loss: a floating-point tensor of any shape.
        optimizers: the optimizer, or list of optimizers, whose parameters the loss reaches.
        loss_id: which scaler to use, 0 to `num_losses - 1`.
        model: not used; apex had it.
        delay_unscale: leave the gradients scaled, to accumulate more of them before a block without
            it: saves work, and is what accumulation under DDP's `no_sync` needs.
        delay_overflow_check: unscale, and leave the scale to the next block without it.

    Yields:
        The scaled loss, float32 for a 16-bit loss.

    Raises:
        AmpRuntimeError: `initialize` has not been called, or not on these optimizers.
        AmpIndexError: there is no such `loss_id`.
        AmpTypeError: `loss` or `optimizers` is something else.
    """
    default = _Default.session
    if default is not None and not default.properties.enabled and not _any_is_bound(optimizers):
        return default.scale_loss(loss, optimizers)  # which does not look at them
    session = _session_for(as_optimizers_of_a_loss(optimizers))
    _Default.waiting_state = None
    return session.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)


def _any_is_bound(optimizers: Any) -> bool:
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return any(AttachedOptimizer.of(optimizer) is not None for optimizer in given)


def _session_for(optimizers: list[Any]) -> Session:
    for optimizer in optimizers:
        attached = AttachedOptimizer.of(optimizer)
        if attached is not None:
            owner: Session = attached.owner
            return owner
    _default("amp.scale_loss")
    raise foreign_optimizer(optimizers[0])


def _default(caller: str) -> Session:
    if _Default.session is None:
        raise AmpRuntimeError(
            f"{caller} was called before amp.initialize. Call it first: "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...)"
        )
    return _Default.session


def get_session(optimizer: Any = None) -> Session:
    """Return the session of an optimizer, or of the last `initialize` if None.

    Raises:
        AmpRuntimeError: there is none.
    """
    if optimizer is None:
        return _default("amp.get_session()")
    attached = AttachedOptimizer.of(optimizer)
    if attached is None:
        raise foreign_optimizer(optimizer)
    session: Session = attached.owner
    return session


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer steps: FP32 masters where there are any.

    Their `.grad` is unscaled between `scale_loss` and `step`: clip these. Masters that are kept in 16
    bits (`split16`, `kahan`) hold NaN outside of a step; `model.state_dict()` has their values.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def step_was_skipped(optimizer: Any) -> bool:
    """Tell whether the optimizer's last `step` was skipped for an overflow.

    The host waits for the device if the optimizer decided that by itself, as torch's fused ones do.

    Raises:
        AmpRuntimeError: the optimizer did not come out of `initialize`.
    """
    attached = AttachedOptimizer.of(optimizer)
    if attached is not None:
        return attached.step_was_skipped
    if _Default.session is not None and not _Default.session.properties.enabled:
        return False
    raise foreign_optimizer(optimizer)


def loss_scale(loss_id: int = 0) -> float:
    """Return the current scale of a loss of the last `initialize`. The host waits for the device."""
    return _default("amp.loss_scale").loss_scale(loss_id)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of the loss scalers of the last `initialize`, in apex's format and more.

    With the model's and the optimizer's state dicts it makes a checkpoint from which training
    resumes bit for bit. It holds plain values only. The host waits for the device.

    Args:
        destination: a dict to put the entries into.

    Raises:
        AmpRuntimeError: `initialize` has not been called.
    """
    state: OrderedDict[str, Any] = _default("amp.state_dict").state_dict()
    if destination is None:
        return state
    destination.update(state)
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take over what `state_dict` returned, or what apex's did.

    It may come before `initialize` or after: what no `scale_loss` has used is taken over by the next
    `initialize` as well. A different number of losses or another level gets an `AmpWarning` that says
    what differs.

    Raises:
        AmpTypeError, AmpValueError, AmpRuntimeError: it is no such state dict.
    """
    checkpoint.check(state_dict)
    if _Default.session is not None and not _Default.session.closed:
        _Default.session.load_state_dict(state_dict)
    _Default.waiting_state = state_dict
