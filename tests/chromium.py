"""A headless Chromium, driven over a pair of pipes: nothing but the browser itself is needed."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, _NAMES)), None)
TIMEOUT_S = 240.0

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


class Tab:
    """One page of the browser. Everything that it complained of or asked for is kept."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one for one in targets if one["type"] == "page")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.media(dark=dark)
        self.call("Page.navigate", url=path.as_uri())
        self.wait(
            "document.readyState === 'complete' && "
            "performance.getEntriesByName('first-contentful-paint').length > 0"
        )

    def media(self, *, dark: bool = False, paper: bool = False) -> None:
        """What the viewer prefers, and whether the page is being printed."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])

    def value(self, script: str) -> Any:
        """What an expression comes to in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not self.value(condition):
            assert time.monotonic() < end, f"never became true: {condition}"
            time.sleep(0.02)

    def press(self, key: str, code: int) -> None:
        """A key, down and up."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def click(self, selector: str) -> None:
        """The middle of an element, by the mouse."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        box = self.value(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._keep(answer)

    def _keep(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded":
                self.complaints.append(str(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], TIMEOUT_S)
            assert ready, "the browser does not answer"
            found = os.read(self._from, 1 << 16)
            assert found, "the browser went away"
            self._buffer += found
        message, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextlib.contextmanager
def opened_tab(profile: Path) -> Iterator[Tab]:
    """A browser with one page; it ends with the block."""
    assert PROGRAM is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()

    def hand_over() -> None:
        # The protocol's pipes are descriptors 3 and 4; out of each other's way first.
        os.dup2(commands_out, 103)
        os.dup2(answers_in, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    words = """
        --headless=new --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage
        --no-first-run --remote-debugging-pipe
    """.split()
    browser = subprocess.Popen(
        [PROGRAM, *words, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=hand_over,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Tab(commands_in, answers_out)
    finally:
        browser.terminate()
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        for descriptor in (commands_out, commands_in, answers_out, answers_in):
            os.close(descriptor)
