"""Rows in 8 bits on CUDA: the codes that torch makes, and bits of a row's own in whatever step it comes about."""

from __future__ import annotations

import pytest
import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families import llama, qwen2, qwen3
from adapters.models.kernels.formats.row_format import LIMITS, RowFormat, RowLayout, read_row_types
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from effects.ids import PAGE
from tests.models.checkpoints import run, run_in_pieces, same_bits, same_rows, tokens_of

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)
triton_splits = pytest.importorskip("adapters.models.kernels.cuda.split_attention")
triton_unpacked = pytest.importorskip("adapters.models.kernels.cuda.chains.unpacked_codes")

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS, LENGTH = (4, 16, 64, 512), 700
CONFIGS = {
    "qwen3": qwen3.Qwen3Config(4096, 1024, 1024, 2, 8, 2, 128, 2048, 1e6),
    "llama": llama.LlamaConfig(4096, 512, 1024, 2, 8, 2, 64, 2048, 5e5),
    "qwen2": qwen2.Qwen2Config(4096, 896, 1024, 2, 14, 2, 64, 2048, 1e6, tie_word_embeddings=True),
}
CODED = [pytest.param(dtype, id=str(dtype)) for dtype in LIMITS]


def shard_of(config, rows, kernels=None, dtype=torch.bfloat16, **how):
    kernels = kernels or triton_cuda.TritonKernels(DEVICE)
    shape = {"slots": 3, "capacity": 1024, "buckets": BUCKETS} | how
    return DenseShard(
        config,
        RandomWeights(config, 1, DEVICE, dtype),
        kernels,
        ShardPlacement(device=DEVICE, dtype=dtype, rows=rows, **shape),
    )


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("turned", [64, 16], ids=["whole heads turned", "parts of heads turned"])
def test_codes_are_those_that_torch_makes(dtype, turned):
    """turned: numbers of a head, by nothing, so that rotating changes none."""
    form, kernels = RowFormat(dtype), triton_cuda.TritonKernels(DEVICE)
    heads = torch.randn(40, 4, 64, generator=make_generator(1)).bfloat16() + 0.0
    heads[0], heads[1, :, 1:], heads[2], heads[3] = 0, 0, heads[2] * 1e-36, heads[3] * 1e30
    angles = torch.ones(64, turned // 2, device=DEVICE)
    caches = [torch.zeros(2, 1, 64, form.row_width(64), dtype=torch.uint8, device=DEVICE).view(dtype) for _ in "kv"]
    batch = Batch(64, DEVICE)
    batch.load(Step((Segment(1, 5, 40),), 64), None)
    kernels.prepare_step(batch)
    qkv = torch.zeros(64, 4, 64, dtype=torch.bfloat16)
    qkv[:40] = heads
    kernels.rotate_store(qkv.flatten(1).to(DEVICE), HeadPrep(), Rope(angles, angles * 0), batch, *caches)
    for head, cache in ((2, caches[0]), (3, caches[1])):
        assert torch.equal(cache[1, 0, 5:45].cpu().view(torch.uint8), form.encode(heads[:, head]).view(torch.uint8))
        assert not cache[1, 0, 45:].view(torch.uint8).any(), "nothing is kept of padded rows"


@pytest.mark.parametrize("rows", CODED)
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_and_answers_are_the_same_however_they_come_about(family, rows):
    config = CONFIGS[family]
    shard, tokens = shard_of(config, rows), tokens_of(LENGTH, config.vocab_size).to(DEVICE)
    expected = run_in_pieces(shard, tokens, [(512, 512)])
    assert same_bits(run_in_pieces(shard, tokens, [(64, 50), (16, 16), (4, 3), (512, 301), (64, 61)], slot=1), expected)
    assert same_rows(shard, 0, 1, 0, LENGTH)
    shard.rows.import_(2, 0, shard.rows.export(0, 0, 650))
    both = run(shard, 4, (2, 650, tokens[650:652]), (1, 300, tokens[300:301]))
    assert same_bits(both, torch.cat((expected[650:652], expected[300:301])))
    step = Step((Segment(2, 652, 3), Segment(2, 653, 1)), 16)
    branches = torch.cat((tokens[652:653], tokens[:2], tokens[653:654]))
    logits = shard.logits(step, shard.forward(step, branches).hidden)
    assert same_bits(logits[[0, 3]], expected[652:654])
    shard.commit(step, [(0, 3)])
    assert same_rows(shard, 0, 2, 0, 654)
    paged = shard_of(config, rows, pages=9)
    assert same_bits(run_in_pieces(paged, tokens, [(512, 512), (16, 16)], slot=1), expected)
    oracle = run_in_pieces(shard_of(config, rows, ReferenceKernels()), tokens, [(512, 512)])
    assert (oracle - expected).norm() < 0.03 * oracle.norm()


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, torch.int8), (torch.float32, torch.bfloat16)], ids=str)
def test_rows_are_kept_in_less_than_they_are_computed_in(dtype, rows):
    config = CONFIGS["llama"]
    shard, tokens = shard_of(config, rows, dtype=dtype), tokens_of(300, config.vocab_size).to(DEVICE)
    expected = run_in_pieces(shard, tokens, [(512, 512)])
    assert same_bits(run_in_pieces(shard, tokens, [(16, 11)], slot=1), expected)
    oracle = run_in_pieces(shard_of(config, rows, ReferenceKernels(), dtype), tokens, [(512, 512)])
    assert (oracle - expected).norm() < 0.01 * oracle.norm()


