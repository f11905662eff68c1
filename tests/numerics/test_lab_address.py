"""The address of the lab holds the state of its controls, and can be copied."""

from __future__ import annotations

import pytest

from tests.browsers import FIELDS, Page

ADDRESS = """
bits-format=bfloat16&bits-number=1/3&ranges-magnitude=2^-130
ulps-format=float8_e5m2&ulps-weight=1.75&ulps-update=0.01&ulps-negative=true
scaling-format=float8_e5m2&scaling-scale=8&scaling-mean=-20.5&scaling-spread=3
sim-init=12&sim-interval=4&sim-growth=1.5&sim-backoff=0.25&sim-hysteresis=2&sim-steps=33
sim-overflows=2, 7, 30
memory-params=70e9&memory-optimizer=sgd-momentum&memory-activations=5e8&memory-world=8
memory-sharding=zero2&memory-gpu=141
fp8-format=float8_e5m2&fp8-scaling=1x128&fp8-mean=2&fp8-spread=4.5&fp8-outlier=6
fp4-rounding=nearest&fp4-hadamard=true&fp4-mean=-3&fp4-spread=2.5&fp4-outlier=6&fp4-largest=2
fp4-draws=5
delayed-format=float8_e5m2&delayed-history=3&delayed-algo=most_recent&delayed-margin=1
delayed-steps=21&delayed-outliers=4, 9&delayed-infs=12
"""
STATE = dict(pair.split("=") for line in ADDRESS.split("\n") for pair in line.split("&") if pair)

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
    ticked = [name for name, value in STATE.items() if value == "true"]
    typed = {name: value for name, value in STATE.items() if name not in ticked}
    page.run(FIELDS + "for (const [id, text] of Object.entries(arguments[0])) tell(id, text);", typed)
    for name in ticked:
        page.click(page[name])
    errors = "return [...document.querySelectorAll('.error')].map((e) => e.textContent).join('')"
    assert page.run(errors) == ""
    drawn = page.run(DRAWN)
    assert sum(a != b for a, b in zip(first, drawn, strict=True)) == len(drawn)
    saved = "return location.hash.includes('fp4-hadamard=true') && location.hash.slice(1)"
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
    page.click(page.driver.find_element("css selector", "#scaling .link"))
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
