"""`FusedOptimizer`, the base class of the fused optimizers: groups, state and step.

State dicts are compatible with those of the `torch.optim` counterpart, in both directions. `step`
follows the protocol of torch's own fused optimizers: under `torch.amp.GradScaler` it unscales and skips
on the device. In a session it does so too, and also writes the model's 16-bit weights; see
`amp.training.step_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from amp.errors import AmpTypeError, AmpValueError, brief, truth_of
from amp.kernels import host_lists
from amp.kernels.interrupts import without_grad
from amp.optimizers.batches import Batches
from amp.optimizers.checks import check_betas, check_entries, check_range, unusable_entry
from amp.optimizers.fused_step import Ready, step_batches
from amp.optimizers.state_dicts import PACKED, as_own_state, pack_moments, unpack_moments
from amp.other_names import names_keywords
from amp.profiles.properties import STATE_DTYPES, StateDtype
from amp.state_checks import all_or_nothing, as_plain
from amp.training.step_inputs import StepInputs, inputs_outside_of_a_session

if TYPE_CHECKING:
    from amp.kernels.rule import Moment, UpdateRule


_FLAGS = (
    *("bias_correction", "maximize", "amsgrad", "nesterov", "adam_w_mode", "grad_averaging"),
    *("use_nvlamb", "reg_inside_moment", "init_zero", "set_grad_none", "capturable"),
    *("decoupled_weight_decay", "wd_after_momentum", "adagrad_w_mode"),
)
"""The hyper-parameters of all fused optimizers that are true or false."""


def _is_constant(group: Mapping[str, Any]) -> bool:
    """Whether no code can change a hyper-parameter of a group in place."""
    values = [value for name, value in group.items() if name not in ("params", "param_names")]
    parts = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return all(isinstance(x, (bool, int, float, str, torch.dtype, type(None))) for x in parts)


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is one launch for each group, device and combination of dtypes.

    Args:
        params: parameters, named parameters or groups of them.
        defaults: the hyper-parameters of a group that does not set them. `maximize` steps along the
            gradients.
        set_grad_none: whether `zero_grad()` by default removes gradients, or writes zeros.
        max_grad_norm: the largest total norm of the gradients of all groups, to which they are clipped;
            0 or None does not clip. For DTensors all shards count, for other tensors only this rank's
            gradients.
        state_dtype: `torch.bfloat16` keeps each moment in 16 bits; `"packed16"` keeps two moments
            together in 16 bits, and one moment in bfloat16. Both round stochastically. None keeps
            moments in the dtype of the master or parameter. The random bits depend on each group's
            `seed`, 0 at first, the parameter's name, the step and the element's place in memory, and
            not on torch's generators or on how a parameter is divided among ranks.

    Raises:
        AmpValueError: a hyper-parameter is out of its range or not a number, or asks for what is not
            supported.
    """

    _step_supports_amp_scaling = True
    _step_takes_scaled_grads = True
    scaled_grads: Any = None
    """The `StepInputs` that a session sets while this optimizer steps."""

    _ranges: tuple[str, ...] = ("lr", "eps", "weight_decay")
    """The hyper-parameters, besides betas, that must be finite and at least 0."""
    _required: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay")
    """The hyper-parameters that every saved group must have."""
    _scalars: tuple[str, ...] = ()
    """The state entries, besides `step`, that are one number for a whole parameter."""
    _uncounted_steps: int | None = None
    """The number of steps of a saved state that does not count them; None if each must count."""
    _goes_by_norms = False
    """Whether a step uses the norm of each tensor."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        set_grad_none: bool,
        max_grad_norm: float | None = None,
        state_dtype: StateDtype | None = None,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            raise AmpTypeError(
                f"{type(self).__name__} takes parameters, and got the model itself, a "
                f"{type(params).__name__}: pass model.parameters()"
            )
        if max_grad_norm is not None:
            check_range("max_grad_norm", max_grad_norm)
        self._check_state_dtype(state_dtype)
        settings = {**defaults, "fused": True, "set_grad_none": set_grad_none}
        settings |= {"max_grad_norm": max_grad_norm, "state_dtype": state_dtype, "seed": 0}
        plain = {n: truth_of(n, x) if n in _FLAGS else as_plain(x) for n, x in settings.items()}
        super().__init__(params, plain)
        self._forget_steps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_steps()

    def _forget_steps(self) -> None:
        """Forget the batches and checks of the last step."""
        self._batches = Batches()
        self._checked: list[Any] = []
        """The content of the groups when they were checked, if it cannot change in place."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make a session skip steps, and unscale gradients, for a subclass with its own `step`.

        Unless the subclass declares that its `step` reads `found_inf`, or `scaled_grads`, itself.
        """
        super().__init_subclass__(**kwargs)
        cls.__init__ = names_keywords(cls.__init__)  # type: ignore[method-assign]
        for name in ("_step_takes_scaled_grads", "_step_supports_amp_scaling"):
            if "step" in vars(cls) and name not in vars(cls):
                setattr(cls, name, False)

    # Overridden by the optimizers.

    def _rule(self, group: Mapping[str, Any] | None = None) -> UpdateRule:
        """Return the formula for a group; without a group, one that has all moments."""
        raise NotImplementedError

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise AmpTypeError or AmpValueError if a group's hyper-parameters make no sense."""
        for name in _FLAGS:
            truth_of(name, group.get(name))
        for name in self._ranges:
            check_range(name, group[name])
        if "betas" in self.defaults:
            check_betas(group["betas"])

    def _moments(self, group: Mapping[str, Any] | None = None) -> dict[str, Moment]:
        """Return the moments that a group has, or without a group those it may have, by their names."""
        return {moment.name: moment for moment in self._rule(group).moments}

    def _of_tensor(self, one: Ready, clip: Tensor | None, inputs: StepInputs) -> Tensor | None:
        """Return a number for each parameter, float32 `[n]`, if the rule takes one.

        Args:
            one: the parameters and their gradients.
            clip: float32 `[1]`, what the unscaled gradients are multiplied by; None is 1.
            inputs: the inputs of the step: whether it is skipped, and the plan to add writes to.
        """
        return None

    def _from_group(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]]) -> None:
        """Move what a saved group holds for its parameters to their state."""

    # Groups and state.

    @property
    def max_grad_norm(self) -> float | None:
        """The largest norm of all gradients, to which they are clipped; None does not clip."""
        return self.defaults["max_grad_norm"] or None

    @property
    def state_dtype(self) -> StateDtype | None:
        """How moments are kept; None in the parameter's dtype. Setting it casts existing moments."""
        return self.defaults["state_dtype"]  # type: ignore[no-any-return]

    @state_dtype.setter
    def state_dtype(self, dtype: StateDtype | None) -> None:
        self._check_state_dtype(dtype)
        self.defaults["state_dtype"] = dtype
        self._cast_moments()

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """The dtype of tensors that keep moments, int16 for two in one; None for the parameter's."""
        if not isinstance(self.state_dtype, str):
            return self.state_dtype
        return torch.int16 if self._rule().packs else torch.bfloat16

    def _kept(self, group: Mapping[str, Any] | None = None) -> Iterable[str]:
        """Return the names of the entries in which moments are kept, as `_moments` does."""
        return (PACKED,) if self.kept_dtype is torch.int16 else self._moments(group)

    def _check_state_dtype(self, dtype: Any) -> None:
        """Raise AmpValueError unless moments can be kept in this dtype."""
        if dtype is not None and dtype not in STATE_DTYPES:
            names = ", ".join(map(repr, STATE_DTYPES))
            raise AmpValueError(f"state_dtype={brief(dtype)} is not one of {names}, None")

    def _check_state(self) -> None:
        """Raise AmpValueError if no step could have made a parameter's state."""
        for index, group in enumerate(self.param_groups):
            for place in range(len(group["params"])):
                check_entries(self, index, place)

    def _cast_moments(self) -> None:
        self._forget_steps()
        for group in self.param_groups:
            group["state_dtype"] = self.state_dtype
            for parameter in group["params"]:
                if not (state := self.state.get(parameter)) or unusable_entry(self, parameter):
                    continue  # the step refuses it by name
                dtype = self.kept_dtype or parameter.dtype
                if dtype is torch.int16:
                    pack_moments(state, parameter)
                    continue
                unpack_moments(state, parameter, dtype)
                for name in state.keys() & self._moments(group):
                    state[name] = state[name].to(dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group` does.

        Raises:
            AmpTypeError: it is no dict, or a flag is neither true nor false.
            AmpValueError: it has no params, or a hyper-parameter is out of its range or not a number.
        """
        if not isinstance(param_group, dict):
            raise AmpTypeError(f"a group of parameters is a dict, and not {brief(param_group)}")
        if "params" not in param_group:
            got = f"a group of parameters needs 'params', and got {brief(param_group)}"
            raise AmpValueError(f"{got}: pass {{'params': model.parameters()}}")
        self._check_group({**self.defaults, **param_group})
        for name in self.defaults.keys() & param_group:
            param_group[name] = as_plain(param_group[name])
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, by default as `set_grad_none` says."""
        to_none = self.defaults["set_grad_none"] if set_to_none is None else set_to_none
        if to_none and not torch.compiler.is_compiling():
            for group in self.param_groups:
                host_lists.lists.clear_grads(list(group["params"]))
        else:
            super().zero_grad(to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of its `torch.optim` counterpart, or of apex's.

        The host waits once for each device, to check the values.

        Raises:
            AmpTypeError, AmpValueError: it is another optimizer's, or an entry is not what it should
                be. Nothing has been changed then.
        """
        # Tensors copied in inference mode could not be stepped outside of it.
        with torch.inference_mode(False), all_or_nothing(self):
            own = as_own_state(self, state_dict)
            # torch would cast all to the parameter's dtype.
            exact = {*self._scalars, *(self._kept() if self.state_dtype is not None else ())}
            aside = {
                key: {name: entry.pop(name) for name in list(entry) if name in exact}
                for key, entry in own["state"].items()
            }
            super().load_state_dict(own)
            for loaded, group in zip(self.param_groups, own["param_groups"], strict=True):
                for parameter, key in zip(loaded["params"], group["params"], strict=True):
                    if key in aside:
                        self.state[parameter] |= aside[key]
            self._cast_moments()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of the `torch.optim` counterpart: packed moments become two in
        bfloat16.

        They become the same packed moments again when they are loaded, also from float32.
        """
        saved = super().state_dict()
        state = {key: dict(x) if isinstance(x, dict) else x for key, x in saved["state"].items()}
        for own, group in zip(self.param_groups, saved["param_groups"], strict=True):
            for parameter, key in zip(own["params"], group["params"], strict=True):
                unpack_moments(state.get(key, {}), parameter, torch.bfloat16)
        return {**saved, "state": state}

    # The step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @without_grad
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient. On a device with Triton the host does not wait.

        Args:
            closure: evaluates the model and returns the loss, as with `torch.optim`.

        Raises:
            AmpTypeError: a gradient is sparse, or of a dtype that no kernel takes; or a parameter is a
                flat shard of `FullyShardedDataParallel`, and the step uses norms.
            AmpValueError: a hyper-parameter is out of its range or not a number.
            AmpRuntimeError: a parameter was moved or cast, or memory was released.

        In all cases no parameter has been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [value for group in self.param_groups for value in group.values()]
        if not host_lists.lists.are_same(given, self._checked):
            for group in self.param_groups:
                self._check_group(group)
            self._checked = given if all(map(_is_constant, self.param_groups)) else []
        inputs = self.scaled_grads or inputs_outside_of_a_session(self)
        step_batches(self, self._batches.of(self, inputs), inputs)
        return loss
