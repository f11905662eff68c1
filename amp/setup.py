"""The work of one `initialize`: its changes to models, optimizers and torch, and how to undo them."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from amp import active, arguments, dcp
from amp.casting import hints
from amp.casting.memory_checks import check_masters, check_memory, named_tensors
from amp.casting.sharded import fsdp1_groups, reshard
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpRuntimeError, warn
from amp.kernels.host_lists import load_in_background
from amp.masters import averages
from amp.masters.state_dict_hooks import install_hooks
from amp.moving_tensors import MovingTensors
from amp.patching import Patches
from amp.state_checks import remember
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training import hidden_gradients, misuse, synchronization
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.clipping import patch_clipping
from amp.training.step import unattached
from amp.training.wrapped_optimizers import innermost
from amp.undo import Undo


class Setup:
    """The changes that prepare some models and optimizers for a session.

    Args:
        session: the session.
        models: the models, as `arguments.as_models` returns them.
        optimizers: the optimizers, as `arguments.as_optimizers` returns them.
    """

    def __init__(self, session: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        self._session = session
        self._models = models
        self._optimizers = optimizers
        self._attached: list[AttachedOptimizer] = []
        self._undo = Undo(session.masters.memory)

    def check(self, allow_low_precision: bool) -> None:
        """Raise AmpError for what cannot be prepared, and warn of float64 models, which stay so."""
        session, properties = self._session, self._session.properties
        for model in self._models:
            _check_not_cast(model)
            reshard(model)
            arguments.check_model(model, properties, allow_low_precision)
            for strategy in session.strategies:
                strategy.check_model(model)
        models = [*session.live_models(), *self._models]
        arguments.check_rules(properties.rules, models if self._models else [])
        arguments.check_optimizers(self._optimizers, models, properties, session.process_groups)
        groups = [group for each in map(innermost, self._optimizers) for group in each.param_groups]
        check_masters(chain.from_iterable(group["params"] for group in groups), models, properties)
        check_memory(self._models, properties)
        for message in arguments.advise_on_float64(self._models, properties):
            warn(message)

    def run(self) -> None:
        """Make all changes; if one fails, undo all of them."""
        session, undo = self._session, self._undo
        known = len(session.models), len(session.attached)
        session.undos.append(undo)
        undo.callback(_let_go, self._attached, undo)  # last, when parameters have their old dtype
        try:
            active.add(session)
            undo.memory.note(named_tensors(self._models))
            self._prepare_models()
            self._attach()
            self._watch_models()
            self._finish()
            undo.has_succeeded()
            load_in_background()  # of which nothing has to be undone
        finally:
            undo.memory.forget()
            if not undo.is_for_close:
                if not any(known):
                    active.remove(session)
                undo.roll_back()
                del session.models[known[0] :], session.attached[known[1] :]

    def _prepare_models(self) -> None:
        """Give models their precision, and patch functions that would silently be wrong."""
        session, undo = self._session, self._undo
        for strategy in session.strategies:
            strategy.begin(undo)
            for model in self._models:
                strategy.prepare_model(model, undo)
        self._patch()
        if session.properties.has_half:
            install_hooks(session.masters, self._models, undo)

    def _patch(self) -> None:
        """Patch functions of torch that would silently be wrong; see docs/architecture.md."""
        session, properties, patches = self._session, self._session.properties, Patches()
        self._undo.always(averages.forget_averages)
        self._undo.always(patches.undo)
        history = None if session.fp8 is None else session.fp8.history
        is_scaled = not session.scalers[0].config.is_identity
        has_masters = bool(properties.master_weights)
        if is_scaled or (has_masters and not HAS_GRAD_DTYPE):
            patch_clipping(self._undo, has_masters)
        if is_scaled or has_masters:
            patches.install((*hidden_gradients.PATCHES, *misuse.PATCHES))
        if is_scaled or has_masters or (history is not None and history.recipe.reduce_amax):
            patches.install(synchronization.PATCHES)
        if properties.has_half:
            over_casts = Patches(order=1)  # which would read rounded weights
            self._undo.always(over_casts.undo)
            over_casts.install(averages.PATCHES)
        if properties.master_weights and dcp.is_in_use():
            patches.install(dcp.PATCHES)
        if properties.has_half or properties.patch_torch_functions:
            patches.install(hints.PATCHES)
        if not session.is_plain:
            self._undo.callback(unattached.forget)
            unattached.watch()

    def _attach(self) -> None:
        """Put masters into the optimizers, and wrap their methods."""
        session = self._session
        session.masters.note_casts(self._undo.before)
        for optimizer in self._optimizers:
            attached = AttachedOptimizer(optimizer, session)
            self._attached.append(attached)
            self._undo.callback(attached.detach)
            attached.attach(self._undo.before)

    def _watch_models(self) -> None:
        """Hook the models, so that the session sees their forwards, and lives as long as they do."""
        session, undo = self._session, self._undo
        for model in self._models:
            undo.callback(session.watch_forwards(model))
        session.models.extend(map(weakref.ref, self._models))
        if session.properties.master_weights and self._models:
            session.observers.append(watch := MovingTensors(self._models))
            undo.if_it_fails.append(functools.partial(session.observers.remove, watch))
        session.synchronization.watch(self._models)
        if session.properties.protect_buffers and session.properties.loss_scaling.check:
            session.running_stats.watch(self._models, undo)
        if session.fp8 is not None and session.fp8.history is not None:
            session.fp8.history.groups_of_data = session.synchronization.groups_of_ddps

    def _finish(self) -> None:
        """Do the rest, which needs the models and the optimizers, and log advice."""
        session, undo = self._session, self._undo
        for one in self._attached:
            undo.if_it_fails.append(remember(one.optimizer.state.values()))
            one.recast_state(session.properties.state_dtype)
            one.note_parameters()
        self._advise()
        groups = fsdp1_groups(self._models)
        for scaler in session.scalers:
            take_back = functools.partial(setattr, scaler, "process_groups", scaler.process_groups)
            undo.if_it_fails.append(take_back)
            scaler.process_groups += groups
        session.attached.extend(self._attached)

    def _advise(self) -> None:
        session = self._session
        for message in filter(None, [strategy.summary() for strategy in session.strategies]):
            session.log(logging.INFO, message)
        on_devices = arguments.advise_on_devices(session.properties, self._models)
        on_eps = [arguments.advise_on_eps(one.optimizer) for one in self._attached]
        for message in chain(on_devices, *on_eps):
            session.log(logging.WARNING, message)


def _check_not_cast(model: nn.Module) -> None:
    """Raise AmpRuntimeError for a model that a session has cast, for example in a cell run twice."""
    session = active.session_of(model)
    if session is not None and session.properties.cast_model_type in LOW_PRECISION:
        raise AmpRuntimeError(
            f"this {type(model).__name__} was initialized already, at opt_level="
            f"{session.properties.opt_level!r}, and that session has cast it. Go on with the result of "
            "that call, or make a new model and optimizer; in a notebook, do it in the same cell. To "
            "start again from these weights, close that session: amp.get_session(optimizer).close()"
        )


def _let_go(attached: Iterable[AttachedOptimizer], undo: Undo) -> None:
    for one in attached:
        one.let_go(has_trained=undo.is_for_close)
