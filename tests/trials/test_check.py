"""`amp.check`, and `python -m amp doctor` on scripts that nobody has edited."""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp
from amp.cli import main
from amp.diagnosis.findings import CAUSES, Report
from amp.diagnosis.records import UNWRITTEN
from amp.diagnosis.shadow import Shadow
from amp.errors import AmpError, AmpTypeError, AmpValueError
from tests.diagnosis.faults import C, EpsNorm, Net, SquaringNorm, T, batch


class Apply(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = C) -> None:
        super().__init__()
        self.proj, self.function = nn.Linear(C, width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.proj(x))


def checked(model: nn.Module, level: str, inputs: Any = None, **overrides: Any) -> Report:
    torch.manual_seed(0)
    return amp.check(model, batch() if inputs is None else inputs, level, **overrides)


def causes(found: Report) -> list[str]:
    return [finding.cause for finding in found.findings]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5", "O6", "O7"])
def test_a_healthy_net_has_no_findings(level: str) -> None:
    found = checked(Net(), level)
    assert causes(found) == [], str(found)
    assert str(found).startswith("healthy: nothing found in ")
    assert found.about == f"at {level}"
    assert found.ops > 30


def mask_of(value: float) -> Tensor:
    mask = torch.zeros(8, T, T)
    mask[0] = value
    return mask


@pytest.mark.parametrize(
    ("model", "level", "inputs", "expected"),
    [
        (lambda: Net(gain=500.0), "O1", None, ("range", "torch.matmul", "blocks.1.attn")),
        (lambda: Net(gain=500.0), "O2", None, ("range", "torch.matmul", "blocks.1.attn")),
        (lambda: Net("exp"), "O2", None, ("range", "torch.exp", "head")),
        (lambda: Net("log", 3), "O2", None, ("mathematics", "torch.log", "head")),
        (
            lambda: Net(norm=SquaringNorm(), lift=300.0),
            "O2",
            None,
            ("absorbed range", "Tensor.mul", "blocks.1.norm"),
        ),
        (lambda: Net(norm=EpsNorm(), lift=0.0), "O3", None, ("eps", "Tensor.div", "blocks.1.norm")),
        (Net, "O2", (batch(), mask_of(-1e9)), ("cast", "Tensor.to", "")),
        (Net, "O1", (batch(), mask_of(-torch.inf)), ("mathematics", "torch.softmax", "blocks.0.attn")),
    ],
)
def test_what_can_go_wrong_is_named(
    model: Callable[[], nn.Module], level: str, inputs: Any, expected: tuple[str, str, str]
) -> None:
    torch.manual_seed(0)
    found = checked(model(), level, inputs)
    first = found.findings[0]
    assert (first.cause, first.op, first.module) == expected, str(found)
    assert Path(first.file).name in ("faults.py", "test_check.py")
    assert not found.is_healthy
    assert expected[0] in CAUSES


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_bfloat16_has_the_range(level: str) -> None:
    torch.manual_seed(0)
    assert checked(Net(gain=500.0), level).is_healthy


def test_values_after_an_overflow_are_predicted_too() -> None:
    found = checked(Net(norm=SquaringNorm(), lift=300.0), "O2")
    (finding,) = found.findings
    assert finding.value is not None
    assert 65504 < finding.value < 1e7  # and not inf, which it is at O2


def test_the_eps_of_a_norm_of_torch_is_not_lost() -> None:
    net = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C, eps=1e-12))
    assert checked(net, "O2").is_healthy


