"""What the state machine of gradients trains: a model, optimizers, and their twins without amp.

The last class, `Stage`, puts them beside their oracle and says what must be true after each action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.optimizers import FusedAdam, FusedLAMB, FusedSGD
from amp.profiles.levels import load_profile
from amp.profiles.loss_scaling import parse_loss_scale
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.deferred_gradients import DeferredGradient
from tests import gradient_oracle as oracle

SCALINGS: dict[str, Any] = {
    "as the level has it": None,
    "static": 64.0,
    "dynamic": {"init": 256, "growth_interval": 3, "max": 1024, "min": 4},
    "restless": {"init": 64, "growth_interval": 1, "max": 1024},
    "hysteresis": {"init": 256, "growth_interval": 2, "max": 1024, "min": 0.5, "hysteresis": 2},
    "checked": {"mode": "static", "init": 1, "check": True},
    "checked at 64": {"mode": "static", "init": 64, "check": True},
    "consecutive": {
        "init": 64,
        "growth_interval": 4,
        "max": 256,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
    },
}
"""Values of `loss_scale`; powers of two, so that scaling rounds nothing."""

profile_of = functools.cache(load_profile)

_ADAM: dict[str, Any] = {"lr": 2**-5, "eps": 1e-3, "weight_decay": 0.01}
_SGD: dict[str, Any] = {"lr": 2**-7, "momentum": 0.5, "weight_decay": 0.125}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, **_SGD),
    "AdamW": lambda params: torch.optim.AdamW(params, **_ADAM),
    # With momentum torch's own raises where a parameter has its first gradient later than another.
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=2**-7, fused=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True, **_ADAM),
    "FusedSGD": lambda params: FusedSGD(params, **_SGD),
    "FusedAdam": lambda params: FusedAdam(params, **_ADAM),
    "FusedAdam, clipping": lambda params: FusedAdam(params, max_grad_norm=4.0, **_ADAM),
    "FusedLAMB": lambda params: FusedLAMB(params, max_grad_norm=0.0, **_ADAM),
}
FUSED = [kind for kind in OPTIMIZERS if kind.startswith("Fused")]
TWIN_OF = {"FusedAdam": "AdamW"}
"""Whose steps are the same; any other optimizer is its own twin."""


class Model(nn.Module):
    """Parameters of every sort, whose gradients are what the model is given, exactly."""

    BASES: Mapping[str, Tensor] = {
        "linear.weight": torch.tensor([[1.0, -1.0, 2.0]] * 2),
        "norm.weight": torch.tensor([2.0, 1.0, -1.0]),
        "shift": torch.tensor([1.0, -2.0]),
        "norm.bias": torch.tensor([-1.0, 1.0, 2.0]),
        "late_shift": torch.tensor([-2.0, 1.0]),
        "late_norm.bias": torch.tensor([1.0, 1.0]),
    }
    """What the gradient of each parameter is a multiple of."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 2, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.shift = nn.Parameter(torch.empty(2))
        self.late_shift = nn.Parameter(torch.empty(2))
        self.late_norm = nn.BatchNorm1d(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(0.5, 1.5)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return a loss whose gradients are the inputs; rows of the linear layer's are equal."""
        parameters = dict(self.named_parameters())
        parts = [
            F.linear(x[:1], self.linear.weight).sum()
            if name == "linear.weight"
            else (parameters[name] * x).sum()
            for name, x in inputs.items()
        ]
        return functools.reduce(torch.add, parts)


class Twin:
    """An optimizer without amp, of copies of what amp's optimizer steps.

    Args:
        make: makes it.
        dtype: of the copies.
    """

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> None:
        self._make, self._dtype = make, dtype
        self.copies: list[nn.Parameter] = []

    def follow(self, optimizer: torch.optim.Optimizer, values: Iterable[Tensor]) -> None:
        """Take over an optimizer's groups and state, and the values of its parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        copy_of = {
            parameter: nn.Parameter(self._copied(value.detach()))
            for parameter, value in zip(parameters, values, strict=True)
        }
        self.optimizer = self._make(
            [{"params": [copy_of[p] for p in group["params"]]} for group in optimizer.param_groups]
        )
        for parameter, copied in copy_of.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    value = self._copied(torch.as_tensor(value))
                    self.optimizer.state[copied][key] = value.float() if key == "step" else value
        self.copies = list(copy_of.values())

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype, copy=True)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step with these gradients."""
        for copied, gradient in zip(self.copies, gradients, strict=True):
            copied.grad = None if gradient is None else gradient.to(self._dtype)
        self.optimizer.step()


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return copies of a parameter's state, without what is still zero or None, as it starts."""
    entries = optimizer.state.get(parameter, {})
    values = {key: torch.as_tensor(value) for key, value in entries.items() if value is not None}
    return {key: value.clone() for key, value in values.items() if value.count_nonzero()}


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in FP64."""
    return tensor.detach().to(torch.float64, copy=True)


def compare(
    actual: Tensor | None,
    expected: Tensor | None,
    what: str,
    tolerance: float = 0.0,
    absolute: float | None = None,
) -> None:
    """Compare a tensor with what it must be; without a tolerance to the last bit."""
    assert (actual is None) == (expected is None), f"{what}: {actual} instead of {expected}"
    if actual is not None and expected is not None and not torch.equal(wide(actual), wide(expected)):
        torch.testing.assert_close(
            wide(actual),
            wide(expected),
            rtol=tolerance,
            atol=tolerance if absolute is None else absolute,
            equal_nan=True,
            msg=lambda text: f"{what}: {actual} instead of {expected}. {text}",
        )


OWN = (("linear.weight", "norm.weight"), ("shift", "norm.bias"))
"""What each of the two optimizers has from the start."""
LATE = ("late_shift", "late_norm.bias")
"""What each gets as another group."""


class Stage(RuleBasedStateMachine):
    """Two optimizers and two losses beside their oracle, and what is true after each action."""

    level: str
    """The opt level; given by a subclass."""
    lean: str | None = None
    """The kind of masters, unless they are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.has_late = [False, False]
        self.frozen: set[str] = set()
        self.was_saved = False
        self.is_inexact = [False, False]
        """Whether gradients of an optimizer were rounded, by clipping their norm."""
        self.is_blurred = [False, False]
        """Whether a lean master was written, and may have any low bits, since it was looked at."""
        self.steps_taken = 0

    @initialize(
        scaling=st.sampled_from(list(SCALINGS)),
        kinds=st.tuples(*[st.sampled_from(list(OPTIMIZERS))] * 2),
    )
    def start(self, scaling: str, kinds: tuple[str, str]) -> None:
        if self.lean == "split24":  # is for optimizers that round stochastically
            kinds = tuple(kind if kind in FUSED else "FusedAdam" for kind in kinds)  # type: ignore
        self.kinds = kinds
        profile = profile_of(self.level)
        scale = SCALINGS[scaling]
        if scale is None and profile.loss_scaling.dynamic:
            scale = {"init": 512, "max": 1024}  # 2**16 is too much for these gradients
        self.options: dict[str, Any] = {} if scale is None else {"loss_scale": scale}
        if self.lean is not None:
            self.options["master_weights"] = self.lean
        config = profile.loss_scaling if scale is None else parse_loss_scale("loss_scale", scale)
        self.make(seed=0)
        self.scales = [oracle.Scale(config), oracle.Scale(config)]
        self.expected = [
            oracle.Optimizer(getattr(optimizer, "_step_takes_scaled_grads", False))
            for optimizer in self.optimizers
        ]
        for i, names in enumerate(OWN):
            for name in names:
                self.expect_parameter(i, name)
            self.follow(i)

    def make(self, seed: int) -> None:
        """Make the model and the optimizers, and initialize them."""
        self.model = Model(seed)
        self.named = dict(self.model.named_parameters())
        self.optimizers = [
            OPTIMIZERS[kind]([self.named[name] for name in names])
            for kind, names in zip(self.kinds, OWN, strict=True)
        ]
        amp.initialize(
            self.model, self.optimizers, opt_level=self.level, num_losses=2, verbosity=0, **self.options
        )
        for i, has in enumerate(self.has_late):
            if has:
                self.optimizers[i].add_param_group({"params": [self.named[LATE[i]]]})
        for name in self.frozen:
            self.named[name].requires_grad_(False)
        dtype = torch.float32 if self.level == "O0" else torch.float64
        self.twins = [Twin(OPTIMIZERS[TWIN_OF.get(kind, kind)], dtype) for kind in self.kinds]

    def expect_parameter(self, i: int, name: str) -> None:
        is_cast = self.named[name].dtype is not torch.float32
        has_master = is_cast and bool(profile_of(self.level).master_weights)
        self.expected[i].gradients[name] = oracle.Gradient(has_master)

    def teardown(self) -> None:
        if amp.get_session() is not None:
            amp.get_session().close()

    def stepped(self, i: int) -> dict[str, Any]:
        """Return what an optimizer steps, by the name of the model's parameter."""
        stepped = amp.master_params(self.optimizers[i])
        return dict(zip(self.expected[i].gradients, stepped, strict=True))

    def values(self, i: int) -> dict[str, Tensor]:
        """Return the weights that an optimizer steps, by name: masters where there are any.

        What is whole is not looked at by amp for that.
        """
        stepped = [p for group in self.optimizers[i].param_groups for p in group["params"]]
        values = dict(zip(self.expected[i].gradients, map(Tensor.detach, stepped), strict=True))
        if self.lean is None:
            return values
        saved = self.model.state_dict()
        masters = self.expected[i].gradients.items()
        return values | {name: saved[name] for name, gradient in masters if gradient.has_master}

    def follow(self, i: int) -> None:
        """Let the twin go on from what its optimizer has."""
        self.twins[i].follow(self.optimizers[i], self.values(i).values())

    def tolerance(self, i: int) -> float:
        """Return how far a gradient may be from the oracle's."""
        if not self.is_inexact[i]:
            return 0.0
        return 1e-2 if self.level == "O3" else 1e-6  # gradients of O3 are in FP16

    @invariant()
    def scales_are_as_expected(self) -> None:
        for i, (scale, entry) in enumerate(zip(self.scales, amp.state_dict().values(), strict=False)):
            assert amp.loss_scale(i) == scale.value
            if scale.config.dynamic:
                assert (entry["unskipped"], entry["hysteresis_left"]) == (scale.good, scale.hysteresis)

    @invariant()
    def states_and_verdicts_are_those_of_the_table(self) -> None:
        for optimizer, expected in zip(self.optimizers, self.expected, strict=True):
            attached = AttachedOptimizer.of(optimizer)
            assert attached is not None
            assert attached.gradients.state in expected.states
            found = [v.found_inf.item() > 0 for v in attached.gradients.verdicts.found]
            assert found == list(map(bool, expected.verdicts)), f"{found}, not {expected.verdicts}"

    @invariant()
    def models_have_the_weights_of_masters(self) -> None:
        for i, expected in enumerate(self.expected):
            for name, stepped in self.stepped(i).items():
                assert (stepped is not self.named[name]) == expected.gradients[name].has_master, name
            for name, value in self.values(i).items():
                model = self.named[name]
                if self.lean is None:
                    assert torch.equal(model, value.to(model.dtype)), name
                else:  # stochastic rounding may end half way between two weights
                    half_a_unit = torch.finfo(model.dtype).eps / 2
                    compare(value, model, f"the master of {name}", half_a_unit, 2.0**-25)

    @invariant()
    def weights_are_what_was_written_and_stepped(self) -> None:
        """Lean masters have any low bits after a write, and then keep them."""
        for i, twin in enumerate(self.twins):
            for (name, value), copied in zip(self.values(i).items(), twin.copies, strict=True):
                compare(value, copied, name, self.blur(i, name))
            if self.is_blurred[i]:
                self.follow(i)
                self.is_blurred[i] = False

    def blur(self, i: int, name: str) -> float:
        """Return how far a lean master may be from what was written to its parameter."""
        has_master = self.expected[i].gradients[name].has_master
        return torch.finfo(self.named[name].dtype).eps if has_master and self.is_blurred[i] else 0.0

    @invariant()
    def models_have_the_gradients_that_backward_left(self) -> None:
        for i, expected in enumerate(self.expected):
            self.stepped(i)  # what was assigned to a master's is at the model's after a look at masters
            for name, gradient in expected.gradients.items():
                what = f"the model's gradient of {name}"
                grad, must_be = self.named[name].grad, expected.in_model(gradient)
                if isinstance(grad, DeferredGradient) and must_be is not None:
                    continue  # a look would unscale it
                compare(grad, must_be, what, self.tolerance(i))
