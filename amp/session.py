"""A session: everything that one `initialize` set up, and the way to undo it."""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from amp import checkpoint, distributed, modelcast
from amp.binding import OptimizerBinding, delay, innermost, keeps_moments, unscale_and_update
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import (
    AmpIndexError,
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
)
from amp.masters import Contents, MasterWeights
from amp.modulerules import restore_classes, run_in_float32
from amp.opcast import OpCaster
from amp.policy import OpPolicy, load_policy
from amp.profiles import resolve
from amp.properties import Overrides, Properties
from amp.regions import DEVICE_TYPES
from amp.registry import registered
from amp.scaler import LossScaler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("amp")


class Session:
    """Mixed precision for some models and optimizers, from `initialize` to `close`.

    `amp.initialize` makes one and keeps it as the default; this is the explicit form:

        with amp.Session(opt_level="O2") as session:
            model, optimizer = session.initialize(model, optimizer)
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

    Several sessions live side by side. The functions that O1 and O4 patch are patched for the whole
    process; where several sessions do, the newest one's casts apply.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile; see `amp.load_profile`.
        num_losses: how many losses are scaled independently, by `loss_id`.
        verbosity: 0 logs nothing, not even skipped steps; 1 logs on rank 0 to the logger `amp`.
        process_group: the process group, or list of them, whose ranks hold different gradients and must
            skip a step together. None is right for one process, for DDP, whose ranks hold the same
            gradients, and for DTensors, which know their groups.
        **overrides: properties on top of the profile; see `Overrides`.

    Attributes:
        properties: what the profile and the overrides resolved to.
        scalers: one loss scaler per loss.

    Raises:
        AmpError: whatever is wrong with the profile, the overrides or their combination.
    """

    def __init__(
        self,
        opt_level: str | os.PathLike[str] = "O1",
        *,
        num_losses: int = 1,
        verbosity: int = 1,
        process_group: ProcessGroup | Sequence[ProcessGroup] | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        if isinstance(num_losses, bool) or not hasattr(num_losses, "__index__") or num_losses < 1:
            raise AmpValueError(f"num_losses={num_losses!r} must be an integer of at least 1")
        self.properties = (
            Properties(enabled=False)
            if overrides.get("enabled", True) is False
            else resolve(opt_level, overrides)
        )
        self.verbosity = verbosity
        self.closed = False
        _check_environment()
        groups = distributed.as_process_groups(process_group)
        self.scalers = [
            LossScaler(self.properties.loss_scaling, i, groups)
            for i in range(operator.index(num_losses))
        ]
        self._models: list[weakref.ref[nn.Module]] = []
        masters = self.properties.master_weights
        self._masters = MasterWeights(None if isinstance(masters, bool) else masters)
        self._caster: OpCaster | None = None
        self._policy: OpPolicy | None = None
        if self.properties.patch_torch_functions:
            table = load_policy(self.properties.patch_torch_functions_type or torch.float16)
            self._policy = table.with_rules(rule for rule in self.properties.rules if rule.kind == "op")
        self._undo = ExitStack()
        if self.properties.enabled:
            self._log(
                logging.INFO, "opt_level %s resolves to\n%s", opt_level, self.properties.describe()
            )

    # Set up and tear down.

    def initialize(
        self, models: Any, optimizers: Any = None, *, allow_incoming_model_not_fp32: bool = False
    ) -> Any:
        """Prepare models and optimizers for training; see `amp.initialize`.

        May be called again, for more models and optimizers of the same session.

        Returns:
            The objects that were passed: models alone if `optimizers` is None, else both.
        """
        self._check_open()
        if self.properties.enabled:
            model_list = _as_models(models)
            optimizer_list = _as_optimizers(optimizers)
            _check_models(model_list, self.properties.cast_model_type, allow_incoming_model_not_fp32)
            _check_unbound(optimizer_list)
            _check_state_dtype(optimizer_list, self.properties.state_dtype)
            self._set_up(model_list, optimizer_list)
        return models if optimizers is None else (models, optimizers)

    def _set_up(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Cast, bind and patch; if any of it fails, leave everything as it was."""
        before: dict[Tensor, Contents] = {}
        bindings: list[OptimizerBinding] = []
        undo = ExitStack()
        try:
            for model in models:
                modelcast.cast_weights(model, self.properties, before)
                for handle in modelcast.install_hooks(model, self.properties):
                    undo.callback(handle.remove)
                if self.properties.cast_model_type in LOW_PRECISION or self.properties.master_weights:
                    for handle in self._masters.install_state_dict_hooks(model):
                        undo.callback(handle.remove)
            for optimizer in map(innermost, optimizers):
                binding = OptimizerBinding(
                    optimizer,
                    owner=self,
                    masters=self._masters,
                    use_masters=bool(self.properties.master_weights),
                    report=self._report_overflows,
                    name_of=self._name_of,
                )
                undo.callback(binding.close)
                binding.open(before)
                bindings.append(binding)
            if self._policy is not None:
                self._cast_ops(self._policy, models, undo)
        except BaseException:
            for tensor, contents in before.items():
                contents.put_into(tensor)
            undo.close()
            raise
        self._models += map(weakref.ref, models)
        self._warn_of_idle_rules(models)
        for binding in bindings:
            binding.recast_state(self.properties.state_dtype)
            self._warn_of_vanishing_eps(binding.optimizer)
        self._undo.push(undo)

    def _cast_ops(self, policy: OpPolicy, models: Sequence[nn.Module], undo: ExitStack) -> None:
        if self._caster is None:
            caster = OpCaster(policy)
            undo.callback(caster.close)
            caster.install(registered())
            self._caster = caster
        for model in models:
            for handle in self._caster.watch(model):
                undo.callback(handle.remove)
            undo.callback(restore_classes, run_in_float32(model, self.properties.rules, self._caster))

    def _warn_of_idle_rules(self, models: Sequence[nn.Module]) -> None:
        """Say so if a rule for modules is for none of them."""
        for rule in self.properties.rules if models else ():
            if rule.kind == "module" and not any(
                rule.matches(name, module) for model in models for name, module in model.named_modules()
            ):
                self._log(
                    logging.WARNING,
                    "%s: no module of the model is named '%s' or of a class of that name; "
                    "the rule does nothing",
                    rule.source,
                    rule.pattern,
                )

    def _warn_of_vanishing_eps(self, optimizer: Any) -> None:
        """Say so if an Adam that steps float16 weights themselves would divide by zero."""
        for group in optimizer.param_groups:
            eps = group.get("eps")
            dtypes = {parameter.dtype for parameter in group["params"]} & LOW_PRECISION
            for dtype in dtypes:
                if (
                    isinstance(eps, float)
                    and eps > 0
                    and torch.tensor(eps, dtype=dtype, device="cpu") == 0
                ):
                    self._log(
                        logging.WARNING,
                        "%s has eps=%g, which is 0 in %s: its steps may divide by zero. "
                        "Give it eps=1e-4, or use master_weights=True.",
                        type(optimizer).__name__,
                        eps,
                        dtype,
                    )

    @property
    def casts_ops(self) -> bool:
        """Whether this session's functions cast their arguments, here and now."""
        return self._caster is not None and any(map(self._caster.casts, DEVICE_TYPES))

    def stop_casting_ops(self) -> None:
        """Give torch its functions back, and leave models, optimizers and scalers as they are."""
        if self._caster is not None:
            self._caster.close()

    def close(self) -> None:
        """Give torch, the models and the optimizers back as they were. Idempotent.

        The dtype of the models stays what it was cast to; `model.float()` widens it. Optimizer state
        is recast to the parameters' dtype. The host waits for the device, to log the last overflows.
        """
        self.closed = True
        self._undo.close()
        for scaler in self.scalers:  # last: a warning may be an error
            self._report_overflows(scaler, wait=True)

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Training.

    @contextmanager
    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Iterator[Tensor]:
        """Scale a loss for its backward, and unscale the gradients after it; see `amp.scale_loss`."""
        self._check_open()
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            raise AmpTypeError(f"amp.scale_loss needs a floating-point tensor as loss, and got {kind}")
        if not self.properties.enabled:
            yield loss
            return
        scaler = self._scaler(loss_id)
        bindings = [self._binding(optimizer) for optimizer in as_optimizer_list(optimizers)]
        with ExitStack() as on_error:
            # Unscaling moves a scale, perhaps this one: look again until nothing is pending at another.
            while any(binding.settle_unless(scaler) for binding in bindings):
                pass
            self._report_overflows(scaler)
            for binding in bindings:
                binding.begin(scaler)
                on_error.callback(binding.abort)
            scaled_loss = scaler.scale(loss)
            scale = scaler.snapshot()
            yield scaled_loss
            if delay_unscale:
                delay(bindings, scale)
            else:
                unscale_and_update(bindings, scale, update=not delay_overflow_check)
            on_error.pop_all()

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the current loss scale. The host waits for the device."""
        return self._scaler(loss_id).loss_scale()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what a checkpoint needs; see `amp.state_dict`."""
        if not self.properties.enabled:
            return OrderedDict()
        return checkpoint.save(self.scalers, self.properties.opt_level)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a saved state; see `amp.load_state_dict`."""
        checkpoint.check(state_dict)
        if self.properties.enabled:
            checkpoint.load(state_dict, self.scalers, self.properties.opt_level)

    def _scaler(self, loss_id: int) -> LossScaler:
        if not hasattr(loss_id, "__index__") or not 0 <= loss_id < len(self.scalers):
            raise AmpIndexError(
                f"loss_id={loss_id!r} is not one of 0 to {len(self.scalers) - 1}: num_losses was "
                f"{len(self.scalers)}. Pass num_losses=... to amp.initialize for more."
            )
        return self.scalers[loss_id]

    def _binding(self, optimizer: Any) -> OptimizerBinding:
        # Of another session, perhaps: its gradients are as good.
        binding = OptimizerBinding.of(optimizer)
        if binding is None:
            raise foreign_optimizer(optimizer)
        return binding

    def _report_overflows(self, scaler: LossScaler, wait: bool = False) -> None:
        """Log the overflows that the host has learnt of, and warn once if they do not end."""
        for overflow in scaler.overflows(wait):
            self._log(
                logging.WARNING,
                "Gradient overflow.  Skipping step, loss scaler %d reducing loss scale to %s",
                scaler.loss_id,
                overflow.scale,
            )
            scaler.warn_if_endless(overflow)

    def _name_of(self, parameter: Tensor) -> str | None:
        for reference in self._models:
            model = reference()
            for name, candidate in model.named_parameters() if model is not None else ():
                if candidate is parameter:
                    return f"'{name}'"
        return None

    def _check_open(self) -> None:
        if self.closed:
            raise AmpRuntimeError("this session was closed; make a new one with amp.initialize")

    def _log(self, level: int, message: str, *args: object) -> None:
        if self.verbosity and distributed.rank() == 0:
            logger.log(level, message, *args)


def foreign_optimizer(optimizer: Any) -> AmpRuntimeError:
    """Return the error for an optimizer that no live session knows."""
    return AmpRuntimeError(
        f"this {type(optimizer).__name__} did not come out of amp.initialize, or its session was "
        "closed. Pass it through: model, optimizer = amp.initialize(model, optimizer, opt_level=...)"
    )


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer, or a wrapper that looks like one, such as apex's LARC."""
    return isinstance(value, torch.optim.Optimizer) or (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and callable(getattr(value, "zero_grad", None))
        and isinstance(getattr(value, "param_groups", None), list)
        and isinstance(getattr(value, "state", None), dict)
    )


def as_optimizer_list(optimizers: Any) -> list[Any]:
    """Return the optimizers of a `scale_loss`, each once.

    Raises:
        AmpTypeError: there is none, or something else among them.
    """
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    wrong = [value for value in given if not is_optimizer(value)]
    if wrong or not given:
        raise AmpTypeError(
            "amp.scale_loss needs the optimizer, or the list of optimizers, whose gradients the loss "
            f"makes; got {type(wrong[0]).__name__ if wrong else 'an empty list'}"
        )
    steppers = list(map(innermost, given))
    return [value for i, value in enumerate(given) if not _is_among(steppers[i], steppers[:i])]


def _is_among(value: object, others: Sequence[object]) -> bool:
    return any(value is other for other in others)


def _check_environment() -> None:
    if "AMP_KERNELS" not in os.environ:
        return
    from amp.kernels.backend import requested  # loads Triton

    try:
        requested()
    except ValueError as error:
        raise AmpValueError(f"the environment variable {error}") from None


def _as_optimizers(optimizers: Any) -> list[Any]:
    given = _as_list(optimizers, is_optimizer, "optimizers", "a torch.optim.Optimizer")
    steppers = list(map(innermost, given))
    for i, optimizer in enumerate(steppers):
        if _is_among(optimizer, steppers[:i]):
            raise AmpRuntimeError(f"optimizers[{i}] is in the list twice; pass each optimizer once")
    return given


def _as_models(models: Any) -> list[nn.Module]:
    return _as_list(models, lambda m: isinstance(m, nn.Module), "models", "a torch.nn.Module")


def _as_list(value: Any, accepts: Any, name: str, kind: str) -> list[Any]:
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not accepts(item):
            hint = f"; make it a list: list({name})" if isinstance(value, (tuple, set)) else ""
            raise AmpTypeError(
                f"{name} must be {kind} or a list of them, and got {type(item).__name__}{hint}"
            )
    return items


def _check_models(models: Sequence[nn.Module], dtype: object, allow_low_precision: bool) -> None:
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for model in models:
        for module in model.modules():
            if isinstance(module, wrappers):
                raise AmpRuntimeError(
                    f"the model is wrapped in {type(module).__name__} already. Call amp.initialize on "
                    f"the bare model first, and wrap what it returns: model, optimizer = "
                    f"amp.initialize(model, optimizer); model = {type(module).__name__}(model)"
                )
            if isinstance(module, torch.jit.ScriptModule) and dtype in LOW_PRECISION:
                raise AmpRuntimeError(
                    f"the model holds a {type(module).__name__}, whose code is fixed and cannot be "
                    "cast. Call amp.initialize first, and script or trace what it returns."
                )
        for kind, tensors in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in tensors:
                if tensor.dtype in LOW_PRECISION and not allow_low_precision:
                    raise AmpRuntimeError(
                        f"{kind} '{name}' is {tensor.dtype} already. amp.initialize casts the model "
                        "itself, and starts from FP32: leave out .half() or .bfloat16(), or call "
                        "model.float() first, after closing the session that cast it if one did. To "
                        "start from these values, pass allow_incoming_model_not_fp32=True."
                    )
                if dtype and nn.parameter.is_lazy(tensor):
                    raise AmpRuntimeError(
                        f"{kind} '{name}' has no values yet (a lazy module). Run one batch through "
                        "the model before amp.initialize."
                    )


def _check_state_dtype(optimizers: Sequence[Any], dtype: torch.dtype | None) -> None:
    for i, optimizer in enumerate(optimizers):
        if dtype is not None and not keeps_moments(innermost(optimizer)):
            raise AmpRuntimeError(
                f"state_dtype={dtype_name(dtype)} needs an optimizer that rounds its moments, and "
                f"optimizers[{i}] is {type(optimizer).__name__}. Take one of amp.optimizers, or leave "
                "state_dtype out."
            )


def _check_unbound(optimizers: Sequence[Any]) -> None:
    for i, optimizer in enumerate(optimizers):
        binding = OptimizerBinding.of(optimizer)
        if binding is not None and binding.optimizer is not innermost(optimizer):
            raise AmpRuntimeError(
                f"optimizers[{i}] ({type(optimizer).__name__}) keeps masters and scales losses itself. "
                f"Pass the {type(binding.optimizer).__name__} that it was made of to amp.initialize"
            )
        if binding is not None:
            raise AmpRuntimeError(
                f"optimizers[{i}] ({type(optimizer).__name__}) has been through amp.initialize and its "
                "session is live. Make a new optimizer, or close that session first: "
                "amp.get_session(optimizer).close()"
            )
