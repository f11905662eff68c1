"""`Finding` and `Report`: what the diagnosis of a step returns."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from amp.diagnosis.guard import Unfollowed

CAUSES = {
    *("range", "absorbed range", "underflow", "cancellation", "rounding", "eps", "cast", "mathematics"),
    *("data", "weights", "loss scale", "order", "still", "buffer", "loss"),
}
"""The kinds of cause, by their stable names. The page on diagnosis says what they mean."""


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong.

    Attributes:
        cause: one of `CAUSES`.
        what: one sentence with the numbers.
        advice: what to do.
        phase: `forward`, `backward`, or `recompute` of an activation checkpoint.
        op: the function that was called.
        module: the name of the innermost module; empty outside of any module.
        file: the file of the line that called it.
        line: the number of that line.
        takes: dtypes of its floating inputs.
        gives: dtype of its result.
        value: the magnitude or constant that matters, computed in FP64 where possible; None if unknown.
        limit: the largest number of the format; None if it is not relevant.
        reached: names of the parameters whose gradients became inf or NaN from it.
        rank: the rank of the process.
    """

    cause: str
    what: str
    advice: str
    phase: str = ""
    op: str = ""
    module: str = ""
    file: str = ""
    line: int = 0
    takes: tuple[str, ...] = ()
    gives: str = ""
    value: float | None = None
    limit: float | None = None
    reached: tuple[str, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        module = self.module.removesuffix(": ")  # a whole model's, where there are several
        where = [f"in {module}" if module else ""]
        where.append(f"{short_path(self.file)}:{self.line}" if self.file else "")
        place = ", ".join([part for part in (f"{self.phase} {self.op}".strip(), *where) if part])
        lines = [f"{self.cause}: {place}" if place else self.cause, f"  {self.what}"]
        if self.reached:
            lines.append(f"  reached the gradients of {listed(self.reached)}")
        return "\n".join([*lines, *(f"  {line}" for line in self.advice.splitlines())])


def without_number(module: str) -> str:
    """Return a module's name without the number of its model, as in `model 1: head`."""
    return re.sub(r"^model \d+: ", "", module)


def rule_for(module: str, kind: str = "module") -> str:
    """Return the rule that keeps a module or a tensor in FP32, to paste into YAML; empty for a model.

    The number of the model is left out: rules apply to all models.
    """
    import yaml  # here, so that `import amp` does not load it

    name = without_number(module)
    quoted = name if yaml.safe_load(name) == name else f"'{name}'"  # 0 of nn.Sequential is no name
    return f"{{{kind}: {quoted}, cast: float32}}" if name else ""


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(names[:3]) + more


def exact(x: float) -> str:
    """Return a number with all of its digits, whole numbers without a point."""
    return str(int(x)) if float(x).is_integer() and abs(x) < 2**63 else repr(float(x))


def short_path(file: str) -> str:
    """Return a path relative to the current directory, if the file is inside it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each cause, op and line: the one with the largest value."""
    groups: defaultdict[Hashable, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.cause, finding.op, finding.file, finding.line, finding.gives].append(finding)
    chosen = []
    for same in groups.values():
        worst = max(same, key=lambda x: abs(x.value or 0.0))
        others = len({x.module for x in same}) - 1
        more = f"; the same in {others} more module{'s' if others > 1 else ''}" if others else ""
        chosen.append(replace(worst, what=worst.what + more))
    return chosen


def one_a_rule(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of those that one rule for a module cures, and all others."""
    first: dict[Hashable, list[Finding]] = {}
    for finding in findings:
        rule = next((x for x in finding.advice.splitlines() if x.startswith("rules:")), None)
        first.setdefault(rule or id(finding), []).append(finding)
    kept = []
    for one, *others in first.values():
        lines = list(dict.fromkeys(f"{x.op}, line {x.line}" for x in others))
        also = f"; its rule cures {listed(lines, '; ')} too" if lines else ""
        kept.append(replace(one, what=one.what + also))
    return kept


@dataclass
class Report:
    """The result of `amp.diagnose`, which is filled when the block ends, of `amp.check` and of a watch.

    Attributes:
        findings: what was found, the cause first; empty if nothing was wrong.
        ops: how many ops were watched.
        ranks: how many processes the findings come from.
        about: what was watched, in one line: what trains, or the level of a check.
        unfollowed: counts what could not be watched, because the watch itself raised an error.
        why_nothing: why no op was watched, if none was.
    """

    findings: list[Finding] = field(default_factory=list)
    ops: int = 0
    ranks: int = 1
    about: str = ""
    unfollowed: Unfollowed = field(default_factory=Unfollowed)
    why_nothing: str = "no op of torch ran"

    @property
    def is_healthy(self) -> bool:
        """Whether ops were watched, and nothing was found."""
        return self.ops > 0 and not self.findings

    @property
    def cause(self) -> str | None:
        """The cause of the first finding, or None."""
        return self.findings[0].cause if self.findings else None

    def __str__(self) -> str:
        lines = [f"rank {x.rank}: {x}" if self.ranks > 1 else str(x) for x in self.findings]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} findings, in the order of the data flow:")
        healthy = f"healthy: nothing found in {self.ops} ops"
        nothing = f"nothing was watched: {self.why_nothing}"
        lines = lines or [healthy if self.ops else nothing]
        return "\n".join(filter(None, [*lines, str(self.unfollowed)]))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for `json.dumps`."""
        about = {"about": self.about} if self.about else {}
        findings = list(map(asdict, self.findings))
        lost = {"unfollowed": str(self.unfollowed)} if self.unfollowed.count else {}
        return {**about, "healthy": self.is_healthy, "ops": self.ops, **lost, "findings": findings}
