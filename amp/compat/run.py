"""`python -m amp run`: running an unmodified script that imports apex."""

import builtins
import functools
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from amp.compat.alias import install
from amp.errors import AmpValueError

_STANDIN = Path(__file__).with_name("standin")
"""The folder in which processes that a script spawns find apex."""

_LAUNCHERS = {"torchrun": "... -m ", "python": "-m ", "python3": "-m "}
"""Programs that users put before the script, and what they take before `amp run`."""

_run_module: Callable[..., object] = vars(runpy)["_run_module_as_main"]
"""The function that `python` itself calls, for `-m` and for a folder."""


def runner(arguments: Sequence[str]) -> Callable[[], object]:
    """Return a function that runs a script or module like `python`, with `import apex` finding amp.

    It runs in this process, as its `__main__`, so that exit codes and signals are the script's own.

    Args:
        arguments: the arguments of `python`: `script.py ...` or `-m package.module ...`.

    Raises:
        AmpValueError: there is nothing to run, or no such file. Nothing is changed.
        OSError: the file cannot be read.
    """
    given = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not given or given == ["-m"]:
        raise AmpValueError("nothing to run: give script.py or -m package.module, and its arguments")
    if given[0] == "-m":
        module = functools.partial(_run_module, given[1])
        return functools.partial(_start, module, ["-m", *given[2:]], Path.cwd())
    script = Path(given[0]).absolute()  # a script may change the folder
    if not script.exists():
        hint = ""
        if given[0].startswith("-"):
            hint = f"; options of the script come after it: reamp run script.py {given[0]}"
        elif given[0] in _LAUNCHERS:
            hint = f"; the launcher comes first: {given[0]} {_LAUNCHERS[given[0]]}amp run script.py"
        raise AmpValueError(f"there is no file '{given[0]}'{hint}")
    if pkgutil.get_importer(str(script)) is not None:  # a folder or a zip file with a __main__.py
        folder = functools.partial(_run_module, "__main__", alter_argv=False)
        return functools.partial(_start, folder, given, script)
    with io.open_code(str(script)) as file:
        run = functools.partial(_run_script, script, file.read())
    return functools.partial(_start, run, given, script.resolve().parent)


def _start(run: Callable[[], object], argv: list[str], folder: Path) -> object:
    install(replace=True)  # the user of this command asks for it
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = os.fspath(folder)
    sys.path.insert(1, str(_STANDIN))
    # It is not removed afterwards: exit functions and threads of the script may pickle its objects.
    sys.modules["__main__"] = main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    try:
        return run()
    except BaseException as error:
        _show_without_own_frames(error)
        raise


def _run_script(script: Path, content: bytes) -> None:
    path, main = str(script), vars(sys.modules["__main__"])
    main.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    code = pkgutil.read_code(io.BytesIO(content))  # of a .pyc file; else None
    exec(code or compile(content, path, "exec", dont_inherit=True), main)


def _show_without_own_frames(error: BaseException) -> None:
    """Make the traceback of an error that ends the script begin in the script."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    show = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            value, traceback = error.with_traceback(inner), inner
        show(kind, value, traceback)

    sys.excepthook = hook
