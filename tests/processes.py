"""Python programs in processes of their own, without the seconds that each would take to import torch.

A server imports torch, and a program runs in a fork of it. What reads the environment while torch is
imported, or asks what importing does, needs `subprocess` itself.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Server:
    """A process that has imported torch."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.processes"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *program: Any) -> int:
        """Run what `_become` takes in a fork, and return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(program), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@functools.cache
def _server() -> Server:
    return Server()


def run_python(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Do what `python *arguments` does in the repository: `-c code`, `-m module` or a file's name."""
    arguments = tuple(map(str, arguments))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        status = _server().run(arguments, environment, *map(str, files))
        return subprocess.CompletedProcess(arguments, status, *[file.read_text() for file in files])


def _become(arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Be another Python program from here to the end of the process."""
    for descriptor, file in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    option, *rest = arguments
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(option, run_name="__main__")


def _serve() -> None:
    import torch._dynamo  # noqa: F401  # the first optimizer imports it

    gc.freeze()  # collectors in forks need not look at what torch has made
    for line in sys.stdin:
        # A `Process` ends without the second in which Python takes torch apart.
        process = multiprocessing.get_context("fork").Process(target=_become, args=json.loads(line))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    _serve()
