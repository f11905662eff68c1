"""`Comparison`: the result of comparing levels, and its output as text, JSON and HTML."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import amp
from amp.numerics import lab
from amp.terminal.text import Printer, plain

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Problem:
    """Why a level is not healthy.

    Attributes:
        cause: `not_run`, `loss_not_finite`, `steps_skipped`, `loss_gap`, `module_stands_out`,
            `gradient_error` or `weights_stand_still`; of a remark `small_layers`, which do not gain in
            FP8. The names are stable.
        what: the problem in a sentence, with the numbers.
    """

    cause: str
    what: str


@dataclass(frozen=True)
class ModuleError:
    """How far the gradient g of a module's own parameters is from the reference gradient r.

    Attributes:
        module: the module's name.
        error: |g - r| / |r| at the first step, where the weights are the same; None for a gradient
            that is 0 up to rounding errors.
        stands_out: whether the error is too large, or the largest one if that of all gradients together
            is too large.
    """

    module: str
    error: float | None
    stands_out: bool = False


@dataclass(frozen=True)
class LevelResult:
    """One level of a comparison.

    Attributes:
        level: the level, as it was given.
        problems: why the level is not healthy; empty if it is healthy.
        remarks: observations that deserve a look, but do not speak against the level.
        losses: the losses of each step, by the name of the loss.
        loss_gap: how far the loss is above the reference, as a mean over the last third of the steps;
            with several losses, that of the worst one.
        loss_gap_allowed: the largest gap within noise, for that loss.
        gradient_error: |g - r| / |r| of all gradients of the first step, as one vector.
        median_error: the median of the modules' errors at the first step.
        modules: the error of each module.
        skipped: how many steps were skipped.
        scale_search: how many steps earlier runs skipped until the loss scale fitted; the reported run
            starts from the scale that they found.
        still: the fraction of weights that a step did not change although their gradient is not 0.
        seconds: the median time of a step.
        memory: bytes, as in `amp.trials.observing.Record`, and their `total`.
    """

    level: str
    problems: tuple[Problem, ...] = ()
    remarks: tuple[Problem, ...] = ()
    losses: dict[str, list[float]] = field(default_factory=dict)
    loss_gap: float | None = None
    loss_gap_allowed: float | None = None
    gradient_error: float | None = None
    median_error: float | None = None
    modules: tuple[ModuleError, ...] = ()
    skipped: int = 0
    scale_search: int = 0
    still: float | None = None
    seconds: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def standing_out(self) -> list[ModuleError]:
        """The modules that stand out, the worst one first."""
        out = [module for module in self.modules if module.stands_out]
        return sorted(out, key=lambda module: module.error or 0.0, reverse=True)

    @property
    def worst_module(self) -> ModuleError | None:
        """The module with the largest gradient error at the first step, or None."""
        known = [each for each in self.modules if each.error is not None]
        return max(known, key=lambda each: each.error or 0.0, default=None)


@dataclass(frozen=True)
class Comparison:
    """The result of `amp.compare`.

    Attributes:
        levels: the result of each level, O0 first.
        recommended: the healthy level that is cheapest on this hardware; None if O0 is not healthy.
        reason: why it is recommended, in a sentence.
        reference: the precision of the reference: `FP64` or `FP32`.
        reference_losses: the losses of the reference.
        steps: how many steps each run had.
        seed: the seed of every run.
        device: the type of device of the runs: `cpu`, `cuda`.
        notes: further remarks for the reader.
    """

    levels: tuple[LevelResult, ...]
    recommended: str | None
    reason: str
    reference: str
    reference_losses: dict[str, list[float]]
    steps: int
    seed: int
    device: str
    notes: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether all levels are healthy."""
        return all(level.is_healthy for level in self.levels)

    def __getitem__(self, level: str) -> LevelResult:
        return next(each for each in self.levels if each.level == level)

    def __str__(self) -> str:
        stream = io.StringIO()
        self.print_to(Printer(stream))
        return stream.getvalue().rstrip("\n")

    def print_to(self, printer: Printer) -> None:
        """Write a table, the problems of each level, and the level to take, with colours."""
        printer.line(
            f"{self.steps} steps on {self.device}, seed {self.seed}; compared with the same run in "
            f"{self.reference}"
        )
        printer.line()
        printer.table(_HEADER, [_row(level) for level in self.levels], alarming=len(_HEADER) - 1)
        printer.line()
        for level in self.levels:
            for problem in level.problems:
                printer.line(f"{level.level}: {problem.what}")
            for remark in level.remarks:
                printer.line(f"{level.level}, healthy: {remark.what}")
        for note in self.notes:
            printer.line(f"note: {note}")
        printer.line(f"recommended: {self.recommended or 'none'}. {self.reason}")

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a dict for `json.dumps`; inf and NaN become strings."""
        data: dict[str, Any] = {"healthy": self.is_healthy, **asdict(self)}
        for level, row in zip(self.levels, data["levels"], strict=True):
            row["healthy"] = level.is_healthy
        found: dict[str, Any] = plain(data)
        return found

    def write_html(self, path: str | Path) -> Path:
        """Write a self-contained HTML page, and return its path.

        Raises:
            AmpValueError: the file cannot be written, or another kind of file is there.
        """
        return lab.write_page(Path(path), page(self.to_json()))


_HEADER = (
    *("level", "loss gap", "error", "worst module", "its error", "skips", "still", "ms", "MB", ""),
)


def _row(level: LevelResult) -> tuple[str, ...]:
    if not level.losses:
        return (level.level, *["-"] * (len(_HEADER) - 2), "not run")
    worst = level.worst_module
    skipped = f"{level.skipped}+{level.scale_search}" if level.scale_search else f"{level.skipped}"
    return (
        level.level,
        _number(level.loss_gap),
        _number(level.gradient_error),
        worst.module if worst else "-",
        _number(worst.error if worst else None),
        skipped,
        "-" if level.still is None else f"{level.still:.1%}",
        "-" if level.seconds is None else f"{1e3 * level.seconds:.1f}",
        f"{level.memory.get('total', 0) / 1e6:.3g}",
        "" if level.is_healthy else "worse",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def page(comparison: dict[str, Any]) -> str:
    """Return the page as HTML, from the result of `Comparison.to_json`."""
    data = json.dumps(comparison, separators=(",", ":"))
    text = (_HERE / "compare.html").read_text(encoding="utf-8")
    for mark, content in (
        ("/*CSS*/", lab.style() + (_HERE / "compare.css").read_text(encoding="utf-8")),
        ("/*VERSION*/", amp.__version__),
        ("/*JS*/", (_HERE / "compare.js").read_text(encoding="utf-8")),
        ("/*DATA*/", data.replace("<", "\\u003c")),  # last: names may contain any text, even a mark
    ):
        text = text.replace(mark, content)
    return text
