"""A page in chromium, operated as a reader would."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FIELDS = """const field = (id) => document.getElementById(id);
const tell = (id, text) => {
  field(id).value = text;
  field(id).dispatchEvent(new Event("input", {bubbles: true}));
};
"""
"""For scripts: `field(id)`, and `tell(id, text)`, which types into it."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a driver of a browser without a window; skip the test, or fail it, where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    missing = "needs Debian's chromium and chromium-driver, or the like"
    if not binary or not driver:
        assert not os.environ.get("AMP_REQUIRE_BROWSER"), missing
        pytest.skip(missing)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
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
    """A page, by the names of its elements."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = address
        self.open()

    def open(self, state: str = "") -> None:
        """Load the page anew, with what follows the # of its address."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}{state and '#'}{state}")
        # On a busy machine the driver may return before.
        self.wait("return location.href !== 'about:blank' && document.readyState === 'complete'")

    def __getitem__(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        """Return the text of an element, with the minus sign that keyboards have."""
        return str(self[name].text).replace("\u2212", "-")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of elements, those that no eye sees included."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.run(script, selector))

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
            if button.get_attribute("textContent").replace("\u2212", "-") == label:
                self.click(button)
                return
        raise AssertionError(label)

    def click(self, element: Any) -> None:
        """Click on an element once it stays where it is: a page that still draws would move it away."""
        self.driver.execute_async_script(
            "const [element, done] = arguments;"
            "const at = () => JSON.stringify(element.getBoundingClientRect());"
            "const look = (before, times) => requestAnimationFrame(() => {"
            "  element.scrollIntoView({block: 'center', behavior: 'instant'});"
            "  const now = at();"
            "  if (now === before && times > 3) done(); else look(now, now === before ? times + 1 : 0);"
            "});"
            "look('', 0);",
            element,
        )
        element.click()

    def wait(self, script: str) -> Any:
        """Return what a script returns as soon as that is true."""
        for _ in range(400):
            if found := self.run(script):
                return found
            time.sleep(0.05)
        raise AssertionError(script)

    def look(self, width: int, scheme: str) -> None:
        """Show the page on a screen of a width, in light or dark colours."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def close(self) -> None:
        """Give the browser back as it was, and fail if the page complained."""
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert self.driver.get_log("browser") == []
