"""A hybrid target's state through the executor and the store: copied, kept, restored, rolled back, and always exact."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, evolve, field

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposal_tree import Tree, chain
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Segment, Step
from adapters.sequence_layout import RowSpec, torch_dtype
from adapters.store.files.file_format import Layout
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.open_store import create_index, open_disk
from adapters.store.store import Store
from adapters.transfer.copy_rows import RowMover, StateMover
from adapters.transfer.saver import MAX_SNAPSHOT_NS, UNPACED
from adapters.transfer.transfer import Transfer, create_transfer
from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import CheckpointId, DeviceFailed, LeaseId, RequestId, SlotId, StoreFailed, Tokens
from effects.job import Sampling
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed
from effects.ports import RowsLost
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from tests.models.recurrent_shard import ROW_SPEC, STATE_SPECS, RecurrentShard, RecurrentStates
from tests.store.kit import DRAFT, files, looked_up, settled

BLOCK_SIZE, CAPACITY, SLOTS, BUCKETS = 8, 128, 3, (4, 8, 16)
LAYOUT = Layout("12" * 16, BLOCK_SIZE, ROW_SPEC, DRAFT, STATE_SPECS)
PROMPT = tuple((5 * n + n // 3) % 61 for n in range(77))
END = len(PROMPT) - 1


def rows(stop: int) -> BlocksRestored:
    """All rows up to `stop`, sizes and times aside."""
    return BlocksRestored(0, stop, 0)


class Caches(Proposer):
    """A draft's rows behind names, filled as it follows the target. It proposes the tokens of `guess`."""

    is_addressable = False

    def __init__(self, spec: RowSpec) -> None:
        self.spec, self.follows, self.guess = spec, True, dict[int, Sequence[int]]()
        shape = (SLOTS, spec.heads, CAPACITY, spec.width)
        self.caches = {name: torch.zeros(shape, dtype=torch_dtype(spec.dtype)) for name in spec.names}

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("rows go by their names")

    def export(self, slot: int, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        return {name: cache[slot, :, start:stop].clone() for name, cache in self.caches.items()}

    def import_runs(self, slot: int, runs: Sequence[tuple[int, torch.Tensor]], keep: Sequence[object]) -> None:
        for start, rows in runs:
            for cache, own in zip(self.caches.values(), rows, strict=True):
                cache[slot, :, start : start + own.shape[1]] = own

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        """Propose the next tokens of the known answer."""
        trees = []
        for request in requests:
            so_far = len(request.state.tokens)
            coming = self.guess.get(request.slot, ())[so_far - END - 1 :]
            trees.append(chain((request.state.tokens[-1], *coming[: min(request.most, request.depth)])))
        return trees

    def follow(
        self,
        step: Step,
        aux: Mapping[int, torch.Tensor],
        kept: Sequence[Kept],
        states: list[SlotState],
        plain_steps: int = 0,
    ):
        for segment, keep, state in zip(step.segments, kept, states, strict=True):
            stop = segment.start + (keep if isinstance(keep, int) else len(keep))
            if self.follows and stop > segment.start:
                for number, cache in enumerate(self.caches.values()):
                    cache[segment.slot, :, segment.start : stop] = aux[0][0, number]
                state.add_draft_rows(segment.start, stop)

    def catch_up(self, slot: int) -> None:
        """It is never late."""

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        state.draft_spans = ()


COLD: dict[tuple[Tokens, int], list[Decoded]] = {}  # answers by prompt and number of tokens


@define
class StatefulBench:
    executor: DeviceExecutor
    moving: Transfer
    shard: RecurrentShard
    draft: Caches
    store: Store = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.store = self.moving.store

    async def one(self, request: int, effect: object):
        if isinstance(effect, SaveSnapshot):
            saving = self.moving.saver.save(RequestId(request), effect)
            self.moving.saver.pace_snapshot(RequestId(request), UNPACED)
            return await saving
        (outcome,) = await self.executor.perform(Launch((EffectRequest(RequestId(request), effect),)))
        return evolve(outcome, ns=0) if hasattr(outcome, "ns") else outcome

    def open(
        self,
        request: int,
        slot: int,
        prompt: Tokens = PROMPT,
        *,
        source: int | None = None,
        keep: int = 0,
        state: int | None = None,
        device_checkpoint: int | None = None,
    ) -> None:
        """Open a slot. state: the position of the state to go on from; None: `keep`."""
        start, at = SlotId(slot if source is None else source), keep if state is None else state
        self.executor.open(
            RequestId(request),
            OpenSlot(SlotId(slot), start, keep, prompt, Sampling(logprobs=2), (), at, device_checkpoint),  # type: ignore[arg-type]
        )

    async def prefill(
        self,
        request: int,
        slot: int,
        start: int = 0,
        stop: int = END,
        *,
        checkpoints: Sequence[int] = (),
        places: Mapping[int, int] = {},
    ) -> None:
        """places: position -> the place that keeps the state there."""
        while start < stop:
            end = min([start + max(BUCKETS), stop, *(at for at in (*checkpoints, *places) if at > start)])
            effect = RunPrefill(
                SlotId(slot), start, end, checkpoint=end in checkpoints, device_checkpoint=places.get(end)
            )  # type: ignore[arg-type]
            assert await self.one(request, effect) == PrefillAdvanced(end)
            start = end

    async def decode(self, request: int, slot: int, tokens: Tokens, count: int = 8, propose: int = 0) -> list[Decoded]:
        """From the last of `tokens` on, until there are `count` more."""
        done, position, last = list[Decoded](), len(tokens) - 1, tokens[-1]
        while sum(len(one.tokens) for one in done) < count:
            done.append(await self.one(request, RunDecode(SlotId(slot), position, last, propose)))
            position, last = position + len(done[-1].tokens), done[-1].tokens[-1]
        return done

    async def cold(self, prompt: Tokens = PROMPT, count: int = 8) -> list[Decoded]:
        """On a shard of its own, row by row: nothing is kept, shared or proposed. It is computed once for all tests."""
        if (prompt, count) in COLD:
            return COLD[prompt, count]
        lane = DeviceLane()
        alone = DeviceExecutor(ExecutorParts(RecurrentShard(1, CAPACITY, (1,)), (1,), lane=lane))
        bench = StatefulBench(alone, self.moving, self.shard, self.draft)
        bench.open(1, 0, prompt)
        for at in range(len(prompt) - 1):
            assert await bench.one(1, RunPrefill(SlotId(0), at, at + 1)) == PrefillAdvanced(at + 1)
        found = await bench.decode(1, 0, prompt, count)
        assert alone.close()
        COLD[prompt, count] = found
        return found

    async def kept(self, checkpoints: Sequence[int] = (32, 72), *, drafted: bool = True) -> None:
        """The prompt computed in slot 0 as request 1, and kept."""
        self.draft.follows = drafted
        self.open(1, 0)
        await self.prefill(1, 0, checkpoints=checkpoints)
        assert isinstance(await self.one(1, SaveSnapshot(SlotId(0), PROMPT[:72])), SnapshotSaved)
        settled(self.store)
        self.draft.follows = True

    async def restored(self, request: int, slot: int, prompt: Tokens = PROMPT) -> object:
        self.open(request, slot, prompt)
        found = looked_up(self.moving.lookup, RequestId(request), FindPrefix(prompt, 0))
        if isinstance(found, PrefixMissed):
            return found
        assert isinstance(found, PrefixFound)
        effect = RestoreBlocks(found.lease, SlotId(slot), 0, found.length)
        outcome = await self.moving.restorer.restore(RequestId(request), effect)
        return evolve(outcome, ns=0, bytes=0) if isinstance(outcome, BlocksRestored) else outcome

    async def goes_on(self, request: int, slot: int, start: int, prompt: Tokens = PROMPT) -> list[Decoded]:
        await self.prefill(request, slot, start, len(prompt) - 1)
        return await self.decode(request, slot, prompt)

    def state(self, slot: int) -> SlotState | DeviceFailed:
        return self.executor.parts.slots.find_state(slot)


def made(folder: Path, host: int) -> StatefulBench:
    lane, lock, shard, draft = (
        DeviceLane(),
        threading.RLock(),
        RecurrentShard(SLOTS, CAPACITY, BUCKETS, state_block=BLOCK_SIZE, state_checkpoints=2),
        Caches(DRAFT.rows),
    )
    disk = open_disk(LAYOUT, PrivateFolder.open(folder), lock, budget=1 << 30)
    store = Store(LAYOUT, (HostTier(create_index(LAYOUT, host)), disk), lock)
    slots = SlotTable()
    moving = create_transfer(store, (shard,), lane, slots.find, draft=draft)
    keep_state = moving.saver.save_checkpoint
    parts = ExecutorParts(shard, BUCKETS, lane=lane, proposer=draft, keep_state=keep_state, slots=slots)
    executor = DeviceExecutor(parts)
    return StatefulBench(executor, moving, shard, draft)


def ended(bench: StatefulBench) -> None:
    assert bench.store.collect_figures().build_json()["leases"] == 0
    assert bench.executor.close()
    bench.moving.close()


@pytest.fixture(params=["host", "disk"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StatefulBench]:
    found = made(tmp_path / "kv", 1 << 30 if request.param == "host" else 0)
    yield found
    ended(found)


async def test_chunks_and_rows_one_by_one_come_to_the_same(bench: StatefulBench) -> None:
    bench.open(1, 0)
    assert await bench.goes_on(1, 0, 0) == await bench.cold()


async def test_a_restored_state_goes_on_as_a_cold_one(bench: StatefulBench) -> None:
    await bench.kept()
    assert await bench.restored(2, 1) == rows(72)
    assert bench.state(1).draft_rows == (0, 72)
    drafted, truth = bench.draft.export(1, 0, 72), bench.draft.export(0, 0, 72)
    assert all(torch.equal(drafted[name], truth[name]) for name in truth)
    assert await bench.goes_on(2, 1, 72) == await bench.cold()


async def test_a_new_process_goes_on_from_what_an_earlier_one_kept(tmp_path: Path) -> None:
    first = made(tmp_path / "kv", 0)
    await first.kept()
    ended(first)
    second = made(tmp_path / "kv", 0)
    assert await second.restored(1, 2) == rows(72)
    assert await second.goes_on(1, 2, 72) == await second.cold()
    ended(second)


async def test_a_slot_is_used_again_without_the_state_of_before(bench: StatefulBench) -> None:
    other = PROMPT[::-1]
    bench.open(1, 0, other)
    await bench.goes_on(1, 0, 0, other)
    bench.open(2, 0)
    assert await bench.goes_on(2, 0, 0) == await bench.cold()


@pytest.mark.parametrize("slot", [0, 1])
async def test_a_sequence_is_continued_in_place_or_copied_with_its_state(bench: StatefulBench, slot: int) -> None:
    bench.open(1, 0, PROMPT[:41])
    await bench.prefill(1, 0, 0, 40)
    bench.open(2, slot, PROMPT, source=0, keep=40)
    assert await bench.goes_on(2, slot, 40) == await bench.cold()


async def test_nothing_is_continued_from_where_the_state_is_not(bench: StatefulBench) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    bench.open(2, 1, PROMPT, source=0, keep=40)
    outcome = await bench.one(2, RunPrefill(SlotId(1), 40, 48))
    assert outcome == DeviceFailed(
        "broken", "slot 1 could not be opened: slot 0, with 76 rows, has no state to go on from at 40"
    )


@pytest.mark.parametrize("slot", [0, 1, 2])
async def test_a_place_has_the_state_of_rows_that_were_gone_past(bench: StatefulBench, slot: int) -> None:
    """The place is used in the same slot, in another one, and while a third request goes on, whatever rows behind it
    are kept.
    """
    bench.open(1, 0)
    await bench.prefill(1, 0, places={40: 1, 64: 0})
    await bench.decode(1, 0, PROMPT, 3)
    other = (*PROMPT[:70], *PROMPT[:20])
    for request, (keep, state, place) in enumerate(((40, 40, 1), (64, 40, 1), (64, 64, 0)), 2):
        bench.open(request, slot, other, source=0, keep=keep, state=state, device_checkpoint=place)
        assert await bench.goes_on(request, slot, state, other) == await bench.cold(other)
        bench.open(7, 0)
        await bench.prefill(7, 0)


async def test_a_place_with_another_state_is_refused(bench: StatefulBench) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0, places={40: 1})
    for place, at in ((0, 40), (1, 32), (2, 40), (1, 0)):
        bench.open(2, 1, source=0, keep=64, state=at, device_checkpoint=place)
        outcome = await bench.one(2, RunPrefill(SlotId(1), at, at + 8))
        assert isinstance(outcome, DeviceFailed)
        assert f"checkpoint {place} does not have the state behind {at} tokens" in outcome.detail


@pytest.mark.parametrize("why", ["no time", "no memory", "the draft has lost its rows"])
async def test_a_draft_whose_rows_are_not_kept_costs_no_row_of_the_target(
    why: str, bench: StatefulBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver, copy_out, allocate = bench.moving.saver, RowMover.copy_out, bench.store.memory.allocate
    draft_bytes = LAYOUT.compute_size("draft", 72)

    def copy_unless_lost(mover: RowMover, *what: Any) -> None:
        if mover.part is bench.draft and why == "the draft has lost its rows":
            raise RowsLost((), "its process was started again")
        copy_out(mover, *what)

    def allocate_unless_full(_: object, size: int, **how: Any) -> Any:
        if size == draft_bytes and why == "no memory":
            raise MemoryError(f"{size} bytes")
        return allocate(size, **how)

    monkeypatch.setattr(RowMover, "copy_out", copy_unless_lost)
    monkeypatch.setattr(bench.store.memory.__class__, "allocate", allocate_unless_full)
    times = iter([0, MAX_SNAPSHOT_NS + 1])  # at the start, and before the second run, which is the draft's
    if why == "no time":
        saver.clock_ns = lambda: next(times)
    bench.open(1, 0)
    await bench.prefill(1, 0)
    with caplog.at_level(logging.INFO, "rekindle.store"):
        saved = await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:72]))
    assert saved == SnapshotSaved(72, LAYOUT.compute_size("rows", 72))
    assert f"slot 0: rows 0..71 of the draft are not kept: {why}" in caplog.messages
    figures = bench.store.collect_figures().build_json()
    assert (figures["dropped_rows"], figures["dropped_draft_rows"]) == (0, 72)


