"""What a type checker knows of the arguments by which a call changes properties of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from amp.distributed import ProcessGroup
from amp.profiles.fp8_recipe import Fp8Recipe
from amp.profiles.loss_scaling import LossScaling

_Dtype = torch.dtype | str


class Overrides(TypedDict, total=False):
    """Properties on top of a profile, as in docs/profiles.md; None changes nothing."""

    cast_model_type: _Dtype | Literal[False] | None
    patch_torch_functions: bool | str | None
    patch_torch_functions_type: _Dtype | None
    keep_batchnorm_fp32: bool | str | None
    keep_norm_fp32: bool | str | None
    master_weights: bool | str | None
    state_dtype: _Dtype | None
    reduce_dtype: _Dtype | None
    loss_scale: float | str | Mapping[str, Any] | LossScaling | None
    protect_buffers: bool | str | None
    diagnose: Literal["on_overflow"] | None
    fp8: str | Mapping[str, Any] | Fp8Recipe | None
    cast_model_inputs: bool | Mapping[str, Any] | Sequence[str] | None
    cast_model_outputs: _Dtype | None
    rules: Sequence[Any] | None
    min_loss_scale: float | None
    max_loss_scale: float | None


class SessionOptions(Overrides, total=False):
    """The keyword arguments of `amp.initialize`."""

    num_losses: int
    verbosity: int
    process_group: ProcessGroup | Sequence[ProcessGroup] | None
    allow_incoming_model_not_fp32: bool
