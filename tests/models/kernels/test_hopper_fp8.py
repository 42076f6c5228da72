"""Products in FP8 on Hopper: the same sums in every kernel and in any order of their warps, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.kernels.gluon_machine import (
    OPERATIONS,
    Descriptor,
    Pointer,
    Product,
    SharedMemory,
    block,
    launch,
    load_kernels,
)

FP8 = "adapters.models.kernels.triton.hopper.fp8"
SIDE = 128
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
fma = OPERATIONS["fma"]


@pytest.fixture(scope="module")
def rows_kernels():
    return load_kernels(f"{FP8}.fp8_rows")


@pytest.fixture(scope="module")
def wide_kernels():
    return load_kernels(f"{FP8}.fp8_wide")


@pytest.fixture(scope="module")
def narrow_kernels():
    return load_kernels(f"{FP8}.fp8_narrow")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weight(outputs: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = (draw(outputs, columns, seed=1) * 100).clamp(-448, 448).to(E4M3)
    return codes, draw(outputs // SIDE, columns // SIDE, seed=2).abs() + 0.1


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, and scales `[columns / 128, rows]`."""
    groups = x.float().view(len(x), -1, SIDE)
    most = groups.abs().amax(2).clamp_min(1e-10)
    codes = (groups * (torch.full_like(most, 448.0) / most)[..., None]).to(E4M3).view(x.shape)
    return codes, (most * (1.0 / 448.0)).T.contiguous()


