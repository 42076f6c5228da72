"""Native decode steps: one call of the compiled library leaves what separate calls for the parts of a step leave.

Compared are outcomes, rows, and the context of the draft.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from attrs import define, evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.buckets import row_counts
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.drafting import Drafting
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement, TargetHead
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.decode_round import NativeRound
from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.models.numerics.synthetic import RandomWeights
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling
from effects.residency import LoadModel, UnloadModel
from tests.device.driver import Driver
from tests.models.checkpoints import same_bits
from tests.models.draft_models import GEOMETRIES, TARGET, random_tensors
from tests.pairs import cover_pairs

pytestmark = pytest.mark.skipif(find_library() is None, reason="no products in C here")
BUCKETS, CAPACITY, SLOTS, VOCAB = (4, 8, 16, 32), 256, 3, 7  # so few tokens that a random draft is often right
KINDS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.8, seed=5),
    "top-p": Sampling(temperature=1.3, top_p=0.8, seed=2**62),
    "top-k": Sampling(temperature=0.7, top_k=3, seed=9),
    "min-p": Sampling(temperature=2.0, min_p=0.1, seed=2**40),
}
DRAFTS = ("gqa 2 to 1, full", "sliding and full", "yarn", "")


@define
class RoundSetup:
    """A target, with or without a draft, whose slots can be read: everything that steps leave behind."""

    driver: Driver
    target: DenseShard
    draft: object

    def left(self, slot: int, valid: int) -> list[torch.Tensor]:
        """The rows of a slot, and the draft's where it has them."""
        state = self.driver.executor.parts.slots.find_state(slot)
        found = list(self.target.rows.export(slot, 0, valid).values())
        for start, stop in state.draft_spans:
            found += self.draft.rows.export(slot, start, stop).values()
        return found


def setup_of(geometry: str, dtype: torch.dtype, *, at_once: bool, fast: bool = False, **options) -> RoundSetup:
    """The same weights each time. at_once: or in calls of its own for every part."""
    config, buckets = evolve(TARGET, vocab_size=VOCAB), row_counts(BUCKETS, fast=fast)
    own = GEOMETRIES.get(geometry)
    layers = () if own is None else own.aux_layers
    how = {"dtype": dtype, "slots": SLOTS, "capacity": CAPACITY, "buckets": buckets, "aux_layers": layers}
    target = DenseShard(config, RandomWeights(config, scale=0.2), CpuKernels(dtype), ShardPlacement(**how))
    draft, proposer = None, None
    if own is not None:
        own = evolve(own, mask_token_id=VOCAB - 1)
        head = TargetHead(target.embedding, target.output.packed, target.output.norm)
        room = {"dtype": dtype, "slots": SLOTS, "capacity": CAPACITY, "buckets": buckets}
        draft = DFlashDraft(own, random_tensors(own), CpuKernels(dtype), head, DraftPlacement(**room))
        proposer = Drafting(draft, buckets, **options)
    executor = DeviceExecutor(
        ExecutorParts(Pipeline([target]), BUCKETS, lane=DeviceLane("cpu"), fast=fast, proposer=proposer)
    )
    if not at_once:
        executor.decoding.native = None
    return RoundSetup(Driver(executor), target, draft)


@pytest.fixture
def counted(monkeypatch):
    """Return a list that takes, for each call, how many proposals it may make."""
    calls, run = list[int](), NativeRound.run

    def counting(self, *asked):
        calls.append(asked[-1])
        return run(self, *asked)

    monkeypatch.setattr(NativeRound, "run", counting)
    return calls


async def played(setup: RoundSetup, sampling: Sampling, seed: int, steps: int = 24):
    """A request in each slot, whose steps have as many proposals as come to mind; and what is left of them."""
    chance, found = random.Random(seed), []
    clients = []
    for slot in range(SLOTS):
        prompt = chance.choices(range(VOCAB), k=chance.randrange(2, 40))
        stops = tuple(chance.sample(range(VOCAB), chance.randrange(3)))
        client = await setup.driver.open(prompt, evolve(sampling, seed=sampling.seed + slot), slot, stops=stops)
        await client.prefill()
        clients.append(client)
    for _ in range(steps):
        client = chance.choice(clients)
        found += await setup.driver.decode(client, propose=chance.choice([0, 0, 1, 2, 3, 3, 5, 7, 7, 9, 12]))
    states = [setup.driver.executor.parts.slots.find_state(slot) for slot in range(SLOTS)]
    kept = [(state.tokens, state.valid, state.draft_spans) for state in states]
    return found, kept, [setup.left(client.slot, client.valid) for client in clients]


