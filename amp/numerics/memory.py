"""Computing the memory that training needs, term by term, without allocating it.

Bytes for each parameter of AdamW:

    level          weights  gradients  masters  moments
    O0, O1, O4        4         4         -        8
    O2, O5            2         4         4        8       the optimizer takes FP32 gradients
    O2, O5, fused     2         2         4        8       the optimizer takes 16-bit gradients
    split16, fused    2         2         2        8
    split24, packed   2         2         1        2       the optimizer keeps moments in packed16
    O2, O5, FSDP2     4         4         -        8       over the ranks; the masters are the weights
    O3                2         2         -        4
    O6 to O9                                       as O4 and O5

Bytes for each element of an input that linear layers save for backward: 4 at O0, 2 at O1 to O5, 1 in
FP8, 9/16 in NVFP4, 17/32 in MXFP4. A block as in Llama saves 7 elements for each token and hidden unit:
1 shared by q, k and v, 1 of the output projection, 1 shared by gate and up, 4 of the down projection.
So it saves 14 bytes, 7 in FP8, and 3.9 in NVFP4; FP8 would take 10 if each layer saved its own, and 20
with a second, transposed copy.

The terms are for one process, between backward and the step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from amp.casting.by_model import dtypes_to_be
from amp.casting.fp8_strategy import choose
from amp.dtypes import LOW_PRECISION
from amp.errors import AmpTypeError, AmpValueError, did_you_mean
from amp.profiles.keys import parse_count, shown
from amp.profiles.levels import LEVELS, load_profile, resolve
from amp.profiles.options import OptLevel
from amp.profiles.properties import Properties
from amp.training.attached_optimizer import AttachedOptimizer

Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp2"]

_BYTES_OF = {"nvfp4": Fraction(9, 16), "mxfp4": Fraction(17, 32)}
"""Bytes of a number, with its part of a scale, where it is not 1."""
_CUT_FROM = {"masters": 1, "optimizer_state": 1, "gradients": 2, "weights": 3}
"""The index of the first sharding in `Sharding` that shards a term."""


def _rows() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the rows that `footprints` compares by default: levels, and overrides."""
    for level in LEVELS:
        yield level, {}
        if load_profile(level).master_weights:
            yield level, {"master_weights": "split16"}


def check_sharding(value: object) -> None:
    """Raise AmpValueError unless it is a `Sharding`."""
    if value not in get_args(Sharding):
        meant = {"fsdp": "'zero3' (FullyShardedDataParallel) or 'fsdp2' (fully_shard)"}
        meant |= dict.fromkeys(("ddp", "no_shard"), "'none'")
        hint = did_you_mean(str(value), get_args(Sharding))
        hint = f"; did you mean {meant[str(value)]}?" if value in meant else hint
        raise AmpValueError(f"sharding={value!r} is not one of {', '.join(get_args(Sharding))}{hint}")


_OF_MASTER = {True: 4, "split16": 2, "kahan": 2, "split24": 1}
"""The bytes of a master, besides those of the weight."""


class StateSize(NamedTuple):
    """The state that an optimizer has for a parameter.

    Attributes:
        moments: how many tensors of the parameter's shape.
        numbers: how many FP32 numbers besides.
        adding: arguments of the optimizer that add one moment each.
        for_frozen: whether the state exists from the start, also for parameters that are not trained.
    """

    moments: int
    numbers: int = 1
    adding: tuple[str, ...] = ()
    for_frozen: bool = False


_STATES = {
    **dict.fromkeys(("adadelta", "adamax", "fusedadam", "fusedlamb", "radam", "rprop"), StateSize(2)),
    **dict.fromkeys(("adam", "adamw"), StateSize(2, adding=("amsgrad",))),
    **dict.fromkeys(("fusedadagrad", "fusedlion", "fusedsgd-momentum"), StateSize(1)),
    "adagrad": StateSize(1, for_frozen=True),
    "asgd": StateSize(1, 3),
    "fusednovograd": StateSize(1, 2),
    "fusedsgd": StateSize(0, adding=("momentum",)),
    "nadam": StateSize(2, 2),
    "rmsprop": StateSize(1, adding=("momentum", "centered")),
    "sgd": StateSize(0, 0, adding=("momentum",)),
    "sgd-momentum": StateSize(1, 0),
}
"""The state of optimizers, by the class's name in lower case."""

TERMS = ("weights", "gradients", "masters", "optimizer_state", "activations", "transient")
"""The terms of a footprint."""


