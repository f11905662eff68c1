"""A user's `rules:` for ops and modules, and `python -m amp explain`."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.casting.by_op import CastOps
from amp.casting.op_names import may_be_cast, resolve
from amp.casting.policy import OpRule
from amp.cli import main
from amp.undo import Undo
from tests.covering import covering
from tests.models import (
    BY_OP_LEVELS,
    CAST_LEVELS,
    HALF_DTYPE,
    LEVELS,
    casting,
    initialize,
    note_of,
    sgd,
    step_on,
)
from tests.processes import run_python

HALF, WIDE, BRAIN = torch.float16, torch.float32, torch.bfloat16
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def profile(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


# Ops.


def test_a_rule_holds_for_every_spelling_of_its_op() -> None:
    with casting("O1", rules=[{"op": "torch.matmul", "cast": "float32"}]):
        for out in (X @ X.half(), torch.matmul(X, X), X.half().matmul(X), X.__rmatmul__(X)):
            assert out.dtype is WIDE
        assert torch.mm(X, X).dtype is HALF, "another op"
    assert (X.half() @ X.half()).dtype is HALF


def test_a_rule_wins_over_what_the_function_calls() -> None:
    """F.softmax calls Tensor.softmax, which the table keeps in FP32."""
    rules = [{"op": "torch.nn.functional.softmax", "cast": "float16"}]
    with casting("O1", rules=rules):
        assert F.softmax(X, -1).dtype is HALF
        assert X.softmax(-1).dtype is HALF
        assert nn.Softmax(-1)(X).dtype is HALF
        assert F.log_softmax(X, -1).dtype is WIDE


def test_rules_in_a_forward_win_over_torch_autocast() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    net = Net()
    amp.initialize(net, opt_level="O4", rules=[{"op": "torch.Tensor.__matmul__", "cast": "float32"}])
    assert net(X).dtype is WIDE
    assert net(X.bfloat16()).dtype is WIDE


def test_globs_and_none() -> None:
    rules = [{"op": "torch.fft.*", "cast": "none"}, {"op": "torch.sum", "cast": None}]
    with casting("O1", rules=rules):
        assert X.half().sum().dtype is HALF
        with pytest.raises(RuntimeError, match="Half"):
            torch.fft.fft(X.half()[:, :3])
    with casting("O1"):
        assert torch.fft.fft(X.half()[:, :3]).dtype is torch.complex64


def test_later_rules_win_and_extending_profiles_add_to_them(tmp_path: Path) -> None:
    profile(tmp_path, "extends: O1\nrules:\n  - {op: torch.mm, cast: float32}\n", "base.yaml")
    mine = profile(tmp_path, "extends: base.yaml\nrules:\n  - {op: torch.bmm, cast: float32}\n")
    properties = amp.load_profile(mine)
    assert [rule.pattern for rule in properties.rules] == ["torch.mm", "torch.bmm"]
    assert "op torch.mm: float32; op torch.bmm: float32" in properties.describe()
    with casting(mine, rules=[{"op": "torch.mm", "cast": "bfloat16"}]):
        assert torch.mm(X, X).dtype is BRAIN
        assert torch.bmm(X[None], X[None]).dtype is WIDE


def test_functions_outside_torch() -> None:
    with casting("O1", rules=[{"op": "tests.test_rules.mine", "cast": "float32"}]):
        module = sys.modules["tests.test_rules"]
        assert module.mine(X.half()) == (WIDE, WIDE)  # type: ignore[attr-defined]


def mine(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    return x.dtype, (x @ x).dtype


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{op: torch.nn.functional.sofmax, cast: float32}", "op .*did you mean 'softmax'"),
        ("{op: torch.nothing.softmax, cast: float32}", "op .*there is no 'torch.nothing'"),
        ("{op: softmax, cast: float32}", "op 'softmax'.*Write a full name"),
        ("{op: 'torch.*.softmax', cast: float32}", "only the last part"),
        ("{op: torch.mm, cast: float31}", "cast='float31' is not one of .*None"),
        ("{op: torch.mm, to: float32}", "a rule has no key 'to'; allowed: op, module, tensor, cast"),
        ("{op: torch.mm}", "must have 'cast'"),
        (
            "{tensor: weight, cast: float16}",
            "rules=tensor weight: float16 does not fit O1: weights are",
        ),
        ("{tensor: weight, cast: none}", "rules=tensor weight: none does not fit O1: weights are FP32"),
        ("{tensor: 3, cast: float32}", "tensor=3 is not a name"),
        ("{tensor: wieght, cast: float32}", "no parameter .* 'wieght'; did you mean 'weight'"),
        ("{op: torch.mm, module: head, cast: float32}", "one of 'op', 'module'"),
        ("{op: 3, cast: float32}", "op=3 is not a name"),
        ("{op: builtins.dict.get, cast: float32}", "builtins.dict is a type of Python"),
        ("{op: torch.*, cast: float32}", " is too broad"),
        ("{op: torch.is_grad_enabled, cast: none}", "casts themselves depend on it"),
        ("{op: torch.Tensor.to, cast: none}", "casts themselves depend on it"),
        ("{op: torch.Tensor._is_view, cast: none}", "casts themselves depend on it"),
        ("{op: torch.Tensor.__getattribute__, cast: none}", "takes no tensors"),
        ("{op: torch.nn.Module.__new__, cast: none}", "takes no tensors"),
        ("{op: torch.nn.Module.*, cast: none}", "no such function"),
        ("{op: tests.models.ConvNet.__init__, cast: none}", "takes no tensors"),
        ("{op: torch.autocast.__enter__, cast: none}", "takes no tensors"),
        ("{op: 'torch.float32.*', cast: none}", "is a dtype, no module or class"),
        ("{op: torch.exp.__name__.upper, cast: none}", "is a str, no module or class"),
        ("{op: torch.nn.Linear.forward.__code__.replace, cast: none}", "is a code, no module or class"),
        ("{op: torch.classes.a.b, cast: none}", "there is no 'torch.classes.a'"),
        ("{op: torch.classes.b, cast: none}", "op 'torch.classes.b': "),
        ("{op: torch.is_autocast_enabled, cast: none}", "takes no tensors"),
        ("torch.mm", "a rule is a mapping"),
        (
            "{module: head, cast: float16}",
            "rules=module head: float16 does not fit O1: weights are FP32",
        ),
    ],
)
def test_errors_name_the_line_and_change_nothing(tmp_path: Path, rule: str, message: str) -> None:
    before = F.softmax, torch.mm
    at = "" if message.startswith("rules=") else r"mine.yaml:3: .*"  # what only a level refuses
    with pytest.raises(amp.AmpError, match=at + message):
        amp.initialize(
            nn.Linear(2, 2), opt_level=profile(tmp_path, f"extends: O1\nrules:\n  - {rule}\n")
        )
    assert (F.softmax, torch.mm) == before


@pytest.mark.parametrize("level", sorted(set(LEVELS) - set(BY_OP_LEVELS)))
def test_rules_for_ops_need_a_level_that_patches(level: str) -> None:
    with pytest.raises(
        RuntimeError, match=f"rules=op torch.mm: float32 does not fit {level}: functions cast"
    ):
        amp.initialize(nn.Linear(2, 2), opt_level=level, rules=[{"op": "torch.mm", "cast": "float32"}])


@pytest.mark.parametrize("value", ["torch.mm", {"op": "torch.mm", "cast": "float32"}, 3])
def test_rules_are_a_list(value: Any) -> None:
    with pytest.raises(TypeError, match="give a list of {op: ..., cast: ...}"):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", rules=value)


PLACES = ("torch", "torch.Tensor", *(f"torch.{n}" for n in ("fft", "linalg", "special", "sparse")))
GLOBS = [
    ("torch.nn.functional.*",),
    *((f"{place}.[!_]*",) for place in PLACES),
    *((f"torch.{glob}",) for glob in ("is*", "*is*", "*a*", "*e*", "*grad*")),
    ("torch.*a*",) * 1000,
    tuple(f"torch.{'*' * i}a*" for i in range(1, 900)),
]


@pytest.mark.parametrize(("cast", "ops"), covering(["float32", "float16", None], GLOBS, strength=1))
def test_rules_for_many_ops_leave_out_what_casts_work_by(
    ops: tuple[str, ...], cast: str | None
) -> None:
    kinds = torch.half, torch.float, torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
    rules = [{"op": op, "cast": cast} for op in ops]
    model, optimizer = initialize(model, sgd(model), "O1", rules=rules)
    nn.LSTM(4, 4)(X[None])
    assert (X @ X + X.half()).shape == X.shape
    with torch.autocast("cpu", dtype=BRAIN):
        model(X)
    if cast != "float16":  # which would also be what unscaling works in
        step_on(model(X).float().sum(), optimizer)
    amp.get_session().close()
    assert (torch.half, torch.float, torch.bfloat16) == kinds
    assert not hasattr(torch.mm, "__wrapped__")


EVERY_FUNCTION = [
    f"{place}.{name}"
    for place in (*PLACES, "torch.nn.functional", "torch.nn.init", "torch._C._nn")
    for name in dir(resolve(place))
    if may_be_cast(resolve(place), name)
]


@pytest.mark.parametrize("first", range(0, len(EVERY_FUNCTION), 500))
def test_every_function_of_torch_that_is_cast_by_its_name_may_be(first: int) -> None:
    """Private ones, and operators, are in no glob."""
    rules = [{"op": op, "cast": "float32"} for op in EVERY_FUNCTION[first : first + 500]]
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1", rules=rules)
    with torch.autocast("cpu", dtype=BRAIN):
        model(X)
    model(X).sum().backward()


# Modules.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def watch(model: nn.Module) -> dict[str, torch.dtype]:
    """Record the dtype of what each module gives."""
    seen: dict[str, torch.dtype] = {}

    def make(name: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            seen[name] = out.dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(make(name))
    return seen


@pytest.mark.parametrize("level", HALF_DTYPE)
@pytest.mark.parametrize("pattern", ["head*", "head", "head.[02]"])
def test_modules_by_name(level: str, pattern: str) -> None:
    model = Net()
    model, optimizer = initialize(
        model, sgd(model), level, rules=[{"module": pattern, "cast": "float32"}], loss_scale=1.0
    )
    seen = watch(model)
    model(X).sum().backward()
    half = HALF_DTYPE[level]
    assert seen["body.0"] is seen["body.2"] is half
    assert seen["head.0"] is seen["head.2"] is WIDE
    if level in CAST_LEVELS:
        assert model.head[0].weight.dtype is model.head[0].weight.grad.dtype is WIDE
        assert model.body[0].weight.dtype is half
    optimizer.step()


@pytest.mark.parametrize("rule", [{"module": "head"}, {"tensor": "head.*"}])
@pytest.mark.parametrize("is_whole", [True, False])
def test_names_are_those_of_the_model_before_it_is_compiled(rule: Any, is_whole: bool) -> None:
    model: Any = Net()
    if not is_whole:
        model.head = torch.compile(model.head, backend="eager")
    given: Any = torch.compile(model, backend="eager") if is_whole else model
    amp.initialize(given, opt_level="O5", verbosity=0, rules=[{**rule, "cast": "float32"}])
    assert {p.dtype for p in model.head.parameters()} == {WIDE}
    assert {p.dtype for p in model.body[0].parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("level", HALF_DTYPE)
@pytest.mark.parametrize("pattern", ["torch.nn.Linear", "Linear", "torch.nn.modules.linear.Linear"])
def test_modules_by_class(level: str, pattern: str) -> None:
    model = Net()
    amp.initialize(model, opt_level=level, rules=[{"module": pattern, "cast": "float32"}])
    seen = watch(model)
    assert model(X).dtype is WIDE
    assert {seen[name] for name in ("body.0", "body.2", "head.0", "head.2")} == {WIDE}


@pytest.mark.parametrize("level", ["O6", "O7"])
@pytest.mark.parametrize("head_is_last", [True, False])
@pytest.mark.filterwarnings("ignore:fp8=current. 0 of 4")
def test_later_rules_for_modules_go_over_earlier_ones(level: str, head_is_last: bool) -> None:
    rules = [{"module": "*", "cast": "bfloat16"}, {"module": "head", "cast": "float32"}]
    model = Net()
    amp.initialize(model, opt_level=level, rules=rules if head_is_last else rules[::-1])
    seen = watch(model)
    model(X)
    assert seen["body.0"] is torch.bfloat16
    assert seen["head.0"] is (WIDE if head_is_last else torch.bfloat16)


class Attention(nn.Module):
    """Computes by itself, with what its children make."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q = self.query(x)
        scores = q @ q.T * scale
        self.dtypes = [x.dtype, q.dtype, scores.dtype]
        return scores


