"""What the functions of `torch` do, in apex's lists."""

import torch

from amp.compat.lists.tables import functions_of, rules_of

__all__ = ["BANNED_FUNCS", "CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch

FP16_FUNCS = functions_of("torch", "FP16_FUNCS")
FP32_FUNCS = functions_of("torch", "FP32_FUNCS")
CASTS = functions_of("torch", "CASTS")
SEQUENCE_CASTS = functions_of("torch", "SEQUENCE_CASTS")
BANNED_FUNCS = [(rule.name, rule.note) for rule in rules_of("torch", "BANNED_FUNCS")]
