"""A headless Chromium, driven over DevTools' pipe: what tests of the page and its pictures need, and no driver program.

Every page has a context of its own, so nothing that one stores is there in the next. Input is real: keys and clicks go
the way of a person's. Waiting is for conditions, within a bound.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field

PATIENCE_S = 30.0  # for any one condition: a machine that does other things as well is slow
MOST_BYTES = 64 << 20  # of one message: a picture of a whole page
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-dev-shm-usage",  # containers have little of it
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    # A sixth of the processor time: no window and no renderer beside those of pages, and no thread to compose each.
    "--no-startup-window",
    "--disable-features=SpareRendererForSitePerProcess",
)
# Chromium 156 never answers a request for a picture if it has this flag.
UNSEEN = "--disable-threaded-compositing"
KEYS: Mapping[str, tuple[int, str]] = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, "")}
SHIFT = 8


def found() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def spawned(command: list[str], incoming: int, outgoing: int, environment: Mapping[str, str]) -> int:
    """A process, in a group of its own, that reads our messages from descriptor 3 and writes its own to 4."""
    # out of the way of 3 and 4
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 16) for one in (incoming, outgoing)]
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    moved = [(os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(high, 3)]
    try:
        return os.posix_spawn(command[0], command, environment, file_actions=[*silent, *moved], setsid=True)
    finally:
        for one in (incoming, outgoing, *high):
            os.close(one)


@define(eq=False)
class Browser:
    """Open inside `opened`."""

    _out: asyncio.WriteTransport
    _last: int = 0
    _answers: dict[int, asyncio.Future[Any]] = field(factory=dict)
    _pages: dict[str, Page] = field(factory=dict)

    @staticmethod
    @asynccontextmanager
    async def opened(program: str, folder: Path, *, takes_pictures: bool = False) -> AsyncIterator[Browser]:
        """folder: for what it writes. takes_pictures: `Page.picture` is called, which costs a thread a page."""
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = [
            *FLAGS,
            *([] if takes_pictures else [UNSEEN]),
            f"--user-data-dir={folder}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        process = spawned([program, *flags, "about:blank"], theirs_in, theirs_out, {**os.environ, "HOME": str(folder)})
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=MOST_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        incoming, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours_in, "rb"))
        outgoing, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(ours_out, "wb"))
        browser = Browser(outgoing)
        listening = loop.create_task(browser._listen(reader))
        try:
            yield browser
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            await anyio.to_thread.run_sync(os.waitpid, process, 0)
            await listening
            incoming.close()
            outgoing.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    if not (answer := self._answers.pop(message["id"])).done():
                        answer.set_result(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.heard(message["method"], message["params"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the browser has ended"))

    async def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params, **({"sessionId": session} if session else {})}
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        self._out.write(json.dumps(message).encode() + b"\0")
        with anyio.fail_after(PATIENCE_S):
            message = await answer
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    @asynccontextmanager
    async def page(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        scale: float = 1,
        mobile: bool = False,
        script: str = "",
        **media: str,
    ) -> AsyncIterator[Page]:
        """A tab that has loaded. script: runs before those of any document.

        media: what the person prefers, e.g. `color_scheme="dark"`.
        """
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for part in ("Page", "Runtime", "Log"):
            await page.call(f"{part}.enable")
        shape = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        await page.call("Emulation.setDeviceMetricsOverride", **shape)
        wanted = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in media.items()]
        await page.call("Emulation.setEmulatedMedia", features=wanted)
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        try:
            await page.open(url)
            yield page
        finally:
            del self._pages[session]
            await self.call("Target.disposeBrowserContext", browserContextId=context)


@define(eq=False)
class Page:
    """A tab. errors: what its console has complained of, and every script that failed."""

    browser: Browser
    session: str
    errors: list[str] = field(factory=list)
    _loaded: asyncio.Event = field(factory=asyncio.Event)

    def heard(self, method: str, message: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(message["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and message["type"] in {"error", "warning", "assert"}:
            self.errors.append(str(message["args"]))
        elif method == "Log.entryAdded" and message["entry"]["level"] in {"error", "warning"}:
            self.errors.append(f"{message['entry']['text']} {message['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.browser.call(method, self.session, **params)

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await self._load()

    async def reload(self) -> None:
        self._loaded.clear()
        await self.call("Page.reload")
        await self._load()

    async def _load(self) -> None:
        with anyio.fail_after(PATIENCE_S):
            await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """Return the value of the expression in the page. Promises are awaited."""
        message = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in message:
            raise RuntimeError(f"{expression}: {message['exceptionDetails'].get('exception', {}).get('description')}")
        return message["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Once this is true, what it is."""
        within = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {1000 * (PATIENCE_S - 5)};
            const look = () => {{
                const found = (() => {condition})();
                if (found) resolve(found);
                else if (performance.now() > end) reject(new Error("it never was: " + document.body.innerText));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        return await self.js(within)

    async def text(self, selector: str) -> str:
        said: str = await self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return said

    async def click(self, selector: str) -> None:
        where = await self.until(
            f"""(() => {{
                const one = document.querySelector({json.dumps(selector)});
                if (!one || one.disabled) return null;
                one.scrollIntoView({{block: "center", behavior: "instant"}});
                const box = one.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
                const top = document.elementFromPoint(x, y);
                return box.width && top && (one.contains(top) || top.contains(one)) ? {{x, y}} : null;
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    async def write(self, selector: str, text: str) -> None:
        """Insert a text into the field, as if it were typed there."""
        await self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **named)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def picture(self) -> bytes:
        """PNG of what is seen. Only in a browser that was opened with `takes_pictures`."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])