def same(one, other):
    """Outcomes and states alike, and rows to the bit."""
    rows = [[same_bits(*pair) for pair in zip(*both, strict=True)] for both in zip(one[2], other[2], strict=True)]
    return one[:2] == other[:2], all(map(all, rows))


@pytest.mark.parametrize(("kind", "geometry", "dtype"), cover_pairs([*KINDS], DRAFTS, [torch.float32, torch.bfloat16]))
async def test_steps_in_one_call_leave_what_calls_for_each_part_leave(kind, geometry, dtype, counted):
    apart = await played(setup_of(geometry, dtype, at_once=False), KINDS[kind], 1)
    assert counted == []
    assert same(await played(setup_of(geometry, dtype, at_once=True), KINDS[kind], 1), apart) == (True, True)
    assert len(counted) == 24 or (geometry == "sliding and full" and len(counted) > 12)  # blocks of 10 are no bucket
    assert any(counted) is bool(geometry)


async def test_a_draft_follows_the_same_rows_however_late(counted):
    """More than copies of them have room for at a time, with other steps in between."""
    found = []
    for at_once in (False, True):
        setup = setup_of(DRAFTS[0], torch.bfloat16, at_once=at_once)
        clients = [await setup.driver.open([1, 2, 3], KINDS["drawn"], slot) for slot in range(2)]
        for client in clients:
            await client.prefill()
        some = []
        for step in range(170):
            batch = clients if step % 50 == 40 else clients[:1] if step % 30 else clients[1:]
            some += await setup.driver.decode(*batch)
        for client in clients:
            some += await setup.driver.decode(client, propose=3)
        found.append((some, *(one for client in clients for one in setup.left(client.slot, client.valid))))
    assert found[0][0] == found[1][0]
    assert len(found[0]) == len(found[1]) > 2 * TARGET.num_layers
    assert all(same_bits(*pair) for pair in zip(found[0][1:], found[1][1:], strict=True))
    assert len(counted) == 170 - 3 + 2


async def test_proposals_are_agreed_to_in_one_call_as_often(counted):
    """Otherwise those above would show nothing of it."""
    found = []
    for seed in range(4):
        found += (await played(setup_of(DRAFTS[0], torch.float32, at_once=True), KINDS["drawn"], seed, 100))[0]
    assert sum(one.accepted for one in found) > 50
    assert any(one.accepted == len(one.tokens) for one in found)  # one that ended the answer
    assert any(len(one.tokens) > 4 for one in found)  # more than are picked at once
    assert len(counted) == 400


async def test_so_do_real_row_counts(counted):
    apart = await played(setup_of(DRAFTS[0], torch.float32, at_once=False, fast=True), KINDS["drawn"], 4)
    assert same(
        await played(setup_of(DRAFTS[0], torch.float32, at_once=True, fast=True), KINDS["drawn"], 4), apart
    ) == ((True, True))
    assert any(counted)


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_slot_is_used_to_its_last_row(at_once, counted):
    setup = setup_of(DRAFTS[0], torch.float32, at_once=at_once)
    client = await setup.driver.open([1] * (CAPACITY - 6), KINDS["drawn"])
    await client.prefill()
    found = []
    while not found or not isinstance(found[-1], DeviceFailed):
        found += await setup.driver.decode(client, propose=7)
    assert client.valid == CAPACITY
    assert found[-1].detail == f"slot 0 is full: it has {CAPACITY} rows"
    assert bool(counted) is at_once


@pytest.mark.parametrize("at_once", [False, True])
async def test_logits_that_are_not_finite_fail_the_request_alone(at_once, counted):
    setup = setup_of(DRAFTS[0], torch.float32, at_once=at_once)
    ill, well = [await setup.driver.open([1, 2, 3, 4], KINDS["greedy"], slot) for slot in range(2)]
    for client in (ill, well):
        await client.prefill()
    rows = {name: one.clone().fill_(float("nan")) for name, one in setup.target.rows.export(0, 0, 3).items()}
    setup.target.rows.import_(0, 0, rows)
    (failed,) = await setup.driver.perform(ill.round(3))
    assert failed == DeviceFailed("broken", "slot 0: the logits for position 4 are not finite")
    (fine,) = await setup.driver.decode(well, propose=3)
    assert fine.tokens
    assert setup.driver.executor.parts.slots.find_state(0).valid == 3
    assert bool(counted) is at_once


