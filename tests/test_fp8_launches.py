"""Which kernels a linear layer in FP8 starts on a GPU, without one: the launches are only listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp.casting import fp8_linear
from amp.kernels import fp4_tiles, language, quantize_tiles, scaled_mm
from amp.kernels.language import INTERPRETED, triton
from tests.fp8_models import history, initialize

pytestmark = pytest.mark.skipif(triton is None or INTERPRETED, reason="lists what the compiler gets")

STARTS_NOTHING = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach"}


class Listing(TorchDispatchMode):
    """Lists torch's operations that start kernels on a GPU."""

    def __init__(self, started: list[str]) -> None:
        super().__init__()
        self.started = started

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.arguments)
        if name not in STARTS_NOTHING and not is_view:
            self.started.append(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels started, in order: ours and torch's."""
    names: list[str] = []

    def only_list(kernel: Any, *_: Any, **__: Any) -> None:
        names.append(kernel.__name__)

    monkeypatch.setattr(language, "launch", only_list)  # of `Bound`, which compiles nothing then
    for module in (quantize_tiles, fp4_tiles):
        monkeypatch.setattr(module, "launch", only_list)
    monkeypatch.setattr(quantize_tiles, "uses_triton", lambda *_: True)
    monkeypatch.setattr(quantize_tiles, "rounds_by_bits", lambda _: False)
    monkeypatch.setattr(scaled_mm, "way_of", lambda *_: "native")
    monkeypatch.setattr(fp8_linear, "_sample_of", lambda _: None)  # none is taken on a GPU
    caches: Any = quantize_tiles._tensor_plan, quantize_tiles._scratch
    for cache in caches:
        cache.cache_clear()
    yield names
    for cache in caches:
        cache.cache_clear()


def layer_of(fp8: dict[str, Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 32))
    model, _ = initialize(model, "O5", fp8)
    first: nn.Module = model[0]
    return first


def forward_and_backward(layer: nn.Module, started: list[str]) -> list[str]:
    x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones(16, 32, dtype=torch.bfloat16)
    started.clear()
    with Listing(started):
        layer(x).backward(grad)
    layer.zero_grad()
    return [*started]


BOTH, PRODUCT = ["amax_kernel", "tensor_kernel"], ["_scaled_mm"]
ONCE = ["tensor_kernel"]


def test_current_takes_nine_kernels(started: list[str]) -> None:
    layer = layer_of({"recipe": "current"})
    first = forward_and_backward(layer, started)  # the weight has no factor yet
    assert first == ["zeros", *BOTH, *BOTH, *PRODUCT, *BOTH, *ONCE, *PRODUCT, *PRODUCT]  # a scratch
    for _ in range(3):
        found = forward_and_backward(layer, started)
        assert found == [*BOTH, *ONCE, *PRODUCT, *BOTH, *ONCE, *PRODUCT, *PRODUCT]
        assert len(found) == 9


def test_current_takes_eight_kernels_where_weights_are_kept(started: list[str]) -> None:
    layer = layer_of({"recipe": "current", "keep_weights": True})
    forward_and_backward(layer, started)
    found = forward_and_backward(layer, started)
    assert found == [*BOTH, *ONCE, *PRODUCT, *BOTH, *PRODUCT, *PRODUCT]


@pytest.mark.parametrize("recipe", ["current", "block", "nvfp4"])
def test_weights_are_quantized_once_for_the_micro_batches_of_a_step(
    recipe: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_mm, "way_of", lambda *_: "emulated")
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 32))
    model, optimizer = initialize(model, "O5", {"recipe": recipe, "keep_weights": "step"})
    layer = model[0]

    def micro_batch() -> int:
        x = torch.ones(128, 128, dtype=torch.bfloat16, requires_grad=True)
        started.clear()
        with Listing(started), amp.scale_loss(layer(x).float().sum(), optimizer) as loss:
            loss.backward()
        return len([name for name in started if name.endswith("_kernel")])

    micro_batch()
    first, *others = [micro_batch() for _ in range(3)]
    assert others == [first] * 2  # the weight is that of the call before
    optimizer.step()
    after_a_step = micro_batch()
    assert after_a_step > first
    with torch.no_grad():
        layer(torch.ones(128, 128))  # uses nothing that was kept, and leaves it
    assert micro_batch() == first
    writes: list[Callable[[], object]] = [
        lambda: layer.weight.detach().mul_(2.0),
        lambda: setattr(layer.weight, "data", layer.weight.data.clone()),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())),
        lambda: layer.load_state_dict(layer.state_dict()),
    ]
    for write in writes:
        write()
        assert micro_batch() == after_a_step
        assert micro_batch() == first


def test_scales_that_are_no_powers_of_2_take_ten_kernels(started: list[str]) -> None:
    """They follow each change of a weight's amax, so that no guess would be right."""
    layer = layer_of({"recipe": "current", "power_of_2_scales": False})
    forward_and_backward(layer, started)
    assert len(forward_and_backward(layer, started)) == 10


@pytest.mark.parametrize(("keep", "most"), [(False, 7), (True, 6)])
def test_delayed_takes_seven_kernels(keep: bool, most: int, started: list[str]) -> None:
    layer = layer_of({"recipe": "delayed", "keep_weights": keep})
    for _ in range(16):
        forward_and_backward(layer, started)
        history().end()
    found = forward_and_backward(layer, started)
    of_weight = [] if keep else ONCE
    assert found == [*ONCE, *ONCE, *PRODUCT, *ONCE, *of_weight, *PRODUCT, *PRODUCT]
    assert len(found) == most


def test_a_weight_on_another_device_or_stream_has_no_guess(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of({"recipe": "current"})
    forward_and_backward(layer, started)
    monkeypatch.setattr(fp8_linear, "stream_of", lambda _: 7)
    assert len(forward_and_backward(layer, started)) == 10
    assert len(forward_and_backward(layer, started)) == 9
    monkeypatch.setattr(fp8_linear, "stream_of", lambda _: None)  # as while a graph is captured
    assert len(forward_and_backward(layer, started)) == 10
