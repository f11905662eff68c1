"""`torch.distributed.checkpoint` for models and optimizers of a session.

Torch's `get_state_dict` and `set_state_dict` name the state of an optimizer after the model's
parameters. With master weights the optimizer steps the masters instead. So these take the places of the
parameters in the model while torch's functions run. The checkpoint holds FP32 values by name, and does
not depend on the number of ranks, the wrapper or the level.

Only this file uses the private functions of torch for this.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from amp import distributed
from amp.kernels.host_lists import store_grads
from amp.own_tensors import own_tensors
from amp.patching import Patch, Patches, around
from amp.training.attached_optimizer import AttachedOptimizer
from amp.training.gradients import State


def get_state_dict(model: nn.Module, optimizers: Any, **options: Any) -> tuple[Any, Any]:
    """Do `torch.distributed.checkpoint.state_dict.get_state_dict`, also with master weights.

    All ranks call this. An optimizer without state gets one, as in torch's function, by a step with a
    learning rate of 0. The host waits for the device where torch's function does, for example with
    `cpu_offload=True`.

    Args:
        model: the model, or its wrapper.
        optimizers: an optimizer, or an iterable of them.
        **options: torch's arguments, such as `options=StateDictOptions(full_state_dict=True)`.

    Returns:
        The state dicts of the model, in FP32, and of the optimizers, by fully qualified names.
    """
    from torch.distributed.checkpoint import state_dict

    with Patches() as patches:
        patches.install(PATCHES)
        return state_dict.get_state_dict(model, optimizers, **options)


def set_state_dict(
    model: nn.Module, optimizers: Any, *, model_state_dict: Any, optim_state_dict: Any, **options: Any
) -> Any:
    """Do `torch.distributed.checkpoint.state_dict.set_state_dict`, also with master weights.

    The state dicts may come from another number of ranks, another wrapper or another level. All ranks
    call this. The state dicts of all optimizers are checked before the first one is loaded. For that,
    the host waits once for each device.

    Args:
        model: the model, or its wrapper.
        optimizers: an optimizer, or an iterable of them.
        model_state_dict: the first result of `get_state_dict`, or a plain model's state dict.
        optim_state_dict: the second result of `get_state_dict`.
        **options: torch's arguments.

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
    """Whether a script has imported torch's functions, and so may call them directly."""
    return "torch.distributed.checkpoint.state_dict" in sys.modules or distributed.world_size() > 1


def _with_masters_in_the_model(original: Any, model: nn.Module, optimizers: Any, *others: Any) -> Any:
    """Run a function of torch while the masters are in the model, in the places of its parameters.

    If an optimizer has no state, torch's function makes it by a step. That step is done before, while
    the model has its own parameters. Torch does no such step if it sees gradients, and a
    session may keep its gradients elsewhere.
    """
    from torch.distributed.checkpoint import state_dict

    *_, info = others
    with ExitStack() as stack:
        for optimizer in optimizers:
            attached = AttachedOptimizer.of(optimizer)
            if attached is not None:  # a step that only makes state is no mistake
                stack.callback(setattr, attached, "misuse", attached.misuse)
                attached.misuse = None
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
    """Show torch a gradient of an optimizer in the block, so that it does not step to make state."""
    without = [p for p in attached.gradients.parameters.stepped if p.grad is None][:1]
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
"""The functions to replace in a session with masters, if `torch.distributed.checkpoint` is in use."""


@contextmanager
def _masters_in(model: nn.Module, optimizers: Iterable[Any]) -> Iterator[dict[Any, nn.Parameter]]:
    """Put the masters of optimizers into the places of the model's parameters, inside the block."""
    attached = filter(None, map(AttachedOptimizer.of, optimizers))
    registries = list(dict.fromkeys(each.masters for each in attached))
    places: list[tuple[nn.Module, str, Any]] = []
    found: dict[Any, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in own_tensors(module):
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
