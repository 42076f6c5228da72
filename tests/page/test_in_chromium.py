"""Tests of what a person sees and does, with one server and one browser for all. They are skipped where there is no
Chromium.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import httpx
import pytest
from attrs import define, evolve, field

from adapters.http.app import build_app
from adapters.http.edge_options import AccessOptions, EdgeModel, EdgeOptions
from adapters.http.wire.server import RunningServer, ServerLimits, serve_app
from adapters.metrics import Metrics
from adapters.text.model_text import Text
from effects.all import EffectRequest, Launch, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import Tokens
from effects.model_details import ModelDetails
from effects.prefill import RunPrefill
from engine.settings.output.server_facts import CompressionFacts, ServerFacts
from states.settings import Settings
from tests.browser import SHIFT, Browser, Page, found
from tests.engine.play import SETTINGS, PlayedEngine, ScriptedDevice, engine
from tests.pairs import with_first
from tests.plain_http import NO_TLS
from tests.text import small

pytestmark = pytest.mark.skipif(found() is None, reason="no Chromium here: Debian's package is `chromium`")

KEY = "a key"
SAID = "Hello, **world**! <b onclick=alert(1)>No markup</b>\n\n```python\nprint('<i>')\n```\n\n- one\n- two"
IDLE = "document.querySelector('#turns [aria-busy]') === null && !document.querySelector('#send').hidden"
READY = "document.querySelector('#state').dataset.is === 'ready'"


@define
class Speaking(ScriptedDevice):
    """A device that says one text, whatever it is asked, and halts where a test wants it to."""

    says: Tokens = ()
    halts: int = 1 << 30  # before this token of every answer, until `go`
    halts_prefill: bool = False  # before any prompt is read, until `go`
    go: anyio.Event = field(factory=anyio.Event)

    async def halt(self, launch: Launch) -> None:
        for ask in launch.effect_requests:
            if self.halts_prefill and isinstance(ask.effect, RunPrefill):
                await self.go.wait()
            if isinstance(ask.effect, RunDecode) and self.count_deltas(ask.effect) == self.halts:
                await self.go.wait()

    def count_deltas(self, effect: RunDecode) -> int:
        """Return the place of the next token in its answer, from 1."""
        return effect.position + 1 - len(self.prompts[effect.slot])

    def answer(self, ask: EffectRequest) -> Outcome:
        outcome = super().answer(ask)
        if isinstance(outcome, Decoded) and isinstance(ask.effect, RunDecode):
            return Decoded((self.says[self.count_deltas(ask.effect)],))
        return outcome


@define
class Seen:
    """The page's server, and the browser it is seen in."""

    browser: Browser
    url: str
    serving: RunningServer
    engine: PlayedEngine
    device: Speaking

    def page(self, key: str | None = KEY, **how: object) -> AbstractAsyncContextManager[Page]:
        return opened(self, key, **how)

    async def idle(self) -> None:
        """Wait until no request is left in the world."""
        with anyio.fail_after(30):
            await self.engine.door.wait_until_empty()

    def halt_at(self, count_deltas: int) -> None:
        self.device.halts, self.device.go = count_deltas, anyio.Event()


@asynccontextmanager
async def opened(seen: Seen, key: str | None, **how: object) -> AsyncIterator[Page]:
    """With this key known, as if it had been given before."""
    stored = (
        "" if key is None else f"if (!sessionStorage.length) sessionStorage.setItem('rekindle.key', {json.dumps(key)})"
    )
    async with seen.browser.page(seen.url, script=stored, **how) as page:  # type: ignore[arg-type]
        if key == KEY:
            await page.until(READY)
        yield page


@pytest.fixture(scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seen]:
    text = Text.load(small.write(tmp_path_factory.mktemp("small")))
    await text.check()
    device = Speaking()
    device.before = device.halt
    settings = evolve(SETTINGS, max_context=4096, max_queue=8)
    listening: list[RunningServer] = []
    program, profile = found(), tmp_path_factory.mktemp("profile")
    assert program is not None
    (says,) = text.tokenizer.encode_now([SAID])
    device.says = (*says, text.tokenizer.end_tokens[0])
    async with engine(settings, device) as running, anyio.create_task_group() as tasks:
        options = EdgeOptions(EdgeModel("scripted", 4096, text.tokenizer.size), access=AccessOptions((KEY,)))
        app = build_app(running.door, text, options, Metrics())
        ready = anyio.Event()

        def on_listening(serving: RunningServer) -> None:
            listening.append(serving)
            ready.set()

        async def run() -> None:
            await serve_app(app, "127.0.0.1", 0, on_listening=on_listening, limits=ServerLimits(grace_s=2))

        tasks.start_soon(run)
        await ready.wait()
        async with Browser.opened(program, profile) as browser:
            yield Seen(browser, f"http://127.0.0.1:{listening[0].port}/", listening[0], running, device)
        listening[0].stop(now=True)
        await listening[0].end_event.wait()


