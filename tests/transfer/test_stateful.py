"""A model whose state is a recurrence: restored from rows and a checkpoint, it goes on exactly as a cold one does."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import torch
from attrs import define, evolve, field

from adapters.device.lane import DeviceLane
from adapters.device.slots import SlotState
from adapters.layout import RowSpec, TensorSpec, torch_dtype
from adapters.store.folder import Folder
from adapters.store.format import Layout
from adapters.store.opening import index, open_disk
from adapters.store.store import Store
from adapters.transfer.transfer import Transfer, transfer
from effects.ids import DeviceFailed, LeaseId, RequestId, SlotId, StoreFailed, Tokens
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from tests.store.kit import DRAFT, files, settled

BLOCK_SIZE, CAPACITY, SLOTS = 8, 128, 3
ROWS = RowSpec(("layers.0.k", "layers.0.v"), 2, 3, "F32")
STATE = (TensorSpec("layers.1.conv", "BF16", (2, 3)), TensorSpec("layers.1.state", "F32", (4, 4)))
LAYOUT = Layout("12" * 16, BLOCK_SIZE, ROWS, DRAFT, STATE)
PROMPT = tuple((5 * n + n // 3) % 61 for n in range(77))


def rows(stop: int) -> BlocksRestored:
    """All rows up to `stop`, sizes and times aside."""
    return BlocksRestored(0, stop, 0)


class Caches:
    """Rows of a draft or a target, `[heads, capacity, width]` a slot."""

    addressed = False
    state_specs: tuple[TensorSpec, ...] = ()

    def __init__(self, rows: RowSpec) -> None:
        self.row_spec = rows
        shape = (SLOTS, rows.heads, CAPACITY, rows.width)
        self.caches = {name: torch.zeros(shape, dtype=torch_dtype(rows.dtype)) for name in rows.names}

    def fill(self, slot: int, position: int, token: int) -> None:
        for number, cache in enumerate(self.caches.values()):
            cache[slot, :, position] = (token * 7 + position + number) % 31

    def rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("rows go by their names")

    def export_rows(self, slot: int, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        return {name: cache[slot, :, start:stop].clone() for name, cache in self.caches.items()}

    def import_rows(self, slot: int, start: int, rows: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in rows.items():
            self.caches[name][slot, :, start : start + tensor.shape[1]] = tensor


class Recurrence(Caches):
    """A state that every token turns, and a sum over all rows: one wrong bit anywhere changes every later answer."""

    state_specs = STATE

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.states = {spec.name: torch.zeros(SLOTS, *spec.shape, dtype=torch_dtype(spec.dtype)) for spec in STATE}

    def reset(self, slot: int) -> None:
        for state in self.states.values():
            state[slot] = 0

    def feed(self, slot: int, position: int, token: int) -> None:
        self.fill(slot, position, token)
        for number, state in enumerate(self.states.values()):
            state[slot] = (state[slot] * 3 + token + number).remainder(101)

    def next(self, slot: int, length: int) -> int:
        total = sum(float(cache[slot, :, :length].double().sum()) for cache in self.caches.values())
        return int(total + sum(float(state[slot].double().sum()) for state in self.states.values())) % 61

    def export_state(self, slot: int) -> Mapping[str, torch.Tensor]:
        return {name: state[slot].clone() for name, state in self.states.items()}

    def import_state(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.states[name][slot] = tensor


@define
class Bench:
    store: Store
    lane: DeviceLane
    shard: Recurrence = field(factory=Recurrence)
    draft: Caches = field(factory=lambda: Caches(DRAFT.rows))
    slots: dict[int, SlotState] = field(factory=dict[int, SlotState])
    moving: Transfer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.moving = transfer(self.store, (self.shard,), self.lane, self.serving, draft=self.draft)  # type: ignore[arg-type]

    def serving(self, slot: int, request: RequestId) -> SlotState | DeviceFailed:
        state = self.slots[slot]
        return state if state.request == request else DeviceFailed("broken", "somebody else's")

    def open(self, request: int, slot: int, prompt: Tokens = PROMPT) -> None:
        self.slots[slot] = SlotState(RequestId(request), list(prompt), 0, sampler=None)  # type: ignore[arg-type]
        self.shard.reset(slot)

    async def compute(self, slot: int, stop: int, checkpoints: tuple[int, ...] = (), drafted: bool = True) -> None:
        """Every row up to `stop`, a checkpoint kept at each of `checkpoints`."""
        state = self.slots[slot]

        def work() -> None:
            while (at := state.valid) < stop:
                self.shard.feed(slot, at, state.tokens[at])
                if drafted:
                    self.draft.fill(slot, at, state.tokens[at])
                    state.draft(at, at + 1)
                state.advance(at + 1)
                if at + 1 in checkpoints:
                    assert self.moving.saver.checkpoint(state.request, SlotId(slot), at + 1)

        await self.lane.run(work)

    async def answer(self, slot: int, count: int = 5) -> list[int]:
        state, answer = self.slots[slot], list[int]()
        await self.compute(slot, len(state.tokens))
        for _ in range(count):
            answer.append(self.shard.next(slot, state.valid))
            state.tokens.append(answer[-1])
            await self.compute(slot, len(state.tokens))
        return answer

    async def kept(self, checkpoints: tuple[int, ...] = (32, 72), drafted: bool = True) -> list[int]:
        """The prompt computed in slot 0 as request 1, and kept; its answer."""
        self.open(1, 0)
        await self.compute(0, 72, checkpoints, drafted)
        effect = SaveSnapshot(SlotId(0), PROMPT[:72])
        saved = await self.lane.run(lambda: self.moving.saver.save(RequestId(1), effect))
        assert isinstance(saved, SnapshotSaved)
        settled(self.store)
        return await self.answer(0)

    async def restored(self, request: int, slot: int, prompt: Tokens = PROMPT) -> PrefixFound | PrefixMissed | object:
        self.open(request, slot, prompt)
        found = await self.moving.lookup.find(RequestId(request), FindPrefix(prompt, 0))
        if isinstance(found, PrefixMissed):
            return found
        assert isinstance(found, PrefixFound)
        outcome = await self.moving.restorer.restore(
            RequestId(request), RestoreBlocks(found.lease, SlotId(slot), 0, found.length)
        )
        return evolve(outcome, ns=0, bytes=0) if isinstance(outcome, BlocksRestored) else outcome


@pytest.fixture(params=["host", "disk"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    lane, lock = DeviceLane(), threading.RLock()
    disk = open_disk(LAYOUT, Folder.open(tmp_path / "kv"), lock, budget=1 << 30)
    store = Store(LAYOUT, index(LAYOUT, 1 << 30 if request.param == "host" else 0), disk, lock)
    yield Bench(store, lane)
    assert store.figures()["leases"] == 0
    assert lane.close()
    assert store.close()


async def test_a_restored_state_goes_on_as_a_cold_one(bench: Bench) -> None:
    cold = await bench.kept()
    assert await bench.restored(2, 1) == rows(72)
    assert bench.slots[1].drafted == (0, 72)
    drafted, truth = bench.draft.export_rows(1, 0, 72), bench.draft.export_rows(0, 0, 72)
    assert all(torch.equal(drafted[name], truth[name]) for name in truth)
    assert await bench.answer(1) == cold


async def test_a_prompt_that_goes_another_way_continues_from_the_checkpoint_before(bench: Bench) -> None:
    await bench.kept()
    other = (*PROMPT[:60], *PROMPT[:20])
    assert await bench.restored(2, 1, other) == rows(32)
    warm = await bench.answer(1)
    bench.open(3, 2, other)
    assert await bench.answer(2) == warm


async def test_rows_without_a_checkpoint_are_no_hit(bench: Bench) -> None:
    await bench.kept(checkpoints=())
    assert await bench.restored(2, 1) == PrefixMissed("no_checkpoint:0")


async def test_rows_that_the_draft_did_not_see_stay_without(bench: Bench) -> None:
    cold = await bench.kept(drafted=False)
    assert await bench.restored(2, 1) == rows(72)
    assert bench.slots[1].drafted == (72, 72)
    assert await bench.answer(1) == cold


async def test_a_drafts_rows_may_be_kept_later(bench: Bench) -> None:
    await bench.kept(drafted=False)
    await bench.kept()
    assert await bench.restored(2, 1) == rows(72)
    assert bench.slots[1].drafted == (0, 72)


def spoil(folder: Path, store: Store, kind: str) -> None:
    assert store.disk is not None
    (entry,) = (entry for entry in store.disk.index.entries.values() if entry.kind == kind and entry.stop == 72)
    (file,) = (file for file in files(folder) if file.name == store.disk.name(entry))
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 255
    file.write_bytes(raw)


async def test_a_damaged_checkpoint_is_a_miss_and_then_the_one_before_is_found(bench: Bench, tmp_path: Path) -> None:
    cold = await bench.kept()
    bench.store.host.budget = 0
    bench.store.release(bench.store.find(PROMPT, 0)[0])  # what memory held is gone
    spoil(tmp_path / "kv", bench.store, "state")
    outcome = await bench.restored(2, 1)
    assert isinstance(outcome, StoreFailed)
    assert outcome.kind == "broken"
    bench.open(2, 1)
    assert await bench.answer(1) == cold
    assert await bench.restored(3, 2) == rows(32)
    assert await bench.answer(2) == cold


async def test_damaged_draft_rows_cost_the_draft_only(bench: Bench, tmp_path: Path) -> None:
    cold = await bench.kept()
    bench.store.host.budget = 0
    bench.store.release(bench.store.find(PROMPT, 0)[0])
    spoil(tmp_path / "kv", bench.store, "draft")
    assert await bench.restored(2, 1) == rows(72)
    assert bench.slots[1].drafted == (72, 72)
    assert await bench.answer(1) == cold


async def test_a_part_of_a_prefix_cannot_be_restored_with_its_state(bench: Bench) -> None:
    await bench.kept()
    for start, stop in ((0, 40), (8, 72)):
        bench.open(2, 1)
        found = await bench.moving.lookup.find(RequestId(2), FindPrefix(PROMPT, 0))
        effect = RestoreBlocks(found.lease, SlotId(1), start, stop)
        assert (await bench.moving.restorer.restore(RequestId(2), effect)).kind == "broken"
        with pytest.raises(KeyError):
            bench.store.lease(LeaseId(found.lease))


async def test_a_checkpoint_is_refused_where_the_slot_is_not(bench: Bench) -> None:
    bench.open(1, 0)
    await bench.compute(0, 20)

    def ask(request: int, at: int) -> bool:
        return bench.moving.saver.checkpoint(RequestId(request), SlotId(0), at)

    for request, at in ((1, 16), (1, 20), (1, 0), (2, 16)):
        assert not await bench.lane.run(lambda request=request, at=at: ask(request, at))
    assert not bench.store.host.entries
