"""Masters take what was written to their parameters, and nothing else; on every backend at hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from amp.kernels.language import INTERPRETED
from amp.kernels.launch_plans import UnsupportedTensorError
from amp.kernels.master_copy import MERGE_BLOCK as BLOCK
from amp.kernels.master_copy import SLICE, differ, master_copy, merge, merged
from amp.kernels.tensor_lists import TensorList
from tests.kernels.test_operations import shifted
from tests.processes import run_python

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SIZES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (63,), (33, 65), (BLOCK + 9,))
WRITTEN = (1.5, math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-24, -3.0)
EVERY_PATTERN = torch.arange(2**16).to(torch.int16)


@pytest.fixture(params=["at hand", "reference"])
def backend(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "at hand" else "reference"


def bits_of(master: Tensor) -> Tensor:
    """Return the bits of numbers, all NaN alike."""
    return torch.where(master.isnan(), math.nan, master).view(torch.int32)


def pair(device: torch.device, dtype: torch.dtype, sizes: object = SIZES) -> tuple[list[Tensor], ...]:
    """Return parameters and masters that agree, though hardly any master is its parameter."""
    torch.manual_seed(0)
    masters = [torch.randn(shape).to(device) for shape in sizes]  # type: ignore[attr-defined]
    return [master.to(dtype) for master in masters], masters


def write(parameter: Tensor, master: Tensor, value: float, at: int) -> Tensor:
    """Write to an element of a parameter, and return what its master should become."""
    expected = master.clone()
    parameter.view(-1)[at] = value
    expected.view(-1)[at] = parameter.view(-1)[at].float()
    return expected


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_master_takes_what_was_written_and_keeps_its_other_bits(
    device: torch.device, dtype: torch.dtype, misaligned: bool, backend: str | None
) -> None:
    """At the first and last elements, and where the parts of a kernel meet."""
    parameters, masters = pair(device, dtype)
    expected = [master.clone() for master in masters]
    values = itertools.cycle(WRITTEN)
    for i, parameter in enumerate(parameters):
        for at in {0, parameter.numel() - 1, BLOCK, BLOCK + 7, BLOCK + 8}:
            if 0 <= at < parameter.numel():
                expected[i] = write(parameter, expected[i], next(values), at)
    if misaligned:
        parameters, masters = list(map(shifted, parameters)), list(map(shifted, masters))
    for parameter, master, right in zip(parameters, masters, expected, strict=True):
        out_of_place = merged(parameter, master)
        assert out_of_place.dtype is F32
        assert torch.equal(bits_of(out_of_place), bits_of(right))
    assert differ(parameters, masters, backend=backend).item() == 1
    merge(parameters, masters, backend=backend)
    for master, right in zip(masters, expected, strict=True):
        assert torch.equal(bits_of(master), bits_of(right))
    assert differ(parameters, masters, backend=backend).item() == 0


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_one_difference_is_found_wherever_it_is(
    device: torch.device, dtype: torch.dtype, backend: str | None
) -> None:
    sizes = (3,), (4 * BLOCK + 13,)
    for i, at in ((0, 0), (0, 2), (1, 0), (1, BLOCK - 1), (1, BLOCK), (1, 4 * BLOCK), (1, -1)):
        parameters, masters = pair(device, dtype, sizes)
        before = [master.clone() for master in masters]
        assert differ(parameters, masters, backend=backend).tolist() == [0]
        expected = write(parameters[i], masters[i], 77.0, at)
        found = differ(parameters, masters, backend=backend)
        assert (found.tolist(), found.dtype, found.device) == ([1], F32, masters[0].device)
        assert all(map(torch.equal, masters, before))
        merge(parameters, masters, backend=backend)
        assert torch.equal(masters[i], expected)
        assert torch.equal(masters[1 - i], before[1 - i])


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_pattern_of_a_parameter(
    device: torch.device, dtype: torch.dtype, backend: str | None
) -> None:
    """Against masters that equal it, that round to it, and that round to its neighbours."""
    parameter = EVERY_PATTERN.view(dtype).to(device)
    generator = torch.Generator().manual_seed(0)
    exact = parameter.float()
    near = exact * (1 + 2.0**-14 * torch.randn(2**16, generator=generator).to(device))
    for master in (exact, near, exact.roll(1), near.roll(-1), near.roll(777), -near):
        keeps = (master.to(dtype) == parameter) | (master.isnan() & parameter.isnan())
        before, after = master.clone(), master.clone()
        merge([parameter], [after], backend=backend)
        assert torch.equal(after.view(torch.int32)[keeps], before.view(torch.int32)[keeps])
        assert torch.equal(bits_of(after)[~keeps], bits_of(exact)[~keeps])
        assert torch.equal(bits_of(merged(parameter, before)), bits_of(after))
        assert differ([parameter], [before], backend=backend).item() == (not keeps.all())
        assert differ([parameter], [after], backend=backend).item() == 0


def test_zeros_of_both_signs_and_not_a_number_agree(device: torch.device, backend: str | None) -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC01234, -1, -0x80000000, 0, 0x7FC00000], dtype=torch.int32)
    master = patterns.to(device).view(F32)
    parameter = torch.tensor([math.nan, math.nan, math.nan, 0.0, -0.0, 1.0]).to(device, BF16)
    assert differ([parameter[:5]], [master[:5]], backend=backend).item() == 0
    merge([parameter], [master], backend=backend)
    assert torch.equal(master.view(torch.int32).cpu()[:5], patterns[:5])
    assert master[5].item() == 1


@pytest.mark.parametrize("kind", [list, TensorList])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_orders_of_dimensions_gaps_and_parameters(
    device: torch.device,
    dtype: torch.dtype,
    kind: Callable[[list[Tensor]], TensorList],
    backend: str | None,
) -> None:
    """Autograd's parameters, channels-last, transposed on both sides or on one, and with gaps."""
    torch.manual_seed(0)
    masters = [
        nn.Parameter(torch.randn(33, 5, device=device)),
        torch.randn(33, 5, device=device).t(),
        torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        torch.randn(9, 4, device=device)[:, ::2],
        torch.randn(4, 6, device=device),
    ]
    parameters = [master.detach().to(dtype) for master in masters]
    parameters[0].requires_grad_()
    parameters[4] = parameters[4].t().contiguous().t()
    expected = [master.detach().clone() for master in masters]
    for parameter, right in zip(parameters, expected, strict=True):
        index = (1,) * right.dim()
        parameter.data[index] = right[index] = 5.0
    versions = [master._version for master in masters]
    merge(kind(parameters), kind(masters), backend=backend)
    assert all(map(torch.equal, masters, expected))
    assert [master._version for master in masters] == versions
    assert not merged(parameters[0], masters[0]).requires_grad


