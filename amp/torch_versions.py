"""Differences between releases of torch. The oldest supported one is in `pyproject.toml`."""

import ctypes
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

VERSION = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def _casts_lose_gradients() -> bool:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        weight = torch.ones(1, 1, device="cpu", requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        return not torch.mm(weight, weight).requires_grad


CASTS_LOSE_GRADIENTS = VERSION < (2, 13) and _casts_lose_gradients()
"""Whether torch.autocast caches a cast of a weight made under `no_grad`, and uses it later where a
gradient is needed, as torch 2.10 does. From torch 2.13 on it never does."""


HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether a 16-bit parameter can have a gradient in FP32, as from torch 2.10 on."""


def accelerator_type() -> str | None:
    """Return the type of the accelerator that torch is built for, or None."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later ones return None
        return None
    return None if accelerator is None else accelerator.type


_internals: Any = torch._C  # whose private functions have no types


def _takes_no_reference() -> bool:
    kept = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # a spare reference, which torch may drop
    before = sys.getrefcount(kept)
    _internals._stash_obj_in_tls("amp: a try", kept)
    takes_none = sys.getrefcount(kept) == before
    remove_from_thread("amp: a try")
    return takes_none


def _keep_with_reference(key: str, value: object) -> None:
    """Store an object, and take the reference that torch 2.6 drops without having taken it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _internals._stash_obj_in_tls(key, value)


def _keep_nothing(key: str) -> None:
    _internals._stash_obj_in_tls(key, None)


remove_from_thread: Callable[[str], None] = getattr(_internals, "_remove_obj_from_tls", _keep_nothing)
"""Removes the object stored by a key, if there is one; before torch 2.13, stores None instead."""
keep_in_thread: Callable[[str, object], None] = (
    _keep_with_reference if _takes_no_reference() else _internals._stash_obj_in_tls
)
"""Stores an object by a key in torch's thread-local state, which the threads of autograd inherit.

A thread removes it before it ends. torch would drop it after Python has let go of the thread, when the
interpreter may be ending, and the process would be aborted.
"""


def root_mesh(mesh: Any) -> Any:
    """Return the device mesh that a mesh is a part of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    older: Any = device_mesh
    return older._mesh_resources.get_root_mesh(mesh)
