"""The names of `apex.parallel`: torch's distributed training with apex's arguments, and LARC."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ReduceOp as ReduceOp
from torch.nn import functional as F

from amp.compat.apex_c import flatten, unflatten
from amp.errors import AmpValueError, truth_of
from amp.kernels.interrupts import without_grad


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    The gradients of the ranks are divided by `gradient_predivide_factor`, summed, and multiplied by
    `gradient_predivide_factor / world_size`. The arguments about when and in what pieces to reduce have
    no effect.

    Args:
        module: the model, on its device.
        message_size: has no effect.
        delay_allreduce: whether there may be parameters without a gradient.
        shared_param: has no effect.
        allreduce_trigger_params: has no effect.
        retain_allreduce_buffers: has no effect.
        allreduce_always_fp32: whether gradients are reduced in float32, whatever their dtype is.
        num_allreduce_streams: has no effect.
        allreduce_communicators: has no effect.
        gradient_average: whether the sum is multiplied; False keeps the sum.
        gradient_predivide_factor: the divisor of gradients before they are summed.
        gradient_average_split_factor: has no effect.
        prof: has no effect.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        unused = truth_of("delay_allreduce", delay_allreduce)
        gradient_average = truth_of("gradient_average", gradient_average)
        allreduce_always_fp32 = truth_of("allreduce_always_fp32", allreduce_always_fp32)
        super().__init__(module, find_unused_parameters=unused)
        if not gradient_average or allreduce_always_fp32 or gradient_predivide_factor != 1:
            before = 1 / gradient_predivide_factor
            world = distributed.get_world_size()
            after = gradient_predivide_factor / world if gradient_average else 1.0
            # A lambda, because torch reads the hook's `__name__`, which a partial lacks.
            self.register_comm_hook(
                None, lambda _, bucket: _reduce(bucket, before, after, allreduce_always_fp32)
            )


def _reduce(bucket: Any, before: float, after: float, in_fp32: bool) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over the ranks, multiplied before and after, perhaps in float32."""
    buffer = bucket.buffer()
    wide = buffer.float() if in_fp32 else buffer
    work: Any = distributed.all_reduce(wide * before, async_op=True)
    return work.get_future().then(lambda future: (future.value()[0] * after).to(buffer.dtype))  # type: ignore[no-any-return]


@without_grad
def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on tensors, once for each dtype: `call(flat, *extra_args)`.

    A sum by `torch.distributed.all_reduce` itself becomes a mean, as in apex.
    """
    for _, alike in groupby(sorted(tensors, key=_type_of), _type_of):
        each = list(alike)
        flat = flatten(each)
        call(flat, *(extra_args or ()))
        if call is distributed.all_reduce:
            flat /= distributed.get_world_size()
        torch._foreach_copy_(each, unflatten(flat, each))


def _type_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


class Reducer:
    """Averages gradients over the ranks on each call of `reduce`.

    Args:
        module_or_grads_list: a model, or a list of gradients. The parameters of a model are set to
            those of rank 0 first.
    """

    def __init__(self, module_or_grads_list: nn.Module | list[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            for parameter in self.module.parameters():
                distributed.broadcast(parameter.detach(), 0)
        else:
            self.grads = module_or_grads_list

    def reduce(self) -> None:
        """Average the gradients over the ranks."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for grad in grads:
            distributed.all_reduce(grad)
            grad.div_(distributed.get_world_size())


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm with apex's arguments.

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: the momentum of the running statistics.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics.
        process_group: the ranks that share statistics; None is all ranks.
        channel_last: has no effect: channels are the second dimension.
        fuse_relu: whether to apply a ReLU to the output.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        output = super().forward(input)
        return F.relu(output) if self.fuse_relu else output


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Replace a model's batch norms by ones that share statistics over the ranks; return the model."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
    for norm in converted.modules():
        if type(norm) is nn.SyncBatchNorm:  # scripts check for apex's class
            norm.__class__ = SyncBatchNorm
            norm.fuse_relu = False  # type: ignore[assignment]
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return the process group of `group_size` neighbouring ranks with this one, or None for size 0.

    Every rank has to call it.

    Raises:
        AmpValueError: `group_size` does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    world = distributed.get_world_size()
    if group_size < 1 or world % group_size:
        raise AmpValueError(f"group_size={group_size} does not divide the {world} ranks there are")
    return distributed.new_subgroups(group_size)[0]  # type: ignore[no-untyped-call]


class LARC:
    """Layer-wise adaptive rate control: a wrapper of an optimizer.

    The gradient of each parameter, weight decay included, is multiplied by the adaptive rate
    `trust_coefficient * norm(p) / (norm(gradient) + weight_decay * norm(p) + eps)`, or with `clip` by
    `min(adaptive_rate / lr, 1)`. Source: You, Gitman, Ginsburg 2017.

    Args:
        optimizer: the optimizer.
        trust_coefficient: the norm of a step relative to the norm of its parameter.
        clip: whether the learning rate is an upper bound of the adaptive rate, or is multiplied by it.
        eps: added to the denominator.
    """

    def __init__(
        self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = truth_of("clip", clip)
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optim.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Adapt the gradients and step. The host does not wait for the device."""
        decays = [(g, g["weight_decay"]) for g in self.param_groups if "weight_decay" in g]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._adapt(parameter, group.get("weight_decay", 0.0), group["lr"])
        try:
            for group, _ in decays:
                group["weight_decay"] = 0.0
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay

    @without_grad
    def _adapt(self, parameter: Tensor, decay: float, lr: float) -> None:
        grad = parameter.grad
        assert grad is not None
        of_parameter, of_grad = parameter.norm(), grad.norm()
        rate = self.trust_coefficient * of_parameter / (of_grad + decay * of_parameter + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        adapts = (of_parameter != 0) & (of_grad != 0)
        grad.copy_(torch.where(adapts, (grad + decay * parameter) * rate, grad))
