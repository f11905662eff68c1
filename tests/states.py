"""What a training has: saved, loaded, and compared bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import amp


def saved_of(model: Any, optimizer: Any) -> list[Any]:
    """Return copies of the state dicts of a model, its optimizer and amp."""
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])


def through_a_file(what: Any, weights_only: bool = True) -> Any:
    """Return what is loaded of a file in which this is saved."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def load(saved: list[Any], model: Any, optimizer: Any) -> None:
    """Load what `saved_of` returns."""
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])


def assert_same(found: Any, expected: Any, where: str = "", equal_nan: bool = False) -> None:
    """Compare tensors and numbers, in containers of any kind: keys, dtypes and every bit."""
    if isinstance(expected, Tensor):
        assert found.dtype is expected.dtype, where
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=equal_nan, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}", equal_nan)
    elif isinstance(expected, Iterable) and not isinstance(expected, str):
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{i}", equal_nan)
    else:
        assert found == expected, where
