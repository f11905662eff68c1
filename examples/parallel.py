"""How char_gpt.py runs on many processes: DDP, FSDP2, tensor parallelism, and FSDP2 around that.

    torchrun --nproc-per-node 2 examples/char_gpt.py --parallel fsdp2 --opt-level O5
    torchrun --nproc-per-node 4 examples/char_gpt.py --parallel fsdp2+tp --mesh 2x2

Ranks that see other data draw the same batch and take their part of it, so a run of any number of
ranks sees what one process sees.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import amp

KINDS = ("none", "ddp", "fsdp2", "tp", "fsdp2+tp")
KEPT = 2
"""How many checkpoints stay, the newest."""


class Parallel:
    """The processes of a run, and the part of each.

    Args:
        kind: one of `KINDS`.
        shape: the mesh, `RxC`: under `fsdp2+tp` data by tensor, under `fsdp2` copies by shards (HSDP).
        device: the type of the devices.

    Attributes:
        rank: the number of this process; 0 prints and draws.
        device: this process's own.
    """

    def __init__(self, kind: str, shape: str | None, device: str) -> None:
        self.kind = kind
        self.rank = int(os.environ.get("RANK", 0))
        self.device = device
        self._wrapped: Any = None
        self._data: DeviceMesh | None = None
        self._tensor: DeviceMesh | None = None
        if kind == "none":
            return
        if "RANK" not in os.environ:
            raise SystemExit(f"--parallel {kind}: start it by torchrun --nproc-per-node N")
        if device == "cuda":
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        join("nccl" if device == "cuda" else "gloo")
        size = distributed.get_world_size()
        sizes = [int(number) for number in shape.split("x")] if shape else [size]
        if kind == "fsdp2+tp" and not shape:
            sizes = [size // 2, 2]
        names = {"tp": ("tensor",), "fsdp2+tp": ("data", "tensor")}.get(kind, ("data",))
        if kind == "fsdp2" and len(sizes) == 2:
            names = "copies", "data"
        if len(names) != len(sizes):
            wanted = " by ".join(names)
            raise SystemExit(f"--mesh {shape}: {kind} takes {len(names)} dimensions, {wanted}")
        mesh = init_device_mesh(device, tuple(sizes), mesh_dim_names=names)
        self._tensor = mesh["tensor"] if "tensor" in names else None
        if kind != "tp":
            self._data = mesh["data"] if "tensor" in names else mesh

    def part_of(self, batches: Tensor) -> Tensor:
        """Return this rank's part of `[accumulate, batch_size, ...]`."""
        if self._data is None:
            return batches
        of = self._data.size()
        if batches.shape[1] % of:
            raise SystemExit(f"{of} ranks do not divide --batch-size {batches.shape[1]}")
        return batches.chunk(of, dim=1)[self._data_rank]

    @property
    def _data_rank(self) -> int:
        if self._data is None:
            return 0
        number = 0
        for at, size in zip(self._data.get_coordinate() or (), self._data.shape, strict=True):
            number = number * size + at
        return number

    def seed(self, seed: int, step: int) -> None:
        """Seed dropout: equally on ranks that share activations, and independently of earlier draws."""
        if self.kind != "none":
            torch.manual_seed((1_000_003 * seed + step) * 4099 + self._data_rank)

    def cut(self, model: Any) -> Any:
        """Cut the model, before its optimizer is made and amp sees it."""
        if self._tensor is not None:
            plan: dict[str, ParallelStyle] = {
                "query_key_value": ColwiseParallel(),
                "projection": RowwiseParallel(),
                "mlp.1": ColwiseParallel(),
                "mlp.3": RowwiseParallel(),
            }
            for block in model.blocks:
                parallelize_module(block, self._tensor, plan)
        if self.kind.startswith("fsdp2"):
            for block in model.blocks:
                fully_shard(block, mesh=self._data)
            fully_shard(model, mesh=self._data)
        return model

    def wrap(self, model: nn.Module) -> Any:
        """Return the model whose forward is called: DDP comes after amp."""
        self._wrapped = DistributedDataParallel(model) if self.kind == "ddp" else model
        return self._wrapped

    def reducing(self, reduces: bool) -> AbstractContextManager[Any]:
        """Reduce gradients in the backwards inside of a block, or leave that to a later one."""
        if reduces or self.kind in ("none", "tp"):
            return nullcontext()
        return self._wrapped.no_sync() if self.kind == "ddp" else not_reducing(self._wrapped)

    # Checkpoints: a folder for each, complete once torch has written its `.metadata`.

    def latest(self, path: Path) -> Path | None:
        """Return the newest whole checkpoint."""
        if self.kind == "none":
            return path if path.exists() else None
        whole = [folder for folder in path.glob("step-*") if (folder / ".metadata").exists()]
        return max(whole, key=lambda folder: int(folder.name.removeprefix("step-")), default=None)

    def save(self, path: Path, step: int, model: Any, optimizer: Any, rest: dict[str, Any]) -> None:
        """Write a checkpoint of all ranks; `rest` is plain values, equal on all of them."""
        folder = path / f"step-{step}"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed run has left of it
        distributed.barrier()
        weights, state = amp.get_state_dict(model, optimizer)
        whole = {"model": weights, "optimizer": state, "amp": amp.Stateful(), "rest": json.dumps(rest)}
        dcp.save(whole, checkpoint_id=folder)
        if self.rank == 0:
            older = sorted(path.glob("step-*"), key=lambda each: int(each.name.removeprefix("step-")))
            for each in older[:-KEPT]:
                shutil.rmtree(each)

    def load(self, folder: Path, model: Any, optimizer: Any) -> dict[str, Any]:
        """Go on from a checkpoint of any number of ranks, and return its `rest`."""
        weights, state = amp.get_state_dict(model, optimizer)
        whole = {"model": weights, "optimizer": state, "amp": amp.Stateful(), "rest": ""}
        dcp.load(whole, checkpoint_id=folder)
        amp.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return json.loads(whole["rest"])  # type: ignore[arg-type, no-any-return]

    def leave(self) -> None:
        """Let the other processes go."""
        if self.kind != "none":
            distributed.barrier()
            distributed.destroy_process_group()


def join(backend: str) -> None:
    """Find the other processes. After a restart torchrun's store still knows the ports of the dead."""
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = distributed.TCPStore(address, port, size, hosts, timeout=timedelta(minutes=5))
    lives = distributed.PrefixStore(f"life {life}", store)
    distributed.init_process_group(backend, store=lives, rank=rank, world_size=size)


@contextmanager
def not_reducing(model: Any) -> Any:
    """Do as DDP's `no_sync` does, for a model of FSDP2."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
