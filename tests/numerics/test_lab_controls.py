"""The controls of the lab: what may be typed, ulps, sliders, keys."""

from __future__ import annotations

import math
import random
import struct
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
import torch

from amp.numerics import bits, describe
from tests.browsers import FIELDS, Page

TYPED: dict[str, float] = {
    "3.14159": 3.14159,
    " -1e-8 ": -1e-8,
    ".5": 0.5,
    "5.": 5.0,
    "1/3": 1 / 3,
    "-2/7": -2 / 7,
    "2^-24": 2.0**-24,
    "-2^3": -8.0,
    "2**10": 1024.0,
    "1.5 \u00d7 2^-14": 1.5 * 2.0**-14,
    "1.16 \u00d7 10^\u221210": 1.16e-10,
    "\u22125": -5.0,
    "0x1p-24": 2.0**-24,
    "-0x1.92P+1": -3.140625,
    "0x.8p0": 0.5,
    "0x1p-1075": 0.0,
    "0x1.8p-1074": 2.0**-1073,
    "inf": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
    "-0": -0.0,
}

PATTERN_OF = """const pattern = (x) => {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, x);
  return view.getBigUint64(0).toString(16).padStart(16, "0");
};
const number = (pattern) => {
  const view = new DataView(new ArrayBuffer(8));
  view.setBigUint64(0, BigInt(`0x${pattern}`));
  return view.getFloat64(0);
};
"""


def pattern_of(x: float) -> str:
    return struct.pack(">d", x).hex()


@pytest.mark.slow
def test_every_form_of_a_number_may_be_typed(page: Page) -> None:
    typed = dict(TYPED)
    draw = random.Random(0)
    for _ in range(200):  # more digits than a float64 has
        text = f"0x{draw.getrandbits(30):x}.{draw.getrandbits(48):012x}p{draw.randint(-1110, 990)}"
        typed[text] = float.fromhex(text)
        a, b = draw.getrandbits(50), draw.getrandbits(30) + 1
        typed[f"{a}/{b}"] = float(Fraction(a, b))
    found = page.run(
        PATTERN_OF + "return arguments[0].map((text) => pattern(lab.parseNumber(text)))", list(typed)
    )
    for (text, expected), got in zip(typed.items(), found, strict=True):
        assert got == pattern_of(expected), text


@pytest.mark.slow
def test_what_is_no_number_is_said_beside_the_field(page: Page) -> None:
    def told(text: str) -> str:
        page.set("bits-number", text)
        assert (page["bits-number"].get_attribute("aria-invalid") == "true") == bool(
            page.text("bits-number-error")
        )
        return page.text("bits-number-error")

    for text in ("abc", "1/2/3", "--1", "1e", "0x", "0xp3", "2^", "1,5", "1/x"):
        assert told(text).startswith(f"“{text}” is not a number; try 3.14159"), text
    assert told("").startswith("Nothing is typed")
    assert told("1/0") == "“1/0” divides by 0; write inf for an infinity."
    assert told("0x12345") == "“0x12345” has more than the 16 bits of float16."
    figure = page.driver.find_element("css selector", "#bits .figure")
    assert "stale" in figure.get_attribute("class").split()
    assert told("0x3c00") == ""
    assert "stale" not in figure.get_attribute("class")
    page.set("sim-interval", "2.5")
    assert page.text("sim-interval-error") == "“2.5” does not fit: give a whole number from 1 to 5000."
    page.set("sim-overflows", "3, x")
    assert "is no list of whole numbers from 0 to 399" in page.text("sim-overflows-error")
    page.set("memory-params", "0x3c00")
    assert "is not a number" in page.text("memory-params-error")


@pytest.mark.slow
def test_bits_may_be_typed_and_stay_a_number_in_another_format(page: Page) -> None:
    for text, value in (
        ("0x3c00", "1"),
        ("0xFBFF", "-65504"),
        ("0x1", "5.96046448 \u00d7 10^-8"),
        ("0x7e01", "nan"),
    ):
        page.set("bits-number", text)
        assert page.text("bits-out").startswith(f"float16 holds {value}")
        assert page.text("bits-hex").split()[0] == f"0x{int(text, 16):04x}"
    page.set("bits-number", "0x3c00")
    page.set("bits-format", "float8_e5m2")
    assert page.text("bits-out") == "float8_e5m2 holds 1"
    page.set("bits-format", "float16")
    page.set("bits-number", "nan")
    page.click(page["bits-row"].find_elements("tag name", "button")[-1])
    assert page["bits-number"].get_attribute("value") == "0x7e01"


def sample(count: int) -> list[float]:
    draw = random.Random(1)
    doubles = [struct.unpack(">d", draw.randbytes(8))[0] for _ in range(count)]
    ends = [2.0**-149, 2.0**-133, 1e-8, 1 / 3, 0.1, 65504.0, 2.0**-1074, sys.float_info.max, 1e22, -0.0]
    return [x for x in doubles if abs(x) < float("inf")] + ends


