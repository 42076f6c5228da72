"""Rows leave a slot and come back into another through the lane, and the next tokens are the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import torch
from anyio import to_thread
from attrs import define, evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.metrics import Metrics
from adapters.models.decoder.dense_shard import DenseShard
from adapters.store.files.file_format import Layout
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.lookup import LookupOutcome
from adapters.store.open_store import create_index, open_disk
from adapters.store.slab_memory import ALIGN, SLAB_BYTES, SlabMemory
from adapters.store.store import Store
from adapters.transfer.copy_rows import RowMover, create_movers
from adapters.transfer.saver import MAX_SNAPSHOT_NS, UNPACED, PaceGate
from adapters.transfer.transfer import Transfer, create_transfer
from effects.all import EffectRequest, Launch
from effects.decode import RunDecode
from effects.ids import LeaseId, RequestId, SlotId, StoreFailed
from effects.job import Sampling
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.pacing import PaceSnapshot
from effects.ports import RowsLost
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from tests.device.driver import BUCKETS, CHUNK, qwen3
from tests.store.kit import files, looked_up, settled

BLOCK_SIZE = 16
PROMPT = tuple((7 * n + n // 5) % 97 for n in range(101))


def timeless(outcome):
    return evolve(outcome, ns=0) if hasattr(outcome, "ns") else outcome


@define
class Bench:
    executor: DeviceExecutor
    moving: Transfer
    shard: DenseShard
    pace: PaceSnapshot = UNPACED  # of every snapshot, from its beginning

    async def one(self, request: int, effect: object):
        if isinstance(effect, SaveSnapshot):
            saving = self.moving.saver.save(RequestId(request), effect)
            self.moving.saver.pace_snapshot(RequestId(request), self.pace)
            return await saving
        (outcome,) = await self.executor.perform(Launch((EffectRequest(RequestId(request), effect),)))
        return timeless(outcome)

    def open(self, request: int, slot: int, prompt=PROMPT) -> None:
        self.executor.open(RequestId(request), OpenSlot(SlotId(slot), SlotId(slot), 0, prompt, Sampling(logprobs=3)))

    async def prefill(self, request: int, slot: int, start: int = 0, stop: int = 100) -> None:
        for at in range(start, stop, CHUNK):
            end = min(at + CHUNK, stop)
            assert await self.one(request, RunPrefill(SlotId(slot), at, end)) == PrefillAdvanced(end)

    async def answer(self, request: int, slot: int, count: int = 6) -> list:
        token, decode_steps = PROMPT[-1], []
        for position in range(100, 100 + count):
            decode_steps.append(await self.one(request, RunDecode(SlotId(slot), position, token)))
            token = decode_steps[-1].tokens[-1]
        return decode_steps

    async def kept(self) -> list:
        """Computes the prompt in slot 0 as request 1 and keeps it; the answer that followed."""
        self.open(1, 0)
        await self.prefill(1, 0)
        answer = await self.answer(1, 0)
        saved = await self.one(1, SaveSnapshot(SlotId(0), PROMPT[:96]))
        assert saved == SnapshotSaved(96, 96 * self.moving.store.layout.token_bytes)
        settled(self.moving.store)
        return answer

    async def found(self, request: int, prompt=PROMPT, beyond: int = 0) -> PrefixFound:
        found = looked_up(self.moving.lookup, RequestId(request), FindPrefix(prompt, beyond))
        assert isinstance(found, PrefixFound)
        return found

    async def restore(self, request: int, found: PrefixFound, slot: int, start: int = 0, stop: int = 96):
        effect = RestoreBlocks(found.lease, SlotId(slot), start, stop)
        outcome = await self.moving.restorer.restore(RequestId(request), effect)
        assert isinstance(outcome, StoreFailed) or outcome.ns > 0, "the planner hears how long it took"
        return timeless(outcome)

    def leases(self) -> int:
        return self.moving.store.collect_figures().build_json()["leases"]


@pytest.fixture(params=["host", "disk"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    lane, shard, lock = DeviceLane(), qwen3(), threading.RLock()
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane))
    layout = Layout("ef" * 16, BLOCK_SIZE, shard.rows.spec)
    disk = open_disk(layout, PrivateFolder.open(tmp_path / "kv"), lock, budget=1 << 30)
    store = Store(layout, (HostTier(create_index(layout, 1 << 30 if request.param == "host" else 0)), disk), lock)
    moving = create_transfer(store, (shard,), lane, executor.parts.slots.find)
    yield Bench(executor, moving, shard)
    assert executor.close()
    moving.close()
    assert store.close(), "once more"


async def test_a_restored_prompt_is_answered_with_the_same_bits(bench: Bench) -> None:
    cold = await bench.kept()
    bench.open(2, 3)
    found = await bench.found(2)
    assert found.length == 96
    restored = await bench.restore(2, found, 3)
    assert restored == BlocksRestored(0, 96, 96 * bench.moving.store.layout.token_bytes)
    await bench.prefill(2, 3, 96)
    assert await bench.answer(2, 3) == cold
    assert bench.leases() == 0


async def test_the_front_is_computed_while_the_rest_is_loaded(bench: Bench) -> None:
    cold = await bench.kept()
    bench.open(2, 1)
    found = await bench.found(2)
    restored = await bench.restore(2, found, 1, 48, 96)
    assert (restored.start, restored.stop) == (48, 96)
    await bench.prefill(2, 1, 0, 48)
    await bench.prefill(2, 1, 96)
    assert await bench.answer(2, 1) == cold


async def test_only_what_is_new_is_copied_out(bench: Bench) -> None:
    await bench.kept()
    bench.open(2, 0, (*PROMPT[:64], *PROMPT))
    await bench.prefill(2, 0, 0, 164)
    saved = await bench.one(2, SaveSnapshot(SlotId(0), (*PROMPT[:64], *PROMPT)[:160]))
    assert saved == SnapshotSaved(160, 96 * bench.moving.store.layout.token_bytes)


async def test_a_snapshot_of_what_the_slot_does_not_hold_is_refused(bench: Bench) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    for tokens in ((9, *PROMPT[1:96]), (*PROMPT, *PROMPT[:11])):
        assert (await bench.one(1, SaveSnapshot(SlotId(0), tokens))).kind == "broken"
    assert (await bench.one(2, SaveSnapshot(SlotId(0), PROMPT[:96]))).kind == "broken", "another request's slot"
    assert bench.moving.store.memory_tier.index.entries == {}


async def test_the_lane_goes_on_while_a_snapshot_is_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    begun, go, saved, take = threading.Event(), threading.Event(), list[object](), RowMover.copy_out

    def slow(*what) -> None:
        begun.set()
        assert go.wait(60)
        take(*what)

    monkeypatch.setattr(RowMover, "copy_out", slow)
    async with anyio.create_task_group() as tasks:

        async def save() -> None:
            saved.append(await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96])))

        tasks.start_soon(save)
        await to_thread.run_sync(begun.wait)
        bench.open(2, 1)
        await bench.prefill(2, 1)
        cold = await bench.answer(2, 1)
        assert not saved
        go.set()
    assert saved == [SnapshotSaved(96, 96 * bench.moving.store.layout.token_bytes)]
    bench.open(3, 2)
    await bench.restore(3, await bench.found(3), 2)
    await bench.prefill(3, 2, 96)
    assert await bench.answer(3, 2) == cold


class Copies:
    """Copies of runs by a snapshot, each noted when it has begun. on_copy: called on the saver's thread before each."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.moving.store.run_bytes = 16 * bench.moving.store.layout.token_bytes  # six runs
        self.begun: list[int] = []
        self.on_copy: Callable[[int], object] = lambda _: None
        copy_out = RowMover.copy_out

        def noted(*what) -> None:
            self.begun.append(len(self.begun) + 1)
            self.on_copy(len(self.begun))
            copy_out(*what)

        monkeypatch.setattr(RowMover, "copy_out", noted)


