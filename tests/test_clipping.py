"""What everybody types clips what is stepped: torch's functions find gradients at every level."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_before

import amp
from tests.covering import covering
from tests.models import run_backward, started

LEVELS = ("O1", "O2", "O4", "O5")
OPTIMIZERS = {"SGD": torch.optim.SGD, "FusedSGD": amp.optimizers.FusedSGD}


def problem(level: str, optimizer: str = "SGD") -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    scaling: Any = {"loss_scale": {"init": 64.0}} if level in ("O1", "O2") else {}
    model, opt = started(made, lambda p: OPTIMIZERS[optimizer](p, lr=0.1), level, **scaling)
    return model, opt, torch.randn(4, 8)


def backward(model: nn.Module, optimizer: Any, x: Tensor, **options: bool) -> None:
    run_backward(model(x).pow(2).mean() * 100, optimizer, **options)


def update_of(model: nn.Module, optimizer: Any) -> Tensor:
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer.step()
    after = amp.master_params(optimizer)
    return torch.cat([(a.detach() - b).flatten() for a, b in zip(after, before, strict=True)])


def clip_norm(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_norm_as_imported(model: nn.Module) -> Tensor:
    return imported_before(list(model.parameters()), max_norm=1.0)


def clip_value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_with_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(50.0))


def clip_one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_(parameter, 0.1)


@pytest.mark.parametrize(
    ("level", "optimizer", "clip"),
    covering(
        LEVELS,
        OPTIMIZERS,
        [clip_norm, clip_norm_as_imported, clip_value, clip_with_norm, clip_one_by_one],
        strength=1,
    ),
)
def test_the_models_parameters_clip_what_is_stepped(level: str, optimizer: str, clip: Any) -> None:
    results = []
    for each in ("O0", level):
        model, made, x = problem(each, optimizer)
        backward(model, made, x)
        norm = clip(model)
        results.append((norm, update_of(model, made)))
        amp.get_session(made).close()
    (norm, update), (norm_here, update_here) = results
    assert torch.allclose(update_here, update, rtol=0.05, atol=2e-4)
    if norm is not None:
        assert norm > 10
        assert torch.allclose(norm_here, norm, rtol=0.02)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_were_left_scaled_are_unscaled_first(level: str) -> None:
    model, optimizer, x = problem(level)
    backward(model, optimizer, x, delay_unscale=True)
    assert 10 < clip_norm(model) < 10_000
    assert update_of(model, optimizer).norm() == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_inside_a_block_warns(level: str) -> None:
    model, optimizer, x = problem(level)
    with amp.scale_loss(model(x).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.warns(amp.AmpWarning, match="clip_grad_norm_ was called inside") as seen:
            imported_before(model.parameters(), 1.0)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_clipping_inside_a_block_is_as_good_at_a_scale_of_one(level: str) -> None:
    model, optimizer, x = problem(level)
    with amp.scale_loss(model(x).pow(2).mean() * 100, optimizer) as scaled_loss:
        scaled_loss.backward()
        assert clip_norm(model) > 10
    assert update_of(model, optimizer).norm() == pytest.approx(0.1, rel=0.01)


@pytest.mark.usefixtures("before_torch_2_10")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_norm_of_gradients_that_are_in_masters_warns(optimizer: str) -> None:
    model, made, x = problem("O2", optimizer)
    backward(model, made, x)
    get = torch.nn.utils.get_total_norm
    with pytest.warns(amp.AmpWarning, match="given 0 gradients, and not those of 6") as seen:
        get([p.grad for p in model.parameters() if p.grad is not None])
    assert seen[0].filename == __file__
    total = get([p.grad for p in amp.master_params(made) if p.grad is not None])
    assert total == pytest.approx(clip_norm(model).item())
    assert get([torch.ones(4)]) == 2  # of something else


@pytest.mark.usefixtures("before_torch_2_10")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("level", "norm", "given", "name"),
    [
        ("O2", nn.BatchNorm1d, 2, "clip_grad_norm_"),
        ("O2", nn.BatchNorm1d, 2, "clip_grad_value_"),
        ("O5", nn.BatchNorm1d, 2, "clip_grad_norm_"),
        ("O5", nn.BatchNorm1d, 2, "clip_grad_value_"),
        ("O5", nn.LayerNorm, 0, "clip_grad_norm_"),
    ],
)
def test_parameters_that_are_chosen_by_their_gradients_warn(
    level: str, norm: Any, given: int, optimizer: str, name: str
) -> None:
    """`p.grad is not None` is true of those alone that stay in FP32, of which there may be none."""
    made = nn.Sequential(nn.Linear(8, 16), norm(16), nn.Linear(16, 1))
    model, opt = started(made, lambda p: OPTIMIZERS[optimizer](p, lr=0.1), level)
    backward(model, opt, torch.randn(4, 8))
    message = f"{name} was given {given} parameters, and not the {6 - given} in 16 bits"
    with pytest.warns(amp.AmpWarning, match=message) as seen:
        getattr(torch.nn.utils, name)([p for p in model.parameters() if p.grad is not None], 1.0)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("optimizer", ["SGD", "FusedSGD"])
def test_gradients_that_were_stepped_on_are_no_reason_to_warn(optimizer: str) -> None:
    model, made, x = problem("O5", optimizer)
    backward(model, made, x)
    made.step()
    torch.nn.utils.clip_grad_norm_([], 1.0)
    torch.nn.utils.clip_grad_norm_([p for p in nn.Linear(2, 2).parameters() if p.grad is not None], 1.0)
    if hasattr(torch.nn.utils, "get_total_norm"):
        torch.nn.utils.get_total_norm([])


def test_a_norm_of_gradients_that_are_left_scaled_warns() -> None:
    model, optimizer, x = problem("O1")
    backward(model, optimizer, x, delay_unscale=True)
    with pytest.warns(amp.AmpWarning, match="multiplied by the loss scale"):
        torch.nn.utils.get_total_norm(
            [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        )


def test_other_models_are_clipped_as_before() -> None:
    problem("O5")
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert clip_norm(other) == pytest.approx(6**0.5)
    assert sum(p.grad.pow(2).sum() for p in other.parameters()) == pytest.approx(1.0, rel=1e-4)
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)


@pytest.fixture(params=["a_script_that_clips", "code"])
def importer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the script, which may be called as one of the standard library."""
    module = ModuleType(request.param)
    module.__file__ = "/home/user/code.py"
    module.clip = torch.nn.utils.clip_grad_norm_  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_names_are_given_back(importer: Any) -> None:
    original = torch.nn.utils.clip_grad_norm_
    _, first, _ = problem("O2")
    _, second, _ = problem("O2")
    assert importer.clip is torch.nn.utils.clip_grad_norm_ is not original
    amp.get_session(first).close()
    assert importer.clip is torch.nn.utils.clip_grad_norm_ is not original
    amp.get_session(second).close()
    assert importer.clip is torch.nn.utils.clip_grad_norm_ is original
