"""Watching every op of a step, forward and backward, for results that are inf or NaN.

A dispatch mode sees the ops below autocast and autograd, so casts are ops like others. It only reads
the step's tensors, so the step's results are bitwise the same as without it. Each result that is not
finite is an event; its parents are the events that made its non-finite inputs. Tensors are identified
by their memory, which is forgotten once it holds finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_map_only

from amp.casting.cast_hooks import EXACT_IN_FP32, EXACT_INTEGERS, positional_names
from amp.diagnosis.events import Event, LossyCast, LostScalar, Source
from amp.diagnosis.places import Place, Places, is_called_by_amp
from amp.diagnosis.wide import floats_in, is_finite, largest_in_float64
from amp.dtypes import LOW_PRECISION
from amp.masters.master_values import largest_in_master
from amp.observers import Observer, observing

_CONSTANTS = {
    *("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where"),
    *("scalar_tensor", "lift_fresh", "lift_fresh_copy", "constant_pad_nd"),
}
"""Ops that write a constant, so that an inf may be intended."""

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
"""Ops whose results have uninitialized memory."""

CASTS = frozenset(["_to_copy", "copy_", "to"])


class Trace(Observer):
    """Records non-finite results, and other losses of precision, of the ops that run while it is open.

    The host waits for the device after each op.

    Args:
        models: the models whose modules, parameters and buffers are named, by the prefix of the names.
        open_scale: returns the loss scale while the gradients in `.grad` are scaled, else None.

    Attributes:
        events: results that are not finite, by the number of the op.
        lost: scalars that became 0.
        casts: casts that changed integers or masks.
        bad_grads: for each parameter whose gradient is not finite, the event that made it, or None.
        bad_weights: for each parameter that the step made inf or NaN, the event that did.
        grads_in_place: parameters whose gradients were written to while they were scaled, and where.
        zero_grads: for each parameter with a finite float16 gradient, the fraction of it that is 0.
        loss: the event that made the loss, or the argument of `note_output`, if it is not finite.
        scales: the loss scales of the backwards that were seen.
        ops: how many ops ran.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], open_scale: Callable[[], Tensor | None] = lambda: None
    ) -> None:
        self.events: dict[int, Event] = {}
        self.lost: list[LostScalar] = []
        self.casts: list[LossyCast] = []
        self.bad_grads: dict[str, int | None] = {}
        self.bad_weights: dict[str, int] = {}
        self.grads_in_place: dict[str, Place] = {}
        self.zero_grads: dict[str, float] = {}
        self.loss: int | None = None
        self.scales: set[float] = set()
        self.ops = 0
        self._models = models
        self._open_scale = open_scale
        self._scale = 1.0
        self._written: dict[str, Place] = {}  # gradients written to after backward, and where
        self._places = Places(models, self._note_loss)
        self._made: dict[int, int] = {}  # the event that made the values of non-finite memory
        self._owned: dict[int, tuple[str, str, Tensor]] = {}
        self._arguments: dict[int, str] = {}
        self._grads: dict[int, str] = {}
        self._open = ExitStack()

    def __enter__(self) -> Trace:
        with ExitStack() as stack:
            for prefix, model in self._models.items():
                self._know(prefix, model, stack)
            stack.enter_context(self._places)
            stack.enter_context(_Ops(self))
            stack.enter_context(observing(self))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()
        for prefix, model in self._models.items():
            for name, parameter in model.named_parameters():
                if (made := self._made.get(memory_of(parameter))) is not None:
                    self.bad_weights[prefix + name] = made

    def _know(self, prefix: str, model: nn.Module, stack: ExitStack) -> None:
        for name, parameter in model.named_parameters():
            self._owned.setdefault(memory_of(parameter), ("weight", prefix + name, parameter))
            if parameter.requires_grad and parameter.is_leaf:
                hook = _accumulated(self, prefix + name)
                register: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(register(hook).remove)
        for name, buffer in model.named_buffers():
            self._owned.setdefault(memory_of(buffer), ("buffer", prefix + name, buffer))
        hook = _root_hook(self)
        handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        stack.callback(handle.remove)

    # Called by hooks and modes.

    def _note_loss(self, loss: Tensor) -> None:
        """Note the loss that a backward starts from."""
        scale = self._open_scale()
        self._scale = 1.0 if scale is None else float(scale)
        self.scales.add(self._scale)
        self._note_result(loss)

    def _note_result(self, x: Tensor) -> None:
        if x.numel() and not is_finite(x):
            self.loss = self._made.get(memory_of(x), self.loss)

    def unscaling(self, grads: Sequence[Tensor], inv_scale: Tensor) -> None:
        """Note gradients that an `amp.GradScaler` unscales."""
        with torch.no_grad(), _disable_current_modes():
            self.note_unscale(grads, float(inv_scale))

    def note_unscale(self, grads: Sequence[Tensor], inv_scale: float) -> None:
        """Note gradients that a gradient scaler unscales: they were scaled until now."""
        if inv_scale in (0.0, 1.0):
            return
        self._scale = 1 / inv_scale
        self.scales = self.scales - {1.0} | {self._scale}
        for event in self.events.values():
            if event.phase == "backward" and event.loss_scale == 1.0:
                event.loss_scale = self._scale
        for grad in grads:
            name = self._grads.get(memory_of(grad), "")
            if name in self._written:
                self.grads_in_place.setdefault(name, self._written[name])

    def note_output(self, output: Any) -> None:
        """Note the output of a forward that no backward follows."""
        with torch.no_grad(), _disable_current_modes():
            for x in floats_in(output):
                self._note_result(x)

    def saw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        before: tuple[Any, Any] | None,
    ) -> None:
        """Check an op that has run; `before` has copies of its arguments, if it can write to some."""
        self.ops += 1
        aten = func.overloadpacket.__name__
        place, phase = self._places.here(aten)
        given_args, given_kwargs = before or (args, kwargs)
        outputs = _written(func, args, kwargs) if before is not None else floats_in(result)
        inputs = floats_in((given_args, given_kwargs))
        if phase == "forward" or phase == "recompute":
            self._note_scalars(func, given_args, outputs, place)
            if aten in CASTS and outputs and inputs:
                self._note_cast(inputs[-1], outputs[0], place)
        if aten == "_amp_foreach_non_finite_check_and_unscale_":  # of torch's GradScaler
            self.note_unscale(args[0], float(args[2]))
        elif before is not None and phase != "backward":
            self._note_write(args, place)
        bad = [] if aten in UNWRITTEN else [x for x in outputs if not is_finite(x)]
        for x in outputs:
            if all(x is not each for each in bad) and not func.is_view:
                self._made.pop(memory_of(x), None)
        if not bad or func.is_view:
            return
        event = Event(
            self.ops,
            place,
            phase,
            aten,
            tuple(x.dtype for x in inputs),
            bad[0].dtype,
            has_nan=any(bool(x.isnan().any()) for x in bad),
            loss_scale=self._scale if phase == "backward" else 1.0,
        )
        originals = floats_in((args, kwargs)) if before is not None else inputs
        for x, held in zip(inputs, originals, strict=True):
            if not is_finite(x):
                made = self._made.get(memory_of(held))
                if made is not None:
                    event.parents.append(made)
                else:
                    event.sources.append(self._source(held, x))
        if "softmax" in aten and phase != "backward":
            event.rows_of_minus_inf = any(
                bool((x == -math.inf).all(-1).any()) for x in inputs if x.dim()
            )
        event.is_minus_inf = not event.has_nan and all(bool((x[x.isinf()] < 0).all()) for x in bad)
        event.is_constant = aten in _CONSTANTS and not event.parents
        if event.is_root and not event.is_constant:
            event.value = largest_in_float64(func, given_args, given_kwargs)
        self.events[event.number] = event
        for x in bad:
            self._made[memory_of(x)] = event.number

    def _source(self, held: Tensor, x: Tensor) -> Source:
        memory = memory_of(held)
        index = tuple((~x.isfinite()).nonzero()[0].tolist())
        if memory in self._owned:
            kind, name, owner = self._owned[memory]
            largest = largest_in_master(owner)
            return Source(kind, name, index, largest if math.isfinite(largest) else None)
        return Source("data", self._arguments.get(memory, ""), index)

    def _note_scalars(self, func: Any, args: Any, outputs: list[Tensor], place: Place) -> None:
        """Note Python numbers among the arguments that become 0 in the dtype of the result.

        Only pointwise ops are checked: norms take an eps too, but compute with it in FP32.
        """
        if not outputs or outputs[0].dtype is not torch.float16 or torch.Tag.pointwise not in func.tags:
            return
        for value in args:
            if isinstance(value, float) and value != 0 and abs(value) <= 2.0**-25:
                self.lost.append(LostScalar(place, value, outputs[0].dtype))

    def _note_cast(self, x: Tensor, y: Tensor, place: Place) -> None:
        if y.dtype not in LOW_PRECISION or x.dtype not in (torch.float32, torch.float64):
            return
        if memory_of(x) in self._owned and self._owned[memory_of(x)][0] == "weight":
            return
        largest = torch.linalg.vector_norm(x, math.inf).item()
        argument = self._arguments.get(memory_of(x), "")
        if not math.isfinite(largest):
            return
        limit = torch.finfo(y.dtype).max
        if largest > limit and bool((y[y.isinf()] < 0).all()):
            self.casts.append(LossyCast(place, "mask", x.dtype, y.dtype, argument, largest))
            return
        most = min(limit, EXACT_IN_FP32)
        if not EXACT_INTEGERS[y.dtype] < largest <= most or torch.equal(y.to(x.dtype), x):
            return
        if bool((x == x.round()).all()):
            self.casts.append(LossyCast(place, "integers", x.dtype, y.dtype, argument, largest))

    def _note_write(self, args: tuple[Any, ...], place: Place) -> None:
        """Note a gradient that is written to after its backward."""
        names = list(filter(None, [self._grads.get(memory_of(x)) for x in floats_in(args[:1])]))
        if names and not is_called_by_amp():
            self._written |= dict.fromkeys(names, place)
            if self._open_scale() is not None and self._scale != 1.0:
                self.grads_in_place |= dict.fromkeys(names, place) | self.grads_in_place

    def accumulated(self, name: str, parameter: Tensor) -> None:
        """Note the gradient that a backward has accumulated in a parameter."""
        grad = parameter.grad
        if grad is None or grad.is_sparse or not grad.numel():
            return
        self._grads[memory_of(grad)] = name
        self._written.pop(name, None)
        if not is_finite(grad):
            self.bad_grads[name] = self._made.get(memory_of(grad))
        elif grad.dtype is torch.float16:
            self.zero_grads[name] = 1 - grad.count_nonzero().item() / grad.numel()

    def note_arguments(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the names of the arguments that a model's tensors come in by."""
        names = [f"argument '{name}'" for name in positional_names(model)]
        names += [f"argument {i}" for i in range(len(names), len(args))]
        named = [(f"argument '{name}'", value) for name, value in kwargs.items()]
        for name, value in [*zip(names, args, strict=False), *named]:
            for x in floats_in(value):
                self._arguments.setdefault(memory_of(x), name)


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each op to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)  # fake tensors have no values
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # the subclass calls the op on its inner tensors, which is seen
        before = None
        if func._schema.is_mutable:
            before = tree_map_only(
                Tensor, lambda x: x.detach().clone() if x.is_floating_point() else x, (args, kwargs)
            )
        result = func(*args, **kwargs)
        with torch.no_grad():
            self._trace.saw(func, args, kwargs, result, before)
        return result


def _accumulated(trace: Trace, name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        with torch.no_grad(), _disable_current_modes():
            trace.accumulated(name, parameter)

    return hook


def _root_hook(trace: Trace) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        trace.note_arguments(module, args, kwargs)

    return hook


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the floating tensors among the arguments that an op has written to."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [
        x
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in floats_in(given.get(argument.name))
    ]


def memory_of(x: Tensor) -> int:
    """Return an identifier of a tensor's memory, valid as long as the tensor lives."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a wrapper subclass without memory of its own
        return id(x)
