"""The lab in a browser: its numbers are the library's, and every control does what it says."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp.cli import main
from amp.numerics import bits, lab, simulate_scaler

ROOT = Path(__file__).parents[2]


def test_the_page_needs_nothing_else(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "page.html"
    assert main(["lab", "--out", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert "/*" + "DATA*/" not in text
    assert main(["lab", "--out", str(tmp_path / "no" / "where.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_it_is_published_as_it_is() -> None:
    """Run `python -m amp lab --out docs/lab.html` after a change."""
    assert (ROOT / "docs" / "lab.html").read_text(encoding="utf-8") == lab.page()


def test_it_is_served_on_this_machine_alone() -> None:
    with lab.server() as running:
        host, port = running.server_address[:2]
        assert host == "127.0.0.1"
        threading.Thread(target=running.serve_forever, daemon=True).start()
        for path, status in (("/", 200), ("/other", 404)):
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.status == status
            assert (b"The numerics lab" in response.read()) == (status == 200)
        with pytest.raises(ValueError, match=f"port {port} cannot be had"):
            lab.server(int(port))
        running.shutdown()


def test_the_shared_table_has_every_format_and_its_ends() -> None:
    numbers = lab.vectors()["numbers"]
    assert len({v["format"] for v in numbers}) == 9
    assert sum(v["overflow"] for v in numbers) > 50
    assert sum(v["subnormal"] for v in numbers) > 20
    assert sum(v["underflow"] for v in numbers) > 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    missing = "needs Debian's chromium and chromium-driver, or the like"
    if not chromium or not driver:
        assert not os.environ.get("AMP_REQUIRE_BROWSER"), missing
        pytest.skip(missing)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1000,1000",
        "--force-prefers-reduced-motion",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    with webdriver.Chrome(options=options, service=service) as running:
        yield running


class Page:
    """The page, by the names of its elements."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def __getitem__(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        return str(self[name].text)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def set(self, name: str, value: Any) -> None:
        """Give an input or a select a value, as a hand would."""
        self.run(
            "arguments[0].value = arguments[1];"
            "for (const kind of ['input', 'change'])"
            " arguments[0].dispatchEvent(new Event(kind, {bubbles: true}));",
            self[name],
            str(value),
        )

    def press(self, holder: str, label: str) -> None:
        for button in self[holder].find_elements("tag name", "button"):
            if button.text == label:
                button.click()
                return
        raise AssertionError(label)


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Page]:
    browser.get(lab.write(tmp_path / "lab.html").as_uri())
    yield Page(browser)
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_its_numbers_are_those_of_the_library(page: Page) -> None:
    found = page.run("return lab.check()")
    assert found["wrong"] == []
    assert found["count"] > 8000
    assert page.text("check") == f"{found['count']} of {found['count']} in the shared table agree."
    broken = page.run("lab.formats.float16.bias = 14; return lab.check().wrong.length")
    assert broken > 0


@pytest.mark.slow
def test_bits_are_typed_flipped_and_chosen(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    assert "float16 holds 3.140625, 0x4248" in page.text("bits-out")
    assert "= (1 + 584/1024) \u00d7 2^1" in page.text("bits-out")
    row = page["bits-row"].find_elements("tag name", "button")
    assert "".join(bit.text for bit in row) == f"{bits(3.14159, 'float16').pattern:016b}"
    row[0].click()
    assert "holds -3.140625" in page.text("bits-out")
    assert page["bits-number"].get_attribute("value") == "-3.140625"
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.SPACE)
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "exponent bit 13 is 1"
    assert "holds -804," in page.text("bits-out")
    page.press("bits-presets", "1e-8")
    assert "holds 0," in page.text("bits-out")
    assert "underflow" in page.text("bits-out")
    page.set("bits-format", "bfloat16")
    assert "underflow" not in page.text("bits-out")
    page["bits-number"].clear()
    page["bits-number"].send_keys("2^-130")
    assert "subnormal" in page.text("bits-out")
    page["bits-number"].clear()
    page["bits-number"].send_keys("abc")
    assert "“abc” is not a number" in page.text("bits-out")
    assert page["bits-number"].get_attribute("aria-invalid") == "true"
    for name in ("float32", "float8_e8m0fnu", "float4_e2m1fn"):
        page.set("bits-format", name)
        for preset in ("π", "nan", "inf", "-0"):
            page.press("bits-presets", preset)
            assert f"{name} holds" in page.text("bits-out")