async def test_a_state_comes_without_rows_where_the_slot_has_them(bench: StatefulBench) -> None:
    await bench.kept()
    bench.open(2, 1, source=0, keep=72, state=0)
    found = looked_up(bench.moving.lookup, RequestId(2), FindPrefix(PROMPT, 0, rows=72))
    assert isinstance(found, PrefixFound)
    assert (found.length, found.checkpoints) == (72, (32, 72))
    lease = bench.store.get_lease(found.lease)
    assert [part.entry.kind for part in lease.all_parts] == [*["draft"] * len(lease.draft), "state", "state"]
    outcome = await bench.moving.restorer.restore(RequestId(2), RestoreBlocks(found.lease, SlotId(1), 72, 72))
    assert isinstance(outcome, BlocksRestored)
    assert (outcome.start, outcome.stop, outcome.bytes) == (72, 72, LAYOUT.compute_size("state", 0))
    assert await bench.goes_on(2, 1, 72) == await bench.cold()


async def test_an_earlier_checkpoint_of_a_lease_may_be_taken(bench: StatefulBench) -> None:
    await bench.kept()
    bench.open(2, 1, source=0, keep=40, state=0)
    found = looked_up(bench.moving.lookup, RequestId(2), FindPrefix(PROMPT, 0, rows=40))
    assert isinstance(found, PrefixFound)
    outcome = await bench.moving.restorer.restore(RequestId(2), RestoreBlocks(found.lease, SlotId(1), 32, 32))
    assert isinstance(outcome, BlocksRestored)
    assert await bench.goes_on(2, 1, 32) == await bench.cold()


