"""Imports run one way, down the layers that docs/architecture.md draws."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

from tests.processes import run_python

ROOT = Path(__file__).parents[1]

LAYERS: dict[str, tuple[str, ...]] = {
    "commands": ("__init__", "__main__", "cli"),
    "integrations": ("integrations",),
    "tools": ("about", "diagnosis", "numerics", "scalar_log", "selftest", "terminal", "trials"),
    "public API": ("frontend", "grad_scaler", "compat", "fp16_utils"),
    "session": (
        "session",
        "setup",
        "arguments",
        "moving_tensors",
        "checkpoint",
        "dcp",
    ),
    "training": ("training", "masters", "optimizers"),
    "casting": ("casting",),
    "profiles": ("profiles",),
    "kernels": ("kernels", "lazy"),
    "base": (
        *("active", "observers", "observer_makers"),
        "errors",
        "other_names",
        "dtypes",
        "distributed",
        "names",
        "patching",
        "shared_memory",
        "state_checks",
        "torch_versions",
        "undo",
        "atomic_save",
        "own_tensors",
    ),
}
"""From top to bottom: packages and modules of amp. Each imports what is in its layer or below it."""

DEPTHS = {name: depth for depth, names in enumerate(LAYERS.values()) for name in names}


def name_of(path: Path) -> str:
    """Return the name of a module inside amp, such as `training.scaler`."""
    parts = (
        path.relative_to(ROOT if path.parent.name == "kernels" else ROOT / "amp").with_suffix("").parts
    )
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = [*(ROOT / "amp").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
MODULES = {name_of(path): path for path in sorted(FILES)}


def imports_of(name: str, is_run: bool = False) -> Iterator[str]:
    """Yield what a module imports, at any depth in it; modules of amp without the `amp.`.

    Args:
        name: of the module.
        is_run: leave out what only type checkers import.
    """
    tree = ast.parse(MODULES[name].read_text())
    for node in ast.walk(tree):
        if is_run and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("amp.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            module = (node.module or "").removeprefix("amp").removeprefix(".")
            inside = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names}
            yield from inside & MODULES.keys() or {node.module if module == "" else module}  # type: ignore[misc]


def test_every_module_is_in_exactly_one_layer() -> None:
    named = [name for names in LAYERS.values() for name in names]
    assert len(named) == len(set(named))
    assert {name.partition(".")[0] for name in MODULES} == set(named)


def test_every_module_imports_only_from_its_own_layer_or_below() -> None:
    tops = {(name, module): module.partition(".")[0] for name in MODULES for module in imports_of(name)}
    upwards = {
        f"{name}: {module}"
        for (name, module), top in tops.items()
        if DEPTHS.get(top, len(LAYERS)) < DEPTHS[name.partition(".")[0]]
    }
    assert not upwards


def test_the_core_imports_no_tool() -> None:
    """Neither at the top of a file, nor in a function or for type checkers."""
    core = [layer for layer in LAYERS if DEPTHS[LAYERS[layer][0]] > DEPTHS["diagnosis"]]
    assert core == ["public API", "session", "training", "casting", "profiles", "kernels", "base"]
    names = [name for name in MODULES if name.partition(".")[0] in chain(*(LAYERS[x] for x in core))]
    found = {(name, x) for name in names for x in imports_of(name) if _is_of_a_tool(x)}
    assert not found


def _is_of_a_tool(module: str) -> bool:
    return module.partition(".")[0] in LAYERS["tools"]


def test_a_training_loads_no_tool() -> None:
    code = """
import sys, torch, amp
for level in ("O1", "O2", "O5"):
    model = torch.nn.Linear(8, 8)
    optimizer = amp.optimizers.FusedAdam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    with amp.scale_loss(model(torch.ones(1, 8)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    amp.load_state_dict(amp.state_dict())
    amp.get_session().close()
print(*sys.modules)
"""
    loaded = run_python("-c", code).stdout.split()
    assert "amp.session" in loaded
    assert not [x for x in loaded if x.startswith("amp.") and _is_of_a_tool(x.removeprefix("amp."))]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: [module for module in imports_of(name, is_run=True) if module in MODULES]
        for name in MODULES
        if name != "__init__"
    }
    TopologicalSorter(graph).prepare()


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", "kernels", *sys.stdlib_module_names}
    for name in MODULES:
        if name.startswith("kernels."):
            assert {module.partition(".")[0] for module in imports_of(name)} <= allowed, name


def test_every_module_says_in_one_line_what_is_in_it() -> None:
    for path in set(FILES) - set((ROOT / "amp" / "compat" / "standin").rglob("*.py")):
        summary, _, rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")
        assert summary.endswith((".", "?")), path
        assert not rest or rest.startswith("\n"), path


def test_no_two_files_and_no_two_public_classes_have_one_name() -> None:
    """Except a formula and its optimizer, and what apex and the frameworks call alike."""
    kernels = {path.name for path in (ROOT / "kernels").glob("*.py")}
    shared = kernels & {path.name for path in (ROOT / "amp" / "optimizers").glob("*.py")}
    files = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name for name, count in files.items() if count > 1} <= shared | {"state_dicts.py"}
    nodes = (node for path in FILES for node in ast.parse(path.read_text()).body)
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = {name for name, count in classes.items() if count > 1 and not name.startswith("_")}
    assert twice <= {"LossScaler", "AmpPrecision"}


def test_the_page_names_no_file_that_is_not_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:amp|kernels|configs|tests)/[\w./]+)`", page))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_packages_have_no_top_level_names_of_their_own() -> None:
    for name in ("kernels", "configs"):
        assert not (ROOT / name / "__init__.py").exists()
        link = ROOT / "amp" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
