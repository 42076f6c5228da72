"""Products in FP8 on Hopper: the bits of a row, however many rows there are, and what is multiplied in this way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StackedWeight, StepLayout
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import FAMILY, Qwen3Config
from adapters.models.kernels.cuda_capability import CudaCapability, read_capability
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights, random_matrix

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)
triton_packed = pytest.importorskip("adapters.models.kernels.cuda.packed")
fp8_products = pytest.importorskip("adapters.models.kernels.cuda.fp8.fp8_products")
NarrowTile = fp8_products.NarrowTile

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
KEPT = StepLayout("e4m3", 128, scale="float32")
ROUNDED = evolve(KEPT, rounds_rows=True)
SHAPES = ((256, 384), (640, 1280), (1024, 4096))
ROWS = (1, 2, 3, 4, 7, 8, 9, 16, 32, 50, 64, 65, 128, 129, 256, 1000)
MOST = 1500

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.cuda.is_available() and not read_capability(DEVICE).has_hopper_kernels,
        reason="these are Hopper's kernels",
    ),
]


@pytest.fixture
def kernels() -> Any:
    made = triton_cuda.TritonKernels(DEVICE)
    made.graphs.enabled = False
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def draw(count: int, columns: int, *, seed: int = 1) -> Tensor:
    """Draw rows whose numbers have very different sizes, so that another order of a sum is another sum."""
    generator = make_generator(seed, DEVICE)
    sizes = torch.randint(-8, 9, (count, columns), generator=generator, device=DEVICE)
    return (torch.randn(count, columns, generator=generator, device=DEVICE) * sizes.float().exp2()).to(BF16)


def stack_of(*parts: PackedMatrix | Tensor) -> StackedWeight:
    return StackedWeight(parts, BF16, DEVICE)


def compute_sums(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return the sums of rounded rows in float64."""
    codes, scales = fp8_products.quantise_rows(x, None)
    rows = codes.double().view(len(x), -1, 128) * scales[:, : len(x)].T.double()[..., None]
    weight = matrix.step_values().double().view(matrix.shape[0], -1, 128) * matrix.scale.double()[..., None]
    return rows.view(len(x), -1) @ weight.view(matrix.shape[0], -1).T


@pytest.mark.parametrize("columns", [128, 4096, 12288])
def test_rows_are_rounded_as_torch_rounds_them(columns):
    x = draw(37, columns)
    x[5] = 0
    codes, scales = fp8_products.quantise_rows(x, None)
    groups = x.float().view(len(x), -1, 128)
    most = groups.abs().amax(2).clamp_min(1e-10)
    expected = (groups * (torch.full_like(most, 448) / most)[..., None]).to(torch.float8_e4m3fn)
    assert same_bits(codes.view(groups.shape), expected)
    assert torch.equal(scales[:, : len(x)].T, most * (1 / torch.tensor(448.0, device=DEVICE)))


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_a_row_has_the_same_bits_however_many_rows_there_are(kernels, outputs, columns):
    matrices = [random_matrix((outputs, columns), ROUNDED, name, DEVICE) for name in ("gate", "up")]
    one, both = kernels.pack(stack_of(matrices[0])), kernels.pack_gated(stack_of(*matrices))
    assert [type(part) for weight in (one, both) for part in weight.parts] == [fp8_products.CudaFp8Matrix] * 2
    x = draw(MOST, columns)
    expected, gated = kernels.linear(x, one), kernels.gated_linear(x, both)
    sums = [compute_sums(x, matrix) for matrix in matrices]
    size = sums[0].norm() / sums[0].numel() ** 0.5
    torch.testing.assert_close(expected.double(), sums[0], rtol=0.01, atol=0.01 * float(size))
    gate, up = (one.to(BF16).float() for one in sums)
    near = (torch.nn.functional.silu(gate) * up - gated.float()).norm() / gated.float().norm()
    assert near < 0.01
    for count in ROWS:
        for first in {0, min(37, MOST - count)}:
            rows = slice(first, first + count)
            assert same_bits(kernels.linear(x[rows].contiguous(), one), expected[rows]), count
            assert same_bits(kernels.gated_linear(x[rows].contiguous(), both), gated[rows]), count


