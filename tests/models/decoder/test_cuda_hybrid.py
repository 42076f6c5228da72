"""Whole hybrid models on CUDA: graphs, rollback, batches and kept states, and rows whose bits are always the same."""

from __future__ import annotations

import pytest
import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_5 import FAMILY, Qwen35Config
from adapters.models.families.qwen3_next import Qwen3NextConfig
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import same_bits
from tests.models.hybrids import (
    CHUNKS,
    LENGTH,
    check_rolled_back_rows,
    check_rows_in_pieces,
    check_slots_side_by_side,
    computed,
    config,
    in_pieces,
    same_sequence,
    whole_of,
)

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS = (4, 8, 16, 32, 64, 128, 512)


SMALL = config((2, 4, 32, 32), 512, 96, 160, 3, 3, 1, 32, 2048, 1e6, rotated=8)
WIDE = config((16, 48, 128, 128), 1024, 1024, 2048, 4, 24, 4, 256, 2048, 1e7, kinds="lllf", rotated=64)
ODD = config((3, 3, 64, 16), 300, 64, 128, 3, 2, 2, 32, 2048, 1e4, kinds="lfl", rotated=32)
SPARSE = config(
    *((2, 4, 32, 32), 512, 96, 160, 3, 3, 1, 32, 2048, 1e6),
    rotated=8,
    family=Qwen3NextConfig,
    experts=ExpertsShape(16, 3, 64, is_normalized=True, shared=32),
    dense_layers=(1,),
)
CONFIGS = {"small": SMALL, "27B's heads": WIDE, "every key head its own": ODD, "experts": SPARSE}
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float32: 2e-5}


def shard_of(own: Qwen35Config, dtype: torch.dtype, kernels=None) -> DenseShard:
    weights = RandomWeights(own, 1, DEVICE, torch.float32, own.hidden_size**-0.5)
    kernels = kernels or triton_cuda.TritonKernels(DEVICE)
    how = {"slots": 4, "capacity": 512, "buckets": BUCKETS, "state_checkpoints": 2, "aux_layers": (own.num_layers - 1,)}
    return DenseShard(own, weights, kernels, ShardPlacement(device=DEVICE, dtype=dtype, **how))


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=[*CONFIGS])
def whole(request, dtype):
    """A shard whose slot 0 holds a sequence computed in chunks of C, with the last layer's output."""
    return whole_of(shard_of(CONFIGS[request.param], dtype))


def test_rows_are_those_of_plain_torch(whole):
    shard, tokens, expected = whole
    plain = shard_of(shard.config, torch.float32, ReferenceKernels())
    reference = computed(plain, tokens, CHUNKS)
    # of most rows: one of experts that are almost equally wanted may be another one
    error = (expected.float() - reference).norm(dim=1) / reference.norm(dim=1)
    assert error.median().item() < TOLERANCE[shard.spec.dtype]


@in_pieces
def test_rows_in_any_pieces_are_rows_of_chunks_bit_for_bit(whole, pieces):
    check_rows_in_pieces(whole, pieces)


@pytest.mark.parametrize("start", [64, 70, 127, 128, 250])
@pytest.mark.parametrize("kept", [0, 1, 5, 30])
def test_what_is_rolled_back_has_never_happened(whole, start, kept):
    check_rolled_back_rows(whole, start, kept)


def test_slots_side_by_side_are_each_as_if_alone(whole):
    check_slots_side_by_side(whole)


def test_replayed_graphs_give_the_bits_of_eager_kernels_and_of_kernels_without_overlap(whole):
    shard, tokens, expected = whole
    for pdl, graphs in ((False, True), (True, False)):
        kernels = triton_cuda.TritonKernels(DEVICE, pdl=pdl)
        kernels.graphs.enabled = graphs
        other = shard_of(shard.config, shard.spec.dtype, kernels)
        assert same_bits(computed(other, tokens, [(128, 128), (16, 9)]), expected)


