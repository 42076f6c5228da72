"""A hybrid target served by the whole engine: every way that its state can come about gives a cold one's tokens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from attrs import define, evolve, field
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.drafting import Drafting
from adapters.device.speculation.proposal_tree import Tree, chain
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import NamedTensors
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.step import Forward, Step
from adapters.models.numerics.probe_result import Numerics
from adapters.store.files.file_format import Layout
from adapters.store.open_store import open_store
from adapters.store.store import Store
from adapters.transfer.transfer import create_transfer
from benchmarks.exactness import Answered, collect_answer
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.residency import LoadModel, ModelLoaded
from effects.scope import Scope
from engine.loading.choose_settings import choose_settings
from engine.loading.memory.memory_fit import Fit
from engine.loading.open_store import build_layout
from engine.loading.plan_load import ProvenPlan
from engine.serving.wiring import Engine, run_engine
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.options import Options
from states.settings import Settings
from tests.models.draft_models import FULL, config_of, head_of, proven_draft, random_tensors
from tests.models.recurrent_shard import VOCAB, WIDTH, RecurrentRows, RecurrentShard, RecurrentStates
from tests.pairs import one_in
from tests.store.kit import settled

CHUNK, BUCKETS = 32, (4, 8, 16, 32)
SETTINGS = Settings(
    slots=2,
    max_context=256,
    chunk=CHUNK,
    block_size=16,
    batch_rows=32,
    store=True,
    stateful=True,
    checkpoint_interval=48,
    state_checkpoints=3,
)
SAMPLED = Sampling(temperature=0.9, seed=5)


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch takes as long as any other, and every restore: so restoring pays, as proposing does."""
    for module in ("adapters.device.decode.prefill_runner", "adapters.transfer.restorer"):
        ticks = count(0, 1000)
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter_ns=partial(next, ticks)))


@define(eq=False)
class Guesses(Proposer):
    """Proposes what is known to come, one token in four of it wrong."""

    known: Sequence[Tokens]
    errors: random.Random = field(factory=partial(random.Random, 3))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        trees = []
        for request in requests:
            so_far = tuple(request.state.tokens)
            coming = next((one[len(so_far) :] for one in self.known if one[: len(so_far)] == so_far), ())
            guess = coming[: min(request.most, request.depth)]
            trees.append(chain((so_far[-1], *(token if self.errors.random() < 0.75 else 3 for token in guess))))
        return trees

    def follow(self, *how: object) -> None: ...

    def catch_up(self, slot: int) -> None: ...

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None: ...


class CountedStates(RecurrentStates):
    """Counts checkpoints that are read back."""

    brought = 0

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        self.brought += 1
        super().import_(slot, state, at)


class ReadBack(RecurrentShard):
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.states = CountedStates(self.spec.slots, self.states.block, self.states.checkpoint_count)


@define
class OneStart:
    engine: Engine
    store: Store
    shard: ReadBack

    async def answer(self, job: Job) -> tuple[Tokens, tuple[str, int]]:
        """Return the tokens of the answer, and the tier and number of restored tokens.

        This waits until the request has left the world and its rows are written: no other request may continue from the
        state of a busy slot, since it may move on.
        """
        found = await collect_answer(self.engine, job)
        while self.engine.event_loop.world.requests:  # noqa: ASYNC110 - no event marks the end of a request
            await anyio.sleep(0.001)
        await anyio.to_thread.run_sync(settled, self.store)
        assert found.report is not None
        return found.tokens, (found.report.tier, found.report.restored_tokens)


