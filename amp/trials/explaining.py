"""`amp.explain`: what precision each function of a forward runs in, and which rule says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from amp.casting.by_model import keeps_fp32
from amp.casting.by_op import CastOps
from amp.casting.policy import OpRule, describe
from amp.diagnosis.findings import short_path
from amp.dtypes import dtype_name
from amp.errors import AmpValueError, did_you_mean
from amp.profiles.rules import Rule
from amp.session import Session
from amp.trials.checking import arguments_of, at_level, one_model
from amp.trials.ledger import Call, Ledger
from amp.trials.replay import Replay


@dataclass(frozen=True)
class Explained:
    """Calls of one function at one place.

    Attributes:
        op: the function's full name.
        module: the name of the innermost module; empty outside of any module.
        file: the file of the line that called it.
        line: the number of that line.
        takes: the dtypes of its floating arguments.
        gives: the dtypes of its results.
        rule: what decides the precision, and where that is written, as a sentence.
        count: how many calls there were.
    """

    op: str
    module: str
    file: str
    line: int
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    rule: str
    count: int = 1

    def __str__(self) -> str:
        dtypes = f"{', '.join(self.takes) or 'no tensor'} -> {', '.join(dict.fromkeys(self.gives))}"
        times = f", {self.count} times" if self.count > 1 else ""
        where = f"{short_path(self.file)}:{self.line}" if self.file else ""
        return f"{self.module or 'the model'}  {self.op}  {dtypes}  {where}{times}\n    {self.rule}"


@dataclass(frozen=True)
class Explanation:
    """The result of `amp.explain`.

    Attributes:
        level: the level at which the forward ran.
        calls: the calls, in the order of their first occurrence.
    """

    level: str
    calls: tuple[Explained, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls))

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as a dict for `json.dumps`."""
        return asdict(self)


def explain(
    model: nn.Module,
    batch: Any,
    op: str | None = None,
    module: str | None = None,
    opt_level: Any = None,
    **overrides: Any,
) -> Explanation:
    """Report the dtypes of each function of torch in a forward, and which rule applies.

        print(amp.explain(model, images, op="softmax", module="blocks.3.attn"))

    Weights, buffers and random numbers are restored afterwards; a model that has not been through
    `initialize` is copied. The host waits for the device after each op.

    Args:
        model: a model before `initialize`, or one that it returned, wrapped or not.
        batch: the arguments of the model; see `amp.check`.
        op: the name of a function, full or short: `torch.softmax`, `softmax`. None reports all
            functions.
        module: the name of a module; calls in it and in its submodules are reported. None reports all.
        opt_level: a level, an alias or a YAML profile, for a model before `initialize`.
        **overrides: as in `amp.initialize`.

    Raises:
        AmpTypeError: `model` is not a module, or does not take the batch.
        AmpValueError: no such function was called, and the message names those that were; or
            `opt_level` is missing, or is given for a model that has a level.
    """
    model = one_model(model, "amp.explain")
    args, kwargs = arguments_of(model, batch)
    with at_level(model, opt_level, overrides, "amp.explain") as (session, subject):
        return chosen(explain_forward(session, subject, args, kwargs), op, module)


