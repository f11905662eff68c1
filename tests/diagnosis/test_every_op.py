"""Torch's own samples of every op, under a watch: nothing raises, and the bits are those without it."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import amp
from tests.processes import ROOT

pytestmark = pytest.mark.slow
SAMPLES = 1
"""Of each op and dtype."""
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNINITIALIZED |= {"new_empty_strided"}


def samples() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of an op, the op, and one of its samples."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        for dtype in {torch.float32, torch.complex64}.intersection(op.supported_dtypes("cpu")):
            try:
                given = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
                chosen = list(itertools.islice(given, SAMPLES))
            except Exception:  # some need libraries that are not there
                continue
            for sample in chosen:
                yield op.name, op, sample


def run(op: Any, sample: Any) -> list[Tensor]:
    """Return the results of an op, and the gradients of its inputs."""
    torch.manual_seed(0)
    given = sample.input, sample.args, sample.kwargs
    results = [x for x in tree_leaves(op(given[0], *given[1], **given[2])) if isinstance(x, Tensor)]
    inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    losses = [x for x in results if x.requires_grad and x.layout is torch.strided]
    if not inputs or not losses:
        return results
    parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in losses]
    try:
        grads = torch.autograd.grad([x.sum() for x in parts], inputs, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # it has no derivative there
        return results
    return [*results, *(grad for grad in grads if grad is not None)]


def bits(x: Tensor) -> Any:
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return x.shape
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.nan_to_num(nan=0.5) if x.is_floating_point() else x
    return x.dtype, x.shape, x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_op_is_followed_and_has_its_own_bits() -> None:
    listed = (ROOT / "docs" / "diagnosis.md").read_text()
    differ, unfollowed, count = set(), dict[str, str](), 0
    model = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, op, sample in samples():
            try:
                expected = [list(map(bits, run(op, sample))) for _ in range(2)]
            except Exception:
                continue
            if expected[0] != expected[1] or name in UNINITIALIZED:
                continue
            with amp.diagnose(model) as report:
                found = list(map(bits, run(op, sample)))
            count += 1
            if found != expected[0]:
                differ.add(name)
            if report.unfollowed.count:
                unfollowed[name] = str(report.unfollowed)
    assert count > 500
    assert not unfollowed
    known = re.search(r"The exceptions are what torch computes differently.*?\n\n", listed, re.DOTALL)
    assert known is not None
    assert differ <= set(re.findall(r"`([\w.]+)`", known[0])), differ