async def test_a_snapshot_copies_nothing_before_it_may(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    copies, saved = Copies(bench, monkeypatch), list[object]()

    async def save() -> None:
        saved.append(await bench.moving.saver.save(RequestId(1), SaveSnapshot(SlotId(0), PROMPT[:96])))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save)
        await anyio.sleep(0.05)
        assert copies.begun == []
        bench.moving.saver.pace_snapshot(RequestId(1), UNPACED)
    assert saved == [SnapshotSaved(96, 96 * bench.moving.store.layout.token_bytes)]
    assert len(copies.begun) == 6
    bench.moving.saver.pace_snapshot(RequestId(1), PaceSnapshot())  # too late, and for a snapshot that has ended


async def test_a_snapshot_stops_between_two_runs_and_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    copies, stopped, loop = Copies(bench, monkeypatch), anyio.Event(), asyncio.get_running_loop()

    def stop_in_the_second(number: int) -> None:
        if number == 2:
            bench.moving.saver.pace_snapshot(RequestId(1), PaceSnapshot())
            loop.call_soon_threadsafe(stopped.set)

    copies.on_copy = stop_in_the_second
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.one, 1, SaveSnapshot(SlotId(0), PROMPT[:96]))
        await stopped.wait()
        await anyio.sleep(0.05)
        assert copies.begun == [1, 2]
        bench.moving.saver.pace_snapshot(RequestId(1), UNPACED)
    assert len(copies.begun) == 6
    assert not bench.moving.store.collect_figures().build_json()["dropped_rows"]


