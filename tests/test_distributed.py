"""Two processes train one model as one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from amp.distributed import check_placements, groups_of_shards
from tests.processes import run_python


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ddp_keeps_ranks_equal_and_accumulates_exactly(tmp_path: Path) -> None:
    finished = run_python("-m", "tests.ddp", tmp_path / "store")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "passed\n" * 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_what_would_train_nothing_is_refused() -> None:
    """Models that were wrapped too late, weights in shards that are to be cast, masters in ZeRO."""
    finished = run_python("-m", "tests.wrapped")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "passed\n"


def test_every_placement_that_is_no_copy_makes_ranks_agree() -> None:
    """FSDP over tensor parallelism cuts with a `_StridedShard`, which calls itself no shard."""

    class Placement:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def is_replicate(self) -> bool:
            return self.kind == "replicate"

        def is_shard(self) -> bool:
            return self.kind == "shard"

        def is_partial(self) -> bool:
            return self.kind == "partial"

    class Mesh:
        def get_group(self, dim: int) -> str:
            return f"group {dim}"

    class Sharded:
        device_mesh = Mesh()
        shape = (3,)

        def __init__(self, *kinds: str) -> None:
            self.placements = [Placement(kind) for kind in kinds]

    cut = ("strided shard", "shard", "replicate")
    tensors: list[Any] = [torch.ones(3), Sharded(*cut), Sharded(*cut)]
    assert groups_of_shards(tensors) == ["group 0", "group 1"]
    check_placements(tensors[0])
    check_placements(tensors[1])
    partial: Any = Sharded("partial")
    with pytest.raises(
        RuntimeError, match=r"gradient of shape \(3,\) has the placement .* Redistribute"
    ):
        check_placements(partial)
