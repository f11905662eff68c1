"""`python -m amp run`: a script that imports apex, unchanged."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from amp.compat.alias import install
from amp.errors import AmpValueError

_STANDIN = Path(__file__).with_name("standin")
"""Where the processes that a script spawns find apex."""


def runner(arguments: Sequence[str]) -> Callable[[], object]:
    """Return what runs a script or a module as `python` would, with `import apex` finding this library.

    Args:
        arguments: what `python` would be given: `script.py ...` or `-m package.module ...`.

    Raises:
        AmpValueError: there is nothing to run, or no such file. Nothing has been changed then.
    """
    given = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not given or given == ["-m"]:
        raise AmpValueError("nothing to run: give script.py or -m package.module, and its arguments")
    if given[0] == "-m":
        module = functools.partial(runpy.run_module, given[1], run_name="__main__", alter_sys=True)
        return functools.partial(_start, module, given[1:], Path.cwd())
    script = Path(given[0])
    if not script.exists():
        raise AmpValueError(f"there is no file '{script}'")
    run = functools.partial(runpy.run_path, str(script), run_name="__main__")
    return functools.partial(_start, run, given, script.resolve().parent)


def _start(run: Callable[[], object], argv: list[str], folder: Path) -> object:
    install(replace=True)  # whoever types this asks for it
    sys.argv = argv
    sys.path[0] = str(folder)
    sys.path.insert(1, str(_STANDIN))
    return run()
