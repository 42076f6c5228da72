"""The pictures of the documentation: `python -m tests.pictures` (`make pictures`) draws them anew, light and dark."""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Thread

import anyio

from benchmarks.trace_view import record
from engine.tools.timeline.timeline_page import write_page
from tests import browser
from tests.browser import Browser, Page
from tests.e2e.server import serving

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SCHEMES = ("light", "dark")
AGENTS = 300  # requests


async def timeline(chromium: Browser, folder: Path) -> None:
    """docs/TRACE.md: one of many requests, what it waited for and who else was there."""
    trace = folder / "agents.jsonl"
    record(trace, AGENTS)
    write_page(trace)
    for scheme in SCHEMES:
        async with chromium.page(
            trace.with_suffix(".html").as_uri(), width=1280, height=800, color_scheme=scheme
        ) as page:
            await shown(page, "117")
            (IMAGES / f"timeline-{scheme}.png").write_bytes(await page.picture())


def asked(folder: Path, name: str) -> Path:
    """Write a server's trace of a long prompt with a short one at the same time: cold at first, then after
    a restart.
    """
    trace, question = folder / f"{name}.jsonl", " ".join(f"Rule {n}: say what step {n} did." for n in range(110))
    with serving("--kv-cache-dir", str(folder / "kv"), "--trace", str(trace)) as running:
        running.chat("What is Rekindle?", max_tokens=8)  # so that nothing below is a process's first
        short_request = Thread(
            target=running.chat, args=("Write a function that reverses a string.",), kwargs={"max_tokens": 60}
        )
        short_request.start()
        while not running.client.get("/props").json()["running"]:
            short_request.join(0.01)
        running.chat(f"{question} What is Rekindle?", max_tokens=60, temperature=0).raise_for_status()
        short_request.join()
        running.stop()
    return trace


async def story(chromium: Browser, folder: Path) -> None:
    """docs/STORY.md: the same prompt cold and after a restart."""
    for name in ("cold", "warm"):
        trace = await anyio.to_thread.run_sync(asked, folder, name)
        write_page(trace)
        for scheme in SCHEMES:
            async with chromium.page(
                trace.with_suffix(".html").as_uri(), width=1280, height=560, color_scheme=scheme
            ) as page:
                await shown(page, "3")
                (IMAGES / f"story-{name}-{scheme}.png").write_bytes(await page.picture())


async def shown(page: Page, number: str) -> None:
    """A request, with some room around it."""
    await page.until("document.documentElement.dataset.ready")
    await page.js(
        f"document.getElementById('search').value = '{number}', document.getElementById('tools').requestSubmit()"
    )
    for action in ("one", "out"):
        await page.click(f"[data-do={action}]")
    await page.js("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


async def main() -> None:
    program = browser.found()
    if program is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with Browser.opened(program, Path(folder) / "chromium", takes_pictures=True) as chromium:
            await timeline(chromium, Path(folder))
            await story(chromium, Path(folder))


if __name__ == "__main__":
    anyio.run(main)
