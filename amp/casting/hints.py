"""Hints for torch's errors about dtypes: in a model's forward which layer, and what to do.

Outside of a forward no code of ours runs. There an error that ends the script has its hint where Python
shows it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import nn

from amp.active import session_of
from amp.casting.cast_hooks import CastInputs, CastOutput
from amp.casting.matching_rules import ruled_tensors
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import first_few
from amp.own_tensors import own_tensors
from amp.patching import Patch, around

_OF_MIXED_DTYPES = (
    "same dtype",
    "expected dtype",
    "expected scalar type",
    "should be the same",
    "dtype mismatch",
)
_OF_NO_KERNEL = (
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "Low precision dtypes",
    "Unsupported dtype Half",
    "Unsupported dtype BFloat16",
    "view_as_complex is only supported for",
)
_OF_NUMPY = "Got unsupported ScalarType BFloat16"
_OF_TOO_LARGE = "::Half without overflow"


class ModelOutput(CastOutput):
    """The hook that casts a model's outputs. It runs after an error too, and then adds a hint to it."""

    def _without_output(self, module: nn.Module) -> None:
        if isinstance(error := sys.exception(), (RuntimeError, TypeError)):
            add_hint(error, module)


def add_hint(error: RuntimeError | TypeError, model: nn.Module, was_cast: bool = True) -> None:
    """Say what to do about an error of a model's forward, if it is about dtypes.

    Args:
        error: the error.
        model: the model.
        was_cast: whether the model was cast; else functions cast.
    """
    if text := _hint(error, model, was_cast):
        error.add_note(text)


def _hint(error: RuntimeError | TypeError, model: nn.Module, was_cast: bool) -> str | None:
    message = str(error)
    is_mixed = any(part in message for part in _OF_MIXED_DTYPES)
    if not (is_mixed or any(part in message for part in (*_OF_NO_KERNEL, _OF_NUMPY, _OF_TOO_LARGE))):
        return None
    names = {module: name for name, module in model.named_modules()}
    inside = [module for module in _modules_on_the_way(error) if module in names]
    if not inside:
        return None
    layer = inside[-1]
    called = f"'{names[layer]}' ({type(layer).__name__})" if names[layer] else type(layer).__name__
    rules = f"[{{'module': '{names[layer]}', 'cast': 'float32'}}]"
    rule = f", by a rule: rules={rules}" if names[layer] else ""
    if _OF_NUMPY in message:
        return f"amp: {called} has a bfloat16 tensor, and NumPy has no bfloat16: x.float().numpy()"
    if _OF_TOO_LARGE in message:
        return (
            f"amp: {called} writes a number to a float16 tensor, and float16 ends at 65504. In a mask "
            f"take torch.finfo(x.dtype).min in the place of -1e9. Or keep the layer in FP32{rule}, or "
            "take a level of bfloat16, such as 'O5'"
        )
    if not was_cast and is_mixed:
        return (
            f"amp: {called} computes with tensors of several dtypes. Functions cast FP32 tensors, and "
            "leave float64, which NumPy makes, and integers alone: convert those by x.float()"
        )
    if not is_mixed:
        return (
            f"amp: {called} {'was cast' if was_cast else 'casts'}, and this operation takes no 16-bit "
            f"tensors. Keep the layer in FP32{rule}, or compute in x.float()"
        )
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, CastInputs)]
    own = {p.dtype for p in layer._parameters.values() if p is not None and p.is_floating_point()}
    own |= {p.dtype for p in vars(layer).values() if isinstance(p, torch.Tensor)}
    if wide := _kept_in_fp32(layer, model):
        return (
            f"amp: {called} has {first_few(wide)} in FP32, by a rule or buffer_dtype, beside 16-bit "
            "tensors. Cast where they meet, as by self.codebook.to(x.dtype) or x.float()"
            + (f"; or keep the whole module in FP32{rule}" if rule else "")
        )
    if layer is not model and not hooks and own and not own & LOW_PRECISION:
        path = re.sub(r"[.](\d+)", r"[\1]", f"model.{names[layer]}")
        return (
            f"amp: {called} is {_listed(own)}, and the model that holds it was cast: perhaps it was "
            "put in after amp.initialize. Put layers in before, or prepare the new one too: "
            f"amp.get_session().initialize({path})"
        )
    if hooks and own and hooks[0].dtype not in own:
        return (
            f"amp: {called} was {dtype_name(hooks[0].dtype)} at amp.initialize, and its weights are "
            f"{_listed(own)} now. If the model was cast after it, by .float(), .half() or .to(), leave "
            "that out. For torch.func.functional_call take dict(model.named_parameters()), "
            "because model.state_dict() has FP32 values. Write FP32 values, as "
            "torch.nn.utils.vector_to_parameters does, to amp.master_params(optimizer)"
        )
    return (
        f"amp: {called} was given tensors of several dtypes. Weights and inputs of the model were "
        "cast; cast what comes from elsewhere to the same dtype"
    )


def _show(
    original: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an error that ends the script, with a hint if 16-bit tensors are the cause."""
    message = str(error)
    if not isinstance(error, (RuntimeError, TypeError)) or getattr(error, "__notes__", None):
        pass
    elif _OF_NUMPY in message:
        error.add_note(
            "amp: NumPy has no bfloat16, and amp.initialize has brought bfloat16 tensors: "
            "x.float().numpy()"
        )
    elif any(part in message for part in _OF_NO_KERNEL):
        error.add_note(
            "amp: this operation takes no 16-bit tensors, and amp.initialize has brought some. Call it "
            "before amp.initialize, as torch.nn.init.orthogonal_ of weights; or compute in x.float(), "
            "and write the result back by copy_()"
        )
    elif "TorchScript" in message and "same dtype" in message:
        error.add_note(
            "amp: torch differentiates scripted code in one 16-bit dtype of a process, which is the "
            "first one that a training has used. Train in another one in a separate process"
        )
    original(kind, error, traceback)


PATCHES = (
    Patch(
        ("sys",),
        "excepthook",
        around(_show),
        "not silent: an error of an operation that takes no 16-bit tensors would not say what brought "
        "them",
    ),
)
"""What is patched in a session that casts."""


def _kept_in_fp32(layer: nn.Module, model: nn.Module) -> list[str]:
    """Return the names of a module's own tensors that a rule or buffer_dtype keeps in FP32."""
    session = session_of(model)
    if session is None:
        return []
    ruled = ruled_tensors(model, session.properties.rules)
    wide = {x for x, rule in ruled.items() if rule.kind == "tensor"}
    if session.properties.buffer_dtype is not None:
        wide |= {x for x in model.buffers() if x not in ruled}
    return [name for name, x in own_tensors(layer) if x in wide and x.dtype is torch.float32]


def _modules_on_the_way(error: BaseException) -> Iterator[nn.Module]:
    """Yield the modules whose methods an error came through, the innermost last."""
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        traceback = traceback.tb_next


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))
