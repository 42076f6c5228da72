"""The pictures of the documentation: `python -m tests.pictures` (`make pictures`) draws them anew, light and dark."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

from benchmarks.trace_view import record
from engine.timeline.view import written
from tests import browser
from tests.browser import Browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SCHEMES = ("light", "dark")
AGENTS = 300  # requests


async def timeline(chromium: Browser, folder: Path) -> None:
    """docs/TRACE.md: one of many requests, what it waited for and who else was there."""
    trace = folder / "agents.jsonl"
    record(trace, AGENTS)
    written(trace)
    for scheme in SCHEMES:
        async with chromium.page(
            trace.with_suffix(".html").as_uri(), width=1280, height=800, color_scheme=scheme
        ) as page:
            await page.until("document.documentElement.dataset.ready")
            await page.js(
                "document.getElementById('search').value = '117', document.getElementById('tools').requestSubmit()"
            )
            for action in ("one", "out"):
                await page.click(f"[data-do={action}]")
            await page.js("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            (IMAGES / f"timeline-{scheme}.png").write_bytes(await page.picture())


async def main() -> None:
    program = browser.found()
    if program is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with Browser.opened(program, Path(folder) / "chromium") as chromium:
            await timeline(chromium, Path(folder))


if __name__ == "__main__":
    anyio.run(main)
