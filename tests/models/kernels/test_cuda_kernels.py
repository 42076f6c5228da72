"""Tests of the Triton kernels: they agree with plain torch in float64, and have the same bits at every bucket and
place, with any other rows.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.models.decoder.cache.window_pages import WindowPages
from adapters.models.kernels.activations import CLAMPED, GELU, gate_halves
from adapters.models.kernels.composed_operations import add_normed
from adapters.models.kernels.cuda.tiles import fits_processors
from adapters.models.kernels.factory import build_sampling
from adapters.models.kernels.formats.row_format import RowLayout, read_row_types
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionRule
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.interfaces.row_kernels import NormedRows
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch, BlockBatch, StateBatch
from effects.ids import PAGE

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS = (4, 8, 16, 32, 64, 128, 256, 2048)
HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GEOMETRIES = [(5, 1, 64), (32, 8, 128), (4, 4, 128), (6, 2, 64), (7, 1, 128), (8, 2, 256)]


@pytest.fixture
def kernels():
    made = triton_cuda.TritonKernels(DEVICE)
    made.graphs.enabled = False
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = make_generator(seed, DEVICE)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(448, 320), (320, 832), (4096, 320), (1000, 4096), (512, 12288)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_has_the_same_bits_at_every_bucket_and_row(kernels, columns, depth, gated, dtype):
    weight = normal(columns, depth, dtype=dtype, scale=depth**-0.5)
    packed = kernels.pack_gated(weight) if gated else kernels.pack(weight)
    run = kernels.gated_linear if gated else kernels.linear
    x = normal(max(BUCKETS), depth, dtype=dtype, seed=1)
    full = run(x, packed)
    exact = x.double() @ weight.double().T
    if gated:
        exact = torch.nn.functional.silu(exact[:, : columns // 2]) * exact[:, columns // 2 :]
    assert distance(full, exact) < TOLERANCE[dtype]
    for bucket in BUCKETS:
        for first in (0, 37 if bucket < max(BUCKETS) else 0):
            assert same_bits(run(x[first : first + bucket].contiguous(), packed), full[first : first + bucket])
        alone = normal(bucket, depth, dtype=dtype, seed=2, scale=100.0)
        alone[bucket // 2] = x[5]
        assert same_bits(run(alone, packed)[bucket // 2], full[5])


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("columns", "depth"), [(448, 320), (1000, 4096), (4096, 12288), (72, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_weights_that_come_ahead_are_multiplied_as_those_that_do_not(columns, depth, gated, dtype, pdl):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper's")
    ahead, plain = triton_cuda.TritonKernels(DEVICE, pdl), triton_cuda.TritonKernels(DEVICE, pdl)
    plain.products.hopper = False  # as on every other GPU
    weight = normal(columns, depth, dtype=dtype, scale=depth**-0.5)
    for rows in (1, 4, 8, 9, 16, 32, 64, 128):
        x = normal(rows, depth, dtype=dtype, seed=rows)
        found = [
            (k.gated_linear(x, k.pack_gated(weight)) if gated else k.linear(x, k.pack(weight))) for k in (ahead, plain)
        ]
        assert same_bits(*found)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("columns", "depth"), [(5120, 320), (5104, 6144), (5120, 17408)])
def test_tiles_that_fit_the_processors_give_the_bits_of_others(columns, depth, dtype, pdl):
    ahead, plain = triton_cuda.TritonKernels(DEVICE, pdl), triton_cuda.TritonKernels(DEVICE, pdl)
    if not (ahead.products.hopper and fits_processors(512, columns, dtype, ahead.products.processors)):
        pytest.skip("a kernel of Hopper's, for 132 processors")
    plain.products.hopper = False  # as on every other GPU
    weight = normal(columns, depth, dtype=dtype, scale=depth**-0.5)
    for rows in (512, 500):
        x = normal(rows, depth, dtype=dtype, seed=rows)
        assert same_bits(*(kernels.linear(x, kernels.pack(weight)) for kernels in (ahead, plain)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 64, 128, 256])
def test_logits_are_rounded_before_they_are_written_as_float32(kernels, rows, dtype):
    depth, vocabulary = 4096, 1000
    hidden, norm = normal(rows, depth, dtype=dtype, seed=1), normal(depth, dtype=dtype, seed=2)
    head = kernels.pack(normal(vocabulary, depth, dtype=dtype, seed=3, scale=depth**-0.5))
    logits = torch.full((rows, vocabulary), float("nan"), device=DEVICE)
    kernels.write_logits(hidden, norm, 1e-6, head, logits)
    assert same_bits(logits, kernels.linear(kernels.add_norm(hidden, None, norm, 1e-6), head).float())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("columns", "depth"), [(32, 2880), (129, 2816), (8, 64), (256, 7168)])
def test_a_router_has_the_same_bits_at_every_row_count_and_on_every_device(columns, depth, dtype):
    here, elsewhere = triton_cuda.TritonKernels(DEVICE), triton_cuda.TritonKernels(DEVICE)
    elsewhere.products.hopper = False
    weight = normal(columns, depth, dtype=dtype, scale=depth**-0.5)
    packed = here.pack_router(weight)
    x = normal(max(BUCKETS), depth, dtype=dtype, seed=1)
    whole = here.linear(x, packed)
    assert distance(whole, x.double() @ weight.double().T) < TOLERANCE[dtype]
    assert same_bits(whole, elsewhere.linear(x, packed))
    for rows in (1, 3, *BUCKETS):
        for first in (0, 37 if rows < max(BUCKETS) else 0):
            part = x[first : first + rows].contiguous()
            for kernels in (here, elsewhere):
                assert same_bits(kernels.linear(part, packed), whole[first : first + rows])


def test_a_chain_of_products_that_come_ahead_ends_as_one_after_the_other(kernels):
    """Each reads what the one before wrote, and is on its processors long before that is there."""
    kernels.pdl = True
    weights = [normal(512, 512, dtype=torch.bfloat16, seed=seed, scale=0.05) for seed in range(12)]
    packed, x = [kernels.pack(weight) for weight in weights], normal(4, 512, dtype=torch.bfloat16, seed=99)
    for _ in range(20):
        chained = alone = x
        for weight in packed:
            chained = kernels.linear(chained, weight)
        for weight in packed:
            alone = kernels.linear(alone, weight)
            torch.cuda.synchronize()
        assert same_bits(chained, alone)


def test_a_weight_whose_rows_cannot_be_copied_in_bulk_is_refused(kernels):
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        kernels.pack(torch.zeros(16, 12, dtype=torch.bfloat16, device=DEVICE))


def test_a_head_size_without_a_kernel_is_refused(kernels):
    with pytest.raises(ValueError, match="head_dim 80 is not supported on CUDA"):
        CachedSequence(kernels, (4, 2, 80), torch.bfloat16, 4).in_pieces([(4, 4)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [320, 4096, 5120])
def test_norms_agree_with_plain_torch_and_do_not_see_the_bucket(kernels, width, dtype):
    residual, delta = normal(2048, width, dtype=dtype), normal(2048, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2) + 1
    full, ours = residual.clone(), residual.clone()
    normed = kernels.add_norm(full, delta, weight, 1e-6)
    expected = ReferenceKernels().add_norm(ours, delta, weight, 1e-6)
    assert same_bits(full, ours)
    assert distance(normed, expected) < TOLERANCE[dtype]
    assert same_bits(kernels.add_norm(full.clone(), None, weight, 1e-6), normed)
    for bucket in BUCKETS:
        part = residual[7 : 7 + bucket].clone()
        assert same_bits(
            kernels.add_norm(part, delta[7 : 7 + bucket].contiguous(), weight, 1e-6),
            normed[7 : 7 + bucket][: len(part)],
        )


class CachedSequence:
    """One layer's caches of three slots and the projections of a sequence that goes to one of them."""

    def __init__(
        self, kernels, geometry: tuple[int, int, int], dtype: torch.dtype, length: int, prepared: str = "norms"
    ):
        """prepared: what projected heads go through, "norms" or "bias", both or neither."""
        capacity = 2304
        self.kernels, self.dtype = kernels, dtype
        self.heads, self.kv, self.head = geometry
        self.qkv = normal(length, (self.heads + 2 * self.kv) * self.head, dtype=dtype, seed=3)
        norms = [normal(self.head, dtype=dtype, seed=seed, scale=0.1) + 2 for seed in (4, 5)]
        bias = normal(self.qkv.shape[1], dtype=dtype, seed=6)
        q_norm, k_norm = norms if "norms" in prepared else (None, None)
        self.prep = HeadPrep(bias if "bias" in prepared else None, q_norm, k_norm, 1e-6)
        angles = torch.outer(torch.arange(capacity), 1e4 ** -torch.linspace(0, 1, self.head // 2)).to(DEVICE)
        self.rope = Rope(angles.cos(), angles.sin())
        self.shape, self.pages = (3, self.kv, capacity, self.head), None
        self.clear()

    def clear(self) -> None:
        # What no row has written yet is poison: reading it must not matter.
        self.k_cache = torch.full(self.shape, float("nan"), dtype=self.dtype, device=DEVICE)
        self.v_cache = torch.full(self.shape, float("nan"), dtype=self.dtype, device=DEVICE)

    def run(self, bucket: int, segments: tuple[Segment, ...], rows: Tensor, kernels=None) -> Tensor:
        """Attention's rows for `segments`, whose projections are `qkv[rows]`."""
        kernels = kernels or self.kernels
        batch = Batch(bucket, DEVICE, pages=self.pages)
        batch.load(Step(segments, bucket), torch.zeros(len(rows), dtype=torch.int64))
        kernels.prepare_step(batch)
        qkv = normal(bucket, self.qkv.shape[1], dtype=self.dtype, seed=bucket, scale=9.0)
        qkv[: len(rows)] = self.qkv[rows]
        caches = self.k_cache, self.v_cache
        q = kernels.rotate_store(qkv, self.prep, self.rope, batch, *caches)
        out = kernels.attend(q, *caches, batch)
        assert out[: len(rows)].isfinite().all()
        return out[: len(rows)].clone()

    def in_pieces(self, pieces: list[tuple[int, int]], slot: int = 0) -> Tensor:
        """The whole sequence, cut into (bucket, rows) pieces, the last one repeated as long as needed."""
        self.clear()
        found, at, index = [], 0, 0
        while at < len(self.qkv):
            bucket, count = pieces[min(index, len(pieces) - 1)]
            count = min(count, len(self.qkv) - at)
            found.append(self.run(bucket, (Segment(slot, at, count),), torch.arange(at, at + count, device=DEVICE)))
            at, index = at + count, index + 1
        return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_has_the_same_bits_however_the_sequence_is_cut(kernels, geometry, dtype):
    sequence = CachedSequence(kernels, geometry, dtype, 1300)
    whole = sequence.in_pieces([(2048, 1300)])
    caches = sequence.k_cache[0, :, :1300].clone(), sequence.v_cache[0, :, :1300].clone()
    sequence.clear()
    reference = sequence.run(2048, (Segment(0, 0, 1300),), torch.arange(1300, device=DEVICE), ReferenceKernels())
    assert distance(whole, reference) < 2 * TOLERANCE[dtype]
    assert distance(caches[0], sequence.k_cache[0, :, :1300]) < TOLERANCE[dtype]
    assert same_bits(caches[1], sequence.v_cache[0, :, :1300])
    for pieces in (
        [(256, 256)],
        [(2048, 1000), (128, 100)],
        [(2048, 1275), (4, 1)],
        [(64, 50)],
        [(2048, 1200), (16, 16)],
    ):
        assert same_bits(sequence.in_pieces(pieces, slot=2), whole)
        assert same_bits(sequence.k_cache[2, :, :1300], caches[0])
        assert same_bits(sequence.v_cache[2, :, :1300], caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rows_in_pages_have_the_bits_of_rows_in_one_piece(kernels, geometry, dtype):
    sequence = CachedSequence(kernels, geometry, dtype, 1300)
    whole = sequence.in_pieces([(2048, 1300)], slot=1)
    rows = sequence.k_cache[1, :, :1300].clone(), sequence.v_cache[1, :, :1300].clone()
    table = torch.randperm(27, generator=make_generator(1)).view(3, 9)
    sequence.shape, sequence.pages = (27, geometry[1], PAGE, geometry[2]), table.to(torch.int32).to(DEVICE)
    for pieces in ([(2048, 1300)], [(256, 256)], [(2048, 1275), (4, 1)], [(64, 50)]):
        assert same_bits(sequence.in_pieces(pieces, slot=1), whole)
        for cache, expected in zip((sequence.k_cache, sequence.v_cache), rows, strict=True):
            found = cache[table[1].to(DEVICE)].transpose(0, 1).flatten(1, 2)
            assert same_bits(found[:, :1300], expected)
            assert found[:, 1300:].isnan().all()  # nothing else was written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", [(5, 1, 64), (32, 8, 128), (7, 1, 16)])
@pytest.mark.parametrize("prepared", ["neither", "bias", "bias and norms"])
def test_heads_of_models_without_norms_or_with_a_bias_are_those_of_plain_torch(kernels, geometry, prepared, dtype):
    sequence = CachedSequence(kernels, geometry, dtype, 300, prepared)
    whole = sequence.in_pieces([(2048, 300)])
    caches = sequence.k_cache[0, :, :300].clone(), sequence.v_cache[0, :, :300].clone()
    for pieces in ([(256, 256)], [(4, 1)], [(128, 100), (16, 9)]):
        assert same_bits(sequence.in_pieces(pieces, slot=1), whole)
        assert same_bits(sequence.k_cache[1, :, :300], caches[0])
        assert same_bits(sequence.v_cache[1, :, :300], caches[1])
    sequence.clear()
    reference = sequence.run(2048, (Segment(0, 0, 300),), torch.arange(300, device=DEVICE), ReferenceKernels())
    assert distance(whole, reference) < 2 * TOLERANCE[dtype]
    assert distance(caches[0], sequence.k_cache[0, :, :300]) < TOLERANCE[dtype]
    assert same_bits(caches[1], sequence.v_cache[0, :, :300])


@pytest.mark.parametrize("bucket", [4, 8, 64, 256])
def test_attention_does_not_see_its_neighbours(kernels, bucket):
    sequence = CachedSequence(kernels, (32, 8, 128), torch.bfloat16, 1300)
    whole = sequence.in_pieces([(2048, 1300)])
    last = torch.tensor([1299], device=DEVICE)
    for slot in (1, 2):
        sequence.k_cache[slot], sequence.v_cache[slot] = sequence.k_cache[0], sequence.v_cache[0]
    rows = torch.cat((torch.tensor([3], device=DEVICE), last, torch.arange(600, 602, device=DEVICE)))
    segments = (Segment(1, 3, 1), Segment(0, 1299, 1), Segment(2, 600, 2))
    assert same_bits(sequence.run(bucket, segments, rows), whole[rows])
    assert same_bits(sequence.run(bucket, (Segment(0, 1299, 1),), last), whole[last])


@pytest.mark.parametrize("dtype", HALF)
def test_rows_are_normed_and_added_as_by_operations_one_by_one(kernels, dtype):
    """Sums of two, factors, and as many norms of the sum as a layer needs; at every row count."""
    for width in (320, 2816, 5376):
        wide = (normal(width, dtype=torch.float32, seed=seed) + 1 for seed in range(1, 7))
        weight, other, own, *outer = wide
        rows, parallel, residual = (normal(300, width, dtype=dtype, seed=seed, scale=3.0) for seed in (7, 8, 9))
        for delta, norms in (
            (NormedRows(rows, weight), outer),
            (NormedRows(rows, weight), outer[:1]),
            (NormedRows(rows, weight, (parallel, other, own), 0.37), []),
        ):
            expected = residual.clone()
            given = evolve(delta, rows=delta.rows.clone())
            sums = add_normed(kernels.add_norm, expected, given, 1e-6, norms)
            for count in (300, 1, 4):
                part = residual[:count].clone()
                cut = None if delta.parallel is None else (parallel[:count], other, own)
                found = kernels.add_normed(part, evolve(delta, rows=rows[:count], parallel=cut), 1e-6, norms)
                assert same_bits(part, expected[:count])
                assert len(found) == len(norms)
                assert all(same_bits(one, two[:count]) for one, two in zip(found, sums, strict=True))


@pytest.mark.parametrize("dtype", HALF)
def test_a_bias_is_added_and_rounded_before_rows_are(kernels, dtype):
    residual, delta = (normal(64, 2880, dtype=dtype, seed=seed) for seed in (1, 2))
    bias, weight = normal(2880, dtype=dtype, seed=3), normal(2880, dtype=torch.float32, seed=4)
    sums, own = residual.clone(), residual.clone()
    expected = kernels.add_norm(sums, delta + bias, weight, 1e-5)
    assert same_bits(kernels.add_norm(own, delta, weight, 1e-5, bias=bias), expected)
    assert same_bits(own, sums)


@pytest.mark.parametrize("activation", [GELU, CLAMPED])
def test_a_gate_lets_through_what_torch_says_for_every_number(kernels, activation):
    """Every number of bfloat16 as a gate. Exponentials of two libraries differ in the last bit of float32."""
    gate = torch.arange(1 << 16, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    both = torch.stack((gate, normal(len(gate), dtype=torch.bfloat16)), 1)
    found = kernels.apply_gate(activation, both.clone(), None)
    exact = gate_halves(CLAMPED, both.float(), None).bfloat16()
    if activation == GELU:
        exact = torch.nn.functional.gelu(both[:, :1].double(), approximate="tanh").bfloat16() * both[:, 1:]
    bits = [one.view(torch.int16).int() for one in (found, exact)]
    apart = torch.where(bits[0] < 0, -(bits[0] & 32767), bits[0]) - torch.where(
        bits[1] < 0, -(bits[1] & 32767), bits[1]
    )
    near = exact.float().abs() > 1e-9  # the sum of 1 and tanh has no digits left below
    assert found.isfinite().equal(exact.isfinite())
    assert (apart.abs() <= 2)[near].all(), (activation, gate[(apart.abs() > 2)[:, 0]][:10])
    bias = normal(2, dtype=torch.bfloat16, seed=5)
    assert same_bits(kernels.apply_gate(activation, both, bias), kernels.apply_gate(activation, both + bias, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_gated_by_gelu_has_one_arithmetic(kernels, dtype):
    """At every row count the bits of the product and the gate one after the other."""
    weight, x = normal(448, 320, dtype=dtype, scale=0.1), normal(2048, 320, dtype=dtype, seed=1)
    packed, plain = kernels.pack_gated(weight, GELU), kernels.pack(weight)
    full = kernels.apply_gate(GELU, kernels.linear(x, plain), None)
    torch.testing.assert_close(
        full.float(), gate_halves(GELU, x.float() @ weight.float().T, None), rtol=4 * TOLERANCE[dtype], atol=1e-2
    )
    for bucket in BUCKETS:
        assert same_bits(kernels.gated_linear(x[:bucket].contiguous(), packed), full[:bucket])


def test_padded_rows_write_nothing_and_stay_finite(kernels):
    sequence = CachedSequence(kernels, (5, 1, 64), torch.bfloat16, 10)
    batch = Batch(64, DEVICE)
    batch.load(Step((Segment(1, 0, 3),), 64), torch.zeros(3, dtype=torch.int64))
    kernels.prepare_step(batch)
    qkv = normal(64, sequence.qkv.shape[1], dtype=torch.bfloat16)
    caches = sequence.k_cache, sequence.v_cache
    q = kernels.rotate_store(qkv, sequence.prep, sequence.rope, batch, *caches)
    assert kernels.attend(q, *caches, batch).isfinite().all()
    assert all(cache[1, :, :3].isfinite().all() and cache[1, :, 3:].isnan().all() for cache in caches)
    assert all(cache[slot].isnan().all() for cache in caches for slot in (0, 2))


SINKS = AttentionRule(sinks=torch.linspace(-2.0, 5.0, 16))
OF_WINDOW = WindowPages.page
AHEAD = [  # type, numbers of a head, heads of a key head, rows of a page, rule
    *(
        (dtype, head, group, page, PLAIN)
        for dtype in HALF
        for head in (64, 128)
        for group in (1, 3, 4, 8)
        for page in (0, PAGE)
    ),
    (torch.bfloat16, 64, 8, PAGE, SINKS),
    (torch.bfloat16, 64, 8, 0, evolve(SINKS, window=128)),
    (torch.bfloat16, 64, 8, OF_WINDOW, evolve(SINKS, window=128)),
    *((torch.bfloat16, 256, group, page, PLAIN) for group in (2, 6) for page in (0, PAGE)),
    (torch.bfloat16, 64, 3, OF_WINDOW, AttentionRule(300)),
    (torch.bfloat16, 128, 3, 0, AttentionRule(300)),
    (torch.bfloat16, 128, 4, OF_WINDOW, AttentionRule(1024)),
    (torch.bfloat16, 256, 1, OF_WINDOW, AttentionRule(300)),
    (torch.bfloat16, 256, 2, OF_WINDOW, AttentionRule(1024)),
    (torch.float16, 256, 2, OF_WINDOW, AttentionRule(1024)),
    (torch.float16, 64, 8, OF_WINDOW, AttentionRule(1024)),
    *((torch.bfloat16, 512, group, page, PLAIN) for group in (3, 8) for page in (0, PAGE)),
    (torch.float16, 512, 8, PAGE, PLAIN),
    (torch.bfloat16, 512, 4, OF_WINDOW, AttentionRule(300)),
]


@pytest.mark.parametrize(("dtype", "head", "group", "page", "rule"), AHEAD, ids=str)
def test_keys_that_come_ahead_are_attended_as_those_that_do_not(dtype, head, group, page, rule):
    """Contexts of every residue of tiles and splits, steps of several slots, and more work than there are programs."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper's")
    kv, slots, capacity = 2, 6, 33 * PAGE
    ahead, plain = triton_cuda.TritonKernels(DEVICE), triton_cuda.TritonKernels(DEVICE)
    plain._attention.hopper = False  # noqa: SLF001 - as on every other GPU
    few = triton_cuda.TritonKernels(DEVICE)
    few._attention.processors = 4  # noqa: SLF001 - so that a program has many splits, of several tiles
    count = slots * capacity // (page or PAGE)
    table = torch.randperm(count, generator=make_generator(3, DEVICE), device=DEVICE).to(torch.int32)
    table = table.view(slots, -1) if page else None
    shape = (count, kv, page, head) if page else (slots, kv, capacity, head)
    sinks = None if rule.sinks is None else rule.sinks[: kv * group].to(DEVICE)
    rule = evolve(rule, sinks=sinks)
    for spans in (
        [(0, 1)],
        [(100, 1)],
        [(255, 1)],
        [(62, 1), (63, 1), (64, 1), (254, 1), (255, 1), (256, 1)],
        [(2048, 1)],
        [(2046, 2)],
        [(8000, 3)],
        [(capacity - 1, 1), (capacity - 65, 1)],
        [(8000, 1), (3000, 1)],
        [(700, 1), (2300, 1), (5, 1)],
        [(2047, 4)],
        [(2047, 4), (300, 17), (0, 5)],
        [(8000, 3), (777, 1), (1023, 2), (5, 1), (319, 1), (128, 64)],
        [(7000, 230)],  # in a wide step no split is computed alone
        [(62, 200), (300, 17), (3000, 5)],
    ):
        rows = sum(count for _, count in spans)
        bucket = next(one for one in (1, *BUCKETS) if one >= rows)
        k_cache, v_cache = (normal(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
        for slot, (start, count) in enumerate(spans):  # rows that were never written may hold anything
            number, row = divmod(start + count, page or PAGE)
            if start + count == capacity:
                continue
            for cache in (k_cache, v_cache):
                (cache[table[slot, number], :, row:] if page else cache[slot, :, start + count :])[:] = float("nan")
        if rule.window and page:  # neither are pages behind a window the slot's own, or rows that it was not given
            for slot, (start, _) in enumerate(spans):
                number, row = divmod(max(0, start - rule.window + 1), page)
                for cache in (k_cache, v_cache):
                    cache[table[slot, :number].long()] = float("nan")
                    cache[table[slot, number], :, :row] = float("nan")
        segments = tuple(Segment(slot, start, count) for slot, (start, count) in enumerate(spans))
        q = normal(bucket, kv * group, head, dtype=dtype, seed=rows)
        found = []
        for kernels in (plain, ahead, few):
            batch = Batch(bucket, DEVICE, pages=table)
            batch.load(Step(segments, bucket), [0] * rows)
            kernels.prepare_step(batch)
            attended = kernels.attend(q, k_cache, v_cache, batch, rule)
            assert not attended[rows:].any()
            found.append(attended[:rows])
        assert torch.isfinite(found[0].float()).all()
        assert same_bits(found[0], found[1])
        assert same_bits(found[0], found[2])
        assert not any(left.any() for kernels in (ahead, few) for left in kernels._attention._counts.values())  # noqa: SLF001


@pytest.mark.parametrize("least_bucket", [4, 64])
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_pages_that_slots_share_are_attended_as_those_that_each_has_alone(head, group, least_bucket):
    """Slots of two families begin with the same pages, or each has a copy of its own: then no tiles are shared."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper's")
    kv, slots, most = 2, 24, 20
    shared = torch.arange(slots * most, dtype=torch.int32, device=DEVICE).view(slots, most)
    own = shared.clone()
    k_cache, v_cache = (normal(slots * most, kv, PAGE, head, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    for first, stop, common in ((0, 18, 9), (18, 24, 5)):
        for slot in range(first + 1, stop):
            shared[slot, :common] = shared[first, :common]
            for cache in (k_cache, v_cache):
                cache[own[slot, :common].long()] = cache[own[first, :common].long()]
    for starts in (
        [3000] * 5,
        [2303 + slot for slot in range(16)],
        [4000 + 37 * slot for slot in range(18)],
        [2303 + 101 * slot for slot in range(24)],
        [5, 2304, 700, 4000, 255, 256, 3333, 1280],
    ):
        bucket = next(one for one in BUCKETS if one >= max(least_bucket, len(starts)))
        step = Step(tuple(Segment(slot, start, 1) for slot, start in enumerate(starts)), bucket)
        q = normal(bucket, kv * group, head, dtype=torch.bfloat16, seed=len(starts))
        found = []
        for pages, processors in ((own, 0), (shared, 0), (shared, 4)):
            kernels = triton_cuda.TritonKernels(DEVICE)
            if processors:
                kernels._attention.processors = processors  # noqa: SLF001 - so that a program has many splits
            batch = Batch(bucket, DEVICE, pages=pages)
            batch.load(step, [0] * len(starts))
            kernels.prepare_step(batch)
            found.append(kernels.attend(q, k_cache, v_cache, batch)[: len(starts)].clone())
        assert torch.isfinite(found[0].float()).all()
        assert same_bits(found[0], found[1])
        assert same_bits(found[0], found[2])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("geometry", [(10, 2, 64), (32, 8, 128), (7, 1, 128), (24, 4, 256), (4, 4, 256)])
@pytest.mark.parametrize("pages", [False, True])
def test_chains_of_keys_that_come_ahead_are_attended_as_those_that_do_not(geometry, dtype, pages):
    """Steps of several slots, of every residue of tiles and splits, with padded rows and without."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper's")
    (heads, kv, head), slots, capacity = geometry, 4, 9 * PAGE
    ahead, plain = triton_cuda.TritonKernels(DEVICE), triton_cuda.TritonKernels(DEVICE)
    plain._attention.hopper = False  # noqa: SLF001 - as on every other GPU
    table = torch.randperm(slots * capacity // PAGE, generator=make_generator(3, DEVICE), device=DEVICE).to(torch.int32)
    table = table.view(slots, capacity // PAGE) if pages else None
    shape = (slots * capacity // PAGE, kv, PAGE, head) if pages else (slots, kv, capacity, head)
    for spans in (
        [(0, 256)],
        [(0, 1), (63, 200), (255, 2)],
        [(100, 129), (0, 7), (256, 64)],
        [(capacity - 500, 500)],
        [(700, 1024)],
    ):
        rows = sum(count for _, count in spans)
        bucket = next(one for one in (256, 512, 1024) if one >= rows)
        k_cache, v_cache = (normal(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
        for slot, (start, count) in enumerate(spans):  # rows that were never written may hold anything
            number, row = divmod(start + count, PAGE)
            for cache in (k_cache, v_cache) if start + count < capacity else ():
                (cache[table[slot, number], :, row:] if pages else cache[slot, :, start + count :])[:] = float("nan")
        q, found = normal(bucket, heads, head, dtype=dtype, seed=rows), []
        for kernels in (plain, ahead):
            batch = Batch(bucket, DEVICE, pages=table)
            batch.load(Step(tuple(Segment(slot, *span) for slot, span in enumerate(spans)), bucket), [0] * rows)
            kernels.prepare_step(batch)
            attended = kernels.attend(q, k_cache, v_cache, batch)
            assert not attended[rows:].any()
            found.append(attended[:rows])
        assert torch.isfinite(found[0].float()).all()
        assert same_bits(*found)


CODED_GEOMETRIES = [(16, 2, 64), (32, 8, 128), (7, 1, 128), (24, 4, 256)]
CODED = [  # heads, key heads and numbers of a head; the format of rows; whether they are in pages; the rule
    *(
        (geometry, rows, True, PLAIN)
        for geometry in CODED_GEOMETRIES
        for rows in ("int8", "fp8", "int4", "k=int8,v=int4", "k=fp8,v=int8")
    ),
    *((geometry, rows, True, AttentionRule(300)) for geometry in CODED_GEOMETRIES for rows in ("int8", "int4")),
    *((geometry, "int8", False, PLAIN) for geometry in CODED_GEOMETRIES),
]


@pytest.mark.parametrize(("geometry", "rows", "pages", "rule"), CODED, ids=str)
def test_codes_that_are_unpacked_ahead_are_attended_as_those_that_are_not(geometry, rows, pages, rule):
    """Wide steps of several slots, and few of their rows once more, whose splits other programs compute."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper's")
    (heads, kv, head), slots, capacity, bf16 = geometry, 4, 9 * PAGE, torch.bfloat16
    types = read_row_types(rows, bf16)
    layout = RowLayout(types, head)
    ahead, plain = triton_cuda.TritonKernels(DEVICE), triton_cuda.TritonKernels(DEVICE)
    plain._attention.hopper = False  # noqa: SLF001 - as on every other GPU
    table = torch.randperm(slots * capacity // PAGE, generator=make_generator(3, DEVICE), device=DEVICE).to(torch.int32)
    table = table.view(slots, capacity // PAGE) if pages else None
    shape = (slots * capacity // PAGE, kv, PAGE) if pages else (slots, kv, capacity)
    memory = torch.empty(len(layout.parts), *shape, layout.width, dtype=layout.dtype, device=DEVICE)
    k_cache, v_cache = layout.open_parts(tuple(memory))
    for spans in ([(0, 256)], [(0, 1), (63, 200), (255, 2)], [(100, 129), (0, 7), (256, 64)], [(700, 1024)]):
        count = sum(count for _, count in spans)
        bucket = next(one for one in (256, 512, 1024) if one >= count)
        for cache, form, seed in ((k_cache, types.keys, 1), (v_cache, types.values, 2)):
            coded = form.encode(normal(*shape, head, dtype=bf16, seed=seed))
            cache.view(torch.uint8).copy_(coded.view(torch.uint8))
        for slot, (start, length) in enumerate(spans):  # rows that were never written may hold anything
            number, row = divmod(start + length, PAGE)
            for raw in (k_cache.view(torch.uint8), v_cache.view(torch.uint8)):
                if pages:
                    raw[table[slot, number], :, row:] = 255
                    raw[table[slot, number + 1 :].long()] = 255
                else:
                    raw[slot, :, start + length :] = 255
        q, found = normal(bucket, heads, head, dtype=bf16, seed=count), []
        for kernels in (plain, ahead):
            batch = Batch(bucket, DEVICE, pages=table)
            batch.load(Step(tuple(Segment(slot, *span) for slot, span in enumerate(spans)), bucket), [0] * count)
            kernels.prepare_step(batch)
            attended = kernels.attend(q, k_cache, v_cache, batch, rule)
            assert not attended[count:].any()
            found.append(attended[:count])
        assert torch.isfinite(found[0].float()).all()
        assert same_bits(*found)
        few = min(spans[-1][1], 48)  # the last rows of the last slot
        batch = Batch(64, DEVICE, pages=table)
        batch.load(Step((Segment(len(spans) - 1, sum(spans[-1]) - few, few),), 64), [0] * few)
        ahead.prepare_step(batch)
        last = torch.cat((q[count - few : count], q[: 64 - few]))
        assert same_bits(ahead.attend(last, k_cache, v_cache, batch, rule)[:few], found[0][-few:])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 5120), (1024, 6144), (2048, 5120)])
def test_columns_that_are_cut_into_several_launches_have_the_same_bits(kernels, rows, columns, gated):
    weight = normal(columns, 512, dtype=torch.bfloat16, scale=0.05)
    x = normal(rows, 512, dtype=torch.bfloat16, seed=1)
    multiply = kernels.gated_linear if gated else kernels.linear
    packed = kernels.pack_gated(weight) if gated else kernels.pack(weight)
    whole = multiply(x, packed)
    for bucket in (4, 128, 256):
        assert same_bits(multiply(x[-bucket:].contiguous(), packed), whole[-bucket:])


@pytest.mark.parametrize("kind", [Batch, BlockBatch, StateBatch])
def test_a_step_is_brought_to_the_device_as_it_is_on_the_host(kind):
    here, there = kind(512, torch.device("cpu")), kind(512, DEVICE)
    for number, (spans, known) in enumerate(
        [([(3, 5), (700, 1)], False), ([(0, 300)], False), ([(9, 1), (4, 1), (77, 2)], True), ([(2, 1)], True)]
    ):
        step = Step(tuple(Segment(slot, *span) for slot, span in enumerate(spans)), 512)
        tokens = torch.arange(100, 100 + step.rows) * (number + 1)
        for batch in (here, there):
            if kind is not Batch:
                batch.before = tuple(start // 2 for start, _ in spans)
            batch.load(step, tokens.to(DEVICE) if known and batch is there else tokens)
        assert torch.equal(there.table.cpu(), here.table)


@pytest.mark.parametrize("vocabulary", [5, 4096, 4097, 151936])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_the_extremes_of_logits_are_those_that_torch_finds(vocabulary, rows):
    extremes = build_sampling(DEVICE).find_extremes
    logits = normal(rows + 1, vocabulary, dtype=torch.float32)[1:]
    logits[0, [1, vocabulary - 1]] = logits.max() + 1  # the first of two
    logits[rows // 2, 3] = float("-inf")
    tokens, told = extremes(logits)
    expected, expected_told = build_sampling(torch.device("cpu")).find_extremes(logits.cpu())
    assert tokens.tolist() == expected.tolist()
    assert tokens[0] == 1
    assert same_bits(told, expected_told.to(DEVICE))
    for odd in (float("nan"), float("inf")):
        logits[-1, vocabulary // 2] = odd
        tokens, told = extremes(logits)
        assert not told[-1, 1:].isfinite().all()
        assert told[-1, 1:].isnan().all() == (odd != odd)  # noqa: PLR0124
        assert 0 <= tokens[-1] < vocabulary
        assert told[0, 1:].isfinite().all() or rows == 1
    logits[-1] = float("nan")
    assert 0 <= extremes(logits)[0][-1] < vocabulary
    logits[-1] = float("-inf")
    assert extremes(logits)[0][-1] == 0
