"""What the fused optimizers share: groups and state as `torch.optim` keeps them, and the one step.

State dicts are those of the `torch.optim` counterpart, in both directions. `step` follows the protocol
of torch's own fused optimizers: `torch.amp.GradScaler` lets it unscale and skip on the device. So does
a session, which lets it write the model's 16-bit weights too; see `amp.scaledgrads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from amp.dtypes import SCALABLE
from amp.errors import AmpTypeError, AmpValueError
from amp.scaledgrads import StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp.kernels.stepping import Rule


class Formula(NamedTuple):
    """How a group is stepped."""

    rule: Rule
    numbers: Sequence[float | Tensor]


class _Work(NamedTuple):
    """What one launch of a group's step is given."""

    group: dict[str, Any]
    formula: Formula
    params: list[Tensor]
    grads: list[Tensor]
    models: list[Tensor] | None


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is one launch for each group, device and combination of dtypes.

    Args:
        params: parameters, named parameters or groups of them.
        defaults: the hyper-parameters of a group that does not set them.
        set_grad_none: what `zero_grad` does unless it is told.

    Raises:
        AmpValueError: a hyper-parameter is out of its range or not a number.
    """

    _step_supports_amp_scaling = True
    _step_takes_scaled_grads = True
    scaled_grads: StepInputs | None = None
    _required: frozenset[str]
    """What every saved group of this optimizer has."""

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        super().__init__(params, {**defaults, "fused": True, "set_grad_none": set_grad_none})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take it that a subclass's own `step` looks at gradients, unless it says that it does not."""
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls) and "_step_takes_scaled_grads" not in vars(cls):
            cls._step_takes_scaled_grads = False

    # What an optimizer has of its own.

    def _formula(self, group: Mapping[str, Any]) -> Formula:
        """Return a group's rule, and its hyper-parameters as the rule takes them."""
        raise NotImplementedError

    def _moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments in the state of a group's parameters, in the rule's order."""
        raise NotImplementedError

    def _first_moment(self, group: Mapping[str, Any]) -> float:
        """Return what moments start at."""
        return 0.0

    def _steps_taken(self, entry: Mapping[str, Any]) -> Any:
        """Return the steps of a saved state that does not count them, or None."""
        return None

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise AmpValueError if a group's hyper-parameters make no sense."""
        raise NotImplementedError

    # Groups and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group` does.

        Raises:
            AmpValueError: a hyper-parameter is out of its range or not a number.
        """
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, by default in the way that the optimizer was made with."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: of this class, of its `torch.optim` counterpart, or apex's.

        Raises:
            AmpValueError: it is another optimizer's. Nothing has been changed then.
        """
        state_dict = copy(state_dict)
        groups = state_dict["param_groups"] = [
            {**group, "fused": True} for group in state_dict["param_groups"]
        ]
        state = state_dict["state"] = dict(state_dict["state"])
        for i, group in enumerate(groups):
            if missing := self._required - group.keys():
                raise self._is_foreign(f"group {i}", missing, group)
            self._check_group({**self.defaults, **group})
            steps = group.pop("step", None)  # apex counts the steps of a group
            for key in group["params"]:
                entry = {name: v for name, v in state.pop(key, {}).items() if v is not None}
                if not entry:
                    continue
                taken = self._steps_taken(entry) if steps is None else steps
                entry = state[key] = {"step": taken, **entry}
                names = ("step", *self._moments({**self.defaults, **group}))
                missing = {name for name in names if entry.get(name) is None}
                if missing:
                    raise self._is_foreign(f"the state of parameter {key}", missing, entry)
                entry["step"] = torch.as_tensor(entry["step"], dtype=torch.float32)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        super().load_state_dict(state_dict)

    def _is_foreign(self, what: str, missing: Set[str], found: Mapping[str, Any]) -> AmpValueError:
        return AmpValueError(
            f"{what} in the state dict has no {', '.join(sorted(missing))}, only "
            f"{', '.join(map(str, found))}: it is not a {type(self).__name__}'s. Load it into an "
            "optimizer of the class that saved it"
        )

    # The step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient. On a device with Triton the host does not wait.

        Args:
            closure: evaluates the model and returns the loss, as with `torch.optim`.

        Raises:
            AmpTypeError: a gradient is sparse, or of a dtype that no kernel takes.
            AmpValueError: a hyper-parameter is out of its range or not a number.

        In both cases no parameter has been stepped.
        """
        from amp.kernels.stepping import step  # loads Triton

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs = self._inputs()
        work = [
            launch
            for i, group in enumerate(self.param_groups)
            for launch in self._work_of(i, group, inputs.grads)
        ]
        for group, formula, params, grads, models in work:
            states = [self._state_of(parameter, group) for parameter in params]
            step(
                *formula,
                params,
                grads,
                [[state[name] for state in states] for name in self._moments(group)],
                [state["step"] for state in states],
                models=models,
                inv_scale=inputs.inv_scale,
                found_inf=inputs.found_inf,
                maximize=group["maximize"],
            )
        return loss

    def _inputs(self) -> StepInputs:
        """Return what a session or a GradScaler shows, or nothing."""
        inputs = self.scaled_grads
        if inputs is not None:
            return inputs
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        return StepInputs(
            {},
            None if scale is None else scale.double().reciprocal().float().reshape(1),
            None if found_inf is None else found_inf.reshape(1),
            None,
        )

    def _work_of(
        self,
        index: int,
        group: dict[str, Any],
        scaled: Mapping[Tensor, tuple[Tensor, Tensor | None]],
    ) -> Iterator[_Work]:
        """Return what a group's launches are given, and change nothing."""
        self._check_group(group)
        alone: list[tuple[Tensor, Tensor, Any]] = []
        masters: list[tuple[Tensor, Tensor, Any]] = []
        for parameter in group["params"]:
            grad, model = scaled.get(parameter) or (parameter.grad, None)
            if grad is None:
                continue
            if grad.layout is not torch.strided or grad.dtype not in SCALABLE:
                kind = grad.dtype if grad.layout is torch.strided else f"sparse ({grad.layout})"
                raise AmpTypeError(
                    f"the gradient of {_name(parameter, index, group)} is {kind}; "
                    f"{type(self).__name__} takes dense float16, bfloat16, float32 and float64"
                )
            (alone if model is None else masters).append((parameter, grad, model))
        formula = self._formula(group)
        for entries in (alone, masters):
            if entries:
                params, grads, models = map(list, zip(*entries, strict=True))
                yield _Work(group, formula, params, grads, models if entries is masters else None)

    def _state_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in self._moments(group):
                state[name] = torch.full_like(
                    parameter, self._first_moment(group), memory_format=torch.preserve_format
                )
        elif state["step"].device != parameter.device:  # a loaded one
            state["step"] = state["step"].to(parameter.device, non_blocking=True)
        return state


def _name(parameter: Tensor, index: int, group: dict[str, Any]) -> str:
    """Return how to call a parameter in a message."""
    at = next(i for i, candidate in enumerate(group["params"]) if candidate is parameter)
    where = f"param_groups[{index}]['params'][{at}], of shape {tuple(parameter.shape)},"
    names = group.get("param_names")
    return f"'{names[at]}', {where}" if names else where


def check_range(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise AmpValueError unless `low <= value < below`. A tensor on a device is not looked at.

    The host would wait for it.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise AmpValueError(f"{name} has shape {tuple(value.shape)}; give it one element")
        if value.device.type != "cpu":
            return
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise AmpValueError(f"{name}={value!r} is no number")
    if not low <= float(value) < below:
        limits = f"at least {low:g}" + (f" and below {below:g}" if below < math.inf else " and finite")
        raise AmpValueError(f"{name}={float(value):g} must be {limits}")


def check_betas(betas: Any) -> None:
    """Raise AmpValueError unless these are two numbers in [0, 1)."""
    if not isinstance(betas, Iterable) or len(betas := list(betas)) != 2:
        raise AmpValueError(f"betas={betas!r} must be two numbers")
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, below=1.0)
