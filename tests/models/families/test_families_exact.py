"""On CPU a row's bits do not depend on chunks, buckets, neighbours, slots or where its K and V rows came from."""

from __future__ import annotations

import re

import pytest
import torch

from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.latent_config import LatentConfig
from adapters.models.decoder.config.rope import Llama3
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.layers.latent_layer import LatentShape
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.glm4_moe import NormedGlm4MoeConfig
from adapters.models.families.llama import LlamaConfig
from adapters.models.families.minimax_m2 import MiniMaxM2Config
from adapters.models.families.mistral import Ministral3Config
from adapters.models.families.qwen2 import Qwen2Config
from adapters.models.families.qwen3 import FAMILY, Qwen3Config
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.families.seed_oss import SeedOssConfig
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape, SigmoidExpertsShape
from adapters.models.kernels.interfaces.product_list import UnprovenProductError
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import proven, run, run_in_pieces, same_bits, same_rows, tokens_of
from tests.pairs import in_turns, take_turns, with_first

SIGMOID = SigmoidExpertsShape(12, 3, 72, is_normalized=True, shared=72, groups=3, chosen_groups=2, factor=1.5)
LATENT = LatentShape(queries=36, latent=28, rotated=12, plain=20, values=24, scale=0.2, interleaved=True)
CONFIGS: dict[str, DenseConfig] = {
    "the demo's layer shapes": Qwen3Config(512, 320, 832, 2, 5, 1, 64, 2048, 1e6, tie_word_embeddings=True),
    "gqa 4 to 1, nothing a multiple of a vector": Qwen3Config(203, 100, 212, 2, 8, 2, 24, 2048, 1e4),
    "gqa 2 to 1": Qwen3Config(300, 96, 130, 2, 4, 2, 32, 2048, 1e4),
    "llama": LlamaConfig(203, 100, 212, 2, 8, 2, 24, 2048, 5e5, rope_scaling=Llama3(8.0, 1.0, 4.0, 256.0)),
    "qwen3_moe": Qwen3MoeConfig(
        203, 100, 212, 2, 6, 2, 24, 2048, 1e6, experts=ExpertsShape(11, 3, 72, is_normalized=True), dense_layers=(0,)
    ),
    "scaled queries": Ministral3Config(203, 100, 212, 2, 6, 2, 24, 2048, 1e6, beta=0.2, original=100),
    "seed_oss": SeedOssConfig(203, 100, 212, 2, 6, 2, 24, 2048, 1e6, out_bias=True),
    "glm4_moe": NormedGlm4MoeConfig(203, 100, 212, 2, 6, 2, 24, 2048, 1e6, experts=SIGMOID, dense=1, rotated=12),
    "minimax_m2": MiniMaxM2Config(203, 100, 72, 2, 6, 2, 24, 2048, 1e6, experts=SIGMOID, rotated=24),
    "latent rows": LatentConfig(
        203, 100, 212, 2, 6, 1, 40, 2048, 1e6, latent=LATENT, experts=SIGMOID, dense=(0,), rope_scaling=None
    ),
    "qwen2": Qwen2Config(203, 100, 212, 2, 6, 2, 24, 2048, 1e6, tie_word_embeddings=True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTH = 700
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=take_turns([*CONFIGS], DTYPES))
def whole(request):
    """A shard whose slot 0 holds a sequence computed in chunks of C, with its logits."""
    name, dtype = request.param
    config = CONFIGS[name]
    weights = RandomWeights(config, scale=config.hidden_size**-0.5)
    shard = DenseShard(
        config,
        weights,
        proven(config, dtype, 1024).copy_for_shard(),
        ShardPlacement(dtype=dtype, slots=4, capacity=1024),
    )
    tokens = tokens_of(LENGTH, config.vocab_size)
    return shard, tokens, run_in_pieces(shard, tokens, [(256, 256)])


@in_turns("whole", "pieces", full=1, one_in=6)
@pytest.mark.parametrize(
    "pieces",
    [
        [(64, 64)],
        [(128, 128), (256, 192), (256, 256)],
        [(256, 64), (256, 256)],
        [(32, 31), (16, 16), (8, 5), (8, 7), (64, 50), (256, 251)],
        [(256, 256), (256, 255), (4, 1), (4, 2), (4, 3), (4, 4), (256, 256)],
        [(64, 17), (64, 17), (128, 100), (128, 127), (256, 256)],
    ],
)
def test_prefill_in_any_pieces_is_prefill_in_chunks_bit_for_bit(whole, pieces):
    shard, tokens, expected = whole
    assert same_bits(run_in_pieces(shard, tokens, pieces, slot=1), expected)
    assert same_rows(shard, 0, 1, 0, LENGTH)


def test_decoding_is_prefill_bit_for_bit_across_a_key_tile(whole):
    shard, tokens, expected = whole
    shard.rows.copy(0, 1, 500)
    found = [run(shard, 4, (1, at, tokens[at : at + 1])) for at in range(500, 530)]
    assert same_bits(torch.cat(found), expected[500:530])
    assert same_rows(shard, 0, 1, 0, 530)


@in_turns("whole", "bucket", full=2)
@pytest.mark.parametrize("bucket", [4, 8, 16, 32, 64, 128, 256])
def test_batched_decoding_is_decoding_alone_bit_for_bit(whole, bucket):
    shard, tokens, expected = whole
    starts = {3: 699, 1: 10, 2: 511}
    for slot in starts:
        shard.rows.copy(0, slot, 699)
    found = run(shard, bucket, *((slot, at, tokens[at : at + 1]) for slot, at in starts.items()))
    assert same_bits(found, expected[list(starts.values())])


@in_turns("whole", "counts", full=2)
@pytest.mark.parametrize("counts", [(3, 1, 0), (5, 5, 6), (16, 7, 9), (1, 1, 30), (100, 1, 11)])
def test_blocks_of_several_slots_in_one_step_are_each_as_if_alone(whole, counts):
    shard, tokens, expected = whole
    bucket = next(bucket for bucket in shard.spec.buckets if bucket >= sum(counts))
    starts = (500, 64, 333)
    parts = [
        (slot, at, tokens[at : at + count]) for slot, (at, count) in enumerate(zip(starts, counts, strict=True), 1)
    ]
    for slot, at, _ in parts:
        shard.rows.copy(0, slot, at + 1)
    found = run(shard, bucket, *(part for part in parts if len(part[2])))
    assert same_bits(found, torch.cat([expected[at : at + len(ids)] for _, at, ids in parts]))


def test_rows_taken_out_and_put_back_decode_on_as_if_they_had_never_left(whole):
    shard, tokens, expected = whole
    rows = shard.rows.export(0, 0, 640)
    run(shard, 256, (2, 0, tokens[:200].flip(0)))
    shard.rows.import_(2, 0, rows)
    assert same_rows(shard, 0, 2, 0, 640)
    found = run_in_pieces_from(shard, tokens, 640)
    assert same_bits(found, expected[640:])


def run_in_pieces_from(shard, tokens, start):
    return torch.cat([run(shard, 64, (2, start, tokens[start:]))])


def test_a_copied_slot_is_the_slot_it_was_copied_from(whole):
    shard, tokens, expected = whole
    shard.rows.copy(0, 3, 300)
    assert same_rows(shard, 0, 3, 0, 300)
    assert same_bits(run(shard, 16, (3, 300, tokens[300:311])), expected[300:311])


def test_rolling_back_is_forgetting(whole):
    shard, tokens, expected = whole
    shard.rows.copy(0, 1, 400)
    run(shard, 16, (1, 400, tokens[:16]))
    assert same_bits(run(shard, 16, (1, 400, tokens[400:416])), expected[400:416])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str)
