"""The figures of the lab: each answers to its controls, with the library's numbers."""

from __future__ import annotations

import math
import re

import pytest

from amp.numerics import bits, simulate_fp8, simulate_scaler
from tests.browsers import Page


@pytest.mark.slow
def test_bits_are_typed_flipped_and_chosen(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    assert page.text("bits-out") == "float16 holds 3.140625"
    assert page.text("bits-hex").startswith("0x4248")
    assert page.text("bits-formula") == "(-1)^(0) \u00d7 2^(16 - 15) \u00d7 (1 + 584/1024) = 3.140625"
    row = page["bits-row"].find_elements("tag name", "button")
    assert "".join(bit.text for bit in row) == f"{bits(3.14159, 'float16').pattern:016b}"
    page.click(row[0])
    assert page.text("bits-out") == "float16 holds -3.140625"
    assert page["bits-number"].get_attribute("value") == "-3.140625"
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.SPACE)
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "exponent bit 13 is 1"
    assert page.text("bits-out") == "float16 holds -804"
    page.press("bits-presets", "10^-8")
    assert page.text("bits-out") == "float16 holds 0: underflow"
    page.set("bits-format", "bfloat16")
    assert "underflow" not in page.text("bits-out")
    page["bits-number"].clear()
    page["bits-number"].send_keys("2^-130")
    assert page.text("bits-out").endswith(": subnormal, an exponent of 0 counts as 1")
    page["bits-number"].clear()
    page["bits-number"].send_keys("abc")
    assert "“abc” is not a number" in page.text("bits-number-error")
    assert page["bits-number"].get_attribute("aria-invalid") == "true"
    for name in ("float32", "float8_e8m0fnu", "float4_e2m1fn"):
        page.set("bits-format", name)
        for preset in ("π", "nan", "inf", "-0"):
            page.press("bits-presets", preset)
            assert f"{name} holds" in page.text("bits-out")
    assert page.text("bits-number-error") == ""


@pytest.mark.slow
def test_bits_and_their_formula_have_the_colour_of_their_field(page: Page) -> None:
    page.set("bits-number", "-1.5")
    for field in ("sign", "exponent", "mantissa"):
        of_bits = page.run(
            "return [...document.querySelectorAll(`#bits-row .${arguments[0]}[aria-pressed=true]`)]"
            ".map((bit) => getComputedStyle(bit).backgroundColor)",
            field,
        )
        in_formula, in_key = page.run(
            "const look = (id) => getComputedStyle(document.querySelector(`#${id} .${arguments[0]}`));"
            "return [look('bits-formula').color, look('bits-key').backgroundColor]",
            field,
        )
        assert set(of_bits) == {in_formula} == {in_key}


@pytest.mark.slow
def test_a_magnitude_in_every_range(page: Page) -> None:
    def fates() -> dict[str, str]:
        texts = page.texts("#ranges-chart text")
        return dict(zip(texts[0:18:2], texts[1:18:2], strict=True))

    page.set("ranges-magnitude", "2^-27")
    assert fates()["float16"] == "becomes 0"
    assert fates()["bfloat16"] == "kept to 8 bits"
    assert "Too small, becomes 0: float16, float8_e4m3fn" in page.text("ranges-out")
    page.press("ranges-presets", "exp(12)")
    assert fates()["float16"] == "becomes inf"
    assert fates()["float8_e4m3fn"] == "becomes 448"
    page.set("ranges-magnitude", "2^-20")
    assert fates()["float16"] == "kept to 5 of 11 bits"
    assert "Subnormal: float16 (kept to 5 of 11 bits)" in page.text("ranges-out")
    page.set("ranges-magnitude", "2^-149")
    assert fates()["float32"] == "kept to 1 of 24 bits"
    assert fates()["float8_e8m0fnu"] == "becomes 2\u2212127"


@pytest.mark.slow
def test_updates_are_dragged(page: Page) -> None:
    from selenium.webdriver import ActionChains

    assert page.text("ulps-out").startswith("The update is lost. 1 + 0.0001 = 1.0001, kept as 1.")
    page.set("ulps-update", "2^-8")
    assert "The update counts. 1 + 0.00390625 = 1.00390625, kept as 1.00390625." in page.text(
        "ulps-out"
    )
    page.click(page["ulps-negative"])
    assert "kept as 0.99609375" in page.text("ulps-out")
    page.set("ulps-format", "float8_e4m3fn")
    assert "One ulp of 1 in float8_e4m3fn is 0.125" in page.text("ulps-out")
    assert "lost" in page.text("ulps-out")
    page.set("ulps-format", "float16")
    page.set("ulps-weight", "2^16")
    assert "One ulp of 65504 in float16" in page.text("ulps-out")
    page.set("ulps-weight", "1")
    for kind in ("update", "weight"):
        before = page.text("ulps-out").splitlines()
        field = page[f"ulps-{kind}"].get_attribute("value")
        handle = page["ulps-chart"].find_element("css selector", f"[data-drag={kind}]")
        ActionChains(page.driver).drag_and_drop_by_offset(handle, 120, 0).perform()
        after = page.text("ulps-out").splitlines()
        assert after[0] != before[0]
        assert (after[1] != before[1]) == (kind == "weight")
        assert page[f"ulps-{kind}"].get_attribute("value") != field


