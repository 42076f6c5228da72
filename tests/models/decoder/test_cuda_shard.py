"""Whole models on CUDA: graphs, oracles, and rows that do not depend on how they were computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.rope import Llama3
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families import llama, qwen2, qwen3, qwen3_moe
from adapters.models.families.llama import LlamaConfig
from adapters.models.families.qwen2 import Qwen2Config
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS = (4, 8, 16, 32, 64, 128, 512)
DEMO = Qwen3Config(4096, 320, 832, 4, 5, 1, 64, 2048, 1e6, tie_word_embeddings=True)
WIDE = Qwen3Config(8192, 1024, 3072, 3, 8, 2, 128, 2048, 1e6)
LLAMA = LlamaConfig(8192, 512, 1024, 3, 8, 2, 64, 2048, 5e5, rope_scaling=Llama3(8.0, 1.0, 4.0, 256.0))
QWEN2 = Qwen2Config(4096, 896, 1024, 3, 14, 2, 64, 2048, 1e6, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(
    4096,
    512,
    1024,
    3,
    8,
    2,
    64,
    2048,
    1e6,
    experts=ExpertsShape(24, 4, 256, is_normalized=True, shared=128),
    dense_layers=(1,),
)
LENGTH = 700


def shard_of(config: DenseConfig, dtype: torch.dtype, kernels=None, **options) -> DenseShard:
    kernels = kernels or triton_cuda.TritonKernels(DEVICE)
    weights = RandomWeights(config, 1, DEVICE, dtype)
    shape = {"slots": 3, "capacity": 1024, "buckets": BUCKETS} | options
    return DenseShard(config, weights, kernels, ShardPlacement(device=DEVICE, dtype=dtype, **shape))


def tokens_of(config: DenseConfig, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=make_generator(seed))


def rows_in_pieces(shard: DenseShard, tokens: Tensor, pieces: list[tuple[int, int]], slot: int = 0) -> Tensor:
    """Logits of every row, the sequence cut into (bucket, rows) pieces, the last one repeated as long as needed."""
    found, at, index = [], 0, 0
    while at < len(tokens):
        bucket, count = pieces[min(index, len(pieces) - 1)]
        part = tokens[at : at + count]
        step = Step((Segment(slot, at, len(part)),), bucket)
        found.append(shard.logits(step, shard.forward(step, part).hidden)[: len(part)].clone())
        at, index = at + len(part), index + 1
    return torch.cat(found)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("config", [DEMO, WIDE, LLAMA, QWEN2, EXPERTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_and_rows_are_the_same_bits_however_they_were_computed(config, dtype):
    shard, tokens = shard_of(config, dtype), tokens_of(config)
    whole = rows_in_pieces(shard, tokens, [(512, 512)])
    rows = {name: tensor.clone() for name, tensor in shard.rows.export(0, 0, LENGTH).items()}
    reference = rows_in_pieces(shard_of(config, torch.float32, ReferenceKernels()), tokens, [(512, 512)])
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-5}[dtype]
    # of most rows: one of experts that are almost equally wanted may be another one
    assert ((whole - reference).norm(dim=1) / reference.norm(dim=1)).median().item() < tolerance
    cuts = (
        [(512, 300), (128, 128)],
        [(64, 64)],
        [(512, 500), (16, 9)],
        [(512, 512), (32, 32)],
        [(512, 512), (128, 128), (4, 1)],
    )
    for pieces in cuts:
        assert same_bits(rows_in_pieces(shard, tokens, pieces, slot=1), whole)
        again = shard.rows.export(1, 0, LENGTH)
        assert all(same_bits(again[name], rows[name]) for name in rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pages", [0, 40])
def test_decode_rows_have_the_same_bits_beside_rows_of_prompts(dtype, pages):
    """They attend by a kernel of their own there. Whatever was recorded, a later step has other rows."""
    shard = shard_of(WIDE, dtype, slots=12, pages=pages)
    texts = [tokens_of(WIDE, seed=seed) for seed in range(12)]
    if pages:
        for slot in range(12):  # the first page is common
            shard.rows.seat(slot, slot, 0, [0, *range(1 + 3 * slot, 4 + 3 * slot)])
            texts[slot][:256] = texts[0][:256]
    expected = [rows_in_pieces(shard, text, [(512, 512)], slot) for slot, text in enumerate(texts)]
    for decode_rows, prompt_rows in ((1, 300), (11, 400), (5, 120), (11, 1), (2, 501)):
        segments = [Segment(slot, LENGTH - 1 - 40 * slot, 1) for slot in range(decode_rows)]
        segments.append(Segment(decode_rows, 60, prompt_rows))
        step = Step(tuple(segments), 512)
        given = torch.cat([texts[one.slot][one.start : one.start + one.count] for one in segments])
        rows = [expected[one.slot][one.start : one.start + one.count] for one in segments]
        for _ in range(3):  # launched, recorded and replayed
            assert same_bits(shard.logits(step, shard.forward(step, given).hidden)[: step.rows], torch.cat(rows))


@pytest.mark.parametrize("config", [WIDE, EXPERTS])
def test_a_step_runs_ahead_with_tokens_that_are_on_the_device(config):
    shard, tokens = shard_of(config, torch.bfloat16), tokens_of(config)
    assert shard.spec.runs_ahead
    step = Step((Segment(0, 0, 4),), 4)
    expected = shard.logits(step, shard.forward(step, tokens[:4]).hidden).clone()
    for _ in range(3):  # launched, recorded and replayed
        found = shard.logits(step, shard.forward(step, tokens[:4].to(DEVICE)).hidden)
        assert same_bits(found, expected)


def test_an_embedding_in_host_memory_gives_the_same_bits_and_takes_none_of_the_device():
    shard, away = shard_of(WIDE, torch.bfloat16), shard_of(WIDE, torch.bfloat16, offload_embedding=True)
    tokens, table = tokens_of(WIDE), WIDE.vocab_size * WIDE.hidden_size * 2
    held, without_table = shard.memory(), away.memory()
    assert (held["host"], without_table["host"]) == (0, table)
    assert without_table["weights"] == held["weights"] - table
    assert away.embedding.device.type == "cpu"
    for pieces in ([(512, 512)], [(512, 300), (4, 1)]):  # recorded after the first of them, and replayed
        assert same_bits(rows_in_pieces(away, tokens, pieces), rows_in_pieces(shard, tokens, pieces))
    tied = shard_of(DEMO, torch.bfloat16, offload_embedding=True)
    assert tied.memory()["host"] == 0
    assert tied.embedding.device.type == "cuda"


def test_slots_that_share_pages_have_the_rows_and_bits_of_slots_that_share_nothing():
    """A head in common, in pages of both; then each goes on, and one is read by a third."""
    shard, apart = shard_of(DEMO, torch.bfloat16, pages=9), shard_of(DEMO, torch.bfloat16)
    head, tails = tokens_of(DEMO, 560), [tokens_of(DEMO, 100, seed) for seed in (1, 2)]
    shard.rows.seat(0, 0, 0, (8, 2, 5))
    rows_in_pieces(shard, head, [(512, 512), (64, 64)])
    shard.rows.seat(1, 0, 540, (8, 2, 0))  # the last page is not whole: its rows are copied
    for slot, (keep, tail) in enumerate(zip((560, 540), tails, strict=True)):
        whole = torch.cat((head[:keep], tail))
        expected = rows_in_pieces(apart, whole, [(512, 512), (64, 64)], slot)[keep:]
        for _ in range(3):  # eager, recorded, replayed
            step = Step((Segment(slot, keep, 100),), 128)
            assert same_bits(shard.logits(step, shard.forward(step, tail).hidden)[:100], expected)
        ours, theirs = shard.rows.export(slot, 0, keep + 100), apart.rows.export(slot, 0, keep + 100)
        assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    shard.rows.seat(2, 1, 512, (8, 2))
    shard.rows.grow(2, (7,))
    shard.rows.import_(2, 512, {name: rows[:, 512:600] for name, rows in apart.rows.export(0, 0, 600).items()})
    step = Step((Segment(2, 600, 1), Segment(0, 660, 1)), 4)
    both = torch.cat((tails[0][40:41], tails[0][:1]))
    found = shard.logits(step, shard.forward(step, both).hidden)[:2].clone()
    again = apart.logits(step, apart.forward(Step((Segment(0, 660, 1),), 4), both[1:]).hidden)[:1].clone()
    assert same_bits(found[1:], again)
    single = Step((Segment(0, 600, 1),), 4)
    assert same_bits(found[:1], apart.logits(single, apart.forward(single, both[:1]).hidden)[:1])


@pytest.mark.parametrize("config", [DEMO, EXPERTS])
def test_a_row_does_not_see_the_requests_that_it_is_batched_with(config):
    shard, sequences = shard_of(config, torch.bfloat16), [tokens_of(config, 600, seed) for seed in range(3)]
    expected = [rows_in_pieces(shard, tokens, [(512, 512)], slot)[-1] for slot, tokens in enumerate(sequences)]
    for bucket in (4, 8, 16, 128, 512):
        step = Step(tuple(Segment(slot, 599, 1) for slot in (2, 0, 1)), bucket)
        found = shard.logits(step, shard.forward(step, torch.stack([sequences[s][599] for s in (2, 0, 1)])).hidden)
        assert all(same_bits(found[row], expected[slot]) for row, slot in enumerate((2, 0, 1)))


def test_replayed_graphs_give_the_bits_of_eager_kernels_and_of_kernels_without_overlap():
    tokens, pieces = tokens_of(DEMO), [(512, 512), (64, 40), (4, 1)]
    eager, plain = triton_cuda.TritonKernels(DEVICE), triton_cuda.TritonKernels(DEVICE, pdl=False)
    eager.graphs.enabled = False
    found = [rows_in_pieces(shard_of(DEMO, torch.bfloat16, k), tokens, pieces) for k in (None, eager, plain)]
    assert all(same_bits(other, found[0]) for other in found[1:])


def test_steps_whose_rows_go_to_experts_are_recorded():
    """The host does not wait for the router's choice. A row that has no number changes no other row."""
    shard, tokens = shard_of(EXPERTS, torch.bfloat16), tokens_of(EXPERTS)
    expected = rows_in_pieces(shard, tokens, [(512, 512), (4, 1)])
    assert ("layers", 4) in {(name, bucket) for name, _, bucket, *_ in shard._kernels.graphs._graphs}  # noqa: SLF001
    shard.rows.import_(2, 0, {name: one * torch.nan for name, one in shard.rows.export(0, 0, 64).items()})
    step = Step((Segment(2, 64, 3), Segment(0, LENGTH - 1, 1)), 8)
    found = shard.logits(step, shard.forward(step, torch.cat((tokens[:3], tokens[-1:]))).hidden)
    assert found[:3].isnan().any()
    assert same_bits(found[3], expected[-1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_decoding_step_never_waits_for_the_device():
    """Torch raises at an operation that makes the host wait, while its debug mode is "error"."""
    shard, tokens = shard_of(DEMO, torch.bfloat16), tokens_of(DEMO).to(DEVICE)
    batch_steps = [Step((Segment(0, at, 1),), 4) for at in range(4)]
    for at, step in enumerate(batch_steps[:3]):
        shard.logits(step, shard.forward(step, tokens[at : at + 1]).hidden)
    kernels, batch = shard._kernels, shard._buffers[4].batch  # noqa: SLF001 - the step without its one host copy
    waited_for = torch.ones(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            waited_for.item()
        kernels.prepare_step(batch)
        for name in ("layers", "logits"):
            kernels.launch(name, batch, lambda: pytest.fail("no graph was recorded"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_middle_shard_captures_and_passes_on_what_one_shard_computes():
    tokens = tokens_of(DEMO, 300)
    whole = shard_of(DEMO, torch.bfloat16, aux_layers=(1, 3))
    parts = [shard_of(DEMO, torch.bfloat16, layers=layers, aux_layers=(1, 3)) for layers in (range(2), range(2, 4))]
    for _ in range(3):
        step = Step((Segment(0, 0, 300),), 512)
        expected = whole.forward(step, tokens)
        first = parts[0].forward(step, tokens)
        second = parts[1].forward(step, first.hidden)
        assert same_bits(second.hidden[:300], expected.hidden[:300])
        assert same_bits(first.aux_hidden_states[1][:300], expected.aux_hidden_states[1][:300])
        assert same_bits(second.aux_hidden_states[3][:300], expected.aux_hidden_states[3][:300])


FAMILIES = [
    (qwen3.FAMILY, DEMO),
    (llama.FAMILY, LLAMA),
    (qwen2.FAMILY, QWEN2),
    (qwen3_moe.FAMILY, EXPERTS),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_the_numerics_probe_proves_every_bucket(family, config, dtype):
    found = probe(
        family,
        config,
        triton_cuda.TritonKernels(DEVICE),
        ProbeShape(device=DEVICE, dtype=dtype, chunk=512, capacity=2048),
    )
    assert not found.failures
    assert found.mode == "buckets"
    assert found.buckets == (4, 8, 16, 32, 64, 128, 256, 512)
