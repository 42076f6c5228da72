"""The attention plan of a step, in Triton: which rows of the batch form a tile, and which splits of keys a tile has.

A table of tiles has eight int32 numbers for each: its first row, how many rows it has, its slot, the position of its
first row (-1: padded rows), the number of splits of all tiles up to and with this one, and the number of its first
split. Tiles that are not used have no rows and no splits. One program plans a step, once a forward, so the host need
not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adapters.models.kernels.triton.online_softmax import lowest_key

_NONE = tl.constexpr(2147483647)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _continues(slots_ptr, positions_ptr, i, bucket):
    """Is row i the next one of the same slot as the row before it, or are both padded?"""
    inside = (i > 0) & (i < bucket)
    position = tl.load(positions_ptr + i, inside, -1).to(tl.int32)
    slot = tl.load(slots_ptr + i, inside, 0).to(tl.int32)
    before = tl.load(positions_ptr + i - 1, inside, -1).to(tl.int32)
    slot_before = tl.load(slots_ptr + i - 1, inside, -1).to(tl.int32)
    follows = (position >= 0) & (position == before + 1) & (slot == slot_before)
    return inside & (follows | ((position < 0) & (before < 0)))


@triton.jit
def _cut_rows(slots_ptr, positions_ptr, bucket, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Return for each row whether it is the first one of a tile, whether it is the last one, and which one is first."""
    i = tl.arange(0, ROWS)
    inside = i < bucket
    follows = _continues(slots_ptr, positions_ptr, i, bucket)
    segment = tl.associative_scan(tl.where(follows, 0, i), 0, _larger)
    opens = inside & ((i - segment) % TILE == 0)
    goes_on = _continues(slots_ptr, positions_ptr, i + 1, bucket)
    closes = inside & ~(goes_on & ((i + 1 - segment) % TILE != 0))
    return opens, closes, tl.associative_scan(tl.where(opens, i, 0), 0, _larger)


@triton.jit
def _clear_unused(tiles_ptr, used, splits, tile_limit, ROWS: tl.constexpr):
    i = tl.arange(0, ROWS)
    unused = (i >= used) & (i < tile_limit)
    tl.store(tiles_ptr + i * 8 + 1, tl.zeros((ROWS,), tl.int32), unused)
    tl.store(tiles_ptr + i * 8 + 4, tl.zeros((ROWS,), tl.int32) + splits, unused)


@triton.jit
def _are_alone(slots_ptr, positions_ptr, i, bucket, APART: tl.constexpr):
    """Is row i, one of the first APART rows, the only one of its slot?"""
    position = tl.load(positions_ptr + i, i < bucket, -1).to(tl.int32)
    follows = _continues(slots_ptr, positions_ptr, i, bucket)
    goes_on = _continues(slots_ptr, positions_ptr, i + 1, bucket)
    return (i < APART) & (position >= 0) & ~follows & ~goes_on


@triton.jit(do_not_specialize=["bucket"])
def find_rows_alone(slots_ptr, positions_ptr, found_ptr, bucket, ROWS: tl.constexpr):
    """Write the positions of the first ROWS rows that are the only ones of their slot, and -1 for the others."""
    i = tl.arange(0, ROWS)
    position = tl.load(positions_ptr + i, i < bucket, -1)
    alone = _are_alone(slots_ptr, positions_ptr, i, bucket, ROWS)
    tl.store(found_ptr + i, tl.where(alone, position, -1))


