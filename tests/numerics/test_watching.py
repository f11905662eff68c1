"""A live model's numbers, counted by their exponents: against counting them one by one."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp
from amp.numerics import Crisis, Histogram, crises, gradient_survival, watch
from amp.optimizers import FusedAdam


def counted(*tensors: Tensor) -> dict[int, int]:
    values = torch.cat([t.detach().flatten() for t in tensors]).tolist()
    return dict(sorted(Counter(math.frexp(v)[1] - 1 for v in values if v and math.isfinite(v)).items()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.second = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.second(self.act(self.first(x)))}


def test_every_number_is_counted_once() -> None:
    model = Net()
    with watch(model) as seen:
        for seed in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
            model.zero_grad()
            model(x)["logits"].square().sum().backward()
            if seed == 0:
                first = [p.grad.clone() for p in model.first.parameters() if p.grad is not None]
    with torch.no_grad():
        model(x)  # not looked at any more
    report = seen.report()
    assert report.steps == 2
    assert set(report.layers) == {"first", "act", "second"}
    second = [p.grad for p in model.first.parameters() if p.grad is not None]
    assert report.layers["first"].weight_gradients.counts == counted(*first, *second)
    x2 = [torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    hidden = [model.first(x).relu() for x in x2]
    assert report.layers["act"].activations.counts == counted(*hidden)
    assert report.layers["act"].activations.zeros == sum(int((h == 0).sum()) for h in hidden)
    outputs = [model.second(h) for h in hidden]
    assert report.layers["second"].activation_gradients.counts == counted(*(2 * o for o in outputs))
    assert report.gradients.total == 2 * (5 * (8 + 8 + 2) + 40 + 18)


def test_the_loss_scale_is_taken_out_and_bad_numbers_are_counted() -> None:
    reports = []
    for level, optimizer_class in (("O0", torch.optim.SGD), ("O2", FusedAdam), ("O1", torch.optim.SGD)):
        model = Net()
        optimizer = optimizer_class(model.parameters(), lr=0.0)
        scale: Any = 1.0 if level == "O0" else {"init": 2**10}
        with amp.Session(level, loss_scale=scale, verbosity=0) as session:
            session.initialize(model, optimizer)
            with watch(model, optimizer=optimizer) as seen:
                for bad in (1.0, math.inf):
                    optimizer.zero_grad()
                    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
                    loss = model(x)["logits"].float().square().sum() * bad
                    with session.scale_loss(loss, optimizer) as scaled_loss:
                        scaled_loss.backward()
                    optimizer.step()
            reports.append(seen.report())
    exact, *others = [report.layers["second"].weight_gradients for report in reports]
    assert exact.not_finite > 0
    for other in others:
        assert other.not_finite == exact.not_finite
        moved = sum(abs(exact.counts.get(e, 0) - other.counts.get(e, 0)) for e in range(-149, 128))
        assert moved <= 4  # rounding may take a number over a power of 2


def test_only_every_so_many_forwards() -> None:
    model = Net()
    with watch(model, every=3) as seen:
        for _ in range(7):
            model(torch.ones(1, 4))["logits"].sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 4))
    assert seen.report().steps == 3
    assert seen.report().layers["second"].activations.total == 3 * 2
    seen.close()
    assert not model._forward_pre_hooks
    assert not model.first._forward_hooks


def test_forwards_in_between_tied_weights_and_containers() -> None:
    class Output(NamedTuple):
        logits: Tensor
        extra: Any

    @dataclass
    class Outputs:
        logits: Tensor

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.table = nn.Embedding(5, 4, sparse=True)

        def forward(self, x: Tensor) -> Outputs:
            return Outputs(Output(self.head(self.embed(x) + self.table(x)), None).logits)

    model = Tied()
    x = torch.tensor([0, 1, 4])
    with watch(model, every=2) as seen:
        for _ in range(2):  # two forwards for each backward; the first of each is looked at
            first = model(x).logits
            second = model(x).logits
            with torch.no_grad():
                model(x)
            (first.sum() + second.sum()).backward()
    report = seen.report()
    assert report.steps == 2
    assert report.layers["embed"].weight_gradients.total == 2 * 40
    assert report.layers["head"].weight_gradients.total == 0
    assert report.layers["table"].weight_gradients.total == 2 * 3 * 4
    assert report.layers["head"].activations.total == 2 * 30


def test_accumulated_gradients_are_counted_as_they_come() -> None:
    model = nn.Linear(4, 4, bias=False)
    with watch(model) as seen:
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
    assert seen.report().layers[""].weight_gradients.counts == {0: 64}


def test_layers_whose_forward_is_not_called_have_gradients_all_the_same() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    with watch(model) as seen:
        model(x, x, x)[0].sum().backward()
    count = sum(p.numel() for p in model.parameters())
    assert sum(layer.weight_gradients.total for layer in seen.report().layers.values()) == count


def test_looking_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp.kernels.update_scale.is_on_host", lambda tensor: False)

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            assert name not in ("_local_scalar_dense", "nonzero", "bincount", "equal"), name
            return func(*args, **(kwargs or {}))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.Session("O2", verbosity=0) as session:
        session.initialize(model, optimizer)
        with watch(model, optimizer=optimizer), Waits():
            loss = model(torch.ones(2, 4))["logits"].float().sum()
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()


def test_survival_from_exponents_is_near_that_of_the_numbers() -> None:
    model = nn.Linear(64, 64, bias=False)
    grads = torch.randn(64, 64) * 1e-6
    with watch(model) as seen:
        (model(torch.eye(64)) * grads.T).sum().backward()
    report = seen.report()
    whole = report.layers[""].weight_gradients
    assert whole.counts == counted(grads)
    found = Histogram(whole.counts, 0, 0)
    exact = gradient_survival(grads, [1.0, 2.0**14])
    from amp.numerics import describe

    for i, scale in enumerate((1.0, 2.0**14)):
        zero, subnormal, overflow = found.fates(describe("float16"), scale)
        assert zero / 4096 == pytest.approx(exact.formats["float16"].zero[i], abs=0.01)
        assert subnormal / 4096 == pytest.approx(exact.formats["float16"].subnormal[i], abs=0.02)
        assert overflow == 0
    assert report.survival().formats["float16"].recommended is not None


def test_a_report_is_printed() -> None:
    model = Net()
    with watch(model) as seen:
        (model(torch.ones(2, 4))["logits"].sum() * 1e-9).backward()
    report = seen.report()
    lines = [line.split() for line in report.describe("float16").splitlines()]
    assert [line[:2] for line in lines[1:4]] == [
        *(["first", "activation"], ["first", "weight"], ["act", "activation"])
    ]
    assert lines[1][4] == "100.00%"
    scaled = [line.split() for line in report.describe("float16", scale=2.0**24).splitlines()]
    assert scaled[1][4] == "0.00%"


def test_what_watch_refuses() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="needs a torch.nn.Module, and got int"):
        watch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=0 must be an integer of at least 1"):
        watch(model, every=0)
    with pytest.raises(ValueError, match="this SGD did not come out of amp.initialize"):
        watch(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


@pytest.fixture(scope="module")
def found() -> dict[str, Crisis]:
    return {crisis.name: crisis for crisis in crises()}


def test_the_three_crises_and_their_cures(found: dict[str, Crisis]) -> None:
    assert found["underflow"].broken == 0.0
    assert found["underflow"].cured == pytest.approx(1e-8, rel=2e-3)
    assert found["overflow"].broken == math.inf
    assert found["overflow"].cured == pytest.approx(math.exp(12), rel=1e-6)
    assert found["vanishing update"].broken == 1.0
    assert found["vanishing update"].cured == pytest.approx(0.9, abs=1e-3)
    assert torch.ones(1).half().exp().dtype is torch.float16  # torch is as it was
    with amp.Session("O1", verbosity=0) as session, torch.inference_mode():
        session.initialize(None)
        assert [c[:4] for c in crises()] == [c[:4] for c in found.values()]


@pytest.mark.parametrize("name", ["underflow", "overflow", "vanishing update"])
def test_the_lines_of_a_crisis_give_what_they_say(name: str, found: dict[str, Crisis]) -> None:
    """An expression is the number after its `#`; a statement leaves `w` there."""
    there: dict[str, Any] = {"torch": torch, "amp": amp, "model": nn.Linear(1, 1)}
    compared = 0
    for line in found[name].code.splitlines():
        code, _, comment = line.partition("#")
        try:
            there["result"] = eval(code, there)
        except SyntaxError:
            exec(code, there)
            there["result"] = there["w"]
        if said := re.search(r"inf|\d[\d.e-]*", comment):
            assert float(there["result"]) == pytest.approx(float(said[0]), rel=1e-4)
            compared += 1
    assert compared == 2
