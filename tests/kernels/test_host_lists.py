"""Questions about lists of tensors: C++ answers as Python does, and refuses what is none."""

from __future__ import annotations

import logging
import weakref
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import amp
from amp.kernels import host_lists, master_copy, unscale
from amp.kernels.host_lists import InPython
from amp.kernels.language import INTERPRETED
from amp.torch_versions import HAS_GRAD_DTYPE
from tests.compiling import lists_in_cpp

if INTERPRETED:
    pytest.skip("needs no interpreter", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def in_cpp() -> Any:
    """The compiled functions."""
    host_lists.lists = lists_in_cpp()
    return host_lists.lists


@pytest.fixture(params=["C++", "Python"])
def way(request: pytest.FixtureRequest, in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways, as what the library uses."""
    chosen = in_cpp if request.param == "C++" else InPython
    monkeypatch.setattr(host_lists, "lists", chosen)
    return chosen


class Own(nn.Parameter):
    """A subclass with a slot of its own, as masters are."""

    __slots__ = ("_own",)


def tensors() -> list[Any]:
    torch.manual_seed(0)
    leaf = nn.Parameter(torch.randn(4, 3))
    made = [leaf, Own(torch.randn(5)), leaf * 2, leaf.detach()[1:, 1:], torch.empty(0, 3)]
    made += [
        torch.randn(3).to(torch.bfloat16),
        torch.tensor(True),
        torch.randn(2, dtype=torch.complex64),
    ]
    made += [torch.zeros(2, device="meta"), leaf.detach().t(), nn.Parameter(torch.randn(2).half())]
    return made


def test_addresses_and_versions(way: Any) -> None:
    some = tensors()
    assert list(way.addresses(some)) == [x.data_ptr() for x in some]
    assert way.versions(some) == [x._version for x in some]
    with torch.no_grad():
        some[0].add_(1)
        some[5].data.add_(1)
        some[1].data = torch.randn(5)
    assert list(way.addresses(some)) == [x.data_ptr() for x in some]
    assert way.versions(some) == [x._version for x in some]
    assert way.are_at(some, way.addresses(some))
    assert way.are_at(some, list(way.addresses(some)))
    assert not way.are_at(some, [*way.addresses(some)[:-1], 1])
    assert not way.are_at(some, array("q", [*way.addresses(some)[:-1], 1]))
    assert not way.are_at(some, way.addresses(some[1:]))
    before = way.versions(some[:2])
    assert way.increment(some[:2]) is None
    assert way.versions(some[:2]) == [version + 1 for version in before]
    assert way.addresses([]) == array("q")
    assert way.versions([]) == []


def test_gradients(way: Any) -> None:
    some = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    grads: list[Any] = [None, torch.randn(3), torch.randn(3)]
    assert way.have_grads(some, [None] * 3)
    for x, grad in zip(some, grads, strict=True):
        x.grad = grad
    assert way.have_grads(some, grads)
    assert not way.have_grads(some, [None] * 3)
    assert not way.have_grads(some, [grads[0], grads[2], grads[1]])
    some[0].grad = torch.zeros(3)
    assert not way.have_grads(some, grads)
    weak = weakref.ref(some[0].grad)
    assert way.clear_grads(some) is None
    assert [x.grad for x in some] == [None] * 3
    assert weak() is None
    assert way.clear_grads([torch.ones(2), torch.ones(2).half()]) is None
    assert way.have_grads([], [])


def test_which_tensors_have_a_gradient(way: Any) -> None:
    some = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    some[1].grad = torch.ones(2)
    assert way.with_grad(some) == [False, True, False]
    some[1].grad = None
    some[2].sum().backward()
    assert way.with_grad([*some, torch.ones(2)]) == [False, False, True, False]
    assert way.with_grad([]) == []


def test_gradients_are_set(way: Any) -> None:
    some = [nn.Parameter(torch.randn(3).to(dtype)) for dtype in (torch.float32, torch.float16)]
    some[1].grad_dtype = None
    grads = [torch.randn(3), torch.randn(3)]
    assert way.set_grads(some, grads)
    assert all(x.grad is grad for x, grad in zip(some, grads, strict=True))
    weak, kept = weakref.ref(grads.pop(0)), some[1].grad
    assert way.set_grads(some, [None, kept])
    assert weak() is None
    assert some[0].grad is None
    assert some[1].grad is kept
    (some[1] * 2).sum().backward()  # it is one that backward adds to
    assert some[1].grad is kept
    assert way.set_grads([], [])


@pytest.mark.parametrize(
    "grad",
    [torch.ones(4), torch.ones(1, 3), torch.ones(3, device="meta"), torch.ones(3).double()],
    ids=["size", "shape", "device", "dtype"],
)
def test_a_gradient_that_does_not_fit_is_left_to_python(in_cpp: Any, grad: Tensor) -> None:
    some = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    first = torch.ones(3)
    assert not in_cpp.set_grads(some, [first, grad])
    assert [x.grad for x in some] == [None, None]
    with pytest.raises(RuntimeError):
        InPython.set_grads(some, [first, grad])
    assert not in_cpp.set_grads(some, [first, some[1]])  # no tensor is its own gradient


def test_the_end_of_a_gradient_may_change_the_list(way: Any) -> None:
    class Grad(Tensor):
        def __del__(self) -> None:
            some.clear()

    some = [nn.Parameter(torch.randn(3)) for _ in range(50)]
    kept = list(some)
    for x in some:
        x.grad = torch.randn(3).as_subclass(Grad)
    way.clear_grads(list(some) if way is InPython else some)
    assert not some
    assert [x.grad for x in kept] == [None] * 50


def test_flags_dtypes_and_devices(way: Any) -> None:
    some = tensors()
    flags = [x.requires_grad for x in some]
    assert way.train(some, flags)
    some[0].requires_grad_(False)
    assert not way.train(some, flags)
    some.append(torch.ones(2, dtype=torch.uint16))
    dtypes = [x.dtype for x in some]
    assert way.have_dtypes(some, dtypes)
    assert not way.have_dtypes(some, [*dtypes[:-1], torch.int16])
    assert way.are_together(some, list(some))
    assert not way.are_together(some, some[::-1])


def test_kinds(way: Any) -> None:
    some = tensors()
    sizes, dtypes = tuple([x.numel() for x in some]), tuple([x.dtype for x in some])
    assert way.kind(some) == (sizes, dtypes, False)
    assert way.kind([x for x in some if x.is_contiguous()])[2]
    flat = [x for x in some if x.is_contiguous()]
    sizes, dtypes, _ = way.kind(flat)
    assert way.are_of_kind(flat, sizes, dtypes)
    assert not way.are_of_kind(flat, (*sizes[:-1], 7), dtypes)
    assert not way.are_of_kind(flat, sizes, (*dtypes[:-1], torch.int8))
    assert not way.are_of_kind(some, *way.kind(some)[:2])
    assert way.kind([]) == ((), (), True)
    rare = [torch.ones(2, dtype=torch.uint16), torch.ones(3).to(torch.float8_e5m2)]
    assert way.kind(rare) == ((2, 3), (torch.uint16, torch.float8_e5m2), True)
    odd = [torch.ones(2).to_sparse(), torch.ones(2, device="meta")]
    assert way.kind(odd) == ((2, 2), (torch.float32,) * 2, all(x.is_contiguous() for x in odd))


def test_lists_that_go_to_an_operation_as_they_are(way: Any) -> None:
    some = [torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(())]
    low = [x.half() for x in some]
    assert way.go_together([some])
    assert way.go_together([some, low, [x.double() for x in some]])
    assert not way.go_together([[*some, torch.ones(2).half()]])
    assert not way.go_together([some, [*low[:2], torch.ones(1).half()]])
    for odd in (
        torch.ones(0),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, dtype=torch.complex64),
    ):
        assert not way.go_together([[odd]])
        assert not way.go_together([[*some, odd]])
    assert not way.go_together([[]])
    assert not way.go_together([some, some[:2]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_lists_of_other_classes_do_not_go_together(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those for which the environment asks for a backend."""
    some = [torch.ones(2), torch.ones(3)]
    held, elsewhere = torch.ones(3).as_subclass(Held), torch.ones(3).as_subclass(Elsewhere)
    assert way.go_together([some, [nn.Parameter(some[0]), held]])
    assert not way.go_together([some, [some[0], elsewhere]])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert way is InPython or way.go_together([[nested]])  # the operation says what is wrong
    with FakeTensorMode():
        fake = torch.ones(3)
    assert not way.go_together([some, [some[0], fake]])
    for backend in ("reference", "triton"):
        monkeypatch.setenv("AMP_KERNELS", backend)
        assert not way.go_together([some])


class Held(Tensor):
    """A class whose tensors have their values themselves."""


class Elsewhere(Tensor):
    """A class that may have its values elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_rows_of_a_loop(in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses list by list, and sizes; none where tensors lie in memory differently."""
    some = [torch.ones(2, 3), torch.ones(3, 4).t(), torch.ones(())]
    low = [torch.empty_like(x, dtype=torch.int8) for x in some]
    expected = [x.data_ptr() for x in (*some, *low)] + [6, 12, 1]
    assert list(in_cpp.rows([some, low])) == expected
    assert list(in_cpp.rows([[torch.ones(0)]])) == [0, 0]
    one = torch.ones(4, 4)
    for odd in (
        one.t(),  # where the other list is not transposed
        one[:, ::2],
        one[:1].expand(4, 4),
        torch._neg_view(one),
        one.to("meta"),
        one.to_sparse(),
        one.as_subclass(Elsewhere),
        one[:2],
        released(one.clone()),
    ):
        assert in_cpp.rows([[one], [odd]]) is None, odd
        assert in_cpp.rows([[one, one], [one, odd]]) is None, odd
    assert in_cpp.rows([[one, one.half()]]) is None
    assert in_cpp.rows([[one], [one, one]]) is None
    assert in_cpp.rows([[]]) is None
    assert InPython.rows([[one]]) is None
    monkeypatch.setenv("AMP_KERNELS", "reference")
    assert in_cpp.rows([some, low]) is None


def test_floats(way: Any) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    some = [torch.ones(3, 2, dtype=dtype).t() for dtype in dtypes]
    assert way.are_floats([*some, torch.ones(2, device="meta")])
    assert way.are_floats([])
    for odd in (torch.ones(2).to_sparse(), torch.ones(2).int(), torch.ones(2, dtype=torch.complex64)):
        assert not way.are_floats([*some, odd])


def test_numbers(way: Any) -> None:
    some = [torch.tensor(float(i)) for i in (3, 2**24 - 1, 0)]
    assert way.numbers(some) == [3.0, 2.0**24 - 1, 0.0]
    way.add(some, 1.0)
    assert way.numbers(some) == [4.0, 2.0**24, 1.0]
    assert [x.item() for x in some] == [4.0, 2.0**24, 1.0]


def test_numbers_of_others_are_refused(in_cpp: Any) -> None:
    right = torch.tensor(1.0)
    for wrong in (torch.tensor(1), torch.ones(2), torch.tensor(1.0, device="meta"), right.double()):
        for function, more in ((in_cpp.numbers, ()), (in_cpp.add, (1.0,))):
            with pytest.raises(TypeError, match="one float32"):
                function([right, wrong], *more)
    assert right == 1.0


def test_memory_and_views(way: Any) -> None:
    some = [torch.ones(3), torch.empty(0), nn.Parameter(torch.ones(2))]
    assert way.have_memory(some)
    assert way.are_whole(some)
    assert not way.are_whole([*some, some[0][1:]])
    assert way.are_whole([some[2].detach()])
    released = torch.ones(3)
    released.untyped_storage().resize_(0)
    assert not way.have_memory([*some, released])
    assert way.have_memory([])
    assert way.are_whole([])


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="gradients have the dtype of their parameter")
def test_which_dtypes_gradients_may_have(way: Any) -> None:
    some = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    some[0].grad_dtype = None
    assert not way.take_any_grad(some)
    some[1].grad_dtype = None
    assert way.take_any_grad(some)
    some[1].grad_dtype = torch.float32
    assert not way.take_any_grad(some)
    assert way.take_any_grad([])


def test_numbers_are_put_into_a_tensor(in_cpp: Any) -> None:
    state = torch.zeros(3)
    version = state._version
    assert in_cpp.put(state, [1.0, 0.1, -3.0])
    assert torch.equal(state, torch.tensor([1.0, 0.1, -3.0]))
    assert state._version > version
    assert not InPython.put(state, [0.0] * 3)
    for odd, numbers in (
        (state, [0.0]),
        (state, [0.0, 0.0, 0]),
        (state, (0.0, 0.0, 0.0)),
        (state.double(), [0.0] * 3),
        (state.to("meta"), [0.0] * 3),
        (torch.zeros(6)[::2], [0.0] * 3),
        (released(torch.zeros(3)), [0.0] * 3),
        (None, [0.0] * 3),
    ):
        assert not in_cpp.put(odd, numbers)
    assert state[0] == 1.0


def test_what_has_neither_version_nor_address_raises(way: Any) -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        way.versions([torch.ones(1), made])
    assert way.addresses([made]) == array("q", [made.data_ptr()])
    assert way.increment([torch.ones(1), made]) is None


class Record:
    """An object with slots, as pairs are."""

    __slots__ = ("first", "second")


def test_slots_and_items(way: Any) -> None:
    records, values = [Record() for _ in range(3)], [torch.ones(1), None, 3]
    assert way.write_slot(records, "first", values) is None
    assert [record.first for record in records] == values
    assert way.are_same(way.read_slot(records, "first"), values)
    with pytest.raises(AttributeError):
        way.read_slot(records, "second")
    weak = weakref.ref(values.pop(0))
    way.write_slot(records, "first", [None] * 3)
    assert weak() is None
    assert way.read_slot([], "first") == []
    assert way.write_slot([], "first", []) is None
    assert way.items([{"a": 1}, {"b": 3, "a": 2}], "a") == [1, 2]
    with pytest.raises(KeyError):
        way.items([{"a": 1}, {}], "a")


def test_shards(way: Any) -> None:
    class Sharded(Own):
        """A tensor that has its values elsewhere, as a DTensor does."""

    some: list[Any] = [torch.ones(1), nn.Parameter(torch.ones(1)), Sharded(torch.ones(2))]
    some[2]._local_tensor = some[0]
    assert way.are_same(way.shards(some), [some[0], some[1], some[0]])
    assert way.shards([]) == []
    some[2]._local_tensor = Own(torch.ones(2))
    assert way.shards(some) is None
    assert way.shards([Own(torch.ones(2))]) is None


def test_same_objects(way: Any) -> None:
    some = [torch.ones(1), None, 1000]
    assert way.are_same(some, tuple(some))
    assert not way.are_same(some, some[:2])
    assert not way.are_same(some, [torch.ones(1), *some[1:]])
    assert way.are_all_same([some, []], (tuple(some), []))
    assert not way.are_all_same([some, some], [some, some[1:]])
    assert not way.are_all_same([some], [some, some])


def test_what_a_class_says_of_its_dtype_is_of_no_other(way: Any) -> None:
    class Wide(Tensor):
        dtype = property(lambda _: torch.float64)  # type: ignore[assignment]

    narrow = torch.ones(2, dtype=torch.uint32)
    wide = narrow.as_subclass(Wide)
    for _ in range(2):
        assert way.have_dtypes([wide, narrow], [torch.float64, torch.uint32])
        assert way.kind([narrow])[1] == (torch.uint32,)


def test_a_list_that_changes_meanwhile_is_named(in_cpp: Any) -> None:
    class Clearing(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            mappings.clear()
            return 1

    mappings = [Clearing(), {"a": 1}]
    with pytest.raises(RuntimeError, match="changed meanwhile"):
        in_cpp.items(mappings, "a")


def outcome(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_tensors_without_values_of_their_own_are_alike(in_cpp: Any) -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    for odd in (fake, torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        for name in ("addresses", "versions"):
            expected = outcome(getattr(InPython, name), [torch.ones(1).detach(), odd])
            found = outcome(getattr(in_cpp, name), [torch.ones(1).detach(), odd])
            assert found is expected or list(found)[1:] == list(expected)[1:]


@pytest.mark.parametrize("wrong", [(torch.ones(1),), [None], [torch.ones(1), 3], None, [object()], "x"])
def test_what_is_no_list_of_tensors_is_refused(in_cpp: Any, wrong: Any) -> None:
    for function, arguments in (
        (in_cpp.addresses, (wrong,)),
        (in_cpp.versions, (wrong,)),
        (in_cpp.clear_grads, (wrong,)),
        (in_cpp.kind, (wrong,)),
        (in_cpp.are_floats, (wrong,)),
        (in_cpp.set_grads, (wrong, [None])),
        (in_cpp.set_grads, ([torch.ones(1)], [])),
        (in_cpp.set_grads, ([torch.ones(1)], [3])),
        (in_cpp.numbers, (wrong,)),
        (in_cpp.add, (wrong, 1.0)),
        (in_cpp.add, ([torch.tensor(1.0)], "1")),
        (in_cpp.go_together, (wrong,)),
        (in_cpp.rows, (wrong,)),
        (in_cpp.with_grad, (wrong,)),
        (in_cpp.rows, ([[torch.ones(1)], wrong],)),
        (in_cpp.go_together, ([[torch.ones(1)], wrong],)),
        (in_cpp.have_grads, (wrong, [None])),
        (in_cpp.train, (wrong, [True])),
        (in_cpp.are_together, (wrong, wrong)),
        (in_cpp.have_dtypes, (wrong, [torch.float32])),
        (in_cpp.have_dtypes, ([torch.ones(1)], [])),
        (in_cpp.are_at, (wrong, [0])),
        (in_cpp.are_at, ([torch.ones(1)], ["1"])),
        (in_cpp.increment, (wrong,)),
        (in_cpp.have_memory, (wrong,)),
        (in_cpp.are_whole, (wrong,)),
        (in_cpp.take_any_grad, (wrong,)),
        (in_cpp.go_over, (3, [[torch.ones(1)]], 1.0, 1.0, None, 1)),
        (in_cpp.go_over, ("no pass", [[torch.ones(1)]], 1.0, 1.0, None, 1)),
        (in_cpp.go_over, ("axpby", [[torch.ones(1)]], 1.0, 1.0, None, 1)),
        (in_cpp.go_over, ("check", 3, 1.0, 1.0, None, 1)),
        (in_cpp.go_over, ("check", [[torch.ones(1)]], 1.0, 1.0, None, None)),
        (in_cpp.shards, (wrong,)),
        (in_cpp.are_of_kind, (wrong, (1,), (torch.float32,))),
        (in_cpp.read_slot, (wrong, "first")),
        (in_cpp.read_slot, ([Record()], 3)),
        (in_cpp.write_slot, (wrong, "first", [1])),
        (in_cpp.write_slot, ([Record()], "first", [])),
        (in_cpp.items, (wrong, 0)),
        (in_cpp.are_same, ([], 3)),
        (in_cpp.are_all_same, ([[]], [3])),
        (in_cpp.have_grads, ([torch.ones(1)], [])),
        (in_cpp.have_grads, ([torch.ones(1)],)),
        (in_cpp.train, ([torch.ones(1)], [True, False])),
        (in_cpp.are_together, ([torch.ones(1)], [])),
        (in_cpp.go_together, ([],)),
        (in_cpp.rows, ([],)),
    ):
        with pytest.raises(TypeError):
            function(*arguments)


def test_where_pointers_are_not_found_python_goes_on(
    in_cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moved:
        """A module of another release, in which they lie elsewhere."""

        prepare = staticmethod(lambda *_: False)

    class Wrong(InPython):
        """One whose answers are not those of Python."""

        prepare = staticmethod(lambda *_: True)
        versions = staticmethod(lambda tensors: [7] * len(tensors))

    monkeypatch.setattr(host_lists, "lists", InPython)
    for module in (Moved, Wrong):
        host_lists._use(module)
        assert host_lists.lists is InPython


def test_a_library_that_cannot_be_imported_is_left_alone(
    in_cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was linked with another torch."""

    def fail(path: str) -> Any:
        raise ImportError(path)

    made_of = host_lists._source(), host_lists._FLAGS
    assert host_lists.load_kept(*made_of, host_lists._open) is not None
    assert host_lists.load_kept(*made_of, fail) is None
    monkeypatch.setattr(host_lists, "_open", fail)
    monkeypatch.setattr(host_lists, "_compile", lambda: None)
    monkeypatch.setattr(host_lists, "_has_begun", False)
    monkeypatch.setattr(host_lists, "lists", InPython)
    host_lists.load_in_background()
    assert host_lists.lists is InPython


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own code
def test_initialize_under_a_transform_leaves_them_for_later(
    in_cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lists, "_has_begun", False)
    monkeypatch.setattr(host_lists, "lists", InPython)

    def forward(x: Tensor) -> Tensor:
        with amp.Session("O4", verbosity=0) as session:
            session.initialize(nn.Linear(2, 2))
        return x

    torch.func.jvp(forward, (torch.ones(1, 2),), (torch.ones(1, 2),))
    assert host_lists.lists is InPython
    host_lists.load_in_background()
    assert host_lists.lists is not InPython


def test_where_nothing_can_be_compiled_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_lists, "lists", InPython)
    monkeypatch.setattr(host_lists, "read_source", lambda *_: "no such thing")
    with caplog.at_level(logging.INFO, "amp"):
        host_lists._compile()
    assert host_lists.lists is InPython
    assert not caplog.text


class Spy:
    """The compiled functions, which note the passes that were asked for, and whether they were made."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions
        self.passes: set[tuple[str, bool]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def go_over(self, name: str, *arguments: Any) -> bool:
        done: bool = self.functions.go_over(name, *arguments)
        self.passes.add((name, done))
        return done


@pytest.mark.parametrize(
    ("level", "fused", "passes"),
    [
        ("O1", False, {"unscale", "axpby"}),
        ("O2", False, {"unscale", "axpby", "merge", "copy"}),
        ("O2", True, {"check", "axpby"}),
        ("O5", False, {"check", "merge", "copy"}),
        ("O5", True, {"check", "axpby"}),
    ],
)
def test_a_training_on_the_cpu_goes_over_lists_in_cpp(
    in_cpp: Any, level: str, fused: bool, passes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks and a step, none of whose passes are left to torch."""
    spy = Spy(in_cpp)
    monkeypatch.setattr(host_lists, "lists", spy)
    model: Any = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4))
    optimizer = (amp.optimizers.FusedAdam if fused else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {} if level == "O5" else {"loss_scale": {"init": 4.0}}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for _ in range(2):
        with amp.scale_loss(model(torch.randn(8, 9)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert spy.passes == {(name, True) for name in passes}


class Watching(Tensor):
    """A tensor that sees torch's functions."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def released(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


X = torch.arange(8.0)
NOT_TAKEN: dict[str, Any] = {
    "gaps": lambda: [[X[:4], X[::2]], [X[:4].clone(), X[:4].clone()]],
    "another order": lambda: [[X.view(2, 4).t()], [X.view(4, 2).clone()]],
    "another shape": lambda: [[X[:4].clone()], [X[:3].clone()]],
    "another length": lambda: [[X.clone()], []],
    "float64": lambda: [[X.double()], [X.clone()]],
    "whole numbers": lambda: [[X.int()], [X.clone()]],
    "no values": lambda: [[X.to("meta")], [X.clone()]],
    "negated": lambda: [[torch._neg_view(X)], [X.clone()]],
    "a class that sees functions": lambda: [[X.as_subclass(Watching)], [X.clone()]],
    "made in inference mode": lambda: [[X.clone()], [inference(X)]],
    "no memory": lambda: [[X.clone()], [released(X.clone())]],
    "a part of itself": lambda: [[X[:-1]], [X[1:]]],
    "one target twice": lambda: [[X + 1, X + 2], [X, X]],
    "targets that overlap": lambda: [[X[:5] + 1, X[:5] + 2], [X[:5], X[3:]]],
    "a source that is another's target": lambda: [[X + 1, X[:4]], [X[:4], X[4:]]],
    "no tensor": lambda: [[X.clone()], [None]],
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_cpp_leaves_to_torch(in_cpp: Any, case: str) -> None:
    lists, before = NOT_TAKEN[case](), X.clone()
    assert not in_cpp.go_over("copy", lists, 1.0, 1.0, None, 2)
    assert torch.equal(X, before)
    taken = [X.clone(), X.clone()]
    assert in_cpp.go_over("copy", [[X, X], taken], 2.0, 1.0, None, 2)
    assert torch.equal(taken[1], 2 * X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by forward_ad, when it is first used
def test_factors_and_flags_that_cpp_leaves_to_torch(in_cpp: Any) -> None:
    one = torch.ones(1)
    with FakeTensorMode():
        fake = torch.ones(1)
    odd = [fake, torch._neg_view(one), one.double(), torch.ones(2), one.to("meta"), "1", True]
    for number in (*odd, released(one.clone())):
        assert not in_cpp.go_over("check", [[X]], number, 1.0, torch.zeros(1), 1), number
        assert not in_cpp.go_over("check", [[X]], 1.0, 1.0, number, 1), number
    for number in (None, torch.ones(())):
        assert not in_cpp.go_over("check", [[X]], number, 1.0, torch.zeros(1), 1), number
    for ruined in (torch.func.vmap, torch.func.grad):
        with pytest.raises(RuntimeError):  # of torch's own operation, on what has no memory
            ruined(lambda x: unscale.check([X], x.reshape(1), torch.zeros(1)) or x.sum())(torch.ones(3))
    flag = torch.zeros(1)
    assert not in_cpp.go_over("check", [[flag]], 1.0, 1.0, flag, 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        assert not in_cpp.go_over("copy", [[dual], [X.clone()]], 1.0, 1.0, None, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not in_cpp.go_over("copy", [[X], [X]], 1.0, 1.0, None, 1)


@pytest.mark.parametrize("n", [40_000, 2**18])
def test_tensors_that_share_memory_take_one_result(in_cpp: Any, n: int) -> None:
    """That of torch, with several threads too."""
    for _ in range(5):
        target = torch.zeros(n)
        sources = [torch.full((n,), float(i)) for i in range(4)]
        master_copy.master_copy(sources, [target] * 4)
        assert torch.equal(target, sources[3])


class Recorded:
    """What is known of one tensor and its master."""

    __slots__ = ("address", "given", "grad", "trains", "version")


CHANGES: dict[str, Any] = {
    "the gradient of a master": lambda masters, models: setattr(masters[1], "grad", torch.ones(2)),
    "no gradient": lambda masters, models: setattr(models[0], "grad", None),
    "a frozen parameter": lambda masters, models: models[1].requires_grad_(False),
    "a frozen master": lambda masters, models: masters[0].requires_grad_(False),
    "a write": lambda masters, models: masters[1].detach().mul_(2),
    "other memory": lambda masters, models: setattr(masters[1], "data", torch.ones(2)),
    "another dtype": lambda masters, models: setattr(models[1], "data", torch.ones(2)),
}


def test_what_is_recorded_of_pairs_is_compared_at_once(in_cpp: Any) -> None:
    dtypes = [torch.float16] * 2

    def made() -> tuple[list[Any], list[Any], list[Any]]:
        models = [nn.Parameter(torch.ones(2).half()) for _ in range(2)]
        masters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        known = [Recorded(), Recorded()]
        for i, (pair, master, model) in enumerate(zip(known, masters, models, strict=True)):
            model.grad_dtype = None
            pair.grad = master.grad = model.grad = torch.ones(2) if i == 0 else None
            pair.trains, pair.given = True, None
            pair.version, pair.address = master._version, master.data_ptr()
        return known, masters, models

    known, masters, models = made()
    assert in_cpp.agree(known, masters, models, masters, dtypes, True)
    assert not InPython.agree(known, masters, models, masters, dtypes, True)
    for name, change in CHANGES.items():
        known, masters, models = made()
        change(masters, models)
        assert not in_cpp.agree(known, masters, models, masters, dtypes, True), name
        is_of_grads = "gradient" in name
        assert in_cpp.agree(known, masters, models, masters, dtypes, False) == is_of_grads, name
    for slot, value in (
        ("given", 1),
        ("version", 1.0),
        ("address", None),
        ("trains", False),
        ("grad", 2),
    ):
        known, masters, models = made()
        setattr(known[0], slot, value)
        assert not in_cpp.agree(known, masters, models, masters, dtypes, True), slot
    known, masters, models = made()
    del known[1].grad
    assert not in_cpp.agree(known, masters, models, masters, dtypes, True)
    assert in_cpp.agree([], [], [], [], [], True)
    for wrong in ((known, masters[:1], models, masters, dtypes), (known, masters, models, masters, [])):
        with pytest.raises(TypeError):
            in_cpp.agree(*wrong, True)
    with pytest.raises(TypeError):
        in_cpp.agree([object()] * 2, masters, models, masters, dtypes, True)


EVENTS: tuple[Any, ...] = (
    lambda model, masters: None,
    lambda model, masters: masters[0].detach().mul_(0.5),
    lambda model, masters: model[2].weight.data.clamp_(-0.1, 0.1),
    lambda model, masters: setattr(masters[1], "data", torch.ones(9)),
    lambda model, masters: setattr(model[0].weight, "data", torch.eye(9)),  # FP32
    lambda model, masters: model[2].requires_grad_(False),
    lambda model, masters: masters[2].requires_grad_(True),
    lambda model, masters: masters[0].data.add_(0.1),
)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, amp.optimizers.FusedAdam])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_training_that_everything_happens_to(
    in_cpp: Any, level: str, optimizer_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes, moved memory, gradients and frozen weights are seen as they are in Python."""
    ends = []
    for chosen in (in_cpp, InPython):
        monkeypatch.setattr(host_lists, "lists", chosen)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4))
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for event in EVENTS:
            event(model, list(amp.master_params(optimizer)))
            with amp.scale_loss(model(torch.randn(8, 9)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            model[0].bias.grad = torch.ones(9)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([x.detach().clone() for x in (*model.parameters(), *amp.master_params(optimizer))])
        amp.get_session(optimizer).close()
    assert all(map(torch.equal, *ends))
