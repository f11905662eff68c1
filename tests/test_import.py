"""Importing amp is cheap and quiet."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import amp as _amp
from amp.lazy import kernels
from tests.processes import ROOT, run_python

amp: Any = _amp


def run(code: str) -> str:
    return run_python("-c", code).stdout.strip()


def loaded_by(*lines: str) -> list[set[str]]:
    """Return what each line has imported besides torch, in a process that nothing has prepared."""
    code = "import torch, sys; had = set(sys.modules)\n"
    code += "".join(f"{line}; print(*set(sys.modules) - had)\n" for line in lines)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in ended.stdout.splitlines()]


def test_a_kernel_module_that_is_not_there_is_a_missing_attribute() -> None:
    assert not hasattr(kernels, "nothing")
    assert [moment.name for moment in kernels.adam.ADAM.moments] == ["exp_avg", "exp_avg_sq"]


def test_import_loads_next_to_nothing_and_initialize_no_kernel() -> None:
    first, later = loaded_by("import amp", "amp.initialize")
    assert {x for x in first if x.startswith("amp")} == {"amp", "amp.observer_makers"}
    assert not {x.partition(".")[0] for x in first} & {"triton", "yaml", "numpy"}
    assert "amp.session" in later
    assert not {"triton", "amp.optimizers.fused"} & later


def test_everything_public_is_importable() -> None:
    code = "from amp import *; print(scalars.__name__, initialize.__name__); import amp"
    code += "; print(all(hasattr(amp, name) for name in amp.__all__))"
    assert run(code).split() == [*("scalars", "initialize", "True")]


def test_type_checkers_are_told_of_the_same_names() -> None:
    stub = ast.parse((ROOT / "amp" / "__init__.pyi").read_text())
    homes = {
        alias.name: node.module.removeprefix("amp.")
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert homes == amp._HOMES
    (exported,) = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(exported)) == amp.__all__
    assert sorted(amp.__all__) == amp.__all__


def test_classes_of_results_are_importable_by_their_public_names() -> None:
    code = "import amp; from amp.diagnosis import *; from amp.trials import *; "
    code += "print({*amp.diagnosis.__all__, *amp.trials.__all__} - set(globals()))"
    assert run(code) == "set()"


def test_packages_are_imported_when_they_are_asked_for() -> None:
    code = "import amp, sys; print('amp.numerics' in sys.modules)"
    code += "; print(amp.numerics.describe('fp16').max)"
    assert run(code).split() == [*("False", "65504.0")]
    code = "import amp; print(amp.optimizers.FusedAdam.__name__, amp.fp16_utils.tofp16.__name__)"
    assert run(f"{code}; print(hasattr(amp, 'nothing'), callable(amp.compat.install))").split() == [
        *("FusedAdam", "tofp16", "False", "True")
    ]
