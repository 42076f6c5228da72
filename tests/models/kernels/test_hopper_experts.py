"""Products of few pairs on Hopper: right for every share of the tiles that a program may get, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.cuda.tiles import (
    FEW_PAIRS,
    H200_SHARED,
    choose_group_tile,
    choose_tile_of_experts,
    choose_tile_of_pairs,
)
from tests.models.kernels.gluon_machine import Descriptor, Pointer, Product, SharedMemory, block, launch, load_kernels

BF16 = torch.bfloat16
SLOTS, COLUMNS, DEPTH, SHARE = 3, 136, 320, 2
TILES = ((0, (1,)), (2, (0, 2, 3, 4, 5, 6, 7, 8)), (2, (9, 10, 11, 12, 13)))  # slots, and pairs of each tile


@pytest.fixture(scope="module")
def experts():
    return load_kernels("adapters.models.kernels.triton.hopper.hopper_experts")


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("programs", [1, 2, 5, 12])
@pytest.mark.parametrize(("gated", "stages"), [(0, 2), (1, 4)])
def test_a_pair_is_one_chain_of_columns_whatever_the_number_of_programs(experts, programs, gated, stages):
    pairs = sum(len(own) for _, own in TILES)
    x, w = normal(pairs // SHARE, DEPTH, seed=1), normal(SLOTS, COLUMNS, DEPTH, seed=2, scale=0.1)
    out = torch.full((pairs, COLUMNS // 2 if gated else COLUMNS), float("nan"), dtype=BF16)
    rows, first = [], 0
    for slot, own in TILES:
        rows.append((slot, first, len(own), 0))
        first += len(own)
    dealt = (torch.tensor([pair for _, own in TILES for pair in own]), torch.tensor(rows), torch.tensor([len(TILES)]))
    launch(
        experts.multiply_pairs_ahead, (programs,), programs, Descriptor(w.view(-1, DEPTH), (64, 128)), Pointer(x),
        Pointer(out), *map(Pointer, dealt), COLUMNS, DEPTH, SHARE=SHARE, STEPS=3, STAGES=stages, BLOCK_M=8,
        X_LAYOUT=None, GATED=gated, TILES=0, EXPERTS=0, EARLY=True, PDL=True, num_warps=4,
    )  # fmt: skip
    apply_gate = experts.store_pairs.__globals__["apply_gate"]
    for slot, own in TILES:
        for pair in own:
            product = Product(x[pair // SHARE][None], SharedMemory(w[slot].T), block(torch.zeros(1, COLUMNS)))
            product.take_place()
            expected = product.result
            if gated:
                expected = apply_gate(expected[:, 0::2], expected[:, 1::2], BF16, gated)
            assert torch.equal(out[pair], expected[0].to(BF16)), pair


@pytest.mark.parametrize("depth", [64, 704, 768, 2048, 2880, 7168])
def test_rows_and_blocks_of_weights_fit_into_shared_memory(depth):
    tile = choose_tile_of_pairs(depth, BF16, H200_SHARED)
    assert tile is not None
    assert tile.is_ahead
    rows = tile.pairs * -(-depth // tile.depth) * tile.depth
    assert 2 * (rows + tile.stages * tile.columns * tile.depth) <= H200_SHARED - 2048


def test_weights_come_ahead_where_pairs_are_few_and_rows_fit():
    def choose(weight: Tensor, pairs: int, *, hopper: bool = True) -> bool:
        tile = choose_tile_of_experts(weight, pairs, SLOTS, H200_SHARED, hopper=hopper)
        assert tile.is_ahead or tile == choose_group_tile(pairs, SLOTS, weight.dtype, H200_SHARED)
        return tile.is_ahead

    weight = torch.empty(SLOTS, 64, 256, dtype=BF16)
    assert choose(weight, FEW_PAIRS * SLOTS)
    assert not choose(weight, FEW_PAIRS * SLOTS + 1)
    assert not choose(weight, 1, hopper=False)
    assert not choose(weight.float(), 1)
    assert not choose(weight[:, :32], 1), "experts lie apart"
    assert not choose(weight.new_empty(SLOTS, 1, 16384), 1), "rows are too long"
    for depth in (72, 104):
        assert not choose(weight.new_empty(SLOTS, 64, depth), 1), "rows of x begin where two bytes are copied at a time"
