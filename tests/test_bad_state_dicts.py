"""State dicts that hold something wrong: what is said of them, and what is left alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpError, AmpTypeError, AmpValueError
from amp.fp16_utils import FP16_Optimizer
from amp.optimizers import FusedAdam, FusedLAMB, FusedLion, FusedSGD
from tests.fuzz.inputs import bits
from tests.models import linear, run_backward, sgd, started, step_on


def stepped(optimizer_of: Any, level: str = "O2", **options: Any) -> tuple[nn.Module, Any]:
    model, optimizer = started(linear(), optimizer_of, level, **options)
    step_on(model(torch.ones(2, 4)).float().mean(), optimizer)
    return model, optimizer


def refused(optimizer: Any, state: Any, match: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    held = optimizer.state, list(optimizer.state.values()), list(optimizer.param_groups)
    with pytest.raises(AmpValueError, match=match):
        optimizer.load_state_dict(state)
    assert held[0] is optimizer.state
    assert all(a is b for a, b in zip(held[1], optimizer.state.values(), strict=True))
    assert all(a is b for a, b in zip(held[2], optimizer.param_groups, strict=True))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, after["state"][key][name])


def refuses(optimizer: Any, path: tuple[Any, ...], value: Any, match: str) -> None:
    """Check that a state dict with another value at one place is refused."""
    state = copy.deepcopy(optimizer.state_dict())
    inner: Any = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    refused(optimizer, state, match)


def freed(tensor: Tensor, left: int) -> Tensor:
    """Return a tensor of whose memory only some bytes are left."""
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.parametrize("optimizer_of", [FusedLion, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("exp_avg", torch.full((4, 4), torch.nan), "a tensor with NaN; expected finite numbers"),
        ("exp_avg", torch.ones(4, 4, dtype=torch.complex64), "a complex64 tensor"),
        ("exp_avg", torch.ones(4, 4).to_sparse(), "torch.sparse_coo"),
        ("exp_avg", torch.ones(4, 4, device="meta"), "on the device meta"),
        ("exp_avg", torch.full((4, 4), -torch.inf), "a tensor of values from -inf to -inf; expected"),
        ("exp_avg", freed(torch.ones(4, 4), 0), "whose memory has been freed"),
        ("exp_avg", freed(torch.ones(4, 4), 8), "whose memory has been freed"),
        ("step", 10**400, "an integer of about 401 digits; expected a whole number from 0 to"),
        ("step", torch.tensor(1.5), "a tensor of values from 1.5 to 1.5; expected a whole number"),
        ("step", torch.ones(2), r"a float32 tensor of shape \(2,\)"),
    ],
)
def test_an_entry_of_a_parameter_is_named(optimizer_of: Any, name: str, value: Any, text: str) -> None:
    _, optimizer = stepped(optimizer_of)
    refuses(optimizer, ("state", 0, name), value, rf"state_dict\['state'\]\[0\] .*{text}")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("exp_avg", [0.0], r"has no usable 'exp_avg': \[0.0\]; expected a dense .* of shape \(4, 4\)"),
        ("exp_avg", torch.ones(4), r"a float32 tensor of shape \(4,\); expected"),
        ("exp_avg", torch.ones(1).expand(9**9, 9**9), "of shape .*; expected a dense"),
        ("mu_product", torch.tensor(1.0), "no such entry"),
    ],
)
def test_fused_optimizers_know_their_entries(name: str, value: Any, text: str) -> None:
    _, optimizer = stepped(FusedLion)
    refuses(optimizer, ("state", 0, name), value, rf"state_dict\['state'\]\[0\] .*{text}")


def test_second_moments_are_not_negative() -> None:
    _, optimizer = stepped(FusedAdam)
    text = "'exp_avg_sq': a tensor of values from -1 to -1; expected finite"
    refuses(optimizer, ("state", 0, "exp_avg_sq"), torch.full((4, 4), -1.0), text)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_sq"] = torch.full((4, 4), torch.inf)  # as float16 has it now and then
    optimizer.load_state_dict(state)


def in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


ODD_TENSORS: dict[str, Any] = {
    "one for all": lambda own, buffer, live: [buffer[: own[0].numel()].view(4, 4)] * len(own),
    "overlapping": lambda own, buffer, live: [buffer[i : i + 16].view(4, 4) for i in range(len(own))],
    "overlapping itself": lambda own, buffer, live: [buffer.as_strided((4, 4), (1, 1)) for _ in own],
    "expanded": lambda own, buffer, live: [buffer[:1].expand(4, 4) for _ in own],
    "the parameter": lambda own, buffer, live: [live, *own[1:]],
    "transposed": lambda own, buffer, live: [each.t().contiguous().t() for each in own],
    "in inference mode": lambda own, buffer, live: list(map(in_inference_mode, own)),
    "negative": lambda own, buffer, live: [torch._neg_view(-each) for each in own],
    "zero": lambda own, buffer, live: [torch._efficientzerotensor((4, 4)) for _ in own],
    "wider": lambda own, buffer, live: [each.double() for each in own],
}
OPTIMIZERS: dict[str, Any] = {
    **{cls.__name__: functools.partial(cls, lr=0.1) for cls in (FusedAdam, FusedLion, FusedLAMB)},
    **{
        name: functools.partial(getattr(torch.optim, name), lr=0.1)
        for name in (
            *("Adam", "NAdam", "RAdam", "Adagrad", "Rprop", "ASGD", "RMSprop", "Adadelta", "Adamax"),
            "Adafactor",
        )
    },
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "Adagrad fused": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
}


def plain(value: Any) -> Any:
    """Return the same values in plain tensors."""
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype).add_(value)
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def after_two_steps(name: str, change: Any, copied: Any) -> list[Any]:
    """Return weights and state after a load of a changed state, and two steps."""
    model, optimizer = stepped(OPTIMIZERS[name], "O0")
    state = optimizer.state_dict()
    state["state"] = {key: dict(entry) for key, entry in state["state"].items()}
    change(state["state"], optimizer.param_groups[0]["params"][0].detach())
    state["state"] = copied(state["state"])
    optimizer.load_state_dict(state)
    for i in range(2):
        optimizer.zero_grad()
        x = torch.linspace(-1, i + 1.0, 8).reshape(2, 4)
        step_on(model(x).square().mean(), optimizer)
    amp.get_session().close()
    return bits([list(model.parameters()), optimizer.state_dict()["state"]])


@pytest.mark.parametrize("odd", ODD_TENSORS)
@pytest.mark.parametrize(
    "name",
    ["FusedAdam", "FusedLAMB", "Adam", "SGD fused", "AdamW fused", "AdamW foreach", "Adagrad fused"],
)
def test_moments_are_copied(name: str, odd: str) -> None:
    def change(state: Any, live: Tensor) -> None:
        names = [key for key, value in state[0].items() if value.shape == (4, 4)]
        live.abs_()
        new = ODD_TENSORS[odd]([state[0][each] for each in names], torch.arange(40.0) / 40, live)
        state[0].update(zip(names, new, strict=True))

    assert after_two_steps(name, change, dict) == after_two_steps(name, change, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_steps_that_parameters_share_are_copied(name: str, dtype: torch.dtype) -> None:
    largest = {torch.uint8: 255, torch.bfloat16: 256}.get(dtype, 1)

    def change(state: Any, live: Tensor) -> None:
        scalars = {key: value for key, value in state[0].items() if value.dim() == 0}
        scalars |= {"step": torch.tensor(largest, dtype=dtype)} if scalars else {}
        for entry in state.values():
            entry.update(scalars)

    def as_floats(state: Any) -> Any:
        return {
            key: {name: x.float() if x.dim() == 0 else x for name, x in plain(entry).items()}
            for key, entry in state.items()
        }

    assert after_two_steps(name, change, dict) == after_two_steps(name, change, as_floats)


@pytest.mark.parametrize("optimizer_of", [FusedAdam, torch.optim.AdamW])
def test_a_load_in_inference_mode_can_be_stepped(optimizer_of: Any) -> None:
    _, optimizer = stepped(optimizer_of)
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
    assert not any(x.is_inference() for entry in optimizer.state.values() for x in entry.values())


def test_what_float16_cannot_hold_is_refused() -> None:
    _, optimizer = stepped(FusedAdam, "O3")
    moments = torch.full((4, 4), 1e5)
    refuses(
        optimizer, ("state", 0, "exp_avg_sq"), moments, "finite numbers from 0 to 65504, for float16"
    )


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("param_groups",), [], "no usable 'param_groups': .*; expected a list of 1 groups"),
        (("param_groups", 0), 3, r"\['param_groups'\] has no usable 0: 3; expected a mapping"),
        (("param_groups", 0, "params"), [0], "no usable 'params': .*; expected a list of 2 numbers"),
        (("param_groups", 0, "params"), [0, 0], "0 is no number, or is there twice"),
        (("param_groups", 0, "lr"), torch.ones(2), "no usable 'lr'"),
        (("param_groups", 0, "lr"), float("nan"), "no usable 'lr': nan"),
        (("param_groups", 0, "betas"), "ab", "no usable 'betas': 'ab'; expected 2 numbers"),
        (("param_groups", 0, "maximize"), "no", "no usable 'maximize': 'no'; expected a bool"),
        (("state",), [], r"no usable 'state': \[\]; expected a mapping"),
        (("state", 7), {"step": 1}, "no usable 'state': 7 is of no group"),
        (("state", 0), [1], r"\['state'\] has no usable 0: \[1\]; expected a mapping"),
    ],
)
@pytest.mark.parametrize("optimizer_of", [FusedAdam, torch.optim.AdamW])
def test_the_structure_is_checked(optimizer_of: Any, path: Any, value: Any, text: str) -> None:
    refuses(stepped(optimizer_of)[1], path, value, text)


def test_a_hook_that_adapts_a_state_dict_comes_before_the_checks() -> None:
    _, optimizer = stepped(torch.optim.AdamW)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {f"p{key}": entry for key, entry in state["state"].items()}

    def adapt(optimizer: Any, state: Any) -> Any:
        return {**state, "state": {int(key[1:]): entry for key, entry in state["state"].items()}}

    optimizer.register_load_state_dict_pre_hook(adapt)
    optimizer.load_state_dict(state)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 1.0


class Broken(torch.optim.SGD):
    """Finds out late that it cannot load."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.state.clear()
        self.param_groups[0]["lr"] = 7.0
        raise KeyError("odd")