def test_states_taken_out_and_put_back_go_on_as_if_they_had_never_left(whole):
    shard, tokens, expected = whole
    computed(shard, tokens[:150], CHUNKS, slot=1)
    shard.states.keep(1, 0)
    state = shard.states.export(1)
    computed(shard, tokens.flip(0), CHUNKS, slot=1)
    shard.rows.copy(0, 1, 128)
    shard.states.load(0, 1)
    assert same_bits(computed(shard, tokens, [(4, 1), (0, 0)], slot=1, start=128), expected[128:])
    shard.states.import_(3, state, 128)
    shard.rows.copy(0, 3, 128)
    assert same_bits(computed(shard, tokens, [(16, 9), (0, 0)], slot=3, start=128), expected[128:])
    shard.states.copy(1, 2)
    shard.rows.copy(1, 2, LENGTH)
    assert same_sequence(shard, 0, 2)


@pytest.mark.parametrize("count", [65, 100, 128, 200])
def test_rows_of_a_prompt_beside_decode_rows_have_the_bits_of_a_prefill(whole, count):
    shard, tokens, expected = whole
    computed(shard, tokens[:64], CHUNKS, slot=1)
    for _ in range(2):  # eagerly, then as a graph
        computed(shard, tokens[:100], CHUNKS, slot=2)
        segments = Segment(2, 100, 1), Segment(1, 64, count)
        step = Step(segments, 512)
        fed = torch.cat([tokens[one.start : one.start + one.count] for one in segments])
        hidden = shard.forward(step, fed).hidden[: step.rows].clone()
        shard.commit(step, [1, count])
        assert same_bits(hidden[:1], expected[100:101])
        assert same_bits(hidden[1:], expected[64 : 64 + count])
        assert same_bits(computed(shard, tokens, [(16, 9), (0, 0)], slot=1, start=64 + count), expected[64 + count :])
        assert same_bits(computed(shard, tokens, [(4, 1), (0, 0)], slot=2, start=101), expected[101:])
        computed(shard, tokens[:64], CHUNKS, slot=1)


@pytest.mark.parametrize("count", [9, 31, 65, 130])
def test_rows_of_several_prompts_beside_a_decode_row_have_the_bits_of_a_prefill(whole, count):
    """A prompt ends with few rows, which do not settle, or with many. Another one begins behind it."""
    shard, tokens, expected = whole
    for _ in range(2):  # eagerly, then as a graph
        computed(shard, tokens[:64], CHUNKS, slot=1)
        computed(shard, tokens[:100], CHUNKS, slot=2)
        segments = Segment(2, 100, 1), Segment(1, 64, count), Segment(3, 0, 150)
        step = Step(segments, 512)
        fed = torch.cat([tokens[one.start : one.start + one.count] for one in segments])
        hidden = shard.forward(step, fed).hidden[: step.rows].clone()
        shard.commit(step, [1, count, 150])
        ends = dict[int, int]()
        first = 0
        for one in segments:
            ends[one.slot] = one.start + one.count
            assert same_bits(hidden[first : first + one.count], expected[one.start : ends[one.slot]])
            first += one.count
        for slot, end in ends.items():
            assert same_bits(computed(shard, tokens, [(4, 1), (0, 0)], slot=slot, start=end), expected[end:])


@pytest.mark.parametrize("length", [66, 128, 129, 200, 256])
def test_the_last_row_of_a_wide_step_can_be_kept_later_or_never(whole, length):
    shard, tokens, expected = whole
    computed(shard, tokens[:length], CHUNKS, slot=1)
    shard.states.keep(1, 0)
    for keeps in (True, False, True):  # eagerly, then as a graph
        step = Step((Segment(2, 0, length),), 512)
        assert same_bits(shard.forward(step, tokens[:length]).hidden[:length], expected[:length])
        shard.commit(step, [length - 1])
        if keeps:
            shard.commit(Step((Segment(2, length - 1, 1),), 4), [1])
        at = length if keeps else length - 1
        assert same_bits(computed(shard, tokens, [(4, 1), (0, 0)], slot=2, start=at), expected[at:])
        assert same_sequence(shard, 0, 2)


@pytest.mark.parametrize("own", [SMALL, WIDE], ids=["small", "27B's heads"])
def test_the_numerics_probe_proves_every_bucket(own):
    kernels = triton_cuda.TritonKernels(DEVICE)
    found = probe(FAMILY, own, kernels, ProbeShape(device=DEVICE, dtype=torch.bfloat16, chunk=512, capacity=2048))
    assert not found.failures
    assert found.mode == "buckets"
    assert found.buckets == (4, 8, 16, 32, 64, 128, 256, 512)