@triton.jit(do_not_specialize=["bucket", "tile_limit"])
def plan_tiles(
    slots_ptr,
    positions_ptr,
    tiles_ptr,
    bucket,
    tile_limit,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr = 0,
    APART: tl.constexpr = 0,
    ALONE: tl.constexpr = False,
):
    """Cut the step's rows into tiles of at most TILE consecutive positions of one slot (or of padded rows).

    APART: 0, or one of two kinds of rows has tiles: those of the first APART that are the only ones of their slot
    (ALONE), or all others.

    WINDOW: keys that a row sees, up to and including its own; 0: all. A tile has the splits that one of its rows sees.
    """
    i = tl.arange(0, ROWS)
    position = tl.load(positions_ptr + i, i < bucket, -1).to(tl.int32)
    slot = tl.load(slots_ptr + i, i < bucket, 0).to(tl.int32)
    opens, closes, first = _cut_rows(slots_ptr, positions_ptr, bucket, TILE, ROWS)
    if APART > 0:
        alone = _are_alone(slots_ptr, positions_ptr, i, bucket, APART)
        opens = opens & (alone == ALONE)
        closes = closes & (alone == ALONE)
    tile = tl.cumsum(opens.to(tl.int32), 0) - 1
    lowest = (lowest_key(position - (i - first), WINDOW) if WINDOW > 0 else i * 0) // SPLIT
    splits = tl.cumsum(tl.where(closes, (position + SPLIT) // SPLIT - lowest, 0), 0)
    _clear_unused(tiles_ptr, tl.sum(opens.to(tl.int32), 0), tl.max(splits, 0), tile_limit, ROWS)
    tl.store(tiles_ptr + tile * 8, i, opens)
    tl.store(tiles_ptr + tile * 8 + 2, slot, opens)
    tl.store(tiles_ptr + tile * 8 + 3, position, opens)
    tl.store(tiles_ptr + tile * 8 + 1, i - first + 1, closes)
    tl.store(tiles_ptr + tile * 8 + 4, splits, closes)
    tl.store(tiles_ptr + tile * 8 + 5, lowest, closes)


@triton.jit
def _count_common_pages(slot, slot_before, pages_ptr, slot_pages, most, COLUMNS: tl.constexpr):
    """Count the leading pages, `most` at most, that each row's slot has in common with the slot of the row before."""
    c = tl.arange(0, COLUMNS)[None, :]
    common = most
    left = most  # nothing where a page is known that differs
    at = 0
    stop = tl.max(left, 0)
    while at < stop:
        seen = at + c < left[:, None]
        page = tl.load(pages_ptr + slot[:, None] * slot_pages + at + c, seen, 0)
        other = tl.load(pages_ptr + slot_before[:, None] * slot_pages + at + c, seen, 0)
        differing = tl.min(tl.where(seen & (page != other), at + c, _NONE), 1)
        common = tl.minimum(common, differing)
        left = tl.where(differing < _NONE, 0, left)
        stop = tl.max(left, 0)
        at += COLUMNS
    return common


@triton.jit(do_not_specialize=["bucket", "tile_limit", "slot_pages"])
def plan_shared_tiles(
    slots_ptr,
    positions_ptr,
    pages_ptr,
    tiles_ptr,
    bucket,
    tile_limit,
    slot_pages,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    APART: tl.constexpr = 0,
):
    """Do the same as `plan_tiles`, with one more tile for rows whose slots begin with the same pages of SPLIT rows.

    Rows that each are the only one of their slot, and consecutive in the batch, share a tile for the splits that lie in
    pages which all of them have. So these pages are read once for up to TILE rows. Each of the rows has a tile of its
    own for the splits behind them, at least for the one that it is in itself. Neighbours are in one chain if they have
    at least half as many pages in common as the neighbours that have most: a few pages of another family of sequences
    must not cut short what a family has in common.
    APART: only rows of the first APART that are the only ones of their slot have tiles.
    """
    i = tl.arange(0, ROWS)
    inside = i < bucket
    position = tl.load(positions_ptr + i, inside, -1).to(tl.int32)
    slot = tl.load(slots_ptr + i, inside, 0).to(tl.int32)
    before = tl.load(positions_ptr + i - 1, inside & (i > 0), -1).to(tl.int32)
    slot_before = tl.load(slots_ptr + i - 1, inside & (i > 0), 0).to(tl.int32)
    opens, closes, first = _cut_rows(slots_ptr, positions_ptr, bucket, TILE, ROWS)
    if APART > 0:
        alone = _are_alone(slots_ptr, positions_ptr, i, bucket, APART)
        opens = opens & alone
        closes = closes & alone
    joined = _continues(slots_ptr, positions_ptr, i - 1, bucket) | _continues(slots_ptr, positions_ptr, i, bucket)
    joined = joined | _continues(slots_ptr, positions_ptr, i + 1, bucket)
    two = inside & (i > 0) & ~joined & (position >= 0) & (before >= 0) & (slot != slot_before)
    if APART > 0:
        two = two & alone
    most = tl.where(two, tl.minimum(position, before) // SPLIT, 0)
    common = _count_common_pages(slot, slot_before, pages_ptr, slot_pages, most, COLUMNS)

    linked = common >= tl.maximum(tl.max(common, 0) // 2, 1)
    chain = tl.associative_scan(tl.where(linked, 0, i), 0, _larger)
    head = chain + (i - chain) // TILE * TILE
    behind = (i > head).to(tl.int32)
    together = (head[:, None] == head[None, :]) & (behind[None, :] > 0)
    shared = tl.min(tl.where(together, common[None, :], _NONE), 1)
    count = tl.sum(together.to(tl.int32), 1) + 1
    shared = tl.where(count > 1, shared, 0)

    heads = (i == head) & (shared > 0)
    own = tl.where(closes, (position + SPLIT) // SPLIT - shared, 0)
    added = opens.to(tl.int32) + heads.to(tl.int32)
    tile = tl.cumsum(added, 0) - 1
    splits = tl.cumsum(own + tl.where(heads, shared, 0), 0)
    _clear_unused(tiles_ptr, tl.sum(added, 0), tl.max(splits, 0), tile_limit, ROWS)
    tl.store(tiles_ptr + tile * 8, i, opens)
    tl.store(tiles_ptr + tile * 8 + 2, slot, opens)
    tl.store(tiles_ptr + tile * 8 + 3, position, opens)
    tl.store(tiles_ptr + tile * 8 + 5, shared, opens)
    tl.store(tiles_ptr + tile * 8 + 1, i - first + 1, closes)
    tl.store(tiles_ptr + tile * 8 + 4, splits, closes)
    to = tiles_ptr + (tile - 1) * 8  # before the head's own tile
    tl.store(to, i, heads)
    tl.store(to + 1, count, heads)
    tl.store(to + 2, slot, heads)
    tl.store(to + 3, position, heads)
    tl.store(to + 4, splits - own, heads)
    tl.store(to + 5, tl.zeros((ROWS,), tl.int32), heads)