async def test_a_snapshot_that_nobody_awaits_any_more_ends_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when the engine stops at once: the thread would hold up the end of the process for ever."""
    bench.open(1, 0)
    await bench.prefill(1, 0)
    copies = Copies(bench, monkeypatch)
    with anyio.move_on_after(0.05):
        await bench.moving.saver.save(RequestId(1), SaveSnapshot(SlotId(0), PROMPT[:96]))
    with anyio.fail_after(20):
        await to_thread.run_sync(bench.moving.saver.close)
    assert len(copies.begun) == 6


async def test_what_there_is_no_time_for_is_dropped_and_counted(bench: Bench) -> None:
    bench.moving.store.run_bytes = 16 * bench.moving.store.layout.token_bytes
    bench.open(1, 0)
    await bench.prefill(1, 0)
    times = iter([0, MAX_SNAPSHOT_NS, MAX_SNAPSHOT_NS + 1])  # as it begins, and before each run but the first
    bench.moving.saver.clock_ns = lambda: next(times)
    saved = await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96]))
    assert saved == SnapshotSaved(32, 32 * bench.moving.store.layout.token_bytes)
    assert bench.moving.store.collect_figures().build_json()["dropped_rows"] == 64
    settled(bench.moving.store)
    assert (await bench.found(2)).length == 32


async def test_a_snapshot_without_memory_costs_the_request_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)

    def full(_: object, size: int, **__: object) -> None:
        raise MemoryError(f"{size} bytes of host memory")

    with monkeypatch.context() as patched:
        patched.setattr(bench.moving.store.memory.__class__, "allocate", full)
        assert await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96])) == SnapshotSaved(0, 0)
    assert bench.moving.store.collect_figures().build_json()["dropped_rows"] == 96
    assert len(await bench.answer(1, 0)) == 6


async def test_what_pinned_memory_has_no_room_for_is_dropped_where_nothing_comes_free(bench: Bench) -> None:
    store = bench.moving.store
    store.memory_tier.memory = SlabMemory(ALIGN, pin=True)
    elsewhere = store.memory.allocate(ALIGN, pinned_only=True)
    bench.open(1, 0)
    await bench.prefill(1, 0)
    assert await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96])) == SnapshotSaved(0, 0)
    assert store.collect_figures().build_json()["dropped_rows"] == 96
    assert elsewhere.data.nbytes == ALIGN


@pytest.mark.parametrize("may_grow", [False, True])
async def test_no_memory_is_registered_where_the_core_forbids_it(may_grow: bool, bench: Bench) -> None:
    """Registering takes several times as long as the copies."""
    store, rows = bench.moving.store, 96 if may_grow else 0
    bench.pace = PaceSnapshot(may_copy=True, may_grow=may_grow, memory_wait_ns=0)
    store.memory_tier.memory = SlabMemory(SLAB_BYTES, pin=True)
    bench.open(1, 0)
    await bench.prefill(1, 0)
    saved = await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96]))
    assert saved == SnapshotSaved(rows, rows * store.layout.token_bytes)
    assert store.collect_figures().build_json()["dropped_rows"] == 96 - rows
    assert bool(store.memory.slab_bytes) == may_grow


@pytest.mark.parametrize("bench", ["disk"], indirect=True)
async def test_a_snapshot_stops_waiting_for_the_disk_when_others_wait_behind_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk never ends its first write: the snapshot waits for memory until it may not any more."""
    store, go, waits = bench.moving.store, threading.Event(), threading.Event()
    store.run_bytes, store.memory_tier.index.budget = 16 * store.layout.token_bytes, 0
    memory = store.memory_tier.memory = SlabMemory(store.run_bytes, pin=True)
    bench.moving.saver.clock_ns = lambda: 0
    disk, allocate = store.lower_tiers[0], memory.allocate
    write = disk.folder.write_async

    async def late(*what) -> None:
        go.wait()
        await write(*what)

    def noted(*what, **how):
        try:
            return allocate(*what, **how)
        except MemoryError:
            waits.set()
            raise

    monkeypatch.setattr(disk.folder.__class__, "write_async", lambda _, *what: late(*what))
    monkeypatch.setattr(SlabMemory, "allocate", lambda _, *what, **how: noted(*what, **how))
    bench.open(1, 0)
    await bench.prefill(1, 0)
    saved = list[object]()

    async def save() -> None:
        saved.append(await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96])))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save)
        assert await to_thread.run_sync(waits.wait, 20)
        await anyio.sleep(0.02)
        assert not saved
        bench.moving.saver.pace_snapshot(RequestId(1), PaceSnapshot(may_copy=True, memory_wait_ns=0))
    assert saved == [SnapshotSaved(16, 16 * store.layout.token_bytes)]
    go.set()


