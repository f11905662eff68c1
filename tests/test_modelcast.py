"""A cast model takes and gives what the bare one did, in every container, and survives what it did."""

from __future__ import annotations

import copy
import pickle
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import amp
from amp.casting.containers import map_tensors
from tests.covering import covering
from tests.models import (
    CAST_LEVELS,
    LEVELS,
    MODEL_DTYPE,
    batch,
    conv_net,
    initialize,
    linear,
    sgd,
    started,
    step_on,
)
from tests.states import assert_same, through_a_file

# Containers.

Point = namedtuple("Point", ["x", "y"])


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Item:
    data: Tensor
    label: int = 3
    nested: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenItem:
    data: Tensor


@dataclass(slots=True)
class SlottedItem:
    data: Tensor


class ModelOutput(OrderedDict):  # as in transformers: a mapping whose keys are attributes too
    logits: Tensor

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Batch:
    """Knows how to move itself, as the batches of graph libraries do."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges = x, edges

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        return Batch(self.x.to(*args, **kwargs), self.edges.to(*args, **kwargs))


class Ring:
    """Knows itself, as the nodes of a tree know their parents."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.me = x, self

    def to(self, *args: Any) -> Ring:
        raise AssertionError("not needed")


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *args: Any) -> Slots:
        return Slots(self.x.to(*args))


class MoreSlots(Slots):
    __slots__ = "y"

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x)
        self.y = y


class OddTuple(tuple):
    def __new__(cls, x: Tensor, y: int) -> OddTuple:
        return super().__new__(cls, (x, y))


class MyList(list):
    pass


class MyDict(dict):
    pass


ONES = torch.ones(2)
INTS = torch.arange(2)


