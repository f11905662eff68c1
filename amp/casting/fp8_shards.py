"""Linear layers in FP8 that tensor parallelism has cut: each rank multiplies its parts.

    style       weight      input        output       gradient of the input
    Colwise     Shard(0)    whole        Shard(-1)    sums of all ranks
    Rowwise     Shard(1)    Shard(-1)    sums         Shard(-1)

A rank quantizes its own parts by the scales of whole tensors: the ranks agree on the amax of a cut
tensor by one MAX all-reduce, and whole tensors need none. Under `delayed` the history has these
amaxes, which ranks share once a step. So the parts have the bits that one process gives them, and only
sums that are cut (the output of Rowwise, the gradient of Colwise's input) are rounded in other places.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp.casting.regions import disable_casts
from amp.distributed import ProcessGroup, reduce_largest
from amp.errors import AmpRuntimeError
from amp.kernels.fp8 import Part
from amp.profiles.fp8_recipe import MULTIPLES, Fp8Recipe


class Split(NamedTuple):
    """How a layer's matrices are divided among the ranks of a group.

    Attributes:
        group: the ranks.
        dims: the cut dimension of the input, the weight and the output's gradient; None if whole.
    """

    group: ProcessGroup
    dims: tuple[int | None, int | None, int | None]

    def part(self, entry: int) -> Part | None:
        """Return how an input, a weight or a gradient is cut, or None if it is whole."""
        dim = self.dims[entry]
        return None if dim is None else Part(dim, functools.partial(_agree, group=self.group))


def _agree(amaxes: Tensor, group: ProcessGroup) -> None:
    reduce_largest([amaxes], [group], "the scales of FP8")


def waited(x: Any) -> Tensor:
    """Wait for the result of a collective, and return it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x  # type: ignore[no-any-return, no-untyped-call]


_STYLES: tuple[tuple[str, tuple[int | None, int | None, int | None]], ...] = (
    ("ColwiseParallel", (None, 0, 1)),
    ("RowwiseParallel", (1, 1, None)),
)
"""The styles of `parallelize_module` by the dimension of the weight that they cut, and `Split.dims`."""


def split_of(
    name: str, recipe: Fp8Recipe, mesh: Any, placements: Sequence[Any], shape: Sequence[int]
) -> Split:
    """Return how a layer is divided whose weight of this shape is a DTensor.

    Raises:
        AmpRuntimeError: the recipe does not support it, or blocks that share a scale would be cut.
    """
    what = f"the weight of '{name}' is a DTensor of tensor parallelism"
    keep_out = f"Keep it out, by fp8={{'skip': ['{name}']}}"
    if recipe.is_fp4:
        raise AmpRuntimeError(
            f"{what}, which FP4 does not support. {keep_out}, or take a recipe in FP8, such as "
            "fp8='current'"
        )
    is_cut = len(placements) == 1 and placements[0].is_shard()
    if not is_cut or placements[0].dim not in (0, 1):
        raise AmpRuntimeError(
            f"{what} with placements {tuple(placements)}, and FP8 supports those of ColwiseParallel "
            f"and RowwiseParallel on a mesh of one dimension. {keep_out}, or take opt_level='O4' or "
            "'O5'"
        )
    dim = placements[0].dim
    style, dims = _STYLES[dim]
    multiple = MULTIPLES.get(recipe.recipe, 16)
    if shape[dim] % (mesh.size() * multiple):
        raise AmpRuntimeError(
            f"{what}: {style} divides a dimension of {shape[dim]} among {mesh.size()} ranks, and "
            f"fp8='{recipe.recipe}' needs parts that are multiples of {multiple}, so that no numbers "
            f"that share a scale are parted. {keep_out}, or divide among fewer ranks"
        )
    return Split(mesh.get_group(), dims)


def run(
    name: str,
    recipe: Fp8Recipe,
    x: Any,
    weight: Any,
    bias: Any,
    run_part: Callable[[Split, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Run a layer whose weight is a DTensor; the result is one too.

    Args:
        name: the layer's.
        recipe: the session's.
        x: the input, a DTensor.
        weight: a DTensor `[N, K]`.
        bias: a DTensor `[N]`, or None.
        run_part: runs this rank's part of it.

    Raises:
        AmpRuntimeError: see `split_of`.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = weight.device_mesh
    split = split_of(name, recipe, mesh, weight.placements, weight.shape)
    last = Shard(x.dim() - 1)
    is_colwise = split.dims[0] is None
    of_x, of_grad_x, of_output = (
        (Replicate(), Partial(), last) if is_colwise else (last, last, Partial())
    )
    with disable_casts():
        if x.placements != (of_x,):
            x = x.redistribute(placements=[of_x])
        local = x.to_local(grad_placements=[of_grad_x])
        if bias is not None:
            is_added = is_colwise or mesh.get_local_rank() == 0
            bias = bias.to_local()
            # The output of Rowwise is a sum over ranks: one adds the bias, all compute its gradient.
            bias = bias if is_added else bias - bias.detach()
        product = run_part(split, local, weight.to_local(), bias)
        return DTensor.from_local(product, mesh, [of_output], run_check=False)
