"""Kernels of Hopper's whose warps have different tasks: right in any order in which these can run, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import pytest
import torch
from attrs import frozen
from torch import Tensor

from tests.models.kernels.gluon_machine import (
    OPERATIONS,
    Barrier,
    Descriptor,
    Pointer,
    Product,
    SharedMemory,
    block,
    launch,
    load_kernels,
    wait_for,
)
from tests.pairs import in_turns, usual_where, with_first

SPLIT = 256
TILE = 64  # keys
NOTHING = -1.0e30
BF16 = torch.bfloat16
maximum, exp2, fma, add_up = (OPERATIONS[name] for name in ("maximum", "exp2", "fma", "sum"))


HOPPER = "adapters.models.kernels.triton.hopper"


CHAINS = (  # numbers of a head, heads of a key head, the window, and whether there are sinks
    (64, 4, 0, False),
    (64, 4, 0, True),
    (64, 8, 128, True),
    (64, 8, 70, False),
    (128, 7, 0, False),
    (128, 8, 0, False),
    (128, 8, 300, True),
    (256, 2, 300, False),
    (256, 6, 0, False),
)


@pytest.fixture(scope="module")
def attend_chain():
    return load_kernels(f"{HOPPER}.hopper_chain").attend_chain_ahead


@pytest.fixture(scope="module")
def attend_plain():
    return load_kernels(f"{HOPPER}.chains.plain_chain").attend_plain_chain


@pytest.fixture(scope="module")
def attend_halved():
    return load_kernels(f"{HOPPER}.chains.halved_chain").attend_halved_chain


@pytest.fixture(scope="module")
def splits():
    return load_kernels(f"{HOPPER}.hopper_attention")


@pytest.fixture(scope="module")
def few():
    return load_kernels(f"{HOPPER}.hopper_products")


@pytest.fixture(scope="module")
def pieces():
    return load_kernels(f"{HOPPER}.hopper_pieces")


@pytest.fixture(scope="module")
def fitted():
    return load_kernels(f"{HOPPER}.many_rows.fitted_tiles")


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


def add_keys(weights: Tensor) -> Tensor:
    """Add up the weights of a tile. Eight keys of a short tile are added first, as warps do where they share it."""
    if weights.shape[1] > 32:
        return add_up(weights, 1)
    return add_up(add_up(add_up(weights.unflatten(1, (2, 2, 8)), 3), 1), 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    tile: int = TILE,
) -> Tensor:
    """Attend as `attention.attend_chain` does, for rows `[M, HEAD]` at such positions and all keys of one head.

    sinks: of each row. scales: of keys and of values, float32 `[keys]`, where both are codes. tile: of keys.
    """
    last = int(position.max())
    lowest = max(0, int(position.min()) - window + 1) if window else 0
    nothing = block(torch.zeros(q.shape)), block(torch.full((len(q),), NOTHING)), block(torch.zeros(len(q)))
    folded = nothing
    for first in range(lowest // SPLIT * SPLIT, last + 1, SPLIT):
        acc, peak, total = nothing
        for key0 in range(max(first, lowest // tile * tile), min(first + SPLIT, last + 1), tile):
            key = torch.arange(key0, key0 + tile)
            values = torch.where(((key >= lowest) & (key <= last))[:, None], v[key], 0.0)
            scores = multiply(q, k[key].T, torch.zeros(len(q), tile))
            if scales is not None:
                scores = scores * scales[0][key]
            seen = key <= position[:, None]
            if window:
                seen &= key > position[:, None] - window
            scores = torch.where(seen, scores, -torch.inf)
            new_peak = maximum(peak, scores.amax(1) * scale)
            spread = block(torch.zeros(scores.shape)) + new_peak[:, None]
            weights = exp2(fma(scores, block(torch.full(scores.shape, scale)), -spread))
            fade = exp2(peak - new_peak)
            total = fma(total, fade, add_keys(weights))
            if scales is not None:
                weights = weights * scales[1][key]
            acc = multiply(weights.to(BF16), values, acc * fade[:, None])
            peak = new_peak
        folded = fold(folded, acc, peak, total)
    if sinks is not None:
        folded = fold(folded, nothing[0], sinks * 1.4426950408889634, block(torch.ones(len(q))))
    return (folded[0] / folded[2][:, None]).to(BF16)


def merge(acc: Tensor, sums: Tensor, spans: list[tuple[int, int]], window: int, sinks: Tensor | None) -> Tensor:
    """Merge the partials of all rows, `[rows, heads, splits, ...]`. Padded rows become zeros."""
    rows, heads, _, head = acc.shape
    found = torch.zeros(rows, heads, head, dtype=BF16)
    nothing = block(torch.zeros(heads, head)), block(torch.full((heads,), NOTHING)), block(torch.zeros(heads))
    for row, last in enumerate(start + at for start, count in spans for at in range(count)):
        folded = nothing
        for split in range(max(0, last - window + 1) // SPLIT if window else 0, last // SPLIT + 1):
            place = split % acc.shape[2]
            peak, total = sums[row, :, place].unbind(1)
            folded = fold(folded, block(acc[row, :, place]), block(peak), block(total))
        if sinks is not None:
            folded = fold(folded, nothing[0], block(sinks) * 1.4426950408889634, block(torch.ones(heads)))
        found[row] = (folded[0] / folded[2][:, None]).to(BF16)
    return found


def cut_into_tiles(spans: list[tuple[int, int]], rows: int, bucket: int, window: int = 0) -> Iterator[list[int]]:
    """Make the table of tiles that `step_tiles.plan_tiles` makes: first row, rows, slot, first position, splits of the
    tiles so far, first split.
    """
    row = ends = 0
    for slot, (start, count) in enumerate(spans):
        for at in range(0, count, rows):
            size = min(rows, count - at)
            low = max(0, start + at - window + 1) // SPLIT if window else 0
            ends += (start + at + size - 1) // SPLIT + 1 - low
            yield [row + at, size, slot, start + at, ends, low, 0, 0]
        row += count
    for at in range(row, bucket, rows):
        yield [at, min(rows, bucket - at), 0, -1, ends, 0, 0, 0]


# Every chain has both seeds and both kinds of pages, and each seed has both kinds of pages.
in_half_of_its_places = usual_where(lambda places: sum(places.values()) % 2 == 0)


def check_chain(kernel, sizes, pages, seed, own_constants):
    """Run steps of several slots and padded rows; contexts of every residue of tiles and splits. Nobody reads rows
    behind a window. A kernel that can have sinks has a constant for them.
    """
    head, group, window, has_sinks = sizes
    kv, page, capacity = 1, 256, 1024
    consumers = own_constants.get("CONSUMERS", 2)
    parts = group // gcd(group, 64 * consumers)
    rows = 64 * consumers * parts // group
    spans = [[(0, 1), (255, 2), (500, 9)], [(62, 3), (320, 5), (511, 10)]][seed]
    bucket = 32
    slots = len(spans)
    keys, values = (normal(slots, kv, capacity, head, seed=number + 2 * seed) for number in (1, 2))
    for slot, (start, count) in enumerate(spans):  # rows that have not been written may hold anything
        for cache in (keys, values):
            cache[slot, :, start + count :] = float("nan")
            cache[slot, :, : max(0, start - window + 1) if window else 0] = float("nan")
    q = normal(bucket, kv * group, head, seed=9 + seed)
    sinks = torch.linspace(-2.0, 5.0, kv * group)
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
        kernel, (len(tiles) * parts * kv,), seed, Pointer(q), Descriptor(k_cache, (TILE, head)),
        Descriptor(v_cache, (TILE, head)), Pointer(tiles), Pointer(out), Pointer(table), capacity, len(tiles), scale,
        *([Pointer(sinks)] if "SINKS" in own_constants else []), HEADS=kv * group, KV=kv, GROUP=group, PARTS=parts,
        SPLIT=SPLIT, REGISTERS=240, PDL=True, PAGE=page if pages else 0, num_warps=4 if consumers == 2 else 8,
        **own_constants,
    )  # fmt: skip
    row = 0
    for slot, (start, count) in enumerate(spans):
        position = (start + torch.arange(count)).repeat_interleave(group)
        mine = q[row : row + count].reshape(-1, head)
        known = keys[slot, 0].nan_to_num(), values[slot, 0].nan_to_num()
        own = block(sinks.repeat(count)) if has_sinks else None
        expected = attend(mine, *known, position, scale, window=window, sinks=own)
        assert torch.equal(out[row : row + count].reshape(-1, head), expected)
        row += count
    assert not out[row:].any()


@with_first("seed")
@pytest.mark.timeout(120)
@in_half_of_its_places
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("sizes", CHAINS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_attention_has_the_bits_of_tiles_and_splits_in_order(attend_chain, sizes, pages, seed):
    head, _group, window, has_sinks = sizes
    own = {"CONSUMERS": 2 if head < 256 else 1, "K_STAGES": 2 + seed, "V_STAGES": 4 - 2 * seed}
    check_chain(attend_chain, sizes, pages, seed, own | {"WINDOW": window, "SINKS": has_sinks})


@with_first("seed")
@pytest.mark.timeout(120)
@in_half_of_its_places
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("sizes", [sizes for sizes in CHAINS if sizes[0] == 128 and not sizes[2]], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_attention_with_one_release_a_step_has_the_same_bits(attend_plain, sizes, pages, seed):
    check_chain(attend_plain, sizes, pages, seed, {"STAGES": 2 + seed})


@with_first("seed")
@pytest.mark.timeout(120)
@in_half_of_its_places
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_attention_with_half_of_the_fold_in_shared_memory_has_the_same_bits(attend_halved, pages, seed):
    check_chain(attend_halved, (256, 6, 0, False), pages, seed, {"STAGES": 2 + seed})


@frozen
class SplitsCase:
    """Attention of few rows. head: numbers of a head. page: rows of a page; 0: rows are not paged. merges: the kernel
    itself does.
    """

    head: int
    window: int
    page: int
    sinks: bool
    merges: bool

    @property
    def name(self) -> str:
        return f"{self.head}, window {self.window}, page {self.page}{', sinks' * self.sinks}"


SPLITS = (
    SplitsCase(64, 0, 256, sinks=False, merges=True),
    SplitsCase(64, 0, 0, sinks=True, merges=True),
    SplitsCase(64, 128, 64, sinks=True, merges=True),
    SplitsCase(64, 70, 0, sinks=False, merges=False),
    SplitsCase(256, 300, 64, sinks=False, merges=True),
    SplitsCase(256, 0, 256, sinks=False, merges=False),
    SplitsCase(512, 0, 256, sinks=False, merges=True),
    SplitsCase(512, 300, 0, sinks=False, merges=False),
)


@in_turns("case", "spans", full=1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("spans", "tall"),
    [
        ([(590, 1)], False),
        ([(590, 1)], True),
        ([(0, 1), (255, 1), (700, 1)], False),
        ([(0, 1), (255, 1), (700, 1)], True),
        ([(510, 3), (319, 1)], False),
    ],
    ids=str,
)
def test_splits_that_come_ahead_have_the_bits_of_tiles_in_order(splits, case, spans, tall):
    """Keys that no row sees hold anything: behind a window, and not written yet. A program has one split or several.

    tall: by the kernel for rows that are alone in their slots, whose tall operand is keys.
    """
    merges = tall or (case.merges and all(count == 1 for _, count in spans))
    head, window, page = case.head, case.window, case.page
    kv, group, padded, capacity, bucket = 1, 3, 4, 1024, 4
    of_tile = 1 if tall else 64 // padded
    slots, most = len(spans), (window + of_tile - 2) // SPLIT + 2 if window else capacity // SPLIT
    keys, values = (normal(slots, kv, capacity, head, seed=seed) for seed in (1, 2))
    for slot, (start, count) in enumerate(spans):
        for cache in (keys, values):
            cache[slot, :, start + count :] = float("nan")
            cache[slot, :, : max(0, start - window + 1) if window else 0] = float("nan")
    q = normal(bucket, kv * group, head, seed=9)
    sinks = torch.linspace(-2.0, 5.0, kv * group)
    places = slots * capacity // (page or capacity)
    table = torch.randperm(places, generator=torch.Generator().manual_seed(1)).view(slots, -1)
    k_cache, v_cache = (cache.reshape(-1, head).clone() for cache in (keys, values))
    for to, rows in ((k_cache, keys), (v_cache, values)) if page else ():
        to.view(-1, kv, page, head)[table.flatten()] = rows.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    tiles = torch.tensor(list(cut_into_tiles(spans, of_tile, bucket, window)))
    acc = torch.full((bucket, kv * group, most, head), torch.nan)
    sums, out = torch.full((*acc.shape[:3], 2), torch.nan), torch.full(q.shape, torch.nan, dtype=BF16)
    left = torch.zeros(bucket, kv, dtype=torch.int32)
    scale = head**-0.5 * 1.4426950408889634
    programs = 1 + 8 * (len(spans) % 2)
    tile, columns = (32, head // 2) if head == 512 else (TILE, head)
    blocks = ((TILE, head), (TILE, head)) if tall else ((tile, head), (tile, columns))
    if tall:
        kernel = load_kernels(f"{HOPPER}.hopper_rows").attend_rows_ahead
        own = {"RING": 8 - head // 128, "UNIT": tile, "P_LAYOUT": None, "num_warps": 4}
    else:
        kernel = splits.attend_splits_ahead
        own = {"K_STAGES": 3, "V_STAGES": 2, "num_warps": 8 if head == 256 else 4}
    launch(
        kernel, (programs,), programs, Pointer(q), Descriptor(k_cache, blocks[0]), Descriptor(v_cache, blocks[1]),
        Pointer(tiles), Pointer(acc), Pointer(sums), Pointer(table), capacity, len(tiles), most, scale, Pointer(left),
        Pointer(out), Pointer(sinks), HEADS=kv * group, KV=kv, GROUP=group, PADDED=padded, SPLIT=SPLIT, PDL=True,
        PAGE=page, LIMIT=16, AT_ONCE=3 if merges else 0, WINDOW=window, SINKS=case.sinks, **own,
    )  # fmt: skip
    assert not left.any()
    found = out if merges else merge(acc, sums, spans, window, sinks if case.sinks else None)
    row = 0
    for slot, (start, count) in enumerate(spans):
        position = (start + torch.arange(count)).repeat_interleave(group)
        for kv_head in range(kv):
            part = slice(kv_head * group, (kv_head + 1) * group)
            own = block(sinks[part].repeat(count)) if case.sinks else None
            k, v = (cache[slot, kv_head].nan_to_num() for cache in (keys, values))
            mine = q[row : row + count, part].reshape(-1, head)
            expected = attend(mine, k, v, position, scale, window=window, sinks=own, tile=tile)
            assert torch.equal(found[row : row + count, part].reshape(-1, head), expected)
        row += count
    assert not found[row:].any()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("gated", "beside"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [5, 24])
def test_products_of_few_rows_are_one_chain_of_columns(few, rows, gated, beside):
    found, expected = multiply_few_rows(few, rows, BF16, (2, 2), (64, 16), GATED=gated, BESIDE=beside, TALL_ROWS=False)
    assert torch.equal(found, expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("gated", "dtype"), [(False, BF16), (True, BF16), (False, torch.float32)])
def test_rows_as_the_tall_operand_give_the_same_chains(few, gated, dtype):
    """Results that are written as float32 have been rounded to the type of the weight."""
    found, expected = multiply_few_rows(few, 50, dtype, (3, 1), (32, 64), GATED=gated, BESIDE=False, TALL_ROWS=True)
    assert torch.equal(found, expected)


def multiply_few_rows(few, rows, dtype, grid, tile, **constants):
    """Return what `linear_ahead` writes as `dtype`, and the same from chains. tile: rows of the weight, and of x."""
    outputs, depth = 72, 320
    gated = constants["GATED"]
    x, w = normal(rows, depth, seed=1), normal(outputs, depth, seed=2, scale=0.1)
    out = torch.full((rows, outputs // 2 if gated else outputs), float("nan"), dtype=dtype)
    weights, inputs = (Descriptor(matrix, (height, 64)) for matrix, height in zip((w, x), tile, strict=True))
    sizes = (rows, outputs, depth, out.stride(0))
    launch(
        few.linear_ahead,
        grid,
        rows,
        weights,
        inputs,
        Pointer(out),
        *sizes,
        STAGES=3,
        PDL=True,
        num_warps=4,
        **constants,
    )
    expected = multiply(x, w.T, torch.zeros(rows, outputs))
    if gated:
        expected = few._apply_gate(expected[:, 0::2], expected[:, 1::2], BF16, 1)  # noqa: SLF001
    return out, expected.to(BF16).to(dtype)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("seed", "programs"), [(0, 4), (1, 3), (2, 1)])
def test_products_in_pieces_add_a_chain_of_each_piece(pieces, seed, programs):
    """The last piece has one step. A program has a tile, two of them, or all."""
    rows, outputs, depth, piece = 150, 90, 448, 128
    x, w = normal(rows, depth, seed=1 + seed), normal(outputs, depth, seed=5 + seed, scale=0.1)
    out = torch.full((rows, outputs), float("nan"), dtype=BF16)
    launch(
        pieces.linear_pieces, (programs,), seed, Descriptor(x, (128, 64)), Descriptor(w, (64, 64)), Pointer(out), rows,
        outputs, depth, piece, out.stride(0), STAGES=2 + seed, GROUP=8, GATED=False, PIECES=4, PDL=True,
    )  # fmt: skip
    total = torch.zeros(rows, outputs)
    for first in range(0, depth, piece):
        part = slice(first, first + piece)
        total = total + multiply(x[:, part], w[:, part].T, torch.zeros(rows, outputs))
    assert torch.equal(out, total.to(BF16))


@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize(("depth", "held"), [(448, 2), (352, 1)])
def test_routers_of_few_rows_add_a_chain_of_each_piece(rows, depth, held):
    """Weights are loaded ahead or not, and the last piece is shorter than the others or has no columns."""
    outputs, piece = 20, 128
    x, w = normal(rows, depth, seed=1), normal(outputs, depth, seed=2, scale=0.1)
    out = torch.full((rows, outputs), float("nan"), dtype=BF16)
    launch(
        load_kernels(f"{HOPPER}.hopper_router").route_few, (2, 2), rows, Pointer(w), Pointer(x), Pointer(out), rows,
        outputs, depth, out.stride(0), PIECE=piece, STEP=64, HELD=held, PDL=True, num_warps=4,
    )  # fmt: skip
    total = torch.zeros(rows, outputs)
    for first in range(0, depth, piece):
        part = slice(first, first + piece)
        total = total + multiply(x[:, part], w[:, part].T, torch.zeros(rows, outputs))
    assert torch.equal(out, total.to(BF16))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2))
def test_products_of_tiles_with_160_columns_are_one_chain(fitted, seed):
    """The last tile has rows and columns that do not exist."""
    rows, columns, depth = 130, 170, 256
    x, w = normal(256, depth, seed=3 + seed), normal(384, depth, seed=1)
    x[rows:] = 0.0
    w[columns:] = 0.0
    out = torch.full((rows, columns), float("nan"), dtype=BF16)
    blocks = Descriptor(x, (128, 64)), Descriptor(w, (128, 64)), Descriptor(w, (32, 64))
    launch(
        fitted.linear_fitted, (4,), seed, *blocks, Pointer(out), rows, columns, depth, columns, STAGES=2 + seed,
        PDL=True,
    )  # fmt: skip
    expected = block(torch.zeros(256, 384))
    for step in range(0, depth, 64):
        expected = multiply(x[:, step : step + 64], w[:, step : step + 64].T, expected)
    assert torch.equal(out, expected[:rows, :columns].to(BF16))


def test_a_wait_that_no_thread_ends_is_a_deadlock():
    with pytest.raises(RuntimeError, match="deadlock"):
        launch(lambda: wait_for(Barrier(count=1, left=1), 0), (1,), seed=0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["hopper_chain", "chains.plain_chain"])
def test_a_slot_that_is_filled_too_early_is_found(monkeypatch, name):
    """The machine must see what it is for: here the warp for loads never waits until consumers have freed a slot."""
    chain = load_kernels(f"{HOPPER}.{name}")
    if name == "hopper_chain":
        kernel, fill, sinks = chain.attend_chain_ahead, chain.fill_rings, [None]
        own = {"CONSUMERS": 2, "K_STAGES": 2, "V_STAGES": 2, "WINDOW": 0, "SINKS": False}
    else:
        kernel, fill, sinks, own = chain.attend_plain_chain, chain.fill_slots, [], {"STAGES": 2}
    group, head, count, keys = 8, 64, 8, 640
    q = normal(count, group, head, seed=1)
    k_cache, v_cache = (normal(keys, head, seed=seed) for seed in (2, 3))
    position = (keys - count + torch.arange(count)).repeat_interleave(group)
    expected = attend(q.reshape(-1, head), k_cache, v_cache, position, head**-0.5)

    def wait_for_loads_only(bar, phase):
        if bar.count == 1:  # both consumers free a slot, and one warp fills it
            wait_for(bar, phase)

    monkeypatch.setattr(fill.__globals__["mbarrier"], "wait", wait_for_loads_only)
    found = []
    for seed in range(5):
        out = torch.zeros(q.shape, dtype=BF16)
        try:
            launch(
                kernel, (1,), seed, Pointer(q), Descriptor(k_cache, (TILE, head)),
                Descriptor(v_cache, (TILE, head)), Pointer(torch.tensor([[0, count, 0, keys - count, 0, 0, 0, 0]])),
                Pointer(out), Pointer(torch.zeros(1, dtype=torch.int64)), keys, 1, head**-0.5, *sinks, HEADS=group,
                KV=1, GROUP=group, PARTS=1, SPLIT=SPLIT, REGISTERS=240, PDL=False, PAGE=0, num_warps=4, **own,
            )  # fmt: skip
        except (AssertionError, RuntimeError):
            found.append(seed)
        else:
            found += [seed] * (not torch.equal(out.reshape(-1, head), expected))
    assert found
