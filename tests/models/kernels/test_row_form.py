"""Rows of keys and values in 8 bits: what a code is, wherever one is written and read, and one sequence's rows in every
way that they come about.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.llama import LlamaConfig
from adapters.models.families.qwen2 import Qwen2Config
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.rows import NativeRows, PreparedHeads
from adapters.models.kernels.formats.row_format import LIMITS, RowFormat, read_row_types
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.layer_interface import Rope
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.layer_bench import LayerBench
from adapters.models.numerics.synthetic import RandomWeights
from adapters.sequence_layout import RowSpec, dtype_name
from tests.models.checkpoints import proven, run, run_in_pieces, same_bits, same_rows, tokens_of
from tests.models.decoder.cache.test_pages import InPages

CODED = [pytest.param(dtype, id=dtype_name(dtype)) for dtype in LIMITS]
CAPACITY, LENGTH = 512, 300


def same(found, expected):
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def random(*shape, seed=1):
    return torch.randn(shape, generator=make_generator(seed))


def heads(size):
    """Rows of heads, with what is hard to code: zeros, numbers that have no inverse, very large ones, exact codes."""
    found = random(40, 3, size)
    found[0], found[1], found[2], found[3] = 0, found[1] * 1e-38, found[2] * 1e-42, found[3] * 1e36
    found[4] = torch.arange(size).float() - size // 2
    found[5, :, 1:] = 0
    return found


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("size", [64, 24, 6])
def test_a_number_is_the_nearest_code_times_its_heads_scale(dtype, size):
    form, numbers = RowFormat(dtype), heads(size)
    rows = form.encode(numbers)
    assert rows.shape == (40, 3, form.row_width(size))
    assert rows.dtype is dtype
    found, most = form.decode(rows), numbers.abs().amax(-1, keepdim=True)
    step = most / LIMITS[dtype]
    # fp8 has three bits behind the first one, and below 2^-6 evenly many steps; int8 is even everywhere
    error = step / 2 if dtype is torch.int8 else torch.maximum(numbers.abs() / 16, step * 2**-10)
    assert bool(((found - numbers).abs() <= error * 1.001 + 2e-36 * (most < 1e-35)).all())
    assert same(form.encode(found)[3:], rows[3:]), "what was coded once is coded so again"
    assert not found[0].any()
    assert bool(found.isfinite().all())


def test_what_is_kept_as_it_is_computed_is_left_alone():
    numbers = random(3, 8).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        form = RowFormat(dtype)
        assert not form.is_coded
        assert form.row_width(8) == form.head_size(8) == 8
        assert same(form.decode(form.encode(numbers)), numbers.to(dtype))
    assert read_row_types("auto", torch.float16).keys.dtype is torch.float16


def test_coded_rows_take_about_half_the_room_of_bfloat16():
    whole = RowSpec(("k", "v"), 2, RowFormat(torch.bfloat16).row_width(128), dtype_name(torch.bfloat16)).token_bytes
    for dtype in LIMITS:
        assert RowSpec(("k", "v"), 2, RowFormat(dtype).row_width(128), dtype_name(dtype)).token_bytes < 0.52 * whole


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("size", [64, 36, 6])
def test_every_instruction_set_writes_and_reads_the_same_codes(native_code, dtype, size):
    """The rows are those that torch makes, and attention to them is attention to the numbers that they stand for."""
    form, numbers = RowFormat(dtype), heads(size)
    numbers[2] = 1  # rotation by nothing turns some -0 into 0, in torch's rows alone
    count, seen = len(numbers), torch.arange(1, len(numbers) + 1)
    rope = Rope(torch.ones(64, 1), torch.zeros(64, 1))
    how = PreparedHeads(None, torch.ones(2, size), normed=False, eps=0.0)
    slots, q = torch.ones(count, dtype=torch.int64), random(count, 1, 2, size, seed=2)
    for level in range(native_code.level + 1):
        caches = [torch.zeros(2, 1, 64, form.row_width(size), dtype=torch.uint8).view(dtype) for _ in range(2)]
        NativeRows(native_code, level).prepare_heads(numbers.flatten(1) + 0.0, how, rope, (slots, seen - 1), *caches)
        for head, cache in enumerate(caches, 1):
            assert same(cache[1, 0, :count], form.encode(numbers[:, head] + 0.0))
        for cache in caches:
            cache[1, 0, 3] = cache[1, 0, 7]  # of 1e36 a score is none
        attention = NativeAttention(native_code, level, torch.float32)
        found = attention.attend(q, slots, (None, seen), *caches)
        numbers_of = [form.decode(cache).contiguous() for cache in caches]
        assert same(found, attention.attend(q, slots, (None, seen), *numbers_of))


def test_rows_in_bfloat16_of_a_model_in_float32(native_code):
    """Rounded once, as they are written."""
    rope, how = Rope(torch.ones(9, 1), torch.zeros(9, 1)), PreparedHeads(None, torch.ones(2, 8), normed=False, eps=0.0)
    numbers, at = random(5, 3, 8), torch.arange(5)
    caches = [torch.zeros(1, 1, 9, 8, dtype=torch.bfloat16) for _ in range(2)]
    rows = NativeRows(native_code, native_code.level)
    rows.prepare_heads(numbers.flatten(1), how, rope, (at * 0, at), *caches)
    assert same(caches[1][0, 0, :5], numbers[:, 2].bfloat16())


FAMILIES = {
    "qwen3": Qwen3Config(203, 96, 212, 2, 6, 2, 24, CAPACITY, 1e6, tie_word_embeddings=True),
    "llama": LlamaConfig(203, 96, 212, 2, 4, 1, 32, CAPACITY, 5e5),
    "qwen2": Qwen2Config(203, 96, 212, 2, 4, 4, 16, CAPACITY, 1e6),
}
WAYS = [(torch.bfloat16, torch.int8), (torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.int8)]


def shard_of(config, dtype, rows, kernels=None, **how):
    kernels = kernels or proven(config, dtype, CAPACITY, (4, 16, 64, 256)).copy_for_shard()
    weights = RandomWeights(config, scale=config.hidden_size**-0.5)
    shape = {"slots": 3, "capacity": CAPACITY, "buckets": (4, 16, 64, 256)} | how
    return DenseShard(config, weights, kernels, ShardPlacement(dtype=dtype, rows=rows, **shape))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "rows"), WAYS, ids=str)
def test_rows_and_answers_are_the_same_however_they_come_about(family, dtype, rows):
    config = FAMILIES[family]
    shard, tokens = shard_of(config, dtype, rows), tokens_of(LENGTH, config.vocab_size)
    assert shard.memory()["kv"] == 3 * CAPACITY * config.kv_bytes_per_token(rows)
    expected = run_in_pieces(shard, tokens, [(256, 256)])
    assert same_bits(run_in_pieces(shard, tokens, [(64, 50), (16, 16), (4, 3), (64, 61)], slot=1), expected)
    assert same_rows(shard, 0, 1, 0, LENGTH), "a row is coded once, from its own numbers"
    shard.rows.import_(2, 0, shard.rows.export(0, 0, 250))
    shard.rows.copy(0, 1, 130)
    both = run(shard, 4, (2, 250, tokens[250:252]), (1, 130, tokens[130:131]))
    assert same_bits(both, torch.cat((expected[250:252], expected[130:131]))), "restored, copied and batched"
    assert same_rows(shard, 0, 2, 0, 252)
    step = Step((Segment(2, 252, 3), Segment(2, 253, 1)), 16)  # a tree: its second branch is what comes next
    branches = torch.cat((tokens[252:253], tokens[:2], tokens[253:254]))
    logits = shard.logits(step, shard.forward(step, branches).hidden)
    assert same_bits(logits[[0, 3]], expected[252:254])
    shard.commit(step, [(0, 3)])
    assert same_rows(shard, 0, 2, 0, 254)
    error = run_in_pieces(shard_of(config, dtype, None), tokens, [(256, 256)]) - expected
    assert 0 < error.abs().mean() < 0.05, "logits are of the size of 1"


@pytest.mark.parametrize("dtype", CODED)
def test_coded_rows_in_pages_are_those_in_one_piece(dtype):
    config, found = FAMILIES["qwen3"], []
    tokens = tokens_of(LENGTH, config.vocab_size)
    for kernels, pages in ((ReferenceKernels(), 0), (InPages(), 7)):
        shard = shard_of(config, torch.float32, dtype, kernels, pages=pages)
        found.append(run_in_pieces(shard, tokens, [(64, 64)], slot=1))
    assert same_bits(*found)
    native = shard_of(config, torch.float32, dtype, CpuKernels(torch.float32))
    assert torch.allclose(run_in_pieces(native, tokens, [(64, 64)]), found[0], atol=0.05)


def test_the_probe_begins_from_rows_that_are_rows():
    config = evolve(FAMILIES["qwen3"], num_layers=1, tie_word_embeddings=False)
    plain, coded = (
        LayerBench(shard_of(config, torch.bfloat16, rows), config.hidden_size, CAPACITY) for rows in (None, torch.int8)
    )
    whole, codes = (bench.shard.rows.export(0, 0, CAPACITY)["layers.0.k"] for bench in (plain, coded))
    assert same(RowFormat(torch.int8).encode(whole), codes)
