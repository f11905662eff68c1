"""Memory that is predicted, against what is counted after a real step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import amp
from amp import optimizers
from amp.numerics import footprint, footprints
from amp.training.deferred_gradients import DeferredGradient
from tests.covering import covering
from tests.fp8_models import Attention
from tests.levels import LEVELS


def net() -> nn.Module:
    torch.manual_seed(0)
    frozen = nn.Linear(7, 7)
    frozen.requires_grad_(False)
    return nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(25, 7), frozen)


def bytes_of(tensors: Any) -> int:
    """Count the memory of some tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def tensors_of_state(optimizer: Any) -> list[Tensor]:
    return [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop all": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "FusedAdam": optimizers.FusedAdam,
    "FusedSGD": lambda p: optimizers.FusedSGD(p, 0.01),
    "FusedSGD momentum": lambda p: optimizers.FusedSGD(p, 0.01, momentum=0.9),
    "FusedLAMB": optimizers.FusedLAMB,
    "FusedNovoGrad": optimizers.FusedNovoGrad,
    "FusedAdagrad": optimizers.FusedAdagrad,
    "FusedLion": optimizers.FusedLion,
}

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((level, {}) for level in LEVELS),
    ("O2", {"master_weights": "split16"}),
    ("O5", {"master_weights": "split16"}),
    ("O5", {"master_weights": "kahan"}),
    ("O2", {"keep_norm_fp32": True, "keep_batchnorm_fp32": False}),
    ("O5", {"master_weights": "split16", "state_dtype": "bfloat16"}),
]


FUSED = [kind for kind in OPTIMIZERS if kind.startswith("Fused")]


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        *covering(OPTIMIZERS, SETTINGS[:-1], strength=1),
        *covering(FUSED, SETTINGS[-1:]),  # only these take a state_dtype
    ],
)
def test_every_term_is_what_is_counted(kind: str, setting: tuple[str, dict[str, Any]]) -> None:
    level, overrides = setting
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    predicted = footprint(model, level, optimizer, **overrides)
    with amp.Session(level, loss_scale=128.0, verbosity=0, **overrides) as session:
        session.initialize(model, optimizer)
        take_gradients(session, model, optimizer)
        optimizer.step()
        own = {id(p) for p in model.parameters()}
        masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if "master_weights" in overrides:
            masters += session.masters.low_halves(list(masters)) or []
        assert bytes_of([*model.parameters(), *model.buffers()]) == predicted.weights
        assert bytes_of(masters) == predicted.masters
        assert bytes_of(tensors_of_state(optimizer)) == predicted.optimizer_state
    assert predicted.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("setting", SETTINGS[:-1], ids=str)
@pytest.mark.usefixtures("nothing_older")
def test_gradients_are_what_is_counted(kind: str, setting: tuple[str, dict[str, Any]]) -> None:
    level, overrides = setting
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    predicted = footprint(model, level, optimizer, **overrides)
    with amp.Session(level, loss_scale=128.0, verbosity=0, **overrides) as session:
        session.initialize(model, optimizer)
        for _ in range(2):  # the first makes what is kept
            take_gradients(session, model, optimizer)
            with_gradients = bytes_alive()
            optimizer.zero_grad(set_to_none=True)
            held = with_gradients - bytes_alive()
            # A fused one keeps the inverse of their scale beside them.
            assert held - predicted.gradients in (0, 4)