def test_thread_counts_of_one_numerics_class_have_the_same_bits(dtype):
    config, before = CONFIGS["the demo's layer shapes"], torch.get_num_threads()
    tokens, found = tokens_of(300, config.vocab_size), {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            numerics = probe(
                FAMILY, config, CpuKernels(dtype), ProbeShape(device=CPU, dtype=dtype, chunk=256, capacity=512)
            )
            kernels = CpuKernels(dtype).with_plan(numerics.plan)
            shard = DenseShard(
                config, RandomWeights(config), kernels, ShardPlacement(dtype=dtype, slots=1, capacity=512)
            )
            logits = run_in_pieces(shard, tokens, [(256, 256), (4, 4)])
            assert same_bits(found.setdefault(numerics.numerics_class, logits), logits)
    finally:
        torch.set_num_threads(before)


@with_first("whole")
def test_a_product_that_was_never_proven_is_refused(whole):
    shard, tokens, _ = whole
    listed = shard.config.products((4, 256), capacity=256, dtype=shard.spec.dtype, threads=torch.get_num_threads())
    plan = CpuKernels(shard.spec.dtype).prove(listed).plan
    kernels = CpuKernels(shard.spec.dtype).with_plan(plan)
    with pytest.raises(UnprovenProductError, match="7 x 11 were never proven"):
        kernels.pack(torch.zeros(7, 11))
    with pytest.raises(UnprovenProductError, match="of 3 query heads of 8"):
        kernels.attend(torch.zeros(4, 1, 3, 8), torch.zeros(1, 1, 256, 8), torch.zeros(1, 1, 256, 8), Batch(4, CPU))
    other = DenseShard(
        shard.config, RandomWeights(shard.config), kernels, ShardPlacement(dtype=shard.spec.dtype, capacity=256)
    )
    with pytest.raises(UnprovenProductError, match=r"a product of 8 rows; proven: steps of \[4, 256\]"):
        run(other, 8, (0, 0, tokens[:5]))
    torch.set_num_threads(before := torch.get_num_threads() + 1)
    try:
        with pytest.raises(UnprovenProductError, match=f"and there are {before} now"):
            run(other, 4, (0, 0, tokens[:1]))
    finally:
        torch.set_num_threads(before - 1)


LONG = 2600


@in_turns("shape", "dtype", full=0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 64), (2, 3, 24), (3, 1, 32)], ids=str)
def test_attention_over_long_spans_gives_a_row_the_same_bits_in_any_company(shape, dtype):
    """Keys come in pairs whose values nearly cancel, so that every change in the order of a sum shows."""
    (kv, group, head), generator = shape, make_generator(4)
    own = Qwen3Config(8, 32, 32, 1, kv * group, kv, head, 3072, 1e6)
    kernels = proven(own, dtype, 3072).copy_for_shard()
    k = torch.randn(2, kv, 3072, head, generator=generator).to(dtype)
    v = torch.randn(2, kv, 3072, head, generator=generator).to(dtype)
    k[:, :, 1::2], v[:, :, 1::2] = k[:, :, 0::2], -v[:, :, 0::2] * 1.01
    queries = torch.randn(LONG, kv, group, head, generator=generator) * head**-0.5

    def attended(bucket, *segments):
        batch = Batch(bucket, torch.device("cpu"))
        batch.load(Step(segments, bucket), None)
        kernels.prepare_step(batch)
        q = torch.zeros(bucket, kv, group, head)
        q[: sum(one.count for one in segments)] = torch.cat(
            [queries[one.start : one.start + one.count] for one in segments]
        )
        return kernels.attend(q, k, v, batch)[: sum(one.count for one in segments)].clone()

    for start in (0, 900, 1023, 1279, 1900, LONG - 256):
        expected = attended(256, Segment(0, start, 256))
        for bucket, at, count in ((4, 0, 1), (4, 124, 4), (8, 127, 7), (16, 118, 16), (64, 100, 50), (4, 255, 1)):
            assert same_bits(attended(bucket, Segment(0, start + at, count)), expected[at : at + count])
        with_neighbour = attended(16, Segment(1, 30, 5), Segment(0, start + 124, 6))
        assert same_bits(with_neighbour[5:], expected[124:130])


