"""The precision plugin for Lightning, shared by the classes for Lightning's two packages.

A Trainer calls `convert_module`, wraps the model in DDP, calls `configure_optimizers` and `connect`,
trains, and calls `teardown`. Fabric calls `convert_module`, wraps the model, and calls `on_after_setup`
of a LightningModule, which it recognizes by an attribute `_fabric`; there the optimizers are known.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from amp.casting.cast_hooks import ModelInputs
from amp.casting.containers import cast_tensors
from amp.dtypes import CASTABLE, LOW_PRECISION
from amp.errors import AmpRuntimeError
from amp.integrations.late_optimizers import LateOptimizers
from amp.masters.fp32_values import put_values, values_of
from amp.patching import Patches, around
from amp.profiles.options import OptLevel
from amp.training.attached_optimizer import AttachedOptimizer


class AmpPlugin:
    """A mixin with the methods of a precision plugin, to put before Lightning's `Precision`.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile.
        num_losses: how many losses have their own scale; select one by
            `manual_backward(loss, loss_id=1)`.
        verbosity: as in `amp.initialize`.
        **overrides: as in `amp.initialize`.

    Raises:
        AmpError: an argument is not valid.
    """

    def __init__(
        self,
        opt_level: OptLevel = "O1",
        *,
        num_losses: int = 1,
        verbosity: int = 1,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self._amp = LateOptimizers(opt_level, num_losses=num_losses, verbosity=verbosity, **overrides)
        self._calls = _OwnCalls()
        self._patches = Patches()
        self._is_in_trainer = False

    # Set up and tear down.

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare the model. Its optimizers are prepared by `connect`, or after Fabric's setup.

        Raises:
            AmpRuntimeError: the Trainer's strategy is DeepSpeed's. Nothing was changed.
            AmpError: the model cannot be prepared; see `amp.initialize`.
        """
        trainer = getattr(module, "_trainer", None)
        if trainer is not None:
            _refuse_deepspeed(trainer.strategy)
        self._amp.cast(module)
        if self._amp.running().properties.casts_model and hasattr(module, "training_step"):
            self._calls.watch(module)
        if trainer is None:
            _tell_of_fabric(module, self._set_up_by_fabric)
        return module

    def _set_up_by_fabric(self, strategy: Any, optimizers: list[Any], wrapped: nn.Module) -> None:
        try:
            _refuse_deepspeed(strategy)
        except AmpRuntimeError:  # the strategy of Fabric is known only now
            self._amp.end()
            raise
        self._amp.attach(optimizers, wrapped)

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Prepare the Trainer's optimizers, if it is about to train."""
        self._is_in_trainer = True
        module: Any = getattr(model, "module", model)
        if module.trainer.state.fn == "fit":
            self._amp.attach(optimizers, model)
            _patch_for_masters(module, self._amp.optimizers, self._patches)
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def teardown(self) -> None:
        """Close the session: weights and optimizer state are FP32 again. The host waits."""
        self._calls.stop()
        self._patches.undo()
        self._amp.end()
        super().teardown()  # type: ignore[misc]

    # A step.

    def forward_context(self) -> AbstractContextManager[Any]:
        """Bring the model's weights up to date with the masters, before a step or Fabric's forward.

        The step of a LightningModule may call parts of the model, and these do not do so themselves.
        """
        self._amp.write_back()
        return nullcontext()

    def backward(self, tensor: Tensor, model: Any, *args: Any, loss_id: int = 0, **kwargs: Any) -> None:
        """Scale the loss, run backward, and unscale the gradients.

        The host does not wait for the device.

        Raises:
            AmpRuntimeError: no optimizers were set up with the model.
        """
        optimizer = args[0] if self._is_in_trainer else None
        optimizers = self._amp.optimizers if optimizer is None else [optimizer]
        if not optimizers:
            raise AmpRuntimeError(
                "AmpPrecision does not know the model's optimizers. Set up both together: "
                "model, optimizer = fabric.setup(model, optimizer). With ModelParallelStrategy, where "
                "that cannot be, leave out AmpPrecision: after model = fabric.setup_module(model) call "
                "amp.initialize(model, optimizer, opt_level=...), and scale losses by amp.scale_loss"
            )
        with self._amp.running().scale_loss(tensor, optimizers, loss_id) as scaled_loss:
            if self._is_in_trainer:
                super().backward(scaled_loss, model, *args, **kwargs)  # type: ignore[misc]
            else:
                scaled_loss.backward(*args, **kwargs)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the Trainer's hooks."""
        return super().pre_backward(tensor, module) if self._is_in_trainer else tensor  # type: ignore[misc]

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the Trainer's hooks."""
        return super().post_backward(tensor, module) if self._is_in_trainer else tensor  # type: ignore[misc]

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step, or skip the step after an overflow; `amp.scale_loss` says when the host waits.

        An optimizer that requires a closure, such as LBFGS, gets it; after an overflow the closure is
        evaluated again at the lower scale.
        """
        if not self._is_in_trainer:
            return optimizer.step(**kwargs, **({} if closure is None else {"closure": closure}))
        assert closure is not None
        if _needs_closure(optimizer):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        optimizer.step(**kwargs)
        return result

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state as from `amp.state_dict`. The host waits for the device."""
        return self._amp.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        self._amp.load_state_dict(state_dict)


