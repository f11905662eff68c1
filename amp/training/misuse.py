"""Mistakes of a script in its first iterations, each of which is named once.

- a backward that is not of the scaled loss, or after its block, or of a second loss in it; a block
  without a gradient
- gradients of a scaled loss that reach an optimizer which the block does not name
- a step whose gradients no block has unscaled, or a `GradScaler` or the script once more
- an optimizer that changes no master, because it keeps its own list of parameters
- a hook of a master, which no backward runs; FullyShardedDataParallel around parameters with masters

An optimizer has a `Misuse` until its first good step, which a `GradScaler` asks too; a block has a
`BlockWatch` while one of its optimizers has one.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp.active import open_sessions
from amp.casting.sharded import is_of_fsdp1
from amp.errors import AmpAssertionError, AmpRuntimeError, warn
from amp.kernels.host_lists import have_grads
from amp.patching import Patch, around
from amp.profiles.levels import levels_with
from amp.training.gradients import State
from amp.training.wrapped_optimizers import ATTACHED, innermost


class Misuse:
    """The watch of one optimizer until its first good step.

    Args:
        attached: the `AttachedOptimizer`.
        has_stepped: whether it has stepped, and is looked at again because of gradients of others.
    """

    def __init__(self, attached: Any, has_stepped: bool = False) -> None:
        self.attached: Any = weakref.proxy(attached)  # weak: it refers to this
        self.has_stepped = has_stepped
        self.has_found = self.was_in_block = has_stepped
        self.of_others: list[Tensor] = []
        """The parameters that a scaled loss of other optimizers has given gradients."""
        self._to_compare = 0 if has_stepped else 2
        """How many more steps may change no master."""
        self._has_named_grad_scaler = has_stepped
        self.scales_read: set[float] = set()
        """The loss scales that the script knows, so that it may use them by itself."""
        self._blocks = 0
        self._unscaled: tuple[Tensor, Tensor] | None = None
        """A parameter or master, and its gradient as a block has left it, if a scale was read."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to look at."""
        return self.has_stepped and not (self._to_compare or self.of_others)

    # Blocks.

    def block_begins(self) -> None:
        """Look at a block that names the optimizer.

        Raises:
            AmpRuntimeError: FullyShardedDataParallel holds parameters that have masters.
        """
        self.warn_if_of_others()
        self.was_in_block = True
        if self.has_stepped:
            return
        parameters = self.attached.gradients.parameters
        if any(map(is_of_fsdp1, parameters.models)):
            raise AmpRuntimeError(
                "the model was wrapped in FullyShardedDataParallel after amp.initialize, and its flat "
                "shards cannot have masters. Before amp.initialize cut the model by "
                "torch.distributed.fsdp.fully_shard instead, or take "
                f"opt_level={levels_with('patch_torch_functions')}"
            )
        if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters.masters):
            warn(
                "a hook was registered on what optimizer.param_groups holds or amp.master_params "
                "yields, which are FP32 masters: no backward reaches them. Register it on the model's "
                "parameter"
            )

    def scale_is_read(self, scale: float) -> None:
        """Note that the script has read a scale, and waited for it: it may divide gradients by it."""
        if scale != 1.0 and not self.has_stepped:
            self.scales_read.add(scale)
            if self.was_in_block and self._unscaled is None:
                self.block_is_left()
                self._blocks -= 1

    def block_is_left(self) -> None:
        """Copy a gradient that a block has unscaled, if the script has read a scale. No host sync."""
        gradients = self.attached.gradients
        self._blocks += 1
        if not self.scales_read or gradients.state in (State.OPEN, State.DELAYED):
            return
        stepped = gradients.parameters.stepped
        grads = ((p, grad) for p in stepped if (grad := p.grad) is not None and not grad.is_sparse)
        self._unscaled = next(((p, grad.detach().clone()) for p, grad in grads), None)

    def _warn_if_divided(self) -> None:
        """Warn if the script has divided gradients by a scale that it has read."""
        if self._unscaled is None:
            return
        parameter, before = self._unscaled
        self._unscaled, grad = None, parameter.grad
        if grad is None or grad.shape != before.shape or torch.equal(grad, before):
            return
        scales = self.scales_read - {float(self._blocks)}  # the mean of so many is no mistake
        if any(torch.allclose(grad * scale, before, atol=0.0) for scale in scales):
            warn(
                "gradients were divided by the loss scale after an amp.scale_loss block, which has "
                "unscaled them already, so the weights hardly move. Leave the division out"
            )

    def warn_if_of_others(self) -> None:
        """Warn if gradients are about to be used that nothing has unscaled."""
        found = [parameter for parameter in self.of_others if parameter.grad is not None]
        self.of_others = []
        if found:
            warn(
                f"the gradient of {self.attached.named.called(found[0])} comes from a loss that was "
                "scaled, in an amp.scale_loss block that does not name its optimizer: it is too large "
                "by the loss scale. Pass all optimizers whose parameters a loss reaches, as in "
                "amp.scale_loss(loss, [first, second]), or call zero_grad before the next block"
            )

    # Steps.

    def step_begins(self) -> tuple[Tensor, int, Tensor] | None:
        """Look at a step that is about to be taken; return what `step_has_ended` compares."""
        compares = self._to_compare and self.attached.gradients.are_there()
        if compares and not self.has_stepped:
            self.has_stepped = True
            self._warn_if_unscaled()
            self._warn_if_divided()
        self.warn_if_of_others()
        return self._copy_to_compare() if compares else None

    def grad_scaler_steps(self) -> None:
        """Look at a step by a `GradScaler`, which may find no gradient, or an overflow, and not step.

        Raises:
            AmpAssertionError: masters have no gradients yet, so that it would leave them scaled.
        """
        name = type(self.attached.optimizer).__name__
        parameters = self.attached.gradients.parameters
        have_any = self.attached.gradients.are_there() or have_grads(parameters.models)
        scales = any(not scaler.config.is_identity for scaler in self.attached.owner.scalers)
        if self.was_in_block and scales and not self._has_named_grad_scaler:
            self._has_named_grad_scaler = True
            warn(
                f"GradScaler.step calls {name}.step, and "
                "amp.scale_loss has scaled the loss and unscaled its gradients already. The "
                "GradScaler divides them by its own scale, so the weights hardly move. Leave the "
                "GradScaler out: call optimizer.step()"
            )
        elif parameters.masters and have_any and not self.was_in_block:
            raise AmpAssertionError(
                f"GradScaler.step was called for {name}, whose FP32 masters have no gradients. They "
                "get some by `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`. Leave the GradScaler out, and call optimizer.step()"
            )

    def closure_has_ended(self) -> None:
        """Look at a step with a closure that was taken."""
        if not self.has_stepped and self.attached.gradients.are_there():
            self.has_stepped, self._to_compare = True, 0
            self._warn_if_unscaled()

    def step_has_ended(self, before: tuple[Tensor, int, Tensor] | None) -> None:
        """Warn if a step has not changed a master: the optimizer keeps its own list of parameters.

        If the optimizer has made a state for the master, as ADOPT does in a first step that only begins
        its moments, the second step counts. A skipped step does not count.

        Args:
            before: what `step_begins` returned.
        """
        if before is None or self.attached.step.was_skipped:
            return
        master, version, values = before
        optimizer = self.attached.optimizer
        was_changed = master._version != version or not torch.equal(master, values)
        is_begun = self._to_compare == 2 and master in optimizer.state
        self._to_compare = 1 if is_begun and not was_changed else 0
        if not (was_changed or is_begun):
            warn(
                f"{type(optimizer).__name__}.step() has not changed an FP32 master that has a "
                "gradient, so the model is not trained. An optimizer that keeps a list or a table of "
                "parameters from when it was made updates 16-bit weights that masters overwrite. Let "
                "it use group['params'] in each step, or choose a level without masters, such as 'O4'"
            )

    def _copy_to_compare(self) -> tuple[Tensor, int, Tensor] | None:
        """Return a master with a gradient, its version, and a copy: the first steps must change it.

        A wrapper may step only each n-th time. torch's fused optimizers and dispatch modes leave no
        trace of a change; to compare values there would make the host wait.
        """
        attached = self.attached
        parameters = attached.gradients.parameters
        is_fused = any(group.get("fused") for group in attached.optimizer.param_groups)
        may_not_tell = attached.is_wrapped or is_fused or _get_current_dispatch_mode()
        if may_not_tell or not (attached.masters.are_whole and parameters.masters):
            self._to_compare = 0
            return None
        master = next((each for each in parameters.masters if each.grad is not None), None)
        return None if master is None else (master, master._version, master.detach().clone())

    def _warn_if_unscaled(self) -> None:
        """Warn if a step uses gradients of a loss that should have been scaled, and was not."""
        owner = self.attached.owner
        was_scaled = self.was_in_block or self.of_others
        if was_scaled or all(scaler.config.is_identity for scaler in owner.scalers):
            return
        warn(
            f"{type(self.attached.optimizer).__name__}.step() was called, and its gradients came from "
            f"no amp.scale_loss block. At opt_level={owner.properties.opt_level!r} losses are to be "
            "scaled: float16 gradients below 6e-8 are 0 without it. Call scaled_loss.backward() in "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss:`. If another gradient scaler scales "
            "the loss, or none is to, pass loss_scale=1.0 to amp.initialize"
        )


class BlockWatch:
    """Looks at one block of optimizers, some of which have a `Misuse`.

    Args:
        session: of the loss.
        block: the block.
        attached: the `AttachedOptimizer`s of the optimizers that it names.

    Raises:
        AmpRuntimeError: FullyShardedDataParallel holds parameters that have masters.
    """

    def __init__(self, session: Any, block: Any, attached: Sequence[Any]) -> None:
        self._session, self.block, self._attached = session, block, attached
        watched = [each.misuse for each in attached if each.misuse is not None]
        for misuse in watched:
            misuse.block_begins()
        unstepped = [misuse for misuse in watched if not misuse.has_stepped]
        self._unstepped = [] if block.scaler.config.is_identity else unstepped
        """Those that have not stepped yet, if the block scales its loss."""
        self.was_run: bool | None = None
        """Whether backward has run from the scaled loss; None if that is not watched."""
        self._root: Any = None
        """The last operation of the scaled loss."""
        self._is_running = False
        """Whether that backward is under way, which may run others, as activation checkpoints do."""
        self._reached: set[Tensor] = set()
        """The parameters that it has reached."""
        self._reached_by_others: set[Tensor] = set()
        """Those that a backward of another loss has reached, if that was not given a gradient."""
        self._others: list[tuple[Any, dict[Tensor, tuple[Tensor | None, int]]]] = []
        """Optimizers whose gradients should not come from this block, and what these were before it."""

    def backward_begins(self, scaled_loss: Tensor) -> None:
        """Note what is there before a backward, and watch whether it runs from the scaled loss."""
        if not self._unstepped:
            return
        if scaled_loss.requires_grad:
            self.was_run, self._root = False, scaled_loss.grad_fn
            hook = functools.partial(_backward_runs, weakref.ref(self))
            scaled_loss.register_hook(hook)  # type: ignore[no-untyped-call]
            self._watch_parameters()
        # Other threads may train those of other sessions meanwhile, with blocks of their own, or at a
        # level that scales no loss.
        session = self._session
        self._others = [
            (each, {p: (p.grad, _version(p.grad)) for p in each.gradients.parameters.of_model})
            for each in chain.from_iterable(one.attached for one in open_sessions())
            if each not in self._attached
            and (each.owner is session or not each.owner.scalers[0].config.is_identity)
        ]

    def _watch_parameters(self) -> None:
        """See by which backward parameters get their gradients, as long as this object lives."""
        of_model = {p for each in self._unstepped for p in each.attached.gradients.parameters.of_model}
        hook = functools.partial(_grad_arrives, weakref.ref(self))
        leaves = [p for p in of_model if p.requires_grad and p.is_leaf]
        handles = [p.register_post_accumulate_grad_hook(hook) for p in leaves]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def backward_has_ended(self) -> None:
        """Raise AmpRuntimeError if the backward of a scaled loss has given a master a gradient."""
        of_all = [each.attached.gradients.parameters.pairs for each in self._unstepped]
        for pair in chain.from_iterable(pairs.pairs for pairs in of_all):
            if pair.master.grad is not None and pair.master.grad is not pair.grad:
                raise AmpRuntimeError(
                    f"the FP32 master of a parameter of shape {tuple(pair.master.shape)} was given a "
                    "gradient in an amp.scale_loss block, which unscales those of the model's "
                    "parameters. Compute the loss from model.parameters(), not from what "
                    "optimizer.param_groups holds or amp.master_params(optimizer) yields"
                )

    def block_is_left(self, is_complete: bool) -> None:
        """Warn of a block without gradients, or with those of another loss; note those of others."""
        if is_complete:
            self._warn_if_empty()
            for misuse in self._unstepped:
                misuse.block_is_left()
        if self.was_run is False and self.block.with_gradients:
            warn(
                "an amp.scale_loss block has found gradients, and none came from the scaled loss: they "
                "are divided by the loss scale all the same, so the weights hardly move. Call "
                "scaled_loss.backward() in `with amp.scale_loss(loss, optimizer) as scaled_loss:`, not "
                "loss.backward()"
            )
        self._warn_of_others()
        of_block = {p for each in self._attached for p in each.gradients.parameters.of_model}
        for each, before in self._others:
            is_own = each.owner is self._session or (each.misuse and not each.misuse.was_in_block)
            if not is_own or each.gradients.state is State.DELAYED:
                continue
            found = [
                p
                for p, (grad, version) in before.items()
                if p not in of_block and (p.grad is not grad or _version(grad) != version)
            ]
            if each.misuse is None and found:
                each.misuse = Misuse(each, has_stepped=True)
            if each.misuse is not None:
                each.misuse.of_others = found

    def _warn_of_others(self) -> None:
        """Warn of gradients that another backward has made, unless its loss may carry the scale.

        It may if the script knows the scale. It may also be made of gradients of the scaled loss: of
        tensors that are no parameters, or of outputs of the layers whose parameters it reaches.
        """
        if not self._reached or any(misuse.scales_read for misuse in self._unstepped):
            return
        found, whose = self._reached & self._reached_by_others, "the scaled loss and from another one"
        if not found and self._reached_by_others:
            leaves = _leaves_of(self._root)
            if all(isinstance(leaf, torch.nn.Parameter) for leaf in leaves):
                found, whose = self._reached_by_others - leaves, "another loss than the scaled one"
        if found:
            stepped = (p for each in self._attached for p in each.gradients.parameters.of_model)
            called = self._attached[0].named.called(next(p for p in stepped if p in found))
            warn(
                f"the gradient of {called} comes from {whose}, whose backward() was called in the same "
                "amp.scale_loss block. If that one is not scaled too, it is divided by the loss scale, "
                "and trains nothing. Add the losses: amp.scale_loss(loss1 + loss2, optimizer). Or give "
                "each loss a separate block"
            )

    def _warn_if_empty(self) -> None:
        """Warn once if the first block of some optimizers has found no gradient at all."""
        known = [each.misuse for each in self._attached]
        for one in filter(None, known):
            one.has_found |= one.attached.gradients in self.block.with_gradients
        if any(one is None or one.has_found or one.has_stepped for one in known):
            return
        if any(p.requires_grad for each in self._attached for p in each.gradients.parameters.stepped):
            for one in known:
                one.has_found = True
            none_was_run = "" if self.was_run else "no backward was run in it, or "
            warn(
                "an amp.scale_loss block has ended, and no parameter of its optimizers has a gradient: "
                f"{none_was_run}the loss does not depend on them, as after .detach(), or zero_grad() "
                "was called after the backward. Call it before the block, and scaled_loss.backward() "
                "in the block"
            )


def _backward_runs(reference: weakref.ref[BlockWatch], grad: Tensor) -> None:
    """Note that the backward of a scaled loss has begun, until it ends; warn if its block is over."""
    watch = reference()
    if watch is not None and not watch.block.is_over:
        watch.was_run = watch._is_running = True
        end = functools.partial(setattr, watch, "_is_running", False)
        torch.autograd.Variable._execution_engine.queue_callback(end)
    elif not bool((grad != 1).any()):  # else it is a part of another loss
        warn(
            "scaled_loss.backward() was called after its amp.scale_loss block: gradients are "
            "not unscaled, and too large by the loss scale. Call it inside of the block"
        )


def _grad_arrives(reference: weakref.ref[BlockWatch], parameter: Tensor) -> None:
    """Note by which backward a parameter has got a gradient.

    Gradients that have a graph are left out: a backward of them goes through the scale again.
    """
    watch, grad = reference(), parameter.grad
    if watch is None or grad is None or grad.requires_grad:
        return
    if watch._is_running:
        watch._reached.add(parameter)
    elif not _backward_is_given_gradients():
        watch._reached_by_others.add(parameter)


def _leaves_of(root: Any) -> set[Tensor]:
    """Return the leaves of a graph, which a backward from `root` reaches."""
    nodes, todo = set[Any](), [root]
    while todo:
        if (node := todo.pop()) is not None and node not in nodes:
            nodes.add(node)
            todo += [each for each, _ in node.next_functions]
    return {node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"}


def _backward_is_given_gradients() -> bool:
    """Whether a backward that is under way was given gradients, which may be of a scaled loss.

    On a GPU it runs in a thread of autograd, and the thread that called it waits.
    """
    code = torch.autograd.backward.__code__
    for top in sys._current_frames().values():
        calls = (frame for frame, _ in traceback.walk_stack(top) if frame.f_code is code)
        if (call := next(calls, None)) and call.f_locals.get("grad_tensors") is not None:
            return True
    return False


def _grad_scaler_step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    misuse = getattr(getattr(innermost(optimizer), ATTACHED, None), "misuse", None)
    if misuse is not None and scaler.is_enabled():
        misuse.grad_scaler_steps()
    return original(scaler, optimizer, *args, **kwargs)


PATCHES = (
    Patch(
        ("torch.amp.grad_scaler.GradScaler",),
        "step",
        around(_grad_scaler_step),
        "a GradScaler beside `scale_loss` would unscale gradients a second time, or leave those of "
        "masters scaled",
    ),
)
"""What is patched in a session with masters or a loss scale."""


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
