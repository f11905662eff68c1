"""O1 and O4: which dtype each op gives, what stays right in training, and what is given back."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp
from amp.opcast import OpCaster
from amp.policy import load_policy
from tests.models import adamw, batch, conv_net, initialize, linear, sgd

HALF = {"O1": torch.float16, "O4": torch.bfloat16}


@pytest.fixture(params=["O1", "O4"])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Turn op casting on, and say to what."""
    with amp.Session(request.param) as session:
        session.initialize(None)
        yield HALF[request.param]


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
KERNEL = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 1, 2, 3])

HALF_OPS: dict[str, Any] = {
    "F.linear": lambda x: F.linear(x, X, X[0]),
    "nn.Linear": lambda x: nn.Linear(4, 4)(x),
    "F.conv2d": lambda x: F.conv2d(IMAGE.to(x.dtype), KERNEL, padding=1),
    "F.conv1d": lambda x: F.conv1d(IMAGE[..., 0].to(x.dtype), KERNEL[..., 0]),
    "F.conv_transpose2d": lambda x: F.conv_transpose2d(IMAGE.to(x.dtype), KERNEL),
    "nn.Conv3d": lambda x: nn.Conv3d(2, 2, 2)(IMAGE.to(x.dtype)),
    "torch.conv2d": lambda x: torch.conv2d(IMAGE.to(x.dtype), KERNEL),
    "torch.matmul": lambda x: torch.matmul(x, X),
    "Tensor.matmul": lambda x: x.matmul(X),
    "@": lambda x: x @ X,
    "@ reflected": lambda x: X @ x,
    "torch.mm": lambda x: torch.mm(x, X),
    "torch.mv": lambda x: torch.mv(x, X[0]),
    "torch.bmm": lambda x: torch.bmm(x[None], X[None]),
    "Tensor.bmm": lambda x: x[None].bmm(X[None]),
    "torch.addmm": lambda x: torch.addmm(X, x, X),
    "torch.baddbmm": lambda x: torch.baddbmm(X[None], x[None], X[None]),
    "keyword arguments": lambda x: torch.addmm(input=x, mat1=X, mat2=X, beta=0.5),
    "torch.einsum": lambda x: torch.einsum("ij,jk->ik", x, X),
    "torch.einsum list": lambda x: torch.einsum("ij,jk->ik", [x, X]),
    "torch.chain_matmul": lambda x: torch.linalg.multi_dot([x, X, X]),
    "F.prelu": lambda x: F.prelu(x, X[0, :1]),
    "F.scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x[None, None], X[None, None], X[None, None]
    ),
}

FLOAT_OPS: dict[str, Any] = {
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "nn.Softmax": lambda x: nn.Softmax(-1)(x),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "F.layer_norm": lambda x: F.layer_norm(x, (4,)),
    "nn.LayerNorm": lambda x: nn.LayerNorm(4)(x),
    "nn.GroupNorm": lambda x: nn.GroupNorm(2, 4)(x),
    "nn.RMSNorm": lambda x: nn.RMSNorm(4)(x),
    "F.normalize": lambda x: F.normalize(x),
    "F.cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "F.gelu": lambda x: F.gelu(x),
    "F.softplus": lambda x: F.softplus(x),
    "F.cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "nn.CrossEntropyLoss": lambda x: nn.CrossEntropyLoss()(x, LABELS),
    "F.nll_loss": lambda x: F.nll_loss(x, LABELS),
    "F.mse_loss": lambda x: F.mse_loss(x, X),
    "F.l1_loss": lambda x: F.l1_loss(x, X),
    "F.smooth_l1_loss": lambda x: F.smooth_l1_loss(x, X),
    "F.huber_loss": lambda x: F.huber_loss(x, X),
    "F.kl_div": lambda x: F.kl_div(x, X.softmax(-1), reduction="batchmean"),
    "F.bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, X.sigmoid()),
    "torch.exp": lambda x: torch.exp(x),
    "Tensor.exp": lambda x: x.exp(),
    "torch.log": lambda x: torch.log(x.abs() + 1),
    "torch.log1p": lambda x: torch.log1p(x.abs()),
    "torch.pow": lambda x: torch.pow(x, 2),
    "**": lambda x: x**2,
    "** reflected": lambda x: 2**x,
    "1 /": lambda x: 1 / x,
    "torch.rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "torch.sum": lambda x: torch.sum(x),
    "Tensor.sum": lambda x: x.sum(dim=0, keepdim=True),
    "Tensor.prod": lambda x: x.prod(),
    "Tensor.cumsum": lambda x: x.cumsum(0),
    "Tensor.norm": lambda x: x.norm(),
    "torch.linalg.vector_norm": lambda x: torch.linalg.vector_norm(x),
    "Tensor.std": lambda x: x.std(),
    "Tensor.var": lambda x: x.var(),
    "torch.cdist": lambda x: torch.cdist(x, x),
    "F.interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "Tensor.cpu": lambda x: x.cpu(),
}

