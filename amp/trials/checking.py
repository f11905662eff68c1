"""`amp.check`: finding what can go wrong at a level, before training."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from amp.diagnosis.causes import findings_of
from amp.diagnosis.diagnose import named_models
from amp.diagnosis.findings import Finding, one_a_rule, said_of
from amp.diagnosis.places import session_of, unwrapped
from amp.diagnosis.shadow import Shadow
from amp.distributed import is_sharded
from amp.dtypes import dtype_name
from amp.errors import AmpError, AmpTypeError, AmpValueError, AmpWarning
from amp.profiles.options import OptLevel
from amp.session import Session
from amp.trials import hazards
from amp.trials.replay import Replay

_SHOWN = 12


@dataclass
class Checkup:
    """The result of `amp.check`.

    Attributes:
        level: the level that was checked.
        findings: what can make numbers wrong, certain problems first.
        products: floating-point operations of matrix products, by the name of their dtype.
        casts: how many casts of activations a forward has.
        cast_bytes: how many bytes these casts read and write.
        ops: how many ops a forward has.
    """

    level: str
    findings: list[Finding] = field(default_factory=list)
    products: dict[str, int] = field(default_factory=dict)
    casts: int = 0
    cast_bytes: int = 0
    ops: int = 0

    @property
    def is_healthy(self) -> bool:
        """Whether a forward was seen, and there are no findings."""
        return self.ops > 0 and not self.findings

    def __str__(self) -> str:
        nothing = "healthy: nothing found" if self.ops else "nothing was watched: no forward was seen"
        lines = [said_of(self.findings[:_SHOWN]) or f"{nothing} at {self.level}"]
        if len(self.findings) > _SHOWN:
            lines.append(f"and {len(self.findings) - _SHOWN} more findings")
        total = sum(self.products.values())
        shares = ", ".join(f"{flops / total:.0%} {dtype}" for dtype, flops in self.products.items())
        lines.append(
            f"{self.level}: {self.ops} ops in a forward; matrix products: {shares or 'none'}; "
            f"{self.casts} casts of activations, {self.cast_bytes / 2**20:.3g} MB"
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a dict for `json.dumps`."""
        return {"healthy": self.is_healthy, **asdict(self)}


def check(
    model: nn.Module,
    batch: Any,
    opt_level: OptLevel | None = None,
    **overrides: Any,
) -> Checkup:
    """Report what can go wrong with a model at a level, from forwards on one batch.

        print(amp.check(model, images, opt_level="O2"))

    The forward runs at the level, and in FP32 for comparison. Weights, buffers and random numbers are
    restored afterwards; a model that has not been through `initialize` is copied. There is no backward:
    to check one, use `amp.diagnose` or `python -m amp doctor`. The host waits for the device after each
    op.

    Findings are: constants that become 0 or inf, integers and masks that a cast changes, numbers that
    are too large, rows that are masked entirely, a forward that fails only at the level, a static
    scale without a check of gradients, and tied weights with different rules.

    Args:
        model: a model before `initialize`, or one that it returned, wrapped or not.
        batch: the arguments of the model: a tuple or list of arguments, a mapping of keyword arguments,
            or the only argument.
        opt_level: a level, an alias or a YAML profile, for a model before `initialize`.
        **overrides: as in `amp.initialize`.

    Raises:
        AmpTypeError: `model` is not a module, or does not take the batch.
        AmpValueError: `opt_level` is missing, or is given for a model that has a level; or weights are
            in 16 bits before `initialize`.
        Exception: an error that the forward raises in FP32 too.
    """
    with a_forward(model, batch, opt_level, overrides, "amp.check") as (session, replay):
        subject, shadow = replay.models[""], Shadow(replay.models)
        is_checked = bool(session.properties.loss_scaling.check)
        found = list(hazards.of_properties(session.properties, subject, is_checked))
        try:
            shadow.gradients.note_results(replay.watched_by(shadow))
        except AmpError:
            raise
        except Exception as error:
            if any(map(is_sharded, subject.parameters())):
                raise
            replay.watched_by(nullcontext(), [""])  # which raises what FP32 raises too
            found.append(hazards.of_failure(shadow, str(error), type(error).__name__))
        else:
            found += hazards.merged(findings_of(shadow), shadow)
    return checkup_of(shadow, str(session.properties.opt_level or "this profile"), one_a_rule(found))


def checkup_of(shadow: Shadow, level: str, findings: Sequence[Finding]) -> Checkup:
    """Return findings, and what a shadow knows of the forwards that it has seen."""
    ledger = shadow.ledger
    products = {dtype_name(dtype): count for dtype, count in ledger.products.most_common()}
    return Checkup(level, list(findings), products, ledger.casts, ledger.cast_bytes, ledger.ops)


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
        yield (
            session,
            Replay(torch.enable_grad()(lambda: subject(*args, **kwargs)), {"": subject}, session),
        )


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
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        return args, kwargs
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise AmpTypeError(
            f"{type(model).__name__}.forward takes {signature}, and not this batch: {error}. Pass what "
            "the model is called with: batch[0] of a pair of inputs and targets"
        ) from None
    return args, kwargs
