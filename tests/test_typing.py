"""What a type checker knows of `initialize`: `make types` reads this file."""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

import pytest
import torch
from torch import nn

import amp


def test_what_goes_in_comes_out() -> None:
    linear = nn.Linear(2, 2)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)
    model, optimizer = amp.initialize(linear, sgd, opt_level="O1", verbosity=0)
    assert_type(model, nn.Linear)
    assert_type(optimizer, torch.optim.SGD)
    assert model is linear
    assert optimizer is sgd
    alone = amp.initialize(nn.Linear(2, 2), opt_level="O1", loss_scale=128.0, verbosity=0)
    assert_type(alone, nn.Linear)
    models = amp.initialize([nn.Linear(2, 2)], opt_level="O1", verbosity=0)
    assert_type(models, list[nn.Linear])
    with amp.Session("O5", verbosity=0, master_weights="split16") as session:
        assert_type(session.initialize(nn.GELU()), nn.GELU)


def test_unknown_keywords_are_errors_for_a_checker_too() -> None:
    with pytest.raises(TypeError, match="did you mean 'loss_scale'"):
        amp.initialize(nn.Linear(2, 2), los_scale=128.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="los_scale"):
        amp.Session("O1", los_scale=128.0)  # pyright: ignore[reportCallIssue]
