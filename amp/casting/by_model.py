"""The strategy that casts a model's weights, inputs and outputs.

Weights are cast in place, so parameters keep their identity: optimizers, tied weights and hooks
keep working. Activations are cast by module hooks that can be copied and pickled, so a deep copy, a
pickle, DataParallel and DDP see an ordinary module.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from amp.casting.cast_hooks import (
    CastInputs,
    CastOutput,
    ModelInputs,
    can_ruin,
    check_names,
    matches,
    ruined_by_cast,
)
from amp.casting.hints import ModelOutput
from amp.casting.matching_rules import ruled_modules, ruled_tensors
from amp.casting.scripting import NotScriptable
from amp.casting.sharded import (
    ShardPolicies,
    casts_by_its_own_policy,
    fsdp1_modules,
    gathered_dtypes,
    reshard,
    restore_policies,
)
from amp.casting.strategy import Strategy
from amp.distributed import is_sharded
from amp.dtypes import CASTABLE, LOW_PRECISION, dtype_name
from amp.errors import AmpRuntimeError, warn
from amp.kernels.interrupts import without_grad
from amp.own_tensors import own_tensors, tensors_in
from amp.profiles.keys import shown
from amp.profiles.levels import levels_with
from amp.profiles.properties import Properties
from amp.profiles.rules import Rule
from amp.shared_memory import CastMemory
from amp.undo import Contents, Undo

_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
_ONE_DTYPE_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    _ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
"""torch's layers that fail when their input has another dtype than their weight."""


_OF_QUANTIZATION = {
    "torch.ao.quantization.fake_quantize": "FakeQuantizeBase",
    "torch.ao.quantization.observer": "ObserverBase",
}


def _imitates_quantization(module: nn.Module) -> bool:
    """Whether a module imitates quantization, or observes values for it: its scales must be FP32."""
    places = _OF_QUANTIZATION.items()
    return any(isinstance(module, getattr(sys.modules.get(each), name, ())) for each, name in places)


def keeps_fp32(module: nn.Module, properties: Properties) -> bool:
    """Whether `module` is a norm that the properties keep in FP32, or imitates quantization."""
    if _imitates_quantization(module):
        return True
    has_statistics = isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None
    # torch takes no statistics in FP32 beside 16-bit weights.
    keeps_statistics = properties.keep_batchnorm_fp32 or properties.buffer_dtype is not None
    if keeps_statistics and isinstance(module, _NormBase) and has_statistics:
        return True
    return bool(properties.keep_norm_fp32) and isinstance(module, (_NormBase, *_OTHER_NORMS))


def _ruled_dtypes(model: nn.Module, rules: Iterable[Rule]) -> dict[nn.Module, torch.dtype]:
    """Return the dtypes of the modules that a user's rules match, and of all their submodules."""
    ruled = ruled_modules(model, rules)
    return {module: rule.dtype for module, rule in ruled.items() if rule.dtype is not None}


def _every_named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in own_tensors(module):
            yield f"{path}.{name}".removeprefix("."), tensor


def dtypes_to_be(model: nn.Module, properties: Properties) -> dict[Tensor, torch.dtype]:
    """Return the parameters and buffers of `model` to cast, each with its new dtype.

    Norms that the properties keep in FP32, and tensors that are neither float16, bfloat16 nor float32,
    are not cast. A user's rules take precedence, also for a tensor that other modules share.
    """
    cast = properties.cast_model_type
    if not isinstance(cast, torch.dtype):
        return {}
    to_be: dict[Tensor, torch.dtype | None] = {}
    for module in model.modules():
        if not keeps_fp32(module, properties):
            for name, tensor in own_tensors(module):
                is_buffer = name in module._buffers
                to_be[tensor] = (properties.buffer_dtype if is_buffer else None) or cast
    to_be |= {tensor: rule.dtype for tensor, rule in ruled_tensors(model, properties.rules).items()}
    return {x: dtype for x, dtype in to_be.items() if dtype is not None and x.dtype in CASTABLE}


