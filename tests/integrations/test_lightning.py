"""AmpPrecision in Lightning's Trainer, against the Trainer's own FP32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import strategies as fabric_strategies
from lightning.pytorch import callbacks, strategies
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.errors import AmpError
from amp.integrations.lightning import AmpPrecision
from tests.integrations.comparing import (
    TOLERANCES,
    gap,
    levels,
    results_of_two_ranks,
    same_bits,
    weights,
)
from tests.integrations.lightning_models import QUIET, Classifier, L, batches, fit, loader, plugins
from tests.processes import run_python

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*does not have many workers",
        ".*does not have a `validation_step`",
        ".*You defined a `validation_step` but have no `val_dataloader`",
        ".*number of training batches",
        ".*dataloader_iter.*",
        "Checkpoint directory .* exists and is not empty",
        "Be aware that when using `ckpt_path`",
        ".*LeafSpec.*",
        ".*treespec.*",
        ".*When using EvalResult",
        ".*You called `self.log",
        ".*Trying to infer the `batch_size`",
        ".*is using the old PyTorch",
        ".*Swapping scheduler",
        ".*lr_scheduler.step\\(\\).*before.*optimizer.step",
        ".*in eval mode at the start of training",
    )
]

HOW = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.3},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "all": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.fixture(scope="module")
def fp32() -> dict[str, list[Tensor]]:
    results = {}
    for how, options in HOW.items():
        model = Classifier()
        fit(model, None, **options)
        results[how] = weights(model)
    return results


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("level", levels("O2"))
def test_a_trainer_script_trains_as_in_fp32(level: str, how: str, fp32: Any) -> None:
    model = Classifier()
    fit(model, level, **HOW[how])
    assert gap(weights(model), fp32[how]) <= TOLERANCES[level]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Norms(Classifier):
    """Logs the norms of gradients, as Lightning's documentation does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = grad_norm(self, norm_type=2)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_lightning_logs_the_norms_of_the_masters_gradients(level: str) -> None:
    expected, model = Norms(), Norms()
    fit(expected, None, max_steps=1)
    fit(model, level, max_steps=1)
    assert model.norms.keys() == expected.norms.keys()
    for name, norm in expected.norms.items():
        assert model.norms[name].item() == pytest.approx(norm.item(), rel=0.05, abs=1e-4)


def test_parts_give_fp32_when_a_step_calls_them() -> None:
    model = Classifier()
    fit(model, "O2", max_epochs=1)
    assert model.dtypes == {torch.float32}


def test_an_overflow_skips_the_step_halves_the_scale_and_training_goes_on() -> None:
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            optimizer = trainer.optimizers[0]
            seen.append((amp.step_was_skipped(optimizer), amp.loss_scale(), weights(module)))

    model = Classifier()
    fit(model, "O2", batches(5, bad=2), max_epochs=1, callbacks=[Watch()])
    assert [skipped for skipped, _, _ in seen] == [False, False, True, False, False]
    assert [scale for _, scale, _ in seen] == [1024, 1024, 512, 512, 512]
    assert same_bits(seen[2][2], seen[1][2])
    assert not same_bits(seen[3][2], seen[2][2])
    assert all(each.isfinite().all() for each in weights(model))


class Seed(Callback):
    """Makes a batch's dropout depend on when it comes alone."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(1000 * trainer.current_epoch + batch_idx)


@pytest.mark.parametrize("level", levels("O2"))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(level: str, tmp_path: Path) -> None:
    data = batches(8, bad=1) if level in ("O1", "O2") else batches()
    options = {"data": data, "accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    straight = Classifier(dropout=0.3)
    trainer = fit(straight, level, max_epochs=4, callbacks=[Seed()], **options)
    saving = ModelCheckpoint(str(tmp_path), save_last=True, save_on_train_epoch_end=True)
    fit(
        Classifier(dropout=0.3),
        level,
        max_epochs=2,
        callbacks=[Seed(), saving],
        **{**options, "enable_checkpointing": True},
    )
    path = tmp_path / "last.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {torch.float32}

    resumed = Classifier(dropout=0.3)
    for parameter in resumed.parameters():
        nn.init.zeros_(parameter)
    again = L.Trainer(
        **{**QUIET, "max_epochs": 4, "plugins": plugins(level), "callbacks": [Seed()]},
        accumulate_grad_batches=3,
        gradient_clip_val=0.3,
    )
    again.fit(resumed, loader(data), loader(batches(2)), ckpt_path=str(path))
    assert same_bits(weights(resumed), weights(straight))
    assert again.precision_plugin.state_dict() == trainer.precision_plugin.state_dict()
    assert straight.losses[16:] == pytest.approx(resumed.losses, abs=0, nan_ok=True)


class Gan(L.LightningModule):
    """Two optimizers by hand, each with the other's parameters frozen, a schedule and clipping."""

    def __init__(self, with_toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.make = nn.Linear(8, 8)
        self.judge = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        self.manual_backward(F.softplus(-self.judge(self.make(x))).mean())
        assert self.judge.weight.grad is None
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            fake = self.judge(self.make(x).detach())
            self.manual_backward((F.softplus(fake) + F.softplus(-self.judge(x))).mean())
            second.step()
            second.zero_grad()
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.SGD(self.make.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.judge.parameters(), lr=1e-2),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 5) for each in optimizers]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_manual_optimization_with_two_optimizers(level: str) -> None:
    models = [Gan(), Gan()]
    for model, each in zip(models, (None, level), strict=True):
        options = {**QUIET, "max_epochs": 2, "plugins": plugins(each)}
        L.Trainer(**options).fit(model, loader(batches()))
    assert gap(*map(weights, models)) < TOLERANCES[level] / 10
    assert "toggle_optimizer" not in vars(models[1])


