"""One linear layer in FP8 or FP4: its three products, and the tensors saved for backward.

    output      = input @ weight.T          input by row, weight by row
    grad_input  = grad_output @ weight      grad_output by row, weight by column
    grad_weight = grad_output.T @ input     grad_output by column, input by column

"By row" and "by column" are those of `amp.kernels.quantize`. Saved for backward are the input by
column, 1 byte for each element, or 9/16 in FP4, shared by layers with the same input, and the weight
itself, which the backward quantizes again: a copy would take more memory, and keep what FSDP frees. A
recipe may keep that copy, the weight by column, instead.

The scale of a whole weight changes rarely. So with `current` each forward tries the factor of the last
one: quantization finds the weight's own amax, too, and does not rely on it. Micro-batches of a step
have the same weights. They are quantized for each all the same, unless `keep_weights: step` asks for
once: a script may write to them in ways that torch does not count.

Gradients have the dtype of their input or weight. The bias is added to the product. A recipe may keep
each product in half precision; in FP4 also that of the output, for the last steps of a training.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from amp.casting import fp8_shards
from amp.casting.fp4_draws import Draws
from amp.casting.fp8_gather import GatheredWeight
from amp.casting.fp8_history import GRADIENT, INPUT, WEIGHT, AmaxHistory
from amp.casting.fp8_switch import Switch
from amp.casting.regions import disable_casts
from amp.distributed import is_sharded
from amp.errors import AmpRuntimeError, warn
from amp.kernels.fp8 import (
    AnyGranularity,
    Fp4Granularity,
    Granularity,
    Operand,
    Quantized,
    amax_of,
    factor_of,
)
from amp.kernels.launch_plans import stream_of
from amp.kernels.philox import Draw
from amp.kernels.quantize import quantize
from amp.kernels.quantize_fp4 import quantize_fp4
from amp.kernels.scaled_mm import scaled_mm
from amp.profiles.fp8_recipe import FP4, GRANULARITIES, Fp8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FORMATS = {"hybrid": (E4M3, E4M3, E5M2), "e4m3": (E4M3, E4M3, E4M3)}
"""The FP8 formats of inputs, weights and gradients."""


class LastFactor:
    """The factor of a module's weight when it was last quantized, on one device and stream."""

    def __init__(self) -> None:
        # One attribute, which threads of several devices write: float32 `[]`, and the place whose later
        # kernels may read it.
        self._last: tuple[Tensor | None, Any] = None, None

    def on(self, device: torch.device, stream: int | None) -> Tensor | None:
        """Return the factor if it is there; None while a CUDA graph is captured."""
        factor, place = self._last
        return factor if stream is not None and place == (device, stream) else None

    def keep(self, factor: Tensor | None, device: torch.device, stream: int | None) -> None:
        """Keep the factor of a weight. One that a CUDA graph writes would not outlive the graph."""
        if stream is not None:
            self._last = factor, (device, stream)


class KeptWeight:
    """A module's weight in FP8 or FP4, for the other forwards of a step."""

    def __init__(self) -> None:
        # One attribute, which threads write: the weight, its key, and the quantized weight.
        self._last: tuple[weakref.ref[Tensor], Any, Quantized] | None = None

    def of(self, key: Any, weight: Tensor, quantize_weight: Callable[[], Quantized]) -> Quantized:
        """Return the quantized weight, from the last call if that had the same tensor and key."""
        if (last := self._last) is not None:
            of, known, found = last
            if of() is weight and known == key:
                return found
        found = quantize_weight()
        self._last = weakref.ref(weight), key, found
        return found


