"""Optimizer steps against torch.optim in FP64, on every backend at hand; see test_operations.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp.kernels import cpu_loop, stepping
from amp.kernels.adam import ADAM, ADAMW
from amp.kernels.lamb import LAMB
from amp.kernels.language import INTERPRETED
from amp.kernels.lion import LION
from amp.kernels.master_copy import merge
from amp.kernels.novograd import NOVOGRAD
from amp.kernels.rule import Origin, UpdateRule
from amp.kernels.sgd import MOMENTUM_SGD, SGD
from amp.kernels.split import Kind, join, low_dtype, split
from amp.kernels.stepping import step
from tests.covering import covering
from tests.kernels.formulas import CASES, Case, made
from tests.kernels.numbers_of import numbers_of
from tests.kernels.operations import scalar

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LR = 1e-2
EPS = {dtype: torch.finfo(dtype).eps for dtype in (F16, BF16)}
SHAPES = ((), (0,), (7,), (33, 65), (2048 + 9,))
STEPS = 4 if INTERPRETED else 100


def adam(**changes: Any) -> Any:
    return numbers_of(ADAM, **changes)


class Tensors:
    """What a step works on."""

    def __init__(self, device: torch.device, rule: UpdateRule, dtype: torch.dtype = F32) -> None:
        torch.manual_seed(0)
        self.rule = rule
        self.params = [torch.randn(shape, device=device).to(dtype) for shape in SHAPES]
        self.moments = [[torch.zeros_like(p) for p in self.params] for _ in rule.moments]
        self.steps = [torch.zeros((), device=device) for _ in self.params]

    def grads(self, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
        return [(torch.randn_like(p, dtype=F32) * scale).to(dtype) for p in self.params]

    def step(self, numbers: Any, grads: list[Tensor], **options: Any) -> None:
        step(self.rule, numbers, self.params, grads, self.moments, self.steps, **options)

    def counts(self) -> list[float]:
        return [float(t) for t in self.steps]

    def copies(self) -> list[Tensor]:
        moments = [tensor for moment in self.moments for tensor in moment]
        return [tensor.clone() for tensor in (*self.params, *moments, *self.steps)]


class Exact:
    """Steps by a formula in FP64; NovoGrad's norms are given."""

    def __init__(self, case: Case, group: dict[str, Any], params: list[Tensor]) -> None:
        self.case, self.group, self.t = case, group, 0
        self.params = [p.double() for p in params]
        self.moments = [[torch.zeros_like(p) for _ in case.rule.moments] for p in self.params]
        self.norms = torch.arange(1, len(params) + 1, device=params[0].device) / 3

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        for i, g in enumerate(grads):
            norm = (lambda _, i=i: self.norms[i]) if self.case.rule is NOVOGRAD else Tensor.norm
            g = -g if self.group.get("maximize") else g
            state = self.params[i], g, *self.moments[i]
            self.params[i], *self.moments[i] = self.case.formula(self.group, self.t, norm, *state)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.torchs])
def test_the_formulas_are_torchs(name: str) -> None:
    case = CASES[name]
    group, starts = case.group(), Tensors(torch.device("cpu"), case.rule, F64)
    params = [nn.Parameter(p.clone()) for p in starts.params]
    optimizer = made(case.torchs, params, group)
    exact = Exact(case, group, starts.params)
    for _ in range(20):
        grads = starts.grads(F64)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        exact.step(grads)
    for p, e in zip(params, exact.params, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "half"), covering(CASES, [None, F16, BF16], strength=1))
