"""One call of every op of native autocast's policies and of apex's lists, in each of its spellings.

A row is a function's full name and arguments in FP32 that it takes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp.casting.op_names import resolve


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, Y, V, B = randn(4, 4), randn(4, 4).T.contiguous() + 0.5, randn(4), randn(2, 4, 4)
UNIT = X.sigmoid() * 0.8 + 0.1  # in (0, 1), where acos, log and erfinv are at home
SPD = X @ X.T + 4 * torch.eye(4)
LOW = torch.linalg.cholesky(SPD)
SIGNAL, IMAGE, VOLUME = randn(2, 4, 8), randn(2, 4, 6, 6), randn(2, 4, 6, 6, 6)
LABELS, SIGNS = torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, -1.0, 1.0, -1.0])
INDEX = torch.zeros(4, 4, dtype=torch.long)
POOLED_1D = F.max_pool1d(SIGNAL, 2, return_indices=True)
POOLED = F.max_pool2d(IMAGE, 2, return_indices=True)
POOLED_3D = F.max_pool3d(VOLUME, 2, return_indices=True)
LU = torch.linalg.lu_factor(SPD)
GRID, GRID_3D = randn(2, 3, 3, 2).tanh(), randn(2, 2, 2, 2, 3).tanh()
Q = randn(1, 2, 4, 4)
ROWS = torch.tensor([0, 2])

Category = Literal["half", "float", "promote", "follows"]


@dataclass(frozen=True)
class Row:
    """One call, and what its dtype depends on."""

    category: Category
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.op

    def __call__(self, convert: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
        """Make the call, with the function found by its name now and `convert` on every tensor."""
        place, _, name = self.op.rpartition(".")
        function = getattr(operator, name) if place == "operator" else getattr(resolve(place), name)
        args = [_map(convert, value) for value in self.args]
        return function(*args, **{key: _map(convert, value) for key, value in self.kwargs.items()})


def is_there(name: str) -> bool:
    """Whether torch has a function of a matrix that it may have removed, or left as one that raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(torch, name)(SPD)
        except (AttributeError, RuntimeError):
            return False
    return True


device = "cpu"
"""Where rows make their calls; tests on a GPU set it."""


