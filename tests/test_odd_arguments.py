"""Arguments that are nothing of the kind: each is refused by an AmpError, and nothing is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp
from amp.errors import AmpIndexError, AmpTypeError
from amp.fp16_utils import FP16_Optimizer


def start(level: str = "O2") -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_without_values_is_refused_before_anything_is_changed(level: str) -> None:
    model, optimizer = start(level)
    before = amp.state_dict()
    loss = torch.ones((), device="meta", requires_grad=True)
    with pytest.raises(AmpTypeError, match="device meta"), amp.scale_loss(loss, optimizer):
        pass
    assert amp.state_dict() == before
    with amp.scale_loss(model(torch.ones(2, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    amp.get_session().close()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_other_scalers_refuse_a_loss_without_values_too() -> None:
    scaler = amp.GradScaler("cpu")
    before = scaler.state_dict()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for loss in (torch.ones((), device="meta"), quantized):
        with pytest.raises(AmpTypeError, match="cannot be scaled"):
            scaler.scale(loss)
    assert scaler.state_dict() == before
    model = nn.Linear(2, 2)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AmpTypeError, match="device meta"):
        optimizer.backward(torch.ones((), device="meta", requires_grad=True))
    optimizer.backward(model(torch.ones(2, 2)).sum())
    optimizer.step()


HUGE = 10**5000
ODD_IDS = (
    torch.tensor([0, 1]),
    torch.tensor(0.0),
    torch.tensor(0, device="meta"),
    np.array([0, 1]),
    HUGE,
    0.0,
    None,
    1,
)


@pytest.mark.parametrize("loss_id", ODD_IDS, ids=range(len(ODD_IDS)))
def test_odd_loss_ids(loss_id: Any) -> None:
    model, optimizer = start()
    loss = model(torch.ones(2, 2)).sum()
    with pytest.raises(AmpIndexError, match="loss_id="), amp.scale_loss(loss, optimizer, loss_id):
        pass
