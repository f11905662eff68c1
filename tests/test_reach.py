"""Where O1 and O4 cast: names taken earlier, threads, checkpoints, regions of the user's own, hooks."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import amp
from amp.casting import regions
from tests.covering import covering
from tests.models import casting, initialize, sgd, started

HALF, WIDE, BRAIN = torch.float16, torch.float32, torch.bfloat16
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def script() -> Iterator[types.ModuleType]:
    """Make a loaded module that took functions from torch by name."""
    module: Any = types.ModuleType("a_script_of_somebody")
    module.linear, module.gelu, module.exp_ = F.linear, F.gelu, torch.exp_
    module.other = "not a function"
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_names_that_modules_took_earlier_cast_too(script: Any) -> None:
    linear, gelu, exp_ = script.linear, script.gelu, script.exp_
    with casting("O1"):
        assert script.linear(X, X).dtype is HALF
        assert script.gelu(X.half()).dtype is WIDE
        assert script.gelu is F.gelu
        with pytest.raises(NotImplementedError, match="exp_ runs in FP32"):
            script.exp_(X.half())
        script.later = F.conv1d
    assert script.linear is linear
    assert script.gelu is gelu
    assert script.exp_ is exp_
    assert script.later is F.conv1d, "also what it took meanwhile"


def test_two_sessions_over_a_name_taken_earlier(script: Any) -> None:
    linear = script.linear
    first, second = amp.Session("O1"), amp.Session("O4")
    first.initialize(None)
    second.initialize(None)
    assert script.linear(X, X).dtype is BRAIN
    second.close()
    assert script.linear(X, X).dtype is HALF
    first.close()
    assert script.linear is linear


class Holds(nn.Module):
    """Holds functions as attributes, as torch's transformer layers do."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


def test_functions_that_modules_hold_cast_too() -> None:
    gelu = F.gelu
    model = nn.Sequential(Holds(gelu), nn.Identity())
    amp.initialize(model, opt_level="O1")
    assert model(X.half()).dtype is WIDE
    assert pickle.loads(pickle.dumps(model))(X.half()).dtype is WIDE
    amp.get_session().close()
    assert model[0].activation is gelu
    assert model(X.half()).dtype is HALF


class Fixed(nn.Module):
    activation = staticmethod(F.gelu)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            nn.Sequential(Holds(functools.partial(F.softplus, beta=2))),
            "0.activation is a partial of torch",
        ),
        (Holds([F.gelu]), "Holds.activation holds torch.nn.functional.gelu"),
        (Fixed(), "Fixed.activation is torch.nn.functional.gelu"),
    ],
)
def test_what_cannot_be_patched_is_named(model: nn.Module, named: str) -> None:
    with pytest.warns(amp.AmpWarning, match=named):
        amp.initialize(model, opt_level="O1")


def in_thread(function: Any) -> Any:
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return h, h.softmax(-1)


def dtypes(values: Any) -> list[torch.dtype]:
    return [value.dtype for value in values]


def test_threads_cast() -> None:
    model = amp.initialize(Net(), opt_level="O4")
    assert in_thread(lambda: F.linear(X, X).dtype) is BRAIN
    assert dtypes(in_thread(lambda: model(X))) == [BRAIN, WIDE]
    assert in_thread(lambda: torch.get_autocast_dtype("cpu")) is torch.get_autocast_dtype("cpu")


