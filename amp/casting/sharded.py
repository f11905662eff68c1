"""Models sharded by FSDP2: the FP32 shards are the master weights, and FSDP2 casts.

`fully_shard` replaces each parameter by this rank's shard of it. Around a module's forward and
backward FSDP2 gathers the whole parameter, in the `param_dtype` of its `MixedPrecisionPolicy`, and
it reduces gradients to shards in the `reduce_dtype`. So at a level with master weights no weight is
cast in place: the policy says 16 bits, the optimizer updates the FP32 shards, and there is no second
copy of them. Where weights have no masters, or lean ones, the shards themselves are cast.

FSDP2 gathers parameters in groups, one for each `fully_shard`, and the gradients of a group have one
dtype. Norms, and modules that a rule keeps in FP32, get a separate group.

The policy of a module has no public setter. Only this file touches torch's private state of an FSDP
module and its groups.
"""

import copy
import dataclasses
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from amp.distributed import ProcessGroup, group_of_mesh
from amp.dtypes import LOW_PRECISION, dtype_name
from amp.errors import AmpRuntimeError
from amp.profiles.levels import resolve
from amp.profiles.options import OptLevel
from amp.profiles.properties import Properties
from amp.torch_versions import root_mesh


def fsdp_policy(opt_level: OptLevel = "O5", **overrides: Any) -> Any:
    """Return FSDP2's `MixedPrecisionPolicy` for a level: `fully_shard(model, mp_policy=...)`.

    `amp.initialize` sets this policy on every FSDP module whose policy has no dtypes, so this function
    is for code that builds models apart from amp, and for reading. The `param_dtype` is None at levels
    that do not cast the model, or that cast the shards themselves. `amp.initialize` casts the inputs,
    not FSDP2.

    Args:
        opt_level: a level, an alias, or a path to a YAML profile.
        **overrides: properties that replace those of the level, as for `amp.initialize`.

    Raises:
        AmpError: the profile or an override is not valid.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    properties = resolve(opt_level, overrides)
    if not properties.casts_model or properties.cast_model_type not in LOW_PRECISION:
        return MixedPrecisionPolicy()
    gathered = properties.cast_model_type if properties.master_weights is True else None
    return MixedPrecisionPolicy(
        param_dtype=gathered or None,
        reduce_dtype=properties.reduce_dtype or torch.float32,
        cast_forward_inputs=False,
    )


def units_of(model: nn.Module) -> list[Any]:
    """Return the FSDP states (units) of a model, one for each `fully_shard`, outermost first."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    modules = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))  # type: ignore[operator]


def reshard(model: nn.Module) -> None:
    """Make the shards the parameters of an FSDP model again, after a forward has gathered them."""
    for module in modules_of_fsdp2(model):
        module.reshard()


def parameters_of(unit: Any) -> list[Tensor]:
    """Return the shards of an FSDP module, which optimizers update."""
    return [param.sharded_param for group in _groups(unit) for param in group.fsdp_params]


def has_unreduced(unit: Any) -> bool:
    """Whether an FSDP module holds gradients that are not yet reduced over all ranks."""
    return any(
        group._partial_reduce_output is not None or any(map(_unreduced, group.fsdp_params))
        for group in _groups(unit)
    )