async def test_the_end_of_an_answer_is_kept_with_the_state_at_its_last_block(bench: StatefulBench) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    said = [token for one in await bench.decode(1, 0, PROMPT, 9) for token in one.tokens]
    tokens = (*PROMPT, *said)  # 85 of 86 have rows
    saved = await bench.one(1, SaveSnapshot(SlotId(0), tokens[:80], checkpoint=True))
    assert isinstance(saved, SnapshotSaved)
    settled(bench.store)
    turn = (*tokens, *PROMPT[:9])
    assert await bench.restored(2, 1, turn) == rows(80)
    assert await bench.goes_on(2, 1, 80, turn) == await bench.cold(turn)


async def test_a_decode_step_keeps_the_state_that_it_goes_on_behind(bench: StatefulBench) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0)
    said = [token for one in await bench.decode(1, 0, PROMPT, 6) for token in one.tokens]
    tokens = (*PROMPT, *said)  # 82 rows
    await bench.one(1, RunDecode(SlotId(0), len(tokens) - 1, tokens[-1], checkpoint=True))
    bench.moving.saver.state_worker.submit(lambda: None).result()  # a thread brings the state to host memory
    assert not bench.store.lacks_checkpoint(tokens[:80])
    assert bench.store.lacks_checkpoint(tokens[:72])


