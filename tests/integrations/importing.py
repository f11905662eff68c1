"""Makes the frameworks importable here, without their warnings: imported before them.

torchvision's wheel is built for CUDA. Beside a torch for the CPU its operators are missing, and it does
not import; timm and torchmetrics import it. What they need of it here is Python. Ignite imports what
torch has deprecated.
"""

from __future__ import annotations

import warnings

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.optim

    try:
        import torchvision  # noqa: F401
    except (RuntimeError, AttributeError):
        for _name in ("nms", "qnms"):
            _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
