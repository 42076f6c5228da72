"""What parts of an engine hear of the world, beyond what effects say."""

from __future__ import annotations

from attrs import evolve

from effects.all import Ask
from effects.ids import PROMPTS, RequestId, SlotId
from effects.prefill import RunPrefill
from engine.assemble import engine
from states.settings import Settings
from tests.device.driver import drive
from tests.device.fake_shard import FakeShard


async def test_decode_steps_hear_whether_prompts_wait_for_each_other() -> None:
    executor = drive(FakeShard()).executor
    settings = Settings(slots=2, max_context=64, chunk=16, block_size=8, beside_rows=8)
    async with engine(settings, executor, facts={}) as running:
        world, ahead = running.runner.world, executor.decoding.ahead
        assert not ahead.crowded()
        waiting = evolve(world.lanes[PROMPTS], waiting=(Ask(RequestId(1), RunPrefill(SlotId(0), 0, 16)),))
        running.runner.world = evolve(world, lanes={**world.lanes, PROMPTS: waiting})
        assert ahead.crowded()
        running.runner.world = world
    assert executor.close()