def test_a_snapshot_waits_for_memory_as_long_as_the_core_allows_in_all() -> None:
    gate = PaceGate()
    assert gate.compute_memory_wait(left_ns=700) == 700, "no limit of the core's"
    gate.set_pace(PaceSnapshot(may_copy=True, memory_wait_ns=100))
    assert gate.compute_memory_wait(700) == 100
    gate.waited_ns += 60
    assert gate.compute_memory_wait(700) == 40
    assert gate.compute_memory_wait(30) == 30
    gate.waited_ns += 60
    assert gate.compute_memory_wait(700) < 0


@pytest.mark.parametrize("bench", ["disk"], indirect=True)
async def test_a_snapshot_that_nobody_waits_behind_waits_for_the_disk(bench: Bench) -> None:
    """Pinned memory for one run of six: each waits until the one before it has been written."""
    store = bench.moving.store
    store.run_bytes, store.memory_tier.index.budget = 16 * store.layout.token_bytes, 0
    store.memory_tier.memory = SlabMemory(store.run_bytes, pin=True)
    bench.moving.saver.clock_ns = lambda: 0
    bench.open(1, 0)
    await bench.prefill(1, 0)
    saved = await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:96]))
    assert saved == SnapshotSaved(96, 96 * store.layout.token_bytes)
    assert not store.collect_figures().build_json()["dropped_rows"]


async def test_a_restore_waits_on_no_thread_of_the_process(bench: Bench) -> None:
    """Nor on one of its own: with one alone, and the lane busy, that one is free as soon as everything is read."""
    cold, go = await bench.kept(), threading.Event()
    limiter = to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    bench.moving.restorer.workers = ThreadPoolExecutor(1)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(to_thread.run_sync, go.wait)  # the only one that there is
            bench.moving.restorer.lane.post(go.wait, print)
            bench.open(2, 3)
            found, restored = await bench.found(2), list[object]()

            async def restore() -> None:
                restored.append(await bench.restore(2, found, 3))

            tasks.start_soon(restore)
            for _ in range(20):
                await asyncio.get_running_loop().run_in_executor(bench.moving.restorer.workers, int)
            assert not restored
            go.set()
    finally:
        go.set()
        limiter.total_tokens = before
        bench.moving.restorer.workers.shutdown()
    assert restored == [BlocksRestored(0, 96, 96 * bench.moving.store.layout.token_bytes)]
    await bench.prefill(2, 3, 96)
    assert await bench.answer(2, 3) == cold


async def test_a_damaged_file_fails_the_restore_and_the_request_computes(bench: Bench, tmp_path: Path) -> None:
    cold = await bench.kept()
    (file,) = files(tmp_path / "kv")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    bench.open(2, 2)
    found = await bench.found(2)
    outcome = await bench.restore(2, found, 2)
    if found.tier == "host":
        assert isinstance(outcome, BlocksRestored), "memory is not asked what the disk did"
        await bench.prefill(2, 2, 96)
    else:
        assert isinstance(outcome, StoreFailed)
        assert outcome.kind == "broken"
        assert looked_up(bench.moving.lookup, RequestId(2), FindPrefix(PROMPT, 0)) == PrefixMissed("empty_store")
        await bench.prefill(2, 2)
    assert await bench.answer(2, 2) == cold
    assert bench.leases() == 0


async def test_a_slot_that_serves_somebody_else_gets_nothing(bench: Bench) -> None:
    await bench.kept()
    before = bench.shard.rows.export(3, 0, 96)
    bench.open(7, 3)
    outcome = await bench.restore(2, await bench.found(2), 3)
    assert isinstance(outcome, StoreFailed)
    after = bench.shard.rows.export(3, 0, 96)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert bench.leases() == 0


