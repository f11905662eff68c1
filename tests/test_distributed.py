"""Two processes train one model as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import run_python


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.slow
def test_ddp_keeps_ranks_equal_and_accumulates_exactly(tmp_path: Path) -> None:
    finished = run_python("-m", "tests.ddp", tmp_path / "store")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "passed\n" * 2
