"""A shadow of a step: every op runs as it is, and again in FP64 on twins that were never rounded.

A dispatch mode sees the ops below autocast and autograd, forward, backward and in the optimizer's step,
so casts are ops like others. The step's own tensors are only read: its results are bitwise the same as
without the shadow. Control flow, random numbers and indices are those of the step, so nothing has to be
aligned. A result that is inf or NaN has parents: the ops that made its inputs.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map

from amp.casting.cast_hooks import positional_names
from amp.diagnosis.advice import properties_of
from amp.diagnosis.lost import Lost
from amp.diagnosis.places import Hook, Place, Places, is_called_by_amp, user_line
from amp.diagnosis.records import CASTS, UNWRITTEN, Inputs, Op, Owned, Source, Value
from amp.diagnosis.twins import (
    Twins,
    difference,
    floats_in,
    has_twin,
    identity_of,
    is_finite,
    is_float,
    largest,
    largest_from,
    own_part,
    run_wide,
)
from amp.masters.master_values import largest_in_master
from amp.observers import Observer, observing


class Shadow(Observer):
    """Runs every op twice while it is open. The host waits for the device after each op.

    Args:
        models: the models whose modules, parameters and buffers are named, by the prefix of the names.
        open_scale: returns the loss scale while the gradients in `.grad` are scaled, else None.

    Attributes:
        ops: the ops that ran, by number.
        lost: what the ops have lost.
        bad_grads: for each parameter whose gradient is not finite, the op that made it, or None.
        bad_weights: for each parameter that the step made inf or NaN, the op that did.
        off_grads: for each parameter, how far its gradient is off, the op that made it, and the root of
            the mean of its exact square.
        grads_in_place: parameters whose gradients were written to while they were scaled, and where.
        zero_grads: for each parameter with a finite gradient, the share of it that is 0 and is not in
            the twin.
        loss: the op that made the loss, or the argument of `note_output`, if it is not finite.
        losses: the ops that made the losses.
        scales: the loss scales of the backwards that were seen.
        failed: where the first op that raised was called, or None.
        without_twin: how many ops could not run on twins.
        properties: those of the models' session; None for a script without amp.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        open_scale: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self.ops: dict[int, Op] = {}
        self.bad_grads: dict[str, int | None] = {}
        self.bad_weights: dict[str, int] = {}
        self.off_grads: dict[str, tuple[float, int, float]] = {}
        self.grads_in_place: dict[str, Place] = {}
        self.zero_grads: dict[str, float] = {}
        self.loss: int | None = None
        self.losses: list[int] = []
        self.scales: set[float] = set()
        self.failed: Place | None = None
        self.without_twin = 0
        self.properties = properties_of(models.values())
        self._casts_model = self.properties is not None and self.properties.casts_model
        self.lost = Lost()
        self._models, self._open_scale, self._scale = models, open_scale, 1.0
        self._twins = Twins()
        self._inputs = Inputs(self._twins)
        self._places = Places(models, self._note_loss, self.call_ends)
        self._made: dict[int, int] = {}  # the op that wrote to a memory last
        self._born: set[int] = set()  # memory whose first values are of this watch
        self._bad: dict[int, int] = {}  # the op that made the values of non-finite memory
        self._owned: dict[int, Owned] = {}
        self._grads: dict[int, str] = {}
        self._written: dict[str, Place] = {}  # gradients written to after backward, and where
        self._is_stepping = False
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for prefix, model in self._models.items():
                self._know(prefix, model, stack)
            stack.enter_context(self._places)
            stack.enter_context(_Ops(self))
            stack.enter_context(observing(self))
            for register, stepping in (
                (register_optimizer_step_pre_hook, True),
                (register_optimizer_step_post_hook, False),
            ):
                stack.callback(register(functools.partial(self._note_stepping, stepping)).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()
        for name, parameter in self.named_parameters():
            if (made := self._bad.get(identity_of(parameter))) is not None:
                self.bad_weights[name] = made

    def _know(self, prefix: str, model: nn.Module, stack: ExitStack) -> None:
        for name, parameter in model.named_parameters():
            name = name.replace("_orig_mod.", "")  # of a compiled model
            self.own("weight", prefix + name, parameter)
            if parameter.requires_grad and parameter.is_leaf:
                hook = Hook(functools.partial(self._unseen, self._accumulated, prefix + name))
                register: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(register(hook).remove)
        for name, buffer in model.named_buffers():
            self.own("buffer", prefix + name, buffer)
        hook = Hook(self._root_called)
        handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        stack.callback(handle.remove)

    def own(self, kind: str, name: str, tensor: Tensor) -> None:
        """Give a tensor a name, by which findings call it; see `Owned`."""
        self._owned.setdefault(identity_of(tensor), Owned(kind, name, tensor))

    def known(self, tensor: Tensor, exact: Tensor) -> None:
        """Give a tensor, which was rounded before the watch, the twin that it was rounded from."""
        self._twins.put(own_part(tensor), own_part(exact))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the models with their names."""
        for prefix, model in self._models.items():
            for name, parameter in model.named_parameters():
                yield prefix + name.replace("_orig_mod.", ""), parameter

    # For a subclass that keeps more.

    def op_begins(self, place: Place, func: Any, args: tuple[Any, ...]) -> None:
        """An op is about to run."""

    def op_ends(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """An op has run."""

    def call_ends(
        self, place: Place, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A torch function was called from outside of torch, and has returned."""

    # Called by hooks and modes.

    def _unseen(self, note: Callable[..., None], *args: Any) -> None:
        """Call a function whose own ops have no shadow."""
        with torch.no_grad(), _disable_current_modes():
            note(*args)

    def _note_stepping(self, is_stepping: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._is_stepping = is_stepping

    def _root_called(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:
        if kwargs is not None:  # else the hook was removed by one before it
            self.note_arguments(model, args, kwargs)

    def note_arguments(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the names of the arguments that a model's tensors come in by."""
        names = [f"argument '{name}'" for name in positional_names(model)]
        names += [f"argument {i}" for i in range(len(names), len(args))]
        named = [(f"argument '{name}'", value) for name, value in kwargs.items()]
        for name, value in [*zip(names, args, strict=False), *named]:
            for path, x in _paths(value):
                self.own("argument", name + path, x)

    def _note_loss(self, loss: Tensor) -> None:
        """Note the loss that a backward starts from."""
        scale = self._open_scale()
        self._scale = 1.0 if scale is None else float(scale)
        self.scales.add(self._scale)
        self._note_results(loss)

    def note_output(self, output: Any) -> None:
        """Note the output of a forward that no backward follows."""
        self._unseen(self._note_results, output)

    def _note_results(self, results: Any) -> None:
        for x in floats_in(results):
            self.losses.append(self._made.get(identity_of(x), 0))
            if not is_finite(x):
                self.loss = self._bad.get(identity_of(x), self.loss)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Note the gradient that a backward has accumulated in a parameter."""
        grad = own_part(parameter.grad)
        if not is_float(grad):
            return
        self._grads[identity_of(grad)] = name
        self._written.pop(name, None)
        if not is_finite(grad):
            self.bad_grads[name] = self._bad.get(identity_of(grad))
            return
        made, exact = self._made.get(identity_of(grad), 0), self._twins.of(grad)
        self.off_grads[name] = difference(grad, exact), made, float(exact.square().mean().sqrt())
        gone = ((grad == 0) & (exact != 0)).count_nonzero().item()
        self.zero_grads[name] = gone / max(1, exact.count_nonzero().item())

    def unscaling(self, grads: Sequence[Tensor], inv_scale: Tensor) -> None:
        """Note gradients that an `amp.GradScaler` unscales."""
        self._unseen(self._note_unscale, grads, inv_scale)

    def _note_unscale(self, grads: Sequence[Tensor], inv_scale: Any) -> None:
        """Note gradients that a gradient scaler unscales: they were scaled until now."""
        if float(inv_scale) in (0.0, 1.0):
            return
        self._scale = 1 / float(inv_scale)
        self.scales = self.scales - {1.0} | {self._scale}
        for op in self.ops.values():
            if op.phase == "backward" and op.loss_scale == 1.0:
                op.loss_scale = self._scale
        for grad in grads:
            name = self._grads.get(identity_of(grad), "")
            if name in self._written:
                self.grads_in_place.setdefault(name, self._written[name])

    def step_ends(self, attached: Any) -> None:
        """Take for exact what kernels of this library wrote, which no mode sees."""
        for group in attached.optimizer.param_groups:
            for master in group["params"]:
                for x in (master, *floats_in(attached.optimizer.state.get(master, {}))):
                    self._twins.forget(x)
        for parameter in attached.gradients.lists.models:
            self._twins.forget(parameter)

    # Each op.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and again on twins, and note what is wrong."""
        place, phase = self._places.here(func.overloadpacket.__name__)
        if self._is_stepping and phase == "forward":
            place, phase = Place(place.op, place.module, *user_line(in_packages=False)), "step"
        self.op_begins(place, func, args)
        written = written_by(func, args, kwargs)
        inputs = floats_in((args, kwargs))
        with torch.no_grad():
            made = self._made
            values = {id(x): self._inputs.read(x, made.get(identity_of(x), 0)) for x in inputs}
            for x in written:
                self._inputs.before_write(x)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.failed = self.failed or place
            raise
        with torch.no_grad():
            self.op_ends(place, func, args, kwargs, result)
            if not func.is_view and (inputs or floats_in(result)):
                scale = self._scale if phase == "backward" else 1.0
                op = Op(len(self.ops) + 1, place, phase, func, scale)
                self._shadow(op, args, kwargs, result, values, written)
        return result

    def _shadow(
        self,
        op: Op,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        values: dict[int, Value],
        written: list[Tensor],
    ) -> None:
        """Do an op that has run on twins, and note what is wrong with its result."""
        outputs = [*written, *fresh_in(result, written)]
        self.ops[op.number] = op
        op.takes = tuple(value.real.dtype for value in values.values())
        op.gives = outputs[0].dtype if outputs else None
        op.parents = tuple(dict.fromkeys(value.made for value in values.values() if value.made))
        self._set_twins(op.func, args, kwargs, result, written)
        if op.aten not in UNWRITTEN:
            exact = [self._twins.of(x) for x in outputs]
            op.error = max(map(difference, outputs, exact), default=0.0)
            op.largest = max(map(largest, exact), default=0.0)
            self._note_bad(op, args, kwargs, values, outputs)
        self._note_lost(op, args, values, outputs, written)
        if op.aten == "_amp_foreach_non_finite_check_and_unscale_":  # of torch's GradScaler
            self._note_unscale(args[0], args[2])
        elif written and op.phase != "backward":
            self._note_write(written, op.place)
        self._made |= dict.fromkeys(map(identity_of, outputs), op.number)
        self._born.update(identity_of(x) for x in fresh_in(result, written))
        if not isinstance(args[0] if args else None, (list, tuple)) or op.is_bad:
            self._inputs.keep(op, args, kwargs, values, outputs)

    def _set_twins(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, written: list[Tensor]
    ) -> None:
        """Run an op on twins; what it has written in place is right then."""
        try:
            if not has_twin(func):
                raise NotImplementedError
            exact_args, exact_kwargs = tree_map(
                lambda x: self._twins.of(x) if is_float(x) else x, (args, kwargs)
            )
            exact = run_wide(func, exact_args, exact_kwargs, result)
        except (RuntimeError, TypeError, NotImplementedError):
            outputs = [*written, *fresh_in(result, written)]
            is_exact = func.namespace == "aten" and not has_twin(func)  # drawn, or a number as it is
            self.without_twin += bool(outputs) and not is_exact
            for x in outputs:
                self._twins.forget(x)
            return
        fresh = set(map(id, fresh_in(result, written)))
        for x, y in zip(tree_leaves(result), tree_leaves(exact), strict=True):
            if id(x) in fresh:
                self._twins.put(x, y)

    def _note_lost(
        self, op: Op, args: Any, values: dict[int, Value], outputs: list[Tensor], written: list[Tensor]
    ) -> None:
        """Note numbers that an op has lost."""
        for x in written:
            value, memory = values.get(id(x)), identity_of(x)
            is_new = memory in self._born and memory not in self._grads
            is_wider = op.aten.endswith("copy_") and max(map(_size, op.takes)) > x.element_size()
            if value is None or is_new or is_wider:  # what is copied is kept with more digits
                continue
            owned = self._owned.get(memory, Owned())
            if memory in self._grads and "add" not in op.aten:  # only sums of gradients may stand still
                continue
            if memory in self._grads:
                owned = Owned("gradient", self._grads[memory])
            self.lost.note_still(op, owned, value, x, self._twins.of(x))
        if op.phase != "backward" and outputs:
            self.lost.note_scalars(op, args)
        if op.aten in (*CASTS, "arange") and outputs and op.phase not in ("backward", "step"):
            memory = next((value.memory for value in reversed(values.values())), 0)
            owned = self._owned.get(memory, Owned())
            if owned.kind == "argument" and self._casts_model and is_called_by_amp():
                op.argument = owned.name
            if owned.kind != "weight":
                self.lost.note_cast(op, owned.name, outputs[0], self._twins.of(outputs[0]))

    def _note_bad(
        self, op: Op, args: Any, kwargs: Any, values: dict[int, Value], outputs: list[Tensor]
    ) -> None:
        """Note results that are inf or NaN."""
        bad = [x for x in outputs if not is_finite(x)]
        for x in outputs:
            if all(x is not each for each in bad):
                self._bad.pop(identity_of(x), None)
        if not bad:
            return
        op.is_bad, op.gives = True, bad[0].dtype
        op.has_nan = any(bool(x.isnan().any()) for x in bad)
        op.is_bad_exactly = any(not is_finite(self._twins.of(x)) for x in bad)
        op.is_minus_inf = not op.has_nan and all(bool((x[x.isinf()] < 0).all()) for x in bad)
        is_foreign = op.func.namespace != "aten"  # a collective: its result may be another rank's
        for value in values.values():
            if not is_finite(value.real):
                made = self._bad.get(value.memory)
                if made is None and value.made and self.ops[value.made].func.namespace != "aten":
                    made = value.made  # a collective, which has ended after it was looked at
                if made is not None:
                    op.bad_parents.append(made)
                elif not is_foreign:
                    op.sources.append(self._source(value))
        if "softmax" in op.aten and op.phase != "backward":
            reals = [value.real for value in values.values() if value.real.dim()]
            op.rows_of_minus_inf = any(bool((x == -math.inf).all(-1).any()) for x in reals)
        if op.is_root and not op.is_constant:
            given = tree_map(lambda x: values[id(x)].real if id(x) in values else x, (args, kwargs))
            op.value = largest_from(op.func, *given)
        self._bad |= dict.fromkeys(map(identity_of, bad), op.number)

    def _source(self, value: Value) -> Source:
        owned = self._owned.get(value.memory, Owned())
        most = math.inf
        if owned.kind in ("weight", "buffer") and owned.tensor is not None:
            most = largest_in_master(owned.tensor)
        index = tuple((~value.real.isfinite()).nonzero()[0].tolist())
        return Source(owned, index, most if math.isfinite(most) else None)

    def _note_write(self, written: Iterable[Tensor], place: Place) -> None:
        """Note a gradient that is written to after its backward."""
        names = list(filter(None, [self._grads.get(identity_of(x)) for x in written]))
        if names and not is_called_by_amp():
            self._written |= dict.fromkeys(names, place)
            if self._open_scale() is not None and self._scale != 1.0:
                self.grads_in_place |= dict.fromkeys(names, place) | self.grads_in_place


def fresh_in(result: Any, written: list[Tensor]) -> list[Tensor]:
    """Return the floating results of an op that are none of the tensors that it has written to."""
    return [x for x in floats_in(result) if all(x is not each for each in written)]


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _paths(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of nested containers, each with the expression that leads to it."""
    if is_float(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _paths(each, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _paths(each, f"{path}[{i}]")


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each op to a shadow."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadow, self._process = shadow, os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_forked = os.getpid() != self._process  # a worker of a loader has the mode, and no shadow
        if is_forked or any(issubclass(each, FakeTensor) for each in types):  # which have no values
            return func(*args, **kwargs or {})
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # the subclass calls the op on its inner tensors, which is seen
        return self._shadow.run(func, args, kwargs or {})


_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Ops that update running statistics, if their sixth argument is true."""


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the floating tensors among the arguments that an op writes to."""
    if func.overloadpacket.__name__ in _NORMS and args[5]:  # whose schema does not say so
        return floats_in(args[3:5])
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [
        x
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in floats_in(given.get(argument.name))
    ]