async def test_an_abandoned_restore_stops_after_the_run_that_it_is_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.moving.store.run_bytes = 16 * bench.moving.store.layout.token_bytes
    await bench.kept()
    bench.open(2, 1)
    put = RowMover.copy_in

    def leave(mover, slot, span, *run):
        if span == (32, 48):
            bench.moving.restorer.abandon(RequestId(2))
        put(mover, slot, span, *run)

    monkeypatch.setattr("adapters.transfer.restorer.RUNS_IN_FLIGHT", 1)
    monkeypatch.setattr(RowMover, "copy_in", leave)
    restored = await bench.restore(2, await bench.found(2), 1)
    assert restored == BlocksRestored(0, 48, 48 * bench.moving.store.layout.token_bytes)
    monkeypatch.undo()
    await bench.prefill(2, 1, 48)
    assert bench.leases() == 0


async def test_a_lease_that_is_not_used_is_given_back(bench: Bench) -> None:
    await bench.kept()
    found = await bench.found(2)
    bench.moving.lookup.release_prefix(RequestId(2), ReleasePrefix(found.lease))
    assert bench.leases() == 0
    with pytest.raises(KeyError):
        bench.moving.store.get_lease(LeaseId(found.lease))


@pytest.mark.parametrize("on_thread", [False, True])
async def test_a_lookup_tells_what_recent_prompts_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, on_thread: bool
) -> None:
    monkeypatch.setattr("adapters.store.lookup.LONG_PROMPT", 1 if on_thread else 1 << 20)

    async def found_by(asked: FindPrefix) -> LookupOutcome:
        answer = bench.moving.lookup.find_prefix(RequestId(1), asked)
        assert isinstance(answer, Awaitable) == on_thread
        return await answer if isinstance(answer, Awaitable) else answer

    prompts = (PROMPT, (*PROMPT[:50], 96, 96), PROMPT)
    shared = [(await found_by(FindPrefix(one, 0, prompts_to_compare=2))).shared for one in prompts]
    assert shared == [0, 50, 101]
    assert (await found_by(FindPrefix(PROMPT, 0))).shared == 0, "no divergence was asked for"
    await bench.kept()
    found = await found_by(FindPrefix((*PROMPT, 5), 0, prompts_to_compare=1))
    assert isinstance(found, PrefixFound)
    assert (found.shared, found.length) == (101, 96)
    bench.moving.lookup.release_prefix(RequestId(1), ReleasePrefix(found.lease))
    assert await found_by(FindPrefix(PROMPT, 96)) == PrefixMissed("diverged_at:96", length=96)


