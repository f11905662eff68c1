"""The observer of every session that logs overflows, and notes whose gradients were bad."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from amp.observers import Observer
from amp.training.attachment import AttachedOptimizer
from amp.training.bad_gradients import bad_flags
from amp.training.recorder import Transition
from amp.training.scaler import LossScaler


class OverflowLog(Observer):
    """Logs skipped steps, warns of endless overflows, and notes which gradients were inf or NaN."""

    def verdicts(self, session: Any, scaler: LossScaler, rows: Sequence[Transition]) -> None:
        """Log the overflows that the host has learnt of, and warn once if they do not end."""
        for row in rows:
            if row.overflow:
                session.log(
                    logging.WARNING,
                    "Gradient overflow.  Skipping step, loss scaler %d "
                    + ("reducing loss scale to %s" if scaler.config.dynamic else "stays at %s"),
                    scaler.loss_id,
                    row.next_scale,
                )
        scaler.recorder.warn_if_endless(session.properties.diagnose is not None)

    def step_ends(self, attached: AttachedOptimizer) -> None:
        """Note in the record of each scaler which of its updates this step belongs to. No host sync."""
        verdicts = attached.step.verdicts
        for scaler in {verdict.scaler: None for verdict in verdicts}:
            scaler.recorder.note_step(v.step for v in verdicts if v.scaler is scaler)
        overflows = [verdict for verdict in verdicts if verdict.is_known_overflow]
        if overflows and (pairs := list(attached.gradients.of_model())):
            name_of = {id(p): name for (_, name), p in attached.owner.named_parameters().items()}
            names = [name_of.get(id(parameter), "a parameter of no model") for parameter, _ in pairs]
            flags = bad_flags(grad for _, grad in pairs)
            for verdict in overflows:
                verdict.scaler.recorder.note_bad(verdict.step, names, flags)