def test_many_steps_stay_beside_fp64(device: torch.device, name: str, half: torch.dtype | None) -> None:
    """With scaled 16-bit gradients and 16-bit weights to write, and without both."""
    case, scale = CASES[name], 1.0 if half is None else 64.0
    group, tensors = case.group(), Tensors(device, case.rule)
    exact = Exact(case, group, tensors.params)
    models = None if half is None else [torch.empty_like(p, dtype=half) for p in tensors.params]
    options: dict[str, Any] = {"maximize": "maximize" in group, "models": models}
    options["inv_scale"] = None if half is None else scalar(device, 1 / scale)
    options["of_tensor"] = exact.norms if case.rule is NOVOGRAD else None
    for _ in range(STEPS):
        grads = tensors.grads(half or F32, scale)
        tensors.step(case.rule.numbers(group), grads, **options)
        exact.step([g.double() / scale for g in grads])
    apart = 0
    for p, e in zip(tensors.params, exact.params, strict=True):
        difference = (p.double() - e).abs()
        apart += int((difference > 1e-4 * e.abs() + 1e-4 * LR * STEPS).sum())
        assert (difference <= 5 * LR).all()
    assert apart <= (3 if name == "lion" else 0)  # a sign near 0 is that of a rounding error
    for p, m in zip(tensors.params, models or [], strict=False):
        assert torch.equal(p.to(m.dtype), m)
    assert tensors.counts() == [STEPS * (p.numel() > 0) for p in tensors.params]


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_parameters_of_other_dtypes_are_computed_in_fp32_or_fp64(
    device: torch.device, dtype: torch.dtype
) -> None:
    tensors = Tensors(device, ADAM, dtype)
    before = [p.to(F64, copy=True) for p in tensors.params]
    grads = tensors.grads(dtype)
    tensors.step(adam(weight_decay=0.0), grads)
    for p, b, g in zip(tensors.params, before, grads, strict=True):
        exact = b - LR * g.double() / (g.double().abs() + 1e-8)
        torch.testing.assert_close(p.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_a_skipped_step_writes_nothing_and_does_not_count(device: torch.device) -> None:
    tensors = Tensors(device, ADAM)
    models = [torch.zeros_like(p, dtype=F16) for p in tensors.params]
    grads = tensors.grads(F32)
    tensors.step(adam(), grads, found_inf=scalar(device, 0))
    before = tensors.copies()
    bad = [torch.full_like(g, torch.inf) for g in grads]
    tensors.step(adam(), bad, found_inf=scalar(device, 1), models=models)
    assert all(map(torch.equal, tensors.copies(), before))
    assert not any(m.any() for m in models)
    tensors.step(adam(), grads, found_inf=scalar(device, 0))
    assert tensors.counts() == [2 * (p.numel() > 0) for p in tensors.params]


def test_scale_and_clip_multiply_the_gradients_and_leave_them_alone(device: torch.device) -> None:
    plain, scaled = Tensors(device, ADAM), Tensors(device, ADAM)
    grads = plain.grads(F32)
    larger = [g * 8 for g in grads]
    copies = [g.clone() for g in larger]
    numbers = adam(decoupled_weight_decay=False)  # whose weight decay is not scaled
    plain.step(numbers, grads)
    scaled.step(numbers, larger, inv_scale=scalar(device, 1 / 4), clip=scalar(device, 1 / 2))
    assert all(map(torch.equal, plain.params, scaled.params))
    assert all(map(torch.equal, larger, copies))


def test_each_tensor_counts_its_own_steps(device: torch.device) -> None:
    """Bias correction goes by it: one that comes late starts at its own first step."""
    late, fresh = Tensors(device, ADAM), Tensors(device, ADAM)
    late.steps[3].fill_(1e6)  # no correction left
    grads = late.grads(F32)
    late.step(adam(weight_decay=0.0), grads)
    fresh.step(adam(weight_decay=0.0), grads)
    assert torch.equal(late.params[4], fresh.params[4])
    assert not torch.allclose(late.params[3], fresh.params[3], atol=LR / 10)
    assert float(late.steps[3]) == 1e6 + 1


def test_numbers_may_be_tensors(device: torch.device) -> None:
    plain, tensors = Tensors(device, ADAM), Tensors(device, ADAM)
    grads = plain.grads(F32)
    plain.step(adam(), grads)
    tensors.step(adam(lr=torch.tensor(LR, device=device)), grads)
    assert all(map(torch.equal, plain.params, tensors.params))


@pytest.mark.parametrize(
    ("name", "dtype"), covering(["adamw", "lamb", "momentum"], [F16, BF16], strength=1)
)
def test_masters_in_two_halves_step_as_whole_ones_do(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """Bit for bit: a half and its low bits are the master."""
    rule = CASES[name].rule
    numbers = rule.numbers(CASES[name].group())
    whole, halves = Tensors(device, rule), Tensors(device, rule)
    masters, halves.params = halves.params, [torch.empty_like(p, dtype=dtype) for p in halves.params]
    lows = [torch.empty_like(p, dtype=torch.int16) for p in halves.params]
    split(masters, halves.params, lows)
    join(halves.params, lows, whole.params)  # without what float16 cannot hold
    for _ in range(STEPS):
        grads = [g.clamp(-1, 1) for g in whole.grads(dtype)]
        whole.step(numbers, grads)
        if dtype is F16:  # which cannot hold the smallest numbers to every bit
            other = [torch.empty_like(p, dtype=F16) for p in whole.params]
            more = list(map(torch.empty_like, lows))
            split(whole.params, other, more)
            join(other, more, whole.params)
        halves.step(numbers, grads, lows=lows)
    join(halves.params, lows, masters)
    assert all(map(torch.equal, masters, whole.params))
    assert all(map(torch.equal, halves.moments[0], whole.moments[0]))
    before = [t.clone() for t in (*halves.copies(), *lows)]
    halves.step(numbers, grads, lows=lows, found_inf=scalar(device, 1))
    assert all(map(torch.equal, before, [*halves.copies(), *lows]))


@pytest.mark.parametrize("kind", ["split16", "kahan"])
def test_small_steps_are_not_lost(device: torch.device, kind: Kind) -> None:
    """Of a size that bfloat16 alone would round away every time."""
    tensors = Tensors(device, SGD, BF16)
    tensors.params = [torch.ones(300, device=device, dtype=BF16)]
    tensors.moments, tensors.steps = [], tensors.steps[:1]
    lows = [torch.zeros(300, device=device, dtype=low_dtype(kind, BF16))]
    for _ in range(STEPS):
        tensors.step(
            numbers_of(SGD, momentum=0.0, weight_decay=0.0),
            [torch.full((300,), 1e-2, device=device)],
            lows=lows,
        )
    master = torch.empty(300, device=device)
    join(tensors.params, lows, [master])
    tolerance = 1e-5 if kind == "split16" else 1e-3  # 16 bits, rounded in each step
    expected = torch.full_like(master, 1 - STEPS * 1e-4)
    torch.testing.assert_close(master, expected, rtol=tolerance, atol=0)


def rounded(
    device: torch.device,
    seeds: Sequence[int],
    sizes: Sequence[int],
    *,
    value: float = 1.0,
    factor: float = 0.9995,
    steps: int = 1,
) -> list[Tensor]:
    """Return moments, bfloat16, after steps along gradients of 0, each of which multiplies them."""
    tensors = Tensors(device, LION)
    tensors.params = [torch.zeros(size, device=device) for size in sizes]
    tensors.steps = tensors.steps[: len(sizes)]
    tensors.moments = [[torch.full_like(p, value, dtype=BF16) for p in tensors.params]]
    numbers = numbers_of(LION, betas=(0.9, factor), weight_decay=0.0)
    grads = list(map(torch.zeros_like, tensors.params))
    for _ in range(steps):
        tensors.step(numbers, grads, origins=list(map(Origin, seeds)) or None)
    return tensors.moments[0]


def test_stochastic_rounding_is_right_on_average_and_the_same_again(device: torch.device) -> None:
    """A mean that moves by far less than half a unit of bfloat16 a step still arrives."""
    n = 4096

    def run(*seeds: int) -> Tensor:
        return rounded(device, seeds, [n], steps=4)[0].float()

    exact = 0.9995**4
    assert bool((run() == 1.0).all())
    one, other = run(7), run(8)
    assert torch.equal(one, run(7))
    assert not torch.equal(one, other)
    for moments in (one, other):
        assert set(moments.tolist()) <= {1 - i * 2.0**-8 for i in range(5)}
        deviation = float(moments.std()) / n**0.5
        assert deviation > 0
        assert abs(float(moments.mean()) - exact) < 5 * deviation


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0, 3.38e38])
def test_stochastic_rounding_of_what_has_no_neighbours(device: torch.device, value: float) -> None:
    (moment,) = rounded(device, [1], [64], value=value, factor=1 - 2.0**-30)
    expected = torch.full_like(moment, value)
    torch.testing.assert_close(moment, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_goes_by_a_tensors_own_seed(device: torch.device) -> None:
    """Not by what else is stepped with it, in whatever order and of whatever size."""
    sizes = (100, 70_000, 300)

    def run(*of: int) -> dict[int, Tensor]:
        found = rounded(device, [5 + i for i in of], [sizes[i] for i in of])
        return dict(zip(of, found, strict=True))

    together = run(0, 1, 2)
    assert not torch.equal(together[0][:100], together[2][:100])
    for some in ((2, 1, 0), (1,), (0, 2)):
        for i, moment in run(*some).items():
            assert torch.equal(moment, together[i])


def test_lists_that_do_not_match_are_refused(device: torch.device) -> None:
    tensors = Tensors(device, ADAM)
    before = tensors.copies()
    grads = tensors.grads(F32)
    with pytest.raises(ValueError, match="tensors 3 have shapes"):
        tensors.step(adam(), [*grads[:3], grads[3].T, grads[4]])
    with pytest.raises(TypeError, match="tensor 2 .* is torch.int64"):
        tensors.step(adam(), [*grads[:2], grads[2].long(), *grads[3:]])
    tensors.steps[1] = tensors.steps[1].double()
    with pytest.raises(ValueError, match="number 1 is torch.float64"):
        tensors.step(adam(), grads)
    tensors.steps[1] = tensors.steps[1].float()
    assert all(map(torch.equal, tensors.copies(), before))


NO_COUNTS = (
    torch.tensor(0),
    torch.tensor(0.0, dtype=F64),
    torch.zeros(2),
    torch.zeros((), device="meta"),
)


@pytest.mark.parametrize("count", NO_COUNTS)
def test_what_is_no_step_count_is_refused(device: torch.device, count: Tensor) -> None:
    """Before anything is written."""
    params = [torch.ones(3, device=device) for _ in range(2)]
    moments = [[torch.zeros_like(p) for p in params] for _ in ADAM.moments]
    steps = [torch.zeros((), device=device), count]
    with pytest.raises(
        ValueError, match=r"number 1 is .* it must be one float32 on the tensor's device"
    ):
        step(ADAM, adam(), params, [torch.ones_like(p) for p in params], moments, steps)
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)
    assert steps[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_shards_step_by_the_norms_of_whole_tensors(device: torch.device, dtype: torch.dtype) -> None:
    """Two halves, each told what both have, do what the whole does, and an empty one does no harm."""
    generator = torch.Generator().manual_seed(0)
    sizes = (63, 3000)
    param, grad = [
        [torch.randn(2 * n, generator=generator, dtype=dtype).to(device) for n in sizes]
        for _ in range(2)
    ]

    def run(params: list[Tensor], grads: list[Tensor], norms_of_all_ranks: Any = None) -> None:
        moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        steps = [torch.zeros((), device=device) for _ in params]
        step(
            *(LAMB, numbers_of(LAMB, eps=1e-6), params, grads, moments, steps),
            norms_of_all_ranks=norms_of_all_ranks,
        )
        assert [each.item() for each in steps] == [float(p.numel() > 0) for p in params]

    halves = [[[t.chunk(2)[i].clone() for t in ts] for ts in (param, grad)] for i in range(2)]
    halves.append([[t[:0].clone() for t in ts] for ts in (param, grad)])
    norms: list[Tensor] = []

    def note(own: Tensor) -> Tensor:
        norms.append(own.clone())
        return own

    for params, grads in halves:
        run([p.clone() for p in params], grads, note)
    total = torch.stack(norms).square().sum(0).sqrt()
    for params, grads in halves:
        run(params, grads, lambda own: total)
    run(param, grad)
    for i, whole in enumerate(param):
        together = torch.cat([params[i] for params, _ in halves])
        torch.testing.assert_close(together, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "weight", "low", "kept"),
    [
        (ADAMW, BF16, torch.int8, "packed"),
        (ADAMW, F16, torch.int8, BF16),
        (LION, F16, torch.int16, BF16),
        (MOMENTUM_SGD, BF16, torch.int16, BF16),
    ],
    ids=["adamw, packed", "adamw", "lion", "sgd"],
)
@pytest.mark.parametrize("first", [0, 2**24 - 2, 2**26])
def test_all_backends_give_the_same_bits(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    rule: UpdateRule,
    weight: Any,
    low: Any,
    kept: Any,
) -> None:
    """Triton in large programs, or on the CPU the loop in C++, and eager torch; with all shards."""
    monkeypatch.setattr(stepping, "parts_of", lambda *_: 4)
    numbers = numbers_of(rule, betas=(0.9, 0.99)) if rule is LION else numbers_of(rule)
    origins = [Origin(11), Origin(12, 2**32 - 40), Origin(13, 1000, 5, 17), Origin(14, 3)]
    shapes = ((7,), (33, 65), (20, 5), (3 * 2048 + 9,))
    found = []
    for backend, on in ((None, device), ("reference", torch.device("cpu"))):
        monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 0)
        generator = torch.Generator().manual_seed(3)
        params = [torch.randn(shape, generator=generator).to(on, weight) for shape in shapes]
        lows = low and [torch.zeros(shape, dtype=low, device=on) for shape in shapes]
        dtype, count = (torch.int16, 1) if kept == "packed" else (kept, len(rule.moments))
        moments = [[torch.zeros(x, dtype=dtype, device=on) for x in shapes] for _ in range(count)]
        steps = [torch.full((), float(first), device=on) for _ in shapes]
        for _ in range(5):
            grads = [torch.randn(shape, generator=generator).to(on, weight) for shape in shapes]
            options: dict[str, Any] = {"lows": lows, "origins": origins, "backend": backend}
            step(rule, numbers, params, grads, moments, steps, **options)
        kept_now = [*params, *(lows or ()), *(x for moment in moments for x in moment), *steps]
        found.append([tensor.cpu() for tensor in kept_now])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_each_step_has_random_bits_of_its_own_also_beyond_16_million(
    device: torch.device, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 cannot add 1 to 2^24; a moment that stands still would be rounded the same for good."""
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 0)
    n, start = 4096, 2.0**24 - 2
    params, grads = ([torch.full((n,), x, device=device, dtype=BF16)] for x in (0.0, 1.0))
    lows = [torch.zeros(n, device=device, dtype=torch.int16)]
    steps, counts, seen = [torch.full((), start, device=device)], [], set()
    for i in range(8):
        moments = [[torch.full((n,), 1.0, device=device, dtype=BF16)]]
        found_inf = torch.full((1,), float(i == 5), device=device)
        origins, numbers = [Origin(5)], numbers_of(MOMENTUM_SGD, lr=0.0, momentum=0.001)
        options: dict[str, Any] = {"origins": origins, "found_inf": found_inf, "lows": lows}
        options["backend"] = backend
        step(MOMENTUM_SGD, numbers, params, grads, moments, steps, **options)
        counts.append(float(steps[0]) - start)
        seen.add(tuple(moments[0][0].tolist()))
    assert counts == [1, 2, 4, 6, 8, 8, 10, 12]  # a skipped step does not count
    assert len(seen) == 8


RULES = {name: CASES[name].rule for name in ("adagrad", "adam", "lamb", "lion", "momentum", "novograd")}
WRITTEN = (2.5, -0.0, torch.nan, torch.inf, 2.0**-24, -1.0)


class Session:
    """Masters and the weights that they were written to, which other code then writes to."""

    def __init__(self, device: torch.device, rule: UpdateRule, dtype: torch.dtype) -> None:
        self.tensors, self.dtype = Tensors(device, rule), dtype
        self.models = [p.to(dtype) for p in self.tensors.params]
        self.numbers = numbers_of(rule, betas=(0.9, 0.99))
        norms = torch.arange(1.0, len(SHAPES) + 1, device=device)
        self.of_tensor = norms if rule is NOVOGRAD else None

    def write(self, values: Sequence[float], by_hand: bool) -> None:
        """Write to weights; by hand to their masters too."""
        for model, param in zip(self.models, self.tensors.params, strict=True):
            for at, value in enumerate(values):
                if model.numel() > 1:
                    model.view(-1)[7 * at % model.numel()] = value
                    if by_hand:
                        param.view(-1)[7 * at % model.numel()] = model.view(-1)[7 * at % model.numel()]

    def step(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.tensors.step(
            *(self.numbers, self.tensors.grads(self.dtype)),
            models=self.models,
            of_tensor=self.of_tensor,
            **options,
        )

    def copies(self) -> list[Tensor]:
        """Return what was stepped. One NaN is like another."""
        return [x.nan_to_num(7e7) for x in (*self.tensors.copies(), *self.models)]


@pytest.mark.parametrize(("name", "dtype"), covering([*RULES, "lamb, ranks"], [F16, BF16], strength=1))
def test_a_step_that_merges_steps_what_was_written_to_weights(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """Bit for bit as if the masters had been written by hand, also after steps that it skips."""
    options: dict[str, Any] = {"norms_of_all_ranks": torch.clone} if "ranks" in name else {}
    rule = RULES[name.removesuffix(", ranks")]
    merges, by_hand = Session(device, rule, dtype), Session(device, rule, dtype)
    for values in ((), WRITTEN[:2], (1.25,), WRITTEN, ()):
        merges.write(values, by_hand=False)
        by_hand.write(values, by_hand=True)
        before = merges.copies()
        merges.step(merges=True, found_inf=scalar(device, 1), **options)
        assert all(map(torch.equal, merges.copies(), before))
        merges.step(merges=True, found_inf=scalar(device, 0), **options)
        by_hand.step(**options)
        assert all(map(torch.equal, merges.copies(), by_hand.copies()))


def test_a_step_that_does_not_merge_steps_the_masters(device: torch.device) -> None:
    """And writes them to the weights, whatever these are."""
    one, other = Session(device, ADAM, F16), Session(device, ADAM, F16)
    one.write(WRITTEN, by_hand=False)
    one.step()
    other.step()
    assert all(map(torch.equal, one.copies(), other.copies()))


@pytest.mark.parametrize(("name", "dtype"), [("adam", F16), ("novograd", BF16)])
def test_all_backends_merge_alike(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Every pattern of a weight, over masters that it is near to and far from."""
    monkeypatch.setattr(cpu_loop, "WORTH_COMPILING", 0)
    model = torch.arange(2**16).to(torch.int16).view(dtype)
    noise = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    near = model.float() * (1 + 2.0**-12 * noise)
    grads = [noise.to(dtype)] * 3
    found = []
    for backend, on in ((None, device), ("reference", torch.device("cpu"))):
        params = [master.clone().to(on) for master in (near, near.roll(1), -near)]
        models = [model.clone().to(on) for _ in params]
        rule = RULES[name]
        moments = [[torch.zeros_like(p) for p in params] for _ in rule.moments]
        steps = [torch.zeros((), device=on) for _ in params]
        numbers = numbers_of(rule, betas=(0.9, 0.99))
        norms = torch.arange(1.0, 4, device=on) if rule is NOVOGRAD else None
        options: dict[str, Any] = {"models": models, "merges": True, "backend": backend}
        merge([m.clone() for m in models], by_hand := [p.clone() for p in params], backend=backend)
        step(
            rule, numbers, params, [g.to(on) for g in grads], moments, steps, of_tensor=norms, **options
        )
        written = [*by_hand, *params, *models, *(x for moment in moments for x in moment)]
        found.append([tensor.cpu().nan_to_num(7e7) for tensor in written])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("value", [1e-4, 0.0, -(2.0**-20)])
def test_a_weight_that_was_written_is_stepped_without_the_remainder_of_the_old_one(
    device: torch.device, value: float, dtype: torch.dtype
) -> None:
    """Which is a quarter of a unit of 1.0, and far more than the weight."""
    found = []
    for remainder in (EPS[dtype] / 4, 0.0):
        tensors = Tensors(device, ADAM, dtype)
        lows = [torch.full_like(p, remainder) for p in tensors.params]
        for weight in tensors.params:
            weight.fill_(value)
        tensors.step(adam(), tensors.grads(dtype), lows=lows)
        found.append([*tensors.copies(), *lows])
    assert all(map(torch.equal, *found))
