"""Where folders of the environment are missing or cannot be written, what needs none works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

PROGRAM = """
import os, sys
import torch, amp
from amp.cli import main
torch.set_num_threads(1)
optimizers = torch.optim.Adam, amp.optimizers.FusedAdam, torch.optim.SGD, amp.optimizers.FusedSGD
for level, make in zip(("O1", "O2", "O5", "O6"), optimizers, strict=True):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = make(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(16, 16)).float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    amp.get_session().close()
assert not main(["env"]) and not main(["levels"])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sets the modes of folders")
def test_no_folder_of_the_environment_is_needed(tmp_path: Path) -> None:
    """HOME is unset, then read-only; TMPDIR is missing and XDG_CACHE_HOME relative in both."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(mode=0o500)
    here.mkdir()
    if os.geteuid() == 0:  # who may write everywhere, but not in /dev/null
        home.rmdir()
        home.symlink_to(os.devnull)
    missing = {"TMPDIR": str(tmp_path / "missing"), "XDG_CACHE_HOME": "cache"}
    for more in ({}, {"HOME": str(home)}):
        environment = {k: v for k, v in os.environ.items() if k != "HOME"}
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            env={**environment, **missing, **more, "PYTHONPATH": str(ROOT)},
            cwd=here,
            text=True,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert "O7" in ended.stdout
        assert list(here.iterdir()) == []
