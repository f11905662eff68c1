"""Checks, before a cast, of memory that tensors share, or that the script also uses elsewhere.

The cast gives tensors new memory: views of one storage become views of one storage again, and memory
that processes share stays shared; see `amp.shared_memory`. Errors name what cannot be kept.
"""

import multiprocessing
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from amp.casting.by_model import dtypes_to_be
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpRuntimeError, AmpValueError, first_few, warn
from amp.kernels.tensor_lists import local, slices
from amp.profiles.levels import levels_with
from amp.profiles.properties import Properties
from amp.shared_memory import is_shared, outside_views, same_memory


def named_tensors(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Return the parameters and buffers of models, each with its first name."""
    named: dict[Tensor, str] = {}
    for i, model in enumerate(models):
        of_which = f"models[{i}]." if len(models) > 1 else ""
        for found in (model.named_parameters(), model.named_buffers()):
            for name, tensor in found:
                named.setdefault(tensor, of_which + name)
    return named


def check_memory(models: Sequence[nn.Module], properties: Properties) -> None:
    """Raise AmpRuntimeError, or warn, where a cast would end the sharing of memory.

    The host does not wait for the device. If tensors of the models share a storage, this looks at all
    objects of the process once.
    """
    named, cast = named_tensors(models), dict[Tensor, torch.dtype]()
    for model in models:
        dtypes = dtypes_to_be(model, properties)
        cast |= {tensor: dtype for tensor, dtype in dtypes.items() if tensor.dtype is not dtype}
    if cast:
        _check_dtypes(named, cast)
        _warn_of_views(named, cast)
        _warn_of_processes(named, cast)


def _check_dtypes(named: Mapping[Tensor, str], cast: Mapping[Tensor, torch.dtype]) -> None:
    """Raise, or warn of buffers, where tensors share elements and are to get different dtypes."""
    for overlap in same_memory(named):
        to_be = {named[x]: dtype_name(cast.get(x, x.dtype)) for x in overlap.tensors}
        if len(set(to_be.values())) == 1 or cast.keys().isdisjoint(overlap.tensors):
            continue
        parts = first_few(to_be.items(), lambda item: f"'{item[0]}' ({item[1]})")
        message = (
            f"these share memory, and would have different dtypes after the cast: {parts}. What is "
            "written to one would no longer reach the others. Give their modules one dtype by rules, "
            "such as {module: ..., cast: float32}, or give each its own memory: "
            "tensor.data = tensor.data.clone()"
        )
        if any(isinstance(tensor, nn.Parameter) for tensor in overlap.tensors):
            raise AmpRuntimeError(message)
        warn(message)


def _warn_of_views(named: Mapping[Tensor, str], cast: Collection[Tensor]) -> None:
    """Warn of a vector outside of the models of which several of their tensors are views."""
    for vector, inside in outside_views(named.keys()):
        if any(tensor in cast for tensor in inside):
            names = first_few(map(named.__getitem__, inside))
            warn(
                f"a tensor of shape {tuple(vector.shape)} that belongs to none of the models has the "
                f"memory of {names}. The cast gives them other memory: that tensor keeps its present "
                "values, and a write to it does not reach the model. Make such a vector after "
                "amp.initialize, from the model's weights, or take a level that casts no weights, "
                f"opt_level={levels_with('patch_torch_functions')}"
            )


def _warn_of_processes(named: Mapping[Tensor, str], cast: Iterable[Tensor]) -> None:
    """Warn of memory that is shared with processes that run already."""
    shared = [named[tensor] for tensor in cast if is_shared(tensor)]
    if shared and (multiprocessing.parent_process() or multiprocessing.active_children()):
        warn(
            f"memory that other processes may see holds {first_few(shared)}. The cast gives them new "
            "memory, which processes that run already do not see: they keep the present weights. Start "
            "them after amp.initialize, whose result stays in shared memory, or, to train one model in "
            "several processes, take a level that casts no weights, "
            f"opt_level={levels_with('patch_torch_functions')}"
        )


def check_masters(
    parameters: Iterable[Tensor], models: Sequence[nn.Module], properties: Properties
) -> None:
    """Raise an AmpError for parameters that could not get a master each.

    They share elements, or are float16 with lean masters and out of its range. The host waits for the
    device only to know the latter.
    """
    kind = properties.master_weights
    if not kind:
        return
    named = named_tensors(models)
    dtypes = {x: dtype for model in models for x, dtype in dtypes_to_be(model, properties).items()}
    weights = {x.dtype for x in named if isinstance(x, nn.Parameter)}
    may_be_lean = properties.casts_model or not weights or weights & LOW_PRECISION
    if isinstance(kind, str) and not may_be_lean:
        raise AmpRuntimeError(
            f"master_weights={kind!r} keeps masters of weights in 16 bits, and the models have none: "
            "the profile casts no weights. Leave it out, or take "
            f"opt_level={levels_with('master_weights')}"
        )
    with_master = [x for x in parameters if dtypes.get(x, x.dtype) in LOW_PRECISION]
    if isinstance(kind, str):
        halves = [x for x in with_master if dtypes.get(x, x.dtype) is torch.float16]
        check_range((named.get(x, f"a parameter of shape {tuple(x.shape)}"), x) for x in halves)
    for overlap in same_memory(with_master):
        names = [named.get(x, f"a parameter of shape {tuple(x.shape)}") for x in overlap.tensors]
        how = (
            "make them one parameter, as by module.weight = other.weight"
            if overlap.is_one_view
            else "compute one from the other in the forward, as by F.linear(x, other.weight.t())"
        )
        raise AmpRuntimeError(
            f"different parameters lie on one memory, and each would get its own master, whose steps "
            f"would undo those of the others: {first_few(names)}. Either {how}; or pass only one "
            f"of them to the optimizer; or take a level without masters, such as opt_level="
            f"{levels_with('patch_torch_functions')}"
        )


def check_range(values: Iterable[tuple[str, Tensor]]) -> None:
    """Raise AmpValueError where finite values of float16 weights with lean masters are beyond 65504.

    A lean master is the weight and more bits, and the weight would be inf. The host waits for the
    device.
    """
    known = ((name, x) for name, x in values if x.is_floating_point() and not x.is_meta)
    parts = ((name, local(x).detach()) for name, x in known)
    beyond = [
        name
        for name, whole in parts
        if any(bool((x.half().isinf() & x.isfinite()).any()) for (x,) in slices(whole))
    ]
    if beyond:
        raise AmpValueError(
            f"{first_few(beyond)} would get values beyond 65504, which float16 does not have, and a "
            "lean master is a float16 weight and more bits. Take master_weights=True, a level of "
            "bfloat16, or a rule that keeps the module in FP32: rules: [{module: ..., cast: float32}]"
        )