@pytest.fixture(autouse=True)
async def free(seen: Seen) -> AsyncIterator[None]:
    """Let nothing halt, and wait until everything that a test has left behind has ended."""
    seen.device.halts = 1 << 30
    seen.device.halts_prefill = False
    yield
    seen.device.go.set()
    await seen.idle()


async def ask(page: Page, text: str = "Hello") -> None:
    await page.write("#message", text)
    await page.press("Enter")


async def test_it_opens_without_a_complaint_and_shows_the_server(seen: Seen) -> None:
    async with seen.page() as page:
        assert await page.text("#model") == "scripted"
        assert await page.js("document.querySelectorAll('#slots li').length") == 2
        assert await page.js("document.querySelectorAll('#tiles .tile').length") == 4
        await page.until("document.querySelector('#misses').textContent")
        assert page.errors == []


def build_facts(settings: Settings, size: int = 22 << 20) -> ServerFacts:
    details = ModelDetails(1024, "bfloat16", "bfloat16", size, (), 16.0, 16.0, None)
    compression = CompressionFacts("off", 0, 1.0, (), None, None, 0, "auto", freeze=False, hot_window=0)
    return ServerFacts("scripted", "", "cpu", details, compression, settings)


LIMITS = [(0, 0, "no draft"), (15, 0, "up to 15 draft tokens per step"), (0, 7, "up to 7 copied tokens per step")]


async def test_the_panel_of_speculation_says_what_a_step_proposes_at_most(seen: Seen) -> None:
    for drafted, copied, words in LIMITS:
        settings = evolve(seen.engine.event_loop.world.settings, max_proposals=drafted, max_copied=copied)
        seen.engine.door.facts = build_facts(settings)
        async with seen.page() as page:
            await page.until("document.querySelector('#speculation-note').textContent")
            assert await page.text("#speculation-note") == words
    seen.engine.door.facts = None


@pytest.mark.long
@pytest.mark.parametrize(("size", "hidden"), [(22 << 20, False), (8 << 30, True)])
async def test_only_a_small_model_is_said_to_make_things_up(seen: Seen, size: int, hidden: bool) -> None:
    seen.engine.door.facts = build_facts(seen.engine.event_loop.world.settings, size)
    async with seen.page() as page:
        assert await page.js("document.querySelector('#small').hidden") == hidden
        assert "makes things up" in await page.js("document.querySelector('#small').textContent")
    seen.engine.door.facts = None


TILE = "document.querySelector('#tiles b').innerText"
CURVE = "document.querySelector('#tiles svg')"


@pytest.mark.long
async def test_slots_that_give_no_tokens_are_said_to_read_prompts_or_to_answer(seen: Seen) -> None:
    seen.device.halts_prefill = True
    seen.device.go = anyio.Event()
    seen.device.halts = 4
    async with seen.page() as page:
        assert await page.text("#tiles .tile:nth-child(2) .more") == "no request is waiting"
        await ask(page)
        await page.until(f"{TILE} === 'reading prompts'")
        assert await page.js(CURVE) is None, "two or three points are no curve"
        seen.device.halts_prefill = False
        read, seen.device.go = seen.device.go, anyio.Event()
        read.set()
        await page.until(f"{TILE} === 'answering'")
        await page.until(CURVE)
        seen.device.go.set()
        await page.until(IDLE)
        assert page.errors == []


COLUMNS = "[...document.querySelectorAll('#requests-head th')].filter((one) => !one.hidden).map((one) => one.innerText)"
CUT = """[...document.querySelectorAll('.of-prompt, .of-answer, #requests-head th')]
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"""


@pytest.mark.long
async def test_states_that_no_request_was_in_have_no_column_and_nothing_is_cut(seen: Seen) -> None:
    async with seen.page(width=1440) as page:
        await ask(page)
        await page.until(IDLE)
        columns = await page.js(COLUMNS)
        assert {"#", "speculate", "prompt", "answer"} <= set(columns)
        assert not {"pflash", "restore", "park", "unpark"} & set(columns)
        # with every column, and the longest of what stands in the last two
        await page.js(
            """document.querySelectorAll('.requests [hidden]').forEach((one) => one.removeAttribute('hidden'));
            document.querySelector('.of-prompt span').textContent = '26,822';
            document.querySelector('.of-prompt .share').textContent = '100 % device';
            document.querySelector('.of-answer span').textContent = '1,581 at 120.5/s'"""
        )
        assert await page.js("document.querySelectorAll('#requests-head th').length") == 12
        assert await page.js(CUT) == []


