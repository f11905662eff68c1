"""Profiles and arguments that hold something wrong: what is said, and what does not happen."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import amp
from amp.errors import AmpError, AmpTypeError, AmpValueError
from tests.models import linear


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("brief: x\nloss_scale: !!int abc", ":2: not valid YAML here: the tag '!!int'; leave it out"),
        ("brief: !!timestamp x", ":1: .*'!!timestamp'"),
        ("brief: !!map x", ":1: .*'!!map'"),
        ("rules: !!python/object/apply:os.system [ls]", ":1: .*os.system"),
        ("!foo {brief: x}", ":1: .*'!foo'"),
        ("brief: x\nloss_scale: " + "9" * 5000, ":1: not valid YAML: Exceeds the limit"),
        ("loss_scale: 1" + "0" * 390, ":1: loss_scale=an integer of about 391 digits must be a finite"),
        ("loss_scale: {growth_interval: .inf}", ":1: growth_interval=inf must be an integer"),
        ("loss_scale: {growth_interval: .nan}", ":1: growth_interval=nan must be an integer"),
        (
            "brief: x\nloss_scale: &a {init: *a}",
            ":1: values are nested too deeply, or one holds its own",
        ),
        ("rules: " + "[" * 3000, ":1: values are nested too deeply, or one holds its own alias"),
        ("loss_scale: {<<: {init: 1}}", ":1: merge keys .* write 'extends:'"),
        ("? [a]\n: b", ":1: a list or mapping stands where a key should be"),
        ("extends: " + "a" * 300 + ".yaml", ":1: extends=.* of length 305: there is no file"),
        ("extends: /dev/zero", ":1: .*is not one of|:1: .*there is no file"),
        ('brief: "\\UFFFFFFFF"', ":1: not valid YAML"),
        ("extends: O1\nbrief: [a]", ":2: brief=.* is a list; give a line of text"),
        ("brief: *" + "a" * 60_000, ":1: not valid YAML: found undefined alias 'a{100,200}"),
        (
            "extends: O1\nrules: [{? " + "x" * 60_000 + " : 1}]",
            ":2: a rule has no key 'x{60}'... of length",
        ),
        (
            "extends: O4\nfp8: {recipe: delayed, amax_history: 1000000000000}",
            ":2: amax_history=1000000000000 must be at most 65536",
        ),
    ],
)
def test_the_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(AmpError, match=f"mine.yaml{message}") as caught:
        amp.load_profile(path)
    assert len(str(caught.value)) < 1500


def test_an_alias_of_a_few_values_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("cast_model_type: &half float16\ncast_model_outputs: *half\n")
    assert amp.load_profile(path).cast_model_outputs is torch.float16


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("fifo.yaml", "folder.yaml", "x" * 300 + ".yaml", "a\0.yaml"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            amp.load_profile(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        amp.load_profile("/dev/zero")


class OddPath:
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


def test_a_path_in_bytes_is_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("brief: x")
    assert amp.load_profile(OddPath(os.fsencode(tmp_path / "mine.yaml"))).brief == "x"
    with pytest.raises(AmpTypeError, match="opt_level=.* is no path"):
        amp.load_profile(OddPath(3))


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("this.s", "there is no 'this' in torch or in what the script has imported"),
        ("torch.utils.bottleneck.__main__.main", "there is no"),
        ("builtins.*", "builtins is a module of Python or amp itself"),
        ("builtins.len", "builtins is a module of Python"),
        ("functools.reduce", "functools is a module of Python"),
        ("amp.scale_loss", "amp is a module of Python or amp itself"),
        ("torch.os.system", "os is a module of Python"),
        ("torch.builtins.*", "builtins is a module of Python"),
        ("torch.sys.exit", "sys is a module of Python"),
        ("torch.importlib.import_module", "importlib is a module of Python"),
        ("torch.functools.*", "functools is a module of Python"),
        ("torch.cuda.os.*", "os is a module of Python"),
        ("tests.test_bad_profiles.Path.open", "pathlib.Path is a module of Python"),
        ("tests.models.contextmanager", "takes no tensors, or casts themselves depend on it"),
        ("numpy.this_is_not_loaded.*", "there is no 'numpy.this_is_not_loaded'"),
    ],
)
def test_a_rule_imports_nothing_and_leaves_python_alone(op: str, text: str) -> None:
    with pytest.raises(AmpValueError, match=text):
        amp.initialize(linear(), opt_level="O1", rules=[{"op": op, "cast": "float32"}])
    assert "this" not in sys.modules
    assert "torch.utils.bottleneck.__main__" not in sys.modules


HUGE: Any = 10**5000  # Python refuses to write it out
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "options",
    [
        *({"rules": [bad]} for bad in (HUGE, {HUGE: 1}, {"op": HUGE, "cast": None}, {"op": HUGE})),
        *({"rules": bad} for bad in (DEEP, [DEEP], [{"op": DEEP, "cast": None}], [{"op": DEEP}])),
        *({"fp8": bad} for bad in ({HUGE: 1}, {"skip": [HUGE]}, {"skip": DEEP}, {"skip": [DEEP]})),
        *({"loss_scale": bad} for bad in ({HUGE: 1}, {"mode": numpy.ones(3)}, {"mode": DEEP}, DEEP)),
        {"loss_scale": {"mode": "static", "init": 1, "check": numpy.ones(3)}},
        {"fp8": {"recipe": "delayed", "amax_history": 10**12}},
        {"cast_model_inputs": {"except": [DEEP]}},
    ],
    ids=lambda options: "-".join(options),
)
def test_values_that_cannot_be_shown_are_refused(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"opt_level": "O4", **options}
    with pytest.raises(AmpError):
        amp.initialize(linear(), **given)


@pytest.mark.parametrize(
    "values",
    [
        ("op", 5, None),
        ("module", 5, None),
        (5, "x", None),
        (numpy.ones(3), "x", None),
        ("op", "torch.exp", torch.int8),
        ("op", "torch.*.exp", None),
        ("op", "torch.exp", None, 5),
    ],
    ids=str,
)
def test_a_rule_is_checked_when_it_is_made(values: Any) -> None:
    with pytest.raises(AmpError):
        amp.Rule(*values)


def test_a_rule_reads_its_dtype() -> None:
    made: Any = amp.Rule
    assert made("op", "torch.exp", "float32").dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_scale": 10**400}, "loss_scale=an integer of about 401 digits must be a finite number"),
        ({"loss_scale": 10**5000}, "loss_scale=an integer of about 5001 digits"),
        ({"loss_scale": torch.ones(2)}, r"loss_scale is a float32 tensor of shape \(2,\); give"),
        ({"loss_scale": {"init": torch.ones(2)}}, r"init is a float32 tensor of shape \(2,\)"),
        ({"min_loss_scale": torch.ones(2)}, "min_loss_scale is a float32 tensor"),
        ({"num_losses": 10**400}, "num_losses=an integer of about 401 digits must be an integer of at"),
        ({"num_losses": 2**31}, "num_losses=2147483648 must be at most 10000"),
        ({"verbosity": torch.ones(2)}, "verbosity=a float32 tensor"),
        ({"opt_level": "x" * 5000}, "of length 5000 is not one of O0"),
    ],
)
def test_numbers_that_are_none_change_nothing(options: dict[str, Any], text: str) -> None:
    model = linear()
    given: Any = {"opt_level": "O2", **options}
    with pytest.raises(AmpError, match=text):
        amp.initialize(model, **given)
    assert model.weight.dtype is torch.float32
