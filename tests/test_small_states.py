"""Seven bytes a parameter: packed moments and 24-bit masters train, save and load as FP32 ones do."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import amp
from amp.errors import AmpRuntimeError, AmpValueError
from amp.kernels import master_copy, plainstep, tensor_lists
from amp.kernels import stochastic_rounding as rounding
from amp.kernels.adam import ADAMW
from amp.kernels.rule import Origin
from amp.kernels.split import decode, encode, join_reference, split_reference
from amp.kernels.stepping import step
from amp.numerics.memory import footprint
from amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from amp.optimizers.state_dicts import pack_moments, unpack_moments
from tests.covering import covering
from tests.kernels.numbers_of import numbers_of
from tests.living import Living, tensors_in
from tests.models import Wrapper, started, step_on
from tests.states import assert_same, load, saved_of, through_a_file

SMALL: dict[str, Any] = {"master_weights": "split24", "state_dtype": "packed16"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ALL_WORDS = torch.arange(-(2**15), 2**15).short()


def build(level: str = "O5", cls: Any = FusedAdam, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))
    own: dict[str, Any] = {"momentum": 0.9} if cls is FusedSGD else {}
    chosen: dict[str, Any] = {**SMALL, "loss_scale": 8.0, **options}
    optimizer = cls(model.parameters(), lr=1e-2, **own)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **chosen)


def train(model: Any, optimizer: Any, steps: range, set_to_none: bool = True) -> None:
    for i in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        step_on(model(x).square().mean(), optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)


def all_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return model.state_dict() | {f"{i}.{k}": v for i, own in states.items() for k, v in own.items()}


# The formats.


def test_every_word_comes_back_from_bfloat16_and_from_float32() -> None:
    m, v = rounding.unpack(ALL_WORDS.int())
    code, ratio = ALL_WORDS.int() >> 7 & 511, ALL_WORDS.int() << 25 >> 25
    is_used = ((code > 0) & (ratio > -64)) | (ALL_WORDS == 0)
    assert int(is_used.sum()) == 64_898
    for dtype in (F32, BF16):
        back = rounding.pack(m.to(dtype).float(), v.to(dtype).float(), rounding.TO_NEAREST).short()
        assert torch.equal(back[is_used], ALL_WORDS[is_used])
    is_nan = (code > 0) & (ratio == -64)
    assert bool(m[is_nan].isnan().all())
    m, v = rounding.unpack(rounding.pack(m, v, rounding.TO_NEAREST)[is_nan])
    assert bool(m.isnan().all())
    assert bool((v == (1.75 * 2.0**23) ** 2).all())


@pytest.mark.parametrize(
    ("m", "v", "expected"),
    [
        (0.0, 0.0, (0.0, 0.0)),
        (0.0, 1e-45, (0.0, (1.0 * 2.0**-40) ** 2)),  # what is not 0 never becomes 0
        (1e19, torch.inf, (59.75 * 1.75 * 2.0**23, (1.75 * 2.0**23) ** 2)),
        (torch.nan, torch.nan, (torch.nan, (1.75 * 2.0**23) ** 2)),
        (100.0, 1.0, (59.75, 1.0)),
        (-3.0, 1.0, (-3.0, 1.0)),
    ],
)
def test_special_moments(m: float, v: float, expected: tuple[float, float]) -> None:
    words = rounding.pack(torch.tensor([m]), torch.tensor([v]), rounding.TO_NEAREST).short()
    found = [float(x) for x in rounding.unpack(words.int())]
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("exponent", [1, 2, 100, 127, 200, 254])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_masters_keep_eight_more_bits(dtype: torch.dtype, exponent: int) -> None:
    patterns = (torch.arange(0, 2**23, 19) + (exponent << 23)).int()
    for masters in (patterns.view(F32), (patterns | -(2**31)).view(F32)):
        weight, low = encode(masters, dtype, torch.int8)
        back = decode(weight, low)
        again = encode(back, dtype, torch.int8)
        assert torch.equal(again[0].view(torch.int16), weight.view(torch.int16))
        assert torch.equal(again[1], low)
        if dtype is BF16:
            off = (back.view(torch.int32).long() - masters.view(torch.int32).long()).abs()
            assert int(off.max()) <= 128
        elif exponent == 127:
            assert bool(((back - masters).abs() <= masters.abs() * 2.0**-18).all())


def test_all_halves_beside_float16_are_joined_and_parted_again() -> None:
    """Against the definition in FP64: float16's bits, with 8 more."""
    high = ALL_WORDS.view(F16)
    for i in range(-128, 128):
        low = torch.full_like(high, i, dtype=torch.int8)
        word = ((ALL_WORDS.int() & 0x7FFF) * 256 + i).clamp(min=0)
        exponent, fraction = (word >> 18).clamp(min=1), word & 0x3FFFF
        size = torch.ldexp((fraction + (word >> 18).clamp(max=1) * 2**18).double(), exponent - 33)
        size[word == 0x7C007F] = torch.inf
        size[word > 0x7C007F] = torch.nan
        joined = decode(high, low)
        torch.testing.assert_close(joined.double().abs(), size, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(joined.signbit(), high.signbit())
        again, rest = encode(joined, F16, torch.int8)
        is_same = (again.view(torch.int16) == ALL_WORDS) & (rest == low)
        is_zero, is_nan = (ALL_WORDS & 0x7FFF) == 0, joined.isnan()
        assert bool((is_same | (is_zero & (i < 0)) | (is_nan & again.isnan() & (rest == 0))).all())


def test_zeros_that_the_user_writes_stay_zeros() -> None:
    for dtype in (BF16, F16):
        weight = torch.tensor([0.0, -0.0], dtype=dtype)
        for low in (-100, 0):
            lows = torch.full((2,), low, dtype=torch.int8)
            assert torch.equal(decode(weight, lows).view(torch.int32), weight.float().view(torch.int32))


def test_rounding_has_the_right_mean() -> None:
    n = 400_000
    keys = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0)).int()
    m, v = torch.full((n,), 0.37), torch.full((n,), 1.7)
    ms, vs = rounding.unpack(rounding.pack(m, v, keys).int())
    assert abs(float(vs.sqrt().double().mean()) / 1.7**0.5 - 1) < 1e-3
    assert abs(float(ms.double().mean()) - 0.37) < 1e-3
    high, low = encode(torch.full((n,), 1.0001), BF16, torch.int8, keys)
    assert abs(float(decode(high, low).double().mean()) - 1.0001) < 0.01 * 2.0**-15


