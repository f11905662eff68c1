"""Checks of the arguments of `initialize` and `scale_loss`, and advice about them."""

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from amp.casting.sharded import is_of_fsdp1
from amp.distributed import ProcessGroup, groups_of_meshes, is_sharded, without_contained
from amp.dtypes import CASTABLE, LOW_PRECISION, dtype_name
from amp.errors import (
    AmpAttributeError,
    AmpIndexError,
    AmpRuntimeError,
    AmpTypeError,
    AmpValueError,
    brief,
    did_you_mean,
    warn,
)
from amp.lazy import kernels
from amp.own_tensors import tensors_in
from amp.profiles.fp8_recipe import GRANULARITIES
from amp.profiles.keys import shown
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule
from amp.state_checks import as_float
from amp.training.attached_optimizer import AttachedOptimizer, keeps_moments
from amp.training.verdicts import Capabilities, declares
from amp.training.wrapped_optimizers import Optimizer, innermost, is_optimizer

Item = TypeVar("Item", covariant=True)


class ListOf(Protocol[Item]):
    """A list, whatever subclasses its items are of: for type checkers, which take no tuple for it."""

    def __iter__(self) -> Iterator[Item]: ...

    def reverse(self) -> None:
        """Reverse the list, which a tuple cannot do."""


Models = TypeVar("Models", bound=nn.Module | ListOf[nn.Module] | None)
Optimizers = TypeVar("Optimizers", bound=Optimizer | ListOf[Optimizer])


def check_verbosity(value: Any) -> None:
    """Raise AmpTypeError unless it is a number, a bool or None."""
    if value is not None and not isinstance(value, bool) and as_float(value) is None:
        raise AmpTypeError(f"verbosity={brief(value)} is neither 0, which logs nothing, nor 1")


def check_third_argument(enabled: Any) -> None:
    """Raise AmpTypeError if the argument enabled is something else that training needs."""
    if isinstance(enabled, nn.Module) or is_optimizer(enabled):
        what = "optimizers" if is_optimizer(enabled) else "models"
        remedy = f"Pass several {what} as one list: amp.initialize([...], [...], opt_level=...)"
    elif hasattr(enabled, "optimizer") or isinstance(enabled, torch.utils.data.DataLoader):
        remedy = "Leave it out: schedulers and data loaders go on without a change"
    else:
        return
    raise AmpTypeError(f"enabled is True or False, and got {_named(enabled)}. {remedy}")


