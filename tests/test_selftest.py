"""`reamp selftest`: right machines pass, wrong kernels are caught, and nothing ends the report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amp.errors import AmpValueError
from amp.kernels import (
    adam,
    axpby,
    cpu_loop,
    fp4,
    fp8,
    host_lists,
    l2norm,
    lamb,
    language,
    master_copy,
    philox,
    plainstep,
    scaled_mm,
    sgd,
    stochastic_rounding,
    unscale,
    update_scale,
)
from amp.kernels import split as splitting
from amp.masters.agreement import Pairs
from amp.selftest import of_steps, selftest_command
from amp.selftest.check_registry import Check, SkipError, all_checks, assert_same_bits
from amp.selftest.running import results
from tests.compiling import lists_in_cpp

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
CHECKS = all_checks()


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "amp", "selftest", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_report_is_one_block_with_a_last_line(tmp_path: Path) -> None:
    """With the same bits by the standard library and torch alone."""
    done = run("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    last = r"\d+ passed, 0 failed, \d+ skipped in \d+ s on .*, torch \d.*"
    assert re.fullmatch(last, lines[-1]), lines[-1]
    assert re.fullmatch(r"digest: [0-9a-f]{16}", lines[-2])
    assert sum(line.startswith("PASS  ") for line in lines) == int(lines[-1].split()[0])
    assert "SKIP  graphs: a captured step" in done.stdout
    checks = [line for line in lines if line[:6] in ("PASS  ", "SKIP  ") or line.startswith("      ")]
    assert max(map(len, checks)) <= 80

    hidden = dict.fromkeys(("yaml", "matplotlib", "triton"))
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= {hidden}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])
    bare = run("--json", PYTHONPATH=path)
    assert bare.returncode == 0, bare.stderr
    report = json.loads(bare.stdout)
    assert f"digest: {report['digest']}" == lines[-2]
    skipped = [each for each in report["checks"] if each["name"].startswith("levels:")]
    assert [each["status"] for each in skipped] == ["SKIP"] * 10
    assert all("PyYAML" in each["text"] for each in skipped)


@pytest.mark.slow
def test_whatever_a_check_does_the_next_one_runs() -> None:
    names = ("a figure", "slow", "wrong", "nothing", "dead", "leaves a child", "a reason to skip")
    checks = [Check(name, lambda _: None, 1.0 if name == "slow" else 60.0, False) for name in names]
    before = time.perf_counter()
    found = {each["name"]: each for each in results(checks, "cpu", "tests.selftest_child")}
    statuses = ["PASS", "FAIL", "FAIL", "PASS", "FAIL", "FAIL", "SKIP"]
    assert [found[name]["status"] for name in names] == statuses
    assert found["a figure"]["text"] == "3 GB/s"
    assert found["a figure"]["bits"]
    assert found["slow"]["text"] == "it took longer than 1 s"
    assert found["wrong"]["text"] == "AssertionError: element 3 is 1.0 and not 2.0"
    assert found["dead"]["text"] == "its process ended with exit status 7: the last words"
    assert found["a reason to skip"]["text"] == "there is no GPU"
    # Its process is kept open by another one, as by a compiler that it has started: that sleeps longer.
    assert found["leaves a child"]["text"].endswith("not \ufffd UTF-8")
    assert time.perf_counter() - before < 300


@pytest.mark.parametrize("device", ["mps", "cuda:99", "gpu"])
def test_a_device_that_cannot_be_checked_is_refused(device: str) -> None:
    with pytest.raises(AmpValueError, match=rf"--device {device} is none of those to check: .*cpu"):
        selftest_command._chosen(device)
    assert selftest_command._chosen("cpu") == "cpu"


# Wrong kernels, each caught by a check.

Mutation = Callable[[pytest.MonkeyPatch], None]


def of_reference(module: Any, name: str, change: Callable[..., None]) -> Mutation:
    """Change what an operation has written, each time."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        operation = getattr(module, name)

        def wrong(*lists: Any, **arguments: Any) -> None:
            operation.reference(*lists, **arguments)
            change(*lists, **arguments)

        monkeypatch.setattr(module, name, operation._replace(reference=wrong))

    return mutate


def last_element(which: int) -> Callable[..., None]:
    def change(*lists: Any, **_: Any) -> None:
        for tensor in lists[which]:
            if tensor.numel() > 2000 and tensor.is_floating_point():
                tensor.view(-1)[-1] *= 1 + 2.0**-7

    return change


def no_flag(*lists: Any, found_inf: Any = None, **_: Any) -> None:
    if found_inf is not None:
        found_inf.zero_()