@pytest.mark.parametrize("wrong", [range(0), range(0, 20, 3), range(0, 20, 2), range(20)])
async def test_proposals_that_are_rolled_back_leave_the_state_of_plain_decoding(
    bench: StatefulBench, wrong: range
) -> None:
    cold = await bench.cold(count=20)
    answer = [token for one in cold for token in one.tokens]
    bench.draft.guess[0] = [token + 1 if at in wrong else token for at, token in enumerate(answer)]
    bench.open(1, 0)
    await bench.prefill(1, 0)
    found = await bench.decode(1, 0, PROMPT, 12, propose=5)
    assert sum(one.proposed for one in found) > 0
    assert [token for one in found for token in one.tokens][:12] == answer[:12]
    tokens = (*PROMPT, *(token for one in found for token in one.tokens))
    bench.open(2, 1, (*tokens, 7), source=0, keep=len(tokens) - 1)
    continued = await bench.goes_on(2, 1, len(tokens) - 1, (*tokens, 7))
    assert continued == await bench.cold((*tokens, 7)), "what stays in the slot is the state of what was kept"


async def test_a_prompt_that_goes_another_way_continues_from_the_checkpoint_before(bench: StatefulBench) -> None:
    await bench.kept()
    other = (*PROMPT[:60], *PROMPT[:20])
    assert await bench.restored(2, 1, other) == rows(32)
    assert await bench.goes_on(2, 1, 32, other) == await bench.cold(other)