FOLLOWING_OPS: dict[str, Any] = {
    "relu": lambda x: F.relu(x),
    "silu": lambda x: F.silu(x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 2),
    "batch_norm": lambda x: nn.BatchNorm1d(4)(x),
    "mean": lambda x: x.mean(),
    "+ scalar": lambda x: x + 1.0,
    "* itself": lambda x: x * x,
    "reshape": lambda x: x.reshape(2, 8),
    "sum with a dtype": lambda x: x.sum(dtype=x.dtype),
    "softmax with a dtype": lambda x: F.softmax(x, dim=-1, dtype=x.dtype),
}

PROMOTING_OPS: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "torch.add": torch.add,
    "torch.mul": torch.mul,
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a),
    "atan2": torch.atan2,
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "Tensor.dot": lambda a, b: a[0].dot(b[0]),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "bilinear": lambda a, b: F.bilinear(a, b, X.expand(2, 4, 4)),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=1),
    "cat": lambda a, b: torch.cat([a, b]),
    "cat keyword": lambda a, b: torch.cat(tensors=(a, b), dim=1),
    "stack": lambda a, b: torch.stack((a, b)),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "scatter_add": lambda a, b: torch.scatter_add(a, 0, torch.zeros(4, 4, dtype=torch.long), b),
    "index_put": lambda a, b: a.index_put((torch.tensor([0]),), b[:1]),
}


def check_values(op: Any, *inputs: Tensor) -> None:
    """The op's value is that of FP32, to half precision's rounding."""
    with amp.disable_casts():
        expected = op(*[t.float() for t in inputs])
    torch.testing.assert_close(op(*inputs).float(), expected, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize("name", HALF_OPS)
@pytest.mark.parametrize("from_half", [False, True])
def test_half_ops(half: torch.dtype, name: str, from_half: bool) -> None:
    op, x = HALF_OPS[name], X.to(half) if from_half else X
    assert op(x).dtype is half
    if "nn." not in name:
        check_values(op, x)


@pytest.mark.parametrize("name", FLOAT_OPS)
@pytest.mark.parametrize("from_half", [False, True])
def test_float_ops(half: torch.dtype, name: str, from_half: bool) -> None:
    op, x = FLOAT_OPS[name], X.to(half) if from_half else X
    assert op(x).dtype is torch.float32
    check_values(op, x)


SPD = X @ X.T + 4 * torch.eye(4)
VOLUME = torch.randn(2, 3, 6, 6, 6, generator=torch.Generator().manual_seed(3))
POOLED, PLACES = F.max_pool2d(IMAGE, 2, return_indices=True)
POOLED_3D, PLACES_3D = F.max_pool3d(VOLUME, 2, return_indices=True)

CPU_FLOAT_OPS: dict[str, tuple[Any, Tensor]] = {
    "F.avg_pool3d": (lambda x: F.avg_pool3d(x, 2), VOLUME),
    "nn.AvgPool3d": (lambda x: nn.AvgPool3d(2)(x), VOLUME),
    "F.adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), VOLUME),
    "F.max_pool3d": (lambda x: F.max_pool3d(x, 2), VOLUME),
    "nn.MaxPool3d": (lambda x: nn.MaxPool3d(2)(x), VOLUME),
    "F.adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), VOLUME),
    "F.fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(x, 2, 3, _random_samples=IMAGE[:, :4, 0, :2].abs() % 1),
        IMAGE,
    ),
    "F.max_unpool2d": (lambda x: F.max_unpool2d(x, PLACES, [2, 2]), POOLED),
    "F.max_unpool3d": (lambda x: F.max_unpool3d(x, PLACES_3D, [2, 2, 2]), POOLED_3D),
    "torch.quantile": (lambda x: torch.quantile(x, 0.3), X),
    "Tensor.quantile": (lambda x: x.quantile(0.3, dim=1), X),
    "torch.nanquantile": (lambda x: torch.nanquantile(x, 0.3), X),
    "torch.stft": (
        lambda x: torch.stft(x, 4, window=torch.ones(4), return_complex=True),
        X.flatten(),
    ),
    "torch.trace": (lambda x: torch.trace(x), X),
    "Tensor.trace": (lambda x: x.trace(), X),
    "torch.polar": (lambda x: torch.polar(x, x), X),
    "torch.view_as_complex": (lambda x: torch.view_as_complex(x), X.reshape(4, 2, 2)),
    "torch.inverse": (lambda x: torch.inverse(x), SPD),
    "Tensor.inverse": (lambda x: x.inverse(), SPD),
    "torch.pinverse": (lambda x: torch.pinverse(x), SPD),
    "torch.cholesky_solve": (lambda x: torch.cholesky_solve(X, x), SPD.tril()),
    "torch.cholesky_inverse": (lambda x: torch.cholesky_inverse(x), SPD.tril()),
    "linalg.cond": (lambda x: torch.linalg.cond(x), SPD),
    "linalg.solve": (lambda x: torch.linalg.solve(x, X), SPD),
    "linalg.cholesky": (lambda x: torch.linalg.cholesky(x), SPD),
    "linalg.svdvals": (lambda x: torch.linalg.svdvals(x), SPD),
    "linalg.eigvalsh": (lambda x: torch.linalg.eigvalsh(x), SPD),
    "linalg.inv": (lambda x: torch.linalg.inv(x), SPD),
    "linalg.tensorinv": (lambda x: torch.linalg.tensorinv(x, ind=1), SPD),
    "linalg.tensorsolve": (lambda x: torch.linalg.tensorsolve(x, X[0]), SPD),
    "linalg.lstsq": (lambda x: torch.linalg.lstsq(x, X).solution, SPD),
    "linalg.qr": (lambda x: torch.linalg.qr(x).R.abs(), SPD),
    "linalg.eigh": (lambda x: torch.linalg.eigh(x).eigenvalues, SPD),
    "fft.fft": (lambda x: torch.fft.fft(x), X),
    "fft.rfft2": (lambda x: torch.fft.rfft2(x), X),
    "fft.hfft": (lambda x: torch.fft.hfft(x), X),
    "fft.ihfft": (lambda x: torch.fft.ihfft(x), X),
    "fft.fftn": (lambda x: torch.fft.fftn(x), X),
}


