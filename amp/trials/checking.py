"""`amp.check`: finding what can go wrong at a level, before training."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from amp import active
from amp.diagnosis.causes import findings_of
from amp.diagnosis.diagnose import named_models, unwrapped
from amp.diagnosis.findings import Finding, one_a_rule, said_of
from amp.diagnosis.records import UNWRITTEN
from amp.distributed import is_sharded
from amp.dtypes import dtype_name
from amp.errors import AmpError, AmpTypeError, AmpValueError, AmpWarning, brief
from amp.session import Session
from amp.trials import hazards
from amp.trials.ledger import Ledger
from amp.trials.replay import Replay

_SHOWN = 12


@dataclass
class Checkup:
    """The result of `amp.check`.

    Attributes:
        level: the level that was checked.
        findings: what can make numbers wrong, certain problems first.
        remarks: what costs time.
        products: floating-point operations of matrix products, by the name of their dtype.
        casts: how many casts of activations a forward has.
        cast_bytes: how many bytes these casts read and write.
        ops: how many ops a forward has.
    """

    level: str
    findings: list[Finding] = field(default_factory=list)
    remarks: list[Finding] = field(default_factory=list)
    products: dict[str, int] = field(default_factory=dict)
    casts: int = 0
    cast_bytes: int = 0
    ops: int = 0

    @property
    def is_healthy(self) -> bool:
        """Whether there are no findings. Remarks do not count."""
        return not self.findings

    def __str__(self) -> str:
        lines = [said_of(self.findings[:_SHOWN])] if self.findings else []
        if len(self.findings) > _SHOWN:
            lines.append(f"and {len(self.findings) - _SHOWN} more findings")
        lines += [f"remark: {remark}" for remark in self.remarks[:_SHOWN]]
        if not self.findings:
            lines.insert(0, f"healthy: nothing found at {self.level}")
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
    opt_level: Any = None,
    **overrides: Any,
) -> Checkup:
    """Report what can go wrong with a model at a level, from forwards on one batch.

        print(amp.check(model, images, opt_level="O2"))

    The forward runs at the level, and in FP32 for comparison. Weights, buffers and random numbers are
    restored afterwards; a model that has not been through `initialize` is copied. There is no backward:
    to check one, use `amp.diagnose` or `python -m amp doctor`. The host waits for the device after each
    op.

    Findings are: constants that become 0 or inf, integers and masks that a cast changes, numbers larger
    than a quarter of float16's maximum, rows that are masked entirely, a forward that fails only at the
    level, weights in 16 bits before `initialize`, a static scale without a check of gradients, and tied
    weights with different rules. Remarks are about speed: sizes that do not suit tensor cores, casts
    that undo each other, and too little work in half precision.

    Args:
        model: a model before `initialize`, or one that it returned, wrapped or not.
        batch: the arguments of the model: a tuple or list of arguments, a mapping of keyword arguments,
            or the only argument.
        opt_level: a level, an alias or a YAML profile, for a model before `initialize`.
        **overrides: as in `amp.initialize`.

    Raises:
        AmpTypeError: `model` is not a module, or does not take the batch.
        AmpValueError: `opt_level` is missing, or is given for a model that has a level.
        Exception: an error that the forward raises in FP32 too.
    """
    model = one_model(model, "amp.check")
    args, kwargs = arguments_of(model, batch)
    with at_level(model, opt_level, overrides, "amp.check") as (session, subject):
        found = list(hazards.before_initialize([model])) if subject is not model else []
        found += hazards.of_properties(
            session.properties, subject, bool(session.properties.loss_scaling.check)
        )
        checkup = check_forward(session, subject, args, kwargs)
        checkup.findings = [*found, *checkup.findings]
    return checkup


def one_model(model: Any, caller: str) -> nn.Module:
    """Return a model without its wrappers; raise AmpTypeError if it is not one module."""
    named_models(model, caller)
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"{caller} takes one model, and got {brief(model)}")
    return unwrapped(model)


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model for a batch.

    Raises:
        AmpTypeError: the model's forward does not take them.
    """
    args: tuple[Any, ...] = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        args, kwargs = (), dict(batch)
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


