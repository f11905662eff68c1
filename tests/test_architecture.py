"""Imports run one way, down the layers that docs/architecture.md draws."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

LAYERS: dict[str, tuple[str, ...]] = {
    "commands": ("__init__", "__main__", "cli"),
    "integrations": ("integrations",),
    "public API": (
        "frontend",
        "grad_scaler",
        "compat",
        "fp16_utils",
        "numerics",
        "scalar_log",
        "trials",
        "about",
        "selftest",
    ),
    "session": (
        "session",
        "setup",
        "overflow_log",
        "arguments",
        "checkpoint",
        "dcp",
        "diagnosis",
    ),
    "training": ("training", "masters", "optimizers"),
    "casting": ("casting",),
    "profiles": ("profiles",),
    "kernels": ("kernels", "lazy"),
    "base": (
        *("active", "interrupts", "observers"),
        "errors",
        "dtypes",
        "distributed",
        "patching",
        "shared_memory",
        "state_checks",
        "torch_versions",
        "undo",
        *("outputs", "saving"),
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