async def test_rows_without_a_checkpoint_are_no_hit(bench: StatefulBench) -> None:
    await bench.kept(checkpoints=())
    assert await bench.restored(2, 1) == PrefixMissed("no_checkpoint:0")


async def test_rows_that_the_draft_did_not_see_stay_without(bench: StatefulBench) -> None:
    await bench.kept(drafted=False)
    assert await bench.restored(2, 1) == rows(72)
    assert bench.state(1).draft_rows == (72, 72)
    assert await bench.goes_on(2, 1, 72) == await bench.cold()


async def test_a_drafts_rows_may_be_kept_later(bench: StatefulBench) -> None:
    await bench.kept(drafted=False)
    await bench.kept()
    assert await bench.restored(2, 1) == rows(72)
    assert bench.state(1).draft_rows == (0, 72)


def spoil(folder: Path, store: Store, kind: str) -> None:
    assert store.lower_tiers
    (entry,) = (
        entry for entry in store.lower_tiers[0].index.entries.values() if entry.kind == kind and entry.stop == 72
    )
    (file,) = (file for file in files(folder) if file.name == store.lower_tiers[0].get_file_name(entry))
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 255
    file.write_bytes(raw)


async def test_a_damaged_checkpoint_is_a_miss_and_then_the_one_before_is_found(
    bench: StatefulBench, tmp_path: Path
) -> None:
    await bench.kept()
    bench.store.memory_tier.index.budget = 0
    bench.store.release(bench.store.find_prefix(PROMPT, 0)[0])  # what memory held is gone
    spoil(tmp_path / "kv", bench.store, "state")
    outcome = await bench.restored(2, 1)
    assert isinstance(outcome, StoreFailed)
    assert outcome.kind == "broken"
    cold = await bench.cold()
    assert await bench.goes_on(2, 1, 0) == cold
    assert await bench.restored(3, 2) == rows(32)
    assert await bench.goes_on(3, 2, 32) == cold


