"""`reamp env`, `reamp levels` and `reamp --version`: what they say, and what they never say."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import amp
from amp import about
from amp.cli import main
from amp.kernels import backend
from amp.profiles.levels import LEVELS


def run(capsys: Any, *arguments: str) -> str:
    assert main(arguments) == 0
    return str(capsys.readouterr().out)


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"reamp {amp.__version__}\n"


def test_the_environment_has_what_a_bug_report_needs(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_KERNELS", "reference")
    shown = run(capsys, "env").splitlines()
    assert f"reamp: {amp.__version__}" in shown
    assert f"torch: {torch.__version__}" in shown
    assert f"python: {platform.python_version()}" in shown
    assert "kernels on cpu: plain torch" in shown
    assert "AMP_KERNELS=reference" in shown
    assert any(
        line.startswith(("accelerators: none", "cuda:0: ", "mps: ", "xpu:0: ")) for line in shown
    )
    assert json.loads(run(capsys, "env", "--json")) == about.environment()


FRAMEWORKS = ("lightning", "pytorch-lightning", "transformers", "accelerate", "pytorch-ignite", "timm")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_framework_with_an_integration_is_in_the_report(
    name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda given: "9.8.7" if given == name else known(given)
    )
    assert f"{name}: 9.8.7" in run(capsys, "env").splitlines()


@pytest.mark.parametrize(
    ("amx", "avx512", "told"), [(True, True, ", AVX512_BF16, AMX"), (False, None, "")]
)
def test_bf16_instructions_of_the_cpu_are_in_the_report(
    amx: bool, avx512: bool | None, told: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    if avx512 is None:  # a release of torch that does not say
        monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    (line,) = (line for line in run(capsys, "env").splitlines() if line.startswith("cpu: "))
    assert line.endswith(f", {torch.backends.cpu.get_cpu_capability()}{told}")


def test_the_environment_names_no_person_machine_or_folder(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/somebody/triton")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-key")
    shown = run(capsys, "env")
    assert "TRITON_CACHE_DIR=(a path)" in shown
    private = ("somebody", "secret-key", str(Path.home()), platform.node(), str(Path.cwd()))
    for word in (*private, *([getpass.getuser()] if getpass.getuser() != "root" else [])):
        assert word not in shown


def test_a_wrong_choice_of_kernels_is_in_the_report(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_KERNELS", "cuda")
    assert "kernels on cpu: none: AMP_KERNELS='cuda' is not one of triton" in run(capsys, "env")


def test_a_missing_triton_is_in_the_report(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "triton", None)
    monkeypatch.setattr(about.importlib.util, "find_spec", lambda name: None)
    shown = run(capsys, "env")
    assert "triton: not installed; kernels run in plain torch" in shown


class Gpu:
    name, major, minor, total_memory, gcnArchName = "NVIDIA H100", 9, 0, 80_000_000_000, "gfx942:x"  # noqa: N815


@pytest.mark.parametrize(("hip", "architecture"), [(None, "sm_90"), ("6.4", "gfx942")])
def test_accelerators(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, hip: str | None, architecture: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert f"cuda:0: NVIDIA H100, {architecture}, 80 GB" in run(capsys, "env")


def test_levels(capsys: Any) -> None:
    rows = run(capsys, "levels").splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(LEVELS)
    assert "bf16-mixed" in rows[4]
    found = {row["level"]: row for row in json.loads(run(capsys, "levels", "--json"))}
    assert found["O1"]["aliases"] == ["16-mixed"]
    assert found["O2"]["masters"]
    assert found["O2"]["loss_scale"] == "dynamic"
    assert (found["O4"]["weights"], found["O4"]["computes_in"]) == ("float32", "bfloat16")
    assert [level for level in found if found[level]["fp8"]] == ["O6", "O7"]
    assert [level for level in found if found[level]["fp4"]] == ["O8", "O9"]
