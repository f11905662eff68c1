"""Linear layers in FP8: where, in which numbers, and what happens to what is not finite."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.checkpoint import checkpoint

import amp
from amp.casting import fp8_linear
from amp.casting.fp8_strategy import choose
from amp.errors import AmpRuntimeError, AmpWarning
from amp.kernels.fp8 import dequantize
from amp.kernels.quantize import quantize
from amp.profiles.fp8_recipe import FP4, Fp8Recipe
from tests.covering import covering
from tests.fp8_models import (
    BASES,
    RECIPE_NAMES,
    WIDTH,
    Attention,
    Net,
    batches,
    history,
    initialize,
    net,
    train,
    trained,
)
from tests.models import run_backward, step_on
from tests.states import assert_same
from tests.test_host_sync import counted_waits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


# That it trains, and in which numbers.


@functools.cache
def last_loss(level: str, fp8: Any) -> float:
    model, optimizer = initialize(net(), level, fp8)
    found = train(model, optimizer, itertools.repeat(next(batches())), 25)[-1]
    amp.get_session().close()
    return found


@functools.cache
def weights_trained(recipe: str, level: str = "O5") -> list[Tensor]:
    """Return weights and history after four steps of a usual run."""
    return trained(recipe, level=level)[0]


@pytest.mark.parametrize(("level", "recipe"), covering(BASES, RECIPE_NAMES, strength=1))
def test_every_recipe_follows_half_precision(level: str, recipe: str) -> None:
    found, half = last_loss(level, recipe), last_loss(level, False)
    start = math.log(10)
    assert found < 0.5 * start
    assert found != half
    tolerance = 0.1 if recipe in FP4 else 0.05
    assert found == pytest.approx(half, abs=tolerance * start)


@pytest.mark.parametrize(
    ("level", "recipe", "dtype"),
    [
        ("O7", "current", torch.bfloat16),
        ("fp8-mixed", "current", torch.float32),
        ("O9", "nvfp4", torch.bfloat16),
        ("fp4-mixed", "nvfp4", torch.float32),
    ],
)
def test_levels_with_fp8_and_fp4_train(level: str, recipe: Any, dtype: torch.dtype) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = train(model, optimizer, itertools.repeat(next(batches())), 20)
    assert losses[-1] < 0.5 * losses[0]
    assert model.first.weight.dtype is dtype
    assert amp.get_session().properties.fp8 == Fp8Recipe(recipe=recipe)


@pytest.mark.parametrize("recipe", [name for name in RECIPE_NAMES if name != "rowwise_gw_hp"])
def test_kept_weights_change_no_bit(recipe: str) -> None:
    found, saved = [], []
    for keep in (False, True):
        model, optimizer = initialize(net(), "O5", {"recipe": recipe, "keep_weights": keep})
        shapes: list[tuple[Any, ...]] = []

        def pack(tensor: Tensor, shapes: list[tuple[Any, ...]] = shapes) -> Tensor:
            shapes.append((tensor.dtype, *tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            train(model, optimizer, batches(), 3)
        found.append(weights(model))
        columns = model.second.in_features, model.second.out_features
        held = torch.uint8 if recipe in FP4 else E4M3
        width = columns[1] // 2 if recipe in FP4 else columns[1]
        saved.append(shapes.count((held, columns[0], width)))
        amp.get_session().close()
    assert_same(*found)
    assert saved[1] == saved[0] + 3


@pytest.mark.parametrize("recipe", [x for x in RECIPE_NAMES if x not in ("delayed", "rowwise_gw_hp")])
def test_weights_kept_for_a_step_change_no_bit(recipe: str) -> None:
    """Nor does an evaluation on averaged weights, which scripts copy in through `.data`."""
    found = []
    for keep in (False, "step"):
        model, optimizer = initialize(net(), "O5", {"recipe": recipe, "keep_weights": keep})
        data = batches()
        for _ in range(3):
            for part in range(2):
                x, y = next(data)
                with amp.scale_loss(nn.functional.cross_entropy(model(x), y), optimizer) as loss:
                    loss.backward()
                kept = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.data.mul_(0.5)
                    found.append([model(x)])
                    for parameter, own in zip(model.parameters(), kept, strict=True):
                        parameter.data.copy_(own)
                if part == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(weights(model))
        amp.get_session().close()
    for one, other in zip(found[:7], found[7:], strict=True):
        assert_same(one, other)


class Growing(nn.Module):
    """Returns another weight each time, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * self.calls


