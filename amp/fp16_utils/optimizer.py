"""`FP16_Optimizer`: a wrapper of an optimizer that adds master weights and loss scaling.

It has a session with one optimizer and no model: `backward` is a `scale_loss` block, and the other
methods use what the session has attached to the optimizer.
"""

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp.errors import AmpRuntimeError, AmpTypeError, brief, truth_of
from amp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, backoff_of
from amp.fp16_utils.state_of_2018 import masters_of_2018, read_2018
from amp.kernels.interrupts import without_grad
from amp.profiles.keys import SMALLEST_SCALE, parse_positive
from amp.session import Session
from amp.state_checks import StateChecks, as_dict
from amp.training import scaler
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.blocks import Block
from amp.training.wrapped_optimizers import is_optimizer

_DYNAMIC_ARGUMENTS = ("init_scale", "scale_factor", "scale_window", "min_loss_scale", "max_loss_scale")


def _flat(groups: str) -> Any:
    """Return a property of `MasterGroups`: the parameters of all groups in one list."""
    return property(lambda self: list(itertools.chain.from_iterable(getattr(self, groups))))


class MasterGroups:
    """The trainable parameters of a session's optimizer, group by group.

    Attributes:
        optimizer: the optimizer.
    """

    optimizer: Any

    def _groups(self) -> list[list[tuple[Tensor, Tensor | None]]]:
        """Return each group's parameters, each with the model's parameter whose master it is."""
        attached = AttachedOptimizer.of(self.optimizer)
        if attached is None:
            return []
        model = attached.masters.model
        groups = [[(p, model(p)) for p in group["params"]] for group in self.optimizer.param_groups]
        return [[(p, m) for p, m in group if (p if m is None else m).requires_grad] for group in groups]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The 16-bit parameters of each group."""
        return [[model for _, model in group if model is not None] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of the 16-bit parameters of each group."""
        return [[stepped for stepped, model in group if model is not None] for group in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The other parameters of each group."""
        return [[stepped for stepped, model in group if model is None] for group in self._groups()]

    all_fp16_params = _flat("fp16_groups")
    """The parameters of `fp16_groups`."""
    all_fp32_from_fp16_params = _flat("fp32_from_fp16_groups")
    """The parameters of `fp32_from_fp16_groups`."""
    all_fp32_from_fp32_params = _flat("fp32_from_fp32_groups")
    """The parameters of `fp32_from_fp32_groups`."""


def _shown(name: str) -> Any:
    """Return a settable property of `FP16_Optimizer`: an attribute of the inner optimizer."""

    def set_inside(outer: Any, value: Any) -> None:
        setattr(outer.optimizer, name, value)

    return property(operator.attrgetter(f"optimizer.{name}"), set_inside)


class FP16_Optimizer(MasterGroups, torch.optim.Optimizer):  # noqa: N801 (apex's name)
    """A wrapper of an optimizer of 16-bit parameters, which updates FP32 masters and scales the loss.

    The caller casts the model; see `network_to_half`. Gradients of several backwards accumulate,
    whether `update_master_grads` is called after each or only after the last. With a dynamic scale, a
    step with inf or NaN gradients is skipped, with a log message.

    Args:
        init_optimizer: the optimizer; the masters replace the parameters in its groups.
        static_loss_scale: the loss scale, if it is static.
        dynamic_loss_scale: whether the scale is dynamic instead.
        dynamic_loss_args: `init_scale`, `scale_factor`, `scale_window`, `min_loss_scale` and
            `max_loss_scale` of a dynamic scale.
        verbose: whether skipped steps are logged.

    Attributes:
        optimizer: the wrapped optimizer.

    Raises:
        AmpValueError: a scale is not valid.
        AmpTypeError: `init_optimizer` is not an optimizer, or `dynamic_loss_args` is not valid.
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
            got = type(init_optimizer).__name__
            raise AmpTypeError(
                f"FP16_Optimizer takes one optimizer, and got a {got}: make one for each"
            )
        loss_scale: Any = parse_positive("static_loss_scale", static_loss_scale)
        if dynamic_loss_args is not None and not isinstance(dynamic_loss_args, Mapping):
            raise AmpTypeError(
                f"dynamic_loss_args={brief(dynamic_loss_args)} must be a dict, such as "
                "{'init_scale': 65536}"
            )
        if truth_of("dynamic_loss_scale", dynamic_loss_scale):
            loss_scale = {"mode": "dynamic", **(dynamic_loss_args or {})}
            for name in dynamic_loss_args or ():
                if name not in _DYNAMIC_ARGUMENTS:
                    raise AmpTypeError(
                        f"dynamic_loss_args has {brief(name)}; allowed: {', '.join(_DYNAMIC_ARGUMENTS)}"
                    )
            if loss_scale.get("scale_factor") is not None:
                loss_scale["backoff_factor"] = backoff_of(loss_scale["scale_factor"])
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

    param_groups = _shown("param_groups")
    """The optimizer's groups, of masters."""
    state = _shown("state")
    """The optimizer's state."""
    defaults = _shown("defaults")
    """The optimizer's defaults."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose 16-bit parameters get masters."""
        self.optimizer.add_param_group(param_group)

    # A training step.

    def zero_grad(  # type: ignore[override]
        self,
        set_grads_to_None: bool = False,  # noqa: N803 (apex's name)
        set_to_none: bool | None = None,
    ) -> None:
        """Clear the gradients of masters and model.

        Args:
            set_grads_to_None: whether to set gradients to None, or to zeros.
            set_to_none: torch's name of the same argument, which takes precedence.
        """
        self.optimizer.zero_grad(set_grads_to_None if set_to_none is None else set_to_none)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward of the scaled loss. The host does not wait for the device.

        Args:
            loss: the loss.
            update_master_grads: whether to unscale the gradients into those of the masters; else call
                `update_master_grads` after the last backward.
            retain_graph: as for `torch.Tensor.backward`.
        """
        delayed = not truth_of("update_master_grads", update_master_grads)
        with self._session.scale_loss(loss, self.optimizer, delay_unscale=delayed) as scaled_loss:
            scaled_loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._attached.gradients.hide()  # as in apex, where 16-bit parameters have scaled ones alone

    def update_master_grads(self) -> None:
        """Unscale gradients into those of the masters, and update the scale.

        The gradients come from `backward(..., update_master_grads=False)`, or from a loss that the
        caller has multiplied by `loss_scale`. The host does not wait for the device.
        """
        gradients = self._attached.gradients
        if gradients.delayed is None and any(p.grad is not None for p in self.all_fp16_params):
            block = Block(self.loss_scaler, [gradients])
            block.scale = self.loss_scaler.scale_now()  # by which the caller has scaled the loss
            gradients.delay(block)()
        gradients.finish_delayed()
        gradients.hide()

    @property
    def overflow(self) -> bool:
        """Whether the newest gradients overflowed: those since the last step, or else the last step's.

        The host waits for the device, and for no other rank: one rank alone may ask.
        """
        verdicts = self._attached.gradients.verdicts
        newest = verdicts.found[verdicts.stepped :] or self._attached.step.verdicts
        return any(verdict.ask() for verdict in newest)

    def _is_skipped(self) -> bool:
        """Whether the next step is skipped. After an overflow ranks look again together, as it does."""
        gradients = self._attached.gradients
        return self.overflow and any(verdict.overflowed for verdict in gradients.verdicts_for_step())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and write them to the model, or skip the step after an overflow.

        Args:
            closure: computes a loss, calls this object's `backward` on it, and returns the loss. After
                an overflow it is evaluated again, at a lower scale.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float | Tensor:
        """Clip the unscaled gradients, and return their norm; after an overflow -1. The host waits."""
        if self._is_skipped():
            return -1
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the step's gradients, group by group, or None after an overflow. The host waits."""
        if self._is_skipped():
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
        self.loss_scaler.set_scale(value)

    @property
    def cur_scale(self) -> float:
        """The scale, by an older name of apex's. The host waits for the device."""
        return self.loss_scale

    @property
    def loss_scaler(self) -> scaler.LossScaler:
        """The scaler of the session."""
        return self._session.scalers[0]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and scale, and the masters. The host waits for the device.

        `torch.load` reads it with `weights_only=True`.
        """
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.loss_scaler.config.dynamic,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[p.detach() for p in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or apex's. Masters are restored exactly, and rounded to the model.

        The host waits once for each device, to check the values. From a state of `apex.optimizers` or
        `apex.contrib.optimizers` come the window and the factor of a dynamic scale too, as in apex.

        Raises:
            AmpError: an entry is not valid, or belongs to another optimizer. Nothing is changed.
        """
        state_dict = as_dict(state_dict, "what FP16_Optimizer.state_dict() returns")
        checks, own = StateChecks(), self.loss_scaler
        groups, config = self.fp32_from_fp16_groups, own.config
        name = masters_of_2018(state_dict)
        if name is not None:
            groups = [group["params"] for group in self.param_groups]
            state_dict, config = read_2018(checks, state_dict, groups, config)
        saved = _saved_masters(checks, state_dict, name or "fp32_from_fp16", groups)
        is_dynamic = checks.flag(state_dict, "dynamic_loss_scale", "state_dict")
        saved_scaler = checks.entry(state_dict, "loss_scaler", "state_dict", "a loss scaler's state")
        state, path = _as_state(saved_scaler), "state_dict['loss_scaler']"
        of_scaler = scaler.read_state(state, path)
        if not (is_dynamic or own.config.dynamic):
            checks.number(state, "loss_scale", path, SMALLEST_SCALE, torch.finfo(torch.float32).max)
        expected = "what the inner optimizer's state_dict() is"
        inner = checks.mapping(state_dict, "optimizer_state_dict", "state_dict", expected)
        checks.finish()
        self.optimizer.load_state_dict(inner)
        own.config = config
        if own.config.dynamic:
            own.restore(of_scaler)
        elif not is_dynamic:
            own.set_scale(of_scaler.loss_scale)
        for master, values in zip(itertools.chain.from_iterable(groups), saved, strict=True):
            without_grad(master.copy_)(values)
        self._attached.gradients.reconcile()

    def __getstate__(self) -> dict[str, Any]:
        raise AmpRuntimeError("an FP16_Optimizer is saved by state_dict(), not by pickling")


def _saved_masters(
    checks: StateChecks, state_dict: Any, name: str, masters: list[list[Tensor]]
) -> list[Tensor]:
    """Return copies of the saved masters of all groups, which are the entry `name`."""
    expected = f"a list of {len(masters)} lists of tensors, as this optimizer has groups"
    groups = checks.items(state_dict, name, "state_dict", expected, len(masters))
    path, saved = f"state_dict['{name}']", list[Tensor]()
    for i, own in enumerate(masters):
        expected = f"a list of {len(own)} tensors: the masters of this optimizer's group {i}"
        group = dict(enumerate(checks.items(dict(enumerate(groups)), i, path, expected, len(own))))
        saved += [checks.tensor_like(group, j, f"{path}[{i}]", p) for j, p in enumerate(own)]
    return saved


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
