"""The choice of backend: Triton for CUDA and ROCm tensors, plain torch for all others.

The environment variable `AMP_KERNELS` sets it; an operation's `backend` argument takes precedence:

- `triton`: Triton; an error if it is not installed or cannot run on a tensor's device. With
  `TRITON_INTERPRET=1` it runs on the CPU only.
- `reference`: plain torch everywhere.
"""

import functools
import logging
import os
import shutil

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp.kernels.language import INTERPRETED, MISSING, jit, launch, tl, triton

logger = logging.getLogger("amp")

BACKENDS = ("triton", "reference")


def requested(backend: str | None = None) -> tuple[str, str]:
    """Return the requested backend, or an empty string, and the name of the setting.

    Raises:
        ValueError: `backend`, or `AMP_KERNELS`, names no backend.
    """
    name, source = backend or os.environ.get("AMP_KERNELS", ""), "backend" if backend else "AMP_KERNELS"
    if name and name not in BACKENDS:
        raise ValueError(
            f"{source}={name!r} is not one of {', '.join(BACKENDS)}; leave it out, and amp chooses"
        )
    return name, source


def uses_triton(device: torch.device, backend: str | None = None) -> bool:
    """Whether an operation on tensors of `device` runs in Triton.

    Raises:
        ValueError: `backend`, or `AMP_KERNELS`, names no backend.
        RuntimeError: Triton was requested and cannot run there.
    """
    if not (backend or os.environ.get("AMP_KERNELS")):
        return device.type == "cuda" and not INTERPRETED and _works(device)
    name, source = requested(backend)
    if name == "reference":
        return False
    if triton is None:
        raise RuntimeError(f"{source}='triton', and {MISSING}")
    if device.type != ("cpu" if INTERPRETED else "cuda"):
        raise RuntimeError(
            f"{source}='triton' cannot run tensors on {device}: Triton runs CUDA and ROCm devices, and "
            f"with TRITON_INTERPRET=1 the CPU instead. Leave {source} out to run them in plain torch."
        )
    return True


def is_eager() -> bool:
    """Whether nothing watches operations, as a diagnosis does, or compiles them."""
    return not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host reads a tensor without waiting for a device."""
    return tensor.is_cpu


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


@jit
def _one_kernel(pointer):
    tl.store(pointer, 1)


def _failure(device: torch.device) -> str | None:
    """Return why a kernel does not run on a device, or None if it does. The host does not wait."""
    try:
        launch(_one_kernel, 1, device, pointer=torch.empty(1, dtype=torch.int32, device=device))
    except torch.OutOfMemoryError:  # which says nothing about Triton
        raise
    except Exception as error:  # of the compiler, the driver, or gcc, which misses a header
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise
        lines = str(error).strip().splitlines() or [""]
        return f"Triton fails on {device} ({type(error).__name__}: {lines[-1][:300]})"
    return None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Return why Triton launches no kernels on a CUDA or ROCm device, or None if it does."""
    if triton is None:
        return MISSING
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler for its launchers (install gcc or clang, or set CC)"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 5):
        return f"{device} is older than what Triton runs on"
    return _failure(device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether Triton launches kernels on a device; logs once why not."""
    if found := obstacle(device):
        logger.warning("%s: kernels run in plain torch, slower", found)
    return not found
