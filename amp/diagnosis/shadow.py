"""A shadow of a step: every op also runs in FP64, on twins that were never rounded.

A dispatch mode sees the ops below autocast and autograd, forward, backward and in the optimizer's step,
so casts are ops like others. The step's own tensors are only read: its results are bitwise the same as
without the shadow. Control flow, random numbers and indices are those of the step, so nothing has to be
aligned. A result that is inf or NaN has parents: the ops that made its inputs.

An error in the shadow itself never reaches the step: see `amp.diagnosis.guard`. The op's results are
taken for exact then.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.utils._pytree import keystr, tree_leaves_with_path

from amp.casting.by_model import CastModel
from amp.casting.cast_hooks import positional_names
from amp.diagnosis.findings import short_path
from amp.diagnosis.guard import Unfollowed, guarded
from amp.diagnosis.ledger import Ledger
from amp.diagnosis.lost import Lost
from amp.diagnosis.memories import Memories, Value, inputs_of, own_part, results_from
from amp.diagnosis.places import Hook, Place, Places, is_called_by_amp, named_in, session_of, user_line
from amp.diagnosis.records import CASTS, COUNTS, MOVES, UNWRITTEN, Op, Owned, Source, origin
from amp.diagnosis.seen_gradients import SeenGradients
from amp.diagnosis.twins import (
    computable,
    difference,
    floats_in,
    fresh_in,
    has_minus_inf_alone,
    has_twin,
    is_finite,
    is_float,
    largest,
    written_by,
    wrong_in,
)
from amp.masters.fp32_values import largest_in_master
from amp.observers import Observer, observing

_MAKERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
PASSED = 4
"""So many ops may be between what a tensor holds and what is copied to it in its place."""


_Begun = tuple[Op, dict[int, Value], list[Tensor]]
"""An op before it runs, what it reads, by the id of the tensor, and the tensors that it writes to."""


class Shadow(Observer):
    """Runs every op twice while it is open. The host waits for the device after each op.

    Args:
        models: the models whose modules, parameters and buffers are named, by the prefix of the names.
        open_scale: returns the loss scale while the gradients in `.grad` are scaled, or of losses that
            it is given, else None.
        unfollowed: counts errors of the shadow itself; by default a new one.

    Attributes:
        models: the models, by the prefix of the names.
        ops: the ops that ran, by number.
        memories: the memory of the tensors that were seen, with their names and twins.
        lost: what the ops have lost.
        ledger: what the first forward of each model calls.
        gradients: what was seen of losses and gradients.
        cast_buffers: buffers that amp has cast, by name, and what they were.
        without_twin: how many ops could not run on twins.
        properties: those of the models' session; None for a script without amp.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        open_scale: Callable[..., Tensor | None] = lambda *losses: None,
        unfollowed: Unfollowed | None = None,
    ) -> None:
        self.models = models
        self.ops: dict[int, Op] = {}
        self.memories = Memories()
        self.lost, self.ledger = Lost(), Ledger()
        self.gradients = SeenGradients(self.memories, open_scale)
        self.without_twin = 0
        self.unfollowed = Unfollowed() if unfollowed is None else unfollowed
        sessions = list(filter(None, map(session_of, models.values())))
        self.properties = next((session.properties for session in sessions), None)
        casts = [x for session in sessions for x in session.strategies if isinstance(x, CastModel)]
        self.cast_buffers: dict[str, tuple[Tensor, Tensor]] = {
            name: (buffer, before.to(buffer.device))
            for name, buffer in named_in(models, "named_buffers")
            for cast in casts
            if (before := cast.before_cast(buffer)) is not None
        }
        self._places = Places(models, self)
        self._called: set[int] = set()  # the ids of the models whose first forward has begun
        self._in_fp8 = {x for x, each in named_in(models, "named_modules") if "_amp_fp8" in vars(each)}
        self._is_stepping = False
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, parameter in named_in(self.models, "named_parameters"):
                self.memories.own("weight", name, parameter)
                if parameter.requires_grad and parameter.is_leaf:
                    hook = Hook(functools.partial(self._unseen, self.gradients.note_accumulated, name))
                    stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            for name, buffer in named_in(self.models, "named_buffers"):
                self.memories.own("buffer", name, buffer)
            for buffer, before in self.cast_buffers.values():
                self.memories.put(buffer, before)
            self._places.begin(stack)
            stack.enter_context(_Ops(self))
            stack.enter_context(observing(self))
            begins, ends = (functools.partial(self._set_stepping, x) for x in (True, False))
            stack.callback(register_optimizer_step_pre_hook(begins).remove)
            stack.callback(register_optimizer_step_post_hook(ends).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    @property
    def bad_weights(self) -> dict[str, int]:
        """For each parameter that is inf or NaN by the step, the number of the op that made it so."""
        named = named_in(self.models, "named_parameters")
        return {name: made for name, x in named if (made := self.memories[x].bad)}

    # Called by hooks and modes.

    @guarded
    def _unseen(self, note: Callable[..., None], *args: Any) -> None:
        """Call a function whose own ops have no shadow."""
        with torch.no_grad(), _disable_current_modes():
            note(*args)

    def _set_stepping(self, is_stepping: bool, *_: Any) -> None:
        self._is_stepping = is_stepping

    @guarded
    def model_called(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the names of a model's arguments, and what its first forward calls."""
        for name, x in _named(model, args, kwargs):
            self.memories.own("argument", name, x)
        if torch.is_grad_enabled() and id(model) not in self._called:
            self._called.add(id(model))
            self.ledger.is_open = True

    @guarded
    def module_left(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the forward of a module has ended."""
        if self.ledger.is_open and "_amp_fp8" in vars(module) and output is not None:
            self.ledger.note_fp8(self._places.of_call(nn.functional.linear), module, args[0], output)
        if any(module is model for model in self.models.values()):
            self.ledger.close()

    @guarded
    def function_called(self, function: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Note a call of a torch function."""
        if function in _MAKERS:
            given = kwargs["data"] if "data" in kwargs else args[function is Tensor.new_tensor]
            self._unseen(self._note_made, given, result)
        if self.ledger.is_open and (place := self._places.of_call(function)).module not in self._in_fp8:
            self.ledger.note_call(place, function, args, kwargs, result)

    def _note_made(self, given: Any, x: Tensor) -> None:
        """Note numbers of Python's that are too large for the tensor that is made of them."""
        if isinstance(given, Tensor) or not is_float(x) or is_finite(x):
            return
        exact = torch.as_tensor(given, dtype=torch.float64).to(x.device)
        if bool((wrong := wrong_in(x, exact)).any()):
            file, line = user_line()
            number = f"{exact[wrong][0].item():g}, at {short_path(file)}:{line},"
            self.memories.own("number", number, x)
            self.memories.put(x, exact)

    @guarded
    def backward_begins(self, losses: Sequence[Tensor]) -> None:
        """Note the loss scale, and the tensors that a backward starts from."""
        self._unseen(self.gradients.note_losses, losses)

    @guarded
    def unscaling(self, grads: Sequence[Tensor], inv_scale: Tensor) -> None:
        """Note gradients that an `amp.GradScaler` unscales."""
        self._unseen(self.gradients.note_unscale, grads, inv_scale)

    @guarded
    def step_ends(self, attached: Any) -> None:
        """Take for exact what kernels of this library wrote, which no mode sees."""
        params = [group["params"] for group in attached.optimizer.param_groups]
        states = list(attached.optimizer.state.values())
        for x in floats_in((params, states, list(attached.gradients.parameters.models))):
            self.memories.forget(x)

    # Each op.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and again on twins, and note what is wrong."""
        begun = self._op_begins(func, args, kwargs)
        result = func(*args, **kwargs)
        if begun is None or not self._op_ends(begun, args, kwargs, result):
            self._forget_op(func, args, kwargs, result)
        return result

    @guarded
    @torch.no_grad()
    def _op_begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun:
        """Find where an op is called, and note what it reads and is about to write."""
        place, phase = self._places.here(func.overloadpacket.__name__)
        if self._is_stepping and phase == "forward":
            place, phase = Place(place.op, place.module, *user_line(in_packages=False)), "step"
        written = written_by(func, args, kwargs)
        if phase != "backward":
            self.lost.note_scalars(place, func, args)
        values = {id(x): self.memories.read(x) for x in floats_in((args, kwargs))}
        for x in written:
            self.memories.before_write(x)
        scale = self.gradients.scale if phase == "backward" else 1.0
        return Op(0, place, phase, func, scale), values, written

    @guarded
    def _forget_op(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Take the results of an op that could not be followed for exact."""
        written = written_by(func, args, kwargs)
        for x in (*written, *fresh_in(result, written)):
            self.memories.forget(x)
            self.memories[x].made = self.memories[x].bad = 0

    @guarded
    @torch.no_grad()
    def _op_ends(self, begun: _Begun, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Run an op on twins, note what is wrong with its result, and return that this was possible."""
        op, values, written = begun
        # A tensor that gets other memory, as from a loader, is not computed.
        if op.func.overloadpacket is torch.ops.aten.set_ or op.func.is_view:
            return True
        fresh = fresh_in(result, written)
        if not values and not fresh:
            return True
        outputs = [*written, *fresh]
        op.number = len(self.ops) + 1
        self.ops[op.number] = op
        op.takes = tuple(value.real.dtype for value in values.values())
        op.gives = outputs[0].dtype if outputs else None
        op.parents = tuple(dict.fromkeys(value.made for value in values.values() if value.made))
        op.has_twin = self.memories.run_on_twins(op.func, args, kwargs, result, fresh)
        if not op.has_twin:
            for x in outputs:
                self.memories.forget(x)
            is_drawn = op.func.namespace == "aten" and not has_twin(op.func)  # or a number as it is
            self.without_twin += bool(outputs) and not is_drawn
        if op.is_collective:  # whose result may not be there yet
            self._note_bad(op, values, [])
            for x in outputs:
                self.memories[x].bad = op.number if op.bad.parents else 0
        elif op.aten not in UNWRITTEN:
            exact = list(map(self.memories.twin, outputs))
            op.error = max(map(difference, outputs, exact), default=0.0)
            op.largest = max(map(largest, exact), default=0.0)
            self._note_bad(op, values, outputs)
        self._note_lost(op, values, outputs, written)
        for value in values.values() if op.aten in CASTS and not outputs else ():
            self.lost.note_integers(origin(self.ops, value.made) or op, value, result)
        if op.aten == "_amp_foreach_non_finite_check_and_unscale_":  # of torch's GradScaler
            self.gradients.note_unscale(args[0], args[2])
        elif written and op.phase != "backward":
            self.gradients.note_write(written, op.place)
        for x in outputs:
            self.memories[x].made = op.number
        for x in fresh:
            self.memories[x].is_new = True
        if op.aten in MOVES or op.is_bad or not isinstance(args[0] if args else None, (list, tuple)):
            self.memories.keep(op, args, kwargs, values, outputs)
        if op.is_bad and (op.is_root or op.bad.is_wrong) and not op.is_constant:
            op.bad.value = self._largest_from_inputs(op, outputs)
        return True

    def _largest_from_inputs(self, op: Op, outputs: list[Tensor]) -> float | None:
        """Return the largest magnitude of an op's results in FP64 from its own inputs.

        If elements of its results are not finite and are in their twins, only these count.

        Returns:
            The magnitude; inf or NaN if the result is not finite in FP64 either, and none that is too
            large for the op's format is. None for an op that cannot be run again.
        """
        results = results_from(op, lambda x: x.real.to(x.exact.dtype))
        if results and op.bad.is_wrong:
            wrong = (wrong_in(x, self.memories.twin(x)) for x in outputs)
            results = [y[at] for y, at in zip(results, wrong, strict=True) if bool(at.any())]
            most = max([largest(torch.where(y.isfinite(), y, 0.0)) for y in results], default=0.0)
            if op.gives is not None and most > torch.finfo(op.gives).max:
                return most
        return max(map(largest, results), key=lambda x: (math.isnan(x), x), default=None)

    def _note_lost(
        self, op: Op, values: dict[int, Value], outputs: list[Tensor], written: list[Tensor]
    ) -> None:
        """Note numbers that an op has lost."""
        for x in written:
            value, memory = values.get(id(x)), self.memories[x]
            if value is None or (op.aten.endswith("copy_") and _is_kept_wider(self.ops, value, values)):
                continue
            if memory.gradient and "add" in op.aten:  # only sums of gradients may stand still
                owned = Owned("gradient", memory.gradient)
                self.lost.note_still(op, owned, value, x, self.memories.twin(x))
            elif not memory.gradient and not memory.is_new:
                self.lost.note_still(op, memory.owned, value, x, self.memories.twin(x))
        is_cast = op.aten in (*CASTS, "arange", "scalar_tensor")
        if is_cast and outputs and op.phase not in ("backward", "step"):
            owned = next((value.memory.owned for value in reversed(values.values())), Owned())
            casts = self.properties is not None and self.properties.casts_model
            if owned.kind == "argument" and casts and is_called_by_amp():
                op.argument = owned.name
            if owned.kind != "weight":
                self.lost.note_cast(op, owned.name, outputs[0], self.memories.twin(outputs[0]))
        if op.aten in COUNTS and outputs and op.phase == "forward":
            self.lost.note_count(op, outputs[0], self.memories.twin(outputs[0]))

    def _note_bad(self, op: Op, values: dict[int, Value], outputs: list[Tensor]) -> None:
        """Note results that are inf or NaN."""
        bad = [x for x in outputs if not is_finite(x)]
        for value in values.values() if bad or op.is_collective else ():
            if not is_finite(value.real):
                self._note_bad_input(op, value)
        if bad:
            op.is_bad, op.gives = True, bad[0].dtype
            wide = list(map(computable, bad))
            op.bad.has_nan = any(bool(x.isnan().any()) for x in wide)
            op.bad.is_wrong = any(bool(wrong_in(x, self.memories.twin(x)).any()) for x in bad)
            made = self.memories[bad[0]].made if op.aten == "copy_" else 0
            if made and self.ops[made].is_collective:  # gloo copies its result when it is waited for
                op.bad.parents.append(made)
                op.bad.sources.clear()
            op.bad.is_minus_inf = not op.bad.has_nan and all(map(has_minus_inf_alone, wide))
        for x in outputs:
            self.memories[x].bad = 0
        kinds = {source.owned.kind for source in op.bad.sources}
        is_batch = op.aten in MOVES and not op.bad.parents and kinds <= {"tensor", "argument"}
        for x in bad if not (kinds and is_batch) else ():  # a batch of samples is data as they are
            self.memories[x].bad = op.number

    def _note_bad_input(self, op: Op, value: Value) -> None:
        op.bad.inherits |= bool(wrong_in(value.real, value.exact).any())
        if not (made := value.memory.bad) and value.made and self.ops[value.made].is_collective:
            made = value.made  # it has come from another rank
        if made:
            op.bad.parents.append(made)
        elif not op.is_collective:
            op.bad.sources.append(_source_of(value))


def _is_kept_wider(ops: Mapping[int, Op], target: Value, values: dict[int, Value]) -> bool:
    """Whether a tensor is copied from a wider one, which was not made of it just before."""
    todo = [x for x in values.values() if x is not target]
    if all(x.real.element_size() <= target.real.element_size() for x in todo):
        return False
    for _ in range(PASSED if len(todo) == 1 else 0):  # lists are copied from what is kept
        made = [ops[x] for x in {x.made for x in todo if x.made}]
        todo = [x for op in made if op.phase != "backward" for x in inputs_of(op)]
        if any(x.memory is target.memory for x in todo):
            return False
    return True


def _source_of(value: Value) -> Source:
    """Return the record of a value that was inf or NaN before the step."""
    owned, most = value.memory.owned, largest(value.exact)
    if owned.kind in ("weight", "buffer") and owned.tensor is not None and not math.isfinite(most):
        most = largest_in_master(owned.tensor)
    seen = [x for x in (owned.tensor, value.real) if x is not None and not is_finite(x)]
    x = computable(own_part(seen[0]))
    index = tuple((~x.isfinite()).nonzero()[0].tolist())
    held = x[x != -math.inf]
    is_mask = owned.kind == "buffer" or bool((held == held[:1]).all())
    is_mask &= is_finite(held) if held.numel() else True
    return Source(owned, index, most if math.isfinite(most) else None, is_mask)


def _named(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in the arguments of a model, each with the name it comes in by."""
    names = [f"argument '{name}'" for name in positional_names(model)]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    named = [(f"argument '{name}'", value) for name, value in kwargs.items()]
    for name, value in [*zip(names, args, strict=False), *named]:
        leaves = tree_leaves_with_path(value)
        yield from ((f"{name}{keystr(path)}", x) for path, x in leaves if is_float(x))


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