async def test_an_answer_streams_in_and_is_text_wherever_it_looks_like_markup(seen: Seen) -> None:
    seen.halt_at(6)
    async with seen.page() as page:
        await ask(page)
        partly = await page.until("document.querySelector('.assistant .said p:not(.thinking)')?.innerText")
        assert "Hello".startswith(partly[:5])
        assert len(partly) < len(SAID)
        await page.until("document.querySelector('#requests .now')?.dataset.name === 'speculate'")
        seen.device.go.set()
        await page.until(IDLE)
        assert await page.text(".assistant strong") == "world"
        assert await page.text(".assistant pre code") == "print('<i>')"
        assert await page.js("[...document.querySelectorAll('.assistant li')].map((one) => one.innerText)") == [
            "one",
            "two",
        ]
        assert "<b onclick=alert(1)>No markup</b>" in await page.text(".assistant .said")
        assert await page.js("document.querySelector('.assistant b, .assistant i')") is None
        assert "prompt tokens" in await page.text(".assistant .figures")
        assert await page.js("document.querySelector('#heard').textContent") == SAID  # what a screen reader reads out
        assert page.errors == []


async def test_the_conversation_is_there_after_a_reload_and_goes_on(seen: Seen) -> None:
    async with seen.page() as page:
        await ask(page, "First")
        await page.until(IDLE)
        first = seen.device.prompts[seen.engine.event_loop.world.slots.slots[0].holder or 0]
        await page.reload()
        await page.until(READY)
        assert await page.text(".user .said") == "First"
        assert await page.text(".assistant strong") == "world"
        await page.write("#message", "Sec")
        await page.press("Enter", SHIFT)
        await ask(page, "ond")
        await page.until("document.querySelectorAll('.assistant .figures').length === 2")
        assert await page.js("document.querySelectorAll('.user .said')[1].textContent") == "Sec\nond"
        # the second prompt has the first one, its answer and the new message in it
        assert max(map(len, seen.device.prompts.values())) > len(first) + len(seen.device.says)
        await page.until(IDLE)
        await page.click("#new-chat")
        assert await page.js("document.querySelectorAll('.turn').length") == 0
        await page.reload()
        assert await page.js("document.querySelectorAll('.turn').length") == 0
        assert page.errors == []


@with_first("how")
@pytest.mark.parametrize("how", ["button", "key"])
async def test_an_answer_that_is_stopped_drains_and_leaves_the_world(seen: Seen, how: str) -> None:
    seen.halt_at(4)
    async with seen.page() as page:
        await ask(page)
        await page.until("document.querySelector('.assistant .said p:not(.thinking)')")
        assert len(seen.engine.event_loop.world.requests) == 1
        if how == "button":
            await page.click("#stop")
        else:
            await page.press("Escape")
        await page.until(IDLE)
        # what is in flight is waited for, and seen to be
        await page.until(
            "[...document.querySelectorAll('#requests .of-answer small')].some((one) => one.innerText === 'draining')"
        )
        seen.device.go.set()
        await seen.idle()
        assert not seen.engine.event_loop.world.requests
        assert all(not lane.running for lane in seen.engine.event_loop.world.lanes.values())
        assert seen.engine.closed[-1].finish == "cancelled"
        await page.until("document.querySelector('#requests tr .of-answer small').innerText === 'cancelled'")
        await page.until("document.querySelector('#requests-note').innerText.startsWith('none running')")
        assert "Stopped." in await page.text(".assistant .said")
        assert page.errors == []


async def test_the_prompt_box_shows_every_token_as_the_api_tells_them(seen: Seen) -> None:
    async with seen.page() as page:
        await page.click("#tab-prompt")
        assert await page.js("document.querySelector('#chat').hidden")
        prompt = await page.js("document.querySelector('#raw-text').value")
        await page.click("#raw-go")
        await page.until(
            "document.querySelector('#raw-figures').innerText && document.querySelector('#raw-stop').hidden"
        )
        body = {"prompt": prompt, "max_tokens": 96}
        async with httpx.AsyncClient(base_url=seen.url, trust_env=False, verify=NO_TLS) as client:
            answer = await client.post("v1/completions", json=body, headers={"x-api-key": KEY})
        assert (
            await page.js("document.querySelector('#raw-out').textContent")
            == prompt + answer.json()["choices"][0]["text"]
        )
        steps = await page.js("document.querySelectorAll('#raw-out .step').length")
        assert 1 < steps <= answer.json()["usage"]["completion_tokens"]
        assert page.errors == []


