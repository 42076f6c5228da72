"""What parts of an engine hear of the world, beyond what effects say."""

from __future__ import annotations

from pathlib import Path

import anyio.lowlevel
from anyio import create_task_group, fail_after, sleep
from attrs import evolve

from effects.all import EffectRequest
from effects.ids import PROMPTS, RequestId, SlotId
from effects.job import Job
from effects.prefill import RunPrefill
from engine.serving.wiring import run_engine
from states.settings import Settings
from tests.device.driver import drive
from tests.device.fake_shard import FakeShard
from tests.engine.test_stateful import process, prompt


async def test_decode_steps_hear_whether_prompts_wait_for_each_other() -> None:
    executor = drive(FakeShard()).executor
    settings = Settings(slots=2, max_context=64, chunk=16, block_size=8, beside_rows=8)
    async with run_engine(settings, executor) as running:
        world, ahead = running.event_loop.world, executor.decoding.overlapped
        assert not ahead.has_prefill_backlog()
        waiting = evolve(world.lanes[PROMPTS], waiting=(EffectRequest(RequestId(1), RunPrefill(SlotId(0), 0, 16)),))
        running.event_loop.world = evolve(world, lanes={**world.lanes, PROMPTS: waiting})
        assert ahead.has_prefill_backlog()
        running.event_loop.world = world
    assert executor.close()


async def test_memory_for_snapshots_hears_whether_anybody_is_served(tmp_path: Path) -> None:
    async with process(tmp_path / "kept", host=1 << 20) as running, create_task_group() as tasks:
        busy = running.store.memory.is_busy
        assert busy is not None
        assert not busy()
        tasks.start_soon(running.told, Job(prompt(1, 40), 8))
        with fail_after(20):
            while not busy():
                await anyio.lowlevel.checkpoint()
            while busy():  # noqa: ASYNC110
                await sleep(0.001)