@contextmanager
def at_level(
    model: nn.Module, opt_level: Any, overrides: dict[str, Any], caller: str
) -> Iterator[tuple[Session, nn.Module]]:
    """Yield a model's session and the model; if it has none, a new session and a copy, for the block.

    Raises:
        AmpTypeError: the model cannot be copied.
        AmpValueError: `opt_level` is missing, or is given for a model that has a level.
    """
    session = active.session_of(model)
    if session is not None:
        if opt_level is not None or overrides:
            raise AmpValueError(
                "the model has been through amp.initialize, at "
                f"{session.properties.opt_level}: leave out opt_level, or call {caller} before it"
            )
        yield session, model
        return
    if opt_level is None:
        raise AmpValueError(
            "the model has not been through amp.initialize: name a level, as in "
            f"{caller}(model, batch, opt_level='O2')"
        )
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise AmpTypeError(
            f"{type(model).__name__} cannot be copied ({error}): call {caller} after amp.initialize"
        ) from error
    with Session(opt_level, verbosity=0, **overrides) as own:
        own.initialize(copied, allow_incoming_model_not_fp32=True)
        yield own, copied


def check_forward(
    session: Session, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Checkup:
    """Check a forward of a session's model, and restore the state afterwards.

    Raises:
        Exception: an error that the forward raises in FP32 too.
    """
    level = str(session.properties.opt_level or "this profile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)  # the findings report the same
        return _check_forward(
            Replay(lambda: model(*args, **kwargs), {"": model}, session), model, level
        )


def _check_forward(replay: Replay, model: nn.Module, level: str) -> Checkup:
    ledger = Ledger(replay.models)
    checkup = Checkup(level)
    try:
        output = replay.watched_by(ledger)
    except AmpError:
        raise
    except Exception as error:
        if any(map(is_sharded, model.parameters())):
            raise
        replay.watched_by(nullcontext(), [""])  # which raises what FP32 raises too
        checkup.findings = [hazards.of_failure(ledger, error)]
    else:
        ledger.note_output(output)
        found = _without_repetition(findings_of(ledger), hazards.of_numbers(ledger))
        checkup.findings = one_a_rule(found)
    checkup.remarks = list(hazards.remarks(ledger, replay.owner.properties))
    flops = hazards.flops_of(ledger.products)
    checkup.products = {dtype_name(dtype): count for dtype, count in flops.most_common()}
    checkup.casts, checkup.cast_bytes = ledger.casts.count, ledger.casts.bytes
    checkup.ops = sum(op.aten not in UNWRITTEN for op in ledger.ops.values())
    return checkup


def _without_repetition(certain: list[Finding], possible: list[Finding]) -> list[Finding]:
    constants = {(x.op, x.file, x.line) for x in possible if x.cause == "mask"}
    certain = [x for x in certain if (x.op, x.file, x.line) not in constants]
    known = {(x.op, x.file, x.line) for x in certain}
    return [*certain, *(x for x in possible if (x.op, x.file, x.line) not in known)]


def merged(checkups: Sequence[Checkup]) -> Checkup:
    """Return the results for several models as one."""
    if len(checkups) == 1:
        return checkups[0]
    whole = Checkup(checkups[0].level if checkups else "no forward")
    flops = Counter[str]()
    for i, one in enumerate(checkups):
        whole.findings += [_of_model(i, x) for x in one.findings]
        whole.remarks += [_of_model(i, x) for x in one.remarks]
        whole.casts += one.casts
        whole.cast_bytes += one.cast_bytes
        whole.ops += one.ops
        flops.update(one.products)
    whole.products = dict(flops.most_common())
    return whole


def _of_model(number: int, finding: Finding) -> Finding:
    return replace(finding, module=f"model {number}: {finding.module}".removesuffix(": "))


def checkup_of_json(found: dict[str, Any]) -> Checkup:
    """Return a checkup from the result of `Checkup.to_json`."""
    known = {key: value for key, value in found.items() if key != "healthy"}
    for key in ("findings", "remarks"):
        known[key] = [Finding(**x) for x in known[key]]
    return Checkup(**known)
