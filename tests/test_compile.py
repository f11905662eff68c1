"""O1 and O4 under torch.compile, torch.export, torch.jit and torch.func: dtypes as in eager."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.nn import functional as F

import amp
from amp.casting.op_names import resolve
from tests import ops
from tests.covering import covering
from tests.models import BY_OP_DTYPE as HALF
from tests.models import casting, initialize, run_backward, sgd, started, train_on
from tests.ops import Row
from tests.processes import run_python
from tests.test_ops import as_half, floats

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*is not recommended"),
    pytest.mark.filterwarnings("ignore:.*will be removed", "ignore:.*TorchScript"),
    pytest.mark.filterwarnings("ignore:.*is not supported in Python 3.14"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Layers, functions, methods and operators, and regions that say otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x) @ self.weight
        method = h.matmul(self.weight)
        with torch.autocast("cpu", enabled=False):
            island = self.conv(x.transpose(1, 2))
        with amp.disable_casts():
            off = x @ self.weight
        with torch.autocast("cpu", torch.bfloat16):
            inner = F.linear(x, self.weight) @ self.weight
        h, _ = self.attention(*[self.norm(h)] * 3, need_weights=False)
        out = self.conv(h.transpose(1, 2))
        return out, method, island, off, inner, F.softmax(out, -1), out**2, 1 / (out.abs() + 1)


def expected(half: torch.dtype) -> list[torch.dtype]:
    wide = torch.float32
    return [half, half, wide, wide, torch.bfloat16, wide, wide, wide]


def dtypes(values: Any) -> list[torch.dtype]:
    return [value.dtype for value in values]


def batch() -> Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("backend", "level", "compile_first"),
    [
        ("eager", "O1", False),
        ("eager", "O4", True),
        pytest.param("inductor", "O1", False, marks=pytest.mark.slow),
    ],
)
def test_a_model_is_one_graph_with_the_dtypes_of_eager(
    backend: str, level: str, compile_first: bool
) -> None:
    model = Net()
    if compile_first:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert dtypes(compiled(batch())) == [torch.float32] * 4 + [torch.bfloat16] + [torch.float32] * 3
    model, _ = initialize(model, sgd(model), level)
    if not compile_first:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager, out = model(batch()), compiled(batch())
    assert dtypes(eager) == dtypes(out) == expected(HALF[level])
    for a, b in zip(eager, out, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    with amp.disable_casts():
        assert dtypes(compiled(batch()))[:2] == [torch.float32] * 2
    assert dtypes(compiled(batch())) == expected(HALF[level]), "what disable_casts compiled stays away"
    amp.get_session().close()
    assert dtypes(compiled(batch()))[:2] == [torch.float32] * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:Dynamo detected")  # in FP8
@pytest.mark.parametrize(
    ("level", "optimizer_class"),
    covering(
        ["O1", "O5", "O7", "O9"],
        [torch.optim.AdamW, amp.optimizers.FusedAdam],
        strength=1,
        slow_strength=1,
    ),
)
def test_a_model_is_compiled_once(level: str, optimizer_class: Any) -> None:
    """Whatever the first steps have looked at, made and noted."""
    counter = CompileCounter()
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    model, optimizer = initialize(model, optimizer, level)
    compiled = torch.compile(model, backend=counter)
    for _ in range(4):
        train_on(compiled(torch.randn(8, 32)).float().sum(), optimizer)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_training_step(backend: str) -> None:
    model, optimizer = started(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), sgd, "O1")

    @torch.compile(backend=backend, fullgraph=True)
    def forward_and_loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        return F.cross_entropy(out.flatten(1), y), x @ model[0].weight

    for _ in range(2):
        loss, product = forward_and_loss(batch(), torch.tensor([0, 1]))
        assert loss.dtype is torch.float32
        assert product.dtype is torch.float16
        run_backward(loss, optimizer)
        assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def stepped(level: str, make: Any, when: str) -> list[Tensor]:
    """Train by a step that is compiled before `initialize`, after it, or not."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = make(model.parameters(), lr=1e-2)
    if when == "before":
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    model, optimizer = initialize(model, optimizer, level)
    counter = CompileCounter()
    step = torch.compile(optimizer.step, backend=counter) if when == "after" else optimizer.step
    for i in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).float().square().mean() * (torch.inf if i == 2 else 1.0)
        run_backward(loss, optimizer)
        step()
        if level in ("O1", "O2"):
            assert amp.step_was_skipped(optimizer) == (i == 2)
    assert not counter.frame_count  # amp's code is not traced: guards on it would fail
    values = [value.clone() for value in model.state_dict().values()]
    amp.get_session().close()
    return values


