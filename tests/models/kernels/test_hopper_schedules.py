"""Kernels of Hopper's whose warps have different tasks: right in any order in which these can run, without a GPU.

Among them are candidates, which have not run on a card.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.models.kernels.gluon_machine import (
    OPERATIONS,
    Barrier,
    Descriptor,
    Pointer,
    Product,
    SharedMemory,
    arrive,
    block,
    launch,
    load_kernels,
    wait_for,
)

SPLIT = 256
TILE = 64  # keys
NOTHING = -1.0e30
BF16 = torch.bfloat16
maximum, exp2, fma, add_up = (OPERATIONS[name] for name in ("maximum", "exp2", "fma", "sum"))


HOPPER = "adapters.models.kernels.triton.hopper"
CHAINS = {
    f"{HOPPER}.hopper_chain": "attend_chain_ahead",
    "benchmarks.candidates.chain_overlapped": "attend_chain_overlapped",
    "benchmarks.candidates.chain_memory": "attend_chain_memory",
    "benchmarks.candidates.chain_deep": "attend_chain_deep",
}


@pytest.fixture(scope="module", params=CHAINS)
def attend_chain(request):
    return getattr(load_kernels(request.param), CHAINS[request.param])


@pytest.fixture(scope="module")
def wide():
    return load_kernels("benchmarks.candidates.wide")


@pytest.fixture(scope="module")
def few():
    return load_kernels(f"{HOPPER}.hopper_products")


@pytest.fixture(scope="module")
def pieces():
    return load_kernels(f"{HOPPER}.hopper_pieces")


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def multiply(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    product = Product(a, SharedMemory(b), block(acc))
    product.take_place()
    return product.result


def fold(
    folded: tuple[Tensor, Tensor, Tensor], acc: Tensor, peak: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    all_acc, all_peak, all_total = folded
    new_peak = maximum(all_peak, peak)
    old, new = exp2(all_peak - new_peak), exp2(peak - new_peak)
    spread = block(torch.zeros(acc.shape)) + new[:, None]
    return fma(acc, spread, all_acc * old[:, None]), new_peak, fma(total, new, all_total * old)


def attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    """Attend as `attention.attend_chain` does, for rows `[M, HEAD]` at such positions and all keys of one head."""
    last = int(position.max())
    nothing = block(torch.zeros(q.shape)), block(torch.full((len(q),), NOTHING)), block(torch.zeros(len(q)))
    folded = nothing
    for first in range(0, last + 1, SPLIT):
        acc, peak, total = nothing
        for key0 in range(first, min(first + SPLIT, last + 1), TILE):
            key = torch.arange(key0, key0 + TILE)
            values = torch.where((key <= last)[:, None], v[key], 0.0)
            scores = multiply(q, k[key].T, torch.zeros(len(q), TILE))
            scores = torch.where(key <= position[:, None], scores, -torch.inf)
            new_peak = maximum(peak, scores.amax(1) * scale)
            spread = block(torch.zeros(scores.shape)) + new_peak[:, None]
            weights = exp2(fma(scores, block(torch.full(scores.shape, scale)), -spread))
            fade = exp2(peak - new_peak)
            total = fma(total, fade, add_up(weights, 1))
            acc = multiply(weights.to(BF16), values, acc * fade[:, None])
            peak = new_peak
        folded = fold(folded, acc, peak, total)
    return (folded[0] / folded[2][:, None]).to(BF16)


def cut_into_tiles(spans: list[tuple[int, int]], rows: int, bucket: int) -> Iterator[list[int]]:
    """Make the table of tiles that `step_tiles.plan_tiles` makes: first row, rows, slot, first position, 0 ..."""
    row = 0
    for slot, (start, count) in enumerate(spans):
        for at in range(0, count, rows):
            yield [row + at, min(rows, count - at), slot, start + at, 0, 0, 0, 0]
        row += count
    for at in range(row, bucket, rows):
        yield [at, min(rows, bucket - at), 0, -1, 0, 0, 0, 0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(("head", "group"), [(64, 4), (128, 8), (256, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_attention_has_the_bits_of_tiles_and_splits_in_order(attend_chain, head, group, pages, seed):
    """Steps of several slots and padded rows; contexts of every residue of tiles and splits."""
    kv, page, capacity = 1, 256, 1024
    consumers = 2 if head < 256 else 1
    rows = consumers * (64 // group)
    spans = [[(0, 1), (255, 2), (500, 9)], [(62, 3), (320, 5), (511, 10)]][seed]
    bucket = 32
    slots = len(spans)
    keys, values = (normal(slots, kv, capacity, head, seed=number + 2 * seed) for number in (1, 2))
    for slot, (start, count) in enumerate(spans):  # rows that have not been written may hold anything
        for cache in (keys, values):
            cache[slot, :, start + count :] = float("nan")
    q = normal(bucket, kv * group, head, seed=9 + seed)
    table = torch.randperm(slots * capacity // page, generator=torch.Generator().manual_seed(seed)).view(slots, -1)
    k_cache, v_cache = (cache.reshape(-1, head) for cache in (keys, values))
    if pages:
        scattered = [torch.empty_like(cache) for cache in (k_cache, v_cache)]
        for to, cache in zip(scattered, (k_cache, v_cache), strict=True):
            to.view(-1, page, head)[table.flatten()] = cache.view(-1, page, head)
        k_cache, v_cache = scattered
    tiles = torch.tensor(list(cut_into_tiles(spans, rows, bucket)))
    out = torch.full(q.shape, float("nan"), dtype=BF16)
    scale = head**-0.5 * 1.4426950408889634
    launch(
        attend_chain, (len(tiles) * kv,), seed, Pointer(q), Descriptor(k_cache, (TILE, head)),
        Descriptor(v_cache, (TILE, head)), Pointer(tiles), Pointer(out), Pointer(table), capacity, len(tiles), scale,
        HEADS=kv * group, KV=kv, GROUP=group, SPLIT=SPLIT, CONSUMERS=consumers, K_STAGES=2 + seed,
        V_STAGES=4 - 2 * seed, REGISTERS=240, PDL=True, PAGE=page if pages else 0, num_warps=4 if consumers == 2 else 8,
    )  # fmt: skip
    row = 0
    for slot, (start, count) in enumerate(spans):
        position = (start + torch.arange(count)).repeat_interleave(group)
        mine = q[row : row + count].reshape(-1, head)
        expected = attend(mine, keys[slot, 0].nan_to_num(), values[slot, 0].nan_to_num(), position, scale)
        assert torch.equal(out[row : row + count].reshape(-1, head), expected)
        row += count
    assert not out[row:].any()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("columns", [256, 128, 64])
@pytest.mark.parametrize("seed", range(2))
def test_products_of_many_rows_are_one_chain_of_columns(wide, columns, gated, seed):
    """A program has several tiles, and rows, columns and depth end within a tile."""
    rows, outputs, depth, stages = 150 + 128 * seed, columns + 48, 160, 2 + seed
    x, w = normal(rows, depth, seed=1 + seed), normal(outputs, depth, seed=5 + seed, scale=0.1)
    out = torch.full((rows, outputs // 2 if gated else outputs), float("nan"), dtype=BF16)
    width = columns // 2 if gated else min(columns, 128)
    launch(
        wide.linear_wide_ahead, (2,), seed, Descriptor(x, (64, 64)), Descriptor(w, (columns, 64)),
        Descriptor(out, (64, width)), rows, outputs, depth, STAGES=stages, GROUP=2, GATED=gated, PDL=True, num_warps=4,
    )  # fmt: skip
    expected = multiply(x, w.T, torch.zeros(rows, outputs))
    if gated:
        expected = wide._silu_times(expected[:, 0::2], expected[:, 1::2], BF16)  # noqa: SLF001
    assert torch.equal(out, expected.to(BF16))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [5, 24])
def test_products_of_few_rows_are_one_chain_of_columns(few, rows, gated):
    outputs, depth = 72, 320
    x, w = normal(rows, depth, seed=1), normal(outputs, depth, seed=2, scale=0.1)
    out = torch.full((rows, outputs // 2 if gated else outputs), float("nan"), dtype=BF16)
    launch(
        few.linear_ahead, (2, 2), rows, Descriptor(w, (64, 64)), Descriptor(x, (16, 64)), Pointer(out), rows, outputs,
        depth, out.stride(0), STAGES=3, GATED=gated, PDL=True, num_warps=4,
    )  # fmt: skip
    expected = multiply(x, w.T, torch.zeros(rows, outputs))
    if gated:
        expected = few._silu_times(expected[:, 0::2], expected[:, 1::2], BF16)  # noqa: SLF001
    assert torch.equal(out, expected.to(BF16))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2))
def test_products_in_pieces_add_a_chain_of_each_piece(pieces, seed):
    rows, outputs, depth, piece = 150, 90, 448, 128
    x, w = normal(rows, depth, seed=1 + seed), normal(outputs, depth, seed=5 + seed, scale=0.1)
    out = torch.full((rows, outputs), float("nan"), dtype=BF16)
    launch(
        pieces.linear_pieces, (4,), seed, Descriptor(x, (128, 64)), Descriptor(w, (64, 64)), Pointer(out), rows,
        outputs, depth, piece, out.stride(0), STAGES=2 + seed, GROUP=8, GATED=False, PDL=True, num_warps=8,
    )  # fmt: skip
    total = torch.zeros(rows, outputs)
    for first in range(0, depth, piece):
        part = slice(first, first + piece)
        total = total + multiply(x[:, part], w[:, part].T, torch.zeros(rows, outputs))
    assert torch.equal(out, total.to(BF16))


def test_a_wait_that_no_thread_ends_is_a_deadlock():
    with pytest.raises(RuntimeError, match="deadlock"):
        launch(lambda: wait_for(Barrier(count=1, left=1), 0), (1,), seed=0)


@pytest.mark.timeout(120)
def test_a_slot_that_is_freed_too_early_is_found(wide, monkeypatch):
    """The machine must see what it is for: here consumers free each block before they have multiplied with it."""
    (rows, outputs, depth) = (128, 64, 640)
    x, w = normal(rows, depth, seed=1), normal(outputs, depth, seed=2)
    expected = multiply(x, w.T, torch.zeros(rows, outputs)).to(BF16)

    def free_early(bar, *, count=1, **_):  # of the step itself, rather than of the one before
        arrive(bar, count=count)

    monkeypatch.setattr(wide.mbarrier, "arrive", free_early)
    found = []
    for seed in range(5):
        out = torch.zeros(rows, outputs, dtype=BF16)
        try:
            launch(
                wide.linear_wide_ahead, (1,), seed, Descriptor(x, (64, 64)), Descriptor(w, (64, 64)),
                Descriptor(out, (64, 64)), rows, outputs, depth, STAGES=2, GROUP=8, GATED=False, PDL=False, num_warps=4,
            )  # fmt: skip
        except (AssertionError, RuntimeError):
            found.append(seed)
        else:
            found += [seed] * (not torch.equal(out, expected))
    assert found
