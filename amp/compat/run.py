"""`python -m amp run`: a script that imports apex, unchanged."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from amp.compat.alias import install
from amp.errors import AmpValueError


def run(arguments: Sequence[str]) -> None:
    """Run a script or a module as `python` would, with `import apex` finding this library.

    Args:
        arguments: what `python` would be given: `script.py ...` or `-m package.module ...`.

    Raises:
        AmpValueError: there is nothing to run, or no such file.
    """
    given = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not given or given == ["-m"]:
        raise AmpValueError("nothing to run: give script.py or -m package.module, and its arguments")
    install()
    if given[0] == "-m":
        sys.argv = given[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
        return
    script = Path(given[0])
    if not script.exists():
        raise AmpValueError(f"there is no file '{script}'")
    sys.argv = given
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
