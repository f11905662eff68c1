"""What a comparison of levels has found: text, JSON and a page of it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amp.numerics.text import Printer, plain
from amp.trials import page


@dataclass(frozen=True)
class Problem:
    """Why a level is not healthy.

    Attributes:
        cause: `not_run`, `loss_not_finite`, `steps_skipped`, `loss_gap`, `module_stands_out`,
            `gradient_error` or `weights_stand_still`. The names are stable.
        what: the same in a sentence, with the numbers.
    """

    cause: str
    what: str


@dataclass(frozen=True)
class ModuleError:
    """How far the gradient of a module's own parameters is from the reference's.

    Attributes:
        module: its name.
        error: |g - r| / |r| at the first step, where the weights are the same; None for a gradient
            that is 0 but for rounding.
        cosine: of the angle between both, at the first step.
        later_error: the same at the last step. The weights have gone apart by then, each run along
            its own way, and this says how far.
        later_cosine: likewise.
        stands_out: whether the error is far above what is usual at this level, or the largest where
            the error of all gradients together is too large.
    """

    module: str
    error: float | None
    cosine: float | None
    later_error: float | None = None
    later_cosine: float | None = None
    stands_out: bool = False


@dataclass(frozen=True)
class LevelResult:
    """One level of a comparison.

    Attributes:
        level: as it was given.
        problems: why it is not healthy; empty if it is.
        remarks: what deserves a look, and is no reason against it.
        losses: of each step, by the name of the loss.
        loss_gap: how far the loss is above the reference's, a mean over the last third of the steps;
            of the loss where that is worst.
        loss_gap_allowed: the most that is within noise, for that loss.
        gradient_error: |g - r| / |r| of all gradients of the first step, as one vector.
        gradient_cosine: of the angle between both.
        median_error: the median of the modules' errors at the first step.
        later_error: as `gradient_error`, at the last step.
        later_cosine: likewise.
        modules: the error of each module.
        skipped: how many steps were skipped.
        scale_search: how many were skipped before, in a first run, until the loss scale fitted; the
            run that is shown starts from the scale that was found.
        still: the share of weights that a step left as they were although their gradient is not 0.
        seconds: the median of a step.
        memory: bytes, see `amp.trials.observing.Record`, and their `total`.
    """

    level: str
    problems: tuple[Problem, ...] = ()
    remarks: tuple[Problem, ...] = ()
    losses: dict[str, list[float]] = field(default_factory=dict)
    loss_gap: float | None = None
    loss_gap_allowed: float | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    median_error: float | None = None
    later_error: float | None = None
    later_cosine: float | None = None
    modules: tuple[ModuleError, ...] = ()
    skipped: int = 0
    scale_search: int = 0
    still: float | None = None
    seconds: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    @property
    def was_run(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.losses)

    @property
    def worst_module(self) -> ModuleError | None:
        """The module whose gradient is furthest off at the first step."""
        known = [each for each in self.modules if each.error is not None]
        return max(known, key=lambda each: each.error or 0.0, default=None)


@dataclass(frozen=True)
class Comparison:
    """What `amp.compare` has found.

    Attributes:
        levels: each level, O0 first.
        recommended: the cheapest healthy level on this hardware; None if there is none.
        reason: why that one, in a sentence.
        reference: what the levels were compared with: `FP64` or `FP32`.
        reference_losses: the losses of the reference.
        steps: how many steps each run had.
        seed: the seed of every run.
        device: where the runs were made: `cpu`, `cuda`.
        notes: what else a reader should know.
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
        """Whether all levels are."""
        return all(level.is_healthy for level in self.levels)

    def __getitem__(self, level: str) -> LevelResult:
        return next(each for each in self.levels if each.level == level)

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return a table, what was found at each level, and which level to take."""
        stream = io.StringIO()
        self.print_to(Printer(stream))
        return stream.getvalue().rstrip("\n")

    def print_to(self, printer: Printer) -> None:
        """Write the same, with colours if there are any."""
        printer.line(
            f"{self.steps} steps on {self.device}, seed {self.seed}; compared with the same run in "
            f"{self.reference}"
        )
        printer.line()
        printer.table(_HEADER, [_row(level) for level in self.levels], alarming=len(_HEADER) - 1)
        printer.line()
        for line in self._lines():
            printer.line(line)

    def _lines(self) -> Iterator[str]:
        for level in self.levels:
            yield from (f"{level.level}: {problem.what}" for problem in level.problems)
            yield from (f"{level.level}, healthy: {remark.what}" for remark in level.remarks)
        yield from (f"note: {note}" for note in self.notes)
        yield f"recommended: {self.recommended or 'none'}. {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes; numbers that are not finite are strings."""
        data: dict[str, Any] = {"healthy": self.is_healthy, **asdict(self)}
        for level, row in zip(self.levels, data["levels"], strict=True):
            row["healthy"] = level.is_healthy
        found: dict[str, Any] = plain(data)
        return found

    def write_html(self, path: str | Path) -> Path:
        """Write a page that needs nothing else, and return its path.

        Raises:
            AmpValueError: it cannot be written.
        """
        return page.write(self.to_json(), path)


_HEADER = (
    *("level", "loss gap", "allowed", "gradient error", "worst module", "its error"),
    *("skipped", "still", "ms/step", "MB", ""),
)


def _row(level: LevelResult) -> tuple[str, ...]:
    if not level.was_run:
        return (level.level, *["-"] * (len(_HEADER) - 2), "not run")
    worst = level.worst_module
    skipped = f"{level.skipped}+{level.scale_search}" if level.scale_search else f"{level.skipped}"
    return (
        level.level,
        _number(level.loss_gap),
        _number(level.loss_gap_allowed),
        _number(level.gradient_error),
        worst.module if worst else "-",
        _number(worst.error if worst else None),
        skipped,
        "-" if level.still is None else f"{level.still:.1%}",
        "-" if level.seconds is None else f"{1e3 * level.seconds:.1f}",
        f"{level.memory.get('total', 0) / 1e6:.1f}",
        "" if level.is_healthy else "worse",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