@pytest.mark.parametrize("level", BY_OP_LEVELS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_inside_a_float32_module_casts(level: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), Attention(), nn.Linear(4, 4))
    amp.initialize(model, opt_level=level, rules=[{"module": "Attention", "cast": "float32"}])
    assert model(X).dtype is HALF_DTYPE[level]
    assert model[1].dtypes == [WIDE, WIDE, WIDE]
    if compiled:
        assert torch.compile(model, backend="aot_eager", fullgraph=True)(X).dtype is HALF_DTYPE[level]
        assert model[1].dtypes == [WIDE, WIDE, WIDE]


def test_a_module_under_a_rule_is_still_what_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Attention())
    names = [name for name, _ in model.named_parameters()]
    amp.initialize(model, opt_level="O1", rules=[{"module": "1", "cast": "float32"}])
    attention = model[1]
    assert isinstance(attention, Attention)
    assert type(attention).__name__ == "Attention"
    assert list(inspect.signature(attention.forward).parameters) == ["x", "scale"]
    assert [name for name, _ in model.named_parameters()] == names
    average = copy.deepcopy(attention)
    assert average(X.half()).dtype is WIDE, "the rule holds for a copy"
    assert type(pickle.loads(pickle.dumps(attention))) is Attention
    assert "Attention(" in repr(model)
    amp.get_session().close()
    assert type(attention) is Attention
    average.query.half()
    assert average(X.half()).dtype is HALF, "and ends with the session"