def test_a_weight_that_is_computed_is_not_kept_for_a_step() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrize.register_parametrization(layer, "weight", growing := Growing())
    initialize(layer, "O5", {"recipe": "current", "keep_weights": "step", "skip": []})
    x, growing.calls = torch.randn(16, WIDTH, requires_grad=True), 0
    sizes = [(layer(x) - layer.bias).norm().item() for _ in range(4)]
    assert sizes == pytest.approx([sizes[0] * i for i in (1, 2, 3, 4)], rel=0.05)


def in_fp8(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """What a matrix with one scale stands for."""
    by_row = quantize(x.detach(), dtype, by_column=False).by_row
    assert by_row is not None
    return dequantize(by_row)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_three_products_are_those_of_quantized_operands(level: str) -> None:
    model = nn.Sequential(nn.Linear(32, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = initialize(model, level, {"skip": []}, optimizer)
    layer = model[0]
    x = torch.randn(5, 32, dtype=layer.weight.dtype, requires_grad=True)
    y = layer(x)
    amp.get_session().casts.stop()  # of what is computed here
    assert y.dtype is torch.bfloat16
    assert layer.bias is not None
    product = (in_fp8(x) @ in_fp8(layer.weight).t()).bfloat16()
    assert torch.equal(y, product + layer.bias.bfloat16())
    grad = torch.randn_like(y)
    y.backward(grad)
    of_grad = in_fp8(grad, E5M2)
    assert x.grad is not None
    assert torch.equal(x.grad, (of_grad @ in_fp8(layer.weight)).to(x.dtype))
    assert torch.equal(layer.weight.grad, (of_grad.t() @ in_fp8(x)).to(layer.weight.dtype))
    assert torch.equal(layer.bias.grad, grad.sum(0).to(layer.bias.dtype))


@pytest.mark.parametrize("recipe", ["rowwise_gw_hp", {"grad_weight": "high"}])
def test_gradients_of_weights_in_high_precision(recipe: Any) -> None:
    fp8 = {"recipe": recipe, "skip": []} if isinstance(recipe, str) else {**recipe, "skip": []}
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    model, _ = initialize(model, "O5", fp8)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    y = model[0](x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(model[0].weight.grad, grad.t() @ x)


@pytest.mark.parametrize(("tokens", "recipe"), covering([0, 1, 5, 17], RECIPE_NAMES, strength=1))
def test_any_number_of_tokens(tokens: int, recipe: str) -> None:
    model, _ = initialize(net(), "O5", recipe)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (tokens, 10)
    assert x.grad.shape == x.shape
    assert model.first.weight.grad.isfinite().all()
    assert model.first.weight.grad.any().item() is (tokens > 0)


def test_inputs_of_any_rank() -> None:
    model, _ = initialize(net(), "O4", "current")
    x = torch.randn(2, 3, 4, WIDTH)
    assert torch.equal(model(x).flatten(0, 2), model(x.flatten(0, 2)))
    assert model(x[0, 0, 0]).shape == (10,)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_loss_scale_changes_nothing(recipe: str) -> None:
    assert_same(trained(recipe, loss_scale=2.0**16)[0], weights_trained(recipe))


def test_evaluation_may_stay_in_half_precision() -> None:
    x = torch.randn(4, WIDTH)
    outputs = {}
    for where, fp8 in (("fp8", "current"), ("high", {"eval": "high"}), ("without", False)):
        model, _ = initialize(net(), "O4", fp8)
        outputs[where] = model.eval()(x)
        amp.get_session().close()
    assert torch.equal(outputs["high"], outputs["without"])
    assert not torch.equal(outputs["fp8"], outputs["without"])


def test_where_casts_are_off_nothing_is_in_fp8() -> None:
    model, _ = initialize(net(), "O4", "current")
    x = torch.randn(4, WIDTH)
    plain = net()
    with amp.disable_casts():
        assert torch.equal(model(x), plain(x))
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(model(x), plain(x))


# Recomputation, micro-batches, copies.


@pytest.mark.parametrize(
    ("recompute", "recipe", "level"),
    covering(["reentrant", "not reentrant"], RECIPE_NAMES, ["O4", "O5"], strength=1, slow_strength=1),
)
def test_activation_checkpointing_changes_no_bit(level: str, recipe: str, recompute: str) -> None:
    found, _ = trained(recipe, level=level, recompute=recompute)
    assert_same(found, weights_trained(recipe, level))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_evaluation_between_steps_changes_no_bit(recipe: str) -> None:
    def evaluate(i: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.eval()(torch.randn(7, WIDTH) * 1000)
        model.train()

    assert_same(trained(recipe, before_step=evaluate)[0], weights_trained(recipe))


def test_layers_that_share_an_input_give_what_each_gives_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(fp8_linear._latest, "of", None)
            monkeypatch.setattr(type(fp8_linear._latest), "__setattr__", lambda *_: None)
        torch.manual_seed(0)
        block, optimizer = initialize(Attention(), "O5", "current")
        y = block(torch.randn(2, 8, WIDTH))
        step_on(y.square().mean(), optimizer)
        found.append(weights(block))
        amp.get_session().close()
    assert_same(*found)


def saved_bytes(block: nn.Module, x: Tensor) -> int:
    """Return the bytes of FP8 or FP4 that a forward keeps for backward, each tensor counted once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype in (E4M3, E5M2, torch.uint8):
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("recipe", [name for name in RECIPE_NAMES if name != "rowwise_gw_hp"])
def test_seven_bytes_for_each_token_and_hidden_unit_are_kept(recipe: str) -> None:
    block, _ = initialize(Attention(), "O5", {"recipe": recipe, "skip": []})
    tokens = 4 * 128
    # q, k and v share 1; o has 1; gate and up share 1; down has 4.
    of_number = {"mxfp8": 33 / 32, "nvfp4": 9 / 16, "mxfp4": 17 / 32}.get(recipe, 1)
    assert saved_bytes(block, torch.randn(4, 128, WIDTH)) == 7 * tokens * WIDTH * of_number


def test_what_is_quantized_is_freed_with_its_input() -> None:
    model, _ = initialize(net(), "O5", "current")
    x = torch.randn(4, WIDTH, requires_grad=True).bfloat16()
    model.third(x)
    assert fp8_linear._latest.result is not None
    del x
    assert fp8_linear._latest.result is None


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_an_input_that_is_written_through_data_is_quantized_again(recipe: str) -> None:
    """torch does not count the write."""
    model, _ = initialize(net(), "O4", {"recipe": recipe, "skip": []})
    x = torch.randn(16, WIDTH).requires_grad_() * 1.0
    model.third(x)
    x.data.mul_(-2)
    expected = model.third(x.detach().clone().requires_grad_() * 1.0)
    assert torch.equal(model.third(x), expected)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_leaves_are_not_shared_where_their_values_are_not_compared(place: str) -> None:
    """A static buffer that is refilled through `.data`, or by a collective, has a new batch in it."""
    leaf = torch.ones(2, device=place)
    assert fp8_linear._counts_writes(leaf) is (place == "cpu")
    assert not fp8_linear._counts_writes(leaf.clone().requires_grad_())
    assert fp8_linear._counts_writes(leaf.clone().requires_grad_() * 1)


def test_streams_and_graphs_share_no_quantized_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = initialize(net(), "O5", "current")
    x = torch.randn(4, WIDTH, requires_grad=True).bfloat16()
    quantized = []
    quantize = fp8_linear.Layer.quantize

    def note(self: Any, tensor: Tensor, entry: int, **options: Any) -> Any:
        quantized.append(entry)
        return quantize(self, tensor, entry, **options)

    monkeypatch.setattr(fp8_linear.Layer, "quantize", note)
    counts = []
    for stream in (1, 1, 2, 2, None, None):  # None while a graph is captured
        monkeypatch.setattr(fp8_linear, "stream_of", lambda _, stream=stream: stream)
        quantized.clear()
        model.third(x)
        counts.append(quantized.count(fp8_linear.INPUT))
    assert counts == [1, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("around", ["no_grad", "inference_mode", "reentrant checkpoint"])
def test_layers_that_share_an_input_share_its_scale_without_gradients_too(around: str) -> None:
    """Under `delayed`, where the first of them alone has seen it."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate, self.up = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return torch.sigmoid(self.gate(y)) * self.up(y)

    torch.manual_seed(0)
    model: Any = Gate()
    model, optimizer = initialize(model, "O4", {"recipe": "delayed", "skip": []})
    x = torch.randn(8, 64, requires_grad=True)
    for gain in (4.0, 1.0):
        with torch.no_grad():
            model.norm.weight.fill_(gain)
        expected = model(x)
        if around == "reentrant checkpoint":
            found = checkpoint(model, x, use_reentrant=True)
        else:
            with getattr(torch, around)():
                found = model(x)
        assert torch.equal(found, expected)
        step_on(expected.float().sum(), optimizer)


def test_an_input_written_in_place_is_quantized_again() -> None:
    model, _ = initialize(net(), "O5", "current")
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    nn.init.zeros_(model.third.bias)
    for given in (x, x.clone().requires_grad_() + 0):
        before = model.third(given)
        given.mul_(2)
        assert torch.equal(model.third(given), 2 * before)


def test_copies_and_pickles() -> None:
    model, _ = initialize(net(), "O4", "delayed")
    x = torch.randn(4, WIDTH)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    unpickled = pickle.loads(pickle.dumps(model))
    assert type(unpickled.first) is nn.Linear
    assert not torch.equal(unpickled(x), expected)
    assert list(model.state_dict()) == list(net().state_dict())


# Which layers.


def reached(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "_amp_fp8" in vars(module)]


SKIPS: dict[str, tuple[Any, list[str]]] = {
    "a text": ("first, last", ["second", "third"]),
    "nothing": ([], ["first", "second", "third"]),  # the head has 10 outputs
    "the first": (["first"], ["second", "third"]),
    "the last": (["last"], ["first", "second", "third"]),
    "a glob": (["*ir*"], ["second"]),
    "a name": (["second", "third"], ["first"]),
}


@pytest.mark.parametrize("name", SKIPS)
def test_layers_may_be_skipped(name: str) -> None:
    skip, expected = SKIPS[name]
    model, _ = initialize(net(), "O4", {"skip": skip})
    assert reached(model) == expected


@pytest.mark.parametrize("level", ["O6", "O7"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rule_keeps_modules_out(level: str, dtype: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp8 = {"skip": []}
    rules = [{"module": "0", "cast": dtype}]
    amp.initialize(model, optimizer, opt_level=level, fp8=fp8, rules=rules, verbosity=0)
    assert reached(model) == ["1"]
    assert model(torch.randn(4, 32)).isfinite().all()


class Reshaped(nn.Linear):
    """A linear layer that does something else besides."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Named(nn.Linear):
    """A linear layer by another name."""


class Conv1D(nn.Module):
    """Hugging Face's, as far as it matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))


class Zoo(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.plain, self.named = nn.Linear(32, 32), Named(32, 32)
        self.reshaped, self.odd = Reshaped(32, 32), nn.Linear(32, 2)
        self.double = nn.Linear(32, 32).double()
        self.attention = nn.MultiheadAttention(32, 2)
        self.conv, self.conv1d = nn.Conv2d(3, 3, 3), Conv1D()
        self.scripted = torch.jit.script(nn.Linear(32, 32))
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_not_reached_is_said_once_with_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = Zoo()
    assert isinstance(model.attention.out_proj, NonDynamicallyQuantizableLinear)
    with caplog.at_level(logging.INFO, "amp"):
        amp.initialize(model, opt_level="O4", fp8={"skip": ["tied"]})
    assert reached(model) == ["plain", "named"]
    said = [record.getMessage() for record in caplog.records if "run in FP8" in record.getMessage()]
    assert len(said) == 1
    for part in (
        "2 of 10 layers run in FP8",
        "reshaped: Reshaped has another forward",
        "odd: dimensions that are no multiples of 16",
        "double: the weight is torch.float64",
        "attention.out_proj: nn.MultiheadAttention multiplies by itself",
        "conv: there are no FP8 kernels for convolutions",
        "conv1d: Hugging Face's Conv1D",
        "scripted: torch.jit has compiled it",
        "head: skip: tied",
    ):
        assert part in said[0]


@pytest.mark.parametrize(
    ("recipe", "shape", "is_small"),
    [
        ("current", (4096, 1024), True),
        ("current", (4112, 1024), False),
        ("current", (4096, 1040), False),
        ("delayed", (64, 1024), True),
        ("rowwise", (8192, 2048), True),
        ("rowwise", (1024, 8192), True),
        ("rowwise", (2048, 4096), True),
        ("rowwise", (2064, 2064), False),
        ("nvfp4", (2048, 4096), True),
        ("mxfp8", (4096, 4096), False),
    ],
)
def test_layers_too_small_to_gain_are_counted_and_can_be_left_out(
    recipe: Any, shape: tuple[int, int], is_small: bool
) -> None:
    """By torchao's limits; K, N."""
    for skip in ((), ("small",)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(*shape, bias=False), nn.Linear(4096, 4128, bias=False))
        chosen, missed = choose(model, Fp8Recipe(recipe=recipe, skip=skip), ())
        is_out = is_small and bool(skip)
        assert list(chosen) == (["1"] if is_out else ["0", "1"])
        assert missed == ({"skip: small": ["0"]} if is_out else {})


def test_the_line_on_fp8_layers_says_which_key_leaves_out_small_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "amp"):
        amp.initialize(net(), opt_level="O6")
    assert "3 are too small to be faster in FP8" in caplog.text
    assert "fp8={'skip': 'small, last, tied'} leaves out" in caplog.text
    amp.get_session().close()
    with pytest.warns(AmpWarning, match="0 of 4 layers run in FP8.*skip: small"):
        amp.initialize(net(), opt_level="O4", fp8={"skip": "auto_filter_small_kn"}, verbosity=0)


@pytest.mark.parametrize(("recipe", "multiple"), [("current", 16), ("mxfp8", 32), ("block", 128)])
def test_dimensions_that_tensor_cores_take(recipe: str, multiple: int) -> None:
    fits, not_quite = nn.Linear(multiple, 2 * multiple), nn.Linear(2 * multiple, multiple + 8)
    model = nn.Sequential(fits, not_quite)
    amp.initialize(model, opt_level="O4", fp8={"recipe": recipe, "skip": []}, verbosity=0)
    assert reached(model) == ["0"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Linear(768, 2)), "0 of 1 layers run in FP8.*multiples of 16|skip: last"),
        (nn.Sequential(nn.Conv2d(3, 3, 3)), "no FP8 kernels for convolutions"),
        (nn.Sequential(nn.ReLU()), "the model has no linear layers"),
    ],
)
def test_nothing_in_fp8_is_a_warning(model: nn.Module, text: str) -> None:
    with pytest.warns(AmpWarning, match=text):
        amp.initialize(model, opt_level="O6", verbosity=0)


def test_frozen_layers_keep_nothing_and_adapters_train() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 8), nn.Linear(8, 32))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1)
    model, optimizer = initialize(model, "O4", {"skip": []}, optimizer)
    assert reached(model) == ["0"]
    x = torch.randn(16, 32, requires_grad=True)
    assert saved_bytes(model[0], x) == 0
    before = weights(model)
    step_on((model[0](x) + model[2](model[1](x))).square().mean(), optimizer)
    assert x.grad.any()
    assert model[0].weight.grad is None
    changed = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert changed == [False, True, True, True, True]


# The session.


def test_close_gives_the_classes_back() -> None:
    model, optimizer = initialize(net(), "O4", "delayed")
    assert reached(model)
    assert isinstance(model.first, nn.Linear)
    assert type(model.first).__name__ == "Linear"
    train(model, optimizer, batches(), 1)
    amp.get_session().close()
    assert not reached(model)
    assert type(model.first) is nn.Linear
    x = torch.randn(3, WIDTH)
    plain = net()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))