@with_first("whole")
def test_wrong_steps_are_refused_by_name(whole):
    shard, tokens, _ = whole
    for message, bucket, parts in [
        ("bucket 5 is not one of", 5, [(0, 0, tokens[:2])]),
        ("slot 4 is not in 0..3", 4, [(4, 0, tokens[:2])]),
        ("rows 1023..1025", 4, [(0, 1023, tokens[:2])]),
        ("appears twice", 4, [(0, 0, tokens[:2]), (0, 5, tokens[:1])]),
        ("5 rows at bucket 4", 4, [(0, 0, tokens[:5])]),
    ]:
        with pytest.raises(ValueError, match=message):
            run(shard, bucket, *parts)


@with_first("whole")
def test_rows_that_are_not_ours_are_refused_by_name(whole):
    shard, _, _ = whole
    rows = dict(shard.rows.export(0, 0, 64))
    with pytest.raises(ValueError, match=r"layers\.9\.k"):
        shard.rows.import_(1, 0, {**rows, "layers.9.k": rows["layers.0.k"]})
    *others, last = shard.rows.spec.names
    with pytest.raises(ValueError, match=re.escape(last)):
        shard.rows.import_(1, 0, {name: rows[name] for name in others})
    with pytest.raises(ValueError, match=r"layers\.0\.k: torch\.float64"):
        shard.rows.import_(1, 0, {**rows, "layers.0.k": rows["layers.0.k"].double()})
    with pytest.raises(ValueError, match=r"layers\.0\.k"):
        shard.rows.import_(1, 0, {**rows, "layers.0.k": rows["layers.0.k"][..., :-2]})
    with pytest.raises(ValueError, match="not a span"):
        shard.rows.import_(1, 1000, rows)


def test_memory_is_what_weights_and_caches_take(whole):
    shard, _, _ = whole
    config, size = shard.config, shard.spec.dtype.itemsize
    held = shard.memory()
    assert held["kv"] == 4 * 1024 * config.kv_bytes_per_token(shard.spec.dtype)
    assert held["weights"] >= config.vocab_size * config.hidden_size * size
    assert held["buffers"] > 0


def test_a_step_that_only_writes_rows_writes_the_rows_of_a_whole_step(whole):
    shard, tokens, expected = whole
    for start in range(0, 640, 128):
        part = tokens[start : start + 128]
        shard.forward(Step((Segment(1, start, 128),), 128, rows_only=True), part)
    assert same_rows(shard, 0, 1, 0, 640)
    assert same_bits(run(shard, 64, (1, 640, tokens[640:])), expected[640:])


def test_a_captured_last_layer_is_finished_even_if_only_rows_are_wanted():
    config = CONFIGS["gqa 2 to 1"]
    shards = [
        DenseShard(
            config,
            RandomWeights(config),
            CpuKernels(torch.float32),
            ShardPlacement(slots=1, capacity=64, aux_layers=(1,)),
        )
        for _ in range(2)
    ]
    tokens = tokens_of(9)
    found = [
        shard.forward(Step((Segment(0, 0, 9),), 16, rows_only=rows_only), tokens).aux_hidden_states[1]
        for shard, rows_only in zip(shards, (False, True), strict=True)
    ]
    assert same_bits(found[0], found[1])
    assert found[0].abs().sum() > 0
