"""Scripts as users write them under `amp.watch`: what it names, and where."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp
from amp.diagnosis.findings import Finding
from tests.diagnosis.users_scripts import X, Y, here, net, steps

BF16 = torch.bfloat16


def named(watch: Any, cause: str) -> list[Finding]:
    return [x for x in watch.report.findings if x.cause == cause]


@pytest.mark.parametrize("bad", [None, 3])
def test_a_loss_that_is_nan_under_a_gradient_scaler_is_reported(bad: int | None) -> None:
    """A scaler skips the step, and says nothing."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-2), torch.amp.GradScaler("cpu")
        for step in range(1, 6):
            labels = torch.full_like(Y, -100) if step == bad else Y
            with torch.autocast("cpu", torch.float16):
                y = model(X)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(y.float(), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
    said = [x.what for x in named(watch, "loss")]
    assert said == (
        [f"the loss of step {bad} is not finite, and this step was not looked at"] * bool(bad)
    )


class Items(nn.Module):
    """Reads ids from the first column of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.head = nn.Embedding(1000, 8), nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.item(x[:, 0].long()), x[:, 1:].to(self.item.weight.dtype)], 1))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_ids_that_a_cast_rounds_before_they_become_indices(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Items()
    x = torch.cat([torch.arange(500, 564.0)[:, None], torch.randn(64, 3)], 1)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            features = x.to(dtype)
            cast_at = here(1)
            F.cross_entropy(model(features).float(), Y).backward()
    found = named(watch, "cast")
    assert bool(found) is (dtype is BF16)
    for one in found:
        assert one.line == cast_at
        assert "integers up to 563, which bfloat16 rounds" in one.what


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_cumulative_sum_whose_places_collide(dtype: torch.dtype) -> None:
    """As the slots of a router's experts."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            slots = torch.ones(600, dtype=dtype).cumsum(0) - 1
            summed_at = here(1)
            kept = slots[torch.arange(600) % 2 == 0]
            kept = torch.zeros(601).index_put((kept.long(),), torch.ones(300))
            (F.cross_entropy(model(X), Y) + kept.mean()).backward()
    assert [x.line for x in named(watch, "cast")] == ([summed_at] if dtype is BF16 else [])


@pytest.mark.parametrize(("dtype", "count"), [(BF16, 3000), (BF16, 200), (torch.float32, 3000)])
def test_a_count_in_16_bits_that_stops(dtype: torch.dtype, count: int) -> None:
    """As of the neighbours of a node: bfloat16 counts up to 256."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            ones, nodes = torch.ones(count, dtype=dtype), torch.zeros(count, dtype=torch.long)
            counted = torch.zeros(64, dtype=dtype).index_add_(0, nodes, ones)
            counted_at = here(1)
            F.cross_entropy(model(X) / counted.clamp_min(1)[:, None].float(), Y).backward()
    found = named(watch, "cast")
    assert [x.line for x in found] == ([counted_at] if dtype is BF16 and count > 256 else [])
    assert all("3000 became 256" in x.what for x in found)


def test_digits_that_an_expanded_tensor_has_lost() -> None:
    """Its elements lie in one place."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            scale = torch.tensor([[1000.3]]).bfloat16()
            cast_at = here(1)
            (model(X) * (scale.expand(64, 4).float() - 1000.3)).square().mean().backward()
    (found,) = watch.report.findings
    assert (found.cause, found.line) == ("rounding", cast_at)


def test_integers_that_are_made_of_floating_numbers_are_the_script_s_own() -> None:
    """The op runs again on twins, and must not write to them."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer, 1):
            places = torch.zeros(4, 3, dtype=torch.long)
            places[:] = torch.tensor([999.0]).bfloat16()
            (model(X) * places.float().mean()).square().mean().backward()
            assert places.eq(1000).all()
    assert places.eq(1000).all()
    assert watch.report.ops > 20


def test_what_float32_loses_too_is_not_to_be_computed_in_float32() -> None:
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            likely = torch.sigmoid(model(X) * 100).half().clamp(1e-8, 1 - 1e-8)
            torch.log(1 - likely).float().mean().backward()
    found = named(watch, "cancellation")[0]
    assert "0.99999999 became 1 in float16" in found.what
    assert "FP32 loses it too" in found.advice
    assert "x.float()" not in found.advice


class Cubed(torch.autograd.Function):
    """Its backward has a large number that no loss scale makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.full((), 60.0, dtype=torch.float16))
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (n,) = ctx.saved_tensors
        return grads[0] + grads[0] / n**3