@pytest.mark.parametrize(
    ("level", "make", "when"),
    covering(
        ["O0", "O1", "O5"],
        [torch.optim.SGD, amp.optimizers.FusedSGD],
        ["before", "after"],
        strength=2,
    ),
)
@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_compiled_step(level: str, make: Any, when: str) -> None:
    if when == "before" and make is amp.optimizers.FusedSGD:
        pytest.skip("a fused optimizer's step is a kernel already")
    found, expected = stepped(level, make, when), stepped(level, make, "not")
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_step_that_was_compiled_before_initialize_and_kept_is_refused(
    level: str, fullgraph: bool
) -> None:
    model: Any = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="eager", fullgraph=fullgraph)
    model, optimizer = initialize(model, optimizer, level)
    run_backward(model(torch.ones(2, 8)).float().mean(), optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="a step of AdamW was called"):
        step()
    assert model.weight.equal(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_alone_is_guarded(backend: str) -> None:
    """Dynamo does not look at what `@` calls: neither the session nor a region may be missed."""
    weight = torch.eye(8)

    @torch.compile(backend=backend, fullgraph=True)
    def product(x: Tensor) -> Tensor:
        return x @ weight

    seen = [product(batch()).dtype]
    with casting("O1"):
        seen.append(product(batch()).dtype)
        with torch.autocast("cpu", enabled=False):
            seen.append(product(batch()).dtype)
        with amp.disable_casts():
            seen.append(product(batch()).dtype)
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(product(batch()).dtype)
        seen.append(product(batch()).dtype)
    seen.append(product(batch()).dtype)
    half, wide = torch.float16, torch.float32
    assert seen == [wide, half, wide, wide, torch.bfloat16, half, wide]


UNTRACEABLE = {
    "torch.cov",
    "torch.corrcoef",
    "torch.Tensor.cov",
    "torch.Tensor.corrcoef",
    "torch.ctc_loss",
    "torch.nn.functional.ctc_loss",
    "torch.nn.functional.gaussian_nll_loss",
    "torch.equal",
    "torch.Tensor.equal",
    "torch.linalg.lstsq",
    "torch.nn.functional.grouped_mm",  # in FP16
    "torch._grouped_mm",
}
"""What Dynamo cannot trace without a break, with amp or without."""


def as_callers_call(row: Row) -> Any:
    place, _, name = row.op.rpartition(".")
    if place == "operator":
        function = getattr(operator, name)
        return lambda args, kwargs: function(*args)
    if place == "torch.Tensor" and not name.startswith("__"):
        return lambda args, kwargs: getattr(args[0], name)(*args[1:], **kwargs)
    holder = resolve(place)
    return lambda args, kwargs: getattr(holder, name)(*args, **kwargs)


OPS_OF_A_GRAPH = 16


@pytest.mark.slow
def test_ops_compile_to_the_dtype_of_eager() -> None:
    """Every third row, because Dynamo and AOTAutograd trace slowly."""
    calls = []
    for row in (*ops.HALF, *ops.FLOAT, *ops.PROMOTE, *ops.FOLLOWS)[::3]:
        if row.op not in UNTRACEABLE:
            convert = (lambda t: t) if row.category in ("half", "promote") else as_half(torch.float16)
            calls.append((row, as_callers_call(row), [ops._map(convert, value) for value in row.args]))
    wrong = []
    with casting("O1"):
        for i in range(0, len(calls), OPS_OF_A_GRAPH):
            some = calls[i : i + OPS_OF_A_GRAPH]

            def graph(all_args: list[Any], some: list[Any] = some) -> list[Any]:
                return [
                    call(args, row.kwargs) for (row, call, _), args in zip(some, all_args, strict=True)
                ]

            all_args = [args for _, _, args in some]
            torch._dynamo.reset()
            compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)(all_args)
            for (row, call, args), out in zip(some, compiled, strict=True):
                if dtypes(floats(call(args, row.kwargs))) != dtypes(floats(out)):
                    wrong.append(row.op)
    assert not wrong


