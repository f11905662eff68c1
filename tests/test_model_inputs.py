"""What a cast model does to its inputs: what it warns of, and what it is told to leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.rope = nn.Linear(4, 4), nn.Identity()
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, positions: Any = None, *, mask: Tensor | None = None) -> Tensor:
        for name, value in (("x", x), ("positions", positions), ("mask", mask)):
            if isinstance(value, Tensor):
                self.seen[name] = value.dtype
        return self.proj(x)


def net(level: str = "O5", **overrides: Any) -> Any:
    return amp.initialize(Net(), opt_level=level, verbosity=0, **overrides)


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("level", "name", "value", "message"),
    [
        (
            "O5",
            "positions",
            torch.arange(300.0),
            "integers up to 299, and bfloat16 rounds those above 256",
        ),
        ("O2", "positions", torch.arange(5000.0), "integers up to 4999, and float16 rounds"),
        ("O2", "mask", torch.tensor([0.0, -1e9]), "holds -1e\\+09, which becomes -inf"),
        ("O3", "mask", torch.tensor([0.0, -1e9]).double(), "which becomes -inf"),
    ],
)
def test_a_cast_that_ruins_an_argument_is_pointed_out_once(
    level: str, name: str, value: Tensor, message: str
) -> None:
    model = net(level)
    with pytest.warns(amp.AmpWarning, match=f"the argument '{name}' of the model .*{message}"):
        model(X, **{name: value})
    model(X, **{name: value})  # a warning would be an error here
    with pytest.warns(amp.AmpWarning, match=f"'{name}'"):
        net(level)(X, **{name: {"inside": [value]}} if name == "positions" else {name: value})


@pytest.mark.parametrize(
    ("level", "value"),
    [
        ("O5", torch.arange(257.0)),
        ("O2", torch.arange(2049.0)),
        ("O5", torch.arange(300)),
        ("O5", 300.5 + torch.arange(300.0)),
        ("O5", torch.tensor([0.0, -1e9])),
        ("O2", torch.tensor([0.0, -torch.inf])),
        ("O2", torch.tensor([0.0, torch.finfo(torch.float16).min])),
        ("O2", torch.zeros(0)),
        ("O1", torch.arange(5000.0)),
    ],
)
def test_what_keeps_its_meaning_is_not(level: str, value: Tensor) -> None:
    net(level)(X, value)


def test_arguments_by_position_have_their_names() -> None:
    with pytest.warns(amp.AmpWarning, match="'positions'"):
        net()(X, torch.arange(300.0))


def test_arguments_that_are_left_alone(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: O5\ncast_model_inputs: {except: [pos*, mask]}\n")
    for model in (net(str(profile)), net(cast_model_inputs=["positions", "mask"])):
        model(X, torch.arange(300.0), mask=torch.ones(2))
        bf16, fp32 = torch.bfloat16, torch.float32
        assert model.seen == {"x": bf16, "positions": fp32, "mask": fp32}
    model = net(cast_model_inputs=False)
    model(X, torch.arange(300.0))
    assert model.seen == {"x": torch.float32, "positions": torch.float32}


def test_modules_that_are_left_alone() -> None:
    seen = []

    class Own(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input.dtype)
            return super().forward(input.float())

    model = nn.Sequential(nn.Linear(4, 4), Own(4), nn.Linear(4, 4))
    overrides = {"keep_norm_fp32": True, "cast_model_inputs": {"except": ["1"]}}
    amp.initialize(model, opt_level="O2", verbosity=0, **overrides)(X)
    assert seen == [torch.float16]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["position"], "'position', which is no argument of Net's forward .x, positions, mask."),
        ({"except": [3]}, "is not true, false, or {except: "),
        ({"but": ["x"]}, "is not true, false, or {except: "),
        (3, "is not true, false, or {except: "),
    ],
)
def test_what_it_does_not_take(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        net(cast_model_inputs=value)
