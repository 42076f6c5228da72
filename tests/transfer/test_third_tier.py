"""A third tier takes one class that implements `ReadableTier`, and one entry of the tuple of tiers. These tests use a
small one.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import ClassVar

import anyio
import pytest
from attrs import define, evolve, field

from adapters.cache_figures import TierFigures
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.file_description import make_entry
from adapters.store.files.file_format import Layout
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.open_store import create_index, open_disk
from adapters.store.recent_prompts import RecentPrompts
from adapters.store.run_read import ReadSource, give_buffer
from adapters.store.slab_memory import SlabMemory
from adapters.store.store import Store
from adapters.store.tier import NotePrompt, ReadableTier, WriteRun
from adapters.transfer.transfer import create_transfer
from effects.ids import LeaseId, RequestId, Tier
from effects.lookup import PrefixFound
from effects.restore import BlocksRestored
from states import policy
from states.events import ForRequest, Submitted
from states.rates import Rates
from states.world import advance, make_world
from tests.device.driver import BUCKETS, qwen3
from tests.states.builders import STORE, a_job
from tests.transfer.test_transfer import BLOCK_SIZE, Bench

OBJECTS = "objects"


@define(eq=False)
class ObjectTier:
    """A tier as a remote store of objects would be: what is written is copied, what is read is copied back."""

    index: BlockIndex
    name: ClassVar[Tier] = OBJECTS
    batch_bytes: ClassVar[int] = 0
    trouble: ClassVar[str] = ""
    threads: ClassVar = ()
    damaged_files: ClassVar[Mapping[str, int]] = {}
    queued_bytes: int = 0
    recent_prompts: RecentPrompts = field(factory=RecentPrompts)
    answers: ClassVar[None] = None
    objects: dict[int, bytes] = field(factory=dict[int, bytes])
    reads: int = 0

    def touch(self, entry: Entry) -> None:
        self.index.touch(entry)

    def collect_figures(self) -> TierFigures:
        return self.index.collect_figures()

    def close(self) -> bool:
        return True

    def submit(self, job: WriteRun | NotePrompt) -> bool:
        """Write at once. The store counts a job as queued only behind this, so finishing it has to come later."""
        if isinstance(job, WriteRun):
            entry = make_entry(job.run, self.index.allocate_handle(), job.size, self.index.origin)
            if self.index.add(entry):
                self.objects[entry.handle] = job.rows.data.numpy().tobytes()
        threading.Timer(0.01, job.finish).start()
        return True

    async def read(self, take: ReadSource, memory: SlabMemory, workers: Executor) -> None:
        while reads := take():
            for read in reads:
                raw = self.objects[read.entry.handle]
                buffer = memory.allocate(len(raw))
                buffer.data.numpy().data[:] = raw
                self.reads += 1
                give_buffer(read, buffer)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Host memory that keeps nothing, a disk that has no room for a run, and objects."""
    lane, shard, lock = DeviceLane(), qwen3(), threading.RLock()
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane))
    layout = Layout("ef" * 16, BLOCK_SIZE, shard.rows.spec)
    disk = open_disk(layout, PrivateFolder.open(tmp_path / "kv"), lock, budget=1)
    objects = ObjectTier(create_index(layout, 1 << 30))
    store: Store[ReadableTier] = Store(layout, (HostTier(create_index(layout, 0)), disk, objects), lock)
    moving = create_transfer(store, (shard,), lane, executor.parts.slots.find)
    yield Bench(executor, moving, shard)
    assert executor.close()
    moving.close()


async def test_a_prompt_is_restored_from_a_third_tier_with_the_same_bits(bench: Bench) -> None:
    cold = await bench.kept()
    store = bench.moving.store
    tier = store.find_tier(ObjectTier)
    assert tier is not None
    with anyio.fail_after(10):
        while store.memory_tier.rows:  # noqa: ASYNC110 - until the last write is finished
            await anyio.sleep(0.005)
    assert not store.lower_tiers[0].index.entries, "the disk has room for none of it"
    bench.open(2, 3)
    found = await bench.found(2)
    assert (found.length, found.tier) == (96, OBJECTS)
    assert await bench.restore(2, found, 3) == BlocksRestored(0, 96, 96 * store.layout.token_bytes)
    await bench.prefill(2, 3, 96)
    assert await bench.answer(2, 3) == cold
    figures = store.collect_figures().build_json()
    assert figures["hits"] == {OBJECTS: 1}
    assert figures["restores"][OBJECTS]["count"] == 1
    assert figures[OBJECTS]["entries"] == len(tier.objects) > 0
    assert tier.reads == len(tier.objects)


def test_the_planner_weighs_a_third_tier_by_its_own_time() -> None:
    known = Rates(prefill=(100,), loads={"host": 1, OBJECTS: 100_000})
    settings = evolve(STORE, chunk=16, block_size=16)
    assert policy.choose_load_start(settings, known, 0, 64, "host") == 0, "all of it is loaded"
    assert policy.choose_load_start(settings, known, 0, 64, OBJECTS) == 64, "all of it is computed"
    assert policy.choose_load_start(settings, Rates(prefill=(100,)), 0, 64, OBJECTS) == 0, (
        "what was not measured is trusted"
    )


def test_the_world_learns_how_long_a_third_tier_takes() -> None:
    world = make_world(STORE)
    for event in (
        Submitted(a_job()),
        PrefixFound(LeaseId(1), 20, OBJECTS),
        BlocksRestored(0, 16, 99, ns=320),
    ):
        world, _ = advance(world, ForRequest(RequestId(1), event))
    assert world.rates == Rates(loads={OBJECTS: 20})
