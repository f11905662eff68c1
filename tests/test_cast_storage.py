"""What lies on one memory before `initialize` does so after it and after `close`, or is named."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters

import amp
from amp.errors import AmpRuntimeError, AmpWarning
from amp.profiles import levels
from amp.profiles.levels import load_profile
from amp.shared_memory import CastMemory, same_memory
from amp.training.attached_optimizer import AttachedOptimizer
from tests.interrupting import Interrupter, every_nth_line, interrupt
from tests.models import train_on

SIZE = 32
LEVELS = [level for level in levels.LEVELS if load_profile(level).casts_model and level != "O0"]
WITHOUT_FP8 = [level for level in LEVELS if not load_profile(level).fp8]
WITH_MASTERS = [level for level in LEVELS if load_profile(level).master_weights]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(SIZE, SIZE, bias=False)
        self.decoder = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def same_view(model: Any) -> None:
    model.decoder.weight.data = model.encoder.weight.data


def transposed(model: Any) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight.data.t())


def shifted(model: Any) -> None:
    flat = torch.randn(SIZE + 1, SIZE) * 0.2
    model.encoder.weight.data, model.decoder.weight.data = flat[:SIZE], flat[1:]


def flat(model: Any) -> None:
    vector = torch.randn(SIZE * SIZE * 2 + 4) * 0.2  # with 8 bytes of padding between the two
    model.encoder.weight.data = vector[: SIZE * SIZE].view(SIZE, SIZE)
    model.decoder.weight.data = vector[SIZE * SIZE + 2 : -2].view(SIZE, SIZE)


def columns(model: Any) -> None:
    both = torch.randn(SIZE, 2 * SIZE) * 0.2
    model.encoder.weight.data, model.decoder.weight.data = both.chunk(2, dim=1)


TIED = [same_view, transposed, shifted]
BESIDE = [flat, columns]
Layout = Callable[[Any], None]


def made(layout: Layout) -> Any:
    model = Net()
    layout(model)
    gc.collect()
    return model


def begin(model: Any, level: str, parameters: Any = None, **options: Any) -> Any:
    """Initialize a model, and return its optimizer."""
    parameters = list(model.parameters() if parameters is None else parameters)
    optimizer: Any = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return optimizer


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        train_on((model(torch.ones(16, SIZE)).float() - 1).square().mean(), optimizer)


def places(model: nn.Module) -> list[Any]:
    """Return where each parameter lies, relative to the others."""
    tensors = list(model.parameters())
    numbers = {tensor.untyped_storage().data_ptr(): i for i, tensor in reversed([*enumerate(tensors)])}
    return [
        (numbers[x.untyped_storage().data_ptr()], x.storage_offset(), x.shape, x.stride())
        for x in tensors
    ]


def copies(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.parameters()]


@pytest.mark.parametrize("layout", [*TIED, *BESIDE])
@pytest.mark.parametrize("level", LEVELS)
def test_views_of_one_storage_are_so_after_the_cast_and_after_close(level: str, layout: Layout) -> None:
    model = made(layout)
    at, values = places(model), copies(model)
    optimizer = begin(model, level, [model.encoder.weight])
    dtype = load_profile(level).cast_model_type
    assert [tensor.dtype for tensor in model.parameters()] == [dtype] * 2
    assert places(model) == at
    for tensor, before in zip(model.parameters(), values, strict=True):
        assert torch.equal(tensor, before.to(tensor.dtype))

    train(model, optimizer)
    assert places(model) == at
    (master,) = amp.master_params(optimizer)
    trained, rounded = master.detach().float(), copies(model)
    amp.get_session(optimizer).close()
    assert [tensor.dtype for tensor in model.parameters()] == [torch.float32] * 2
    assert places(model) == at
    assert torch.equal(model.encoder.weight, trained), "the bits of the master are kept"
    assert not torch.equal(trained, values[0])
    assert torch.equal(model.decoder.weight.to(rounded[1].dtype), rounded[1])


@pytest.mark.parametrize("level", LEVELS)
def test_a_flat_vector_that_the_model_holds_reaches_its_views(level: str) -> None:
    model = made(flat)
    whole = model.encoder.weight.data.as_strided((SIZE * SIZE * 2 + 4,), (1,), 0)
    model.register_buffer("whole", whole)
    del whole
    begin(model, level, [model.encoder.weight])
    model.whole.fill_(0.25)
    assert bool((model.encoder.weight == 0.25).all() and (model.decoder.weight == 0.25).all())
    amp.get_session().close()
    assert model.whole.dtype is torch.float32
    model.whole.fill_(0.5)
    assert bool((model.decoder.weight == 0.5).all())


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("layout", BESIDE)
def test_what_lies_side_by_side_trains_as_what_lies_apart(layout: Layout, level: str) -> None:
    ends = []
    for lies_apart in (False, True):
        model = made(layout)
        if lies_apart:
            for tensor in model.parameters():
                tensor.data = tensor.data.contiguous().clone()
        optimizer = begin(model, level)
        train(model, optimizer)
        amp.get_session(optimizer).close()
        ends.append([tensor.contiguous() for tensor in copies(model)])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("layout", TIED)
def test_without_masters_an_optimizer_steps_each_view_as_in_torch(layout: Layout) -> None:
    model, plain = made(layout), made(layout)
    optimizer = begin(model, "O3", cast_model_type="bfloat16")
    memory = plain.encoder.weight.data.as_strided(
        (SIZE * (SIZE + 1) if layout is shifted else SIZE * SIZE,), (1,), 0
    )
    memory = memory.bfloat16()
    for tensor in plain.parameters():
        tensor.data = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        (plain(torch.ones(16, SIZE, dtype=torch.bfloat16)).float() - 1).square().mean().backward()
        by_hand.step()
        by_hand.zero_grad()
    train(model, optimizer)
    assert all(map(torch.equal, copies(model), copies(plain)))


@pytest.mark.parametrize("layout", [same_view, flat])
def test_views_that_were_made_after_initialize_are_so_after_close(layout: Layout) -> None:
    model = Net()
    optimizer = begin(model, "O5", [model.encoder.weight])
    vector = torch.zeros(SIZE * SIZE * 2 + 4, dtype=torch.bfloat16)
    if layout is flat:
        model.encoder.weight.data = vector[: SIZE * SIZE].view(SIZE, SIZE)
        model.decoder.weight.data = vector[SIZE * SIZE + 2 : -2].view(SIZE, SIZE)
    else:
        layout(model)
    at = places(model)
    amp.get_session(optimizer).close()
    assert places(model) == at


def test_models_of_one_call_share_memory_as_before() -> None:
    actor, critic = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    critic.weight.data = actor.weight.data
    optimizer: Any = torch.optim.SGD([*actor.parameters(), critic.bias], lr=0.1)
    amp.initialize([actor, critic], optimizer, opt_level="O5", verbosity=0)
    train(actor, optimizer)
    assert critic.weight.data_ptr() == actor.weight.data_ptr()
    amp.get_session(optimizer).close()
    assert critic.weight.data_ptr() == actor.weight.data_ptr()
    assert critic.weight.dtype is torch.float32


@pytest.mark.parametrize("layout", [*TIED, *BESIDE])
def test_a_failed_initialize_gives_the_very_memory_back(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError

    model = made(layout)
    addresses, at, values = [x.data_ptr() for x in model.parameters()], places(model), copies(model)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(AttachedOptimizer, "note_parameters", fail)
        begin(model, "O5", [model.encoder.weight])
    assert [x.data_ptr() for x in model.parameters()] == addresses
    assert places(model) == at
    assert all(map(torch.equal, copies(model), values))

    optimizer = begin(model, "O5", [model.encoder.weight])  # which casts what is there now
    assert torch.equal(model.encoder.weight, values[0].bfloat16())
    assert places(model) == at
    amp.get_session(optimizer).close()


@every_nth_line(97, 11)
def test_an_interrupted_close_can_be_repeated(every: int) -> None:
    def run(at: int) -> tuple[Interrupter, list[Any], list[Tensor]]:
        model = made(flat)
        optimizer = begin(model, "O5", [model.encoder.weight])
        train(model, optimizer)
        session = amp.get_session(optimizer)
        interrupter = interrupt(at, session.close)
        session.close()
        return interrupter, places(model), copies(model)

    counted, at, values = run(-1)
    for line in counted.first[::every]:
        interrupter, found, now = run(line)
        assert found == at, interrupter.place
        assert all(map(torch.equal, now, values)), interrupter.place


@pytest.mark.parametrize("layout", [*TIED, *BESIDE])
def test_an_interrupted_initialize_leaves_the_very_memory(layout: Layout) -> None:
    def run(at: int) -> Interrupter:
        model, interrupter = made(layout), Interrupter(at)
        addresses, values = [x.data_ptr() for x in model.parameters()], copies(model)
        try:
            with interrupter.active():
                begin(model, "O5", [model.encoder.weight])
        except KeyboardInterrupt:
            if model.encoder.weight.dtype is torch.float32:
                assert [x.data_ptr() for x in model.parameters()] == addresses, interrupter.place
                assert all(map(torch.equal, copies(model), values)), interrupter.place
        return interrupter

    for line in run(-1).first[::151]:
        run(line)


def test_a_tensor_that_has_moved_meanwhile_is_cast_as_it_is() -> None:
    memory, both = CastMemory(), torch.zeros(8)
    one, other = both[:4], both[4:]
    memory.note([one, other])
    one.data = torch.ones(4)
    assert torch.equal(memory.cast(one, torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    assert torch.equal(memory.cast(other, torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))


def test_the_memory_from_before_is_freed() -> None:
    model = made(flat)
    before = weakref.ref(model.encoder.weight.untyped_storage())
    optimizer = begin(model, "O5")
    assert before() is None
    during = weakref.ref(model.encoder.weight.untyped_storage())
    amp.get_session(optimizer).close()
    assert during() is None


def test_views_with_much_between_them_do_not_take_memory_for_it() -> None:
    model = Net()
    of_a_file = torch.randn(100_000)
    for i, tensor in enumerate(model.parameters()):
        tensor.data = of_a_file[i * 50_000 :][: SIZE * SIZE].view(SIZE, SIZE)
    del of_a_file
    begin(model, "O5")
    assert (
        sum(tensor.untyped_storage().nbytes() for tensor in model.parameters()) == 2 * 2 * SIZE * SIZE
    )


# What is refused.


@pytest.mark.parametrize("layout", TIED)
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_two_masters_of_one_memory_are_refused(level: str, layout: Layout) -> None:
    model = made(layout)
    at = places(model)
    remedy = "make them one parameter" if layout is same_view else "compute one from the other"
    with pytest.raises(AmpRuntimeError, match=f"encoder.weight, decoder.weight. Either {remedy}"):
        begin(model, level)
    assert places(model) == at
    assert model.encoder.weight.dtype is torch.float32


def test_two_masters_of_one_memory_are_refused_in_two_optimizers() -> None:
    model = made(same_view)
    optimizers: Any = [torch.optim.SGD([x], lr=0.1) for x in model.parameters()]
    with pytest.raises(AmpRuntimeError, match="encoder.weight, decoder.weight"):
        amp.initialize(model, optimizers, opt_level="O5", verbosity=0)


def norm_on_a_bias() -> Any:
    model: Any = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
    model[1].bias.data = model[0].bias.data
    return model


def test_one_memory_that_would_need_two_dtypes_is_refused() -> None:
    model = norm_on_a_bias()
    with pytest.raises(AmpRuntimeError, match=r"'0.bias' \(bfloat16\), '1.bias' \(float32\)"):
        begin(model, "O5", [model[0].weight])
    assert model[0].bias.dtype is torch.float32
    assert model[0].bias.data_ptr() == model[1].bias.data_ptr()


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_one_memory_that_needs_one_dtype_is_not_refused(level: str) -> None:
    model = norm_on_a_bias()
    begin(model, level)
    assert model[0].bias.data_ptr() == model[1].bias.data_ptr()


def test_buffers_that_would_need_two_dtypes_are_warned_of() -> None:
    model: Any = Net()
    mask = torch.rand(1, SIZE)
    model.encoder.register_buffer("mask", mask)
    model.decoder.register_buffer("mask", mask.expand(SIZE, SIZE))
    rules: Any = [{"module": "decoder", "cast": "float32"}]
    with pytest.warns(AmpWarning, match=r"'encoder.mask' \(bfloat16\), 'decoder.mask' \(float32\)"):
        begin(model, "O5", rules=rules)


# What other code looks at.


@pytest.mark.parametrize("way", ["tensor", "numpy"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_flat_vector_that_other_code_holds_is_warned_of(level: str, way: str) -> None:
    model = made(flat)
    vector = model.encoder.weight.data.as_strided((SIZE * SIZE * 2 + 4,), (1,), 0)
    held = vector.numpy() if way == "numpy" else vector
    del vector
    says = r"shape \(2052,\).* has the memory of encoder.weight, decoder.weight"
    with pytest.warns(AmpWarning, match=says) as caught:
        begin(model, level)
    assert len(caught) == 1
    assert held.shape == (2052,)


def test_a_vector_that_was_made_of_weights_by_torch_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
    best = nn.utils.parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(best, model.parameters())
    with pytest.warns(AmpWarning, match="has the memory of 0.weight, 0.bias, 1.weight, 1.bias"):
        begin(model, "O2")


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_levels_that_cast_no_weights_say_nothing_of_a_flat_vector(level: str) -> None:
    model = made(flat)
    vector = model.encoder.weight.data.as_strided((SIZE * SIZE * 2 + 4,), (1,), 0)
    begin(model, level)
    vector.zero_()
    assert not model.decoder.weight.any()


def convolutions() -> Any:
    last: Any = nn.Conv2d(8, 8, 3)
    last.to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), last)


def through(function: Callable[[Any], Any]) -> Callable[[Path], Iterator[Any]]:
    def make(_: Path) -> Iterator[Any]:
        first = convolutions()
        yield function(first)
        del first

    return make


def assigned(path: Path, *, mmap: bool) -> Iterator[Any]:
    torch.save(convolutions().state_dict(), path / "state.pt")
    state = torch.load(path / "state.pt", mmap=mmap)
    model = convolutions()
    model.load_state_dict(state, assign=True)
    yield model
    del state


def of_safetensors(path: Path) -> Iterator[Any]:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(
        convolutions().to(memory_format=torch.contiguous_format).state_dict(), path / "state"
    )
    state = safetensors.load_file(path / "state")
    model = convolutions()
    model.load_state_dict(state, assign=True)
    yield model
    del state


def with_state_dict_taken(_: Path) -> Iterator[Any]:
    model = convolutions()
    taken = model.state_dict(), [tensor.data for tensor in model.parameters()]
    yield model
    del taken


def with_graph_alive(_: Path) -> Iterator[Any]:
    model = convolutions()
    loss = model(torch.randn(2, 3, 8, 8)).sum()
    loss.backward(retain_graph=True)
    yield model
    del loss


def with_views_of_a_weight(_: Path) -> Iterator[Any]:
    model: Any = nn.MultiheadAttention(SIZE, 2)
    parts = model.in_proj_weight.chunk(3), model.in_proj_weight.data.view(-1)
    yield model
    del parts


def parametrized(_: Path) -> Iterator[Any]:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
        parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
        parametrizations.orthogonal(nn.Linear(SIZE, SIZE)),
    )
    parametrize.register_parametrization(model[0], "bias", nn.Identity())
    yield model


ORDINARY: dict[str, Callable[[Path], Iterator[Any]]] = {
    "just made": through(lambda model: model),
    "a deep copy": through(copy.deepcopy),
    "pickled": through(lambda model: pickle.loads(pickle.dumps(model))),
    "moved": through(lambda model: model.double().float().to(memory_format=torch.channels_last)),
    "an average": through(lambda model: torch.optim.swa_utils.AveragedModel(model)),
    "pruned": through(lambda model: (prune.l1_unstructured(model[0], "weight", 2), model)[1]),
    "loaded": through(lambda model: (model.load_state_dict(convolutions().state_dict()), model)[1]),
    "assigned": lambda path: assigned(path, mmap=False),
    "mapped": lambda path: assigned(path, mmap=True),
    "of safetensors": of_safetensors,
    "state dict taken": with_state_dict_taken,
    "graph alive": with_graph_alive,
    "views of a weight": with_views_of_a_weight,
    "parametrized": parametrized,
    "recurrent": through(lambda _: nn.LSTM(SIZE, SIZE, 2, bidirectional=True)),
    "a transformer": through(lambda _: nn.TransformerEncoderLayer(SIZE, 2)),
}


@pytest.mark.parametrize("way", ORDINARY)
@pytest.mark.parametrize("level", WITHOUT_FP8)
def test_ordinary_ways_to_make_a_model_are_not_warned_of(level: str, way: str, tmp_path: Path) -> None:
    for model in ORDINARY[way](tmp_path):
        begin(model, level)
        amp.get_session().close()


# Shared memory.

HAS_FORK = hasattr(os, "fork")


@pytest.mark.skipif(not HAS_FORK, reason="needs os.fork")
@pytest.mark.parametrize("layout", [None, flat])
@pytest.mark.parametrize("level", LEVELS)
def test_an_actor_sees_the_training_of_a_model_in_shared_memory(
    level: str, layout: Layout | None
) -> None:
    model = Net() if layout is None else made(layout)
    model.share_memory()
    optimizer = begin(model, level)
    assert all(tensor.is_shared() for tensor in model.parameters())
    go_read, go_write = os.pipe()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
        child = os.fork()
    if child == 0:
        os.read(go_read, 1)
        os.write(write, b"%.6f" % float(model.encoder.weight.detach().double().sum()))
        os._exit(0)
    train(model, optimizer)
    os.write(go_write, b"x")
    seen = float(os.read(read, 100))
    os.waitpid(child, 0)
    for end in (go_read, go_write, read, write):
        os.close(end)
    assert seen == pytest.approx(float(model.encoder.weight.detach().double().sum()), abs=1e-6)
    amp.get_session(optimizer).close()
    assert all(tensor.is_shared() for tensor in model.parameters())


def test_what_is_not_shared_is_not_put_into_shared_memory() -> None:
    model = made(flat)
    begin(model, "O5")
    assert not any(tensor.is_shared() for tensor in model.parameters())


def initialize_and_tell(model: Any, told: Any, go: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpWarning)
        begin(model, "O5")
    told.send([str(one.message) for one in caught if isinstance(one.message, AmpWarning)])
    go.wait(60)


@pytest.mark.skipif(not HAS_FORK, reason="needs os.fork")
@pytest.mark.parametrize("is_in_shared_memory", [True, False])
def test_processes_that_run_already_are_warned_of(is_in_shared_memory: bool) -> None:
    model = Net()
    if is_in_shared_memory:
        model.share_memory()
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    go = context.Event()
    child = context.Process(target=initialize_and_tell, args=(model, theirs, go))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    try:
        says = "other processes may see holds encoder.weight, decoder.weight.* after amp.initialize"
        assert ours.poll(60)
        in_child = ours.recv()
        if is_in_shared_memory:
            assert "other processes may see holds encoder.weight, decoder.weight" in in_child[0]
            with pytest.warns(AmpWarning, match=says):
                begin(model, "O5")
        else:
            assert not in_child
            begin(model, "O5")
    finally:
        go.set()
        child.join()


# The helper.


def groups(*tensors: Tensor) -> list[tuple[list[int], bool]]:
    number = {id(tensor): i for i, tensor in enumerate(tensors)}
    found = same_memory(tensors)
    return sorted((sorted(number[id(x)] for x in each.tensors), each.is_one_view) for each in found)


def test_tensors_that_share_elements_are_found() -> None:
    x, matrix = torch.zeros(100), torch.zeros(8, 8)
    assert groups(x, x.clone(), matrix) == []
    assert groups(x, x) == [], "one object is one"
    assert groups(x, x.detach(), x[:100]) == [([0, 1, 2], True)]
    assert groups(x[:50], x[50:]) == []
    assert groups(x[:51], x[50:], x[99:]) == [([0, 1, 2], False)]
    assert groups(x[:10], x[90:], x[5:15], x[80:95], x[40:60]) == [([0, 2], False), ([1, 3], False)]
    assert groups(matrix, matrix.t()) == [([0, 1], False)]
    assert groups(matrix[:, :4], matrix[:, 4:]) == []
    assert groups(matrix[:, :5], matrix[:, 4:], matrix[0]) == [([0, 1, 2], False)]
    assert groups(x[::2], x[1::2]) == []
    assert groups(x[::2], x[1::2], x[::3]) == [([0, 1, 2], False)]
    assert groups(x[::2], x[1::2], x[::4], x[1::4]) == [([0, 2], False), ([1, 3], False)]
    assert groups(x, x.view(torch.int32)) == [([0, 1], False)]
    assert groups(x[::2], x.view(torch.float16)[2::4], x.view(torch.int16)[1::4]) == [([0, 2], False)]
    assert groups(x[:1].expand(5), x[:1]) == [([0, 1], False)]
    assert groups(x[:0], x) == []


def test_tensors_without_memory_of_their_own_share_none() -> None:
    on_meta = torch.zeros(4, device="meta")
    sparse = torch.eye(3).to_sparse()
    released = torch.zeros(4)
    released.untyped_storage().resize_(0)
    assert groups(on_meta, on_meta.view(2, 2), sparse, released, released.detach()) == []
    assert groups(nn.parameter.UninitializedParameter(), F.one_hot(torch.tensor(1))) == []