def test_a_failed_initialize_changes_nothing() -> None:
    model = net()
    before = weights(model)
    with pytest.raises(AmpRuntimeError):
        amp.initialize([model, nn.Linear(4, 4).half()], opt_level="O7", verbosity=0)
    assert not reached(model)
    assert_same(weights(model), before)
    assert type(model.first) is nn.Linear
    small = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(AmpWarning, match="0 of 1"):  # warnings are errors in tests
        amp.initialize(small, opt_level="O7", verbosity=0)
    assert small[0].weight.dtype is torch.float32


def test_an_earlier_session_keeps_its_layers_if_a_later_one_fails() -> None:
    model, _ = initialize(net(), "O4", "current")
    taken = vars(model.first)["_amp_fp8"]
    with pytest.raises(AmpWarning):
        amp.Session("O4", fp8={"skip": ["*"]}, verbosity=0).initialize(model)
    assert vars(model.first)["_amp_fp8"] is taken


def test_the_newest_session_says_whether_a_model_is_in_fp8() -> None:
    model = net()
    first = amp.Session("O6", verbosity=0)
    first.initialize(model)
    second = amp.Session("O4", verbosity=0)
    second.initialize(model)
    assert not reached(model)
    third = amp.Session("O6", verbosity=0)
    third.initialize(model)
    first.close()
    assert reached(model) == ["first", "second", "third"]
    third.close()
    second.close()
    assert type(model.first) is nn.Linear