def take_gradients(session: amp.Session, model: nn.Module, optimizer: Any) -> None:
    x = torch.randn(4, 3, 7)
    with session.scale_loss(model(x).float().square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.fixture(scope="module")
def nothing_older() -> None:
    """Hide from Python's collector all that is there: what a test counts is what is made in it."""
    gc.collect()
    gc.freeze()


def bytes_alive() -> int:
    """Return the memory of all tensors that Python or autograd holds."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    grads = [t.grad for t in alive if type(t) is nn.Parameter]
    # An earlier test compiled; and deferred gradients have no memory until they are used.
    without_memory = FakeTensor, DeferredGradient, type(None)
    return bytes_of([each for each in (*alive, *grads) if type(each) not in without_memory])


def test_the_numbers_of_gpt_3() -> None:
    plain = footprint(175e9, "O0", "adam")
    assert plain.weights == 700e9
    assert plain.total == pytest.approx(2.8e12, rel=1e-9)
    lean = footprint(175e9, "O5", "FusedAdam", master_weights="split16", state_dtype="bfloat16")
    assert lean.total == pytest.approx(10 * 175e9, rel=1e-9)


def test_activations_and_shards() -> None:
    options: dict[str, Any] = {"activations": 1e9, "world_size": 8}
    rows = {
        sharding: footprint(8e9, "O5", "FusedAdam", sharding=sharding, **options)
        for sharding in ("none", "zero1", "zero2", "zero3")
    }
    assert rows["none"].activations == 2e9
    assert [row.weights / 1e9 for row in rows.values()] == [16, 16, 16, 2]
    assert [row.gradients / 1e9 for row in rows.values()] == [16, 16, 2, 2]
    assert [row.masters / 1e9 for row in rows.values()] == [32, 4, 4, 4]
    assert rows["zero1"].optimizer_state == rows["none"].optimizer_state / 8 + 0.5
    assert footprint(8e9, "O0", activations=1e9).activations == 4e9
    assert footprint(8e9, "O7", activations=1e9, linear_inputs=1e9).activations == 3e9
    assert footprint(8e9, "O5", activations=1e9, linear_inputs=1e9).activations == 4e9
    high = footprint(8e9, "O7", linear_inputs=1e9, fp8="rowwise_gw_hp")
    assert high.activations == 2e9
    assert footprint(8e9, "O9", linear_inputs=1e9).activations == 9e9 / 16
    assert footprint(8e9, "O9", linear_inputs=1e9, fp4="mxfp4").activations == 17e9 / 32
    assert footprint(8e9, "O9", linear_inputs=1e9, fp4={"grad_weight": "high"}).activations == 2e9


def test_levels_side_by_side() -> None:
    rows = footprints(1e6, "FusedAdam")
    shown = [(row.opt_level, row.masters_kept) for row in rows]
    assert shown[:4] == [("O0", "-"), ("O1", "-"), ("O2", "float32"), ("O2", "split16")]
    assert shown[-3:] == [("O8", "-"), ("O9", "float32"), ("O9", "split16")]
    per_parameter = [round((row.total - row.transient) / 1e6) for row in rows]
    assert per_parameter == [16, 16, 16, 14, 8, *[16, 16, 14] * 3]
    assert [round(row.transient / 1e6) for row in rows] == [0, 2, 0, 0, 0, *[2, 0, 0] * 3]
    assert footprint(1e6, "O2", "adamw").transient == 2e6


def test_a_layer_in_fp8_has_one_copy_of_its_weight_while_it_is_used() -> None:
    last = nn.Linear(128, 10)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 128), last)
    head = last.weight.numel() + 64 + 128 + 10
    assert footprint(model, "O4").transient == 2 * sum(p.numel() for p in model.parameters())
    assert footprint(model, "O6").transient == 2 * head + 64 * 128
    assert footprint(model, "O7", "FusedAdam").transient == 64 * 128
    kept = footprint(model, "O7", "FusedAdam", fp8={"keep_weights": True})
    assert kept.transient == 64 * 128 + (32 * 64 + 64 * 128)
    kept = footprint(model, "O7", "FusedAdam", fp8={"keep_weights": "step"})
    assert kept.transient == 64 * 128 + 2 * (32 * 64 + 64 * 128)


@pytest.mark.parametrize("level", ["O5", "O7"])
def test_what_linear_layers_keep_is_what_is_counted(level: str) -> None:
    width, tokens = 128, 256
    block = Attention(width)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    fp8 = {"skip": []} if level == "O7" else None
    block, _ = amp.initialize(block, optimizer, opt_level=level, fp8=fp8, verbosity=0)
    inputs: list[torch.Tensor] = []
    for module in block.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_input = tensor.data_ptr() in {each.data_ptr() for each in inputs}
        if tensor.dtype.itemsize == 1 if level == "O7" else is_input:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(torch.randn(2, tokens // 2, width))
    assert output.requires_grad
    counted = footprint(block, level, linear_inputs=7 * tokens * width, fp8=fp8).activations
    assert counted == sum(kept.values()) == (7 if level == "O7" else 14) * tokens * width


def test_groups_subclasses_and_optimizers_that_are_initialized() -> None:
    class MyAdamW(torch.optim.AdamW):
        pass

    model = net()
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [first], "momentum": 0.9}, {"params": rest}]
    assert footprint(model, "O0", torch.optim.SGD(groups, lr=0.1)).optimizer_state == first.numel() * 4
    optimizer = MyAdamW(model.parameters())
    before = footprint(model, "O2", optimizer)
    with amp.Session("O2", verbosity=0) as session:
        session.initialize(model, optimizer)
        assert footprint(model, "O2", optimizer) == before


def test_a_model_on_meta_stays_as_it_is() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10_000, 10_000), nn.BatchNorm1d(10_000))
    row = footprint(model, "O2", torch.optim.AdamW)
    assert row.parameters == 100_030_000
    assert row.weights == 2 * 100_010_000 + 4 * 40_000 + 8
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((-5,), {}, ValueError, "a model of -5 parameters: give a whole number from 1 to 1e18"),
        ((1.5,), {}, ValueError, "a model of 1.5 parameters"),
        ((float("nan"),), {}, TypeError, "nan is a float, not a module or a number"),
        (("gpt",), {}, TypeError, "'gpt' is a str, not a module or a number"),
        ((10, "O99"), {}, RuntimeError, "opt_level='O99' is not one of"),
        ((10, "O2", "adamv"), {}, ValueError, "optimizer 'adamv' is not known; .*did you mean"),
        ((10, "O2", torch.optim.LBFGS), {}, ValueError, "optimizer 'lbfgs' is not known"),
        ((10,), {"world_size": 0}, ValueError, "world_size=0 must be an integer of at least 1"),
        ((10,), {"sharding": "zero4"}, ValueError, "sharding='zero4' is not one of none, zero1"),
        ((10,), {"activations": -1}, ValueError, "activations=-1 must be"),
        ((10,), {"linear_inputs": -1}, ValueError, "linear_inputs=-1 must be"),
        ((10,), {"activations": float("inf")}, ValueError, "activations=inf must be"),
        ((10,), {"state_dtype": "bfloat16"}, ValueError, "state_dtype=bfloat16 needs .* adamw is none"),
        ((10, "O1"), {"master_weights": True}, RuntimeError, "master_weights=True does not fit O1"),
    ],
)
def test_what_it_refuses(arguments: Any, options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        footprint(*arguments, **options)
