"""Launches of flash decoding on Hopper: splits of the keys of few rows, whose tiles are requested ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from attrs import frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import (
    Constants,
    cache_sizes,
    describe_blocks,
    launch_options,
    page_size,
    shared_layout,
    word_layout,
)
from adapters.models.kernels.cuda.tiles import AHEAD, AHEAD_OF_ROW, AHEAD_PARTS, KV_TILE, ROWS_AHEAD, SPLIT
from adapters.models.kernels.formats.row_format import INT4, as_bytes
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton import attention
from adapters.models.kernels.triton.hopper import hopper_attention, hopper_rows
from adapters.models.kernels.triton.hopper.codes import coded_rows
from adapters.models.kernels.triton.hopper.rows.window_row import attend_window
from adapters.models.kernels.triton_launch import launch

LOG2_E = 1.4426950408889634
ALONE_HEADS = 8  # of a key head, at most, that are the short side of a product
CODE_KINDS: Mapping[torch.dtype, int] = {
    torch.int8: 1,
    torch.float8_e4m3fn: 2,
    INT4: 4,
}  # as `hopper_numbers` names them
CODED_ROWS = {256}  # sizes of heads of which single rows attend to codes by a kernel of their own
# The widest window of a row whose program has all tiles of a key head in shared memory, and sizes of such heads.
ROW_WINDOW = 2 * KV_TILE
WINDOW_HEADS = {64}
_FEW_ROWS = 32  # with many programs, a step of 16 rows of an 8B model took 3 % longer on an H200
_MANY_PROGRAMS = 20  # for each processor. A step of 64 rows took 1.4 % less time; with 10 it took 0.8 % less.
# Numbers of a key head's partial from which on a kernel of its own merges, by a program for each head. In a step of one
# row with eight heads of 128 to a key head, a layer behind 8,191 tokens took 3 us less on an H200, and behind 511 1 us.
WIDE_MERGE = 1024
_MERGED = 1 << 14  # numbers of partials that a program of four warps has in registers


class CodeConstants(TypedDict):
    """The constants of `coded_rows.attend_coded_rows` alone."""

    HEAD: int
    UNIT: int
    KINDS: tuple[int, int]
    APART: int
    LAYOUTS: tuple[gl.NVMMASharedLayout, ...]
    AT_ONCE: int


def count_programs(rows: int, head: int) -> int:
    """Return how many programs there are for each processor, in a step of so many rows with such heads.

    A processor runs two at a time, or one if heads are wide or there is one row (`AHEAD_OF_ROW`). While one of the two
    computes, rows of the other are loaded. In steps of many rows there are more programs with one split or a few each,
    and a free processor takes the next one.
    """
    if head > 128 or (rows == 1 and head in AHEAD_OF_ROW):
        return 1
    return _MANY_PROGRAMS if rows > _FEW_ROWS and head == 128 else 2


@frozen(eq=False)
class HopperSplits:
    """The arguments of both kernels. tiles: see `TilePlanner`. partials: results of splits, their peaks and totals,
    and how many have been written. sizes: rows of a slot, and splits of a tile. shape: constants of both kernels.
    processors: of the device.
    """

    q: Tensor
    caches: tuple[Tensor, Tensor]
    tiles: Tensor
    pages: Tensor
    partials: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    sinks: Tensor
    sizes: tuple[int, int]
    shape: Constants
    scale: float
    processors: int
    pdl: bool | None

    def attend(self, kv: int, padded: int, key_tile: int, *, merges: bool) -> None:
        """Attend with tiles of several rows. padded: heads of a key head, rounded up. merges: the kernel does."""
        head = self.q.shape[2]
        parts = AHEAD_PARTS.get(head, 1)
        widths = (head, head // parts)
        warps = 8 if head == 256 else 4
        stages = AHEAD_OF_ROW.get(head, AHEAD[head]) if len(self.q) == 1 else AHEAD[head]
        own = {**stages, "AT_ONCE": self._merge_at_once(padded, warps) if merges else 0}
        described = self._describe_caches(key_tile, widths)
        self._launch(hopper_attention.attend_splits_ahead, kv * parts, described, warps, own)

    def attend_alone(self, kv: int, padded: int, key_tile: int) -> None:
        """Attend with tiles of one row, and merge its partials. padded: up to `ALONE_HEADS`."""
        head = self.q.shape[2]
        if self.caches[0].dtype in CODE_KINDS:
            self._attend_codes(kv, padded, key_tile)
            return
        own = {
            "RING": ROWS_AHEAD[head],
            "UNIT": key_tile,
            "P_LAYOUT": shared_layout((ALONE_HEADS, key_tile), self.q.dtype),
            "AT_ONCE": self._merge_at_once(padded, 4),
        }
        self._launch(hopper_rows.attend_rows_ahead, kv, self._describe_caches(KV_TILE, (head, head)), 4, own)

    def _attend_codes(self, kv: int, padded: int, key_tile: int) -> None:
        """Do what `attend_alone` does over rows of codes."""
        head = self.q.shape[2]
        blocks = (2 * key_tile, head), (key_tile, head), (ALONE_HEADS, head), (ALONE_HEADS, key_tile)
        k_cache, v_cache = self.caches
        own: CodeConstants = {
            "HEAD": head,
            "UNIT": key_tile,
            "KINDS": (CODE_KINDS[k_cache.dtype], CODE_KINDS[v_cache.dtype]),
            "APART": k_cache.stride(2) // 4,
            "LAYOUTS": (*(shared_layout(block, self.q.dtype) for block in blocks), word_layout()),
            "AT_ONCE": self._merge_at_once(padded, 8),
        }
        words = [as_bytes(cache).view(torch.int32) for cache in self.caches]
        self._launch(coded_rows.attend_coded_rows, kv, words, 8, own)

    def _merge_at_once(self, padded: int, warps: int) -> int:
        """Return how many partials of a key head are merged together."""
        head = self.q.shape[2]
        most = 16 if head <= 128 else 8
        return min(most, max(1, _MERGED * warps // 4 // (padded * max(128, head))))

    def _describe_caches(self, tile: int, widths: tuple[int, int]) -> list[TensorDescriptor]:
        """Return descriptors of keys and values. tile: keys of a block. widths: its columns of each."""
        head = self.q.shape[2]
        pairs = zip(self.caches, widths, strict=True)
        return [describe_blocks(cache.view(-1, head), tile, width) for cache, width in pairs]

    def _launch(
        self, kernel: object, heads: int, caches: Sequence[object], warps: int, own: Constants | CodeConstants
    ) -> None:
        """Launch a kernel. heads: key heads, or parts of them. caches: keys and values as the kernel takes them."""
        head = self.q.shape[2]
        capacity, splits = self.sizes
        limit = len(self.tiles)
        acc, sums, counts = self.partials
        programs = min(limit * splits * heads, self.processors * count_programs(len(self.q), head))
        assert programs >= heads
        launch(
            kernel,
            (programs,),
            self.q,
            *caches,
            self.tiles,
            acc,
            sums,
            self.pages,
            capacity,
            limit,
            splits,
            self.scale,
            counts,
            self.out,
            self.sinks,
            **self.shape,
            **own,
            enable_fp_fusion=False,
            **launch_options(warps, self.pdl),
        )


def merge_partials(given: tuple[Any, ...], constants: Constants, pdl: bool | None) -> None:
    """Merge partials, by a program for each row's head. given: the tensors of `attention.merge`, and the splits.
    constants: WINDOW and SINKS.
    """
    bucket, heads, size = given[3].shape
    options = {"HEADS": heads, "HEAD": size, "SPLIT": SPLIT, "AT_ONCE": 16 if size <= 128 else 8}
    options |= {**constants, **launch_options(1, pdl)}
    options |= {"enable_fp_fusion": False, "maxnreg": 168}  # for all loads of a warp: fewer would be chosen
    launch(attention.merge, (bucket, heads), *given, **options)


def has_row_window(batch: Batch, rule: AttentionRule) -> bool:
    """Return whether a step has one row, whose window is narrow enough for `attend_row_window`."""
    return batch.bucket == 1 and batch.plan.merges and 0 < rule.window <= ROW_WINDOW


def attend_row_window(
    q: Tensor, caches: tuple[Tensor, Tensor], batch: Batch, rule: AttentionRule, pdl: bool | None
) -> Tensor:
    """Attend with the one row of a step to a window of up to `ROW_WINDOW` keys."""
    out = torch.empty_like(q)
    _, heads, head = q.shape
    _, kv, capacity = cache_sizes(caches[0], batch)
    launch(
        attend_window,
        (kv,),
        q,
        *(describe_blocks(cache.view(-1, head), KV_TILE, head) for cache in caches),
        batch.slots,
        batch.positions,
        batch.positions if batch.pages is None else batch.pages,  # without pages, never read
        out,
        q if rule.sinks is None else rule.sinks,  # without sinks, never read
        capacity,
        head**-0.5 * LOG2_E,
        KV=kv,
        GROUP=heads // kv,
        SPLIT=SPLIT,
        TILES=(rule.window + KV_TILE - 2) // KV_TILE + 1,
        PAGE=page_size(caches[0], batch),
        WINDOW=rule.window,
        SINKS=rule.sinks is not None,
        enable_fp_fusion=False,
        **launch_options(4, pdl),
    )
    return out
