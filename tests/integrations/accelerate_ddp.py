"""Two ranks under Accelerate's DDP: `python -m tests.integrations.accelerate_ddp FOLDER`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from amp.errors import AmpRuntimeError
from amp.integrations.accelerate import end, prepare
from tests.integrations.comparing import on_two_ranks
from tests.integrations.test_accelerate import Script, net

warnings.simplefilter("ignore")


def main(rank: int, folder: Path) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    results = {}
    for level in ("FP32", "O1", "O2", "O5"):
        script = Script(None if level == "FP32" else level)
        results[level] = script.epoch().values()
        if level != "FP32":
            script.accelerator.save_state(str(folder / level))
            results[f"{level} straight"] = script.epoch().values()
            again = Script(level)
            again.accelerator.load_state(str(folder / level))
            results[f"{level} resumed"] = again.epoch().values()
            end(script.accelerator)
            end(again.accelerator)
        AcceleratorState._reset_state()
    torch.save(results, folder / f"{rank}.pt")
    script = Script(None)
    with pytest.raises(AmpRuntimeError, match="instead of accelerator.prepare"):
        prepare(script.accelerator, script.model, script.optimizer, opt_level="O2")
    assert prepare(script.accelerator, net(), opt_level="O1")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    on_two_ranks(main, Path(sys.argv[1]))
