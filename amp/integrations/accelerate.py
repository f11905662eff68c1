"""Hugging Face Accelerate: `prepare(accelerator, model, optimizer, loader, opt_level="O2")`.

Accelerate uses `accelerator.scaler`, an object like torch's GradScaler, to scale losses, to step, and
for the state in a checkpoint. `Scaler` does this with a session, so `accelerator.backward`,
`accumulate`, `save_state` and `load_state` work unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp.integrations import missing

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing(__name__, "Accelerate", "huggingface") from error

import amp
from amp import active
from amp.errors import AmpRuntimeError
from amp.integrations.late_optimizers import LateOptimizers
from amp.profiles.options import OptLevel
from amp.training.wrapped_optimizers import is_optimizer

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU")
"""The distributed types of Accelerate in which each process has the whole model."""


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    opt_level: OptLevel = "O1",
    device_placement: list[bool] | None = None,
    **options: Any,
) -> Any:
    """Do what `accelerator.prepare` does, and prepare models and optimizers for an opt level.

    It takes the same objects, and returns them in the same order. In a single process they may have
    been prepared by `accelerator.prepare` already. A model and its optimizer may be prepared in two
    calls, the model first; the options of the first call are used.

    Args:
        accelerator: an accelerator with `mixed_precision="no"`.
        *objects: models, optimizers, data loaders, schedulers.
        opt_level: a level, an alias, or a path to a YAML profile.
        device_placement: as in `accelerator.prepare`.
        **options: as in `amp.initialize`.

    Returns:
        The result of `accelerator.prepare`.

    Raises:
        AmpRuntimeError: the accelerator casts or shards models itself, a model is in DDP already, or an
            optimizer comes before its model.
        AmpError: as in `amp.initialize`.
    """
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if is_optimizer(each) and not isinstance(each, nn.Module)]
    scaler = accelerator.scaler
    if not isinstance(scaler, Scaler):
        scaler = configure(accelerator, opt_level, **options)
    if optimizers and not models and scaler.late.session.closed:
        raise AmpRuntimeError(
            "an optimizer was prepared, and no model before it or with it. Prepare the model with it "
            "or first, and not in DataParallel: torchrun gives each GPU a process"
        )
    for model in models:
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        bare = getattr(bare, "_orig_mod", bare)  # of torch.compile
        if isinstance(model, DistributedDataParallel) and active.session_of(bare) is None:
            raise AmpRuntimeError(
                "the model was put into DistributedDataParallel by accelerator.prepare already. Call "
                "amp.integrations.accelerate.prepare instead of accelerator.prepare"
            )
        scaler.late.cast(bare)
    prepared = Accelerator.prepare(accelerator, *objects, device_placement=device_placement)
    each_prepared = prepared if len(objects) > 1 else (prepared,)
    if optimizers:
        wrapped = next((x for x in accelerator._models if isinstance(x, DistributedDataParallel)), None)
        scaler.take([each for each in each_prepared if isinstance(each, AcceleratedOptimizer)], wrapped)
    return prepared


def configure(accelerator: Accelerator, opt_level: OptLevel = "O1", **options: Any) -> Scaler:
    """Set the scaler of an accelerator, and return it; see `prepare`.

    Raises:
        AmpRuntimeError: the accelerator casts or shards models itself.
        AmpError: the level or an option is not valid.
    """
    if accelerator.mixed_precision != "no":
        raise AmpRuntimeError(
            f"the accelerator has mixed_precision='{accelerator.mixed_precision}', and would cast what "
            "amp casts. Pass mixed_precision='no', or leave out fp16=True and bf16=True"
        )
    if accelerator.distributed_type.name not in _PLAIN:
        raise AmpRuntimeError(
            f"amp.integrations.accelerate does not work with {accelerator.distributed_type.name}, "
            "which shards the model. Use DDP, or call amp.initialize as docs/distributed.md says"
        )
    accelerator.scaler = scaler = Scaler(LateOptimizers(opt_level, **options))
    return scaler


def end(accelerator: Accelerator) -> None:
    """Close the session of `prepare`: the model is FP32 again. Idempotent. The host waits."""
    if isinstance(accelerator.scaler, Scaler):
        accelerator.scaler.late.end()


class Scaler:
    """The `accelerator.scaler`, with the methods of torch's GradScaler that Accelerate calls.

    Args:
        late: the session.
    """

    def __init__(self, late: LateOptimizers) -> None:
        self.late = late
        self._wrappers: weakref.WeakSet[AcceleratedOptimizer] = weakref.WeakSet()

    def take(self, wrappers: list[AcceleratedOptimizer], model: nn.Module | None) -> None:
        """Prepare the optimizers in these wrappers, and make the wrappers use this scaler."""
        self.late.attach([each.optimizer for each in wrappers], model)
        for each in wrappers:
            # The constructor stores `optimizer.step`, so call it again now that amp has replaced it.
            AcceleratedOptimizer.__init__(each, each.optimizer, device_placement=False, scaler=self)
        self._wrappers.update(wrappers)

    def scale(self, loss: Tensor) -> SimpleNamespace:
        """Return an object whose `backward` runs the backward of the scaled loss."""
        return SimpleNamespace(backward=partial(self._backward, loss))

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of the scaled loss, and unscale the gradients. The host does not wait."""
        if not (self.late.optimizers or self.late.session.closed):
            raise AmpRuntimeError(
                "accelerator.backward was called, and no optimizer was prepared: amp unscales the "
                "gradients of optimizers. Pass the optimizer to amp.integrations.accelerate.prepare"
            )
        with self.late.running().scale_loss(loss, self.late.optimizers) as scaled_loss:
            scaled_loss.backward(**kwargs)

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing: `backward` has unscaled the gradients."""

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and tell Accelerate whether the step was skipped. The host may wait for 4 bytes."""
        result = optimizer.step() if closure is None else optimizer.step(closure)
        if amp.step_was_skipped(optimizer):
            for each in self._wrappers:
                if each.optimizer is optimizer:
                    each._accelerate_step_called = False
        return result

    def update(self) -> None:
        """Do nothing: `backward` has updated the scale."""

    def is_enabled(self) -> bool:
        """Return True."""
        return True

    def get_scale(self) -> float:
        """Return the loss scale. The host waits for the device."""
        return self.late.running().loss_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as from `amp.state_dict`. The host waits for the device."""
        return self.late.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        self.late.load_state_dict(state)