async def test_damaged_draft_rows_cost_the_draft_only(bench: StatefulBench, tmp_path: Path) -> None:
    await bench.kept()
    bench.store.memory_tier.index.budget = 0
    bench.store.release(bench.store.find_prefix(PROMPT, 0)[0])
    spoil(tmp_path / "kv", bench.store, "draft")
    assert await bench.restored(2, 1) == rows(72)
    assert bench.state(1).draft_rows == (72, 72)
    assert await bench.goes_on(2, 1, 72) == await bench.cold()


async def test_a_part_of_a_prefix_cannot_be_restored_with_its_state(bench: StatefulBench) -> None:
    await bench.kept()
    for start, stop in ((0, 40), (8, 72)):  # where no checkpoint is; and rows behind others that are missing
        bench.open(2, 1)
        found = looked_up(bench.moving.lookup, RequestId(2), FindPrefix(PROMPT, 0))
        effect = RestoreBlocks(found.lease, SlotId(1), start, stop)
        assert (await bench.moving.restorer.restore(RequestId(2), effect)).kind == "broken"
        with pytest.raises(KeyError):
            bench.store.get_lease(LeaseId(found.lease))


async def test_a_checkpoint_is_refused_where_the_slot_is_not(bench: StatefulBench) -> None:
    bench.open(1, 0)
    await bench.prefill(1, 0, 0, 20)

    def ask(request: int, at: int) -> bool:
        return bench.moving.saver.save_checkpoint(RequestId(request), SlotId(0), at)

    for request, at in ((1, 8), (1, 20), (1, 0), (2, 16)):
        assert not await bench.moving.restorer.lane.run(lambda request=request, at=at: ask(request, at))
    assert not bench.store.memory_tier.index.entries


