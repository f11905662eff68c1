"""Dtype names and torch dtypes: the only place that compares type strings."""

from __future__ import annotations

import torch

from amp.errors import AmpTypeError, AmpValueError, did_you_mean

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
"""The dtypes that get FP32 master weights."""

CASTABLE = LOW_PRECISION | {torch.float32}
"""The dtypes that mixed precision may change. Float64, complex, float8, integers and bools stay
what they are: whoever chose them for a parameter chose them on purpose."""

SCALABLE = CASTABLE | {torch.float64}
"""The dtypes that gradients of a scaled loss may have."""

_NAMES = {
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
}
_ALLOWED = "float16, bfloat16, float32"


def parse_dtype(value: object) -> torch.dtype:
    """Return the torch dtype that `value` names.

    Args:
        value: a dtype, or a name such as `"float16"`, `"torch.float16"`, `"half"`, `"bf16"`.

    Raises:
        AmpValueError: a name or dtype outside float16, bfloat16 and float32.
        AmpTypeError: neither a dtype nor a string.
    """
    if isinstance(value, torch.dtype):
        if value in CASTABLE:
            return value
        raise AmpValueError(f"{value} is not one of {_ALLOWED}")
    if isinstance(value, str):
        name = value.strip().lower().removeprefix("torch.")
        if name in _NAMES:
            return _NAMES[name]
        raise AmpValueError(f"{value!r} is not one of {_ALLOWED}{did_you_mean(name, _NAMES)}")
    raise AmpTypeError(f"{value!r} is a {type(value).__name__}, not a dtype ({_ALLOWED})")


def is_none(value: object) -> bool:
    """Whether `value` is None or the word for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its `torch.` prefix: `float16`."""
    return str(dtype).removeprefix("torch.")
