"""Every op of native autocast's policies and of apex's lists gives the dtype that its rule says.

Outside a model's forward, inside one, compiled; from FP32 and from half arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.casting.op_names import resolve
from amp.casting.policy import load_policy
from tests import ops
from tests.devices import on_gpu
from tests.models import BY_OP_DTYPE as HALF
from tests.models import casting
from tests.ops import Row, X, Y

TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
WIDE = (torch.float32, torch.complex64)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated", "ignore:.*is not recommended", "ignore:.*will be removed", "ignore:An output"
)


@pytest.fixture(scope="module", params=[*HALF, *on_gpu(*(f"{level} cuda" for level in HALF))])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Turn op casting on, and say to what."""
    level, _, device = request.param.partition(" ")
    with casting(level), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "device", device or "cpu")
        yield HALF[level]


@pytest.fixture(autouse=True)
def torch_is_given_back() -> None:
    """The session is the module's here; other files check what is left behind."""


class Calls(nn.Module):
    """A model whose forward is any function."""

    def forward(self, function: Any) -> Any:
        return function()


def in_forward(function: Any) -> Any:
    """Call a function inside the forward of a model that was given to the session."""
    from amp.active import newest_caster
    from amp.casting.regions import watch

    model = Calls()
    undo = watch(model, newest_caster())
    try:
        return model(function)
    finally:
        undo()


NOT_EVERYWHERE = {
    *(f"{place}.{name}" for place in ("torch", "torch.Tensor") for name in ("cholesky", "qr")),
    "torch.linalg.matrix_sqrth",
}
"""Ops of the tables that torch 2.14 has removed, and that it was the first to have."""

WAYS = {"outside": lambda function: function(), "in forward": in_forward}


def each_way(row: Row, half: torch.dtype) -> Iterator[tuple[str, bool, Any]]:
    """Yield where a row is called, whether from half arguments, and what it returns."""
    for way, call in WAYS.items():
        for from_half in (False, True):
            convert = as_half(half) if from_half else lambda t: t
            yield way, from_half, call(lambda convert=convert: row(convert))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def floats(value: Any) -> list[Tensor]:
    return [t for t in tensors(value) if t.is_floating_point() or t.is_complex()]


def as_half(half: torch.dtype) -> Any:
    return lambda t: t.to(half) if t.dtype is torch.float32 else t


def rounded(half: torch.dtype) -> Any:
    return lambda t: t.to(half).float() if t.dtype is torch.float32 else t


def check_values(row: Row, results: dict[str, Any], half: torch.dtype, tolerance: float) -> None:
    """What is made of half arguments has the values of FP32 on the same, rounded arguments."""
    with amp.disable_casts():
        expected = row(rounded(half))
    for actual, exact in [
        pair for way in WAYS for pair in zip(floats(results[way]), floats(expected), strict=True)
    ]:
        scale = max(exact.abs().max().item(), 1.0)
        torch.testing.assert_close(
            actual.to(exact.dtype), exact, rtol=0, atol=tolerance * scale, equal_nan=True
        )


@pytest.mark.parametrize("row", ops.HALF, ids=str)
def test_half_ops(half: torch.dtype, row: Row) -> None:
    results = {}
    for way, from_half, result in each_way(row, half):
        assert {t.dtype for t in floats(result)} == {half}, (way, from_half)
        results[way] = result  # from half arguments, which come last
    check_values(row, results, half, TOLERANCE[half])


UNSTABLE = ("svd", "qr", "eig", "geqrf", "lu", "lstsq")
"""Factors whose signs or order are free."""


@pytest.mark.parametrize("row", ops.FLOAT, ids=str)
def test_float_ops(half: torch.dtype, row: Row) -> None:
    results = {}
    for way, from_half, result in each_way(row, half):
        assert {t.dtype for t in floats(result)} <= set(WIDE), (way, from_half)
        assert floats(result) or row.op.endswith("matrix_rank")
        results[way] = result
    if not row.op.endswith(UNSTABLE):
        check_values(row, results, half, 1e-4)


@pytest.mark.parametrize("row", ops.PROMOTE, ids=str)
def test_promoting_ops(half: torch.dtype, row: Row) -> None:
    """All FP32: FP32. All half: half. Only the first half: FP32."""
    for way, from_half, result in each_way(row, half):
        assert {t.dtype for t in floats(result)} <= {half if from_half else torch.float32}, way
    if row.op in ("torch.Tensor.index_copy", "torch.Tensor.equal"):
        return
    for way, call in WAYS.items():
        seen = 0

        def first_half(tensor: Tensor) -> Tensor:
            nonlocal seen
            seen += tensor.is_floating_point()
            return tensor.to(half) if tensor.is_floating_point() and seen == 1 else tensor

        assert {t.dtype for t in floats(call(lambda: row(first_half)))} <= {torch.float32}, way


@pytest.mark.parametrize("row", ops.FOLLOWS, ids=str)
def test_other_ops_follow_their_input(half: torch.dtype, row: Row) -> None:
    for way, from_half, result in each_way(row, half):
        assert {t.dtype for t in floats(result)} == {half if from_half else torch.float32}, way