async def test_a_wrong_key_is_refused_told_and_asked_again(seen: Seen) -> None:
    async with seen.page(key="one that no longer holds") as page:
        await page.until("document.querySelector('#key').open")
        assert "refused this key" in await page.text("#key-why")
        assert await page.js("sessionStorage.getItem('rekindle.key')") is None
        assert await page.text("#model") == ""
        await page.write("#key-text", "a wrong one")
        await page.press("Enter")
        await page.until(
            "document.querySelector('#key').open && document.querySelector('#key-why').innerText.includes('refused')"
        )
        await page.press("Escape")
        await page.until("document.querySelector('#state').dataset.is === 'locked'")
        await page.click("#locked")
        await page.write("#key-text", KEY)
        await page.press("Enter")
        await page.until(READY)
        assert await page.text("#model") == "scripted"
        assert await page.js("sessionStorage.getItem('rekindle.key')") == KEY
        assert not await page.js("Object.values(localStorage).some((one) => one.includes('key'))")
        # the browser itself reports each refusal, and nothing else is reported
        assert page.errors
        assert all("401" in error for error in page.errors)


async def test_without_any_key_only_the_empty_page_is_seen(seen: Seen) -> None:
    async with seen.page(key=None) as page:
        await page.until("document.querySelector('#key').open")
        assert "Without a key" in await page.text("#key-why")
        assert (
            await page.js(
                "document.querySelector('#tiles').children.length + document.querySelector('#slots').children.length"
            )
            == 0
        )


LIGHT = (
    "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)"
)


@with_first("scheme")
@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
async def test_colours_are_the_systems_or_those_of_the_switch(seen: Seen, scheme: str, other: str) -> None:
    async with seen.page(color_scheme=scheme) as page:
        assert (await page.js(LIGHT) > 380) == (scheme == "light")
        while await page.js("document.documentElement.dataset.theme") != other:
            await page.click("#theme")
        assert (await page.js(LIGHT) > 380) == (other == "light")
        assert await page.js("document.querySelector('#theme').ariaLabel") == f"Colours: {other}"
        await page.reload()
        assert (await page.js(LIGHT) > 380) == (other == "light")
        assert page.errors == []


@with_first("width")
@pytest.mark.parametrize("width", [320, 390, 768])
async def test_nothing_is_wider_than_a_phone(seen: Seen, width: int) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    async with seen.page(width=width, height=800, mobile=True) as page:
        await ask(page, "x" * 300)
        await page.until(IDLE)
        assert await page.js(wide) == 0
        await page.click("#tab-prompt")
        assert await page.js(wide) == 0
        await page.click(".views a:last-child")
        assert await page.js("document.querySelector('#talk').offsetWidth") == 0
        await page.until("document.querySelector('#requests tr')?.offsetWidth")
        assert await page.js(wide) == 0
        assert page.errors == []


FOCUSED = """(() => {
    const one = document.activeElement, seen = getComputedStyle(one).outlineStyle !== "none";
    return one === document.body ? "" : (one.id || one.className || one.innerText) + (seen ? "" : " UNSEEN");
})()"""


async def test_everything_can_be_reached_and_is_named_without_a_mouse(seen: Seen) -> None:
    async with seen.page() as page:
        await ask(page)
        await page.until(IDLE)
        await page.reload()
        await page.until(READY)
        reached: list[str] = []
        for _ in range(40):
            await page.press("Tab")
            where = await page.js(FOCUSED)
            if not where or where in reached:
                break
            reached.append(where)
        assert not [one for one in reached if one.endswith("UNSEEN")]
        order = [reached.index(one) for one in ("skip", "theme", "tab-chat", "new-chat", "log", "message", "send")]
        assert order == sorted(order)
        await page.js("document.querySelector('#tab-chat').focus()")
        await page.press("ArrowRight")
        assert await page.js("document.activeElement.id") == "tab-prompt"
        assert not await page.js("document.querySelector('#prompt').hidden")
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        asked = {"button", "textbox", "spinbutton", "checkbox", "tab", "link", "image", "meter", "table", "region"}
        nodes = [one for one in tree if not one.get("ignored") and one.get("role", {}).get("value") in asked]
        assert len(nodes) > 8
        assert not [one for one in nodes if not one.get("name", {}).get("value")]


@pytest.mark.long
async def test_who_wants_less_motion_gets_none(seen: Seen) -> None:
    seen.halt_at(4)
    async with seen.page(reduced_motion="reduce") as page:
        await ask(page)
        await page.until("document.querySelector('#requests .now')")
        assert await page.js("document.getAnimations().length") == 0


STATES = """(() => {
    window.states = [];
    const state = document.querySelector("#state");
    new MutationObserver(() => states.push(state.dataset.is)).observe(state, {attributes: true});
})()"""


async def test_it_comes_back_by_itself_when_its_connection_is_lost(seen: Seen) -> None:
    async with seen.page() as page:
        await page.js(STATES)
        for connection in list(seen.serving.connections):
            connection.transport.abort()
        await page.until("states.includes('stopped') && states.at(-1) === 'ready'")
        await ask(page)
        await page.until(IDLE)
        assert await page.text(".assistant strong") == "world"
