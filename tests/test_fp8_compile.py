"""Layers in FP8 under torch.compile: one graph, the bits of eager mode, no second compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import amp
from amp.profiles.fp8_recipe import FP4
from tests.fp8_models import WIDTH, batches, history, initialize, train
from tests.states import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Inductor warns of much


def trained(level: str, recipe: str, compiles: bool) -> tuple[list[Tensor], int]:
    """Return weights and history after 10 steps, and how many graphs were compiled late."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    # One layer: what Inductor makes of it takes a few seconds for each recipe.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    model, optimizer = initialize(model, level, recipe, torch.optim.SGD(model.parameters(), lr=0.1))
    forward = torch.compile(model, fullgraph=True) if compiles else model
    data = batches()
    train(forward, optimizer, data, 2)
    first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(forward, optimizer, data, 8)
    found = [value.clone() for value in model.state_dict().values()]
    found += [] if history() is None else [history().amaxes]
    found += [torch.tensor(list(amp.state_dict().get("fp8", {}).get("draws", {}).values()))]
    more = torch._dynamo.utils.counters["stats"]["unique_graphs"] - first
    amp.get_session().close()
    return found, more


@pytest.mark.parametrize(
    ("level", "recipe"),
    [
        ("O5", "delayed"),  # half of these are tried: see conftest.py
        *(("O4", name) for name in ("mxfp4", "nvfp4", "delayed", "rowwise_gw_hp", "block", "mxfp8")),
    ],
)
def test_one_graph_with_the_bits_of_eager_mode(level: str, recipe: str) -> None:
    expected, _ = trained(level, recipe, compiles=False)
    config: dict[str, Any] = {"emulate_precision_casts": True}
    if recipe in FP4:
        config["cpp.simdlen"] = 1  # the code takes half the time to write without vectors
    with torch._inductor.config.patch(config):
        found, compiled_late = trained(level, recipe, compiles=True)
    assert_same(found, expected)
    assert compiled_late == 0