def test_classes_with_registries_and_required_keywords() -> None:
    """Of a subclass that amp makes, the user's hooks must not hear."""
    made = []

    class Meta(type):
        def __new__(cls, name: str, bases: Any, body: Any, **kwargs: Any) -> Any:
            made.append(name)
            return super().__new__(cls, name, bases, body, **kwargs)

        def __init__(cls, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args)

    class Base(nn.Linear, metaclass=Meta):
        def __init_subclass__(cls, *, task: str) -> None:
            made.append(task)

    class Head(Base, task="x"):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Head(4, 4))
    amp.initialize(model, opt_level="O1", rules=[{"module": "1", "cast": "float32"}])
    assert model(X).dtype is WIDE
    assert made == ["Base", "Head", "x"]


def test_a_module_that_no_rule_can_hold_for_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.warns(amp.AmpWarning, match=r"rules\[0\]: .*cannot hold for '0' \(Linear\)"):
        amp.initialize(model, opt_level="O1", rules=[{"module": "0", "cast": "float32"}])


def test_a_rule_that_cannot_hold_changes_nothing_where_warnings_are_errors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(amp.AmpWarning, match="cannot hold for '1'"):  # as this suite has them
        amp.initialize(model, opt_level="O1", rules=[{"module": "Linear", "cast": "float32"}])
    assert type(model[0]) is nn.Linear