# Training.


def test_no_element_decides_on_the_step_of_its_neighbour() -> None:
    """The gradients of B have one size for 20 steps, then 0; those of A, beside it, are 1 or -1."""
    sizes = (1e-15, 1e-5, 1e-4, 1.5e-3, 4e-3, 1.0, 1e6)
    weights = [nn.Parameter(torch.zeros(2)) for _ in sizes]
    optimizer = FusedAdam(weights, lr=1.0, state_dtype="packed16")
    largest = torch.zeros(len(sizes))
    for i in range(400):
        for weight, b in zip(weights, sizes, strict=True):
            weight.grad = torch.tensor([float((-1) ** i), b if i < 20 else 0.0])
        before = torch.stack([weight.detach()[1] for weight in weights])
        optimizer.step()
        after = torch.stack([weight.detach()[1] for weight in weights])
        largest = torch.maximum(largest, (after - before).abs())
    assert bool((largest < 1.6).all()), largest
    assert bool((largest[1:] > 0.9).all()), largest  # of the first eps decides


def trained_alone(lr: float, steps: int, **options: Any) -> Tensor:
    """Return how far weights from 1.05 to 1.95 have gone, as parts of the way of FP32 ones."""
    start = torch.linspace(1.05, 1.95, 4096)
    layer = nn.Linear(1, 4096, bias=False)
    with torch.no_grad():
        layer.weight.copy_(start[:, None])
    model, optimizer = started(layer, lambda p: FusedSGD(p, lr=lr), "O5", **options)
    for _ in range(steps):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    return (start - model.state_dict()["weight"][:, 0]) / (lr * steps)


@pytest.mark.parametrize("lr", [1e-5, 1e-6])
def test_steps_that_are_far_too_small_arrive(lr: float) -> None:
    gone = trained_alone(lr, 400, master_weights="split24")
    assert float(gone.mean()) == pytest.approx(1.0, abs=5 * float(gone.std()) / 64 + 0.03)