def of_update(module: Any, name: str, change: Callable[..., Any]) -> Mutation:
    """Change the formula of an optimizer."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        rule = getattr(module, name)
        formula = rule.plain_update or language.plain(rule.update)

        def wrong(p: Any, g: Any, moments: Any, prepared: Any, *functions: Any) -> Any:
            return change(formula, p, g, moments, prepared, *functions)

        wrong_rule = rule._replace(plain_update=wrong)
        rules = {key: wrong_rule if value is rule else value for key, value in of_steps.RULES.items()}
        monkeypatch.setattr(of_steps, "RULES", rules)

    return mutate


def of_function(module: Any, name: str, change: Callable[[Any], Any]) -> Mutation:
    """Change what a function returns."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: change(original(*args, **kwargs)))

    return mutate


def of_arguments(module: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> Mutation:
    """Change the arguments that a function gets."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: original(*change(*args)))

    return mutate


def of_value(module: Any, name: str, value: Any) -> Mutation:
    """Replace a function or a number."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_loop, "_loops", {})  # no loop of an earlier test
        monkeypatch.setattr(module, name, value)

    return mutate


def of_lamb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the ratio of norms that all ranks have agreed on upside down."""

    def at(numbers: Any, t: float, norms: Any) -> Any:
        assert lamb.LAMB.at is not None
        return lamb.LAMB.at(numbers, t, norms and norms[::-1])

    monkeypatch.setattr(of_steps, "RULES", {**of_steps.RULES, "LAMB": lamb.LAMB._replace(at=at)})


def of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let C++ write a wrong last tensor in each pass."""
    lists = lists_in_cpp()

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(lists, name)

        def go_over(self, name: str, tensors: list[list[torch.Tensor]], *arguments: Any) -> Any:
            done = lists.go_over(name, tensors, *arguments)
            tensors[-1][-1].fill_(1)
            return done

    monkeypatch.setattr(host_lists, "compiled", Wrong)


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "C++: a wrong tensor": (of_passes, "kernels: passes in C++"),
    "unscale: last element": (of_reference(unscale, "_UNSCALE", last_element(1)), "kernels: unscale"),
    "unscale: no flag": (of_reference(unscale, "_UNSCALE", no_flag), "kernels: overflow"),
    "check: no flag": (of_reference(unscale, "_CHECK", no_flag), "kernels: overflow"),
    "axpby: last element": (of_reference(axpby, "_AXPBY", last_element(2)), "kernels: axpby"),
    "copy: last element": (of_reference(master_copy, "_COPY", last_element(1)), "kernels: master copy"),
    "join: last element": (of_reference(splitting, "_JOIN", last_element(2)), "kernels: split16"),
    "split: last element": (of_reference(splitting, "_SPLIT", last_element(1)), "kernels: split16"),
    "l2norm: too large": (
        of_function(l2norm, "l2norm_reference", lambda norms: norms * 1.001),
        "kernels: l2norm",
    ),
    "Adam: no momentum": (
        of_update(adam, "ADAMW", lambda f, p, g, m, n, *s: f(p, g, (0 * m[0], m[1]), n, *s)),
        "training: Adam",
    ),
    "SGD: too far": (
        of_update(sgd, "MOMENTUM_SGD", lambda f, p, g, m, n, *s: f(p, g * 1.001, m, n, *s)),
        "training: momentum SGD",
    ),
    "LAMB: no decay": (
        of_update(lamb, "LAMB", lambda f, p, g, m, n, *s: f(p, g, m, (n[0], n[1], 0.0, *n[3:]), *s)),
        "training: LAMB",
    ),
    "halves: low bits lost": (
        of_function(plainstep, "encode", lambda halves: (halves[0], torch.zeros_like(halves[1]))),
        "training: Adam, split16",
    ),
    "moments: never up": (
        of_function(plainstep, "round_stochastically", lambda rounded: rounded * 0.5),
        "training: Adam, bfloat16 moments",
    ),
    "FP8: a factor too large": (
        of_function(fp8, "_scales", lambda scales: (scales[0] * 2, scales[1])),
        "fp8: quantized",
    ),
    "FP4: a factor too large": (
        of_function(fp4, "two_levels", lambda scales: (scales[0], scales[1] * 2, scales[2])),
        "fp8: quantized, FP4",
    ),
    "check: no factor above 1": (
        of_value(unscale, "_is_at_most_one", lambda factor: True),
        "kernels: overflow",
    ),
    "clip: above 1": (
        of_value(l2norm, "clip_factor", lambda total, most: most / total if most else total / total),
        "kernels: l2norm",
    ),
    "scale: no hysteresis": (
        of_arguments(update_scale, "next_state", lambda state, numbers, reset: (state, numbers, False)),
        "kernels: hysteresis",
    ),
    "halves: old low bits": (
        of_value(
            stochastic_rounding, "joined", lambda high, low, number, *_: number((high << 16) + low)
        ),
        "kernels: split16, bfloat16",
    ),
    "moments: packed to nearest": (
        of_arguments(plainstep, "pack", lambda m, v, x: (m, v, stochastic_rounding.TO_NEAREST)),
        "training: small states",
    ),
    "halves: to nearest": (
        of_arguments(plainstep, "encode", lambda p, dtype, low, noise: (p, dtype, low)),
        "training: small states",
    ),
    "shards: without runs": (
        of_arguments(
            plainstep,
            "_random_bits",
            lambda keys, origins, pieces: (keys, [each._replace(run=0) for each in origins], pieces),
        ),
        "training: shards",
    ),
    "LAMB: the ratio of ranks": (of_lamb, "training: LAMB, norms of ranks"),
    "C++: 0 * inf": (
        of_value(cpu_loop, "_plus_product", lambda x, factor, y: x + factor * y),
        "training: the loop in C++, merged",
    ),
    "Hadamard: a sign": (of_value(fp4, "SIGNS", (1, 1, 1, 1, *fp4.SIGNS[4:])), "fp8: known answers"),
    "Philox: 9 rounds": (of_value(philox, "ROUNDS", 9), "fp8: known answers"),
    "masters: not written back": (
        of_value(Pairs, "write_back", Pairs.note_agreement),
        "sessions: O2, AdamW",
    ),
    "FP8 products: half": (of_function(scaled_mm, "_mm", lambda product: product / 2), "fp8: products"),
}


