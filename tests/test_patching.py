"""Whoever patches what, in whatever order they leave, the originals are back in the end."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest

from amp.patching import Patches


def original(x: int) -> int:
    return x


class Base:
    def method(self, x: int) -> int:
        return x


class Child(Base):
    pass


def adder(amount: int) -> Callable[[Any], Any]:
    def make(function: Any) -> Any:
        return lambda *args: function(*args) + amount

    return make


@pytest.fixture
def module() -> types.SimpleNamespace:
    return types.SimpleNamespace(f=original)


def test_undo_gives_the_same_object_back_and_is_idempotent(module: types.SimpleNamespace) -> None:
    patches = Patches()
    patches.wrap(module, "f", adder(10))
    assert module.f(1) == 11
    patches.undo()
    assert module.f is original
    patches.undo()
    assert module.f is original


def test_an_inherited_attribute_is_inherited_again() -> None:
    with Patches() as patches:
        patches.wrap(Child, "method", adder(10))
        assert Child().method(1) == 11
        assert Base().method(1) == 1
    assert "method" not in vars(Child)
    assert Child().method(1) == 1


def test_a_method_of_an_instance() -> None:
    child = Child()
    with Patches() as patches:
        patches.wrap(child, "method", lambda f: types.MethodType(lambda self, x: f(x) + 10, child))
        assert child.method(1) == 11
    assert not vars(child)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_owners_leave_in_any_order(module: types.SimpleNamespace, order: tuple[int, ...]) -> None:
    owners = [Patches() for _ in range(3)]
    for i, owner in enumerate(owners):
        owner.wrap(module, "f", adder(10 * (i + 1)))
        assert module.f(0) == 10 * (i + 1), "each wraps the original, not the other's wrapper"
    left = set(range(3))
    for i in order:
        owners[i].undo()
        left.discard(i)
        assert module.f(0) == (10 * (max(left) + 1) if left else 0)
    assert module.f is original


def test_an_exception_undoes(module: types.SimpleNamespace) -> None:
    with pytest.raises(KeyError), Patches() as patches:
        patches.wrap(module, "f", adder(1))
        raise KeyError
    assert module.f is original


def test_somebody_elses_patch_on_top_is_left_alone(module: types.SimpleNamespace) -> None:
    patches = Patches()
    patches.wrap(module, "f", adder(10))
    ours = module.f

    def theirs(x: int) -> int:
        return ours(x) * 2

    theirs.__dict__.update(ours.__dict__)  # as functools.wraps does
    module.f = theirs
    patches.undo()
    assert module.f is theirs
    again = Patches()
    again.wrap(module, "f", adder(1))
    assert module.f(1) == 23
    again.undo()
    assert module.f is theirs