def test_the_second_moment_falls_without_gradients() -> None:
    weights = nn.Parameter(torch.zeros(4096))
    optimizer = FusedAdam([weights], lr=0.0, state_dtype="packed16")
    weights.grad = torch.ones(4096)
    optimizer.step()
    weights.grad = torch.zeros(4096)
    for _ in range(300):
        optimizer.step()
    v = optimizer.state_dict()["state"][0]["exp_avg_sq"].float()
    assert float(v.mean()) == pytest.approx(1e-3 * 0.999**300, rel=0.08)


@pytest.mark.parametrize(
    ("level", "options"),
    [
        *(("O2", SMALL), ("O5", SMALL)),
        *(("O2", {"master_weights": "split24"}), ("O5", {"state_dtype": "packed16"})),
    ],
)
def test_weights_stay_beside_those_of_fp32_state(level: str, options: dict[str, Any]) -> None:
    whole: dict[str, Any] = {"master_weights": True, "state_dtype": None}
    ends = []
    for chosen in (whole, {**whole, **options}):
        model, optimizer = build(level, **chosen)
        start = {name: x.clone() for name, x in model.state_dict().items() if "weight" in name}
        train(model, optimizer, range(40))
        ends.append({name: model.state_dict()[name] for name in start})
    for name, exact in ends[0].items():
        off, way = (ends[1][name] - exact).norm(), (exact - start[name]).norm()
        assert float(off) < 0.25 * float(way), name


IN_BFLOAT16 = {"master_weights": None, "state_dtype": "bfloat16"}


RESUMED = (
    *((x, cls, {}) for x in ("O2", "O5") for cls in (FusedAdam, FusedSGD)),
    *(("O5", cls, {}) for cls in (FusedLAMB, FusedLion)),
    *((x, cls, IN_BFLOAT16) for x in ("O0", "O2", "O5") for cls in (FusedAdam, FusedSGD)),
    *(("O2", cls, IN_BFLOAT16) for cls in (FusedAdagrad, FusedLAMB, FusedLion, FusedNovoGrad)),
)