def _unreduced(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (
        whole is not None and whole.grad is not None
    )


def drop_unreduced(unit: Any, shards: Collection[int]) -> None:
    """Drop the gradients that an FSDP module has still to reduce, of the shards with these ids.

    FSDP2 reduces a group's gradients together. So if only a part of a group is dropped, its gradients
    are set to 0, and the group's partly reduced gradients of HSDP, which are one tensor, are kept.
    """
    for group in _groups(unit):
        own = [param for param in group.fsdp_params if id(param.sharded_param) in shards]
        if len(own) == len(group.fsdp_params):
            group._partial_reduce_output = None
            for param in filter(_unreduced, own):
                param.unsharded_accumulated_grad = param.unsharded_param.grad = None
        else:
            for param in filter(_unreduced, own):
                for grad in (param.unsharded_accumulated_grad, param.unsharded_param.grad):
                    if grad is not None:
                        grad.zero_()


def is_of_fsdp1(parameter: Tensor) -> bool:
    """Whether a parameter is sharded by FSDP1, FSDP's first version."""
    return getattr(parameter, "_fsdp_flattened", False)


def fsdp1_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP1's `FullyShardedDataParallel` wraps."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def has_unreduced1(module: Any) -> bool:
    """Whether an FSDP1 module holds gradients that are not yet reduced over the ranks."""
    handle = module._handle
    if handle is None:  # it has no parameters of its own
        return False
    if not handle.uses_sharded_strategy:
        return not module._sync_gradients
    grad = handle.flat_param.grad
    return grad is not None and grad.size() == handle.flat_param._unpadded_unsharded_size


def fsdp1_groups(models: Iterable[nn.Module]) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which FSDP1 has sharded models.

    They include the groups of HSDP's replicas and of tensor parallelism: all ranks decide together.
    """
    modules = chain.from_iterable(map(fsdp1_modules, models))
    cut = [module for module in modules if module.sharding_strategy.name != "NO_SHARD"]
    groups: list[ProcessGroup] = []
    for module in cut:
        groups += filter(None, (module.process_group, getattr(module, "_inter_node_pg", None)))
        if module._fsdp_extension is not None:
            groups.append(group_of_mesh(root_mesh(module._device_mesh)))
    return tuple(dict.fromkeys(groups))


def casts_by_its_own_policy(model: nn.Module) -> bool:
    """Whether FSDP gathers weights in 16 bits, by a mixed-precision policy of the user's."""
    first = [module.mixed_precision.param_dtype for module in fsdp1_modules(model)]
    return not LOW_PRECISION.isdisjoint([*first, *gathered_dtypes(model).values()])


def specs_when_gathered(model: nn.Module) -> dict[Tensor, Any]:
    """Return the shards of FSDP2, each with its layout of tensor parallelism when gathered, or None."""
    return {
        _shard(param): param._unsharded_dtensor_spec
        if hasattr(param, "_unsharded_dtensor_spec")
        else getattr(param, "_tp_spec", None)  # before torch 2.12
        for group in _groups_in(model)
        for param in group.fsdp_params
    }


def params_of_fsdp2(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return FSDP2's parameters, by the module and the name; shared ones are left out."""
    params = [param for group in _groups_in(model) for param in group.fsdp_params]
    return {
        (param._module_info.module, param._module_info.param_name): param
        for param in params
        if not param._module_info.shared_modules
    }


def modules_of_fsdp2(model: nn.Module) -> list[Any]:
    """Return the modules whose forwards gather parameters."""
    return [module for unit in units_of(model) for module in unit._modules]


def gathered_dtypes(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return the floating shards of a model, each with its dtype when gathered for a forward."""
    return {
        shard: group.mp_policy.param_dtype or shard.dtype
        for group in _groups_in(model)
        for shard in map(_shard, group.fsdp_params)
        if shard.is_floating_point()
    }


class ShardPolicies:
    """The policies and groups that FSDP2 needs for the shards of one model at a level.

    Args:
        model: the model; it is only changed by `apply`.
        properties: the level.
        dtypes: the new dtypes of parameters, from `dtypes_to_be`.

    Raises:
        AmpRuntimeError: a `MixedPrecisionPolicy` of the user's contradicts the level, a group would
            have several dtypes in a torch that cannot split it, or the model has run a forward, after
            which FSDP2 does not read policies.
    """

    def __init__(
        self, model: nn.Module, properties: Properties, dtypes: Mapping[Tensor, torch.dtype]
    ) -> None:
        self._properties = properties
        self._wanted = {
            shard: dtypes.get(shard, shard.dtype)
            for group in _groups_in(model)
            for shard in map(_shard, group.fsdp_params)
        }
        self._units = units_of(model) if properties.cast_model_type in LOW_PRECISION else []
        for unit in self._units:
            self._check(unit)

    def keeps(self, tensor: Tensor) -> bool:
        """Whether a tensor is a shard that is a master: it stays FP32, and FSDP2 casts on gathering."""
        are_masters = self._properties.master_weights is True
        return are_masters and tensor in self._wanted and tensor.dtype is torch.float32

    def _parts(self, group: Any) -> dict[Any, list[Any]]:
        """Return the parameters of a group by the storage dtype and policy that they need."""
        own = group.mp_policy
        parts: dict[Any, list[Any]] = {}
        for param in group.fsdp_params:
            shard = _shard(param)
            gathered = self._wanted[shard]
            stored = shard.dtype if self.keeps(shard) else gathered
            policy = dataclasses.replace(
                own,
                param_dtype=None if stored is gathered else gathered,
                reduce_dtype=own.reduce_dtype or self._properties.reduce_dtype or torch.float32,
                # The hooks of `by_model` cast inputs, as without FSDP2.
                cast_forward_inputs=own.cast_forward_inputs and own.param_dtype is not None,
            )
            parts.setdefault((stored, policy), []).append(param)
        return parts

    def _check(self, unit: Any) -> None:
        level, low = self._properties.opt_level, self._properties.cast_model_type
        assert isinstance(low, torch.dtype)
        for group in _groups(unit):
            own, names = group.mp_policy, [param._module_info.param_name for param in group.fsdp_params]
            asked = self._properties.reduce_dtype
            if own.param_dtype not in (None, low) or (asked and own.reduce_dtype not in (None, asked)):
                raise AmpRuntimeError(
                    f"fully_shard was given {own} for {_described(unit)}, and opt_level {level} "
                    f"computes in {dtype_name(low)} and reduces in "
                    f"{dtype_name(asked or torch.float32)}. Leave mp_policy out, and amp.initialize "
                    "sets it, or pass mp_policy=amp.fsdp_policy(...) of the same level"
                )
            parts = self._parts(group)
            if len(parts) > 1 and not hasattr(unit, "_fsdp_param_groups"):
                raise AmpRuntimeError(
                    f"{_described(unit)} has parameters of several dtypes at opt_level {level} "
                    f"({', '.join(names)}), and this version of torch gathers them as one. Call "
                    "fully_shard on each module that stays float32, such as a BatchNorm2d, before"
                )

    def apply(self) -> None:
        """Set the policies, after the shards were cast; `restore_policies` undoes it."""
        for unit in self._units:
            groups = _groups(unit)
            own = [(group, group.mp_policy, group.fsdp_params) for group in groups]
            unit._before_amp = unit._mp_policy, groups, own
            parts = [part for group in groups for part in self._split(group, _has_run(unit))]
            policies = [part.mp_policy for part in parts]
            main = max(policies, key=lambda policy: policy.param_dtype is not None, default=None)
            _set(unit, unit._mp_policy if main is None else main, parts)

    def _split(self, group: Any, has_run: bool) -> Iterator[Any]:
        """Yield the group with its new policy, and new groups for parameters that need another one."""
        for i, ((_, policy), params) in enumerate(self._parts(group).items()):
            part = group if i == 0 else copy.copy(group)
            if i > 0:
                if not has_run:  # else it is that of the root
                    part.comm_ctx = type(group.comm_ctx)()
                part._module_to_pre_save_state_dict_hook_handle = {}
                part._module_to_pre_load_state_dict_hook_handle = {}
                part._post_forward_indices = []
            part.mp_policy, part.fsdp_params = policy, params
            yield part


def restore_policies(reference: weakref.ref[nn.Module]) -> None:
    """Give the units of a model the policies that they had before amp, after shards were cast back."""
    model = reference()
    for unit in () if model is None else units_of(model):
        if (before := vars(unit).pop("_before_amp", None)) is not None:
            policy, groups, own = before
            for group, of_group, params in own:
                group.mp_policy, group.fsdp_params = of_group, params
            _set(unit, policy, groups)


def _set(unit: Any, policy: Any, groups: list[Any]) -> None:
    """Give a unit a policy and groups, and let FSDP2 read the shards again."""
    unit._mp_policy = policy
    if hasattr(unit, "_fsdp_param_groups"):
        unit._fsdp_param_groups = groups
    for group in groups:
        for param in group.fsdp_params:
            param.reset_sharded_param()
            param.all_gather_outputs = []  # after a forward, of the dtype that it was gathered in
            vars(param).pop("_unsharded_param", None)
        if _has_run(unit):
            group.lazy_init()  # reads the policy


def _has_run(unit: Any) -> bool:
    """Whether a unit has run a forward, in which FSDP2 reads its policy."""
    return unit._is_root is not None


def _groups(unit: Any) -> list[Any]:
    """Return the groups of a unit; up to torch 2.12 a unit has one at most."""
    groups = getattr(unit, "_fsdp_param_groups", None)
    return list(filter(None, [unit._fsdp_param_group])) if groups is None else list(groups)


def _groups_in(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of all units of a model."""
    for unit in units_of(model):
        yield from _groups(unit)


def _shard(param: Any) -> Any:
    """Return the shard of a parameter, as the model has it while it is not gathered."""
    shown = getattr(param._module_info.module, param._module_info.param_name)
    return shown if hasattr(shown, "device_mesh") else param.sharded_param


def _described(unit: Any) -> str:
    return f"an FSDP module of type {type(unit._modules[0]).__name__.removeprefix('FSDP')}"
