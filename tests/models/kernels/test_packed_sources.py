"""Kernels of packed weights run from their own source, without a GPU: every format, number of rows, and kernel.

Their launches are those that serve. So this shows that words and levels are read where they were put, and that
instructions make the numbers that `unpack_for_cuda` makes.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attrs import asdict, evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight, StepLayout
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.numerics.synthetic import random_matrix
from tests.models.kernels.cuda_numbers import unpack_for_cuda
from tests.models.kernels.gluon_machine import Descriptor, NumberType, Pointer, launch, load_kernels
from tests.models.kernels.test_packed_levels import LAYOUTS
from tests.pairs import in_turns, usual_where

triton_packed = pytest.importorskip(
    "adapters.models.kernels.cuda.packed", reason="Triton comes with CUDA builds of torch"
)
triton_ahead = pytest.importorskip("adapters.models.kernels.cuda.packed_ahead")
few_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.few_rows")
many_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.many_rows")
part_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.part_rows")
triton_groups = pytest.importorskip("adapters.models.kernels.cuda.packed_groups")

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
ROOM = "adapters.models.kernels.triton"
LAUNCHERS = {
    triton_packed: ("packed",),
    few_rows: ("packed",),
    part_rows: ("hopper.hopper_packed_parts",),
    many_rows: ("hopper.hopper_packed_wide",),
    triton_ahead: ("hopper.hopper_packed", "hopper.hopper_packed_row", "hopper.hopper_row_registers"),
    triton_groups: ("packed_groups", "hopper.hopper_groups", "hopper.rows.packed_row_experts"),
}


def convert(value: Any, forms: Any) -> Any:
    """Return an argument of a launch as the machine has it."""
    if isinstance(value, Tensor):
        return Pointer(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value.base, tuple(value.block_shape))
    if isinstance(value, triton_packed.BlockForm):
        scale = {"uint8": torch.uint8, "fp16": torch.float16, "bf16": BF16, "fp32": torch.float32}[value.scale.name]
        return forms.BlockForm(**asdict(value) | {"scale": NumberType(scale)})
    return value


@pytest.fixture(autouse=True)
def on_the_machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches run on the machine. Return the names of kernels that ran."""
    forms, ran = load_kernels(f"{ROOM}.packed_levels"), list[str]()
    for launcher, names in LAUNCHERS.items():
        modules = {name: load_kernels(f"{ROOM}.{name}") for name in names}

        def run(kernel: Any, grid: tuple[int, ...], *args: Any, modules: Any = modules, **options: Any) -> None:
            body = getattr(modules[kernel.fn.__module__.removeprefix(f"{ROOM}.")], kernel.fn.__name__)
            ran.append(kernel.fn.__name__)
            parameters = inspect.signature(body).parameters
            kept = {key: convert(one, forms) for key, one in options.items() if key in parameters}
            launch(body, grid, 0, *(convert(one, forms) for one in args), **kept)

        monkeypatch.setattr(launcher, "launch", run)
    return ran


def multiply(x: Tensor, w: Tensor, pieces: int, piece: int) -> Tensor:
    """The product as `packed` adds it up, float32: pieces in order, each a chain in steps of 16."""
    total = None
    for first in range(0, pieces * piece, piece):
        part = torch.zeros(len(x), len(w))
        for k in range(first, min(first + piece, w.shape[1]), 16):
            part = (part.double() + x[:, k : k + 16].double() @ w[:, k : k + 16].double().T).float()
        total = part if total is None else total + part
    assert total is not None
    return total


def make_x(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=make_generator(1, CPU)).to(BF16)


def pack(layout: StepLayout, outputs: int, columns: int, *, converts: bool = True) -> tuple[Any, Tensor]:
    """Return a packed matrix, and its numbers."""
    matrix = random_matrix((outputs, columns), layout, "w")
    return triton_packed.pack_steps(matrix, CPU, converts_e4m3=converts), unpack_for_cuda(matrix, BF16)


