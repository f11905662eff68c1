"""Mistakes of somebody in a hurry: each error says what was passed, what is allowed and what to do."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import amp
from amp.cli import main
from amp.diagnosis.findings import Finding, Report
from amp.terminal.progress import Progress
from amp.terminal.text import Printer
from amp.training.step import unattached
from amp.trials import script_commands
from docs.site import terminal
from tests.models import note_of, run_backward, step_on

X = torch.ones(3, 4)


def fresh() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def initialized(**options: Any) -> tuple[Any, Any]:
    given: dict[str, Any] = {"opt_level": "O2", "verbosity": 0, **options}
    return amp.initialize(*fresh(), **given)


def initializing(model: Any = None, optimizer: Any = None, **options: Any) -> None:
    made = fresh()
    models = made[0] if model is None else model(*made)
    optimizers = made[1] if optimizer is None else optimizer(*made)
    given: dict[str, Any] = {"opt_level": "O2", "verbosity": 0, **options}
    amp.initialize(models, optimizers, **given)


def scaling(loss: Any = None, optimizer: Any = None) -> None:
    model, own = initialized()
    value = model(X).sum()
    run_backward(loss(value, own) if loss else value, optimizer(own) if optimizer else own)


def scaling_by_a_grad_scaler() -> None:
    model, optimizer = initialized()
    scaler = amp.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    scaler.step(optimizer)


def entering_twice() -> None:
    model, optimizer = initialized()
    block = amp.scale_loss(model(X).sum(), optimizer)
    for _ in range(2):
        with block as scaled_loss:
            scaled_loss.backward(retain_graph=True)


def deleting_a_layer() -> None:
    model, optimizer = initialized()
    del model[1]
    step_on(model(X).sum(), optimizer)


def of_other_shapes() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def loading(state: Callable[[Any, Any], Any]) -> None:
    model, optimizer = initialized()
    optimizer.load_state_dict(state(model, optimizer))


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


ANY: Any = amp
"""For arguments that type checkers refuse."""
BAD_STEPS: tuple[Any, ...] = (nn.Linear(4, 4), 5, ["a"], [0], [])


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (
            lambda: initializing(lambda m, o: o, lambda m, o: m),
            "models must be a torch.nn.Module or a list of them, and got AdamW. The model comes first: "
            "amp.initialize(model, optimizer, opt_level=...)",
        ),
        (
            lambda: initializing(lambda m, o: nn.Linear),
            "and got type Linear. Pass an object of it: Linear(...)",
        ),
        (
            lambda: initializing(None, lambda m, o: torch.optim.SGD),
            "and got type SGD. Pass an object of it: SGD(model.parameters(), ...)",
        ),
        (
            lambda: initializing(None, lambda m, o: m.parameters()),
            "and got generator. Pass an optimizer of the parameters, such as torch.optim.AdamW(",
        ),
        (
            lambda: initializing(None, lambda m, o: schedule(o)),
            "and got StepLR. Pass the optimizer itself, scheduler.optimizer",
        ),
        (
            lambda: initializing(None, lambda m, o: fresh()[1]),
            "nothing would be trained. Make the optimizer of this model: AdamW(model.parameters(), "
            "...). fully_shard",
        ),
        (
            lambda: scaling(lambda loss, o: o, lambda o: X.sum()),
            "needs a floating-point tensor as loss, and got AdamW. The loss comes first: "
            "amp.scale_loss(loss, optimizer)",
        ),
        (
            lambda: scaling(lambda loss, o: loss.item()),
            "and got float. A number, such as loss.item(), has no graph: pass the tensor itself",
        ),
        (
            lambda: scaling(None, schedule),
            "gradients from the loss; got StepLR. Pass the optimizer itself, scheduler.optimizer",
        ),
        (
            lambda: scaling(None, lambda o: [o, fresh()[1]]),
            "this AdamW did not come out of amp.initialize, or its session was closed; its parameters "
            "have the shapes (8, 4), (8,), .... Pass it through:",
        ),
        (
            lambda: scaling(None, lambda o: fresh()[0]),
            "gradients from the loss; got Sequential, a module. amp.initialize returned (model, opt",
        ),
        (
            lambda: initializing(lambda m, o: m.state_dict()),
            "and got OrderedDict. Pass the model itself",
        ),
        (
            lambda: amp.state_dict(initialized()[0]),
            "amp.state_dict takes no Sequential: it returns the loss scalers. Save model.state_dict()",
        ),
        (
            lambda: list(amp.master_params(initialized()[0])),
            "amp.master_params takes an optimizer, and got Sequential: pass the optimizer that",
        ),
        (
            lambda: list(amp.master_params([initialized()[1]])),
            "amp.master_params takes an optimizer, and got list: pass one optimizer, and call it for",
        ),
        (
            lambda: amp.step_was_skipped([initialized()[1]]),
            "an optimizer is needed here, and this is list: pass one optimizer, and call it for each",
        ),
        (
            lambda: ANY.optimizers.FusedAdam(fresh()[0]),
            "takes parameters, and got the model itself, a Sequential: pass model.parameters()",
        ),
        (
            lambda: initializing(keep_bn_fp32=True),
            "unexpected keyword argument 'keep_bn_fp32'; did you mean 'keep_batchnorm_fp32'?",
        ),
        (
            lambda: initializing(cast_model_type="float8"),
            "FP8 is a property of linear layers: take opt_level='O6' or 'O7', or fp8='current'",
        ),
        (
            lambda: initializing(cast_model_type=torch.float8_e4m3fn),
            "take opt_level='O6' or 'O7', or fp8='current'",
        ),
        (
            lambda: initializing(loss_scale="dynmaic"),
            "loss_scale='dynmaic' is not a number; allowed: 'dynamic', a number, or a mapping; did you "
            "mean 'dynamic'?",
        ),
        (
            lambda: initializing(opt_level={"extends": "O2", "loss_scale": 128}),
            "opt_level takes a level, or the path of a YAML file, and got {'extends': 'O2', "
            "'loss_scale': 128}. Write the keys into a file, or pass them as keywords: opt_level='O2', "
            "loss_scale=128",
        ),
        (
            lambda: initializing(loss_scale=True),
            "loss_scale=True is not a number; allowed: 'dynamic', a number, or a mapping; did you mean "
            "'dynamic'?",
        ),
        (
            lambda: initializing(loss_scale=128, max_loss_scale=64),
            "loss_scale=128 is a fixed scale, and not between min_loss_scale=0 and max_loss_scale=64; "
            "leave these out, or pass loss_scale='dynamic'",
        ),
        (
            lambda: initializing(init_scale=1024),
            "argument 'init_scale'; it belongs under loss_scale, which takes a mapping such as "
            "{'init_scale': ...}",
        ),
        (lambda: initializing(init=1024), "such as {'init': ...}"),
        (
            lambda: initializing(enabled="False"),
            "enabled='False' is not a bool; did you mean enabled=False, without quotes?",
        ),
        (
            lambda: amp.get_session(initialized()[0]),
            "an optimizer is needed here, and this is Sequential: pass the optimizer that",
        ),
        (lambda: amp.step_was_skipped(initialized()[0]), "and this is Sequential: pass the opt"),
        (
            lambda: ANY.Session("O2", num_loss=2),
            "there is no property 'num_loss'; allowed: num_losses, verbosity, process_group, enabled, ",
        ),
        (lambda: ANY.Session("O2", num_loss=2), "; did you mean 'num_losses'?"),
        (
            lambda: amp.initialize(fresh()[0], "O2"),
            "and got str. Pass the level by its name: amp.initialize(model, optimizer, opt_level='O2')",
        ),
        (
            lambda: ANY.initialize(fresh()[0], None, "O2"),
            "enabled='O2' is not a bool; did you mean opt_level='O2'",
        ),
        (
            lambda: initializing(verbosity="info"),
            "verbosity='info' is neither 0, which logs nothing, nor 1",
        ),
        (
            lambda: ANY.optimizers.FusedAdam(fresh()[0].parameters(), 1e-3, (0.5, 0.9)),
            "bias_correction=(0.5, 0.9) is neither True nor False; did you mean betas=(0.5, 0.9)?",
        ),
        (
            lambda: ANY.optimizers.FusedLAMB(fresh()[0].parameters(), 1e-3, (0.5, 0.9)),
            "did you mean betas=(0.5, 0.9)?",
        ),
        (
            lambda: ANY.optimizers.FusedNovoGrad(fresh()[0].parameters(), 1e-3, (0.5, 0.9)),
            "did you mean betas=(0.5, 0.9)?",
        ),
        (
            lambda: ANY.optimizers.FusedAdam(fresh()[0].parameters(), maximize="False"),
            "maximize='False' is neither True nor False; pass one of them",
        ),
        (
            lambda: ANY.optimizers.FusedSGD(fresh()[0].parameters(), 0.1, 0.9, nesterov="False"),
            "nesterov='False' is neither True nor False",
        ),
        (lambda: ANY.GradScaler("cpu", enabled="False"), "enabled='False' is neither True nor False"),
        (
            lambda: initializing(rules=[{"module": 0, "cast": "float32"}]),
            "module=0 is not a name or a glob; write it in quotes",
        ),
        (
            lambda: amp.scale_loss(X.sum(), *reversed(initialized())),
            "loss_id=Sequential must be an integer from 0 to 0: num_losses was 1. Leave it out for a",
        ),
        (
            lambda: amp.loss_scale(initialized()[1]),
            "loss_id=AdamW must be an integer from 0 to 0: num_losses was 1. Leave",
        ),
        (
            scaling_by_a_grad_scaler,
            "none of its parameters has a gradient. Its FP32 masters get gradients by `with amp.scale_",
        ),
        (
            entering_twice,
            "what amp.scale_loss returned was entered a second time. Make a new one for each backward",
        ),
        (
            deleting_a_layer,
            "and where a layer was replaced or deleted. Wrap the model first, or change its layers, t",
        ),
        (
            lambda: loading(lambda m, o: {"model": m.state_dict(), "optim": o.state_dict()}),
            "load_state_dict got a whole checkpoint: pass checkpoint['optim']. Nothing was loaded",
        ),
        (
            lambda: loading(lambda m, o: amp.state_dict()),
            "got what amp.state_dict() returned: pass it to amp.load_state_dict. Nothing was loaded",
        ),
        (
            lambda: ANY.initialize(*fresh(), schedule(fresh()[1]), opt_level="O2"),
            "enabled is True or False, and got StepLR. Leave it out: schedulers and data loaders go on",
        ),
        (
            lambda: ANY.initialize(*fresh(), torch.utils.data.DataLoader([X]), opt_level="O2"),
            "enabled is True or False, and got DataLoader. Leave it out: schedulers and data loaders",
        ),
        (
            lambda: ANY.initialize(*fresh(), fresh()[1], opt_level="O2"),
            "enabled is True or False, and got AdamW. Pass several optimizers as one list: amp.initi",
        ),
        (
            lambda: ANY.initialize(*fresh(), *fresh()),
            "enabled is True or False, and got Sequential. Pass several models as one list: amp.initi",
        ),
        (
            lambda: loading(lambda m, o: torch.optim.SGD(m.parameters(), 0.1).state_dict()),
            "has no usable 'betas': it is missing; expected a setting that this optimizer has; perhaps",
        ),
        (
            lambda: loading(lambda m, o: of_other_shapes()),
            "has no usable 'exp_avg': a float32 tensor of shape (9, 4); expected a dense floating-"
            "point tensor of shape (8, 4)",
        ),
        (
            lambda: amp.doctor(X.sum(), *initialized()),  # type: ignore[arg-type]
            "step must be a function that runs a forward, amp.scale_loss and a backward, and got a ",
        ),
        (lambda: amp.doctor(lambda: None, *initialized()), "step ran no op: it has to run a forward"),
        (
            lambda: amp.compare(fresh()[0], lambda *_: None),
            "build must be a function that returns (model, optimizer), and got Sequential(",
        ),
        (
            lambda: amp.compare(fresh, 5),  # type: ignore[arg-type]
            "step must be a function that trains for one step: step(model, optimizer, i), and got 5",
        ),
        (
            lambda: amp.compare(fresh, lambda *_: None, seed=2**64),
            "seed=18446744073709551616 must be from 0 to 2**64 - 1",
        ),
        *(
            (lambda at=at: amp.watch(at), "as in [1, 4, 20]; amp.watch takes no model")
            for at in BAD_STEPS
        ),
    ],
)
def test_what_is_said(mistake: Callable[[], None], text: str) -> None:
    with pytest.raises(amp.AmpError, match=re.escape(text)):
        mistake()


def test_a_model_that_is_cast_afterwards() -> None:
    model, _ = initialized(opt_level="O3")
    model.float()
    note = note_of(lambda: model(X))
    assert note.startswith(
        "amp: '0' (Linear) was float16 at amp.initialize, and its weights are float32"
    )
    assert "If the model was cast after it, by .float(), .half() or .to(), leave that out" in note


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        status = main(list(arguments))
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out + err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("explain sofmax", "there is no function 'sofmax'; did you mean 'torch.softmax'?"),
        ("explain torch.sofmax", "; did you mean 'torch.softmax'?"),
        ("explain softmax", "; did you mean 'torch.softmax'?"),
        ("explain torch.linear", "; did you mean 'torch.nn.functional.linear'?"),
        ("explain nn.Linear", "; did you mean 'torch.nn.functional.linear'?"),
        ("explain torch.fft.ftt", "; did you mean 'torch.fft.fft'?"),
        ("explain xyz", "there is no function 'xyz'; give a full name, such as torch.softmax"),
        (
            "memory --sharding fsdp",
            "sharding='fsdp' is not one of none, zero1, zero2, zero3, fsdp2; did you mean 'zero3' "
            "(FullyShardedDataParallel) or 'fsdp2' (fully_shard)?",
        ),
        ("memory --sharding zero", "zero3, fsdp2; did you mean 'zero3'?"),
        ("docter x.py", "reamp: there is no command 'docter'; did you mean 'doctor'? See reamp --help"),
        ("launch x.py", "reamp: there is no command 'launch'; did you mean 'run'? See reamp --help"),
        ("x.py", "command 'x.py'; did you mean 'run x.py', 'doctor x.py' or 'compare x.py'? See"),
        (
            "run --opt-level O2 x.py",
            "no file '--opt-level'; options of the script come after it: reamp run script.py --opt",
        ),
        (
            "run torchrun x.py",
            "no file 'torchrun'; the launcher comes first: torchrun ... -m amp run script.py",
        ),
        ("run python x.py", "; the launcher comes first: python -m amp run script.py"),
        ("compare x.py --levls O2", "unrecognized arguments: --levls O2; did you mean '--lev"),
        ("doctor x.py --opt-levle O2", "did you mean '--opt-level'? See reamp doctor --help"),
        ("memory --parms 7B", "did you mean '--params'? See reamp memory --help"),
        ("compare x.py --epochs 1", "arguments: --epochs 1; arguments of the script come after"),
        ("compare x.py 3", "unrecognized arguments: 3; arguments of the script come after --"),
        ("compare x.py --levels O2 O4", "levels are separated by commas, as in --levels O2"),
        ("explain exp --script train.py", "call amp.explain(model, batch, op) in a script"),
        ("compare . --steps 1", "'.' is a folder without __main__.py: give a script in it"),
        ("compare x.py --seed -1", "seed=-1 must be from 0 to 2**64 - 1"),
    ],
)
def test_a_command_that_is_misspelt(
    capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    status, said = run(capsys, *command.split())
    assert status == 2
    assert text in said
    assert said.count("\n") == 1


def test_a_backend_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_KERNELS", "foo")
    status, said = run(capsys, "selftest")
    assert (status, said.count("\n")) == (2, 1)
    assert "AMP_KERNELS='foo' is not one of" in said


PLAIN = """
import argparse, sys, torch
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
steps = parser.parse_args().steps
if not steps:
    sys.exit("no data found")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(steps):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("scripts_in_forks")