@pytest.mark.slow
def test_a_scale_moves_gradients_out_of_the_dead_zone(page: Page) -> None:
    assert "42.07 % become 0" in page.text("scaling-out")
    assert "2^16 loses least" in page.text("scaling-out")
    page.click(page["scaling-best"])
    assert page["scaling-scale"].get_attribute("value") == "16"
    assert "0.03 % become 0" in page.text("scaling-out")
    page.set("scaling-format", "bfloat16")
    page.set("scaling-scale", 0)
    assert "0.00 % become 0" in page.text("scaling-out")
    page.set("scaling-mean", 10)
    page.set("scaling-format", "float16")
    assert "Every scale overflows" in page.text("scaling-out")
    assert not page["scaling-best"].is_enabled()
    page.set("scaling-mean", -15)
    page.set("scaling-spread", 1)
    assert "2^6 loses least" in page.text("scaling-out")
    page.set("scaling-spread", 0)
    assert "a number from 0.5 to 20" in page.text("scaling-spread-error")


@pytest.mark.slow
def test_a_loss_scale_is_stepped_and_played(page: Page) -> None:
    overflows = [0, 1, 2, 11, 20, 45]
    trace = simulate_scaler(steps=60, overflows=overflows, init=2**16, growth_interval=8)
    assert page.text("sim-out").startswith(f"Scale {trace[-1].next_scale:.0f};")
    assert "60 steps, 6 skipped" in page.text("sim-out")
    assert page.run("return document.querySelectorAll('#sim-chart path').length") == 1 + 6
    page.set("sim-hysteresis", 2)
    trace = simulate_scaler(steps=60, overflows=overflows, init=2**16, growth_interval=8, hysteresis=2)
    assert page.text("sim-out").startswith(f"Scale {trace[-1].next_scale:.0f};")
    page.click(page["sim-reset"])
    assert "no step yet" in page.text("sim-out")
    page.set("sim-hysteresis", 1)
    page.set("sim-init", 15)
    page.set("sim-interval", 5)
    for i in range(16):
        page.click(page["sim-overflow" if i in (3, 8, 9) else "sim-step"])
    trace = simulate_scaler(steps=16, overflows=[3, 8, 9], init=2**15, growth_interval=5)
    assert page.text("sim-out").startswith(f"Scale {trace[-1].next_scale:.0f};")
    assert "16 steps, 3 skipped" in page.text("sim-out")
    assert page["sim-overflows"].get_attribute("value") == "3, 8, 9"
    page.set("sim-growth", 0.5)
    assert "give a number from 1 to 16" in page.text("sim-growth-error")
    page.set("sim-growth", 2)
    page.click(page["sim-play"])
    assert page["sim-play"].get_attribute("aria-pressed") == "true"
    page.run("return new Promise((done) => setTimeout(done, 700))")
    page.click(page["sim-play"])
    assert int(re.findall(r"(\d+) steps", page.text("sim-out"))[0]) > 18
    page.set("sim-steps", 400)
    assert not page["sim-step"].is_enabled()


def row_of(page: Page, table: str, name: str) -> list[str]:
    """Return the words of a table's row behind its name."""
    lines = [row.text.replace("\n", " ") for row in page[table].find_elements("tag name", "tr")]
    return next(line.removeprefix(name).split() for line in lines if line.startswith(f"{name} "))


@pytest.mark.slow
def test_memory_is_compared(page: Page) -> None:
    def row(name: str) -> list[str]:
        return row_of(page, "memory-table", name)

    small = "O2 O5 O7 O9, FusedAdam, split24, packed16"
    assert row("O0, FusedAdam")[:3] == ["112.00", "too", "large"]
    assert row(small)[:2] == ["49.00", "fits"]
    said = "O5 with FusedAdam, split16, BF16 moments fits in 80 GB, with 10.00 GB to spare."
    assert page.text("memory-out") == said  # as reamp memory says
    page.set("memory-optimizer", "sgd-momentum")
    said = "None of O5, O2, O4, O1, O0 fits in 80 GB; O3 with sgd-momentum would."
    assert page.text("memory-out") == said
    page.set("memory-optimizer", "adamw")
    page.press("memory-presets", "GPT-3")
    assert row("O0, adamw")[3] == "700.00"
    assert row("O0, adamw")[0] == "2800"
    page.set("memory-world", 64)
    page.set("memory-sharding", "zero3")
    page.set("memory-optimizer", "FusedAdam")
    assert row("O0, FusedAdam")[:2] == ["43.75", "fits"]
    page.set("memory-gpu", 40)
    assert page.text("memory-out").startswith("O5 with FusedAdam, split16 fits in 40 GB")
    page.set("memory-activations", "20e9")
    assert page.text("memory-out") == "Nothing fits in 40 GB."
    page.set("memory-params", "-5")
    assert "give a number from 1 to 1e17" in page.text("memory-params-error")


