"""apex's first API: `amp.init`, its handle and wrapped optimizers; and the lists that scripts edit."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp.casting.registry import registered


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_functions_cast_without_a_model_until_the_handle_is_deactivated(
    amp: Any, dtype: torch.dtype
) -> None:
    wide, narrow = torch.ones(4, 4), torch.ones(4, 4, dtype=dtype)
    handle = amp.init(patch_type=dtype)
    try:
        assert amp._amp_state.handle is handle
        assert handle.is_active()
        assert F.linear(wide, wide).dtype is dtype
        assert (narrow**2).dtype is torch.float32
        assert torch.cat([narrow, wide]).dtype is torch.float32
        assert narrow.clone().add_(wide).dtype is dtype
        with pytest.raises(NotImplementedError):
            narrow.exp_()
        assert nn.RNN(4, 4)(wide)[0].dtype is dtype
        with handle._disable_casts():
            assert not handle.is_active()
            assert F.linear(wide, wide).dtype is torch.float32
        for value in (False, False, True, True):
            handle._is_active = value
            assert handle._is_active == handle.is_active() == value
            assert (F.linear(wide, wide).dtype is dtype) == value
        assert (handle.has_cache, handle.verbose, handle.cache) == (True, False, {})
        handle._clear_cache()
        handle.remove_cache(wide)
    finally:
        handle._deactivate()
    assert not handle.is_active()
    assert F.linear(wide, wide).dtype is torch.float32


def test_banned_functions_run_in_fp32_where_that_is_allowed(amp: Any) -> None:
    half = torch.full((4,), 0.5).half()
    handle = amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        F.binary_cross_entropy(half, half)
    handle._deactivate()
    handle = amp.init(allow_banned=True)
    assert nn.BCELoss()(half, half).dtype is torch.float32
    handle._deactivate()


def test_one_of_two_handles(amp: Any) -> None:
    first, second = amp.init(), amp.init()
    first._deactivate()
    assert not first.is_active()
    assert second.is_active()
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    second._deactivate()
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_the_handle_of_initialize(amp: Any) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(torch.ones(1, 2)).dtype is torch.float16
    amp._amp_state.handle._deactivate()
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_a_wrapped_optimizer_has_a_scale_for_each_loss(amp: Any) -> None:
    handle = amp.init(loss_scale="dynamic")
    parameter = nn.Parameter(torch.ones(3))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([parameter], lr=0.5), num_loss=2)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for factor in (1.0, 2.0):
        with optimizer.scale_loss((parameter * factor).sum()) as scaled_loss:
            assert scaled_loss.item() == 3 * factor * 2**16
            scaled_loss.backward()
    optimizer.step()
    assert parameter.tolist() == [-0.5] * 3
    optimizer.zero_grad()
    for factor in (1.0, float("inf")):
        with optimizer.scale_loss((parameter * factor).sum()) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert parameter.tolist() == [-0.5] * 3
    scales = []
    for _ in range(2):
        with optimizer.scale_loss(parameter[0] - parameter[0].detach() + 1) as scaled_loss:
            scales.append(scaled_loss.item())
    assert scales == [2.0**16, 2.0**15]
    with pytest.raises(IndexError), optimizer.scale_loss(parameter.sum()):
        pass
    with pytest.raises(NotImplementedError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="handle.wrap_optimizer"):
        handle.scale_loss(parameter.sum(), optimizer)
    handle._deactivate()


def test_a_handle_that_does_nothing(amp: Any) -> None:
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([parameter], lr=0.5))
    with optimizer.scale_loss(parameter.sum()) as loss, handle.scale_loss(loss, optimizer) as same:
        assert same is loss
        loss.backward()
    optimizer.step()
    assert parameter.tolist() == [0.5] * 3
    handle._deactivate()


def test_another_dtype_is_refused(amp: Any) -> None:
    with pytest.raises(RuntimeError, match=r"patch_type=torch.float64 is not one of torch.float16"):
        amp.init(patch_type=torch.float64)


def test_edits_of_the_lists_are_heeded(amp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = importlib.import_module("apex.amp.lists")
    functional, of_torch = lists.functional_overrides, lists.torch_overrides
    assert "linear" in functional.FP16_FUNCS
    assert "softmax" in functional.FP32_FUNCS
    assert "addcmul" in lists.tensor_overrides.CASTS
    assert "cat" in of_torch.SEQUENCE_CASTS
    (banned,) = functional.BANNED_FUNCS
    half = torch.full((2, 2), 0.5).half()
    functional.FP32_FUNCS.remove("softmax")
    functional.BANNED_FUNCS.remove(banned)
    of_torch.FP32_FUNCS.append("abs")
    try:
        handle = amp.init()
        assert nn.Softmax(-1)(half).dtype is torch.float16
        assert F.log_softmax(half, -1).dtype is torch.float32
        assert F.binary_cross_entropy(half, half).dtype is torch.float16
        assert torch.abs(half).dtype is torch.float32
        handle._deactivate()
    finally:
        functional.FP32_FUNCS.append("softmax")
        functional.BANNED_FUNCS.append(banned)
        of_torch.FP32_FUNCS.remove("abs")
    handle = amp.init()
    assert nn.Softmax(-1)(half).dtype is torch.float32
    assert torch.abs(half).dtype is torch.float16
    handle._deactivate()
    assert not registered(), "the lists are as they were, and so is every later session"
