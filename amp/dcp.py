"""`torch.distributed.checkpoint` for models and optimizers of a session.

Torch's `get_state_dict` and `set_state_dict` name the state of an optimizer after the model's
parameters. Under master weights the optimizer steps others. So while torch looks, the masters stand
in the model. What is saved is FP32, by names, and knows nothing of how many ranks there were, which
wrapper, or which level.

What torch keeps to itself of this is touched in this file alone.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from amp import distributed
from amp.masters.parameter import store_grads, stored_grad
from amp.patching import Patch, Patches, around
from amp.training.attachment import AttachedOptimizer
from amp.training.gradients import State


def get_state_dict(model: nn.Module, optimizers: Any, **options: Any) -> tuple[Any, Any]:
    """Do `torch.distributed.checkpoint.state_dict.get_state_dict`, under master weights too.

    All ranks call this. The optimizers' states are made if there are none yet, as torch's function
    makes them, by a step of a rate of 0. The host waits for the device where torch's function does, as
    with `cpu_offload=True`.

    Args:
        model: the model, or what wraps it.
        optimizers: an optimizer, or an iterable of them.
        **options: torch's, such as `options=StateDictOptions(full_state_dict=True)`.

    Returns:
        The model's state dict in FP32, and the optimizers', by fully qualified names.
    """
    from torch.distributed.checkpoint import state_dict

    with Patches() as patches:
        patches.install(PATCHES)
        return state_dict.get_state_dict(model, optimizers, **options)


def set_state_dict(
    model: nn.Module, optimizers: Any, *, model_state_dict: Any, optim_state_dict: Any, **options: Any
) -> Any:
    """Do `torch.distributed.checkpoint.state_dict.set_state_dict`, under master weights too.

    What is loaded may be of another number of ranks, another wrapper or another level. All ranks call
    this. The optimizers' state dicts are checked before any of them is loaded into its optimizer, for
    which the host waits once for each device.

    Args:
        model: the model, or what wraps it.
        optimizers: an optimizer, or an iterable of them.
        model_state_dict: what `get_state_dict` returned, or a plain model's state dict.
        optim_state_dict: the other thing that it returned.
        **options: torch's.

    Returns:
        The missing and unexpected keys of the model's state dict.
    """
    from torch.distributed.checkpoint import state_dict

    with Patches() as patches:
        patches.install(PATCHES)
        return state_dict.set_state_dict(
            model,
            optimizers,
            model_state_dict=model_state_dict,
            optim_state_dict=optim_state_dict,
            **options,
        )


def is_in_use() -> bool:
    """Whether torch's functions may be called directly: a script that does has imported them."""
    return "torch.distributed.checkpoint.state_dict" in sys.modules or distributed.world_size() > 1


def _with_masters_in_the_model(original: Any, model: nn.Module, optimizers: Any, *others: Any) -> Any:
    """Run a function of torch while masters stand in the model.

    It makes the state of an optimizer that has none by a step, which is made before: in it the model is
    to be as it is. Torch makes none where it sees gradients, and those of a session may be elsewhere.
    """
    from torch.distributed.checkpoint import state_dict

    *_, info = others
    with ExitStack() as stack:
        for optimizer in optimizers:
            attached = AttachedOptimizer.of(optimizer)
            if attached is not None:
                stack.enter_context(attached.step.none_of_the_training())
            if attached is None or attached.gradients.state is State.SETTLED:
                state_dict._init_optim_state(optimizer)
            else:
                stack.enter_context(_some_gradient(attached))
        with _masters_in(model, optimizers) as masters:
            for parameter, master in masters.items():
                names = info.fqn_param_mapping[master] = info.fqn_param_mapping[parameter]
                info.fqn_param_mapping.update(dict.fromkeys(names, master))
            return original(model, optimizers, *others)


@contextmanager
def _some_gradient(attached: AttachedOptimizer) -> Iterator[None]:
    """Let torch see a gradient of an optimizer, so that it makes no state by a step, in the block."""
    without = [p for p in attached.gradients.lists.stepped if stored_grad(p) is None][:1]
    store_grads(without, list(map(torch.zeros_like, without)))
    try:
        yield
    finally:
        store_grads(without)


PATCHES = tuple(
    Patch(
        ("torch.distributed.checkpoint.state_dict",),
        name,
        around(_with_masters_in_the_model),
        "the state of masters would be saved without names, or not at all",
    )
    for name in ("_get_optim_state_dict", "_load_optim_state_dict")
)
"""What is replaced in a session with masters where `torch.distributed.checkpoint` is in use."""


@contextmanager
def _masters_in(model: nn.Module, optimizers: Iterable[Any]) -> Iterator[dict[Any, nn.Parameter]]:
    """Put the masters of optimizers in the place of the model's parameters, inside the block."""
    attached = filter(None, map(AttachedOptimizer.of, optimizers))
    registries = list(dict.fromkeys(each.masters for each in attached))
    places: list[tuple[nn.Module, str, Any]] = []
    found: dict[Any, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            for masters in registries:
                if (master := masters.master(parameter)) is not None:
                    places.append((module, name, parameter))
                    found[parameter] = master
    try:
        for module, name, parameter in places:
            module._parameters[name] = found[parameter]
        yield found
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
