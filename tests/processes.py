"""Python programs in processes of their own, without the seconds that each would take to import torch.

A server imports torch, and a program runs in a fork of it. What reads the environment while torch is
imported, or asks what importing does, needs `subprocess` itself.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Server:
    """A process that has imported torch."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.processes", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, program: dict[str, Any], descriptors: list[int]) -> None:
        """Run what `_become` takes in a fork, which gets copies of open files."""
        message = json.dumps(program).encode()
        socket.send_fds(self.socket, [len(message).to_bytes(8, "big")], descriptors)
        self.socket.sendall(message)

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


@functools.cache
def _server() -> Server:
    made = Server()
    atexit.register(made.end)
    return made


class Forked:
    """A program in a fork of the server, as a `subprocess.Popen` of `python ...` has it.

    It is like a new process but for what Python reads before it begins, such as `PYTHONHASHSEED`.
    """

    def __init__(
        self,
        arguments: Iterable[Any],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Iterable[int] = (),
        start_new_session: bool = False,
        warns: bool = True,
    ) -> None:
        _, *words = map(str, arguments)
        reading, writing = os.pipe()
        with Path(os.devnull).open("r+") as nothing:
            own = [nothing if each == subprocess.DEVNULL else each for each in (stdin, stdout, stderr)]
            files = {
                place: place if each is None else each if isinstance(each, int) else each.fileno()
                for place, each in enumerate(own)
            }
            files |= {each: each for each in pass_fds}
            program = {
                "arguments": words,
                "environment": dict(os.environ if env is None else env),
                "cwd": str(cwd or Path.cwd()),
                "places": [*files],
                "is_leader": start_new_session,
                "warns": warns,
            }
            _server().start(program, [writing, *files.values()])
        os.close(writing)
        self._said = os.fdopen(reading)
        self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and connection.wait([self._said.fileno()], 0):
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            with self._said:
                self.returncode = int(self._said.readline() or -signal.SIGKILL)  # the server has ended
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_python(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Do what `python *arguments` does in the repository: `-c code`, `-m module` or a file's name."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryFile("r+") as stdout, tempfile.TemporaryFile("r+") as stderr:
        files: dict[str, Any] = {"stdout": stdout, "stderr": stderr}
        forked = Forked([sys.executable, *arguments], env=environment, cwd=ROOT, warns=False, **files)
        status = forked.wait()
        for file in files.values():
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, stdout.read(), stderr.read())


def _become(program: dict[str, Any], descriptors: list[int]) -> None:
    """Be another Python program from here to the end of the process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if program["is_leader"]:
        os.setsid()
    os.write(descriptors[0], f"{os.getpid()}\n".encode())
    above = max(program["places"]) + 1
    files = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors[1:]]
    for each in descriptors:
        os.close(each)
    for file, place in zip(files, program["places"], strict=True):
        os.dup2(file, place)
        os.close(file)
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["environment"])
    tempfile.tempdir = None
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # a `Process` has closed it
    if program["warns"]:
        sys.warnoptions.clear()
        warnings.resetwarnings()
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    option, *rest = program["arguments"]
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        sys.path.insert(0, str(Path(option).resolve().parent))
        runpy.run_path(option, run_name="__main__")


def _serve(requests: socket.socket) -> None:
    import torch._dynamo  # noqa: F401  # the first optimizer imports it

    gc.freeze()  # collectors in forks need not look at what torch has made
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: list[tuple[Any, int]] = []
    while True:
        ready = connection.wait([requests, ended])
        if ended in ready:
            os.read(ended, 1024)
            for each in [each for each in running if each[0].exitcode is not None]:
                running.remove(each)
                os.write(each[1], f"{each[0].exitcode}\n".encode())
                os.close(each[1])
        if requests in ready:
            size, descriptors, _, _ = socket.recv_fds(requests, 8, 64)
            if not size:
                return
            program = json.loads(requests.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
            # A `Process` ends without the second in which Python takes torch apart.
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=_become, args=(program, descriptors))
            process.start()
            running.append((process, descriptors[0]))
            for descriptor in descriptors[1:]:
                os.close(descriptor)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
