"""Tests of the DFlash draft on CUDA: it agrees with the reference, and has the same bits with any other requests,
graphs and parking included.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.layers.embedding import host_table
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import BlockRequest, NotLoaded
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import BlockBatch
from adapters.models.numerics.synthetic import RandomDraft
from tests.models.checkpoints import same_bits

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS = (4, 8, 16, 32, 64, 128, 512)
LENGTH = 700
VOCAB = 1000
FULL, SLIDING = AttentionMask(), AttentionMask(causal=True, window=300)
DEMO = DFlashConfig(320, 832, 3, 5, 1, 64, Rotary(64, 1e6), (FULL,) * 3, (1, 4, 6, 9), 16, 999)
WIDE = DFlashConfig(1024, 3072, 3, 16, 4, 128, Rotary(128, 1e6), (SLIDING, SLIDING, FULL), (1, 9, 17), 16, 999)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 8e-3, torch.float32: 1e-4}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = make_generator(seed, DEVICE)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def draft_of(
    config: DFlashConfig, dtype: torch.dtype, kernels=None, stored=None, *, away=False, **options
) -> DFlashDraft:
    """stored: what the weights are made in, if that is not the draft's dtype. away: the embedding is in host memory."""
    kernels, stored = kernels or triton_cuda.TritonKernels(DEVICE), stored or dtype
    table = normal(VOCAB, config.hidden_size, dtype=stored, seed=9).to(dtype)
    shape = {"slots": 4, "capacity": 1024, "buckets": BUCKETS} | options
    weights = RandomDraft(config, 1, DEVICE, stored, config.hidden_size**-0.5)
    head = TargetHead(host_table(table) if away else table, kernels.pack(table.clone()), torch.ones_like(table[0]))
    return DFlashDraft(config, weights, kernels, head, DraftPlacement(device=DEVICE, dtype=dtype, **shape))


