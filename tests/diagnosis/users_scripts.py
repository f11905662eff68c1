"""Scripts of users who never call `initialize`; `# here` marks the line at fault, if it has one."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 4


def here(offset: int = 0) -> int:
    """Return the line of the caller, or one so many lines before it."""
    return inspect.currentframe().f_back.f_lineno - offset  # type: ignore[union-attr]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def steps(optimizer: torch.optim.Optimizer, count: int = 2) -> Iterator[int]:
    """Yield before each backward; gradients are set to None before, and a step follows."""
    for i in range(count):
        optimizer.zero_grad()
        yield i
        optimizer.step()


def trained_in_bfloat16(rate: float = 1e-4, count: int = 2, **options: Any) -> None:
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), rate, **options)
    for _ in steps(optimizer, count):
        F.cross_entropy(model(X.bfloat16()).float(), Y).backward()


def bfloat16_weights() -> None:
    trained_in_bfloat16()


def bfloat16_moments() -> None:
    trained_in_bfloat16(1e-2, 24, betas=(0.9, 0.9999))


def weight_decay() -> None:
    trained_in_bfloat16(1e-3, weight_decay=0.1)


def average_in_bfloat16() -> None:
    model = net()
    average = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new.bfloat16(), 1e-4)  # here


def accumulation_in_bfloat16() -> None:
    model = nn.Linear(16, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)
    for _ in range(600):
        (model(torch.ones(1, 16).bfloat16()).float().sum() / 600).backward()
    optimizer.step()


def rotary_buffer() -> None:
    class Rotary(nn.Module):
        inv_freq: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(8) / 8))

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(64)[:, None] * self.inv_freq.float()
            return self.linear(x) * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)

    model = Rotary().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in steps(optimizer):
        model(X.bfloat16()).float().square().sum().backward()


def timesteps_cast() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in steps(optimizer):
        times = (torch.arange(64) * 15 + 3).bfloat16()  # here
        (model(X) * torch.sin(times * 0.01)[:, None].float()).square().mean().backward()


def positions_made_in_bfloat16() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in steps(optimizer):
        places = torch.arange(512, 576, dtype=torch.bfloat16)  # here
        (model(X) * torch.sin(places * 0.01)[:, None].float()).square().mean().backward()


def ids_cast() -> None:
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in steps(optimizer):
        ids = (torch.arange(64) * 31 + 5).to(torch.bfloat16)  # here
        F.cross_entropy(model(ids.long()), Y).backward()


def ratio_of_policies() -> None:
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in steps(optimizer):
        new = F.log_softmax(model(X.bfloat16()), -1)[:, 0]
        old = F.log_softmax(model(X.bfloat16()).float(), -1)[:, 0].detach()
        torch.exp(new - old).sub(1).square().sum().backward()  # here


def scaled(model: nn.Module, scaler: Any, share: float = 1.0) -> Tensor:
    """Return the scaled loss of a model in float16."""
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(X).float(), Y)
    return scaler.scale(loss) * share  # type: ignore[no-any-return]


def with_a_scaler(model: nn.Module, part: Any = None, count: int = 2) -> Iterator[tuple[Any, Any]]:
    """Yield a scaler and an optimizer after each backward; a step of the scaler follows."""
    optimizer = torch.optim.SGD((part or model).parameters(), 1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(count):
        model.zero_grad()
        scaled(model, scaler).backward()
        yield scaler, optimizer
        scaler.step(optimizer)
        scaler.update()


def clipped_while_scaled() -> None:
    model = net()
    for _ in with_a_scaler(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here


def step_past_the_scaler() -> None:
    for _, optimizer in with_a_scaler(net()):
        optimizer.step()  # here


def statistics_in_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4, momentum=1e-3)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 10.0)
    for _ in steps(optimizer):
        F.cross_entropy(model(X.bfloat16()).float(), Y).backward()


def log_of_probabilities() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in steps(optimizer):
        with torch.autocast("cpu", torch.float16):
            logits = model(X) * 40
        probabilities = torch.softmax(logits, 1)  # here
        (-torch.log(probabilities[torch.arange(64), Y]).mean() * 1e-3).backward()


def no_scaler() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in steps(optimizer):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(X), Y)
        loss.backward()


def vanished_gradients() -> None:
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e3)
    for _ in steps(optimizer):
        (F.cross_entropy(model(X.half()).float(), Y) * 1e-5).backward()


def two_masks() -> None:
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)
    least = torch.finfo(torch.float16).min
    for _ in steps(optimizer):
        padding = torch.zeros(64, 4).half()
        padding[1] = least
        causal = torch.full((64, 4), least).half().triu(1)
        causal[1] = least
        attention = torch.softmax(model(X.half()) + (padding + causal), -1)  # here
        attention[:, 0].float().log().mean().backward()


def half_and_adam() -> None:
    model = net().half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in steps(optimizer):
        (F.cross_entropy(model(X.half()).float(), Y) * 1e-3).backward()


def masked_rows() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in steps(optimizer):
        scores = model(X).masked_fill(torch.arange(64)[:, None] == 5, -math.inf)
        torch.softmax(scores, -1)[:, 0].mean().backward()  # here


def step_past_the_scaler_of_another_one() -> None:
    model = net()
    second = torch.optim.SGD(model[3:].parameters(), 1e-5)
    for scaler, first in with_a_scaler(model, model[:3]):
        scaler.unscale_(first)
        second.step()  # here


def one_of_two_losses_scaled() -> None:
    model = net()
    for _ in with_a_scaler(model):
        F.cross_entropy(model(X), Y.flip(0)).backward()  # here


def unscaled_in_each_part() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for part in range(4):
        scaled(model, scaler, 0.5).backward()  # here
        scaler.unscale_(optimizer)
        if part % 2:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def penalty_of_a_gradient(divisor: float = 1.0) -> None:
    """Train with a penalty of a scaled gradient that is divided by a number."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        grad = torch.autograd.grad(scaler.scale(model(x).sum()), x, create_graph=True)[0]
        penalty = ((grad / divisor).norm(dim=1) - 1).square().mean()  # here
        scaler.scale(F.cross_entropy(model(X), Y) + penalty).backward()
        scaler.step(optimizer)
        scaler.update()