class ByClosure(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lbfgs_gets_its_closure(level: str) -> None:
    models = [ByClosure(), ByClosure()]
    for model, each in zip(models, (None, level), strict=True):
        fit(model, each, batches(1), max_epochs=1)
    assert gap(*map(weights, models)) < 5e-3
    assert len(models[0].losses) == len(models[1].losses) > 1


def averaging(base: str = "WeightAveraging") -> Any:
    return getattr(callbacks, base)(avg_fn=lambda average, new, n: 0.9 * average + 0.1 * new)


AVERAGES = {
    "WeightAveraging": averaging,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(
        0.05, swa_epoch_start=1, annealing_epochs=1
    ),
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("level", levels("O2"))
def test_averages_are_as_in_fp32(level: str, kind: str) -> None:
    models = [Classifier(), Classifier()]
    for model, each in zip(models, (None, level), strict=True):
        fit(model, each, max_epochs=3, callbacks=[AVERAGES[kind]()])
    assert gap(*map(weights, models)) <= TOLERANCES[level]


def test_an_average_loses_no_bits_in_validation() -> None:
    kept: list[Any] = []

    class Average(callbacks.WeightAveraging):
        def on_validation_epoch_start(self, *args: Any) -> None:
            kept.append(weights(self._average_model.module))  # type: ignore[union-attr]
            super().on_validation_epoch_start(*args)

        def on_validation_epoch_end(self, *args: Any) -> None:
            super().on_validation_epoch_end(*args)
            kept.append(weights(self._average_model.module))  # type: ignore[union-attr]

    model = Classifier()
    average = Average(avg_fn=lambda average, new, n: 0.9 * average + 0.1 * new)
    fit(model, "O5", callbacks=[average])
    for before, after in zip(kept[::2], kept[1::2], strict=True):
        assert same_bits(before, after)
    assert same_bits(weights(model), weights(average._average_model.module))  # type: ignore[union-attr]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_testing_predicting_and_fitting_again(level: str) -> None:
    model = Classifier()
    trainer = fit(model, level, max_epochs=1)
    trained = weights(model)
    assert not same_bits([each.half().float() for each in trained], trained), "the weights are rounded"
    state = trainer.precision_plugin.state_dict()
    assert trainer.test(model, loader(batches(2)), verbose=False)[0]["test_loss"] < 2
    trainer.validate(model, loader(batches(2)), verbose=False)
    assert all(out.isfinite().all() for out in trainer.predict(model, loader(batches(2))))
    assert same_bits(weights(model), trained), "the weights lost bits"
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(batches()), loader(batches(2)))
    assert not same_bits(weights(model), trained)
    assert trainer.precision_plugin.state_dict()["loss_scaler0"]["unskipped"] == 16
    assert state["loss_scaler0"]["unskipped"] == 8


def test_nothing_is_left_of_a_run() -> None:
    model = Classifier()
    trainer = fit(model, "O1", max_epochs=1)
    assert amp.get_session().closed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "on_after_setup" not in vars(model)
    optimizer = trainer.optimizers[0]
    assert optimizer.param_groups[0]["params"][0] is model.net[0].weight
    assert {each["momentum_buffer"].dtype for each in optimizer.state.values()} == {torch.float32}


def test_a_run_that_raises_leaves_fp32_weights() -> None:
    class Raises(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ValueError("stop here")
            return super().training_step(batch, batch_idx)

    model = Raises()
    with pytest.raises(ValueError, match="stop here"):
        fit(model, "O2")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_checkpoint_of_after_the_run_holds_fp32_and_the_scale(tmp_path: Path) -> None:
    model = Classifier()
    trainer = fit(model, "O2", batches(8, bad=3), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert same_bits(saved["state_dict"].values(), weights(model))
    assert saved["AmpPrecision"]["loss_scaler0"]["loss_scale"] == 512
    fresh = Classifier.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    assert same_bits(weights(fresh), weights(model))


def test_what_is_wrong_with_a_profile_is_said_at_once() -> None:
    with pytest.raises(AmpError, match="'02' is not one of"):
        AmpPrecision("02")
    with pytest.raises(AmpError, match="keep_batchnorm"):
        AmpPrecision("O2", keep_batchnorm=True)


@pytest.mark.slow
def test_pytorch_lightning_has_it_too() -> None:
    code = """if True:
        from tests.integrations import importing
        import warnings; warnings.simplefilter("ignore")
        import torch, pytorch_lightning as pl
        from pytorch_lightning.demos.boring_classes import BoringModel
        from amp.integrations.pytorch_lightning import AmpPrecision
        model, seen = BoringModel(), set()
        before = model.layer.weight.clone()
        model.layer.register_forward_pre_hook(lambda layer, _: seen.add(layer.weight.dtype))
        trainer = pl.Trainer(accelerator="cpu", max_steps=2,
            plugins=[AmpPrecision("O2", loss_scale=8.0)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
        trainer.fit(model)
        assert seen == {torch.float16} and model.layer.weight.dtype is torch.float32
        assert not torch.equal(model.layer.weight, before)
    """
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_lightning_fabric_alone_has_it_too() -> None:
    code = """if True:
        from tests.integrations import importing
        import sys, warnings; warnings.simplefilter("ignore")
        sys.modules["pytorch_lightning"] = None  # not installed
        import torch, lightning_fabric
        from amp.integrations.pytorch_lightning import AmpPrecision
        model = torch.nn.Linear(4, 2)
        before = model.weight.clone()
        precision = AmpPrecision("O2", loss_scale=128.0)
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, plugins=[precision])
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model.weight.dtype is torch.float16
        fabric.backward(model(torch.ones(3, 4)).square().mean())
        optimizer.step()
        precision.teardown()
        assert model.weight.dtype is torch.float32 and not torch.equal(model.weight, before)
    """
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("levels", [("O2", "O4"), ("O0", "O1", "O5")])
def test_two_ranks_under_ddp(levels: tuple[str, ...], tmp_path: Path) -> None:
    check_two_ranks(tmp_path, "ddp", levels)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(strategies, "ModelParallelStrategy"), reason="came with Lightning 2.4")
def test_two_ranks_under_fsdp2(tmp_path: Path) -> None:
    check_two_ranks(tmp_path, "fsdp2", ["O2"])


def test_strategies_with_precision_of_their_own_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision`"):
        strategies.FSDPStrategy().precision_plugin = AmpPrecision("O2")
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision`"):
        fabric_strategies.FSDPStrategy().precision = AmpPrecision("O2")
    model = Classifier()
    model._trainer = SimpleNamespace(strategy=without_deepspeed(strategies.DeepSpeedStrategy))
    with pytest.raises(AmpError, match="AmpPrecision does not work with DeepSpeedStrategy.*FSDP2"):
        AmpPrecision("O2").convert_module(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def without_deepspeed(cls: type[Any]) -> Any:
    """Return a strategy of Lightning's that needs deepspeed to be made."""
    return cls.__new__(cls)


def check_two_ranks(folder: Path, strategy: str, levels: Sequence[str]) -> None:
    module = "tests.integrations.lightning_ddp"
    found = results_of_two_ranks(module, folder, strategy, "FP32", *levels)
    for (level, how), values in found.items():
        if level != "FP32":
            assert gap(values, found["FP32", how]) <= TOLERANCES[level], (level, how)
    for level in ("FP32", *levels):
        assert same_bits(found[level, "resumed"], found[level, "straight"]), level


def test_two_losses_have_scalers_of_their_own() -> None:
    class TwoLosses(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, _ = batch
            for i, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
                with optimizer.toggle_model():
                    loss = self.judge(self.make(x)).square().mean() * (torch.inf if i else 1.0)
                    self.manual_backward(loss, loss_id=i)
                    optimizer.step()
                    optimizer.zero_grad()

    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, "plugins": plugins("O2", num_losses=2)})
    trainer.fit(TwoLosses(), loader(batches(1)))
    state = trainer.precision_plugin.state_dict()
    assert [state[f"loss_scaler{i}"]["loss_scale"] for i in range(2)] == [1024, 512]
