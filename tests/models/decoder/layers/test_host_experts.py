"""Experts in host memory: wherever they lie, answers are the same, bit for bit. Both memories are the host's here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.layers.host_experts import EVERY, HostExperts
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.interfaces.experts_interface import ChosenExperts, Experts, ExpertsShape, GatedWeights
from adapters.models.kernels.offload import map_tensors
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.synthetic import RandomWeights
from effects.ids import Tokens
from effects.job import Job
from effects.ports import Closed
from effects.stream import EmitTokens
from engine.core.replay import replay_file
from engine.core.trace import VERSION, Header, Recorder
from engine.loading.memory.expert_placement import assign_first_experts, with_expert_counts
from engine.serving.wiring import run_engine
from states.settings import Settings
from tests.models.checkpoints import run, run_in_pieces, same_bits, tokens_of
from tests.pairs import usual_where

COUNT, ACTIVE, LAYERS = 11, 3, 2  # and one dense layer
CONFIG = Qwen3MoeConfig(
    160,
    64,
    96,
    1 + LAYERS,
    4,
    2,
    16,
    512,
    1e6,
    experts=ExpertsShape(COUNT, ACTIVE, 24, is_normalized=True),
    dense_layers=(0,),
)
SIZE = 3 * 24 * 64 * 4  # of one in float32, whole runs of 256 bytes
CPU = torch.device("cpu")
CHUNK = 32


class AllTurns(ChosenExperts):
    """All turns of a fetch, one after the other: the weights at their places, in the order of the numbers."""

    def __init__(self, each: ChosenExperts) -> None:
        self.each, self.slots = each, each.stacked

    def fetch_in_turns(self, numbers: Sequence[int]) -> Iterable[Mapping[int, int]]:
        return self.each.fetch_in_turns(numbers)

    def fetch(self, numbers: Sequence[int]) -> list[GatedWeights]:
        found = {
            number: map_tensors(self.slots[slot], Tensor.clone)
            for turn in self.fetch_in_turns(numbers)
            for number, slot in turn.items()
        }
        assert sorted(found) == sorted(numbers)
        return [found[number] for number in numbers]


class KernelsInTurns(ReferenceKernels):
    """Reads experts as kernels do that multiply with many at once."""

    def experts(self, x: Tensor, experts: Experts, batch: Batch, deciding: Tensor | None = None) -> Tensor:
        return super().experts(x, evolve(experts, each=AllTurns(experts.each)), batch, deciding)


def shard_with(offloaded: HostExperts | None, kernels: ReferenceKernels | None = None) -> DenseShard:
    placement = ShardPlacement(slots=2, capacity=256, buckets=(4, 8, 16, CHUNK))
    weights = RandomWeights(CONFIG, scale=0.2)
    return DenseShard(CONFIG, weights, kernels or ReferenceKernels(), placement, offloaded=offloaded)


@usual_where(lambda places: places["kernels"] == places["room"] % 2)
@pytest.mark.parametrize("kernels", [ReferenceKernels, KernelsInTurns])
@pytest.mark.parametrize("room", [1, 5, 11, 40])
def test_wherever_an_expert_lies_the_rows_are_the_same(room: int, kernels: type[ReferenceKernels]) -> None:
    """From one at a time on its way and no places to places for all of them."""
    offloaded, tokens = HostExperts(CPU, COUNT, room * SIZE), tokens_of(60)
    shard, plain = shard_with(offloaded, kernels()), shard_with(None)
    pieces = [(CHUNK, CHUNK), (16, 9), (4, 1), (4, 3), (8, 8)]
    expected = run_in_pieces(plain, tokens, pieces)
    assert same_bits(run_in_pieces(shard, tokens, pieces), expected)
    chance, where = Random(room), list[int]()
    for _ in range(2):  # everybody moves, and steps go on
        where = chance.sample(range(LAYERS * COUNT), offloaded.expert_slots)
        offloaded.move_experts((slot, expert) for slot, expert in enumerate(where) if expert not in offloaded.where)
        assert same_bits(run_in_pieces(shard, tokens, pieces, slot=1), expected)
    assert offloaded.host_bytes == LAYERS * COUNT * SIZE
    assert offloaded.device_bytes == room * SIZE
    assert shard.memory()["weights"] == plain.memory()["weights"] - LAYERS * COUNT * SIZE + room * SIZE


def test_who_is_there_is_not_brought_and_who_leaves_is_again() -> None:
    offloaded = HostExperts(CPU, COUNT, (8 + 3) * SIZE)
    shard = shard_with(offloaded)
    offloaded.move_experts([(0, 4), (1, 5), (2, COUNT + 1)])
    row = tokens_of(1)
    run(shard, 4, (0, 0, row))
    before = offloaded.build_figures()
    assert before["needed"] == LAYERS * ACTIVE
    needed = [expert for expert, uses in enumerate(offloaded._uses) if uses]  # noqa: SLF001 - they are reported after 32 steps only
    assert before["brought"] == len([expert for expert in needed if expert not in {4, 5, COUNT + 1}])
    offloaded.move_experts([(slot, expert) for slot, expert in enumerate(needed[:3]) if expert not in offloaded.where])
    run(shard, 4, (1, 0, row))
    brought = offloaded.build_figures()["brought"] - before["brought"]
    assert brought == len([expert for expert in needed if expert not in offloaded.where]) < before["needed"]


def test_what_was_used_is_told_after_enough_steps() -> None:
    offloaded = HostExperts(CPU, COUNT, 9 * SIZE)
    shard, tokens = shard_with(offloaded), tokens_of(EVERY)
    for at in range(EVERY):
        assert offloaded.report() == ()
        run(shard, 4, (0, at, tokens[at : at + 1]))
    counts = offloaded.report()
    assert (len(counts), sum(counts)) == (LAYERS * COUNT, EVERY * LAYERS * ACTIVE)
    assert max(counts) <= EVERY
    assert offloaded.report() == ()


def test_moves_that_cannot_be_are_refused() -> None:
    offloaded = HostExperts(CPU, COUNT, 10 * SIZE)
    shard_with(offloaded)
    offloaded.move_experts([(0, 3)])
    for slot, expert in ((2, 1), (-1, 1), (0, LAYERS * COUNT), (1, 3)):
        with pytest.raises(ValueError, match=f"expert {expert} of 22 to slot {slot} of 2"):
            offloaded.move_experts([(slot, expert)])


def test_packed_weights_that_cannot_be_copied_are_refused() -> None:
    class Opaque(ReferenceKernels):
        def pack(self, weight: Tensor | StackedWeight) -> Tensor:
            return super().pack(weight).to_mkldnn()

    offloaded = HostExperts(CPU, COUNT, 9 * SIZE)
    with pytest.raises(ValueError, match="pack weights in a form that cannot be copied"):
        DenseShard(CONFIG, RandomWeights(CONFIG), Opaque(), ShardPlacement(capacity=256), offloaded=offloaded)


# --- served, with the places that the world gives ---

JOBS = [Job(tuple(tokens_of(40 + 9 * seed, seed=seed).tolist()), 70) for seed in range(3)]


async def answers(experts: HostExperts | None, record: Path | None = None) -> list[Tokens]:
    """Each alone, one after the other."""
    all_tokens = list[Tokens]()
    shard = Pipeline([shard_with(experts)])
    executor = DeviceExecutor(ExecutorParts(shard, (4, 8, 16, CHUNK), lane=DeviceLane(CPU), experts=experts))
    settings = with_expert_counts(
        Settings(slots=2, max_context=256, chunk=CHUNK, block_size=CHUNK, keep_decoded=False), experts
    )
    if experts is not None:
        assign_first_experts(experts)
    recorder = None
    if record is not None:
        recorder = Recorder(record, Header(VERSION, "test", settings, "experts", {}, redacted=False))
        recorder.start()
    try:
        async with run_engine(settings, executor, recorder=recorder, paranoid=True) as running:
            for job in JOBS:
                tokens: Tokens = ()
                async for message in running.submissions.submit(job):
                    tokens += message.tokens if isinstance(message, EmitTokens) else ()
                    assert not isinstance(message, Closed) or message.finish == "length"
                all_tokens.append(tokens)
    finally:
        executor.close()
    return all_tokens


async def test_answers_are_the_same_while_experts_move_and_the_moves_replay(tmp_path: Path) -> None:
    experts = HostExperts(CPU, COUNT, (8 + 6) * SIZE)
    alone = await answers(None)
    assert await answers(experts, tmp_path / "trace.jsonl") == alone
    shown = experts.build_figures()
    assert shown["moved"] > 6, "the policy has moved some, besides the first"
    assert 0 < shown["brought"] < shown["needed"]
    world = replay_file(tmp_path / "trace.jsonl").world
    assert {expert: slot for slot, expert in enumerate(world.experts.expert_slots)} == experts.where
