"""Tests of the pace that the core sets for the parts of an assembled engine."""

from __future__ import annotations

from pathlib import Path

import anyio.lowlevel
import pytest
from anyio import create_task_group, fail_after

from adapters.device.decode.overlapped_decode import OverlappedDecode
from adapters.store.slab_memory import SlabMemory
from effects.all import Effect, EffectRequest
from effects.ids import ENGINE, Side
from effects.job import Job
from effects.pacing import PaceSnapshot, PaceSteps
from effects.prompt_compression import KeepFrozen
from effects.timer import StartTimer
from engine.core.event_loop import EventLoop
from engine.serving.wiring import run_engine
from states import pacing
from states.settings import Settings
from tests.device.driver import drive
from tests.device.fake_shard import FakeShard
from tests.engine.loading.test_stateful import process, prompt


async def test_every_effect_has_an_executor(tmp_path: Path) -> None:
    async with process(tmp_path / "kept") as running:
        executors = running.engine.event_loop.executors
        on_lanes = {effect for effect in Effect.__args__ if effect.outcomes and effect.side is Side.DEVICE}
        effects = {*Effect.__args__} - on_lanes - {StartTimer}  # which the event loop carries out itself
        assert {*executors.perform, *executors.notify} == effects
        assert all(executors.notify[effect] for effect in executors.notify if effect is not KeepFrozen)


async def test_decode_steps_hear_whether_prompts_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    paces = list[tuple[bool, int]]()
    monkeypatch.setattr(
        OverlappedDecode, "set_pace", lambda _, *, evenly, interval_ns: paces.append((evenly, interval_ns))
    )
    executor = drive(FakeShard()).executor
    settings = Settings(slots=2, max_context=64, chunk=16, block_size=8, prompt_lane_min_rows=8)
    async with run_engine(settings, executor) as running, create_task_group() as tasks:
        running.event_loop.dispatch(EffectRequest(ENGINE, PaceSteps(evenly=True, interval_ns=7)), tasks)
        running.event_loop.dispatch(EffectRequest(ENGINE, PaceSteps(evenly=False)), tasks)
    assert paces == [(True, 7), (False, 0)]
    assert executor.close()


async def test_memory_for_snapshots_hears_whether_anybody_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = list[bool]()
    monkeypatch.setattr(SlabMemory, "set_pace", lambda _, __, pace: paces.append(pace.gently))
    async with process(tmp_path / "kept", host=1 << 20) as running:
        assert paces == [False], "the start is over"
        await running.answer(Job(prompt(1, 40), 8))
        assert paces == [False, True, False]


async def test_a_snapshot_waits_for_the_timer_of_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine: what it asks for, in order, with times that are its own."""
    monkeypatch.setitem(pacing.DELAYS_NS, "snapshot_quiet", 50 * pacing.MS)
    asked, fold = list[object](), EventLoop.fold

    def noted(self: EventLoop, happened: object) -> object:
        outs = fold(self, happened)  # type: ignore[arg-type]
        effects = [out.effect for out in outs if isinstance(out, EffectRequest)]
        asked.extend((self.clock_ns(), one) for one in effects if isinstance(one, StartTimer | PaceSnapshot))
        return outs

    monkeypatch.setattr(EventLoop, "fold", noted)
    async with process(tmp_path / "kept", host=1 << 30) as running:
        with fail_after(20):
            await running.answer(Job(prompt(1, 40), 8))
        assert running.store.collect_figures().build_json()["host"]["entries"]
    (_, interval), (started, quiet), (opened, pace) = asked
    assert interval == StartTimer("trim_interval", 1, 60_000 * pacing.MS)
    assert quiet == StartTimer("snapshot_quiet", 2, 50 * pacing.MS)
    assert pace == PaceSnapshot(may_copy=True)
    assert opened - started >= 50 * pacing.MS


async def test_an_engine_trims_memory_after_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trims = list[int]()
    monkeypatch.setitem(pacing.DELAYS_NS, "trim_interval", 20 * pacing.MS)
    monkeypatch.setattr("engine.serving.wiring.MemoryTrimmer.trim_memory", lambda *_: trims.append(1))
    async with process(tmp_path / "kept") as running:
        await anyio.sleep(0.1)
        assert trims == [], "there was no work"
        await running.answer(Job(prompt(1, 40), 8))
        with fail_after(20):
            while not trims:
                await anyio.lowlevel.checkpoint()
        before = len(trims)
        await anyio.sleep(0.1)
        assert len(trims) == before, "and none since"
