"""Packed weights on CUDA: the bits of products in pieces with what they stand for, however many rows there are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StackedWeight, StepLayout
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import FAMILY, Qwen3Config
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.offload import count_bytes
from adapters.models.kernels.proof.cancelling import make_cancelling, make_cancelling_packed
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights, random_matrix
from adapters.models.open_checkpoint import DECIDING
from tests.models import hybrids
from tests.models.kernels.cuda_numbers import unpack_for_cuda

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)
triton_packed = pytest.importorskip("adapters.models.kernels.cuda.packed")
triton_ahead = pytest.importorskip("adapters.models.kernels.cuda.packed_ahead")
few_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.few_rows")
many_rows = pytest.importorskip("adapters.models.kernels.cuda.packing.many_rows")

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
Q4_K = StepLayout("uint4", 32, per=8, inner=True, least="own")
Q6_K = StepLayout("int8", 16, per=16, inner=True)
SHORT = StepLayout("e4m3", 32, scale="float32")  # which no kernel is for
LAYOUTS = (
    Q4_K,
    Q6_K,
    StepLayout("int8", 32, per=8, inner=True, least="own"),
    StepLayout("int8", 32),
    StepLayout("int4", 32),
    StepLayout("iq4", 32),
    StepLayout("iq4", 32, per=8, inner=True),
    StepLayout("int4", 64, scale="bfloat16"),
    StepLayout("uint4", 16, least="scale"),
    StepLayout("uint4", 128, least="scale"),
    StepLayout("int8", 64, scale="bfloat16", least="scale"),
    StepLayout("int8", 128, scale="float32"),
    StepLayout("e4m3", 128, scale="float32"),
    StepLayout("e4m3", 64, scale="bfloat16"),
)
ROWS = (1, 4, 7, 8, 16, 32, 50, 64, 128, 129, 256, 2048)


@pytest.fixture
def kernels() -> Any:
    made = triton_cuda.TritonKernels(DEVICE)
    made.graphs.enabled = False
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def inputs(count: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, columns, device=DEVICE, generator=make_generator(1, DEVICE)).to(dtype)


def multiply_in_pieces(kernels: Any, x: Tensor, plain: Tensor, part: Any, *, gated: bool = False) -> Tensor:
    """The product with an unpacked weight, added up as that with the packed one."""
    out = x.new_empty(len(x), len(plain) // (1 + gated))
    kernels.products.multiply(x, plain, out, gated=gated, piece=part.piece if part.pieces > 1 else 0)
    return out


def stack_of(*parts: PackedMatrix | Tensor, dtype: torch.dtype = torch.bfloat16) -> StackedWeight:
    return StackedWeight(parts, dtype, DEVICE)


@pytest.mark.parametrize("few", [0, triton_packed.FEW], ids=["one chain", "pieces"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_packed_product_has_the_bits_of_the_unpacked_one_at_every_row_count(kernels, monkeypatch, layout, dtype, few):
    monkeypatch.setattr(triton_packed, "FEW", few)
    columns = 1280 if layout.span > 64 else 832  # the last: no whole number of a lane's words
    matrices = [random_matrix((72, columns), layout, name) for name in ("gate", "up")]
    one = kernels.pack(stack_of(matrices[0], dtype=dtype))
    both = kernels.pack_gated(stack_of(*matrices, dtype=dtype))
    assert isinstance(one, triton_packed.CudaStack)
    assert isinstance(both, triton_packed.CudaStack)
    plain = [unpack_for_cuda(matrix, dtype).to(DEVICE) for matrix in matrices]
    x = inputs(max(ROWS), columns, dtype)
    expected = multiply_in_pieces(kernels, x, plain[0], one.parts[0])
    pair = kernels.pack_gated(torch.cat(plain)).weight
    gated = multiply_in_pieces(kernels, x, pair, both.parts[0], gated=True)
    for count in ROWS:
        for first in {0, min(37, max(ROWS) - count)}:
            rows = slice(first, first + count)
            assert same_bits(kernels.linear(x[rows].contiguous(), one), expected[rows])
            assert same_bits(kernels.gated_linear(x[rows].contiguous(), both), gated[rows])
    assert count_bytes(one) < 1.1 * layout.bits / 8 * 72 * columns + 72 * 64
    assert same_bits(expected, kernels.linear(x, kernels.pack(plain[0]))) == (few == 0)


@pytest.mark.parametrize("few", [0, triton_packed.FEW], ids=["one chain", "pieces"])
@pytest.mark.parametrize("columns", [4096, 1280])
@pytest.mark.parametrize("layout", [Q4_K, Q6_K, LAYOUTS[3], LAYOUTS[9], LAYOUTS[12]], ids=str)
def test_sums_that_cancel_have_the_same_bits_with_every_tile(kernels, monkeypatch, layout, columns, few):
    monkeypatch.setattr(triton_packed, "FEW", few)
    x, matrix = make_cancelling_packed((64, 200, columns), layout, torch.bfloat16)
    x = x.to(DEVICE)
    (part,) = kernels.pack(stack_of(matrix)).parts
    expected = multiply_in_pieces(kernels, x, unpack_for_cuda(matrix, torch.bfloat16).to(DEVICE), part)
    rooms = (99 << 10, kernels.traits.shared)  # the smallest GPUs', and this one's
    for count, shared in itertools.product((1, 4, 16, 32, 64), rooms):
        # A device of few processors, on which three programs at a time save a round, and this one.
        for processors in (5, kernels.traits.processors):
            tile = few_rows.choose_packed_tile(count, part, processors, shared)
            out = torch.full_like(expected[:count], float("nan"))
            few_rows.multiply_narrow(x[:count], part, out, tile, gated=False, pdl=kernels.pdl)
            assert same_bits(out, expected[:count])
    if not kernels.traits.capability.has_hopper_kernels:
        return
    for processors in (1, kernels.traits.processors):  # a program has both tiles, or one
        out = torch.full_like(expected, float("nan"))
        many_rows.multiply_wide_ahead(x, part, out, processors, gated=False, pdl=kernels.pdl)
        assert same_bits(out, expected)
    tile = triton_ahead.choose_row_tile(x[:1], part, kernels.traits.processors, kernels.traits.shared)
    every = {2, tile.stages} if tile and tile.stages else {0} if tile else ()
    for stages, row in itertools.product(every, (0, 7, 63)):
        out = torch.full_like(expected[:1], float("nan"))
        single = evolve(tile, stages=stages)
        triton_ahead.multiply_row(x[row : row + 1], part, out, single, gated=False, pdl=kernels.pdl)
        assert same_bits(out, expected[row : row + 1])
    for count in (1, 4, 7, 8) if triton_ahead.comes_ahead(1, part, torch.bfloat16) else ():
        out = torch.full_like(expected[:count], float("nan"))
        triton_ahead.multiply_ahead(x[:count], part, out, gated=False, pdl=kernels.pdl)
        assert same_bits(out, expected[:count])


@pytest.mark.parametrize("columns", [4096, 1280])
def test_pieces_add_up_alike_where_there_is_no_kernel_of_hopper(kernels, columns):
    x, w = make_cancelling(300, 200, columns, torch.bfloat16)
    found = [torch.empty(300, 200, dtype=x.dtype, device=DEVICE) for _ in range(2)]
    for out, hopper in zip(found, (kernels.products.hopper, False), strict=True):
        kernels.products.hopper = hopper
        kernels.products.multiply(x.to(DEVICE), w.to(DEVICE), out, gated=False, piece=-(-columns // 1024) * 128)
    assert same_bits(*found)


def test_parts_that_are_packed_otherwise_or_not_at_all_stand_one_below_the_other(kernels):
    plain = inputs(40, 512)
    parts = (random_matrix((64, 512), Q4_K, "q"), random_matrix((24, 512), Q4_K, "k"))
    parts = (*parts, plain, random_matrix((24, 512), SHORT, "v"), random_matrix((30, 512), Q6_K, "g"))
    stack, x = stack_of(*parts), inputs(300, 512)
    weight = kernels.pack(stack)
    assert [type(part).__name__ for part in weight.parts] == ["CudaPackedMatrix", "CudaWeight", "CudaPackedMatrix"]
    assert weight.widths == (88, 64, 30)
    expected = kernels.linear(x, weight)
    close = kernels.linear(x, kernels.pack(stack.unpack()))
    torch.testing.assert_close(expected, close, rtol=0.02, atol=0.02)
    for count in (1, 32, 64):
        assert same_bits(kernels.linear(x[:count].contiguous(), weight), expected[:count])


def test_what_has_no_kernel_is_unpacked(kernels):
    matrix = random_matrix((64, 256), Q4_K, "q")
    assert isinstance(kernels.pack(stack_of(matrix, dtype=torch.float32)), triton_cuda.CudaWeight)
    assert isinstance(kernels.pack(stack_of(random_matrix((64, 256), SHORT, "q"))), triton_cuda.CudaWeight)
    other = random_matrix((64, 256), Q6_K, "q")
    assert isinstance(kernels.pack_gated(stack_of(matrix, other)), triton_cuda.CudaWeight)
    eight = random_matrix((64, 256), LAYOUTS[-2], "q")
    assert isinstance(kernels.pack(stack_of(eight)), triton_packed.CudaStack)
    large = evolve(eight, scale=eight.scale + 1e6)
    assert isinstance(kernels.pack(stack_of(large)), triton_cuda.CudaWeight)


def test_many_rows_go_through_a_large_weight_piece_by_piece(kernels):
    matrix = random_matrix((40_040, 2048), Q4_K, "head", DEVICE)
    assert triton_packed.SCRATCH_BYTES < 40_040 * 2048 * 2
    one, two = kernels.pack(stack_of(matrix)), kernels.pack_gated(stack_of(matrix, matrix))
    plain, x = unpack_for_cuda(matrix, torch.bfloat16), inputs(300, 2048)
    assert one.parts[0].pieces == 1
    assert same_bits(kernels.linear(x, one), kernels.linear(x, kernels.pack(plain)))
    assert same_bits(
        kernels.gated_linear(x, two), kernels.gated_linear(x, kernels.pack_gated(torch.cat((plain, plain))))
    )


@pytest.mark.parametrize(("outputs", "columns"), [(34_816, 5120), (16_384, 5120), (14_336, 5120)], ids=str)
def test_one_row_of_a_large_weight_has_the_bits_of_many_rows(kernels, outputs, columns):
    """Scales are made before the row comes: of all steps, of some of them at a time, or of none."""
    halves = tuple(random_matrix((outputs // 2, columns), Q4_K, name, DEVICE) for name in ("gate", "up"))
    one, two = kernels.pack(stack_of(*halves)), kernels.pack_gated(stack_of(*halves))
    x = inputs(80, columns)
    expected, gated = kernels.linear(x, one), kernels.gated_linear(x, two)
    for row in (0, 7, 79):
        assert same_bits(kernels.linear(x[row : row + 1].contiguous(), one), expected[row : row + 1])
        assert same_bits(kernels.gated_linear(x[row : row + 1].contiguous(), two), gated[row : row + 1])


CONFIG = Qwen3Config(4096, 512, 1280, 3, 8, 2, 64, 2048, 1e6, tie_word_embeddings=True)
HYBRID = hybrids.config((2, 4, 64, 64), 4096, 512, 1280, 3, 8, 2, 64, 2048, 1e6, kinds="lfl", rotated=16)
BUCKETS = (4, 16, 64, 512)
LENGTH = 400


def mixed(config: ModelConfig) -> dict[str, StepLayout]:
    """Return the layouts of a mix as files have it: some matrices of some layers have more bits, and the head is the
    embedding's.
    """
    matrices = (name for name, shape in config.tensors().items() if len(shape) == 2)
    found = {name: Q4_K for name in matrices if name.split(".")[-2] not in DECIDING}
    found |= {name: Q6_K for name in found if "v_proj" in name and ".1." not in name}
    return found | {"model.embed_tokens.weight": Q6_K, "model.layers.2.mlp.down_proj.weight": SHORT}


class Unpacked:
    """The same numbers, of weights that are not packed."""

    def __init__(self, weights: RandomWeights) -> None:
        self.weights = weights

    def read(self, name: str) -> Tensor:
        packed = self.weights.find_layout(name) is not None and "embed" not in name
        return self.weights.read_packed(name).unpack(torch.bfloat16) if packed else self.weights.read(name)


def shard_of(weights: Any, config: ModelConfig = CONFIG) -> DenseShard:
    kernels = triton_cuda.TritonKernels(DEVICE)
    how: dict[str, Any] = {"slots": 2, "capacity": 1024, "buckets": BUCKETS, "aux_layers": (config.num_layers - 1,)}
    return DenseShard(config, weights, kernels, ShardPlacement(device=DEVICE, dtype=torch.bfloat16, **how))


def in_pieces(shard: DenseShard, tokens: Tensor, bucket: int, count: int, *, slot: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden rows, computed so many at a time, and the logits of the last of them."""
    found, logits = list[Tensor](), torch.empty(0)
    for at in range(0, len(tokens), count):
        part = tokens[at : at + count]
        step = Step((Segment(slot, at, len(part)),), bucket)
        hidden = shard.forward(step, part).hidden
        found.append(hidden[: len(part)].clone())
        if bucket <= 64:
            logits = shard.logits(step, hidden)[len(part) - 1].clone()
    return torch.cat(found), logits