@pytest.mark.parametrize("gated", [0, 1])
def test_every_tile_has_the_same_bits(kernels, gated):
    outputs, columns = 512, 2048
    traits = kernels.traits
    products = fp8_products.Fp8Products(DEVICE, traits.processors, traits.shared, kernels.pdl, hopper=True)
    gate, up = (random_matrix((outputs, columns), ROUNDED, name, DEVICE) for name in ("gate", "up"))
    weight = products.pack_gated(gate, up, BF16) if gated else products.pack(gate, BF16)
    x = draw(300, columns)
    codes, scales = fp8_products.quantise_rows(x, kernels.pdl)
    expected = torch.empty(len(x), outputs, dtype=BF16, device=DEVICE)
    products.multiply_wide(codes, scales, weight, expected, gated=gated)
    for processors in (1, 3, 1000):  # more or fewer programs, and tiles of other sizes
        out = torch.full_like(expected, float("nan"))
        evolve(products, processors=processors).multiply_wide(codes, scales, weight, out, gated=gated)
        assert same_bits(out, expected)
    for groups, (at_once, stages) in itertools.product((1,) if gated else (1, 2), ((1, 3), (2, 2), (4, 1))):
        for rows in (8 // groups, 32):
            out = torch.full_like(expected, float("nan"))
            tile = NarrowTile(rows, at_once, groups, stages)
            products.multiply_narrow(codes, scales, weight, out, tile, gated=gated)
            assert same_bits(out, expected), tile
        tile = NarrowTile(8 // groups, at_once, groups, stages)
        for row in (0, 7, 299):
            one = torch.full_like(expected[:1], float("nan"))
            products.multiply_row(x[row : row + 1], weight, one, tile, gated=gated)
            assert same_bits(one, expected[row : row + 1]), tile


def test_a_row_that_is_no_number_leaves_the_others_alone(kernels):
    weight = kernels.pack(stack_of(random_matrix((256, 512), ROUNDED, "w", DEVICE)))
    x = draw(12, 512)
    expected = kernels.linear(x, weight)
    x[3] = float("nan")
    found = kernels.linear(x, weight)
    assert same_bits(torch.cat((found[:3], found[4:])), torch.cat((expected[:3], expected[4:])))


def test_what_is_in_no_such_blocks_is_multiplied_as_ever(kernels):
    whole = random_matrix((256, 512), ROUNDED, "w", DEVICE)
    uneven = evolve(whole, scale=whole.scale * torch.rand_like(whole.scale))
    short = random_matrix((192, 512), ROUNDED, "w", DEVICE)
    for matrix in (uneven, short, evolve(whole, layout=KEPT)):
        (part,) = kernels.pack(stack_of(matrix)).parts
        assert isinstance(part, triton_packed.CudaPackedMatrix)
    small = triton_cuda.TritonKernels(DEVICE, traits=evolve(kernels.traits, capability=CudaCapability(8, 9)))
    (part,) = small.pack(stack_of(whole)).parts
    assert isinstance(part, triton_packed.CudaPackedMatrix)


def test_parts_beside_others_have_their_own_columns(kernels):
    plain = draw(48, 512)
    stack = stack_of(random_matrix((256, 512), ROUNDED, "q", DEVICE), plain)
    weight, x = kernels.pack(stack), draw(200, 512)
    expected = kernels.linear(x, weight)
    own = kernels.linear(x, kernels.pack(stack_of(stack.parts[0])))
    assert same_bits(expected[:, :256], own)
    for count in (1, 16, 64):
        assert same_bits(kernels.linear(x[:count].contiguous(), weight), expected[:count])


CONFIG = Qwen3Config(4096, 512, 1280, 3, 8, 2, 64, 2048, 1e6, tie_word_embeddings=True)
BUCKETS = (1, 4, 16, 64, 512)
LENGTH = 400


def layouts_of(layout: StepLayout) -> dict[str, StepLayout]:
    return {name: layout for name in CONFIG.tensors() if name.endswith("_proj.weight")}


class KeptRows:
    """The same weights, whose rows of x are kept."""

    def __init__(self, weights: RandomWeights) -> None:
        self.weights = weights
        self.read = weights.read

    def find_layout(self, name: str) -> StepLayout | None:
        return None if self.weights.find_layout(name) is None else KEPT

    def read_packed(self, name: str) -> PackedMatrix:
        return evolve(self.weights.read_packed(name), layout=KEPT)


def shard_of(weights: RandomWeights | KeptRows) -> DenseShard:
    how: dict[str, Any] = {"slots": 2, "capacity": 1024, "buckets": BUCKETS}
    return DenseShard(
        CONFIG, weights, triton_cuda.TritonKernels(DEVICE), ShardPlacement(device=DEVICE, dtype=BF16, **how)
    )


def compute_hidden(shard: DenseShard, tokens: Tensor, bucket: int) -> Tensor:
    """Return hidden rows, computed as many at a time as the bucket has."""
    found = list[Tensor]()
    for at in range(0, len(tokens), bucket):
        part = tokens[at : at + bucket]
        found.append(shard.forward(Step((Segment(0, at, len(part)),), bucket), part).hidden[: len(part)].clone())
    return torch.cat(found)


def test_a_shard_has_the_same_bits_however_rows_were_computed():
    weights = RandomWeights(CONFIG, 1, DEVICE, BF16, layouts=layouts_of(ROUNDED))
    ours, before = shard_of(weights), shard_of(KeptRows(weights))
    tokens = torch.randint(0, CONFIG.vocab_size, (LENGTH,), generator=make_generator(2))
    whole = compute_hidden(ours, tokens, 512)
    for bucket in BUCKETS[:-1]:
        assert same_bits(compute_hidden(ours, tokens[: 16 * bucket], bucket), whole[: 16 * bucket])
    other = compute_hidden(before, tokens, 512)
    assert 0 < (whole.float() - other.float()).norm() / other.float().norm() < 0.5
    assert ours.memory()["weights"] < 1.01 * before.memory()["weights"]
    ours.close()
    before.close()


def test_the_probe_tells_these_layers_from_those_whose_rows_are_kept():
    how: dict[str, Any] = {"device": DEVICE, "dtype": BF16, "chunk": 512, "capacity": 1024}
    kernels = triton_cuda.TritonKernels(DEVICE)
    found = [probe(FAMILY, CONFIG, kernels, ProbeShape(**how, layouts=layouts_of(one))) for one in (KEPT, ROUNDED)]
    assert [one.mode for one in found] == ["buckets"] * 2
    assert [one.failures for one in found] == [()] * 2
    assert found[0].numerics_class != found[1].numerics_class
