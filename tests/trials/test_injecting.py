"""Scripts that never call `initialize`, run at levels without an edit."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp import active
from amp.cli import main
from amp.errors import AmpRuntimeError
from amp.trials.injecting import Injected
from amp.trials.observing import Record, RunObserver, Trial
from tests.diagnosis.users_scripts import X, Y, healthy, net

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")


def run(level: str, precision: str, model: nn.Module, steps: int = 3) -> tuple[list[Tensor], Record]:
    torch.manual_seed(0)
    with RunObserver(Trial(level, steps)) as observer, Injected(level):
        weights = healthy(model, precision, steps)
        return weights, observer.seen()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_precision_of_the_script_is_taken_away(precision: str) -> None:
    expected = healthy(net(), "float32", 3)
    found, record = run("O0", precision, net())
    # Without a gradient scaler clipping sees the same gradients.
    assert all(map(torch.equal, found, expected))
    assert record.skipped == [False] * 3


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        ("O0", torch.float32),
        ("O1", torch.float32),
        ("O2", torch.float16),
        ("O4", torch.float32),
        ("O5", torch.bfloat16),
    ],
)
def test_a_level_is_in_force(level: str, dtype: torch.dtype) -> None:
    found, record = run(level, "bfloat16", net(), 8)
    assert found[0].dtype is dtype
    exact = healthy(net(), "float32", 1)
    assert len(record.losses["loss"]) == 8
    assert abs(record.losses["loss"][0] - float(F.cross_entropy(net()(X), Y))) < 0.02
    assert not torch.equal(found[0].float(), exact[0])
    assert active.newest_caster() is None


def half_model() -> None:
    model = net().half().to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(X.half()).float(), Y).backward()
        optimizer.step()
    assert model[0].weight.dtype is torch.float32


def test_a_cast_of_the_model_is_taken_away_and_inputs_are_widened() -> None:
    with RunObserver(Trial("O0", 2)) as observer, Injected("O0") as injected:
        half_model()
        record = observer.seen()
    assert len(record.losses["loss"]) == 2
    assert injected.notes == []


def test_weights_that_are_in_16_bits_from_the_start_are_named() -> None:
    model = net().bfloat16()
    with Injected("O0") as injected:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    assert injected.notes == [
        "weights are in bfloat16 from the start: all levels begin with rounded values"
    ]


def train_once(model: nn.Module, many: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = F.cross_entropy(model(X), Y)
    if many:
        torch.autograd.backward([loss, loss * 2], retain_graph=True)
    loss.backward()
    optimizer.step()


class LightningModule(nn.Sequential):
    pass


def test_what_cannot_be_done_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Injected("O2"), pytest.raises(AmpRuntimeError, match="Lightning calls no forward"):
        train_once(LightningModule(*net()))
    with Injected("O2"), pytest.raises(AmpRuntimeError, match="a backward from several tensors"):
        train_once(net(), many=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Injected("O2"), pytest.raises(AmpRuntimeError, match="several processes"):
        train_once(net())


def test_torch_is_as_before() -> None:
    places = [
        *((nn.Module, name) for name in ("__call__", "half", "bfloat16", "to")),
        (Tensor, "backward"),
        *((torch.autocast, name) for name in ("__enter__", "__exit__")),
        (torch.amp.GradScaler, "__init__"),
        (torch, "set_default_dtype"),
    ]
    before = [getattr(*each) for each in places]
    with Injected("O2"):
        assert [getattr(*each) for each in places] != before
        train_once(net())
    assert [getattr(*each) for each in places] == before


SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x, y = torch.randn(64, 16).bfloat16(), torch.arange(64) % 4
for i in range(40):
    optimizer.zero_grad()
    F.cross_entropy(F.relu(model(x)).float(), y).backward()
    optimizer.step()
    open("steps", "w").write(str(i + 1))
"""


def command(capsys: Any, *arguments: str, status: int) -> str:
    assert main(list(arguments)) == status, capsys.readouterr()
    return str(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_in_forks")
def test_the_commands(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(textwrap.dedent(SCRIPT))
    shown = command(capsys, "doctor", "train.py", "--at", "2,5", status=1)
    assert shown.startswith("Sequential, 740 parameters in bfloat16, AdamW, no GradScaler, 5 steps\n")
    assert "wholly 1.weight" in shown
    assert "train.py:11" in shown
    assert "opt_level='O5'" in shown
    assert int(Path("steps").read_text()) == 5  # where it ends the script
    shown = command(capsys, "compare", "train.py", "--levels", "O0,O5", "--steps", "3", status=0)
    assert [line.split()[0] for line in shown.splitlines()[3:5]] == ["O0", "O5"]
    assert "weights are in bfloat16" not in shown  # the script's cast is taken away
    step = "model(x if i != 5 else x / 0)"
    Path("train.py").write_text(textwrap.dedent(SCRIPT.replace("model(x)", step)))
    shown = command(capsys, "doctor", "train.py", status=1)  # which looks at step 6 by itself
    assert "data: forward torch.nn.functional.linear, in 0" in shown
    Path("train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setenv("RANK", "1")  # as torchrun does, which starts a doctor for each rank
    shown = command(capsys, "doctor", "train.py", "--level", "O5", status=0)
    assert "rank 1:\nSequential, 740 parameters in bfloat16, AdamW, at O5, 20 steps\nhealthy: " in shown
