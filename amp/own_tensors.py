"""The tensors that a module holds itself, even if its class overrides `named_parameters` and the like.

A class may override these with fewer arguments than `nn.Module` has: `remove_duplicate` is new in torch
2.0, and torchrl's loss modules do not have it. Elsewhere amp calls them without arguments.
"""

from collections.abc import Iterator

from torch import Tensor, nn


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that a module holds itself, by all their names."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def tensors_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model, shared ones by each of their names."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield from ((prefix + name, tensor) for name, tensor in own_tensors(module))
