"""`python -m amp bits` and its sisters: what they print, draw, and refuse."""

from __future__ import annotations

import functools
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp.cli import main
from amp.numerics import number_commands
from amp.numerics.planning import Transformer
from amp.terminal.text import Printer
from amp.trials.activation_memory import Activations


def run(capsys: Any, *arguments: str, status: int = 0) -> str:
    """Run a command line and return what it printed: its output, or its one line of error."""
    try:
        found = main(arguments)
    except SystemExit as end:
        found = int(end.code or 0)
    out, err = capsys.readouterr()
    assert found == status, err
    if status:
        assert out == ""
        assert err.count("\n") == 1
    return str(err if status else out)


def rows(text: str) -> dict[str, list[str]]:
    """Return the words of each line, by the first of them."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_bits(capsys: Any) -> None:
    found = rows(run(capsys, "bits", "3.14159"))
    assert found["float16"] == ["0", "10000", "1001001000", "3.140625", "-0.000965"]
    assert found["float8_e5m2"][-2] == "3"
    tiny = rows(run(capsys, "bits", "1e-8", "--format", "fp16", "--format", "bf16"))
    assert list(tiny) == ["format", "float16", "bfloat16"]
    assert tiny["float16"][-1] == "underflow"
    large = json.loads(run(capsys, "bits", "70000", "--format", "fp16", "--json"))
    assert large[0]["overflow"] is True
    assert large[0]["value"] == "inf"
    assert large[0]["bits"] == "0 11111 0000000000"
    assert json.loads(run(capsys, "bits", "-0x1p-24", "--json"))[1]["subnormal"]


def test_ranges_and_ulps(capsys: Any) -> None:
    found = rows(run(capsys, "ranges"))
    assert len(found) >= 10
    listed = {row["format"]: row for row in json.loads(run(capsys, "ranges", "--json"))}
    assert listed["float8_e4m3fn"]["max"] == 448.0
    assert json.loads(run(capsys, "ulp", "65504", "--format", "bf16", "--json"))[0]["ulp"] == 512.0
    nan = json.loads(run(capsys, "ulp", "-NaN", "--update", "1", "--format", "fp16", "--json"))
    assert nan[0]["survives"] is False
    next_to_1 = rows(run(capsys, "ulp", "1", "--update", "5e-5"))
    assert next_to_1["float16"][-1] == "lost"
    assert next_to_1["float32"][-1] == "yes"
    (half,) = json.loads(run(capsys, "ulp", "1", "--format", "e4m3", "--json"))
    assert (half["ulp"], half["below"], half["above"]) == (0.125, 0.9375, 1.125)


def test_simulate(capsys: Any) -> None:
    options = ["--steps", "20", "--overflows", "10", "--init", "32768", "--growth-interval", "5"]
    trace = json.loads(run(capsys, "simulate", *options, "--json"))
    assert [trace[i]["next_scale"] for i in (4, 9, 10, 15)] == [65536, 131072, 65536, 131072]
    assert "overflow, skipped" in run(capsys, "simulate", *options)
    long = run(capsys, "simulate", "--steps", "9000", "--overflows", "5").splitlines()[1:]
    assert [line.split()[0] for line in long] == ["0", "5", "2005", "4005", "6005", "8005", "8999"]


def test_survival(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "gradients.pt"
    torch.save(
        {"a": torch.tensor([2.0**-30, 0.0]), "b": [torch.ones(2), 3, torch.ones(1).long()]}, file
    )
    found = json.loads(run(capsys, "survival", str(file), "--json"))
    assert (found["count"], found["zeros"]) == (3, 1)
    assert found["formats"]["float16"]["zero"][0] == 1 / 3
    shown = run(capsys, "survival", str(file), "--format", "e4m3")
    assert "3 gradients other than 0 in float8_e4m3fn (1 are 0, 0 inf or NaN)" in shown
    assert "loses least in bfloat16: 1" in shown
    assert "loses least in float16: 65536" in run(capsys, "survival", "--mean", "-22")


def test_memory(capsys: Any) -> None:
    rows = json.loads(run(capsys, "memory", "--params", "175e9", "--optimizer", "adam", "--json"))
    assert rows[0]["weights"] == 700e9
    assert rows[0]["total"] == pytest.approx(2.8e12)
    shown = run(capsys, "memory", "--params", "7e9", "--optimizer", "FusedAdam", "--gpu-memory", "100")
    assert "7,000,000,000 parameters" in shown
    fits = [line.startswith("O") and line.endswith(" fits") for line in shown.splitlines()]
    assert sum(fits) == 4  # split16, with bfloat16 moments too, 7 bytes, and O3
    said = "With 100 GB: O5 with FusedAdam, split16 fits, with 2.00 GB for activations. Its keys in a "
    assert said + "profile: master_weights: split16. Activations are not counted:" in shown.replace(
        "\n", " "
    )
    sharded = ["--world-size", "8", "--sharding", "zero3", "--activations", "1e9"]
    rows = json.loads(run(capsys, "memory", "--params", "8e9", *sharded, "--json"))
    assert rows[0]["weights"] == 4e9
    assert rows[0]["activations"] == 4e9


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7e9), ("350m", 350e6), ("1.5T", 1.5e12), ("7e9", 7e9), ("1.1B", 1.1e9)]
)
def test_counts_are_written_as_people_write_them(capsys: Any, text: str, count: float) -> None:
    rows = json.loads(run(capsys, "memory", "--params", text, "--json"))
    assert rows[0]["weights"] == 4 * count


def test_crises(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = functools.cache(number_commands.crises)  # seconds of training
    monkeypatch.setattr(number_commands, "crises", cached)
    found = {row["name"]: row for row in json.loads(run(capsys, "crises", "--json"))}
    assert found["overflow"]["broken"] == "inf"
    assert "vanishing update" in run(capsys, "crises")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bits", "abc"], "'abc' is not a number, such as 3.14159"),
        (["bits"], "the following arguments are required: number"),
        (["simulate", "--overflows", "1,x"], "'1,x' is not a list of integers"),
        (["simulate", "--steps", "3", "--overflows", "5"], "overflows=[5] are not among"),
        (["simulate", "--steps", "1000000000"], "--steps 1000000000: give at most 1000000"),
        (["survival", "nowhere.pt"], "there is no file 'nowhere.pt'"),
        (["survival", __file__], "is no file of tensors that torch.save wrote"),
        (["survival", "--count", "0"], "--count 0: give 1 to 100000000"),
        (["survival", "--spread", "-1"], "--mean -22 --spread -1: give a mean"),
        (["simulate-fp8", "--outlier", "0"], "--outlier 0: give a finite number above 0"),
        (["simulate-fp8", "--amaxes", "1,x"], "'x' is not a number, such as 3.14159"),
        (["simulate-fp8", "--amax-algo", "least"], "amax_algo='least' is not one of max, most_recent"),
        (["survival", "a\0b"], "is no file of tensors"),
        (["memory", "--params", "7X"], "'7X' is not a count: give a number such as 7e9, or one with K"),
        (["memory", "--params", "-7e9"], "parameters: give a whole number from 1 to"),
        (["memory", "--params", "7e9", "--gpu-memory", "-1"], "--gpu-memory -1: give the GB"),
        (["memory", "--params", "7e9", "--gpu-memory", "80XB"], "'80XB' is no size, such as 80GB"),
        (["memory", "--params", "7e9", "--gpu", "H10"], "'H10' is not known; give --gpu-memory; did"),
        (["memory", "--params", "1e40"], "parameters: give a whole number from 1 to 1e18"),
        (["memory", "--params", "7e9", "--gpu", "3060"], "give --gpu-memory; known are V100, T4, A10"),
        (["memory", "--params", "7B", "--layers", "4"], "--layers is of a model: give --model gpt too"),
        (["memory", "--params", "7B", "--script", "x.py"], "--script counts what --params says: leave"),
        (["memory", "--params", "7B", "--sharding", "zero3"], "--sharding zero3 is over processes"),
        (["memory"], "give --params, as in --params 7B, or --model gpt"),
        (["memory", "--model", "gpt", "--layers", "2"], "--model gpt needs --width too, as in"),
        (["bitz", "1"], "there is no command 'bitz'; did you mean 'bits'?"),
    ],
)
def test_errors_are_one_line(capsys: Any, arguments: list[str], message: str) -> None:
    assert message in run(capsys, *arguments, status=2)


def test_help_has_examples(capsys: Any) -> None:
    for command in [
        "bits",
        "ranges",
        "ulp",
        "simulate",
        "simulate-fp8",
        "survival",
        "memory",
        "crises",
    ]:
        assert f"examples:\n  reamp {command}" in run(capsys, command, "--help")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Printer(Terminal()).colours
    assert "\x1b[31m" in Printer(Terminal()).alarm("overflow")
    assert not Printer(io.StringIO()).colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Printer(Terminal()).colours
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert Printer(ascii_only).bar(0.5, 4) == "##"
    assert math.isclose(len(Printer(io.StringIO()).bar(0.001)), 1)


@pytest.mark.parametrize(("size", "count"), [("80GB", 80e9), ("80", 80e9), ("40GiB", 40 * 2**30)])
def test_sizes_are_written_as_people_write_them(capsys: Any, size: str, count: float) -> None:
    rows = json.loads(run(capsys, "memory", "--params", "1B", "--gpu-memory", size, "--json"))
    assert rows[0]["gpu_memory"] == count


def test_a_gpu_knows_its_memory_and_hides_what_it_emulates(capsys: Any) -> None:
    rows = json.loads(run(capsys, "memory", "--params", "1B", "--gpu", "t4", "--json"))
    assert {row["opt_level"] for row in rows} == {"O0", "O1", "O2", "O3"}
    assert rows[0]["gpu_memory"] == 16e9
    rows = json.loads(run(capsys, "memory", "--params", "1B", "--gpu", "A100", "--json"))
    assert {row["opt_level"] for row in rows} == {"O0", "O1", "O2", "O3", "O4", "O5"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--layers 24 --width 2560 --sequence 2048 --batch 1 --gpu T4",
            "With 16 GB: none of O2, O1, O0 fits; O3 (without masters) would. Activations take 4.44 "
            "GB. With --checkpointing they take about 0.83 GB. O2 fits on 2 such GPUs",
        ),
        (
            "--layers 32 --width 4096 --sequence 4096 --batch 5 --world-size 8 --sharding fsdp2 "
            "--gpu H100",
            "With 80 GB: none of O5, O2, O4, O1, O0 fits; O7 (in FP8) would. Activations take 71.23 "
            "GB. With --checkpointing they take about",
        ),
    ],
)
def test_what_fits_and_is_not_recommended_is_said(capsys: Any, arguments: str, said: str) -> None:
    given = ("memory", "--model", "gpt", "--optimizer", "FusedSGD", *arguments.split())
    assert said in run(capsys, *given).replace("\n", " ")


def test_small_sizes_have_small_units(capsys: Any) -> None:
    for params, unit in (("1000", "KB"), ("1M", "MB"), ("1B", "GB")):
        shown = run(capsys, "memory", "--params", params)
        assert f"parameters, adamw, {unit} of one process" in shown
        assert re.search(r"O0 +adamw +4\.0", shown), shown


def test_what_does_not_fit_says_what_would(capsys: Any) -> None:
    shape = ("--model", "gpt", "--layers", "32", "--width", "4096", "--sequence", "4096")
    told = run(capsys, "memory", *shape, "--batch", "4", "--gpu", "H100")
    shown = told.replace("\n", " ")
    assert "With 80 GB: nothing fits." in shown
    assert "With --checkpointing they take about" in shown
    assert "a KV cache of 8.59 GB in 16 bits or 4.29 GB in 8 bits" in shown
    shown = run(capsys, "memory", "--params", "7B", "--gpu", "A100").replace("\n", " ")
    assert "With 80 GB: O5 with FusedAdam, split16, BF16 moments fits, with 10.00 GB for act" in shown
    assert "Its keys in a profile: master_weights: split16; state_dtype: bfloat16." in shown
    shown = run(capsys, "memory", "--params", "70B", "--gpu", "H100").replace("\n", " ")
    assert "O5 fits on 16 such GPUs: --world-size 16 --sharding fsdp2" in shown


@pytest.mark.parametrize("flash", [True, False])
def test_the_activations_of_a_gpt_are_those_that_autograd_keeps(flash: bool) -> None:
    width, sequence, batch, vocabulary = 256, 128, 2, 1000

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            shape = (batch, sequence, width // 64, 64)
            q, k, v = (
                y.reshape(shape).mT.mT.transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1)
            )
            if flash:
                y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y = torch.softmax(q @ k.mT / 8, -1) @ v
            x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, width))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(width, vocabulary))
    counted = Activations(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, counted.unpack):
        y = model(torch.randn(batch, sequence, width))
        loss = nn.functional.cross_entropy(y.flatten(0, 1), torch.zeros(batch * sequence).long())
    assert loss.requires_grad
    told = Transformer(4, width, sequence, batch, vocabulary, flash=flash)
    assert counted.most / 4 == pytest.approx(sum(told.activations), rel=0.15)