@pytest.mark.parametrize("name", CPU_FLOAT_OPS)
@pytest.mark.parametrize("from_half", [False, True])
def test_ops_that_autocast_widens_on_the_cpu(half: torch.dtype, name: str, from_half: bool) -> None:
    """Many have no half kernels at all. FP32 on what was half: the very same values."""
    op, x = CPU_FLOAT_OPS[name]
    x = x.to(half) if from_half else x
    actual = op(x)
    assert actual.dtype in (torch.float32, torch.complex64)
    with amp.disable_casts():
        torch.testing.assert_close(actual, op(x.float()))


@pytest.mark.parametrize("name", FOLLOWING_OPS)
@pytest.mark.parametrize("from_half", [False, True])
def test_other_ops_follow_their_input(half: torch.dtype, name: str, from_half: bool) -> None:
    x = X.to(half) if from_half else X
    assert FOLLOWING_OPS[name](x).dtype is x.dtype


@pytest.mark.parametrize("name", PROMOTING_OPS)
@pytest.mark.parametrize("left_half", [False, True])
@pytest.mark.parametrize("right_half", [False, True])
def test_promotion_to_the_widest(
    half: torch.dtype, name: str, left_half: bool, right_half: bool
) -> None:
    a, b = (X.to(half) if is_half else X for is_half in (left_half, right_half))
    expected = half if left_half and right_half else torch.float32
    if name == "bilinear":
        expected = torch.float32  # its weight here is
    assert PROMOTING_OPS[name](a, b).dtype is expected


def test_comparisons_of_mixed_types(half: torch.dtype) -> None:
    a, b = torch.ones(2, dtype=half), torch.ones(2)
    assert (a == b).all()
    assert not (a < b).any()
    assert torch.equal(a, b)


def test_doubles_and_integers_are_left_alone(half: torch.dtype) -> None:
    assert (X.double() @ X.double()).dtype is torch.float64
    assert F.softmax(X.double(), -1).dtype is torch.float64
    assert torch.dot(X[0].double(), X[0]).dtype is torch.float64
    assert LABELS.sum().dtype is torch.int64
    z = X.to(torch.complex64)
    assert (z @ z).dtype is torch.complex64


# In place and out=.


def test_in_place_ops_keep_their_dtype(half: torch.dtype) -> None:
    for name in ("add_", "mul_", "sub_", "div_", "atan2_"):
        assert getattr(X.to(half), name)(X).dtype is half
        assert getattr(X.clone(), name)(X.to(half)).dtype is torch.float32
    y = x = X.to(half)
    y += X
    assert y is x
    assert x.dtype is half
    assert X.to(half).addmm_(X, X).dtype is half
    assert X.clone().addmm_(X.to(half), X).dtype is torch.float32


