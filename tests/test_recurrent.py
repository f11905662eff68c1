"""Recurrent layers at O1 and O4: half compute, FP32 weights, whatever comes in and how it is packed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import amp
from tests.covering import covering
from tests.models import BY_OP_DTYPE as HALF
from tests.models import TOLERANCE

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}
LENGTHS = [4, 2, 1]


def first(output: Any) -> Tensor:
    """Return the output of a layer or cell that may return its state too."""
    output = output[0] if type(output) is tuple else output
    return output.data if isinstance(output, PackedSequence) else output


def batch(dtype: torch.dtype, packed: bool) -> Any:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    return pack_padded_sequence(x, LENGTHS, batch_first=True) if packed else x


OPTIONS: list[dict[str, Any]] = [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}]


@pytest.mark.parametrize(
    ("level", "kind", "options", "packed", "half_input"),
    covering(HALF, LAYERS, OPTIONS, [False, True], [False, True]),
)
def test_layers_compute_in_half_and_learn_in_float32(
    level: str, kind: str, options: dict[str, Any], packed: bool, half_input: bool
) -> None:
    torch.manual_seed(0)
    model = LAYERS[kind](5, 7, batch_first=True, **options)
    plain = copy.deepcopy(model)
    amp.initialize(model, opt_level=level)
    half = HALF[level]
    x = batch(half if half_input else torch.float32, packed)
    output = first(model(x))
    assert output.dtype is half
    output.float().square().sum().backward()
    amp.get_session().close()
    rounded = batch(half if half_input else torch.float32, False).float()
    if packed:
        rounded = pack_padded_sequence(rounded, LENGTHS, batch_first=True)
    expected = first(plain(rounded))
    expected.square().sum().backward()
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=TOLERANCE[level])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype is torch.float32
        error = torch.dist(p.grad, q.grad) / torch.linalg.vector_norm(q.grad)
        assert error < 4 * TOLERANCE[level]


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("half_input", [False, True])
def test_cells(level: str, kind: str, half_input: bool) -> None:
    torch.manual_seed(0)
    cell = CELLS[kind](5, 7)
    plain = copy.deepcopy(cell)
    amp.initialize(cell, opt_level=level)
    x = torch.randn(2, 5)
    output = first(cell(x.to(HALF[level]) if half_input else x))
    assert output.dtype is HALF[level]
    amp.get_session().close()
    torch.testing.assert_close(output.float(), first(plain(x)), rtol=0, atol=TOLERANCE[level])


@pytest.mark.parametrize("level", HALF)
def test_a_state_of_another_dtype_is_carried_on(level: str) -> None:
    model = nn.LSTM(5, 7)
    amp.initialize(model, opt_level=level)
    state = (torch.zeros(1, 2, 7), torch.zeros(1, 2, 7))
    for _ in range(3):
        output, state = model(torch.ones(1, 2, 5), state)
        assert output.dtype is HALF[level]
        assert {s.dtype for s in state} == {HALF[level]}


def test_what_a_layer_checks_is_still_checked() -> None:
    model = nn.GRU(5, 7)
    with pytest.raises(ValueError, match="RNN input dtype"):
        model(torch.ones(1, 2, 5).half())
    amp.initialize(model, opt_level="O1")
    with pytest.raises(RuntimeError, match="input.size\\(-1\\) must be equal to input_size"):
        model(torch.ones(1, 2, 4).half())
    with amp.disable_casts(), pytest.raises(ValueError, match="RNN input dtype"):
        model(torch.ones(1, 2, 5).half())
    amp.get_session().close()
    with pytest.raises(ValueError, match="RNN input dtype"):
        model(torch.ones(1, 2, 5).half())
