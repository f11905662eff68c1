"""The snippets of docs/integrations.md run as they stand, and a framework that is missing is named."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import amp
from tests.integrations.huggingface_models import Tokens, gpt2
from tests.integrations.lightning_models import QUIET, Classifier
from tests.processes import ROOT, run_python

PAGE = (ROOT / "docs" / "integrations.md").read_text()
SECTIONS = {
    title: "".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


def _names(section: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = [(torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(4)]
    names: dict[str, Any] = {
        "net": net,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loader": DataLoader(rows, batch_size=None),  # type: ignore[arg-type]
        "x": rows[0][0],
        "y": rows[0][1],
    }
    if section == "Lightning":
        names |= {"module": Classifier()}
    elif section == "Transformers":
        names |= {"tokens": Tokens(), "language_model": gpt2()}
    return names


def _be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give classes of frameworks arguments that readers need not see."""
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, **QUIET))
    arguments = partial(transformers.TrainingArguments, **quiet)
    monkeypatch.setattr(transformers, "TrainingArguments", arguments)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_snippet_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SECTIONS[section]
    monkeypatch.chdir(tmp_path)
    _be_quiet(monkeypatch)
    names = _names(section)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", amp.AmpWarning)
        exec(SECTIONS[section], names)
    if section == "Transformers":
        assert (tmp_path / "saved" / "model.safetensors").exists()
    elif section == "Logging":
        assert names["numbers"]["amp/loss_scale"] == 65536


MODULES = {
    "lightning": ("lightning", "lightning"),
    "accelerate": ("accelerate", "huggingface"),
    "huggingface": ("transformers", "huggingface"),
    "ignite": ("ignite", "ignite"),
    "timm": ("timm", "timm"),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_framework_that_is_missing_is_named_with_its_extra(module: str) -> None:
    package, extra = MODULES[module]
    code = f"import sys; sys.modules[{package!r}] = None; import amp.integrations.{module}"
    done = run_python("-c", code)
    assert done.returncode != 0
    assert f"amp.integrations.{module} needs" in done.stderr
    assert f"pip install 'reamp[{extra}] @ git+https://github.com/reamp/reamp'" in done.stderr


def test_lightning_under_its_other_names_is_named_where_both_are_missing() -> None:
    code = (
        "import sys; sys.modules['pytorch_lightning'] = sys.modules['lightning_fabric'] = None; "
        "import amp.integrations.pytorch_lightning"
    )
    done = run_python("-c", code)
    assert done.returncode != 0
    assert "needs pytorch_lightning or lightning_fabric: pip install pytorch-lightning" in done.stderr


def test_amp_imports_no_framework() -> None:
    code = "import amp, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run_python("-c", code).stdout.split())
    assert not loaded & {package for package, _ in MODULES.values()}
