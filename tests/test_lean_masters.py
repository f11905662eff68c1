"""Masters in 16 bits beside the weights train, save and load as FP32 ones do."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.covering import covering
from tests.levels import WITH_MASTERS
from tests.models import initialize, run_backward, sgd, started, step_on
from tests.processes import run_python
from tests.states import assert_same, load, saved_of
from tests.test_scaled_grads import Plain, block, failing_step, loss_of

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": lambda groups: FusedAdam(groups, lr=0.01),
    "FusedLAMB": lambda groups: FusedLAMB(groups, lr=0.01),
    "FusedSGD": lambda groups: FusedSGD(groups, lr=0.01, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}


def make(
    masters: Any, level: str = "O5", optimizer: str = "FusedAdam", width: int = 8, **kwargs: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.02}]
    kwargs.setdefault("loss_scale", {"init": 2.0**10, "growth_interval": 3})
    return initialize(model, OPTIMIZERS[optimizer](groups), level, master_weights=masters, **kwargs)


def train(model: Any, optimizer: Any, first: int = 0, last: int = 8) -> dict[str, Tensor]:
    for i in range(first, last):
        block(model, optimizer, i)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("level", "optimizer"), covering(WITH_MASTERS, OPTIMIZERS, strength=1))
def test_split16_trains_bit_for_bit(level: str, optimizer: str) -> None:
    whole = train(*make(True, level, optimizer))
    split = train(*make("split16", level, optimizer))
    for name, value in whole.items():
        assert split[name].dtype is value.dtype
        if level == "O5":
            assert torch.equal(value, split[name]), name
        else:  # whose smallest numbers are not exact
            torch.testing.assert_close(split[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("optimizer", ["FusedSGD", "SGD"])
def test_kahan_stays_near(level: str, optimizer: str) -> None:
    whole = train(*make(True, level, optimizer))
    kahan = train(*make("kahan", level, optimizer))
    for name, value in whole.items():
        torch.testing.assert_close(kahan[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("level", "optimizer", "masters"),
    [
        *covering(
            WITH_MASTERS,
            ["FusedAdam", "AdamW", "SGD"],
            [("split16", "split16"), ("kahan", "kahan")],
            strength=1,
        ),
        *itertools.product(["O5"], ["FusedAdam", "AdamW"], [(True, "split16"), ("split16", True)]),
    ],
)
def test_resume_is_exact(masters: tuple[Any, Any], optimizer: str, level: str) -> None:
    """Also with other masters that have the same bits, and beside a stray gradient."""
    expected = train(*make(masters[0], level, optimizer, width=1024))
    model, opt = make(masters[0], level, optimizer, width=1024)
    train(model, opt, last=5)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    saved = saved_of(model, opt)
    model, opt = make(masters[1], level, optimizer, width=1024)
    loss_of(model).backward()
    load(saved, model, opt)
    opt.zero_grad()
    assert_same(model.state_dict(), saved[0])
    assert all(map(torch.equal, weights, model.parameters()))
    assert_same(train(model, opt, first=5), expected)


@pytest.mark.parametrize("kind", ["split16", "split24", "kahan"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_resume_is_exact_after_zeros_were_written_without_a_trace(level: str, kind: str) -> None:
    model, opt = make(kind, level)
    train(model, opt, last=3)
    model[0].weight.data[::2] = 0.0
    saved = saved_of(model, opt)
    assert not saved[0]["0.weight"][::2].any()
    expected = train(model, opt, first=3)
    model, opt = make(kind, level)
    load(saved, model, opt)
    assert_same(expected, train(model, opt, first=3))


@pytest.mark.parametrize("kind", ["split16", "kahan"])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "AdamW"])
def test_what_is_written_to_weights_stays(optimizer: str, kind: str) -> None:
    """The model has what was written, and what is saved rounds to it; the others keep their bits."""
    model, opt = make(kind, "O5", optimizer)
    train(model, opt, last=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight
    with torch.no_grad():
        for row, value in enumerate((0.0, 1.0, -0.5, 3.0)):
            weight[row] = value
        weight[4] *= 0.001
    written = weight.detach().clone()
    after = model.state_dict()
    assert not after["0.weight"][0].any()
    assert torch.equal(after["0.weight"].bfloat16(), written)
    assert torch.equal(after["0.weight"][5:], before["0.weight"][5:])
    assert_same(after | {"0.weight": before["0.weight"]}, before)
    model.load_state_dict(after | {"0.weight": written.float()})
    assert torch.equal(model.state_dict()["0.weight"], written.float())
    model.load_state_dict(after)
    assert torch.equal(model.state_dict()["0.weight"], after["0.weight"])
    assert torch.equal(model[0].weight, written)
    train(model, opt, first=3)
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("kind", ["split16", "kahan"])
@pytest.mark.parametrize("overwrite", [lambda w: w.fill_(1.0), nn.init.xavier_uniform_, nn.init.ones_])
def test_a_weight_that_is_overwritten_rounds_to_what_was_written(overwrite: Any, kind: str) -> None:
    model, opt = make(kind, "O5", "FusedAdam")
    train(model, opt, last=3)
    others = {name: value.clone() for name, value in model.state_dict().items() if name != "0.weight"}
    weight = model[0].weight
    with torch.no_grad():
        overwrite(weight)
    saved = model.state_dict()
    half_a_unit = weight.float().abs() * 2**-8
    assert ((saved["0.weight"] - weight.float()).abs() <= half_a_unit).all()
    assert_same({name: value for name, value in saved.items() if name != "0.weight"}, others)
    train(model, opt, first=3)


@pytest.mark.parametrize("kind", ["split16", "split24", "kahan"])
def test_values_that_float16_does_not_have_are_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = FusedAdam(model.parameters())
    with torch.no_grad():
        model[1].weight[0, 0] = 70000.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(AmpValueError, match="1.weight would get values beyond 65504"):
        amp.initialize(model, optimizer, opt_level="O2", master_weights=kind, verbosity=0)
    assert_same(model.state_dict(), before)
    with torch.no_grad():
        model[1].weight[0, 0] = -torch.inf  # a mask, which float16 has
        model[1].weight[0, 1] = 65504.0
    amp.initialize(model, optimizer, opt_level="O2", master_weights=kind, verbosity=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = {name: value + 1 for name, value in before.items()}
    bad["1.weight"] = torch.full((4, 4), -1e5)
    with pytest.raises(AmpValueError, match="1.weight would get values beyond 65504"):
        model.load_state_dict(bad)
    assert_same(model.state_dict(), before)
    model[0].weight.data = torch.full((4, 4), 1e5)
    with pytest.raises(AmpValueError, match="'0.weight' would get values beyond 65504"):
        optimizer.step()


@pytest.mark.parametrize(
    ("level", "masters", "is_own"),
    [(level, True, True) for level in WITH_MASTERS]
    + [(level, kind, False) for level in WITH_MASTERS for kind in ("split16", "kahan")]
    + [("O3", None, False), ("O0", None, True), ("O4", None, True)],
)
def test_entries_of_a_state_dict_are_the_masters_or_copies(
    level: str, masters: Any, is_own: bool
) -> None:
    model, _ = started(nn.Sequential(nn.Linear(4, 4)), sgd, level, master_weights=masters)
    model.state_dict()["0.weight"].fill_(2.0)
    model(torch.ones(1, 4))
    assert bool((model[0].weight == 2.0).all()) is is_own


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_whole_masters_and_bfloat16_hold_values_beyond_float16(level: str) -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(70000.0)
    masters = "split16" if level == "O5" else True
    started(model, FusedAdam, level, master_weights=masters)
    assert torch.equal(model.state_dict()["weight"], torch.full((2, 2), 70000.0))


@pytest.mark.parametrize("kind", ["split16", "split24", "kahan"])
@pytest.mark.parametrize(
    ("level", "options"),
    [("O0", {}), ("O2", {"cast_model_type": "float32"}), ("O5", {"cast_model_type": False})],
)
def test_lean_masters_where_no_weight_is_in_16_bits_are_refused(
    kind: str, level: str, options: Any
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AmpRuntimeError, match=f"master_weights='?{kind}'?"):
        started(model, FusedAdam, level, master_weights=kind, **options)
    rules = [{"module": "0", "cast": "bfloat16"}]
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    started(layers, FusedAdam, "O0", master_weights=kind, rules=rules)


def test_a_weight_that_is_put_back_has_all_its_bits() -> None:
    """As around an evaluation of an average."""
    model, opt = make("split16", "O5", "FusedAdam")
    train(model, opt, last=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            kept = weight.clone()
            weight.copy_(torch.randn(weight.shape))
            weight.copy_(kept)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("optimizer", ["FusedAdam", "AdamW"])
def test_a_frozen_parameter_keeps_its_bits(optimizer: str) -> None:
    ends = []
    for masters in (True, "split16"):
        model, opt = make(masters, "O5", optimizer)
        train(model, opt, last=2)
        model[3].weight.requires_grad_(False)
        train(model, opt, first=2, last=4)
        model[3].weight.requires_grad_(True)
        ends.append(train(model, opt, first=4))
    assert_same(*ends)


def test_lbfgs() -> None:
    ends = []
    for masters in (True, "split16"):
        torch.manual_seed(0)
        make = functools.partial(torch.optim.LBFGS, max_iter=4)
        model, optimizer = started(nn.Linear(4, 2), make, "O5", master_weights=masters)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            return run_backward(loss_of(model), optimizer)

        optimizer.step(closure)
        ends.append(model.state_dict())
    assert_same(*ends)


CLOSURE_OPTIMIZERS: dict[str, Any] = {
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize(
    ("level", "name", "kind"),
    covering(WITH_MASTERS, CLOSURE_OPTIMIZERS, ["split16", "kahan"], strength=1),
)
def test_resume_is_exact_where_the_optimizer_calls_a_closure(kind: str, name: str, level: str) -> None:
    def start() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        return started(model, CLOSURE_OPTIMIZERS[name], level, master_weights=kind)

    def train_by_closures(model: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
        for i in steps:

            def closure(i: int = i) -> Tensor:
                optimizer.zero_grad()
                block(model, optimizer, i)
                return loss_of(model, i)

            optimizer.step(closure)
        return {key: value.clone() for key, value in model.state_dict().items()}

    expected = train_by_closures(*start(), range(6))
    model, optimizer = start()
    half = train_by_closures(model, optimizer, range(3))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    saved = saved_of(model, optimizer)
    model, optimizer = start()
    load(saved, model, optimizer)
    assert all(map(torch.equal, weights, model.parameters()))
    assert_same(half, model.state_dict())
    assert_same(expected, train_by_closures(model, optimizer, range(3, 6)))
    assert any(not torch.equal(half[key], expected[key]) for key in half)


def test_a_scheduler_sees_one_optimizer_with_all_its_groups() -> None:
    model, optimizer = make("split16", "O5", "AdamW")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, last=1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]


def test_an_error_in_a_step_leaves_every_group_and_value() -> None:
    for optimizer_class in (Plain, FusedAdam):
        model = nn.Linear(4, 2)
        params = list(model.parameters())
        optimizer = optimizer_class([{"params": params[:1]}, {"params": params[1:]}], lr=0.01)
        model, optimizer = initialize(model, optimizer, "O5", master_weights="split16")
        block(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        failing_step(model, optimizer)
        assert len(optimizer.param_groups) == 2
        if optimizer_class is FusedAdam:  # Plain steps one group after another
            assert_same(model.state_dict(), before)
        assert all(value.isfinite().all() for value in model.state_dict().values())
        optimizer.step()
        block(model, optimizer, 3)


@pytest.mark.slow
def test_bytes_for_each_parameter() -> None:
    """Counted in a process of its own, and what the document says."""
    folder = Path(__file__).parents[1] / "docs"
    run = run_python(folder / "benchmarks" / "count_memory.py", "--check")
    assert run.returncode == 0, run.stderr
    rows = (folder / "optimizers.md").read_text().splitlines()
    assert "| O2, `FusedAdam` | 16 | 14 |" in rows
    assert "| O2, `FusedAdam`, `split16` | 14 | 12 |" in rows
    assert "| O2, `FusedAdam`, `kahan` | 14 | 12 |" in rows
    assert "| O2, `FusedAdam`, `split16`, `state_dtype: bfloat16` | 10 | 8 |" in rows


def test_values_that_do_not_exist_and_optimizers_that_cannot(tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight.clone()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(AmpValueError, match="master_weights='split61' is not one of .*'split16'"):
        amp.initialize(model, optimizer, opt_level="O2", master_weights="split61")
    with pytest.raises(AmpValueError, match="state_dtype='float16' is not one of bfloat16"):
        amp.initialize(model, optimizer, opt_level="O2", state_dtype="float16")
    with pytest.raises(AmpRuntimeError, match=r"state_dtype=bfloat16 .* optimizers\[0\] is Adam"):
        amp.initialize(model, optimizer, opt_level="O2", state_dtype="bfloat16")
    with pytest.raises(AmpRuntimeError, match="master_weights=split16 does not fit O1"):
        amp.initialize(model, optimizer, opt_level="O1", master_weights="split16")
    assert model.weight.dtype is torch.float32
    assert torch.equal(model.weight, weight)
    profile = tmp_path / "lean.yaml"
    profile.write_text("extends: O5\nmaster_weights: split16\nstate_dtype: bfloat16\n")
    properties = amp.load_profile(profile)
    assert (properties.master_weights, properties.state_dtype) == ("split16", torch.bfloat16)
    assert amp.Session("O5", master_weights="float32").properties.master_weights is True


def test_a_profiles_state_dtype_ends_with_the_session() -> None:
    make = functools.partial(FusedAdam, lr=0.01)
    model, optimizer = started(nn.Linear(4, 2), make, "O5", state_dtype="bfloat16")
    train(model, optimizer, last=1)
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    assert optimizer.state_dtype is torch.bfloat16
    amp.get_session(optimizer).close()
    assert optimizer.state_dtype is None
    model.float()


@pytest.mark.parametrize("kind", ["split16", "split24", "kahan"])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "packed16"])
def test_loaded_moments_lie_as_the_weights_do(kind: str, state_dtype: Any) -> None:
    made = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    model, optimizer = started(made, FusedAdam, "O5", master_weights=kind, state_dtype=state_dtype)
    step_on(model(torch.ones(1, 4, 4, 4)).sum(), optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = [x for x in optimizer.state[optimizer.param_groups[0]["params"][0]].values() if x.dim()]
    assert {x.stride() for x in moments} == {model.weight.stride()}
