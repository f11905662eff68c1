"""What a type checker knows of `initialize` and `scale_loss`."""
# pyright: reportUnnecessaryTypeIgnoreComment=error, reportCallIssue=error

import json
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest
import torch
from torch import nn

import amp
from tests.processes import ROOT


def test_what_goes_in_comes_out() -> None:
    linear = nn.Linear(2, 2)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)
    model, optimizer = amp.initialize(linear, sgd, opt_level="O1", verbosity=0)
    assert_type(model, nn.Linear)
    assert_type(optimizer, torch.optim.SGD)
    assert model is linear
    assert optimizer is sgd
    alone = amp.initialize(nn.Linear(2, 2), opt_level="O1", loss_scale=128.0, verbosity=0)
    assert_type(alone, nn.Linear)
    models = amp.initialize([nn.Linear(2, 2)], opt_level="O1", verbosity=0)
    assert_type(models, list[nn.Linear])
    with amp.Session("O5", verbosity=0, master_weights="split16") as session:
        assert_type(session.initialize(nn.GELU()), nn.GELU)


def test_unknown_keywords_are_errors_for_a_checker_too() -> None:
    with pytest.raises(TypeError, match="did you mean 'loss_scale'"):
        amp.initialize(nn.Linear(2, 2), los_scale=128.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="los_scale"):
        amp.Session("O1", los_scale=128.0)  # pyright: ignore[reportCallIssue]


HEAD = """
import argparse, pathlib, torch
from torch import nn
import amp
from amp.optimizers import FusedAdam

class Wrapper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state = optimizer.state
    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups
    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
    def step(self, closure=None):
        return self.optimizer.step(closure)

args = argparse.Namespace()
model, second = nn.Linear(2, 2), nn.Conv2d(2, 2, 1)
optimizer, fused = torch.optim.SGD(model.parameters()), FusedAdam(model.parameters())
wrapper = Wrapper(optimizer)
loss = torch.zeros(())
"""
RIGHT = """
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
amp.initialize(model, fused, opt_level="bf16-mixed")
amp.initialize(model, wrapper, opt_level=args.opt_level, loss_scale=args.loss_scale)
amp.initialize(model, optimizer, opt_level=pathlib.Path("mine.yaml"))
amp.initialize([model, second], [optimizer, fused, wrapper], num_losses=2)
amp.initialize(None, optimizer)
amp.initialize(model, loss_scale="dynamic", cast_model_type=torch.float16, keep_batchnorm_fp32="False")
amp.initialize(model, loss_scale={"init": 1024}, fp8="delayed", state_dtype="packed16")
amp.initialize(model, cast_model_type="bf16", master_weights="kahan", fp8={"recipe": "current"})
amp.Session("O6", verbosity=0).initialize([model], [optimizer])
amp.scale_loss(loss, optimizer).__enter__().backward()
amp.scale_loss(loss, [optimizer, fused], loss_id=1)
amp.scale_loss(loss, (wrapper, optimizer))
list(amp.master_params(wrapper))
amp.load_profile("O9"), amp.load_profile(args.profile)
"""
WRONG = """
amp.initialize(model, optimizer, opt_level="O55")
amp.initialize(model, optimizer, opt_level="o2")
amp.initialize(model, optimizer, opt_level=2)
amp.initialize(model, optimizer, "O2")
amp.initialize(model, "O2")
amp.initialize(optimizer, model)
amp.initialize([optimizer], [model])
amp.initialize((model, second), optimizer)
amp.initialize(model.parameters(), optimizer)
amp.initialize(model, torch.optim.SGD)
amp.initialize(model, torch.optim.lr_scheduler.StepLR(optimizer, 1))
amp.initialize(model, optimizer, loss_scale="dynmaic")
amp.initialize(model, optimizer, master_weights="split25")
amp.initialize(model, optimizer, cast_model_type="fp17")
amp.initialize(model, optimizer, fp8="delayd")
amp.initialize(model, optimizer, fp8=True)
amp.initialize(model, optimizer, dtype=torch.float16)
amp.initialize(model, optimizer)(loss)
amp.Session("O55")
amp.Session("O2").initialize(optimizer, model)
amp.scale_loss(loss, model)
amp.scale_loss(optimizer, loss)
amp.scale_loss(0.5, optimizer)
amp.scale_loss(loss, amp.initialize(model))
amp.master_params(model)
amp.load_profile("O55")
amp.autocast()
"""


def test_a_checker_finds_the_wrong_lines_and_only_these(tmp_path: Path) -> None:
    right, wrong = RIGHT.split("\n"), WRONG.split("\n")
    (tmp_path / "lines.py").write_text("\n".join([HEAD, *right, *wrong]))
    project = {"extraPaths": [str(ROOT)], "reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(project))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    command += ["--project", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(ended.stdout)["generalDiagnostics"]
    lines = (tmp_path / "lines.py").read_text().split("\n")
    errors = {lines[each["range"]["start"]["line"]] for each in found if each["severity"] == "error"}
    assert errors == set(filter(None, wrong))
