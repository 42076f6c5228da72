"""Trials of recurrent layers of our own: that a row is the same beside any others, and how long they take."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from adapters.models.kernels.delta_interface import TAPS, DeltaKernels, DeltaShape, DeltaWeights
from adapters.models.kernels.product_list import NATIVE
from adapters.models.kernels.proof.trials import Trial
from adapters.models.kernels.seeded import seeded
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import StateBatch

_BEHIND = 5  # rows between a state and the row that is tried
_RUNS = 2


def rule_trial(own: DeltaKernels, shape: DeltaShape, rows: int, threads: tuple[int, ...]) -> Trial:
    """Each row goes on from the same few rows behind the same state, as if it were of a slot of its own."""
    weights, inputs = _weights(shape), _inputs(shape, rows)
    convolved, gates = inputs
    state = own.state(shape, 1, 0, torch.float32, torch.device("cpu"))
    state.memory.normal_(generator=seeded(3))
    own.delta_rule(convolved[:_BEHIND], gates[:_BEHIND], weights, state, _batch(_BEHIND, Segment(0, 0, _BEHIND)))

    def read(some: Tensor) -> Tensor:
        batch = _batch(len(some), *[Segment(0, _BEHIND, 1)] * len(some))
        rows, gated = some[:, : shape.channels].contiguous(), some[:, shape.channels :]
        return own.delta_rule(rows, gated, weights, state, batch).flatten(1)

    return Trial(f"delta rule of {shape.value_heads} heads", NATIVE, torch.cat(inputs, 1), threads, read)


def rule_seconds(kernels: DeltaKernels, shape: DeltaShape, rows: int, threads: tuple[int, int], decodes: int) -> float:
    """Of a chunk, and so many steps of a row."""
    weights, (mixed, gates) = _weights(shape), _inputs(shape, rows)
    state = kernels.state(shape, 1, 0, torch.float32, torch.device("cpu"))
    norm = torch.ones(shape.value_size)

    def step(batch: StateBatch) -> float:
        start, count = time.perf_counter(), batch.bucket
        convolved = kernels.convolve(mixed[:count], weights, state, batch)
        read = kernels.delta_rule(convolved, gates[:count], weights, state, batch)
        kernels.gated_norm(read, mixed[:count, -shape.values :], norm, 1e-6)
        return time.perf_counter() - start

    found = list[float]()
    batches = (_batch(1, Segment(0, _BEHIND, 1)), _batch(rows, Segment(0, 0, rows), settles=True))
    for batch, regime in zip(batches, threads, strict=True):
        torch.set_num_threads(regime)
        found.append(min(step(batch) for _ in range(_RUNS)))
    return decodes * found[0] + found[1]


def _weights(shape: DeltaShape) -> DeltaWeights:
    generator, heads = seeded(1), shape.value_heads
    rate = -torch.rand(heads, generator=generator)
    taps = torch.randn(shape.channels, TAPS, generator=generator)
    return DeltaWeights(shape, taps, rate, torch.randn(heads, generator=generator))


def _inputs(shape: DeltaShape, rows: int) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of rows, and their gates."""
    generator = seeded(2)
    mixed = torch.randn(rows, shape.channels, generator=generator) * shape.key_size**-0.5
    return mixed, torch.randn(rows, 2 * shape.value_heads, generator=generator)


def _batch(bucket: int, *segments: Segment, settles: bool = False) -> StateBatch:
    """Of rows that go on from a state at 0."""
    batch = StateBatch(bucket, torch.device("cpu"))
    batch.before, batch.settles = (0,) * len(segments), settles
    batch.load(Step(segments, bucket, rows_only=settles), torch.zeros(bucket, dtype=torch.int64))
    return batch
