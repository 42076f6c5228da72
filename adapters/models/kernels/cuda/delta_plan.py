"""The plan of chunks of a step of recurrent layers on a CUDA device, and memory for their factors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.interfaces.delta_interface import CHUNK, LayerStates

FIELDS = 8  # numbers of a chunk in the plan


@frozen(eq=False)
class ChunkPlan:
    """The chunks of a step. chunks: int32 `[limit, 8]`. runs: int32 `[segments + 1, 2]`, the last one for padded
    rows. walks: int32 `[segments + 1, 8]`, the last one for their number. singles: int32 `[segments, 4]`, rows that
    have no chunks (`delta_rows.plan_chunks`); None: there are never any.
    """

    chunks: Tensor
    runs: Tensor
    walks: Tensor
    singles: Tensor | None = None


@frozen(eq=False)
class FactorScratch:
    """Memory for the factors of one layer at a time, kept for good because recorded graphs hold its address."""

    mix: Tensor
    fold: Tensor
    lines: Tensor


def plan_advance(states: LayerStates, slot: int, base: int, most: int) -> Iterator[ChunkPlan]:
    """Yield plans that move the slot's state over a whole chunk in the rings, each for at most `most` layers.

    Slots are counted over all layers. No row is new, so no segment walks.
    """
    layers, rooms = states.stacked.memory.shape[:2]
    slots = states.stacked.keys.shape[1]
    groups = -(-layers // most)
    numbers = np.zeros(
        layers * FIELDS + groups * 2 * (most + 2), np.int32
    )  # each part begins at a multiple of 16 bytes
    chunks = numbers[: layers * FIELDS].reshape(layers, FIELDS)
    chunks[:, 2] = np.arange(layers) * slots + slot
    chunks[:, 3] = base
    chunks[:, 4] = CHUNK
    chunks[:, 5] = np.arange(layers) * rooms + slot
    runs = numbers[layers * FIELDS :].reshape(groups, most + 2, 2)
    runs[:, :most, 0] = np.arange(most)
    runs[:, :most, 1] = 1  # one chunk for each run
    runs[-1, layers - (groups - 1) * most :] = 0
    table = torch.from_numpy(numbers)
    if states.whole.memory.is_cuda:
        # In pinned memory, so that the host does not wait for earlier steps.
        table = table.pin_memory().to(states.whole.memory.device, non_blocking=True)
    all_chunks = table[: layers * FIELDS].view(layers, FIELDS)
    all_runs = table[layers * FIELDS :].view(groups, most + 2, 2)
    for group, own in enumerate(all_runs):
        mine = all_chunks[group * most : (group + 1) * most]
        yield ChunkPlan(mine, own[: len(mine) + 1], own)
