"""The functions that scripts call, with apex's arguments, and the default session that they use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any, Literal, NoReturn, Unpack, overload

from torch import Tensor

from amp import checkpoint
from amp.arguments import Models, Optimizers, attached_to, check_third_argument, what_to_pass
from amp.distributed import ProcessGroup
from amp.errors import AmpAttributeError, AmpRuntimeError, AmpTypeError, brief, truth_of
from amp.kernels.interrupts import followed_by
from amp.other_names import unknown_keyword
from amp.profiles.options import Dtype, Flag, LossScale, Masters, OptLevel, SessionOptions
from amp.profiles.properties import OVERRIDE_KEYS, hint_at
from amp.session import Session
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.recorder import Transition
from amp.training.wrapped_optimizers import ATTACHED, Optimizer


class _Default:
    """The session of the last `initialize`, and a loaded state that no session has used yet."""

    session: Session | None = None
    waiting_state: checkpoint.SavedState | None = None
    loaded_into: Session | None = None
    """The session that has loaded the waiting state already. If it closes, the state stops waiting."""


@overload
def initialize(
    models: Models,
    optimizers: None = None,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
    **options: Unpack[SessionOptions],
) -> Models: ...


@overload
def initialize(
    models: Models,
    optimizers: Optimizers,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
    **options: Unpack[SessionOptions],
) -> tuple[Models, Optimizers]: ...


def initialize(
    models: Any = ...,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
    cast_model_type: Dtype | Literal[False] | None = None,
    patch_torch_functions: Flag | None = None,
    keep_batchnorm_fp32: Flag | None = None,
    master_weights: Masters | None = None,
    loss_scale: LossScale | None = None,
    cast_model_outputs: Dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = None,
    *,
    process_group: ProcessGroup | Sequence[ProcessGroup] | None = None,
    allow_incoming_model_not_fp32: bool = False,
    **others: Any,
) -> Any:
    """Prepare models and optimizers for mixed-precision training, and return them.

    They stay the same objects: models are cast in place, and methods of optimizers are wrapped. Call
    it when models are on their device and not yet in `DistributedDataParallel`. A second call makes
    another session. From then on its casts apply, and the optimizers of the first session go on
    working. The host waits for the device only where buffers are cast to 16 bits: it looks for integers
    and masks that the cast ruins.

    Args:
        models: a module, a list of modules, or None.
        optimizers: an optimizer, a list of optimizers, or None.
        enabled: False makes this and `scale_loss` do nothing.
        opt_level: a level such as `"O2"`, an alias, or a path to a YAML profile. The arguments below,
            up to `cast_model_outputs`, change single keys of it; None leaves a key as the level has it.
            docs/profiles.md has their values.
        cast_model_type: the dtype of the weights and inputs; False casts neither.
        patch_torch_functions: torch's functions cast their arguments, as at O1 and O4.
        keep_batchnorm_fp32: norms with running statistics stay FP32 in a cast model.
        master_weights: with True, the optimizer steps FP32 copies of 16-bit weights. `"split16"` and
            `"kahan"` keep these copies in 16 bits, to save memory, and `"split24"` in 8. With False
            there are none.
        loss_scale: `"dynamic"`, a number, or a mapping with `init`, `growth_interval` and so on.
        cast_model_outputs: the dtype of the model's outputs.
        num_losses: how many losses are scaled independently, by `loss_id`.
        verbosity: 0 logs nothing, not even skipped steps; 1 logs on rank 0 to the logger `amp`.
        min_loss_scale: the smallest loss scale.
        max_loss_scale: the largest loss scale.
        process_group: the process group, or list of them, whose ranks must skip a step together; see
            `amp.Session`.
        allow_incoming_model_not_fp32: accept a model whose weights have 16 bits already.
        **others: keys that apex did not have.

            - `patch_torch_functions_type`: the dtype of the ops that gain from half precision.
            - `keep_norm_fp32`: all norms stay FP32 in a cast model, LayerNorm and the like too.
            - `buffer_dtype`: float32 keeps all floating-point buffers in FP32 in a cast model.
            - `state_dtype`: how a fused optimizer keeps its moments: in bfloat16, or `"packed16"`.
            - `reduce_dtype`: the dtype in which FSDP2 reduces gradients of a cast model.
            - `protect_buffers`: running statistics survive an overflow.
            - `diagnose`: `"on_overflow"` watches a step after a streak of overflows.
            - `fp8`: linear layers run in FP8 or FP4, by a recipe.
            - `fp4`: the same; True is the recipe `nvfp4`.
            - `cast_model_inputs`: whether a cast model casts its inputs, and which of them it does not
              cast.
            - `rules`: the precision of single ops, modules, parameters and buffers, on top of the
              profile's.

    Returns:
        The same objects: `models` alone if `optimizers` is None, else `(models, optimizers)`. A list
        comes back as the same list, and None as None. With `enabled=False` the result is the same, and
        the objects are unchanged.

    Raises:
        AmpRuntimeError: an unknown level, properties that do not fit together, a model that is
            wrapped or 16-bit already, an optimizer of an open session, inference mode. Nothing is
            changed.
        AmpTypeError: something that is not a model or an optimizer, or an unknown argument.
        AmpValueError: a property has a value that is not allowed.
    """
    _check_arguments(models, enabled, others)
    enabled = truth_of("enabled", enabled)
    if isinstance(min_loss_scale, (int, float)) and not min_loss_scale:
        min_loss_scale = None
    given: dict[str, Any] = {key: value for key, value in locals().items() if key in OVERRIDE_KEYS}
    given |= others
    session = Session(
        opt_level, num_losses=num_losses, verbosity=verbosity, process_group=process_group, **given
    )
    if _Default.loaded_into is not None and _Default.loaded_into.closed:
        _Default.waiting_state = None
    if _Default.waiting_state is not None:
        checkpoint.restore(_Default.waiting_state, session)

    def set_up() -> Any:
        result = session.initialize(
            models, optimizers, allow_incoming_model_not_fp32=allow_incoming_model_not_fp32
        )
        _make_default(session)
        return result

    return followed_by(
        set_up, lambda: _make_default(session) if session.models or session.attached else None
    )


def _make_default(session: Session) -> None:
    """Make a session the default. It may be called again."""
    _Default.waiting_state = _Default.loaded_into = None
    if _Default.session is not None and _Default.session is not session:
        _Default.session.casts.stop()
    _Default.session = session


def _check_arguments(models: object, enabled: object, others: Mapping[str, Any]) -> None:
    if isinstance(enabled, str):  # the third position, where users often put a level
        shown = brief(enabled)
        is_flag = enabled.lower() in ("true", "false")
        meant = f"enabled={enabled.title()}, without quotes" if is_flag else f"opt_level={shown}"
        raise AmpTypeError(f"enabled={shown} is not a bool; did you mean {meant}?")
    check_third_argument(enabled)
    for name in sorted(others.keys() - OVERRIDE_KEYS.keys()):
        takes = dict.fromkeys([*inspect.signature(initialize).parameters, *OVERRIDE_KEYS])
        del takes["others"]
        raise AmpTypeError(
            f"initialize() got an unexpected keyword argument '{name}'"
            f"{hint_at(name, takes) or '; leave it out. It takes ' + ', '.join(takes)}"
        )
    if models is ...:
        raise AmpTypeError(
            "amp.initialize needs the model, or None. Write model, optimizer = "
            "amp.initialize(model, optimizer)"
        )


def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
    **others: NoReturn,
) -> AbstractContextManager[Tensor]:
    """Scale a loss for its backward, and unscale the gradients when the block ends.

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    After the block, gradients are unscaled, and added to those of earlier blocks; clip them then. If
    one is inf or NaN, the next `step` of each of the optimizers is skipped, and a dynamic scale goes
    down. If the block raises, its gradients are dropped.

    The block does not make the host wait for the device. If gradients are checked, `step` waits for 4
    bytes per block. It does not wait if the optimizer skips on the device, as those of `amp.optimizers`
    and torch's fused ones do. Even these wait with a closure, and in the first step of torch's SGD with
    momentum. Gradients are checked under dynamic scaling, and at O4 to O9 if the check does not make
    the host wait; see `check` in docs/profiles.md.

    Args:
        loss: a floating-point tensor of any shape.
        optimizers: the optimizer, or list of optimizers, whose parameters the loss reaches.
        loss_id: which scaler to use, 0 to `num_losses - 1`.
        model: not used; apex had it.
        delay_unscale: leave the gradients scaled, and accumulate more of them until a block without
            this argument. It saves work. A block under DDP's `no_sync` always does this.
        delay_overflow_check: unscale the gradients, but let the next block without this argument
            update the scale.
        **others: none; other names raise AmpTypeError.

    Yields:
        The scaled loss: a floating-point tensor of the loss's shape and dtype, float32 for a 16-bit
        loss.

    Raises:
        AmpRuntimeError: `initialize` has not been called, or not on these optimizers.
        AmpIndexError: there is no such `loss_id`.
        AmpTypeError: `loss` or `optimizers` has the wrong type.
    """
    if others:
        *takes, _ = inspect.signature(scale_loss).parameters
        raise unknown_keyword("scale_loss", next(iter(others)), takes)
    attached = getattr(optimizers, ATTACHED, None)
    if attached is None:
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        attached = next(filter(None, map(AttachedOptimizer.of, given)), None)
    if attached is None:
        session = _default("amp.scale_loss")  # which refuses the optimizers, unless it is disabled
    else:
        session, _Default.waiting_state = attached.owner, None
        _Default.loaded_into = None
    return session.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)


def _default(caller: str) -> Session:
    if _Default.session is None:
        raise AmpRuntimeError(
            f"{caller} was called before amp.initialize. Call it first: "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...)"
        )
    return _Default.session


def get_session(optimizer: Optimizer | None = None) -> Session:
    """Return the session of an optimizer, or of the last `initialize` if None.

    Raises:
        AmpRuntimeError: there is none.
    """
    if optimizer is None:
        return _default("amp.get_session()")
    session: Session = attached_to(optimizer).owner
    return session


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer steps: FP32 masters of 16-bit weights, if there are any.

    Between `scale_loss` and `step` their `.grad` is unscaled: clip these gradients. Masters that are
    kept in 16 bits or fewer (`split16`, `split24`, `kahan`) are NaN outside of a step;
    `model.state_dict()` has their values. If the optimizer is in no session, these are its own
    parameters. The host does not wait for the device.

    Raises:
        AmpAttributeError: `optimizer` has no `param_groups`. It is raised with the first parameter.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise AmpAttributeError(
            f"amp.master_params takes an optimizer, and got {type(optimizer).__name__}: pass "
            f"{what_to_pass(optimizer)}"
        )
    if (attached := AttachedOptimizer.of(optimizer)) is not None:
        attached.reconcile_and_merge()
    for group in groups:
        yield from group["params"]


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's last `step` was skipped because of an overflow.

    The host waits for the device if the optimizer skips on the device, as torch's fused ones do.

    Raises:
        AmpRuntimeError: the optimizer did not come out of `initialize`.
    """
    disabled = _Default.session is not None and not _Default.session.properties.enabled
    if disabled and AttachedOptimizer.of(optimizer) is None:
        return False
    return attached_to(optimizer).step.was_skipped


