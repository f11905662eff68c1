"""The devices that tests run on: those that are there."""

from __future__ import annotations

import pytest
import torch

from amp.kernels.language import INTERPRETED

GPU = torch.cuda.is_available() and not INTERPRETED
"""Whether tests use a GPU; Triton's interpreter runs kernels on the CPU."""


def on_gpu(*values: str) -> list[object]:
    """Mark the values of a parameter that need a GPU; return none of them where there is none."""
    return [pytest.param(value, marks=pytest.mark.gpu) for value in values if GPU]


DEVICES = ["cpu", *on_gpu("cuda")]