class Layer(NamedTuple):
    """How one module runs in FP8.

    Attributes:
        recipe: the session's recipe.
        name: the module's name, for errors.
        switch: turned off when the session closes; copies of the module share it.
        history: the amax history of `delayed`, or None.
        draws: the counts of FP4's random bits, or None.
        number: the module's index in the history or the counts.
        guess: the factor that the weight had last, or None where it is not tried.
        kept: the quantized weight of this step, or None where it is not kept.
        split: how tensor parallelism has divided the layer, or None.
        gathered: the weight that travels in FP8, or None.
    """

    recipe: Fp8Recipe
    name: str
    switch: Switch
    history: AmaxHistory | None = None
    draws: Draws | None = None
    number: int = 0
    guess: LastFactor | None = None
    kept: KeptWeight | None = None
    split: fp8_shards.Split | None = None
    gathered: GatheredWeight | None = None

    def runs(self, is_training: bool) -> bool:
        """Whether the module runs in FP8 now, in training or evaluation.

        It runs in half precision where its products would be transformed: under `torch.func`, in
        forward-mode differentiation, and in `torch.jit.trace`. This warns once in a session.
        """
        if not (self.switch.on and (is_training or self.recipe.eval != "high")):
            return False
        if torch.compiler.is_compiling() or not _is_transformed():
            return True
        if not self.switch.has_warned:
            self.switch.has_warned = True
            warn(
                f"'{self.name}' and the other layers in {self.recipe.number_format} run in half "
                "precision under torch.func, in forward-mode differentiation and in torch.jit.trace, "
                "which do not support such products"
            )
        return False

    def forward_is_fp4(self, is_training: bool) -> bool:
        """Whether the product of a forward is in FP4."""
        is_high = self.switch.forward_is_high or (not is_training and self.recipe.eval == "high")
        return self.recipe.recipe in FP4 and not is_high

    def operand(self, parts: tuple[Tensor | None, ...], entry: int) -> Operand:
        """Return the operand for an input, or a weight by row, from the result of `_parts_of`."""
        values, inverse, outer = parts
        assert values is not None
        assert inverse is not None
        granularity = self._granularity(entry)
        return Operand(values, inverse, granularity, bool(self.recipe.power_of_2_scales), outer)

    def _granularity(self, entry: int, is_backward: bool = False) -> AnyGranularity:
        """Return which numbers share a scale; those of a weight differ between forward and backward."""
        of_values, of_weight, of_columns = GRANULARITIES[self.recipe.recipe]
        if entry != WEIGHT or self.recipe.square_weights is False:
            return of_values
        return of_columns if is_backward else of_weight

    def _draw(self, device: torch.device) -> Draw | None:
        """Return the random bits for the gradient of a backward, or None to round to nearest."""
        return None if self.draws is None else self.draws.next(self.number, device)

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
        """Return a matrix in FP8 or FP4, as the recipe says for an input, a weight or a gradient.

        Args:
            x: `[M, K]`.
            entry: `INPUT`, `WEIGHT` or `GRADIENT`.
            by_row: whether to quantize by row.
            by_column: whether to quantize by column.
            sees: whether the history records the amax.
            factor: the scale factor, float32 `[]`, or None for that of the history or of `x` itself.
        """
        is_backward = by_column and not by_row  # of a weight
        granularity = self._granularity(entry, is_backward)
        if self.recipe.is_fp4:
            return quantize_fp4(
                x,
                cast(Fp4Granularity, granularity),
                by_row=by_row,
                by_column=by_column,
                hadamard=bool(self.recipe.hadamard) and entry != WEIGHT,
                draw=self._draw(x.device) if entry == GRADIENT else None,
            )
        part = seen = guess = None
        if self.split is not None:
            x = fp8_shards.waited(x)
            # Else ranks with parts of one tensor agree on its amax first.
            is_agreed = factor is not None
            if not is_agreed and self.history is not None:
                is_agreed = not (self.history.is_new and self.history.recipe.reduce_amax)
            part = None if is_agreed else self.split.part(entry)
        is_compiling, is_known = torch.compiler.is_compiling(), factor is not None
        dtype = FORMATS[self.recipe.format or "hybrid"][entry]
        power_of_2 = bool(self.recipe.power_of_2_scales)
        if self.history is not None and factor is None:
            factor, seen = self.history.factor_and_seen(self.number, entry, x.device)
            is_known = is_compiling or not self.history.is_new  # compiled code has one graph for both
        elif is_compiling and granularity == "tensor" and entry != WEIGHT and not (is_known or part):
            # Inductor finds the amax where it computes x. Weights it would read once more.
            factor = factor_of(amax_of(x, granularity).reshape(()), dtype, power_of_2)
            is_known = True
        last = self.guess if entry == WEIGHT and factor is None and part is None else None
        stream = None
        if last is not None and not is_compiling:
            stream = stream_of(x.device)
            guess = last.on(x.device, stream)
        result = quantize(
            x,
            dtype,
            cast(Granularity, granularity),
            by_row=by_row,
            by_column=by_column,
            power_of_2=power_of_2,
            factor=factor,
            is_known=is_known,
            guess=guess,
            seen=seen if sees else None,
            part=part,
        )
        if last is not None and not is_compiling:
            last.keep(result.factor, x.device, stream)
        return result

    def _quantized_weight(self, weight: Tensor, sees: bool, by_column: bool) -> Quantized:
        found = None if self.gathered is None else self.gathered.quantized(weight)
        if found is not None:
            return found

        def quantized() -> Quantized:
            return self.quantize(weight.detach(), WEIGHT, by_row=True, by_column=by_column, sees=sees)

        # An evaluation may run on other weights, written through `.data`: it takes and leaves none.
        if self.kept is None or not sees or torch.compiler.is_compiling():
            return quantized()
        stream = stream_of(weight.device)
        if stream is None:  # a CUDA graph quantizes in each replay
            return quantized()
        key = weight._version, weight.data_ptr(), stream, self.switch.steps
        return self.kept.of(key, weight, quantized)

    def weight_by_column(
        self, weight: Tensor | None, kept: tuple[Tensor | None, ...], factor: Tensor | None
    ) -> Operand:
        """Return the weight by column for a backward: as it was kept, or quantized again."""
        if weight is None:
            return self.operand(kept, WEIGHT)
        columns = self.quantize(weight, WEIGHT, by_row=False, by_column=True, factor=factor).by_column
        assert columns is not None
        return columns

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, is_training: bool
    ) -> Tensor:
        """Return `x @ weight.T + bias`, `[..., N]`, with products in FP8.

        The host does not wait for the device.

        Args:
            x: float16, bfloat16 or float32 `[..., K]`.
            weight: float16, bfloat16 or float32 `[N, K]`.
            bias: `[N]`, or None.
            dtype: the dtype of the result.
            is_training: whether the module is in training mode; only then the history records amaxes.
        """
        if is_sharded(weight):

            def run_part(split: fp8_shards.Split, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
                return self._replace(split=split).run(x, weight, bias, dtype, is_training)

            return fp8_shards.run(self.name, self.recipe, x, weight, bias, run_part)
        sees = torch.is_grad_enabled() and is_training
        trains = torch.is_grad_enabled() and weight.requires_grad
        keeps = trains and self.recipe.grad_weight in ("fp8", "fp4")
        is_high = self.switch.forward_is_high
        keeps_weight = self.recipe.keep_weights and self.recipe.grad_input != "high"
        keeps_weight = keeps_weight and torch.is_grad_enabled() and x.requires_grad
        of_x = of_weight = Quantized(None, None)
        with disable_casts():
            if keeps or not is_high:
                of_x = _quantized_input(x, self, not is_high, keeps, sees)
            if not is_high:
                of_weight = self._quantized_weight(weight, sees, keeps_weight)
            product: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
                x.reshape(-1, x.shape[-1]),
                weight,
                *_parts_of(of_x.by_row),
                *_parts_of(of_x.by_column),
                *_parts_of(of_weight.by_row),
                *_parts_of(of_weight.by_column),
                of_weight.factor,
                dtype,
                self,
                sees,
            )
            if bias is not None:
                product = product + bias.to(dtype)
            return product.reshape(*x.shape[:-1], weight.shape[0])

    def __deepcopy__(self, memo: Any) -> "Layer":
        return self  # a copy of the module uses the history of the module