def test_large_tensors_and_many_small_ones(device: torch.device, backend: str | None) -> None:
    """More than plain torch looks at together, with a difference in some of the parts only."""
    sizes = (2 * SLICE + 5,), *([(4001,)] * 90), (SLICE,)
    parameters, masters = pair(device, BF16, sizes)
    expected = [master.clone() for master in masters]
    for i, at in ((0, SLICE), (0, -1), (7, 0), (90, 4000), (91, SLICE - 1)):
        expected[i] = write(parameters[i], expected[i], -9.0, at)
    parameters[3] = shifted(parameters[3])
    merge(parameters, masters, backend=backend)
    assert all(map(torch.equal, masters, expected))


def test_nothing_and_inference_mode(device: torch.device, backend: str | None) -> None:
    merge([], [], backend=backend)
    assert differ([], [], backend=backend).tolist() == [0]
    parameters, masters = pair(device, F16)
    expected = write(parameters[4], masters[4], 9.0, 5)
    versions = [master._version for master in masters]
    with torch.inference_mode():
        assert differ(parameters, masters, backend=backend).item() == 1
        merge(parameters, masters, backend=backend)
    assert torch.equal(masters[4], expected)
    assert [master._version for master in masters] == versions


@pytest.mark.parametrize(
    ("parameter", "master"), [(F32, F32), (F16, F16), (torch.int16, F32), (BF16, torch.float64)]
)
def test_other_dtypes_are_refused_before_anything_is_written(
    device: torch.device, parameter: torch.dtype, master: torch.dtype
) -> None:
    fine = torch.ones(4, device=device)
    parameters = [torch.zeros(4, dtype=dtype, device=device) for dtype in (F16, parameter)]
    masters = [fine, torch.ones(4, dtype=master, device=device)]
    for operation in (merge, differ):
        with pytest.raises(UnsupportedTensorError, match=f"tensor 1 is {parameter}, with a master in"):
            operation(parameters, masters)
    assert torch.equal(fine, torch.ones(4, device=device))
    with pytest.raises(ValueError, match=r"tensors 0 have shapes \[4\], \[3\]"):
        merge([parameters[0]], [torch.ones(3, device=device)])


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_masters_are_rounded_back(device: torch.device, dtype: torch.dtype, has_gaps: bool) -> None:
    """After a merge, and after tensors have moved; versions of parameters go up."""
    parameters, masters = pair(device, dtype, [size for size in SIZES if size != (0,)])
    masters.append(torch.randn(2, 3, 4, 5).to(device, memory_format=torch.channels_last))
    parameters.append(masters[-1].to(dtype))
    if has_gaps:
        masters.append(torch.randn(6, 4, device=device).t())  # in another order than its parameter
        masters.append(torch.randn(5, 8, device=device)[:, ::2])
        parameters += [master.to(dtype).contiguous() for master in masters[-2:]]
    masters.append(EVERY_PATTERN.view(dtype).float().to(device) * (1 + 2.0**-9))
    parameters.append(torch.zeros_like(masters[-1], dtype=dtype))
    for step in range(4):
        if step == 2:
            masters[5].data, parameters[4].data = masters[5].clone(), parameters[4].clone()
        merge(parameters, masters)
        for master in masters:
            master.mul_(1.01)
        versions = [parameter._version for parameter in parameters]
        master_copy(masters, parameters)
        for parameter, master, version in zip(parameters, masters, versions, strict=True):
            assert torch.equal(parameter.nan_to_num(7.0), master.to(dtype).nan_to_num(7.0))
            assert parameter._version > version


READ_ONLY = """
import sys
import numpy, torch
from amp.kernels import host_lists
from amp.kernels.master_copy import merge
from tests.compiling import lists_in_cpp

values = numpy.linspace(-1, 1, 2**20 + 7, dtype="float32")
values[3], values[4] = -0.0, numpy.nan
values.tofile(sys.argv[1])
master = torch.from_numpy(numpy.memmap(sys.argv[1], dtype="float32", mode="r"))
host_lists.lists = lists_in_cpp()
for dtype in (torch.float16, torch.bfloat16):
    parameter = master.to(dtype)
    parameter[3] = 0.0
    for backend in (None, "reference"):
        merge([parameter, parameter[:5]], [master, master[:5]], backend=backend)
print("merged")
"""


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter copies")
def test_masters_that_agree_are_not_written_to(tmp_path: Path) -> None:
    """Their pages stay clean, and may even be read-only: a write would end this process."""
    ended = run_python("-c", READ_ONLY, str(tmp_path / "master"))
    assert ended.stdout == "merged\n", ended
