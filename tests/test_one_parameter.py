"""What a script attaches to a model's parameter is at its master, and what it does wrong it is told."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp.errors import AmpTypeError, AmpWarning
from amp.optimizers import FusedAdam
from tests import training
from tests.covering import covering
from tests.models import initialize, run_backward, started, step_on, train_on

X = torch.ones(2, 8)
OPTIMIZERS = {name: training.OPTIMIZERS[name] for name in ("AdamW", "FusedAdam")}


def made(level: str, optimizer: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"loss_scale": 128.0, **options} if level in ("O1", "O2", "O3") else options
    return initialize(model, OPTIMIZERS[optimizer](model.parameters()), level, **options)


def loss_of(model: Any, x: Any = X) -> Any:
    return model(x).float().square().mean()


def backward(model: Any, optimizer: Any) -> None:
    run_backward(loss_of(model), optimizer)


def train(model: Any, optimizer: Any) -> None:
    train_on(loss_of(model), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_state_is_found_by_the_models_parameter(level: str, optimizer: str) -> None:
    model, opt = made(level, optimizer)
    weight, stepped = model[0].weight, next(iter(amp.master_params(opt)))
    assert weight not in opt.state
    assert opt.state.get(weight) is None
    train(model, opt)
    entry = opt.state[weight]
    assert entry is opt.state[stepped]
    assert weight in opt.state
    assert opt.state.get(weight) is entry
    entry["exp_avg"].zero_()  # as a reset for neurons that are revived does
    assert not opt.state[stepped]["exp_avg"].any()
    opt.state[weight]["of the script"] = 3
    assert opt.state[stepped]["of the script"] == 3
    del opt.state[stepped]["of the script"]
    assert opt.state.pop(weight) is entry
    assert stepped not in opt.state
    assert opt.state.pop(weight, None) is None
    opt.state[weight] = entry
    assert list(opt.state)[-1] is stepped
    train(model, opt)
    assert len(opt.state) == 4


def test_state_is_found_after_a_load_and_where_it_was_replaced() -> None:
    model, opt = made("O2")
    train(model, opt)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert "exp_avg" in opt.state[model[0].weight]
    opt.state = defaultdict(dict)  # as a restart of the optimizer does
    train(model, opt)
    assert "exp_avg" in opt.state[model[0].weight]
    copied = pickle.loads(pickle.dumps(opt.state))
    assert type(copied) is type(copy.deepcopy(opt.state)) is defaultdict
    amp.get_session(opt).close()
    assert type(opt.state) is defaultdict
    assert opt.state[model[0].weight]["exp_avg"].shape == (8, 8)
    assert len(opt.state) == 4


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_attributes_are_at_both(level: str) -> None:
    model = nn.Linear(4, 4)
    early: Any = model.weight
    early.lr_scale = 0.5
    model, opt = initialize(model, OPTIMIZERS["AdamW"](model.parameters()), level)
    weight: Any = model.weight
    master: Any = next(iter(amp.master_params(opt)))
    assert master is not weight
    assert master.lr_scale == 0.5
    weight.is_expert = True
    assert master.is_expert
    master.tag = "late"
    assert weight.tag == "late"
    amp.get_session(opt).close()
    assert model.weight.tag == "late"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_was_not_scaled_is_noted_inside_of_the_block(optimizer: str) -> None:
    model, opt = made("O2", optimizer)
    loss = loss_of(model)
    with (
        pytest.warns(AmpWarning, match="none came from the scaled loss.*scaled_loss.backward"),
        amp.scale_loss(loss, opt),
    ):
        loss.backward()


def test_a_backward_after_the_block_is_noted() -> None:
    model, opt = made("O1")
    with (
        pytest.warns(AmpWarning, match="no parameter of its optimizers has a gradient"),
        amp.scale_loss(loss_of(model), opt) as scaled_loss,
    ):
        pass
    with pytest.warns(AmpWarning, match="called after its amp.scale_loss block.*Call it inside"):
        scaled_loss.backward()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("init_scale", [2.0, 2.0**100])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_grad_scaler_besides_is_noted(level: str, init_scale: float, before: bool) -> None:
    """Also where it finds an overflow, so that it does not call the optimizer's step."""
    model, opt = made(level)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    loss = loss_of(model)
    with amp.scale_loss(scaler.scale(loss) if before else loss, opt) as scaled_loss:
        (scaled_loss if before else scaler.scale(scaled_loss)).backward()
    with pytest.warns(AmpWarning, match="GradScaler.step calls AdamW.step.*Leave the GradScaler out"):
        scaler.step(opt)


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, amp.GradScaler])
@pytest.mark.parametrize("before", ["nothing", "unscale_", "clipping"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5", "O7"])
@pytest.mark.filterwarnings("ignore:fp8=current")
def test_a_grad_scaler_instead_of_a_block_is_refused_where_there_are_masters(
    level: str, optimizer: str, before: str, cls: Any
) -> None:
    model, opt = made(level, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = cls("cpu", init_scale=2.0)
    scaler.scale(loss_of(model)).backward()
    if before != "nothing":
        scaler.unscale_(opt)
    if before == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(amp.AmpError, match="Leave the GradScaler out, and call optim") as caught:
        scaler.step(opt)
    assert isinstance(caught.value, AssertionError)
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())


def test_a_grad_scaler_instead_of_a_block_works_where_nothing_is_scaled() -> None:
    model, opt = made("O1", loss_scale=1.0)
    before = model[0].weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    assert not model[0].weight.equal(before)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize(
    ("apart", "told"),
    [
        (False, r"'0\.weight' comes from the scaled loss and from another one.* Add the losses"),
        (True, r"'2\.\w+' comes from another loss than the scaled one.* Add the losses"),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_loss_that_is_not_scaled_is_noted(
    level: str, apart: bool, told: str, delay: bool, first: bool
) -> None:
    model, opt = made(level)
    x = torch.ones(2, 8)
    if apart:  # each loss has parameters of its own
        x = x.to(model[0].weight.dtype)
    one, other = (model[0], model[2]) if apart else (model, model)

    def block() -> None:
        with amp.scale_loss(loss_of(one, x), opt, delay_unscale=delay) as scaled_loss:
            losses = [scaled_loss, loss_of(other, x / 2)]
            for loss in losses[::-1] if first else losses:
                loss.backward()

    with pytest.warns(AmpWarning, match=f"the gradient of {told}"):
        block()


def a_scaled_part(model: Any, x: Any, scaled_loss: Any) -> None:
    scaled_loss.backward(retain_graph=True)
    (scaled_loss / 2).backward()


def a_chain(model: Any, x: Any, scaled_loss: Any) -> None:
    scaled_loss.backward()
    hidden = model[0](x.detach())
    hidden.backward(torch.ones_like(hidden) * x.grad.sum().to(hidden.dtype))


def a_surrogate(model: Any, x: Any, scaled_loss: Any) -> None:
    scaled_loss.backward(inputs=[x, *model[2].parameters()])
    (model[0](x.detach()).float() * x.grad.sum()).sum().backward()


def a_surrogate_of_a_hidden_tensor(model: Any, x: Any, scaled_loss: Any) -> None:
    hidden = model.outputs[0]
    hidden.retain_grad()
    scaled_loss.backward(inputs=[hidden, *model[2].parameters()])
    (model[0](x.detach().to(hidden.dtype)).float() * hidden.grad.float()).sum().backward()


def a_curvature(model: Any, x: Any, scaled_loss: Any) -> None:
    scaled_loss.backward(create_graph=True)
    torch.stack([p.grad.float().sum() for p in model.parameters()]).sum().backward()


@pytest.mark.parametrize(
    "backward", [a_scaled_part, a_chain, a_surrogate, a_surrogate_of_a_hidden_tensor, a_curvature]
)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_backwards_that_carry_the_scale_are_not_noted(level: str, backward: Any) -> None:
    model, opt = made(level)
    model.outputs = []
    model[0].register_forward_hook(lambda *args: model.outputs.append(args[-1]))
    x = torch.ones(2, 8, requires_grad=True)
    with amp.scale_loss(loss_of(model, x), opt) as scaled_loss:
        backward(model, x, scaled_loss)
    opt.step()


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_second_loss_needs_no_scale_where_nothing_is_scaled(level: str) -> None:
    model, opt = made(level)
    with amp.scale_loss(loss_of(model), opt) as scaled_loss:
        scaled_loss.backward()
        loss_of(model, X / 2).backward()
    opt.step()


def read_scale(by: str) -> float:
    return amp.loss_scale() if by == "loss_scale" else amp.state_dict()["loss_scaler0"]["loss_scale"]


@pytest.mark.parametrize(
    ("level", "optimizer", "by", "when", "of"),
    covering(
        ["O1", "O2"],
        ["AdamW", "FusedAdam"],
        ["loss_scale", "state_dict"],
        ["before", "after"],
        ["in place", "assigned", "master_params"],
        strength=2,
    ),
)
def test_gradients_that_are_divided_by_the_scale_are_noted(
    level: str, optimizer: str, by: str, when: str, of: str
) -> None:
    model, opt = made(level, optimizer)
    scale = read_scale(by) if when == "before" else 0.0
    backward(model, opt)
    scale = scale or read_scale(by)
    for p in amp.master_params(opt) if of == "master_params" else model.parameters():
        if p.grad is None:
            continue
        if of == "assigned":
            p.grad = p.grad / scale
        else:
            p.grad.div_(scale)
    with pytest.warns(AmpWarning, match="divided by the loss scale .* Leave the division out"):
        opt.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scales_that_are_read_while_gradients_are_scaled_are_not_noted(level: str) -> None:
    model, opt = made(level)
    with amp.scale_loss(loss_of(model), opt, delay_unscale=True) as scaled_loss:
        amp.loss_scale()
        scaled_loss.backward()
        amp.loss_scale()
    amp.loss_scale()
    opt.step()


@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_other_changes_of_gradients_are_not_noted(level: str, optimizer: str) -> None:
    model, opt = made(level, optimizer)
    amp.loss_scale()
    backward(model, opt)
    amp.loss_scale()
    nn.utils.clip_grad_norm_(amp.master_params(opt), 1e-3)
    for p in amp.master_params(opt):
        if p.grad is not None:
            p.grad.div_(3.0)
    opt.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_right_script_is_told_nothing(level: str) -> None:
    model, opt = made(level)
    for _ in range(2):
        with amp.scale_loss(loss_of(model), opt) as scaled_loss:
            (scaled_loss + 0).backward(retain_graph=True)
        opt.step()
        opt.zero_grad()


def test_scale_loss_without_with_says_what_to_write() -> None:
    model, opt = made("O2")
    loss = model(torch.ones(2, 8)).float().mean()
    with pytest.raises(AttributeError, match="without `with`.*with amp.scale_loss") as raised:
        amp.scale_loss(loss, opt).backward()  # type: ignore[attr-defined]  # pyright: ignore
    assert isinstance(raised.value, amp.AmpError)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_are_unscaled_in_it(level: str, optimizer: str) -> None:
    """Hutchinson: the derivative of gradients has no loss scale."""

    def curvature(level: str) -> list[Tensor]:
        model, opt = made(level, optimizer)
        with amp.scale_loss(loss_of(model), opt) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        found = torch.autograd.grad(
            [g.sum() for g in grads], list(model.parameters()), allow_unused=True
        )
        return [torch.zeros(1) if x is None else x.float() for x in found]

    torch.testing.assert_close(curvature(level), curvature("O0"), rtol=0.05, atol=1e-2)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return (
            self.gate(x).topk(2, dim=-1),
            self.gate(x).max(dim=1),
            torch.linalg.svd(self.gate(x).float()),
        )


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7"])
@pytest.mark.filterwarnings("ignore::amp.AmpWarning")
def test_named_results_of_torch_come_through(level: str) -> None:
    model: Any = initialize(Router(), None, level)
    top, largest, svd = model(torch.randn(3, 8))
    assert (type(top), type(largest)) == (torch.return_types.topk, torch.return_types.max)
    assert type(svd).__name__ == "linalg_svd"
    assert top.values.dtype is (torch.float32 if level not in ("O1", "O4", "O6") else top[0].dtype)
    assert top.indices.dtype is torch.int64


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_transforms_of_torch_func_go_through_a_cast_model(level: str) -> None:
    model: Any = initialize(nn.Linear(4, 2), None, level)
    x = torch.randn(5, 4)
    torch.testing.assert_close(torch.vmap(model)(x), model(x), rtol=0.02, atol=0.02)
    assert torch.func.jacrev(lambda one: model(one))(x[0]).shape == (2, 4)
    parameters = dict(model.named_parameters())

    def loss(own: Any, one: Tensor) -> Tensor:
        return torch.func.functional_call(model, own, (one,)).sum()

    grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert grads["weight"].shape == (5, 2, 4)


class Counting(torch.optim.AdamW):
    """As SPAM, keeps a number of its own beside the parameters' entries."""

    state: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.state["total_step"] = 0

    def step(self, closure: Any = None) -> Any:
        self.state["total_step"] += 1
        return super().step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_an_optimizer_keeps_what_is_its_own_in_its_state(level: str) -> None:
    model, opt = started(nn.Linear(8, 4), Counting, level)
    step_on(model(torch.ones(2, 8)).float().mean() * 1e-3, opt)
    assert opt.state["total_step"] == 1
    opt.load_state_dict(opt.state_dict())
    amp.get_session(opt).close()
    assert opt.state["total_step"] == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_session_that_is_closed_in_inference_mode_leaves_weights_that_train(level: str) -> None:
    model, opt = made(level)
    train(model, opt)
    with torch.inference_mode():
        amp.get_session(opt).close()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_load_without_memory_says_so(level: str, optimizer: str) -> None:
    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, opt = made(level, optimizer)
    train(model, opt)
    state = copy.deepcopy(opt.state_dict())
    with pytest.raises(torch.OutOfMemoryError), Full():
        opt.load_state_dict(state)
    opt.load_state_dict(state)


def test_a_command_without_stdout_ends_well() -> None:
    command = f"{sys.executable} -m amp levels >&-"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_device_that_is_none_is_named() -> None:
    with pytest.raises(amp.AmpError, match="is not a device.*such as 'cuda'"):
        amp.GradScaler(device=-(10**400))


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_stacked_parameters_may_be_trained_where_no_masters_are_needed(level: str) -> None:
    models = [nn.Linear(4, 2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base: Any = copy.deepcopy(models[0])
    opt: Any = torch.optim.SGD(parameters.values(), lr=0.1)
    with pytest.warns(AmpWarning, match="Unless the model is called with them by"):
        base, opt = amp.initialize(base, opt, opt_level=level, verbosity=0, loss_scale=1.0)
    before = parameters["weight"].detach().clone()

    def call(own: Any, own_buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (own, own_buffers), (x,))

    out = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, torch.ones(2, 4))
    step_on(out.float().sum(), opt)
    assert not torch.equal(before, parameters["weight"])


@pytest.mark.parametrize("level", ["O1", "O4", "O6"])
@pytest.mark.filterwarnings("ignore")
def test_lazy_norms_and_scripted_parts(level: str) -> None:
    scripted = [torch.jit.script(nn.Linear(4, 4))] if level == "O1" else []  # torch keeps its dtype
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *scripted, nn.LazyBatchNorm1d())
    opt: Any = torch.optim.SGD(list(model[:2].parameters()), lr=0.1)
    model, opt = amp.initialize(model, opt, opt_level=level, verbosity=0)
    step_on(model(torch.randn(4, 4)).float().sum() * 1e-3, opt)


@pytest.mark.parametrize("loss_scale", [64.0, "dynamic"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_sparse_gradients_of_a_fused_optimizer_are_named_and_the_session_closes(
    level: str, loss_scale: Any
) -> None:
    model, opt = started(nn.Embedding(10, 8, sparse=True), FusedAdam, level, loss_scale=loss_scale)
    run_backward(model(torch.tensor([1, 2])).sum(), opt)
    with pytest.raises(AmpTypeError, match=r"is sparse \(torch.sparse_coo\); FusedAdam takes dense"):
        opt.step()
    amp.get_session().close()
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("release", ["before", "after"])
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_steps_in_the_backward_that_another_package_takes(level: str, release: str) -> None:
    optimi = pytest.importorskip("optimi")
    x = torch.randn(64, 8)

    def trained(level: str | None) -> float:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        opt: Any = optimi.AdamW(model.parameters(), lr=1e-2, gradient_release=True)
        if release == "before":
            optimi.prepare_for_gradient_release(model, opt)
        if level is not None:
            model, opt = initialize(model, opt, level)
        if release == "after":
            optimi.prepare_for_gradient_release(model, opt)
        for _ in range(30):
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
            run_backward(loss, None if level is None else opt)
        return loss.item()

    assert trained(level) == pytest.approx(trained(None), rel=0.05)


LOOKS: dict[str, Any] = {
    "a state dict": lambda model, opt: model.state_dict(),
    "a copy": lambda model, opt: copy.deepcopy(model),
    "the masters": lambda model, opt: next(amp.master_params(opt)),
    "an evaluation": lambda model, opt: (model.eval(), model(torch.ones(2, 8)), model.train()),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_pruned_is_saved_pruned(level: str, optimizer: str) -> None:
    model, opt = made(level, optimizer)
    train(model, opt)
    prune.l1_unstructured(model[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    prune.remove(model[0], "weight")  # type: ignore[no-untyped-call]
    assert (model.state_dict()["0.weight"] == 0).sum() == 32
    assert (model[0].weight == 0).sum() == 32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_vector_of_all_weights_goes_back_to_what_is_stepped(level: str, optimizer: str) -> None:
    model, opt = made(level, optimizer)
    train(model, opt)
    vector = parameters_to_vector(amp.master_params(opt)).detach() * 0.5
    vector_to_parameters(vector, amp.master_params(opt))
    model(torch.ones(2, 8))
    assert torch.equal(parameters_to_vector(model.state_dict().values()), vector)
    train(model, opt)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_wrapper_that_has_the_state_of_what_it_wraps_keeps_it(level: str) -> None:
    class Wrapper:
        def __init__(self, base: Any) -> None:
            self.optimizer, self.state, self.param_groups = base, base.state, base.param_groups

        def step(self) -> None:
            self.optimizer.step()

        def zero_grad(self) -> None:
            self.optimizer.zero_grad()

    torch.manual_seed(0)
    make = OPTIMIZERS["AdamW"]
    model, wrapper = started(nn.Linear(8, 4), lambda p: Wrapper(make(p)), level, loss_scale=1.0)
    train(model, wrapper)
    assert wrapper.state is wrapper.optimizer.state
    assert len(wrapper.state) == 2
    amp.get_session().close()
    assert wrapper.state is wrapper.optimizer.state
    assert set(wrapper.state) == set(model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_state_that_is_given_for_the_models_parameter_is_stepped_with(level: str) -> None:
    model, opt = made(level)
    train(model, opt)
    entry = dict(opt.state[model[0].weight])
    opt.state.update({model[0].weight: entry})
    opt.state |= {model[0].bias: dict(opt.state[model[0].bias])}
    assert len(opt.state) == 4
    train(model, opt)
    assert entry["step"] == 2
    late = nn.Parameter(torch.zeros(2))
    opt.state[late] = {}
    opt.add_param_group({"params": [late]})
    del opt.state[late]
    held = weakref.ref(opt.state[model[2].weight]["exp_avg"])
    opt.state.clear()
    assert held() is None


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("look", LOOKS)
def test_writes_to_masters_are_not_taken_back_by_a_look_at_the_model(level: str, look: str) -> None:
    model, opt = made(level)
    train(model, opt)
    with torch.no_grad():
        for stepped in amp.master_params(opt):
            stepped.add_(1.0)
    expected = [stepped.detach().clone() for group in opt.param_groups for stepped in group["params"]]
    LOOKS[look](model, opt)
    assert all(map(torch.equal, expected, amp.master_params(opt)))
    assert all(map(torch.equal, expected, model.state_dict().values()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_that_writes_through_data_is_told_nothing(level: str) -> None:
    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.add_(p.grad, alpha=-0.1)

    torch.manual_seed(0)
    model, opt = started(nn.Linear(8, 4), lambda p: Plain(p, lr=0.1), level)
    train(model, opt)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_parametrized_layers_are_fp32_after_close(level: str) -> None:
    model, opt = made(level)
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[2])
    parametrize.remove_parametrizations(model[2], "weight")
    amp.get_session(opt).close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