@dataclass(frozen=True)
class Footprint:
    """The memory of training in one process, in bytes.

    Attributes:
        opt_level: the level.
        masters_kept: how masters are stored: `float32`, `split16`, `split24`, `kahan`, or `-` for none.
        optimizer: the optimizer's name.
        parameters: how many trained parameters the whole model has.
        weights: the model's parameters and buffers.
        gradients: the gradients between backward and the step.
        masters: FP32 masters, or the 8 or 16 bits of lean ones.
        optimizer_state: moments and step counts.
        activations: activations saved for backward, for the numbers that were given.
        transient: copies that exist for a part of an iteration: casts of weights in a forward, 16-bit
            gradients while they are unscaled into FP32 ones, FP32 values of lean masters in a step, the
            weight of one layer in FP8 or FP4, and with `keep_weights` those of all layers.
    """

    opt_level: str
    masters_kept: str
    optimizer: str
    parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer_state: int
    activations: int
    transient: int

    @property
    def total(self) -> int:
        """The sum of all terms."""
        return sum(getattr(self, term) for term in TERMS)


class _Tensor(NamedTuple):
    """A parameter or buffer of the prepared model."""

    numel: int
    dtype: torch.dtype
    trained: bool
    is_optimized: bool
    extra_moments: int = 0
    in_fp8: bool = False