def run(code: str, **environment: str) -> str:
    """Run code in a process of its own, and return what it prints."""
    result = run_python("-c", code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_what_a_session_compiled_first_does_not_spoil_torch_afterwards() -> None:
    """Dynamo knows torch's functions by identity; it must not learn wrappers instead."""
    code = """
import torch, amp
from torch.nn import functional as F
def f(x):
    y = torch.addcdiv(x, x, x, value=2)
    return F.conv1d(x, x[:, :, :1]), torch.exp(x).softmax(-1), y, x.lerp(x, .5)
x = torch.ones(2, 2, 2)
with amp.Session("O1") as session:
    session.initialize(None)
    torch.compile(f, backend="eager", fullgraph=True)(x)
print(*{t.dtype for t in torch.compile(f, backend="eager", fullgraph=True)(x)})
"""
    assert run(code) == "torch.float32"


@pytest.mark.slow
def test_processes_that_share_an_inductor_cache_keep_their_dtypes(tmp_path: Path) -> None:
    code = """
import os, sys, torch, amp, torch._inductor.compile_fx
torch._inductor.config.compile_threads = 1
w = torch.eye(4)
@torch.compile(fullgraph=True)
def f(x):
    return x @ w, x.matmul(w)
for level in ("O1", None):
    child = os.fork()
    if not child:
        break
    assert not os.waitpid(child, 0)[1]
else:
    sys.exit()
if level:
    amp.initialize(torch.nn.Linear(1, 1), opt_level=level, verbosity=0)
print(*[t.dtype for t in f(torch.ones(3, 4))])
"""
    seen = run(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).splitlines()
    half, wide = ("torch.float16",) * 2, ("torch.float32",) * 2
    assert [tuple(line.split()) for line in seen] == [half, wide]


def test_levels_have_inductor_cache_keys_of_their_own() -> None:
    tags = [torch.compiler.config.cache_key_tag]
    for level in ("O1", "O4"):
        with casting(level):
            tags.append(torch.compiler.config.cache_key_tag)
    assert len(set(tags)) == 3


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export(strict: bool) -> None:
    model = Net()
    amp.initialize(model, opt_level="O1")
    eager = model(batch())
    program = torch.export.export(model, (batch(),), strict=strict)
    amp.get_session().close()
    out = program.module()(batch())
    assert dtypes(out) == dtypes(eager), "the casts are in the program"
    torch.testing.assert_close(out[0], eager[0], rtol=1e-2, atol=1e-2)


def test_an_export_that_fails_in_a_region_leaves_casts_on() -> None:
    tracer: Any = torch.fx.Tracer()
    tracer.graph = torch.fx.Graph()
    with casting("O1"):
        with pytest.raises(ZeroDivisionError), PreDispatchTorchFunctionMode(tracer):
            torch.amp._enter_autocast("cpu", None, False, None)  # as in the graph of a strict export
            assert (batch() @ torch.eye(8)).dtype is torch.float32
            raise ZeroDivisionError
        assert (batch() @ torch.eye(8)).dtype is torch.float16


@pytest.mark.parametrize("backend", BACKENDS)
def test_cpu_gives_float32_in_compiled_code_too(backend: str) -> None:
    def numbers(x: Tensor) -> Tensor:
        return x.cpu()

    with casting("O1"):
        compiled = torch.compile(numbers, backend=backend, fullgraph=True)
        assert compiled(batch().half()).dtype is torch.float32
    assert compiled(batch().half()).dtype is torch.float16


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x) @ self.linear.weight
        return h, h.softmax(-1)


def test_trace_holds_the_casts() -> None:
    model = Small()
    amp.initialize(model, opt_level="O1")
    traced: Any = torch.jit.trace(model, (batch(),))
    amp.get_session().close()
    assert dtypes(traced(batch())) == [torch.float16, torch.float32]


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_script_says_what_to_do_instead(opt_level: str) -> None:
    model = nn.Sequential(Small())
    amp.initialize(model, opt_level=opt_level)
    with pytest.raises(RuntimeError, match=r"cannot compile this Sequential.*torch.jit.trace"):
        torch.jit.script(model)
    with pytest.raises(amp.AmpError, match="cannot compile this Sequential"):
        torch.jit.script(obj=model)
    part: Any = nn.Sequential(*model[0].children())
    if opt_level in ("O2", "O5"):  # where layers have hooks that cast
        for each in (part, part[0]):
            with pytest.raises(amp.AmpError, match="cannot compile this Linear: amp casts as it runs"):
                torch.jit.script(each)
    scripted = torch.jit.script(
        nn.Linear(8, 8), None, 0
    )  # not the session's: torch's own code does this
    assert scripted(batch()).dtype is torch.float32
    amp.get_session().close()
    torch.jit.script(part)
    assert torch.jit.script(model)(batch())[0].dtype is torch.float32


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, batch())


@pytest.mark.parametrize(
    ("make", "called", "opt_level", "dtype"),
    [
        (torch.jit.script, False, "O1", torch.float16),
        (torch.jit.script, True, "O4", torch.bfloat16),
        (traced, False, "O4", torch.bfloat16),
        (traced, True, "O1", torch.float16),
    ],
)
def test_a_scripted_or_traced_model(
    make: Any, called: bool, opt_level: str, dtype: torch.dtype
) -> None:
    model = make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    if called:
        model(batch())
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    assert [model(batch()).dtype for _ in range(3)] == [dtype] * 3
    amp.get_session().close()
    assert model(batch()).dtype is torch.float32


