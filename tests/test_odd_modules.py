"""Modules whose classes override methods of `nn.Module` with fewer arguments than it has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import amp
from amp.casting.regions import _first_parameter
from tests.levels import LEVELS
from tests.models import train_on


class OldNames(nn.Module):
    """As torchrl's LossModule: it knows no `remove_duplicate`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.gain = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.ones(16))

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse)

    def named_buffers(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from super().named_buffers(prefix, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.gain + self.mean.to(x.dtype)  # type: ignore[no-any-return]


class NoArguments(OldNames):
    """It takes no arguments at all."""

    def named_parameters(self) -> Any:  # type: ignore[override]
        return nn.Module.named_parameters(self)

    def named_buffers(self) -> Any:  # type: ignore[override]
        return nn.Module.named_buffers(self)

    def parameters(self) -> Any:  # type: ignore[override]
        return (parameter for _, parameter in self.named_parameters())

    def buffers(self) -> Any:  # type: ignore[override]
        return (buffer for _, buffer in self.named_buffers())

    def children(self) -> Any:
        return iter(self._modules.values())

    def state_dict(self) -> Any:  # type: ignore[override]
        return nn.Module.state_dict(self)


class Plain(OldNames):
    """The same as `nn.Module` has it."""

    named_parameters: Any = nn.Module.named_parameters
    named_buffers: Any = nn.Module.named_buffers


def ends(cls: type[OldNames], level: str, inside: bool) -> list[Tensor]:
    """Return what a model has after two steps, while its session is open and after it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), cls()) if inside else cls()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    average = AveragedModel(copy.deepcopy(model))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for seed in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        train_on(model(x).float().square().mean(), optimizer)
        average.update_parameters(model)
    model.load_state_dict(dict(model.state_dict()))
    copied = copy.deepcopy(model)
    open_ones = [*model.state_dict().values(), *copied.state_dict().values()]
    open_ones = [value.clone() for value in (*open_ones, *average.module.state_dict().values())]
    amp.get_session(optimizer).close()
    return [*open_ones, *model.state_dict().values()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("cls", "inside"), [(OldNames, True), (OldNames, False), (NoArguments, False)])
def test_methods_with_fewer_arguments_change_nothing(
    cls: type[OldNames], inside: bool, level: str
) -> None:
    for one, other in zip(ends(cls, level, inside), ends(Plain, level, inside), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


class Part(nn.Module):
    """A module that knows the one that holds it, as a submodule."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole


class Whole(nn.Module):
    """One with such a part before its first parameter, and a place for another part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(self)
        self.register_module("none", None)
        self.register_parameter("nothing", None)
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_modules_that_hold_each_other_run(level: str) -> None:
    model = Whole()
    assert _first_parameter(model) is next(model.parameters())
    assert _first_parameter(Part(nn.ReLU())) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model(torch.ones(2, 16)).dtype in (torch.float16, torch.bfloat16)