class Prepared(tuple[Any, Any]):
    """The result of `initialize` for models and optimizers: a tuple that has to be unpacked.

    If it is used as a model or an optimizer, the error says so.
    """

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AmpTypeError."""
        raise AmpTypeError(f"a tuple was called. {_NOT_UNPACKED}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AmpAttributeError(f"a tuple has no attribute '{name}'. {_NOT_UNPACKED}")

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return tuple, (list(self),)


_NOT_UNPACKED = (
    "amp.initialize returned (model, optimizer): write model, optimizer = amp.initialize(model, "
    "optimizer, opt_level=...)"
)


def attached_of_a_loss(optimizers: Any) -> list[AttachedOptimizer]:
    """Return the `AttachedOptimizer` of each optimizer of a `scale_loss`, at least one, each once."""
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    wrong = [value for value in given if not is_optimizer(value)]
    if wrong or not given:
        got = f"{_named(wrong[0])}{_remedy(wrong[0])}" if wrong else "an empty list"
        got = f"a tuple. {_NOT_UNPACKED}" if isinstance(optimizers, Prepared) else got
        raise AmpTypeError(
            "amp.scale_loss needs the optimizer, or the list of optimizers, whose parameters get "
            f"gradients from the loss; got {got}"
        )
    return list(dict.fromkeys(map(attached_to, given)))


def number_of_loss(loss_id: object, count: int) -> int:
    """Return the index of a loss scaler, of `count`.

    Raises:
        AmpIndexError: there is none of this index.
    """
    try:
        number = operator.index(loss_id)  # type: ignore[arg-type]
    except Exception:  # a tensor or an array may raise any error
        number = -1
    if not 0 <= number < count:
        is_object = isinstance(loss_id, nn.Module) or is_optimizer(loss_id)
        raise AmpIndexError(
            f"loss_id={type(loss_id).__name__ if is_object else brief(loss_id)} must be an integer "
            f"from 0 to {count - 1}: num_losses was {count}. Leave it out for a single loss. For more, "
            "pass num_losses=... to amp.initialize."
        )
    return number


def check_loss(loss: Any) -> None:
    """Raise AmpTypeError if a loss is no floating-point tensor."""
    if isinstance(loss, Tensor) and loss.is_floating_point():
        return
    remedy = ""
    if is_optimizer(loss):
        remedy = ". The loss comes first: amp.scale_loss(loss, optimizer)"
    elif isinstance(loss, Mapping) or isinstance(getattr(loss, "loss", None), Tensor):
        remedy = ". Pass the loss that is in it, as output.loss or output['loss']"
    elif isinstance(loss, (list, tuple)):
        remedy = ". Pass their sum, or make a block for each, with another loss_id"
    elif isinstance(loss, (int, float)):
        remedy = ". A number, such as loss.item(), has no graph: pass the tensor itself"
    elif hasattr(loss, "__array__") and not isinstance(loss, Tensor):
        remedy = ". An array, such as loss.numpy(), has no graph: pass the tensor itself"
    elif callable(loss):
        remedy = ". Call it, and pass the loss that it returns"
    elif loss is None:
        remedy = ": the model or the criterion has returned nothing. Look for a missing return"
    kind = loss.dtype if isinstance(loss, Tensor) else _named(loss)
    raise AmpTypeError(f"amp.scale_loss needs a floating-point tensor as loss, and got {kind}{remedy}")


def attached_to(optimizer: Any) -> AttachedOptimizer:
    """Return the `AttachedOptimizer` of an optimizer; raise AmpRuntimeError if no session has it."""
    attached = AttachedOptimizer.of(optimizer)
    if attached is None and not is_optimizer(optimizer):
        raise AmpRuntimeError(
            f"an optimizer is needed here, and this is {_named(optimizer)}: "
            f"pass {what_to_pass(optimizer)}"
        )
    if attached is None:
        raise AmpRuntimeError(
            f"this {type(optimizer).__name__} did not come out of amp.initialize, or its session was "
            f"closed{_of_parameters(optimizer)}. Pass it through: "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...)"
        )
    return attached


def _of_parameters(optimizer: Any) -> str:
    """Return the parameters of an optimizer, which tell it from others of its class, for a message."""
    groups = getattr(innermost(optimizer), "param_groups", ())
    parameters = [parameter for group in groups for parameter in group["params"]]
    shapes = [str(tuple(each.shape)) for each in parameters[:2]]
    more = ["..."] * (len(parameters) > 2)
    return f"; its parameters have the shapes {', '.join(shapes + more)}" if shapes else ""


def as_optimizers(optimizers: Any) -> list[Any]:
    """Return the optimizers of an `initialize`. Each is in the list once, and in no open session."""
    given = _as_list(optimizers, is_optimizer, "optimizers", "a torch.optim.Optimizer")
    inner = list(map(innermost, given))
    for i, optimizer in enumerate(given):
        if any(inner[i] is other for other in inner[:i]):
            raise AmpRuntimeError(f"optimizers[{i}] is in the list twice; pass each optimizer once")
        attached = AttachedOptimizer.of(optimizer)
        if attached is not None:
            why = (
                "has been through amp.initialize, and its session is open. Make a new optimizer, or "
                "first close that session: amp.get_session(optimizer).close()"
            )
            if declares(optimizer, "_scales_losses_itself"):
                made_of = type(attached.optimizer).__name__
                why = f"scales losses itself. Pass the {made_of} inside it to amp.initialize"
            raise AmpRuntimeError(f"optimizers[{i}] ({type(optimizer).__name__}) {why}")
    return given


def as_models(models: Any) -> list[nn.Module]:
    """Return the models of an `initialize`."""
    return _as_list(models, lambda m: isinstance(m, nn.Module), "models", "a torch.nn.Module")


def check_inference_mode(given: Sequence[Any]) -> None:
    """Raise AmpRuntimeError if there are models or optimizers to prepare, in inference mode."""
    if given and torch.is_inference_mode_enabled():
        raise AmpRuntimeError(
            "torch.inference_mode is on, and weights that are cast in it can never be trained. Call "
            "amp.initialize before the block; forwards may run in it"
        )


def check_model(model: nn.Module, properties: Properties, allow_low_precision: bool) -> None:
    """Raise AmpRuntimeError for a model that cannot be prepared.

    Such a model is wrapped in DDP, has 16-bit weights that are not allowed, has tensors that were made
    in inference mode, or has quantized layers and no parameters. A part may be in DataParallel. It may
    be in DDP too, unless the level casts its weights, or has scales or masters, which have to know of
    DDP's `no_sync`.
    """
    keeps_weights = properties.cast_model_type not in LOW_PRECISION and not properties.master_weights
    keeps_ddp = keeps_weights and properties.loss_scale == 1.0 and properties.fp8 is None
    has_parameters = any(True for _ in model.parameters())
    for name, module in model.named_modules():
        if (
            not has_parameters
            and type(module).__module__.startswith("torch.ao.nn.")
            and ("quantized" in type(module).__module__)
        ):
            raise AmpRuntimeError(
                f"the model is quantized: '{name}' is a {module._get_name()}, and no parameter is left "
                "to cast or to train. Call amp.initialize before quantization, on the model with FP32 "
                "weights; a quantized model for inference needs no amp.initialize"
            )
        is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        if name and is_ddp and not keeps_ddp:
            raise AmpRuntimeError(
                f"the part '{name}' of the model is in {type(module).__name__} already, which would "
                "reduce gradients of the dtype that its weights had, and whose no_sync() amp would not "
                "know of. Call amp.initialize on the bare model first, and then wrap the part"
            )
        if not name and (is_ddp or isinstance(module, nn.DataParallel)):
            raise AmpRuntimeError(
                f"the model is wrapped in {type(module).__name__} already. Call amp.initialize on "
                f"the bare model first, and wrap what it returns: model, optimizer = "
                f"amp.initialize(model, optimizer); model = {type(module).__name__}(model)"
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if tensor.dtype in LOW_PRECISION and not allow_low_precision:
            makers = ".half() or .bfloat16()"
            if tensor.dtype is torch.get_default_dtype():
                makers = f"torch.set_default_dtype({tensor.dtype}), {makers}"
            raise AmpRuntimeError(
                f"{kind} '{name}' is {tensor.dtype} already. amp.initialize casts the model "
                f"itself, and starts from FP32: leave out {makers}, or call "
                "model.float() first, or close the session that cast it, if there is one. To "
                "start from these values, pass allow_incoming_model_not_fp32=True."
            )
        if not nn.parameter.is_lazy(tensor) and tensor.is_inference():
            raise AmpRuntimeError(
                f"{kind} '{name}' was made in torch.inference_mode, and can never be trained. Make the "
                "model outside of that block, or take copy.deepcopy(model) and an optimizer of the copy"
            )


def check_rules(rules: Sequence[Rule], models: Sequence[nn.Module]) -> None:
    """Raise AmpValueError for a rule that matches no module, or no tensor whose dtype amp changes."""
    modules = [each for model in models for each in model.named_modules()]
    tensors = [each for model in models for each in tensors_in(model)]
    for rule in rules if models else ():
        if rule.kind == "op" or rule.optional:
            continue
        as_module, as_tensor = replace(rule, kind="module"), replace(rule, kind="tensor")
        is_module = any(as_module.matches(name, module) for name, module in modules)
        dtypes = {x.dtype for name, x in tensors if as_tensor.matches_tensor(name)}
        if is_module if rule.kind == "module" else dtypes & CASTABLE:
            continue
        if rule.kind == "module":
            known = {name for name, _ in modules} | {type(module).__name__ for _, module in modules}
            what = f"no module of the model is named '{rule.pattern}', and none has a class of "
            what += "that name"
            names, other = "model.named_modules() has the names", "tensor" if dtypes else ""
        elif dtypes:
            raise AmpValueError(
                f"{rule.source}: what '{rule.pattern}' names is {', '.join(map(dtype_name, dtypes))}, "
                "and amp casts only float16, bfloat16 and float32. Leave the rule out"
            )
        else:
            known = {name for name, _ in tensors}
            what = f"no parameter or buffer of the model is named '{rule.pattern}'"
            names = "model.named_parameters() and model.named_buffers() have the names"
            other = "module" if is_module else ""
        hint = did_you_mean(rule.pattern, known) or f". {names}"
        if other:
            hint = f"; did you mean {{{other}: {rule.pattern}, ...}}?"
        raise AmpValueError(
            f"{rule.source}: {what}{hint}. If the rule is for other models, write "
            f"{{{rule.kind}: {rule.pattern}, ..., optional: true}}"
        )


def check_optimizers(
    optimizers: Sequence[Any],
    models: Sequence[nn.Module],
    properties: Properties,
    process_groups: Sequence[ProcessGroup] = (),
) -> None:
    """Raise AmpRuntimeError for an optimizer that cannot train these models by this profile."""
    _check_owns(models, optimizers, bool(properties.master_weights))
    process_groups = [group for group in process_groups if torch.distributed.get_world_size(group) > 1]
    for i, optimizer in enumerate(map(innermost, optimizers)):
        kind = type(optimizer)
        is_zero = any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in kind.__mro__)
        max_norm = getattr(optimizer.optim if is_zero else optimizer, "max_grad_norm", None)
        if max_norm and (is_zero or _is_spread(optimizer, process_groups)):
            raise AmpRuntimeError(
                f"optimizers[{i}] is a {kind.__name__} with max_grad_norm={max_norm}, and each rank "
                "has different parameters, so it would clip only by the norm of its own gradients. "
                "Pass max_grad_norm=None, and clip by the norm over all ranks: call "
                "torch.nn.utils.clip_grads_with_norm_ with torch.nn.utils.get_total_norm of "
                "amp.master_params(optimizer), summed over the ranks"
            )
        if is_zero and properties.master_weights:
            raise AmpRuntimeError(
                f"optimizers[{i}] is a {kind.__name__}, which makes the optimizer that steps, and that "
                "one cannot have master weights. Use a level without master weights, such as "
                "opt_level='O1' or 'O4'"
            )
        if keeps_moments(optimizer):
            optimizer._check_state()
        if properties.state_dtype is not None and not keeps_moments(optimizer):
            raise AmpRuntimeError(
                f"state_dtype={shown(properties.state_dtype)} needs an optimizer that rounds its "
                f"moments, and optimizers[{i}] is {kind.__name__}. Use one of amp.optimizers, or leave "
                "out state_dtype."
            )
        if properties.master_weights == "split24" and not Capabilities(optimizer).takes_scaled:
            raise AmpRuntimeError(
                "master_weights='split24' needs an optimizer that rounds masters stochastically in its "
                f"step, and optimizers[{i}] is {kind.__name__}. Use one of amp.optimizers, or "
                "master_weights='split16'"
            )


def _check_owns(models: Sequence[nn.Module], optimizers: Sequence[Any], has_masters: bool) -> None:
    """Raise AmpRuntimeError, or warn, if no parameter of the optimizers belongs to one of the models.

    It is raised too if a sharded parameter is in no optimizer, and an optimizer holds a plain one of
    its shape that belongs to no model: that is what it was before it was cut. Parameters of
    `torch.func.stack_module_state`, for `functional_call`, belong to none. They need no masters at
    levels that do not cast the model.
    """
    parameters = list(chain.from_iterable(model.parameters() for model in models))
    have = set(map(id, parameters))
    groups = [group for optimizer in map(innermost, optimizers) for group in optimizer.param_groups]
    given = {id(p): p for group in groups for p in group["params"]}
    if not have or not groups:
        return
    if not have.isdisjoint(given):
        strangers = {p.shape for key, p in given.items() if key not in have and not is_sharded(p)}
        cut = [p for p in parameters if is_sharded(p) and p.requires_grad and id(p) not in given]
        if lost := [p for p in cut if p.shape in strangers]:
            raise AmpRuntimeError(
                f"a parameter of shape {tuple(lost[0].shape)} is a shard, and the optimizer holds a "
                "whole tensor in its place, of before fully_shard or parallelize_module, or of a "
                "forward of FSDP2, which gathers it: it would not be trained. Make the optimizer of "
                "model.parameters() after the model was cut, and before a forward, or after "
                "model.reshard()"
            )
        return
    if has_masters or any(is_sharded(p) or is_of_fsdp1(p) for p in parameters):
        made_of = type(innermost(optimizers[0])).__name__
        raise AmpRuntimeError(
            "no parameter of the optimizers belongs to the models, so nothing would be trained. Make "
            f"the optimizer of this model: {made_of}(model.parameters(), ...). fully_shard, "
            "parallelize_module and similar functions replace a model's parameters: call them before"
        )
    warn(
        "no parameter of the optimizers belongs to the models. Unless the model is called with them by "
        "torch.func.functional_call, nothing is trained: make the optimizer of model.parameters()"
    )


def _is_spread(optimizer: Any, process_groups: Sequence[ProcessGroup]) -> bool:
    """Whether ranks of the groups step parameters that the norm of this rank's optimizer leaves out."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = groups_of_meshes(parameters)
    return bool(set(without_contained([*known, *process_groups])) - set(known))


