"""An optimizer that is named in blocks and is never stepped: memory does not grow."""

import math

import pytest
import torch
from torch import nn

import amp
from amp.training import verdicts
from amp.training.attached_optimizer import AttachedOptimizer
from tests.models import run_backward, started


@pytest.mark.parametrize("overflows_at", [None, 3])
def test_what_checks_have_found_does_not_pile_up(
    monkeypatch: pytest.MonkeyPatch, overflows_at: int | None
) -> None:
    monkeypatch.setattr(verdicts, "MOST_VERDICTS", 8)
    model, optimizer = started(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), "O1")
    before = model.weight.detach().clone()
    attached = AttachedOptimizer.of(optimizer)
    assert attached is not None
    for i in range(20):
        loss = model(torch.ones(1, 2)).sum() * (math.inf if i == overflows_at else 1e-3)
        run_backward(loss, optimizer)
        assert len(attached.gradients.verdicts.found) <= 8
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is (overflows_at is not None)
    assert amp.scalars(optimizer)["amp/skipped_steps"] == (overflows_at is not None)
    assert torch.equal(model.weight, before) is (overflows_at is not None)