def aux_hidden_states_of(config: DFlashConfig, count: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    return normal(len(config.aux_layers), count, config.hidden_size, dtype=dtype, seed=seed)


def extend(draft: DFlashDraft, bucket: int, *parts: tuple[int, int, Tensor]) -> None:
    """Parts are (slot, start, auxiliary hidden states `[K, rows, D]`)."""
    step = Step(tuple(Segment(slot, start, rows.shape[1]) for slot, start, rows in parts), bucket)
    every = torch.cat([rows for _, _, rows in parts], 1)
    padded = torch.full((len(draft.aux_layers), bucket, every.shape[2]), 3e4, dtype=every.dtype, device=DEVICE)
    padded[:, : every.shape[1]] = every
    draft.extend(step, torch.zeros(step.rows, dtype=torch.int64), dict(zip(draft.aux_layers, padded, strict=True)))


def extend_in_pieces(draft: DFlashDraft, rows: Tensor, pieces: list[tuple[int, int]], slot: int = 0) -> None:
    at, index = 0, 0
    while at < rows.shape[1]:
        bucket, count = pieces[min(index, len(pieces) - 1)]
        extend(draft, bucket, (slot, at, rows[:, at : at + count]))
        at, index = at + count, index + 1


def proposed(draft: DFlashDraft, *asks: BlockRequest) -> list[Tensor]:
    return [part.clone() for part in draft.logits(asks).split([ask.count for ask in asks])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", [(5, 1, 64), (32, 8, 128), (4, 4, 128), (6, 2, 64), (16, 2, 256)])
def test_attention_of_blocks_agrees_with_the_reference_and_sees_nothing_else(geometry, dtype):
    heads, kv, head = geometry
    kernels, capacity = triton_cuda.TritonKernels(DEVICE), 2048
    kernels.graphs.enabled = False
    qkv = normal(32, (heads + 2 * kv) * head, dtype=dtype)
    norms = normal(2, head, dtype=dtype, seed=1) * 0.1 + 2
    angles = torch.outer(torch.arange(capacity), 1e4 ** -torch.linspace(0, 1, head // 2)).to(DEVICE)
    rope = Rope(angles.cos(), angles.sin())
    known = (normal(3, kv, capacity, head, dtype=dtype, seed=2), normal(3, kv, capacity, head, dtype=dtype, seed=3))
    blocks = ((Segment(1, 1500, 16), 700), (Segment(0, 4, 4), 0), (Segment(2, 510, 8), 500))
    segments, firsts = tuple(block for block, _ in blocks), tuple(first for _, first in blocks)
    for mask in (
        AttentionMask(),
        AttentionMask(causal=True),
        AttentionMask(causal=True, window=40),
        AttentionMask(window=600),
    ):
        found = []
        for own in (kernels, ReferenceKernels()):
            k_cache, v_cache = (cache.clone() for cache in known)
            if own is kernels:  # what no block sees is poison
                for (slot, start, count), first in zip(
                    ((s.slot, s.start, s.count) for s in segments), firsts, strict=True
                ):
                    for cache in (k_cache, v_cache):
                        cache[slot, :, :first] = float("nan")
                        cache[slot, :, start + count :] = float("nan")
            batch = BlockBatch(32, DEVICE)
            batch.before = firsts
            batch.load(Step(segments, 32), torch.zeros(28, dtype=torch.int64))
            own.prepare_step(batch)
            q = own.rotate_store(qkv, HeadPrep(None, norms[0], norms[1], 1e-6), rope, batch, k_cache, v_cache)
            found.append(own.attend_block(q, k_cache, v_cache, batch, mask))
        assert distance(found[0][:28], found[1][:28]) < TOLERANCE[dtype]
        assert not found[0][28:].any()


@pytest.fixture(scope="module", params=[(DEMO, dtype) for dtype in DTYPES] + [(WIDE, dtype) for dtype in DTYPES])
def whole(request):
    """A draft whose slot 0 holds rows that were computed in chunks of C, with its proposals behind them."""
    config, dtype = request.param
    draft = draft_of(config, dtype)
    rows = aux_hidden_states_of(config, LENGTH, dtype)
    extend_in_pieces(draft, rows, [(512, 512)])
    [expected] = proposed(draft, BlockRequest(0, 0, LENGTH, 9, 15))
    return draft, rows, expected


def same_rows(draft, ours: int, theirs: int, stop: int) -> bool:
    first, second = draft.rows.export(ours, 0, stop), draft.rows.export(theirs, 0, stop)
    return all(same_bits(first[name], second[name]) for name in first)


def test_proposals_are_those_of_the_reference_kernels(whole):
    draft, rows, expected = whole
    plain = draft_of(draft.config, torch.float32, ReferenceKernels(), rows.dtype)
    extend_in_pieces(plain, rows.float(), [(512, 512)])
    [exact] = proposed(plain, BlockRequest(0, 0, LENGTH, 9, 15))
    assert distance(expected, exact) < TOLERANCE[rows.dtype]


@pytest.mark.parametrize(
    "pieces", [[(64, 64)], [(512, 300), (128, 128)], [(512, 500), (16, 9)], [(512, 512), (128, 128), (4, 1)]]
)
def test_rows_in_any_pieces_are_rows_in_chunks_bit_for_bit(whole, pieces):
    draft, rows, expected = whole
    extend_in_pieces(draft, rows, pieces, slot=1)
    assert same_rows(draft, 0, 1, LENGTH)
    assert same_bits(proposed(draft, BlockRequest(1, 0, LENGTH, 9, 15))[0], expected)


def test_a_block_is_proposed_the_same_whoever_asks_beside(whole):
    draft, _, expected = whole
    for _ in range(3):  # eager, recorded, replayed
        for slot in (1, 2, 3):
            draft.copy_rows(0, slot, 0, LENGTH)
        asks = [
            BlockRequest(2, 3, 300, 1, 1),
            BlockRequest(1, 0, LENGTH, 9, 15),
            BlockRequest(3, 0, 17, 4, 2),
            BlockRequest(0, 0, LENGTH, 9, 15),
        ]
        found = proposed(draft, *asks)
        assert same_bits(found[1], expected)
        assert same_bits(found[3], expected)
        found = proposed(draft, *asks[1:])
        assert same_bits(found[0], expected)
        assert same_bits(proposed(draft, asks[-1])[0], expected)


def test_rows_taken_out_and_put_back_are_proposed_the_same(whole):
    draft, rows, expected = whole
    taken = [draft.rows.export(0, start, start + 100) for start in range(0, LENGTH, 100)]
    extend_in_pieces(draft, aux_hidden_states_of(draft.config, LENGTH, rows.dtype, seed=1), [(512, 512)], slot=2)
    for index, part in enumerate(taken):
        draft.rows.import_(2, index * 100, part)
    assert same_bits(proposed(draft, BlockRequest(2, 0, LENGTH, 9, 15))[0], expected)


def test_replayed_graphs_give_the_bits_of_eager_kernels_and_of_kernels_without_overlap(whole):
    draft, rows, expected = whole
    eager, plain = triton_cuda.TritonKernels(DEVICE), triton_cuda.TritonKernels(DEVICE, pdl=False)
    eager.graphs.enabled = False
    for kernels in (eager, plain):
        other = draft_of(draft.config, rows.dtype, kernels)
        for _ in range(3):
            extend_in_pieces(other, rows, [(512, 512), (64, 40)])
            assert same_bits(proposed(other, BlockRequest(0, 0, LENGTH, 9, 15))[0], expected)


def test_an_embedding_in_host_memory_proposes_the_same(whole):
    draft, rows, expected = whole
    away = draft_of(draft.config, rows.dtype, away=True)
    assert away.memory()["weights"] == draft.memory()["weights"]
    for _ in range(3):  # eager, recorded, replayed
        extend_in_pieces(away, rows, [(512, 512)])
        assert same_bits(proposed(away, BlockRequest(0, 0, LENGTH, 9, 15))[0], expected)


def test_more_keys_than_splits_are_weighed_in_larger_ones():
    config = evolve(DEMO, num_layers=1, masks=(FULL,))
    draft = draft_of(config, torch.bfloat16, slots=1, capacity=20_000)
    rows = aux_hidden_states_of(config, 512, torch.bfloat16)
    for start in range(0, 19_968, 512):
        extend(draft, 512, (0, start, rows))
    [found] = proposed(draft, BlockRequest(0, 0, 19_968, 9, 15))
    plain = draft_of(config, torch.float32, ReferenceKernels(), torch.bfloat16, slots=1, capacity=20_000)
    for start in range(0, 19_968, 512):
        extend(plain, 512, (0, start, rows.float()))
    assert distance(found, proposed(plain, BlockRequest(0, 0, 19_968, 9, 15))[0]) < TOLERANCE[torch.bfloat16]


def test_a_head_size_without_a_kernel_is_refused_at_once():
    config = evolve(DEMO, head_dim=80, rotary=Rotary(80, 1e6))
    with pytest.raises(ValueError, match="head_dim 80 is not supported on CUDA"):
        draft_of(config, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_forward_never_waits_for_the_device():
    """Torch raises at an operation that makes the host wait, while its debug mode is "error"."""
    draft, rows = draft_of(WIDE, torch.bfloat16), aux_hidden_states_of(WIDE, 16, torch.bfloat16)
    for _ in range(3):
        extend(draft, 16, (0, 0, rows))
        draft.logits([BlockRequest(0, 0, 16, 9, 15)])
    kernels = draft._kernels  # noqa: SLF001 - the steps without their one host copy
    context, block = draft._contexts[16, len(draft.aux_layers)], draft._blocks[16]  # noqa: SLF001
    waited_for = torch.ones(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            waited_for.item()
        for name, buffers in (("extend", context), ("propose", block)):
            kernels.prepare_step(buffers.batch)
            kernels.launch(name, buffers.batch, lambda: pytest.fail("no graph was recorded"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def large():
    config = evolve(WIDE, hidden_size=2048, intermediate_size=8192, num_heads=16)
    draft = draft_of(config, torch.bfloat16)
    extend(draft, 64, (0, 0, aux_hidden_states_of(config, 60, torch.bfloat16)))
    return draft


def test_parking_gives_device_memory_back_and_unparking_the_same_bits(large):
    ask = BlockRequest(0, 0, 60, 9, 15)
    for _ in range(2):
        [expected] = proposed(large, ask)
    loaded = large.memory()
    assert loaded["host"] == 0
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        assert large.offload() >= loaded["weights"]
        assert before - torch.cuda.memory_allocated() >= loaded["weights"]
        held = large.memory()
        assert (large.weights_state, held["weights"], held["kv"]) == ("parked", 0, loaded["kv"])
        assert loaded["weights"] <= held["host"] < loaded["weights"] * 1.01
        with pytest.raises(NotLoaded):
            large.logits([ask])
        assert large.load_back() >= loaded["weights"]
        for _ in range(3):
            assert same_bits(proposed(large, ask)[0], expected)
    large.release()
    assert (large.weights_state, large.memory()["host"], large.memory()["weights"]) == ("released", 0, 0)
    large.load_back()
    assert same_bits(proposed(large, ask)[0], expected)


@pytest.mark.parametrize("released", [False, True])
def test_an_unparking_without_room_leaves_the_draft_as_it_was(large, released):
    ask = BlockRequest(0, 0, 60, 9, 15)
    [expected] = proposed(large, ask)
    if released:
        large.release()
    else:
        large.offload()
    state, held = large.weights_state, large.memory()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            large.load_back()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (large.weights_state, large.memory()) == (state, held)
    large.load_back()
    assert same_bits(proposed(large, ask)[0], expected)