def explain_forward(
    session: Session, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Explanation:
    """Explain all calls in a forward of a session's model, and restore the state afterwards."""
    ledger = Ledger({"": model})
    Replay(lambda: model(*args, **kwargs), {"": model}, session).watched_by(ledger)
    counts = Counter(_explained(session, model, call) for call in ledger.calls)
    calls = [Explained(**{**vars(call), "count": count}) for call, count in counts.items()]
    return Explanation(str(session.properties.opt_level or "this profile"), tuple(calls))


def chosen(explanation: Explanation, op: str | None, module: str | None) -> Explanation:
    """Return the calls of an explanation that are of an op and in a module; None selects all.

    Raises:
        AmpValueError: there are none; the message names the existing ones.
    """
    modules = {call.module for call in explanation.calls}
    calls = [x for x in explanation.calls if is_about(x, None, module)]
    if not calls:
        hint = did_you_mean(module or "", modules)
        raise AmpValueError(f"no function of torch was called in module '{module}'{hint}")
    found = [x for x in calls if is_about(x, op, module)]
    if not found:
        names = sorted({x.op for x in calls})
        where = f" in module '{module}'" if module else ""
        raise AmpValueError(f"'{op}' was not called{where}; these were: {', '.join(names)}")
    return Explanation(explanation.level, tuple(found))


def explanation_of_json(found: dict[str, Any]) -> Explanation:
    """Return an explanation from the result of `Explanation.to_json`."""
    calls = [{key: _frozen(value) for key, value in call.items()} for call in found["calls"]]
    return Explanation(found["level"], tuple(Explained(**call) for call in calls))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def is_about(call: Explained, op: str | None, module: str | None) -> bool:
    """Whether a call is of the function `op`, in a module or one of its submodules."""
    name = call.module
    is_inside = not module or name == module or name.startswith(f"{module}.")
    return is_inside and (op is None or op in (call.op, call.op.rpartition(".")[2]))


def _explained(session: Session, model: nn.Module, call: Call) -> Explained:
    op, rule = _op_rule(session, call)
    return Explained(
        op,
        call.place.module,
        call.place.file,
        call.place.line,
        tuple(map(dtype_name, call.takes)),
        tuple(map(dtype_name, call.gives)),
        _reason(session, model, call, rule),
    )


def _op_rule(session: Session, call: Call) -> tuple[str, OpRule | None]:
    """Return the full name of a function, and its rule, if there is one."""
    name = f"torch.{call.place.op}" if call.place.op.startswith("Tensor.") else call.place.op
    caster = _caster(session)
    if caster is None:
        return name, None
    if (known := caster.rule_of(call.function)) is not None:
        return known.op, known
    return name, next((rule for rule in caster.policy.rules if rule.op == name), None)


def _caster(session: Session) -> CastOps | None:
    return next((x for x in session.strategies if isinstance(x, CastOps)), None)


def _reason(session: Session, model: nn.Module, call: Call, rule: OpRule | None) -> str:
    """Return, as a sentence, what decides the precision of a call."""
    properties = session.properties
    name = call.place.module
    module = model.get_submodule(name)
    if call.takes[1:] and call.takes[-1].itemsize == 1:
        return f"multiplies in FP8, {dtype_name(call.takes[-1])}: fp8={properties.fp8}."
    ruled = _module_rule(session, model, name)
    if ruled is not None and ruled.dtype is not None:
        dtype = dtype_name(ruled.dtype)
        return f"a rule for the module '{ruled.pattern}' says {dtype} ({ruled.source})."
    caster = _caster(session)
    if caster is not None:
        if rule is not None and rule.category == "calls":
            inner = next((x for x in caster.policy.rules if x.op == rule.note), None)
            return f"calls {rule.note}, which {describe(inner, caster.policy)}"
        return describe(rule, caster.policy)
    if properties.casts_model and keeps_fp32(module, properties):
        return f"its weights stay in FP32 at {properties.opt_level}, as those of norms do."
    weights = {x.dtype for x in module.parameters(recurse=False) if isinstance(x, Tensor)}
    held = f"; its weights are {', '.join(map(dtype_name, weights))}" if weights else ""
    if properties.cast_model_type is False and not properties.patch_torch_functions:
        return f"follows its input, or torch.autocast where it is on: no level is in force{held}."
    return f"follows its input: {properties.opt_level} casts models and no functions{held}."


def _module_rule(session: Session, model: nn.Module, name: str) -> Rule | None:
    """Return the rule for a module, or for the innermost module around it with a rule."""
    while True:
        inner = model.get_submodule(name)
        rule = next((x for x in session.properties.rules if x.matches(name, inner)), None)
        if rule is not None or not name:
            return rule
        name = name.rpartition(".")[0]
