"""Several processes that stay up between tests: `@ranks(2)`, or `world(2).run(check, *arguments)`.

They talk by gloo, and by NCCL too where each has a GPU, which is torch's default device there then.

Each process imports the function by its name and calls it with its rank first. A test fails with the
tracebacks of all ranks that raised. After a failure the processes are ended, and the next test gets
new ones.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import chain
from typing import Any, TextIO

import pytest
import torch
from torch import distributed

from tests.processes import ROOT, Forked

TIMEOUT = timedelta(seconds=20)
"""After which a rank gives up waiting for another."""
PATIENCE = 3
"""Seconds to wait for the others after one has failed."""


class World:
    """Processes with one process group, the default one."""

    def __init__(self, size: int, backend: str) -> None:
        self.size, self.backend = size, backend
        self._parent: Forked | None = None
        self._ranks: list[tuple[TextIO, TextIO]] = []
        """For each rank, what takes its tasks and what has its answers."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function(rank, *arguments)` in each process; arguments go there as JSON.

        Raises:
            AssertionError: on some rank it raised, or the process has ended.
        """
        if self._parent is None:
            self._start()
        for tasks, _ in self._ranks:
            print(
                json.dumps([function.__module__, function.__qualname__, *arguments]),
                file=tasks,
                flush=True,
            )
        failures: list[str] = []
        waiting = {answers: rank for rank, (_, answers) in enumerate(self._ranks)}
        while waiting:
            # Those that wait for a rank that has failed are not waited for long.
            ready, _, _ = select.select([*waiting], [], [], PATIENCE if failures else None)
            for answers in ready:
                rank, answer = waiting.pop(answers), answers.readline()
                if answer != '""\n':
                    why = json.loads(answer) if answer else "the process has ended"
                    failures.append(f"rank {rank}: {why}")
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} did not answer")
                break
        if failures:
            self.end()
            raise AssertionError("\n".join(failures))

    def end(self) -> None:
        """End the processes."""
        if self._parent is not None:
            os.killpg(self._parent.pid, signal.SIGKILL)
            self._parent.wait()
        for files in self._ranks:
            for file in files:
                file.close()
        self._parent, self._ranks = None, []

    def _start(self) -> None:
        tasks, answers = [[os.pipe() for _ in range(self.size)] for _ in range(2)]
        theirs = [[read, write] for (read, _), (_, write) in zip(tasks, answers, strict=True)]
        self._parent = Forked(
            [sys.executable, "-m", "tests.distributed.world", self.backend, json.dumps(theirs)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            pass_fds=[*chain.from_iterable(theirs)],
            start_new_session=True,
            warns=False,
        )
        self._ranks = [
            (os.fdopen(write, "w"), os.fdopen(read))
            for (_, write), (read, _) in zip(tasks, answers, strict=True)
        ]
        for descriptor in chain.from_iterable(theirs):
            os.close(descriptor)


class Backend:
    """What the processes of a test talk by: the fixture `backend` sets it."""

    name = "gloo"


def world(size: int) -> World:
    """Return the processes of a size, which are started for the first test that runs there."""
    if Backend.name == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL needs a GPU for each of the {size} processes")
    return _world(size, Backend.name)


def ranks(size: int | Mapping[str, int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of a function: it runs on each rank, with the test's arguments after the rank.

    Args:
        size: the number of ranks, or what has it for the first argument.
    """

    def decorate(check: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(check)
        _, *parameters = signature.parameters.values()

        def test(**arguments: Any) -> None:
            values = [arguments[parameter.name] for parameter in parameters]
            world(size if isinstance(size, int) else size[values[0]]).run(test, *values)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(check, name))
        of_pytest = {"__signature__": signature.replace(parameters=parameters)}
        vars(test).update(vars(check), **of_pytest, on_rank=check, size=size)
        return test

    return decorate


@functools.cache
def _world(size: int, backend: str) -> World:
    made = World(size, backend)
    atexit.register(made.end)
    return made


def _serve(backend: str, file: str, rank: int, size: int, tasks: int, answers: int) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    with os.fdopen(tasks) as tasks_file, os.fdopen(answers, "w") as answers_file:
        for line in tasks_file:
            module, name, *arguments = json.loads(line)
            answer = ""
            try:
                function = getattr(importlib.import_module(module), name)
                _call(getattr(function, "on_rank", function), rank, arguments)
            except BaseException:
                answer = traceback.format_exc()
            print(json.dumps(answer), file=answers_file, flush=True)


def _call(function: Callable[..., Any], rank: int, arguments: list[Any]) -> None:
    import amp
    from amp.frontend import _Default

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(rank, *arguments)
        finally:
            if _Default.session is not None:
                amp.get_session().close()
            _Default.session = _Default.waiting_state = None


def main(backend: str, descriptors: list[list[int]]) -> None:
    """Import once what all ranks need, and become their parent."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import amp  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, own in enumerate(descriptors):
            arguments = (backend, f"{folder}/store", rank, len(descriptors), *own)
            processes.append(multiprocessing.get_context("fork").Process(target=_serve, args=arguments))
            processes[-1].start()
        for descriptor in chain.from_iterable(descriptors):
            os.close(descriptor)
        for process in processes:
            process.join()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
