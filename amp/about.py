"""The commands of `python -m amp` about this library and this machine: `env` and `levels`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import torch

import amp
from amp.lazy import kernels
from amp.profiles.keys import shown
from amp.profiles.levels import LEVELS, aliases, compute_dtype, load_profile
from amp.terminal.command import command
from amp.terminal.text import Printer

FRAMEWORKS = ("lightning", "pytorch-lightning", "transformers", "accelerate", "pytorch-ignite", "timm")
PACKAGES = ("torch", "triton", "numpy", "PyYAML", "torchvision", *FRAMEWORKS)
"""The distributions whose versions a bug report needs."""

_BF16_INSTRUCTIONS = {"AVX512_BF16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}
"""The CPU's bfloat16 instructions, and the functions of `torch.cpu` that look for them.

These functions are private, so a release of torch may lack them.
"""

VARIABLES = (
    *("AMP_KERNELS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "ROCR_VISIBLE_DEVICES"),
    *("TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE"),
    *("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "WORLD_SIZE"),
    *("CC", "CXX", "XDG_CACHE_HOME"),
)
"""The environment variables that change what runs. Others are not shown: they may hold secrets."""


def environment() -> dict[str, Any]:
    """Return what a bug report needs, in values that JSON can hold.

    The names of machine and user are left out, and so are paths.
    """
    found: dict[str, Any] = {"reamp": amp.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.lower()] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # with the build, which the distribution's version may lack
    found["cuda"], found["hip"] = torch.version.cuda, torch.version.hip
    libc = " ".join(platform.libc_ver())
    found["os"] = f"{platform.system()} {platform.machine()} {libc}".strip()
    cpu = [_cpu_name(), torch.backends.cpu.get_cpu_capability()]
    for name, function in _BF16_INSTRUCTIONS.items():
        if getattr(torch.cpu, function, lambda: False)():
            cpu.append(name)
    found["cpu"] = ", ".join(cpu)
    found["threads"] = torch.get_num_threads()
    found["devices"] = _devices()
    found["kernels"] = _backends()
    found["variables"] = {
        name: _without_path(os.environ[name]) for name in VARIABLES if name in os.environ
    }
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> list[dict[str, Any]]:
    """Return the accelerators, with what decides which formats they compute in."""
    rows: list[tuple[str, str, str, int | None]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip is not None:
            architecture = properties.gcnArchName.partition(":")[0]
        rows.append((f"cuda:{index}", properties.name, architecture, properties.total_memory))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Apple GPU", "mps", None))
    for index in range(torch.xpu.device_count()):
        xpu = torch.xpu.get_device_properties(index)
        rows.append((f"xpu:{index}", xpu.name, "xpu", xpu.total_memory))
    return [dict(zip(("device", "name", "architecture", "memory"), row, strict=True)) for row in rows]


def _backends() -> dict[str, str]:
    """Return which kernels run on the CPU and on the first CUDA or ROCm device."""
    found = {}
    for device in ("cpu", *(["cuda:0"] if torch.cuda.is_available() else [])):
        try:
            uses_triton = kernels.backend.uses_triton(torch.device(device))
            found[device] = "Triton" if uses_triton else "plain torch"
        except (RuntimeError, ValueError) as error:
            found[device] = f"none: {error}"
    return found


def _without_path(value: str) -> str:
    """Return a value, or that it is a path, which may hold names of people and machines."""
    return "(a path)" if "/" in value or "\\" in value else value


@command("env")
def _env(arguments: argparse.Namespace, printer: Printer) -> Any:
    """Say what a bug report needs: versions, devices, kernels.

    reamp env
    reamp env --json
    """
    found = environment()
    for name, value in found.items():
        if isinstance(value, str | int):
            printer.line(f"{name}: {value}")
    if importlib.util.find_spec("triton") is None:
        printer.line("triton: not installed; kernels run in plain torch")
    for device in found["devices"]:
        memory = "" if device["memory"] is None else f", {device['memory'] / 1e9:.0f} GB"
        printer.line(f"{device['device']}: {device['name']}, {device['architecture']}{memory}")
    if not found["devices"]:
        printer.line("accelerators: none that torch finds")
    for device, backend in found["kernels"].items():
        printer.line(f"kernels on {device}: {backend}")
    for name, value in found["variables"].items():
        printer.line(f"{name}={value}")
    return found


@command("levels")
def _levels(arguments: argparse.Namespace, printer: Printer) -> Any:
    """List the levels, with their aliases.

    reamp levels
    reamp levels --json
    """
    data: list[dict[str, Any]] = []
    for level in LEVELS:
        properties = load_profile(level)
        data.append(
            {
                "level": level,
                "aliases": [alias for alias, of in aliases().items() if of == level],
                "brief": properties.brief,
                "weights": shown(properties.cast_model_type or torch.float32),
                "computes_in": shown(compute_dtype(properties)),
                "masters": bool(properties.master_weights),
                "loss_scale": properties.loss_scaling.mode,
                "fp8": properties.fp8 is not None and not properties.fp8.is_fp4,
                "fp4": properties.fp8 is not None and properties.fp8.is_fp4,
            }
        )
    rows = [(row["level"], ", ".join(row["aliases"]) or "-", row["brief"]) for row in data]
    printer.table(("level", "alias", "what it does"), rows)
    return data


COMMANDS = (_env, _levels)
"""The commands of this module, in the order of `--help`."""
