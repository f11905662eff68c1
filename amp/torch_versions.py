"""What older releases of torch do otherwise. The oldest that is supported is in `pyproject.toml`."""

import ctypes
import re
import sys
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
"""Whether torch.autocast keeps a cast of a weight that was made under `no_grad` for uses after it, as
torch 2.10 does. Releases from 2.13 on need not be asked."""


def accelerator_type() -> str | None:
    """Return the type of the accelerator that torch is built for, or None."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later ones return None
        return None
    return None if accelerator is None else accelerator.type


_internals: Any = torch._C  # which has no types for what is asked of it here


def _takes_no_reference() -> bool:
    kept = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # the one that may be let go of for it
    before = sys.getrefcount(kept)
    _internals._stash_obj_in_tls("amp: a try", kept)
    return sys.getrefcount(kept) == before


_TAKES_NO_REFERENCE = _takes_no_reference()
"""Whether torch lets go of a reference that it has not taken, as torch 2.6 does."""


def keep_in_thread(key: str, value: object) -> None:
    """Keep an object in torch's state of this thread, which autograd's threads inherit."""
    if _TAKES_NO_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _internals._stash_obj_in_tls(key, value)


def root_mesh(mesh: Any) -> Any:
    """Return the device mesh that a mesh is a part of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    older: Any = device_mesh
    return older._mesh_resources.get_root_mesh(mesh)
