"""A linear layer in FP8 on the kernels, against plain torch: see test_operations for the backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
import amp.kernels.quantize_operators
from amp.kernels.backend import uses_triton

pytestmark = pytest.mark.triton

Write = Callable[[Tensor], object]
WRITES: dict[str, Write] = {
    "none": lambda weight: None,
    "through .data": lambda weight: weight.data.mul_(3.0),
    "in place": lambda weight: weight.detach().mul_(0.25),
    "of one element": lambda weight: weight.data[0, 0].fill_(40.0),
    "of all to zero": lambda weight: weight.data.zero_(),
    "of NaN": lambda weight: weight.data[3, 5].fill_(torch.nan),
    "of numbers again": lambda weight: weight.data.fill_(1.5),
}
"""What a script may do to a weight between two micro-batches, whether torch counts it or not."""


def results(fp8: Any, device: torch.device) -> list[Tensor]:
    """Return outputs and gradients of micro-batches, between which the weight is written to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 32)).to(device)
    session = amp.Session("O5", fp8=fp8, verbosity=0)
    model, _ = session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    layer, found = model[0], []
    if session.fp8.history is not None:
        session.fp8.history._new_until = 0
        session.fp8.history.is_new = False  # as after many iterations
    for write in WRITES.values():
        write(layer.weight)
        x = torch.randn(16, 64).bfloat16().to(device).requires_grad_()
        y = layer(x)
        y.backward(torch.randn(16, 32).bfloat16().to(device))
        found += [y.detach(), x.grad, layer.weight.grad]
        layer.weight.grad = None
        if session.fp8.history is not None:
            session.fp8.history.end()
            found.append(session.fp8.history.amaxes.clone())
    session.close()
    return [x.float().cpu() for x in found if x is not None]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_no_stale_weight_is_multiplied(
    recipe: str, keep: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor that a weight had last is only a guess, and that of `delayed` may be unknown."""
    fp8 = {"recipe": recipe, "skip": [], "keep_weights": keep}
    found = results(fp8, device)
    monkeypatch.setenv("AMP_KERNELS", "reference")
    expected = results({**fp8, "keep_weights": False}, device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


RECIPES = ["current", "delayed", "block", "mxfp8", "rowwise", "nvfp4", "mxfp4"]


def trained(recipe: str, device: torch.device, backend: str | None) -> tuple[list[Tensor], int]:
    """Return outputs, gradients and history of some iterations, and how often operators were called."""
    calls = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += str(graph.code).count("torch.ops.amp.quantize")
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.GELU(), nn.Linear(128, 128)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    with amp.Session("O5", fp8={"recipe": recipe, "skip": []}, verbosity=0) as session:
        session.initialize(model, optimizer)
        forward = model if backend is None else torch.compile(model, fullgraph=True, backend=counting)
        for scale in (1.0, torch.inf):
            x = (torch.randn(32, 128) * scale).bfloat16().to(device).requires_grad_()
            with session.scale_loss((forward(x) * 0.1).sum(), optimizer) as loss:
                loss.backward()
            found += [p.grad for p in (x, *model.parameters()) if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        found += [] if session.fp8.history is None else [session.fp8.history.amaxes]
        return [x.float().cpu() for x in found], calls


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_run_the_kernels_of_eager_mode(recipe: str, device: torch.device) -> None:
    """With scales for rows Inductor's own kernels are as few, so formulas are compiled."""
    expected, _ = trained(recipe, device, None)
    found, calls = trained(recipe, device, "aot_eager")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    runs_kernels = uses_triton(device)
    assert (calls > 0) is (runs_kernels and recipe != "rowwise")


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("tensor", {}),
    ("tensor", {"factor": torch.tensor(3.0), "is_known": True, "seen": torch.zeros(())}),
    ("1x128", {}),
    ("128x128", {}),
    ("1x32", {}),
]


@pytest.mark.parametrize(("granularity", "given"), KINDS)
@pytest.mark.parametrize("aligned", [True, False])
def test_operators_are_as_torch_wants_them_and_take_any_address(
    granularity: str, given: dict[str, Any], aligned: bool, device: torch.device
) -> None:
    given = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
    memory = torch.randn(128 * 128 + 1).bfloat16().to(device)
    x = memory[not aligned :][: 128 * 128].view(128, 128)
    of_tensor = [given.get("factor"), given.get("is_known", False), given.get("seen"), None]
    arguments = (x, torch.float8_e4m3fn, granularity, True, True, True, *of_tensor)
    torch.library.opcheck(torch.ops.amp.quantize, arguments)
    found, expected = (torch.ops.amp.quantize(y, *arguments[1:]) for y in (x, x.clone()))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("granularity", ["1x16", "16x16", "1x32"])
def test_operators_of_fp4_are_as_torch_wants_them(granularity: str, device: torch.device) -> None:
    x, calls = torch.randn(64, 64).to(device), torch.tensor(3, device=device)
    arguments = (x, granularity, True, True, granularity == "1x16", calls, 7, 5, 0)
    torch.library.opcheck(torch.ops.amp.quantize_fp4, arguments)
