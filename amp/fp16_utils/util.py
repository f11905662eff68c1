"""Manual half precision: casting models, making masters, and copying between both."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp.errors import AmpTypeError, AmpValueError, truth_of
from amp.kernels.interrupts import without_grad
from amp.lazy import kernels
from amp.own_tensors import own_tensors
from amp.undo import Contents

clip_grad_norm = torch.nn.utils.clip_grad_norm_

Module = TypeVar("Module", bound=nn.Module)


class tofp16(nn.Module):  # noqa: N801 (apex's name)
    """A module that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input in float16."""
        return input.half()


def BN_convert_float(module: Module) -> Module:  # noqa: N802 (apex's name)
    """Cast the batch norms with weights in a module to float32, and return the module."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return a model cast to float16, apart from batch norms with weights, that casts its input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters, gradients and buffers of a module, not of its children."""
    for _, tensor in own_tensors(module):
        if tensor.is_floating_point():
            Contents.cast(tensor, dtype).put_into(tensor)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Cast a model in place, apart from batch norms with weights, and return it."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A model in float16 with float32 batch norms, which casts its inputs.

    Args:
        network: the model, which is cast in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the network's output for the inputs, cast to float16."""
        return self.network(*[x.half() for x in inputs])


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of a model, and their float32 masters.

    Args:
        model: the model.
        flat_master: whether the masters are one flat parameter, with a gradient.

    Raises:
        AmpValueError: no parameter is trainable.
        AmpTypeError: `flat_master` is True, and the parameters have several dtypes.
    """
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not params:
        raise AmpValueError(f"no parameter of this {type(model).__name__} requires a gradient")
    if not truth_of("flat_master", flat_master):
        return params, [nn.Parameter(p.detach().clone().float()) for p in params]
    dtypes = {parameter.dtype for parameter in params}
    if len(dtypes) > 1:
        raise AmpTypeError(
            f"flat_master=True takes parameters of one dtype, and these are of "
            f"{', '.join(sorted(map(str, dtypes)))}. Use flat_master=False"
        )
    master = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


@without_grad
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients from a model to its masters, in float32. The host does not wait for the device.

    Raises:
        AmpValueError: the lists do not match, or `flat_master` is True and a gradient is missing.
    """
    flat_master = truth_of("flat_master", flat_master)
    _check_lists(model_params, master_params, flat_master)
    grads = [parameter.grad for parameter in model_params]
    if flat_master:
        pieces = [grad.reshape(-1) for grad in grads if grad is not None]
        if len(pieces) < len(grads):
            raise AmpValueError(
                f"{len(grads) - len(pieces)} of {len(grads)} parameters have no gradient, and a flat "
                "master needs all. Use flat_master=False"
            )
        grads = [torch.cat(pieces)]
    for grad, master in zip(grads, master_params, strict=True):
        if grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(grad)


@without_grad
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy masters to a model, rounded. The host does not wait for the device.

    Raises:
        AmpValueError: the lists do not match.
    """
    flat_master = truth_of("flat_master", flat_master)
    _check_lists(model_params, master_params, flat_master)
    if flat_master:
        pieces = torch.split(master_params[0].detach(), [p.numel() for p in model_params])
        master_params = [piece.view(p.shape) for piece, p in zip(pieces, model_params, strict=True)]
    kernels.master_copy.master_copy(master_params, model_params)


def to_python_float(t: Any) -> float:
    """Return a tensor of one element, or the first element of a list, as a float. The host waits."""
    return float(t.item() if hasattr(t, "item") else t[0])


def _check_lists(model: Sequence[Tensor], masters: Sequence[Tensor], flat_master: bool) -> None:
    sizes = [sum(p.numel() for p in params) for params in (model, masters)]
    if (len(masters) != 1 if flat_master else len(model) != len(masters)) or sizes[0] != sizes[1]:
        raise AmpValueError(
            f"{len(model)} parameters of {sizes[0]} elements and {len(masters)} masters of {sizes[1]} "
            f"do not match, with flat_master={flat_master}: pass what prep_param_lists returned"
        )