def footprint(
    model: nn.Module | float,
    opt_level: OptLevel = "O2",
    optimizer: str | type | torch.optim.Optimizer = "adamw",
    *,
    activations: float = 0,
    linear_inputs: float = 0,
    world_size: int = 1,
    sharding: Sharding = "none",
    **overrides: Any,
) -> Footprint:
    """Return the memory that training a model needs, without allocating it or changing the model.

        >>> footprint(175e9, "O0", "adam").weights / 1e9
        700.0

    Args:
        model: a module on any device, also `meta`; or a number of parameters.
        opt_level: a level, alias or profile.
        optimizer: an optimizer of `torch.optim` or `amp.optimizers`: its name in upper or lower case,
            such as `"adamw"`, `"sgd-momentum"`, `"FusedAdam"`; its class, for its default options; or
            an instance.
        activations: how many elements are saved for backward, besides `linear_inputs`. They take 4
            bytes at levels that cast to FP32, such as O0, and 2 at the others.
        linear_inputs: how many elements linear layers save of their inputs; an input that several
            layers share counts once. They take 1 byte in FP8, 9/16 in NVFP4 and 17/32 in MXFP4, else
            as much as `activations`.
        world_size: how many processes there are.
        sharding: what is sharded over the processes: nothing; `zero1`: masters and optimizer state;
            `zero2`: gradients too; `zero3`: weights too; `fsdp2`: the same, with FP32 weights that are
            the masters, and are gathered in 16 bits for a module's forward and backward.
        **overrides: properties that replace those of the level, such as `master_weights="split16"`.

    Raises:
        AmpValueError: the optimizer is unknown or does not fit, or a number is out of its range.
        AmpTypeError: `model` is neither a module nor a number.
        AmpError: the level or an override is not valid.
    """
    properties = resolve(opt_level, overrides)
    kept, computes_in = properties.master_weights, properties.cast_model_type
    name, state = _state_of(optimizer)
    for what, count in (("activations", activations), ("linear_inputs", linear_inputs)):
        if not _is_number(count) or not 0 <= count < math.inf:
            raise AmpValueError(f"{what}={count!r} must be a finite number of at least 0")
    world_size = parse_count("world_size", world_size)
    check_sharding(sharding)
    if properties.state_dtype is not None and not name.startswith("fused"):
        raise AmpValueError(
            f"state_dtype={shown(properties.state_dtype)} needs an optimizer of amp.optimizers, "
            f"and {name} is none. Take one, such as 'fusedadam', or leave state_dtype out"
        )
    if sharding == "fsdp2" and properties.master_weights is True:
        properties = replace(properties, cast_model_type=torch.float32, master_weights=False)
    tensors = list(_tensors_of(model, properties, optimizer, state))
    terms: dict[str, int] = dict.fromkeys(TERMS, 0)
    for tensor in tensors:
        for term, size in _bytes_of(tensor, properties, name, state):
            terms[term] += size
    for term, first in _CUT_FROM.items():
        if get_args(Sharding).index(sharding) >= first:
            terms[term] = -(-terms[term] // world_size)
    activation = 4 if computes_in is torch.float32 else 2
    linear_input = Fraction(activation)
    if (fp8 := properties.fp8) is not None:
        of_low = _BYTES_OF.get(fp8.recipe, Fraction(1))
        linear_input = of_low if fp8.grad_weight in ("fp8", "fp4") else Fraction(2)
        in_low = [tensor.numel for tensor in tensors if tensor.in_fp8]
        kept_weights = sum(in_low) * (2 if fp8.keep_weights == "step" else bool(fp8.keep_weights))
        terms["transient"] += math.ceil(of_low * (max(in_low, default=0) + kept_weights))
    terms["activations"] = round(activations) * activation + math.ceil(
        linear_input * round(linear_inputs)
    )
    return Footprint(
        opt_level=str(opt_level),
        masters_kept="-" if not kept else "float32" if kept is True else str(kept),
        optimizer=name,
        parameters=sum(tensor.numel for tensor in tensors if tensor.trained),
        **terms,
    )


def footprints(
    model: nn.Module | float,
    optimizer: str | type | torch.optim.Optimizer = "adamw",
    rows: Sequence[tuple[Any, dict[str, Any]]] | None = None,
    **options: Any,
) -> list[Footprint]:
    """Return a `footprint` for each level, with FP32 and with lean masters, to compare.

    Args:
        model: as in `footprint`.
        optimizer: as in `footprint`.
        rows: levels, each with overrides; None takes all levels, and lean masters too.
        **options: `activations`, `linear_inputs`, `world_size`, `sharding`.
    """
    chosen = _rows() if rows is None else rows
    return [footprint(model, level, optimizer, **options, **more) for level, more in chosen]


def _bytes_of(
    tensor: _Tensor, properties: Properties, name: str, state: StateSize
) -> Iterator[tuple[str, int]]:
    """Yield the terms of a parameter or buffer: some of `TERMS`, with their bytes."""
    numel, size = tensor.numel, tensor.dtype.itemsize
    kept = properties.master_weights
    has_master = bool(kept) and tensor.is_optimized and tensor.dtype in LOW_PRECISION
    yield "weights", numel * size
    if has_master:
        yield "masters", numel * _OF_MASTER[kept] + 4 * (kept is not True)
    if tensor.is_optimized and (tensor.trained or state.for_frozen):
        dtype = properties.state_dtype or (torch.float32 if has_master else tensor.dtype)
        moments = state.moments + tensor.extra_moments
        of_moments = moments * dtype.itemsize if dtype != "packed16" else 2 * min(moments, 1)
        yield "optimizer_state", numel * of_moments + state.numbers * 4
    if tensor.trained:
        is_widened = has_master and not name.startswith("fused")
        yield "gradients", numel * (4 if is_widened else size)
        if is_widened:
            yield "transient", numel * (size if kept is True else size + 4)
        if properties.patch_torch_functions and tensor.dtype is torch.float32 and not tensor.in_fp8:
            yield "transient", numel * 2


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _tensors_of(
    model: Any, properties: Properties, optimizer: Any, state: StateSize
) -> Iterator[_Tensor]:
    """Yield the parameters and buffers that a model will have under some properties.

    An optimizer instance has the parameters of its groups; a name or class has all trained ones.
    """
    if isinstance(model, nn.Module):
        to_be = dtypes_to_be(model, properties)
        in_groups = _extra_moments(optimizer, state)
        layers = choose(model, properties.fp8, properties.rules)[0] if properties.fp8 else {}
        in_fp8 = {id(layer.weight) for layer in layers.values()}  # quantized when a layer is used
        for parameter in model.parameters():
            own, trained = id(parameter), parameter.requires_grad
            dtype = to_be.get(parameter, parameter.dtype)
            is_optimized = own in in_groups if in_groups else trained
            extra = in_groups.get(own, 0)
            yield _Tensor(parameter.numel(), dtype, trained, is_optimized, extra, own in in_fp8)
        for buffer in model.buffers():
            yield _Tensor(buffer.numel(), to_be.get(buffer, buffer.dtype), False, False)
    elif not _is_number(model):
        raise AmpTypeError(
            f"{model!r} is a {type(model).__name__}, not a module or a number of parameters"
        )
    elif not 1 <= model <= 1e18 or model != int(model):
        raise AmpValueError(f"a model of {model!r} parameters: give a whole number from 1 to 1e18")
    else:
        cast = properties.cast_model_type
        yield _Tensor(int(model), cast if isinstance(cast, torch.dtype) else torch.float32, True, True)


def _state_of(optimizer: Any) -> tuple[str, StateSize]:
    """Return an optimizer's name, that of its first known base class, and its state."""
    if isinstance(optimizer, str):
        name = optimizer.strip().lower().replace("_", "-").replace("fused-", "fused")
    else:
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        names = [base.__name__.lower() for base in cls.__mro__]
        name = next((each for each in names if each in _STATES), names[0])
    if name not in _STATES:
        raise AmpValueError(
            f"the state of the optimizer {name!r} is not known; known are {', '.join(sorted(_STATES))}"
            f"{did_you_mean(name, _STATES)}"
        )
    return name, _STATES[name]


def _extra_moments(optimizer: Any, state: StateSize) -> dict[int, int]:
    """Return, by parameter id, how many moments the options of a parameter's group add."""
    binding = AttachedOptimizer.of(optimizer)
    groups = None if binding is None else binding.gradients.reconcile()
    model_of = dict(zip(map(id, groups.masters), groups.models, strict=True)) if groups else {}
    return {
        id(model_of.get(id(parameter), parameter)): sum(bool(group.get(key)) for key in state.adding)
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    }
