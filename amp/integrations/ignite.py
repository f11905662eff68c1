"""PyTorch Ignite: the update function of a supervised trainer, for use after `amp.initialize`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp.integrations import missing

try:
    from ignite.engine import Engine, _prepare_batch
except ImportError as error:
    raise missing(__name__, "Ignite", "ignite") from error

import amp
from amp.errors import AmpValueError


def supervised_training_step(  # noqa: D417 (several arguments in one line)
    model: nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., Any] = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = lambda x, y, y_pred, loss: loss.item(),
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
    *,
    max_norm: float | None = None,
) -> Callable[[Engine, Any], Any]:
    """Return an update function for `ignite.engine.Engine`, like Ignite's functions of this name.

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        trainer = Engine(supervised_training_step(model, optimizer, loss_fn))

    To save the scaler, pass `to_save={..., "amp": amp.Stateful()}` to Ignite's `Checkpoint`.

    Args:
        model: the model from `amp.initialize`, perhaps in DDP.
        optimizer: the optimizer from `amp.initialize`.
        loss_fn, device, non_blocking, prepare_batch, model_transform, output_transform, model_fn: as in
            `ignite.engine.supervised_training_step`. The default `output_transform` makes the host wait
            for the loss, as Ignite's does.
        gradient_accumulation_steps: over how many batches gradients are averaged for a step.
        max_norm: the norm to which unscaled gradients are clipped; None does not clip.

    Raises:
        AmpRuntimeError: the optimizer has not been through `amp.initialize`.
        AmpValueError: `gradient_accumulation_steps` is below 1.
    """
    steps = gradient_accumulation_steps
    if steps < 1:
        raise AmpValueError(f"gradient_accumulation_steps={steps} is below 1; 1 accumulates nothing")
    amp.get_session(optimizer)  # raises for an unknown optimizer

    def update(engine: Engine, batch: Any) -> Any:
        iteration = engine.state.iteration
        if (iteration - 1) % steps == 0:
            optimizer.zero_grad()
        model.train()
        x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
        y_pred = model_transform(model_fn(model, x))
        loss = loss_fn(y_pred, y)
        is_last = iteration % steps == 0
        with amp.scale_loss(loss / steps, optimizer, delay_unscale=not is_last) as scaled_loss:
            scaled_loss.backward()
        if is_last:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
            optimizer.step()
        return output_transform(x, y, y_pred, loss)

    return update
