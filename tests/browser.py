"""A real browser without a window, for the pages that the project makes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
_COMMAND = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--remote-debugging-pipe",
)
# The browser reads its requests from descriptor 3, and writes its answers to 4.
_START = """
import fcntl, os, sys
requests, answers = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(requests, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Controls one page of a browser by sending JSON messages over two pipes."""

    def __init__(self, requests: BinaryIO, answers: BufferedReader) -> None:
        self._requests = requests
        self._answers = answers
        self._buffer = b""
        self._num_sent = 0
        self._session: dict[str, str] = {}
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 60) -> None:
        """Return as soon as an expression is true."""
        end_s = time.monotonic() + timeout_s
        while not self.value(script):
            assert time.monotonic() < end_s, f"never true: {script}"
            time.sleep(0.05)

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        answer = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_sent += 1
        request = {"id": self._num_sent, "method": method, "params": parameters, **self._session}
        self._requests.write(json.dumps(request).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _read(self) -> bytes:
        while b"\0" not in self._buffer:
            part = self._answers.read1(1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with an empty profile in a folder."""
    theirs_in, requests = os.pipe()
    answers, theirs_out = os.pipe()
    start = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out)]
    process = subprocess.Popen(
        [*start, str(CHROMIUM), *_COMMAND, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        with os.fdopen(answers, "rb") as read, os.fdopen(requests, "wb", buffering=0) as written:
            yield Browser(written, read)
    finally:
        process.kill()
        process.wait()