@pytest.mark.parametrize(
    ("arguments", "size", "said"),
    [
        (
            "doctor train.py",
            "1",
            "required: --steps\nreamp: the script failed: it ended with exit status 2",
        ),
        pytest.param(
            "doctor train.py -- --steps 0",
            "1",
            "reamp: the script failed: it ended: no data found",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "doctor train.py --at 9 -- --steps 5",
            "1",
            "reamp: nothing was watched: training ended after 5 steps, before step 9",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "doctor train.py --at 1,9 -- --steps 5",
            "1",
            "no GradScaler, 5 steps; training ended before step 9\n",
            marks=pytest.mark.slow,
        ),
        (
            "doctor train.py --opt-level O4 -- --steps 5",
            "two",
            "a script of several processes without amp: only one can be compared",
        ),
    ],
)
def test_a_script_that_ends_early_says_why(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    size: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", size)
    Path("train.py").write_text(PLAIN)
    assert said in run(capsys, *arguments.split())[1]


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys)
    assert status == 0
    assert said == run(capsys, "--help")[1]
    assert "scripts that train:\n" in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for stream, is_quiet in ((Terminal(), False), (Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress(is_quiet)
        for what in ("train.py", "O2", "O2"):  # a search for a loss scale runs a level again
            with progress.of_run(what) as tell:
                tell(1, 3)
                tell(3, 3)
            progress.note(1, 2)
        said.append(stream.getvalue())
    assert said[0].startswith("\rtrain.py, waits for its first step: 0step [")
    assert "train.py, to step 3:  33%|" in said[0]
    assert re.search(r"O2, 2 of 2, about \d+ s left:  33%\|", said[0])
    assert "| 1/3 [" in said[0]
    assert len(re.findall(r"O2, 2 of 2, about \d+ s left, waits for its first step: ", said[0])) == 2
    assert said[1:] == ["", ""]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", plain := Terminal())
    with Progress(False).of_run("train.py") as tell:
        tell(3, 3)
    assert plain.getvalue() == "train.py, waits for its first step\n"


def test_a_line_is_folded_on_a_terminal_and_yaml_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rule = "  rules: [{module: a.name.of.some.length, cast: float32}]"
    for stream, lines in ((Terminal(), 3), (io.StringIO(), 1)):
        Printer(stream).line("  word" * 15)
        Printer(stream).line(rule)
        *folded, last = stream.getvalue().splitlines()
        assert last == rule
        assert len(folded) == lines
        assert lines == 1 or max(map(len, folded)) <= 40


COMMANDS = (
    "bits 3.14159",
    "ranges",
    "ulp 1.0 --update 5e-5",
    "simulate --steps 20 --overflows 10",
    "simulate-fp8",
    "survival --count 1000",
    "memory --model gpt --layers 32 --width 4096 --sequence 4096 --batch 4 --gpu H100",
    "memory --params 175B --world-size 64 --sharding zero3 --gpu-memory 80",
    "env",
    "levels",
    "explain torch.softmax --opt-level O4",
    "--help",
    *(f"{name} --help" for name in ("compare", "doctor", "explain", "memory", "lab", "selftest")),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_wider_than_a_terminal(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    with contextlib.suppress(SystemExit):
        main(command.split())
    lines = [line for line in shown.getvalue().splitlines() if "{" not in line]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    if command.startswith(("levels", "memory", "ranges")) and "--help" not in command:
        monkeypatch.setattr(sys, "stdout", piped := io.StringIO())
        main(command.split())
        assert piped.getvalue() == shown.getvalue()


@pytest.mark.parametrize(
    ("stream", "no_color", "has_colours"),
    [(Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)],
    ids=["terminal", "NO_COLOR", "pipe"],
)
def test_the_doctor_has_colours_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, no_color: str, has_colours: bool
) -> None:
    seen = Report([Finding("range", "a number is large", "scale it")], ops=1, about="Linear, SGD")
    script = SimpleNamespace(watched_by=lambda *_: (seen, ""), traceback="", warnings=[])
    monkeypatch.setattr(script_commands, "Script", lambda *_: script)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["doctor", "x.py"]) == 1
    lines = ["\x1b[2mLinear, SGD\x1b[0m", "\x1b[1;31mrange\x1b[0m", "  a number is large", "  scale it"]
    expected = "\n".join(lines) + "\n"
    assert stream.getvalue() == (expected if has_colours else re.sub(r"\x1b\[[\d;]*m", "", expected))


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_the_picture_of_the_doctor_is_what_it_prints() -> None:
    """`python docs/site/terminal.py` draws it anew. Digits depend on the machine's products."""
    shown = re.sub(r"[\d.]+", "0", terminal.drawn(terminal.printed()))
    assert re.sub(r"[\d.]+", "0", terminal.PICTURE.read_text()) == shown


def test_an_optimizer_that_initialize_was_not_given() -> None:
    gc.collect()  # sessions of other tests, which share the hook
    model = amp.initialize(fresh()[0], opt_level="O5", verbosity=0)
    late = torch.optim.AdamW(model.parameters(), 1e-3)
    model(X).sum().backward()
    with pytest.warns(amp.AmpWarning, match="AdamW has 16-bit weights of a model of amp.initialize"):
        late.step()
    late.step()
    amp.get_session().initialize([], late)
    late.step()
    amp.get_session().close()
    assert unattached not in _global_optimizer_pre_hooks.values()


@pytest.mark.parametrize(
    ("level", "options"), [("O3", {}), ("O2", {"master_weights": False}), ("O4", {})]
)
def test_an_optimizer_that_needs_no_masters(level: str, options: dict[str, Any]) -> None:
    model = amp.initialize(fresh()[0], opt_level=level, verbosity=0, **options)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 1e-3).step()


def cut_off(model: Any) -> Any:
    return model(X).float().sum().detach()


def without_gradients(model: Any) -> Any:
    with torch.no_grad():
        return model(X).float().sum()


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)(X).float().sum()


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (cut_off, "cut off by"),
        (without_gradients, "torch.no_grad"),
        (frozen, "parameters .* are frozen"),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_loss_without_a_graph_says_why(level: str, loss: Any, text: str) -> None:
    model, optimizer = initialized(opt_level=level)

    def block() -> None:
        run_backward(loss(model), optimizer)

    with pytest.raises(
        amp.AmpError, match=f"the loss of an amp.scale_loss block has no gradient.*{text}"
    ):
        block()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_loss_without_a_graph_may_be_a_factor(level: str) -> None:
    model, optimizer = initialized(opt_level=level)
    with amp.scale_loss(torch.ones(()), optimizer) as scale:
        (model(X).float().sum() * scale).backward()


