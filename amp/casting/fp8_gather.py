"""Weights of FSDP2 that travel in FP8: each rank quantizes its shard, and gathers 1 byte for a number.

    factor = FMAX / (largest amax of all shards)      of all layers in one reduction
    values = gathered E4M3 of shard * factor    the same as gathering first, then quantizing
    weight = values / factor                          in the dtype that FSDP2 would have gathered

FSDP2 asks a shard's local tensor for two methods, and finds them as attributes, so that no parameter
changes its class. The layer multiplies `values`; all other readers of the gathered weight see a plain
tensor. While gathered, a weight takes 1 byte more for each number than without FP8.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from amp.distributed import reduce_largest
from amp.kernels.fp8 import Operand, Quantized, amax_of, factor_of
from amp.kernels.interrupts import without_grad
from amp.profiles.fp8_recipe import Fp8Recipe

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
E4M3 = torch.float8_e4m3fn


class Gathers:
    """The weights of one model that travel in FP8.

    Args:
        recipe: the session's recipe.
        params: FSDP2's parameters, each the weight of a layer.
        groups: the process groups that hold the shards.
    """

    def __init__(
        self, recipe: Fp8Recipe, params: Mapping[nn.Module, Any], groups: Sequence[Any]
    ) -> None:
        self.is_power_of_2 = bool(recipe.power_of_2_scales)
        self.groups = groups
        self.weights = {
            module: GatheredWeight(self, param, i) for i, (module, param) in enumerate(params.items())
        }
        device = next(iter(params.values())).device
        self.amaxes = torch.zeros(len(params), dtype=torch.float32, device=device)
        self.factors = torch.zeros_like(self.amaxes)

    @without_grad
    def agree(self) -> None:
        """Compute the factors of all weights from all of their shards, by one reduction."""
        amaxes = [amax_of(each.shard().reshape(1, -1), "tensor") for each in self.weights.values()]
        self.amaxes.copy_(torch.cat(amaxes).reshape(-1))
        reduce_largest([self.amaxes], self.groups, "the scales of FP8")
        self.factors.copy_(factor_of(self.amaxes, E4M3, self.is_power_of_2))
        for each in self.weights.values():
            each.agreed = each.version()

    def attach(self, *_: Any) -> None:
        """Let FSDP2 gather in FP8.

        Each forward calls this, because a shard may be another tensor by then.
        """
        for each in self.weights.values():
            each.attach()

    def close(self) -> None:
        """Let FSDP2 gather as before."""
        for each in self.weights.values():
            each.close()


class GatheredWeight:
    """One weight that travels in FP8: methods by which FSDP2 gathers it, and gathered tensors."""

    def __init__(self, gathers: Gathers, param: Any, number: int) -> None:
        self._gathers, self._param, self._number = gathers, param, number
        self.agreed: Any = None
        self._values: Tensor | None = None
        self._decoded: Tensor | None = None
        self._forget()

    def __deepcopy__(self, memo: Any) -> None:
        """Make a copy of a shard, which has this in its attributes, a plain tensor."""

    def attach(self) -> None:
        """Let FSDP2 find the two methods."""
        local = self._param._sharded_local_tensor
        if _METHODS[0] not in vars(local):
            vars(local).update({name: getattr(self, name) for name in _METHODS})
            freed = self._param._unsharded_inner_tensors  # FSDP2 gives their memory back
            self._param._init_extensions()
            self._param._unsharded_inner_tensors = freed

    def version(self) -> Any:
        """Return a value that changes when the shard is written to."""
        shard, local = self._param.sharded_param, self._param._sharded_local_tensor
        return id(local), local._version, shard._version  # steps through the DTensor raise only its own

    def shard(self) -> Tensor:
        """Return this rank's shard, padded with zeros as FSDP2 does, in the dtype to be gathered."""
        data: Tensor = self._param._sharded_param_data.view(self._param.padded_sharded_param_size)
        return data.to(self._param.param_dtype or data.dtype)

    @property
    def factor(self) -> Tensor:
        """What the values were multiplied by, float32 `[]`."""
        return self._gathers.factors[self._number]

    def inverse(self) -> Tensor:
        """Return what to multiply the values by, float32 `[]`."""
        amax = self._gathers.amaxes[self._number]
        return torch.where(amax < torch.inf, 1 / self.factor, torch.nan)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Return the shard in FP8, as bytes: not every backend gathers FP8."""
        if self.agreed != self.version():
            self._gathers.agree()
        shard = self.shard()
        largest = torch.finfo(E4M3).max
        values = (shard.float() * self.factor).clamp(-largest, largest).to(E4M3)
        return (values.view(torch.uint8),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the gathered weight as a plain tensor, and the tensors that FSDP2 is to free."""
        rows, columns = self._param._orig_size
        values = outputs[0].view(E4M3).view(-1, columns)[:rows]
        decoded = (values.float() * self.inverse()).to(dtype)
        self._values = values
        if out is None:
            self._decoded = decoded
            return decoded, (decoded,)
        assert self._decoded is not None
        with _unsafe_preserve_version_counter(self._decoded):
            self._decoded.copy_(decoded)
        return None

    def quantized(self, weight: Tensor) -> Quantized | None:
        """Return the gathered weight in FP8, if `weight` is it."""
        if weight is not getattr(self._param, "_unsharded_param", None) or self._values is None:
            return None
        operand = Operand(self._values, self.inverse(), "tensor", self._gathers.is_power_of_2)
        return Quantized(operand, None, self.factor)

    def close(self) -> None:
        """Let FSDP2 gather the weight as before."""
        for name in _METHODS:
            vars(self._param._sharded_local_tensor).pop(name, None)
        self._forget()

    def _forget(self) -> None:
        """Make FSDP2 forget the memory in which it has gathered the weight."""
        param = self._param
        vars(param).pop("_unsharded_param", None)
        vars(param).pop("_extensions_data", None)
        param.all_gather_outputs, param._unsharded_inner_tensors = [], []
        self._values = self._decoded = None
