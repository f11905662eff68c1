"""The states of gradients, as the table of `amp/training/gradients.py` has them.

Scripts that hypothesis writes (`tests/gradient_machine.py`) run beside an oracle in plain FP64
(`tests/gradient_oracle.py`).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

import amp
from amp.errors import AmpRuntimeError, AmpWarning
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.gradients import State
from tests.gradient_harness import Model, compare, profile_of
from tests.gradient_machine import Script
from tests.levels import LEVELS, WITH_MASTERS
from tests.models import run_backward

LEAN = [(level, kind) for level in WITH_MASTERS for kind in ("split16", "split24", "kahan")]


def run(level: str, examples: int, steps: int, *, shrink: bool, lean: str | None = None) -> None:
    """Run scripts of so many actions at one level, always the same ones.

    To shrink a failure takes minutes; without that, the whole script that fails is printed at once.
    """
    warnings.filterwarnings("ignore", ".* overflows in a row", AmpWarning)  # long scripts have these
    warnings.filterwarnings("ignore", ".* came from no amp.scale_loss block", AmpWarning)  # strays
    warnings.filterwarnings("ignore", ".* does not name its optimizer", AmpWarning)
    warnings.filterwarnings(
        "ignore", ".* with the same values", AmpWarning
    )  # by chance: small integers
    if not profile_of(level).master_weights:
        examples //= 2  # most of the table is about masters
    script = type(f"ScriptAt{level}", (Script,), {"level": level, "lean": lean})
    scripts_of_its_own = hypothesis.seed(list(LEVELS).index(level))
    run_state_machine_as_test(
        scripts_of_its_own(script),
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.parametrize("level", LEVELS)
def test_any_script(level: str) -> None:
    run(level, examples=5, steps=20, shrink=False)


@pytest.mark.parametrize(("level", "kind"), LEAN)
def test_any_script_with_lean_masters(level: str, kind: str) -> None:
    run(level, examples=8 if kind == "split16" else 4, steps=20, shrink=False, lean=kind)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_any_long_script(level: str) -> None:
    run(level, examples=16, steps=40, shrink=True)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "kind"), LEAN)
def test_any_long_script_with_lean_masters(level: str, kind: str) -> None:
    run(level, examples=16, steps=40, shrink=True, lean=kind)


# What the machine has found in the library, or in a change that was made to try it, each alone.


def two_optimizers(level: str = "O1") -> tuple[Model, Any, Any]:
    """Return a model with two losses, at two scales, and two optimizers."""
    model = Model(0)
    one, other = [torch.optim.SGD([getattr(model, name)], lr=0.5) for name in ("shift", "late_shift")]
    scaling = {"init": 64, "growth_interval": 100}
    amp.initialize(model, [one, other], opt_level=level, num_losses=2, loss_scale=scaling, verbosity=0)
    return model, one, other


def run_block(model: Model, optimizers: Any, name: str, number: float = 1.0, **kwargs: Any) -> None:
    run_backward(model({name: number * Model.BASES[name]}), optimizers, **kwargs)


def test_a_nested_block_of_another_loss_is_refused_before_anything_moves() -> None:
    model, one, other = two_optimizers()
    run_block(model, one, "shift", delay_unscale=True)
    run_block(model, other, "late_shift", delay_unscale=True)
    with amp.scale_loss(model({"shift": Model.BASES["shift"]}), one) as scaled_loss:
        with (
            pytest.raises(AmpRuntimeError, match="inside another amp.scale_loss block"),
            amp.scale_loss(torch.ones(()), [other, one], loss_id=1),
        ):
            pass
        assert AttachedOptimizer.of(other).gradients.state is State.DELAYED
        scaled_loss.backward()
    compare(model.shift.grad, 2 * Model.BASES["shift"], "the gradient")


def test_zeros_are_written_for_gradients_that_a_delayed_block_has_set_aside() -> None:
    model, one, other = two_optimizers()
    run_block(model, one, "shift")
    run_block(model, [one, other], "late_shift", delay_unscale=True)
    one.zero_grad(set_to_none=False)
    compare(model.shift.grad, torch.zeros(2), "the gradient")


def test_an_overflow_that_a_delayed_block_has_set_aside_is_not_forgotten() -> None:
    model, one, other = two_optimizers()
    before = model.shift.detach().clone()
    run_block(model, one, "shift", math.inf)
    run_block(model, [one, other], "late_shift", delay_unscale=True)
    run_block(model, [one, other], "late_shift")
    one.step()
    assert torch.equal(model.shift, before)


def test_a_delayed_block_at_a_scale_that_another_delayed_block_moves_is_unscaled_first() -> None:
    model, one, other = two_optimizers()
    run_block(model, other, "late_shift", math.inf, delay_unscale=True)
    run_block(model, one, "shift")
    run_block(model, one, "shift", delay_unscale=True)
    run_block(model, [one, other], "shift")  # halves the scale by what `other` has delayed
    assert amp.loss_scale(0) == 32
    compare(model.shift.grad, 3 * Model.BASES["shift"], "the gradient")