@asynccontextmanager
async def process(
    folder: Path, host: int = 0, known: Sequence[Tokens] = (), **changes: object
) -> AsyncIterator[OneStart]:
    """From its start to its end; what it kept is in the folder."""
    settings = evolve(SETTINGS, max_proposals=7 if known else 0, **changes)
    places = {"state_block": settings.block_size, "state_checkpoints": settings.state_checkpoints}
    lane, shard = DeviceLane(), ReadBack(settings.slots, settings.max_context, BUCKETS, **places)
    store = open_store(
        Layout("34" * 16, SETTINGS.block_size, shard.rows.spec, state=shard.states.specs),
        folder,
        host_bytes=host,
        disk_bytes=1 << 30,
    )
    assert store is not None
    slots = SlotTable()
    moving = create_transfer(store, (shard,), lane, slots.find)
    parts = ExecutorParts(
        shard,
        BUCKETS,
        lane,
        handlers={LoadModel: lambda *_: ModelLoaded()},
        proposer=Guesses(known) if known else None,
        keep_state=moving.saver.save_checkpoint,
        slots=slots,
    )
    executor = DeviceExecutor(parts)
    async with run_engine(settings, executor, transfer=moving, paranoid=True) as running:
        yield OneStart(running, store, shard)
        await anyio.to_thread.run_sync(settled, store)
    assert store.collect_figures().build_json()["leases"] == 0
    assert executor.close()
    moving.close()


COLD = dict[Job, Tokens]()


async def cold(tmp_path: Path, job: Job, **changes: object) -> Tokens:
    """Return the answer that a process gives which keeps nothing, row by row. It is computed once for all tests."""
    if job not in COLD:
        async with process(tmp_path / "none", **{**changes, "chunk": 1, "block_size": 1, "store": False}) as running:
            COLD[job] = (await running.answer(evolve(job, scope=Scope("off"))))[0]
    return COLD[job]


def prompt(seed: int, length: int) -> Tokens:
    return tuple(random.Random(seed).choices(range(4, VOCAB), k=length))


async def test_every_way_to_a_state_gives_the_tokens_of_a_cold_one(tmp_path: Path) -> None:
    first = Job(prompt(1, 100), 9, sampling=SAMPLED)
    others = [Job(prompt(seed, 40), 4) for seed in (2, 3)]
    answers = {id(job): await cold(tmp_path, job) for job in (first, *others)}
    turn = Job((*first.prompt, *answers[id(first)], *prompt(4, 30)), 9)
    answers[id(turn)] = await cold(tmp_path, turn)
    branch = Job((*first.prompt[:60], *prompt(5, 30)), 9)
    answers[id(branch)] = await cold(tmp_path, branch)
    for host, tier in ((1 << 30, "host"), (0, "disk")):
        folder = tmp_path / tier
        async with process(folder, host) as running:

            async def asked(job: Job, running: OneStart = running) -> tuple[str, int]:
                tokens, restored = await running.answer(job)
                assert tokens == answers[id(job)]
                return restored

            assert await asked(first) == ("none", 0)
            assert await asked(turn) == ("device", 96), "the slot goes on in the last block of the answer"
            for other in others:
                await asked(other)
            place, rows = await asked(turn)
            assert (place, rows) == (tier, 128), "both slots serve others now"
            assert await asked(branch) == ("device", 48), "the rows are there, and a state that both share"
        async with process(folder, host) as running:
            assert await asked(turn, running) == ("disk", 128), "a new process"
            assert (await asked(branch, running))[1] == 80, "its own checkpoint"


class Dialogue:
    """Turns of a template that leaves the reasoning of earlier answers out, as Qwen's does."""

    OPENS, SYSTEM, USER, THINKS = (1, 2), prompt(20, 30), 14, 11

    def __init__(self) -> None:
        self.said, self.turns, self.boundaries = [*self.OPENS, *self.SYSTEM], 0, [2]

    def asks(self) -> Job:
        """The next prompt; its last boundary opens the answer, whose reasoning begins behind it."""
        self.turns += 1
        self._message(prompt(30 + self.turns, self.USER))
        boundaries = (*self.boundaries, len(self.said) + 2)
        return Job((*self.said, *self.OPENS, 3), 24, boundaries=boundaries)

    def hears(self, answer: Tokens) -> None:
        self._message(answer[self.THINKS :])

    def _message(self, content: Tokens) -> None:
        self.boundaries.append(len(self.said) + 2)
        self.said += [*self.OPENS, *content]