def test_a_parametrized_module_is_plain_after_the_session() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    amp.initialize(model, opt_level="O1", rules=[{"module": "0", "cast": "float32"}])
    torch.nn.utils.parametrizations.weight_norm(model[0])
    assert model(X.half()).dtype is WIDE
    amp.get_session().close()
    with pytest.raises(RuntimeError, match="dtype"):
        model(X.half())


def test_operators_are_spellings_too() -> None:
    with casting("O1", rules=[{"op": "torch.add", "cast": "float32"}]):
        h = X.half()
        assert (h + h).dtype is (1 + h).dtype is h.add(h).dtype is WIDE
        assert (h * h).dtype is HALF


def test_a_shared_weight_follows_the_rule() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 4)
            self.mix = nn.Linear(4, 4)
            self.head = nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(i)))

    model = Tied()
    amp.initialize(model, opt_level="O2", rules=[{"module": "head", "cast": "float32"}])
    assert model.embed.weight.dtype is WIDE
    assert model.mix.weight.dtype is HALF
    assert model(torch.arange(4)).dtype is WIDE


def test_a_rule_for_no_module_is_refused_unless_it_is_optional() -> None:
    model, rule = Net(), {"module": "haed", "cast": "float32"}
    with pytest.raises(amp.AmpError, match=r"rules\[0\]: no module .* 'haed'.*did you mean 'head'\?"):
        amp.initialize(model, opt_level="O2", rules=[rule])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    amp.initialize(model, opt_level="O2", rules=[{**rule, "optional": True}])


