"""Two ranks under Accelerate's DDP: `python -m tests.integrations.accelerate_ddp FOLDER`."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from amp.errors import AmpRuntimeError
from amp.integrations.accelerate import end, prepare
from tests.integrations.test_accelerate import Script, net

warnings.simplefilter("ignore")


def main(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(i, Path(sys.argv[1]), port)) for i in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))
