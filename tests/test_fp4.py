"""Training in FP4: recipes and their words, exact resume, draws, layers left out, the switch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import amp
from amp.casting import fp4_draws, fp8_linear
from amp.errors import AmpError, AmpRuntimeError, AmpTypeError, AmpValueError, AmpWarning
from amp.profiles.fp8_recipe import Fp8Recipe
from tests.covering import covering
from tests.fp8_models import WIDTH, Net, batches, initialize, net, train, trained
from tests.models import Wrapper
from tests.states import assert_same
from tests.test_fp8 import weights

RECIPES = ("nvfp4", "mxfp4")


def draws() -> dict[str, int]:
    found: dict[str, int] = amp.state_dict()["fp8"]["draws"]
    return found


# Words.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fp4": True}, {}),
        ({"fp4": "e2m1"}, {}),
        ({"fp8": "e2m1"}, {}),
        ({"fp8": "NVFP4BlockScaling"}, {}),
        ({"fp4": "mxfp4"}, {"recipe": "mxfp4"}),
        ({"fp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}}, {}),
        ({"fp4": {"disable_rht": True}}, {"hadamard": False}),
        ({"fp4": {"disable_stochastic_rounding": True}}, {"stochastic_rounding": False}),
        ({"fp4": {"disable_2d_quantization": True}}, {"square_weights": False}),
        (
            {"fp4": {"backward_override": "high_precision"}},
            {"grad_weight": "high", "grad_input": "high"},
        ),
        ({"fp4": {"fp8_wgrad": False}}, {"grad_weight": "high"}),
        ({"fp4": {"first_last_layers_bf16": True}}, {"skip": ("first", "last")}),
        ({"fp4": {"num_layers_at_end_in_bf16": 8}}, {"skip": ("last 8",)}),
        (
            {
                "fp4": {
                    "first_last_layers_bf16": True,
                    "num_layers_at_start_in_bf16": 2,
                    "num_layers_at_end_in_bf16": 4,
                }
            },
            {"skip": ("first 2", "last 4")},
        ),
        ({"fp4": {"skip": ["last 15%", "tied"]}}, {"skip": ("last 15%", "tied")}),
        ({"fp4": {"forward": "high", "seed": 7}}, {"forward": "high", "seed": 7}),
    ],
    ids=str,
)
def test_the_words_of_other_libraries(given: dict[str, Any], expected: dict[str, Any]) -> None:
    session = amp.Session("O4", verbosity=0, **given)  # type: ignore[misc]
    assert session.properties.fp8 == Fp8Recipe(**{"recipe": "nvfp4", **expected})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"fp4": True, "fp8": "current"}, AmpValueError, "fp8 and fp4 are given.*keep one"),
        (
            {"fp4": "mxfp8"},
            AmpValueError,
            "fp4=.mxfp8. is not one of nvfp4, mxfp4; for FP8 say fp8=mxfp8",
        ),
        ({"fp4": {"recipe": "current"}}, AmpValueError, "is not one of nvfp4, mxfp4.*fp8=current"),
        (
            {"fp4": {"fp4_param_gather": True}},
            AmpValueError,
            "does not offer fp4_param_gather.*split24",
        ),
        ({"fp4": {"four_over_six": True}}, AmpValueError, "does not offer four_over_six.*leave it out"),
        ({"fp4": {"row_scaled_activation": True}}, AmpValueError, "one scale for a tensor"),
        ({"fp4": {"amax_history": 4}}, AmpValueError, "does nothing under nvfp4.*recipe: delayed"),
        ({"fp4": {"power_of_2_scales": True}}, AmpValueError, "does nothing under nvfp4"),
        ({"fp4": {"format": "hybrid"}}, AmpValueError, "does nothing under nvfp4"),
        ({"fp8": {"recipe": "mxfp4", "square_weights": True}}, AmpValueError, "recipe: nvfp4"),
        ({"fp8": {"hadamard": True}}, AmpValueError, "does nothing under current.*recipe: nvfp4"),
        ({"fp4": {"grad_weight": "fp8"}}, AmpValueError, "say fp4 or high"),
        ({"fp4": {"forward": "low"}}, AmpValueError, "forward='low' is not one of"),
        ({"fp4": {"seed": -1}}, AmpValueError, "seed=-1"),
        ({"fp4": {"hadamar": True}}, AmpTypeError, "did you mean 'hadamard'"),
        ({"fp4": "nvfp5"}, AmpValueError, "did you mean 'nvfp4'"),
        (
            {"fp4": {"skip": ["last"], "first_last_layers_bf16": True}},
            AmpValueError,
            "'first_last_layers_bf16' and 'skip', which are one thing",
        ),
    ],
    ids=str,
)
def test_what_is_refused_names_the_remedy(
    given: dict[str, Any], error: type[AmpError], message: str
) -> None:
    with pytest.raises(error, match=message):
        amp.Session("O4", verbosity=0, **given)  # type: ignore[misc]


def test_fp4_needs_a_level_of_half_precision() -> None:
    with pytest.raises(AmpRuntimeError, match="linear layers run in FP4.*'O8'"):
        amp.Session("O0", fp4=True)


# Which layers.


class Blocks(nn.Module):
    def __init__(self, count: int = 7) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(count)
        )
        self.head = nn.Linear(32, 32)


@pytest.mark.parametrize(
    ("skip", "left_out"),
    [
        ("last 15%", {"blocks.5", "blocks.6"}),  # 1.05 blocks, rounded up
        ("last 2", {"blocks.5", "blocks.6"}),
        ("first 2", {"blocks.0", "blocks.1"}),
        ("first 100", {f"blocks.{i}" for i in range(7)}),
        ("first 0", set()),
    ],
)
def test_blocks_are_counted(skip: str, left_out: set[str]) -> None:
    model = amp.initialize(Blocks(), opt_level="O4", fp4={"skip": [skip]}, verbosity=0)
    reached = {name for name, module in model.named_modules() if "_amp_fp8" in vars(module)}
    every = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert every - reached == {f"{block}.{part}" for block in left_out for part in ("up", "down")}


def test_without_blocks_linear_layers_are_counted() -> None:
    model = amp.initialize(Net(), opt_level="O4", fp4={"skip": ["last 50%"]}, verbosity=0)
    reached = {name for name, module in model.named_modules() if "_amp_fp8" in vars(module)}
    assert reached == {"first", "second"}


# Draws, and exact resume.


def switch_at(step: int) -> Callable[[int, Any], None]:
    """Return what switches the forward before a step."""

    def switch(i: int, model: Any) -> None:
        if i == step:
            amp.get_session().set_fp4_forward("high")

    return switch


@pytest.mark.parametrize(("recipe", "level"), covering(RECIPES, ("O2", "O4", "O5"), strength=1))
def test_a_resumed_run_is_the_uninterrupted_one(recipe: str, level: str) -> None:
    expected, _ = trained(recipe, range(6), level=level)
    _, state = trained(recipe, range(3), level=level)
    assert set(state[2]["fp8"]) == {"recipe", "forward", "seed", "draws"}
    found, _ = trained(recipe, range(3, 6), state, level=level)
    assert_same(found, expected)
    del state[2]["fp8"]
    with pytest.warns(AmpWarning, match="no 'fp8'.*all layers draw from the beginning"):
        found, _ = trained(recipe, range(3, 6), state, level=level)
    assert not all(map(torch.equal, found, expected))


def test_a_state_of_other_draws_warns() -> None:
    _, state = trained("nvfp4", range(1))
    with pytest.warns(AmpWarning, match="saved with seed 0 of fp8, and this session has 1"):
        trained({"recipe": "nvfp4", "seed": 1}, range(1), state)
    del state[2]["fp8"]["draws"]["first"]
    with pytest.warns(AmpWarning, match=r"no FP8 entries of first; these layers draw from the"):
        trained("nvfp4", range(1), state)
    _, of_history = trained("delayed", range(1))
    with pytest.warns(AmpWarning, match="an 'fp8' of delayed"):
        trained("nvfp4", range(1), of_history)
    state[2]["fp8"]["draws"]["second"] = -1
    with pytest.raises(AmpValueError, match="no usable 'second': -1"):
        amp.load_state_dict(state[2])


def gradients(
    recompute: str = "", micro: int = 1, **recipe: Any
) -> tuple[list[Tensor], dict[str, int]]:
    torch.manual_seed(0)
    model, _ = initialize(Net(recompute), "O5", {"recipe": "nvfp4", **recipe})
    for i in range(micro):
        x, y = next(batches(seed=i))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends one kind of checkpointing
            F.cross_entropy(model(x).float(), y).backward()
    found = [p.grad.clone() for p in model.parameters()]
    counts = draws()
    amp.get_session().close()
    return found, counts


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recomputation_draws_the_same_bits(recompute: str) -> None:
    expected, counts = gradients()
    found, others = gradients(recompute)
    assert_same(found, expected)
    assert counts == others == {"first": 1, "second": 1, "third": 2}  # which is called twice


def test_each_micro_batch_draws_anew() -> None:
    assert gradients(micro=3)[1] == {"first": 3, "second": 3, "third": 6}


def test_evaluation_draws_nothing() -> None:
    model, _ = initialize(net(), "O5", "nvfp4")
    for is_training in (False, True):
        with torch.no_grad():
            model.train(is_training)(torch.randn(4, WIDTH))
    assert set(draws().values()) == {0}


def test_seeds_and_ranks_change_the_bits_and_other_layers_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = gradients()
    other, _ = gradients(seed=1)
    assert not torch.equal(other[4], expected[4])
    monkeypatch.setattr(fp4_draws.distributed, "rank", lambda: 1)
    other, _ = gradients()
    assert not torch.equal(other[4], expected[4])
    monkeypatch.undo()
    # The gradient of the third layer comes before those of the others.
    skipped, counts = gradients(skip=["last", "first"])
    assert "first" not in counts
    assert torch.equal(skipped[3], expected[3]) or "second" in counts


def test_the_bits_of_a_layer_do_not_depend_on_which_others_run_in_fp4() -> None:
    grad = torch.randn(32, WIDTH, dtype=torch.bfloat16)
    found = []
    for skip in (["head"], ["head", "first", "second"]):
        model, _ = initialize(net(), "O5", {"recipe": "nvfp4", "skip": skip})
        layer = vars(model.third)["_amp_fp8"]
        both = layer.quantize(grad, fp8_linear.GRADIENT, by_row=True, by_column=True)
        found.append([both.by_row.values, both.by_column.values])
        amp.get_session().close()
    assert_same(*found)


def test_dropout_is_as_without_fp4() -> None:
    masks = []
    for fp8 in (False, "nvfp4"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))
        model, _ = initialize(model, "O4", fp8 and {"recipe": fp8, "skip": []})
        for _ in range(2):
            y = model[1](torch.ones(4, 64))
            model(torch.randn(4, 32)).sum().backward()
        masks.append([y, torch.get_rng_state()])
        amp.get_session().close()
    assert_same(*masks)


# What is in half precision.


@pytest.mark.parametrize("part", ["forward", "grad_input", "grad_weight"])
def test_each_product_may_stay_in_half_precision(part: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    model, _ = initialize(model, "O5", {"recipe": "nvfp4", "skip": [], part: "high"})
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    y = model[0](x)
    grad = torch.randn_like(y)
    y.backward(grad)
    weight = model[0].weight
    exact = {
        "forward": (y, x @ weight.t()),
        "grad_input": (x.grad, grad @ weight),
        "grad_weight": (weight.grad, grad.t() @ x),
    }
    for name, (found, expected) in exact.items():
        assert torch.equal(found, expected) is (name == part)


def test_the_forward_is_switched_by_one_call() -> None:
    model, _ = initialize(net(), "O4", {"recipe": "nvfp4", "skip": ["head"]})
    x = torch.randn(8, WIDTH)
    session = amp.get_session()
    in_fp4 = model(x)
    session.set_fp4_forward("high")
    high = model(x)
    high.sum().backward()
    assert set(draws().values()) == {1, 2}  # gradients stay in FP4
    session.set_fp4_forward("fp4")
    assert torch.equal(model(x), in_fp4)
    assert not torch.equal(high, in_fp4)
    with pytest.raises(AmpValueError, match="forward='bf16' is not one of fp4, high"):
        session.set_fp4_forward("bf16")
    session.close()
    plain, _ = initialize(net(), "O4", False)
    torch.testing.assert_close(plain(x), high, rtol=0.02, atol=0.02)  # whose bias is added later
    with pytest.raises(AmpRuntimeError, match="this session has fp8=none.*'O8'"):
        amp.get_session().set_fp4_forward("high")


def test_the_switch_is_the_same_as_a_profile_with_it() -> None:
    _, state = trained("nvfp4", range(2), level="O4")
    expected, _ = trained({"recipe": "nvfp4", "forward": "high"}, range(2, 4), state, level="O4")
    assert_same(trained("nvfp4", range(4), level="O4", before_step=switch_at(2))[0], expected)


@pytest.mark.parametrize("is_random", [True, False])
def test_a_checkpoint_has_the_switch(is_random: bool) -> None:
    recipe = {"recipe": "nvfp4", "stochastic_rounding": is_random}
    expected, _ = trained(recipe, range(6), before_step=switch_at(2))
    _, saved = trained(recipe, range(4), before_step=switch_at(2))
    assert saved[2]["fp8"]["forward"] == "high"
    found, again = trained(recipe, range(4, 6), saved)
    assert_same(found, expected)
    assert again[2]["fp8"]["forward"] == "high"
    del saved[2]["fp8"]["forward"]  # as an earlier version has saved it
    if is_random:
        found, _ = trained("nvfp4", range(4, 6), saved)
        assert not all(map(torch.equal, found, expected))
        assert_same(trained("nvfp4", range(4, 6), saved, before_step=switch_at(4))[0], expected)


def test_a_checkpoint_from_before_the_switch_takes_it_back() -> None:
    initialize(net(), "O5", "nvfp4")
    before, session = amp.state_dict(), amp.get_session()
    session.set_fp4_forward("high")
    amp.load_state_dict(before)
    assert amp.state_dict()["fp8"]["forward"] is None
    # A profile that says it wins over a checkpoint without a call, and a call over the profile.
    for call, forward in ((None, None), ("fp4", "fp4")):
        session.close()
        initialize(net(), "O5", {"recipe": "nvfp4", "forward": "high"})
        session = amp.get_session()
        session.set_fp4_forward("fp4")
        if call is None:
            amp.load_state_dict(before)
        saved = amp.state_dict()
        assert saved["fp8"]["forward"] == forward
        amp.load_state_dict(saved)
        assert amp.state_dict()["fp8"]["forward"] == forward


@pytest.mark.parametrize("value", ["bf16", 1, ["high"]])
def test_another_word_for_the_switch_is_refused(value: Any) -> None:
    initialize(net(), "O5", "nvfp4")
    state = amp.state_dict()
    state["fp8"]["forward"] = value
    with pytest.raises(AmpValueError, match=r"no usable 'forward'.*expected fp4, high or None"):
        amp.load_state_dict(state)


# Names.


def wrapped(kind: str) -> Any:
    def compiled(module: nn.Module) -> Any:
        return torch.compile(module, backend="eager")

    wrap = {"compile": compiled, "checkpoint": checkpoint_wrapper, "part": Wrapper}.get(kind)
    model = net()
    if wrap is not None:
        setattr(model, "second", wrap(model.second))  # noqa: B010
    return Wrapper(model) if kind == "whole" else model


WRAPPED = ["compile", "checkpoint", "part", "whole"]


@functools.cache
def steps_without(recipe: str) -> tuple[Any, Any, Any]:
    """Return three steps' weights and state without a wrapper, and the weights of two more."""
    found, state = steps_of_wrapped("", recipe, 3)
    return found, state, steps_of_wrapped("", recipe, 2, state)[0]


