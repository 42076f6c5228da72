"""Whole hybrid models on CUDA: graphs, rollback, batches and kept states, and rows whose bits are always the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.models.dense import DenseShard
from adapters.models.kernels.delta import DeltaShape
from adapters.models.kernels.reference import ReferenceKernels
from adapters.models.probe import probe
from adapters.models.qwen3_5 import FAMILY, FULL, LINEAR, Qwen35Config
from adapters.models.shard import Segment, Step
from adapters.models.synthetic import RandomWeights
from tests.models.checkpoints import same_bits, tokens_of

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.triton_cuda", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS = (4, 8, 16, 32, 64, 128, 512)
LENGTH = 460


def config(delta: tuple[int, int, int, int], kinds: str, *sizes: object, rotated: int) -> Qwen35Config:
    layer_types = tuple(LINEAR if kind == "l" else FULL for kind in kinds)
    return Qwen35Config(*sizes, linear=DeltaShape(*delta), layer_types=layer_types, rotated=rotated)


SMALL = config((2, 4, 32, 32), "llf", 512, 96, 160, 3, 3, 1, 32, 2048, 1e6, rotated=8)
WIDE = config((16, 48, 128, 128), "lllf", 1024, 1024, 2048, 4, 24, 4, 256, 2048, 1e7, rotated=64)
ODD = config((3, 3, 64, 16), "lfl", 300, 64, 128, 3, 2, 2, 32, 2048, 1e4, rotated=32)
CONFIGS = {"small": SMALL, "27B's heads": WIDE, "every key head its own": ODD}
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float32: 2e-5}


def shard_of(own: Qwen35Config, dtype: torch.dtype, kernels=None) -> DenseShard:
    weights = RandomWeights(own, 1, DEVICE, torch.float32, own.hidden_size**-0.5)
    kernels = kernels or triton_cuda.TritonKernels(DEVICE)
    how = {"slots": 4, "capacity": 512, "buckets": BUCKETS, "state_places": 2, "aux_layers": (own.num_layers - 1,)}
    return DenseShard(own, weights, kernels, device=DEVICE, dtype=dtype, **how)


def computed(shard: DenseShard, tokens: Tensor, pieces: list[tuple[int, int]], *, slot: int = 0, start: int = 0):
    """The last layer's output for tokens[start:]; pieces: (bucket, rows), the last one repeated.

    Narrow steps are settled by `commit`, wide ones at once.
    """
    found, at, index = [], start, 0
    while at < len(tokens):
        bucket, count = pieces[min(index, len(pieces) - 1)]
        part = tokens[at : at + count]
        step = Step((Segment(slot, at, len(part)),), bucket, rows_only=len(part) > 64)
        found.append(shard.forward(step, part).aux_hidden_states[shard.layers.stop - 1][: len(part)].clone())
        if not step.rows_only:
            shard.commit(step, [len(part)])
        at, index = at + len(part), index + 1
    return torch.cat(found)


def same_sequence(shard: DenseShard, ours: int, theirs: int) -> bool:
    pairs = [(shard.export_state(ours), shard.export_state(theirs))]
    pairs.append((shard.export_rows(ours, 0, LENGTH), shard.export_rows(theirs, 0, LENGTH)))
    return all(same_bits(one[name], other[name]) for one, other in pairs for name in one)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=[*CONFIGS])
def whole(request, dtype):
    """A shard whose slot 0 holds a sequence computed in chunks of C, with the last layer's output."""
    shard = shard_of(CONFIGS[request.param], dtype)
    tokens = tokens_of(LENGTH, shard.vocab_size)
    return shard, tokens, computed(shard, tokens, [(512, 512)])


def test_rows_are_those_of_plain_torch(whole):
    shard, tokens, expected = whole
    plain = shard_of(shard.config, torch.float32, ReferenceKernels())
    reference = computed(plain, tokens, [(512, 512)])
    assert ((expected.float() - reference).norm() / reference.norm()).item() < TOLERANCE[shard.dtype]


