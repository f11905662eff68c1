"""What the functions of `torch.nn.functional` do, in apex's lists."""

import torch

from amp.compat.lists.tables import functions_of, rules_of

__all__ = ["BANNED_FUNCS", "CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch.nn.functional

FP16_FUNCS = functions_of("torch.nn.functional", "FP16_FUNCS")
FP32_FUNCS = functions_of("torch.nn.functional", "FP32_FUNCS")
CASTS = functions_of("torch.nn.functional", "CASTS")
SEQUENCE_CASTS = functions_of("torch.nn.functional", "SEQUENCE_CASTS")
BANNED_FUNCS = [(rule.name, rule.note) for rule in rules_of("torch.nn.functional", "BANNED_FUNCS")]
