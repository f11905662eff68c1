"""Running a step repeatedly from the same state, without updating the model.

All state of the step is restored after each run: weights, buffers, gradients, optimizer state, loss
scales, amax history, and the random number generators. `optimizer.step` does nothing meanwhile, and a
`scale_loss` block drops its gradients after it has checked them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp.casting.by_model import CastModel
from amp.casting.by_op import CastOps
from amp.casting.cast_hooks import ModelInputs, cast_inputs_to
from amp.casting.module_rules import run_in_float32
from amp.casting.regions import disable_casts
from amp.diagnosis.diagnose import open_scale
from amp.diagnosis.places import modules_of, unwrapped
from amp.diagnosis.shadow import Shadow
from amp.dtypes import LOW_PRECISION
from amp.kernels.host_lists import grads_of, store_grads
from amp.masters.fp32_values import values_of
from amp.profiles.rules import Rule
from amp.session import Session
from amp.training.attached_optimizer import AttachedOptimizer
from amp.trials.random_numbers import keep_random_numbers


@dataclass
class Replay:
    """Runs one step of a session's models repeatedly.

    Attributes:
        step: runs a forward, `scale_loss` and a backward, on the same batch each time.
        models: the models, by the prefix of the names of their modules.
        owner: the session.
        attached: its optimizers, whose gradients are restored too.
        runs: how many runs were made.
    """

    step: Callable[[], Any]
    models: dict[str, nn.Module]
    owner: Session
    attached: Sequence[AttachedOptimizer] = ()
    runs: int = 0

    def run(
        self,
        modules: Sequence[str] = (),
        scale: float | None = None,
        arguments: Sequence[str] = (),
    ) -> tuple[Shadow, Any]:
        """Run the step with some modules in FP32, at a loss scale; return its shadow, and its result.

        Args:
            modules: the modules' names; "" is the whole model, and what runs outside of it.
            scale: the loss scale; None keeps the present scale.
            arguments: names of arguments of the models that are not cast.

        Raises:
            Exception: an error of the step; the state is restored then too.
        """
        self.runs += 1
        with ExitStack() as stack:
            self._keep_all(stack)
            self._run_in_float32(modules, stack)
            if arguments:
                self._uncast(arguments, stack)
            shadow = Shadow(self.models, functools.partial(open_scale, self.attached))
            stack.enter_context(shadow)
            if scale is not None:
                for scaler in self.owner.scalers:
                    scaler.set_scale(scale)
            return shadow, self.step()

    # Each of these is undone when the stack ends.

    def _keep_all(self, stack: ExitStack) -> None:
        """Keep all state that a step changes, and disable `optimizer.step`."""
        for ddp in _ddps_around(list(self.models.values())):  # each rank runs as often as it needs
            stack.enter_context(ddp.no_sync())
        keep_random_numbers(stack)
        for model in self.models.values():
            for x in (*model.parameters(), *model.buffers()):
                stack.callback(_put_back, x, x.data, x.detach().clone(), x.grad)
        for one in self.attached:
            _keep_optimizer(one, stack)
        for scaler in self.owner.scalers:
            stack.callback(scaler.snapshot())
        if self.owner.fp8 is not None and (history := self.owner.fp8.history) is not None:
            stack.callback(history.snapshot())
        for session in {self.owner, *(one.owner for one in self.attached)}:
            stack.callback(setattr, session, "is_rehearsal", session.is_rehearsal)
            session.is_rehearsal = True

    def _run_in_float32(self, names: Sequence[str], stack: ExitStack) -> None:
        """Run modules in FP32, like a rule for each."""
        modules = modules_of(self.models)
        chosen = [modules[name] for name in names]
        caster = next((x for x in self.owner.strategies if isinstance(x, CastOps)), None)
        is_cast = any(isinstance(x, CastModel) for x in self.owner.strategies)
        if caster is not None and any(module in self.models.values() for module in chosen):
            stack.enter_context(disable_casts())
        for module in chosen:
            if is_cast:
                self._upcast(module, stack)
            if caster is not None:
                rule = Rule("module", "*", torch.float32, "a trial")
                stack.callback(run_in_float32(module, [rule], caster))

    def _uncast(self, arguments: Sequence[str], stack: ExitStack) -> None:
        """Do not cast arguments of the models."""
        for hook in [x for model in self.models.values() for x in model._forward_pre_hooks.values()]:
            if isinstance(hook, ModelInputs):
                kept = hook.which if isinstance(hook.which, tuple) else ()
                stack.callback(setattr, hook, "which", hook.which)
                hook.which = (*kept, *arguments)

    def _upcast(self, module: nn.Module, stack: ExitStack) -> None:
        """Replace a module's weights by FP32 ones with the values of their masters.

        The original weights keep their dtype: a change of dtype would lose the hooks on their gradient,
        and DistributedDataParallel would stop to reduce it.
        """
        wide: dict[int, Tensor] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype in LOW_PRECISION:
                values, is_weight = values_of(tensor).clone(), isinstance(tensor, nn.Parameter)
                wide[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_weight else values
        for holder in (each for model in self.models.values() for each in model.modules()):
            for name, held in [*holder._parameters.items(), *holder._buffers.items()]:
                if id(held) in wide:
                    stack.callback(setattr, holder, name, held)
                    setattr(holder, name, wide[id(held)])
        for inner in module.modules():
            stack.callback(cast_inputs_to(inner, torch.float32))


def _ddps_around(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDPs around models, which a session does not know where ranks need not agree."""
    found = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    return [ddp for ddp in found if any(unwrapped(ddp) is model for model in models)]


@torch.no_grad()
def _put_back(x: Tensor, data: Tensor, values: Tensor, grad: Tensor | None) -> None:
    """Restore the memory, the values and the gradient of a tensor."""
    x.grad = None
    x.data = data
    if not torch.equal(x, values):
        x.copy_(values)
    x.grad = grad


def _keep_optimizer(attached: AttachedOptimizer, stack: ExitStack) -> None:
    """Restore gradients of masters, deferred ones too, and group options, when a stack ends."""
    for group in attached.optimizer.param_groups:
        stack.callback(group.update, {k: v for k, v in group.items() if k != "params"})
    gradients = attached.gradients
    for pair in gradients.parameters.pairs.pairs:
        stack.callback(setattr, pair, "grad", pair.grad)
    masters = gradients.parameters.masters
    stack.callback(store_grads, masters, grads_of(masters))
    for each in (gradients, gradients.deferral):
        stack.callback(vars(each).update, dict(vars(each)))
