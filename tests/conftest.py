"""Which tests are run, and around each: nothing that amp patches may outlive the test that made it."""

from __future__ import annotations

import gc
import itertools
import operator
import os
import subprocess
import sys
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # also of programs that tests start: their tensors are too small

import hypothesis  # noqa: F401  # which finds no referrers among what is frozen below
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and it replaces torch.manual_seed
import torch.utils.checkpoint

from amp import active
from amp.casting import registry
from amp.frontend import _Default
from amp.kernels import backend, update_scale
from amp.kernels.language import INTERPRETED
from tests.devices import GPU
from tests.processes import Forked
from tests.tried import TRIED

if torch.cuda.is_available():  # then torch._dynamo.reset imports this, which warns of torch.jit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor.cudagraph_trees

if INTERPRETED:
    from triton.runtime import interpreter

    interpreted: Any = interpreter.InterpretedFunction
    replace_language, replaced_for = interpreter._patch_lang, set[str]()

    def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__ not in replaced_for:
            replaced_for.add(function.fn.__module__)
            replace_language(function.fn)
        return function.rewrite()(*args, **kwargs)

    # Triton replaces its language for each launch, and again for each call inside of it, which takes a
    # third of the time.
    interpreted.__call__ = call_device_function

PATCHED_PLACES = (
    torch,
    torch.nn.functional,
    torch.Tensor,
    torch.linalg,
    torch.fft,
    torch.special,
    torch._VF,
    torch.autocast,
    torch.utils.checkpoint,
    torch.nn.RNNBase,
    torch.nn.DataParallel,
)


def _attributes() -> list[dict[str, object]]:
    return [dict(vars(place)) for place in PATCHED_PLACES]


def _are_same(old: dict[str, object], new: dict[str, object]) -> bool:
    """Whether two dicts have the same keys, in the same order, and the same objects."""
    return [*old] == [*new] and all(map(operator.is_, old.values(), new.values()))


def _changed(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    if all(map(_are_same, before, after)):
        return []
    return [
        f"{place.__name__}.{name}"
        for place, old, new in zip(PATCHED_PLACES, before, after, strict=True)
        for name in old.keys() | new.keys()
        # torch imports parts of itself on first use, and copyreg leaves a note on Tensor
        if old.get(name) is not new.get(name)
        and not isinstance(old.get(name, new.get(name)), types.ModuleType)
        and name != "__slotnames__"
    ]


MANY = 4
LONG = (
    *("test_threads.py", "test_benchmarks.py", "test_selftest.py", "test_moved_memory.py"),
    *("test_every_op.py", "test_examples.py", "test_injecting.py", "test_interpreter.py"),
    *("test_never_breaks.py", "test_odd_starts.py", "test_compiled.py"),
)
"""Files with tests that take long: they are run first, so that no process is left with one of them."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked with what this machine has not, and half of what takes long.

    These are the cases of a slow test, or in the interpreter of any, that has more than MANY. With
    `AMP_COVERING=all` they are all there.
    """
    missing = [mark for mark, there in (("gpu", GPU), ("triton", GPU or INTERPRETED)) if not there]
    left_out = [item for item in items if any(map(item.get_closest_marker, missing))]
    if os.environ.get("AMP_COVERING") != "all":
        cases: defaultdict[object, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if isinstance(item, pytest.Function) and (INTERPRETED or item.get_closest_marker("slow")):
                cases[item.function].append(item)
        left_out += [item for same in cases.values() if len(same) > MANY for item in same[1::2]]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Let garbage collections look at nothing that was there before the first test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_a_module_imports_stays() -> Iterator[None]:
    """Nor at what the tests of a module have imported."""
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def what_was_tried(request: pytest.FixtureRequest) -> Iterator[None]:
    TRIED.clear()
    yield
    request.node.user_properties += [(f"tried {what}", number) for what, number in TRIED.items()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Sum up what tests have tried, whichever process they ran in."""
    tried: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if getattr(report, "when", None) == "teardown":
            for name, number in report.user_properties:
                tried[name] += number
    for name, number in sorted(tried.items()):
        if name.startswith("tried "):
            terminalreporter.write_line(f"{name}: {number:,}")


@pytest.fixture
def before_torch_2_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take parameters for those of an older torch, which know no `grad_dtype`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("amp.") and hasattr(module, "HAS_GRAD_DTYPE"):
            monkeypatch.setattr(module, "HAS_GRAD_DTYPE", False)


@pytest.fixture
def scripts_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands run their scripts in forks of a process that has imported torch."""
    from amp.trials import scripts

    started = types.SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(scripts, "subprocess", started)


@pytest.fixture
def the_cpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host believe that it has to wait for the CPU."""
    for module in (backend, update_scale):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)


@pytest.fixture(autouse=True)
def torch_is_given_back() -> Iterator[None]:
    """Close all sessions after the test, and check that every torch function is back."""
    before = _attributes()
    registered = dict(registry._registered)
    _Default.session = _Default.waiting_state = None
    seed = torch.manual_seed if GPU else torch.default_generator.manual_seed  # which notes no caller
    seed(0)
    yield
    for session in active.open_sessions():
        session.close()
    _Default.session = _Default.waiting_state = None
    after = _attributes()
    assert not torch.is_autocast_enabled("ipu"), "casts are left switched off"
    assert not torch.is_autocast_enabled("cpu"), "a forward's region is left open"
    assert registry._registered == registered, "functions are left registered"
    assert not torch.compiler.config.cache_key_tag
    changed = _changed(before, after)
    assert not changed, f"left patched: {changed}"