def test_a_loader_that_fails_late_is_undone() -> None:
    _, optimizer = stepped(lambda p: Broken(p, lr=0.1, momentum=0.9))
    refused(optimizer, {}, "Broken cannot load this state dict: KeyError: 'odd'. Nothing was loaded")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_grad_norm", "x", "'max_grad_norm': 'x'; expected a finite number from 0"),
        ("max_grad_norm", -1.0, "'max_grad_norm': -1.0"),
        ("state_dtype", torch.float16, "'state_dtype': torch.float16; expected torch.bf"),
    ],
)
def test_settings_are_what_the_constructor_takes(name: str, value: Any, text: str) -> None:
    _, optimizer = started(linear(), FusedAdam, "O0")
    refuses(optimizer, ("param_groups", 0, name), value, rf"\[0\] has no usable .*{text}")


@pytest.mark.parametrize("optimizer_of", [FusedAdam, torch.optim.AdamW])
def test_numbers_of_numpy_are_numbers(optimizer_of: Any) -> None:
    _, optimizer = stepped(optimizer_of)
    state = copy.deepcopy(optimizer.state_dict())
    numbers = {"lr": np.float32(0.1), "eps": np.float64(1e-8), "betas": [np.float32(0.5), 0]}
    state["param_groups"][0].update(numbers)
    state["state"][0]["step"] = np.int64(3)
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert [type(x) for x in (group["lr"], group["eps"], *group["betas"])] == [float] * 4
    assert group["lr"] == float(np.float32(0.1))
    assert optimizer.state_dict()["state"][0]["step"] == 3.0
    optimizer.step()


