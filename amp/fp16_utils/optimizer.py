"""`FP16_Optimizer`: an optimizer around an optimizer, with masters and loss scaling inside.

It is a session with one optimizer and no model: `backward` is a `scale_loss` block, and the rest looks
at what is attached to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp.errors import AmpRuntimeError, AmpTypeError, brief, truth_of
from amp.fp16_utils.groups import MasterGroups
from amp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, backoff_of
from amp.kernels.grad_mode import without_grad
from amp.profiles.keys import SMALLEST_SCALE, parse_number
from amp.session import Session
from amp.state_checks import StateChecks, as_dict
from amp.training import scaler
from amp.training.attachment import AttachedOptimizer
from amp.training.blocks import Block
from amp.training.optimizer_wrappers import is_optimizer
from amp.training.scaler import read_state

_DYNAMIC_ARGUMENTS = {
    "init_scale": "init",
    "scale_factor": "growth_factor",
    "scale_window": "growth_interval",
    "min_loss_scale": "min",
    "max_loss_scale": "max",
}


class FP16_Optimizer(MasterGroups, torch.optim.Optimizer):  # noqa: N801 (apex's name)
    """An optimizer of 16-bit parameters, which steps FP32 masters of them on scaled gradients.

    The model is the caller's to cast; see `network_to_half`. Gradients of several backwards add up,
    whether each is followed by `update_master_grads` or the last. A step with inf or NaN gradients is
    skipped under a dynamic scale, with a log message.

    Args:
        init_optimizer: the optimizer; its groups then hold the masters.
        static_loss_scale: what losses are multiplied by.
        dynamic_loss_scale: whether the scale follows overflows instead.
        dynamic_loss_args: `init_scale`, `scale_factor`, `scale_window`, `min_loss_scale` and
            `max_loss_scale` of a dynamic scale.
        verbose: whether skipped steps are logged.

    Attributes:
        optimizer: the optimizer that was given.

    Raises:
        AmpValueError: a scale that cannot be.
        AmpTypeError: no optimizer, or an argument that a dynamic scale does not have.
    """

    _scales_losses_itself = True

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not is_optimizer(init_optimizer):
            raise AmpTypeError(f"FP16_Optimizer takes an optimizer, and got {brief(init_optimizer)}")
        loss_scale: Any = parse_number("static_loss_scale", static_loss_scale)
        if dynamic_loss_args is not None and not isinstance(dynamic_loss_args, Mapping):
            raise AmpTypeError(f"dynamic_loss_args={brief(dynamic_loss_args)} is no dict")
        if truth_of("dynamic_loss_scale", dynamic_loss_scale):
            loss_scale = {"mode": "dynamic"}
            for name, value in (dynamic_loss_args or {}).items():
                if name not in _DYNAMIC_ARGUMENTS:
                    raise AmpTypeError(
                        f"dynamic_loss_args has {brief(name)}; allowed: {', '.join(_DYNAMIC_ARGUMENTS)}"
                    )
                if value is not None:
                    loss_scale[_DYNAMIC_ARGUMENTS[name]] = value
            if "growth_factor" in loss_scale:
                loss_scale["backoff_factor"] = backoff_of(loss_scale["growth_factor"])
        verbosity = int(truth_of("verbose", verbose))
        self._session = Session("O2", verbosity=verbosity, loss_scale=loss_scale)
        self._session.initialize([], init_optimizer)
        self.optimizer = init_optimizer
        self.first_closure_call_this_step = True

    @property
    def _attached(self) -> AttachedOptimizer:
        attached = AttachedOptimizer.of(self.optimizer)
        assert attached is not None
        return attached

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # before there is one
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    # What it shows of the optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, of masters."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: list[dict[str, Any]]
    ) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's defaults."""
        return self.optimizer.defaults  # type: ignore[no-any-return]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose 16-bit parameters get masters."""
        self.optimizer.add_param_group(param_group)

    def _optimizer_of_groups(self) -> Any:
        return self.optimizer

    # A training step.

    def zero_grad(  # type: ignore[override]
        self,
        set_grads_to_None: bool = False,  # noqa: N803 (apex's name)
        set_to_none: bool | None = None,
    ) -> None:
        """Clear the gradients of masters and model.

        Args:
            set_grads_to_None: whether to remove them, or to write zeros.
            set_to_none: the same by torch's name.
        """
        self.optimizer.zero_grad(set_grads_to_None if set_to_none is None else set_to_none)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward of the scaled loss. The host does not wait.

        Args:
            loss: the loss.
            update_master_grads: whether to bring the gradients, unscaled, to the masters; else call
                `update_master_grads` after the last backward.
            retain_graph: as for `torch.Tensor.backward`.
        """
        with self._session.scale_loss(
            loss, self.optimizer, delay_unscale=not update_master_grads
        ) as scaled_loss:
            scaled_loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def update_master_grads(self) -> None:
        """Bring scaled gradients, unscaled, to the masters, and move the scale. No host sync.

        Gradients are those of `backward(..., update_master_grads=False)`, or of a loss that the caller
        has multiplied by `loss_scale`.
        """
        gradients = self._attached.gradients
        if gradients.delayed is None and any(p.grad is not None for p in self.all_fp16_params):
            block = Block(scaler := self._session.scalers[0], [gradients])
            block.scale = scaler.scale_now()  # by which the caller has scaled the loss
            gradients.delay(block)()
        self._attached.gradients.finish_delayed()

    @property
    def overflow(self) -> bool:
        """Whether the gradients overflowed, those of the last step or newer. The host waits."""
        verdicts = self._attached.gradients.verdicts or self._attached.step.verdicts
        return any(verdict.overflowed for verdict in verdicts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters, and write them to the model; or skip after an overflow.

        Args:
            closure: computes a loss, calls this object's `backward` on it, and returns it. Evaluated
                again, at a lower scale, after an overflow.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float | Tensor:
        """Clip the unscaled gradients, and return their norm; -1 after an overflow. The host waits."""
        if self.overflow:
            return -1
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients that the step will see, group by group; None after an overflow."""
        if self.overflow:
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.param_groups
        ]

    # The scale.

    @property
    def loss_scale(self) -> float:
        """The scale; may be set. The host waits for the device."""
        return self._session.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._session.scalers[0].set_scale(value)

    @property
    def cur_scale(self) -> float:
        """The scale, by its name of 2018. The host waits for the device."""
        return self.loss_scale

    @property
    def loss_scaler(self) -> scaler.LossScaler:
        """The scaler of the session."""
        return self._session.scalers[0]

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and scale, and the masters; read under `weights_only=True`."""
        scaler = self._session.scalers[0]
        return {
            "loss_scaler": scaler.state_dict(),
            "dynamic_loss_scale": scaler.config.dynamic,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [master.detach() for master in masters] for masters in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of this class or apex's, masters bit for bit; the model gets them rounded.

        The host waits once for each device, to look at the values.

        Raises:
            AmpError: an entry is not what it should be, or of another optimizer. Nothing has been
                changed then.
        """
        state_dict = as_dict(state_dict, "what FP16_Optimizer.state_dict() returns")
        checks, masters = StateChecks(), self.fp32_from_fp16_groups
        saved = _saved_masters(checks, state_dict, masters)
        is_dynamic = checks.flag(state_dict, "dynamic_loss_scale", "state_dict")
        state = _as_state(
            checks.entry(state_dict, "loss_scaler", "state_dict", "a loss scaler's state")
        )
        path = "state_dict['loss_scaler']"
        of_scaler, scaler = read_state(state, path), self._session.scalers[0]
        if not (is_dynamic or scaler.config.dynamic):
            checks.number(state, "loss_scale", path, SMALLEST_SCALE, torch.finfo(torch.float32).max)
        inner = checks.mapping(
            state_dict,
            "optimizer_state_dict",
            "state_dict",
            "what the inner optimizer's state_dict() is",
        )
        checks.finish()
        self.optimizer.load_state_dict(inner)
        if scaler.config.dynamic:
            scaler.restore(of_scaler)
        elif not is_dynamic:
            scaler.set_scale(of_scaler.scale)
        for into, group in zip(masters, saved, strict=True):
            for master, values in zip(into, group, strict=True):
                without_grad(master.copy_)(values)
        self._attached.write_back.of_all()

    def __getstate__(self) -> dict[str, Any]:
        raise AmpRuntimeError("an FP16_Optimizer is saved by state_dict(), not by pickling")

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise AmpRuntimeError("an FP16_Optimizer is loaded by load_state_dict(), not by unpickling")


