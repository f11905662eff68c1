"""`amp.explain`: dtypes and rules where functions run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.casting.policy import load_policy
from amp.errors import AmpValueError
from amp.trials.explaining import Explained, Explanation
from tests.diagnosis.faults import Net, batch


def explained(level: str, op: str | None = None, module: str | None = None, **more: Any) -> Explanation:
    return amp.explain(Net(), batch(), op, module, level, **more)


def the_only(found: Explanation) -> Explained:
    assert len(found.calls) == 1, str(found)
    return found.calls[0]


@pytest.mark.parametrize(
    ("level", "op", "module", "takes", "gives", "rule"),
    [
        ("O1", "softmax", "blocks.1", "float16", "float32", "runs in float32: half arguments are cast"),
        ("O1", "linear", "head", "float32", "float16", "runs in float16; in a model's forward"),
        ("O1", "layer_norm", "blocks.1", "float32", "float32", "calls torch.layer_norm, which runs"),
        ("O1", "masked_fill", "blocks.1", "float16", "float16", "follows its input: no rule names it"),
        ("O2", "softmax", "blocks.1", "float16", "float16", "follows its input: O2 casts models and"),
        ("O2", "linear", "head", "float16", "float16", "follows its input: O2 casts models and no"),
        ("O4", "torch.softmax", "blocks.1", "bfloat16", "float32", "runs in float32"),
        ("O7", "softmax", "blocks.1", "bfloat16", "bfloat16", "follows its input: O7 casts models"),
        ("O0", "softmax", "blocks.1", "float32", "float32", "follows its input: O0 casts models"),
    ],
)
def test_dtypes_and_the_rule(
    level: str, op: str, module: str, takes: str, gives: str, rule: str
) -> None:
    call = the_only(explained(level, op, module))
    assert (call.takes[0], call.gives[0]) == (takes, gives)
    assert call.rule.startswith(rule)
    assert Path(call.file).name == "faults.py"


def test_the_rule_is_where_it_says() -> None:
    call = the_only(explained("O1", "softmax", "blocks.0.attn"))
    rule = next(x for x in load_policy(torch.float16).rules if x.op == "torch.softmax")
    assert call.rule.endswith(f"(float, {rule.source}).")
    file, line = rule.source.rsplit(":", 1)
    text = (Path(__file__).parents[2] / file).read_text().splitlines()
    assert "softmax" in text[int(line) - 1]


def test_the_page_on_diagnosis_shows_what_it_prints() -> None:
    page = (Path(__file__).parents[2] / "docs/diagnosis.md").read_text()
    assert str(explained("O1", "softmax", "blocks.1")) in page


def test_casts_of_what_a_model_takes_are_no_calls_of_the_script() -> None:
    calls = amp.explain(nn.Linear(4, 4), torch.ones(2, 4), opt_level="O2").calls
    assert [x.op for x in calls] == ["torch.nn.functional.linear"]


def test_calls_in_fp8() -> None:
    calls = explained("O7", "linear", "blocks.0.mlp").calls
    assert [x.module for x in calls] == ["blocks.0.mlp.0", "blocks.0.mlp.2"]
    assert {x.takes for x in calls} == {("bfloat16", "float8_e4m3fn")}
    assert calls[0].rule == "multiplies in FP8, float8_e4m3fn: fp8=current."
    four = explained("O9", "linear", "blocks.0.mlp").calls[0]
    assert four.rule == "multiplies in FP4, float4_e2m1fn_x2: fp8=nvfp4."


def test_rules_of_the_users(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "extends: O1\nrules:\n  - {module: blocks.0.attn, cast: float32}\n"
        "  - {op: torch.softmax, cast: float16}\n"
    )
    first = the_only(explained(str(profile), "softmax", "blocks.0"))
    assert first.gives == ("float32",)
    assert first.rule == f"a rule for the module 'blocks.0.attn' says float32 ({profile}:3)."
    second = the_only(explained(str(profile), "softmax", "blocks.1"))
    assert second.gives == ("float16",)
    assert second.rule.endswith(f"(cast, {profile}:4).")


def test_norms_that_stay_in_fp32() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    found = amp.explain(Images(), torch.randn(2, 3, 8, 8), module="norm", opt_level="O2")
    call = next(x for x in found.calls if x.op.endswith("batch_norm"))
    assert call.rule == "its weights stay in FP32 at O2, as those of norms do."


def test_of_two_rules_for_a_module_the_last_one_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rules = [{"module": "Linear", "cast": "bfloat16"}, {"module": "1", "cast": "float32"}]
    first, second = amp.explain(model, torch.ones(2, 4), "linear", opt_level="O5", rules=rules).calls
    assert first.rule == "a rule for the module 'Linear' says bfloat16 (rules[0])."
    assert second.rule == "a rule for the module '1' says float32 (rules[1])."
    assert (second.takes, second.gives) == (("float32",), ("float32",))


def test_a_rule_for_tensors_is_named_where_they_are_used() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rules = [{"tensor": "1.*", "cast": "float32"}]
    first, second = amp.explain(model, torch.ones(2, 4), "linear", opt_level="O5", rules=rules).calls
    assert "a rule" not in first.rule
    assert "its weights are float32; a rule for '1.*' says float32 (rules[0])." in second.rule


def test_a_call_that_is_made_again_is_counted() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.exp(-x.abs())
            return x

    call = the_only(amp.explain(Twice(), torch.ones(2), "exp", opt_level="O1"))
    assert call.count == 3
    assert ", 3 times\n" in str(call)


def test_of_a_model_that_has_been_through_initialize() -> None:
    with amp.Session("O5", verbosity=0) as session:
        model = session.initialize(Net())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found = amp.explain(model, batch(), "softmax")
        assert found.level == "O5"
        assert {x.gives for x in found.calls} == {("bfloat16",)}
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(AmpValueError, match=r"'softmx' was not called in module 'head'; these were: "):
        explained("O1", "softmx", "head")
    with pytest.raises(AmpValueError, match=r"in module 'block.1'; did you mean 'blocks.1'"):
        explained("O1", "softmax", "block.1")
    with pytest.raises(AmpValueError, match=r"as in amp.explain\(model, batch"):
        amp.explain(Net(), batch())
