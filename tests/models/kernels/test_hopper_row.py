"""Kernels of Hopper's for a step of one row: the bits of those for more rows, without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.models.kernels.gluon_machine import Descriptor, Pointer, block, launch, load_kernels
from tests.models.kernels.test_hopper_schedules import BF16, HOPPER, SPLIT, TILE, attend, normal

WINDOWS = (  # the position of the row, the window, heads of a key head, whether there are sinks, and rows of a page
    (300, 128, 8, True, 0),
    (255, 128, 8, True, 0),
    (256, 70, 4, False, 64),
    (5, 128, 8, True, 256),
    (383, 128, 8, False, 256),
    (-1, 128, 8, True, 0),
)


@pytest.fixture(scope="module")
def windows():
    return load_kernels(f"{HOPPER}.rows.window_row")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_row_of_a_window_has_the_bits_of_its_splits(windows, case):
    position, window, group, has_sinks, page = case
    slots, slot, kv, head, capacity = 2, 1, 2, 64, 512
    scale = head**-0.5 * 1.4426950408889634
    keys, values = (normal(slots, kv, capacity, head, seed=seed) for seed in (1, 2))
    for rows in (keys, values):  # behind the row, and before its window, anything may stand
        rows[slot, :, position + 1 :] = float("nan")
        rows[slot, :, : max(0, position - window + 1)] = float("nan")
    table, caches = torch.zeros(1, dtype=torch.int64), (keys, values)
    if page:
        count = capacity // page
        order = torch.randperm(slots * count, generator=torch.Generator().manual_seed(3))
        table = order.view(slots, count)
        caches = tuple(torch.empty(slots * count, kv, page, head, dtype=BF16) for _ in caches)
        for paged, rows in zip(caches, (keys, values), strict=True):
            paged[order] = rows.view(slots, kv, count, page, head).transpose(1, 2).flatten(0, 1)
    q = normal(1, kv * group, head, seed=9)
    sinks = torch.randn(kv * group, generator=torch.Generator().manual_seed(4))
    out = torch.full(q.shape, float("nan"), dtype=BF16)
    launch(
        windows.attend_window, (kv,), position + 1, Pointer(q),
        *(Descriptor(one.view(-1, head), (TILE, head)) for one in caches), Pointer(torch.tensor([slot])),
        Pointer(torch.tensor([position])), Pointer(table), Pointer(out), Pointer(sinks), capacity, scale,
        KV=kv, GROUP=group, SPLIT=SPLIT, TILES=3, PAGE=page, WINDOW=window, SINKS=has_sinks,
        PDL=True, num_warps=4,
    )  # fmt: skip
    if position < 0:
        assert not out.any()
        return
    for kv_head in range(kv):
        part = slice(kv_head * group, (kv_head + 1) * group)
        own = block(sinks[part]) if has_sinks else None
        k, v = (rows[slot, kv_head].nan_to_num() for rows in (keys, values))
        of_rows = torch.full((group,), position)
        expected = attend(q[0, part], k, v, of_rows, scale, window=window, sinks=own)
        assert torch.equal(out[0, part], expected)
