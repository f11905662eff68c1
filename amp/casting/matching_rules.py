"""Which modules and tensors of a model a user's rules match."""

from collections.abc import Iterable

from torch import Tensor, nn

from amp.own_tensors import tensors_in
from amp.profiles.rules import Rule


def ruled_modules(model: nn.Module, rules: Iterable[Rule]) -> dict[nn.Module, Rule]:
    """Return the modules that rules match, and all their submodules, each with its last rule."""
    ruled: dict[nn.Module, Rule] = {}
    for rule in rules:
        for name, module in model.named_modules():
            if rule.matches(name, module):
                ruled.update(dict.fromkeys(module.modules(), rule))
    return ruled


def ruled_tensors(model: nn.Module, rules: Iterable[Rule]) -> dict[Tensor, Rule]:
    """Return the parameters and buffers that rules match, or whose modules they match, by last rule."""
    ruled: dict[Tensor, Rule] = {}
    named = list(tensors_in(model))
    for rule in rules:
        for name, module in model.named_modules() if rule.kind == "module" else ():
            if rule.matches(name, module):
                ruled.update(dict.fromkeys((*module.parameters(), *module.buffers()), rule))
        ruled.update((tensor, rule) for name, tensor in named if rule.matches_tensor(name))
    return ruled