@pytest.mark.parametrize("off", [False, True])
def test_data_parallel_threads_do_as_the_caller_does(off: bool, monkeypatch: Any) -> None:
    """DataParallel tells its threads whether autocast is on, and never in which dtype."""

    def parallel_apply(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled("cpu")

        def worker() -> Any:
            with torch.autocast("cpu", HALF, enabled=enabled):  # as torch: in the default dtype
                return replicas[0](*inputs)

        return in_thread(worker)

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", parallel_apply)
    model = amp.initialize(Net(), opt_level="O4")
    replica = model._replicate_for_data_parallel()
    replica.linear = model.linear
    with torch.autocast("cpu", enabled=False) if off else torch.no_grad():
        out = nn.DataParallel.parallel_apply(None, [replica], (X,), {})  # type: ignore[arg-type]
    assert dtypes(out) == ([WIDE, WIDE] if off else [BRAIN, WIDE])
    amp.get_session().close()


REGIONS = {
    "none": (lambda: torch.no_grad(), [HALF, WIDE]),
    "off": (lambda: torch.autocast("cpu", enabled=False), [WIDE, WIDE]),
    "old spelling": (lambda: torch.cpu.amp.autocast(enabled=False), [WIDE, WIDE]),
    "disable_casts": (amp.disable_casts, [WIDE, WIDE]),
    "bfloat16": (lambda: torch.autocast("cpu", BRAIN), [BRAIN, BRAIN]),  # the CPU's own policy
    "same": (lambda: torch.autocast("cpu", HALF), [HALF, WIDE]),
}
ignore_old_spelling = pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast")


@ignore_old_spelling
@pytest.mark.parametrize("name", REGIONS)
def test_the_inner_region_wins(name: str) -> None:
    region, expected = REGIONS[name]

    class Regions(Net):
        def forward(self, x: Tensor) -> Any:
            before = super().forward(x)
            with region():
                inside = super().forward(x)
            return before, inside, super().forward(x)

    model = amp.initialize(Regions(), opt_level="O1")
    before, inside, after = model(X)
    assert dtypes(before) == dtypes(after) == [HALF, WIDE]
    assert dtypes(inside) == expected
    with region():  # around a forward, and where there is none
        assert dtypes(model.linear(X).softmax(-1)[None]) == expected[1:]
        assert F.linear(X, X).dtype is expected[0]
        outside = model(X)
    assert dtypes(outside[0]) == expected
    assert dtypes(model(X)[0]) == [HALF, WIDE]


@ignore_old_spelling
@pytest.mark.parametrize(
    ("name", "use_reentrant", "in_forward"), covering(REGIONS, [False, True], [False, True], strength=1)
)
def test_a_checkpoint_recomputes_as_it_computed(
    name: str, use_reentrant: bool, in_forward: bool
) -> None:
    if name == "none":
        region: Any = torch.enable_grad
    else:
        region = REGIONS[name][0]
    seen: list[list[torch.dtype]] = []

    class Checkpoints(Net):
        def part(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(dtypes(out))
            return out[1].float()

        def forward(self, x: Tensor) -> Any:
            with region():
                return checkpoint(self.part, x, use_reentrant=use_reentrant)

    model = amp.initialize(Checkpoints(), opt_level="O1")
    x = X.clone().requires_grad_()
    with set_checkpoint_early_stop(False):
        out = model(x) if in_forward else model.forward(x)
    out[0].sum().backward()
    assert seen == [REGIONS[name][1]] * 2
    assert model.linear.weight.grad.dtype is WIDE


def test_custom_functions_hear_that_autocast_is_on() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype is WIDE
            assert (x @ x).dtype is WIDE, "casts are off inside, as it says"
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
            return grad * 2

    class Custom(Net):
        def forward(self, x: Tensor) -> Any:
            assert torch.is_autocast_enabled("cpu")
            return Doubled.apply(self.linear(x))

    model = amp.initialize(Custom(), opt_level="O1")
    model(X).sum().backward()
    assert model.linear.weight.grad.dtype is WIDE


def test_a_region_for_a_device_that_is_not_there_says_nothing() -> None:
    with casting("O1"), torch.autocast("xpu", enabled=False):
        assert (X @ X).dtype is HALF


def test_a_step_inside_a_forward_is_seen_by_it() -> None:
    class Learns(Net):
        def forward(self, x: Tensor) -> Any:
            first = self.linear(x)
            first.float().sum().backward()
            optimizer.step()
            return first, self.linear(x)

    model, optimizer = started(Learns(), sgd, "O4")
    first, second = model(X)
    assert not torch.equal(first, second)


def test_backward_hooks_cast_like_everything_else() -> None:
    model = amp.initialize(Net(), opt_level="O1")
    out = model(X)[0].float()
    seen = []
    out.register_hook(lambda grad: seen.append((grad @ grad).dtype))
    out.sum().backward()
    with amp.disable_casts():
        out = model.linear(X)
        out.register_hook(lambda grad: seen.append((grad @ grad).dtype))
        out.sum().backward()
    assert seen == [HALF, WIDE]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_gradient_penalty(level: str) -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        return (grad.float().norm(2, dim=1) - 1).square().mean()

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    model, _ = initialize(model, sgd(model), level)
    penalty(model, X.clone().requires_grad_()).backward()
    amp.get_session().close()
    penalty(plain, X.clone().requires_grad_()).backward()
    for p, q in zip(model[:2].parameters(), plain[:2].parameters(), strict=True):
        error: Any = p.grad - q.grad
        assert error.norm() <= 0.1 * q.grad.norm() + 1e-3


def test_an_interrupted_forward_leaves_nothing_for_the_next() -> None:
    """Ctrl-C calls no hooks: the next forward starts afresh, with the weights as they are then."""

    class Interrupted(Net):
        stop = True

        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            if self.stop:
                raise KeyboardInterrupt
            return out

    model = Interrupted()
    model = amp.initialize(model, opt_level="O1")
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.stop = False
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.fill_(3)
    assert (model(X)[0] == 3).all()
    assert not torch.is_autocast_enabled("cpu")
    assert not regions.forwards.are_running
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    amp.get_session().close()
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_of_another_models_inside_a_forward() -> None:
    inner = Net()

    class Outer(Net):
        def forward(self, x: Tensor) -> Any:
            inner(x)
            assert torch.is_autocast_enabled("cpu"), "the inner forward ended, not the outer one"
            return super().forward(inner(x)[0])

    outer = Outer()
    amp.initialize([outer, inner], opt_level="O1")
    assert dtypes(outer(X)) == [HALF, WIDE]
    assert not torch.is_autocast_enabled("cpu")


def test_a_copy_for_averaging_casts_and_outlives_the_session() -> None:
    model = amp.initialize(Net(), opt_level="O1")
    average = copy.deepcopy(model)
    assert dtypes(average(X)) == [HALF, WIDE]
    amp.get_session().close()
    assert dtypes(average(X)) == [WIDE, WIDE]
    assert dtypes(pickle.loads(pickle.dumps(average))(X)) == [WIDE, WIDE]


def test_what_a_dispatch_mode_does_inside_an_op_is_its_own() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch.mm(X, X).dtype)
            return func(*args, **(kwargs or {}))

    amp.initialize(Net(), opt_level="O1")
    with Looks():
        assert (X @ X).dtype is HALF
    assert set(seen) == {WIDE}


def test_closing_after_an_exception_gives_every_function_back() -> None:
    before = {name: getattr(F, name) for name in dir(F)}
    with pytest.raises(KeyError), amp.Session("O1") as session:
        session.initialize(Net())
        raise KeyError
    assert all(getattr(F, name) is value for name, value in before.items())
