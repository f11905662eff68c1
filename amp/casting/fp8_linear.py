"""One linear layer in FP8: three products, and what is kept from forward to backward.

    output      = input @ weight.T          input by row, weight by row
    grad_input  = grad_output @ weight      grad_output by row, weight by column
    grad_weight = grad_output.T @ input     grad_output by column, input by column

"By row" and "by column" are those of `amp.kernels.quantize`. Kept are the input by column, 1 byte for
each number, once for layers that are given the same tensor, and the weight itself, which the backward
quantizes again: a copy in FP8 would take another byte for each parameter, and hold what FSDP frees.
Gradients come out in the dtype of what they are gradients of. The bias is added to the product.
"""

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp.casting.fp8_history import GRADIENT, INPUT, WEIGHT, AmaxHistory
from amp.casting.regions import disable_casts
from amp.errors import AmpRuntimeError
from amp.kernels.fp8 import Granularity, Operand, Quantized
from amp.kernels.quantize import quantize
from amp.kernels.scaled_mm import scaled_mm
from amp.profiles.fp8_recipe import Fp8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FORMATS = {"hybrid": (E4M3, E4M3, E5M2), "e4m3": (E4M3, E4M3, E4M3)}
"""Of inputs, weights and gradients."""

GRANULARITIES: dict[str, tuple[Granularity, Granularity, Granularity]] = {
    "current": ("tensor", "tensor", "tensor"),
    "delayed": ("tensor", "tensor", "tensor"),
    "rowwise": ("row", "row", "row"),
    "rowwise_gw_hp": ("row", "row", "tensor"),
    "block": ("1x128", "128x128", "128x128"),
    "mxfp8": ("1x32", "1x32", "1x32"),
}
"""What shares a scale in activations, in the weight, and in the weight that gives `grad_input`."""


class Switch:
    """Whether the layers of a session run in FP8."""

    on = True


class Layer(NamedTuple):
    """How one module runs in FP8.

    Attributes:
        recipe: the session's.
        name: of the module, for errors.
        history: what `delayed` remembers, or None.
        number: of the module in the history.
        switch: whether the session is open: copies of a module have no other way to learn that.
    """

    recipe: Fp8Recipe
    name: str
    history: AmaxHistory | None = None
    number: int = 0
    switch: Switch = Switch()

    def runs(self, is_training: bool) -> bool:
        """Whether the module runs in FP8, in training or evaluation."""
        return self.switch.on and (is_training or self.recipe.eval == "fp8")

    def operand(self, values: Tensor, inverse: Tensor, entry: int) -> Operand:
        """Return an input, or a weight by row, from the values and scales that `quantize` returned."""
        granularity = GRANULARITIES[self.recipe.recipe][entry]
        return Operand(values, inverse, granularity, bool(self.recipe.power_of_2_scales))

    def quantize(
        self,
        x: Tensor,
        entry: int,
        *,
        by_row: bool,
        by_column: bool,
        sees: bool = False,
        factor: Tensor | None = None,
    ) -> Quantized:
        """Return a matrix in FP8, as the recipe says for an input, a weight or a gradient."""
        granularity, of_weight, of_columns = GRANULARITIES[self.recipe.recipe]
        if entry == WEIGHT:
            granularity = of_weight if by_row else of_columns
        if self.history is not None and factor is None:
            factor = self.history.factor(self.number, entry, x.device)
        result = quantize(
            x,
            FORMATS[self.recipe.format or "hybrid"][entry],
            granularity,
            by_row=by_row,
            by_column=by_column,
            power_of_2=bool(self.recipe.power_of_2_scales),
            factor=factor,
        )
        if self.history is not None and sees and result.amax is not None:
            self.history.see(self.number, entry, result.amax)
        return result

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, is_training: bool
    ) -> Tensor:
        """Return `x @ weight.T + bias`, `[..., N]`, with products in FP8. The host does not wait.

        Args:
            x: float16, bfloat16 or float32 `[..., K]`.
            weight: likewise, `[N, K]`.
            bias: `[N]`, or None.
            dtype: of what is returned.
            is_training: whether the module is in training, and the history sees this.
        """
        sees = torch.is_grad_enabled() and is_training
        keeps = torch.is_grad_enabled() and weight.requires_grad and self.recipe.grad_weight == "fp8"
        with disable_casts():
            of_x = _quantized_input(x, self, by_column=keeps, sees=sees)
            of_weight = self.quantize(weight.detach(), WEIGHT, by_row=True, by_column=False, sees=sees)
            assert of_x.by_row is not None
            assert of_weight.by_row is not None
            columns = of_x.by_column
            product: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
                x.reshape(-1, x.shape[-1]),
                weight,
                *of_x.by_row[:2],  # values and scales: torch looks for tensors in no tuples
                *((None, None) if columns is None else columns[:2]),
                *of_weight.by_row[:2],
                of_weight.factor,
                dtype,
                self,
                sees,
            )
            if bias is not None:
                product = product + bias.to(dtype)
            return product.reshape(*x.shape[:-1], weight.shape[0])

    def __deepcopy__(self, memo: Any) -> "Layer":
        return self  # a copy of the module goes by what the module has seen