def fails(check: Check) -> bool:
    """Whether a check finds something wrong."""
    try:
        check.run(CPU)
    except AssertionError:
        return True
    except SkipError:
        pass
    return False


@pytest.mark.skipif(language.INTERPRETED, reason="mutates plain torch")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, caught_by = MUTATIONS[name]
    mutate(monkeypatch)
    assert any(fails(CHECKS[name]) for name in CHECKS if name.startswith(caught_by))


PLANTED = [
    (
        "unscale",
        "report(report_to, not_finite(y), 2)",
        "report(report_to, y != y, 2)",
        "kernels: overflow",
    ),
    ("l2norm", "bad_steps + index", "bad_steps", "kernels: overflow, bfloat16"),
    ("language", "j, j < length, arguments", "j, j < length - 1, arguments", "kernels: axpby"),
    ("language", "start, BLOCK).to", "start, BLOCK - 8).to", "kernels: master copy"),
    ("packing", "pattern ^ rounded, 0, rounded", "pattern, 0, pattern", "kernels: split16, bfloat16"),
    ("update_scale", "good >= interval.to", "good > interval.to", "kernels: the loss scale"),
    ("stochastic_rounding", "pattern + noise >> 16", "pattern >> 16", "training: moments"),
    ("stepping", "scale *= tl.load(clip)", "scale *= 1.0", "training: SGD"),
    ("sgd", "plus(g, decay, p), moments", "g, moments", "training: SGD"),
    ("quantize_tiles", "(i < M - m)", "(i < M - m - 1)", "fp8: quantized, 128x128"),
    ("quantize_tiles", "subnormal = added", "subnormal = 1 + added", "fp8: quantized, 1x128"),
    ("fp4_tiles", "random << 14", "random << 13", "fp8: quantized, FP4 1x32"),
    ("fp4_tiles", "if _NEGATIVE >> r", "if 1 >> r", "fp8: quantized, FP4 1x16"),
    ("fp4_tiles", "* of_tensor[1]", "* 1.01", "fp8: quantized, FP4 16x16"),
]
"""A module of kernels, what is to be replaced in it, by what, and the checks that are to see it.

Every third is given, of which every other one is tried, and all of them with `AMP_COVERING=all`.
"""
SCRIPT = """
import sys
import torch
from amp.selftest.check_registry import all_checks
for name, check in all_checks().items():
    if name.startswith(sys.argv[1]):
        try:
            check.run(torch.device("cpu"))
        except AssertionError as error:
            print("caught", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(language.triton is None, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("module", "right", "wrong", "seen_by"),
    PLANTED if os.environ.get("AMP_COVERING") == "all" else PLANTED[::3],
)
def test_a_wrong_kernel_of_triton_is_caught(
    module: str, right: str, wrong: str, seen_by: str, tmp_path: Path
) -> None:
    for name in ("amp", "kernels", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    path = tmp_path / "kernels" / f"{module}.py"
    source = path.read_text()
    assert right in source
    path.write_text(source.replace(right, wrong, 1))
    variables = {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1", "AMP_KERNELS": "triton"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, seen_by],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "caught" in done.stdout


def test_differing_bits_are_named() -> None:
    a = torch.tensor([1.0, torch.nan, -0.0])
    assert_same_bits([a], [a.clone()], "same")
    with pytest.raises(
        AssertionError, match=r"zeros: tensor 0 of 3 elements differs in 1; element 2 is -0.0"
    ):
        assert_same_bits([a], [a.abs()], "zeros")
