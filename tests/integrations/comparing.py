"""What the tests of all frameworks share: levels, runs that are compared with FP32, and two ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.levels import DYNAMIC, LEVELS
from tests.processes import run_python

TOLERANCES = {"O0": 0.0, "O1": 2e-3, "O2": 2e-3, "O3": 2e-2, "O4": 2e-2, "O5": 2e-2}
"""How far weights may be from FP32's after some steps, of which each moves them by about 0.05."""


def levels(*quick: str) -> list[Any]:
    """Return all levels, of which those that are not named are marked slow."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in LEVELS]


def options_for(level: str, **more: Any) -> dict[str, Any]:
    """Return arguments of `initialize`: a dynamic scale at which no gradient of a test overflows."""
    return {"verbosity": 0, **({"loss_scale": {"init": 1024}} if level in DYNAMIC else {}), **more}


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def gap(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """Return the largest difference of two lists of tensors."""
    return max((x - y).abs().max().item() for x, y in zip(some, others, strict=True))


def same_bits(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(some, others, strict=True))


def results_of_two_ranks(module: str, folder: Path, *arguments: Any) -> dict[Any, list[Tensor]]:
    """Run a module that calls `on_two_ranks`; return what either rank has saved in `folder`."""
    done = run_python("-m", module, folder, *arguments)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    for key, found in first.items():
        assert same_bits(found, second[key]), f"{key}: the ranks differ"
    return first  # type: ignore[no-any-return]


def on_two_ranks(main: Callable[..., None], *arguments: Any) -> None:
    """Call `main(rank, *arguments)` in two processes that know of each other, and end this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start: Any = torch.multiprocessing.get_context("fork").Process
    ranks = [start(target=_be_rank, args=(rank, port, main, arguments)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


def _be_rank(rank: int, port: int, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    torch.set_num_threads(1)
    main(rank, *arguments)