def test_the_numerics_probe_proves_every_bucket():
    where = {"device": DEVICE, "dtype": torch.bfloat16, "chunk": 512, "capacity": 2048}
    found = probe(
        qwen3.FAMILY, CONFIGS["qwen3"], triton_cuda.TritonKernels(DEVICE), ProbeShape(rows=torch.int8, **where)
    )
    assert not found.failures
    assert found.mode == "buckets"


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("starts", [(0,), (255,), (256,), (4000,), (40_000,), (300, 2058, 511, 9000)], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_single_rows_attend_to_codes_with_the_bits_of_other_steps(monkeypatch, name, starts, window):
    """Rows of several slots, in pages that lie anywhere. The kernel for single rows gives what the plain one gives."""
    heads, kv, head, count = 24, 4, 256, len(starts)
    kernels = triton_cuda.TritonKernels(DEVICE)
    layout = RowLayout(read_row_types(name, torch.bfloat16), head)
    pages = max(starts) // PAGE + 1
    memory = torch.zeros(len(layout.parts), count * pages, kv, PAGE, layout.width, dtype=layout.dtype, device=DEVICE)
    caches = layout.open_parts(tuple(memory))
    some = make_generator(len(name))
    for cache, form in zip(caches, (layout.types.keys, layout.types.values), strict=True):
        rows = torch.randn(8, kv, PAGE, head, generator=some).bfloat16()
        codes = form.encode(rows).view(torch.uint8).to(DEVICE)
        for page in range(0, len(cache), 8):
            cache[page : page + 8].view(torch.uint8).copy_(codes[: len(cache) - page])
    table = torch.randperm(count * pages, generator=some).to(DEVICE, torch.int32).view(count, -1)
    batch = Batch(count, DEVICE, pages=table)
    batch.load(Step(tuple(Segment(slot, start, 1) for slot, start in enumerate(starts)), count), [0] * count)
    q = torch.randn(count, heads, head, generator=some).bfloat16().to(DEVICE)
    found = []
    for served in (triton_splits.CODED_ROWS, set[int]()):
        monkeypatch.setattr("adapters.models.kernels.cuda.attention.CODED_ROWS", served)
        kernels.prepare_step(batch)
        found.append(kernels.attend(q, *caches, batch, AttentionRule(window=window)))
    assert found[0].isfinite().all()
    assert same_bits(*found)


def open_rows(name, kv, head, slots, pages):
    """Return coded caches of random rows, in pages that lie anywhere, and the table of pages."""
    layout = RowLayout(read_row_types(name, torch.bfloat16), head)
    some = make_generator(len(name))
    drawn = layout.encode(lambda: torch.randn(slots * pages, kv, PAGE, head, generator=some).bfloat16())
    caches = layout.open_parts([one.view(torch.uint8).to(DEVICE).view(layout.dtype) for one in drawn])
    table = torch.randperm(slots * pages, generator=some).to(DEVICE, torch.int32).view(slots, -1)
    return caches, table


UNPACKED = ("int8", "fp8", "int4", "int3.5", "k=int8,v=int4", "k=int8,v=bf16")
UNPACKED_HEADS = ((8, 2, 64), (32, 4, 128), (12, 2, 256))
UNPACKED_CASES = [
    *((name, heads, 4) for name in UNPACKED for heads in UNPACKED_HEADS),
    *(("int4", heads, 1) for heads in UNPACKED_HEADS),
    ("int8", (32, 4, 128), 0),
]


@pytest.mark.parametrize(("name", "heads", "fitting"), UNPACKED_CASES, ids=str)
def test_a_chunk_attends_to_unpacked_codes_with_the_bits_of_the_plain_kernel(monkeypatch, name, heads, fitting):
    """The last of two slots. Where not even one head fits into the memory for unpacked rows, a kernel unpacks them."""
    count, kv, head = heads
    bucket, start, rows = 512, 1700, 500
    caches, table = open_rows(name, kv, head, 2, (start + rows) // PAGE + 1)
    memory = torch.empty(fitting * 2 * PAGE * table.shape[1] * (2 * head + 4), dtype=torch.uint8, device=DEVICE)
    place = triton_unpacked.UnpackedRows.place
    placed = list[int]()

    def place_in_memory(_, *shape):
        found = place(memory, *shape)
        placed.append(0 if found is None else found.numbers.shape[1])
        return found

    monkeypatch.setattr(triton_unpacked.UnpackedRows, "place", place_in_memory)
    q = torch.randn(bucket, count, head, generator=make_generator(9)).bfloat16().to(DEVICE)
    found = []
    for is_plain in (False, True):
        kernels = triton_cuda.TritonKernels(DEVICE)
        if is_plain:
            kernels._attention.hopper = False  # noqa: SLF001 - no option says this
        batch = Batch(bucket, DEVICE, pages=table)
        batch.load(Step((Segment(1, start, rows),), bucket), [0] * rows)
        kernels.prepare_step(batch)
        found.append(kernels.attend(q, *caches, batch)[:rows])
    assert placed == [min(fitting, kv)] * kernels.traits.capability.has_hopper_kernels
    assert found[0].isfinite().all()
    assert same_bits(*found)