def test_positions_are_named_by_their_argument() -> None:
    class Rotate(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return x * torch.cos(positions)[:, None]

    positions = torch.arange(513.0)
    found = checked(Rotate(), "O5", (torch.randn(513, 4), positions))
    assert causes(found) == ["cast"]
    assert "cast_model_inputs: {except: [positions]}" in str(found)
    excepted = {"except": ["x*"]}
    more = checked(Rotate(), "O5", (torch.randn(513, 4), positions), cast_model_inputs=excepted)
    assert "cast_model_inputs: {except: ['x*', positions]}" in str(more)
    assert "argument 'positions' holds integers up to 512" in found.findings[0].what
    assert checked(Rotate(), "O4", {"x": torch.randn(513, 4), "positions": positions}).is_healthy


def test_memory_that_nobody_has_written_is_no_number() -> None:
    with Shadow({}) as shadow:
        x = torch.empty(3).half()
        x = torch.empty_like(x).fill_(1) + torch.ones(3).half()
    ops = list(shadow.ops.values())
    assert all(op.largest == 0.0 for op in ops if op.aten in UNWRITTEN)
    assert ops[-1].largest == 2
    assert x.tolist() == [2, 2, 2]


def test_recurrent_layers() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(16, 8), nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(self.embed(x))[0].mean(1)

    tokens = torch.zeros(4, 8, dtype=torch.long)
    for level in ("O1", "O2", "O4"):
        assert amp.check(Classifier(), tokens, level).is_healthy
    assert "lstm" in str(amp.explain(Classifier(), tokens, opt_level="O1"))


# What it leaves behind.


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_changed(level: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten())
    x = torch.randn(4, 3, 6, 6)
    plain = copy.deepcopy(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    amp.check(plain, x, level)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.softmax(torch.ones(2).half(), 0).dtype is torch.float16  # torch is as it was
    with amp.Session(level, verbosity=0) as session:
        model, optimizer = session.initialize(net, torch.optim.SGD(net.parameters(), 0.1))
        cast = {name: value.clone() for name, value in net.state_dict().items()}
        found = amp.check(model, x)
        assert found.about == f"at {level}"
        assert all(torch.equal(value, cast[name]) for name, value in net.state_dict().items())
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert all(p.grad is not None for p in amp.master_params(optimizer))


def test_wrapped_and_compiled_models() -> None:
    net: Any = nn.DataParallel(Net(gain=500.0)) if torch.cuda.is_available() else Net(gain=500.0)
    torch.manual_seed(0)
    compiled: Any = torch.compile(net, backend="eager")
    assert causes(amp.check(compiled, batch(), "O2"))[0] == "range"
    amp.initialize(compiled, opt_level="O2", verbosity=0)
    for model in (compiled, net):
        assert amp.check(model, batch()).about == "at O2"
    with pytest.raises(AmpValueError, match="the model has been through amp.initialize, at O2"):
        amp.check(net, batch(), "O2")


def test_an_error_of_the_model_is_the_models(capsys: Any) -> None:
    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        amp.check(Apply(broken), batch(), "O2")


def test_misuse() -> None:
    with pytest.raises(AmpTypeError, match=r"forward takes \(x: .*too many .*batch\[0\] of a pair"):
        amp.check(Apply(F.relu), (batch(), batch()), "O2")
    with pytest.raises(AmpValueError, match=r"name a level, as in amp.check\(model, batch, opt_le"):
        amp.check(Apply(F.relu), batch())
    with pytest.raises(AmpError, match="opt_level='O99' is not one of"):
        amp.check(Apply(F.relu), batch(), "O99")
    with pytest.raises(AmpTypeError, match=r"amp.check needs a torch.nn.Module"):
        amp.check(lambda x: x, batch(), "O2")  # type: ignore[arg-type]
    with amp.Session("O2", verbosity=0) as session:
        model = session.initialize(Apply(F.relu))
        with pytest.raises(AmpValueError, match="has been through amp.initialize, at O2: leave out"):
            amp.check(model, batch(), "O1")


def test_json_says_it_all() -> None:
    found = checked(Net(gain=500.0), "O2")
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["healthy"] is False
    assert plain["findings"][0]["cause"] == "range"
    assert plain["ops"] == found.ops > 0


# Scripts.

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from tests.diagnosis.faults import Net, batch
    {imports}

    torch.manual_seed(0)
    net = Net({options})
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    net, optimizer = amp.initialize(net, optimizer, opt_level="{level}"{more})
    for i in range(1000):
        optimizer.zero_grad()
        loss = net(batch()).float().square().mean() * {gain}
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            {inside}
        optimizer.step()
        open("steps", "w").write(str(i + 1))
"""


def write(folder: Path, **parts: str) -> str:
    plain = {"imports": "import amp", "options": "", "level": "O2", "more": "", "gain": "1"}
    text = textwrap.dedent(SCRIPT).format(**{**plain, "inside": "pass", **parts})
    script = folder / "train.py"
    script.write_text(text)
    return str(script)


def run(capsys: Any, *arguments: str, status: int) -> str:
    try:
        found = main(["doctor", *arguments])
    except SystemExit as end:
        found = int(end.code or 0)
    out, err = capsys.readouterr()
    assert found == status, out + err
    return str(err if status == 2 else out)


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_a_healthy_script(capsys: Any, tmp_path: Path) -> None:
    shown = run(capsys, write(tmp_path), "--at", "1,2", status=0)
    about, said = shown.splitlines()
    assert about.endswith(" in float16, SGD, at O2, 2 steps")
    assert said.startswith("healthy: nothing found in ")
    assert (tmp_path / "steps").read_text() == "2"


@pytest.mark.usefixtures("scripts_in_forks")
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"options": "gain=500.0"}, "range: forward torch.matmul, in blocks.1.attn"),
        pytest.param({"gain": "3e6", "level": "O3"}, "range: backward", marks=pytest.mark.slow),
        pytest.param(
            {"imports": "from apex import amp", "options": "head='exp'", "level": "O3"},
            "range: forward torch.exp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_script_does_wrong(
    capsys: Any, tmp_path: Path, parts: dict[str, str], expected: str
) -> None:
    shown = run(capsys, write(tmp_path, **parts), status=1)
    assert any(line.startswith(expected) for line in shown.splitlines()), shown


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_what_amp_warns_of_is_shown(capsys: Any, tmp_path: Path) -> None:
    script = write(tmp_path, imports="import amp, contextlib")
    text = (
        Path(script)
        .read_text()
        .replace("amp.scale_loss(loss, optimizer)", "contextlib.nullcontext(loss)")
    )
    Path(script).write_text(text)
    found = json.loads(run(capsys, script, "--json", status=0))
    warned = "SGD.step() was called, and its gradients came from no amp.scale_loss block"
    assert [x.startswith(warned) for x in found["warnings"]] == [True]
    assert f"amp warned: {warned}" in run(capsys, script, status=0)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_another_level(capsys: Any, tmp_path: Path) -> None:
    script = write(tmp_path, options="gain=500.0", level="O5")
    assert "range: forward torch.matmul" in run(capsys, script, "--level", "O1", status=1)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_a_script_that_fails_at_its_level(capsys: Any, tmp_path: Path) -> None:
    script = write(tmp_path)
    text = Path(script).read_text().replace("net(batch())", "net(batch(), mask)")
    text = text.replace("for i in", "mask = torch.zeros(8, 16, 16).double()\nfor i in")
    text = text.replace("net = Net()", "net = Net()\nnet.head.forward = lambda x: x @ torch.eye(32)")
    Path(script).write_text(text)
    assert main(["doctor", script]) == 2
    _, traceback = capsys.readouterr()
    assert "the script failed: RuntimeError: " in traceback
    assert f'Traceback (most recent call last):\n  File "{script}", line ' in traceback


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('of its own')", "the script failed: ValueError: of its own"),
        ("pass", "the script trains nothing: it never called amp.initialize"),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_scripts_that_do_not_train(capsys: Any, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert message in run(capsys, "train.py", status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        ([], "give one script.py, or -m package.module"),
        (["x.py", "--at", "0"], "--at 0 must be numbers of steps, from 1 on"),
        (["x.py", "--level", "O99"], "opt_level='O99' is not one of"),
    ],
)
def test_errors_of_the_command_are_one_line(capsys: Any, arguments: list[str], message: str) -> None:
    shown = run(capsys, *arguments, status=2)
    assert message in shown
    assert shown.count("\n") == 1


GAN = """
    import torch, amp
    from torch import nn
    torch.manual_seed(0)
    G, D = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    g, d = (torch.optim.SGD(x.parameters(), 0.01) for x in (G, D))
    (G, D), (g, d) = amp.initialize([G, D], [g, d], opt_level="O2", num_losses=2)
    while True:
        fake = G(torch.randn(16, 8))
        loss = D(fake.detach()).mean() - D(torch.randn(16, 16)).mean()
        d.zero_grad()
        with amp.scale_loss(loss, d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        d.step()
        g.zero_grad()
        with amp.scale_loss(-(D(fake) * 1e9).mean(), g, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        g.step()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_two_models_and_losses(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(textwrap.dedent(GAN))
    found = json.loads(run(capsys, "gan.py", "--json", status=1))
    assert "range" in {x["cause"] for x in found["findings"]}
