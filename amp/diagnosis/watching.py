"""`amp.watch`: looking at the training of any script, as it is, with amp or without it.

Some steps of the training have a shadow. The first window begins when the first optimizer is made,
since masks, positions and noise come before a forward; later ones begin with a forward, since warm-ups
and moments show late. A window ends with the first forward after all optimizers have stepped, so that
averages of weights are in it. All steps are looked at cheaply: for dtypes, buffers that a cast has
rounded, and the order of calls.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp.diagnosis import advice
from amp.diagnosis.attaching import Training, models_of, optimizers_of, other_models
from amp.diagnosis.causes import findings_of, stands_still
from amp.diagnosis.diagnose import open_scale
from amp.diagnosis.findings import Finding, Report, exact, grouped
from amp.diagnosis.lost import Still
from amp.diagnosis.places import user_line
from amp.diagnosis.shadow import Shadow
from amp.diagnosis.twins import is_float
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.observers import Observer, observing
from amp.training.attachment import AttachedOptimizer

AT = (1, 4, 20)
"""The steps that have a shadow."""
LONGEST = 8
"""After so many steps of one optimizer a window ends, though another one has not stepped."""
SEARCH = 20
"""For so many steps more a window begins again after a step that a dynamic loss scale has skipped."""
_CANNOT = {
    "DeepSpeedEngine": "DeepSpeed's engine, whose optimizer and gradients torch's hooks do not see",
    "FullyShardedDataParallel": "FSDP1, whose flat parameters have no names: use fully_shard",
}


class Watch(Training, Observer):
    """Looks at the training of this process while it is open.

    Args:
        at: the numbers of the steps that have a shadow, from 1 on.

    Attributes:
        report: what was found so far.
        steps: how many steps the first optimizer has made.
    """

    takes_half_models = True

    def __init__(self, at: Sequence[int] = AT) -> None:
        super().__init__()
        self.report, self.steps = Report(), 0
        self._due = sorted(at)
        self._first: int | None = None  # the id of the optimizer whose steps are counted
        self._shadow: Shadow | None = None
        self._stepped = Counter[int]()  # in this window, by the id of the optimizer
        self._is_empty = True  # whether no forward of the window has begun
        self._looks: dict[tuple[str, str], Finding] = {}  # by cause and advice
        self._seen: list[Finding] = []
        self._still: list[Still] = []
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._buffers: list[tuple[weakref.ref[nn.Module], Finding]] = []
        self._models: list[nn.Module] = []
        self._parts: list[str] = []
        self._names: dict[str, None] = {}  # the classes of the optimizers
        self._without_twin = 0
        self._is_half = self._has_scaler = self._is_dynamic = False
        self._tries = SEARCH
        self._unscaled: set[int] = set()
        self._scaled: Tensor | None = None  # the scale of a GradScaler, while gradients have it
        self._taken: set[int] = set()  # optimizers whose step is counted already

    def __enter__(self) -> Self:
        super().__enter__()
        self._open.enter_context(observing(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self.look()
        super().__exit__(*exception)

    @property
    def about(self) -> str:
        """What is watched, in one line."""
        if not self._parts:
            return "no optimizer was made"
        scaler = "a GradScaler" if self._has_scaler else "no GradScaler"
        parts = [*self._parts, *self._names, scaler, f"{self.steps} steps"]
        if self._without_twin:
            parts.append(f"{self._without_twin} ops could not run in FP64")
        return ", ".join(dict.fromkeys(parts))

    @property
    def is_watching(self) -> bool:
        """Whether a window is open, or is still to come."""
        return bool(self._due) or self._shadow is not None

    # Windows.

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Begin the first window, or begin it anew with the models of this optimizer too."""
        self._restart()

    def initialize_begins(self, session: Any, models: Sequence[nn.Module]) -> None:
        """Do not watch amp's casts of weights, which have masters."""
        if self._drop() is not None:
            self._due.insert(0, self.steps + 1)

    def initialize_ends(
        self, session: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]
    ) -> None:
        """Begin the first window anew."""
        for optimizer in filter(None, optimizers):
            self.follow(optimizer)
        self._is_dynamic |= any(scaler.config.dynamic for scaler in session.scalers)
        self._restart()

    def root_called(self, model: nn.Module) -> None:
        """End a window that has had its steps, or begin one that is due."""
        if peek_interpreter_stack() is not None:
            return  # vmap and grad put tensors of their own into modules
        if not self.optimizers:
            for optimizer in optimizers_of(model):
                self.follow(optimizer)
        device = next((x.device.type for x in model.parameters()), "cpu")
        if torch.is_autocast_enabled(device) and torch.is_grad_enabled():
            self._is_half |= torch.get_autocast_dtype(device) is torch.float16
        if self._shadow is not None:
            every = set(map(id, self.optimizers))
            if self._stepped and (
                every <= self._stepped.keys() or max(self._stepped.values()) == LONGEST
            ):
                self.look()
        self._begin(model)
        self._is_empty = False

    def _restart(self) -> None:
        if self._shadow is not None and self._is_empty:
            self._drop()
            self._due.insert(0, self.steps + 1)
        self._begin()

    def _begin(self, called: nn.Module | None = None) -> None:
        if self._shadow is not None or not self._due or self.steps + 1 < self._due[0]:
            return
        if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():  # type: ignore[no-untyped-call]
            return  # of the script, which leaves them in reverse order
        sessions = {one.owner for one in self._attached()}
        own = [model for session in sessions for model in session.live_models()]
        around = [x for x in models_of(self.optimizers) if not any(each in own for each in x.modules())]
        self._models = [*own, *around]
        if not self._models and self.optimizers and called is not None:
            self._models = [called]  # whose weights the script copies from others
        if not self._models:
            return
        self._due = [step for step in self._due if step > self.steps + 1]
        several = len(self._models) > 1
        prefixes = [f"model {i}: " if several else "" for i in range(len(self._models))]
        scale = functools.partial(self._open_scale, self._attached())
        shadow = Shadow(dict(zip(prefixes, self._models, strict=True)), scale)
        self._shadow = shadow.__enter__()
        self._stepped.clear()
        self._is_empty = True
        self._name_states(shadow)
        for rounded, whole in self._rounded:
            shadow.known(rounded, whole)
        self._parts = self._described()  # as they are now: a session gives models their dtypes back

    def watch_steps(self, at: Iterable[int]) -> None:
        """Watch other steps than before, without what was seen until now."""
        self._drop()
        self._due = sorted(at)
        self._begin()

    def _drop(self) -> Shadow | None:
        shadow, self._shadow = self._shadow, None
        if shadow is not None:
            shadow.__exit__(None, None, None)
        return shadow

    def look(self) -> None:
        """End a window if one is open, and put what was found into the report."""
        if (shadow := self._drop()) is not None:
            found = [x for x in findings_of(shadow) if x.cause != "loss scale" or not self._is_dynamic]
            if not found and shadow.bad_grads and self._tries:
                self._tries -= 1
                self._due.insert(0, self.steps + 1)  # the loss scale was being searched
            self._seen += found
            if shadow.bad_weights:  # all later steps are consequences
                self._due = []
            has_gradients = all(x.cause not in ("underflow", "loss scale") for x in found)
            self._still += [
                x for x in shadow.lost.still.values() if has_gradients or x.dtype.itemsize < 4
            ]
            self.report.ops += len(shadow.ops)
            self._without_twin += shadow.without_twin
        paths = {id(each): name for model in self._models for name, each in model.named_modules()}
        rounded = [
            replace(x, module=paths[id(holder())])
            for holder, x in self._buffers
            if id(holder()) in paths
        ]
        looks = sorted(self._looks.values(), key=lambda x: x.phase)
        found = [*rounded, *grouped(self._seen), *stands_still(self._still), *looks]
        self.report.findings = found

    def _attached(self) -> list[AttachedOptimizer]:
        return list(filter(None, map(AttachedOptimizer.of, self.optimizers)))

    def _open_scale(self, attached: Sequence[AttachedOptimizer]) -> Any:
        return self._scaled if self._scaled is not None else open_scale(attached)

    def _name_states(self, shadow: Shadow) -> None:
        names = {id(p): name for name, p in shadow.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for kind, x in state.items() if isinstance(state, dict) else ():
                    if is_float(x):
                        shadow.own("moment", f"{kind} of {names.get(id(parameter), 'a parameter')}", x)
        for model in other_models(self._models):
            for name, x in model.named_parameters():
                shadow.own("average", name, x)

    def _described(self) -> list[str]:
        """Return the classes of the models, and the number and dtypes of their parameters."""
        parts = []
        for model in self._models:
            sizes, classes = Counter[str](), {type(each).__name__ for each in model.modules()}
            for parameter in model.parameters():
                sizes[dtype_name(parameter.dtype)] += parameter.numel()
            held = " and ".join(f"{count:,} parameters in {dtype}" for dtype, count in sizes.items())
            parts += [f"{type(model).__name__}, {held}"]
            parts += [f"cannot look into {why}" for name, why in _CANNOT.items() if name in classes]
        return parts

    # Cheap looks at every step.

    def backward_begins(self, losses: list[Tensor]) -> None:
        """Look at the dtype of what the backward starts from, and at autocast."""
        for loss in losses:
            if torch.is_autocast_enabled(loss.device.type):
                self._note(
                    "order",
                    "backward() runs inside of autocast, which casts its ops by other rules than the "
                    "forward's",
                    "Leave the autocast block before loss.backward().",
                    "backward",
                )
            value = loss.detach()
            is_half = loss.dtype in LOW_PRECISION and loss.numel() == 1 and not self._has_amp()
            if is_half and bool(value.isfinite()):
                larger = torch.nextafter(value.abs(), torch.full_like(value, torch.inf))
                self._note(
                    "loss dtype",
                    f"backward() starts from a loss in {dtype_name(loss.dtype)}: {float(value):.6g} "
                    f"has neighbours {float(larger.double() - value.abs().double()):g} apart",
                    "Compute the loss in float32, as in loss_of(output.float(), target).",
                    "backward",
                )

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Look for a gradient scaler that is missing, or passed over."""
        if self._scaled is not None and not self.is_in_scaler and float(self._scaled) != 1.0:
            self._note(
                "order",
                f"optimizer.step() takes gradients that are scaled by {exact(float(self._scaled))}",
                "Call scaler.step(optimizer) in its place, and scaler.update() after it.",
                "step",
            )
        grads = [p.grad for p in _params(optimizer) if p.grad is not None]
        is_half = self._is_half or any(grad.dtype is torch.float16 for grad in grads)
        if grads and is_half and not self._has_scaler and not self._has_amp():
            self._note(
                "loss scale",
                "gradients are computed in float16, and no GradScaler scales the loss: those below "
                "6e-8 are 0",
                advice.scale_loss(None),
                "step",
            )

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Look at the dtypes of what the optimizer holds."""
        self._count(optimizer)
        held = Counter[tuple[str, torch.dtype]]()
        for state in optimizer.state.values() if not self._has_amp() else ():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
                    held[name, value.dtype] += 1
        if held:
            names = " and ".join(f"'{name}'" for name, _ in held)
            (_, dtype), count = held.most_common(1)[0]
            self._note(
                "state",
                f"{type(optimizer).__name__} holds {names} of {count} parameters in "
                f"{dtype_name(dtype)}, where small changes of a running mean are lost",
                advice.KEEP_MASTERS,
                "step",
            )

    def step_begins(self, attached: AttachedOptimizer, closure: Any) -> Any:
        """Be ready to count a step, which may be skipped."""
        self._taken.discard(id(attached.optimizer))
        return closure

    def step_ends(self, attached: AttachedOptimizer) -> None:
        """Count a step that amp has skipped without a call of the optimizer's own."""
        if id(attached.optimizer) not in self._taken:
            self._count(attached.optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        self._first = id(optimizer) if self._first is None else self._first
        self.steps += id(optimizer) == self._first
        self._stepped[id(optimizer)] += 1
        self._taken.add(id(optimizer))
        self._names[type(optimizer).__name__] = None

    def scaler_called(self, name: str, scaler: Any, optimizer: Any) -> None:
        """Look at the order of a scaler's calls."""
        self._has_scaler = self._is_dynamic = True
        self._scaled = torch.tensor(scaler.get_scale()) if name == "scale" else None
        if name == "step":
            if id(optimizer) not in self._taken:
                self._count(optimizer)
            self._taken.discard(id(optimizer))
            if id(optimizer) in self._unscaled:
                self._note(
                    "order",
                    "GradScaler.step is called again, and update was not: the loss scale stays",
                    "Call scaler.update() after the scaler.step of all optimizers.",
                    "step",
                )
            self._unscaled.add(id(optimizer))
        elif name == "update":
            self._unscaled.clear()

    def module_cast(self, module: nn.Module, before: dict[str, Tensor]) -> None:
        """Look for buffers that a cast has rounded."""
        for name, old in before.items():
            new = module._buffers.get(name)
            if (
                new is None
                or new.dtype not in LOW_PRECISION
                or old.dtype.itemsize <= new.element_size()
            ):
                continue
            there = old.to(new.device)
            off = (new.to(old.dtype) - there).abs()
            if bool(off.any()):
                self._rounded.append((new, there))
                size = there.abs().clamp_min(torch.finfo(torch.float32).tiny)
                what = (
                    f"a cast to {dtype_name(new.dtype)} has rounded the buffer '{name}' of "
                    f"{type(module).__name__}, by up to {float((off / size).max()):.2%}"
                )
                todo = f"Keep it in float32: set module.{name} again after the cast, or compute it in"
                file, line = user_line(in_packages=False)
                found = Finding("buffer", what, f"{todo} the forward.", file=file, line=line)
                self._buffers.append((weakref.ref(module), found))

    def _has_amp(self) -> bool:
        return bool(self._attached())

    def _note(self, cause: str, what: str, todo: str, phase: str) -> None:
        if (cause, todo) not in self._looks:
            file, line = user_line(in_packages=False)
            self._looks[cause, todo] = Finding(cause, what, todo, phase, file=file, line=line)


def _params(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def watch(at: Sequence[int] = AT) -> Watch:
    """Watch the training in a block, as it is, and report where precision harms it.

        with amp.watch() as watch:
            train()
        print(watch.about, watch.report, sep="\\n")

    No model or optimizer is named: what trains is found by torch's hooks, with amp or without it. Some
    steps run twice, as they are and in FP64; in these the host waits for the device after each op, and
    they take 20 to 45 times as long on a CPU. The results are bitwise the same as without it.

    Args:
        at: the numbers of the steps that run twice, from 1 on. The first one shows most faults; running
            means and warm-ups show theirs later.

    Returns:
        A context manager with `about`, one line on what was found, and `report`, an
        `amp.diagnosis.Report`.
    """
    return Watch(at)
