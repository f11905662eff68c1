"""Sets of dtypes, and their names."""

import torch

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
"""The dtypes that get FP32 master weights."""

CASTABLE = LOW_PRECISION | {torch.float32}
"""The dtypes that mixed precision may change.

Float64, complex, float8, integers and bools keep their dtype, because a user chooses such a dtype on
purpose.
"""

SCALABLE = CASTABLE | {torch.float64}
"""The dtypes that gradients of a scaled loss may have."""

DTYPES = {
    **dict.fromkeys(("float16", "half", "fp16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float32", "float", "fp32"), torch.float32),
}
"""The names under which a user may ask for a dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its `torch.` prefix: `float16`."""
    return str(dtype).removeprefix("torch.")