@pytest.mark.parametrize("name", ops.MODULES)
def test_modules(half: torch.dtype, name: str) -> None:
    category, make, given = ops.MODULES[name]
    for way, call in WAYS.items():
        for dtype in (given.dtype, half):
            x = given.to(ops.device, dtype)
            expected = {"half": half, "float": torch.float32, "follows": dtype}[category]
            result = call(lambda x=x: make().to(ops.device)(x))
            assert {t.dtype for t in floats(result)} == {expected}, (way, dtype)


OF_ONE_DTYPE = ("torch.rnn", "torch._VF", "torch.gru", "torch.lstm")
"""Functions that need all their arguments in one dtype, which they are not if only some are FP64."""


NOT_IN_FP64 = {
    "torch.nn.functional.grouped_mm",
    "torch._grouped_mm",
    "torch.fake_quantize_per_channel_affine",
}


@pytest.mark.parametrize("rows", [ops.HALF, ops.FLOAT, ops.PROMOTE], ids=["half", "float", "promote"])
def test_float64_is_left_alone(half: torch.dtype, rows: list[Row]) -> None:
    for row in rows:
        if row.op.startswith(OF_ONE_DTYPE) or "mkldnn" in row.op or row.op in NOT_IN_FP64:
            continue
        result = row(lambda t: t.double() if t.is_floating_point() else t)
        assert {t.dtype for t in floats(result)} <= {torch.float64, torch.complex128}, row


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_every_op_that_torch_autocast_knows_has_a_row(device: str) -> None:
    """A new op in torch's policy fails this until it has a rule and a row."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
    names = {name.removeprefix("aten::").split(".")[0] for name in registered} - ops.INTERNAL
    names = {name for name in names if "::" not in name}  # torchvision's, where it is imported
    covered = {row.op for row in (*ops.HALF, *ops.FLOAT, *ops.PROMOTE)}
    spelled = {
        f"{prefix}{op.rpartition('.')[2]}" for op in covered for prefix in ("", "linalg_", "fft_")
    }
    assert {ops.UNDER_OTHER_NAMES.get(name, name) for name in names} - spelled == set()


def test_every_rule_has_a_row() -> None:
    covered = {row.op for row in (*ops.HALF, *ops.FLOAT, *ops.PROMOTE, *ops.FOLLOWS)}
    untested = {rule.op for rule in load_policy(torch.float16).rules} - covered
    assert untested <= NOT_EVERYWHERE | {
        "torch.Tensor.cpu",
        "torch.Tensor.__pow__",  # as operators
        "torch.Tensor.__rpow__",
        "torch.chain_matmul",
        "torch.nn.functional.binary_cross_entropy",
        "torch.nn.functional.upsample",
        "torch.nn.functional.upsample_bilinear",
        "torch.nn.functional.upsample_nearest",
        "torch._transformer_encoder_layer_fwd",  # by modules
        "torch._native_multi_head_attention",
        "torch.fused_moving_avg_obs_fake_quant",
        *(f"{place}.{name}" for place in ("torch", "torch._VF") for name in ("lstm", "gru")),
        *(f"{place}.rnn_{name}" for place in ("torch", "torch._VF") for name in ("tanh", "relu")),
    }


def test_every_name_in_the_tables_exists_in_this_torch() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert set(load_policy(dtype).missing()) <= NOT_EVERYWHERE


def test_cpu_gives_float32(half: torch.dtype) -> None:
    """As in apex: what leaves the device is for people and metrics."""
    assert X.to(half).cpu().dtype is torch.float32


def test_out_and_dtype_are_left_alone(half: torch.dtype) -> None:
    for way in WAYS.values():
        out = torch.empty(4, 4)
        way(lambda out=out: torch.mm(X, Y, out=out))
        with amp.disable_casts():
            assert torch.equal(out, X @ Y)
        way(lambda out=out: torch.exp(X, out=out))
        assert torch.equal(out, X.exp())
        way(lambda out=out: torch.tensordot(X, Y, dims=1, out=out))
        with amp.disable_casts():
            assert torch.equal(out, torch.tensordot(X, Y, dims=1))
        way(lambda out=out: torch.linalg.multi_dot([X, Y, X], out=out))
        with amp.disable_casts():
            assert torch.equal(out, torch.linalg.multi_dot([X, Y, X]))
        for op in (torch.sum, torch.cumsum, torch.prod, torch.softmax, F.softmax, F.log_softmax):
            result = way(lambda op=op: op(X.to(half), dim=0, dtype=half))
            assert result.dtype is half
            assert way(lambda op=op: op(X.to(half), dim=0, dtype=torch.float64)).dtype is torch.float64
            assert way(lambda op=op: op(X, dim=0, dtype=half)).dtype is half
        assert way(lambda: torch.linalg.vector_norm(X.to(half), dtype=half)).dtype is half


def test_augmented_assignment_is_in_place(half: torch.dtype) -> None:
    x = kept = X.to(half)
    x += X
    x *= X
    x -= X
    x /= X + 9
    assert x is kept
    assert x.dtype is half
    x **= 2
    assert x is kept
    assert x.dtype is half
    wide = X.clone()
    wide @= Y.to(half)
    assert wide.dtype is half  # __imatmul__ is not in place in torch


def test_places_of_the_tables_resolve() -> None:
    assert resolve("torch.Tensor") is Tensor
    assert resolve("torch.linalg") is torch.linalg
