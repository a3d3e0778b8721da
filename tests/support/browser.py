"""A real browser: headless Chromium, driven by chromedriver over the W3C WebDriver protocol. Nothing of either is mocked."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.waiting import WAIT_SECONDS, until

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    if shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("chromium-browser")):
        return ""
    return "no chromium with chromedriver is installed (make browser, as root on Debian)"


@dataclass
class Browser:
    """One window."""

    port: int
    session: str

    def go(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What a function with the body `script` returns in the page."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(args)})

    def wait(self, script: str, *args: Any) -> Any:
        """As `run`, again and again until it is true."""
        return until(lambda: self.run(script, *args), lambda: f"{script}: {self.run('return document.body.innerText')}")

    def text(self, selector: str) -> str:
        """What the element shows."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def type(self, selector: str, words: str) -> None:
        """Keys as a person presses them."""
        found = self._call("POST", "element", {"using": "css selector", "value": selector})
        self._call("POST", f"element/{next(iter(found.values()))}/value", {"text": words})

    def press(self, key: str) -> None:
        """One key, wherever the focus is."""
        steps = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._call("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def command(self, name: str, **params: Any) -> Any:
        """One command of the DevTools protocol."""
        return self._call("POST", "goog/cdp/execute", {"cmd": name, "params": params})

    def look(self, width: int, height: int, scheme: str = "light", *, reduced_motion: bool = False) -> None:
        """Shows the page as on a screen of this size, in a light or a dark scheme."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        features.append({"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"})
        self.command("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Writes the whole page as a PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings in the browser's log since the last look, blocked resources and scripts among them."""
        return [str(entry["message"]) for entry in self._call("POST", "se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("DELETE", "", None)

    def _call(self, method: str, path: str, body: Any) -> Any:
        return _exchange(self.port, method, f"/session/{self.session}/{path}".rstrip("/"), body)


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile below `folder`, which knows no host but loopback."""
    with tempfile.TemporaryFile() as log:
        driver = subprocess.Popen(
            [str(shutil.which("chromedriver")), "--port=0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            browser = _open(_port(driver, log), folder)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(WAIT_SECONDS)


def _port(driver: subprocess.Popen[bytes], log: Any) -> int:
    """Where chromedriver listens, from the line it says so in."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        log.seek(0)
        said = log.read().decode()
        if "started successfully on port " in said:
            return int(said.split("started successfully on port ")[1].split(".")[0])
        assert driver.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


def _open(port: int, folder: Path) -> Browser:
    # Whatever else it would look up does not exist: a page that asks for it fails, here as on any machine.
    arguments = [*ARGUMENTS, f"--user-data-dir={folder}/profile", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    options = {"args": arguments, "binary": shutil.which("chromium") or shutil.which("chromium-browser")}
    capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    made = _exchange(port, "POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
    return Browser(port, made["sessionId"])


def _exchange(port: int, method: str, path: str, body: Any) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        value = json.loads(connection.getresponse().read())["value"]
    if isinstance(value, dict) and "error" in value:
        raise AssertionError(f"{value['error']}: {value['message']}")
    return value
