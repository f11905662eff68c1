"""What delayed scaling remembers: when it moves, what it holds, and that a resume is exact."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp
from amp.casting.fp8_history import GRADIENT, INPUT, WEIGHT, AmaxHistory
from amp.errors import AmpRuntimeError, AmpWarning
from amp.profiles.fp8_recipe import Fp8Recipe
from tests.fp8_models import WIDTH, batches, factors_of, history, initialize, net, train, trained
from tests.fp8_resume import CASES, FIRST, SECOND
from tests.models import run_backward, step_on
from tests.processes import run_python
from tests.states import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E4M3, E5M2)


# The formula.


def transformer_engines_step(
    window: Tensor, scale: Tensor, now: Tensor, algo: str, margin: int, largest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next window `[H, N]`, whose first row is the newest, and the next scale."""
    window = torch.cat([now[None], window[:-1]])
    amax = window.amax(0) if algo == "max" else window[0]
    new = torch.div(largest, amax) / 2.0**margin
    return window, torch.where(amax > 0, new, scale)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 16])
@pytest.mark.parametrize("margin", [0, 2])
def test_scales_are_transformer_engines_for_a_thousand_steps(
    algo: str, length: int, margin: int
) -> None:
    recipe = Fp8Recipe(
        recipe="delayed",
        power_of_2_scales=False,
        amax_history=length,
        amax_algo=algo,  # type: ignore[arg-type]
        margin=margin,
    )
    ours = AmaxHistory(recipe, FORMATS)
    ours.add(["a", "b"], torch.device("cpu"))
    largest = torch.tensor([448.0, 448.0, 57344.0]).repeat(2)
    window, scale = torch.zeros(length, 6), torch.zeros(6)
    for _ in range(1000 if length > 1 and not margin else 200):
        now = torch.rand(6) * torch.exp(4 * torch.randn(6))
        for i, amax in enumerate(now):
            ours.see(i // 3, i % 3, amax / 2)
            ours.see(i // 3, i % 3, amax)
        ours.end()
        window, scale = transformer_engines_step(window, scale, now, algo, margin, largest)
        assert torch.equal(ours.amaxes[1:], window)
        assert torch.equal(factors_of(ours), scale)


def test_nothing_and_what_is_not_finite_are_not_remembered() -> None:
    ours = AmaxHistory(Fp8Recipe(recipe="delayed", amax_history=3), FORMATS)
    ours.add(["a"], torch.device("cpu"))
    for entry, amax in ((INPUT, 1.0), (WEIGHT, 2.0), (GRADIENT, 4.0)):
        ours.see(0, entry, torch.tensor(amax))
    ours.end()
    kept = ours.amaxes.clone()
    ours.see(0, INPUT, torch.tensor(math.inf))
    ours.end()
    assert torch.equal(ours.amaxes, kept)
    ours.see(0, INPUT, torch.tensor(0.5))
    ours.end()
    assert ours.amaxes[1].tolist() == [0.5, 2.0, 4.0]


def test_gradients_are_remembered_without_the_loss_scale() -> None:
    ours = AmaxHistory(Fp8Recipe(recipe="delayed"), FORMATS)
    ours.add(["a"], torch.device("cpu"))
    for scale in (1024.0, 65536.0):
        ours.begin(torch.tensor(scale))
        ours.see(0, GRADIENT, torch.tensor(2.0 * scale))
        ours.end()
        assert ours.amaxes[1, GRADIENT] == 2.0
        assert factors_of(ours)[GRADIENT] == 2.0**14 / scale  # 57344 / 2, rounded down to a power of 2
    ours.begin(None)
    assert factors_of(ours)[GRADIENT] == 2.0**14


# When it moves.


def amaxes_after(step: Any, steps: int = 3, level: str = "O5", **more: Any) -> Tensor:
    """Return the history after some iterations, each of which `step` does."""
    model, optimizer = initialize(net(), level, "delayed", **more)
    data = batches()
    for _ in range(steps):
        x, y = next(data)
        optimizer.zero_grad()
        step(model, optimizer, x, y)
    found: Tensor = history().amaxes.clone()
    amp.get_session().close()
    return found


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def in_a_block(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    step_on(loss_of(model, x, y), optimizer)


def bare(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    optimizer.step()


def in_four(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for i in range(4):
        rows = slice(6 * i, 6 * i + 6)
        # As large as those of the whole batch: the mean of a quarter, and a quarter of that.
        run_backward(loss_of(model, x[rows], y[rows]) / 4, optimizer, delay_unscale=i < 3)
    optimizer.step()


def with_a_closure(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return run_backward(loss_of(model, x, y), optimizer)

    optimizer.step(closure)


@pytest.mark.parametrize("step", [bare, with_a_closure])
def test_an_iteration_without_a_block_moves_it_too(step: Any) -> None:
    assert torch.equal(amaxes_after(step), amaxes_after(in_a_block))


def test_micro_batches_are_one_iteration() -> None:
    """In bits, since the largest of the parts is the largest of the whole."""
    found, expected = amaxes_after(in_four, steps=1), amaxes_after(in_a_block, steps=1)
    forward = [i for i in range(found.shape[1]) if i % 3 != GRADIENT]
    assert torch.equal(found[:, forward], expected[:, forward])
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)
    assert (found[1] > 0).all()
    assert not found[2:].any()


def test_grad_scaler_moves_it() -> None:
    scaler = amp.GradScaler("cpu", init_scale=1024)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()

    assert torch.equal(amaxes_after(step, level="O4"), amaxes_after(in_a_block, level="O4"))


def test_another_loss_scale_makes_no_other_history() -> None:
    found = [amaxes_after(in_a_block, loss_scale=scale) for scale in (1.0, 2.0**12)]
    assert torch.equal(*found)


def test_an_earlier_amax_sets_the_scale() -> None:
    model, optimizer = initialize(net(), "O5", "delayed")
    data = itertools.repeat(next(batches()))
    train(model, optimizer, data, 1)
    x = next(data)[0].detach().bfloat16()
    seen = x.abs().max()
    assert history().amaxes[1, INPUT] == seen
    # Values far beyond what it has seen saturate.
    with torch.no_grad():
        small, large = model.first(x), model.first(1000 * x)
    assert large.norm() < 100 * small.norm()


def test_one_tensor_and_nothing_in_the_model() -> None:
    model, optimizer = initialize(net(), "O5", "delayed")
    train(model, optimizer, batches(), 1)
    state = amp.state_dict()["fp8"]
    assert state["names"] == ["first", "second", "third"]
    assert state["amaxes"].shape == (17, 9)
    assert set(state) == {"recipe", "names", "amaxes"}
    assert list(model.state_dict()) == list(net().state_dict())
    for recipe in ("current", "mxfp8"):
        amp.get_session().close()
        initialize(net(), "O5", recipe)
        assert "fp8" not in amp.state_dict()


def test_layers_on_two_devices_are_refused() -> None:
    first = nn.Linear(16, 16)
    model = nn.Sequential(first, nn.Linear(16, 16, device="meta"))
    with pytest.raises(AmpRuntimeError, match="linear layers are on cpu, meta.*fp8='current'"):
        initialize(
            model, "O4", {"recipe": "delayed", "skip": []}, torch.optim.SGD([first.weight], lr=1)
        )
    assert type(first) is nn.Linear


def test_models_of_one_session_have_entries_of_their_own() -> None:
    session = amp.Session("O4", fp8="delayed", verbosity=0)
    session.initialize([net(), net()])
    session.initialize(net())
    names = session.state_dict()["fp8"]["names"]
    assert names[:4] == ["first", "second", "third", "model 1: first"]
    assert len(set(names)) == 9
    session.close()


# Resuming.


@pytest.mark.slow
def test_a_resume_in_a_new_process_is_exact(tmp_path: Path) -> None:
    for case, (level, recipe) in enumerate(CASES):
        torch.save(trained(recipe, FIRST, level=level)[1], tmp_path / f"{case}.pt")
    run_python("-m", "tests.fp8_resume", str(tmp_path))
    for case, (level, recipe) in enumerate(CASES):
        found = torch.load(tmp_path / f"{case}.out", weights_only=True)
        assert_same(found, trained(recipe, range(SECOND.stop), level=level)[0], f"{level} {recipe}")


def test_without_the_history_a_resume_is_not_exact() -> None:
    expected, _ = trained("delayed", range(SECOND.stop))
    _, state = trained("delayed", FIRST)
    del state[2]["fp8"]
    with pytest.warns(AmpWarning, match="no 'fp8'.*starts empty"):
        found, _ = trained("delayed", SECOND, state)
    assert not all(map(torch.equal, found, expected))


def state_after_training(level: str = "O5") -> Any:
    return trained("delayed", range(2), level=level)[1][2]


def test_missing_layers_start_anew_with_a_warning() -> None:
    state = state_after_training()
    state["fp8"]["names"][1] = "renamed"
    initialize(net(), "O5", "delayed")
    with pytest.warns(AmpWarning, match="no FP8 entries of second; the amax history of these layers"):
        amp.load_state_dict(state)
    amaxes = history().amaxes
    assert torch.equal(amaxes[:, :3], state["fp8"]["amaxes"][:, :3])
    assert not amaxes[:, 3:6].any()
    assert torch.equal(amaxes[:, 6:], state["fp8"]["amaxes"][:, 6:])


def test_a_state_that_is_loaded_first_is_taken_over_by_initialize() -> None:
    state = state_after_training()
    amp.load_state_dict(state)
    initialize(net(), "O5", "delayed")
    assert torch.equal(history().amaxes, state["fp8"]["amaxes"])


def test_a_second_initialize_takes_over_its_own_layers_only() -> None:
    state = state_after_training()
    state["fp8"]["names"] += [f"model 1: {name}" for name in state["fp8"]["names"]]
    state["fp8"]["amaxes"] = state["fp8"]["amaxes"].repeat(1, 2)
    session = amp.Session("O5", fp8="delayed", verbosity=0)
    session.load_state_dict(state)
    session.initialize(net())
    history = session.fp8.history
    assert history is not None
    history.see(0, INPUT, torch.tensor(1000.0))
    history.end()
    trained = history.amaxes.clone()
    session.initialize(net())
    assert torch.equal(history.amaxes[:, :9], trained)
    assert torch.equal(history.amaxes[:, 9:], state["fp8"]["amaxes"][:, 9:])
    session.close()


@pytest.mark.parametrize("length", [4, 32])
def test_a_history_of_another_length_takes_over_the_newest(length: int) -> None:
    state = state_after_training()
    initialize(net(), "O5", {"recipe": "delayed", "amax_history": length})
    amp.load_state_dict(state)
    assert torch.equal(history().amaxes[:4], state["fp8"]["amaxes"][:4])


def test_another_recipe_or_level_goes_on() -> None:
    state = state_after_training()
    for level, recipe in (("O5", "current"), ("O5", "mxfp8"), ("O5", False)):
        initialize(net(), level, recipe)
        amp.load_state_dict(state)  # without a warning: these need nothing of it
        amp.get_session().close()
    amp.load_state_dict(state)
    with pytest.warns(AmpWarning, match="saved at opt_level O5"):
        initialize(net(), "O4", "delayed")
    assert torch.equal(history().amaxes, state["fp8"]["amaxes"])


@pytest.mark.parametrize(
    "entry",
    [{"names": ["a"]}, {"names": ["a"], "amaxes": torch.zeros(3, 4)}, 7, {"names": 3, "amaxes": []}],
)
def test_an_unusable_entry_is_refused(entry: Any) -> None:
    initialize(net(), "O5", "delayed")
    before = history().amaxes.clone()
    with pytest.raises(amp.errors.AmpValueError, match="state_dict(\\['fp8'\\])? has no usable"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}, "fp8": entry})
    assert torch.equal(history().amaxes, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("amaxes", torch.ones(17, 9, device="meta")),
        ("amaxes", torch.ones(1, 1).expand(10**9, 9)),
        ("amaxes", torch.full((17, 9), torch.inf)),
        ("recipe", object()),
        ("recipe", "current"),
    ],
)
def test_a_state_that_cannot_be_taken_over_leaves_the_scalers_alone(name: str, value: Any) -> None:
    state = state_after_training("O2")
    before = amp.state_dict()
    state["fp8"][name] = value
    state["loss_scaler0"]["loss_scale"] = 2.0
    with pytest.raises(amp.errors.AmpValueError, match=rf"\['fp8'\] has no usable '{name}'"):
        amp.load_state_dict(state)
    after = amp.state_dict()
    assert after["loss_scaler0"] == before["loss_scaler0"]
    assert torch.equal(after["fp8"]["amaxes"], before["fp8"]["amaxes"])


def test_a_state_is_plain(tmp_path: Path) -> None:
    state = state_after_training()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["fp8"]["amaxes"], state["fp8"]["amaxes"])


def test_the_model_may_move_after_initialize() -> None:
    model, _ = initialize(net(), "O4", "delayed")
    model.to("meta")
    assert model(torch.randn(3, WIDTH, device="meta")).shape == (3, 10)


def test_two_loss_scales_at_a_time() -> None:
    """What was seen at one scale is not taken for what was seen at another."""
    found = []
    for delay in (False, True):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
        fp8 = {"recipe": "delayed", "skip": []}
        scaling = {"num_losses": 2, "loss_scale": 4.0, "verbosity": 0}
        amp.initialize(models, optimizers, opt_level="O2", fp8=fp8, **scaling)
        amp.get_session().scalers[1].set_scale(65536.0)
        x = torch.randn(16, WIDTH)
        for _ in range(3):
            losses = [model(x).float().square().mean() for model in models]
            run_backward(losses[0], optimizers[0], delay_unscale=delay)
            run_backward(losses[1] / 1000, optimizers[1], loss_id=1)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append(history().amaxes[1].clone())
        amp.get_session().close()
    assert torch.equal(*found)


def test_a_module_in_evaluation_sees_nothing() -> None:
    model, optimizer = initialize(net(), "O5", "delayed")
    train(model, optimizer, batches(), 1)
    before = history().amaxes.clone()
    model.eval()
    model(1000 * torch.randn(4, WIDTH)).sum().backward()
    assert torch.equal(history().amaxes, before)