class LayerByName:
    """One layer of a shard, as if it were in another process. asked: who of these has been."""

    is_addressable = False

    def __init__(self, shard: DenseShard, layer: int, asked: list[int]) -> None:
        self.shard, self.layer, self.asked = shard, layer, asked
        self.spec = evolve(shard.rows.spec, names=shard.rows.spec.names[2 * layer : 2 * layer + 2])
        self.runs = list[tuple[int, int, torch.Tensor, Sequence[object]]]()

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("rows go by their names")

    def export(self, slot: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        return dict(zip(self.spec.names, self.shard.rows.view(slot, start, stop)[self.layer], strict=True))

    def import_runs(self, slot: int, runs: Sequence[tuple[int, torch.Tensor]], keep: Sequence[object]) -> None:
        self.asked.append(self.layer)
        self.runs += [(slot, *run, keep) for run in runs]

    def arrive(self) -> None:
        """Put the rows of all runs that were imported, and keep nothing of them any more."""
        while self.runs:
            slot, start, rows, _ = self.runs.pop()
            for own, given in zip(self.export(slot, start, start + rows.shape[2]).values(), rows, strict=True):
                own.copy_(given)


async def test_shards_that_are_asked_by_name_are_told_and_what_they_read_is_theirs_until_they_have_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, store = list[int](), bench.moving.store
    monkeypatch.setattr(store.memory_tier, "memory", SlabMemory(1 << 20))
    cold = await bench.kept()
    restorer = bench.moving.restorer
    parts = [LayerByName(bench.shard, layer, asked) for layer in range(2)]
    restorer.target = create_movers(parts, store.layout.rows)
    bench.open(2, 3)
    restored = await bench.restore(2, await bench.found(2), 3)
    assert restored == BlocksRestored(0, 96, 96 * store.layout.token_bytes)
    assert asked == [0, 1]
    assert all(part.runs for part in parts), "no one has waited for them"
    assert bench.leases() == 0
    store.memory_tier.index.budget = 0
    with store.lock:
        store.memory_tier.make_room(0)
    assert not store.memory_tier.rows
    others = [store.memory.allocate(restored.bytes) for _ in range(4)]  # who comes next is given it, if it is free
    for other in others:
        other.data.fill_(7)
    for part in parts:
        part.arrive()
    await bench.prefill(2, 3, 96)
    assert await bench.answer(2, 3) == cold


class Gone(LayerByName):
    """A part whose process is found dead when it is to import rows."""

    def import_runs(self, slot: int, runs: Sequence[tuple[int, torch.Tensor]], keep: Sequence[object]) -> None:
        self.asked.append(self.layer)
        raise RowsLost((), f"layer {self.layer} is gone")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("passed", [False, True])
async def test_what_a_part_elsewhere_could_not_be_told_of_is_not_believed(
    bench: Bench, lost: int, passed: bool
) -> None:
    """passed: the slot is open by then, so a run is imported as soon as it is read."""
    cold, asked = await bench.kept(), list[int]()
    restorer, here = bench.moving.restorer, bench.moving.restorer.target
    kinds = [Gone if layer == lost else LayerByName for layer in range(2)]
    parts = [kind(bench.shard, layer, asked) for layer, kind in enumerate(kinds)]
    restorer.target = create_movers(parts, bench.moving.store.layout.rows)
    bench.open(2, 3)
    if passed:
        restorer.place_fence(RequestId(2), OpenSlot(SlotId(3), SlotId(3), 0, PROMPT, Sampling()))
        assert await restorer.fences.get_or_place_fence(RequestId(2), SlotId(3)).wait() is None
    failed = await bench.restore(2, await bench.found(2), 3)
    assert failed == StoreFailed("broken", f"layer {lost} is gone")
    assert asked == [*range(lost + 1)], "each part is asked once, and none once the restore has failed"
    state = bench.executor.parts.slots.find(SlotId(3), RequestId(2))
    assert isinstance(state, SlotState)
    assert state.valid == 0
    assert bench.leases() == 0
    restorer.target = here
    assert (await bench.restore(2, await bench.found(2), 3)).stop == 96
    await bench.prefill(2, 3, 96)
    assert await bench.answer(2, 3) == cold


def test_loaded_rows_count_when_those_before_them_do() -> None:
    state = SlotState(RequestId(1), list(range(100)), 10, sampler=None)  # type: ignore[arg-type]
    state.add_loaded_rows(30, 40)
    state.add_loaded_rows(40, 60)
    assert state.valid == 10
    state.mark_computed(20)
    assert state.valid == 20
    state.mark_computed(30)
    assert state.valid == 60
    state.mark_computed(64)
    assert state.valid == 64


async def test_metrics_say_what_the_cache_does(bench: Bench) -> None:
    metrics = Metrics()
    metrics.watch_cache(bench.moving.store.collect_figures)
    await bench.kept()
    bench.open(2, 3)
    found = await bench.found(2)
    await bench.restore(2, found, 3)
    looked_up(bench.moving.lookup, RequestId(2), FindPrefix((9, *PROMPT), 0))
    text = metrics.render()[0].decode()
    size = 96 * bench.moving.store.layout.token_bytes
    for line in (
        f'rekindle_cache_hits_total{{tier="{found.tier}"}} 1.0',
        'rekindle_cache_misses_total{reason="diverged_at"} 1.0',
        f'rekindle_cache_restore_seconds_count{{tier="{found.tier}"}} 1.0',
        f'rekindle_cache_restored_bytes_total{{tier="{found.tier}"}} {float(size)}',
        'rekindle_cache_entries{tier="disk"} 1.0',
        "rekindle_cache_quarantined_total 0.0",
        "rekindle_cache_write_errors_total 0.0",
        "rekindle_cache_dropped_writes_total 0.0",
        "rekindle_cache_dropped_rows_total 0.0",
        "rekindle_cache_dropped_draft_rows_total 0.0",
        "rekindle_cache_queued_bytes 0.0",
    ):
        assert line in text.splitlines(), line
    for name in ("bytes", "budget_bytes", "evictions_total", "written_bytes_total", "read_bytes_total"):
        assert f"rekindle_cache_{name}" in text
