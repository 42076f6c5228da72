"""Tests of the timeline's page in a browser: it opens without an error, and shows what is clicked, searched or chosen
by a key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace_view import record
from effects.ids import DeviceFailed, RequestId
from effects.job import Job
from engine.core.replay import CUT_SHORT
from engine.tools.timeline.timeline_page import write_page
from states.events import Submitted
from states.settings import Settings
from tests import browser
from tests.browser import Browser, Page
from tests.engine.stories import STORIES, Teller
from tests.timeline.test_view import HOSTILE

PROGRAM = browser.found()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")
REQUESTS = 40
GUTTER, ROW = 96, 18  # of page/draw.js


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("timeline") / "agents.jsonl"
    record(path, REQUESTS)
    write_page(path)
    return path.with_suffix(".html").as_uri()


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    assert PROGRAM is not None
    async with Browser.opened(PROGRAM, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@asynccontextmanager
async def shown(chromium: Browser, url: str, **how: Any) -> AsyncIterator[Page]:
    """Until all is drawn; nothing was complained of, to the end."""
    async with chromium.page(url, **how) as page:
        await page.until("document.documentElement.dataset.ready")
        yield page
        assert page.errors == []


async def read_details(page: Page, wanted: str) -> str:
    """Once it tells of that, all that it tells."""
    text = "document.getElementById('detail').innerText"
    found: str = await page.until(f"{text}.includes({json.dumps(wanted)}) && {text}")
    return found


async def mouse(page: Page, element: str, x: float, y: float) -> None:
    """Press and release there, counted from the element's corner."""
    box = await page.js(f"(({{x, y}}) => [x, y])(document.getElementById('{element}').getBoundingClientRect())")
    where = {"x": box[0] + x, "y": box[1] + y, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        await page.call("Input.dispatchMouseEvent", type=kind, **where)


async def press(page: Page, *keys: str) -> None:
    for key in keys:
        await page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        await page.call("Input.dispatchKeyEvent", type="keyUp", key=key)


async def test_it_opens_and_a_click_tells_of_an_event_and_what_it_led_to(chromium: Browser, timeline: str) -> None:
    async with shown(chromium, timeline) as page:
        assert f"{REQUESTS} requests" in await page.text("#facts")
        assert "prompt tokens" in await page.text("#hits")
        legend = await page.text("#legend")
        assert {"Prefilling", "Speculating", "LookingUp"} <= set(legend.split())
        await mouse(page, "bars", GUTTER + 1, 2 * ROW + ROW / 2)
        assert "Submitted" in await read_details(page, "Request 2")
        await mouse(page, "bars", GUTTER - 40, ROW / 2)
        first = await read_details(page, "Request 0")
        assert "It led to" in first
        assert "FindPrefix for request 0" in " ".join(first.split())
        assert "job.prompt (how many)" in first


# This browser hides scroll bars, so a border takes the room of one, before anything is drawn.
BORDER = """document.addEventListener("readystatechange", () => {
    document.getElementById("rows").style.borderRight = "15px solid"
}, { once: true })"""


async def test_a_moment_has_one_place_in_rows_and_above_them(chromium: Browser, timeline: str) -> None:
    async with shown(chromium, timeline, script=BORDER) as page:
        widths = "['overview', 'tracks', 'bars'].map((name) => document.getElementById(name).clientWidth)"
        whole = await page.js("document.getElementById('rows').offsetWidth")
        assert await page.js(widths) == [whole - 15] * 3


async def test_keys_go_through_requests_and_their_events_and_search_finds_one(chromium: Browser, timeline: str) -> None:
    async with shown(chromium, timeline) as page:
        await press(page, "ArrowDown", "ArrowDown")
        await read_details(page, "Request 1")
        await press(page, "n")
        again = await read_details(page, "event")
        await press(page, "z", "+", "ArrowRight", "-", "f", "p", "End")
        assert await read_details(page, f"Request {REQUESTS - 1}") != again
        await press(page, "/")
        await page.call("Input.insertText", text="17")
        await page.js("document.getElementById('tools').requestSubmit()")
        await read_details(page, "Request 17")
        await page.js(
            "document.getElementById('search').value = '4444'; document.getElementById('tools').requestSubmit()"
        )
        await read_details(page, "There is no request 4444")


# What the page writes on its canvases: canvas, text, x, y, width.
WRITTEN = """(() => {
    const write = CanvasRenderingContext2D.prototype.fillText;
    window.written = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...most) {
        window.written.push([this.canvas.id, text, x, y, this.measureText(text).width]);
        return write.call(this, text, x, y, ...most);
    };
})()"""
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
STATES = {"Waiting", "LookingUp", "Restoring", "Prefilling", "Speculating", "Snapshotting"}


@pytest.mark.long
async def test_no_mark_lies_on_the_name_of_a_state(chromium: Browser, timeline: str) -> None:
    compared = 0
    async with shown(chromium, timeline, script=WRITTEN) as page:
        for request in range(REQUESTS):
            await page.js(
                f"document.getElementById('search').value = '{request}';"
                "document.getElementById('tools').requestSubmit()"
            )
            await page.click("[data-do=one]")
            await page.js(f"window.written.length = 0; {DRAWN}")
            await page.js(f"document.getElementById('rows').dispatchEvent(new Event('scroll')); {DRAWN}")
            texts = [
                (text, x, y, width) for canvas, text, x, y, width in await page.js("window.written") if canvas == "bars"
            ]
            for _, mark, row, _ in (one for one in texts if one[0] in {"d", "h"}):
                for text, x, y, width in (one for one in texts if one[0] in STATES):
                    if y == row:
                        compared += 1
                        assert mark + 4 <= x or x + width <= mark - 11, f"request {request}: {text}"
    assert compared > 10


@pytest.mark.long
async def test_the_settings_of_the_server_are_folded_away(chromium: Browser, timeline: str) -> None:
    async with shown(chromium, timeline) as page:
        assert "max_context" not in await page.text("#facts")
        assert not await page.js("document.querySelector('#settings').open")
        await page.click("#settings summary")
        assert "max_context" in await page.text("#settings")


@pytest.mark.long
async def test_a_launch_tells_who_was_in_it_and_a_name_leads_there(chromium: Browser, timeline: str) -> None:
    async with shown(chromium, timeline) as page:
        await mouse(page, "tracks", GUTTER + 2, 18 + 40 + 10)
        launch = await read_details(page, "Launch on lane 0")
        assert "RunPrefill" in launch or "RunDecode" in launch
        assert "The event that it was launched after" in launch
        await page.click("#detail .card button")
        await read_details(page, "Time in each state")


@pytest.mark.long
async def test_the_wheel_zooms_a_drag_moves_and_the_theme_changes(chromium: Browser, timeline: str) -> None:
    async with shown(chromium, timeline, color_scheme="dark") as page:
        seen = "document.getElementById('tracks').toDataURL()"
        box = await page.js("(({x, y}) => [x, y])(document.getElementById('tracks').getBoundingClientRect())")

        async def hand(kind: str, x: float, **how: Any) -> None:
            await page.call("Input.dispatchMouseEvent", type=kind, x=box[0] + x, y=box[1] + 60, **how)

        await page.js(f"window.before = {seen}, 1")
        await hand("mouseWheel", 300, deltaX=0, deltaY=-400, modifiers=2)
        await page.until(f"{seen} !== window.before")
        await page.js(f"window.before = {seen}, 1")
        for kind, x in (("mousePressed", 300), ("mouseMoved", 200), ("mouseReleased", 200)):
            await hand(kind, x, button="left", buttons=1)
        await page.until(f"{seen} !== window.before")
        paper = "getComputedStyle(document.documentElement).getPropertyValue('--paper')"
        dark = await page.js(paper)
        await page.click("[data-do=theme]")
        assert await page.until(f"{paper} !== {json.dumps(dark)} && {paper}")


async def test_names_that_want_to_be_script_are_text(chromium: Browser, tmp_path: Path) -> None:
    teller = Teller(Settings(slots=1, max_context=256, chunk=32, block_size=16))
    teller.tell(RequestId(1), Submitted(Job((1, 2, 3), 4)), DeviceFailed("broken", HOSTILE))
    path = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    path.write_text(teller.end().replace('"scripted"', json.dumps(HOSTILE), 1))
    write_page(path, tmp_path / "page.html")
    async with shown(chromium, (tmp_path / "page.html").as_uri()) as page:
        assert await page.text("#name") == path.name
        assert HOSTILE[:12] in await page.text("#facts")
        await press(page, "ArrowDown", "n")
        assert HOSTILE[:60] in await read_details(page, "DeviceFailed")
        assert await page.js("document.querySelectorAll('img, script:not([type=module])').length") == 0


async def test_what_is_wrong_with_a_trace_is_said_on_the_page(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(STORIES["a_full_house"]().splitlines(keepends=True)[:-4]))
    assert write_page(path).status == CUT_SHORT
    async with shown(chromium, path.with_suffix(".html").as_uri()) as page:
        assert "cut short after event" in await page.text("#trouble")