def test_a_large_number_in_a_backward_that_the_loss_scale_does_not_make() -> None:
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                y = Cubed.apply(model(X))  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(y.float(), Y)).backward()
            scaler.step(optimizer)
            scaler.update()
    (found,) = watch.report.findings
    assert found.cause == "absorbed range"
    assert "216000 in FP64; float16 ends at 65504" in found.what
    assert "scale" not in found.what
    assert "smaller" not in found.advice


def test_weights_in_float32_that_stand_still_by_rounded_gradients_are_no_finding() -> None:
    """Second differences in bfloat16: gradients are wrong, and of the wrong size."""
    torch.manual_seed(0)
    u = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x, h = torch.rand(128, 1), 1e-2
    with amp.watch(at=[1, 2]) as watch:
        optimizer = torch.optim.Adam(u.parameters(), 1e-3)
        for _ in steps(optimizer):
            with torch.autocast("cpu", BF16):
                second = (u(x + h) - 2 * u(x) + u(x - h)) / h**2
                loss = (second + u(x)).square().mean()
            loss.backward()
    assert named(watch, "rounding")
    assert not named(watch, "still")


@pytest.mark.parametrize("rate", [5.0, 1e-3])
def test_a_loss_that_grows_is_said_beside_what_it_makes_too_large(rate: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    with amp.watch(at=[1, 20]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for _ in steps(optimizer, 21):
            (model(X) - 3).square().mean().backward()
    findings = watch.report.findings
    assert bool(findings) is (rate == 5.0)
    if findings:
        assert "The loss has grown from" in findings[0].advice
        assert "take a smaller learning rate. Else:\n" in findings[0].advice
        assert sum("has grown" in x.advice for x in findings) == 1
        assert "21 steps, weights became inf or NaN" in watch.about


def test_statistics_that_overflow_in_float16_need_no_word_of_amp() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).half()
    with amp.watch(at=[3]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        for _ in steps(optimizer, 4):
            F.cross_entropy(model((X * 900).half()).float(), Y).backward()
    found = named(watch, "weights")[0]
    assert "1.running_var is not finite" in found.what
    assert "--at 1,2,3" in found.advice
    assert "protect_buffers" not in found.advice


@pytest.mark.parametrize("op", [torch.matmul, torch.mul], ids=lambda op: op.__name__)
def test_only_of_what_autocast_casts_back_the_cure_leaves_autocast(op: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with torch.autocast("cpu", torch.float16):
            y = model(100 * torch.ones(16, 16))
            z = op(5 * y, 5 * y)
        z.float().mean().backward()
        optimizer.step()
    (found,) = named(watch, "range")
    assert found.op.endswith(op.__name__)
    assert ("enabled=False" in found.advice) == (op is torch.matmul)


@pytest.mark.parametrize("op", [torch.matmul, torch.mul], ids=lambda op: op.__name__)
def test_only_of_what_o1_casts_the_cure_disables_casts(op: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with amp.Session("O1", verbosity=0, loss_scale=1.0) as session:
        model, optimizer = session.initialize(model, optimizer)
        with amp.diagnose(model, optimizer) as report:
            y = model(100 * torch.ones(16, 16))
            z = op(5 * y.half(), 5 * y.half())
            with session.scale_loss(z.float().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
    found = report.findings[0]
    assert found.cause == "range"
    assert found.op.endswith(op.__name__)
    assert ("disable_casts" in found.advice) == (op is torch.matmul)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda y: torch.softmax(200 * y, -1)[:, 0].log(), "log_softmax"),
        (lambda y: (1 - torch.sigmoid(100 * y)).log(), "logsigmoid"),
        (lambda y: (1e-4 * y).exp() - 1, "expm1"),
        (lambda y: (1 + 1e-4 * y.abs()).log(), "log1p"),
        (lambda y: (1e-4 * y).float().exp() - 1, None),
    ],
    ids=["softmax", "sigmoid", "exp", "log", "float32"],
)
def test_what_one_call_computes_is_advised(of: Any, said: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8).bfloat16()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        y = model(4 * torch.randn(32, 16).bfloat16())
        of(y).float().abs().mean().backward()
        optimizer.step()
    advice = [x.advice for x in watch.report.findings if x.cause != "still"]
    assert [str(said) in x for x in advice[:1]] == ([True] if said else [])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_rounding_before_tensors_are_joined_is_found(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    x, counts = torch.randn(500, 8), torch.randint(0, 4, (500,))
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            total = counts.to(dtype).cumsum(0)
            summed_at = here(1)
            share = torch.cat([total[:1].float(), total.float()]).diff() / 3
            F.binary_cross_entropy_with_logits(model(x)[:, 0], share).backward()
    found = [x for x in watch.report.findings if x.cause == "cast"]
    assert [x.line for x in found] == ([summed_at] if dtype is BF16 else [])


@pytest.mark.parametrize("kind", ["average", "copy of masters"])
def test_a_copy_in_16_bits_stands_still_unless_a_wider_one_is_kept(kind: str) -> None:
    model, masters = net(), net()
    small = net().bfloat16()
    with amp.watch(at=[2]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        for _ in steps(optimizer):
            F.cross_entropy(model(X), Y).backward()
            with torch.no_grad():
                for x, master, p in zip(
                    small.parameters(), masters.parameters(), model.parameters(), strict=True
                ):
                    master.lerp_(p, 1e-3)
                    x.copy_(0.999 * x + 0.001 * p if kind == "average" else master)
    found = [x for x in named(watch, "still") if x.gives == "bfloat16"]
    assert bool(found) == (kind == "average")
    assert all("averages" in x.what and "x.copy_" in line_of(x) for x in found)


def line_of(finding: Finding) -> str:
    return linecache.getline(finding.file, finding.line)


@pytest.mark.parametrize("mean", [True, False])
def test_a_loss_of_what_a_mask_has_set_to_minus_infinity(mean: bool) -> None:
    """As of label smoothing over a padded vocabulary; the gradients are finite."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            y = model(X).log_softmax(-1)
            y = torch.cat([y, torch.full((64, 2), -torch.inf)], 1)
            chosen = y.mean(-1) if mean else y.gather(-1, Y[:, None])
            taken_at = here(1)
            (-chosen.mean()).backward()
    found = [(x.cause, x.line) for x in watch.report.findings]
    assert found == ([("mathematics", taken_at)] if mean else [])


def test_one_call_for_two_ops_is_not_advised_for_a_sum_of_several() -> None:
    """The logarithm of a mixture is no log_softmax of its weights."""
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer):
            y = model(X)
            density = y.softmax(-1) * torch.exp(-10 * (y - 5).square())
            (-density.sum(-1).log().mean()).backward()
    (found,) = named(watch, "underflow")
    assert "log_softmax, which" not in found.advice
    assert "logsumexp" in found.advice


LOSING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "det": (lambda y: torch.det(torch.eye(12) * 1e-4 * y.mean().exp()).log(), "torch.linalg.slogdet"),
    "time": (
        lambda y: (1.7e9 + torch.arange(64.0).double()).float().diff().mean() * y.mean(),
        "float64",
    ),
}


@pytest.mark.parametrize("of", LOSING)
def test_what_float32_loses_has_a_cure_of_its_own(of: str) -> None:
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer, 1):
            LOSING[of][0](model(X)).backward()
    assert LOSING[of][1] in watch.report.findings[0].advice


class Scaled(nn.Module):
    """Has its eps as a buffer, or writes the square of one."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.net, self.is_buffer = net(), is_buffer
        if is_buffer:
            self.register_buffer("eps", torch.tensor(1e-8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x) * 0
        return y / (y.square() + (self.get_buffer("eps") if self.is_buffer else 1e-6**2)).sqrt()


@pytest.mark.parametrize(
    ("is_buffer", "said"), [(True, "Make it a Python number"), (False, "Take at least 6.1e-05 in the")]
)
def test_an_eps_that_is_0_in_float16(is_buffer: bool, said: str) -> None:
    with amp.watch(at=[1]) as watch:
        model = Scaled(is_buffer).half()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in steps(optimizer, 1):
            F.cross_entropy(model(X.half()).float(), Y).backward()
    assert said in watch.report.findings[0].advice
    assert is_buffer or "in the place of 1e-12" in watch.report.findings[0].advice


EPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda y: y / (y.norm(dim=-1, keepdim=True) + torch.tensor(1e-8)),
    "cast tensor": lambda y: y / (y.norm(dim=-1, keepdim=True) + torch.full((1,), 1e-8).half()),
    "cast sum": lambda y: y / (y.norm(dim=-1, keepdim=True).float() + 1e-8).half(),
    "maximum": lambda y: y / torch.maximum(y.norm(dim=-1, keepdim=True), torch.tensor(1e-8)),
}


@pytest.mark.parametrize("of", EPS)
def test_an_eps_is_one_however_it_is_written(of: str) -> None:
    model = net().half()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in steps(optimizer, 1):
            F.cross_entropy(EPS[of](model(X.half()) * 0).float(), Y).backward()
    found = watch.report.findings[0]
    assert (found.cause, found.what.partition(" (")[0]) == ("eps", "1e-08 is 0 in float16")


def test_the_eps_of_an_optimizer_that_steps_all_weights_at_once() -> None:
    model = net().half()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=True)
        for _ in steps(optimizer, 1):
            (F.cross_entropy(model(X.half()).float(), Y) * 1e-3).backward()
    found = watch.report.findings[0]
    assert (found.cause, found.phase) == ("eps", "step")
    assert "1e-08 is 0 in float16" in found.what


def test_the_numbers_of_a_finding_are_of_the_element_that_matters() -> None:
    model = net()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in steps(optimizer, 1):
            small = torch.tensor([1e-9, 2e-8]).half() + torch.tensor([1.0, 0.0]).half()
            (model(X).mean() * small.log().mean()).backward()
    assert "2e-08 became 0 in float16" in watch.report.findings[0].what


def test_a_number_that_nothing_depends_on_may_be_too_large() -> None:
    """`padding_idx` drops the gradient of the first token."""
    table, head = nn.Embedding(8, 16, padding_idx=0), nn.Linear(16, 4)
    tokens = Y + 1
    tokens[::4] = 0
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for _ in range(2):
            optimizer.zero_grad()
            x = table(tokens)
            padded = (x.half().sum(1).float() * (tokens == 0) * 3).sum()
            scaler.scale(F.cross_entropy(head(x), Y) + padded).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watch.report.is_healthy, str(watch.report)


@pytest.mark.parametrize("seed", [2, 3])
def test_a_loss_and_the_gradient_of_one_bias_that_are_0_by_chance_may_be_off(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    slopes = torch.randn(64, 1)
    slopes += 1e-4 - slopes.mean()
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in steps(optimizer, 1):
            with torch.autocast("cpu", BF16):
                y = model(X)
            (y.float() * slopes).mean().backward()
    assert watch.report.is_healthy, str(watch.report)


@pytest.mark.parametrize("distance", [0.02, 0.2])
def test_slopes_that_change_sides_in_a_backward_are_no_finding(distance: float) -> None:
    """A discriminator's gradient is what is left of those of real and of made examples."""
    torch.manual_seed(2)
    layers = [nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    made = X + distance * torch.randn_like(X)
    with amp.watch(at=[1]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in steps(optimizer, 1):
            with torch.autocast("cpu", BF16):
                real, other = model(X).float(), model(made).float()
            (F.softplus(-real).mean() + F.softplus(other).mean()).backward()
    assert watch.report.is_healthy, str(watch.report)


def test_moments_of_what_has_converged_stand_still() -> None:
    """New squares are small beside the mean of the old ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with amp.watch(at=[20]) as watch:
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in steps(optimizer, 21):
            F.cross_entropy(model(X[:8]), Y[:8]).backward()
    assert watch.report.is_healthy, str(watch.report)


def test_half_of_the_weights_in_float32_may_stand_still_where_gradients_are_small() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    with amp.watch(at=[4]) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in steps(optimizer, 5):
            model(torch.ones(3, 64)).softmax(1).square().mean().backward()
    assert watch.report.is_healthy, str(watch.report)
