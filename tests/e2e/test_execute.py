"""`replay --execute` on the demo: what was loaded is computed, in any order in which it may have come, and hostile
traces cost neither memory nor a traceback.
"""

from __future__ import annotations

import json
import resource
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zstandard
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.ids import LeaseId, RequestId
from effects.job import Job
from effects.lookup import FindPrefix, PrefixFound
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from engine.__main__ import main
from engine.core.event_loop import Envelope
from engine.core.replay import ReplayDiffers, TraceCutShort
from engine.core.trace import VERSION, Header, Recorder, converter, encode
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.re_execute import execute, read_options
from engine.settings.config_file import parse_values
from states.events import Event, ForRequest, Submitted
from states.rates import Rates
from states.settings import Settings
from states.world import advance, make_world

SHAPE = {"device": "cpu", "max_ctx": 2048, "slots": 1, "threads": 1}
EVEN = Rates(prefill=(1000,), loads={"disk": 1000})  # half of what was found is computed while the rest is loaded
PROMPT = tuple(10 + 37 * n % 4000 for n in range(1500))
FOUND = 1472
ONE = RequestId(1)


@asynccontextmanager
async def loaded() -> AsyncIterator[LoadedModel]:
    target = await load_target(
        parse_values({**SHAPE, "disk_prefix_cache": "off", "host_cache_budget": 0, "draft": "none"})
    )
    try:
        yield target
    finally:
        await target.close()


class Recording:
    """One request, whose restore is done when its front is not yet, recorded as the event loop would."""

    def __init__(self, target: LoadedModel, file: Path) -> None:
        self.file, self.target, self.events = file, target, deque[Event]()
        self.settings = evolve(target.settings, store=True, rates=EVEN)
        self.recorder = Recorder(file, Header(VERSION, "test", self.settings, target.identity, {**SHAPE}))
        self.loaded: BlocksRestored | None = None
        self.order = list[Event]()

    async def play(self) -> None:
        self.recorder.start()
        try:
            await self.fold()
        finally:
            self.recorder.close()

    async def fold(self) -> None:
        world, seq = make_world(self.settings), 0
        self.events.append(Submitted(Job(PROMPT, max_tokens=4)))
        while self.events:
            self.order.append(event := self.events.popleft())
            world, outs = advance(world, ForRequest(ONE, event))
            self.recorder.record(Envelope(seq, seq, ForRequest(ONE, event)), outs, world)
            seq += 1
            for out in outs:
                await self.carry_out(out)

    async def carry_out(self, out: object) -> None:
        match out:
            case EffectRequest(request, OpenSlot() as opening):
                self.target.executor.open(request, opening)
            case EffectRequest(_, FindPrefix()):
                self.events.append(PrefixFound(LeaseId(1), FOUND, "disk"))
            case EffectRequest(_, RestoreBlocks(start=start, stop=stop)):
                self.loaded = BlocksRestored(start, stop, 1)
                self.events.appendleft(self.loaded)
            case EffectRequest(_, SaveSnapshot(tokens=tokens)):
                self.events.append(SnapshotSaved(len(tokens), 0))
            case Launch((EffectRequest(_, RunPrefill(stop=stop)),)):
                self.events += await self.target.executor.perform(out)
                if self.loaded is not None and stop == self.loaded.start:
                    await self.load(self.loaded.start, self.loaded.stop)
            case Launch():
                self.events += await self.target.executor.perform(out)

    async def load(self, start: int, stop: int) -> None:
        """The rows that a store would have brought."""
        chunk = self.settings.chunk
        for at in range(start, stop, chunk):
            await self.target.executor.perform(Launch((EffectRequest(ONE, RunPrefill(0, at, min(at + chunk, stop))),)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
async def session(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    async with loaded() as target:
        session = Recording(target, tmp_path_factory.mktemp("trace") / "mixed.jsonl")
        await session.play()
    return session


@pytest.mark.timeout(300)
async def test_a_load_that_was_done_before_the_front_is_no_divergence(session: Recording) -> None:
    at = {type(event): place for place, event in reversed(list(enumerate(session.order)))}
    assert session.loaded is not None
    assert session.loaded.start > session.settings.chunk, "the front has several chunks"
    assert at[BlocksRestored] < at[PrefillAdvanced], "and none of them was done when the load was"
    run, tokens = await execute(session.file, None)
    assert run.is_complete
    assert tokens == 4


@pytest.mark.timeout(300)
async def test_a_killed_servers_trace_is_executed_as_far_as_it_goes_and_says_so(
    session: Recording, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(session.file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(TraceCutShort, match="4 tokens were executed, and are the recorded ones"):
        await execute(cut, None)


@pytest.mark.timeout(300)
async def test_a_chunk_that_the_device_does_not_compute_is_a_difference(session: Recording, tmp_path: Path) -> None:
    raw = json.loads(session.file.read_text().partition("\n")[0])
    raw["settings"] |= {"chunk": 2 * raw["settings"]["chunk"], "store": False}
    file, world = tmp_path / "odd.jsonl", make_world(converter().structure(raw, Header).settings)
    lines = [json.dumps(raw)]
    for seq, event in enumerate((session.order[0], PrefillAdvanced(raw["settings"]["chunk"]))):
        world, outs = advance(world, ForRequest(ONE, event))
        lines += [encode(Envelope(seq, 0, ForRequest(ONE, event))), *map(encode, outs)]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReplayDiffers, match="executed: DeviceFailed"):
        await execute(file, None)


def test_a_trace_is_executed_with_the_places_for_states_that_it_was_recorded_with() -> None:
    """It names them, and the device refuses one that it does not have."""
    settings = Settings(slots=1, max_context=2048, chunk=256)
    header = Header(VERSION, "test", settings, "the demo's", {**SHAPE, "state_checkpoints": 20})
    assert read_options(header, None).checkpoints.state_checkpoints == 20
    assert (
        read_options(evolve(header, config=SHAPE), None).checkpoints.state_checkpoints
        == parse_values(SHAPE).checkpoints.state_checkpoints
    )


def test_a_header_of_another_identity_is_refused_before_memory_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()
    monkeypatch.setattr(
        "engine.loading.load_target.drop_unverifiable_draft", lambda *_: made.append("a draft")
    )  # the next thing that is done
    file = tmp_path / "other.jsonl"
    golden = Path(__file__).parents[1] / "golden" / "a_full_house.jsonl"
    header, *records = golden.read_text().splitlines(keepends=True)
    file.write_text(json.dumps({**json.loads(header), "config": SHAPE}) + "\n" + "".join(records))
    with ThreadPoolExecutor(1) as thread:  # this thread has the event loop of the module's fixture
        assert thread.submit(main, ["replay", str(file), "--execute"]).result() == 2
    assert "was recorded with model and numerics scripted" in capsys.readouterr().err
    assert not made


@pytest.mark.timeout(300)
async def test_a_bomb_is_refused_where_it_goes_off_and_not_read_whole(session: Recording, tmp_path: Path) -> None:
    """Two million decode steps of a request that never came: the first one is the last that is read."""
    file = tmp_path / "bomb.jsonl.zst"
    happened = '{"request":7,"event":{"tokens":[1],"is":"Decoded"},"is":"ForRequest"}'
    line = f'{{"seq":0,"at_ns":0,"happened":{happened},"is":"Envelope"}}\n'
    with file.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as writer:
        writer.write(session.file.read_bytes().partition(b"\n")[0] + b"\n")
        for _ in range(200):
            writer.write(line.encode() * 10_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ReplayDiffers, match="line 2"):
        await execute(file, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"
