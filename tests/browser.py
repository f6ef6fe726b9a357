"""A headless Chromium for tests, over the W3C WebDriver protocol of chromedriver."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dstrain.launch.probe import free_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key of an element's id in answers, fixed by the protocol."""
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """A browser with one window."""

    def __init__(self, port: int, arguments: tuple[str, ...]) -> None:
        self._address = f"http://127.0.0.1:{port}"
        options = {"args": [*ARGUMENTS, *arguments]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}  # fmt: skip
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file, and wait until its charts are drawn."""
        self._call("POST", f"{self._session}/url", {"url": "about:blank"})
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri() + fragment})
        until = time.monotonic() + 30
        while self.run("return document.documentElement.dataset.ready") is None:
            assert time.monotonic() < until, self.console()
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """Run a script in the page; return what it returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """Click the middle of the first element, as a user does: it must be visible."""
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        self._call("POST", f"{self._session}/element/{found[ELEMENT]}/click", {})

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag with the mouse over an element, from and to these shares of its width."""
        left, top, width, height = self.run(f"const box = document.querySelector({selector!r}); box.scrollIntoView({{block: 'center'}}); const r = box.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]")  # fmt: skip
        y = round(top + height / 2)
        moves = [{"type": "pointerMove", "duration": 50, "x": round(left + share * width), "y": y} for share in (begin, (begin + end) / 2, end)]  # fmt: skip
        actions = [moves[0], *([{"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}] if end > begin else [])]  # fmt: skip
        source = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._call("POST", f"{self._session}/actions", {"actions": [source]})

    @contextmanager
    def screen(self, width: int, height: int = 844) -> Iterator[None]:
        """Context with a screen of this size in CSS pixels, as that of a phone: a window has at least 500."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        try:
            yield
        finally:
            self.send("Emulation.clearDeviceMetricsOverride")

    def set_color_scheme(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def send(self, command: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol; return its answer."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def console(self) -> list[str]:
        """Return messages of the console since the last call: errors, and violations of the page's policy."""
        return [entry["message"] for entry in self._read_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call, without that of the file itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self._read_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("file:", "about:", "data:"))]

    def close(self) -> None:
        self._call("DELETE", self._session)

    def _read_log(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("POST", f"{self._session}/se/log", {"type": name})
        return found

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:1000]}") from None


@contextmanager
def chromium(*arguments: str) -> Iterator[Browser]:
    """Start a browser; skip the test where none is installed."""
    driver = shutil.which("chromedriver")
    if driver is None or not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("needs chromium and chromedriver: apt install chromium chromium-driver")
    port = free_port()
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        browser = _connect(port, arguments)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait(20)


def _connect(port: int, arguments: tuple[str, ...]) -> Browser:
    until = time.monotonic() + 30
    while True:
        try:
            return Browser(port, arguments)
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