class CastModel(Strategy):
    """Casts weights in place, and inputs and outputs by hooks."""

    _has_warned = False

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        # Buffers that were cast: what they were, and how often torch had counted writes to them then.
        self._cast: Any = WeakTensorKeyDictionary()

    @staticmethod
    def is_asked_for(properties: Properties) -> bool:
        """Whether a profile casts the model, or its outputs."""
        return properties.casts_model or properties.cast_model_outputs is not None

    def check_model(self, model: nn.Module) -> None:
        """Raise AmpRuntimeError for a model that cannot be cast, and AmpTypeError for an unknown name.

        A model cannot be cast if it has a scripted module, a lazy one without values, or
        `FullyShardedDataParallel`, or if `ShardPolicies` refuses it. The names are those of
        `cast_model_inputs`.
        """
        dtype = self.properties.cast_model_type
        check_names(model, self.properties.cast_model_inputs)
        if dtype in LOW_PRECISION and fsdp1_modules(model):
            raise AmpRuntimeError(
                "the model is wrapped in FullyShardedDataParallel, whose flat shards cannot be cast to "
                f"{dtype_name(dtype)}. Cut it by torch.distributed.fsdp.fully_shard instead, or take "
                f"opt_level={levels_with('patch_torch_functions')}"
            )
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule) and dtype in LOW_PRECISION:
                raise AmpRuntimeError(
                    f"the model holds a {type(module).__name__}, whose code is fixed and cannot be "
                    "cast. Call amp.initialize first, and trace what it returns; or take "
                    f"opt_level={levels_with('patch_torch_functions')}, where it runs as in "
                    "torch.autocast"
                )
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if dtype and nn.parameter.is_lazy(tensor):
                raise AmpRuntimeError(
                    f"'{name}' has no values yet (a lazy module). Run one batch through the model "
                    "before amp.initialize."
                )

        dtypes = dtypes_to_be(model, self.properties)
        _check_layers(model, self.properties.rules, dtypes)
        ShardPolicies(model, self.properties, dtypes)
        _warn_of_buffers(model, dtypes)

    def prepare_model(self, model: nn.Module, undo: Undo) -> None:
        """Cast the parameters, buffers and gradients of the model in place, and register hooks.

        FP32 shards of FSDP2 are not cast at levels with masters; see `amp.casting.sharded`.
        """
        dtypes = dtypes_to_be(model, self.properties)
        policies = ShardPolicies(model, self.properties, dtypes)
        had = {name: x.dtype for name, x in _every_named(model)}
        is_cast = any(tensor.dtype is not dtype for tensor, dtype in dtypes.items())
        undo.callback(restore_policies, weakref.ref(model))
        undo.callback(_cast_back, weakref.ref(model), had, undo.memory)
        for tensor, dtype in dtypes.items():
            if tensor.dtype is not dtype and not policies.keeps(tensor):
                before = undo.before[tensor] = Contents(tensor.data, tensor.grad)
                Contents.cast(tensor, dtype, undo.memory.cast(tensor, dtype)).put_into(tensor)
                if not isinstance(tensor, nn.Parameter) and _has_changed(before.data, tensor):
                    self._cast[tensor] = before.data, tensor._version
        policies.apply()
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and self.properties.casts_model:
                module.flatten_parameters()
        for handle in self._hooks(model, is_cast):
            undo.callback(handle.remove)
        for module in model.modules():
            hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
            if module is model or any(isinstance(hook, (CastInputs, CastOutput)) for hook in hooks):
                vars(module)["__prepare_scriptable__"] = NotScriptable(type(module).__name__)
                undo.callback(vars(module).pop, "__prepare_scriptable__", None)

    def before_cast(self, buffer: Tensor) -> Tensor | None:
        """Return the value of a buffer before its cast to 16 bits, unless it was written to since."""
        data, version = self._cast.get(buffer, (None, None))
        return data if version == buffer._version else None

    def check_loss(self, loss: Tensor) -> None:
        """Warn once about a 16-bit loss, if outputs of models are FP32."""
        properties = self.properties
        outputs = properties.cast_model_outputs or torch.float32
        if loss.dtype not in LOW_PRECISION or outputs in LOW_PRECISION or self._has_warned:
            return
        if properties.cast_model_type in LOW_PRECISION:
            self._has_warned = True
            warn(
                f"the loss is in {dtype_name(loss.dtype)}, and outputs of model(x) are in "
                f"{dtype_name(outputs)}: perhaps it comes from model.forward(x) or from a part of the "
                "model, whose outputs amp does not cast. Call model(x), or output.float()"
            )

    def _hooks(self, model: nn.Module, is_cast: bool) -> Iterator[RemovableHandle]:
        """Register the hooks that cast, and yield their handles.

        - The model casts floating inputs to its own dtype and floating outputs to FP32, or to
          `cast_model_outputs`.
        - A layer that needs its input in its weight's dtype casts it, so that a submodule can be
          called on its own, and FP32 activations may appear inside the model. Where no tensor of the
          model is cast, the model's code gives each layer its dtype.
        - A norm kept in FP32 that cannot take half inputs casts them up, and its output down again.
        - A module that a rule matches casts its inputs to the rule's dtype, and not its outputs; but a
          parametrization casts what it computes to the dtype of its layer.
        """
        dtype, outputs = self.properties.cast_model_type, self.properties.cast_model_outputs
        weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if isinstance(dtype, torch.dtype) and weights != {torch.float64}:
            outputs = outputs or torch.float32
            ruled = _ruled_dtypes(model, self.properties.rules)
            gathered = gathered_dtypes(model)
            which = self.properties.cast_model_inputs
            leaves_it_to_fsdp = dtype is torch.float32 and casts_by_its_own_policy(model)
            for name, module in () if leaves_it_to_fsdp else model.named_modules():
                needed = _needed_input_dtype(module, dtype, gathered) or ruled.get(module)
                if module is model:
                    hook = ModelInputs(model, needed or dtype, which)
                    yield module.register_forward_pre_hook(hook, with_kwargs=True)
                elif needed is dtype and not is_cast and module not in ruled:
                    continue
                elif needed is not None and not matches(which, name):
                    yield module.register_forward_pre_hook(CastInputs(needed), with_kwargs=True)
                if needed not in (None, dtype) and module is not model and module not in ruled:
                    yield module.register_forward_hook(CastOutput(dtype), prepend=True)
                if isinstance(module, ParametrizationList):
                    layer = model.get_submodule(name.rpartition(".parametrizations.")[0])
                    of_layer = _needed_input_dtype(layer, dtype, gathered) or ruled.get(layer, dtype)
                    own = [x.dtype for _, x in tensors_in(module) if x.is_floating_point()]
                    if any(each is not of_layer for each in own):
                        yield module.register_forward_hook(CastOutput(of_layer))
        if outputs is not None:
            yield model.register_forward_hook(ModelOutput(outputs), prepend=True, always_call=True)


