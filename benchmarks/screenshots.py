"""Takes the pictures of docs/PAGE.md: the demo, started a second time, with a conversation and requests of agents.

    python -m benchmarks.screenshots --into docs/images

Needs a Chromium (Debian's package `chromium`). Nothing here is measured: times in the pictures are this machine's.
"""

from __future__ import annotations

import io
import tempfile
import threading
from pathlib import Path

import anyio
from PIL import Image

from benchmarks.arguments import benchmark_parser
from tests.browser import Browser, Page, found
from tests.e2e.server import Running, serving

IDLE = "document.querySelector('#turns [aria-busy]') === null && !document.querySelector('#send').hidden"
BUSY = """document.querySelectorAll("#requests .now").length > 3 && document.querySelector("#requests .s-speculate.now")
    && parseFloat(document.querySelector("#tiles b").textContent) > 0"""
TOLD = "document.querySelector('#raw-figures').innerText && document.querySelector('#raw-stop').hidden"
QUESTIONS = ("What is Rekindle?", "Write a function that reverses a string.")
RULES = [f"Rule {n}: read a file before you change it, and say in a line what step {n} did." for n in range(60)]
MOST_BYTES = 300_000


def agent(running: Running, day: str, task: int) -> None:
    system = " ".join(["You are an agent.", *RULES[:25], f"Today is {day}.", *RULES[25:]])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Task {task}: what is Rekindle?"}]
    running.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 120, "temperature": 0})


def start_agents(running: Running, days: list[str]) -> list[threading.Thread]:
    """Agents at work."""
    threads = [threading.Thread(target=agent, args=(running, day, task)) for task, day in enumerate(days)]
    for thread in threads:
        thread.start()
    return threads


async def save(page: Page, path: Path) -> None:
    """Save a picture in 256 colours. The page has fewer, apart from the edges of letters."""
    picture = Image.open(io.BytesIO(await page.picture())).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    packed = io.BytesIO()
    picture.save(packed, "png", optimize=True)
    await anyio.Path(path).write_bytes(packed.getvalue())
    print(f"{path}: {picture.width} x {picture.height}, {packed.tell()} bytes")
    assert packed.tell() < MOST_BYTES


async def likes(page: Page, scheme: str) -> None:
    await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


async def pictures(running: Running, program: str, folder: Path, into: Path) -> None:
    async with (
        Browser.opened(program, folder, takes_pictures=True) as browser,
        browser.page(running.url + "/", width=1440, height=960, color_scheme="light") as page,
    ):
        await page.until("document.querySelector('#state').dataset.is === 'ready'")
        await anyio.to_thread.run_sync(agent, running, "Monday", 100)
        for question in QUESTIONS:
            await page.write("#message", question)
            await page.press("Enter")
            await page.until(IDLE)
        await page.click("#turns li:last-child .why summary, #turns li:nth-last-child(3) .why summary")
        for scheme in ("light", "dark"):
            await likes(page, scheme)
            agents = start_agents(running, ["Monday", "Monday", "Tuesday", "Monday", "Friday", "Monday"])
            await page.until(BUSY)
            await save(page, into / f"page-{scheme}.png")
            for each in agents:
                await anyio.to_thread.run_sync(each.join)
        await page.click("#tab-prompt")
        await page.click("#raw-go")
        await page.until(
            "document.querySelector('#raw-figures').innerText && document.querySelector('#raw-stop').hidden"
        )
        await likes(page, "light")
        await save(page, into / "page-prompt.png")
        await page.click("#tab-chat")
        shape = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        await page.call("Emulation.setDeviceMetricsOverride", **shape)
        await page.click(".views a:last-child")
        await likes(page, "dark")
        await save(page, into / "page-phone.png")
        assert not page.errors, page.errors


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--into", type=Path, default=Path("docs/images"))
    into: Path = parser.parse_args().into
    program = found()
    if program is None:
        raise SystemExit("there is no Chromium here: Debian's package is `chromium`")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        options = ("--kv-cache-dir", str(folder / "kv"), "--kv-cache-min-tokens", "64")
        with serving(*options) as first:
            agent(first, "Monday", 0)
            first.stop()
        with serving(*options) as second:
            anyio.run(pictures, second, program, folder / "profile", into)


if __name__ == "__main__":
    main()