@pytest.mark.parametrize("name", ["exp_", "log_", "reciprocal_", "rsqrt_", "cumsum_", "pow_"])
def test_fp32_ops_refuse_to_write_to_half_in_place(half: torch.dtype, name: str) -> None:
    args = {"cumsum_": (0,), "pow_": (2,)}.get(name, ())
    with pytest.raises(NotImplementedError, match=f"{name} runs in FP32 and cannot write to"):
        getattr(X.to(half), name)(*args)
    assert getattr(X.clone(), name)(*args).dtype is torch.float32
    with amp.disable_casts():
        assert getattr(X.to(half), name)(*args).dtype is half


def test_out_is_left_alone(half: torch.dtype) -> None:
    out = torch.empty(4, 4)
    torch.mm(X, X, out=out)
    assert torch.equal(out, _plain(lambda: X @ X))
    torch.exp(X, out=out)
    assert torch.equal(out, X.exp())


def _plain(op: Any) -> Any:
    with amp.disable_casts():
        return op()


def test_binary_cross_entropy_is_banned_on_half(half: torch.dtype) -> None:
    p = X.sigmoid()
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss.*input.float()") as caught:
        F.binary_cross_entropy(p.to(half), p)
    assert isinstance(caught.value, amp.AmpError)
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(p, p.to(half))
    assert F.binary_cross_entropy(p, p).dtype is torch.float32
    with amp.disable_casts():
        F.binary_cross_entropy(p.to(half), p.to(half))


# Switching off.


def test_disable_casts_nests_and_survives_exceptions(half: torch.dtype) -> None:
    with pytest.raises(KeyError), amp.disable_casts():
        with amp.disable_casts():
            assert (X @ X).dtype is torch.float32
        assert (X @ X).dtype is torch.float32
        raise KeyError
    assert (X @ X).dtype is half


def test_disable_casts_is_for_this_thread(half: torch.dtype) -> None:
    seen = []
    with amp.disable_casts():
        thread = threading.Thread(target=lambda: seen.append((X @ X).dtype))
        thread.start()
        thread.join()
        assert (X @ X).dtype is torch.float32
    assert seen == [half]


def test_disable_casts_without_casts_does_nothing() -> None:
    with amp.disable_casts():
        assert (X @ X).dtype is torch.float32
    amp.initialize(linear(), opt_level="O2")
    with amp.disable_casts():
        pass


def test_casts_are_off_inside_the_optimizer() -> None:
    seen = []

    class Nosy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((X @ X).dtype)
            if len(seen) == 2:
                raise KeyError
            return super().step(closure)

    model = linear()
    model, optimizer = initialize(model, Nosy(model.parameters(), lr=0.1), "O1")
    optimizer.step()
    with pytest.raises(KeyError):
        optimizer.step()
    assert seen == [torch.float32] * 2
    assert (X @ X).dtype is torch.float16


