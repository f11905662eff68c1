"""apex internals that scripts read: `_amp_state`, its loss scalers, and an optimizer's `_amp_stash`."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from amp import frontend
from amp.errors import AmpNotImplementedError, AmpRuntimeError, AmpTypeError, brief
from amp.fp16_utils.loss_scaler import is_not_finite
from amp.fp16_utils.optimizer import MasterGroups
from amp.lazy import kernels
from amp.profiles.loss_scaling import LossScaling
from amp.profiles.properties import Properties
from amp.training import scaler
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.blocks import Block

__all__ = ["LossScaler", "_amp_state", "scale_check_overflow_python"]

_ARGUMENTS = {
    "_scale_factor": "scale_factor",
    "_scale_seq_len": "scale_window",
    "_min_loss_scale": "min_loss_scale",
    "_max_loss_scale": "max_loss_scale",
}
"""The pickled attributes of a scaler besides its state, and the arguments they set. apex's pickles have
no factor, which was always 2."""


def _setting(field: str) -> Any:
    """Return a settable property of `LossScaler`: a field of its configuration."""

    def set_field(face: Any, value: Any) -> None:
        face._ours.config = dataclasses.replace(face._ours.config, **{field: value})

    return property(operator.attrgetter(f"_ours.config.{field}"), set_field)


class LossScaler:
    """apex's `amp.scaler.LossScaler`, on a scaler of this library: a new one, or a session's.

    Args:
        loss_scale: "dynamic", or the scale.
        init_scale: the first scale, if it is dynamic.
        scale_factor: the factor by which the scale grows and backs off.
        scale_window: good updates in a row before the scale grows.
        min_loss_scale: the floor.
        max_loss_scale: the ceiling.

    Raises:
        AmpValueError: a number is out of its range.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        is_dynamic = loss_scale == "dynamic"
        config = LossScaling(
            mode="dynamic" if is_dynamic else "static",
            init=init_scale if is_dynamic else float(loss_scale),
            growth_factor=scale_factor,
            backoff_factor=1 / scale_factor,
            growth_interval=scale_window,
            min=min_loss_scale,
            max=max_loss_scale,
        )
        self._ours = scaler.LossScaler(config)

    _given_buf: Tensor | None = None

    @classmethod
    def of(cls, ours: scaler.LossScaler) -> Self:
        """Return an adapter of one of this library's scalers."""
        face = cls.__new__(cls)
        face._ours = ours
        return face

    def loss_scale(self) -> float:
        """Return the scale. The host waits for the device."""
        return self._ours.loss_scale()

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float = 1.0,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write `model_grads / scale` to `master_grads`, and check for overflow. No host sync."""
        scale = self._ours.scale_now().inv_scale
        if scale_override is not None:
            scale = torch.full_like(scale, 1 / scale_override)
        kernels.unscale.unscale(model_grads, master_grads, scale, self._ours.found_inf)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write `model_grads / scale + stashed_master_grads` to `master_grads`. The host does not wait.

        `scale_override` has the scales of the model's gradients, the stashed ones and the result. Only
        `model_grads` are checked for overflow.
        """
        a: float | Tensor = self._ours.scale_now().inv_scale
        b = 1.0
        if scale_override is not None:
            of_new, of_stashed, of_result = scale_override
            a, b = of_result / of_new, of_result / of_stashed
        kernels.axpby.axpby(a, model_grads, b, stashed_master_grads, master_grads, self._ours.found_inf)

    def clear_overflow_state(self) -> None:
        """Forget the last overflow."""
        if self._has_overflow:
            self._has_overflow = False

    def update_scale(self) -> bool:
        """Update the scale, and return whether to skip the step. The host waits for the device.

        If a script has set `_overflow_buf`, int32 `[1]`, that says whether there was an overflow.
        """
        found_inf = self._ours.found_inf
        if self._given_buf is not None and found_inf is not None:
            found_inf.copy_(self._given_buf.reshape(1) != 0)
        overflowed = found_inf is not None and found_inf.item() > 0
        self._ours.update()
        return overflowed

    @property
    def _loss_scale(self) -> float:
        return self._ours.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._ours.set_scale(value)

    @property
    def _unskipped(self) -> int:
        return int(self._ours.state_dict()["unskipped"])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        state = self._ours.state_dict()
        self._ours.load_state_dict({**state, "unskipped": value})

    @property
    def dynamic(self) -> bool:
        """Whether the scale is dynamic."""
        return self._ours.config.dynamic

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        self._ours.config = dataclasses.replace(
            self._ours.config, mode="dynamic" if value else "static", init=self._ours.loss_scale()
        )

    @property
    def _overflow_buf(self) -> Tensor:
        found_inf = self._ours.found_inf if self._given_buf is None else self._given_buf
        return torch.zeros(1, dtype=torch.int32, device="cpu") if found_inf is None else found_inf.int()

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._given_buf = value

    @property
    def _has_overflow(self) -> bool:
        found_inf, state = self._ours.found_inf, self._ours.state_dict()
        return found_inf is not None and (found_inf.item() > 0 or state["overflows_in_a_row"] > 0)

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._ours.load_state_dict({**self._ours.state_dict(), "overflows_in_a_row": int(value)})

    _scale_factor = property(operator.attrgetter("_ours.config.growth_factor"))
    _min_loss_scale: float | None = _setting("min")
    _max_loss_scale: float = _setting("max")
    _scale_seq_len: int = _setting("growth_interval")

    def __getstate__(self) -> dict[str, Any]:
        names = ("dynamic", "_loss_scale", "_unskipped", *_ARGUMENTS)
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = {argument: state[name] for name, argument in _ARGUMENTS.items() if name in state}
        self.__init__("dynamic" if state["dynamic"] else state["_loss_scale"], **options)  # type: ignore[misc]
        saved = {"loss_scale": state["_loss_scale"], "unskipped": state["_unskipped"]}
        self._ours.load_state_dict(saved)


