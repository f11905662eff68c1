"""A session that nobody closes goes with its model: torch is given back, and no memory is kept."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import amp
from tests.models import step_on


@pytest.mark.parametrize("cls", [torch.optim.Adam, amp.optimizers.FusedAdam])
@pytest.mark.parametrize("options", [{}, {"master_weights": "kahan"}], ids=["whole", "kahan"])
def test_sessions_may_be_dropped(cls: Any, options: Any) -> None:
    before = torch.lerp, torch.nn.utils.clip_grad_norm_, vars(nn.Module).get("__deepcopy__")
    for _ in range(3):
        model = nn.Linear(4, 4)
        optimizer = cls(model.parameters())
        session = amp.Session(opt_level="O2", verbosity=0, **options)
        model, optimizer = session.initialize(model, optimizer)
        step_on(model(torch.ones(2, 4)).sum(), optimizer)
        gone = weakref.ref(session)
        del model, optimizer, session
        gc.collect()
        assert gone() is None
    assert before == (torch.lerp, torch.nn.utils.clip_grad_norm_, vars(nn.Module).get("__deepcopy__"))
