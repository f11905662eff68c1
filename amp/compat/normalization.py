"""The names of `apex.normalization`, for torch's norms, which are fused too."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from amp.errors import AmpRuntimeError, truth_of

Shape = int | Sequence[int]


class _Arguments:
    """A mixin with apex's arguments of a norm. `memory_efficient` has no effect."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        affine = truth_of("elementwise_affine", elementwise_affine)
        super().__init__(normalized_shape, eps=eps, elementwise_affine=affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Arguments, nn.LayerNorm):
    """`torch.nn.LayerNorm`."""


class FusedRMSNorm(_Arguments, nn.RMSNorm):
    """`torch.nn.RMSNorm`."""


class _Mixed:
    """A mixin for norms whose output has the dtype of their weight. They need a weight."""

    elementwise_affine: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.elementwise_affine:
            raise AmpRuntimeError(
                f"{type(self).__name__} gives its output the dtype of its weight, and with "
                "elementwise_affine=False there is none. Use "
                f"{type(self).__name__.removeprefix('Mixed')}"
            )


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """A layer norm whose output has the dtype of its weight, not of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the norm of the input, in the weight's dtype."""
        weight, bias = self.weight.float(), self.bias.float()
        wide = F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)
        return wide.to(self.weight.dtype)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """An RMS norm whose output has the dtype of its weight, not of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of the input, in the weight's dtype."""
        wide = F.rms_norm(x.float(), list(self.normalized_shape), self.weight.float(), self.eps)
        return wide.to(self.weight.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the layer norm of an input."""
    return F.layer_norm(input, _sizes(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm of an input, times a weight and with a bias."""
    return F.layer_norm(input, _sizes(normalized_shape), weight, bias, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the RMS norm of an input."""
    return F.rms_norm(input, _sizes(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the RMS norm of an input, times a weight."""
    return F.rms_norm(input, _sizes(normalized_shape), weight, eps)


def _sizes(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


class _Function:
    """Stands in for a `torch.autograd.Function` of apex: `apply` takes the arguments of `forward`."""

    forward: Callable[..., Tensor]

    @classmethod
    def apply(cls, *args: Any) -> Tensor:
        """Return `forward` of the arguments."""
        return cls.forward(None, *args)


class FusedLayerNormFunction(_Function):
    """`fused_layer_norm`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Return the layer norm of an input."""
        return fused_layer_norm(input, normalized_shape, eps)


class FusedLayerNormAffineFunction(_Function):
    """`fused_layer_norm_affine`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the layer norm of an input, times a weight and with a bias."""
        return fused_layer_norm_affine(input, weight, bias, normalized_shape, eps)


class FusedRMSNormFunction(_Function):
    """`fused_rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Return the RMS norm of an input."""
        return fused_rms_norm(input, normalized_shape, eps)


class FusedRMSNormAffineFunction(_Function):
    """`fused_rms_norm_affine`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the RMS norm of an input, times a weight."""
        return fused_rms_norm_affine(input, weight, normalized_shape, eps)
