"""Two processes train one model as one process would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ddp_keeps_ranks_equal_and_accumulates_exactly(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ddp", str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert out.strip() == "passed"
    finally:
        for process in ranks:
            process.kill()