def test_policy_names_exist_in_this_torch(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        caster = OpCaster(load_policy(dtype))
        caster.install()
        caster.close()
    assert not caplog.records


def test_patched_functions_keep_their_names(half: torch.dtype) -> None:
    assert F.linear.__name__ == "linear"
    assert torch.exp.__wrapped__ is not None
    assert "exp" in (torch.exp.__doc__ or "")
    assert pickle.loads(pickle.dumps(F.gelu)) is F.gelu


# Training.


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_gradients_come_in_fp32_and_are_right(level: str) -> None:
    reference, model = conv_net().double(), conv_net()
    model, optimizer = initialize(model, adamw(model), level)
    x, y = batch()
    F.cross_entropy(reference(x.double()), y).backward()
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    ours = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
    bound = 2e-2 if level == "O4" else 3e-3
    assert torch.dist(ours, exact) <= bound * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_forward_gives_the_same_gradients(level: str, use_reentrant: bool) -> None:
    def run(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        model = nn.ModuleList([layer, nn.LayerNorm(6), layer])  # one weight used twice

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, x: Tensor) -> Tensor:
                for part in self.parts:
                    x = checkpoint(part, x, use_reentrant=use_reentrant) if checkpointed else part(x)
                return x.float().pow(2).mean()

        net = Net()
        net, optimizer = initialize(net, sgd(net), level)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with amp.scale_loss(net(x), optimizer) as scaled_loss:
            scaled_loss.backward()
        return [p.grad for p in net.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


# The weight cache.


class Twice(nn.Module):
    """Uses one weight twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight)


def count_casts(function: Any) -> int:
    """How many times a 4x4 FP32 parameter is cast to half while `function` runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == (4, 4):
                self.count += args[0].dtype is torch.float32
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        function()
    return counter.count


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_used_twice_is_cast_once_and_gets_both_gradients(grad: bool) -> None:
    model = Twice()
    model, optimizer = initialize(model, sgd(model), "O1")
    x = torch.ones(1, 4)
    with torch.set_grad_enabled(grad):
        assert count_casts(lambda: model(x)) == 1
        assert count_casts(lambda: F.linear(F.linear(x, model.weight), model.weight)) == 2
    if grad:
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(model.weight.grad, torch.ones(4, 4) * 0.5 + torch.ones(4, 4) * 0.5)


def change_in_place(model: Twice) -> None:
    with torch.no_grad():
        model.weight.mul_(2)


def change_data(model: Twice) -> None:
    model.weight.data.mul_(2)  # an EMA swap as scripts write it: no version counter sees it


def replace_data(model: Twice) -> None:
    model.weight.data = model.weight.data * 2


def load(model: Twice) -> None:
    model.load_state_dict({"weight": model.weight.detach() * 2})


@pytest.mark.parametrize("change", [change_in_place, change_data, replace_data, load])
@pytest.mark.parametrize("grad", [True, False])
def test_no_weight_is_ever_stale(change: Any, grad: bool) -> None:
    model = amp.initialize(Twice(), opt_level="O1")
    x = torch.ones(1, 4)
    with torch.set_grad_enabled(grad):
        assert (model(x) == 0.25).all()
        change(model)
        assert (model(x) == 1).all()


def test_evaluation_between_training_steps_keeps_the_gradients() -> None:
    model = Twice()
    model, optimizer = initialize(model, sgd(model), "O1")
    x = torch.ones(1, 4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(x)
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad is not None
        model.weight.requires_grad_(False)
        model(x)
        model.weight.requires_grad_(True)


def test_a_no_grad_part_inside_a_forward_does_not_cut_the_graph() -> None:
    class Peek(Twice):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                F.linear(x, self.weight)
            return super().forward(x)

    model = amp.initialize(Peek(), opt_level="O1")
    model(torch.ones(1, 4)).float().sum().backward()
    assert model.weight.grad is not None


def test_nothing_is_held_after_a_forward_even_one_that_raises() -> None:
    class Breaks(Twice):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError

    model = amp.initialize(Breaks(), opt_level="O1")
    for _ in range(3):
        with pytest.raises(KeyError):
            model(torch.ones(1, 4))
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            model.weight.mul_(2)
        assert (F.linear(torch.ones(1, 4), model.weight) == model.weight[0, 0]).all()


def test_evaluation_does_not_grow_memory() -> None:
    model = amp.initialize(conv_net(), opt_level="O1").eval()
    x, _ = batch()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    with torch.no_grad():
        model(x)
        before = tensors()
        for _ in range(50):
            model(x)
        assert tensors() <= before


def test_a_second_backward_through_a_cached_cast() -> None:
    model = Twice()
    model, optimizer = initialize(model, sgd(model), "O1")
    out = model(torch.ones(1, 4)).float().sum()
    with amp.scale_loss(out, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        scaled_loss.backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))


def test_double_backward() -> None:
    """A gradient penalty: the gradient of a gradient's norm."""
    model = Twice()
    model, _ = initialize(model, sgd(model), "O1")
    x = torch.ones(1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).float().pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()
    assert (model.weight.grad != 0).any()


@pytest.mark.parametrize("after", [False, True])
def test_transformer_encoders_evaluate(half: torch.dtype, after: bool) -> None:
    """Torch's fast path for inference takes half inputs and FP32 weights for granted to agree."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 5, 8)
    with amp.disable_casts(), torch.no_grad():
        expected = encoder(x)
    with torch.no_grad():
        out = encoder(x.to(half) if after else x)
    torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=5e-2)


def test_a_step_in_one_thread_leaves_the_casts_of_others_alone() -> None:
    started, finish, seen = threading.Event(), threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((X @ X).dtype)
            started.set()
            assert finish.wait(10)
            return super().step(closure)

    model = linear()
    model, optimizer = initialize(model, Slow(model.parameters(), lr=0.1), "O1")
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert started.wait(10)
    seen.append((X @ X).dtype)
    finish.set()
    thread.join()
    assert seen == [torch.float32, torch.float16]
