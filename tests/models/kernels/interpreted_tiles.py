"""Checks the plans of attention in Triton's interpreter against plain Python. It runs in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from adapters.models.kernels.cuda.step_tiles import APART_ROWS, StepTiles, TileKind, TilePlanner
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from effects.ids import PAGE

CPU = torch.device("cpu")
SLOTS, MOST, TILE = 40, 24, 16  # MOST: pages of a slot
Work = list[tuple[tuple[int, ...], int, int]]  # rows of the batch that are computed together, their slot, a split


def list_work(table: torch.Tensor) -> Work:
    """List what programs do: for each split of each tile, the rows and the slot whose pages are read."""
    work = Work()
    before = 0
    assert table[-1, 4] == table[:, 4].max(), "programs read there how many splits there are"
    for row0, count, slot, first, ends, low, *_ in table.tolist():
        if first >= 0:
            rows = tuple(range(row0, row0 + count))
            work += [(rows, slot, split) for split in range(low, low + ends - before)]
        before = ends
    return work


def plan(segments: Sequence[Segment], bucket: int, pages: torch.Tensor, *, shares: bool) -> Work:
    batch = Batch(bucket, CPU, pages=pages)
    batch.load(Step(tuple(segments), bucket), [0] * sum(one.count for one in segments))
    batch.plan = StepTiles()
    kind = TileKind(TILE, shares)
    planner = TilePlanner(CPU, pdl=False, split=PAGE)
    return list_work(planner.find_tiles(batch, kind, SLOTS))


def check_plan(segments: Sequence[Segment], bucket: int, pages: torch.Tensor) -> int:
    """Check that every split of every row is computed once, from its own pages. Return how many reads were saved."""
    slots = [one.slot for one in segments for _ in range(one.count)]
    positions = [one.start + row for one in segments for row in range(one.count)]
    own = plan(segments, bucket, pages, shares=False)
    shared = plan(segments, bucket, pages, shares=True)
    expected = sorted((row, split) for row, at in enumerate(positions) for split in range(at // PAGE + 1))
    for work in (own, shared):
        done = [(row, split) for rows, _, split in work for row in rows if split <= positions[row] // PAGE]
        assert sorted(done) == expected
        assert all(len(rows) <= TILE for rows, _, _ in work)
    for rows, slot, split in shared:
        if len({slots[row] for row in rows}) > 1:
            assert all(pages[slots[row], split] == pages[slot, split] for row in rows)
            assert all((split + 1) * PAGE <= positions[row] for row in rows), "a key that a row does not see"
    return len(own) - len(shared)


def make_pages(families: Sequence[tuple[int, int]]) -> torch.Tensor:
    """families: of each how many slots it has, and how many pages these begin with together."""
    pages = torch.arange(SLOTS * MOST, dtype=torch.int32).view(SLOTS, MOST)
    slot = 0
    for count, common in families:
        pages[slot : slot + count, :common] = pages[slot, :common].clone()
        slot += count
    return pages


def check_shared_tiles() -> None:
    def step(starts: Sequence[int]) -> list[Segment]:
        return [Segment(slot, start, 1) for slot, start in enumerate(starts)]

    assert check_plan(step([4000] * 16), 16, make_pages([(16, 10)])) == 15 * 10
    assert check_plan(step([4000] * 20), 32, make_pages([(20, 10)])) == (15 + 3) * 10, "a tile has 16 rows"
    assert check_plan(step([4000] * 17), 32, make_pages([(17, 10)])) == 15 * 10, "one row alone shares with none"
    assert check_plan(step([4000] * 8), 8, make_pages([])) == 0
    assert check_plan(step([2559, 2560, 4000]), 8, make_pages([(3, 10)])) == 2 * 9, "a page is shared behind its end"
    assert check_plan(step([4000] * 9), 16, make_pages([(4, 10), (5, 6)])) == 3 * 10 + 4 * 6
    both = make_pages([(8, 10)])
    both[2:4, :14] = both[2, :14]
    assert check_plan(step([4000] * 8), 8, both) == 7 * 10
    little = make_pages([(8, 1)])
    little[:4, :12] = little[0, :12]
    assert check_plan(step([4000] * 8), 8, little) == 3 * 12, (
        "what the first four have in common is not cut to one page"
    )
    pieces = [Segment(0, 3000, 1), Segment(1, 3000, 20), Segment(2, 3000, 1), Segment(3, 3000, 1), Segment(4, 0, 5)]
    assert check_plan(pieces, 32, make_pages([(4, 10)])) == 10, "rows of one slot are not mixed with others"
    draw = random.Random(1)
    for _ in range(12):
        sizes = [(draw.randrange(1, 8), draw.randrange(MOST)) for _ in range(5)]
        starts = [
            draw.choice((0, PAGE - 1, PAGE, draw.randrange(MOST * PAGE - 1))) for _ in range(draw.randrange(1, 33))
        ]
        check_plan(step(starts), 64 if len(starts) > 32 else 32, make_pages(sizes))


def check_windows() -> None:
    """Every split that a row sees is computed once, and none that its tile does not see."""
    draw = random.Random(2)
    pages = make_pages([])
    for window in (1, 128, PAGE, 1024):
        for _ in range(6):
            sizes = [draw.choice((1, 1, 2, 17)) for _ in range(draw.randrange(1, 4))]
            segments = [Segment(slot, draw.randrange(MOST * PAGE - 20), size) for slot, size in enumerate(sizes)]
            batch = Batch(64, CPU, pages=pages)
            batch.load(Step(tuple(segments), 64), [0] * sum(sizes))
            batch.plan = StepTiles()
            planner = TilePlanner(CPU, pdl=False, split=PAGE)
            work = list_work(planner.find_tiles(batch, TileKind(TILE, window=window), SLOTS))
            positions = [one.start + row for one in segments for row in range(one.count)]
            lows = [max(0, at - window + 1) // PAGE for at in positions]
            seen = [(row, split) for row, at in enumerate(positions) for split in range(lows[row], at // PAGE + 1)]
            done = [(row, split) for rows, _, split in work for row in rows]
            kept = [(row, split) for row, split in done if lows[row] <= split <= positions[row] // PAGE]
            assert sorted(kept) == sorted(seen), (window, segments)
            assert all(lows[rows[0]] <= split <= positions[rows[-1]] // PAGE for rows, _, split in work)


def check_rows_apart() -> None:
    """Every split of every row is computed once: of decode rows by tiles of their own, of others by chains."""
    draw = random.Random(3)
    cases = (
        (1, [100]),
        (15, [60, 1, 2, 70]),
        (39, [130]),
        (37, [1, 23, 170]),
        (34, [26, 1, 90, 1]),
        (30, [30, 1, 1, 1, 1, 1, 1, 90]),
    )
    for decode_rows, sizes in cases:
        pages = make_pages([(len(sizes) + decode_rows, draw.randrange(MOST))])
        starts = [draw.randrange(PAGE * MOST - 300) for _ in range(SLOTS)]
        counts = ([1] * decode_rows + sizes)[:SLOTS]
        segments = [Segment(slot, starts[slot], count) for slot, count in enumerate(counts)]
        batch = Batch(256, CPU, pages=pages)
        batch.load(Step(tuple(segments), 256), [0] * sum(counts))
        batch.plan = StepTiles()
        planner = TilePlanner(CPU, pdl=False, split=PAGE)
        positions = [one.start + row for one in segments for row in range(one.count)]
        first_rows = [sum(counts[:slot]) for slot in range(len(counts))]
        own = [at for at, count in zip(first_rows, counts, strict=True) if count == 1 and at < APART_ROWS]
        for shares in (False, True):
            alone = list_work(planner.find_tiles(batch, TileKind(TILE, shares, apart="alone"), SLOTS))
            assert {row for rows, _, _ in alone for row in rows} == {*own}
            chains = list_work(planner.find_tiles(batch, TileKind(2 * TILE, apart="chains"), SLOTS))
            done = [
                (row, split) for rows, _, split in alone + chains for row in rows if split <= positions[row] // PAGE
            ]
            assert sorted(done) == sorted(
                (row, split) for row, at in enumerate(positions) for split in range(at // PAGE + 1)
            )
        assert batch.plan.alone_positions.tolist() == [
            positions[row] if row in own else -1 for row in range(APART_ROWS)
        ]


if __name__ == "__main__":
    check_shared_tiles()
    check_windows()
    check_rows_apart()