# What is not finite.


PLACES = ("input", "weight", "gradient")


@pytest.mark.parametrize(
    ("recipe", "place", "bad"), covering(RECIPE_NAMES, PLACES, [math.inf, math.nan], strength=1)
)
def test_an_overflow_skips_the_step_and_the_next_scale_is_right_at_once(
    recipe: str, place: str, bad: float
) -> None:
    found = []
    for injects in (False, True):
        # A step that is skipped has drawn random bits, which are then not drawn again.
        rounding = {"stochastic_rounding": False} if recipe in FP4 else {}
        model, optimizer = initialize(net(), "O2", {"recipe": recipe, **rounding})
        data = batches()
        train(model, optimizer, data, 2)
        if injects:
            before = weights(model)
            scale = amp.loss_scale()
            x, y = next(batches(seed=5))
            parameter = model.second.weight
            kept = parameter.detach().clone()
            optimizer.zero_grad()
            with torch.no_grad():
                if place == "input":
                    x[3, 5] = bad
                if place == "weight":
                    parameter[3, 5] = bad
            out = model(x)
            if place == "gradient":
                out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), bad))
            run_backward(F.cross_entropy(out.float(), y), optimizer)
            with torch.no_grad():
                parameter.copy_(kept)
            optimizer.step()
            assert amp.step_was_skipped(optimizer)
            assert amp.loss_scale() == scale / 2
            if place != "weight":
                assert_same(weights(model), before)
            if history() is not None:
                assert history().amaxes.isfinite().all()
        optimizer.zero_grad()
        x, y = next(data)
        F.cross_entropy(model(x).float(), y).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        amp.get_session().close()
    if recipe != "delayed":
        assert_same(*found)
    else:  # what a skipped iteration saw besides is remembered
        torch.testing.assert_close(*found, rtol=0.2, atol=2e-3)


