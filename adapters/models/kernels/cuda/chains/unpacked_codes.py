"""Attention of a chunk over coded rows that are first unpacked to memory, on Hopper.

A chunk reads each row once for every 64 or 128 of its queries, and kernels that read codes unpack it as often. Here a
row is unpacked once. Its memory is that of the partials of steps with few rows: no such step runs meanwhile.
"""

from __future__ import annotations

from math import gcd

import torch
from attrs import frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import cache_sizes, describe_blocks, launch_options, page_size
from adapters.models.kernels.cuda.packed_rows import row_kind, scales_of
from adapters.models.kernels.cuda.split_attention import LOG2_E
from adapters.models.kernels.cuda.step_tiles import TileKind, TilePlanner
from adapters.models.kernels.cuda.tiles import CHAIN_AHEAD, KV_TILE, PLAIN_CHAIN, SPLIT, count_parts, round_up_to_power
from adapters.models.kernels.formats.row_format import as_bytes
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton.hopper.codes import unpack_codes, unpacked_chain
from adapters.models.kernels.triton_launch import launch

LEAST_ROWS = 256  # of a chunk whose attention pays for unpacking (decision 084)
_SCALE_BYTES = 4


@frozen(eq=False)
class UnpackedRows:
    """Memory for the rows of some key heads of one slot. numbers: bfloat16 `[2, heads, rows, HEAD]`, keys and values.
    scales: float32 `[2, heads, rows]`.
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def place(cls, memory: Tensor, kv: int, capacity: int, head: int) -> UnpackedRows | None:
        """Place the rows of as many key heads as fit, and as divide `kv`. None: the rows of one do not fit."""
        rows = count_parts(capacity, KV_TILE) * KV_TILE
        of_numbers = 2 * rows * head * torch.bfloat16.itemsize
        each = of_numbers + 2 * rows * _SCALE_BYTES
        free = memory.numel() * memory.itemsize
        heads = max((count for count in range(1, kv + 1) if kv % count == 0 and count * each <= free), default=0)
        if heads == 0:
            return None
        stored = memory.view(-1).view(torch.uint8)[: heads * each]
        numbers = stored[: heads * of_numbers]
        scales = stored[heads * of_numbers :]
        return cls(
            numbers.view(torch.bfloat16).view(2, heads, rows, head), scales.view(torch.float32).view(2, heads, rows)
        )


@frozen(eq=False)
class UnpackedAttention:
    """Attention of a chunk whose rows are all of one slot. caches: keys and values. tiles: the chunk's. consumers and
    parts: see `hopper_chain`.
    """

    caches: tuple[Tensor, Tensor]
    batch: Batch
    tiles: Tensor
    memory: UnpackedRows
    consumers: int
    parts: int
    pdl: bool | None

    def attend(self, q: Tensor, rule: AttentionRule, unread: Tensor) -> Tensor:
        """Return what queries `[rows, H, HEAD]` attend to. unread: stands for sinks that are none."""
        out = torch.empty_like(q)
        _, heads, head = q.shape
        kv = self.caches[0].shape[1]
        _, at_once, rows, _ = self.memory.numbers.shape
        numbers = [describe_blocks(one.view(-1, head), KV_TILE, head) for one in self.memory.numbers]
        line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        of_tiles = self.memory.scales.view(2, -1, KV_TILE)
        scales = [TensorDescriptor.from_tensor(one, [1, KV_TILE], line) for one in of_tiles]
        has_sinks = rule.sinks is not None
        for first in range(0, kv, at_once):
            self.unpack(first)
            launch(
                unpacked_chain.attend_unpacked_chain,
                (len(self.tiles) * self.parts * at_once,),
                q,
                *numbers,
                *scales,
                self.tiles,
                out,
                rule.sinks if has_sinks else unread,
                first,
                rows,
                len(self.tiles),
                head**-0.5 * LOG2_E,
                HEADS=heads,
                KV=at_once,
                GROUP=heads // kv,
                PARTS=self.parts,
                SPLIT=SPLIT,
                CONSUMERS=self.consumers,
                STAGES=CHAIN_AHEAD[head]["K_STAGES"],
                REGISTERS=CHAIN_AHEAD[head]["REGISTERS"],
                SINKS=has_sinks,
                PLAIN=head in PLAIN_CHAIN and not has_sinks,
                enable_fp_fusion=False,
                **launch_options(4 if self.consumers == 2 else 8, self.pdl),
            )
        return out

    def unpack(self, first: int) -> None:
        """Unpack the rows of the key heads from `first` on."""
        keys, values = self.caches
        _, kv, capacity = cache_sizes(keys, self.batch)
        _, at_once, rows, head = self.memory.numbers.shape
        launch(
            unpack_codes.unpack_codes,
            (rows // KV_TILE, at_once, 2),
            as_bytes(keys),
            as_bytes(values),
            scales_of(keys),
            scales_of(values),
            self.tiles,
            self.batch.positions if self.batch.pages is None else self.batch.pages,  # never read without
            *self.memory.numbers,
            *self.memory.scales,
            first,
            capacity,
            rows,
            len(self.tiles),
            KV=kv,
            HEAD=head,
            BLOCK_N=KV_TILE,
            LIMIT=round_up_to_power(len(self.tiles)),
            PAGE=page_size(keys, self.batch),
            K_KIND=row_kind(keys),
            K_APART=keys.stride(2),
            V_KIND=row_kind(values),
            V_APART=values.stride(2),
            **launch_options(4, self.pdl),
        )


def can_unpack(q: Tensor, caches: tuple[Tensor, Tensor], rule: AttentionRule) -> bool:
    """Return whether rows of these caches are unpacked first: coded ones, also if only keys or values are."""
    is_served = q.dtype == torch.bfloat16 and q.shape[2] in CHAIN_AHEAD
    return is_served and not rule.window and all(row_kind(cache) > 0 for cache in caches)


def place_unpacked(
    q: Tensor, caches: tuple[Tensor, Tensor], batch: Batch, memory: Tensor, planner: TilePlanner, pdl: bool | None
) -> UnpackedAttention | None:
    """Plan attention over unpacked rows; None: `memory` has no room for them."""
    _, heads, head = q.shape
    slots, kv, capacity = cache_sizes(caches[0], batch)
    rows = UnpackedRows.place(memory, kv, capacity, head)
    if rows is None:
        return None
    group = heads // kv
    consumers = CHAIN_AHEAD[head]["CONSUMERS"]
    parts = group // gcd(group, 64 * consumers)
    tiles = planner.find_tiles(batch, TileKind(64 * consumers * parts // group), slots)
    return UnpackedAttention(caches, batch, tiles, rows, consumers, parts, pdl)