@one_in(2, "host")
@pytest.mark.parametrize(("host", "places"), [(1 << 30, 3), (0, 3), (1 << 30, 0)])
async def test_a_conversation_without_its_earlier_reasoning_computes_a_chunk_and_what_is_new(
    tmp_path: Path, host: int, places: int
) -> None:
    """Six turns, a restart before the fourth. Nothing but the new tokens, less than a chunk, and one state a turn."""
    dialogue, before, tiers, large = Dialogue(), 0, list[str](), {"max_context": 1024, "state_checkpoints": places}
    for lives in range(2):
        async with process(tmp_path / "kv", host, **large) as running:
            for _ in range(3):
                job, states = dialogue.asks(), running.shard.states.brought
                tokens, (tier, restored) = await running.answer(job)
                assert tokens == await cold(tmp_path, job, **large)
                new = len(job.prompt) - before
                assert len(job.prompt) - restored <= new + CHUNK, (lives, dialogue.turns)
                assert running.shard.states.brought - states <= 1
                dialogue.hears(tokens)
                before, tiers = len(dialogue.said), [*tiers, tier]
    back = "device" if places else "host" if host else "disk"
    assert (tiers[0], tiers[3]) == ("none", "disk")
    assert {*tiers[1:3], *tiers[4:]} == {"device"}, f"rows stay on the device, wherever the state is: {back}"