_SAMPLE = 64
"""How many values of an input on the CPU are compared, to find writes that torch does not count."""


class _Latest(threading.local):
    """The last input that this thread quantized, for the next layer with the same input.

    Attributes:
        of: the input.
        key: values that must be the same for the next layer.
        number: the layer whose scale it has.
        result: the input in FP8.
        sample: some of its values, on the CPU.
    """

    of: "weakref.ref[Tensor] | None" = None
    key: Any = None
    number = 0
    result: Quantized | None = None
    sample: Tensor | None = None

    def forget(self, reference: Any) -> None:
        if self.of is reference:
            self.of = self.key = self.result = self.sample = None


_latest = _Latest()


def _is_transformed() -> bool:
    """Whether operations are transformed by torch.func, differentiated forward, or traced."""
    return (
        peek_interpreter_stack() is not None or forward_ad._current_level >= 0 or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def _parts_of(operand: Operand | None) -> tuple[Tensor | None, ...]:
    """Return an operand's tensors, because torch does not look for tensors in nested tuples."""
    return (None,) * 3 if operand is None else (operand.values, operand.inverse, operand.outer)


def _quantized_input(x: Tensor, layer: Layer, by_row: bool, by_column: bool, sees: bool) -> Quantized:
    """Return an input in FP8, flattened to rows; the last result, if the input is the same.

    Layers with one input share its scale under `delayed`, too, in training and under `no_grad` alike.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    stream = None if torch.compiler.is_compiling() else stream_of(x.device)
    # Compiled, or captured in a graph, whose replays change no version. Or cut: all ranks have to
    # quantize as often, and each would compare values of its own.
    if stream is None or layer.split is not None:
        return layer.quantize(rows, INPUT, by_row=by_row, by_column=by_column, sees=sees)
    iteration = None if layer.history is None else (id(layer.history), layer.history.iteration)
    version = x._version if _counts_writes(x) else None
    key = (version, x.data_ptr(), stream, layer.recipe, iteration, by_row, by_column, sees)
    is_same = _latest.of is not None and _latest.of() is x and _latest.key == key
    sample = _sample_of(rows)
    if is_same and version is not None and _is_equal(sample, _latest.sample):
        assert _latest.result is not None
        return _latest.result
    number = _latest.number if is_same else layer.number
    of_scale = layer._replace(number=number)
    result = of_scale.quantize(rows, INPUT, by_row=by_row, by_column=by_column, sees=sees)
    _latest.of = weakref.ref(x, _latest.forget)
    _latest.key, _latest.number, _latest.result = key, number, result
    _latest.sample = None if sample is None else sample.clone()
    return result


def _counts_writes(x: Tensor) -> bool:
    """Whether torch counts the usual writes to a tensor.

    It counts nothing in inference mode. Scripts and libraries write to leaves in ways that it does not
    count: through `.data`, by collectives, from other frameworks. On the CPU values are compared.
    """
    if x.is_leaf and (x.requires_grad or x.device.type != "cpu"):
        return False
    return not x.is_inference()


def _sample_of(rows: Tensor) -> Tensor | None:
    """Return some values of an input on the CPU; None on another device."""
    return rows.reshape(-1)[:: rows.numel() // _SAMPLE + 1] if rows.device.type == "cpu" else None


def _is_equal(sample: Tensor | None, other: Tensor | None) -> bool:
    """Whether values are unchanged; True on devices other than the CPU, where none are kept."""
    return sample is None or (other is not None and torch.equal(sample, other))


class _Linear(torch.autograd.Function):
    # Not with `setup_context`: torch would look at the signature of `forward` at each call. `more` has
    # three tensors each of the input by row and by column, and of the weight by row and by column; then
    # the weight's factor, the dtype of the output, the layer, and whether the history records amaxes.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        of_rows, of_columns, of_weight, weight_columns = (more[i : i + 3] for i in range(0, 12, 3))
        factor, ctx.out_dtype, layer, ctx.sees = more[12:]
        ctx.layer = layer
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.dtypes = x.dtype, weight.dtype
        kept = x if needs_weight and of_columns[0] is None else None
        kept_weight = weight if needs_x and weight_columns[0] is None else None
        ctx.save_for_backward(kept, kept_weight, *of_columns, *weight_columns, factor)
        if of_rows[0] is None:
            return x.to(ctx.out_dtype) @ weight.to(ctx.out_dtype).t()
        rows, weights = layer.operand(of_rows, INPUT), layer.operand(of_weight, WEIGHT)
        return scaled_mm(rows, weights, ctx.out_dtype, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        layer: Layer = ctx.layer
        recipe = layer.recipe
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise AmpRuntimeError(
                f"the gradients of '{layer.name}', which runs in {recipe.number_format}, cannot be "
                "differentiated again (create_graph=True). Keep the layer out: "
                f"fp8={{'skip': ['{layer.name}']}}"
            )
        x, weight, *quantized, factor = ctx.saved_tensors
        of_columns, weight_columns = tuple(quantized[:3]), tuple(quantized[3:])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_dtype, weight_dtype = ctx.dtypes
        grad_x = grad_weight = None
        of_grad = Quantized(None, None)
        with disable_casts():
            quantizes_x = needs_x and recipe.grad_input != "high"
            quantizes_weight = needs_weight and of_columns[0] is not None
            if quantizes_x or quantizes_weight:
                of_grad = layer.quantize(
                    grad, GRADIENT, by_row=quantizes_x, by_column=quantizes_weight, sees=ctx.sees
                )
            if quantizes_x:
                of_weight = layer.weight_by_column(weight, weight_columns, factor)
                assert of_grad.by_row is not None
                of_weight = _scaled_alike(of_weight, of_grad.by_row)
                grad_x = scaled_mm(of_grad.by_row, of_weight, x_dtype)
            elif needs_x:
                grad_x = (grad.to(ctx.out_dtype) @ weight.to(ctx.out_dtype)).to(x_dtype)
            if quantizes_weight:
                assert of_grad.by_column is not None
                of_x = layer.operand(of_columns, INPUT)
                grad_weight = scaled_mm(of_grad.by_column, of_x, weight_dtype)
            elif needs_weight:
                grad_weight = (grad.to(ctx.out_dtype).t() @ x.to(ctx.out_dtype)).to(weight_dtype)
        return grad_x, grad_weight, *[None] * 16


def _scaled_alike(operand: Operand, other: Operand) -> Operand:
    """Return an operand with its one scale repeated for each row, if `other` has scales for rows."""
    if (operand.granularity, other.granularity) != ("tensor", "row"):
        return operand
    inverse = operand.inverse.expand(operand.values.shape[0], 1).contiguous()
    return operand._replace(inverse=inverse, granularity="row")