def are_near(a: Tensor, b: Tensor) -> bool:
    return bool((a.float() - b.float()).norm() < 0.05 * b.float().norm())


def test_a_shard_of_packed_weights_has_the_same_bits_however_rows_were_computed():
    weights = RandomWeights(CONFIG, 1, DEVICE, torch.bfloat16, layouts=mixed(CONFIG))
    weights = evolve(weights, layouts={name: one for name, one in weights.layouts.items() if "embed" not in name})
    ours, theirs = shard_of(weights), shard_of(Unpacked(weights))
    tokens = torch.randint(0, CONFIG.vocab_size, (LENGTH,), generator=make_generator(2))
    whole, _ = in_pieces(ours, tokens, 512, LENGTH)
    _, last = in_pieces(ours, tokens, 64, 64)
    unpacked, _ = in_pieces(theirs, tokens, 512, LENGTH)
    assert are_near(whole, unpacked)
    for bucket, count in ((512, 333), (64, 64), (64, 37), (16, 16), (4, 4)):
        hidden, logits = in_pieces(ours, tokens, bucket, count)
        assert same_bits(hidden, whole)
        assert bucket > 64 or same_bits(logits, last)
    assert ours.memory()["weights"] < 0.6 * theirs.memory()["weights"]
    ours.close()
    theirs.close()


