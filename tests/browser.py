"""A real browser for tests of pages: Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP, PHONE = (1280, 900), (360, 740)
_START_LIMIT = 60.0
_LIMIT = 60.0


class Page:
    """One tab. Everything that it asked the network for, and every complaint of its console, is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket, self._session = socket, session
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol. Raises RuntimeError with what the browser has against it."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": number, "sessionId": self._session, "method": method, "params": parameters}
        )
        answer = await asyncio.wait_for(self._answers[number], _LIMIT)
        del self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def open(self, address: str, *, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Show a report, once everything in it is ready."""
        width, height = size
        phone = {"mobile": size == PHONE, "deviceScaleFactor": 2 if size == PHONE else 1}
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=address)
        await self.until("document.documentElement?.dataset.ready === 'true'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    async def until(self, expression: str, limit: float = _LIMIT) -> None:
        """Wait until an expression is true. Raises TimeoutError with it."""
        deadline = time.monotonic() + limit
        while not await self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {limit:g} s: {expression}; console: {self.complaints}")
            await asyncio.sleep(0.02)

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def point(self, selector: str, *, across: float = 0.5) -> None:
        """Move the mouse over an element, ``across`` of its width from the left."""
        box = await self.evaluate(
            f"(() => {{ const element = document.querySelector({selector!r});"
            " element.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const box = element.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        left, top, width, height = box
        await self.call(
            "Input.dispatchMouseEvent", type="mouseMoved", x=left + across * width, y=top + height / 2
        )

    async def screenshot(self, height: int | None = None) -> bytes:
        """What is in sight, or the uppermost ``height`` pixels of the page, as PNG."""
        clip = {}
        if height is not None:
            width = await self.evaluate("innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        shot = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=height is not None, **clip
        )
        return base64.b64decode(shot["data"])

    def take(self, message: dict[str, Any]) -> None:
        """What the browser says: an answer or an event."""
        if (answer := self._answers.get(message.get("id", -1))) is not None:
            if not answer.done():
                answer.set_result(message)
            return
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str([a.get("value") for a in parameters["args"]]))
            case "Log.entryAdded":
                self.complaints.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")


@contextlib.asynccontextmanager
async def browse() -> AsyncIterator[Page]:
    """A page in a browser of its own, with a profile of its own; both are gone afterwards."""
    assert CHROMIUM, "there is no chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            address = await _address(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
                page = await _attach(socket)
                listening = asyncio.create_task(_listen(socket, page))
                try:
                    for domain in ("Page", "Network", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                finally:
                    listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(file: Path, process: asyncio.subprocess.Process) -> str:
    """Where the browser listens; it writes that into its profile."""
    deadline = time.monotonic() + _START_LIMIT
    while not (found := _lines(file)):
        if process.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{CHROMIUM} did not start within {_START_LIMIT:g} s ({process.returncode})")
        await asyncio.sleep(0.05)
    return f"ws://127.0.0.1:{found[0]}{found[1]}"


def _lines(file: Path) -> list[str]:
    """Port and path; nothing before both are there."""
    found = file.read_text().splitlines() if file.exists() else []
    return found if len(found) == 2 else []


async def _attach(socket: aiohttp.ClientWebSocketResponse) -> Page:
    async def ask(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        await socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await socket.receive_json(timeout=_LIMIT)).get("id") != number:
            pass
        return message["result"]

    target = await ask(-1, "Target.createTarget", url="about:blank")
    attached = await ask(-2, "Target.attachToTarget", targetId=target["targetId"], flatten=True)
    return Page(socket, attached["sessionId"])


async def _listen(socket: aiohttp.ClientWebSocketResponse, page: Page) -> None:
    async for message in socket:
        page.take(message.json())
