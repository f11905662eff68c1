"""FSDP: whose policy counts, what is refused, and what each rank keeps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

import amp
from amp.optimizers import FusedAdam, FusedLAMB
from amp.training.attached_optimizer import AttachedOptimizer
from tests.distributed.models import (
    assert_equal_on_ranks,
    backward,
    batches,
    data_rank,
    fsdp1,
    initialize,
    loss_of,
    make,
    mesh,
    sgd,
    shard,
    train,
    weights_of,
)
from tests.distributed.world import ranks
from tests.levels import LEVELS, WITH_MASTERS, levels_where

CAST = levels_where(lambda properties: properties.cast_model_type in (torch.float16, torch.bfloat16))


def gathered(model: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of the weights as a forward sees them."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return dtypes


@ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_fsdp_policy_is_what_initialize_sets(rank: int, level: str) -> None:
    """`fsdp_policy` and `initialize` alone give the same run."""
    results = []
    for options in ({}, {"mp_policy": amp.fsdp_policy(level)}):
        model = shard(make(), **options)
        model, optimizer = initialize(model, sgd(model), level)
        train(model, optimizer, batches(*data_rank("fsdp2")))
        results.append([gathered(model), weights_of(model)])
        amp.get_session().close()
    (ours, weights), (theirs, others) = results
    assert ours == theirs
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@ranks(2)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_fp32_shards_are_the_masters_and_norms_are_gathered_in_fp32(rank: int, level: str) -> None:
    model = shard(make("pictures"))
    shards = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in shards.items()}
    model, optimizer = initialize(model, sgd(model), level)
    low = amp.get_session().properties.cast_model_type
    for name, parameter in model.named_parameters():
        assert parameter is shards[name]
        assert torch.equal(parameter.full_tensor(), before[name].full_tensor())
    assert all(p is q for p, q in zip(amp.master_params(optimizer), shards.values(), strict=True))
    seen = gathered(model)
    assert {seen[name] for name in seen if name.startswith("norm")} == {torch.float32}
    assert {seen[name] for name in seen if not name.startswith("norm")} == {low}
    (x, _), *_ = batches(*data_rank("fsdp2"))
    assert model(x).dtype is torch.float32


@ranks(2)
@pytest.mark.parametrize("level", CAST)
def test_a_policy_that_contradicts_the_level_is_refused_before_anything_is_touched(
    rank: int, level: str
) -> None:
    other = torch.bfloat16 if level in ("O2", "O3") else torch.float16
    low = torch.float16 if level in ("O2", "O3") else torch.bfloat16
    for policy, options in (
        (MixedPrecisionPolicy(param_dtype=other), {}),
        (MixedPrecisionPolicy(param_dtype=torch.float32), {}),
        (MixedPrecisionPolicy(reduce_dtype=low), {"reduce_dtype": torch.float32}),
    ):
        model = shard(make(), mp_policy=policy)
        optimizer = sgd(model)
        with pytest.raises(amp.AmpError, match=r"fully_shard was given .*amp\.fsdp_policy"):
            initialize(model, optimizer, level, **options)
        (x, _), *_ = batches(*data_rank("fsdp2"))
        model(x).sum().backward()
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("level", CAST)
def test_a_model_may_have_run_a_forward(rank: int, level: str) -> None:
    results = []
    for has_run in (False, True):
        model = shard(make("pictures"))
        (x, _), *_ = batches(*data_rank("fsdp2"))
        if has_run:
            with torch.no_grad():
                model.eval()(x)
            model.train()
            with pytest.raises(amp.AmpError, match="no parameter of the optimizers belongs"):
                initialize(model, sgd(model), level)  # of whole parameters, which the forward left
            model.reshard()
        model, optimizer = initialize(model, sgd(model), level)
        train(model, optimizer, batches(*data_rank("fsdp2")))
        results.append([gathered(model), weights_of(model), model.state_dict()])
        amp.get_session().close()
    (dtypes, weights, state), (others, after, state_after) = results
    assert dtypes == others
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert state.keys() == state_after.keys()


@ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_initialize_may_be_called_again(rank: int, level: str) -> None:
    """The same notebook cell may be run twice, with the model that was trained in between."""
    model = shard(make())
    for _ in range(2):
        model, optimizer = initialize(model, sgd(model), level)
        before = weights_of(model)
        train(model, optimizer, batches(*data_rank("fsdp2")))
        assert all(not torch.equal(value, before[name]) for name, value in weights_of(model).items())
        amp.get_session().close()


@ranks(2)
@pytest.mark.parametrize("level", CAST)
def test_a_failed_initialize_takes_policies_back(rank: int, level: str) -> None:
    model = shard(make("pictures"))
    before = dict(model.named_parameters())

    def fail(*_: Any) -> None:
        raise OSError("no more")

    optimizer = sgd(model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no more"):
        patch.setattr(AttachedOptimizer, "attach", fail)
        initialize(model, optimizer, level)
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert set(gathered(model).values()) == {torch.float32}
    (x, _), *_ = batches(*data_rank("fsdp2"))
    model(x).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@ranks(2)
@pytest.mark.parametrize("level", CAST)
def test_after_close_the_model_is_in_fp32(rank: int, level: str) -> None:
    """After `close` a model that was trained is one in FP32, for a last evaluation or more training."""
    for stays, masters in itertools.product((False, True), (None, "split16", "split24")):
        model = shard(make("pictures"), reshard_after_forward=not stays)
        options = {} if masters is None or level == "O3" else {"master_weights": masters}
        model, optimizer = initialize(model, FusedAdam(model.parameters()), level, **options)
        train(model, optimizer, batches(*data_rank("fsdp2")))
        (x, _), *_ = batches(*data_rank("fsdp2"))
        model(x)  # without a backward, the whole parameters of a unit may be left here
        amp.get_session().close()
        whole = make("pictures")
        whole.load_state_dict({name: value.float() for name, value in weights_of(model).items()})
        whole.train(model.training)
        whole.load_state_dict(dict(model.named_buffers()), strict=False)
        torch.testing.assert_close(model(x), whole(x), rtol=0, atol=0)
        model(x).sum().backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        assert set(gathered(model).values()) == {torch.float32}


@ranks(2)
@pytest.mark.parametrize("which", [1, 2])
def test_a_policy_of_the_users_works_at_o0(rank: int, which: int) -> None:
    """A policy of the user's goes on working; amp casts nothing."""
    seen = []
    if which == 1:
        policy = MixedPrecision(param_dtype=torch.bfloat16)
        model: Any = fsdp1(make(), mixed_precision=policy)
    else:
        model = shard(make(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    up = model.layers[0].up
    model, optimizer = initialize(model, sgd(model), "O0")
    up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    train(model, optimizer, batches(*data_rank("fsdp2")))
    assert set(seen) == {torch.bfloat16}


@ranks(2)
def test_what_the_first_fsdp_cannot_do_is_refused(rank: int) -> None:
    model = fsdp1(make())
    for level in CAST:
        with pytest.raises(amp.AmpError, match="FullyShardedDataParallel.*fully_shard instead"):
            initialize(model, sgd(model), level)
    for level in WITH_MASTERS:
        late: Any = make()
        late, made = initialize(late, sgd(late), level)
        late = fsdp1(late)
        (x, y), *_ = batches(*data_rank("fsdp2"))
        loss = loss_of(late, x, y)
        with pytest.raises(amp.AmpError, match="after amp.initialize.*fully_shard instead"):
            amp.scale_loss(loss, made).__enter__()
    for optimizer in (FusedLAMB(model.parameters()), FusedAdam(model.parameters(), max_grad_norm=1.0)):
        _, made = initialize(model, optimizer, "O4")
        (x, y), *_ = batches(*data_rank("fsdp2"))
        backward(loss_of(model, x, y), made)
        with pytest.raises(TypeError, match="flat shard of FullyShardedDataParallel"):
            made.step()
        amp.get_session().close()


@ranks(2)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_units_of_norms_and_parts_of_models_train(rank: int, level: str) -> None:
    """Norms in units of their own, and a model of which only a part is cut."""
    model = make("pictures")
    fully_shard(model.norm, mesh=mesh("data"))
    fully_shard(model.convolution, mesh=mesh("data"))  # the head is a whole on each rank
    model, optimizer = initialize(model, sgd(model), level)
    low = amp.get_session().properties.cast_model_type
    assert model.head.weight.dtype is low
    (x, y), *_ = batches()  # the same on each rank: nothing reduces the head's gradients
    train(model, optimizer, [(x, y)] * 2)
    assert_equal_on_ranks(weights_of(model).values())