@pytest.mark.parametrize("converts", [True, False], ids=["instruction", "bits"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_are_unpacked_to_their_numbers(layout: StepLayout, converts: bool) -> None:
    packed, numbers = pack(layout, 72, 768, converts=converts)
    out = torch.full((40, 768), float("nan"), dtype=BF16)
    triton_packed.unpack_rows(packed, 24, out, None)
    assert torch.equal(out, numbers[24:64])


@usual_where(lambda places: places["layout"] == 0 or sum(places.values()) % 2 == 0)
@pytest.mark.parametrize("few", [0, 1 << 14], ids=["one chain", "pieces"])
@pytest.mark.parametrize("rows", [3, 11])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_few_rows_are_multiplied_with_their_numbers(monkeypatch, layout: StepLayout, rows: int, few: int) -> None:
    """Columns of 768 leave pieces without any, and 1,024 are whole pieces."""
    monkeypatch.setattr(triton_packed, "FEW", few)
    for columns in (768, 1024):
        packed, numbers = pack(layout, 24, columns)
        x = make_x(rows, columns)
        expected = multiply(x, numbers, packed.pieces, packed.piece).to(BF16)
        for processors in (1, 132):
            tile = few_rows.choose_packed_tile(rows, packed, processors, 227 << 10)
            out = torch.full((rows, 24), float("nan"), dtype=BF16)
            few_rows.multiply_narrow(x, packed, out, tile, gated=False, pdl=None)
            assert torch.equal(out, expected), (columns, processors)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_words_that_come_ahead_are_multiplied_with_their_numbers(monkeypatch, layout: StepLayout) -> None:
    monkeypatch.setattr(triton_packed, "FEW", 0)
    for columns in (768, 1280):
        packed, numbers = pack(layout, 72, columns // layout.span * layout.span)
        x = make_x(5, packed.columns)
        out = torch.full((5, 72), float("nan"), dtype=BF16)
        triton_ahead.multiply_ahead(x, packed, out, gated=False, pdl=True)
        assert torch.equal(out, multiply(x, numbers, packed.pieces, packed.piece).to(BF16)), columns


@usual_where(lambda places: places["layout"] == 0 or sum(places.values()) % 2 == 0)
@pytest.mark.parametrize("few", [0, 1 << 14], ids=["one chain", "pieces"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_one_row_is_multiplied_with_its_numbers(monkeypatch, layout: StepLayout, few: int) -> None:
    """Memory holds all steps, or fewer of them, so that it is used several times. Or registers hold one step."""
    monkeypatch.setattr(triton_packed, "FEW", few)
    packed, numbers = pack(layout, 24, 4096)
    x = make_x(1, packed.columns)
    expected = multiply(x, numbers, packed.pieces, packed.piece).to(BF16)
    sizes = ((2, 128), (64, 128), (0, 128), (0, 512))
    tiles = [triton_ahead.AheadTile(16, columns, stages, 8, 80) for stages, columns in sizes]
    tiles += [triton_ahead.MANY_CHAINS] if packed.pieces == 1 else []
    for tile in tiles:
        out = torch.full((1, 24), float("nan"), dtype=BF16)
        triton_ahead.multiply_row(x, packed, out, tile, gated=0, pdl=True)
        assert torch.equal(out, expected), tile


def make_weight(name: str, outputs: int, columns: int) -> Any:
    """Return a packed matrix whose words and levels have sizes and no memory."""
    layout = LAYOUTS[name]
    form = triton_packed.form_of(layout, converts_e4m3=True)
    words = torch.empty(outputs // 8, -(-columns // form.block), 128, dtype=torch.int32, device="meta")
    levels = torch.empty(outputs // 8, -(-columns // 128), form.planes, 8, dtype=torch.int32, device="meta")
    return triton_packed.CudaPackedMatrix(layout, outputs, columns, words, levels, True)


CHOSEN = {  # outputs, columns, then rows and columns of a tile, and whether its words wait in registers
    "Q4_K": (
        (6144, 4096, (16, 256, True)),
        (4096, 4096, (16, 512, True)),
        (4096, 12288, (16, 256, True)),
        (5120, 6144, (16, 128, False)),
        (5120, 17408, (16, 128, True)),
        (24576, 4096, (64, 512, False)),
        (24576, 5120, (64, 256, False)),
        (34816, 5120, (32, 256, False)),  # nine programs at a time
        (16384, 5120, (64, 256, False)),
        (14336, 5120, (16, 128, False)),
        (24576, 8192, None),
        (8192, 28672, None),  # scales of a program and a row take more than half of a processor's memory
    ),
    "AWQ": ((24576, 4096, (64, 512, False)), (151936, 4096, None), (4096, 4096 + 128, None)),
    "Q8_0": ((4096, 4096, (16, 128, False)), (4096, 12288, (16, 256, False)), (24576, 4096, (64, 256, False))),
    "FP8": ((4096, 12288, (16, 128, False)), (24576, 4096, (64, 128, False))),
    "Q6_K": ((4096, 4096, None), (24576, 4096, None)),
    "AWQ by 16": ((4096, 4096, None),),
}


@pytest.mark.parametrize(("name", "cases"), CHOSEN.items(), ids=CHOSEN)
def test_products_of_one_row_have_the_tiles_that_were_measured(name: str, cases: tuple[Any, ...]) -> None:
    for outputs, columns, expected in cases:
        weight = make_weight(name, outputs, columns)
        tile = triton_ahead.choose_row_tile(make_x(1, columns), weight, 132, 227 << 10)
        found = tile and (tile.outputs, tile.columns, tile.stages == 0)
        assert found == expected, (outputs, columns)
        assert triton_ahead.choose_row_tile(make_x(2, columns), weight, 132, 227 << 10) is None


@pytest.mark.parametrize("name", ["Q4_K", "FP8"])
def test_a_row_is_copied_whole_where_a_piece_has_three_times_a_power_of_two_blocks(name: str) -> None:
    packed, numbers = pack(LAYOUTS[name], 16, 6144)
    x = make_x(1, packed.columns)
    expected = multiply(x, numbers, packed.pieces, packed.piece).to(BF16)
    for stages in (0, 2):
        out = torch.full((1, 16), float("nan"), dtype=BF16)
        tile = triton_ahead.AheadTile(16, 256, stages, 8, 80)
        triton_ahead.multiply_row(x, packed, out, tile, gated=0, pdl=True)
        assert torch.equal(out, expected), stages


@pytest.mark.parametrize("name", ["Q4_K", "AWQ"])
def test_a_piece_of_five_blocks_is_multiplied_block_after_block(name: str) -> None:
    """Scales are made of all steps before the row comes, or step by step."""
    packed, numbers = pack(LAYOUTS[name], 16, 5120)
    x = make_x(1, packed.columns)
    expected = multiply(x, numbers, packed.pieces, packed.piece).to(BF16)
    for columns, stages, makes in ((128, 0, True), (640, 0, True), (128, 2, True), (128, 2, False), (128, 5, True)):
        out = torch.full((1, 16), float("nan"), dtype=BF16)
        tile = triton_ahead.AheadTile(16, columns, stages, 8, 80, makes=makes)
        triton_ahead.multiply_row(x, packed, out, tile, gated=0, pdl=True, is_late=stages > 2)
        assert torch.equal(out, expected), (columns, stages, makes)


@usual_where(lambda places: places["layout"] == 0 or sum(places.values()) % 2 == 0)
@pytest.mark.parametrize("few", [0, 1 << 14], ids=["one chain", "pieces"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_many_rows_are_multiplied_with_their_numbers(monkeypatch, layout: StepLayout, few: int) -> None:
    """Columns of 768 leave pieces without any, and 1,120 are no whole number of blocks. A program has two tiles."""
    monkeypatch.setattr(triton_packed, "FEW", few)
    for columns in (768, 1120):
        packed, numbers = pack(layout, 136, columns // layout.span * layout.span)
        x = make_x(133, packed.columns)
        expected = multiply(x, numbers, packed.pieces, packed.piece).to(BF16)
        out = torch.full((133, 136), float("nan"), dtype=BF16)
        many_rows.multiply_wide_ahead(x, packed, out, 3, gated=0, pdl=True)
        assert torch.equal(out, expected), columns


@usual_where(lambda places: places["layout"] == 0 or sum(places.values()) % 2 == 0)
@pytest.mark.parametrize("few", [0, 1 << 14], ids=["one chain", "pieces"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_program_for_each_piece_multiplies_with_their_numbers(monkeypatch, layout: StepLayout, few: int) -> None:
    """The second product finds the counts of the first one at zero."""
    monkeypatch.setattr(triton_packed, "FEW", few)
    for columns, rows in ((768, 13), (1120, 33)):
        packed, numbers = pack(layout, 72, columns // layout.span * layout.span)
        scratch = part_rows.PartScratch.allocate(72, packed.pieces, CPU)
        for number in range(2):
            x = make_x(rows - number, packed.columns)
            out = torch.full((len(x), 72), float("nan"), dtype=BF16)
            part_rows.multiply_parts(x, packed, out, scratch, gated=0, pdl=True)
            expected = multiply(x, numbers, packed.pieces, packed.piece).to(BF16)
            assert torch.equal(out, expected), (columns, number)


def stack_matrices(layout: StepLayout, columns: int, rows: int = 40) -> tuple[Any, list[Tensor]]:
    """Return the packed matrices of three experts, so many rows each, and their numbers."""
    matrices = [random_matrix((rows, columns), layout, f"expert {number}") for number in range(3)]
    each = [triton_packed.pack_steps(one, CPU, converts_e4m3=True) for one in matrices]
    words, levels = (torch.stack([getattr(one, name) for one in each]) for name in ("words", "levels"))
    return evolve(each[0], words=words, levels=levels), [unpack_for_cuda(one, BF16) for one in matrices]


@in_turns("layout", "pairs", full=1, one_in=2)
@pytest.mark.parametrize("pairs", [8, 16, 48, 128])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pairs_of_experts_are_multiplied_with_the_numbers_of_theirs(on_the_machine, layout, pairs) -> None:
    """Expert 1 of three has five pairs, and expert 2 has three. The last piece of 832 columns is half a block."""
    columns = 832 // layout.span * layout.span
    stacked, numbers = stack_matrices(layout, columns)
    x = make_x(8, columns)
    order = torch.tensor([3, 0, 7, 5, 2, 1, 6, 4], dtype=torch.int32)
    tiles = torch.tensor([[1, 0, 5, 0], [2, 5, 3, 0], [0, 0, 0, 0]], dtype=torch.int32)
    dealt = triton_groups.PairTiles(order, tiles, torch.tensor([2], dtype=torch.int32))
    tile = triton_groups.choose_packed_group_tile(pairs, 1, stacked, 227 << 10, hopper=True)
    assert tile.pairs == {8: 8, 16: 16, 48: 64}.get(pairs, 128 if layout.steps == "e2m1" else 64)
    out = torch.full((8, 40), float("nan"), dtype=BF16)
    triton_groups.multiply_packed_groups(x, stacked, out, dealt, tile, share=1, gated=0, processors=1, pdl=None)
    for at, pair in enumerate(order.tolist()):
        own = numbers[1 if at < 5 else 2]
        expected = multiply(x[pair : pair + 1], own, stacked.pieces, stacked.piece).to(BF16)
        assert torch.equal(out[pair : pair + 1], expected), pair
    kernels = {8: ["multiply_few"], 16: ["multiply_many"]}
    wide = ["gather_rows", "multiply_many_ahead"] if layout.steps == "e2m1" else ["multiply_many"]
    assert on_the_machine == kernels.get(pairs, wide)


@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_experts_of_one_row_need_no_tiles(layout: StepLayout, share: int) -> None:
    """The row chose experts 2, 0 and, in place of a number that no expert has, the last one."""
    stacked, numbers = stack_matrices(layout, 1024)
    x = make_x(3 // share, 1024)
    chosen = torch.tensor([2, 0, 3], dtype=torch.int32)
    dealt = triton_groups.PairTiles(chosen, chosen, chosen, is_early=share == 1, experts=3)
    tile = triton_groups.choose_packed_group_tile(3, 3, stacked, 227 << 10, hopper=True)
    out = torch.full((3, 40), float("nan"), dtype=BF16)
    how = {"gated": 0, "processors": share, "pdl": True}
    triton_groups.multiply_packed_groups(x, stacked, out, dealt, tile, share=share, **how)
    for pair, expert in enumerate((2, 0, 2)):
        row = x[pair // share : pair // share + 1]
        expected = multiply(row, numbers[expert], stacked.pieces, stacked.piece).to(BF16)
        assert torch.equal(out[pair : pair + 1], expected), pair


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("columns", [768, 2048])
def test_the_words_of_one_rows_experts_wait_in_registers(on_the_machine, columns, gated) -> None:
    """Two of the eight pieces of 768 columns are empty. The row chose experts 2, 0 and none, as above."""
    stacked, numbers = stack_matrices(LAYOUTS["Q4_K"], columns, 64)
    x = make_x(1, columns) if gated else make_x(3, columns)
    chosen = torch.tensor([2, 0, 3], dtype=torch.int32)
    dealt = triton_groups.PairTiles(chosen, chosen, chosen, is_early=not gated, experts=3)
    tile = triton_groups.choose_packed_group_tile(3, 3, stacked, 227 << 10, hopper=True)
    out = torch.full((3, 32 if gated else 64), float("nan"), dtype=BF16)
    how = {"gated": gated, "processors": 132, "pdl": True, "share": 3 if gated else 1}
    triton_groups.multiply_packed_groups(x, stacked, out, dealt, tile, hopper=True, **how)
    assert on_the_machine == ["multiply_registers"]
    for pair, expert in enumerate((2, 0, 2)):
        row = x[:1] if gated else x[pair : pair + 1]
        expected = multiply(row, numbers[expert], stacked.pieces, stacked.piece).to(BF16)
        if gated:
            gate, up = expected.float().view(-1, 2).unbind(1)
            silu = (gate / (1 + torch.exp(-gate.double()).float())).to(BF16).float()
            expected = (silu * up).to(BF16)[None]
        assert torch.equal(out[pair : pair + 1], expected), pair


def test_gates_and_what_they_gate_are_multiplied_together(on_the_machine: list[str]) -> None:
    layout = LAYOUTS["Q6_K"]
    matrices = [random_matrix((16, 1024), layout, name) for name in ("gate", "up")]
    kernels = pytest.importorskip("adapters.models.kernels.cuda.kernels").TritonKernels(CPU)
    both = kernels.pack_gated(StackedWeight(tuple(matrices), BF16, CPU)).parts[0]
    x = make_x(4, 1024)
    gate, up = (multiply(x, unpack_for_cuda(one, BF16), both.pieces, both.piece).to(BF16).float() for one in matrices)
    out = torch.full((4, 16), float("nan"), dtype=BF16)
    tile = few_rows.choose_packed_tile(4, both, 132, 227 << 10)
    few_rows.multiply_narrow(x, both, out, tile, gated=True, pdl=None)
    silu = (gate / (1 + torch.exp(-gate.double()).float())).to(BF16).float()
    assert torch.equal(out, (silu * up).to(BF16))
    assert on_the_machine == ["packed_narrow"]
