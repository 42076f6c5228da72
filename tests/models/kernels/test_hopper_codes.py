"""Attention on Hopper over coded rows: right in any order in which its warps can run, without a GPU."""

from __future__ import annotations

from math import gcd

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.formats.row_format import INT4, RowLayout, read_row_types, unpack_codes
from tests.models.kernels.gluon_machine import Pointer, launch, load_kernels
from tests.models.kernels.test_hopper_schedules import BF16, HOPPER, SPLIT, TILE, attend, cut_into_tiles, normal
from tests.pairs import one_in

CODE_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, INT4: 4}  # as the kernel names them
CASES = (  # the format of rows, numbers of a head, heads of a key head, the window, and whether rows are in pages
    ("int8", 64, 4, 0, True),
    ("int8", 128, 7, 300, True),
    ("int8", 256, 6, 0, False),
    ("fp8", 128, 4, 0, True),
    ("int4", 64, 8, 70, False),
    ("int4", 256, 2, 0, True),
    ("k=int8,v=int4", 128, 8, 0, True),
)


@pytest.fixture(scope="module")
def codes():
    return load_kernels(f"{HOPPER}.hopper_codes")


@pytest.fixture(scope="module")
def alone():
    return load_kernels(f"{HOPPER}.codes.coded_rows")


def open_bytes(layout: RowLayout, memory: Tensor) -> list[Tensor]:
    """Return the parts of rows in the dtype that the layout gives them."""
    return [part.view(layout.dtype) for part in memory]