class _OwnCalls:
    """Hooks for calls in a step of a cast LightningModule: calls of its parts, and calls through DDP.

    In a step, `self.net(x)` returns FP32 like `self(x)`. DDP calls the step in place of `forward`, with
    the batch as its argument; the hooks keep it from being cast, as without DDP.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handles: list[Any] = []

    def watch(self, root: nn.Module) -> None:
        """Register hooks on a module and on the parts that its steps may call."""
        inputs = next((h for h in root._forward_pre_hooks.values() if isinstance(h, ModelInputs)), None)
        enter = partial(self._enter, inputs, None if inputs is None else inputs.which)
        self._handles += [
            root.register_forward_pre_hook(enter, prepend=True),
            root.register_forward_hook(self._leave, always_call=True),
            *(part.register_forward_hook(self._widen) for part in _parts(root)),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._depth = [], 0

    def _enter(self, inputs: Any, which: Any, root: nn.Module, args: Any) -> None:
        is_step = "forward" in vars(root)  # Lightning sets it to make DDP call the step
        self._depth += not is_step
        if inputs is not None:
            inputs.which = False if is_step else which

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        # A step has restored `forward` by now, and was not counted: do not go below 0.
        self._depth = max(0, self._depth - 1)

    def _widen(self, part: nn.Module, args: Any, output: Any) -> Any:
        return output if self._depth else cast_tensors(output, CASTABLE, torch.float32)


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that can be called: not module lists and dicts."""
    containers = (nn.ModuleList, nn.ModuleDict)
    return [
        part
        for child in module.children()
        for part in (_parts(child) if isinstance(child, containers) else [child])
    ]


def _refuse_deepspeed(strategy: Any) -> None:
    """Raise AmpRuntimeError for DeepSpeed's strategy, which takes any plugin and casts itself."""
    if any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        raise AmpRuntimeError(
            f"AmpPrecision does not work with {type(strategy).__name__}: DeepSpeed keeps masters and "
            "scales losses itself. Leave out AmpPrecision and pass precision='16-mixed' or "
            "'bf16-mixed', or take strategy='ddp' or a ModelParallelStrategy, which shards by FSDP2"
        )


def _tell_of_fabric(module: Any, tell: Callable[[Any, list[Any], nn.Module], None]) -> None:
    """Make Fabric call `tell` with its strategy, a module's optimizers, and the wrapped module."""
    own = getattr(module, "on_after_setup", None)
    is_lightning_module = hasattr(module, "_fabric")

    def on_after_setup(fabric: Any, module: Any) -> None:
        original = module._original_module
        del original.on_after_setup
        optimizers = [each.optimizer for each in original._fabric_optimizers]
        tell(fabric.strategy, optimizers, module._forward_module)
        if not is_lightning_module:
            fabric._callbacks = [each for each in fabric._callbacks if each is not original]
            del original._fabric, original._fabric_optimizers
        elif own is not None:
            own(fabric=fabric, module=module)

    if not is_lightning_module:
        module._fabric = None
    module.on_after_setup = on_after_setup


def _needs_closure(optimizer: Any) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# Patches, until `Patches.undo`, where Lightning changes parameters in ways that masters do not see.


def _patch_for_masters(module: Any, optimizers: Sequence[Any], patches: Patches) -> None:
    """Patch methods of a Trainer's module and callbacks that would bypass masters.

    `toggle_optimizer` freezes the parameters in the optimizers' groups, which are masters.
    `WeightAveraging` exchanges weights and averages through `.data`, which bypasses the masters and
    would round the averages.

    Args:
        module: the LightningModule, whose Trainer has the callbacks.
        optimizers: the optimizers that train it.
        patches: undoes the patches later.
    """
    for name in ("toggle_optimizer", "untoggle_optimizer"):
        patches.wrap(module, name, around(partial(_toggle, optimizers)))
    for callback in module.trainer.callbacks:
        for name, function in (("_swap_models", _swap), ("_copy_average_to_current", _copy)):
            if hasattr(callback, name):
                patches.wrap(callback, name, around(partial(function, callback)))


def _toggle(optimizers: Sequence[Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Freeze and unfreeze the weights like their masters."""
    original(*args, **kwargs)
    for attached in filter(None, map(AttachedOptimizer.of, optimizers)):
        attached.gradients.reconcile("forward")


def _pairs(callback: Any, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of the average, each with the model's."""
    average = callback._average_model.module
    return zip(
        chain(average.parameters(), average.buffers()),
        chain(module.parameters(), module.buffers()),
        strict=True,
    )


def _swap(callback: Any, original: Callable[..., Any], module: nn.Module) -> None:
    for average, current in _pairs(callback, module):
        before = average.detach().clone()
        average.data.copy_(values_of(current) if current.dtype in LOW_PRECISION else current.detach())
        put_values(current, before)


def _copy(callback: Any, original: Callable[..., Any], module: nn.Module) -> None:
    for average, current in _pairs(callback, module):
        put_values(current, average.detach())