def history() -> list[Transition]:
    """Return the last 256 updates of each loss scaler of the last `initialize`, oldest first.

        for row in amp.history():
            print(row.step, row.scale, row.overflow, row.bad)

    They are always recorded, and recording does not make the host wait for the device. This call waits
    for the updates whose numbers have not reached the host yet.

    Returns:
        Rows with `step`, `loss_id`, `scale`, `overflow`, `in_a_row`, `next_scale`, `norm` (with a fused
        optimizer that has `max_grad_norm`) and `bad`, the names of the parameters whose gradients were
        inf or NaN in that step for the last time.

    Raises:
        AmpRuntimeError: `initialize` has not been called.
    """
    return _default("amp.history").history()


def loss_scale(loss_id: int = 0) -> float:
    """Return the current scale of a loss of the last `initialize`. The host waits for the device."""
    return _default("amp.loss_scale").loss_scale(loss_id)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of the loss scalers of the last `initialize`: apex's entries, and a few more.

    Together with the state dicts of the model and the optimizer it makes a checkpoint from which
    training resumes bit for bit. It contains plain values, and with `fp8="delayed"` one tensor. The
    host waits for the device.

    Args:
        destination: a dict to put the entries into.

    Raises:
        AmpRuntimeError: `initialize` has not been called.
        AmpTypeError: `destination` is no dict.
    """
    state = _default("amp.state_dict").state_dict()
    if destination is None:
        return state
    if not isinstance(destination, MutableMapping):
        raise AmpTypeError(
            f"amp.state_dict takes no {type(destination).__name__}: it returns the loss scalers. "
            "Save model.state_dict() and optimizer.state_dict() beside it"
        )
    destination.update(state)
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load a state dict that `amp.state_dict` returned, or apex's.

    Call it before or after `initialize`. The next `initialize` loads the state as well, unless there is
    a `scale_loss` in between, or the session that has loaded it was closed. An
    `AmpWarning` says if the number of losses or the level differs. If a scale is on the device already,
    the host waits for the device.

    Raises:
        AmpTypeError, AmpValueError, AmpRuntimeError: this is not such a state dict, or an entry is not
            valid. Nothing is changed then.
    """
    saved, session = checkpoint.read(state_dict), _Default.session
    if session is not None and session.closed:
        session = None
    if session is not None:
        checkpoint.restore(saved, session)
    _Default.waiting_state, _Default.loaded_into = saved, session


class Stateful:
    """An object with which `torch.distributed.checkpoint` saves and loads the loss scalers.

        state = {"model": ..., "optimizer": ..., "amp": amp.Stateful()}
        torch.distributed.checkpoint.save(state, checkpoint_id=path)

    Args:
        session: the session whose state is saved and loaded; None is that of the last `initialize` at
            that time.

    Raises:
        AmpTypeError: `session` is not an `amp.Session`.
    """

    def __init__(self, session: Session | None = None) -> None:
        if not isinstance(session, (Session, NoneType)):
            raise AmpTypeError(
                f"amp.Stateful takes a session, and got {brief(session)}: leave it out, or pass "
                "amp.get_session(optimizer)"
            )
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        """Return the state as from `amp.state_dict`. The host waits for the device."""
        return (self._session or _default("amp.Stateful.state_dict")).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, as `amp.load_state_dict` does."""
        if self._session is None:
            load_state_dict(state_dict)
        else:
            self._session.load_state_dict(state_dict)