def test_fused_optimizers_take_numbers_of_numpy() -> None:
    outcomes = []
    for kind in (float, np.float32):
        model = linear()
        numbers: list[Any] = [kind(x) for x in (0.5, 0.25, 0.75)]
        parameters = [{"params": model.parameters(), "lr": numbers[0]}]
        optimizer = FusedAdam(parameters, numbers[1], betas=(numbers[1], numbers[2]))
        assert type(optimizer.param_groups[0]["lr"]) is float
        optimizer.param_groups[0].update(lr=numbers[0], betas=(numbers[1], numbers[2]))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        outcomes.append(bits(list(model.parameters())))
    assert outcomes[0] == outcomes[1]


class Unreadable(Mapping[Any, Any]):
    """A mapping that fails when it is read."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        raise KeyError("odd")

    def __getitem__(self, key: Any) -> Any:
        raise KeyError("odd")


@pytest.mark.parametrize("optimizer_of", [FusedAdam, torch.optim.AdamW])
def test_mappings_that_fail_are_named(optimizer_of: Any) -> None:
    _, optimizer = stepped(optimizer_of)
    state = optimizer.state_dict()
    with pytest.raises(AmpTypeError, match=r"got a Unreadable that cannot be read: KeyError\('odd'\)"):
        optimizer.load_state_dict(Unreadable())
    text = r"a mapping that cannot be read: KeyError\('odd'\)"
    refused(optimizer, {**state, "state": Unreadable()}, f"usable 'state': {text}")
    refused(optimizer, {**state, "state": {0: Unreadable()}}, f"usable 0: {text}")
    refused(optimizer, {**state, "param_groups": [Unreadable()]}, f"usable 0: {text}")


LOADED_TWICE = ("Adafactor", "Adagrad", "Adam", "AdamW", "LBFGS", "Muon", "RMSprop", "SGD")


@pytest.mark.parametrize("name", [n for n in LOADED_TWICE if hasattr(torch.optim, n)])
@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_what_an_optimizer_of_torch_has_saved_loads_again_and_again(level: str, name: str) -> None:
    make = functools.partial(getattr(torch.optim, name), lr=1e-3)
    model, optimizer = started(nn.Linear(4, 4, bias=False), make, level)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return run_backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)

    optimizer.step(closure)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        optimizer.load_state_dict(state)
        assert bits(optimizer.state_dict()["state"]) == bits(state["state"])
    for _ in range(3):
        optimizer.step(closure)
        optimizer.load_state_dict(state)


def test_a_load_that_fails_leaves_the_defaults_alone() -> None:
    _, optimizer = stepped(torch.optim.Adafactor)
    before = dict(optimizer.defaults)

    def fail(optimizer: Any) -> None:
        raise KeyError("odd")

    optimizer.register_load_state_dict_post_hook(fail)
    refused(optimizer, optimizer.state_dict(), "Adafactor cannot load this state dict: KeyError")
    assert optimizer.defaults == before


@pytest.mark.parametrize("level", [None, "O3"])
def test_second_moments_in_bfloat16_are_not_rounded_to_float16_on_the_way(level: str | None) -> None:
    model = linear().half()
    optimizer: Any = FusedAdam(model.parameters(), state_dtype=torch.bfloat16)
    if level is not None:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, allow_incoming_model_not_fp32=True
        )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    moments: Tensor = state["state"][0]["exp_avg_sq"]
    assert 0 < moments.float().max() < 2**-25
    optimizer.load_state_dict(copy.deepcopy(state))
    after = optimizer.state_dict()["state"][0]
    assert torch.equal(after["exp_avg_sq"], moments)
    assert torch.equal(after["exp_avg"], state["state"][0]["exp_avg"])


def fp16_optimizer() -> FP16_Optimizer:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    return FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)


WRONG_MASTERS: dict[str, Callable[[], list[Any]]] = {
    "nested": lambda: [torch.nested.nested_tensor([torch.zeros(3)])],
    "of another shape": lambda: [torch.zeros(4, 3)],
    "a number": lambda: [1.0],
    "too many": lambda: [torch.zeros(4, 4)] * 10_000,
}
WRONG_MASTERS |= {
    f"{number}": lambda number=number: [torch.full((4,), number, dtype=torch.float64)]  # type: ignore
    for number in (torch.nan, torch.inf, -torch.inf, 1e300, -1e300)
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("wrong", WRONG_MASTERS)
def test_masters_are_those_of_the_model(wrong: str) -> None:
    optimizer = fp16_optimizer()
    state = copy.deepcopy(optimizer.state_dict())
    state["fp32_from_fp16"][0][-1:] = WRONG_MASTERS[wrong]()
    before = bits(optimizer.state_dict())
    with pytest.raises(AmpValueError, match=r"\['fp32_from_fp16'\].*; expected (a|finite) ") as error:
        optimizer.load_state_dict(state)
    assert len(str(error.value)) < 300
    assert bits(optimizer.state_dict()) == before


def test_masters_may_come_in_another_order() -> None:
    optimizer = fp16_optimizer()
    state = optimizer.state_dict()
    of = state["fp32_from_fp16"][0]
    of[0], of[2] = of[2], of[0]  # what is loaded is what it is loaded into
    expected = bits(state["fp32_from_fp16"])
    optimizer.load_state_dict(state)
    assert bits(optimizer.state_dict()["fp32_from_fp16"]) == expected


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"unskipped": 1e39}, "'unskipped': 1e[+]39; expected a whole number from 0 to 2.14748e[+]09"),
        ({"unskipped": 10**400}, "'unskipped': an integer of about 401 digits"),
        ({"unskipped": 1.5}, "'unskipped': 1.5"),
        ({"unskipped": float("inf")}, "'unskipped': inf"),
        ({"hysteresis_left": float("nan")}, "'hysteresis_left': nan"),
        ({"hysteresis_left": None}, "'hysteresis_left': None"),
        ({"loss_scale": True}, "'loss_scale': True"),
        ({"dynamic": "yes"}, "'dynamic': 'yes'; expected a bool"),
        ({"histeresis_left": 1}, "'histeresis_left': no loss scaler has it"),
    ],
)
def test_several_loss_scalers_load_together_or_not_at_all(entry: dict[str, Any], text: str) -> None:
    model = linear()
    amp.initialize(model, sgd(model), opt_level="O2", num_losses=2)
    before = amp.state_dict()
    wrong = {"loss_scale": 4.0, "unskipped": 1, **entry}
    state = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": wrong}
    with pytest.raises(AmpError, match=rf"state_dict\['loss_scaler1'\] has no usable {text}"):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


class Named:
    """Looks like a key, and is none."""

    def __str__(self) -> str:
        return "loss_scaler1"


def test_only_text_is_a_key_of_a_loss_scaler() -> None:
    amp.initialize(linear(), opt_level="O2", num_losses=2)
    state: Any = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}
    state[Named()] = state["loss_scaler0"]
    with pytest.raises(AmpError, match="Unexpected key"):
        amp.load_state_dict(state)


def test_a_warning_that_is_an_error_comes_before_anything_is_loaded() -> None:
    amp.initialize(linear(), opt_level="O2")
    with pytest.raises(amp.AmpWarning, match="saved at opt_level O1"):  # warnings are errors here
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "opt_level": "O1"})
    assert amp.loss_scale() == 65536.0


def test_state_dicts_go_both_ways_between_torchs_optimizers_and_the_fused() -> None:
    for theirs, ours in (
        (torch.optim.AdamW, FusedAdam),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: FusedSGD(p, lr=0.1, momentum=0.9),
        ),
    ):
        _, first = stepped(theirs)
        saved = copy.deepcopy(first.state_dict())
        _, second = stepped(ours)
        second.load_state_dict(saved)
        first.load_state_dict(copy.deepcopy(second.state_dict()))
        first.step()


def test_a_hostile_key_cannot_steer_the_terminal() -> None:
    _, optimizer = started(torch.nn.Linear(2, 2), torch.optim.AdamW, "O5")
    for key in ("\x1b[2Jgone", "a\rb", "\x9b31m", "\u202eabc"):
        for load in (amp.load_state_dict, optimizer.load_state_dict):
            with pytest.raises(amp.AmpError) as raised:
                load({key: {"param_groups": []}, "loss_scaler0": {key: 1}})
            assert str(raised.value).isprintable()
