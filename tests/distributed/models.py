"""Models, the ways to wrap them, and what one process makes of the same data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import amp
from amp.optimizers import FusedAdam

BATCH, LENGTH, WIDTH = 8, 4, 8
STEPS = 4


class Layer(nn.Module):
    """A norm and two linear layers, as in a transformer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """`[B, T, C]` in and `[B, T, 3]` out; no dimension of the head is a multiple of the ranks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(width), Layer(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Pictures(nn.Module):
    """Convolutions with norms that have running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(LENGTH, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.convolution(x))).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {"network": Network, "pictures": Pictures}


def make(kind: str = "network") -> Any:
    """Return a model with the same weights every time."""
    torch.manual_seed(0)
    return MODELS[kind]()


@functools.cache
def mesh(*names: str) -> DeviceMesh:
    """Return a mesh of all ranks: in one dimension, or 2 x 2 of them."""
    size = distributed.get_world_size()
    shape = (size,) if len(names) == 1 else (2, size // 2)
    return init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)


def shard(model: Any, on: DeviceMesh | None = None, **options: Any) -> Any:
    """Cut a model by FSDP2, layer by layer."""
    on = on or mesh("data")
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=on, **options)
    return fully_shard(model, mesh=on, **options)


def parallelize(model: Any, on: DeviceMesh | None = None) -> Any:
    """Cut the linear layers of a `Network` by columns and by rows; its norms stay as they are."""
    on = on or mesh("tensor")
    for layer in model.layers:
        parallelize_module(layer, on, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def parallelize_sequence(model: Any, on: DeviceMesh | None = None) -> Any:
    """Cut a `Network` as PyTorch's tutorial does: between linear layers by tokens, norms too.

    Gradients of the norms are sums that are still to be made over the ranks.
    """
    on = on or mesh("tensor")
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, on, plan)
    layouts: Any = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    cut = PrepareModuleInput(**layouts, use_local_output=True)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, on, {"layers.0": cut, "head": head})


def both(cut: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return FSDP2 around a kind of tensor parallelism."""

    def wrap(model: Any) -> Any:
        grid = mesh("data", "tensor")
        return shard(cut(model, grid["tensor"]), grid["data"])

    return wrap


WRAPS: dict[str, Callable[[Any], Any]] = {
    "fsdp2": shard,
    "hsdp": lambda model: shard(model, mesh("copies", "data")),
    "tp": parallelize,
    "sp": parallelize_sequence,
    "fsdp2+tp": both(parallelize),
    "fsdp2+sp": both(parallelize_sequence),
}
"""Wrappers that go around a model before `amp.initialize`."""

FSDP1: dict[str, Callable[[Any], Any]] = {
    "fsdp1": lambda model: fsdp1(model),
    "fsdp1 hybrid": lambda model: fsdp1(
        model, device_mesh=mesh("first", "second"), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    ),
    "fsdp1+tp": lambda model: fsdp1(
        parallelize(model, mesh("first", "second")["second"]),
        device_mesh=mesh("first", "second")["first"],
    ),
}
"""The first FSDP, which takes no level with masters."""

SIZES = {"fsdp2": 2, "hsdp": 4, "tp": 2, "sp": 2, "fsdp2+tp": 4, "fsdp2+sp": 4, "ddp": 2}
SIZES |= {"fsdp1": 2, "fsdp1 hybrid": 4, "fsdp1+tp": 4}
"""How many processes a wrapper is tested on."""

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.5),
    "adamw": lambda params, **options: torch.optim.AdamW(params, lr=0.02, eps=1e-3, **options),
    "fused": lambda params: FusedAdam(params, lr=0.02, eps=1e-3),
}
"""One that the host skips for, and two that skip on the device."""


def make_optimizer(kind: str, model: nn.Module) -> Any:
    """Return an optimizer of a model's parameters."""
    params = list(model.parameters())
    # Torch's fused ones take DTensors or others, not both.
    fused = len({isinstance(parameter, DTensor) for parameter in params}) == 1
    return OPTIMIZERS[kind](params, **({"fused": fused} if kind == "adamw" else {}))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def initialize(model: Any, optimizer: Any, level: str, **options: Any) -> Any:
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def fsdp1(model: Any, **options: Any) -> Any:
    """Cut a model by the first FSDP."""
    device = torch.get_default_device()
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device, **options)


def prepared(
    wrap: str, level: str, optimizer: Callable[[Any], Any], model: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """Return a model that is wrapped, what computes its forward, and its optimizer, at a level."""
    model = (WRAPS | FSDP1).get(wrap, lambda bare: bare)(make() if model is None else model)
    model, made = initialize(model, optimizer(model), level, **options)
    wrapped = model
    if wrap.startswith("ddp"):
        kinds = {"gradient_as_bucket_view": wrap == "ddp views", "static_graph": wrap == "ddp static"}
        wrapped = DistributedDataParallel(model, **kinds)
    return model, wrapped, made


def data_rank(kind: str) -> tuple[int, int]:
    """Return the number of this rank among those that see other data, and how many there are."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if kind in ("tp", "sp"):
        return 0, 1
    if "+" in kind:
        return rank // (size // 2), 2
    return rank, size


def batches(part: int = 0, of: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of each step: those of one rank, which are a part of the batch."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, device="cpu").chunk(of)[part]
        y = torch.randn(BATCH, LENGTH, 3, generator=generator, device="cpu").chunk(of)[part]
        yield x.to(torch.get_default_device()), y.to(torch.get_default_device())


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def train(model: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        backward(loss_of(model, x, y), optimizer)
        optimizer.step()


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    result = model(x).float()
    return (result - (y if result.dim() == 3 else y.mean(1))).square().mean()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a DTensor, on each rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal_on_ranks(tensors: Any) -> None:
    """Raise unless all ranks hold the same bits, whatever they call them."""
    mine = torch.cat([torch.as_tensor(tensor).detach().float().flatten() for tensor in tensors])
    others = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(others, mine)
    for rank, other in enumerate(others):
        assert torch.equal(mine, other), (
            f"ranks differ, e.g. from rank {rank} by {(mine - other).abs().max()}"
        )


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return FP32 copies of all that a model's state dict has."""
    return {
        name.removeprefix("module."): whole(value).detach().float().clone()
        for name, value in model.state_dict().items()
    }


def end_of(model: Any) -> Tensor:
    """Close the session, and return all that the model's state dict had, as one vector."""
    end = torch.cat([value.flatten() for value in weights_of(model).values()])
    amp.get_session().close()
    return end


@contextmanager
def all_reduces(op: Any = None) -> Iterator[list[int]]:
    """Yield a list that gets the number of elements of each all-reduce, of an operation or of any."""
    sizes: list[int] = []
    original: Any = distributed.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if op is None or kwargs.get("op") == op:
            sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", counted)
        yield sizes