def test_an_inf_that_saturates_would_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opposite of the test above: without the NaN in scales nothing would notice."""
    from amp.kernels import fp8

    def hides(x: Tensor, granularity: object, backend: object = None) -> Tensor:
        return x.float().abs().nan_to_num(posinf=1e4).amax().view(1, 1)

    monkeypatch.setattr(fp8, "amax_of", hides)
    model, optimizer = initialize(net(), "O2", "current")
    x, y = next(batches())
    x = x.detach()
    x[3, 5] = math.inf
    optimizer.zero_grad()
    step_on(F.cross_entropy(model(x).float(), y), optimizer)
    assert not amp.step_was_skipped(optimizer)


def test_a_module_of_the_model_may_be_used_alone() -> None:
    model, _ = initialize(Net(), "O5", "current")
    assert model.first(torch.randn(3, WIDTH)).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.first(torch.randn(3, WIDTH + 1))


@pytest.mark.usefixtures("the_cpu_is_a_device")
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_the_host_never_waits(recipe: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = initialize(model, "O2", recipe, optimizer)
    data = batches()

    def step() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        step_on(F.cross_entropy(model(x).float(), y), optimizer)

    step()
    with counted_waits() as waits:
        step()
    assert not waits


# What readers of the first version found.


@pytest.mark.parametrize("level", ["O6", "O7"])
def test_second_derivatives_are_refused_by_name(level: str) -> None:
    model = net()
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(AmpRuntimeError, match="'third', which runs in FP8, cannot be differentiated"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_learned_input_is_quantized_anew() -> None:
    """torch's fused optimizers write to parameters and leave no trace."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.full((16, WIDTH), 0.1))
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

        def forward(self) -> Tensor:
            return self.head(self.first(self.queries))

    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Queries()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        model, optimizer = initialize(model, "O4", "current", optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model().float().square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        amp.get_session().close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_nothing_has_to_be_contiguous(recipe: str) -> None:
    model, _ = initialize(net(), "O5", recipe)
    layer = model.third
    base = torch.randn(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
    for x in (base.t()[:, :WIDTH], base[:, 1 : WIDTH + 1], base[:1, :WIDTH].expand(8, WIDTH)):
        y = layer(x)
        assert torch.equal(y, layer(x.contiguous()))
        y.backward(torch.randn(WIDTH, len(y), dtype=torch.bfloat16).t())


def test_nested_tensors_run_in_half_precision() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True), 2)
    amp.initialize(encoder, opt_level="O7", verbosity=0)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 5:] = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its nested tensors are a prototype
        output = encoder.eval()(torch.randn(2, 8, WIDTH), src_key_padding_mask=mask)
    assert output.shape == (2, 8, WIDTH)


