"""A real browser without a window, with a profile of its own, driven over its DevTools pipe."""

from __future__ import annotations

import base64
import fcntl
import os
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.waiting import until

Scheme = Literal["dark", "light"]
Media = Literal["screen", "print"]
PROGRAM = shutil.which("chromium")
PATIENCE = 120.0  # seconds for one answer, on a machine with much else to do


class Browser:
    """One page. `fetched` has the address of everything that it asked for."""

    def __init__(self, send: int, receive: int) -> None:
        self.fetched: list[str] = []
        self._send, self._receive = send, receive
        self._left = b""
        self._number = 0
        self._session = ""
        page = next(one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self._call("Network.enable")

    def open(self, page: Path) -> None:
        """Load a page; return when everything in it is there."""
        self._call("Page.navigate", url=page.as_uri())  # answered when the new document has taken the place of the old
        until(lambda: self.value("document.readyState") == "complete", str(page))

    def look(self, width: int, scheme: Scheme = "light", media: Media = "screen") -> None:
        """How it is looked at from now on."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=wanted)

    def value(self, expression: str) -> Any:
        """What the expression comes to in the page."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, target: Path) -> None:
        """The whole page as a picture, for eyes."""
        target.parent.mkdir(parents=True, exist_ok=True)
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        target.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = msgspec.json.encode(message) + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        answer = self._until(lambda message: message.get("id") == number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            message = self._next()
            if message.get("method") == "Network.requestWillBeSent":
                self.fetched.append(message["params"]["request"]["url"])
            if wanted(message):
                return message

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._receive], [], [], PATIENCE)
            assert ready, f"no answer from the browser for {PATIENCE} s"
            piece = os.read(self._receive, 1 << 20)
            assert piece, "the browser has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        decoded: dict[str, Any] = msgspec.json.decode(message)
        return decoded


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile and its log in the folder; it has ended afterwards."""
    assert PROGRAM is not None
    # Root may not use the sandbox; what is opened is a page of ours. No network: it needs none.
    command = [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--no-first-run", "--proxy-server=127.0.0.1:9", "--remote-debugging-pipe",
        f"--user-data-dir={folder / 'profile'}", "about:blank",
    ]  # fmt: skip
    # The browser reads descriptor 3 and writes descriptor 4.
    ends = [*os.pipe(), *os.pipe()]
    listen, send, receive, answer = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    log = os.fspath(folder / "log")
    actions = [
        (os.POSIX_SPAWN_DUP2, listen, 3), (os.POSIX_SPAWN_DUP2, answer, 4),
        (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o600),
    ]  # fmt: skip
    pid = os.posix_spawn(PROGRAM, command, os.environ, file_actions=actions, setpgroup=0)
    os.close(listen)
    os.close(answer)
    try:
        yield Browser(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
