"""The types of the options of `initialize`, by which a type checker finds a misspelt level or word.

At run time more is allowed than these types say. A script may pass texts from its command line, such as
`"128.0"` for a scale, and the path of a profile as a text; `keys.py` and `levels.py` check them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from amp.distributed import ProcessGroup
from amp.profiles.fp8_recipe import Fp8Recipe
from amp.profiles.loss_scaling import LossScaling

Level = Literal[
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "O6",
    "O7",
    "O8",
    "O9",
    "16-mixed",
    "16-true",
    "32-true",
    "bf16-mixed",
    "fp4-mixed",
    "fp8-mixed",
]
"""The levels and their aliases. A test compares it with the files of the levels."""

OptLevel = Level | os.PathLike[str]
"""A level, an alias, or the path of a profile: `pathlib.Path("mine.yaml")`."""

Flag = bool | Literal["True", "False", "true", "false"]
_Float16 = Literal["float16", "half", "fp16", "torch.float16", "torch.half"]
_BFloat16 = Literal["bfloat16", "bf16", "torch.bfloat16"]
_Float32 = Literal["float32", "float", "fp32", "torch.float32", "torch.float"]
Dtype = torch.dtype | _Float16 | _BFloat16 | _Float32
Masters = Flag | Literal["split16", "split24", "kahan"] | _Float32
LossScale = float | Literal["dynamic"] | Mapping[str, Any] | LossScaling
_Fp4 = Literal["nvfp4", "mxfp4"]
_Fp8 = (
    Literal["current", "delayed", "rowwise", "rowwise_gw_hp", "block", "mxfp8"]
    | Literal["tensorwise", "rowwise_with_gw_hp", "blockwise", "hybrid", "e4m3"]
    | _Fp4
)


class Overrides(TypedDict, total=False):
    """Properties on top of a profile, as in docs/profiles.md; None changes nothing."""

    cast_model_type: Dtype | Literal[False] | None
    patch_torch_functions: Flag | None
    patch_torch_functions_type: Dtype | None
    keep_batchnorm_fp32: Flag | None
    keep_norm_fp32: Flag | None
    buffer_dtype: torch.dtype | _Float32 | None
    master_weights: Masters | None
    state_dtype: torch.dtype | _BFloat16 | _Float32 | Literal["packed16"] | None
    reduce_dtype: Dtype | None
    loss_scale: LossScale | None
    protect_buffers: Flag | None
    diagnose: Literal["on_overflow"] | None
    fp8: _Fp8 | Literal[False] | Mapping[str, Any] | Fp8Recipe | None
    fp4: _Fp4 | bool | Mapping[str, Any] | Fp8Recipe | None
    cast_model_inputs: bool | Mapping[str, Any] | Sequence[str] | None
    cast_model_outputs: Dtype | None
    rules: Sequence[Any] | None
    min_loss_scale: float | None
    max_loss_scale: float | None


class SessionOptions(Overrides, total=False):
    """The keyword arguments of `amp.initialize`."""

    num_losses: int
    verbosity: int
    process_group: ProcessGroup | Sequence[ProcessGroup] | None
    allow_incoming_model_not_fp32: bool
