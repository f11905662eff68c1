"""`amp.watch`: looking at the training of any unmodified script, with amp or without it.

Some steps of the training have a shadow. The first window begins when the first optimizer is made,
since masks, positions and noise come before a forward; later ones begin with a forward, since warm-ups
and moments show late. A window ends with the first forward after all optimizers have stepped, so that
averages of weights are in it. All steps are looked at cheaply, without a shadow: at the order of calls,
and at buffers that a cast has rounded. An error in any of this never reaches the training: see
`amp.diagnosis.guard`.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from amp.diagnosis import advice
from amp.diagnosis.attaching import Training, described, models_in_memory, optimizers_of
from amp.diagnosis.causes import findings_of, stands_still
from amp.diagnosis.diagnose import open_scale, prefixed
from amp.diagnosis.findings import Finding, Report, exact, grouped, one_a_rule
from amp.diagnosis.guard import Unfollowed, guarded
from amp.diagnosis.lost import Still
from amp.diagnosis.memories import KEPT, Value, own_part
from amp.diagnosis.places import named_in, open_modes, unwrapped, user_line
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.twins import is_float
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpValueError, brief
from amp.names import unwrapped_name
from amp.observers import Observer, observing
from amp.other_names import names_keywords
from amp.training.attached_optimizer import AttachedOptimizer

logger = logging.getLogger("amp")

AT = (1, 4, 20)
"""The steps that have a shadow."""
DEPTH = 4
"""So many operations may be between a scaled loss and the backward."""
LONGEST = 8
"""After so many steps of one optimizer a window ends, though another one has not stepped."""
SEARCH = 20
"""For so many steps more a window begins again after a step that a dynamic loss scale has skipped."""

OF_FORWARD, OF_NUMBER, BYTES = 3.5, 60, 120
"""A watched step takes so many times as long as its forward, and for each number of the weights so many
times as long as a product in FP64, and so many bytes."""
MUCH_TIME, MUCH_MEMORY = 10.0, 2**30
"""The cost is said beforehand if a step takes more seconds than this, or more bytes."""
FIRST, GROWTH = 2, 1000
"""A loss grows if it becomes larger than the first of these by this factor."""
_OF_GROWTH = {"range", "absorbed range", "loss", "weights", "mathematics"}
"""Causes of what grows without end."""
_RUINED = ", weights became inf or NaN"
_COMPENSATION = re.compile("kahan|compensation")
"""In the names of optimizer state that has what the weights have lost."""


class Rounded(NamedTuple):
    """What is known of a buffer that a cast has rounded.

    Attributes:
        name: its name in its module.
        exact: what it was before.
        version: how often torch had counted a write to it after the cast: it is exact no more if the
            script has written to it since.
        finding: what is said of it.
    """

    name: str
    exact: Tensor
    version: int
    finding: Finding


class TrainingWatch(Training, Observer):
    """Looks at the training of this process while it is open.

    Args:
        at: the numbers of the steps that have a shadow, from 1 on.

    Attributes:
        report: what was found so far.
        steps: how many steps the first optimizer has made.
        tell: tells the user something before the report.
    """

    def __init__(self, at: Sequence[int] = AT) -> None:
        super().__init__()
        self.unfollowed, self.tell = Unfollowed(), logger.warning
        self.report, self.steps = Report(unfollowed=self.unfollowed), 0
        self._at, self._due = set(at), sorted(at)
        self._first: int | None = None  # the id of the optimizer whose steps are counted
        self._shadow: Shadow | None = None
        self._modes_before: list[Any] = []  # which were open before, and will be after
        self._hindered_by = ""  # the class of a mode that was open where a window was due
        self._mode: Any = None  # that of the shadow
        self._is_empty = True  # whether no forward of the window has begun
        self._stepped = Counter[int]()  # in this window, by the id of the optimizer
        self._seen: list[Finding] = []
        self._still: list[Still] = []
        self._averages: list[tuple[Tensor, Tensor]] = []  # those in 16 bits, and what they were
        self._bad_loss: dict[torch.device, Tensor] = {}  # the number of the first step; 0 if none
        self._sizes: dict[torch.device, tuple[Tensor, Tensor]] = {}  # of the first losses, of all
        self._backwards = 0
        self._models: list[nn.Module] = []
        self._parts: list[str] = []  # of the line that says what is watched
        self._names: dict[str, None] = {}  # the classes of the optimizers
        self._levels: dict[str, None] = {}  # those of amp's sessions
        self._first_forward: float | None = None  # when it began; 0 when it has ended
        self._without_twin, self._tries, self._is_dynamic = 0, SEARCH, False
        self._is_ruined = self._is_explained = False
        self._has_scaler = False  # of torch's
        self._scaled_by: Tensor | None = None  # the factor that a scaler has left in the gradients
        self._left_by_scaler = 1.0  # that of the last backward, until the scaler is updated
        self._unscaled = set[int]()  # the ids of optimizers whose gradients it has unscaled since then
        self._scaled_nodes = set[int]()  # of autograd, by number: of losses that it has scaled
        self._sums: dict[nn.Module, tuple[int, float]] = {}  # of weights, and the step: see `_unmoved`
        self._in_float16 = False  # whether autocast computes in it
        self._is_stale = False  # whether weights have changed since autocast's cache was empty
        self._rounded: MutableMapping[Tensor, Rounded] = WeakTensorKeyDictionary()
        self._noted: dict[tuple[str, str], Finding] = {}  # by cause and advice

    def __enter__(self) -> Self:
        super().__enter__()
        self._modes_before = open_modes()
        self._open.enter_context(observing(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self.look()
        if self._shadow is not None:  # an error has left it open
            self._shadow.__exit__(None, None, None)
        super().__exit__(*exception)

    @property
    def about(self) -> str:
        """What is watched, in one line."""
        if not self._parts:
            return "no optimizer was made"
        scaled = ["a GradScaler"] if self._has_scaler else list(self._levels) or ["no GradScaler"]
        counted = f"{self.steps} step{'s' * (self.steps != 1)}" + self._is_ruined * _RUINED
        parts = [*self._parts, *self._names, *scaled, counted]
        lost = self._without_twin
        said = ", ".join(dict.fromkeys(parts + [f"{lost} ops could not run in FP64"] * bool(lost)))
        missed = [step for step in self._due if step in self._at]
        for text, steps in (
            ("no model was called for step", [x for x in missed if x <= self.steps]),
            ("training ended before step", [x for x in missed if x > self.steps]),
        ):
            said += f"; {text} {', '.join(map(str, steps))}" if steps else ""
        return said

    @property
    def _attached(self) -> list[AttachedOptimizer]:
        """The optimizers that have been through `initialize`."""
        return list(filter(None, map(AttachedOptimizer.of, self.optimizers)))

    # Windows.

    @guarded
    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Begin the first window, or begin it anew with the models of this optimizer too."""
        self._restart()

    @guarded
    def initialize_begins(self, session: Any, models: Sequence[nn.Module]) -> None:
        """Do not watch amp's casts of weights, which have masters."""
        self._cancel()

    @guarded
    def initialize_ends(
        self, session: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Begin the first window anew."""
        for optimizer in filter(None, optimizers):
            self.follow(optimizer)
        self._is_dynamic |= any(scaler.config.dynamic for scaler in session.scalers)
        self._restart()

    @guarded
    def root_called(self, model: nn.Module, args: Any) -> None:
        """End a window that has had its steps, or begin one that is due."""
        is_inside = self._shadow is not None and self._mode is not _get_current_dispatch_mode()
        if peek_interpreter_stack() is not None or is_inside:
            return  # vmap and grad put tensors of their own into modules; modes are left in order
        self._look_at_autocast(model)
        for optimizer in optimizers_of(model) if not self.optimizers else ():
            self.follow(optimizer)
        has_all = set(map(id, self.optimizers)) <= self._stepped.keys()
        if self._stepped and (has_all or max(self._stepped.values()) == LONGEST):
            self.look(is_last=False)
        if self._is_empty and self._shadow is not None:
            known = {x for each in self._models for x in each.parameters()}
            if _trains(model) and not known.issuperset(model.parameters()):
                self._cancel()  # it trains, though the optimizer has other weights
        self._begin(model, args)
        if self._shadow is not None:
            self._look_at_values(model)
        self._is_empty = False
        if self._first_forward is None and self._shadow is not None and torch.is_grad_enabled():
            self._first_forward = time.perf_counter()

    @_disable_current_modes()  # a shadow sees no ops of this
    def _look_at_values(self, model: nn.Module) -> None:
        """Look for buffers that are inf or NaN, which an op may hide, as 1 / inf is 0."""
        for name, x in model.named_buffers():
            if is_float(x) and bool((x.isnan() | (x == math.inf)).any()):
                what = f"the buffer {name} of {type(model).__name__} is not finite"
                self._note("weights", "forward", what, advice.EARLIER)

    @guarded
    def root_returns(self, model: nn.Module) -> None:
        """Say after the first forward what the steps to be looked at cost, if that is much."""
        shadow, weights = self._shadow, [x for each in self._models for x in each.parameters()]
        if not self._first_forward or shadow is None or not weights:
            return
        numbers = sum(x.numel() for x in weights)
        forward, self._first_forward = time.perf_counter() - self._first_forward, 0.0
        with _disable_current_modes():
            ones = torch.ones(min(numbers, 2**20), dtype=torch.float64, device=weights[0].device)
            start = time.perf_counter()
            float(ones.mul(ones)[0])
            each = (time.perf_counter() - start) / len(ones)
        seconds = OF_FORWARD * forward + OF_NUMBER * each * numbers
        size = min(OF_FORWARD * shadow.memories.bytes, KEPT) + BYTES * numbers
        if seconds > MUCH_TIME or size > MUCH_MEMORY:
            steps = len(self._due) + 1
            self.tell(
                f"{steps} watched step{'s' * (steps > 1)}, about {seconds:.0f} s each, with "
                f"{size / 2**30:.1f} GB more memory"
            )

    def _restart(self) -> None:
        if self._is_empty:
            self._cancel()
        self._begin()

    def _begin(self, called: nn.Module | None = None, args: Any = ()) -> None:
        is_due = self._due and self.steps + 1 >= self._due[0]
        if self._shadow is not None or not is_due:
            return
        if modes := [mode for mode in open_modes() if mode not in self._modes_before]:
            self._hindered_by = type(modes[-1]).__name__
            return
        sessions = {one.owner for one in self._attached}
        self._levels |= {f"at {x.properties.opt_level or 'a profile'}": None for x in sessions}
        own = [model for session in sessions for model in session.live_models()]
        trained, others = models_in_memory(self.optimizers)
        around = [x for x in trained if not any(each in own for each in x.modules())]
        self._models = list(map(unwrapped, [*own, *around]))
        if called is not None and self.optimizers and (_trains(called) or not self._models):
            around = [x for x in others if any(each is called for each in x.modules())]
            around = around or [called] * (not self._models)
            # The script may copy their weights from those that the optimizer has.
            self._models += [x for x in map(unwrapped, around) if x not in self._models]
        if not self._models:
            return
        self._due = [step for step in self._due if step > self.steps + 1]
        shadow = Shadow(prefixed(self._models), self._scale, self.unfollowed)
        shadow.__enter__()
        self._shadow = shadow
        self._mode = _get_current_dispatch_mode()
        self._stepped.clear()
        self._is_empty = True
        self._name_states(shadow, others)
        for x, rounded in self._rounded.items():
            if x._version == rounded.version:
                shadow.memories.put(x, rounded.exact)
                shadow.memories.own("buffer", rounded.name, x)
        if called is not None and called in self._models:  # its own hooks are not called any more
            shadow.model_called(called, args, {})
        self._parts = described(self._models)  # as they are now: a session gives dtypes back

    def _scale(self, losses: Sequence[Tensor] = ()) -> Any:
        """Return the loss scale that gradients have now, or that those of losses will have; or None."""
        if self._scaled_by is None:
            return open_scale(self._attached)
        return self._scaled_by if not losses or any(map(self._is_scaled, losses)) else None

    def _is_scaled(self, loss: Tensor) -> bool:
        """Whether a loss is what a gradient scaler has returned, or a sum or a share of it."""
        nodes = [loss.grad_fn]
        for _ in range(DEPTH):
            known = [node for node in nodes if node is not None]
            if any(node._sequence_nr() in self._scaled_nodes for node in known):
                return True
            nodes = [each for node in known for each, _ in node.next_functions]
        return False

    def _drop(self) -> Shadow | None:
        """Close a window, and return its shadow."""
        shadow, self._shadow, self._mode = self._shadow, None, None
        self._stepped.clear()
        if shadow is not None:
            shadow.__exit__(None, None, None)
        return shadow

    def _cancel(self) -> None:
        """Close a window, to begin it again."""
        if self._drop() is not None:
            self._due.insert(0, self.steps + 1)

    @guarded
    def look(self, is_last: bool = True) -> None:
        """End a window if one is open, and put what was found into the report.

        The host waits for the losses if this `is_last`, and not in every step.
        """
        if (shadow := self._drop()) is not None:
            self.window_ends(shadow)
        # A scaler may have been used only after this was noted, as in a GAN.
        noted = [x for x in self._noted.values() if x.cause != "loss scale" or not self._has_scaler]
        still = list(stands_still(self._still, bool(self._levels)))
        losses = _of_unseen(self._bad_loss.values()) if is_last else []
        seen = grouped(self._seen)
        first = [x for x in noted if x.cause == "order"]  # of which the others may be consequences
        has_weights = any(x.cause == "weights" for x in seen)  # by what they have ruined
        last = [x for x in noted if x not in first and not (has_weights and x.cause == "weights")]
        if not seen or seen[0].cause == "weights":  # an earlier step has ruined them
            first += losses
        else:
            last = [*losses, *last]
        if is_last and not (first or seen or still or last):
            last = list(self._unmoved())
        self.report.why_nothing = self._why_nothing()
        found = [*first, *self._rounded_buffers(), *seen, *still, *last]
        self.report.findings = one_a_rule(self._with_growth(found) if is_last else found)

    def _note_weights(self, shadow: Shadow) -> None:
        """Note the sums of the weights of models with gradients; NaN, which no sum is, if they move."""
        for prefix, model in shadow.models.items():
            if any(shadow.memories[x].made for x in model.parameters()):  # the same as before, perhaps
                self._sums[model] = self.steps, math.nan
            elif any(name.startswith(prefix) for name in shadow.gradients.known):
                self._sums.setdefault(model, (self.steps, _sum_of(model)))

    def _note_averages(self, shadow: Shadow) -> None:
        """Note averages that several ops have moved and, together, have not."""
        for x, before in self._averages:
            memory = shadow.memories[x]
            op = shadow.ops.get(memory.made)
            if op is not None and "copy" not in op.aten:  # else what it copies is kept elsewhere
                value = Value(before, before.double(), memory, 0)
                shadow.lost.note_still(op, memory.owned, value, x.detach(), shadow.memories.twin(x))
        self._averages = []

    def _unmoved(self) -> Iterator[Finding]:
        """Yield a finding for each model of which no weight has changed in several steps."""
        for model, (step, before) in self._sums.items():
            least = SEARCH - 4 if self._is_dynamic else 2  # for a scale to be found
            if self.steps < step + least or _sum_of(model) != before:
                continue
            what = f"no weight of {type(model).__name__} has changed from step {step} to {self.steps}"
            todo = "Look whether the optimizer has its parameters, or new values are copied to them,\n"
            todo += "and whether all steps are skipped, as where each step makes its own GradScaler."
            yield Finding("still", what, todo, "step")

    def _rounded_buffers(self) -> list[Finding]:
        named = (each for model in self._models for each in model.named_modules())
        paths = {id(x): unwrapped_name(path) for path, each in named for x in each._buffers.values()}
        return [
            replace(one.finding, module=paths[id(x)])
            for x, one in self._rounded.items()
            if x._version == one.version and id(x) in paths
        ]

    def _why_nothing(self) -> str:
        """Return why no op was seen, if none was."""
        if mode := self._hindered_by:
            return f"the mode {mode} was open, which has to be left before a watch can begin"
        if not self.steps:
            return (
                "no optimizer of torch has stepped here: put steps by hand into amp.diagnose(model); "
                "each process needs its own watch"
            )
        if self._due and self._due[0] > self.steps:
            ended = f"training ended after {self.steps} steps, before step {self._due[0]}"
            return f"{ended}: give smaller numbers of steps in at"
        if not self._models:
            return "what the optimizer steps is in no module, or its module was not called"
        return "no backward has begun, as where torch.func computes the gradients"

    @guarded
    def backward_begins(self, losses: list[Tensor]) -> None:
        """Note how large losses are, and the first that is not finite in a step without a shadow.

        The host does not wait.
        """
        scale = self._scale(losses)
        is_from_amp = self._scaled_by is None  # whose own block unscales
        self._left_by_scaler = 1.0 if scale is None or is_from_amp else float(scale)
        self._backwards += 1
        with _disable_current_modes():  # a shadow sees no ops of this
            for loss in losses:
                if loss.numel() == 1 and loss.is_floating_point():
                    self._note_loss(own_part(loss.detach()).reshape(()), scale)

    @torch.no_grad()
    def _note_loss(self, loss: Tensor, scale: Tensor | None) -> None:
        nothing = torch.zeros((), device=loss.device)
        size = (loss.float() if scale is None else loss.float() / scale).abs()
        size = torch.where(size.isfinite(), size, 0.0)
        first, most = self._sizes.get(loss.device, (nothing, nothing))
        most = torch.maximum(most, size)
        self._sizes[loss.device] = most if self._backwards <= FIRST else first, most
        if self._shadow is None and not self._is_explained:
            known = self._bad_loss.get(loss.device, nothing.long())
            is_known = (known > 0) | loss.isfinite()
            self._bad_loss[loss.device] = torch.where(is_known, known, self.steps + 1)

    def _with_growth(self, findings: list[Finding]) -> list[Finding]:
        """Return findings, of which the first that is a consequence of a growing loss says so."""
        for first, most in ((float(first), float(most)) for first, most in self._sizes.values()):
            at = [i for i, x in enumerate(findings) if x.cause in _OF_GROWTH]
            if at and first > 0 and most > GROWTH * max(first, 1e-3):
                one = findings[at[0]]
                grown = f"The loss has grown from {first:.3g} to {most:.3g}: if it grows in float32 "
                todo = f"{grown}too, take a smaller learning rate. Else:\n{one.advice}"
                findings[at[0]] = replace(one, advice=todo)
        return findings

    @guarded
    def window_ends(self, shadow: Shadow) -> None:
        """Note what a shadow has seen."""
        found = [x for x in findings_of(shadow) if x.cause != "loss scale" or not self._is_dynamic]
        if not found and shadow.gradients.bad and self._tries:
            self._tries -= 1
            self._due.insert(0, self.steps + 1)  # the loss scale was being searched
        if shadow.bad_weights:  # all later steps are consequences
            self._due, self._is_ruined = [], True
        self._is_explained |= bool(found and (shadow.gradients.bad_loss or shadow.bad_weights))
        self._seen += found
        if not self._levels:  # else masters may move alone
            self._note_weights(shadow)
        self._note_averages(shadow)
        still = shadow.lost.still.values()
        self._still += [x for x in still if not _is_compensated(x, self.optimizers)]
        if any(op.phase == "backward" for op in shadow.ops.values()):
            self.report.ops += len(shadow.ops)
        self._without_twin += shadow.without_twin

    @_disable_current_modes()
    def _name_states(self, shadow: Shadow, others: list[nn.Module]) -> None:
        """Name the state of optimizers, and models that no optimizer has."""
        names = {id(p): name for name, p in named_in(shadow.models, "named_parameters")}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = names.get(id(parameter), "a parameter")
                for kind, x in state.items() if isinstance(state, dict) else ():
                    if is_float(x):
                        shadow.memories.own("moment", f"{kind} of {name}", x)
        for model in others:
            for name, x in model.named_parameters():
                shadow.memories.own("average", name, x)
                if x.dtype in LOW_PRECISION and shadow.memories[x].owned.kind == "average":
                    self._averages.append((x, x.detach().clone()))

    # Cheap looks at every step.

    def _note(self, cause: str, phase: str, what: str, todo: str) -> None:
        if (cause, todo) not in self._noted:
            file, line = user_line(in_packages=False)
            self._noted[cause, todo] = Finding(cause, what, todo, phase, file=file, line=line)

    def _look_at_autocast(self, model: nn.Module) -> None:
        """Look whether autocast computes in float16."""
        device = next((x.device.type for x in model.parameters()), "cpu")
        if torch.is_autocast_enabled(device) and torch.is_grad_enabled():
            self._in_float16 |= torch.get_autocast_dtype(device) is torch.float16
            if self._is_stale:
                what = "a forward runs in the autocast block in which optimizer.step() has run before: "
                what += "it takes the weights of before the step, whose casts autocast keeps"
                todo = "Leave the autocast block in each step, or pass cache_enabled=False to it."
                self._note("order", "forward", what, todo)

    @guarded
    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Look for a gradient scaler that is missing, or passed over."""
        scale = self._left_by_scaler
        if scale != 1.0 and not self.is_in_scaler and id(optimizer) not in self._unscaled:
            what = f"optimizer.step() takes gradients that are scaled by {exact(scale)}"
            todo = "Call scaler.step(optimizer) in its place, and scaler.update() after it."
            self._note("order", "step", what, todo)
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        devices = {p.device.type for p in params if p.dtype is torch.float32}
        has_cache = torch.is_autocast_cache_enabled() and not self._attached
        self._is_stale |= has_cache and any(map(torch.is_autocast_enabled, devices))
        dtypes = {p.grad.dtype for p in params if p.grad is not None}
        is_half = torch.float16 in dtypes or (self._in_float16 and bool(dtypes))
        if is_half and not self._has_scaler and not self._attached:
            what = "gradients are computed in float16, and no GradScaler scales the loss: those below "
            self._note("loss scale", "step", f"{what}6e-8 are 0", advice.scale_loss(None))

    @guarded
    def autocast_left(self) -> None:
        """Note that no cast of weights is kept."""
        self._is_stale = False

    @guarded
    def module_cast(self, module: nn.Module, before: dict[str, Tensor]) -> None:
        """Look for buffers that a cast has rounded."""
        for name, old in before.items():
            new = module._buffers.get(name)
            if new is None or new.dtype not in LOW_PRECISION:
                continue
            there = old.to(new.device)
            if known := self._rounded.get(old):  # it has moved to another device
                exact, version = known.exact.to(new.device), new._version
                self._rounded[new] = known._replace(exact=exact, version=version)
            if old.dtype.itemsize > 2 and bool((new.to(old.dtype) != there).any()):
                found = _of_rounding(module, name, there, new)
                self._rounded[new] = Rounded(name, there, new._version, found)

    # Counting steps.

    @guarded
    def optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count a step, unless it is one of amp's or of a gradient scaler, which may skip it."""
        if AttachedOptimizer.of(optimizer) is None and not self.is_in_scaler:
            self._count(optimizer)

    @guarded
    def step_ends(self, attached: AttachedOptimizer) -> None:
        """Count a step of amp's, taken or skipped."""
        if not self.is_in_scaler:
            self._count(attached.optimizer)

    @guarded
    def scaler_called(self, name: str, scaler: Any, given: Any, result: Any) -> None:
        """Count a step of a gradient scaler, taken or skipped."""
        self._has_scaler = self._is_dynamic = True
        if name == "step":
            self._count(given)
        self._scaled_by = torch.tensor(scaler.get_scale()) if name == "scale" else None
        if name == "scale":
            nodes = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor)]
            self._scaled_nodes |= {node._sequence_nr() for node in nodes if node is not None}
        elif name == "update":
            self._left_by_scaler = 1.0
            self._unscaled.clear()
            self._scaled_nodes.clear()
        else:
            self._unscaled.add(id(given))

    def _count(self, optimizer: Optimizer) -> None:
        self._first = id(optimizer) if self._first is None else self._first
        self.steps += id(optimizer) == self._first
        if self._shadow is not None:
            self._stepped[id(optimizer)] += 1
        self._names[type(optimizer).__name__] = None


