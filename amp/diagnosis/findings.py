"""What is said about a step that went wrong."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any

CAUSES = {
    "range": "a number is too large for the format",
    "absorbed range": "a number is too large for the format, and nothing after it shows that",
    "underflow": "gradients are too small for the format, and became 0",
    "eps": "a small constant is 0 in the format",
    "cast": "a cast has changed integers, or a mask",
    "mathematics": "the result is not finite in any precision",
    "data": "the data is not finite",
    "weights": "a weight or a buffer is not finite",
    "loss scale": "a gradient times the loss scale is too large for the format",
    "order": "gradients were changed before they were unscaled",
    "headroom": "a number is close to the largest of the format",
    "mask": "a constant is too large for the format",
    "fails": "what runs in FP32 raises at this level",
    "unchecked": "nothing looks at gradients before a step",
    "tied": "modules share a weight, and rules do not treat them alike",
    "cast before initialize": "weights were rounded to 16 bits before there were masters",
}
"""The classes of cause, by their stable names. The last six are of `amp.check`."""

REMARKS = {
    "alignment": "a size that tensor cores do not like",
    "round trip": "casts that undo each other",
    "share": "most of the work is not in half precision",
}
"""What `amp.check` says of speed."""


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong.

    Attributes:
        cause: one of `CAUSES`.
        what: one sentence with the numbers.
        advice: what to do.
        phase: `forward`, `backward`, or `recompute` of a checkpoint.
        op: the function that was called.
        module: the name of the innermost module; empty outside of any.
        file, line: where it was called.
        takes, gives: dtypes of its floating inputs, and of its result.
        value: the largest magnitude in FP64; None where that is not known.
        limit: the largest number of the format; None where that says nothing.
        reached: names of the parameters whose gradients it has ruined.
        rank: of the process.
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
            more = f" and {len(self.reached) - 3} more" if len(self.reached) > 3 else ""
            lines.append(f"  reached the gradients of {', '.join(self.reached[:3])}{more}")
        return "\n".join([*lines, *(f"  {line}" for line in self.advice.splitlines())])


def rule_for(module: str) -> str:
    """Return the rule that keeps a module in FP32, to paste into YAML; empty for a whole model.

    A rule knows no number of a model, as `model 1: head` has it: it is for each model with that name.
    """
    import yaml  # here, so that `import amp` does not load it

    name = re.sub(r"^model \d+: ", "", module)
    quoted = name if yaml.safe_load(name) == name else f"'{name}'"  # 0 of nn.Sequential is no name
    return f"{{module: {quoted}, cast: float32}}" if name else ""


def short_path(file: str) -> str:
    """Return a path as seen from the current directory, if it is inside of that."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


@dataclass
class Report:
    """What `amp.diagnose` has found; it is filled when the block ends.

    Attributes:
        findings: the cause first; empty if all was well.
        ops: how many ops were looked at.
        ranks: how many processes have told theirs.
    """

    findings: list[Finding] = field(default_factory=list)
    ops: int = 0
    ranks: int = 1

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def cause(self) -> str | None:
        """The class of the first finding, or None."""
        return self.findings[0].cause if self.findings else None

    def __str__(self) -> str:
        if not self.findings:
            return f"healthy: {self.ops} ops gave nothing that is not finite"
        many = self.ranks > 1
        return "\n".join(
            f"rank {finding.rank}: {finding}" if many else str(finding) for finding in self.findings
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes."""
        return {
            "healthy": self.is_healthy,
            "ops": self.ops,
            "findings": list(map(asdict, self.findings)),
        }
