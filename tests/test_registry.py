"""apex's decorators and register functions, for whatever a script brings along."""

from __future__ import annotations

import builtins
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import amp
from amp.casting import registry
from tests.covering import covering
from tests.levels import BY_OP
from tests.models import casting

HALF, WIDE, BRAIN = torch.float16, torch.float32, torch.bfloat16
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_registrations_are_left() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def takes(*args: Any, **kwargs: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors that arrive."""
    flat = [v for a in (*args, *kwargs.values()) for v in (a if isinstance(a, (list, tuple)) else [a])]
    return [v.dtype for v in flat if isinstance(v, Tensor)]


PLAIN = [takes]  # where no session patches it


@pytest.fixture
def extension() -> Any:
    """Make a module of functions, like a C extension."""
    return types.SimpleNamespace(run=takes)


KINDS = {
    "half": (amp.register_half_function, amp.half_function, {"O1": [HALF, HALF], "O4": [BRAIN, BRAIN]}),
    "bfloat16": (
        amp.register_bfloat16_function,
        amp.bfloat16_function,
        {"O1": [BRAIN, BRAIN], "O4": [BRAIN, BRAIN]},
    ),
    "float": (
        amp.register_float_function,
        amp.float_function,
        {"O1": [WIDE, WIDE], "O4": [WIDE, WIDE]},
    ),
    "promote": (
        amp.register_promote_function,
        amp.promote_function,
        {"O1": [WIDE, WIDE], "O4": [WIDE, WIDE]},
    ),
}


@pytest.mark.parametrize(("kind", "level", "before"), covering(KINDS, BY_OP, [False, True]))
def test_registered_functions(kind: str, level: str, before: bool, extension: Any) -> None:
    register, _, expected = KINDS[kind]
    if before:
        register(extension, "run")
    for _ in range(2):  # the registration survives a second session
        with casting(level):
            if not before:
                register(extension, "run")
            assert extension.run(X, X.half()) == expected[level]
            assert extension.run([X], other=X.half()) == expected[level]
            assert extension.run.__wrapped__ is PLAIN[0]
            assert takes is extension.run, "a name taken earlier"
            with amp.disable_casts():
                assert extension.run(X, X.half()) == [WIDE, HALF]
        assert extension.run is takes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", BY_OP)
def test_decorated_functions(kind: str, level: str) -> None:
    _, decorate, expected = KINDS[kind]
    function = decorate(takes)
    assert function(X, X.half()) == [WIDE, HALF], "no session: a plain call"
    assert function.__wrapped__ is takes
    assert function.__name__ == "takes"
    for _ in range(2):
        with casting(level):
            assert function(X, X.half()) == expected[level]
            with torch.autocast("cpu", enabled=False):
                assert function(X, X.half()) == [WIDE, HALF]
    with casting("O2"):
        assert function(X, X.half()) == [WIDE, HALF], "no function casts there"


def test_methods_static_methods_and_class_methods() -> None:
    class Layer:
        @amp.half_function
        def method(self, x: Tensor) -> list[torch.dtype]:
            return takes(x)

        @amp.half_function
        @staticmethod
        def static(x: Tensor) -> list[torch.dtype]:
            return takes(x)

        @classmethod
        @amp.half_function
        def of_class(cls, x: Tensor) -> list[torch.dtype]:
            assert cls is Layer
            return takes(x)

        def plain(self, x: Tensor) -> list[torch.dtype]:
            return takes(x)

        @staticmethod
        def fixed(x: Tensor) -> list[torch.dtype]:
            return takes(x)

    attribute = vars(Layer)["fixed"]
    amp.register_half_function(Layer, "plain")
    amp.register_half_function(Layer, "fixed")
    with casting("O1"):
        layer = Layer()
        for call in (
            layer.method,
            layer.static,
            Layer.static,
            layer.of_class,
            layer.plain,
            layer.fixed,
        ):
            assert call(X) == [HALF]
        assert Layer.fixed(X) == [HALF]
    assert vars(Layer)["fixed"] is attribute
    assert layer.plain(X) == layer.fixed(X) == [WIDE]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.dtype = x.dtype
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        assert grad.dtype is ctx.dtype
        return grad * ctx.scale, None


@pytest.mark.parametrize("decorated", [False, True])
def test_autograd_functions(decorated: bool) -> None:
    if not decorated:
        amp.register_half_function(Scaled, "apply")
    scaled = amp.half_function(Scaled.apply) if decorated else lambda *args: Scaled.apply(*args)
    with casting("O1"):
        x = X.clone().requires_grad_()
        out = scaled(x, 2.0)
        assert out.dtype is HALF
        out.sum().backward()
        assert x.grad.dtype is WIDE
        assert (x.grad == 2).all()
    assert Scaled.apply(X, 2.0).dtype is WIDE
    assert "apply" not in vars(Scaled)


class Doubled(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return Scaled.forward(ctx, x, 2 * scale)


def test_a_subclass_of_a_registered_function_is_itself() -> None:
    amp.register_float_function(Scaled, "apply")
    with casting("O1"):
        assert (Scaled.apply(X, 1.0) == X).all()
        assert (Doubled.apply(X.half(), 1.0) == 2 * X.half().float()).all()


def test_modules_hold_functions_of_an_extension_that_nobody_can_import(extension: Any) -> None:
    model = torch.nn.Module()
    model.run = extension.run
    amp.register_half_function(extension, "run")
    amp.initialize(model, opt_level="O1")
    assert model.run(X) == [HALF]
    amp.get_session().close()
    assert model.run(X) == [WIDE]


def test_functions_of_torch_can_be_registered_as_in_apex() -> None:
    amp.register_float_function(torch, "sigmoid")
    with casting("O1"):
        assert torch.sigmoid(X.half()).dtype is WIDE
        p = torch.sigmoid(X.half())
        assert torch.isfinite(F.binary_cross_entropy(p, torch.ones(4, 4)))


def test_what_a_half_function_calls_goes_on_casting_and_what_a_float_function_calls_does_not() -> None:
    def inside(x: Tensor) -> list[torch.dtype]:
        return takes(x, x @ x, x.softmax(-1))

    with casting("O1"):
        assert amp.half_function(inside)(X) == [HALF, HALF, WIDE]
        assert amp.float_function(inside)(X.half()) == [WIDE, WIDE, WIDE]


def test_errors_say_what_is_there(extension: Any) -> None:
    with pytest.raises(ValueError, match=r"torch has no function 'sigmod'; did you mean 'sigmoid'"):
        amp.register_half_function(torch, "sigmod")
    extension.value = 3
    with pytest.raises(ValueError, match="value is no function but a int"):
        amp.register_half_function(extension, "value")
    with pytest.raises(ValueError, match="Linear is no function but a type"):
        amp.register_half_function(torch.nn, "Linear")
    with pytest.raises(ValueError, match="builtins is a module of Python"):
        amp.register_float_function(builtins, "len")
    with pytest.raises(ValueError, match="int is a type of Python itself"):
        amp.register_half_function(int, "bit_length")
    with pytest.raises(TypeError, match="name is 3, a int; give a string"):
        amp.register_half_function(torch, 3)  # type: ignore[arg-type]
    for value in (3, torch.nn.Linear):
        with pytest.raises(TypeError, match="is no function to decorate"):
            amp.half_function(value)  # type: ignore[type-var]


def test_what_runs_after_its_call_or_cannot_be_replaced_is_refused(extension: Any) -> None:
    def generator(x: Tensor) -> Iterator[Tensor]:
        yield x

    async def later(x: Tensor) -> Tensor:
        return x

    class Slots:
        __slots__ = ()

        def run(self, x: Tensor) -> Tensor:
            return x

    for function in (generator, later):
        with pytest.raises(TypeError, match=r"runs after the call.*amp.disable_casts.*float32"):
            amp.float_function(function)
        extension.later = function
        with pytest.raises(TypeError, match="later is a generator or async"):
            amp.register_float_function(extension, "later")
        assert amp.half_function(function).__name__ == function.__name__, "its arguments are cast"
    with pytest.raises(TypeError, match=r"Slots.run cannot be replaced.*Decorate it instead"):
        amp.register_float_function(Slots(), "run")
    with amp.Session("O1") as session:
        session.initialize(None)


def test_float64_and_integers_arrive_as_they_are() -> None:
    with casting("O1"):
        assert amp.half_function(takes)(X.double(), X.long()) == [torch.float64, torch.int64]
