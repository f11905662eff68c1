"""`amp.explain`: what precision each function of a forward runs in, and which rule says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from amp.casting.by_model import keeps_fp32
from amp.casting.by_op import CastOps
from amp.casting.matching_rules import ruled_modules, ruled_tensors
from amp.casting.policy import OpRule, describe
from amp.diagnosis.findings import short_path
from amp.diagnosis.ledger import Call
from amp.diagnosis.places import modules_of
from amp.dtypes import dtype_name
from amp.errors import AmpValueError, did_you_mean
from amp.own_tensors import own_tensors
from amp.profiles.keys import shown
from amp.profiles.options import OptLevel
from amp.session import Session
from amp.trials.checking import a_forward


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


def explain(
    model: nn.Module,
    batch: Any,
    op: str | None = None,
    module: str | None = None,
    opt_level: OptLevel | None = None,
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
    with a_forward(model, batch, opt_level, overrides, "amp.explain") as (session, replay):
        shadow, _ = replay.run()
        explained = _Explainer(session, replay.models[""]).explained
        counts = Counter(map(explained, shadow.ledger.calls))
    calls = [replace(call, count=count) for call, count in counts.items()]
    level = str(session.properties.opt_level or "this profile")
    return Explanation(level, tuple(_chosen(calls, op, module)))


def _chosen(calls: list[Explained], op: str | None, module: str | None) -> list[Explained]:
    """Return the calls of an op, in a module or its submodules; None selects all.

    Raises:
        AmpValueError: there are none; the message names the existing ones.
    """
    inside = [x for x in calls if not module or f"{x.module}.".startswith(f"{module}.")]
    if not inside:
        hint = did_you_mean(module or "", {x.module for x in calls})
        raise AmpValueError(f"no function of torch was called in module '{module}'{hint}")
    chosen = [x for x in inside if op in (None, x.op, x.op.rpartition(".")[2])]
    if not chosen:
        names = sorted({x.op for x in inside})
        where = f"module '{module}'" if module else "a forward"
        raise AmpValueError(f"'{op}' was not called in {where}; these were: {', '.join(names)}")
    return chosen


class _Explainer:
    """Explains calls of functions in the forward of a session's model."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._modules, self._properties = modules_of({"": model}), session.properties
        self._caster = next((x for x in session.strategies if isinstance(x, CastOps)), None)
        self._rules = {x.op: x for x in self._caster.policy.rules} if self._caster else {}
        self._ruled = ruled_modules(model, session.properties.rules)
        self._ruled_tensors = ruled_tensors(model, session.properties.rules)

    def explained(self, call: Call) -> Explained:
        """Explain a call."""
        place, caster = call.place, self._caster
        name = f"torch.{place.op}" if place.op.startswith("Tensor.") else place.op
        rule = (caster and caster.rule_of(call.function)) or self._rules.get(name)
        name = name if rule is None else rule.op
        takes, gives = (tuple(map(dtype_name, dtypes)) for dtypes in (call.takes, call.gives))
        why = self._reason(call, rule)
        return Explained(name, place.module, place.file, place.line, takes, gives, why)

    def _reason(self, call: Call, rule: OpRule | None) -> str:
        """Return, as a sentence, what decides the precision of a call."""
        properties, caster = self._properties, self._caster
        module = self._modules[call.place.module]
        own = [x for _, x in own_tensors(module)]
        weights = {dtype_name(x.dtype): None for x in own if isinstance(x, nn.Parameter)}
        held = f"; its weights are {', '.join(weights)}" if weights else ""
        for x in own:
            by_name = self._ruled_tensors.get(x)
            if by_name is not None and by_name.kind == "tensor":
                said = f"'{by_name.pattern}' says {shown(by_name.dtype)} ({by_name.source})"
                held += f"; a rule for {said}" if said not in held else ""
        if not (properties.casts_model or properties.patch_torch_functions):
            return f"follows its input, or torch.autocast where it is on: no level is in force{held}."
        if call.takes[1:] and call.takes[-1].itemsize == 1:
            name = dtype_name(call.takes[-1])
            return f"multiplies in FP{4 if 'float4' in name else 8}, {name}: fp8={properties.fp8}."
        ruled = self._ruled.get(module)
        if ruled is not None and ruled.dtype is not None:
            dtype = dtype_name(ruled.dtype)
            return f"a rule for the module '{ruled.pattern}' says {dtype} ({ruled.source})."
        if caster is not None:
            if rule is not None and rule.category == "calls":
                return f"calls {rule.note}, which {describe(self._rules.get(rule.note), caster.policy)}"
            return describe(rule, caster.policy)
        if properties.casts_model and keeps_fp32(module, properties):
            return f"its weights stay in FP32 at {properties.opt_level}, as those of norms do."
        return f"follows its input: {properties.opt_level} casts models and no functions{held}."