@pytest.mark.slow
def test_a_magnitude_in_every_range(page: Page) -> None:
    page.set("ranges-exponent", -27)
    assert "float16: becomes 0" in page.text("ranges-out")
    assert "bfloat16: is 7.4505806e-9" in page.text("ranges-out")
    page.set("ranges-exponent", -33)
    assert page.text("ranges-out").startswith("2^-33 = 1.16415322e-10")
    page.set("ranges-exponent", 17)
    assert "float16: overflows to inf" in page.text("ranges-out")
    assert "float8_e4m3fn: overflows to 448" in page.text("ranges-out")
    page.set("ranges-exponent", -20)
    assert "float16: is subnormal" in page.text("ranges-out")


@pytest.mark.slow
def test_updates_are_dragged(page: Page) -> None:
    from selenium.webdriver import ActionChains

    assert "the update is lost" in page.text("ulps-out")
    page.set("ulps-update", -8)
    assert "kept as 1.00390625: the update counts" in page.text("ulps-out")
    page["ulps-negative"].click()
    assert "kept as 0.99609375" in page.text("ulps-out")
    page.set("ulps-format", "float8_e4m3fn")
    assert "one ulp there is 0.125" in page.text("ulps-out")
    assert "lost" in page.text("ulps-out")
    page.set("ulps-format", "float16")
    page.set("ulps-centre", 16)
    assert "weight 65504 in float16" in page.text("ulps-out")
    page.set("ulps-centre", 0)
    for kind in ("update", "centre"):
        before = page.text("ulps-out").splitlines()
        handle = page["ulps-chart"].find_element("css selector", f"[data-drag={kind}]")
        ActionChains(page.driver).drag_and_drop_by_offset(handle, 120, 0).perform()
        after = page.text("ulps-out").splitlines()
        assert after[1] != before[1]
        assert (after[0] != before[0]) == (kind == "centre")


@pytest.mark.slow
def test_a_scale_moves_gradients_out_of_the_dead_zone(page: Page) -> None:
    assert "42.07 % become 0" in page.text("scaling-out")
    assert "2^16 loses least" in page.text("scaling-out")
    page.set("scaling-scale", 16)
    assert "0.03 % become 0" in page.text("scaling-out")
    page.set("scaling-format", "bfloat16")
    page.set("scaling-scale", 0)
    assert "0.00 % become 0" in page.text("scaling-out")
    page.set("scaling-mean", 10)
    page.set("scaling-format", "float16")
    assert "every scale overflows" in page.text("scaling-out")
    page.set("scaling-mean", -15)
    page.set("scaling-spread", 1)
    assert "2^6 loses least" in page.text("scaling-out")
    page.set("scaling-spread", 0)
    assert "a spread from 0.5 to 20" in page.text("scaling-out")


@pytest.mark.slow
def test_a_loss_scale_is_stepped_and_played(page: Page) -> None:
    overflows = [3, 8, 9]
    for i in range(16):
        page["sim-overflow" if i in overflows else "sim-step"].click()
    trace = simulate_scaler(steps=16, overflows=overflows, init=2**15, growth_interval=5)
    assert page.text("sim-out").startswith(f"scale {trace[-1].next_scale:g};")
    assert "16 steps, 3 skipped" in page.text("sim-out")
    page.set("sim-hysteresis", 2)
    assert "no step yet" in page.text("sim-out")
    page["sim-overflow"].click()
    assert page.text("sim-out").startswith("scale 32768; step 0 overflowed and was skipped")
    page.set("sim-growth", 0.5)
    assert "growth is at least 1" in page.text("sim-out")
    page.set("sim-growth", 4)
    page.set("sim-interval", 1)
    page.set("sim-init", 3)
    page.set("sim-backoff", 0.25)
    page["sim-step"].click()
    assert page.text("sim-out").startswith("scale 32;")
    page["sim-play"].click()
    assert page["sim-play"].get_attribute("aria-pressed") == "true"
    page.run("return new Promise((done) => setTimeout(done, 700))")
    page["sim-play"].click()
    steps = int(re.findall(r"(\d+) steps", page.text("sim-out"))[0])
    assert steps > 2
    page["sim-reset"].click()
    assert "0 steps" in page.text("sim-out")