@pytest.mark.parametrize(
    ("value", "get"),
    [
        (ONES, lambda v: v),
        ([ONES, 1], lambda v: v[0]),
        ((ONES, "a"), lambda v: v[0]),
        (MyList([ONES]), lambda v: v[0]),
        ({"a": ONES, "b": None}, lambda v: v["a"]),
        (MyDict(a=ONES), lambda v: v["a"]),
        (OrderedDict(b=INTS, a=ONES), lambda v: v["a"]),
        (defaultdict(list, a=ONES), lambda v: v["a"]),
        (UserDict(a=ONES), lambda v: v["a"]),
        (types.MappingProxyType({"a": ONES}), lambda v: v["a"]),
        (Point(ONES, INTS), lambda v: v.x),
        (Pair(ONES, INTS), lambda v: v.left),
        (Item(ONES), lambda v: v.data),
        (Item(INTS, nested=[ONES]), lambda v: v.nested[0]),
        (FrozenItem(ONES), lambda v: v.data),
        (SlottedItem(ONES), lambda v: v.data),
        (Batch(ONES, INTS), lambda v: v.x),
        (Ring(ONES), lambda v: v.x),
        (Slots(ONES), lambda v: v.x),
        (MoreSlots(ONES, INTS), lambda v: v.x),
        (OddTuple(ONES, 1), lambda v: v[0]),
        (deque([ONES], maxlen=2), lambda v: v[0]),
        ({1: [(ONES, {"deep": Point(ONES, INTS)})]}, lambda v: v[1][0][1]["deep"].x),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_found_in_every_container_and_types_are_kept(value: Any, get: Any) -> None:
    result = map_tensors(lambda t: t.half() if t.is_floating_point() else t, value)
    assert get(result).dtype is torch.float16
    assert get(value).dtype is torch.float32, "the caller's own was changed"
    if not isinstance(value, types.MappingProxyType):
        assert type(result) is type(value)
    if isinstance(value, OrderedDict):
        assert list(result) == list(value)
    if isinstance(value, defaultdict):
        assert result.default_factory is list
    if isinstance(value, Batch):
        assert result.edges.dtype is torch.int64
    if isinstance(value, Item):
        assert result.label == 3


def test_a_model_output_keeps_its_attributes() -> None:
    value = ModelOutput()
    value["logits"] = ONES
    result = map_tensors(Tensor.half, value)
    assert type(result) is ModelOutput
    assert result.logits.dtype is result["logits"].dtype is torch.float16
    assert value.logits.dtype is torch.float32


def test_a_packed_sequence() -> None:
    value = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = map_tensors(Tensor.half, value)
    assert isinstance(result, PackedSequence)
    assert result.data.dtype is torch.float16
    assert torch.equal(result.batch_sizes, value.batch_sizes)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, "text", b"bytes", 2.5, range(3), iter([ONES]), {1, 2}, [], {}, (), int, INTS),
        *(torch.float16, torch.Size([1, 2]), torch.device("cpu"), nn.Linear(1, 1)),
        *((x for x in [ONES]), [INTS, {"a": INTS}], Item(INTS)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_nothing_to_cast_is_returned_itself(value: Any) -> None:
    assert map_tensors(lambda t: t.half() if t.is_floating_point() else t, value) is value


class Echo(nn.Module):
    """Records what it was given and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return {"first": args[0] * self.weight, "all": args, "count": INTS}


@pytest.mark.parametrize("level", ["O0", *CAST_LEVELS])
def test_inputs_go_in_as_the_models_dtype_and_outputs_come_out_fp32(level: str) -> None:
    model = amp.initialize(Echo(), opt_level=level)
    out = model(
        ONES, [ONES.double(), INTS], flag=True, extra={"mask": INTS > 0, "c": ONES.to(torch.complex64)}
    )
    dtype = MODEL_DTYPE[level]
    (first, (second, third)), kwargs = model.seen
    assert first.dtype is second.dtype is dtype
    assert third.dtype is torch.int64
    assert kwargs["flag"] is True
    assert kwargs["extra"]["mask"].dtype is torch.bool
    assert kwargs["extra"]["c"].dtype is torch.complex64
    assert out["first"].dtype is torch.float32
    assert out["count"].dtype is torch.int64


@pytest.mark.parametrize(
    ("level", "override", "expected"),
    [
        ("O2", {"cast_model_outputs": torch.float16}, torch.float16),
        ("O5", {"cast_model_outputs": "bfloat16"}, torch.bfloat16),
        ("O1", {"cast_model_outputs": "float32"}, torch.float32),
        ("O1", {}, torch.float16),
        ("O1", {"cast_model_type": torch.float32}, torch.float32),
        ("O2", {"cast_model_type": False}, torch.float32),
        ("O3", {"cast_model_type": torch.bfloat16, "cast_model_outputs": "half"}, torch.float16),
    ],
)
def test_output_dtypes(level: str, override: dict[str, Any], expected: torch.dtype) -> None:
    model = amp.initialize(linear(), opt_level=level, **override)
    assert model(torch.ones(1, 4)).dtype is expected


def test_gradients_flow_to_an_input_in_its_own_dtype() -> None:
    model = amp.initialize(linear(), opt_level="O2")
    x = torch.ones(1, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


# Norms.


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm2d(4)
        self.batch_plain = nn.BatchNorm2d(4, affine=False)
        self.instance_stats = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(5)
        self.rms = nn.RMSNorm(5)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
            assert x.dtype is self.conv.weight.dtype, f"{type(module).__name__} gave {x.dtype}"
        return x


STATISTICS = ("batch", "batch_plain", "instance_stats")
OTHERS = ("instance", "group", "layer", "rms")


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("keep", [{}, {"keep_norm_fp32": True}, {"keep_batchnorm_fp32": False}])
@pytest.mark.parametrize("training", [True, False])
def test_which_norms_stay_fp32(level: str, keep: dict[str, Any], training: bool) -> None:
    model = amp.initialize(Norms(), opt_level=level, **keep).train(training)
    statistics = keep.get("keep_batchnorm_fp32", level != "O3") or "keep_norm_fp32" in keep
    for name in STATISTICS + OTHERS:
        kept = statistics if name in STATISTICS else "keep_norm_fp32" in keep
        for tensor in (*getattr(model, name).parameters(), *getattr(model, name).buffers()):
            if tensor.is_floating_point():
                assert tensor.dtype is (torch.float32 if kept else MODEL_DTYPE[level]), name
    model(torch.randn(2, 4, 5, 5)).sum().backward()
    assert model.batch.num_batches_tracked == int(training)


@pytest.mark.parametrize(
    ("level", "keep", "name"),
    covering(CAST_LEVELS, [{}, {"keep_norm_fp32": True}], STATISTICS + OTHERS, strength=1),
)
def test_norms_can_be_called_on_their_own_with_any_input(
    level: str, keep: dict[str, Any], name: str
) -> None:
    model = amp.initialize(Norms(), opt_level=level, **keep)
    x = torch.randn(2, 4, 5, 5)
    expected = getattr(Norms(), name)(x)
    for dtype in (torch.float32, MODEL_DTYPE[level]):
        out = getattr(model, name)(x.to(dtype))
        torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


# What a model must survive.


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_sub_modules_can_be_called_on_their_own(level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU())
            self.norm = nn.LayerNorm(4)
            self.rnn = nn.LSTM(4, 3, batch_first=True)
            self.cell = nn.GRUCell(3, 3)
            self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
            self.head = nn.Linear(3, 2)

        def features(self, x: Tensor) -> Tensor:
            h = self.body(x).flatten(2).transpose(1, 2).float()  # a detour through FP32
            h, _ = self.rnn(self.norm(h))
            h, _ = self.attention(h.float(), h.float(), h.float())
            return self.cell(h.mean(1).float())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x).float())

    model = amp.initialize(Net(), opt_level=level)
    x = torch.randn(2, 1, 4, 4)
    out = model(x)
    assert out.dtype is torch.float32
    torch.testing.assert_close(model.head(model.features(x)).float(), out)
    assert torch.isfinite(model.body(x)).all()
    out.sum().backward()


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model, optimizer = started(Tied(), lambda p: sgd(p, lr=1.0), "O2")
    assert model.head.weight is model.embed.weight
    assert len(list(amp.master_params(optimizer))) == 1
    step_on(model(torch.tensor([[1, 2]])).sum() / 64, optimizer)
    state = model.state_dict()
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert torch.equal(model.head.weight, state["embed.weight"].half())


def test_buffers_are_cast_and_integer_ones_are_not() -> None:
    model = amp.initialize(conv_net(), opt_level="O3")
    assert model.offset.dtype is torch.float16
    assert model.norm.num_batches_tracked.dtype is torch.int64


def test_gradients_that_are_there_are_cast_with_their_parameter() -> None:
    model = linear()
    model(torch.ones(1, 4)).sum().backward()
    amp.initialize(model, opt_level="O3")
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float16


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_models_of_their_own(level: str, how: str) -> None:
    model, optimizer = started(conv_net(), lambda p: sgd(p, lr=1.0), level)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = through_a_file(model, weights_only=False)
    model.eval()
    twin.eval()
    x, y = batch()
    before = model(x)
    assert twin(x).dtype is before.dtype
    in_float32 = how == "deepcopy" and next(model.parameters()).dtype is not torch.float32
    if in_float32:
        torch.testing.assert_close(twin(x), before, rtol=0, atol=0.03)
        before = twin(x)
    else:
        assert torch.equal(twin(x), before)
    step_on(F.cross_entropy(model(x), y), optimizer)
    assert torch.equal(twin(x), before), "the copy ran the original's weights"
    assert not torch.equal(model(x), before)
    for name, value in twin.state_dict().items():
        assert not value.is_floating_point() or value.dtype is torch.float32, name
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0.03 if in_float32 else 0)


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_the_state_dict_is_fp32_in_the_same_order_and_loads_back(level: str) -> None:
    plain = conv_net()
    model, _ = started(conv_net(), sgd, level)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert value.dtype is plain.state_dict()[name].dtype, name
    if level != "O3":
        for name, value in plain.named_parameters():
            assert torch.equal(state[name], value), name
    assert model.head.state_dict()["weight"].dtype is torch.float32
    plain.load_state_dict(state)
    other, other_optimizer = started(conv_net(1), sgd, level)
    other.load_state_dict(state)
    assert_same(other.state_dict(), state)
    other_optimizer.step()
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name]), f"{name}: stale masters came back"


def test_sub_module_state_dicts_reach_the_masters_too() -> None:
    model, optimizer = started(conv_net(), sgd, "O2")
    model.head.load_state_dict({"weight": torch.full((3, 64), 1 / 3), "bias": torch.zeros(3)})
    optimizer.step()
    assert (model.state_dict()["head.weight"] == 1 / 3).all()
    assert (model.head.weight == torch.tensor(1 / 3).half()).all()


def test_a_user_hook_sees_the_cast_output_and_runs_in_its_turn() -> None:
    seen = []
    model = linear()
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = amp.initialize(model, opt_level="O2")
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model(torch.ones(1, 4))
    assert seen == [torch.float16, torch.float32]


def test_data_parallel_replicas_cast_too() -> None:
    model = amp.initialize(linear(), opt_level="O2")
    replica: Any = model._replicate_for_data_parallel()
    replica.weight, replica.bias = model.weight.detach(), model.bias.detach()
    assert replica(torch.ones(1, 4)).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own doing
@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", *CAST_LEVELS])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_torch_compile_makes_one_graph_of_a_cast_model(level: str, compiled_first: bool) -> None:
    def run(compiled: bool) -> list[float]:
        model = conv_net()
        optimizer = sgd(model)
        forward: Any = model
        if compiled and compiled_first:
            forward = torch.compile(model, backend="aot_eager", fullgraph=True)
        initialize(model, optimizer, level)
        if compiled and not compiled_first:
            forward = torch.compile(model, backend="aot_eager", fullgraph=True)
        losses = []
        for step in range(3):
            x, y = batch(step)
            output = forward(x)
            assert output.dtype is torch.float32
            optimizer.zero_grad()
            losses.append(step_on(F.cross_entropy(output, y), optimizer).item())
        return losses

    torch._dynamo.reset()
    assert run(compiled=True) == pytest.approx(run(compiled=False), rel=1e-3)


@pytest.mark.parametrize("level", ["O0", *CAST_LEVELS])
def test_a_float64_model_stays_one(level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    says_so = pytest.warns(amp.AmpWarning, match="of this Net are float64. No level casts that")
    with nullcontext() if level == "O0" else says_so:
        model = amp.initialize(Net(), opt_level=level)
    assert model(torch.full((1, 4), 1 / 3, dtype=torch.float64))[0, 0] == 4 * (1 / 3)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_is_refused_where_it_cannot_be_cast() -> None:
    model: Any = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="Call amp.initialize first, and trace what it returns"):
        amp.initialize(nn.Sequential(model), opt_level="O2")
    amp.initialize(nn.Sequential(model), opt_level="O0")


class Copied(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new: Any = type(self)(self.in_features, self.out_features)
        new.load_state_dict(self.state_dict())
        new.mark = "deepcopy"
        return new


class Once(nn.Linear):
    """Takes its method away while it is copied, as many do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        vars(self)["__deepcopy__"] = None
        try:
            new: Any = copy.deepcopy(self, memo)
        finally:
            del vars(self)["__deepcopy__"]
        del vars(new)["__deepcopy__"]
        new.mark = "once"
        return new


class Reduced(nn.Linear):
    """Is made anew when it is copied or unpickled."""

    def __reduce__(self) -> Any:
        return _remade, (type(self), self.in_features, self.state_dict())


def _remade(cls: Any, size: int, state: dict[str, Tensor]) -> Any:
    new = cls(size, size)
    new.load_state_dict(state)
    new.mark = "reduced"
    return new


class Stated(nn.Linear):
    """Says itself what its state is."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mark": "state"}


class Shared(nn.Linear):
    """Has no copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@pytest.mark.parametrize(
    ("level", "of"), covering(["O1", "O4", "O6"], [Copied, Once, Reduced, Stated, Shared], strength=1)
)
def test_modules_are_copied_and_pickled_as_their_classes_say(of: Any, level: str) -> None:
    model: Any = nn.Sequential(of(16, 16), nn.Linear(16, 16))
    amp.initialize(model, opt_level=level, verbosity=0)
    own: Any = model[0]
    cls, x = type(own), torch.randn(16, 16)
    twin = copy.deepcopy(model)
    other: Any = twin[0]
    assert type(own) is cls
    assert type(other) is cls
    assert torch.equal(twin(x), model(x))
    assert (other is own) is (of is Shared)
    marks = {Copied: "deepcopy", Once: "once", Reduced: "reduced", Stated: "state"}
    assert getattr(other, "mark", None) == marks.get(of)
    assert not hasattr(own, "mark")
    assert type(pickle.loads(pickle.dumps(own))) is of