async def test_a_state_that_cannot_be_put_back_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot had one of its own, further back, which is lost with it: the request is computed from its start."""
    job = Job(prompt(1, 100), 9)
    begun = evolve(job, prompt=job.prompt[:60], max_tokens=1)
    async with process(tmp_path / "kv") as running:
        answer, _ = await running.answer(job)
    turn, tried = Job((*job.prompt, *answer, *prompt(4, 30)), 9), list[int]()

    def half(states: CountedStates, slot: int, _: NamedTensors, __: int) -> None:
        tried.append(slot)
        states.standing[slot] = None
        raise RuntimeError("only half of it")

    async with process(tmp_path / "kv") as running:
        await running.answer(begun)
        monkeypatch.setattr(CountedStates, "import_", half)
        assert await running.answer(turn) == (await cold(tmp_path, turn), ("none", 0))
        assert len(tried) == 1


async def test_a_slot_that_does_not_get_its_rows_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, copy, tried = Job(prompt(1, 100), 9), RecurrentRows.copy, list[int]()
    branch = Job((*job.prompt[:60], *prompt(5, 30)), 9)

    def once(rows: RecurrentRows, source: int, target: int, count: int) -> None:
        tried.append(target)
        if len(tried) == 1:
            raise RuntimeError("no copy today")
        copy(rows, source, target, count)

    async with process(tmp_path / "kv") as running:
        await running.answer(job)
        monkeypatch.setattr(RecurrentRows, "copy", once)
        tokens, _ = await running.answer(branch)
        assert (tokens, len(tried)) == (await cold(tmp_path, branch), 2)


async def test_an_append_only_turn_after_a_restart_goes_on_in_the_last_block_of_the_answer(tmp_path: Path) -> None:
    job = Job(prompt(1, 70), 40)
    async with process(tmp_path / "kv") as running:
        answer, _ = await running.answer(job)
    turn = Job((*job.prompt, *answer, *prompt(2, 20)), 5)
    async with process(tmp_path / "kv") as running:
        assert await running.answer(turn) == (await cold(tmp_path, turn), ("disk", 96)), "109 rows, of which 6 blocks"


async def test_proposals_change_nothing_of_what_is_kept_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0, 1000)  # every launch takes as long, whatever it proposes, so proposing pays
    monkeypatch.setattr("adapters.device.decode.decode_step.time", SimpleNamespace(perf_counter_ns=lambda: next(clock)))
    job = Job(prompt(1, 70), 60)
    plain = await cold(tmp_path, job)
    known = (*job.prompt, *plain)
    async with process(tmp_path / "kv", known=[known]) as running:
        found = await collect_answer(running.engine, job)
        await running.answer(Job(prompt(9, 5), 1))  # both are done
        assert found.tokens == plain
        assert found.report is not None
        assert found.report.proposed > found.report.accepted > 10, "some were taken back"
        turn = Job((*known, *prompt(2, 20)), 8)
        tokens, restored = await running.answer(turn)
        assert restored == ("device", (len(known) - 1) // 16 * 16)
        assert tokens == await cold(tmp_path, turn)


async def test_streams_side_by_side_each_have_their_own_state(tmp_path: Path) -> None:
    jobs = [Job(prompt(seed, 30 + 7 * seed), 12) for seed in range(6)]
    alone = [await cold(tmp_path, job) for job in jobs]
    found = [Answered()] * len(jobs)
    async with process(tmp_path / "kv") as running:

        async def one(number: int) -> None:
            found[number] = await collect_answer(running.engine, jobs[number])

        async with anyio.create_task_group() as tasks:
            for number in range(len(jobs)):
                tasks.start_soon(one, number)
    assert [one.tokens for one in found] == alone


async def test_the_engine_learns_from_the_shard_that_it_has_state(tmp_path: Path) -> None:
    lane, shard = DeviceLane(), Pipeline((RecurrentShard(2, 256, BUCKETS),))
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane))
    numerics = Numerics("buckets", BUCKETS, 16, CHUNK, "torch", 1, "one", 0.0, 0, 0)
    how = {"proven": ProvenPlan(Fit(4, 256), numerics, (), "a"), "kept": CalibrationCache(tmp_path), "plan": ()}
    settings = await lane.run(partial(choose_settings, Options(), executor.parts, shard, None, **how))
    assert settings.stateful
    assert all(settings.rates.prefill), "chunks are timed wherever they stand, whatever state was there"
    assert build_layout(shard, None, "a", 16) == Layout("a", 16, shard.rows.spec, None, shard.states.specs)
    assert not settings.no_trees
    assert executor.close()


class Strict(RecurrentShard):
    """A shard that refuses what real shards refuse: only one block of the state can be rolled back."""

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        if not step.rows_only and any(segment.count > self.states.block for segment in step.segments):
            raise ValueError("too many rows in a step that may be rolled back")
        return super().forward(step, inputs)


async def test_a_draft_of_large_blocks_is_asked_for_what_can_be_rolled_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lane, shard = DeviceLane(), Pipeline((Strict(2, 256, BUCKETS, state_block=16),))
    like = {"hidden_size": WIDTH, "num_layers": 1, "masks": (FULL,), "aux_layers": (0,)}
    config = config_of(**like, block=32, mask_token_id=VOCAB - 1)
    kernels = proven_draft(config, torch.float32, 256, VOCAB).copy_for_shard()
    head = head_of(config, kernels, vocab=VOCAB)
    draft = DFlashDraft(
        config, random_tensors(config), kernels, head, DraftPlacement(slots=2, capacity=256, buckets=BUCKETS)
    )
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane, proposer=Drafting(draft, BUCKETS)))
    numerics = Numerics("buckets", BUCKETS, 16, CHUNK, "torch", 1, "one", 0.0, 0, 0)
    how = {"proven": ProvenPlan(Fit(4, 48), numerics, (), "a"), "kept": CalibrationCache(tmp_path), "plan": ()}
    settings = await lane.run(partial(choose_settings, Options(), executor.parts, shard, draft, **how))
    assert settings.max_proposals == 15
    assert max(rows for _, _, rows, *_ in settings.rates.decode) == 16
    assert "could propose 31 tokens at once, but only 15 can be undone" in caplog.text
    assert executor.close()
