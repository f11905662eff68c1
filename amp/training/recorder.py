"""Decisions of a device that the host learns later: updates of a scale, and bad gradients.

A `FlightRecorder` keeps the recent updates of a loss scaler, its streaks of overflows, and the warning
about endless ones. Nothing here makes the host wait, unless it is asked to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.errors import first_few, warn

SCALE, INVERSE, GOOD_STEPS, HYSTERESIS, FOUND_INF, OVERFLOWS, UPDATES = range(7)
"""The index of each number in a scaler's state; see `amp.kernels.update_scale`."""
STATE_SIZE = 7
KEPT = 256
"""How many updates are kept, and how many copies that nobody asks for."""
BELOW_ONE = 3
"""How many overflows in a row at a scale below 1 are a streak, whatever the patience."""
SETTLED = 16
"""A search for the loss scale ends before so many overflows in a row: 65536 is halved to 1 by then."""


class HostCopies:
    """A queue of copies on their way from a device to the host.

    Attributes:
        underway: the copies: a note on each, a list or a tensor on the host, and an event that tells
            when it is there.
    """

    def __init__(self) -> None:
        self.underway: deque[tuple[Any, Any, torch.cuda.Event | None]] = deque(maxlen=KEPT)

    def send(self, tensor: Tensor | list[float], about: Any = None) -> None:
        """Start to copy what a tensor holds now. The host does not wait for the device.

        Nothing is sent in CUDA graph capture: the host does not see what a replay does.

        Args:
            tensor: a few numbers; a list if the host has them.
            about: what `arrived` returns with it: for its `until` a number, larger for later copies.
        """
        if isinstance(tensor, list) or not tensor.is_cuda:
            self.underway.append((about, tensor if isinstance(tensor, list) else tensor.clone(), None))
            return
        with torch.cuda.device(tensor.device):
            if torch.cuda.is_current_stream_capturing():
                return
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.underway.append((about, copy, event))

    def arrived(self, wait: bool = False, until: int = -1) -> list[tuple[Any, list[float]]]:
        """Return the copies that came since the last call, and what they are about, oldest first.

        Args:
            wait: wait for copies that are still under way. Otherwise the host does not wait for a CUDA
                device; for other devices, which have no pinned memory here, it does.
            until: wait for copies with numbers up to this one.
        """
        if self.underway and self.underway[0][2] and torch.cuda.is_current_stream_capturing():
            return []  # there events cannot be queried
        values = []
        while self.underway:
            about, copy, event = self.underway[0]
            if event is not None:
                if wait or (until >= 0 and about <= until):
                    event.synchronize()
                elif not event.query():  # type: ignore[no-untyped-call]
                    break
            values.append((about, copy if isinstance(copy, list) else copy.tolist()))
            self.underway.popleft()
        return values


_LISTS = 8
"""How many lists are remembered; there are several if some parameters get no gradient at times."""

Names = Callable[[Sequence[Tensor]], list[str]]


class Transition(NamedTuple):
    """One update of a loss scaler.

    Attributes:
        step: its number, from 0.
        loss_id: the scaler's.
        scale: what the loss was multiplied by.
        overflow: whether a gradient was inf or NaN, so that the step was skipped.
        in_a_row: how many overflows there were in a row, with this one.
        next_scale: the scale after it.
        norm: the norm of the unscaled gradients if it was computed for `max_grad_norm`, else None.
        bad: names of the parameters whose gradients were inf or NaN then, and have not been since.
    """

    step: int
    loss_id: int
    scale: float
    overflow: bool
    in_a_row: int
    next_scale: float
    norm: float | None = None
    bad: tuple[str, ...] = ()