def take_apart(rows: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Return the codes of rows as bfloat16, and their scales."""
    raw = rows.view(torch.uint8)
    scales = raw[..., -4:].contiguous().view(torch.float32)[..., 0].clone()
    if rows.dtype is INT4:
        return unpack_codes(raw, head, INT4).to(BF16), scales
    return raw[..., :-4].contiguous().view(rows.dtype).to(BF16), scales


def encode_rows(
    layout: RowLayout, spans: list[tuple[int, int]], capacity: int, page: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Return random rows of a slot for each span as bytes, the codes and scales of keys and of values, and the pages.

    Rows behind a span's last one may hold anything. page: rows of one; 0 where rows are in one piece.
    """
    numbers = [normal(len(spans), capacity, layout.head, seed=number) for number in (1, 2)]
    memory = torch.stack([one.view(torch.uint8) for one in layout.encode(lambda: numbers.pop(0))])
    known = [take_apart(one, layout.head) for one in layout.open_parts(tuple(open_bytes(layout, memory)))]
    for slot, (start, count) in enumerate(spans):
        memory[:, slot, start + count :] = 255
    places = len(spans) * capacity // (page or capacity)
    table = torch.randperm(places, generator=torch.Generator().manual_seed(1)).view(len(spans), -1)
    if page:
        scattered = torch.empty_like(memory).view(len(memory), -1, page, memory.shape[-1])
        scattered[:, table.flatten()] = memory.view(scattered.shape)
        memory = scattered
    return memory, known, table


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_every_code_becomes_its_number(name):
    numbers = load_kernels(f"{HOPPER}.hopper_numbers")
    every = torch.arange(256, dtype=torch.uint8)
    words = every.view(torch.int32)
    if name == "int4":
        first, second, third, fourth = numbers.number_int4(words)
        low = torch.stack((first, second), -1).flatten().view(BF16)
        high = torch.stack((third, fourth), -1).flatten().view(BF16)
        assert torch.equal(low, (2 * (every & 15).int() - 15).to(BF16))
        assert torch.equal(high, (2 * (every >> 4).int() - 15).to(BF16))
        return
    number = numbers.number_int8 if name == "int8" else numbers.number_fp8
    found = torch.stack(number(words), -1).flatten().view(BF16)
    expected = every.view(torch.int8 if name == "int8" else torch.float8_e4m3fn).to(BF16)
    known = expected.isfinite()
    assert torch.equal(found[known], expected[known])
    assert found.isfinite().all()


@one_in(2, "case")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_coded_rows_are_attended_tile_after_tile(codes, case):
    """Steps of several slots and padded rows. Rows that have not been written may hold anything."""
    name, head, group, window, pages = case
    types = read_row_types(name, BF16)
    layout = RowLayout(types, head)
    page, capacity, bucket, seed = 256, 768, 32, len(name) + head
    consumers = 2 if head < 256 else 1
    parts = group // gcd(group, 64 * consumers)
    rows = 64 * consumers * parts // group
    spans = [(0, 1), (255, 2), (500, 9)]
    memory, known, table = encode_rows(layout, spans, capacity, page if pages else 0)
    caches = layout.open_parts(tuple(open_bytes(layout, memory)))
    words = [Pointer(memory.view(torch.int32), one.storage_offset() * one.itemsize // 4) for one in caches]
    tiles = torch.tensor(list(cut_into_tiles(spans, rows, bucket)))
    kinds = tuple(CODE_KINDS[one.dtype] for one in caches)
    q = normal(bucket, group, head, seed=9)
    out = torch.full(q.shape, float("nan"), dtype=BF16)
    scale = head**-0.5 * 1.4426950408889634
    launch(
        codes.attend_coded_chain, (len(tiles) * parts,), seed, Pointer(q), *words, Pointer(tiles), Pointer(out),
        Pointer(table), capacity, len(tiles), scale, None, HEADS=group, KV=1, GROUP=group, PARTS=parts, SPLIT=SPLIT,
        CONSUMERS=consumers, K_STAGES=2, V_STAGES=2, REGISTERS=208, KINDS=kinds,
        APART=layout.width * layout.dtype.itemsize // 4, TILE=(TILE, head), NUMBERS=None, WORDS=None, PDL=True,
        PAGE=page if pages else 0, WINDOW=window, SINKS=False, num_warps=4 if consumers == 2 else 8,
    )  # fmt: skip
    row = 0
    (keys, key_scales), (values, value_scales) = known
    for slot, (start, count) in enumerate(spans):
        position = (start + torch.arange(count)).repeat_interleave(group)
        mine = q[row : row + count].reshape(-1, head)
        scales = key_scales[slot], value_scales[slot]
        expected = attend(mine, keys[slot], values[slot], position, scale, window=window, scales=scales)
        assert torch.equal(out[row : row + count].reshape(-1, head), expected)
        row += count
    assert not out[row:].any()


ALONE_CASES = (  # the format of rows, numbers of a head, the window, whether rows are in pages, and programs
    ("int8", 256, 0, True, 4),
    ("int4", 256, 300, True, 1),
    ("k=int8,v=int4", 128, 0, False, 3),
    ("fp8", 128, 70, True, 9),
)


@one_in(2, "case")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ALONE_CASES, ids=str)
@pytest.mark.parametrize("spans", [[(590, 1)], [(0, 1), (255, 1), (700, 1)]], ids=str)
def test_single_rows_attend_to_codes_split_by_split(alone, case, spans):
    """A program has one split or several. Keys that no row sees hold anything."""
    name, head, window, pages, programs = case
    layout = RowLayout(read_row_types(name, BF16), head)
    capacity, group, bucket, page = 1024, 3, 4, 256 if pages else 0
    memory, known, table = encode_rows(layout, spans, capacity, page)
    caches = layout.open_parts(tuple(open_bytes(layout, memory)))
    words = [Pointer(memory.view(torch.int32), one.storage_offset() * one.itemsize // 4) for one in caches]
    most = (window - 1) // SPLIT + 2 if window else capacity // SPLIT
    tiles = torch.tensor(list(cut_into_tiles(spans, 1, bucket, window)))
    acc = torch.full((bucket, group, most, head), torch.nan)
    sums = torch.full((*acc.shape[:3], 2), torch.nan)
    left = torch.zeros(bucket, 1, dtype=torch.int32)
    q = normal(bucket, group, head, seed=9)
    out = torch.full(q.shape, torch.nan, dtype=BF16)
    scale = head**-0.5 * 1.4426950408889634
    launch(
        alone.attend_coded_rows, (programs,), programs, Pointer(q), *words, Pointer(tiles), Pointer(acc),
        Pointer(sums), Pointer(table), capacity, len(tiles), most, scale, Pointer(left), Pointer(out), Pointer(q),
        HEADS=group, KV=1, GROUP=group, PADDED=4, SPLIT=SPLIT, HEAD=head, UNIT=TILE,
        KINDS=tuple(CODE_KINDS[one.dtype] for one in caches), APART=layout.width * layout.dtype.itemsize // 4,
        LAYOUTS=(None,) * 5, PDL=True, PAGE=page, LIMIT=16, AT_ONCE=3, WINDOW=window, SINKS=False, num_warps=8,
    )  # fmt: skip
    assert not left.any()
    (keys, key_scales), (values, value_scales) = known
    for row, (start, _) in enumerate(spans):
        scales = key_scales[row], value_scales[row]
        position = torch.full((group,), start)
        expected = attend(q[row], keys[row], values[row], position, scale, window=window, scales=scales)
        assert torch.equal(out[row], expected)
    assert not out[len(spans) :].any()
