"""What newcomers do: each is right, or is told by name what to do."""

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from tests.covering import covering
from tests.models import run_backward, sgd, started, step_on

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def start(level: str, **overrides: Any) -> Any:
    return started(net(), sgd, level, **overrides)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_without_scale_loss_warn_once(level: str) -> None:
    model, optimizer = start(level)
    model(X).mean().backward()
    with pytest.warns(
        amp.AmpWarning, match=r"SGD\.step.* came from no\s+amp\.scale_loss block"
    ) as seen:
        optimizer.step()
    assert seen[0].filename == __file__
    optimizer.zero_grad()
    model(X).mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("level", "scale"), [("O0", None), ("O3", None), ("O4", None), ("O5", None), ("O1", 1.0)]
)
def test_where_nothing_is_scaled_no_block_is_needed(level: str, scale: float | None) -> None:
    model, optimizer = start(level, loss_scale=scale)
    model(X).mean().backward()
    optimizer.step()


def test_a_first_step_without_gradients_says_nothing() -> None:
    model, optimizer = start("O2")
    optimizer.zero_grad()
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False
    step_on(model(X).mean(), optimizer)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_cell_that_runs_twice(level: str) -> None:
    model, optimizer = start(level)
    before = [p.dtype for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=rf"Sequential was initialized already, at opt_level='{level}'"
    ):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert [p.dtype for p in model.parameters()] == before
    amp.get_session(optimizer).close()
    model.float()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
@pytest.mark.parametrize("make", [torch.optim.SGD, amp.optimizers.FusedSGD], ids=lambda c: c.__name__)
def test_each_parameter_is_stepped_in_the_backward(level: str, make: Any) -> None:
    def train(level: str) -> list[Tensor]:
        model = net()
        of = {p: make([p], lr=0.1, momentum=0.9) for p in model.parameters()}
        amp.initialize(model, list(of.values()), opt_level=level, verbosity=0)

        def step(p: Any) -> None:
            of[p].step()
            of[p].zero_grad()

        for p in of:
            p.register_post_accumulate_grad_hook(step)
        for _ in range(20):
            run_backward((model(X) - 1).square().mean(), list(of.values()))
            assert not any(p.grad is not None and p.grad.any() for p in of)
        masters = [p for optimizer in of.values() for p in amp.master_params(optimizer)]
        amp.get_session().close()
        return masters

    for a, b in zip(train(level), train("O0"), strict=True):
        assert torch.allclose(a.float(), b, atol=2e-2)


def test_a_step_in_the_backward_is_refused_while_gradients_are_scaled() -> None:
    model, optimizer = start("O2")
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match="such as O4 or O5"):
        run_backward(model(X).mean(), optimizer)


def step_of_super(optimizer: Any) -> None:
    """Call the step of the class of an optimizer from one that is made of it afterwards."""
    optimizer.__class__ = type("Subclass", (type(optimizer),), {})
    above: Any = super(type(optimizer), optimizer)
    above.step()


STEPS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "bound": lambda optimizer: optimizer.step,
    "partial": lambda optimizer: functools.partial(optimizer.step),
    "the class's": lambda optimizer: lambda: type(optimizer).step(optimizer),
    "a subclass's": lambda optimizer: lambda: step_of_super(optimizer),
}