def steps_of_wrapped(kind: str, recipe: Any, steps: int, state: Any = None) -> tuple[Any, Any]:
    model = wrapped(kind)
    model, optimizer = initialize(model, "O5", recipe)
    if state is not None:
        amp.load_state_dict(state)
    with torch.compiler.set_stance("force_eager"):  # only the name counts here
        train(model, optimizer, batches(), steps)
    found, state = weights(model), amp.state_dict()
    amp.get_session().close()
    return found, state


@pytest.mark.parametrize(("kind", "recipe"), [*zip(WRAPPED, ["nvfp4", "delayed"] * 2, strict=True)])
def test_wrappers_change_no_bits(kind: str, recipe: str) -> None:
    expected, state, later = steps_without(recipe)
    found, of_wrapped = steps_of_wrapped(kind, recipe, 3)
    assert_same(found, expected)
    assert list(of_wrapped["fp8"].get("draws", of_wrapped["fp8"].get("names"))) == [
        "first",
        "second",
        "third",
    ]
    assert_same(steps_of_wrapped(kind, recipe, 2, state)[0], later)
    assert_same(steps_of_wrapped("", recipe, 2, of_wrapped)[0], later)


@pytest.mark.parametrize(("kind", "recipe"), [*zip(WRAPPED, ["delayed", "nvfp4"] * 2, strict=True)])
def test_names_with_wrappers_are_loaded_as_an_earlier_version_has_saved_them(
    kind: str, recipe: str
) -> None:
    _, state, expected = steps_without(recipe)
    old = copy.deepcopy(state)
    names = [n for n, module in wrapped(kind).named_modules() if type(module) is nn.Linear][:3]
    assert names != ["first", "second", "third"]
    if recipe == "delayed":
        old["fp8"]["names"] = names
    else:
        old["fp8"]["draws"] = dict(zip(names, state["fp8"]["draws"].values(), strict=True))
        del old["fp8"]["forward"]
    for each in (kind, ""):
        assert_same(steps_of_wrapped(each, recipe, 2, old)[0], expected)


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_a_module_called_module_keeps_its_name_beside_another(recipe: str) -> None:
    def build() -> nn.Module:
        inner = nn.ModuleDict({"fc": nn.Linear(32, 32), "other": nn.Linear(32, 32)})
        return nn.ModuleDict({"module": inner, "fc": nn.Linear(32, 32)})

    for model in (build(), Wrapper(build())):
        initialize(model, "O5", {"recipe": recipe, "skip": []})
        state = amp.state_dict()
        names = state["fp8"]["names" if recipe == "delayed" else "draws"]
        assert list(names) == ["module.fc", "other", "fc"]
        if recipe == "nvfp4":
            names |= dict(zip(names, (1, 2, 3), strict=True))
            amp.load_state_dict(state)
            assert draws() == names
        amp.get_session().close()
