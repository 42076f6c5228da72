"""Levels of packed weights as CUDA's kernels read them, and the numbers that they make of steps: without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import MXFP4, PackedMatrix, StepLayout
from adapters.models.kernels.formats.packed_formats import count_device_bits
from adapters.models.numerics.synthetic import random_matrix
from tests.models.kernels.cuda_numbers import unpack_for_cuda

triton_packed = pytest.importorskip(
    "adapters.models.kernels.cuda.packed", reason="Triton comes with CUDA builds of torch"
)
triton_ahead = pytest.importorskip("adapters.models.kernels.cuda.packed_ahead")
few_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.few_rows")
many_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.many_rows")
part_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.part_rows")
levels_of = pytest.importorskip("adapters.models.kernels.triton.packed_levels")

CPU = torch.device("cpu")
LAYOUTS = {
    "Q4_K": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "Q5_K": StepLayout("int8", 32, per=8, inner=True, least="own"),
    "Q6_K": StepLayout("int8", 16, per=16, inner=True),
    "Q8_0": StepLayout("int8", 32),
    "Q4_0": StepLayout("int4", 32),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
    "AWQ": StepLayout("uint4", 128, least="scale"),
    "AWQ by 16": StepLayout("uint4", 16, least="scale"),
    "int8 by 64": StepLayout("int8", 64, scale="bfloat16", least="scale"),
    "int8 by 128": StepLayout("int8", 128, scale="float32"),
    "FP8": StepLayout("e4m3", 128, scale="float32"),
    "FP8 by 64": StepLayout("e4m3", 64, scale="bfloat16"),
    "MXFP4": MXFP4,
}


def read_level(levels: Tensor, form: levels_of.BlockForm, name: str, columns: int) -> Tensor:
    """The numbers of one kind for each 16 columns `[rows, columns / 16]`, found as `_load_level` and `_of_word` do."""
    share = form.find_share(name)
    rows = levels.permute(0, 3, 1, 2).flatten(0, 1).numpy().view(np.uint32).astype(np.uint64)
    found = list[np.ndarray]()
    for start in range(0, columns, 16):
        block, inside = divmod(start, form.block)
        word, half = (inside // 32, inside % 32 // 16) if form.block == 128 else (inside // 16, 0)
        bit = share.first + (half * share.size if share.is_twofold else 0)
        bit += (block * form.block // 64 % 2) * share.size if share.is_half else 0
        bit += word * share.count // 4 * share.bits
        number = rows[:, start // 128, bit // 32] >> np.uint64(bit % 32)
        found.append(number & np.uint64((1 << share.bits) - 1))
    return torch.from_numpy(np.stack(found, 1).astype(np.int64))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_packed_matrix_takes_as_many_bits_as_an_estimate_says(layout: StepLayout) -> None:
    packed = triton_packed.pack_steps(random_matrix((24, 768), layout, "w"), CPU, converts_e4m3=True)
    taken = sum(tensor.nbytes for tensor in packed.tensors)
    assert 8 * taken == count_device_bits(layout) * 24 * 768
    assert count_device_bits(layout) >= (4.25 if layout == MXFP4 else layout.bits)


def as_floats(numbers: Tensor, scale: str) -> Tensor:
    if scale == "uint8":  # the exponent of a bfloat16, its last bit first
        return ((numbers & 0x7F) << 8 | numbers & 0x80).to(torch.int16).view(torch.bfloat16).float()
    if scale == "float32":
        return torch.from_numpy(numbers.numpy().astype(np.uint32).view(np.float32))
    return torch.from_numpy(numbers.numpy().astype(np.uint16).view(np.int16)).view(getattr(torch, scale)).float()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("columns", [768, 1280])
def test_levels_lie_where_kernels_read_them(layout: StepLayout, columns: int) -> None:
    if columns % layout.span:
        pytest.skip("columns are whole spans")
    matrix = random_matrix((20, columns), layout, "w")
    packed = triton_packed.pack_steps(matrix, CPU, converts_e4m3=True)
    form = packed.block_form
    assert packed.levels.shape == (3, -(-columns // 128), form.planes, 8)
    raised = {"e2m1": 2.0**127}.get(layout.steps, 1.0)
    for name in form.level_sizes:
        level = getattr(matrix, name)
        each = (layout.group if name in {"inner", "least"} else layout.span) // 16
        found = read_level(packed.levels, form, name, columns)[:20]
        if level.dtype == torch.int8:
            assert torch.equal(found - 128, level.long().repeat_interleave(each, 1))
        else:
            kept = as_floats(found, packed.layout.scale)
            assert torch.equal(kept, level.float().repeat_interleave(each, 1) * raised)


def as_float32(numbers: Tensor) -> Tensor:
    return torch.from_numpy(numbers.int().numpy().view(np.float32)).double()


def as_bfloat16(numbers: Tensor) -> Tensor:
    return as_float32(numbers.int() << 16)


@pytest.mark.parametrize("name", ["Q6_K", "Q8_0", "int8 by 128"])
def test_bytes_that_are_multiplied_as_bits_give_the_numbers_that_unpacking_gives(name: str) -> None:
    """A model of `_four_bytes`. Results of multiply-adds are rounded once, from what float64 holds exactly."""
    matrix = random_matrix((16, 512), LAYOUTS[name], "w")
    form = triton_packed.form_of(matrix.layout, converts_e4m3=True)
    assert form.is_linear
    raised = 2.0 ** (133 - levels_of.EXPONENT.value)
    factor = (matrix.group_levels()[0] * raised).repeat_interleave(form.group, 1)
    bits = (matrix.steps.view(torch.uint8) ^ 128).int() << 16
    found = (as_float32(bits) * factor.double() - factor.double() * 2.0**-126).float() * 2.0**levels_of.EXPONENT.value
    assert torch.equal(found, matrix.unpack(torch.float32))


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "AWQ", "AWQ by 16"])
@pytest.mark.parametrize("is_upper", [False, True], ids=["lower", "upper"])
def test_pairs_of_steps_that_are_multiplied_as_bits_give_one_rounding(name: str, is_upper: bool) -> None:
    """A model of `_four_paired`. Steps are in the lower or the upper half of a byte."""
    exponent = levels_of.EXPONENT.value
    matrix = random_matrix((16, 512), LAYOUTS[name], "w")
    form = triton_packed.form_of(matrix.layout, converts_e4m3=True)
    assert form.is_paired
    scale, least = matrix.group_levels()
    factor = (scale * 2.0 ** (133 - exponent)).bfloat16()
    added = factor.double() * -8 * 2.0**-133 if least is None else (least * -(2.0**-exponent)).bfloat16().double()
    factor = factor.double() / (16 if is_upper else 1)
    factor, added = (one.repeat_interleave(form.group, 1) for one in (factor, added))
    steps = matrix.steps + (8 if matrix.steps.dtype == torch.int8 else 0)
    bits = as_bfloat16(steps.int() << (4 if is_upper else 0))
    found = (bits * factor + added).float().bfloat16() * 2.0**exponent
    assert torch.equal(found, unpack_for_cuda(matrix, torch.bfloat16))


def test_factors_of_the_largest_scales_are_finite() -> None:
    largest = levels_of.LARGEST_SCALE * 2.0 ** (149 - 8 - levels_of.EXPONENT.value)
    assert largest * 32896 < torch.finfo(torch.float32).max
    layout = LAYOUTS["Q4_K"]
    matrix = random_matrix((8, 256), layout, "w")
    large = PackedMatrix(layout, matrix.steps, matrix.scale + 8, matrix.inner, matrix.least, matrix.own)
    assert triton_packed.pack_steps(large, CPU, converts_e4m3=True) is None


@pytest.mark.parametrize(
    ("scale", "is_kept"), [(1.0, True), (2.0**-128, True), (0.0, True), (0.75, False), (2.0, False)]
)
def test_scales_of_mxfp4_are_powers_of_two_up_to_one(scale: float, is_kept: bool) -> None:
    """The smallest scale of a checkpoint is 2 ** -127, and scales are halved."""
    matrix = random_matrix((8, 128), MXFP4, "w")
    changed = evolve(matrix, scale=torch.full_like(matrix.scale, scale))
    packed = triton_packed.pack_steps(changed, CPU, converts_e4m3=True)
    assert (packed is not None) == is_kept
    if packed is not None:
        exponents = read_level(packed.levels, packed.block_form, "scale", 128)
        assert torch.equal(as_floats(exponents, "uint8"), torch.full((8, 8), scale * 2.0**127))


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_XS"])
def test_weights_come_ahead_for_few_rows_of_one_chain_in_measured_formats(name: str) -> None:
    packed = triton_packed.pack_steps(random_matrix((8, 768), LAYOUTS[name], "w"), CPU, converts_e4m3=True)
    many = evolve(packed, outputs=triton_packed.FEW)
    assert not triton_ahead.comes_ahead(1, packed, torch.bfloat16)
    assert triton_ahead.comes_ahead(8, many, torch.bfloat16) == (name != "IQ4_XS")
    assert not triton_ahead.comes_ahead(9, many, torch.bfloat16)
    assert not triton_ahead.comes_ahead(8, many, torch.float16)


@pytest.mark.parametrize(
    ("name", "columns", "pieces", "chain"),
    [
        ("Q4_K", 4096, 4096, 4096),
        ("Q4_K", 12288, 4096, 4096),
        ("AWQ", 12288, 4096, 4096),
        ("FP8", 4096, 512, 2048),
        ("FP8", 12288, 0, 2048),
        ("Q8_0", 4096, 0, 0),
    ],
)
def test_many_rows_are_multiplied_with_registers_while_that_was_quicker(name, columns, pieces, chain) -> None:
    packed = triton_packed.pack_steps(random_matrix((8, 768), LAYOUTS[name], "w"), CPU, converts_e4m3=True)
    few = evolve(packed, columns=columns)
    many = evolve(few, outputs=triton_packed.FEW)
    for weight, most in ((few, pieces), (many, chain)):
        counts = (65, 512, 513, 1024, 1025, 2048, 2049, 4096)
        found = [many_rows.is_unpacked_in_registers(count, weight, torch.bfloat16) for count in counts]
        assert found == [count <= most for count in counts]
        assert not many_rows.is_unpacked_in_registers(65, weight, torch.float16)


@pytest.mark.parametrize(
    ("name", "count", "columns", "in_pieces", "chain"),
    [
        ("Q4_K", 32, 4096, (2, 3, 128), (4, 4, 168)),
        ("Q4_K", 33, 4096, (2, 4, 168), (2, 4, 168)),
        ("FP8", 16, 4096, (4, 3, 128), (4, 4, 168)),
        ("AWQ", 8, 6144, (2, 3, 128), (4, 4, 168)),  # a piece has six blocks
    ],
)
def test_few_rows_have_the_tiles_that_were_measured(name, count, columns, in_pieces, chain) -> None:
    packed = triton_packed.pack_steps(random_matrix((8, 768), LAYOUTS[name], "w"), CPU, converts_e4m3=True)
    few = evolve(packed, columns=columns)
    for weight, tile in ((few, in_pieces), (evolve(few, outputs=triton_packed.FEW), chain)):
        assert part_rows.choose_part_tile(count, weight) == part_rows.PartTile(*tile)
        found = [part_rows.has_parts(rows, weight, torch.bfloat16) for rows in (4, 5, 64, 65)]
        assert found == [False, True, True, False]
        assert not part_rows.has_parts(16, weight, torch.float16)
    assert not part_rows.has_parts(16, evolve(packed, columns=320 * 8), torch.bfloat16) or name == "FP8"
    other = triton_packed.pack_steps(random_matrix((8, 4096), LAYOUTS["Q8_0"], "w"), CPU, converts_e4m3=True)
    assert not part_rows.has_parts(16, other, torch.bfloat16)


@pytest.mark.parametrize(
    ("outputs", "count", "rows"),
    [(4096, 256, 64), (4096, 512, 128), (6144, 128, 64), (6144, 256, 128), (24576, 256, 128), (24576, 512, 256)],
)
def test_tiles_of_many_rows_are_small_while_there_are_too_few_programs(outputs, count, rows) -> None:
    packed = triton_packed.pack_steps(random_matrix((8, 768), LAYOUTS["Q4_K"], "w"), CPU, converts_e4m3=True)
    assert many_rows.choose_wide_rows(count, evolve(packed, outputs=outputs), 132) == rows


@pytest.mark.parametrize(("outputs", "registers"), [(4096, 128), (6144, 80), (8192, 128), (12288, 80)])
def test_three_programs_share_a_processor_where_two_would_leave_another_round(outputs: int, registers: int) -> None:
    packed = triton_packed.pack_steps(random_matrix((8, 1024), LAYOUTS["Q4_K"], "w"), CPU, converts_e4m3=True)
    weight = evolve(packed, outputs=outputs)
    tiles = {count: few_rows.choose_packed_tile(count, weight, 132, 227 << 10) for count in (1, 8, 9)}
    assert (tiles[1].registers, tiles[8].registers, tiles[9].registers) == (registers, registers, 128)
    assert [tile.columns for tile in tiles.values()] == [16, 16, 16]
