"""When masters are written to the model, and which: in a step, and after other code has changed them.

Other code is SAM's two steps, Schedule-Free's `eval`, averages. Methods of the optimizer, and of
wrappers around it, are followed by a write-back. Any other change of a master shows in its version or
its address, which the model's forward checks. A forward in compiled code does not check; then the next
`scale_loss` warns.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from amp.errors import warn
from amp.kernels.tensor_lists import local
from amp.lazy import kernels
from amp.masters.whole import MasterWeights
from amp.training.gradients import Gradients
from amp.training.parameter_lists import ParameterLists


class WriteBack:
    """Writes the masters of one optimizer to the model.

    Args:
        gradients: the gradients of the optimizer.
        masters: the session's.
    """

    def __init__(self, gradients: Gradients, masters: MasterWeights) -> None:
        self._gradients = gradients
        self._masters = masters
        self._lists = gradients.lists
        self._traces: list[int] = []
        self._is_stepping = False
        self._has_looked = False
        self._has_warned = False
        self._was_evaluated = False
        self._index: dict[int, int] = {}
        """The place of each master in `_lists`, by its id."""
        masters.write_backs.append(weakref.ref(self))

    # In a step.

    def after_step(self, without: Collection[Tensor] = ()) -> None:
        """Write masters to the model. A frozen parameter without a gradient stays as it is.

        Args:
            without: masters that the step itself has written.
        """
        self._masters.write_back(self._trained(without))

    def if_changed_in_step(self) -> None:
        """Write the masters that a step, or a hook of it, has changed, and no others.

        A backward that is under way still needs the others as they are, and hooks may write the model.
        """
        self._masters.write_back(self._changed())

    def _trained(self, without: Collection[Tensor] = ()) -> list[Tensor]:
        lists = self._gradients.lists
        return [
            master
            for master, model in zip(lists.masters, lists.models, strict=True)
            if master not in without and (model.requires_grad or master.grad is not None)
        ]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run the optimizer's step, which itself writes masters to the model."""
        try:
            self._is_stepping = True
            if self._was_evaluated:  # weights are often written around an evaluation, and restored
                self._masters.traces.suspect(self._gradients.lists.masters)
                self._was_evaluated = False
            self._masters.are_ahead = True
            self._masters.given_out.difference_update(self._gradients.lists.masters)
            with self._masters.as_they_are_kept():
                yield
        finally:
            self._is_stepping = self._masters.are_ahead = False
        self.note()

    # Outside of a step.

    def note(self) -> None:
        """Note that the masters are written to the model now. No host sync."""
        if self._lists is not self._gradients.lists or not self._index:
            self._lists = self._gradients.lists
            self._index = {id(master): i for i, master in enumerate(self._lists.masters)}
        self._traces = self._traces_now()
        self._has_looked = False

    def _traces_now(self) -> list[int]:
        masters = self._lists.masters
        values = masters if self._lists.are_plain else list(map(local, masters))
        return [*[value._version for value in values], *map(Tensor.data_ptr, values)]

    def has_changed(self, master: Tensor) -> bool:
        """Whether other code has changed a master."""
        index = self._index.get(id(master))
        if index is None or self._is_stepping:
            return False
        values, count = local(master), len(self._index)
        return [values._version, values.data_ptr()] != self._traces[index::count]

    def _changed(self) -> list[Tensor]:
        """Return the masters that other code has changed."""
        now = self._traces_now()
        if now == self._traces:
            return []
        masters = self._lists.masters
        pairs = enumerate(zip(now, self._traces, strict=True))
        changed = [i % len(masters) for i, (a, b) in pairs if a != b]
        return [masters[i] for i in dict.fromkeys(changed)]

    def before_forward(self, is_training: bool) -> None:
        """Let model and masters agree: in what is frozen, gradients and values. No host sync."""
        self._was_evaluated |= not (is_training or torch.is_grad_enabled())
        lists = self._gradients.lists
        self._masters.follow_requires_grad(lists.masters, lists.models)
        self._gradients.of_masters.look_after_step()
        self.if_changed()
        self._write_given_out()
        self._has_looked = True

    def if_changed(self) -> None:
        """Write the masters that other code has changed to the model. No host sync."""
        changed = [] if self._is_stepping else self._changed()
        if changed:
            self._masters.write_back(changed)
            self.note()

    def _write_given_out(self) -> None:
        """Write masters that other code was given, and may have changed without a trace."""
        masters = self._masters
        if masters.given_out and not self._is_stepping:
            written = list(filter(masters.may_have_changed, self._lists.masters))
            masters.write_back(written)
            masters.given_out.difference_update(written)
            self.note()

    def before_a_look(self) -> None:
        """Let masters and model agree, before other code looks at the masters. No host sync."""
        lists = self._gradients.look_at_groups()
        if lists.masters and not self._is_stepping:
            with self._masters.lock:
                self.if_changed()
                self._write_given_out()
                # Before a step this would be the hot path: scripts clip by what they get here.
                compares = not self._gradients.of_masters.are_there()
                for master in lists.masters:
                    self._masters.follow(master, compares=compares)
                if self._masters.are_whole:
                    self._masters.given_out.update(lists.masters)

    def of_all(self) -> None:
        """Write all masters to the model. No host sync."""
        with self._masters.lock:
            self._masters.write_back(self._gradients.look_at_groups().masters)
            self.note()

    def warn_if_missed(self) -> None:
        """Warn, once, if a master has changed since the forward whose loss is about to be scaled."""
        if not (self._is_stepping or self._has_looked or self._has_warned) and self._changed():
            self._has_warned = True
            warn(
                "master weights were changed outside of optimizer.step, and the last forward did not "
                "see it, as in compiled code: it ran on the old weights. Change the model's parameters "
                "instead, under torch.no_grad(): masters follow them in the next step"
            )

    @contextmanager
    def around_method(self) -> Iterator[None]:
        """Run a method of the optimizer, or of a wrapper, that may change masters. No host sync."""
        lists = self._gradients.look_at_groups()
        if self._is_stepping or not lists.masters:
            yield
            return
        with self._masters.lock, self._masters.as_float32(self._up_to_date(lists)):
            self.note()
            try:
                self._masters.are_ahead = True
                yield
            finally:
                self._after_method()
                self._masters.are_ahead = False
        self.note()

    def _up_to_date(self, lists: ParameterLists) -> Sequence[Tensor]:
        """Make masters and model agree, and return the masters."""
        self.if_changed()
        self._masters.follow_requires_grad(lists.masters, lists.models)
        self._masters.follow_all(lists.masters, lists.models)
        return lists.masters

    def _after_method(self) -> None:
        """Write all masters to the model, because changes through `.data` leave no trace.

        Masters without a trace of a change are written without one too: a graph that is still to be run
        backward stays valid if nothing was changed.
        """
        lists = self._gradients.lists
        changed = dict.fromkeys(self._changed() if self._masters.are_whole else lists.masters)
        self._masters.write_back(changed)
        model_of = dict(zip(lists.masters, lists.models, strict=True))
        rest = self._trained(changed)
        sources = [local(master).detach() for master in rest]
        kernels.master_copy.master_copy(sources, [local(model_of[master]).data for master in rest])