@pytest.mark.parametrize(
    "pieces",
    [
        [(64, 64)],
        [(4, 1)],
        [(16, 16)],
        [(16, 13), (8, 7)],
        [(512, 256), (4, 1), (4, 2), (16, 9)],
        [(128, 100), (32, 31), (512, 200)],
        [(64, 63), (64, 2), (64, 64), (64, 61)],
        [(512, 130), (128, 65), (4, 3)],
    ],
    ids=str,
)
def test_rows_in_any_pieces_are_rows_of_chunks_bit_for_bit(whole, pieces):
    shard, tokens, expected = whole
    assert same_bits(computed(shard, tokens, pieces, slot=1), expected)
    assert same_sequence(shard, 0, 1)


@pytest.mark.parametrize("start", [64, 70, 127, 128, 250])
@pytest.mark.parametrize("kept", [0, 1, 5, 30])
def test_what_is_rolled_back_has_never_happened(whole, start, kept):
    shard, tokens, expected = whole
    computed(shard, tokens[:start], [(512, 512)], slot=1)
    wrong = torch.cat((tokens[start : start + kept], tokens_of(31 - kept, shard.vocab_size, seed=start)))
    step = Step((Segment(1, start, 31),), 32)
    for _ in range(3):  # run, recorded and replayed; what is not committed has not happened either
        shard.forward(step, wrong)
    shard.commit(step, [kept])
    assert same_bits(computed(shard, tokens, [(8, 5), (64, 64)], slot=1, start=start + kept), expected[start + kept :])
    assert same_sequence(shard, 0, 1)


def test_slots_side_by_side_are_each_as_if_alone(whole):
    shard, tokens, expected = whole
    starts = (100, 256, 61)
    for slot, start in enumerate(starts, 1):
        computed(shard, tokens[:start], [(512, 512)], slot=slot)
    for counts in ((1, 1, 1), (5, 1, 3), (1, 1, 1), (16, 7, 9), (1, 1, 1), (30, 64, 2), (1, 1, 1)):
        spans = [(slot, start, start + count) for slot, start, count in zip((1, 2, 3), starts, counts, strict=True)]
        segments = tuple(Segment(slot, start, stop - start) for slot, start, stop in spans)
        step = Step(segments, next(bucket for bucket in shard.buckets if bucket >= sum(counts)))
        forward = shard.forward(step, torch.cat([tokens[start:stop] for _, start, stop in spans]))
        hidden = forward.aux_hidden_states[shard.layers.stop - 1][: step.rows]
        assert same_bits(hidden, torch.cat([expected[start:stop] for _, start, stop in spans]))
        shard.commit(step, counts)
        starts = tuple(stop for _, _, stop in spans)


def test_replayed_graphs_give_the_bits_of_eager_kernels_and_of_kernels_without_overlap(whole):
    shard, tokens, expected = whole
    for pdl, graphs in ((False, True), (True, False)):
        kernels = triton_cuda.TritonKernels(DEVICE, pdl=pdl)
        kernels.graphs.enabled = graphs
        other = shard_of(shard.config, shard.dtype, kernels)
        assert same_bits(computed(other, tokens, [(128, 128), (16, 9)]), expected)


def test_states_taken_out_and_put_back_go_on_as_if_they_had_never_left(whole):
    shard, tokens, expected = whole
    computed(shard, tokens[:150], [(512, 512)], slot=1)
    shard.keep_state(1, 0)
    state = shard.export_state(1)
    computed(shard, tokens.flip(0), [(512, 512)], slot=1)
    shard.copy_rows(0, 1, 128)
    shard.load_state(0, 1)
    assert same_bits(computed(shard, tokens, [(4, 1), (512, 512)], slot=1, start=128), expected[128:])
    shard.import_state(3, state)
    shard.copy_rows(0, 3, 128)
    assert same_bits(computed(shard, tokens, [(16, 9), (512, 512)], slot=3, start=128), expected[128:])
    shard.copy_state(1, 2)
    shard.copy_rows(1, 2, LENGTH)
    assert same_sequence(shard, 0, 2)


@pytest.mark.parametrize("own", [SMALL, WIDE], ids=["small", "27B's heads"])
def test_the_numerics_probe_proves_every_bucket(own):
    kernels = triton_cuda.TritonKernels(DEVICE)
    found = probe(FAMILY, own, kernels, device=DEVICE, dtype=torch.bfloat16, chunk=512, capacity=2048)
    assert not found.failures
    assert found.mode == "buckets"
    assert found.buckets == (4, 8, 16, 32, 64, 128, 256, 512)
