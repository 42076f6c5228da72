"""Products with packed weights: of the numbers that a format stands for, the same bits however many rows there are."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve

from adapters.checkpoint.gguf.unpack_blocks import UNPACK
from adapters.checkpoint.packed_matrix import TABLES, PackedMatrix, StackedWeight, StepLayout
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels, CpuStack
from adapters.models.kernels.cpu.native import native_library
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.product_list import (
    NATIVE,
    PACKED,
    ProductPlan,
    ServedHeads,
    ServedWeight,
    UnprovenProductError,
)
from adapters.models.kernels.offload import count_bytes
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.memory.packed_estimate import keeps_packed
from engine.loading.memory_estimate import estimate_weights
from tests.models.checkpoints import run, run_in_pieces, save_model, tokens_of
from tests.models.gguf.test_gguf_models import WIDE
from tests.models.ggufs import Kind, mixed, random_blocks, write_gguf
from tests.models.quantised import quantise
from tests.pairs import usual_where

LAYOUTS = (
    StepLayout("int8", 32),
    StepLayout("int4", 32),
    StepLayout("uint4", 32, per=8, inner=True, least="own"),
    StepLayout("int8", 32, per=8, inner=True, least="own"),
    StepLayout("int8", 16, per=16, inner=True),
    StepLayout("iq4", 32, per=8, inner=True),
    StepLayout("e4m3", 128, scale="float32"),
    StepLayout("uint4", 128, least="scale"),
    StepLayout("int8", 64, scale="bfloat16", least="scale"),
)
TYPES = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)
BUCKETS = (4, 16, 64, 256)


def random_matrix(layout: StepLayout, rows: int, columns: int, seed: int = 0) -> PackedMatrix:
    generator = make_generator(seed)

    def whole(low: int, high: int, each: int = 1, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.randint(low, high, (rows, columns // each), generator=generator, dtype=dtype)

    def scale() -> torch.Tensor:
        found = torch.rand(rows, columns // layout.span, generator=generator) * 0.02 + 1e-4
        return found.to(getattr(torch, layout.scale))

    steps = whole(-128, 128)
    if layout.steps in TABLES:
        steps = whole(0, 16, dtype=torch.uint8)
    if layout.steps == "e4m3":
        steps = steps.view(torch.uint8)
        steps[(steps & 127) == 127] = 3  # no numbers
    return PackedMatrix(
        layout,
        steps,
        scale(),
        whole(-32, 64, layout.group) if layout.inner else None,
        whole(-8, 64, layout.group) if layout.least else None,
        scale() if layout.least == "own" else None,
    )


def exactly(x: torch.Tensor, matrix: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and how large its terms are, scales and what is least apart."""
    scale, least = matrix.group_levels()
    steps = matrix.step_values().abs() * scale.abs().repeat_interleave(matrix.layout.group, 1)
    if least is not None:
        steps += least.abs().repeat_interleave(matrix.layout.group, 1)
    wide = x.double()
    return wide @ matrix.unpack(torch.float32).double().T, wide.abs() @ steps.double().T


@pytest.fixture(scope="module")
def own(native_code: Any) -> NativeProducts:
    return NativeProducts(native_code, native_code.level)