@pytest.mark.parametrize(
    ("level", "made", "how"),
    covering(["O1", "O2", "O4", "O5"], ["AdamW", "FusedAdam"], [*STEPS], strength=2),
)
def test_a_step_that_is_not_that_of_initialize_changes_nothing(level: str, made: str, how: str) -> None:
    own = torch.optim.AdamW if made == "AdamW" else amp.optimizers.FusedAdam
    model = net()
    optimizer: Any = own(model.parameters(), lr=0.1)
    step = STEPS[how](optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def backward() -> None:
        optimizer.zero_grad()
        run_backward(model(X).float().square().mean(), optimizer)

    backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(amp.AmpError, match=r"a step of .* was called .* Call optimizer\.step\(\)"):
        step()
    after = model.state_dict()
    assert all(after[name].equal(before[name]) for name in before)
    optimizer.step()
    assert not any(model.state_dict()[name].equal(before[name]) for name in before)
    amp.get_session(optimizer).close()
    model(X).sum().backward()
    step()  # which is the optimizer's step again


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_where_a_step_is_the_optimizers_own_it_may_be_taken_before_initialize(level: str) -> None:
    model = net()
    optimizer = sgd(model)
    step = optimizer.step
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run_backward(model(X).float().mean(), optimizer)
    before = model[0].weight.detach().clone()
    step()
    assert not model[0].weight.equal(before)


class Images(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        return torch.eye(3) * 1e5 @ torch.ones(3)


@pytest.mark.parametrize(
    ("level", "start_method"), covering(["O1", "O4"], ["fork", "spawn"], strength=1)
)
def test_nothing_casts_in_workers_of_data_loaders(level: str, start_method: str) -> None:
    start(level)
    context = multiprocessing.get_context(start_method)
    loader = torch.utils.data.DataLoader(Images(), 2, num_workers=1, multiprocessing_context=context)
    for batch in loader:
        assert batch.dtype is torch.float32
        assert (batch == 1e5).all()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_work_on_other_devices_than_the_models_is_not_cast(level: str) -> None:
    with torch.device("meta"):
        model = net()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert (torch.eye(3) @ torch.ones(3)).dtype is torch.float32
    model.to_empty(device="cpu")
    model(X)  # says where the model is now
    assert (torch.eye(3) @ torch.ones(3)).dtype is not torch.float32


def test_saving_before_the_first_step_is_no_step_without_scale_loss() -> None:
    """torch makes an optimizer's state by a step, which is none of the training's."""
    model, optimizer = started(nn.Linear(4, 4), torch.optim.Adam, "O2")
    state_of_model, state_of_optimizer = amp.get_state_dict(model, optimizer)
    amp.set_state_dict(
        model, optimizer, model_state_dict=state_of_model, optim_state_dict=state_of_optimizer
    )
    model(torch.ones(2, 4)).float().sum().backward()
    with pytest.warns(amp.AmpWarning, match=r"came from no amp.scale_loss block"):
        optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.AdamW, amp.optimizers.FusedAdam])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parameters_that_are_assigned_to_groups_are_refused(level: str, make: Any) -> None:
    """They would be stepped in 16 bits, and masters would overwrite them."""
    model, optimizer = started(nn.Linear(4, 4), lambda p: make(p, lr=1e-2), level)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(amp.AmpError, match=r"hold 16-bit parameters.*\('weight', 'bias'\)"):
        run_backward(loss, optimizer)


@pytest.mark.parametrize("make", [torch.optim.AdamW, amp.optimizers.FusedAdam])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("how", ["extended", "appended"])
def test_parameters_that_are_put_into_groups_by_hand_are_refused_until_they_are_added(
    how: str, level: str, make: Any
) -> None:
    """They would be stepped in 16 bits, stand still, or become NaN."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(model[0].parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    groups, head = optimizer.param_groups, list(model[1].parameters())
    if how == "extended":
        groups[0]["params"].extend(head)
    else:
        groups.append({**groups[0], "params": head})
    with pytest.raises(amp.AmpError, match=r"\('1.weight', '1.bias'\).*by optimizer.add_param_group"):
        optimizer.zero_grad()
    with pytest.raises(amp.AmpError, match="hold 16-bit parameters"):
        optimizer.step()
    if how == "extended":
        del groups[0]["params"][2:]
    else:
        groups.pop()
    optimizer.add_param_group({"params": head})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        step_on(model(torch.ones(2, 4)).float().sum(), optimizer)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_loss_of_a_direct_call_of_forward_says_what_to_call(level: str) -> None:
    """Nothing casts its outputs, so the loss is computed in 16 bits."""
    model, optimizer = start(level)
    loss = model.forward(X).mean()
    with (
        pytest.warns(amp.AmpWarning, match=r"model\.forward\(x\).*Call model\(x\)") as seen,
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert seen[0].filename == __file__
    with amp.scale_loss(model.forward(X).mean(), optimizer) as scaled_loss:  # once
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_other_losses_say_nothing_of_it(level: str) -> None:
    model, optimizer = start(level)
    run_backward(model(X).mean(), optimizer)
    run_backward(model.forward(X).float().mean(), optimizer)


def test_outputs_that_are_to_have_16_bits_say_nothing_of_it() -> None:
    model, optimizer = start("O5", cast_model_outputs="bfloat16")
    run_backward(model(X).mean(), optimizer)


def test_a_session_ends_whatever_raises_in_it() -> None:
    model: Any = net()
    with pytest.raises(RuntimeError, match="shape"), amp.Session("O2", verbosity=0) as session:
        session.initialize(model)(X[:, :3])
    assert session.closed
    assert model[0].weight.dtype is torch.float32
