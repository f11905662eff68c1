"""Imports run one way, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "hostcopy", "kernels.compiling", "kernels.language", "kernels.scale_state"),
    ("kernels.bulk",),
    ("dtypes", "distributed", "kernels.backend"),
    ("rules", "patching", "yamlfile", "kernels.tables"),
    ("properties", "regions", "kernels.native"),
    ("kernels.nativestep",),
    ("kernels.unscale", "kernels.master_copy", "kernels.split", "kernels.update_scale"),
    ("kernels.axpby", "kernels.l2norm"),
    ("kernels.plainstep",),
    ("kernels.stepping",),
    ("kernels.adagrad", "kernels.adam", "kernels.lion", "kernels.sgd", "scaledgrads"),
    ("kernels.lamb", "kernels.novograd"),
    ("optimizers.launches",),
    ("optimizers.fused",),
    (
        *("optimizers.adagrad", "optimizers.adam", "optimizers.lamb"),
        *("optimizers.lion", "optimizers.novograd", "optimizers.sgd"),
    ),
    ("optimizers",),
    ("profiles", "scaler", "masters"),
    ("policy",),
    ("opcast", "modelcast", "checkpoint"),
    ("registry", "modulerules", "binding"),
    ("numerics.formats",),
    ("numerics.rounding",),
    ("numerics.scaling", "numerics.memory"),
    ("session", "grad_scaler"),
    ("numerics.text",),
    ("numerics.crises", "numerics.watching"),
    ("numerics.plots", "numerics.lab"),
    ("numerics.commands",),
    ("numerics",),
    ("fp16_utils.groups", "fp16_utils.loss_scaler", "fp16_utils.util"),
    ("fp16_utils.optimizer",),
    ("fp16_utils",),
    (
        *("frontend", "compat.normalization", "compat.parallel", "compat.alias", "compat.amp_c"),
        *("compat.optimizers", "compat.lists.tables", "compat.apex_c"),
    ),
    (
        *("compat.state", "compat.run", "compat.lists.functional_overrides"),
        *("compat.lists.tensor_overrides", "compat.lists.torch_overrides"),
    ),
    ("compat.lists",),
    ("compat.handle",),
    ("compat.apex_amp",),
    ("compat",),
    ("cli",),
    ("__init__",),
    ("__main__",),
)
LAYER_OF = {name: depth for depth, names in enumerate(LAYERS) for name in names}
FOLDERS = {
    "amp": "",
    "amp/compat": "compat.",
    "amp/compat/lists": "compat.lists.",
    "amp/optimizers": "optimizers.",
    "amp/fp16_utils": "fp16_utils.",
    "amp/numerics": "numerics.",
    "kernels": "kernels.",
}
SOURCES = {
    (prefix + path.stem).removesuffix(".__init__"): path
    for folder, prefix in FOLDERS.items()
    for path in sorted((ROOT / folder).glob("*.py"))
}


def imported(path: Path) -> set[str]:
    """Return the top modules of amp and the packages that a file imports, at any depth in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {name for name in inside if name.removeprefix("amp.") in LAYER_OF}
            names |= inside if node.module == "amp" else known or {node.module}
    return names


@pytest.mark.parametrize("name", SOURCES)
def test_every_module_imports_only_what_lies_below_it(name: str) -> None:
    for module in imported(SOURCES[name]):
        if module.startswith("amp."):
            below = module.removeprefix("amp.")
            assert LAYER_OF[below] < LAYER_OF[name], f"{name} imports {below}"


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", "amp", *sys.stdlib_module_names}
    for path in (ROOT / "kernels").glob("*.py"):
        for module in imported(path):
            top = module.split(".")[0]
            assert top in allowed, f"{path.name} imports {module}"
            assert top != "amp" or module.startswith("amp.kernels"), f"{path.name} imports {module}"


def test_the_packages_have_no_top_level_names_of_their_own() -> None:
    for name in ("kernels", "configs"):
        assert not (ROOT / name / "__init__.py").exists()
        link = ROOT / "amp" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