class _Latest(threading.local):
    """The last input that this thread quantized, for the next layer that is given the same tensor."""

    of: "weakref.ref[Tensor] | None" = None
    key: Any = None
    result: Quantized | None = None

    def forget(self, reference: Any) -> None:
        if self.of is reference:
            self.of = self.key = self.result = None


_latest = _Latest()


def _quantized_input(x: Tensor, layer: Layer, by_column: bool, sees: bool) -> Quantized:
    """Return an input in FP8, in rows; as it was returned last, if it is the same."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling() or x.is_leaf:  # a leaf is written to in ways that leave no trace
        return layer.quantize(rows, INPUT, by_row=True, by_column=by_column, sees=sees)
    iteration = None if layer.history is None else (id(layer.history), layer.history.iteration)
    key = (x._version, layer.recipe, iteration, by_column, sees)
    if _latest.of is not None and _latest.of() is x and _latest.key == key:
        assert _latest.result is not None
        return _latest.result
    result = layer.quantize(rows, INPUT, by_row=True, by_column=by_column, sees=sees)
    _latest.of = weakref.ref(x, _latest.forget)
    _latest.key, _latest.result = key, result
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        x_values: Tensor,
        x_inverse: Tensor,
        columns: Tensor | None,
        columns_inverse: Tensor | None,
        weight_values: Tensor,
        weight_inverse: Tensor,
        weight_factor: Tensor | None,
        dtype: torch.dtype,
        layer: Layer,
        sees: bool,
    ) -> Tensor:
        rows = layer.operand(x_values, x_inverse, INPUT)
        weights = layer.operand(weight_values, weight_inverse, WEIGHT)
        return scaled_mm(rows, weights, dtype, fast_accum=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, _, columns, columns_inverse, _, _, factor, ctx.low, ctx.layer, ctx.sees = inputs
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.dtypes = x.dtype, weight.dtype
        kept = x if needs_weight and columns is None else None
        ctx.save_for_backward(kept, weight if needs_x else None, columns, columns_inverse, factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        layer: Layer = ctx.layer
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise AmpRuntimeError(
                f"the gradients of '{layer.name}', which runs in FP8, cannot be differentiated again "
                f"(create_graph=True). Keep the layer out: fp8={{'skip': ['{layer.name}']}}"
            )
        x, weight, columns, columns_inverse, factor = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_dtype, weight_dtype = ctx.dtypes
        grad_x = grad_weight = None
        with disable_casts():
            of_grad = layer.quantize(
                grad,
                GRADIENT,
                by_row=needs_x,
                by_column=needs_weight and columns is not None,
                sees=ctx.sees,
            )
            if needs_x:
                columns_of_weight = layer.quantize(
                    weight, WEIGHT, by_row=False, by_column=True, factor=factor
                ).by_column
                assert of_grad.by_row is not None
                assert columns_of_weight is not None
                of_weight = _scaled_alike(columns_of_weight, of_grad.by_row)
                grad_x = scaled_mm(of_grad.by_row, of_weight, x_dtype)
            if needs_weight and columns is not None:
                assert of_grad.by_column is not None
                of_x = layer.operand(columns, columns_inverse, INPUT)
                grad_weight = scaled_mm(of_grad.by_column, of_x, weight_dtype)
            elif needs_weight:
                grad_weight = (grad.to(ctx.low).t() @ x.to(ctx.low)).to(weight_dtype)
        return grad_x, grad_weight, *[None] * 10


def _scaled_alike(operand: Operand, other: Operand) -> Operand:
    """Return an operand with one scale for all as one with that scale for each row, beside such."""
    if (operand.granularity, other.granularity) != ("tensor", "row"):
        return operand
    inverse = operand.inverse.expand(operand.values.shape[0], 1).contiguous()
    return operand._replace(inverse=inverse, granularity="row")
