"""Launches of attention on a CUDA device: tiles, splits of the keys, and the memory for partial results.

`SPLIT` is a constant because it can change bits. Tiles of queries and the number of stages are free.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.cuda.chains.chain_launch import attend_chain
from adapters.models.kernels.cuda.chains.rows_apart import attend_decode_rows, has_decode_rows_first
from adapters.models.kernels.cuda.chains.unpacked_codes import LEAST_ROWS, can_unpack, place_unpacked
from adapters.models.kernels.cuda.descriptors import (
    AttentionArguments,
    CacheArguments,
    cache_sizes,
    describe_cache,
    launch_options,
    page_size,
)
from adapters.models.kernels.cuda.packed_rows import row_kind, turn_back
from adapters.models.kernels.cuda.split_attention import (
    ALONE_HEADS,
    CODE_KINDS,
    CODED_ROWS,
    LOG2_E,
    WIDE_MERGE,
    WINDOW_HEADS,
    HopperSplits,
    attend_row_window,
    has_row_window,
    merge_partials,
)
from adapters.models.kernels.cuda.step_tiles import APART_ROWS, TileKind, TilePlanner
from adapters.models.kernels.cuda.tiles import (
    AHEAD,
    AHEAD_QUERIES,
    CHAIN_AHEAD,
    CODED_AHEAD,
    PLAIN_CHAIN,
    ROWS_AHEAD,
    SPLIT,
    choose_tiles,
    count_parts,
    count_shares,
    count_splits,
    round_up_to_power,
)
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.layer_interface import ALONE, NARROW
from adapters.models.kernels.step_batch import Batch, BlockBatch
from adapters.models.kernels.triton import attention
from adapters.models.kernels.triton import block_attention as block
from adapters.models.kernels.triton_launch import launch

SCRATCH_BYTES = 256 << 20
BLOCK_SPLITS = 64  # splits of a block's keys, at most, so that one tile holds a head's partials


@define(eq=False)
class CudaAttention:
    """Attention of one shard. Scratch memory is kept for good, because recorded graphs hold its address.

    processors: of the device. shared: bytes of shared memory that a program may have. hopper: the kernels for Hopper
    may run, which load keys and values ahead.
    """

    device: torch.device
    processors: int
    shared: int
    pdl: bool | None
    hopper: bool = False
    planner: TilePlanner = field(init=False)
    _partials: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(init=False, factory=dict)
    _counts: dict[int, Tensor] = field(init=False, factory=dict)
    _usual: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.planner = TilePlanner(self.device, self.pdl, SPLIT)
        self._usual = torch.zeros(1, device=self.device)

    def merges_in_kernel(self, batch: Batch) -> bool:
        """Return whether the program that writes the last partial of a row merges all of them, in place of a separate
        kernel.

        For more rows the separate kernel is quicker. The answer must be the same for all steps that one graph is
        recorded for.
        """
        if not self.hopper or batch.bucket > ALONE or isinstance(batch, BlockBatch):
            return False
        return all(one.count == 1 for one in batch.segments)

    def unpacks_codes(self, batch: Batch) -> bool:
        """Return whether coded rows are unpacked to memory before they are attended, where that can be. All rows must
        be of one slot. The answer must be the same for all steps that one graph is recorded for.
        """
        is_chunk = batch.bucket >= LEAST_ROWS and not isinstance(batch, BlockBatch)
        return self.hopper and is_chunk and len(batch.segments) == 1

    def attends_apart(self, batch: Batch) -> bool:
        """Return whether decode rows attend apart from rows of prompts: the same for all steps of one graph."""
        return self.hopper and has_decode_rows_first(batch)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rule: AttentionRule = PLAIN) -> Tensor:
        bucket, heads, head = q.shape
        slots, kv, capacity = cache_sizes(k_cache, batch)
        pages = batch.positions if batch.pages is None else batch.pages  # never read without
        size = rule.latent or head  # of a value
        query_tile, key_tile = choose_tiles(q)
        share = count_shares(heads // kv, query_tile)
        kv *= share
        padded = round_up_to_power(heads // kv)
        of_tile = query_tile // padded
        splits = count_splits(capacity, rule.window, of_tile)
        out = q.new_empty(bucket, heads, size)
        chained = bucket > NARROW or bucket * heads * splits * size * 4 > SCRATCH_BYTES
        is_usual = share == 1 and not (rule.cap or rule.latent)
        if (
            chained
            and is_usual
            and (found := self._attend_chain(q, (k_cache, v_cache), batch, rule, splits)) is not None
        ):
            return found
        can_split = is_usual and not chained
        if can_split and has_row_window(batch, rule) and self._can_run_ahead(q, k_cache, WINDOW_HEADS):
            return attend_row_window(q, (k_cache, v_cache), batch, rule, self.pdl).view(bucket, -1)
        alone = can_split and batch.plan.merges and padded <= ALONE_HEADS and self._can_be_alone(q, k_cache, v_cache)
        ahead = alone or (can_split and self._can_run_ahead(q, k_cache, AHEAD))
        merges = ahead and batch.plan.merges and (alone or padded * head < WIDE_MERGE)
        if ahead:
            of_tile = 1 if alone else AHEAD_QUERIES // padded
            splits = count_splits(capacity, rule.window, of_tile)
        kind = TileKind(of_tile, window=0 if chained else rule.window)
        tiles = self.planner.find_tiles(batch, kind, slots, may_share=ahead and not rule.window and bucket > ALONE)
        shape = {
            "HEADS": heads,
            "KV": kv,
            "GROUP": heads // kv,
            "PADDED": padded,
            "SPLIT": SPLIT,
            "PAGE": page_size(k_cache, batch),
        }
        sinks = self._usual if rule.sinks is None else rule.sinks  # never read without
        bounds = {"WINDOW": rule.window, "CAP": rule.cap, "REST": head - size, "SHARE": share}
        joins = {"SINKS": rule.sinks is not None, "WINDOW": rule.window}
        scale = head**-0.5 * LOG2_E
        if chained:
            rows_of, options = self._cache_arguments(q, (k_cache, v_cache), query_tile, key_tile, size)
            given = (*rows_of, tiles, out, pages, sinks, capacity, len(tiles), scale)
            launch(attention.attend_chain, (len(tiles) * kv,), q, *given, **shape, **(bounds | joins), **options)
            return self._finish(out, head, v_cache)
        acc, sums = self._scratch(heads, splits, size)
        shape["LIMIT"] = NARROW  # the same for every bucket and any number of slots: one kernel to be compiled
        if ahead:
            tables = ((acc, sums, self._partial_counts(kv)), out, sinks, (capacity, splits), shape | joins)
            own = HopperSplits(q, (k_cache, v_cache), tiles, pages, *tables, scale, self.processors, self.pdl)
            if alone:
                own.attend_alone(kv, padded, key_tile)
            else:
                own.attend(kv, padded, key_tile, merges=merges)
        else:
            rows_of, options = self._cache_arguments(q, (k_cache, v_cache), query_tile, key_tile, size)
            programs = min(len(tiles) * splits * kv, 2 * self.processors)
            assert programs >= kv
            to = (tiles, acc, sums, pages, capacity, len(tiles), splits, scale)
            launch(attention.attend_splits, (programs,), q, *rows_of, *to, **shape, **bounds, **options)
        if not merges:
            merge_partials((acc, sums, batch.positions, out, sinks, splits), joins, self.pdl)
        return self._finish(out, head, v_cache)

    def _attend_chain(
        self, q: Tensor, caches: tuple[Tensor, Tensor], batch: Batch, rule: AttentionRule, splits: int
    ) -> Tensor | None:
        """Attend with many rows by a kernel of Hopper's; None: there is none for such rows. splits: of the keys."""
        _, heads, head = q.shape
        out = self._attend_apart(q, caches, batch, rule, splits) if batch.plan.apart else None
        if batch.plan.unpacks and can_unpack(q, caches, rule):
            memory, _ = self._scratch(heads, splits, head)
            unpacked = place_unpacked(q, caches, batch, memory, self.planner, self.pdl)
            out = None if unpacked is None else unpacked.attend(q, rule, self._usual)
        if out is None and self._can_chain_ahead(q, *caches):
            out = attend_chain(q, caches, batch, rule, self._usual, self.planner, self.pdl)
        return None if out is None else self._finish(out, head, caches[1])

    def _attend_apart(
        self, q: Tensor, caches: tuple[Tensor, Tensor], batch: Batch, rule: AttentionRule, splits: int
    ) -> Tensor | None:
        """Attend with decode rows apart; None: there is no kernel for them, or no memory for their partials."""
        _, heads, head = q.shape
        can = self._can_run_ahead(q, caches[0], PLAIN_CHAIN) and not rule.window and rule.sinks is None
        if not can or APART_ROWS * heads * splits * head * 4 > SCRATCH_BYTES:
            return None
        kv = cache_sizes(caches[0], batch)[1]
        partials = (*self._scratch(heads, splits, head), self._partial_counts(kv))
        out = attend_decode_rows(q, caches, batch, partials, self._usual, self.planner, self.processors, self.pdl)
        return attend_chain(q, caches, batch, rule, self._usual, self.planner, self.pdl, decode_rows=out)

    def _finish(self, out: Tensor, head: int, v_cache: Tensor) -> Tensor:
        return (turn_back(out, head, self.pdl) if format_of(v_cache).is_packed else out).view(len(out), -1)

    def _can_run_ahead(self, q: Tensor, k_cache: Tensor, heads: Collection[int]) -> bool:
        """Return whether a kernel of Hopper's serves that was written for these sizes of heads."""
        is_half = q.dtype.itemsize == 2 and row_kind(k_cache) == 0
        return self.hopper and is_half and q.shape[2] in heads

    def _can_be_alone(self, q: Tensor, *caches: Tensor) -> bool:
        """Return whether a kernel of Hopper's serves rows that are alone in their slots."""
        if caches[0].dtype in CODE_KINDS:
            is_served = q.shape[2] in CODED_ROWS and q.dtype == torch.bfloat16
            return self.hopper and is_served and caches[0].dtype is caches[1].dtype
        return self._can_run_ahead(q, caches[0], ROWS_AHEAD)

    def _can_chain_ahead(self, q: Tensor, *caches: Tensor) -> bool:
        """Return whether a kernel of Hopper's serves chains of such rows: numbers, or codes that it can unpack."""
        if all(cache.dtype in CODE_KINDS for cache in caches):
            return self.hopper and q.dtype == torch.bfloat16 and q.shape[2] in CODED_AHEAD
        return self._can_run_ahead(q, caches[0], CHAIN_AHEAD)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask, latent: int
    ) -> Tensor:
        bucket, heads, head = q.shape
        _, kv, capacity, _ = k_cache.shape
        size = latent or head  # of a value
        split = SPLIT
        while split * BLOCK_SPLITS < capacity:
            split *= 2
        splits = count_parts(capacity, split)
        query_tile, key_tile = choose_tiles(q)
        share = count_shares(heads // kv, query_tile)
        kv *= share
        padded = round_up_to_power(heads // kv)
        acc, sums = self._block_scratch(bucket, heads, splits, size)
        out = q.new_empty(bucket, heads, size)
        shape = {"HEADS": heads, "HEAD": size, "SPLIT": split}
        parts = ((k_cache, size), (v_cache, size), (k_cache, head - size or size))
        launch(
            block.attend_splits,
            (2 * self.processors,),
            q,
            *(describe_cache(cache, key_tile, count)[0] for cache, count in parts),
            batch.slots,
            batch.positions,
            batch.starts,
            batch.lengths,
            batch.firsts,
            acc,
            sums,
            bucket,
            capacity,
            splits,
            head**-0.5 * LOG2_E,
            **shape,
            KV=kv,
            GROUP=heads // kv,
            PADDED=padded,
            BLOCK_M=query_tile,
            BLOCK_N=key_tile,
            TILE=query_tile // padded,
            ROWS=round_up_to_power(bucket),
            CAUSAL=mask.causal,
            WINDOW=mask.window,
            REST=head - size,
            SHARE=share,
            **self._attention_options(q, query_tile, key_tile),
        )
        launch(
            block.merge,
            (bucket, heads),
            acc,
            sums,
            batch.starts,
            batch.lengths,
            batch.firsts,
            out,
            splits,
            **shape,
            LIMIT=round_up_to_power(splits),
            WINDOW=mask.window,
            **launch_options(4, self.pdl),
        )
        return out.view(bucket, -1)

    def _cache_arguments(
        self, q: Tensor, caches: tuple[Tensor, Tensor], query_tile: int, key_tile: int, size: int
    ) -> tuple[tuple[Any, ...], CacheArguments]:
        """Return the arguments for keys, values, the scales of both and the rest of keys, and the constants that
        describe them. size: numbers of a value.
        """
        keys, values = (describe_cache(cache, key_tile, size) for cache in caches)
        rest, _ = describe_cache(caches[0], key_tile, q.shape[2] - size or size)  # never read where there is none
        options: CacheArguments = {
            "HEAD": size,
            "BLOCK_M": query_tile,
            "BLOCK_N": key_tile,
            "K_KIND": row_kind(caches[0]),
            "K_APART": caches[0].stride(2),
            "V_KIND": row_kind(caches[1]),
            "V_APART": caches[1].stride(2),
            **self._attention_options(q, query_tile, key_tile),
        }
        return (keys[0], values[0], keys[1], values[1], rest), options

    def _attention_options(self, q: Tensor, query_tile: int, key_tile: int) -> AttentionArguments:
        head = q.shape[2]
        size = q.dtype.itemsize
        wide = q.dtype == torch.float32
        fits = (self.shared - 4096 - 2 * query_tile * head * size) // (2 * key_tile * head * size)
        stages = 1 if wide else max(1, min(3 if head <= 128 else 2, fits))
        return {
            **launch_options(8 if wide or head > 128 else 4, self.pdl),
            "enable_fp_fusion": False,
            "PRECISION": "ieee" if wide else "tf32",
            "STAGES": stages,
        }

    def _block_scratch(self, bucket: int, heads: int, splits: int, head: int) -> tuple[Tensor, Tensor]:
        """Return memory for partials of blocks. A block has few splits, so every bucket has its own."""
        key = (bucket, heads, splits, head)
        if key not in self._partials:
            self._partials[key] = (
                torch.empty(key, dtype=torch.float32, device=self.device),
                torch.empty(bucket, heads, splits, 2, dtype=torch.float32, device=self.device),
            )
        return self._partials[key]

    def _scratch(self, heads: int, splits: int, head: int) -> tuple[Tensor, Tensor]:
        """Return memory where splits leave their partials. It is kept for good, because recorded graphs hold its
        address.
        """
        key = (heads, splits, head)
        if key not in self._partials:
            sizes = (min(NARROW, SCRATCH_BYTES // (heads * splits * head * 4)), heads, splits)
            self._partials[key] = (
                torch.empty(*sizes, head, dtype=torch.float32, device=self.device),
                torch.empty(*sizes, 2, dtype=torch.float32, device=self.device),
            )
        return self._partials[key]

    def _partial_counts(self, kv: int) -> Tensor:
        """Return how many partials of each row and key head have been written: zero between two launches."""
        if kv not in self._counts:
            self._counts[kv] = torch.zeros(ALONE, kv, dtype=torch.int32, device=self.device)
        return self._counts[kv]