def masters_by_hand(rate: float = 0.1, come_back: bool = False) -> None:
    """Train masters of a model, and copy them to it or not."""
    model = net().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, rate)
    for _ in range(5):
        model.zero_grad()
        F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        for master, p in zip(masters, model.parameters(), strict=True) if come_back else ():
            p.data.copy_(master)


def a_scaler_for_each_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(18):
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        scaled(model, scaler).backward()
        scaler.step(optimizer)
        scaler.update()


def statistics_that_were_saved_in_float16() -> None:
    norm = nn.BatchNorm1d(16).eval()
    assert norm.running_var is not None
    norm.running_var.fill_(1e5).copy_(norm.running_var.half())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in steps(optimizer):
        F.cross_entropy(model(norm(X).detach()), Y).backward()


def ids_that_were_kept_in_float16() -> None:
    rows = torch.arange(8000, 8064).half()
    table = nn.Embedding(9000, 4)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    for _ in steps(optimizer):
        F.cross_entropy(table(rows.long()), Y).backward()  # here


def distances_of_far_points() -> None:
    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    points = 5e6 + 1000 * torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
    for _ in steps(optimizer):
        model(torch.cdist(points, points)).mean().backward()  # here


def an_average_of_two_ops() -> None:
    model = net()
    average = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in steps(optimizer, 3):
        F.cross_entropy(model(X), Y).backward()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.995).add_(p.bfloat16(), alpha=0.005)  # here