@pytest.mark.parametrize(
    ("level", "cls", "options", "set_to_none"),
    [
        (*case, is_none)
        for i, case in enumerate(RESUMED)
        for is_none in (True, False)
        if case[:2] == ("O2", FusedAdam) or is_none is bool(i % 3)
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    level: str, cls: Any, options: dict[str, Any], set_to_none: bool
) -> None:
    """However gradients are cleared."""
    model, optimizer = build(level, cls, **options)
    train(model, optimizer, range(4), set_to_none)
    saved = through_a_file(saved_of(model, optimizer))
    train(model, optimizer, range(4, 8), set_to_none)
    other, resumed = build(level, cls, **options)
    load(saved, other, resumed)
    train(other, resumed, range(4, 8), not set_to_none)
    assert_same(all_of(other, resumed), all_of(model, optimizer))


@pytest.mark.parametrize("masters", ["split24", True])
@pytest.mark.parametrize("reference", [False, True])
def test_a_resumed_run_of_channels_last_weights_goes_on_bit_for_bit(
    masters: Any, reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose elements are counted in the order of their memory, wherever loaded moments lie."""
    if reference:
        monkeypatch.setenv("AMP_KERNELS", "reference")

    def build_one() -> Any:
        torch.manual_seed(0)
        model: Any = nn.Conv2d(3, 8, 3, bias=False)
        model = model.to(memory_format=torch.channels_last)
        options: dict[str, Any] = {**SMALL, "master_weights": masters, "loss_scale": 1.0}
        return started(model, lambda p: FusedAdam(p, lr=1e-2), "O5", **options)

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            model.weight.grad = model.weight.detach() * 0.25
            optimizer.step()

    model, optimizer = build_one()
    steps(model, optimizer, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    steps(model, optimizer, 3)
    other, resumed = build_one()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    steps(other, resumed, 3)
    assert_same(all_of(other, resumed), all_of(model, optimizer))


def test_a_run_of_more_than_16_million_steps_is_resumed() -> None:
    """Its count has gone on from one float32 number to the next one."""
    model, optimizer = build()
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = torch.tensor(2.0**40)
    ends = []
    for _ in range(2):
        optimizer.load_state_dict(state)
        weights = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(2))
        ends.append(all_of(model, optimizer))
        model.load_state_dict(weights)
    assert_same(*ends)
    assert {float(v) for k, v in ends[0].items() if k.endswith("step")} == {2.0**40 + 2 * 2.0**17}


def test_a_state_goes_through_adamw_of_torch() -> None:
    model, optimizer = build()
    train(model, optimizer, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    assert {v.dtype for k, v in saved["state"][0].items() if k != "step"} == {BF16}
    params = [nn.Parameter(torch.zeros_like(p, dtype=F32)) for p in model.parameters()]
    adamw = torch.optim.AdamW(params, lr=1e-2)
    adamw.load_state_dict({**adamw.state_dict(), "state": saved["state"]})
    assert adamw.state[params[0]]["exp_avg"].dtype is F32
    model_state = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(4, 8))
    other, resumed = build()
    other.load_state_dict(model_state)
    resumed.load_state_dict({**saved, "state": adamw.state_dict()["state"]})
    train(other, resumed, range(4, 8))
    assert_same(all_of(other, resumed), all_of(model, optimizer))


@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_checkpoint_of_other_moments_loads(dtype: Any) -> None:
    model, optimizer = build(state_dtype=dtype, master_weights=True)
    train(model, optimizer, range(4))
    other, small = build()
    other.load_state_dict(model.state_dict())
    small.load_state_dict(optimizer.state_dict() | {"param_groups": small.state_dict()["param_groups"]})
    for i, own in small.state_dict()["state"].items():
        wide = optimizer.state_dict()["state"][i]
        s = wide["exp_avg_sq"].float().sqrt()
        torch.testing.assert_close(own["exp_avg_sq"].float().sqrt(), s, rtol=0.07, atol=1e-12)
        off = (own["exp_avg"].float() - wide["exp_avg"].float()).abs()
        assert bool((off <= 0.1 * s + 0.15 * wide["exp_avg"].float().abs()).all())
    train(other, small, range(4, 6))


def test_a_skipped_step_changes_nothing() -> None:
    model, optimizer = build("O2", loss_scale="dynamic")
    train(model, optimizer, range(2))
    before = copy.deepcopy(all_of(model, optimizer))
    step_on(model(torch.full((4, 8), 60000.0)).float().square().sum(), optimizer)
    after = {k: v for k, v in all_of(model, optimizer).items() if "running" not in k and "num" not in k}
    assert_same(after, {k: before[k] for k in after})


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_five_bytes_a_parameter_are_kept_and_gradients_take_two_more(level: str) -> None:
    model, optimizer = started(nn.Linear(64, 64, bias=False), FusedAdam, level, **SMALL)
    step_on(model(torch.randn(4, 64)).square().mean(), optimizer)
    lows = amp.get_session(optimizer).masters.low_halves(optimizer.param_groups[0]["params"]) or []
    (state,) = optimizer.state.values()
    kept = [model.weight, *lows, *(x for x in state.values() if x.dim())]
    assert sum(x.numel() * x.element_size() for x in kept) == 5 * model.weight.numel()
    counted = footprint(model.weight.numel(), level, "fusedadam", **SMALL)
    assert counted.total == 7 * model.weight.numel() + 4 + 4  # the step, and as of any lean master


def test_random_bits_go_by_the_name_of_a_parameter() -> None:
    """Not by its place among the parameters; and two parameters have different ones."""
    moments = []
    for names in (("first", "other"), ("other", "first")):
        of = {name: nn.Parameter(torch.zeros(500)) for name in names}
        optimizer = FusedAdam([*of.items()], lr=0.0, state_dtype="packed16")
        for _ in range(3):
            for parameter in of.values():
                parameter.grad = torch.full((500,), 0.3)
            optimizer.step()
        moments.append({name: optimizer.state[parameter]["moments"] for name, parameter in of.items()})
    for name in ("first", "other"):
        assert torch.equal(moments[0][name], moments[1][name])
    assert not torch.equal(moments[0]["first"], moments[0]["other"])


@pytest.mark.parametrize("in_session", [True, False])
def test_a_wrapper_changes_no_bits_and_a_module_called_module_has_its_own(in_session: bool) -> None:
    moments = []
    for wraps in (False, True):
        inner, outer = nn.Linear(100, 5, bias=False), nn.Linear(100, 5, bias=False)
        model: nn.Module = nn.ModuleDict({"module": nn.ModuleDict({"fc": inner}), "fc": outer})
        if wraps:
            model = Wrapper(model)
        optimizer = FusedAdam(model.named_parameters(), lr=0.0, state_dtype="packed16")
        if in_session:
            amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        for _ in range(3):
            for layer in (inner, outer):
                layer.weight.grad = torch.full_like(layer.weight, 0.25)
            optimizer.step()
        moments.append([state["moments"] for state in optimizer.state.values()])
    assert all(map(torch.equal, *moments))
    assert not torch.equal(*moments[0])


# How much memory a checkpoint takes.


class Step(NamedTuple):
    """What was alive, in bytes: the most at once, before and after."""

    peak: int
    before: int
    after: int

    @property
    def beyond(self) -> int:
        """What was needed beyond what was there at the beginning or is there at the end."""
        return self.peak - max(self.before, self.after)


def measured(holders: Any, call: Any) -> tuple[Any, Step]:
    with Living(tensors_in(holders)) as living:
        before = living.now()
        result = call()
        return result, Step(living.peak, before, living.now())


@pytest.mark.parametrize(
    ("masters", "state_dtype", "level", "reference"),
    covering(
        *(("split24", "split16", "kahan", True), ("packed16", BF16), ("O2", "O5"), (False, True)),
        strength=1,
        slow_strength=1,
    ),
)
def test_a_checkpoint_takes_little_memory_besides_itself(
    masters: Any, state_dtype: Any, level: str, reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding is 64 slices; for each of its elements a slice takes up to 60 bytes meanwhile."""
    if reference:
        monkeypatch.setenv("AMP_KERNELS", "reference")
    for module in (tensor_lists, master_copy, plainstep):
        monkeypatch.setattr(module, "SLICE", 2**12)
    n, slices = 2**18, 60 * 2**12
    layer = nn.Embedding(n // 64, 64)
    optimizer = FusedAdam(layer.parameters())
    options: dict[str, Any] = {"master_weights": masters, "state_dtype": state_dtype, "loss_scale": 1.0}

    def initialize() -> None:
        amp.initialize(layer, optimizer, opt_level=level, verbosity=0, **options)

    _, found = measured(list(layer.parameters()), initialize)
    # The FP32 weights, which are freed at the end, the cast ones, and masters or their low halves.
    of_masters = {"split24": 1, "split16": 2, "kahan": 2, True: 4}[masters]
    assert found.peak <= (4 + 2 + of_masters) * n + slices
    lows = amp.get_session(optimizer).masters.low_halves(optimizer.param_groups[0]["params"]) or []
    whole = [] if lows else optimizer.param_groups[0]["params"]

    def holders() -> Any:
        return [list(layer.parameters()), lows, whole, list(optimizer.state.values())]

    grad = layer.weight.grad = torch.full_like(layer.weight, 0.25)
    _, found = measured([holders(), grad], optimizer.step)
    assert found.beyond <= 90 * 2**12  # the first step, which makes the moments
    optimizer.zero_grad()

    saved, found = measured(holders(), optimizer.state_dict)
    assert found.beyond <= slices
    new = 4 if state_dtype == "packed16" else 0  # two bfloat16, where the words stay beside
    assert found.after - found.before == new * n
    wide = copy.deepcopy(saved)
    for name in ("exp_avg", "exp_avg_sq"):
        wide["state"][0][name] = wide["state"][0][name].float()
    kept = 2 if state_dtype == "packed16" else 4
    for each in (saved, wide):
        # Until all is loaded the old state is kept, to go back to.
        _, found = measured([holders(), each], functools.partial(optimizer.load_state_dict, each))
        assert found.peak - found.before <= kept * n + slices + 64
    saved, found = measured(holders(), layer.state_dict)
    assert found.beyond <= slices
    _, found = measured([holders(), saved], functools.partial(layer.load_state_dict, saved))
    assert found.peak - found.before <= 2 * n + slices  # a copy of the 16-bit weights
    del saved, wide, each
    _, found = measured(holders(), amp.get_session(optimizer).close)
    assert found.peak <= found.before + (4 + 8) * n + slices  # weights and moments in FP32


@pytest.mark.parametrize("shape", [(3, 5, 700), (1, 1, 9000), (2, 1, 7, 600), (9001,), (0, 3), ()])
@pytest.mark.parametrize("order", ["contiguous", "transposed", "expanded"])
def test_slices_have_the_bits_of_the_whole(
    shape: tuple[int, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if order == "transposed":
        values = values.permute(tuple(reversed(range(values.dim()))))
    if order == "expanded":
        values = values.expand(2, *values.shape)
    results = []
    for limit in (2**16, 500):
        monkeypatch.setattr(tensor_lists, "SLICE", limit)
        entry = {"exp_avg": values, "exp_avg_sq": values.square()}
        pack_moments(entry, values)
        found = [entry["moments"]]
        unpack_moments(entry, values, BF16)
        found += [entry["exp_avg"], entry["exp_avg_sq"]]
        for low in (torch.int8, torch.int16, F16):
            weight, rest = values.half(), torch.empty_like(values, dtype=low)
            split_reference([values], [weight], [rest])
            back = torch.empty_like(values, dtype=F32)
            join_reference([weight], [rest], [back])
            found += [weight, rest, back]
        results.append(found)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


# What cannot be right is refused.


def test_an_optimizer_that_cannot_round_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AmpRuntimeError, match="'split24' needs an optimizer that rounds masters"):
        amp.initialize(model, optimizer, opt_level="O5", master_weights="split24")
    assert model.weight.dtype is F32


def test_other_words_for_the_state_are_refused() -> None:
    with pytest.raises(AmpValueError, match="'int8' is not one of torch.bfloat16, 'packed16', None"):
        FusedAdam([nn.Parameter(torch.zeros(1))], state_dtype="int8")  # type: ignore[arg-type]


def test_two_moments_that_are_not_adams_are_kept_one_by_one() -> None:
    class OfOtherMoments(FusedAdam):
        def _rule(self, group: Any = None) -> Any:
            return super()._rule(group)._replace(packs=False)

    model, optimizer = build(cls=OfOtherMoments, master_weights=True)
    train(model, optimizer, range(2))
    for state in optimizer.state.values():
        assert {name: x.dtype for name, x in state.items() if x.dim()} == {
            "exp_avg": BF16,
            "exp_avg_sq": BF16,
        }


# Shards of a tensor.


@pytest.mark.parametrize("cut", ["rows", "columns", "both", "flat"])
@pytest.mark.parametrize("kind", ["packed16", "bfloat16"])
def test_shards_are_rounded_as_the_whole_tensor_is(kind: str, cut: str) -> None:
    """A new division at each step, into uneven parts."""
    generator = torch.Generator().manual_seed(0)
    shape, numbers = (37, 30), numbers_of(ADAMW)
    whole = [torch.randn(shape, generator=generator).to(BF16), torch.zeros(shape, dtype=torch.int8)]
    dtype, count = (torch.int16, 1) if kind == "packed16" else (BF16, 2)
    whole += [torch.zeros(shape, dtype=dtype) for _ in range(count)]
    divided = [x.clone() for x in whole]
    for i in range(5):
        grad = torch.randn(shape, generator=generator).to(BF16)

        def take(tensors: list[Tensor], grad: Tensor, origin: Origin, t: int = i) -> None:
            p, low, *moments = tensors
            step(
                *(ADAMW, numbers, [p], [grad], [[x] for x in moments], [torch.tensor(float(t))]),
                lows=[low],
                origins=[origin],
            )

        take(whole, grad, Origin(5))
        for part, first, run, pitch in parts_of(shape, cut, i):
            chosen = [part(x).clone() for x in divided]
            take(chosen, part(grad).clone(), Origin(5, first, run, pitch))
            for to, new in zip(divided, chosen, strict=True):
                part(to).copy_(new)
        for a, b in zip(whole, divided, strict=True):
            assert torch.equal(
                a.view(torch.int16 if a.element_size() == 2 else torch.int8),
                b.view(torch.int16 if b.element_size() == 2 else torch.int8),
            )


def parts_of(shape: tuple[int, int], cut: str, i: int) -> Any:
    rows, columns = shape
    across = [(0, rows)] if cut == "columns" else [(0, 11 + i), (11 + i, 12 + i), (12 + i, rows)]
    along = [(0, 7 + i), (7 + i, columns)] if cut in ("columns", "both") else [(0, columns)]
    if cut == "flat":
        for a, b in [(0, 100 + i), (100 + i, rows * columns)]:
            yield (lambda x, a=a, b=b: x.view(-1)[a:b]), a, 0, 0
        return
    for a, b in across:
        for c, d in along:
            part = lambda x, a=a, b=b, c=c, d=d: x[a:b, c:d]  # noqa: E731
            yield part, a * columns + c, d - c if cut != "rows" else 0, columns if cut != "rows" else 0