def _trains(model: nn.Module) -> bool:
    """Whether a call of a model may give its weights gradients; a teacher's does not."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters())


@torch.no_grad()
def _sum_of(model: nn.Module) -> float:
    return sum(float(own_part(x).double().sum()) for x in model.parameters())


def _of_rounding(module: nn.Module, name: str, before: Tensor, after: Tensor) -> Finding:
    """Return the finding of a buffer that a script has cast."""
    off = (after.to(before.dtype) - before).abs()
    most = float((off / before.abs().clamp_min(torch.finfo(torch.float32).tiny)).max())
    what = f"a cast to {dtype_name(after.dtype)} has rounded the buffer '{name}' of "
    what += f"{type(module).__name__}, by up to {most:.2%}"
    todo = f"Keep it in float32: set module.{name} again after the cast, or compute it in the forward."
    if not before.dim():
        todo = "Make it a Python number: one float32 number leaves ops with 16-bit tensors in 16 bits."
    file, line = user_line(in_packages=False)
    return Finding("buffer", what, todo, file=file, line=line)


def _of_unseen(first_steps: Iterable[Tensor]) -> list[Finding]:
    """Return a finding of the first step, 0 for none, whose loss is not finite and has no shadow."""
    steps = [int(step) for step in first_steps if step > 0]
    if not steps:
        return []
    what = f"the loss of step {min(steps)} is not finite, and this step was not looked at"
    # The step before may have ruined weights.
    at = f"{min(steps) - 1},{min(steps)}" if min(steps) > 1 else "1"
    todo = f"Look there: reamp doctor --at {at}, or amp.watch(at=[{at}])."
    return [Finding("loss", what, todo, "backward", value=min(steps))]


def _is_compensated(still: Still, optimizers: Iterable[Optimizer]) -> bool:
    """Whether an optimizer keeps what a weight has lost, as in Kahan's sums."""
    x: Any = still.owned.tensor
    names = [still.owned.name] * (still.owned.kind == "moment")
    names += [name for each in optimizers if x in each.state for name in each.state[x]]
    return any(map(_COMPENSATION.search, names))


@names_keywords
def watch(at: Sequence[int] = AT) -> TrainingWatch:
    """Watch the training in a block, without changing it, and report where precision harms it.

        with amp.watch() as watch:
            train()
        print(watch.about, watch.report, sep="\\n")

    No model or optimizer is named: what trains is found by torch's hooks, with amp or without it. Some
    steps run twice, as they are and in FP64; in these the host waits for the device after each op, and
    they take 20 to 80 times as long on a CPU. The results are bitwise the same as without it.

    Args:
        at: the numbers of the steps that run twice, from 1 on. The first one shows most faults; running
            means and warm-ups show theirs later.

    Returns:
        A context manager with `about`, one line on what was found, and `report`, an
        `amp.diagnosis.Report`.

    Raises:
        AmpValueError: `at` is no list of such numbers.
    """
    numbers = list(at) if isinstance(at, (list, tuple, range)) else []
    if not numbers or not all(type(each) is int and each >= 1 for each in numbers):
        raise AmpValueError(
            f"at={brief(at)} must be a list of numbers of steps, from 1 on, as in [1, 4, 20]; "
            "amp.watch takes no model, and finds models itself"
        )
    return TrainingWatch(numbers)