async def test_weights_that_went_and_came_back_are_found_again(counted):
    found = []
    for at_once in (False, True):
        setup = setup_of(DRAFTS[0], torch.float32, at_once=at_once)
        proposer, lane = setup.driver.executor.decoding.proposer, setup.driver.executor.decoding.lane
        client = await setup.driver.open([1, 2, 3, 4, 5], KINDS["drawn"])
        await client.prefill()
        some = []
        for moved in (None, proposer.offload, proposer.load_back):
            if moved is not None:
                effect = UnloadModel if moved == proposer.offload else LoadModel
                await lane.run(lambda moved=moved, effect=effect: moved(RequestId(0), effect("draft")))
            for _ in range(3):
                some += await setup.driver.decode(client, propose=3)
        found.append((some, client.tokens, *setup.left(0, client.valid)))
    assert found[0][:2] == found[1][:2]
    assert all(same_bits(*pair) for pair in zip(found[0][2:], found[1][2:], strict=True))
    assert counted == [3, 3, 3, 0, 0, 0, *counted[6:]]


async def test_nothing_is_kept_of_weights_that_went(counted):
    setup = setup_of(DRAFTS[0], torch.bfloat16, at_once=True)
    proposer, lane = setup.driver.executor.decoding.proposer, setup.driver.executor.decoding.lane
    client = await setup.driver.open([1, 2, 3, 4, 5], KINDS["drawn"])
    await client.prefill()
    await setup.driver.decode(client, propose=3)
    stale = setup.driver.executor.decoding.native.find_fused_step(setup.draft, 3).native
    block = stale.draft().block
    held = [weakref.ref(one) for one in (block.layers, block.layers.layers[0], block.head, block.logits)]
    del block
    await lane.run(lambda: proposer.offload(RequestId(0), UnloadModel("draft")))
    gc.collect()
    assert counted == [3]
    assert [one() for one in held] == [None] * 4
    with pytest.raises(ValueError, match="weights have gone"):
        stale.run(0, 5, 0, 1, 3)


async def test_nothing_is_kept_of_a_target_that_was_closed(counted):
    setup = setup_of("", torch.bfloat16, at_once=True)
    client = await setup.driver.open([1, 2, 3, 4, 5], KINDS["drawn"])
    await client.prefill()
    await setup.driver.decode(client)
    took = setup.driver.executor.decoding.native.find_fused_step(None, 0).native.target
    held = [weakref.ref(one) for one in (setup.target.embedding, took.logits, took.layers)]
    del took
    setup.driver.executor.close()
    gc.collect()
    assert counted == [0]
    assert [one() for one in held] == [None] * 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logprobs=2),
        Sampling(temperature=1, presence_penalty=0.5),
        Sampling(repetition_penalty=1.2),
        Sampling(logit_bias=((1, 2.0),)),
    ],
    ids=["logprobs", "penalties", "repetition", "bias"],
)
async def test_what_it_does_not_serve_is_done_in_calls_for_each_part(sampling, counted):
    found, *_ = await played(setup_of(DRAFTS[0], torch.float32, at_once=True), sampling, 2, 8)
    assert len(found) == 8
    assert counted == []


async def test_neither_are_trees_or_batches(counted):
    setup = setup_of("yarn", torch.float32, at_once=True, nodes=12)  # blocks of 8
    client = await setup.driver.open([1, 2, 3, 4, 5], KINDS["drawn"])
    await client.prefill()
    await setup.driver.decode(client, propose=12)
    assert counted == []
    other = await setup.driver.open([1, 2, 3], KINDS["drawn"], 1)
    await other.prefill()
    await setup.driver.decode(client, other, propose=3)
    assert counted == []
    await setup.driver.decode(client, propose=3)
    assert counted == [3]


@pytest.mark.parametrize(
    "asked",
    [(3, 0, 0, 1, 3), (0, -1, 0, 1, 3), (0, CAPACITY - 3, 0, 1, 3), (0, 5, 6, 1, 3), (0, 5, 0, 1, 4), (0, 5, 0, 1, 0)],
)
def test_the_library_is_told_of_nothing_beyond_the_caches(asked):
    setup = setup_of(DRAFTS[0], torch.float32, at_once=True)
    rounds = setup.driver.executor.decoding.native
    native = rounds.find_fused_step(setup.draft, 3).native
    with pytest.raises(IndexError, match="slots of"):
        native.run(*asked)


def test_a_token_that_the_embedding_lacks_is_an_error():
    setup = setup_of(DRAFTS[0], torch.float32, at_once=True)
    with pytest.raises(IndexError, match=f"token {VOCAB}"):
        setup.driver.executor.decoding.native.find_fused_step(None, 0).native.run(0, 0, 0, VOCAB, 0)