# Parameters and buffers.


class Codes(nn.Module):
    """Has a buffer and a parameter of its own, each beside a layer."""

    centre: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale - self.centre)


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Codes() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.body:
            x = each(x)
        return self.head(x)


def names_in(dtype: torch.dtype, model: nn.Module) -> set[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, x in named if x.dtype is dtype}


def trained(model: Any, level: str, **overrides: Any) -> tuple[Any, Any]:
    """Train for three steps."""
    model, optimizer = initialize(model, sgd(model), level, verbosity=0, **overrides)
    for _ in range(3):
        optimizer.zero_grad()
        step_on(model(X).float().sum(), optimizer)
    return model, optimizer


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize(
    ("patterns", "wide"),
    [
        (["body.0.centre"], {"body.0.centre"}),
        (["*.centre"], {"body.0.centre", "body.1.centre"}),
        (["*.scale", "*.centre"], {f"body.{i}.{x}" for i in (0, 1) for x in ("scale", "centre")}),
        (["head.*"], {"head.weight", "head.bias"}),
        (["body.?.fc.*"], {f"body.{i}.fc.{x}" for i in (0, 1) for x in ("weight", "bias")}),
    ],
)
@pytest.mark.filterwarnings("ignore:fp8=")
def test_tensors_by_name(level: str, patterns: list[str], wide: set[str]) -> None:
    model = Coded()
    before = {name: x.dtype for name, x in model.state_dict().items()}
    rules = [{"tensor": each, "cast": "float32"} for each in patterns]
    model, optimizer = trained(model, level, rules=rules)
    assert names_in(WIDE, model) == wide
    assert model.body[0](X).dtype is HALF_DTYPE[level], "layers give the model's dtype on"
    masters = set(map(id, amp.master_params(optimizer)))
    assert all(id(x) in masters for name, x in model.named_parameters() if name in wide), "no master"
    assert {p.dtype for p in model.state_dict().values()} <= {WIDE, torch.long, HALF_DTYPE[level]}
    assert copy.deepcopy(model)(X).dtype is WIDE
    amp.get_session().close()
    assert {name: x.dtype for name, x in model.state_dict().items()} == before


def test_a_parameter_in_fp32_takes_steps_that_16_bits_would_lose() -> None:
    def moved(**overrides: Any) -> float:
        model: Any = Coded()
        optimizer: Any = torch.optim.SGD([model.body[0].scale], lr=1e-5)
        model, optimizer = initialize(model, optimizer, "O3", verbosity=0, **overrides)
        for _ in range(4):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
        return float((model.body[0].scale.detach().float() - 1).abs().max())

    assert moved() == 0
    assert moved(rules=[{"tensor": "*.scale", "cast": "float32"}]) > 0


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        ([("module", "body.0"), ("tensor", "*.centre")], BRAIN),
        ([("tensor", "*.centre"), ("module", "body.0")], WIDE),
        ([("module", "Coded"), ("tensor", "body.0.*")], BRAIN),
    ],
)
def test_the_last_rule_for_a_tensor_or_its_module_wins(rules: Any, dtype: torch.dtype) -> None:
    cast = {"module": "float32", "tensor": "bfloat16"}
    model = Coded()
    given = [{kind: pattern, "cast": cast[kind]} for kind, pattern in rules]
    amp.initialize(model, opt_level="O5", rules=given)
    assert model.body[0].centre.dtype is dtype
    model(X).sum().backward()


def test_a_rule_for_a_tensor_goes_over_norms_that_stay_fp32_and_over_buffer_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Codes())
    rules = [{"tensor": x, "cast": "bfloat16"} for x in ("1.*", "2.centre")]
    amp.initialize(model, opt_level="O5", rules=rules, buffer_dtype="float32")
    assert names_in(WIDE, model) == set()
    model(X).sum().backward()


