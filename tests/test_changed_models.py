"""Models that a script transforms, parametrizes, swaps or extends after `amp.initialize`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import amp
from amp.profiles.levels import LEVELS
from tests.models import initialize, note_of, sgd, started, train_on
from tests.states import assert_same

HALF = ["O2", "O3", "O5"]


def linear(*sizes: int) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


def train(model: Any, optimizer: Any, x: Tensor) -> None:
    train_on(model(x).float().square().mean(), optimizer)


# Transforms of layers in FP8.


def functional(model: Any, x: Tensor) -> Callable[[Any], Tensor]:
    return lambda own: torch.func.functional_call(model, own, (x,)).float().square().mean()


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(functional(model, x))(dict(model.named_parameters()))[
        "0.weight"
    ],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "linearize": lambda model, x: torch.func.linearize(model, x)[1](torch.ones_like(x)),
    "jit.trace": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("level", ["O6", "O7"])
@pytest.mark.filterwarnings("ignore:.*(torch.jit|get_attr Node)")
def test_layers_in_fp8_are_transformed_in_half_precision(level: str, transform: str) -> None:
    model: Any = initialize(linear(32, 32, 32), None, level, fp8={"skip": []})
    x = torch.randn(16, 32)
    with pytest.warns(amp.AmpWarning, match=r"'0' and the other layers in FP8 run in half precision"):
        result = TRANSFORMS[transform](model, x)
    half: Any = initialize(linear(32, 32, 32), None, {"O6": "O4", "O7": "O5"}[level])
    torch.testing.assert_close(result, TRANSFORMS[transform](half, x), rtol=0, atol=0)
    in_fp8 = model(x)
    assert not torch.equal(in_fp8, half(x))  # and not in half precision from then on


# Parametrizations.


@pytest.mark.parametrize("when", ["before", "after", "in between"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore::amp.AmpWarning")
def test_parametrizations_come_and_go(level: str, when: str) -> None:
    model = linear(16, 16, 16)
    if when == "before":
        parametrizations.weight_norm(model[0])
    options: dict[str, Any] = {"fp8": {"skip": []}} if level > "O5" else {}
    model, optimizer = started(model, sgd, level, **options)
    x = torch.randn(16, 16)
    if when == "in between":
        parametrizations.weight_norm(model[0])
    else:
        train(model, optimizer, x)
    if when != "after":
        expected = model[0].weight.detach().float()
        parametrize.remove_parametrizations(model[0], "weight")
        torch.testing.assert_close(model[0].weight.detach().float(), expected)
    assert not parametrize.is_parametrized(model[0])
    assert type(model[0]).__name__ == "Linear"
    assert model(x).isfinite().all()
    copy.deepcopy(model)(x)
    amp.get_session(optimizer).close()
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("level", ["O6", "O7"])
def test_a_parametrized_layer_runs_in_fp8_and_comes_back(level: str) -> None:
    model = linear(16, 16, 16)
    parametrizations.weight_norm(model[0])
    before = type(model[0])
    model, optimizer = started(model, sgd, level, fp8={"skip": []})
    x = torch.randn(16, 16)
    assert not torch.equal(
        model[0](x), F.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
    )
    train(model, optimizer, x)
    amp.get_session(optimizer).close()
    assert type(model[0]) is before
    assert type(model[1]) is nn.Linear


@pytest.mark.parametrize("which", ["0.parametrizations.weight", "0.parametrizations.weight.0", "0"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore::amp.AmpWarning")
def test_a_rule_may_name_a_parametrization(level: str, which: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    parametrizations.spectral_norm(model[0])
    rules = [{"module": which, "cast": "float32"}]
    model, optimizer = started(model, sgd, level, rules=rules)
    train(model, optimizer, torch.randn(4, 16))


# Modules that are moved, replaced or called with other weights.


@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore::amp.AmpWarning")
def test_parameters_that_are_swapped_by_to(level: str, optimizer: str) -> None:
    def trained(swaps: bool) -> list[Tensor]:
        model = linear(16, 16, 16)
        make: Any = getattr(torch.optim if optimizer == "AdamW" else amp.optimizers, optimizer)
        model, opt = initialize(model, make(model.parameters(), lr=1e-2, eps=1e-4), level)
        x = torch.ones(4, 16)
        train(model, opt, x)
        if swaps:
            torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to("cpu")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        train(model, opt, x)
        return [p.detach().clone() for p in model.parameters()]

    assert_same(trained(swaps=False), trained(swaps=True))


@pytest.mark.parametrize("level", HALF)
def test_a_new_head_is_named(level: str) -> None:
    model = initialize(linear(4, 4, 4), None, level)
    model[1] = nn.Linear(4, 2)
    note = note_of(lambda: model(torch.ones(2, 4)))
    assert "'1' (Linear) is float32" in note
    assert "amp.get_session().initialize(model[1])" in note
    amp.get_session().initialize(model[1])
    assert model(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("level", HALF)
def test_weights_of_another_dtype_are_named(level: str) -> None:
    model = initialize(linear(4, 4, 4), None, level)
    assert "dict(model.named_parameters())" in note_of(
        lambda: torch.func.functional_call(model, model.state_dict(), (torch.ones(2, 4),))
    )
    torch.func.functional_call(model, dict(model.named_parameters()), (torch.ones(2, 4),))


@pytest.mark.parametrize("level", HALF)
def test_an_operation_without_16_bits_is_named(level: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parametrizations.orthogonal(model[1], orthogonal_map="householder")
    model = initialize(model, None, level)
    assert "Keep the layer in FP32, by a rule" in note_of(lambda: model(torch.ones(2, 4)))


def test_an_error_of_the_models_own_gets_no_note() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of its own")

    model: Any = initialize(nn.Sequential(nn.Linear(4, 4), Broken()), None, "O5")
    assert note_of(lambda: model(torch.ones(2, 4))) == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_mask_that_float16_does_not_hold_is_explained(level: str) -> None:
    class Scores(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            scores = super().forward(input)
            return scores.masked_fill(scores > 0, -1e9)

    model = amp.Session(level, verbosity=0).initialize(nn.Sequential(Scores(4, 4)))
    note = note_of(lambda: model(torch.ones(2, 4)))
    assert note.startswith("amp: '0' (Scores) writes a number to a float16 tensor, and float16 ends at")
    assert "rules=[{'module': '0', 'cast': 'float32'}]" in note


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_hook_that_returns_another_dtype_is_explained(level: str) -> None:
    model, optimizer = started(linear(4, 4), sgd, level)
    mask = torch.ones(4, 4)
    model.weight.register_hook(lambda grad: grad * mask)
    assert "return (grad * mask).to(grad.dtype)" in note_of(
        lambda: train(model, optimizer, torch.ones(2, 4))
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore")
def test_quantization_aware_training(level: str) -> None:
    from torch.ao import quantization

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model.train(), inplace=True)
    model, optimizer = started(model, sgd, level)
    before = model[0].weight.detach().float().clone()
    train(model, optimizer, torch.randn(8, 16))
    assert not torch.equal(before, model[0].weight.float())
    scales = [b for name, b in model.named_buffers() if "scale" in name]
    assert {scale.dtype for scale in scales} == {torch.float32}