@pytest.mark.slow
def test_fp8_is_scaled(page: Page) -> None:
    def row(name: str) -> list[float]:
        return list(map(float, row_of(page, "fp8-table", name)))

    lost = [row(scaling)[0] for scaling in ("none", "tensor", "row", "1x32")]  # as the text says
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 60 > lost[1] > 40 > 1 > lost[2]
    assert row("tensor")[1] > 10 * row("1x32")[1] > 0
    assert row("tensor")[3] > 3 * row("1x32")[3]
    before = page["fp8-chart"].get_attribute("innerHTML")
    page.set("fp8-scaling", "1x32")
    assert page["fp8-chart"].get_attribute("innerHTML") != before
    page.set("fp8-outlier", 0)
    assert row("tensor")[0] < 10
    page.set("fp8-mean", 4)
    assert row("tensor")[2] == 0 < row("none")[2]
    page.set("fp8-spread", "0")
    assert page["fp8-spread"].get_attribute("aria-invalid") == "true"


@pytest.mark.slow
def test_fp4_is_right_on_average_and_an_outlier_is_spread(page: Page) -> None:
    def error() -> float:
        return float(re.findall(r"([0-9.]+) %", page.text("fp4-out"))[-1])

    def products(column: int) -> list[float]:
        texts = page.texts(f"#fp4-products td:nth-child({column})")
        return [float(text.replace("\u2212", "-")) for text in texts]

    page.click(page["fp4-reset"])
    one = error()
    page.click(page["fp4-draw"])
    assert page["fp4-draws"].get_attribute("value") == "2"
    page.click(page["fp4-more"])
    assert error() < one / 5
    page.set("fp4-draws", 1000)
    assert not page["fp4-draw"].is_enabled()
    for column in (2, 3):
        exact, nearest, mean = products(column)
        assert mean == pytest.approx(exact, rel=5e-3)
        assert nearest != pytest.approx(exact, rel=5e-2)
    assert products(3)[0] == pytest.approx(products(2)[0], rel=1e-2)  # the transforms cancel
    page.set("fp4-rounding", "nearest")
    assert error() > 5
    assert "Of 16 numbers 3 become 0." in page.text("fp4-out")
    page.click(page["fp4-hadamard"])
    assert "Of 16 numbers 0 become 0." in page.text("fp4-out")
    kept = page.texts("#fp4-table td:nth-child(3)")
    assert page.texts("#fp4-table td:nth-child(4)") == kept
    page.set("fp4-largest", 20)
    assert "Of 16 numbers 16 become 0." in page.text("fp4-out")


@pytest.mark.slow
def test_a_delayed_scale_is_followed(page: Page) -> None:
    page.click(page["delayed-reset"])
    assert page.text("delayed-out").startswith("No iteration yet.")
    page.set("delayed-steps", 12)
    page.click(page["delayed-step"])
    assert "fits.\n13 iterations, 0 too large" in page.text("delayed-out")
    page.click(page["delayed-spike"])
    assert "cut off, where a scale of its own would be" in page.text("delayed-out")
    page.click(page["delayed-inf"])
    assert "makes the result NaN" in page.text("delayed-out")
    page.click(page["delayed-step"])
    assert "fits.\n16 iterations, 2 too large" in page.text("delayed-out")
    factors = [64.0 if i == 13 else math.inf if i == 14 else 1.0 for i in range(16)]
    amaxes = [2 ** (4 - i / 6 + math.sin(i)) * factor for i, factor in enumerate(factors)]
    trace = simulate_fp8(amaxes, "float8_e4m3fn", amax_history=6)
    assert sum(step.saturated for step in trace) == 2
    assert f"the scale {trace[-1].factor:g}; it fits" in page.text("delayed-out")
    page.set("delayed-margin", 17)
    assert "a whole number from 0 to 16" in page.text("delayed-margin-error")
    page.set("delayed-infs", "")
    page.set("delayed-margin", 8)
    assert "0 too large" in page.text("delayed-out")  # what the margin is for
