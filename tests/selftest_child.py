"""A process of `reamp selftest` with checks that fail in every way."""

import json
import os
import subprocess
import sys
import time

import torch

from amp.selftest import check_process
from amp.selftest.check_registry import Outcome, SkipError, check


@check("a figure")
def figure(device: torch.device) -> Outcome:
    print("not ours")
    return Outcome("3 GB/s", [torch.ones(3)])


@check("nothing")
def nothing(device: torch.device) -> None:
    pass


@check("a reason to skip")
def skipped(device: torch.device) -> None:
    raise SkipError("there is no GPU")


@check("wrong")
def wrong(device: torch.device) -> None:
    raise AssertionError("element 3 is 1.0 and not 2.0")


@check("slow")
def slow(device: torch.device) -> None:
    time.sleep(1000)


@check("dead")
def dead(device: torch.device) -> None:
    print("the last words", file=sys.stderr, flush=True)
    os._exit(7)


@check("leaves a child")
def leaves(device: torch.device) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=subprocess.DEVNULL)
    os.write(2, b"not \xff UTF-8\n")
    os._exit(3)


if __name__ == "__main__":
    check_process.main(sys.argv[1], json.loads(sys.argv[2]))
