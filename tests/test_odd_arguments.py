"""Arguments that are nothing of the kind: each is refused by an AmpError, and nothing is changed."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp
from amp import optimizers
from amp.compat.handle import init
from amp.errors import AmpIndexError, AmpRuntimeError, AmpTypeError, AmpValueError, brief, first_few
from amp.fp16_utils import DynamicLossScaler, FP16_Optimizer
from tests.models import step_on


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
    step_on(model(torch.ones(2, 2)).sum(), optimizer)
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
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 128.0)
    with pytest.raises(AmpTypeError, match="device meta"):
        optimizer.backward(torch.ones((), device="meta", requires_grad=True))
    optimizer.backward(model(torch.ones(2, 2)).sum())
    optimizer.step()


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

HUGE: Any = 10**5000
ODD_IDS = (
    torch.tensor([0, 1]),
    torch.tensor(0.0),
    torch.tensor(0, device="meta"),
    np.array([0, 1]),
    HUGE,
    *(0.0, 1.0, "0", None, 1, -1),
)


@pytest.mark.parametrize("loss_id", ODD_IDS, ids=range(len(ODD_IDS)))
def test_odd_loss_ids(loss_id: Any) -> None:
    model, optimizer = start()
    loss = model(torch.ones(2, 2)).sum()
    with pytest.raises(AmpIndexError, match="loss_id="), amp.scale_loss(loss, optimizer, loss_id):
        pass


def deep_list() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


class Hostile(list[Any]):
    """A list that cannot be looked at."""

    def __iter__(self) -> Any:
        raise ZeroDivisionError


def test_brief_says_something_of_anything() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    odd: Any = (nested, [nested], Hostile([1]), [deep_list()], [HUGE], {HUGE: 1}, {1: HUGE})
    odd += (frozenset([frozenset()]), [Hostile()], deep_list(), {"a": deep_list()})
    for value in odd:
        assert len(brief(value)) < 400
    assert brief(nested) == "a float32 tensor of shape (...)"


def test_lists_of_names_are_bounded() -> None:
    assert first_few(range(3)) == "0, 1, 2"
    assert first_few(["a"] * 10) == "a, a, a, a, a, a, a, a and 2 more"
    start()
    with pytest.raises(AmpRuntimeError, match="99992 more") as caught:
        amp.load_state_dict({f"x{i}": 1 for i in range(100_000)})
    assert len(str(caught.value)) < 1000
    scaler = amp.state_dict()["loss_scaler0"]
    state = {**amp.state_dict(), **{f"loss_scaler{i}": scaler for i in range(99)}}
    with pytest.warns(amp.AmpWarning, match="loss_scaler8 and 90 more"):
        amp.load_state_dict(state)
    with pytest.raises(AmpValueError, match="more: it is not a GradScaler") as caught_too:
        amp.GradScaler("cpu").load_state_dict({f"x{i}": 1 for i in range(100_000)})
    assert len(str(caught_too.value)) < 1000


def weights() -> list[Any]:
    return [nn.Parameter(torch.ones(2))]


def sgd() -> Any:
    return torch.optim.SGD(weights(), lr=0.1)


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def scaling() -> Any:
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


def fp16(**dynamic: Any) -> Any:
    return FP16_Optimizer(sgd(), dynamic_loss_scale=True, dynamic_loss_args=dynamic)


REFUSED: dict[str, Any] = {
    "load_state_dict huge": lambda: amp.load_state_dict({HUGE: 1}),
    "GradScaler huge": lambda: amp.GradScaler("cpu").load_state_dict({HUGE: 1}),
    "GradScaler cyclic": lambda: amp.GradScaler("cpu").scale(cyclic()),
    "GradScaler deep": lambda: amp.GradScaler("cpu").scale(deep_list()),
    "GradScaler enabled": lambda: amp.GradScaler("cpu", enabled=torch.ones(2)),  # type: ignore[arg-type]
    "GradScaler step": lambda: scaling().step(3),
    "GradScaler unscale": lambda: scaling().unscale_(3),
    "GradScaler skipped": lambda: scaling().step_was_skipped(3),
    "FP16 scale": lambda: FP16_Optimizer(sgd(), 10**400),
    "FP16 word": lambda: FP16_Optimizer(sgd(), "a"),  # type: ignore[arg-type]
    "FP16 factor 0": lambda: fp16(scale_factor=0),
    "FP16 factor huge": lambda: fp16(scale_factor=HUGE),
    "FP16 factor list": lambda: fp16(scale_factor=[2]),
    "FP16 args": lambda: FP16_Optimizer(sgd(), 1.0, True, "abc"),  # type: ignore[arg-type]
    "FP16 args list": lambda: FP16_Optimizer(sgd(), 1.0, True, [1]),  # type: ignore[arg-type]
    "FP16 None": lambda: FP16_Optimizer(None),
    "FP16 list": lambda: FP16_Optimizer([sgd()]),
    "DynamicLossScaler 0": lambda: DynamicLossScaler(scale_factor=0),
    "DynamicLossScaler None": lambda: DynamicLossScaler(scale_factor=None),  # type: ignore[arg-type]
    "NovoGrad sNaN": lambda: optimizers.FusedNovoGrad(weights(), norm_type=Decimal("sNaN")),  # type: ignore[arg-type]
    "NovoGrad huge": lambda: optimizers.FusedNovoGrad(weights(), norm_type=HUGE),
    "NovoGrad deep": lambda: optimizers.FusedNovoGrad(weights(), norm_type=deep_list()),  # type: ignore[arg-type]
    "no params": lambda: optimizers.FusedAdam([{}]),
    "lr nested": lambda: optimizers.FusedAdam(weights(), torch.nested.nested_tensor([torch.ones(2)])),
    "check list": lambda: amp.check([nn.Linear(2, 2)], torch.ones(2), "O1"),  # type: ignore[arg-type]
    "explain list": lambda: amp.explain([], []),  # type: ignore[arg-type]
    "doctor lists": lambda: amp.doctor([], [], []),  # type: ignore[arg-type]
    "Stateful": lambda: amp.Stateful(3),  # type: ignore[arg-type]
    "compare": lambda: amp.compare(nn.Linear, int, levels=3),  # type: ignore[call-overload]
    "patch_type": lambda: init(patch_type=[HUGE]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_it_is_refused(call: Any) -> None:
    with pytest.raises(amp.AmpError):
        call()


FLAGS = (
    *("FusedAdam adam_w_mode", "FusedAdam amsgrad", "FusedAdam bias_correction"),
    *("FusedAdam capturable", "FusedAdam master_weights", "FusedAdam maximize"),
    *("FusedSGD nesterov", "FusedSGD wd_after_momentum", "FusedAdagrad adagrad_w_mode"),
    *("FusedLAMB amsgrad", "FusedLAMB use_nvlamb", "FusedLAMB set_grad_none"),
    *("FusedNovoGrad amsgrad", "FusedNovoGrad init_zero"),
)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_optimizers(flag: str) -> None:
    name, _, argument = flag.partition(" ")
    for value in (torch.ones(2), torch.ones((), device="meta"), np.ones(2)):
        with pytest.raises(AmpTypeError, match="is neither True nor False"):
            getattr(optimizers, name)(weights(), lr=0.1, **{argument: value})
