"""`amp.diagnose`: watching every op of a step, and reporting what made an inf or NaN."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed
from torch import Tensor, nn

from amp import distributed
from amp.diagnosis.causes import findings_of, stands_still
from amp.diagnosis.findings import Finding, Report
from amp.diagnosis.guard import guarded
from amp.diagnosis.places import unwrapped
from amp.diagnosis.shadow import Shadow
from amp.errors import AmpTypeError
from amp.other_names import names_keywords
from amp.training.attached_optimizer import AttachedOptimizer


@names_keywords
@contextmanager
def diagnose(model: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> Iterator[Report]:
    """Watch every op of a step, and report which one produced an inf or NaN.

        with amp.diagnose(model, optimizer) as report:
            with amp.scale_loss(loss_of(model(x), y), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        print(report)

    The results of the step are bitwise the same as without it. A compiled model runs op by op, which
    may overflow where fused kernels do not. The host waits for the device after each op, so use it for
    single steps: they take 20 to 80 times as long on a CPU. With several processes, every process must
    enter and leave the block, and every report has the findings of all processes.

    Args:
        model: the model, or a list of models, wrapped and compiled or not.
        optimizer: an optimizer from `amp.initialize`, or a list of them. From it the loss scale is
            known, so that a gradient that is too large only because of the scale is reported so.

    Yields:
        An `amp.diagnosis.Report`, which is filled when the block ends.

    Raises:
        AmpTypeError: `model` is not a module.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    attached = list(filter(None, map(AttachedOptimizer.of, optimizers)))
    with diagnosing(named_models(model, "amp.diagnose"), attached) as (_, report):
        yield report
    gather(report)


@contextmanager
def diagnosing(
    models: dict[str, nn.Module], attached: Sequence[AttachedOptimizer]
) -> Iterator[tuple[Shadow, Report]]:
    """Yield a shadow of a step, and the report of this rank, which is filled when the block ends."""
    shadow = Shadow(models, functools.partial(open_scale, attached))
    report = Report(unfollowed=shadow.unfollowed)
    try:
        with shadow:
            yield shadow, report
    finally:
        report.ops, report.findings = len(shadow.ops), _found_by(shadow, attached) or []


@guarded
def _found_by(shadow: Shadow, attached: Sequence[AttachedOptimizer]) -> list[Finding]:
    found = findings_of(shadow)
    weights = [x for x in shadow.lost.still.values() if x.owned.kind == "weight"]
    return [*found, *stands_still(weights, bool(attached))]


def open_scale(attached: Sequence[AttachedOptimizer], losses: Any = ()) -> Tensor | None:
    """Return the loss scale, on the device, of a block that one of these optimizers is in, or None."""
    blocks = [one.gradients.open_block for one in attached]
    return next((block.scale.scale for block in blocks if block is not None), None)


def named_models(model: Any, caller: str) -> dict[str, nn.Module]:
    """Return models without their wrappers, by the prefix of the names of their modules.

    Raises:
        AmpTypeError: one is not a module.
    """
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    wrong = [type(each).__name__ for each in models if not isinstance(each, nn.Module)]
    if wrong or not models:
        got = wrong[0] if wrong else "an empty list"
        raise AmpTypeError(f"{caller} needs a torch.nn.Module or a list of them, and got {got}")
    return prefixed(list(map(unwrapped, models)))


def prefixed(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return models by the prefix of the names of their modules: none for a single model."""
    return {f"model {i}: " if len(models) > 1 else "": model for i, model in enumerate(models)}


def gather(report: Report) -> None:
    """Put the findings of all ranks into a report, each with its rank."""
    report.ranks = distributed.world_size()
    if report.ranks > 1:
        mine = [replace(finding, rank=distributed.rank()) for finding in report.findings]
        every: list[Any] = [None] * report.ranks
        torch.distributed.all_gather_object(every, mine)
        found = [finding for of_rank in every for finding in of_rank]
        # Gradients are summed over the ranks: a rank without an op of its own got the inf from another.
        report.findings = [finding for finding in found if finding.op] or found
