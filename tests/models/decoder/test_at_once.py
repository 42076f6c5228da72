"""Layers in one call of the library leave what its operations one by one leave: every bit of rows and logits."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.config.rope import Llama3
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.checkpoint import MASK_EMBEDDING
from adapters.models.families.llama import LlamaConfig
from adapters.models.families.qwen2 import Qwen2Config
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import same_bits, tokens_of
from tests.models.draft_models import GEOMETRIES, aux_hidden_states_of, draft_of, extend, random_tensors
from tests.pairs import in_turns

pytestmark = pytest.mark.skipif(find_library() is None, reason="no products in C here")
BUCKETS, CAPACITY = (4, 16, 64, 256), 512
CONFIGS = {
    "qwen3": Qwen3Config(203, 100, 212, 3, 8, 2, 24, 2048, 1e4, tie_word_embeddings=True),
    "llama": LlamaConfig(203, 96, 130, 3, 4, 2, 32, 2048, 5e5, rope_scaling=Llama3(8.0, 1.0, 4.0, 256.0)),
    "qwen2": Qwen2Config(203, 100, 212, 3, 6, 2, 24, 2048, 1e6),
}
# Segments of one step: slot, start, rows.
STEPS = (
    ((0, 0, 256),),
    ((0, 256, 64),),
    ((1, 0, 50), (2, 0, 7)),
    ((0, 320, 1),),
    ((2, 7, 2), (0, 321, 1), (1, 50, 5)),
    ((1, 55, 1), (0, 322, 3)),
)


class OneByOne(CpuKernels):
    """Operation by operation, as wherever the library does not serve all of a layer."""

    def fuse_layers(self, *_):
        return None

    def fuse_context(self, *_):
        return None

    def write_logits(self, hidden, norm, eps, packed, out):
        out.copy_(self.linear(self.add_norm(hidden, None, norm, eps), packed))


class Noting(CpuKernels):
    """Notes how many layers run at once, in steps of each bucket."""

    def __init__(self, *how):
        super().__init__(*how)
        self.noted, self.contexts = {}, set()

    def fuse_layers(self, layers, rope, rows, embedding):
        found = super().fuse_layers(layers, rope, rows, embedding)
        if found is not None:
            self.noted[rows] = len(layers)
        return found

    def fuse_context(self, *given):
        found = super().fuse_context(*given)
        if found is not None:
            self.contexts.add(given[-1])
        return found


def left_by(config, kernels, dtype, rows, *, layers=None, aux=(), weights=None):
    """Everything that steps leave: hidden states and captures of each, logits, and rows."""
    layers = range(config.num_layers) if layers is None else layers
    weights = RandomWeights(config, scale=config.hidden_size**-0.5) if weights is None else weights
    how = {"dtype": dtype, "rows": rows, "slots": 3, "capacity": CAPACITY, "buckets": BUCKETS, "aux_layers": aux}
    shard, found = DenseShard(config, weights, kernels, ShardPlacement(layers=layers, **how)), []
    generator = make_generator(3)
    for segments in STEPS:
        count = sum(rows for _, _, rows in segments)
        bucket = next(bucket for bucket in BUCKETS if bucket >= count)
        for only in (True, False):
            step = Step(tuple(Segment(*one) for one in segments), bucket, rows_only=only)
            hidden = torch.randn(bucket, config.hidden_size, generator=generator).to(dtype)
            inputs = tokens_of(count, config.vocab_size) if layers.start == 0 else hidden
            forward = shard.forward(step, inputs)
            found += [states[:count].clone() for states in forward.aux_hidden_states.values()]
            if not only or layers.stop < config.num_layers:
                found.append(forward.hidden[:count].clone())
            if not only and layers.stop == config.num_layers:
                found.append(shard.logits(step, forward.hidden)[:count].clone())
    for slot, count in enumerate((325, 56, 9)):
        found += [kept.view(torch.uint8) for kept in shard.rows.export(slot, 0, count).values()]
    shard.close()
    return found


def same_at_once(config, dtype, rows=None, plan=None, **how):
    """Return whether everything is the same either way, and how many layers ran at once in steps of every bucket."""
    noting = Noting(dtype, plan)
    found = left_by(config, noting, dtype, rows, **how)
    expected = left_by(config, OneByOne(dtype, plan), dtype, rows, **how)
    same = all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    return same, {noting.noted.get(bucket, 0) for bucket in (4, 16, 64, 256)}


@in_turns("name", "dtype", full=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS])
def test_layers_at_once_leave_what_operations_one_by_one_leave(name, dtype):
    same, at_once = same_at_once(CONFIGS[name], dtype, aux=(0, 1, 2))
    assert same
    assert at_once == ({0} if dtype is torch.float16 else {3})


@pytest.mark.parametrize("rows", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layers", [range(3), range(1, 2), range(1, 3)], ids=str)
def test_so_do_coded_rows_and_the_layers_of_any_shard(rows, layers):
    config = evolve(CONFIGS["qwen3"], head_dim=32)
    assert same_at_once(config, torch.bfloat16, rows, layers=layers, aux=(1,)) == (True, {len(layers)})


def test_padded_rows_cost_nothing():
    config, dtype = CONFIGS["qwen3"], torch.bfloat16
    weights, how = RandomWeights(config, scale=config.hidden_size**-0.5), {"slots": 1, "capacity": CAPACITY}
    shard = DenseShard(
        config, weights, CpuKernels(dtype), ShardPlacement(dtype=dtype, layers=range(1, 2), buckets=BUCKETS, **how)
    )
    hidden = torch.randn(16, config.hidden_size, generator=make_generator(3)).to(dtype)
    left = shard.forward(Step((Segment(0, 0, 5),), 16), hidden).hidden
    assert same_bits(left[5:], hidden[5:]), "as they came"
    assert not (left[:5] == hidden[:5]).all(1).any()
    shard.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_in_pieces_that_were_proven_and_on_any_threads(threads, two_threads):
    config, dtype, wide = CONFIGS["llama"], torch.bfloat16, torch.get_num_threads()
    plan = CpuKernels(dtype).prove(config.products(BUCKETS, capacity=CAPACITY, dtype=dtype, threads=wide)).plan
    weights = tuple(evolve(one, wide=16) for one in plan.weights)
    assert same_at_once(config, dtype, plan=evolve(plan, threads=(threads, wide), weights=weights)) == (True, {3})


@in_turns("name", "dtype", full=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*GEOMETRIES])
def test_a_drafts_context_and_blocks_at_once_are_those_of_operations_one_by_one(name, dtype):
    config = GEOMETRIES[name]
    tensors = random_tensors(config)
    tensors[MASK_EMBEDDING] = torch.randn(config.hidden_size)
    states = aux_hidden_states_of(config, 90, dtype)
    noting, found = Noting(dtype), list[list[torch.Tensor]]()
    for kernels in (noting, OneByOne(dtype)):
        draft, left = draft_of(config, tensors, dtype, kernels=kernels), list[torch.Tensor]()
        extend(draft, 64, (0, 0, states[:, :50]), (2, 0, states[:, 50:60]))
        extend(draft, 32, (0, 50, states[:, 60:85]), (2, 10, states[:, 85:]))
        for count in (3, config.block - 1):
            asks = [BlockRequest(0, 4, 75, 7, count), BlockRequest(2, 0, 15, 9, count)]
            left += [draft.logits(asks[:1]).clone(), draft.logits(asks).clone()]
        left += [rows.view(torch.uint8) for slot in (0, 2) for rows in draft.rows.export(slot, 0, 15).values()]
        found.append(left)
        draft.close()
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))
    assert noting.noted == ({} if dtype is torch.float16 else dict.fromkeys(noting.noted, config.num_layers))
    assert (4 in noting.noted) is (dtype is not torch.float16) is (64 in noting.contexts)


def test_tensors_that_were_not_the_last_ones_are_checked_and_taken_anew():
    dtype, width = torch.bfloat16, 96
    kernels, norm = CpuKernels(dtype), torch.ones(width, dtype=dtype)
    packed = kernels.pack(torch.randn(40, width).to(dtype))
    given = [torch.randn(4, width).to(dtype) for _ in range(2)]
    for hidden in (given[0], given[0], given[1], given[0]):
        expected, logits = torch.empty(4, 40), torch.empty(4, 40)
        OneByOne(dtype).write_logits(hidden, norm, 1e-6, packed, expected)
        kernels.write_logits(hidden, norm, 1e-6, packed, logits)
        assert same_bits(logits, expected)
    with pytest.raises(ValueError, match="for a norm of"):
        kernels.write_logits(given[0].float(), norm, 1e-6, packed, logits)
    with pytest.raises(ValueError, match="outputs into"):
        kernels.write_logits(given[0], norm, 1e-6, packed, logits[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_may_be_packed_each_part_in_its_own_way(dtype):
    config = Qwen3Config(203, 256, 512, 2, 8, 2, 32, 2048, 1e4, tie_word_embeddings=True)
    attention, feed = "model.layers.{}.self_attn.{}_proj.weight", "model.layers.{}.mlp.{}_proj.weight"
    many, four = StepLayout("int8", 16, per=16, inner=True), StepLayout("uint4", 32, per=8, inner=True, least="own")
    layouts = {attention.format(0, part): four for part in "qo"} | {attention.format(1, "v"): many}
    layouts |= {feed.format(layer, part): four for layer in (0, 1) for part in ("gate", "up")}
    layouts |= {feed.format(1, "down"): many}
    weights = RandomWeights(config, scale=config.hidden_size**-0.5, layouts=layouts)
    assert same_at_once(config, dtype, weights=weights) == (True, {2})