def check_environment() -> None:
    """Raise AmpValueError if `AMP_KERNELS` names no backend."""
    if "AMP_KERNELS" not in os.environ:
        return
    try:
        kernels.backend.requested()
    except ValueError as error:
        raise AmpValueError(f"the environment variable {error}") from None


def _as_list(value: Any, accepts: Callable[[Any], bool], name: str, kind: str) -> list[Any]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if not accepts(item):
            is_series = isinstance(value, (tuple, set)) and any(map(accepts, value))
            hint = f"; make it a list: list({name})" if is_series else _remedy(item, name)
            raise AmpTypeError(f"{name} must be {kind} or a list of them, and got {_named(item)}{hint}")
    return items


def what_to_pass(value: Any) -> str:
    """Return what to pass in place of a value that is no optimizer."""
    is_list = isinstance(value, (list, tuple)) and any(map(is_optimizer, value))
    return (
        "one optimizer, and call it for each"
        if is_list
        else "the optimizer that amp.initialize returned"
    )


def _named(value: Any) -> str:
    kind = type(value)
    if kind.__module__ == "numpy":  # whose float32 is not torch's
        return f"numpy.{kind.__name__}"
    return f"type {value.__name__}" if isinstance(value, type) else kind.__name__


def _remedy(value: Any, name: str = "") -> str:
    """Return what to do about a value that is no model, or no optimizer, or an empty text.

    Args:
        value: the value.
        name: the argument of `initialize` that it is; empty for the optimizers of `scale_loss`.
    """
    if isinstance(value, type):
        takes = "..." if name == "models" else "model.parameters(), ..."
        return f". Pass an object of it: {value.__name__}({takes})"
    if name and (is_optimizer(value) or isinstance(value, nn.Module)):
        return ". The model comes first: amp.initialize(model, optimizer, opt_level=...)"
    if name == "models":
        return ". Pass the model itself" if isinstance(value, (Iterator, Tensor, dict)) else ""
    if name == "optimizers" and isinstance(value, str):
        level = f"opt_level={brief(value)}"
        return f". Pass the level by its name: amp.initialize(model, optimizer, {level})"
    if is_optimizer(getattr(value, "optimizer", None)):
        return ". Pass the optimizer itself, scheduler.optimizer; schedulers need no change"
    if not name and isinstance(value, nn.Module):
        return f", a module. {_NOT_UNPACKED}. Without an optimizer it returns the model alone"
    if not name:
        return ". Pass what amp.initialize returned as optimizer"
    if isinstance(value, (Iterator, Tensor, dict)) or callable(value):
        return ". Pass an optimizer of the parameters, such as torch.optim.AdamW(model.parameters())"
    return ""


