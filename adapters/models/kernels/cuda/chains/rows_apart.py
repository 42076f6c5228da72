"""Attention of decode rows that share a forward with rows of prompts: by the kernels of steps of few rows.

A tile of `plain_chain` takes as long for one row as for 32. With 15 decode rows behind 12,000 tokens and 1,008 rows of
a prompt, decode rows took a third of attention's time that way. The kernels of few rows give the same bits.

The decode rows come first in a forward. Which of the first rows they are is worked out on the device
(`step_tiles.find_rows_alone`), so that one graph serves any number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import cache_sizes, page_size
from adapters.models.kernels.cuda.split_attention import LOG2_E, HopperSplits, merge_partials
from adapters.models.kernels.cuda.step_tiles import APART_ROWS, TileKind, TilePlanner
from adapters.models.kernels.cuda.tiles import AHEAD_QUERIES, KV_TILE, SPLIT, round_up_to_power
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.step_batch import Batch, BlockBatch


def has_decode_rows_first(batch: Batch) -> bool:
    """Return whether this is a wide forward that begins with a decode row, or with another row that is alone."""
    is_wide = batch.bucket > NARROW and not isinstance(batch, BlockBatch)
    return is_wide and len(batch.segments) > 1 and batch.segments[0].count == 1


def attend_decode_rows(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: Batch,
    partials: tuple[Tensor, Tensor, Tensor],
    unread: Tensor,
    planner: TilePlanner,
    processors: int,
    pdl: bool | None,
) -> Tensor:
    """Return memory for what queries `[rows, H, HEAD]` attend to, in which decode rows are written.

    The first APART_ROWS rows that are no decode rows are zero in it. partials: see `HopperSplits`. unread: stands for
    sinks, which there are none of. processors: of the device.
    """
    _, heads, head = q.shape
    slots, kv, capacity = cache_sizes(caches[0], batch)
    acc, sums, _ = partials
    splits = acc.shape[2]
    padded = round_up_to_power(heads // kv)
    kind = TileKind(AHEAD_QUERIES // padded, apart="alone")
    tiles = planner.find_tiles(batch, kind, slots, may_share=True)
    positions = batch.plan.alone_positions
    assert positions is not None, "the tiles of decode rows have been planned"
    out = torch.empty_like(q)
    pages = batch.positions if batch.pages is None else batch.pages  # never read without
    joins = {"SINKS": False, "WINDOW": 0}
    shape = {"HEADS": heads, "KV": kv, "GROUP": heads // kv, "PADDED": padded, "SPLIT": SPLIT, "LIMIT": NARROW, **joins}
    shape |= {"PAGE": page_size(caches[0], batch)}
    tables = (partials, out, unread, (capacity, splits), shape)
    own = HopperSplits(q, caches, tiles, pages, *tables, head**-0.5 * LOG2_E, processors, pdl)
    own.attend(kv, padded, KV_TILE, merges=False)
    merge_partials((acc, sums, positions, out[:APART_ROWS], unread, splits), joins, pdl)
    return out