def test_a_tied_weight_is_found_by_each_of_its_names() -> None:
    for name in ("0.weight", "2.weight"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        amp.initialize(model, opt_level="O5", rules=[{"tensor": name, "cast": "float32"}])
        assert model[0].weight.dtype is WIDE
        model(X).sum().backward()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pattern", ["0.*", "0.parametrizations.*"])
@pytest.mark.parametrize("make", ["weight_norm", "spectral_norm"])
def test_a_rule_may_name_what_a_weight_is_computed_from(make: str, pattern: str, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.Linear(4, 4))
    getattr(torch.nn.utils.parametrizations, make)(model[0])
    trained(model, "O5", rules=[{"tensor": pattern, "cast": "float32"}])


@pytest.mark.parametrize("level", BY_OP_LEVELS)
@pytest.mark.filterwarnings("ignore:fp8=")
def test_where_tensors_are_fp32_anyway_a_rule_may_say_so(level: str) -> None:
    model = Coded()
    initialize(model, None, level, rules=[{"tensor": "*.centre", "cast": "float32"}])
    model(X)
    with pytest.raises(RuntimeError, match=f"does not fit {level}: weights are FP32 there, so tensors"):
        amp.initialize(Coded(), opt_level=level, rules=[{"tensor": "*.centre", "cast": "bfloat16"}])


@pytest.mark.parametrize("level", ["O6", "O7"])
def test_a_layer_whose_weight_has_a_rule_is_not_in_fp8(level: str) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    rules = [{"tensor": "1.*", "cast": "float32"}]
    with pytest.warns(amp.AmpWarning, match=r"1: the rule for '1\.\*'"):
        amp.initialize(model, opt_level=level, rules=rules, fp8={"skip": ["0", "2"]})
    model(torch.randn(16, 16)).sum().backward()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"tensor": "body.0.center", "cast": "float32"},
            r"rules\[0\]: no parameter or buffer .*'body.0.center'; did you mean 'body.0.centre'\?.*"
            r"\{tensor: body.0.center, ..., optional: true\}",
        ),
        (
            {"tensor": "body.0", "cast": "float32"},
            r"no parameter or buffer .* 'body.0'; did you mean \{module: body.0, ...\}",
        ),
        (
            {"module": "*.centre", "cast": "float32"},
            r"no module .* '\*.centre', .*; did you mean \{tensor: \*.centre, ...\}",
        ),
        ({"tensor": "*.seen", "cast": "float32"}, r"'\*.seen' names is int64, and amp casts only"),
        ({"tensor": "zzz", "cast": "float32"}, r"'zzz'. model.named_parameters\(\) and "),
        (
            {"tensor": "*.bias", "cast": "float32"},
            r"rules\[0\]: the rule for '\*.bias' would leave several dtypes in 'body.0.fc', and Linear "
            r"computes in one: weight bfloat16, bias float32. Give them all one "
            r"dtype: \{tensor: 'body.0.fc.\*', cast: float32\}",
        ),
        (
            {"tensor": "*.centre", "cast": None},
            "rules=tensor \\*.centre: none does not fit O5: a tensor has to have some dtype",
        ),
    ],
)
def test_a_rule_for_tensors_that_makes_no_sense_changes_nothing(
    rule: dict[str, Any], message: str
) -> None:
    model = Coded()
    with pytest.raises(amp.AmpError, match=message):
        amp.initialize(model, opt_level="O5", rules=[rule])
    assert names_in(BRAIN, model) == set()


def test_a_rule_for_tensors_of_another_model_is_optional() -> None:
    model = Coded()
    rule = {"tensor": "codebook", "cast": "float32", "optional": True}
    amp.initialize(model, opt_level="O5", rules=[rule])
    assert names_in(WIDE, model) == set()


def test_statistics_of_a_norm_are_not_parted_from_its_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rules = [{"tensor": "*.running_*", "cast": "bfloat16"}]
    with pytest.raises(RuntimeError, match=r"several dtypes in '1', and BatchNorm1d computes in one"):
        amp.initialize(model, opt_level="O5", rules=rules)