SCRIPTED_PARTS = """
import sys, torch, amp
from torch import nn
def train(level, make):
    parts = [nn.Linear(16, 16), make(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 16)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
    for _ in range(3):
        y = model(torch.ones(2, 16))
        with amp.scale_loss(y.float().square().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    amp.get_session().close()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before)]
    print(level, y.dtype, all(moved))
trace = lambda part: torch.jit.trace(part, torch.ones(2, 16))
for make in (torch.jit.script, trace):
    for level in ("O4", "O6"):
        train(level, make)
try:
    train("O1", torch.jit.script)
except RuntimeError as error:
    sys.excepthook(type(error), error, error.__traceback__)
    print("".join(getattr(error, "__notes__", [])))
"""


@pytest.mark.slow
def test_scripted_and_traced_parts_train_as_in_autocast() -> None:
    """Torch itself trains them in one 16-bit dtype of a process: where it fails, a note says so."""
    printed = run(SCRIPTED_PARTS)
    for level in ("O4", "O6"):
        assert printed.count(f"{level} torch.bfloat16 True") == 2
    assert "O1 torch" in printed or "Train in another one in a separate process" in printed


def scaling(by: float) -> nn.Module:
    """Return a model of a class of its own."""
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, x): return self.linear(x) * {by}", namespace)
    return cast("nn.Module", type("Scaling", (Small,), namespace)())


NOTHING_COMPILED = """
import torch, amp
def fail(): raise AssertionError("reset, which imports Inductor where there is a GPU")
import torch._dynamo
torch._dynamo.reset = fail
model = torch.nn.Linear(2, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1")
model(torch.ones(1, 2))
amp.get_session().close()
"""


@pytest.mark.slow
def test_initialize_resets_no_compiler_that_has_compiled_nothing() -> None:
    run(NOTHING_COMPILED)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, for any input that is no leaf
@pytest.mark.parametrize("opt_level", ["O1", "O5"])
@torch._dynamo.config.patch(recompile_limit=3)
def test_more_models_are_compiled_than_torch_recompiles_one(opt_level: str) -> None:
    """torch.compile gives up on code after some recompilations, and each model has code of its own."""
    counter = CompileCounter()
    models = [scaling(0.5 + i) for i in range(5)]
    amp.initialize(models, opt_level=opt_level, verbosity=0)
    before = 0
    for model in models:
        torch.compile(model, backend=counter)(batch())
        assert counter.frame_count > before
        before = counter.frame_count


def test_torch_func_transforms() -> None:
    from torch.func import functional_call, grad, jvp, vmap

    model = Small()
    amp.initialize(model, opt_level="O1")
    seen: list[torch.dtype] = []

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out, wide = functional_call(model, parameters, (x,))
        seen.extend(dtypes([out, wide]))
        return out.float().sum()

    parameters: dict[str, Tensor] = dict(model.named_parameters())
    x = batch()[0]
    plain = grad(loss)(parameters, x)
    per_sample = vmap(grad(loss), (None, 0))(parameters, x[:, None])
    assert set(seen[::2]) == {torch.float16}
    assert set(seen[1::2]) == {torch.float32}
    for name, gradient in plain.items():
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(per_sample[name].sum(0), gradient, rtol=1e-2, atol=1e-2)
    assert dtypes(vmap(model)(x[:, None])) == [torch.float16, torch.float32]
    outputs = jvp(lambda a: model(a)[0], (x,), (torch.ones_like(x),))
    assert dtypes(outputs) == [torch.float16, torch.float16]


def test_a_forward_inside_a_transform() -> None:
    model = nn.Linear(8, 8)
    amp.initialize(model, opt_level="O1")
    assert torch.func.vmap(model)(batch()).dtype is torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_a_transform_inside_a_forward() -> None:
    class PerSample(Small):
        def forward(self, x: Tensor) -> Any:
            return torch.func.vmap(super().forward)(x)

    model = PerSample()
    amp.initialize(model, opt_level="O4")
    assert dtypes(model(batch())) == [torch.bfloat16, torch.float32]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_a_compiled_layer_in_an_eager_model() -> None:
    compiled: Any = torch.compile(Small(), backend="aot_eager", fullgraph=True)
    model = nn.Sequential(nn.Linear(8, 8), compiled)
    amp.initialize(model, opt_level="O1")
    assert dtypes(model(batch())) == [torch.float16, torch.float32]
    assert dtypes(model[1](batch())) == [torch.float16, torch.float32], "called on its own"
    amp.get_session().close()
    assert dtypes(model(batch())) == [torch.float32, torch.float32]