ANY_AMP: Any = amp


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model, own: ANY_AMP.scale_loss(model(X).sum()),
            "needs the optimizer, .* Pass what amp",
        ),
        (lambda model, own: amp.get_session().scale_loss(model(X).sum()), "needs the optimizer"),
        (lambda model, own: ANY_AMP.initialize(), r"Write model, optimizer = amp\.initialize\(model"),
        (lambda model, own: ANY_AMP.initialize(model=model, optimizer=own), "did you mean 'models'"),
        (lambda model, own: ANY_AMP.initialize(model, optimizer=own), "did you mean 'optimizers'"),
        (lambda model, own: ANY_AMP.doctor(model, own), r"amp\.doctor\(step, model, optimizer\)"),
    ],
)
def test_an_argument_that_is_left_out(call: Any, text: str) -> None:
    model, optimizer = initialized()
    with pytest.raises(amp.AmpError, match=text) as caught:
        call(model, optimizer)
    assert isinstance(caught.value, TypeError)


class Forward(nn.Module):
    """Calls a function with a layer's output."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Any) -> Any:
        return self.function(self.layer(x))


NO_KERNEL = "takes no 16-bit tensors.*x.float()"
SEVERAL = "'layer' .Linear. computes with tensors of several dtypes. Functions cast FP32 .* x.float()"


@pytest.mark.parametrize(
    ("levels", "function", "x", "text"),
    [
        ("O2 O3 O5", torch.fft.rfft, X, NO_KERNEL),
        ("O5", lambda y: torch.view_as_complex(y.reshape(-1, 2)), X, NO_KERNEL),
        ("O4 O5", lambda y: torch.from_numpy(y.detach().numpy()), X, "NumPy has no bfloat16"),
        ("O1 O4", torch.relu, X.double(), SEVERAL),
        ("O1 O4", torch.relu, X.long(), SEVERAL),
        (
            "O1 O4",
            lambda y: y @ torch.ones(4, 4).double(),
            X,
            "Forward computes with tensors of several",
        ),
    ],
)
def test_an_error_about_dtypes_in_the_forward_has_a_note(
    levels: str, function: Any, x: Any, text: str
) -> None:
    for level in levels.split():
        model = amp.initialize(Forward(function), opt_level=level, verbosity=0)
        assert re.search(text, note_of(functools.partial(model, x), (RuntimeError, TypeError))), level
        amp.get_session().close()


@pytest.mark.parametrize(
    ("levels", "function", "text"),
    [
        ("O2 O3 O5", lambda model: nn.init.orthogonal_(model.layer.weight), "Call it before amp.init"),
        ("O2 O5", lambda model: torch.linalg.svd(model.layer.weight), NO_KERNEL),
        ("O5", lambda model: model.layer.weight.detach().numpy(), "NumPy has no bfloat16.*x.float()"),
        ("O4", lambda model: model(X).detach().numpy(), "NumPy has no bfloat16.*x.float()"),
        ("O5", lambda model: model.layer.weight.reshape(5, 5), None),
    ],
)
def test_an_error_about_dtypes_that_ends_the_script_has_a_note(
    levels: str, function: Any, text: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    show = sys.excepthook
    for level in levels.split():
        model = amp.initialize(Forward(torch.relu), opt_level=level, verbosity=0)
        with pytest.raises((RuntimeError, TypeError)) as caught:
            function(model)
        sys.excepthook(caught.type, caught.value, caught.tb)
        shown = capsys.readouterr().err
        assert str(caught.value) in shown
        assert "amp: " not in shown if text is None else re.search(text, shown), level
        amp.get_session().close()
        assert sys.excepthook is show


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_another_error_in_the_forward_has_none(level: str) -> None:
    model = amp.initialize(Forward(lambda y: y.reshape(5, 5)), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match="shape") as caught:
        model(X)
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_whose_loss_is_not_scaled(level: str) -> None:
    model, optimizer = initialized(opt_level=level)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        return loss

    with pytest.warns(amp.AmpWarning, match="its gradients came from no amp.scale_loss block"):
        optimizer.step(closure)
    optimizer.step(closure)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_float16_region_at_a_level_of_bfloat16(level: str) -> None:
    model, _ = initialized(opt_level=level)
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        model(X)
    with torch.autocast("cpu", torch.float16):
        with pytest.warns(amp.AmpWarning, match=f"at opt_level='{level}' was called in a region"):
            model(X)
        model(X)


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_block_that_finds_no_gradient(level: str) -> None:
    model, optimizer = initialized(opt_level=level)
    model[0].requires_grad_(False)
    with (
        pytest.warns(amp.AmpWarning, match="no parameter of its optimizers has a gradient: no back"),
        amp.scale_loss(model(X).sum(), optimizer),
    ):
        pass
    with amp.scale_loss(model(X).sum(), optimizer):
        pass


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_blocks_that_find_a_gradient(level: str) -> None:
    model, optimizer = initialized(opt_level=level)
    model[0].requires_grad_(False)
    for delay in (True, False):
        run_backward(model(X).sum(), optimizer, delay_unscale=delay)
    optimizer.step()
    optimizer.zero_grad()
    with amp.scale_loss(model(X).sum(), optimizer):
        pass  # a phase without this loss


def test_a_loss_in_the_block_of_another_session() -> None:
    (_, first), (model, second) = initialized(), initialized()
    with pytest.warns(amp.AmpWarning, match="no parameter of its optimizers has a gradient"):
        run_backward(model(X).sum(), first)
    with pytest.warns(amp.AmpWarning, match="block that does not name its optimizer"):
        second.step()


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("loss_scale: true", ":2: loss_scale=True is not a number"),
        ("growth_interval: 100", ":2: there is no property 'growth_interval'; allowed: "),
        ("growth_interval: 100", "; it belongs under loss_scale, which takes a mapping such as {'gr"),
        ("keep_bn_fp32: true", "; did you mean 'keep_batchnorm_fp32'?"),
        ("precision: 16", ":2: there is no property 'precision'"),
        ("precision: bf16", "; extends says it: 'O1' or 'O2' for float16, 'O4' or 'O5' for bfloat16"),
        ("rules: [{module: 0, cast: float32}]", ":2: module=0 is not a name or a glob; write it in"),
        ("rules: [{layer: x, cast: float32}]", "optional; did you mean 'module'?"),
        ("grow: 3", "; did you mean 'growth_factor' or 'growth_interval', under loss_scale?"),
        ("loss_scale: {grow: 3}", "patience; did you mean 'growth_factor' or 'growth_interval'?"),
        ("loss_scale: {init: 2**16}", ":2: init='2**16' is not a number; write 65536"),
        ("loss_scale: 2^10", ":2: loss_scale='2^10' is not a number; write 1024; allowed: 'dynamic'"),
        ("norms: fp32", "; did you mean 'keep_norm_fp32'?"),
        ("level: O5", ":2: there is no property 'level'; did you mean 'extends'?"),
        ("fp8: true", "; did you mean 'current', the recipe of O6 and O7?"),
        ("fp8: on", ":2: fp8='on' is a str; allowed: one of current, delayed, rowwise"),
    ],
)
def test_what_is_said_of_a_profile(tmp_path: Path, lines: str, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: O2\n{lines}\n")
    with pytest.raises(amp.AmpError, match=re.escape(text)):
        amp.load_profile(path)


def test_a_fixed_scale_may_have_bounds_around_it() -> None:
    initialized(loss_scale=128, min_loss_scale=1, max_loss_scale=2.0**24)
    assert amp.loss_scale() == 128


def test_nothing_is_logged_before_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "amp")
    with pytest.raises(amp.AmpError):
        initializing(lambda m, o: o, verbosity=1)
    assert not caplog.records
    initialized(verbosity=1)
    assert caplog.records[0].getMessage().startswith("opt_level O2 resolves to")
