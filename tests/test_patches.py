"""What is replaced while a session is open: what docs/architecture.md lists, and nothing else.

All attributes of torch, of the standard library's modules that a training uses and of the supported
frameworks are compared before `initialize`, in the session, and after it.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict
import torch.nn.parallel
import torch.optim.swa_utils
import torch.utils.checkpoint
from torch import nn

import amp
from amp import dcp
from amp.casting import hints, region_patches
from amp.masters import averages
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training import clipping, hidden_gradients, misuse, synchronization
from tests.processes import ROOT, run_python

PAGE = ROOT / "docs" / "architecture.md"
FRAMEWORKS = ("lightning", "pytorch_lightning", "transformers", "accelerate", "timm")
OTHERS = (sys, builtins, *map(importlib.import_module, ("copy", "pickle", "threading", "warnings")))
LIMITS = {"O0": 0, "O1": 16} | {f"O{i}": 14 for i in range(2, 10)}
"""Besides the functions of the op tables, which O1, O4, O6 and O8 are for."""
PATCHES = [
    *hints.PATCHES,
    *region_patches.PATCHES,
    *averages.PATCHES,
    *clipping.PATCHES,
    *clipping.PATCHES_WITH_MASTERS,
    *hidden_gradients.PATCHES,
    *synchronization.PATCHES,
    *misuse.PATCHES,
    *dcp.PATCHES,
]
OP_TABLES = {"torch", "torch.Tensor", "torch.functional", "torch.nn.functional", "torch._C._nn"}
OP_TABLES |= {"torch.linalg", "torch.fft", "torch.special", "torch._VF", "torch.nn.init"}


def holders() -> Iterator[tuple[str, Any]]:
    """Yield the modules and classes that are looked at, with their names."""
    for name, module in list(sys.modules.items()):
        is_looked_at = name.split(".")[0] in ("torch", *FRAMEWORKS) or module in OTHERS
        if is_looked_at and isinstance(module, ModuleType):
            yield name, module
            for value in list(vars(module).values()):
                if issubclass(type(value), type) and value.__module__ == name:
                    yield f"{name}.{value.__qualname__}", value
    yield "torch.Tensor", torch.Tensor


def attributes() -> dict[tuple[str, str], Any]:
    """Return every function, method and property, by where it is and what it is called."""
    return {
        (where, name): value
        for where, holder in holders()
        for name, value in list(vars(holder).items())
        if callable(value) or hasattr(type(value), "__get__")
    }


def replaced(before: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Return what stands now where something else stood, or nothing."""
    now = attributes()
    gone = dict.fromkeys(before.keys() - now.keys())
    return gone | {place: new for place, new in now.items() if before.get(place) is not new}


def initialize(level: str, **options: Any) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Import what torch imports when it is first used."""
    for level in ("O1", "O5"):
        initialize(level)
        amp.get_session().close()


def listed() -> dict[str, list[str]]:
    """Return the rows of the page's table: by attribute, the cells after it."""
    text = PAGE.read_text().partition("## What is patched")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| (.*) \|$", text, flags=re.M)
    return {name: cells.split(" | ") for names, cells in rows for name in re.findall(r"[\w.]+", names)}


def at(level: str) -> set[str]:
    """Return the attributes that the page lists at a level, for this torch."""
    found = set()
    for name, (levels, *_) in listed().items():
        now, _, older = levels.partition("before torch 2.10 ")
        words = now if HAS_GRAD_DTYPE else f"{now}, {older}"
        if level in re.findall(r"O\d", words):
            found.add(name)
    return found


QUICK = ("O0", "O1", "O5")
CASTS_NONE = ("O0", "O2", "O3", "O5", "O7", "O9")


def name_of(place: tuple[str, str]) -> str:
    return ".".join(place)


@pytest.mark.parametrize("options", [{}, {"master_weights": "split16"}], ids=["", "split16"])
@pytest.mark.parametrize(
    "level", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in LIMITS if x not in QUICK)]
)
def test_a_level_patches_what_the_page_lists(level: str, options: dict[str, Any]) -> None:
    if options and level not in ("O2", "O5", "O7", "O9"):
        pytest.skip("has no masters")
    before = attributes()
    initialize(level, **options)
    found = {place for place in replaced(before) if place[0] not in OP_TABLES or level in CASTS_NONE}
    amp.get_session().close()
    assert not replaced(before)
    assert sum(where.startswith("torch.") for where, _ in found) <= LIMITS[level], found
    loaded = {name for name, _ in holders()}
    rows = {name for name in at(level) if name.rpartition(".")[0] in loaded}
    assert {name_of(place) for place in found} == rows


FRAMEWORK_PATCHES = """
import contextlib, importlib
from tests.test_patches import FRAMEWORKS, attributes, initialize, name_of, replaced
for name in ("lightning.pytorch", "timm.utils", *FRAMEWORKS[1:]):
    with contextlib.suppress(Exception):  # it is not installed, or not with this torch
        importlib.import_module(name)
initialize("O5")
amp.get_session().close()
before = attributes()
initialize("O5")
for place in replaced(before):
    print(name_of(place))
"""


@pytest.mark.slow
def test_frameworks_are_patched_where_the_page_says() -> None:
    run = run_python("-c", f"import amp{FRAMEWORK_PATCHES}")
    assert run.returncode == 0, run.stderr
    rows = at("O5")
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "torch" in loaded, run.stderr
    assert set(run.stdout.split()) == {name for name in rows if name.partition(".")[0] in loaded}


def test_the_page_gives_each_patchs_reason() -> None:
    rows = listed()
    for patch in PATCHES:
        for target in patch.targets():
            where = f"{target.__module__}.{target.__qualname__}" if inspect.isclass(target) else None
            assert rows[f"{where or target.__name__}.{patch.name}"][1] == patch.why


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_what_stands_for_a_function_passes_for_it(level: str) -> None:
    before = attributes()
    initialize(level)
    found = {place: new for place, new in replaced(before).items() if place in before}
    assert len(found) >= 5
    for place, new in found.items():
        old = getattr(before[place], "__func__", before[place])
        new = getattr(new, "__func__", new)
        assert new.__name__ == old.__name__, place
        assert new.__doc__ == old.__doc__, place
        assert inspect.unwrap(new) is inspect.unwrap(old), place
        assert pickle.loads(pickle.dumps(new)) is new, place
        module = sys.modules.get(old.__module__ or "")
        if module is not None and vars(module).get(old.__qualname__) is new:
            assert (new.__module__, new.__qualname__) == (old.__module__, old.__qualname__), place
        try:
            signature = inspect.signature(old)
        except ValueError:  # a builtin that has none
            continue
        assert inspect.signature(new) == signature, place
