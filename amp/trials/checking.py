"""`amp.check`: finding what can go wrong at a level, before training."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from amp.diagnosis.causes import findings_of
from amp.diagnosis.diagnose import named_models
from amp.diagnosis.findings import Report
from amp.diagnosis.places import session_of, unwrapped
from amp.errors import AmpTypeError, AmpValueError, AmpWarning
from amp.profiles.options import OptLevel
from amp.session import Session
from amp.trials.replay import Replay


def check(
    model: nn.Module,
    batch: Any,
    opt_level: OptLevel | None = None,
    **overrides: Any,
) -> Report:
    """Report what can go wrong with a model at a level, from forwards on one batch.

        print(amp.check(model, images, opt_level="O2"))

    The forward runs at the level, and each op also in FP64. Weights, buffers and random numbers are
    restored afterwards; a model that has not been through `initialize` is copied. There is no backward:
    to check one, use `amp.diagnose` or `python -m amp doctor`. The host waits for the device after each
    op.

    Args:
        model: a model before `initialize`, or one that it returned, wrapped or not.
        batch: the arguments of the model: a tuple or list of arguments, a mapping of keyword arguments,
            or the only argument.
        opt_level: a level, an alias or a YAML profile, for a model before `initialize`.
        **overrides: as in `amp.initialize`.

    Returns:
        An `amp.diagnosis.Report`.

    Raises:
        AmpTypeError: `model` is not a module, or does not take the batch.
        AmpValueError: `opt_level` is missing, or is given for a model that has a level; or weights are
            in 16 bits before `initialize`.
        Exception: an error that the forward raises.
    """
    with a_forward(model, batch, opt_level, overrides, "amp.check") as (session, replay):
        shadow, result = replay.run()
        shadow.gradients.note_results(result)
        level = f"at {session.properties.opt_level or 'this profile'}"
        return Report(findings_of(shadow), len(shadow.ops), 1, level, shadow.unfollowed)


@contextmanager
def a_forward(
    model: Any, batch: Any, opt_level: Any, overrides: dict[str, Any], caller: str
) -> Iterator[tuple[Session, Replay]]:
    """Yield a model's session and replays of a forward; one without a session is copied for the block.

    Raises:
        AmpTypeError: the model is no module, does not take the batch, or cannot be copied.
        AmpValueError: `opt_level` is missing, or is given for a model that has a level.
    """
    named_models(model, caller)
    if not isinstance(model, nn.Module):
        raise AmpTypeError(
            f"{caller} takes one model, and got a {type(model).__name__} of {len(model)}: pass one of "
            "them, and call it again for the next"
        )
    subject = unwrapped(model)
    args, kwargs = _arguments_of(subject, batch)
    session = session_of(subject)
    if session is not None and (opt_level is not None or overrides):
        raise AmpValueError(
            "the model has been through amp.initialize, at "
            f"{session.properties.opt_level}: leave out opt_level, or call {caller} before it"
        )
    if session is None and opt_level is None:
        raise AmpValueError(
            "the model has not been through amp.initialize: name a level, as in "
            f"{caller}(model, batch, opt_level='O2')"
        )
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore", AmpWarning)  # findings report the same
        if session is None:
            subject = _copied(subject, caller)
            level: Any = opt_level
            session = stack.enter_context(Session(level, verbosity=0, **overrides))
            session.initialize(subject)
        forward = torch.enable_grad()(lambda: subject(*args, **kwargs))
        yield session, Replay(forward, {"": subject}, session)


def _copied(model: nn.Module, caller: str) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise AmpTypeError(
            f"{type(model).__name__} cannot be copied ({error}): call {caller} after amp.initialize"
        ) from error


def _arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model for a batch.

    Raises:
        AmpTypeError: the model's forward does not take them.
    """
    args: tuple[Any, ...] = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (args, {})
    with suppress(ValueError):  # it has no signature
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise AmpTypeError(
                f"{type(model).__name__}.forward takes {signature}, and not this batch: {error}. Pass "
                "what the model is called with: batch[0] of a pair of inputs and targets"
            ) from None
    return args, kwargs
