"""What the fused optimizers share: groups and state as `torch.optim` keeps them, and the one step.

State dicts are those of the `torch.optim` counterpart, in both directions. `step` follows the protocol
of torch's own fused optimizers: `torch.amp.GradScaler` lets it unscale and skip on the device. So does
a session, which lets it write the model's 16-bit weights too; see `amp.scaledgrads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from amp.distributed import groups_of_shards, reduce_norm
from amp.dtypes import SCALABLE
from amp.errors import AmpRuntimeError, AmpTypeError, AmpValueError
from amp.kernels import bulk
from amp.optimizers.launches import Launch, Launches
from amp.scaledgrads import StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp.kernels.stepping import Rule
    from amp.kernels.tables import Plan, Whereabouts


class Formula(NamedTuple):
    """How a group is stepped."""

    rule: Rule
    numbers: Sequence[float | Tensor]


class Work(NamedTuple):
    """What one launch has to do in one step.

    Attributes:
        launch: which parameters.
        grads: their gradients, scaled or not.
        kept: their moments and steps; None where some have to be made first.
        whereabouts: of all these, where a plan may be kept for them.
        plan: how the last step ran, if that still holds.
    """

    launch: Launch
    grads: Sequence[Tensor]
    kept: list[list[Tensor]] | None
    whereabouts: Whereabouts | None
    plan: Plan | None


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is one launch for each group, device and combination of dtypes.

    Args:
        params: parameters, named parameters or groups of them.
        defaults: the hyper-parameters of a group that does not set them.
        set_grad_none: what `zero_grad` does unless it is told.
        max_grad_norm: what to clip the norm of the gradients of all groups to; 0 or None does not clip.
            Gradients of DTensors count with all their shards, others once on each rank.
        state_dtype: `torch.bfloat16` keeps the moments in 16 bits, rounded stochastically with a seed
            that comes from `torch.initial_seed()` and is in the state dict; None keeps them in the
            dtype of what is stepped.

    Raises:
        AmpValueError: a hyper-parameter is out of its range or not a number.
    """

    _step_supports_amp_scaling = True
    _step_takes_scaled_grads = True
    scaled_grads: StepInputs | None = None
    _goes_by_norms = False
    """Whether a step goes by the norm of each tensor, which no rank knows of a DTensor's shards."""
    _required: frozenset[str]
    """What every saved group of this optimizer has."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        set_grad_none: bool,
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if max_grad_norm is not None:
            check_range("max_grad_norm", max_grad_norm)
        check_state_dtype(state_dtype)
        of_all = {
            "fused": True,
            "set_grad_none": set_grad_none,
            "max_grad_norm": max_grad_norm,
            "state_dtype": state_dtype,
            "seed": torch.initial_seed() % 2**31,
        }
        super().__init__(params, {**defaults, **of_all})
        self._launches = Launches()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._launches = Launches()

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

    def _scalars(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of what the state has once for a whole parameter, besides its steps."""
        return ()

    def _from_group(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]]) -> None:
        """Move what a saved group holds for its parameters to their state."""

    def _of_tensor(
        self,
        launch: Launch,
        grads: Sequence[Tensor],
        inputs: StepInputs,
        clip: Tensor | None,
    ) -> Tensor | None:
        """Return a number for each parameter, float32 `[n]`, if the rule takes one."""
        return None

    def _steps_taken(self, entry: Mapping[str, Any]) -> Any:
        """Return the steps of a saved state that does not count them, or None."""
        return None

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise AmpValueError if a group's hyper-parameters make no sense."""
        raise NotImplementedError

    # Groups and state.

    @property
    def max_grad_norm(self) -> float | None:
        """What the norm of all gradients is clipped to; None does not clip."""
        return self.defaults["max_grad_norm"] or None

    @property
    def state_dtype(self) -> torch.dtype | None:
        """The dtype of the moments; None for that of what is stepped. Moments there are follow it."""
        dtype: torch.dtype | None = self.defaults["state_dtype"]
        return dtype

    @state_dtype.setter
    def state_dtype(self, dtype: torch.dtype | None) -> None:
        check_state_dtype(dtype)
        self.defaults["state_dtype"] = dtype
        self._cast_moments()

    def _cast_moments(self) -> None:
        self._launches = Launches()
        for group in self.param_groups:
            group["state_dtype"] = self.state_dtype
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                for name in self._moments(group):
                    if name in state:
                        state[name] = state[name].to(self.state_dtype or parameter.dtype)

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
        state = state_dict["state"] = {key: dict(e) for key, e in state_dict["state"].items()}
        for i, group in enumerate(groups):
            if missing := self._required - group.keys():
                raise self._is_foreign(f"group {i}", missing, group)
            self._check_group({**self.defaults, **group})
            self._from_group(group, state)
            steps = group.pop("step", None)  # apex counts the steps of a group
            for key in group["params"]:
                entry = {name: v for name, v in state.pop(key, {}).items() if v is not None}
                if not entry:
                    continue
                taken = self._steps_taken(entry) if steps is None else steps
                entry = state[key] = {"step": taken, **entry}
                of_group = {**self.defaults, **group}
                names = ("step", *self._moments(of_group), *self._scalars(of_group))
                missing = {name for name in names if entry.get(name) is None}
                if missing:
                    raise self._is_foreign(f"the state of parameter {key}", missing, entry)
                entry["step"] = _as_tensor(entry["step"])
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        super().load_state_dict(state_dict)
        for loaded, group in zip(self.param_groups, groups, strict=True):
            for parameter, key in zip(loaded["params"], group["params"], strict=True):
                for name in self._scalars(group) if key in state else ():  # torch has cast it
                    scalar = _as_tensor(state[key][name])
                    self.state[parameter][name] = scalar.to(parameter.device, copy=True)
        self._cast_moments()

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
            AmpTypeError: a gradient is sparse, or of a dtype that no kernel takes; or a parameter is in
                shards, and the step goes by norms.
            AmpValueError: a hyper-parameter is out of its range or not a number.

        In both cases no parameter has been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs = self._inputs()
        for group in self.param_groups:
            self._check_group(group)
        launches = self._launches.of(self.param_groups, list(self.state), inputs)
        states = list(self.state.values())
        works = [self._prepare(launch, inputs, launch.states(states)) for launch in launches]
        clip = self._clip(works, inputs)
        for work in works:
            self._launch(work, inputs, clip)
        return loss

    def _inputs(self) -> StepInputs:
        """Return what a session or a GradScaler shows, or nothing."""
        inputs = self.scaled_grads
        if inputs is not None:
            return inputs
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        return StepInputs(
            *([], [], [], None),
            None if scale is None else scale.double().reciprocal().float().reshape(1),
            None if found_inf is None else found_inf.reshape(1),
            None,
        )

    def _prepare(self, launch: Launch, inputs: StepInputs, states: list[Any]) -> Work:
        """Find the tensors of a launch; those that are not where the last step had them are checked."""
        from amp.kernels.tables import Located, Whereabouts  # loads Triton

        grads = launch.grads(inputs)
        names = self._names(self.param_groups[launch.index])
        whereabouts = plan = None
        try:
            kept = [bulk.entries(states, name) for name in names]
        except (KeyError, TypeError):  # there is no state yet, or not all of it
            kept = None
        if kept is not None and (isinstance(grads, Located) or bulk.layouts(grads) == {torch.strided}):
            same = [launch.params, launch.models or launch.lows or (), *kept]
            whereabouts = Whereabouts.of(same, grads)
            plan = launch.plan(whereabouts, grads)
        if plan is None:
            self._check(launch, grads)
        return Work(launch, grads, kept, whereabouts, plan)

    def _names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of what a step takes of the state of a group's parameters."""
        return (*self._moments(group), "step")

    def _check(self, launch: Launch, grads: Sequence[Tensor]) -> None:
        """Raise if a gradient, or the state, is not what a step takes."""
        group = self.param_groups[launch.index]
        if self._goes_by_norms and groups_of_shards(launch.stepped):
            sharded = next(p for p in launch.stepped if groups_of_shards([p]))
            raise AmpTypeError(
                f"{_name(sharded, launch.index, group)} is a DTensor cut into shards, and "
                f"{type(self).__name__} steps by the norms of whole tensors"
            )
        for parameter, grad in zip(launch.stepped, grads, strict=True):
            self._check_gradient(grad, parameter, launch.index, group)

    def _check_gradient(
        self, grad: Tensor, parameter: Tensor, index: int, group: dict[str, Any]
    ) -> None:
        if grad.layout is not torch.strided or grad.dtype not in SCALABLE:
            kind = grad.dtype if grad.layout is torch.strided else f"sparse ({grad.layout})"
            raise AmpTypeError(
                f"the gradient of {_name(parameter, index, group)} is {kind}; "
                f"{type(self).__name__} takes dense float16, bfloat16, float32 and float64"
            )
        if parameter.device != grad.device:
            raise AmpRuntimeError(
                f"the gradient of {_name(parameter, index, group)} is on {grad.device}, and what is "
                f"stepped on {parameter.device}: the model was moved. Do that before amp.initialize"
            )
        if self.state_dtype and torch.float64 in (parameter.dtype, grad.dtype):
            raise AmpTypeError(
                f"{_name(parameter, index, group)} is {parameter.dtype} and its gradient {grad.dtype}: "
                f"moments in {self.state_dtype} are of float32 at most. Leave state_dtype out"
            )
        state = self.state.get(parameter, {})
        for name in self._moments(group):
            moment = state.get(name)
            if moment is None:
                continue
            if moment.dtype is not (self.state_dtype or parameter.dtype):
                raise AmpRuntimeError(
                    f"{_name(parameter, index, group)} is {parameter.dtype} and its {name} "
                    f"{moment.dtype}: the parameter's dtype was changed after its first step. Change "
                    "it before, and make a new optimizer"
                )
            if moment.device != grad.device:
                raise AmpRuntimeError(
                    f"the gradient of {_name(parameter, index, group)} is on {grad.device} and its "
                    f"{name} on {moment.device}: the model was moved after its first step. Move it "
                    "before, or load the optimizer's state dict into a new optimizer"
                )

    def _clip(self, works: Sequence[Work], inputs: StepInputs) -> Tensor | None:
        """Return what clipping multiplies the unscaled gradients by, float32 `[1]`. No host sync."""
        max_norm = self.max_grad_norm
        if max_norm is None or inputs.clip is not None or not works:
            return inputs.clip
        from amp.kernels.l2norm import clip_factor, l2norm  # loads Triton

        grads = [grad for work in works for grad in work.grads]
        by_ranks: dict[tuple[Any, ...], list[Tensor]] = {}
        for grad in grads:
            by_ranks.setdefault(tuple(groups_of_shards([grad])), []).append(grad)
        if by_ranks.keys() == {()}:
            return l2norm(by_ranks[()], inputs.inv_scale, max_norm=max_norm).clip
        norms = [
            reduce_norm(l2norm(grads, inputs.inv_scale).total, ranks)
            for ranks, grads in by_ranks.items()
        ]
        together = torch.stack([norm.to(norms[0].device) for norm in norms])
        return clip_factor(torch.linalg.vector_norm(together).reshape(1), max_norm)

    def _launch(self, work: Work, inputs: StepInputs, clip: Tensor | None) -> None:
        """Step the parameters of one launch."""
        from amp.kernels.stepping import step  # loads Triton

        launch = work.launch
        group = self.param_groups[launch.index]
        kept = work.kept
        if kept is None or work.plan is None:
            self._complete(launch, group)
            kept = [[self.state[p][name] for p in launch.stepped] for name in self._names(group)]
        *moments, steps = kept
        seed = None if self.state_dtype is None else group["seed"] + 4 * launch.index + launch.number
        plan = step(
            *self._formula(group),
            launch.params,
            work.grads,
            moments,
            steps,
            models=launch.models,
            lows=launch.lows,
            of_tensor=self._of_tensor(launch, work.grads, inputs, clip),
            seed=seed,
            inv_scale=inputs.inv_scale,
            clip=clip,
            found_inf=inputs.found_inf,
            maximize=group["maximize"],
            known=work.plan,
        )
        launch.keep(plan, work.whereabouts)

    def _complete(self, launch: Launch, group: Mapping[str, Any]) -> None:
        """Make what the state has not, and move the steps of a loaded one to the device."""
        for parameter, like in zip(launch.stepped, launch.params, strict=True):
            state = self.state[parameter]
            whole = like.dtype if launch.lows is None else torch.float32
            for name in self._moments(group):
                if name not in state:
                    state[name] = torch.full_like(
                        like,
                        self._first_moment(group),
                        dtype=self.state_dtype or whole,
                        memory_format=torch.preserve_format,
                    )
            for name in ("step", *self._scalars(group)):
                if name not in state:
                    state[name] = torch.zeros((), dtype=torch.float32, device=like.device)
            if state["step"].device != like.device:
                state["step"] = state["step"].to(like.device, non_blocking=True)


def _as_tensor(number: Any) -> Tensor:
    """Return a number as a float32 tensor, on the CPU if it is on no device."""
    if isinstance(number, Tensor):
        return number.to(torch.float32, copy=True)  # each parameter has its own
    return torch.tensor(number, dtype=torch.float32, device="cpu")


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


def check_state_dtype(dtype: Any) -> None:
    """Raise AmpValueError unless moments can be kept in it."""
    if dtype not in (None, torch.bfloat16):
        raise AmpValueError(f"state_dtype={dtype!r} is not one of torch.bfloat16, None")


def check_betas(betas: Any) -> None:
    """Raise AmpValueError unless these are two numbers in [0, 1)."""
    if not isinstance(betas, Iterable) or len(betas := list(betas)) != 2:
        raise AmpValueError(f"betas={betas!r} must be two numbers")
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, below=1.0)
