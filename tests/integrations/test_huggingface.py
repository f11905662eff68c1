"""AmpTrainer, against transformers' own Trainer in FP32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2LMHeadModel, HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments

import amp
from amp.errors import AmpError, AmpRuntimeError
from amp.integrations.huggingface import AmpMixin, AmpTrainer, AmpTrainingArguments
from tests.covering import covering
from tests.integrations.comparing import TOLERANCES, gap, levels, same_bits, weights
from tests.integrations.huggingface_models import MODELS, Tokens, arguments, gpt2, logged, trainer
from tests.levels import LEVELS

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*lr_scheduler.step\\(\\).*before.*optimizer.step",
        ".*pin_memory",
        ".*Swig",
        ".*SwigPy",
    )
]

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
    "not clipped": {"max_grad_norm": 0.0},
}


def cases() -> list[Any]:
    quick = {
        ("O2", "gpt2", "accumulated and clipped"),
        ("O4", "llama", "plain"),
        ("O2", "bert", "plain"),
    }
    slow = {case.values for case in covering(LEVELS, MODELS, HOW, slow_strength=2)} - quick
    return [*sorted(quick), *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(slow))]


@pytest.mark.parametrize(("level", "model", "how"), cases())
def test_a_trainer_script_trains_as_in_fp32(level: str, model: str, how: str, tmp_path: Path) -> None:
    runs = [trainer(MODELS[model](), arguments(tmp_path, **HOW[how]), each) for each in (None, level)]
    for run in runs:
        run.train()
    assert gap(*(weights(run.model) for run in runs)) <= TOLERANCES[level]
    norms, losses = ([logged(run, name) for run in runs] for name in ("grad_norm", "loss"))
    assert norms[1] == pytest.approx(norms[0], rel=2e-2 if level < "O3" else 6e-2)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3 if level < "O3" else 2e-2)
    assert {each.dtype for each in weights(runs[1].model)} == {torch.float32}


@pytest.mark.parametrize("level", levels("O2"))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(level: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
    scale = {"growth_interval": 2}
    straight = trainer(gpt2(0.2), arguments(tmp_path, **options), level, **scale)
    straight.train()
    resumed = trainer(gpt2(0.2), arguments(tmp_path, **options), level, **scale)
    for parameter in resumed.model.parameters():
        torch.nn.init.zeros_(parameter)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same_bits(weights(resumed.model), weights(straight.model))
    assert logged(resumed, "loss") == logged(straight, "loss")
    assert resumed.accelerator.scaler.state_dict() == straight.accelerator.scaler.state_dict()


def test_a_skipped_step_does_not_move_the_schedule(tmp_path: Path) -> None:
    options = {"max_steps": 5, "lr_scheduler_type": "linear"}
    run = trainer(gpt2(), arguments(tmp_path, **options), "O2", init=2.0**21)
    run.train()
    skipped = [row.overflow for row in amp.history()]
    assert skipped[0]
    assert not skipped[-1]
    rates = logged(run, "learning_rate")
    good_before = [i - sum(skipped[:i]) for i in range(5)]
    assert rates == pytest.approx([0.5 * (1 - good / 5) for good in good_before])
    scale = run.accelerator.scaler.state_dict()["loss_scaler0"]["loss_scale"]
    assert scale == 2.0**21 / 2 ** sum(skipped)


def test_saved_models_hold_the_masters(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 6}
    run = trainer(gpt2(), arguments(tmp_path, **options), "O2")
    run.train()
    run.save_model(str(tmp_path / "end"))
    for folder in (tmp_path / "checkpoint-6", tmp_path / "end"):
        saved = load_file(folder / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
        loaded = GPT2LMHeadModel.from_pretrained(folder)
        for x, y in zip(loaded.parameters(), weights(run.model), strict=True):
            assert x.dtype is torch.float32
            assert torch.equal(x, y)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_in_a_loop_of_its_own_is_saved_in_fp32(level: str, tmp_path: Path) -> None:
    model = gpt2()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    tokens = torch.arange(8)[None]
    with amp.scale_loss(model(input_ids=tokens, labels=tokens).loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert loaded[name].dtype is torch.float32
        assert torch.equal(loaded[name], value)


def test_the_best_model_is_loaded_with_all_its_bits(tmp_path: Path) -> None:
    options = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first one, then
    }
    run = trainer(gpt2(), arguments(tmp_path, **options), "O2")
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    named = dict(run.model.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in saved.items() if name in named)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_evaluation_prediction_and_a_second_training(level: str, tmp_path: Path) -> None:
    runs = [
        trainer(gpt2(), arguments(tmp_path, eval_strategy="steps", eval_steps=3), each)
        for each in (None, level)
    ]
    for run in runs:
        run.train()
    inside = [logged(run, "eval_loss") for run in runs]
    assert inside[1] == pytest.approx(inside[0], rel=2e-3)
    outside = [run.evaluate()["eval_loss"] for run in runs]
    assert outside[1] == pytest.approx(outside[0], rel=2e-3)
    assert runs[1].predict(runs[1].eval_dataset).predictions.dtype == "float32"
    before = weights(runs[1].model)
    for run in runs:
        run.train()
    assert not all(map(torch.equal, before, weights(runs[1].model)))
    assert gap(*(weights(run.model) for run in runs)) <= 2 * TOLERANCES[level]


def test_a_run_that_raises_leaves_fp32_weights(tmp_path: Path) -> None:
    run = trainer(gpt2(), arguments(tmp_path), "O2")

    def stop(*_: Any, **__: Any) -> Tensor:
        raise ValueError("stop here")

    run.compute_loss = stop
    with pytest.raises(ValueError, match="stop here"):
        run.train()
    assert {each.dtype for each in weights(run.model)} == {torch.float32}
    assert amp.get_session().closed


def test_precision_of_the_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AmpRuntimeError, match="leave out fp16=True and bf16=True"):
        trainer(gpt2(), arguments(tmp_path, bf16=True), "O2")


def test_a_wrong_level_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(AmpError, match="'02' is not one of"):
        trainer(gpt2(), arguments(tmp_path), "02")


def test_the_level_may_come_from_the_arguments(tmp_path: Path) -> None:
    (args,) = HfArgumentParser(AmpTrainingArguments).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--output_dir", str(tmp_path), "--opt_level", "O5", "--use_cpu", "True"]
    )
    args = arguments(tmp_path, AmpTrainingArguments, opt_level=args.opt_level)
    run = AmpTrainer(gpt2(), args, train_dataset=Tokens(), amp_options={"verbosity": 0})
    seen = []

    def loss(out: Any, *_: Any, **__: Any) -> Tensor:
        seen.append(run.model.dtype)  # type: ignore[union-attr]
        return out["logits"].square().mean()

    run.compute_loss_func = loss
    run.train()
    assert set(seen) == {torch.bfloat16}


@pytest.mark.slow
def test_other_trainers_take_the_mixin(tmp_path: Path) -> None:
    class Mixed(AmpMixin, Seq2SeqTrainer):
        pass

    args = arguments(tmp_path, Seq2SeqTrainingArguments)
    runs = [trainer(gpt2(), args, level, Mixed) for level in ("O0", "O2")]
    for run in runs:
        run.train()
    assert gap(*(weights(run.model) for run in runs)) <= TOLERANCES["O2"]
    shutil.rmtree(tmp_path)
