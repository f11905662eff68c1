"""Numbers about the precision of a training run, as a flat dict for any logger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp.arguments import attached_to
from amp.errors import truth_of
from amp.frontend import get_session
from amp.training.attached_optimizer import AttachedOptimizer


def scalars(optimizer: Any = None, *, wait: bool = False, norms: bool = False) -> dict[str, float]:
    """Return numbers of the loss scalers, and of the optimizer, to log after each step.

        wandb.log(amp.scalars(optimizer), step=step)
        for name, value in amp.scalars(optimizer).items():
            writer.add_scalar(name, value, step)

    The host does not wait for the device: the numbers are the newest ones that have reached the host,
    which on a GPU may be about a step old. `wait` and `norms` make it wait.

    Args:
        optimizer: an optimizer of the session; None stands for the session of the last `initialize`.
        wait: whether to wait for the numbers that have not reached the host yet.
        norms: whether to compute the norms of the optimizer's gradients and weights. Call this between
            `scale_loss` and `step` then, when there are gradients.

    Returns:
        A dict with, for each loss,

        - "amp/loss_scale": the scale after the last update;
        - "amp/skipped_steps": the number of steps that were skipped since `initialize`;
        - "amp/overflows", "amp/overflows_in_a_row": the numbers of backwards with an overflow; several
          backwards may belong to one step;
        - "amp/grad_norm": the norm of the unscaled gradients, if `norms` is True, or a fused optimizer
          with `max_grad_norm` has computed it;
        - "amp/weight_norm": the norm of the weights, if `norms` is True.

        With several losses, the names of the first four end in "/0", "/1" and so on.

    Raises:
        AmpRuntimeError: `initialize` has not been called, or `norms` is True and `optimizer` did not
            come out of it.
    """
    wait, norms = truth_of("wait", wait), truth_of("norms", norms)
    session = get_session(optimizer)
    if not session.properties.enabled:
        return {}
    rows = session.history(wait)
    values: dict[str, float] = {}
    for scaler in session.scalers:
        recorder = scaler.recorder
        end = f"/{scaler.loss_id}" if len(session.scalers) > 1 else ""
        last = next((row for row in reversed(rows) if row.loss_id == scaler.loss_id), None)
        values |= {
            f"amp/loss_scale{end}": recorder.scale,
            f"amp/skipped_steps{end}": float(recorder.skipped_steps),
            f"amp/overflows{end}": float(recorder.overflows),
            f"amp/overflows_in_a_row{end}": 0.0 if last is None else float(last.in_a_row),
        }
        if last is not None and last.norm is not None:
            values[f"amp/grad_norm{end}"] = last.norm
    return values | _norms(attached_to(optimizer)) if norms else values


def _norms(attached: AttachedOptimizer) -> dict[str, float]:
    """Return the norms of the gradients and weights that an optimizer has now. The host waits."""
    attached.gradients.finish_delayed()
    parameters = attached.reconcile_and_merge()
    grads = [each.grad for each in parameters.stepped if each.grad is not None]
    with attached.masters.as_float32(parameters.masters):
        weights = [each.detach() for each in parameters.stepped]
        return {"amp/grad_norm": _norm(grads), "amp/weight_norm": _norm(weights)}


def _norm(tensors: list[Tensor]) -> float:
    norm: Any = torch.nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
