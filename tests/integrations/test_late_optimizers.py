"""What a framework's model has when its session ends, without a framework."""

import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from amp.integrations.late_optimizers import LateOptimizers
from tests.test_taking_back import NoMemory


class WithBuffers(nn.Module):
    """A layer, one that is frozen, an average that training moves, and a table that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(64, 1), nn.Linear(64, 64).requires_grad_(False)
        self.register_buffer("mean", 1 + 1e-3 * torch.randn(64))
        self.register_buffer("table", 1 + 1e-3 * torch.randn(64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.frozen(x - self.mean.float()) * self.table.float())


def trained(level: str) -> tuple[LateOptimizers, Any, dict[str, torch.Tensor]]:
    """Return the session of a model that has trained, the model, and its values of before."""
    torch.manual_seed(0)
    model = WithBuffers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    warnings.filterwarnings("ignore", ".* writes to the buffers mean")  # is meant
    late = LateOptimizers(level, verbosity=0)
    late.cast(model)
    optimizer = torch.optim.SGD(model.layer.parameters(), 0.01, momentum=0.9)
    late.attach([optimizer], model)
    for _ in range(3):
        x = 1 + 0.01 * torch.randn(32, 64)
        with torch.no_grad():
            model.mean.lerp_(x.mean(0).to(model.mean.dtype), 0.1)
        with late.running().scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return late, model, before


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_what_was_written_to_a_buffer_is_what_it_ends_with(level: str) -> None:
    late, model, before = trained(level)
    mean = model.mean.detach().float()
    late.end()
    assert model.mean.dtype is torch.float32
    assert torch.equal(model.mean, mean)
    for name in ("table", "frozen.weight", "frozen.bias"):  # nothing was written to them
        assert torch.equal(model.state_dict()[name], before[name]), name


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_an_end_that_runs_out_of_memory_can_be_repeated(level: str) -> None:
    late, model, _ = trained(level)
    late.end()
    expected, n = model.state_dict(), 0
    for n in range(1, 300, 2):
        late, model, _ = trained(level)
        memory = NoMemory(n, for_long=False)
        with memory, suppress(torch.OutOfMemoryError):
            late.end()
        late.end()
        for name, value in model.state_dict().items():
            assert value.dtype is torch.float32, name
            assert torch.equal(value, expected[name]), (name, n)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        if not memory.was_met:
            break
    assert n > 9