@pytest.mark.slow
def test_memory_is_compared(page: Page) -> None:
    def row(name: str) -> list[str]:
        for line in page["memory-table"].find_elements("tag name", "tr"):
            if line.text.startswith(f"{name} "):
                return str(line.text).split()
        raise AssertionError(name)

    assert row("O0")[-3:] == ["112.00", "too", "large"]
    assert page.text("memory-out") == "fits in 80 GB: O3"
    page.press("memory-presets", "GPT-3")
    assert row("O0")[1] == "700.00"
    assert row("O0")[-3] == "2800"
    page.set("memory-world", 64)
    page.set("memory-sharding", "zero3")
    page.set("memory-optimizer", "fusedadam")
    assert row("O0")[-2:] == ["43.75", "fits"]
    page.set("memory-gpu", 40)
    assert "O3" in page.text("memory-out")
    page.set("memory-activations", "20e9")
    assert page.text("memory-out") == "nothing fits in 40 GB"
    page.set("memory-params", "-5")
    assert "at least 1, such as 7e9" in page.text("memory-out")


@pytest.mark.slow
def test_fp8_is_scaled_and_followed(page: Page) -> None:
    def row(name: str) -> list[float]:
        for line in page["fp8-table"].find_elements("tag name", "tr"):
            if line.text.startswith(f"{name} "):
                return [float(part) for part in line.text.split()[1::2]]
        raise AssertionError(name)

    assert row("tensor")[0] > 40 > 1 > row("1x32")[0]
    assert row("tensor")[2] == 0 < row("none")[2]
    before = page["fp8-chart"].get_attribute("innerHTML")
    page.set("fp8-scaling", "1x32")
    assert page["fp8-chart"].get_attribute("innerHTML") != before
    page.set("fp8-outlier", 0)
    assert row("tensor")[0] < 10
    page.set("fp8-spread", "0")
    assert page["fp8-spread"].get_attribute("aria-invalid") == "true"
    page["fp8-step"].click()
    assert "fits\n13 iterations, 0 too large" in page.text("fp8-out")
    page["fp8-spike"].click()
    assert "cut off, where a scale of its own would be" in page.text("fp8-out")
    page["fp8-inf"].click()
    assert "an inf makes the result NaN" in page.text("fp8-out")
    page["fp8-step"].click()
    assert "fits\n16 iterations, 2 too large" in page.text("fp8-out")
    factor = "return new lab.AmaxHistory(lab.formats.float8_e4m3fn, {}).fmt.max"
    assert page.run(factor) == 448
    page.set("fp8-margin", 17)
    assert "a whole number from 0 to 16" in page.text("fp8-out")
    page.set("fp8-margin", 8)
    assert "0 too large" in page.text("fp8-out")
    page["fp8-spike"].click()
    assert "0 too large" in page.text("fp8-out")  # what the margin is for


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_in_light_and_dark(page: Page, scheme: str, tmp_path: Path) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    width = page.run(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width[0] <= width[1] == 390
    paper = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    picture = tmp_path / "page.png"
    assert page.driver.save_screenshot(str(picture))
    assert picture.stat().st_size > 5000
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_everything_has_a_name_and_a_place_for_the_keyboard(page: Page) -> None:
    nameless = page.run(
        "return [...document.querySelectorAll('input, select')]"
        ".filter((e) => !e.labels.length).map((e) => e.id)"
    )
    assert nameless == []
    unnamed = "svg:not([role=img]), svg:not([aria-labelledby])"
    assert page.run(f"return document.querySelectorAll('{unnamed}').length") == 0
    unreachable = page.run(
        "return [...document.querySelectorAll('button, input, select')]"
        ".filter((e) => e.tabIndex < 0 && !e.closest('#bits-row')).length"
    )
    assert unreachable == 0
    assert page.run("return [...document.querySelectorAll('#bits-row [tabindex=\"0\"]')].length") == 1
