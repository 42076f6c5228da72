"""Chunks of a prompt side by side over shards leave what they leave one after the other, as far as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import anyio
import pytest
import torch
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.running_batch import has_more_to_come
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.pipeline.pipelined_chunks import SPAN
from adapters.models.kernels.step import Forward, Segment, Step
from effects.all import EffectRequest, Launch, Outcome
from effects.ids import DeviceFailed, RequestId, SlotId
from effects.job import Sampling
from effects.ports import LaunchFailed, RequestOutcome, RowsLost
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from tests.models.checkpoints import same_bits
from tests.models.splits import AUX, CONFIGS, CUTS, TOKENS, pipeline, whole_of
from tests.remote.daemons import RandomModel, Threads, split

ONE, SLOT = RequestId(1), SlotId(0)
BOUNDS = (0, 64, 128, 192, 236)
BUCKETS = (4, 8, 16, 32, 64)


def chunks(bounds: tuple[int, ...] = BOUNDS) -> Iterator[tuple[Step, Tensor]]:
    for start, stop in pairwise(bounds):
        yield Step((Segment(0, start, stop - start),), 64, rows_only=True), TOKENS[start:stop]


def heard(forwards: Iterator[Forward]) -> list[Tensor]:
    """Return what a draft would read of each chunk, while it is there."""
    return [
        left.aux_hidden_states[layer][:rows].clone()
        for left in forwards
        for layer, rows in dict.fromkeys(AUX, 44).items()
    ]


def left_in(shard: DenseShard | Pipeline, stop: int) -> dict[str, Tensor]:
    return {**shard.rows.export(0, 0, stop), **(shard.states.export(0) if shard.states.specs else {})}


def far(kind: str, cuts: str) -> Pipeline:
    return split(CONFIGS[kind], CUTS[cuts], lambda: Threads(RandomModel(CONFIGS[kind])))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_chunks_in_waves_leave_the_bits_of_one_after_the_other(kind: str, where: str) -> None:
    waves = pipeline(kind, CUTS["three"]) if where == "here" else far(kind, "three")
    one = whole_of(kind)
    assert waves.span == (1 if where == "here" else SPAN)
    ours, theirs = heard(waves.prefill(chunks())), heard(one.forward(*chunk) for chunk in chunks())
    assert len(ours) == len(AUX) * (len(BOUNDS) - 1)
    assert all(same_bits(mine, other) for mine, other in zip(ours, theirs, strict=True))
    mine, other = left_in(waves, BOUNDS[-1]), left_in(one, BOUNDS[-1])
    assert all(same_bits(mine[name], tensor) for name, tensor in other.items())
    waves.close()


def test_what_has_begun_is_finished_where_no_other_chunk_begins() -> None:
    waves, one = far("hybrid", "three"), whole_of("hybrid")
    assert len(list(waves.prefill(chunks(BOUNDS[:3])))) == 2
    for chunk in chunks(BOUNDS[:3]):
        one.forward(*chunk)
    mine, other = left_in(waves, BOUNDS[2]), left_in(one, BOUNDS[2])
    assert all(same_bits(mine[name], tensor) for name, tensor in other.items())
    waves.close()


# --- as the executor carries it out ---


def executor_of(shard: Pipeline) -> DeviceExecutor:
    return DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=DeviceLane()))


async def prefill(executor: DeviceExecutor, *spans: tuple[int, int]) -> list[object]:
    executor.open(ONE, OpenSlot(SLOT, SLOT, 0, tuple(TOKENS[:300].tolist()), Sampling()))
    return [(await executor.perform(Launch((EffectRequest(ONE, RunPrefill(SLOT, *span)),))))[0] for span in spans]


def stops(outcomes: list[object]) -> list[int]:
    return [one.stop for one in outcomes if isinstance(one, PrefillAdvanced)]


async def test_a_prefill_of_several_chunks_is_one_of_each() -> None:
    executor, other = executor_of(waves := far("hybrid", "two")), executor_of(one := pipeline("hybrid", CUTS["one"]))
    assert stops(await prefill(executor, (0, 256), (256, 299))) == [256, 299]
    bounds = (*range(0, 257, 64), 299)
    assert stops(await prefill(other, *pairwise(bounds))) == list(bounds[1:])
    mine, theirs = left_in(waves, 299), left_in(one, 299)
    assert all(same_bits(mine[name], tensor) for name, tensor in theirs.items())
    most = 64 * SPAN
    (odd,) = await prefill(executor, (0, most + 1))
    assert isinstance(odd, DeviceFailed)
    assert f"at most {most}" in odd.detail
    (odd,) = await prefill(other, (0, 65))
    assert isinstance(odd, DeviceFailed)
    assert "at most 64" in odd.detail
    assert executor.close()
    assert other.close()


async def test_how_far_it_came_is_told_behind_each_chunk() -> None:
    executor, outcomes, done = executor_of(far("dense", "two")), list[Outcome](), anyio.Event()
    executor.open(ONE, OpenSlot(SLOT, SLOT, 0, tuple(TOKENS[:300].tolist()), Sampling()))

    def hear(heard: Sequence[RequestOutcome] | LaunchFailed) -> None:
        assert not isinstance(heard, LaunchFailed)
        outcomes.extend(outcome for _, outcome in heard)
        if not has_more_to_come(outcomes[-1]):
            done.set()

    executor.submit(Launch((EffectRequest(ONE, RunPrefill(SLOT, 0, 256)),)), hear)
    await done.wait()
    advanced = [one for one in outcomes if isinstance(one, PrefillAdvanced)]
    assert [one.more for one in advanced] == [True] * (len(advanced) - 1) + [False]
    assert advanced[-1].stop == 256
    passed = [one.stop for one in advanced[:-1]]
    assert passed, "before it is done"
    assert passed == sorted(set(passed) & {64, 128, 192}), "who falls behind hears of the last ones only"
    assert executor.close()


async def test_one_that_is_given_up_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, real, seen = executor_of(far("hybrid", "two")), DenseShard.forward, list[int]()

    def given_up(shard: DenseShard, step: Step, inputs: Tensor) -> Forward:
        if not shard.spec.layers.start:
            seen.append(step.segments[0].start)
            if len(seen) == 2:
                executor.abandon(ONE)
        return real(shard, step, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(DenseShard, "forward", given_up)
        assert stops(await prefill(executor, (0, 299))) == [128]
    assert seen == [0, 64]
    (then,) = await executor.perform(
        Launch((EffectRequest(ONE, RunPrefill(SLOT, 128, 299)),))
    )  # from where all shards are
    assert stops([then]) == [299]
    assert executor.close()


@pytest.mark.parametrize(("kind", "said"), [("dense", "out_of_memory"), ("hybrid", "broken")])
async def test_where_a_later_shard_finds_no_memory_states_are_not_believed(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are computed again; a state of which some layers have gone on is of no use."""
    executor, real = executor_of(far(kind, "two")), DenseShard.forward

    def fails(shard: DenseShard, step: Step, inputs: Tensor) -> Forward:
        if shard.spec.layers.start and step.segments[0].start == 64:
            raise torch.OutOfMemoryError("no memory")
        return real(shard, step, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(DenseShard, "forward", fails)
        (odd,) = await prefill(executor, (0, 256))
    assert isinstance(odd, DeviceFailed)
    assert odd.kind == said
    assert isinstance(executor.parts.slots.find(SLOT, ONE), DeviceFailed) == (kind == "hybrid")
    assert stops(await prefill(executor, (0, 256))) == [256]
    assert executor.close()


async def test_a_shard_that_dies_meanwhile_is_a_loss() -> None:
    shard = far("dense", "two")
    executor = executor_of(shard)
    (_, remote) = shard.parts
    remote.peer.set_loss_listener(executor.lose_all_slots)  # type: ignore[attr-defined]
    remote.peer.pause_s = 0  # type: ignore[attr-defined]
    remote.peer.dial.kill()  # type: ignore[attr-defined]
    with pytest.raises(RowsLost):
        await prefill(executor, (0, 256))
    assert isinstance(executor.parts.slots.find(SLOT, ONE), DeviceFailed)
    assert stops(await prefill(executor, (0, 256))) == [256]
    assert executor.close()