@pytest.fixture
def installed(own: NativeProducts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the library that these sources make, whichever this tree has."""
    monkeypatch.setattr(native_library, "load_library", lambda: (own.compiled, ""))


@usual_where(lambda places: places["rows_in"] == places["layout"] % 2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows_in", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_the_numbers_and_alike_for_any_rows_in_any_instructions(
    own: NativeProducts, layout: StepLayout, rows_in: torch.dtype
) -> None:
    own = evolve(own, to=rows_in)
    gate, up = (random_matrix(layout, 72, 512, seed) for seed in (1, 2))
    x = torch.randn(70, 512, generator=make_generator(3)).bfloat16()
    expected, terms = exactly(x, gate)
    found, gated = list[torch.Tensor](), list[torch.Tensor]()
    for level in range(own.compiled.level + 1):
        each = evolve(own, level=level)
        first, second = each.pack_steps(gate), each.pack_steps(up)
        for rows in (1, 5, 12, 70):
            found.append(torch.empty(70, 72))
            for part, out in zip(x.split(rows), found[-1].split(rows), strict=True):
                each.multiply_packed(part, first, out=out)
            gated.append(torch.cat([each.multiply_packed(part, first, second) for part in x.split(rows)]))
    assert first.fixed == (rows_in == torch.bfloat16 and layout.steps != "e4m3")
    assert float(((found[0] - expected).abs() / terms).max()) < (2**-17 if first.fixed else 2**-22)
    for one in found[1:]:
        assert torch.equal(one, found[0])
    for one in gated[1:]:
        assert torch.equal(one, gated[0])
    other = torch.empty(70, 72)
    own.multiply_packed(x, own.pack_steps(up), out=other)
    expected = torch.nn.functional.silu(found[0]) * other
    assert torch.allclose(gated[0].float(), expected, rtol=1e-5 if rows_in == torch.float32 else 5e-3, atol=1e-6)


def in_fixed_point(own: NativeProducts, x: torch.Tensor, matrix: PackedMatrix) -> list[torch.Tensor]:
    """The product of rows in bfloat16, in every kind of instructions."""
    found = list[torch.Tensor]()
    for level in range(own.compiled.level + 1):
        each, out = evolve(own, to=torch.bfloat16, level=level), torch.empty(len(x), matrix.shape[0])
        found.append(each.multiply_packed(x, each.pack_steps(matrix), out=out))
    return found


def test_the_largest_sums_of_rows_in_fixed_point_do_not_overflow(own: NativeProducts) -> None:
    """Steps at the ends of their range, rows at the end of theirs, in the longest groups: to the last bit."""
    layout = StepLayout("int8", 128)
    steps = torch.tensor([[-128], [127], [0]], dtype=torch.int8).repeat(1, 256)
    matrix = PackedMatrix(layout, steps, torch.ones(3, 2, dtype=torch.float16))
    x = torch.tensor([[1.9921875], [-1.9921875], [-3.984375]]).bfloat16().repeat(1, 256)
    expected = x.double() @ steps.double().T
    for found in in_fixed_point(own, x, matrix):
        assert torch.equal(found.double(), expected)


def test_terms_are_rounded_by_the_greatest_of_their_group_and_what_is_no_number_shows(own: NativeProducts) -> None:
    matrix = random_matrix(StepLayout("uint4", 32, least="scale"), 40, 96)
    x = torch.zeros(6, 96, dtype=torch.bfloat16)
    x[1, 3] = 1e-39  # less than any unit
    x[2, :32], x[2, 32:64] = 1e30, 1e-30  # each in its own unit
    x[3, 40] = float("inf")
    x[4, 70] = float("nan")
    x[5, 5], x[5, 6] = 1.0, 2**-16  # a half of the unit: to the even number, 0
    expected, _ = exactly(x, matrix)
    for found in in_fixed_point(own, x, matrix):
        assert not found[0].any()
        assert not found[1].any()
        assert torch.allclose(found[2].double(), expected[2], rtol=1e-4)
        assert found[3:5].isnan().all()
        x[5, 6] = 0
        assert torch.allclose(found[5].double(), exactly(x[5:], matrix)[0][0], rtol=1e-6, atol=1e-9)


def test_packed_bytes_are_those_of_the_layout(own: NativeProducts) -> None:
    for layout in LAYOUTS:
        for each in (own, evolve(own, to=torch.bfloat16)):
            panels = each.pack_steps(random_matrix(layout, 64, 512)).panels
            assert panels.numel() * 8 == layout.bits * 64 * 512


def test_what_does_not_fit_is_refused(own: NativeProducts) -> None:
    matrix = random_matrix(StepLayout("int8", 32), 40, 96)
    weight = own.pack_steps(matrix)
    with pytest.raises(ValueError, match="whole groups"):
        own.pack_steps(evolve(matrix, layout=StepLayout("int8", 64)))
    with pytest.raises(ValueError, match="rows of 64 numbers"):
        own.multiply_packed(torch.zeros(1, 64), weight)
    with pytest.raises(ValueError, match="must be alike"):
        own.multiply_packed(torch.zeros(1, 96), weight, own.pack_steps(random_matrix(StepLayout("int4", 32), 40, 96)))
    with pytest.raises(ValueError, match="outputs of 2 x 40"):
        own.multiply_packed(torch.zeros(2, 96), weight, out=torch.empty(2, 41))
    brains = evolve(own, to=torch.bfloat16)
    with pytest.raises(TypeError, match=r"rows of torch.float32 with a weight for those of bfloat16"):
        brains.multiply_packed(torch.zeros(1, 96), brains.pack_steps(matrix))


@pytest.mark.parametrize("name", ["steps", "scale", "inner", "least", "own"])
def test_a_matrix_whose_tensors_are_not_its_layouts_is_not_read(own: NativeProducts, name: str) -> None:
    matrix = random_matrix(LAYOUTS[2], 40, 512)
    tensor = getattr(matrix, name)
    for wrong in (tensor[:-1], tensor[:, :-1], tensor.double(), None):
        if name != "steps" or (wrong is not None and wrong.shape == tensor.shape):
            with pytest.raises((TypeError, ValueError), match=f"{name} of a packed weight"):
                own.pack_steps(evolve(matrix, **{name: wrong}))
    with pytest.raises(TypeError, match=r"own of a packed weight .* unexpected"):
        own.pack_steps(evolve(random_matrix(LAYOUTS[0], 40, 512), own=matrix.own))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_is_multiplied_as_the_gguf_package_unpacks_it(
    own: NativeProducts, tmp_path: Any, kind: Kind
) -> None:
    count, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 40, 512
    blocks, _ = random_blocks("blk.0.x", np.zeros((rows, columns), np.float32), kind)
    found = UNPACK[kind.name](torch.from_numpy(blocks.reshape(-1, size).copy()))
    matrix = found.map_tensors(lambda one: one.reshape(rows, columns // count * one.shape[1]))
    wanted = torch.from_numpy(gguf.dequantize(blocks, kind).astype(np.float32)).view(rows, columns)
    assert torch.equal(matrix.unpack(torch.float32), wanted)
    x = torch.randn(4, columns, generator=make_generator(3))
    product = own.multiply_packed(x, own.pack_steps(matrix))
    _, terms = exactly(x, matrix)
    assert float(((product - x.double() @ wanted.double().T).abs() / terms).max()) < 2**-22


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    save_model(folder, "qwen3", **WIDE)
    return folder


def checkpoints(plain: Any, folder: Any) -> list[Checkpoint]:
    """Return checkpoints of a mix, of K types, of a folder, and packed at load."""
    found = [write_gguf(folder / "mix.gguf", plain, Kind.Q4_0, pack=mixed)]
    found.append(write_gguf(folder / "q4_k.gguf", plain, Kind.Q4_K, pack=random_blocks))
    quantise(plain, folder / "awq", "awq")
    found.append(folder / "awq")
    return [*(Checkpoint.open(path) for path in found), Checkpoint.open(plain).with_quantisation(4)]


def test_a_shard_of_packed_weights_computes_what_they_stand_for_and_takes_their_bytes(
    plain: Any, tmp_path: Any, installed: None
) -> None:
    tokens = tokens_of(40)
    for checkpoint in checkpoints(plain, tmp_path):
        shape: dict[str, Any] = {"slots": 1, "capacity": 256, "dtype": torch.float32}
        ours = DenseShard(checkpoint.config, checkpoint, CpuKernels(torch.float32), ShardPlacement(**shape))
        theirs = DenseShard(
            checkpoint.config, checkpoint, CpuKernels(torch.float32, own=False), ShardPlacement(**shape)
        )
        logits = run_in_pieces(ours, tokens, [(64, 40)])
        assert torch.allclose(logits, run_in_pieces(theirs, tokens, [(64, 40)]), atol=2e-4, rtol=1e-3)
        assert torch.equal(logits.argmax(1), run_in_pieces(theirs, tokens, [(64, 40)]).argmax(1))
        layouts = {name: layout for name, layout in checkpoint.layouts.items() if "embed" not in name}
        assert layouts
        bits = sum(layout.bits * np.prod(checkpoint.tensors[name].shape) for name, layout in layouts.items())
        left = sum(np.prod(entry.shape) for name, entry in checkpoint.tensors.items() if name not in layouts)
        assert ours.memory()["weights"] < 1.1 * bits / 8 + 8 * left + 65536
        ours.close()
        theirs.close()


def test_what_packed_weights_take_is_reckoned_before_they_are_read(plain: Any, tmp_path: Any, installed: None) -> None:
    """Weights count as they are packed. Where the plan has a part of a weight unpacked, that weight counts as the
    numbers that it stands for.
    """
    dtype, host = torch.bfloat16, torch.device("cpu")
    for checkpoint in checkpoints(plain, tmp_path):
        config, layouts = checkpoint.config, checkpoint.layouts
        listed = config.products((4,), capacity=256, dtype=dtype, threads=1, layouts=layouts)
        without = min(listed.packed, key=lambda one: one.outputs)
        plans = [
            ProductPlan(
                steps=(),
                threads=(1, 1),
                weights=tuple(ServedWeight(one, NATIVE, (4,), 4) for one in listed.weights),
                heads=tuple(ServedHeads(one, NATIVE, (4,), 256) for one in listed.heads),
                packed=tuple(ServedWeight(one, PACKED, (4,), 4) for one in listed.packed if one not in left_out),
            )
            for left_out in ((), (without,), listed.packed)
        ]
        held = list[int]()
        for plan in plans:
            kernels = CpuKernels(dtype).with_plan(plan)
            shard = DenseShard(
                config, checkpoint.with_dtype(dtype), kernels, ShardPlacement(dtype=dtype, slots=1, capacity=256)
            )
            held.append(shard.memory()["weights"])
            shard.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.loading.memory_estimate.choose_itemsize", lambda *_: dtype.itemsize)
            reckoned = [
                estimate_weights(config, dtype, host, range(config.num_layers), layouts, proven=plan) for plan in plans
            ]
            expected = estimate_weights(config, dtype, host, range(config.num_layers), layouts)
        assert reckoned == pytest.approx(held, rel=0.01)
        assert held[0] < held[1] < held[2]
        kept = [keeps_packed(listed, dtype, layout) for layout in layouts.values()]
        assert len(set(kept)) == 1
        assert expected == (reckoned[0] if kept[0] else reckoned[2])


def test_packed_products_are_proven_and_serve_with_the_same_bits_in_any_pieces(
    plain: Any, tmp_path: Any, installed: None
) -> None:
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "mix.gguf", plain, Kind.Q4_0, pack=mixed))
    checkpoint = checkpoint.with_dtype(torch.bfloat16)
    listed = checkpoint.config.products(
        BUCKETS,
        capacity=512,
        dtype=torch.bfloat16,
        threads=torch.get_num_threads(),
        layouts=checkpoint.layouts,
        memory=0,
    )
    assert listed.packed
    assert not listed.unpacked
    proof = CpuKernels(torch.bfloat16).prove(listed)
    assert proof.plan is not None
    assert {served.weight for served in proof.plan.packed} == set(listed.packed)
    assert {served.way for served in proof.plan.packed} == {PACKED}
    without = evolve(proof.plan, packed=())
    assert proof.plan.bit_signature() != without.bit_signature()
    kernels = CpuKernels(torch.bfloat16).with_plan(proof.plan)
    shard = DenseShard(
        checkpoint.config,
        checkpoint,
        kernels,
        ShardPlacement(dtype=torch.bfloat16, slots=1, capacity=512, buckets=BUCKETS),
    )
    tokens = tokens_of(90)
    whole = run(shard, 256, (0, 0, tokens))
    for pieces in ([(4, 3)], [(16, 16)], [(64, 50), (4, 1)]):
        assert torch.equal(run_in_pieces(shard, tokens, pieces), whole)
    unpacked = DenseShard(
        checkpoint.config,
        checkpoint,
        CpuKernels(torch.bfloat16).with_plan(without),
        ShardPlacement(dtype=torch.bfloat16, slots=1, capacity=512, buckets=BUCKETS),
    )
    assert unpacked.memory()["weights"] > 1.5 * shard.memory()["weights"]
    assert (run(unpacked, 256, (0, 0, tokens)) - whole).abs().max() < 0.1 * whole.abs().max()
    shard.close()
    unpacked.close()


def test_a_row_count_that_is_not_proven_is_refused(installed: None) -> None:
    matrix = random_matrix(StepLayout("int8", 32), 64, 64)
    kernels = CpuKernels(torch.float32)
    weight = kernels.pack(StackedWeight((matrix,), torch.float32, torch.device("cpu")))
    assert isinstance(weight, CpuStack)
    assert kernels.linear(torch.ones(3, 64), weight).shape == (3, 64)
    assert count_bytes(weight) == 64 * 64 * 8.5 / 8
    with pytest.raises(UnprovenProductError, match="3 rows"):
        kernels.linear(torch.ones(3, 64), evolve(weight, steps=frozenset({4})))


def test_parts_that_are_packed_otherwise_stand_one_below_the_other(installed: None) -> None:
    one, two = random_matrix(StepLayout("int8", 32), 40, 64, 1), random_matrix(StepLayout("int4", 32), 24, 64, 2)
    plain = torch.randn(8, 64)
    kernels = CpuKernels(torch.float32)
    stack = StackedWeight((one, one, plain, two), torch.float32, torch.device("cpu"))
    weight, x = kernels.pack(stack), torch.randn(4, 64)
    assert isinstance(weight, CpuStack)
    assert len(weight.parts) == 3
    assert torch.allclose(kernels.linear(x, weight), x @ stack.unpack().T, atol=1e-4)