def test_a_hybrid_of_packed_weights_has_the_same_bits_however_rows_were_computed():
    layouts = {name: one for name, one in mixed(HYBRID).items() if "embed" not in name}
    weights = RandomWeights(HYBRID, 1, DEVICE, torch.bfloat16, layouts=layouts)
    ours, theirs = shard_of(weights, HYBRID), shard_of(Unpacked(weights), HYBRID)
    tokens = torch.randint(0, HYBRID.vocab_size, (LENGTH,), generator=make_generator(2))
    expected = hybrids.computed(ours, tokens, hybrids.CHUNKS)
    assert are_near(expected, hybrids.computed(theirs, tokens, hybrids.CHUNKS))
    for pieces in ([(64, 64)], [(64, 37), (16, 16), (4, 1)]):
        assert same_bits(hybrids.computed(ours, tokens, pieces), expected)
    assert ours.memory()["weights"] < 0.6 * theirs.memory()["weights"]
    ours.close()
    theirs.close()


def test_the_probe_finds_that_packed_layers_keep_their_bits_and_tells_them_from_others():
    how: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16, "chunk": 512, "capacity": 1024}
    kernels = triton_cuda.TritonKernels(DEVICE)
    packed = probe(FAMILY, CONFIG, kernels, ProbeShape(**how, layouts=mixed(CONFIG)))
    assert packed.mode == "buckets"
    assert packed.failures == ()
    plain = probe(FAMILY, CONFIG, kernels, ProbeShape(**how))
    assert packed.spans == 2 * plain.spans  # with values in 4 bits, and in 8
    assert packed.numerics_class != plain.numerics_class


@pytest.mark.parametrize("device", [DEVICE, torch.device("cuda", 0)], ids=str)
def test_a_draft_beside_its_target_has_no_copy_of_the_embedding(device: torch.device):
    config = evolve(CONFIG, tie_word_embeddings=False)
    how: dict[str, Any] = {"slots": 2, "capacity": 1024, "buckets": BUCKETS, "dtype": torch.bfloat16}
    shard = DenseShard(
        config,
        RandomWeights(config, 1, DEVICE),
        triton_cuda.TritonKernels(device),
        ShardPlacement(device=device, **how),
    )
    pipeline = Pipeline((shard,))
    before = pipeline.memory()
    assert pipeline.head.embedding is shard.embedding
    assert pipeline.memory() == before
    pipeline.close()


def test_a_head_that_the_embedding_packs_is_multiplied_as_it_is_packed():
    weights = RandomWeights(CONFIG, 1, DEVICE, torch.bfloat16, layouts={"model.embed_tokens.weight": Q6_K})
    shard = shard_of(weights)
    assert isinstance(shard.output.packed, triton_packed.CudaStack)
    shard.close()
