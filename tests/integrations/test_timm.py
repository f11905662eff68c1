"""timm: ApexScaler under the alias, AmpScaler, averages and checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import timm.utils.cuda
import torch
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

import amp
from amp.integrations.timm import AmpScaler
from tests.integrations import comparing
from tests.integrations.comparing import TOLERANCES, levels, values
from tests.models import initialize

CLIPS: dict[str, dict[str, Any]] = {
    "not clipped": {},
    "norm": {"clip_grad": 0.3, "clip_mode": "norm"},
    "value": {"clip_grad": 0.01, "clip_mode": "value"},
    "agc": {"clip_grad": 0.01, "clip_mode": "agc"},
}


@pytest.fixture
def apex_scaler() -> Iterator[Any]:
    """timm's ApexScaler, as a script gets it under `python -m amp run`."""
    amp.compat.install()
    yield importlib.reload(timm.utils.cuda).ApexScaler
    amp.compat.uninstall()
    importlib.reload(timm.utils.cuda)


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=3,
    )


def batches(n: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(n)
    ]


def sgd(model: nn.Module) -> Any:
    return timm.optim.create_optimizer_v2(model, opt="momentum", lr=0.1, momentum=0.9)


class Script:
    """The loop of timm's train.py: accumulation over two batches, clipping, an average of weights."""

    def __init__(
        self,
        level: str | None,
        scaler: Any = None,
        ema: Any = ModelEmaV3,
        clips_head: bool = False,
        **options: Any,
    ) -> None:
        self.model = vit()
        self.optimizer = sgd(self.model)
        if level is not None:
            self.model, self.optimizer = initialize(self.model, self.optimizer, level, **options)
        self.scaler, self.clips_head = scaler, clips_head
        self.ema = ema(self.model, decay=0.9)

    def train(self, data: Any = None, **clip: Any) -> Script:
        for i, (x, y) in enumerate(batches() if data is None else data):
            loss = F.cross_entropy(self.model(x).float(), y) / 2
            without_head = clip.get("clip_mode") == "agc" and not self.clips_head
            parameters = timm.models.model_parameters(self.model, exclude_head=without_head)
            need_update = i % 2 == 1
            if self.scaler is not None:
                self.scaler(
                    loss, self.optimizer, parameters=parameters, need_update=need_update, **clip
                )
            else:
                loss.backward()
                if need_update:
                    if clip:
                        timm.utils.dispatch_clip_grad(parameters, clip["clip_grad"], clip["clip_mode"])
                    self.optimizer.step()
            if need_update:
                self.optimizer.zero_grad()
                self.ema.update(self.model)
        return self


def gap(a: nn.Module, b: nn.Module) -> float:
    return comparing.gap(values(a), values(b))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("level", levels("O2"))
def test_amp_scaler_trains_as_in_fp32(level: str, clip: str) -> None:
    reference = Script(None).train(**CLIPS[clip])
    script = Script(level, AmpScaler()).train(**CLIPS[clip])
    assert gap(script.model, reference.model) <= TOLERANCES[level]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_apex_scaler_trains_as_in_fp32_under_the_alias(level: str, clip: str, apex_scaler: Any) -> None:
    reference = Script(None, clips_head=True).train(**CLIPS[clip])
    script = Script(level, apex_scaler()).train(**CLIPS[clip])
    assert gap(script.model, reference.model) <= TOLERANCES[level]


@pytest.mark.parametrize("ema", [ModelEmaV2, ModelEmaV3])
@pytest.mark.parametrize("level", levels("O2"))
def test_averages_are_as_in_fp32(level: str, ema: Any) -> None:
    reference = Script(None, ema=ema).train()
    script = Script(level, AmpScaler(), ema=ema).train()
    assert gap(script.ema.module, reference.ema.module) <= TOLERANCES[level]
    if level in ("O2", "O5"):
        assert {value.dtype for value in script.ema.module.state_dict().values()} == {torch.float32}


def test_masters_in_16_bits_are_clipped_by_their_size() -> None:
    reference = Script("O5", AmpScaler()).train(**CLIPS["agc"])
    script = Script("O5", AmpScaler(), master_weights="split16").train(**CLIPS["agc"])
    assert gap(script.model, reference.model) == 0


def amp_loop(
    loss: Tensor, optimizer: Any, parameters: Any, need_update: bool, clip_grad: float, clip_mode: str
) -> None:
    """Do what `AmpScaler` does in a script's own lines."""
    with amp.scale_loss(loss, optimizer, delay_unscale=not need_update) as scaled_loss:
        scaled_loss.backward()
    if need_update:
        timm.utils.dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
        optimizer.step()


@pytest.mark.parametrize("masters", ["FP32", "split16", "kahan"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_adaptive_clipping_finds_the_masters(level: str, masters: str) -> None:
    reference = Script(level, AmpScaler(), master_weights=masters).train(**CLIPS["agc"])
    script = Script(level, amp_loop, master_weights=masters).train(**CLIPS["agc"])
    # The script's own line clips by the norms of weights, and AmpScaler by those of masters.
    assert gap(script.model, reference.model) < 1e-3
    unclipped = Script(level, AmpScaler(), master_weights=masters).train()
    assert gap(script.model, unclipped.model) > 3e-3


def test_a_checkpoint_of_timm_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = {"loss_scale": {"init": 2.0**22}}
    straight = Script("O2", AmpScaler(), **options).train()
    state = amp.state_dict()
    saved = Script("O2", AmpScaler(), **options).train(batches()[:4])
    saver = CheckpointSaver(
        saved.model, saved.optimizer, amp_scaler=saved.scaler, checkpoint_dir=str(tmp_path)
    )
    saver.save_checkpoint(epoch=0)
    resumed = Script("O2", AmpScaler(), **options)
    nn.init.zeros_(resumed.model.patch_embed.proj.weight)  # type: ignore[union-attr,arg-type]
    resume_checkpoint(
        resumed.model, str(tmp_path / "last.pth.tar"), resumed.optimizer, resumed.scaler, log_info=False
    )
    resumed.train(batches()[4:])
    assert gap(resumed.model, straight.model) == 0
    assert amp.state_dict() == state