class Mixes(nn.Module):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("centre", torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ self.centre


@pytest.mark.parametrize(
    "overrides", [{"rules": [{"tensor": "*.centre", "cast": "float32"}]}, {"buffer_dtype": "float32"}]
)
def test_code_that_needs_one_dtype_is_told_where_to_cast(overrides: Any) -> None:
    model = nn.Sequential(Mixes())
    amp.initialize(model, opt_level="O5", **overrides)
    note = note_of(lambda: model(X))
    assert "'0' (Mixes) has centre in FP32, by a rule or buffer_dtype, beside 16-bit tensors" in note
    assert "rules=[{'module': '0', 'cast': 'float32'}]" in note


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.filterwarnings("ignore:fp8=")
def test_buffer_dtype_keeps_all_floating_buffers_in_fp32(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Codes())
    model.register_buffer("wide", torch.zeros(4, dtype=torch.float64))
    model, _ = trained(model, level, buffer_dtype="float32")
    norm = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert names_in(WIDE, model) == {"2.centre", *norm}
    assert names_in(torch.float64, model) == {"wide"}
    amp.get_session().close()
    assert names_in(HALF_DTYPE[level], model) == set()


def test_buffer_dtype_in_a_file(tmp_path: Path) -> None:
    path = profile(tmp_path, "extends: O5\nbuffer_dtype: fp32\n")
    assert amp.load_profile(path).buffer_dtype is WIDE
    assert "buffer_dtype" in amp.load_profile(path).describe()
    with pytest.raises(ValueError, match="buffer_dtype=torch.bfloat16 is not one of float32, None"):
        amp.initialize(nn.Linear(2, 2), opt_level="O5", buffer_dtype=torch.bfloat16)


# Explain.


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("op", "level", "says"),
    [
        ("torch.softmax", "O1", ["runs in float32", "configs/ops/float16.yaml:"]),
        ("torch.nn.functional.softmax", "O4", ["it calls torch.Tensor.softmax", "runs in float32"]),
        ("torch.matmul", "O4", ["runs in bfloat16", "torch.Tensor.__matmul__"]),
        ("torch.addmv", "O1", ["runs in float16: its floating arguments are cast down"]),
        ("torch.relu", "O1", ["follows its input"]),
        ("torch.cat", "O1", ["widest"]),
        ("torch.Tensor.exp_", "O1", ["raises on half tensors, because torch.Tensor.exp gives float32"]),
        ("torch.Tensor.addmm_", "O1", ["casts its other arguments", "configs/ops/float16.yaml:"]),
        ("torch.nn.functional.binary_cross_entropy", "O1", ["raises on half", "BCEWithLogitsLoss"]),
        ("torch.matmul", "O2", ["Functions cast only at 'O1' (float16) or 'O4'", "inputs are float16"]),
        ("torch.matmul", "16-mixed", ["O1", "float16"]),
    ],
)
def test_explain(capsys: pytest.CaptureFixture[str], op: str, level: str, says: list[str]) -> None:
    told = explain(capsys, op, "--opt-level", level)
    for words in says:
        assert words in told


def test_explain_points_at_the_very_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = explain(capsys, "torch.Tensor.logsumexp")
    line = int(told.partition("float16.yaml:")[2].partition(")")[0])
    tables = Path(__file__).parents[1] / "configs" / "ops" / "float16.yaml"
    assert "logsumexp" in tables.read_text().splitlines()[line - 1]


def test_the_page_on_ops_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs/ops.md").read_text()
    assert explain(capsys, "torch.softmax").splitlines()[0] in page


def test_explain_knows_a_users_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = profile(tmp_path, "extends: O1\nrules:\n  - {op: torch.mm, cast: float32}\n")
    assert f"runs in float32, and so does all that it calls (cast, {path}:3)" in explain(
        capsys, "torch.Tensor.mm", "--opt-level", str(path)
    )


def test_explain_of_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "torch.nn.Linear"]) == 2
    assert "is a class" in capsys.readouterr().err
    assert main(["explain", "torch.mm", "--opt-level", "O99"]) == 2
    assert "O99" in capsys.readouterr().err


def test_the_module_runs() -> None:
    result = run_python("-m", "amp", "explain", "torch.mm")
    assert "runs in float16" in result.stdout


def test_a_table_may_name_what_this_torch_lacks() -> None:
    """Torch gains ops and drops some: what is not there cannot be called, and the rest works."""
    by_op, undo = CastOps(amp.load_profile("O1")), Undo()
    new = OpRule("float", "torch", "an_op_of_tomorrow")
    by_op.policy = replace(by_op.policy, rules=(*by_op.policy.rules, new))
    try:
        by_op.begin(undo)
        assert (X @ X).dtype is HALF
    finally:
        undo.close()
    assert (X @ X).dtype is WIDE