# Advice about arguments that are allowed, and probably do not do what the user wants.


def advise_on_float64(models: Sequence[nn.Module], properties: Properties) -> Iterator[str]:
    """Yield a message for each model to cast that has only float64 weights, which no level casts."""
    casts = properties.patch_torch_functions or properties.cast_model_type in LOW_PRECISION
    for model in models if casts else ():
        dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
        if dtypes == {torch.float64}:
            by_default = torch.get_default_dtype() is torch.float64
            yield (
                f"all parameters of this {type(model).__name__} are float64"
                f"{', the default dtype' if by_default else ''}. No level casts that: it trains in "
                "float64. For mixed precision call model.float() before amp.initialize"
            )


def advise_on_devices(properties: Properties, models: Sequence[nn.Module]) -> Iterator[str]:
    """Yield a message for each device of the models that does not have what the properties want."""
    devices = {parameter.device for model in models for parameter in model.parameters()}
    for device in sorted(devices, key=str):
        if device.type in ("mps", "xpu") and not kernels.backend.has_float64(device):
            yield f"{device} has no float64: learning rates and loss scales are computed in float32"
        if device.type != "cuda":
            continue
        capability, is_hip = torch.cuda.get_device_capability(device), torch.version.hip is not None
        name = str(device) if is_hip else f"{device} (sm_{capability[0]}{capability[1]})"
        half = properties.cast_model_type, properties.patch_torch_functions_type
        if torch.bfloat16 in half and capability < (8, 0) and not is_hip:
            yield f"{name} emulates bfloat16, which is slow: take a level of float16, O1 or O2"
        if properties.fp8 is not None:
            recipe, is_fp4 = properties.fp8.recipe, properties.fp8.is_fp4
            granularity, of_weight, _ = GRANULARITIES[recipe]
            if kernels.scaled_mm.way_of(device, granularity, of_weight, is_fp4) == "emulated":
                yield (
                    f"fp8={recipe} is emulated on {name} with torch {torch.__version__}, which is "
                    "slower than half precision; see docs/fp8.md"
                )


def advise_on_eps(optimizer: Any) -> Iterator[str]:
    """Yield a message if `eps` is 0 in the 16-bit weights that an Adam steps: it may divide by 0."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        dtypes = {parameter.dtype for parameter in group["params"]} & LOW_PRECISION
        for dtype in dtypes if isinstance(eps, float) and eps > 0 else ():
            if torch.tensor(eps, dtype=dtype, device="cpu") == 0:
                yield (
                    f"{type(optimizer).__name__} has eps={eps:g}, which is 0 in {dtype}: its steps may "
                    "divide by zero. Give it eps=1e-4, or use master_weights=True."
                )