def _map(convert: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return convert(value.to(device, copy=True))
    if isinstance(value, (list, tuple)):
        return type(value)([_map(convert, item) for item in value])
    return value


def rows(category: Category, places: str, name: str, *args: Any, **kwargs: Any) -> Iterator[Row]:
    """Yield one row for each place: T for torch.Tensor, t for torch, F, L for linalg, and so on."""
    where = {
        "t": "torch",
        "T": "torch.Tensor",
        "F": "torch.nn.functional",
        "L": "torch.linalg",
        "f": "torch.fft",
        "s": "torch.special",
        "V": "torch._VF",
        "o": "operator",
    }
    for place in places:
        yield Row(category, f"{where[place]}.{name}", args, kwargs)


def half_rows() -> Iterator[Row]:
    for n, x in ((1, SIGNAL), (2, IMAGE), (3, VOLUME)):
        yield from rows("half", "tF", f"conv{n}d", x, randn(3, 4, *[2] * n), randn(3))
        yield from rows("half", "F", f"conv{n}d", x, randn(3, 4, *[3] * n), padding="same")
        yield from rows("half", "tF", f"conv_transpose{n}d", x, randn(4, 3, *[2] * n))
    yield from rows("half", "tF", "conv_tbc", randn(5, 2, 4), randn(3, 4, 4), V)
    convolution = (IMAGE, randn(3, 4, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    yield from rows("half", "t", "convolution", *convolution)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    yield from rows("half", "F", "grouped_mm", randn(16, 16), randn(2, 16, 16), offs=ends)
    yield from rows("half", "t", "_grouped_mm", randn(16, 16), randn(2, 16, 16), offs=ends)
    yield from rows("half", "F", "linear", X, Y, V)
    yield from rows("half", "ttT", "prelu", X, V[:1])
    yield from rows("half", "F", "prelu", X, V[:1])
    yield from rows("half", "tT", "addmm", X, X, Y)
    yield from rows("half", "tT", "addmv", V, X, V)
    yield from rows("half", "tT", "addr", X, V, V)
    yield from rows("half", "tTL", "matmul", X, Y)
    yield from rows("half", "o", "matmul", X, Y)
    yield from rows("half", "T", "__matmul__", X, Y)
    yield from rows("half", "T", "__rmatmul__", X, Y)
    yield from rows("half", "tT", "mm", X, Y)
    yield from rows("half", "tT", "mv", X, V)
    yield from rows("half", "tT", "bmm", B, B)
    yield from rows("half", "tT", "addbmm", X, B, B)
    yield from rows("half", "tT", "baddbmm", B, B, B)
    yield from rows("half", "t", "addmm", X, X, Y, beta=0.5, alpha=2)
    yield from rows("half", "t", "einsum", "ij,jk->ik", X, Y)
    yield from rows("half", "t", "einsum", "ij,jk->ik", [X, Y])
    yield from rows("half", "L", "multi_dot", [X, Y, X])
    yield from rows("half", "L", "vecdot", X, Y)
    yield from rows("half", "F", "scaled_dot_product_attention", Q, Q, Q)
    cell = (randn(2, 5), randn(2, 7), randn(7, 5), randn(7, 7), randn(7), randn(7))
    gru = (*cell[:2], randn(21, 5), randn(21, 7), randn(21), randn(21))
    lstm = (cell[0], [randn(2, 7), randn(2, 7)], randn(28, 5), randn(28, 7), randn(28), randn(28))
    yield from rows("half", "tV", "rnn_tanh_cell", *cell)
    yield from rows("half", "tV", "rnn_relu_cell", *cell)
    yield from rows("half", "tV", "gru_cell", *gru)
    yield from rows("half", "tV", "lstm_cell", *lstm)


def float_rows() -> Iterator[Row]:
    for name in ("acos", "asin", "erfinv", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt"):
        yield from rows("float", "tT", name, UNIT)
    for name in ("cosh", "exp", "expm1", "sinh", "tan", "sum", "std", "var", "prod", "norm"):
        yield from rows("float", "tT", name, X)
    for name in ("arccos", "arcsin"):
        yield from rows("float", "tT", name, UNIT)
    for name in ("erfinv", "expm1", "log1p"):
        yield from rows("float", "s", name, UNIT)
    yield from rows("float", "tT", "pow", UNIT, 3)
    yield from rows("float", "tT", "pow", UNIT, X)
    yield from rows("float", "t", "pow", 2.0, X)
    yield from rows("float", "o", "pow", UNIT, 3)
    yield from rows("float", "o", "pow", 2, X)
    yield from rows("float", "o", "truediv", 1, UNIT)
    for name in ("cumsum", "cumprod"):
        yield from rows("float", "tT", name, X, 0)
    for name in ("softmax", "log_softmax"):
        yield from rows("float", "tTFs", name, X, -1)
    yield from rows("float", "F", "softmin", X, -1)
    for name in ("sum", "prod", "std", "var"):
        yield from rows("float", "tT", name, X, 0)
    yield from rows("float", "tTs", "logsumexp", X, 0)
    yield from rows("float", "tT", "norm", X, 2, 0)
    yield from rows("float", "t", "nuclear_norm", X)
    yield from rows("float", "t", "frobenius_norm", X, [0])
    yield from rows("float", "t", "norm_except_dim", X, 2, 0)
    yield from rows("float", "tT", "renorm", X, 2, 0, 1.0)
    yield from rows("float", "tT", "dist", X, Y)
    yield from rows("float", "t", "cdist", X, Y)
    yield from rows("float", "tF", "pdist", X)
    for name in ("cosine_similarity", "pairwise_distance"):
        yield from rows("float", "tF", name, X, Y)
    yield from rows("float", "L", "norm", X)
    yield from rows("float", "L", "vector_norm", X)
    yield from rows("float", "L", "matrix_norm", X)
    yield from rows("float", "L", "matrix_norm", X, "nuc")
    yield from rows("float", "tF", "layer_norm", X, (4,), V, V)
    yield from rows("float", "t", "native_layer_norm", X, (4,), V, V, 1e-5)
    yield from rows("float", "tF", "rms_norm", X, (4,), V)
    yield from rows("float", "tF", "group_norm", IMAGE, 2, V, V)
    yield from rows("float", "F", "local_response_norm", IMAGE, 2)
    yield from rows("float", "F", "normalize", X)
    yield from rows("float", "F", "softplus", X)
    yield from rows("float", "F", "gelu", X)
    yield from loss_rows()
    yield from resampling_rows()
    yield from cpu_rows()


def loss_rows() -> Iterator[Row]:
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield from rows("float", "F", name, X, UNIT)
    yield from rows("float", "t", "kl_div", X, UNIT)
    yield from rows("float", "F", "kl_div", X, UNIT, reduction="batchmean")
    for name in ("nll_loss", "cross_entropy", "multi_margin_loss"):
        yield from rows("float", "F", name, X, LABELS)
    yield from rows("float", "F", "nll_loss", IMAGE, torch.zeros(2, 6, 6, dtype=torch.long))
    yield from rows("float", "F", "cross_entropy", X, UNIT)
    yield from rows("float", "F", "soft_margin_loss", V, SIGNS)
    yield from rows("float", "F", "multilabel_margin_loss", X, INDEX)
    yield from rows("float", "F", "multilabel_soft_margin_loss", X, UNIT)
    yield from rows("float", "F", "gaussian_nll_loss", X, Y, UNIT)
    poisson = (X, UNIT, True, False, 1e-8, 1)
    yield from rows("float", "t", "poisson_nll_loss", *poisson)
    yield from rows("float", "F", "poisson_nll_loss", X, UNIT)
    yield from rows("float", "tF", "binary_cross_entropy_with_logits", X, UNIT)
    yield from rows("float", "tF", "hinge_embedding_loss", V, SIGNS)
    yield from rows("float", "tF", "cosine_embedding_loss", X, Y, SIGNS)
    yield from rows("float", "tF", "margin_ranking_loss", V, V.flip(0), SIGNS)
    yield from rows("float", "tF", "triplet_margin_loss", X, Y, UNIT)
    yield from rows("float", "F", "triplet_margin_with_distance_loss", X, Y, UNIT)
    lengths = (torch.tensor([6, 6]), torch.tensor([2, 2]))
    spoken = randn(6, 2, 4).log_softmax(-1)
    yield from rows("float", "tF", "ctc_loss", spoken, torch.ones(2, 2, dtype=torch.long), *lengths)


def resampling_rows() -> Iterator[Row]:
    for mode, x in (
        ("nearest", SIGNAL),
        ("linear", SIGNAL),
        ("nearest", IMAGE),
        ("nearest-exact", IMAGE),
        ("bilinear", IMAGE),
        ("bicubic", IMAGE),
        ("area", IMAGE),
        ("nearest", VOLUME),
        ("trilinear", VOLUME),
    ):
        yield from rows("float", "F", "interpolate", x, scale_factor=2.0, mode=mode)
    for mode in ("bilinear", "bicubic"):
        yield from rows("float", "F", "interpolate", IMAGE, size=(3, 3), mode=mode, antialias=True)
    yield from rows("float", "F", "grid_sample", IMAGE, GRID, align_corners=False)
    yield from rows("float", "t", "grid_sampler", IMAGE, GRID, 0, 0, False)
    yield from rows("float", "t", "grid_sampler_2d", IMAGE, GRID, 0, 0, False)
    yield from rows("float", "t", "grid_sampler_3d", VOLUME, GRID_3D, 0, 0, False)
    for mode in ("reflect", "replicate"):
        yield from rows("float", "F", "pad", SIGNAL, (1, 1), mode)
        yield from rows("float", "F", "pad", IMAGE, (1, 1, 1, 1), mode=mode)


def cpu_rows() -> Iterator[Row]:
    """What torch.autocast widens on the CPU alone."""
    yield from rows("float", "F", "avg_pool3d", VOLUME, 2)
    yield from rows("float", "F", "adaptive_avg_pool3d", VOLUME, 2)
    yield from rows("float", "tF", "max_pool3d", VOLUME, 2)
    yield from rows("float", "F", "adaptive_max_pool3d", VOLUME, 2)
    sample = UNIT.flatten()
    yield from rows(
        "float", "F", "fractional_max_pool2d", IMAGE, 2, 3, _random_samples=sample.view(2, 4, 2)
    )
    samples = torch.cat([sample, sample]).view(2, 4, 4)[..., :3].contiguous()
    yield from rows("float", "F", "fractional_max_pool3d", VOLUME, 2, 3, _random_samples=samples)
    yield from rows("float", "F", "max_unpool1d", *POOLED_1D, 2)
    yield from rows("float", "F", "max_unpool2d", *POOLED, 2)
    yield from rows("float", "F", "max_unpool3d", *POOLED_3D, 2)
    for name in ("quantile", "nanquantile"):
        yield from rows("float", "tT", name, X, 0.3)
        yield from rows("float", "t", name, X, UNIT[0])
    window = torch.ones(4)
    yield from rows("float", "tT", "stft", V.repeat(4), 4, window=window, return_complex=True)
    for name in ("trace", "cov", "corrcoef"):
        yield from rows("float", "tT", name, X)
    for name in (
        "inverse",
        "pinverse",
        "svd",
        *(name for name in ("cholesky", "qr") if is_there(name)),
    ):
        yield from rows("float", "tT", name, SPD)
    if hasattr(torch.linalg, "matrix_sqrth"):  # since torch 2.14
        yield from rows("float", "L", "matrix_sqrth", SPD)
    yield from rows("float", "tTL", "matrix_power", SPD, 2)
    yield from rows("float", "tT", "lu", SPD)
    yield from rows("float", "tT", "cholesky_inverse", LOW)
    yield from rows("float", "tT", "cholesky_solve", X, LOW)
    yield from rows("float", "tT", "lu_solve", X, *LU)
    yield from rows("float", "L", "lu_solve", *LU, X)
    yield from rows("float", "tT", "geqrf", X)
    yield from rows("float", "tT", "orgqr", *torch.geqrf(X))
    yield from rows("float", "tT", "ormqr", *torch.geqrf(X), Y)
    yield from rows("float", "tT", "triangular_solve", X, LOW, False)
    yield from rows("float", "t", "polar", UNIT, X)
    yield from rows("float", "t", "view_as_complex", randn(4, 2))
    yield from rows("float", "t", "fake_quantize_per_tensor_affine", X, 0.1, 0, -128, 127)
    of_channels = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
    yield from rows("float", "t", "fake_quantize_per_channel_affine", X, *of_channels, 0, -128, 127)
    for name in ("cond", "matrix_rank", "cholesky", "cholesky_ex", "svd", "svdvals", "eig", "eigvals"):
        yield from rows("float", "L", name, SPD)
    for name in ("eigh", "eigvalsh", "inv", "inv_ex", "qr", "pinv"):
        yield from rows("float", "L", name, SPD)
    yield from rows("float", "L", "solve", SPD, X)
    yield from rows("float", "L", "lstsq", SPD, X)
    yield from rows("float", "L", "householder_product", *torch.geqrf(X))
    yield from rows("float", "L", "tensorinv", SPD, 1)
    yield from rows("float", "L", "tensorsolve", SPD, V)
    for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2"):
        yield from rows("float", "f", name, X)
    for name in ("rfftn", "irfftn", "hfft", "ihfft", "hfft2", "ihfft2", "hfftn", "ihfftn"):
        yield from rows("float", "f", name, X)


def promote_rows() -> Iterator[Row]:
    for name in ("addcdiv", "addcmul"):
        yield from rows("promote", "tT", name, X, X, UNIT)
    for name in ("atan2", "arctan2", "equal"):
        yield from rows("promote", "tT", name, X, UNIT)
    for name in ("dot", "vdot", "inner"):
        yield from rows("promote", "tT", name, V, V.flip(0))
    yield from rows("promote", "tT", "cross", randn(4, 3), randn(4, 3) + 1, 1)
    yield from rows("promote", "L", "cross", randn(4, 3), randn(4, 3) + 1)
    yield from rows("promote", "tF", "bilinear", X, Y, B, None)
    yield from rows("promote", "t", "tensordot", X, Y, 1)
    yield from rows("promote", "tT", "lerp", X, Y, 0.5)
    yield from rows("promote", "tT", "scatter_add", X, 0, INDEX, Y)
    yield from rows("promote", "tT", "index_put", X, (ROWS,), Y[:2])
    yield from rows("promote", "tT", "index_copy", X, 0, ROWS, Y[:2])
    for name in ("cat", "concat", "concatenate", "stack"):
        yield from rows("promote", "t", name, [X, Y])
    yield from rows("promote", "t", "cat", (X, Y), dim=1)
    for name in ("add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge"):
        yield from rows("promote", "o", name, X, Y)
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"):
        yield from rows("promote", "tT", name, X, Y)
    yield from rows("promote", "t", "where", X > 0, X, Y)


def following_rows() -> Iterator[Row]:
    for name in ("relu", "silu", "elu", "dropout", "leaky_relu", "hardtanh"):
        yield from rows("follows", "F", name, X)
    for name in ("mean", "relu", "sigmoid", "tanh", "sqrt", "abs", "sin", "amax", "neg"):
        yield from rows("follows", "tT", name, X)
    yield from rows("follows", "F", "max_pool2d", IMAGE, 2)
    yield from rows("follows", "F", "avg_pool2d", IMAGE, 2)
    yield from rows("follows", "F", "adaptive_avg_pool2d", IMAGE, 2)
    yield from rows("follows", "F", "embedding", LABELS, X)
    yield from rows("follows", "F", "batch_norm", X, V.clone(), UNIT[0], training=True)
    yield from rows("follows", "F", "pad", IMAGE, (1, 1))
    yield from rows("follows", "F", "pad", IMAGE, (1, 1, 1, 1), mode="circular")
    yield from rows("follows", "o", "add", X, 1.0)
    yield from rows("follows", "o", "getitem", X, 0)


HALF, FLOAT = tuple(half_rows()), tuple(float_rows())
PROMOTE, FOLLOWS = tuple(promote_rows()), tuple(following_rows())

MODULES: dict[str, tuple[Category, Callable[[], nn.Module], Tensor]] = {
    "Linear": ("half", lambda: nn.Linear(4, 3), X),
    "Conv1d": ("half", lambda: nn.Conv1d(4, 3, 2), SIGNAL),
    "Conv2d": ("half", lambda: nn.Conv2d(4, 3, 2), IMAGE),
    "Conv3d": ("half", lambda: nn.Conv3d(4, 3, 2), VOLUME),
    "ConvTranspose2d": ("half", lambda: nn.ConvTranspose2d(4, 3, 2), IMAGE),
    "PReLU": ("half", lambda: nn.PReLU(), X),
    "LSTMCell": ("half", lambda: nn.LSTMCell(4, 3), X),
    "GRUCell": ("half", lambda: nn.GRUCell(4, 3), X),
    "RNNCell": ("half", lambda: nn.RNNCell(4, 3), X),
    "LSTM": ("half", lambda: nn.LSTM(4, 3, batch_first=True), B),
    "GRU": ("half", lambda: nn.GRU(4, 3, 2, bidirectional=True), B),
    "Softmax": ("float", lambda: nn.Softmax(-1), X),
    "LogSoftmax": ("float", lambda: nn.LogSoftmax(-1), X),
    "LayerNorm": ("float", lambda: nn.LayerNorm(4), X),
    "RMSNorm": ("float", lambda: nn.RMSNorm(4), X),
    "GroupNorm": ("float", lambda: nn.GroupNorm(2, 4), IMAGE),
    "GELU": ("float", lambda: nn.GELU(), X),
    "Softplus": ("float", lambda: nn.Softplus(), X),
    "Upsample": ("float", lambda: nn.Upsample(scale_factor=2), IMAGE),
    "ReflectionPad2d": ("float", lambda: nn.ReflectionPad2d(1), IMAGE),
    "ReplicationPad3d": ("float", lambda: nn.ReplicationPad3d(1), VOLUME),
    "MaxPool3d": ("float", lambda: nn.MaxPool3d(2), VOLUME),
    "BatchNorm2d": ("follows", lambda: nn.BatchNorm2d(4), IMAGE),
    "ReLU": ("follows", lambda: nn.ReLU(), X),
    "MaxPool2d": ("follows", lambda: nn.MaxPool2d(2), IMAGE),
}

INTERNAL = {
    "_addmm_activation",
    "_convolution",
    "_grid_sampler_2d_cpu_fallback",
    "_lu_with_info",
    "_native_multi_head_attention",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "chain_matmul",  # deprecated, it calls multi_dot
    "_cudnn_rnn",  # in torch's builds for CUDA
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "mkldnn_rnn_layer",
    "multilabel_margin_loss_forward",
    "binary_cross_entropy",  # banned: a test of its own
}
"""What torch.autocast registers and no script calls: kernels behind the ops of the rows."""

UNDER_OTHER_NAMES = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss2d": "nll_loss",
    "reflection_pad1d": "pad",
    "reflection_pad2d": "pad",
    "replication_pad1d": "pad",
    "replication_pad2d": "pad",
    "replication_pad3d": "pad",
    **{
        f"{prefix}upsample_{mode}": "interpolate"
        for prefix in ("", "_")
        for mode in (
            "nearest1d",
            "nearest2d",
            "nearest3d",
            "nearest_exact1d",
            "nearest_exact2d",
            "nearest_exact3d",
            "linear1d",
            "bilinear2d",
            "trilinear3d",
            "bicubic2d",
            "bilinear2d_aa",
            "bicubic2d_aa",
        )
    },
}
"""The function that scripts call for what torch.autocast registers."""
