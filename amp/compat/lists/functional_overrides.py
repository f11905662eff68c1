"""apex's lists for the functions of `torch.nn.functional`."""

import torch

from amp.compat.lists.apex_lists import lists_of

__all__ = ["BANNED_FUNCS", "CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch.nn.functional

FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS, BANNED_FUNCS = lists_of("torch.nn.functional")