def _saved_masters(
    checks: StateChecks, state_dict: Any, masters: list[list[Tensor]]
) -> list[list[Tensor]]:
    """Return copies of the saved masters, group by group."""
    key = "fp32_from_fp16"
    expected = f"a list of {len(masters)} lists of tensors, as this optimizer has groups"
    saved = checks.items(state_dict, key, "state_dict", expected)
    if len(saved) != len(masters):
        checks.fail("state_dict", key, brief(saved), expected)
    for i, (group, own) in enumerate(zip(saved, masters, strict=True)):
        if not isinstance(group, (list, tuple)) or len(group) != len(own):
            expected = f"a list of {len(own)} tensors: the masters of this optimizer's group {i}"
            checks.fail(f"state_dict['{key}']", i, brief(group), expected)
    return [
        [
            checks.tensor_like(dict(enumerate(group)), j, f"state_dict['{key}'][{i}]", master)
            for j, master in enumerate(own)
        ]
        for i, (group, own) in enumerate(zip(saved, masters, strict=True))
    ]


def _as_state(scaler: Any) -> dict[str, Any]:
    """Return the state of a saved scaler; apex saved the object itself."""
    if isinstance(scaler, Mapping):
        return dict(scaler)
    if isinstance(scaler, DynamicLossScaler):
        return scaler._scaler.state_dict()
    if isinstance(scaler, LossScaler):
        return {"loss_scale": scaler.cur_scale, "unskipped": 0}
    if hasattr(scaler, "_loss_scale") and hasattr(scaler, "_unskipped"):
        return {"loss_scale": scaler._loss_scale, "unskipped": scaler._unskipped}
    raise AmpTypeError(
        f"the saved loss_scaler is {brief(scaler)}, of which nothing is known; expected a mapping with "
        "loss_scale and unskipped, or a scaler of apex's. Nothing was loaded"
    )
