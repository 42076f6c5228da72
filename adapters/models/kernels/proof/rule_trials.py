"""Trials of the compiled library's recurrent layers: that neighbours do not change a row."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.delta_interface import TAPS, DeltaKernels, DeltaShape, DeltaWeights
from adapters.models.kernels.interfaces.product_list import NATIVE
from adapters.models.kernels.proof.trials import Trial
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import StateBatch

_BEHIND = 5  # rows between a state and the row that is tried


def make_rule_trial(kernels: DeltaKernels, shape: DeltaShape, rows: int, threads: tuple[int, ...]) -> Trial:
    """Make a trial in which each row continues the same few rows behind the same state, as if it had a slot of its
    own.
    """
    weights = _make_weights(shape)
    inputs = _make_inputs(shape, rows)
    convolved, gates = inputs
    state = kernels.make_state(shape, 1, 0, torch.float32, torch.device("cpu"))
    state.memory.normal_(generator=make_generator(3))
    kernels.delta_rule(
        convolved[:_BEHIND], gates[:_BEHIND], weights, state, _make_batch(_BEHIND, Segment(0, 0, _BEHIND))
    )

    def read(some: Tensor) -> Tensor:
        batch = _make_batch(len(some), *[Segment(0, _BEHIND, 1)] * len(some))
        rows = some[:, : shape.channels].contiguous()
        gated = some[:, shape.channels :]
        return kernels.delta_rule(rows, gated, weights, state, batch).flatten(1)

    return Trial(f"delta rule of {shape.value_heads} heads", NATIVE, torch.cat(inputs, 1), threads, read)


def _make_weights(shape: DeltaShape) -> DeltaWeights:
    generator = make_generator(1)
    heads = shape.value_heads
    rate = -torch.rand(heads, generator=generator)
    taps = torch.randn(shape.channels, TAPS, generator=generator)
    return DeltaWeights(shape, taps, rate, torch.randn(heads, generator=generator))


def _make_inputs(shape: DeltaShape, rows: int) -> tuple[Tensor, Tensor]:
    """Return queries, keys and values of rows, and their gates."""
    generator = make_generator(2)
    mixed = torch.randn(rows, shape.channels, generator=generator) * shape.key_size**-0.5
    return mixed, torch.randn(rows, 2 * shape.value_heads, generator=generator)


def _make_batch(bucket: int, *segments: Segment, settles: bool = False) -> StateBatch:
    """Return a batch of rows that continue a state at position 0."""
    batch = StateBatch(bucket, torch.device("cpu"))
    batch.before = (0,) * len(segments)
    batch.settles = settles
    batch.load(Step(segments, bucket, rows_only=settles), torch.zeros(bucket, dtype=torch.int64))
    return batch
