"""The controls of the lab: what may be typed, ulps, sliders, keys, copies, the state in the address."""

from __future__ import annotations

import math
import random
import struct
from decimal import Decimal
from fractions import Fraction

import pytest
import torch

from amp.numerics import bits, describe
from tests.browsers import Page

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
    assert "stale" in figure.get_attribute("class")
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
    page["bits-row"].find_elements("tag name", "button")[-1].click()
    assert page["bits-number"].get_attribute("value") == "0x7e01"


def sample(count: int) -> list[float]:
    draw = random.Random(1)
    doubles = [struct.unpack(">d", draw.randbytes(8))[0] for _ in range(count)]
    ends = [
        2.0**-149,
        2.0**-133,
        1e-8,
        1 / 3,
        0.1,
        65504.0,
        2.0**-1074,
        1.7976931348623157e308,
        1e22,
        -0.0,
    ]
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


FIELDS = """const field = (id) => document.getElementById(id);
const tell = (id, text) => {
  field(id).value = text;
  field(id).dispatchEvent(new Event("input", {bubbles: true}));
};
"""


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


STATE: dict[str, str] = {
    "bits-format": "bfloat16",
    "bits-number": "1/3",
    "ranges-magnitude": "2^-130",
    "ulps-format": "float8_e5m2",
    "ulps-weight": "1.75",
    "ulps-update": "0.01",
    "ulps-negative": "true",
    "scaling-format": "float8_e5m2",
    "scaling-scale": "8",
    "scaling-mean": "-20.5",
    "scaling-spread": "3",
    "sim-init": "12",
    "sim-interval": "4",
    "sim-growth": "1.5",
    "sim-backoff": "0.25",
    "sim-hysteresis": "2",
    "sim-steps": "33",
    "sim-overflows": "2, 7, 30",
    "memory-params": "70e9",
    "memory-optimizer": "sgd-momentum",
    "memory-activations": "5e8",
    "memory-world": "8",
    "memory-sharding": "zero2",
    "memory-gpu": "141",
    "fp8-format": "float8_e5m2",
    "fp8-scaling": "1x128",
    "fp8-mean": "2",
    "fp8-spread": "4.5",
    "fp8-outlier": "6",
    "delayed-format": "float8_e5m2",
    "delayed-history": "3",
    "delayed-algo": "most_recent",
    "delayed-margin": "1",
    "delayed-steps": "21",
    "delayed-outliers": "4, 9",
    "delayed-infs": "12",
}

VALUES = (
    "const fields = document.querySelectorAll('main input:not([type=range]), main select');"
    "const value = (e) => e.type === 'checkbox' ? String(e.checked) : e.value;"
    "return Object.fromEntries([...fields].map((e) => [e.id, value(e)]))"
)
DRAWN = (
    "const drawn = document.querySelectorAll('output, svg, #bits-row, #bits-facts');"
    "return [...drawn].map((e) => e.innerHTML)"
)


@pytest.mark.slow
def test_the_address_restores_every_control(page: Page) -> None:
    opening, first = page.run(VALUES), page.run(DRAWN)
    assert opening.keys() == STATE.keys()
    assert all(opening[name] != value for name, value in STATE.items())
    typed = {name: value for name, value in STATE.items() if name != "ulps-negative"}
    page.run(FIELDS + "for (const [id, text] of Object.entries(arguments[0])) tell(id, text);", typed)
    page["ulps-negative"].click()
    errors = "return [...document.querySelectorAll('.error')].map((e) => e.textContent).join('')"
    assert page.run(errors) == ""
    drawn = page.run(DRAWN)
    assert sum(a != b for a, b in zip(first, drawn, strict=True)) == len(drawn)
    saved = "return location.hash.includes('ulps-negative=true') && location.hash.slice(1)"
    state = page.wait(saved)
    page.open(state)
    assert page.run(VALUES) == STATE
    assert page.run(DRAWN) == drawn
    page.run("location.hash = '#fp8'")  # a link to a section leaves the fields alone
    page.wait("return location.hash.startsWith('#fp8?')")
    assert page.run(VALUES) == STATE
    page.run("location.hash = ''")
    page.wait("return document.getElementById('sim-steps').value === '60'")
    assert page.run(VALUES) == opening
    page.open("scaling?scaling-scale=9")
    assert page.run(VALUES) == opening | {"scaling-scale": "9"}
    assert page.run("return scrollY") > 1000


@pytest.mark.slow
def test_a_link_with_what_the_page_does_not_know_says_so(page: Page) -> None:
    page.open("bits?bits-format=float17&colour=red&bits-number=abc&ulps-negative=maybe")
    notice = page.text("notice")
    assert all(part in notice for part in ("bits-format=float17", "colour=red", "ulps-negative=maybe"))
    assert page["notice"].is_displayed()
    assert "“abc” is not a number" in page.text("bits-number-error")
    page.open("bits?bits-number=<img src=x onerror=document.title='x'>")
    assert page.driver.title == "reamp: the numerics lab"
    assert page.run("return document.images.length") == 0


@pytest.mark.slow
def test_links_and_numbers_are_copied(page: Page) -> None:
    page.run(
        "window.copied = [];"
        "navigator.clipboard.writeText = async (text) => { window.copied.push(text); };"
    )
    page.set("scaling-scale", 7)
    page.driver.find_element("css selector", "#scaling .link").click()
    assert page.wait("return window.copied[0]") == f"{page.address}#scaling?scaling-scale=7"
    page.press("bits-exact", "Copy")
    assert page.wait("return window.copied[1]") == "3.140625"
    page.press("bits-c", "Copy")
    assert page.wait("return window.copied[2]") == "0x1.92p+1"
    page.run(
        "navigator.clipboard.writeText = async () => { throw new Error(); };"
        "document.execCommand = () => false;"
    )
    page.press("bits-hex", "Copy")
    page.wait("return document.getElementById('notice').textContent.includes('0x4248')")
    assert page["notice"].is_displayed()
