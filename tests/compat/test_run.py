"""`python -m amp run` is `python`, but for what `import apex` finds."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

SHOWN = """
import json, os, sys, __main__
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "environment": dict(os.environ), "stdin": sys.stdin.read(),
    "file": __file__, "name": __name__, "package": __package__, "is main": vars(__main__) is globals(),
    "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
}))
"""

NAMES = """
import atexit, pickle
class Saved: pass
atexit.register(lambda: print(len(pickle.dumps(Saved())) > 0))
"""

ENDS = {
    "an exit code": "import sys; sys.exit(3)",
    "an exit text": "import sys; sys.exit('no data')",
    "an error": "def f():\n    raise ValueError('x')\nf()",
    "an error of reading": "raise OSError('x')",  # which the commands answer themselves
    "no Python": "def f(:",
    "an error after chdir": "import os; os.chdir('/'); raise ValueError('x')",
    "its own hook": "import sys; sys.excepthook = lambda *e: print(e[0].__name__); 1 / 0",
    "an interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "a termination": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "names at the exit": NAMES,
}


FORKS = """
import gc, json, os, sys
import amp.cli, torch._dynamo
gc.freeze()
for number, command in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if not pid:
        for stream, file in enumerate(("stdin", f"{number}-1", f"{number}-2")):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), stream)
        sys.exit(amp.cli.main(command))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""`reamp`, for several command lines: what these raise ends Python, which has imported torch once."""


def check_they_are_python(folder: Path, commands: list[list[str]]) -> None:
    """Run each by `python` and by `python -m amp run`, and compare what can be seen of them."""
    (folder / "stdin").write_text("lines\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = json.dumps([["run", *command] for command in commands])
    python = functools.partial(
        subprocess.run, text=True, capture_output=True, cwd=folder, env=environment, check=False
    )
    forks = python([sys.executable, "-c", FORKS, runs])
    assert forks.returncode == 0, forks.stderr
    for number, status in enumerate(forks.stdout.split()):
        plain = python([sys.executable, *commands[number]], input="lines\n")
        texts = [(folder / f"{number}-{stream}").read_text() for stream in (1, 2)]
        found = (int(status), *map(without_standin, texts))
        assert found == (plain.returncode, plain.stdout, plain.stderr), commands[number]
    assert number == len(commands) - 1


def without_standin(text: str) -> str:
    """Leave out where a child of the script finds apex."""
    return re.sub(r'"[^"]*standin", ', "", text)


@pytest.mark.slow
def test_a_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    for name in ("train.py", "project/train.py", "project/__main__.py", "project/__init__.py"):
        (tmp_path / name).write_text("" if "init" in name else SHOWN)
    scripts = (["train.py"], ["project/train.py"], ["-m", "project.train"], ["-m", "project"])
    check_they_are_python(tmp_path, [[*script, "--lr", "1"] for script in (*scripts, ["project"])])


@pytest.mark.slow
def test_a_script_ends_as_under_python(tmp_path: Path) -> None:
    """By the same exit code or signal, and the same text."""
    names = [f"{end.replace(' ', '_')}.py" for end in ENDS]
    for name, text in zip(names, ENDS.values(), strict=True):
        (tmp_path / name).write_text(text)
    modules = [["-m", "an_error"], ["-m", "nowhere"]]
    check_they_are_python(tmp_path, [*([name] for name in names), *modules])


def run(script: Path, text: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "amp", "run", "train.py", "--lr", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=script.parent,
        text=True,
        capture_output=True,
        check=False,
    )


def test_a_traceback_begins_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    ended = run(script, "import os, sys\nos.chdir('/')\nprint(sys.argv)\nraise ValueError('x')")
    assert (ended.returncode, ended.stdout) == (1, "['train.py', '--lr', '1']\n")
    assert ended.stderr.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
        "    raise ValueError('x')",
        "ValueError: x",
    ]