@without_grad
def _has_changed(before: Tensor, buffer: Tensor) -> bool:
    """Whether a cast to 16 bits has changed a buffer. The host waits for the device."""
    if is_sharded(buffer) or not can_ruin(before, buffer.dtype):
        return False
    with _disable_current_modes():  # modes that watch the model should not see these ops
        return bool((buffer.to(before.dtype) != before).any())


def _check_layers(
    model: nn.Module, rules: Sequence[Rule], dtypes: Mapping[Tensor, torch.dtype]
) -> None:
    """Raise AmpRuntimeError where rules for tensors leave one layer of torch with several dtypes."""
    ruled = {x: rule for x, rule in ruled_tensors(model, rules).items() if rule.kind == "tensor"}
    for name, module in model.named_modules() if ruled else ():
        is_of_torch = type(module).__module__.startswith("torch.nn.modules.")
        if not (is_of_torch and isinstance(module, (*_ONE_DTYPE_LAYERS, _NormBase))):
            continue
        may_differ = () if isinstance(module, _NormBase) else set(module.buffers())
        own = [x for x in tensors_in(module) if x[1].is_floating_point() and x[1] not in may_differ]
        to_be = {each: dtype_name(dtypes.get(x, x.dtype)) for each, x in own}
        rule = next((ruled[x] for _, x in own if x in ruled), None)
        if rule is not None and len(set(to_be.values())) > 1:
            parts = ", ".join(f"{each} {dtype}" for each, dtype in to_be.items())
            where, every = (f"'{name}'", f"{name}.*") if name else ("the model", "*")
            raise AmpRuntimeError(
                f"{rule.source}: the rule for '{rule.pattern}' would leave several dtypes in "
                f"{where}, and {type(module).__name__} computes in one: "
                f"{parts}. Give them all one dtype: {{tensor: '{every}', cast: {shown(rule.dtype)}}}"
            )


def _warn_of_buffers(model: nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Warn of buffers whose integers or masks a cast ruins. The host waits for the device."""
    for name, buffer in model.named_buffers():
        dtype = dtypes.get(buffer, buffer.dtype)
        if is_sharded(buffer) or not can_ruin(buffer, dtype):
            continue
        if found := ruined_by_cast(buffer, dtype):
            module = name.rpartition(".")[0]
            rule = f"its module in FP32: rules: [{{module: {module}" if module else ""
            rule = rule or f"it in FP32: rules: [{{tensor: {name}"
            warn(
                f"the buffer '{name}' is cast to {dtype_name(dtype)}, and holds {found}. Hold integers "
                f"as torch.long and masks as bools, or keep {rule}, cast: float32}}]"
            )


def _cast_back(
    reference: weakref.ref[nn.Module], had: Mapping[str, torch.dtype], memory: CastMemory
) -> None:
    """Cast parameters and buffers to the dtypes that they had, unless a master has restored them.

    They are found by name, because torch swaps no tensors that have weak references. Tensors with new
    names, such as those of a parametrization, were made from cast ones, and become FP32.
    """
    model = reference()
    if model is None:
        return
    reshard(model)
    for name, tensor in _every_named(model):
        is_new = name not in had and tensor.dtype in LOW_PRECISION and not is_sharded(tensor)
        dtype = torch.float32 if is_new else had.get(name, tensor.dtype)
        if tensor.dtype not in CASTABLE or dtype not in CASTABLE:
            continue
        if any(x is not None and x.dtype is not dtype for x in (tensor, tensor.grad)):
            Contents.cast(tensor, dtype, memory.cast(tensor, dtype)).put_into(tensor)


def _needed_input_dtype(
    module: nn.Module, model_dtype: torch.dtype, gathered: Mapping[Tensor, torch.dtype]
) -> torch.dtype | None:
    """Return the dtype that the input of this layer must have, or None if it takes any.

    `gathered` has the dtypes of FSDP2's shards when they are gathered for a forward.
    """
    tensors = [tensor for _, tensor in own_tensors(module) if tensor.is_floating_point()]
    dtype = next((gathered.get(tensor, tensor.dtype) for tensor in tensors), None)
    is_cast_norm = isinstance(module, _NormBase) and dtype is model_dtype  # a wider one takes any input
    needs_its_own = (
        is_cast_norm or isinstance(module, _ONE_DTYPE_LAYERS) or _imitates_quantization(module)
    )
    return dtype if needs_its_own else None