@pytest.mark.slow
def test_the_exact_decimal_has_all_digits(page: Page) -> None:
    numbers = sample(150)
    for name in ("exactDecimal", "hexFloat"):
        script = PATTERN_OF + f"return arguments[0].map((each) => lab.{name}(number(each)))"
        found = page.run(script, [pattern_of(x) for x in numbers])
        for x, text in zip(numbers, found, strict=True):
            if name == "exactDecimal":
                assert text == f"{Decimal(x):f}"
            else:
                assert pattern_of(float.fromhex(text)) == pattern_of(x)
    page.set("bits-format", "float32")
    page.set("bits-number", "0x1p-149")
    exact = page["bits-exact"].find_element("tag name", "code")
    assert exact.text == f"{Decimal(2.0**-149):f}"
    page.look(390, "light")
    assert exact.rect["x"] >= 0
    assert exact.rect["x"] + exact.rect["width"] <= 390
    assert exact.rect["height"] > 60  # it wraps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_an_ulp_is_torchs_next_number(page: Page, name: str) -> None:
    fmt = describe(name)
    assert fmt.dtype is not None
    ends = [fmt.max, fmt.min_normal, fmt.min_subnormal, 1.0, 3.140625, math.inf]
    starts = torch.tensor([0.0, *ends, *(-end for end in ends)], dtype=fmt.dtype)
    for way in ("up", "down"):
        step = (
            "tell('bits-format', arguments[0]);"
            "return arguments[1].map((text) => {"
            "  tell('bits-number', text);"
            f"  field('bits-{way}').click();"
            "  return document.querySelector('#bits-exact code').textContent;"
            "});"
        )
        found = page.run(FIELDS + step, name, [repr(x) for x in starts.tolist()])
        beyond = torch.full_like(starts, math.inf if way == "up" else -math.inf)
        assert [float(text) for text in found] == torch.nextafter(starts, beyond).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"])
def test_ulps_lead_through_all_numbers_of_a_small_format(page: Page, name: str) -> None:
    count = 2 ** describe(name).bits
    script = (
        "const fmt = lab.formats[arguments[0]];"
        "return Array.from({length: arguments[1]}, (_, i) => String(lab.decode(i, fmt)))"
    )
    decoded = [float(text.replace("Infinity", "inf")) for text in page.run(script, name, count)]
    values = sorted({x for x in decoded if not math.isnan(x)})
    assert all(bits(value, name).value == value for value in values)
    walk = page.run(
        FIELDS + "tell('bits-format', arguments[0]);"
        "tell('bits-number', arguments[1]);"
        "const walk = [arguments[1]];"
        "while (!field('bits-up').disabled && walk.length < 300) {"
        "  field('bits-up').click();"
        "  walk.push(field('bits-number').value);"
        "}"
        "return walk",
        *(name, repr(values[0])),
    )
    assert [float(text) for text in walk] == values


SLIDE = """return [...document.querySelectorAll("input[type=range]")].map((slider) => {
  const name = slider.id.replace("-slider", "");
  const {min, max, log} = field(name).dataset;
  const at = (text) => { tell(name, text); return Number(slider.value); };
  const ends = [at(min) === Number(slider.min), at(max) === Number(slider.max)];
  const moved = [0.25, 0.6].map((part) => {
    slider.value = Number(slider.min) + part * (slider.max - slider.min);
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    const text = field(name).value;
    const told = slider.getAttribute("aria-valuetext") === text;
    return [Number(slider.value), lab.parseNumber(text), told];
  });
  const good = field(`${name}-error`).textContent;
  const stays = at("2e300") === moved[1][0];
  const bad = field(`${name}-error`).textContent;
  return {name, log: log !== undefined, ends, moved, stays, good, bad};
});
"""


@pytest.mark.slow
def test_a_typed_value_and_a_slider_agree(page: Page) -> None:
    sliders = page.run(FIELDS + SLIDE)
    assert len(sliders) > 15
    for slider in sliders:
        assert slider["ends"] == [True, True], slider
        for position, value, is_told in slider["moved"]:
            expected = 2.0**position if slider["log"] else position
            assert value == pytest.approx(expected, rel=5e-3, abs=1e-9), slider
            assert is_told
        assert slider["good"] == ""
        assert slider["bad"].startswith("“2e300” does not fit: give a"), slider
        assert slider["stays"]


@pytest.mark.slow
def test_arrow_keys_step_a_number(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page["bits-number"].send_keys(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_DOWN)
    assert page["bits-number"].get_attribute("value") == "3.142578125"
    page["scaling-scale"].send_keys(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_DOWN)
    assert page["scaling-scale"].get_attribute("value") == "1"
    page["ulps-weight"].send_keys(Keys.ARROW_UP)
    assert page["ulps-weight"].get_attribute("value") == "2"
    page["sim-growth"].send_keys(Keys.ARROW_DOWN)
    assert page["sim-growth"].get_attribute("value") == "1.9"
    page["sim-backoff-slider"].send_keys(Keys.ARROW_RIGHT)
    assert page["sim-backoff"].get_attribute("value") == "0.51"