class FlightRecorder:
    """The last updates of a scaler that have reached the host, and which gradients were bad.

    Args:
        loss_id: the scaler's.
        patience: how many overflows in a row are a streak.
        scale: the first scale.

    Attributes:
        rows: the last 256 updates, oldest first.
        streak: the update that made the last streak.
        streaks: the steps at which streaks were reached, each streak once.
        scale: the scale after the newest row.
        overflows: how many there were.
        states: the states after updates that are on their way to the host, each about the number of its
            update, with the norm of the unscaled gradients if it is known.
        bad: the last update at which each of some gradients was bad, NaN for none, on their way to the
            host, about the names of the parameters.
    """

    def __init__(self, loss_id: int, patience: int, scale: float) -> None:
        self.rows: deque[Transition] = deque(maxlen=KEPT)
        self.streaks: deque[int] = deque(maxlen=KEPT)
        self.streak: Transition | None = None
        self.scale = scale
        self._loss_id, self._patience = loss_id, patience
        self._below_one = 0
        self._is_streak = self._has_warned = False
        self.overflows = 0
        self._skipped = 0
        self._counted_to = -1
        self._overflowed: set[int] = set()
        self._steps: deque[frozenset[int]] = deque()
        """The updates of each step that `_skipped` does not count yet."""
        self.states, self.bad = HostCopies(), HostCopies()
        self._bad_steps: dict[str, int] = {}
        """What has arrived of `bad`, by the parameter's name."""
        self._logs: dict[int, tuple[Sequence[Tensor], Tensor, Names]] = {}

    # Recording.

    def log_of(self, parameters: Sequence[Tensor], names: Names) -> Tensor:
        """Return the tensor in which kernels log the last bad update of each parameter's gradient.

        They do where the host learns of an overflow too late to check the gradients.

        Args:
            parameters: the same list each time, of one device.
            names: returns the names of parameters.

        Returns:
            float32 `[n]`, NaN at first.
        """
        if id(parameters) not in self._logs:
            if len(self._logs) == _LISTS:
                del self._logs[next(iter(self._logs))]
            log = torch.full(
                (len(parameters),), math.nan, dtype=torch.float32, device=parameters[0].device
            )
            self._logs[id(parameters)] = parameters, log, names
        return self._logs[id(parameters)][1]

    def note_step(self, updates: Iterable[int]) -> None:
        """Note that an optimizer has stepped, or skipped a step, after these updates.

        Optimizers that step after the same updates count once.
        """
        numbers = frozenset(updates)
        if max(numbers) > self._counted_to and numbers not in self._steps:
            self._steps.append(numbers)

    # Reading.

    def learn(self, wait: bool = False, until: int = -1) -> list[Transition]:
        """Return the updates that have reached the host since the last call.

        Args:
            wait: wait for updates that are still under way. Otherwise there is no host sync.
            until: wait for updates up to this one.
        """
        rows = [
            self._record(step, state[SCALE], state[OVERFLOWS], *state[STATE_SIZE:])
            for step, state in self.states.arrived(wait, until)
        ]
        if any([row.overflow for row in rows]):  # noqa: C419 (is faster)
            for parameters, log, names in self._logs.values():
                self.bad.send(log, names(parameters))
        for known, steps in self.bad.arrived(wait) if self.bad.underway else ():
            named = zip(known, steps, strict=True)
            self._bad_steps |= {name: int(step) for name, step in named if not math.isnan(step)}
        return rows

    def _record(
        self, step: int, next_scale: float, in_a_row: float, norm: float | None = None
    ) -> Transition:
        """Note an update, and return it as a row."""
        overflow = in_a_row > 0
        row = Transition(step, self._loss_id, self.scale, overflow, int(in_a_row), next_scale, norm)
        self.rows.append(row)
        if overflow:
            self.overflows += 1
            self._overflowed.add(step)
        while self._steps and (last := max(self._steps[0])) < step:  # not yet for this one
            self._skipped += not self._steps.popleft().isdisjoint(self._overflowed)
            self._overflowed = {number for number in self._overflowed if number > last}
            self._counted_to = last
        self._below_one = self._below_one + 1 if overflow and self.scale < 1.0 else 0
        is_streak = in_a_row >= self._patience or self._below_one >= min(BELOW_ONE, self._patience)
        if is_streak and not self._is_streak:
            self.streaks.append(step)
            self.streak = row
        self._is_streak = overflow and (self._is_streak or is_streak)
        self.scale = next_scale
        return row

    def warn_if_endless(self, is_watched: bool = False) -> None:
        """Warn once, after a streak of overflows; `is_watched` says that a diagnosis follows."""
        last = self.streak
        if last is None or self._has_warned:
            return
        names = [name for name, step in self._bad_steps.items() if step >= last.step]
        if self.bad.underway and not names:
            return  # they are about to arrive
        self._has_warned = True
        scales = ", ".join(f"{x.scale:g}" for x in self.rows if last.step - 6 < x.step <= last.step)
        is_settled = last.scale < 1.0 or last.in_a_row >= SETTLED
        told = ", so scaling is not the cause" if is_settled else ""
        bad = f" The gradients of {first_few(names, most=4)} were inf or NaN." if names else ""
        what_to_do = (
            "The report of the next iteration follows"
            if is_watched
            else "Put `with amp.diagnose(model, optimizer) as report:` around one step and print the "
            "report, or pass diagnose='on_overflow' to amp.initialize"
        )
        warn(
            f"{last.in_a_row} overflows in a row: gradients were inf or NaN at loss scales of {scales}"
            f"{told}.{bad} {what_to_do}: it names the op that makes them, its line, and what to do. "
            "amp.history() has the last steps."
        )

    def history(self) -> list[Transition]:
        """Return the last updates that have reached the host, oldest first. No host sync."""
        bad: dict[int, list[str]] = {}
        for name, step in self._bad_steps.items():
            bad.setdefault(step, []).append(name)
        return [row._replace(bad=tuple(bad.get(row.step, ()))) for row in self.rows]

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped, of those whose updates have reached the host."""
        newest = self.rows[-1].step if self.rows else -1
        come = [numbers for numbers in self._steps if max(numbers) <= newest]
        return self._skipped + sum(not numbers.isdisjoint(self._overflowed) for numbers in come)