def multiply(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """Return the sums `[rows, outputs]` in float32, group after group."""
    codes, own = quantise(x)
    total = block(torch.zeros(len(x), len(w)))
    for group in range(x.shape[1] // SIDE):
        at = slice(group * SIDE, (group + 1) * SIDE)
        product = Product(codes[:, at], SharedMemory(w[:, at].T), block(torch.zeros(len(x), len(w))))
        product.take_place()
        scale = own[group][:, None] * scales[:, group].repeat_interleave(SIDE)[None, :]
        total = fma(product.result, block(scale), total)
    return total


def finish(total: Tensor, kernels, gated: int) -> Tensor:
    if not gated:
        return total.to(BF16)
    gate, up = total.chunk(2, 1)
    return kernels.apply_gate(gate, up, BF16, gated)


@pytest.mark.timeout(60)
def test_rows_are_quantised_in_groups_with_scales_of_their_own(rows_kernels):
    x = torch.cat((draw(3, 640, seed=3), torch.zeros(1, 640), draw(2, 640, seed=4) * 1e-3)).to(BF16)
    codes, scales = torch.full(x.shape, 1.0).to(E4M3), torch.full((5, 8), float("nan"))
    launch(
        rows_kernels.quantise_rows, (6, 2), 1, Pointer(x), Pointer(codes), Pointer(scales), 640, 640, 8,
        PDL=True, num_warps=1,
    )  # fmt: skip
    expected, own = quantise(x)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales[:, :6], own)
    assert not codes[3].float().any()


def take_turns(codes: Tensor, gated: int) -> Tensor:
    """Put 64 rows of a gate and 64 of what it gates in turn."""
    return codes.view(2, -1, 64, codes.shape[1]).transpose(0, 1).reshape(codes.shape) if gated else codes


def describe_tall(codes: Tensor, at_once: int, gated: int, groups: int = 1) -> Descriptor:
    """groups: columns of so many groups of a row stand in a tile."""
    if groups == 2:
        tiles = codes.view(-1, 8, codes.shape[1] // SIDE // 2, 2, SIDE).permute(2, 0, 3, 1, 4)
        return Descriptor(tiles, (at_once, 4, 2, 8, SIDE))
    tiles = take_turns(codes, gated).view(-1, 64, codes.shape[1] // SIDE, SIDE).permute(2, 0, 1, 3)
    return Descriptor(tiles, (at_once, 2, 32, SIDE) if gated else (at_once, 1, 64, SIDE))


def describe_flat(codes: Tensor, at_once: int, width: int, groups: int = 1) -> Descriptor:
    if groups == 2:
        return Descriptor(codes.view(len(codes), -1, 2, SIDE).permute(1, 0, 2, 3), (at_once, width, 2, SIDE))
    return Descriptor(codes.view(len(codes), -1, SIDE).permute(1, 0, 2), (at_once, width, SIDE))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("tile", "stages", "programs"), [(128, 2, 3), (256, 3, 2), (256, 2, 7)])
@pytest.mark.parametrize("gated", [0, 1])
def test_many_rows_in_tiles_of_any_size_have_the_sums_of_groups_in_order(wide_kernels, tile, stages, programs, gated):
    count, outputs, columns = 300, 512, 384
    x = draw(count, columns, seed=5).to(BF16)
    w, scales = make_weight(outputs, columns)
    codes, own = quantise(x)
    out = torch.full((count, outputs // 2 if gated else outputs), float("nan"), dtype=BF16)
    for seed in range(2):
        launch(
            wide_kernels.multiply_wide, (programs,), seed, Descriptor(codes, (tile, SIDE)),
            Descriptor(take_turns(w, gated), (SIDE, SIDE)), Pointer(own), Pointer(scales), Pointer(out), count, outputs,
            columns // SIDE, outputs // 2 if gated else 32, count, len(out[0]), STAGES=stages, GROUP=2, GATED=gated,
            PDL=True,
        )  # fmt: skip
        assert torch.equal(out, finish(multiply(x, w, scales), wide_kernels, gated))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tile", [(1, 8, 2, 1), (5, 8, 4, 1), (40, 16, 3, 1), (9, 8, 2, 2), (9, 16, 1, 3)], ids=str)
@pytest.mark.parametrize(("gated", "groups"), [(0, 1), (1, 1), (0, 2)])
def test_few_rows_have_the_sums_of_many(narrow_kernels, tile, gated, groups):
    count, width, stages, at_once = tile
    outputs, columns = 256, 1536
    x = draw(count, columns, seed=6).to(BF16)
    w, scales = make_weight(outputs, columns)
    codes, own = quantise(x)
    out = torch.full((count, outputs // 2 if gated else outputs), float("nan"), dtype=BF16)
    width //= groups
    launch(
        narrow_kernels.multiply_narrow, (outputs * groups // 64, -(-count // width)), 1,
        describe_tall(w, at_once, gated, groups), describe_flat(codes, at_once, width, groups), Pointer(own),
        Pointer(scales), Pointer(out), count, outputs // 2 if gated else 32, count, len(out[0]), GROUPS=columns // SIDE,
        STAGES=stages, GATED=gated, PDL=True, num_warps=4,
    )  # fmt: skip
    assert torch.equal(out, finish(multiply(x, w, scales), narrow_kernels, gated))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("stages", "at_once"), [(2, 1), (3, 1), (6, 1), (2, 2), (3, 2), (1, 3)])
@pytest.mark.parametrize(("gated", "groups"), [(0, 1), (1, 1), (0, 2)])
def test_one_row_that_is_quantised_in_the_product_has_the_sums_of_many(narrow_kernels, stages, at_once, gated, groups):
    outputs, columns = 256, 1536
    x = draw(1, columns, seed=7).to(BF16)
    w, scales = make_weight(outputs, columns)
    out = torch.full((outputs // 2 if gated else outputs,), float("nan"), dtype=BF16)
    launch(
        narrow_kernels.multiply_row, (outputs * groups // 64,), 1, describe_tall(w, at_once, gated, groups), Pointer(x),
        Pointer(scales), Pointer(out), outputs // 2 if gated else 32, GROUPS=columns // SIDE,
        STAGES=min(stages, columns // SIDE // at_once // groups), GATED=gated, PDL=True, num_warps=4,
    )  # fmt: skip
    assert torch.equal(out, finish(multiply(x, w, scales), narrow_kernels, gated)[0])