class Counted(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        Counted.calls += 1
        return weight


def test_a_parametrized_weight_is_computed_once_in_a_forward() -> None:
    model = net()
    nn.utils.parametrize.register_parametrization(model.third, "weight", Counted())
    Counted.calls = 0
    model, _ = initialize(model, "O4", "current", torch.optim.SGD(model.parameters(), lr=0.1))
    assert Counted.calls == 0
    model.third(torch.randn(4, WIDTH))
    assert Counted.calls == 1


def test_copies_leave_fp8_when_the_session_closes() -> None:
    model, _ = initialize(net(), "O4", "current")
    copied = copy.deepcopy(model)
    amp.get_session().close()
    x = torch.randn(4, WIDTH)
    assert torch.equal(copied.third(x), nn.functional.linear(x, model.third.weight, model.third.bias))


def test_a_copy_of_what_has_masters_is_in_fp32() -> None:
    model, _ = initialize(net(), "O5", "current")
    copied, plain = copy.deepcopy(model), net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, WIDTH)
    assert torch.equal(copied(x), plain(x))


def test_a_model_that_is_widened_runs_as_torch_has_it() -> None:
    model, _ = initialize(net(), "O4", "current")
    model.third.double()
    with amp.disable_casts():
        assert model.third(torch.randn(3, WIDTH).double()).dtype is torch.float64


@pytest.mark.parametrize("skip", ["frist", ["last", "blocks.*"]])
def test_a_skip_that_names_nothing_is_a_warning(skip: Any) -> None:
    with pytest.warns(AmpWarning, match="fp8 has skip: (frist|blocks.*), which is the name of no"):
        initialize(net(), "O4", {"skip": skip})
