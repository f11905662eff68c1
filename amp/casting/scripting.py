"""`torch.jit.script` compiles the source of a module, which does not say what a session casts."""

from collections.abc import Callable
from typing import Any

from torch import nn

from amp.casting import regions
from amp.casting.cast_hooks import cast_by
from amp.casting.subclassing import has_forward_of_ours
from amp.errors import AmpRuntimeError


def script(
    original: Callable[..., Any],
    obj: Any,
    optimize: Any = None,
    _frames_up: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `torch.jit.script`, and raise AmpRuntimeError for a module of a session."""
    for module in obj.modules() if isinstance(obj, nn.Module) else ():
        if _is_cast(module):
            raise AmpRuntimeError(
                f"torch.jit.script cannot compile this {type(module).__name__}: amp casts as it "
                "runs, which its source does not say. Use torch.jit.trace, torch.export or "
                "torch.compile, or script it after amp.get_session().close()."
            )
    return original(obj, optimize, _frames_up + 2, *args, **kwargs)


def _is_cast(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    has_casts = any(cast_by(hook) is not None for hook in hooks)
    return has_casts or has_forward_of_ours(module) or regions.is_watched(module)
