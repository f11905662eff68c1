"""A plugin of pytest that claims a GPU, on a machine that has just what a bare one has.

Tests that need a GPU are then collected. They cannot run: what they make lies on the CPU.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

MISSING = {
    *("accelerate", "bs4", "fastai", "ignite", "lightning", "matplotlib", "mkdocs", "monai", "optimi"),
    *("peft", "pytorch_lightning", "pytorch_optimizer", "selenium", "tensorboard"),
    *("timm", "torchao", "torchmetrics", "torchvision", "transformers"),
}
"""Packages that the tests of other things use."""


class _Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


sys.meta_path.insert(0, _Missing())
claimed: Any = torch.cuda
claimed.is_available, claimed.device_count = lambda: True, lambda: 1
claimed.get_device_capability = lambda device=None: (9, 0)
internals: Any = torch._C
internals._cuda_init = lambda: None
for name in ("arange", "empty", "full", "ones", "randn", "tensor", "zeros"):
    setattr(torch, name, _on_cpu(getattr(torch, name)))