def scale_check_overflow_python(
    model_grad: Tensor, master_grad: Any, scale: Any, check_overflow: bool | None = None
) -> bool:
    """Write `model_grad * scale` to `master_grad`, or return True if there is an inf or NaN.

    The host waits if it checks. apex has had these arguments in two orders, and both are understood:
    `(model_grad, master_grad, scale)`, which checks only if `check_overflow` is True, and the older
    `(model_grad, scale, master_grad)`, which checks unless it is False.
    """
    is_older = not (isinstance(master_grad, Tensor) and master_grad.shape == model_grad.shape)
    if is_older:
        master_grad, scale = scale, master_grad
    if (is_older if check_overflow is None else check_overflow) and is_not_finite([model_grad]):
        return True
    if master_grad is not model_grad:
        master_grad.copy_(model_grad)
    master_grad.mul_(scale)  # a part of the graph, if the gradient is one
    return False


_OPTIONS = (
    *("enabled", "opt_level", "cast_model_type", "patch_torch_functions", "patch_torch_functions_type"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApexProperties(Properties):
    """This library's properties, with apex's `options`."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The properties that apex has, by name, to read."""
        return MappingProxyType({name: getattr(self, name) for name in _OPTIONS})


class _NotInitializedError(AmpRuntimeError, AttributeError):
    """Makes `hasattr(_amp_state, "loss_scalers")` False before `initialize`, as in apex."""


class AmpState:
    """apex's `_amp_state`, for the default session.

    Attributes:
        hard_override: has no effect.
        allow_incoming_model_not_fp32: whether models may have 16-bit weights before `initialize`.
        verbosity: has no effect.
        handle: the handle of the last `initialize` or `init` that made functions cast; else not set.
    """

    handle: Any
    hard_override = False
    allow_incoming_model_not_fp32 = False
    verbosity = 1

    @property
    def opt_properties(self) -> ApexProperties:
        """The properties of the default session."""
        ours = self._session().properties
        return ApexProperties(**{f.name: getattr(ours, f.name) for f in dataclasses.fields(ours)})

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scalers of the default session."""
        return [LossScaler.of(ours) for ours in self._session().scalers]

    @property
    def min_loss_scale(self) -> float | None:
        """The floor of the first loss's scale."""
        return self.loss_scalers[0]._min_loss_scale

    @property
    def max_loss_scale(self) -> float:
        """The ceiling of the first loss's scale."""
        return self.loss_scalers[0]._max_loss_scale

    def _session(self) -> Any:
        try:
            return frontend.get_session()
        except AmpRuntimeError as error:
            raise _NotInitializedError(str(error)) from None


_amp_state = AmpState()


_USE_SCALE_LOSS = "Use `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"


class Stash(MasterGroups):
    """apex's `optimizer._amp_stash`: the parameters of an optimizer, and their masters.

    Args:
        optimizer: an optimizer that `initialize` has prepared.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.lazy_init_called = True
        self.already_patched = False
        self._block: Block | None = None

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether there are gradients still to be unscaled. Setting it to True leaves them scaled."""
        attached = AttachedOptimizer.of(self.optimizer)
        return attached is not None and attached.gradients.delayed is not None

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if value:
            self._delay(self._attached().owner.scalers[0])

    def prepare_amp_backward(self) -> None:
        """Enter a block whose loss the script scales: apex's `optimizer._prepare_amp_backward`.

        If an earlier such block was not left, as after an error, its gradients are dropped.

        Raises:
            AmpNotImplementedError: layers run in FP8 by the recipe `delayed`.
            AmpRuntimeError: the optimizer is inside an `amp.scale_loss` block, or in no session.
        """
        attached = self._attached()
        gradients, owner = attached.gradients, attached.owner
        if owner.fp8 is not None and owner.fp8.history is not None:
            raise AmpNotImplementedError(
                "optimizer._prepare_amp_backward() was called in a session with FP8 by the recipe "
                f"'delayed', whose scales amp.scale_loss moves. {_USE_SCALE_LOSS}"
            )
        for ours in owner.scalers:
            owner.learn(ours)
        if self._block is not None and gradients.open_block is self._block:
            self._block.abort()
        # The scaler comes later. A scale that is not 1 lets the block set all gradients aside.
        self._block = Block(LossScaler("dynamic")._ours, [gradients])
        try:
            self._block.enter(self._zero())
        except BaseException:
            self._block.abort()
            raise

    def post_amp_backward(self, loss_scaler: LossScaler) -> None:
        """Unscale the gradients, and leave the block: apex's `optimizer._post_amp_backward`.

        If one is inf or NaN, the next step is skipped. `loss_scaler.update_scale()` moves the scale.

        Raises:
            AmpTypeError: `loss_scaler` is none of apex's.
            AmpNotImplementedError: the gradients were not reduced over the ranks.
            AmpRuntimeError: the optimizer is inside an `amp.scale_loss` block, or in no session.
        """
        attached = self._attached()
        if not isinstance(loss_scaler, LossScaler):
            raise AmpTypeError(
                f"optimizer._post_amp_backward takes one of _amp_state.loss_scalers, and got "
                f"{brief(loss_scaler)}"
            )
        if not attached.gradients.are_reduced():
            raise AmpNotImplementedError(
                "optimizer._post_amp_backward was called after a backward under no_sync(), whose "
                f"gradients are not reduced over the ranks. {_USE_SCALE_LOSS}"
            )
        if attached.misuse is not None:
            attached.misuse.block_begins()
        self._delay(loss_scaler._ours).finish(update=False)
        self._block = None
        attached.owner.running_stats.repair()

    def _delay(self, ours: scaler.LossScaler) -> Block:
        """Leave the gradients scaled, in a block of the script or of `delay_unscale`; return the block.

        A block of the script gets the scaler by whose scale the script has multiplied its loss.
        """
        gradients = self._attached().gradients
        block = gradients.open_block
        if block is not None and block is not self._block:
            raise AmpRuntimeError(
                "optimizer._post_amp_backward was called, or params_have_scaled_gradients set, inside "
                "an amp.scale_loss block, which does that itself. Leave it out"
            )
        kept = gradients.delayed or block
        if kept is None or kept is self._block:
            own = Block(ours, [gradients]) if kept is None or self._block is None else self._block
            own.scaler = ours
            _, own.scale = ours.scale_and_remember(self._zero())
            kept = self._block = own
        gradients.delay(kept)()
        return kept

    def _attached(self) -> AttachedOptimizer:
        attached = AttachedOptimizer.of(self.optimizer)
        if attached is None:
            raise AmpRuntimeError(
                f"this {type(self.optimizer).__name__} is in no session. Call amp.initialize on it"
            )
        return attached

    def _zero(self) -> Tensor:
        """Return a loss on the device of the first parameter, to which scalers go."""
        groups = self.optimizer.param_groups
        return torch.zeros((), device=next((p.device for g in groups for p in g["params"]), "cpu"))

    all_fp32_params = MasterGroups.all_fp32_from_fp32_params
    """The parameters without a master, by the name that apex uses if no parameter has one."""