def accumulation_in_a_copy() -> None:
    masters = net()
    model = copy.deepcopy(masters).bfloat16()
    optimizer = torch.optim.SGD(masters.parameters(), 0.1)
    for _ in range(2):
        model.zero_grad()
        for x, y in zip(X.repeat(4, 1), Y.repeat(4), strict=True):
            (F.cross_entropy(model(x.bfloat16()).float(), y) / 256).backward()  # here
        for master, p in zip(masters.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters.parameters(), model.parameters(), strict=True):
                p.copy_(master)


def a_schedule_of_its_own() -> None:
    schedule: Any = nn.Module()
    schedule.register_buffer("kept", (1 - torch.linspace(1e-4, 0.02, 64)).cumprod(0))
    schedule.bfloat16()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for _ in steps(optimizer):
        loss = F.cross_entropy(model(X), Y, reduction="none")
        kept = schedule.kept[torch.arange(64)].float()  # here
        (loss * kept / (1 - kept)).mean().backward()


FAULTS: dict[Callable[[], None], tuple[str, str]] = {
    bfloat16_weights: ("still", "1.weight"),
    bfloat16_moments: ("still", "exp_avg_sq of"),
    weight_decay: ("still", "by weight decay"),
    average_in_bfloat16: ("still", "averages"),
    accumulation_in_bfloat16: ("still", "1 gradient"),
    rotary_buffer: ("buffer", "'inv_freq' of Rotary"),
    timesteps_cast: ("cast", "933 became 932"),
    positions_made_in_bfloat16: ("cast", "575 became 576"),
    ids_cast: ("cast", "1958 became 1960"),
    ratio_of_policies: ("cancellation", "digits are all that a subtraction leaves"),
    clipped_while_scaled: ("order", "was written to while it was still scaled"),
    step_past_the_scaler: ("order", "optimizer.step() takes gradients that are scaled by 1024"),
    statistics_in_bfloat16: ("still", "1 buffer; wholly 1.running_var"),
    log_of_probabilities: ("underflow", "it shows at torch.log"),
    no_scaler: ("loss scale", "no GradScaler"),
    vanished_gradients: ("underflow", "more than half of the gradient is 0"),
    two_masks: ("range", "131008"),
    half_and_adam: ("eps", "1e-08 is 0 in float16"),
    masked_rows: ("mathematics", "a whole row of the input is -inf"),
    step_past_the_scaler_of_another_one: ("order", "gradients that are scaled by 1024"),
    one_of_two_losses_scaled: ("order", "a gradient scaled by 1 was added to one scaled by 1024"),
    unscaled_in_each_part: ("order", "a gradient scaled by 1024 was added to one scaled by 1"),
    penalty_of_a_gradient: ("order", "gradients that are still scaled, as in a penalty"),
    masters_by_hand: ("still", "no weight of Sequential has changed from step 1 to 5"),
    a_scaler_for_each_step: ("still", "no weight of Sequential has changed from step 1 to 18"),
    statistics_that_were_saved_in_float16: ("weights", "running_var of BatchNorm1d is not finite"),
    ids_that_were_kept_in_float16: ("cast", "it does not hold all above 2048"),
    distances_of_far_points: ("cancellation", "computes with too few digits"),
    an_average_of_two_ops: ("still", "averages; wholly 0.bias"),
    accumulation_in_a_copy: ("still", "gradients"),
    a_schedule_of_its_own: ("rounding", "the buffer kept was cast, and"),
}
"""The cause of each, and a part of what must be said of it."""


# Healthy ones.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.view(-1, 4, 4))[0][:, -1])


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x.view(-1, 1, 4, 4)))).mean((2, 3)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Linear(16, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, 4))
        return (weights[..., None] * picked).sum(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer = nn.Linear(4, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        return self.out(self.layer(self.into(x.view(-1, 4, 4)).transpose(0, 1), mask)[-1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": net,
    "recurrent": Recurrent,
    "convolutional": Convolutional,
    "mixture": Mixture,
    "attention": Attention,
}


def healthy(model: nn.Module, precision: str, count: int = 6) -> list[Tensor]:
    """Train a model, and return its weights."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=precision != "float32"):
            loss = F.cross_entropy(model(X), Y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]
