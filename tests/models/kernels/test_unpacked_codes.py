"""Attention of a chunk over codes that were unpacked to memory: right in any order of its warps, without a GPU."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import torch

from adapters.models.kernels.formats.row_format import RowLayout, read_row_types
from tests.models.kernels.gluon_machine import Descriptor, Pointer, launch, load_kernels
from tests.models.kernels.test_hopper_codes import encode_rows
from tests.models.kernels.test_hopper_schedules import BF16, HOPPER, SPLIT, TILE, attend, cut_into_tiles, normal

CASES = (  # the format of rows, numbers of a head, heads of a key head, and whether plain chains compute them
    ("int8", 64, 4, False),
    ("int4", 128, 7, True),
    ("int8", 128, 4, True),
    ("fp8", 128, 4, False),
    ("int4", 256, 6, False),
)


@pytest.fixture(scope="module")
def chain_kernels() -> Any:
    return load_kernels(f"{HOPPER}.codes.unpacked_chain")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("span", [(500, 9), (0, 20), (255, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpacked_rows_are_attended_tile_after_tile(
    chain_kernels: Any, case: tuple[str, int, int, bool], span: tuple[int, int]
) -> None:
    """Two of four key heads. Rows behind the last tile that is seen hold anything."""
    name, head, group, plain = case
    layout = RowLayout(read_row_types(name, BF16), head)
    capacity, bucket, kv, first_head = 768, 32, 2, 1
    start, count = span
    end = -(-(start + count) // TILE) * TILE
    _, (key_rows, value_rows), _ = encode_rows(layout, [span, span], capacity, 0)
    (keys, key_scales), (values, value_scales) = ((one.clone() for one in rows) for rows in (key_rows, value_rows))
    for numbers, scales in ((keys, key_scales), (values, value_scales)):
        numbers[:, start + count : end] = 0
        numbers[:, end:] = torch.nan
        scales[:, start + count :] = 0
    consumers = 2 if head < 256 else 1
    parts = group // gcd(group, 64 * consumers)
    tiles = torch.tensor(list(cut_into_tiles([span], 64 * consumers * parts // group, bucket)))
    q = normal(bucket, 4 * group, head, seed=9)
    out = torch.full(q.shape, torch.nan, dtype=BF16)
    scale = head**-0.5 * 1.4426950408889634
    launch(
        chain_kernels.attend_unpacked_chain, (len(tiles) * parts * kv,), len(name) + head, Pointer(q),
        Descriptor(keys.flatten(0, 1), (TILE, head)), Descriptor(values.flatten(0, 1), (TILE, head)),
        Descriptor(key_scales.view(-1, TILE), (1, TILE)), Descriptor(value_scales.view(-1, TILE), (1, TILE)),
        Pointer(tiles), Pointer(out), None, first_head, capacity, len(tiles), scale, HEADS=4 * group, KV=kv,
        GROUP=group, PARTS=parts, SPLIT=SPLIT, CONSUMERS=consumers, STAGES=2 if head > 64 else 3, REGISTERS=240,
        SINKS=False, PLAIN=plain, PDL=True, num_warps=4 if consumers == 2 else 8,
    )  # fmt: skip
    position = (start + torch.arange(count)).repeat_interleave(group)
    for number in range(kv):
        own = slice((first_head + number) * group, (first_head + number + 1) * group)
        mine = q[:count, own].reshape(-1, head)
        both = key_scales[number], value_scales[number]
        expected = attend(mine, keys[number].nan_to_num(0), values[number].nan_to_num(0), position, scale, scales=both)
        assert torch.equal(out[:count, own].reshape(-1, head), expected)
        assert not out[count:, own].any()
    assert out[:, :group].isnan().all()
