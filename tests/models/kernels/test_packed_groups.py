"""Packed experts on CUDA, without a GPU: how words lie, which tiles are chosen, and the order of sums as a model."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import MXFP4, TABLES, PackedMatrix, StackedWeight, StepLayout
from adapters.models.kernels.activations import CLAMPED
from adapters.models.kernels.formats.packed_formats import block_columns, has_packed_kernel
from adapters.models.kernels.formats.packed_words import arrange_words
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    GatedWeights,
    StackedExperts,
)
from adapters.models.kernels.proof.cancelling import make_cancelling_packed
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.synthetic import random_matrix

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)
triton_packed = pytest.importorskip("adapters.models.kernels.cuda.packed")
triton_groups = pytest.importorskip("adapters.models.kernels.cuda.packed_groups")
triton_experts = pytest.importorskip("adapters.models.kernels.cuda.experts")
triton_products = pytest.importorskip("adapters.models.kernels.cuda.products")
expert_choice = pytest.importorskip("adapters.models.kernels.cuda.rows.expert_choice")
row_sums = pytest.importorskip("adapters.models.kernels.cuda.rows.row_sums")
triton_rows = pytest.importorskip("adapters.models.kernels.cuda.row_launches")

CPU = torch.device("cpu")
BF16 = torch.bfloat16
Q4_K = StepLayout("uint4", 32, per=8, inner=True, least="own")
LAYOUTS = {
    "Q4_K": Q4_K,
    "Q6_K": StepLayout("int8", 16, per=16, inner=True),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
    "AWQ": StepLayout("uint4", 128, least="scale"),
    "FP8": StepLayout("e4m3", 128, scale="float32"),
    "MXFP4": MXFP4,
}
SHAPES = ((1536, 2048), (2048, 768), (5760, 2880), (512, 7168), (28672, 4096))


def read_steps(words: Tensor, layout: StepLayout) -> Tensor:
    """The steps in words `[rows / 8, blocks, 128]`, as the kernels' lanes read them: `[rows, columns]`."""
    block = block_columns(layout)
    lanes = words.view(len(words), -1, 8, 4, 4)  # side, lane, word
    count = block // 16
    bits = 32 // count
    places = torch.arange(count)
    if layout.steps in {"uint4", "int4"}:
        places = places // 2 + places % 2 * 4  # pairs lie 16 bits apart
    found = lanes.unsqueeze(-1) >> (places * bits) & (1 << bits) - 1
    if layout.steps == "e2m1":
        bits_of = ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3))  # three bits of size, and the sign
        numbers = [
            sum((lanes >> (place + half) % 32 & 1) << bit for bit, place in enumerate(one))
            for one in bits_of
            for half in (0, 16)
        ]
        found = torch.stack([torch.as_tensor(one) for one in numbers], -1)
    # Of each 16 columns lane t has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    found = found.view(len(words), -1, 8, 4, 4, count // 4, 2, 2)
    found = found.permute(0, 2, 1, 4, 5, 6, 3, 7)  # side, block, word, 16, half, lane, pair
    return found.reshape(len(words) * 8, -1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_words_hold_the_steps_of_the_matrix(layout: StepLayout) -> None:
    matrix = random_matrix((24, 768), layout, "w")
    steps = read_steps(arrange_words(matrix.steps, layout), layout)
    raised = 128 if layout.steps == "int8" else 0
    assert torch.equal(steps, matrix.steps.int() + raised)


def test_numbers_of_mxfp4_come_out_of_the_bits_of_bfloat16() -> None:
    """A sign, two bits of exponent and one of mantissa, moved to where bfloat16 has them, and a scale 2 ** 127 times
    as great.
    """
    codes = torch.arange(16, dtype=torch.int32)
    bits = (codes & 8) << 12 | (codes & 7) << 6
    numbers = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(BF16)
    scales = torch.tensor([2.0**-20, 2.0**-9, 0.5, 1.0]).to(BF16)
    found = numbers.float()[:, None] * (scales * 2.0**127).float()
    assert torch.equal(found, torch.tensor(TABLES["e2m1"]).float()[:, None] * scales.float())


def test_shifts_bring_each_pair_of_mxfp4_to_the_bits_of_bfloat16() -> None:
    """The model of `packed_numbers._pair_e2m1`, for all pairs of codes in each place of a word."""
    matrix = random_matrix((8, 4096), MXFP4, "w")
    words = arrange_words(matrix.steps, MXFP4)
    assert torch.equal(read_steps(words, MXFP4), matrix.steps.int())
    found = torch.cat([(one >> half * 16 & 0xFFFF).flatten() for one in move_pairs(words) for half in (0, 1)])
    expected = (matrix.steps.int() & 8) << 12 | (matrix.steps.int() & 7) << 6
    assert torch.equal(found.sort().values, expected.flatten().sort().values.long())
    for code in range(16):  # a word of one code in all places
        alone = arrange_words(torch.full((8, 128), code, dtype=torch.uint8), MXFP4).flatten()[:1]
        bits = (code & 8) << 12 | (code & 7) << 6
        assert [int(one) for one in move_pairs(alone)] == [bits | bits << 16] * 4


def move_pairs(words: Tensor) -> list[Tensor]:
    """Return the bits of bfloat16 of each of the four pairs of words."""
    words = words.long() & 0xFFFFFFFF
    turned = [(words >> count | words << 32 - count) & 0xFFFFFFFF for count in (3, 6)]
    return [one & 0x81C081C0 for one in (words, *turned, (words & 0x001B001B) * 0x1084)]


def test_a_matrix_in_mxfp4_stays_packed_for_bfloat16_and_scales_that_fit() -> None:
    matrix = random_matrix((64, 256), MXFP4, "w")
    assert has_packed_kernel(MXFP4, 256, BF16)
    assert not has_packed_kernel(MXFP4, 256, torch.float16)
    packed = triton_packed.pack_steps(matrix, CPU, converts_e4m3=False)
    assert packed.pieces * packed.piece >= 256
    large = PackedMatrix(MXFP4, matrix.steps, matrix.scale + 4)
    assert triton_packed.pack_steps(large, CPU, converts_e4m3=False) is None


def add_steps(x: Tensor, w: Tensor, first: int, stop: int) -> Tensor:
    """One chain over ascending columns in steps of 16, float32 `[rows, outputs]`."""
    total = torch.zeros(len(x), len(w))
    for k in range(first, stop, 16):
        total = total + (x[:, k : k + 16].double() @ w[:, k : k + 16].double().T).float()
    return total


@pytest.mark.parametrize("columns", [1280, 2304])
def test_pieces_side_by_side_and_one_after_the_other_are_the_same_sum(columns: int) -> None:
    """A model of `multiply_few` and of `multiply_many`. The last pieces of 1,280 columns are empty."""
    x, matrix = make_cancelling_packed((5, 24, columns), Q4_K, BF16)
    packed = triton_packed.pack_steps(matrix, CPU, converts_e4m3=False)
    w = matrix.unpack(BF16)
    each = packed.piece
    padded = [torch.nn.functional.pad(one, (0, packed.pieces * each - columns)) for one in (x, w)]
    parts = [add_steps(*padded, at * each, (at + 1) * each) for at in range(packed.pieces)]
    side_by_side = parts[0]
    for part in parts[1:]:
        side_by_side = side_by_side + part
    in_turn = torch.zeros(5, 24)
    for start in range(0, columns, each):
        in_turn = in_turn + add_steps(x, w, start, min(start + each, columns))
    assert torch.equal(side_by_side, in_turn)
    assert not torch.equal(in_turn, add_steps(x, w, 0, columns)), "the order of a sum shows in its bits"
    for rows in (1, 3):
        assert torch.equal(add_steps(x[:rows], w, 0, each), add_steps(x, w, 0, each)[:rows])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_every_tile_covers_whole_pieces(layout: StepLayout, outputs: int, columns: int) -> None:
    if columns % layout.span:
        columns = columns // layout.span * layout.span
    small = triton_packed.pack_steps(random_matrix((8, columns), layout, "w"), CPU, converts_e4m3=False)
    weight = evolve(small, outputs=outputs, columns=columns)
    blocks = weight.piece // weight.block_form.block
    assert blocks * weight.block_form.block == weight.piece
    tiles = [
        triton_groups.choose_packed_group_tile(pairs, 32, weight, 227 << 10)
        for pairs in (1, 32, 256, 512, 1024, 1 << 16)
    ]
    assert [tile.pairs for tile in tiles] == [8, 8, 8, 16, 32, 64]
    for tile in tiles:
        assert blocks % tile.ahead == 0
        across = weight.pieces if tile.pairs == triton_groups.FEW_PAIRS else 1
        assert tile.columns % (16 * tile.warps // across) == 0


def make_expert(kernels: object, layout: StepLayout, number: int) -> GatedWeights:
    def stack(*sizes: tuple[int, int]) -> StackedWeight:
        parts = (random_matrix(size, layout, f"{number} {part}") for part, size in enumerate(sizes))
        return StackedWeight(tuple(parts), BF16, CPU)

    both = kernels.pack_gated(stack((64, 256), (64, 256)))  # type: ignore[attr-defined]
    return GatedWeights(both, kernels.pack(stack((256, 256))))  # type: ignore[attr-defined]


def test_experts_of_one_form_are_stacked_and_others_are_not() -> None:
    kernels = triton_cuda.TritonKernels(CPU)
    each = [make_expert(kernels, Q4_K, number) for number in range(4)]
    stacked = kernels.stack_experts(iter(each), 4)
    assert isinstance(stacked, StackedExperts)
    own = stacked[2].gate_up.parts[0]
    assert torch.equal(own.words, each[2].gate_up.parts[0].words)
    assert own.blocks == each[2].gate_up.parts[0].blocks
    mixed = [*each[:2], make_expert(kernels, LAYOUTS["AWQ"], 2), each[3]]
    apart = kernels.stack_experts(iter(mixed), 4)
    assert isinstance(apart, tuple)
    assert [one.gate_up.parts[0].layout for one in apart] == [Q4_K, Q4_K, LAYOUTS["AWQ"], Q4_K]
    assert torch.equal(apart[1].down.parts[0].words, each[1].down.parts[0].words)


def test_nothing_is_read_outside_of_biases_while_kernels_are_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs then, so what rows chose is whatever was in memory."""
    kernels = triton_cuda.TritonKernels(CPU)
    for module in (triton_experts, triton_groups, triton_products, triton_rows, row_sums, expert_choice):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    shape = BiasedExpertsShape(4, 2, 64, is_normalized=True)

    def make_biased(number: int) -> GatedWeights:
        parts = (random_matrix((64, 256), MXFP4, f"{number} {part}") for part in ("gate", "up"))
        both = kernels.pack(StackedWeight(tuple(parts), BF16, CPU))
        down = kernels.pack(StackedWeight((random_matrix((256, 64), MXFP4, f"{number} down"),), BF16, CPU))
        return GatedWeights(both, down, CLAMPED, torch.zeros(128, dtype=BF16), torch.zeros(256, dtype=BF16))

    router = kernels.pack(torch.zeros(4, 256, dtype=BF16))
    experts = Experts(shape, router, kernels.stack_experts(map(make_biased, range(4)), 4), None)
    batch = Batch(4, CPU)
    batch.load(Step((Segment(0, 0, 4),), 4), None)
    empty = torch.empty

    def make_garbage(*size: int, **options: object) -> Tensor:
        return empty(*size, **options).fill_(-1000)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", make_garbage)
    assert kernels.experts(torch.zeros(4, 256, dtype=BF16), experts, batch).shape == (4, 256)