@pytest.mark.parametrize("lacks", ["permits", "memory"])
async def test_a_checkpoint_that_others_would_wait_for_stays_on_the_device(
    bench: StatefulBench, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    """With pinned memory, the device's thread does not wait for earlier copies, and no more memory is pinned."""
    caplog.set_level("INFO", "rekindle.store")
    bench.open(1, 0)
    await bench.prefill(1, 0, 0, 16)
    saver, memory = bench.moving.saver, bench.store.memory
    memory.pin = True
    if lacks == "permits":
        while saver._copy_permits.acquire(blocking=False):  # noqa: SLF001 - as if copies were on their way
            pass
    else:
        memory.max_bytes = 0
    began = await saver.lane.run(lambda: saver.save_checkpoint(RequestId(1), SlotId(0), 16))
    assert began == (lacks == "memory")
    await asyncio.wrap_future(saver.state_worker.submit(lambda: None))
    assert not bench.store.memory_tier.index.entries
    assert "the checkpoint at 16 stays on the device" in caplog.text


async def test_a_prompt_beside_decode_steps_has_the_answer_and_the_checkpoints_of_one_alone(
    bench: StatefulBench,
) -> None:
    """Both requests: the one that decodes meanwhile, and the one whose prompt comes in blocks behind its steps."""
    other = PROMPT[::-1]
    bench.open(1, 0)
    await bench.prefill(1, 0)
    bench.open(2, 1, other)
    found, position, last = list[Decoded](), END, PROMPT[-1]
    for start in range(0, END, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, END)
        step = EffectRequest(RequestId(1), RunDecode(SlotId(0), position, last))
        piece = RunPrefill(
            SlotId(1), start, stop, checkpoint=stop == 32, device_checkpoint=CheckpointId(0) if stop == 40 else None
        )
        decoded, advanced = await bench.executor.perform(Launch((step, EffectRequest(RequestId(2), piece))))
        assert isinstance(decoded, Decoded)
        assert advanced == PrefillAdvanced(stop)
        found.append(evolve(decoded, ns=0))
        position, last = position + 1, decoded.tokens[0]
    assert found[:8] == await bench.cold()
    assert await bench.decode(2, 1, other) == await bench.cold(other)
    assert isinstance(await bench.one(2, SaveSnapshot(SlotId(1), other[:72])), SnapshotSaved)
    assert await bench.restored(3, 2, other[:40]) == rows(32)
    assert await bench.goes_on(3, 2, 32, other[:40]) == await bench.cold(other[:40])


async def test_the_lane_goes_on_while_a_checkpoint_is_on_its_way_to_host_memory(
    bench: StatefulBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = StateMover.write

    def write_late(mover: StateMover, *given: object) -> None:
        assert may_write.wait(10)
        write(mover, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StateMover, "write", write_late)
    bench.open(1, 0)
    await bench.prefill(1, 0, checkpoints=(32,))  # its later chunks move the state of the slot
    assert bench.store.lacks_checkpoint(PROMPT[:32])
    may_write.set()
    assert isinstance(await bench.one(1, SaveSnapshot(SlotId(0), PROMPT[:72])), SnapshotSaved)
    assert not bench.store.lacks_checkpoint(PROMPT[:32]), "an answered snapshot has its checkpoints"
    assert await bench.restored(2, 1, PROMPT[:40]) == rows(32)
    assert await bench.goes_on(2, 1, 32, PROMPT[:40]) == await bench.cold(PROMPT[:40])


async def test_a_checkpoint_that_finds_no_memory_costs_the_request_nothing(
    bench: StatefulBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int) -> None:
        raise MemoryError(f"{size} bytes of host memory")

    with monkeypatch.context() as patched:
        patched.setattr(bench.store.memory.__class__, "allocate", lambda _, size: full(size))
        bench.open(1, 0)
        await bench.prefill(1, 0, checkpoints=(32,))
    assert not bench.store.memory_tier.index.entries
    assert await bench.decode(1, 0, PROMPT) == await bench.cold()


async def test_a_state_that_cannot_be_put_back_leaves_rows_without_a_state(
    bench: StatefulBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of it may be there already, so the state of before is gone as well, and the rows are computed again."""
    await bench.kept()
    bench.open(2, 1)
    await bench.prefill(2, 1, 0, 16)
    found = looked_up(bench.moving.lookup, RequestId(2), FindPrefix(PROMPT, 16))

    def half(states: RecurrentStates, slot: int, state: Mapping[str, torch.Tensor], at: int) -> None:
        states.standing[slot] = None
        raise ValueError("only half of it")

    with monkeypatch.context() as patched:
        patched.setattr(RecurrentStates, "import_", half)
        outcome = await bench.moving.restorer.restore(RequestId(2), RestoreBlocks(found.lease, SlotId(1), 16, 72))
    assert outcome == StoreFailed("lost", "only half of it")
    bench.open(3, 2, source=1, keep=16, state=0)
    cold = await bench.cold()
    assert await bench.goes_on(3, 2, 0) == cold, "its rows are still what everybody believes"
    assert await bench.goes_on(2, 1, 0) == cold


async def test_what_is_on_the_device_goes_on_with_a_state_that_is_kept(bench: StatefulBench) -> None:
    await bench.kept()
    bench.open(2, 1)
    await bench.prefill(2, 1, 0, 16)
    found = looked_up(bench.moving.lookup, RequestId(2), FindPrefix(PROMPT, 16))
    outcome = await bench.moving.restorer.restore(RequestId(2), RestoreBlocks(found.lease, SlotId(1), 16, 72))
    assert (outcome.start, outcome.stop) == (16, 72)
    assert await bench.goes_on(2, 1, 72) == await bench.cold()


async def test_a_draft_without_memory_does_not_undo_what_the_target_did(
    bench: StatefulBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for what the draft would have to remember")

    monkeypatch.setattr(bench.draft, "follow", full)
    bench.open(1, 0)
    assert await bench.goes_on(1, 0, 0) == await bench.cold()


async def test_a_tree_is_refused_by_name() -> None:
    shard = RecurrentShard(1, CAPACITY, BUCKETS)
    tree = Step((Segment(0, 0, 2), Segment(0, 1, 1)), 4)
    with pytest.raises(ValueError, match="a tree: each of its nodes would need a recurrent state"):
        shard.forward(tree, torch.tensor([1, 2, 3]))
