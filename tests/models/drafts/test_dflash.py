"""Tests of the DFlash draft: it follows the formulas, and has the same bits however its rows came about and whatever
else is asked for.
"""

from __future__ import annotations

import os

import pytest
import torch
from attrs import evolve

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest, NotLoaded
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.offload import OffloadableWeights, copy_to_host, copy_tree, count_bytes
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomDraft, RandomWeights
from tests.models.checkpoints import proven, same_bits, tokens_of
from tests.models.draft_models import (
    GEOMETRIES,
    TARGET,
    Tensors,
    aux_hidden_states_of,
    config_of,
    draft_of,
    extend,
    extend_in_pieces,
    head_of,
    proven_draft,
    random_tensors,
    save_draft,
    slow_logits,
)
from tests.pairs import in_turns, take_turns, usual_where

LENGTH = 700
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@pytest.fixture(scope="module", params=[*GEOMETRIES])
def config(request):
    return GEOMETRIES[request.param]


def distance(a, b) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@usual_where(lambda places: places["config"] == 0 or places["dtype"] + places["kernels"] < 2)
@pytest.mark.parametrize("kernels", [None, ReferenceKernels()], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_proposals_are_those_of_the_formulas(config, dtype, kernels):
    tensors = Tensors({name: tensor.to(dtype) for name, tensor in random_tensors(config).items()})
    draft = draft_of(config, tensors, dtype, kernels=kernels)
    rows = aux_hidden_states_of(config, 90, dtype)
    for length, first, count in ((90, 0, config.block - 1), (90, 70, 3), (3, 3, 5)):
        extend_in_pieces(draft, rows[:, :length], [(64, 64)], slot=2)
        found = draft.logits([BlockRequest(2, first, length, 17, count)])
        size = min(4 if count <= 3 else 8 if count <= 7 else 16, config.block)
        block = [17, *[config.mask_token_id] * (size - 1)]
        table = head_of(config, ReferenceKernels(), dtype).embedding
        expected = slow_logits(config, tensors, table, aux_hidden_states=rows[:, :length], first=first, tokens=block)
        assert found.shape == (count, TARGET.vocab_size)
        assert found.dtype == torch.float32
        assert distance(found, expected[1 : count + 1]) < TOLERANCE[dtype]


def test_a_mask_embedding_of_its_own_stands_for_the_targets(config):
    tensors = random_tensors(config)
    plain = draft_of(config, tensors)
    own = torch.randn(config.hidden_size)
    masked = draft_of(config, Tensors({**tensors, "mask_embedding": own.unsqueeze(0)}))
    for draft in (plain, masked):
        extend(draft, 32, (0, 0, aux_hidden_states_of(config, 20)))
    found = masked.logits([BlockRequest(0, 0, 20, 17, 7)])
    assert not torch.equal(found, plain.logits([BlockRequest(0, 0, 20, 17, 7)]))
    table = head_of(config, ReferenceKernels()).embedding
    table[config.mask_token_id] = own
    block = [17, *[config.mask_token_id] * 7]
    expected = slow_logits(
        config, tensors, table, aux_hidden_states=aux_hidden_states_of(config, 20), first=0, tokens=block
    )
    same_head = [vocab for vocab in range(TARGET.vocab_size) if vocab != config.mask_token_id]
    assert distance(found[:, same_head], expected[1:8, same_head]) < 2e-5


@pytest.fixture(scope="module", params=take_turns([*GEOMETRIES], DTYPES))
def whole(request):
    """A draft whose slot 0 holds rows that were computed in chunks of C, with its proposals behind some of them."""
    name, dtype = request.param
    config = GEOMETRIES[name]
    draft = draft_of(config, dtype=dtype)
    rows = aux_hidden_states_of(config, LENGTH, dtype)
    extend_in_pieces(draft, rows, [(256, 256)])
    expected = {at: draft.logits([BlockRequest(0, 0, at, 9, draft.block - 1)]).clone() for at in (LENGTH, 505, 64)}
    extend_in_pieces(draft, rows, [(256, 256)])  # the blocks were written over rows further on
    return draft, rows, expected


def same_rows(draft, ours: int, theirs: int, stop: int) -> bool:
    first, second = draft.rows.export(ours, 0, stop), draft.rows.export(theirs, 0, stop)
    return first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)


def proposed(draft, slot: int, at: int):
    return draft.logits([BlockRequest(slot, 0, at, 9, draft.block - 1)])


@in_turns("whole", "pieces", full=2)
@pytest.mark.parametrize(
    "pieces",
    [
        [(64, 64)],
        [(128, 128), (256, 192), (256, 256)],
        [(256, 256), (16, 9), (4, 1), (8, 7), (4, 3), (32, 20)],
        [(256, 256), (256, 250), (4, 4), (16, 16)],
    ],
)
def test_rows_in_any_pieces_are_rows_in_chunks_bit_for_bit(whole, pieces):
    draft, rows, expected = whole
    extend_in_pieces(draft, rows, pieces, slot=1)
    assert same_rows(draft, 0, 1, LENGTH)
    assert same_bits(proposed(draft, 1, LENGTH), expected[LENGTH])


def test_rows_of_several_slots_in_one_step_are_their_own(whole):
    draft, rows, _ = whole
    for slot in (1, 2, 3):
        extend_in_pieces(draft, rows[:, :500], [(256, 256)], slot=slot)
    parts = [(slot, 500, rows[:, 500 : 500 + count]) for slot, count in ((2, 16), (1, 1), (3, 9))]
    extend(draft, 32, *parts)
    assert same_rows(draft, 0, 2, 516)
    assert same_rows(draft, 0, 1, 501)
    assert same_rows(draft, 0, 3, 509)


def test_a_block_is_proposed_the_same_whoever_asks_beside(whole):
    draft, _, expected = whole
    full = draft.block - 1
    for asks in (
        [BlockRequest(1, 0, 64, 9, full), BlockRequest(0, 0, LENGTH, 9, full), BlockRequest(3, 0, 505, 9, full)],
        [
            BlockRequest(2, 3, 300, 1, 1),
            BlockRequest(1, 0, 505, 9, full),
            BlockRequest(3, 0, 17, 4, 2),
            BlockRequest(0, 0, LENGTH, 9, full),
        ],
    ):
        for slot in (1, 2, 3):
            draft.copy_rows(0, slot, 0, LENGTH)
        found = draft.logits(asks).split([ask.count for ask in asks])
        for ask, logits in zip(asks, found, strict=True):
            if ask.count == full:
                assert same_bits(logits, expected[ask.position])
    again = draft_of(draft.config, dtype=draft.rows.export(0, 0, 1)["draft.layers.0.k"].dtype, buckets=(32, 256))
    again.rows.import_(3, 0, draft.rows.export(0, 0, 505))
    assert same_bits(proposed(again, 3, 505), expected[505])


def test_rows_taken_out_put_back_or_copied_are_proposed_the_same(whole):
    draft, rows, expected = whole
    taken = [draft.rows.export(0, start, start + 100) for start in range(0, LENGTH, 100)]
    extend_in_pieces(draft, aux_hidden_states_of(draft.config, LENGTH, rows.dtype, seed=1), [(256, 256)], slot=2)
    for index in (3, 0, 6, 5, 1, 2, 4):
        draft.rows.import_(2, index * 100, taken[index])
    assert same_bits(proposed(draft, 2, LENGTH), expected[LENGTH])
    draft.copy_rows(0, 3, 0, 300)
    draft.copy_rows(2, 3, 300, 505)
    assert same_bits(proposed(draft, 3, 505), expected[505])


def test_a_block_leaves_nothing_behind(whole):
    """After proposals and accepted rows, in rounds, the slot is as if it had been computed at once."""
    draft, rows, expected = whole
    draft.copy_rows(0, 1, 0, 400)
    at = 400
    for kept in (1, 7, 16, 3, 16, 2, 16, 16, 12, 16):
        draft.logits([BlockRequest(1, 0, at, 30 + kept, draft.block - 1)])
        extend(draft, 16, (1, at, rows[:, at : at + kept]))
        at += kept
    assert at == 505
    assert same_rows(draft, 0, 1, 505)
    assert same_bits(proposed(draft, 1, 505), expected[505])


def test_context_rows_before_the_first_valid_one_have_no_say(whole):
    draft, rows, _ = whole
    strange = aux_hidden_states_of(draft.config, 600, rows.dtype, seed=1)
    found = []
    for slot, source in ((1, rows), (2, strange)):
        extend_in_pieces(draft, source[:, :600], [(256, 256)], slot=slot)
        draft.copy_rows(0, slot, 530, 600)
        found.append(draft.logits([BlockRequest(slot, 530, 600, 9, 7)]).clone())
    assert same_bits(*found)
    assert not same_bits(draft.logits([BlockRequest(1, 529, 600, 9, 7)]), found[0])


def test_more_blocks_than_one_forward_holds_are_proposed_to_in_turns():
    config = config_of()
    draft = draft_of(config, slots=20)
    rows = aux_hidden_states_of(config, 100)
    for slot in range(20):
        extend(draft, 128, (slot, 0, rows[:, : 60 + slot]))
    asks = [BlockRequest(slot, 0, 60 + slot, slot, 1 + slot % 15) for slot in range(20)]
    alone = [draft.logits([ask]).clone() for ask in asks]
    assert same_bits(draft.logits(asks), torch.cat(alone))


def test_a_drafts_rows_follow_the_targets_hidden_states_bit_for_bit():
    config = config_of()
    found = []
    for cuts in ([256, 44], [64] * 4 + [32, 12], [256, 16, 16, 4, 4, 4]):
        kernels, draft_kernels = (
            proven(TARGET, torch.float32, 400).copy_for_shard(),
            proven_draft(config, torch.float32, 400).copy_for_shard(),
        )
        shard = DenseShard(
            TARGET,
            RandomWeights(TARGET, scale=0.1),
            kernels,
            ShardPlacement(slots=2, capacity=400, aux_layers=(6, 1, 4)),
        )
        draft = DFlashDraft(
            config,
            random_tensors(config),
            draft_kernels,
            Pipeline((shard,)).head,
            DraftPlacement(slots=2, capacity=400),
        )
        tokens, at = tokens_of(300), 0
        for count in cuts:
            bucket = next(bucket for bucket in shard.spec.buckets if bucket >= count)
            step = Step((Segment(1, at, count),), bucket, rows_only=True)
            part = tokens[at : at + count]
            draft.extend(step, part, shard.forward(step, part).aux_hidden_states)
            at += count
        found.append(draft.logits([BlockRequest(1, 0, 300, int(tokens[3]), 15)]).clone())
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])
    middle = DenseShard(
        TARGET, RandomWeights(TARGET), CpuKernels(torch.float32), ShardPlacement(layers=range(1, 9), capacity=64)
    )
    with pytest.raises(ValueError, match=r"layers 1\.\.8 lack the embedding"):
        Pipeline((middle,)).head  # noqa: B018


def test_what_cannot_be_is_refused_by_name():
    draft = draft_of(config_of(), capacity=100)
    for message, ask in [
        ("16 proposals; accepted: 1..15", BlockRequest(0, 0, 10, 1, 16)),
        ("0 proposals", BlockRequest(0, 0, 10, 1, 0)),
        ("slot 4 is not in 0..3", BlockRequest(4, 0, 10, 1, 1)),
        ("context rows 11..10", BlockRequest(0, 11, 10, 1, 1)),
        ("context rows 0..101", BlockRequest(0, 0, 101, 1, 1)),
        ("token 211 is not in 0..210", BlockRequest(0, 0, 10, 211, 1)),
    ]:
        with pytest.raises(ValueError, match=message):
            draft.logits([ask])
    with pytest.raises(ValueError, match="a slot asks twice"):
        draft.logits([BlockRequest(0, 0, 10, 1, 1), BlockRequest(0, 0, 11, 1, 1)])
    with pytest.raises(ValueError, match="nothing is asked"):
        draft.logits([])
    rows = aux_hidden_states_of(draft.config, 4)
    with pytest.raises(ValueError, match=r"rows 98\.\.102"):
        extend(draft, 4, (0, 98, rows))
    with pytest.raises(ValueError, match="bucket 5"):
        extend(draft, 5, (0, 0, rows))
    with pytest.raises(ValueError, match="appears twice"):
        extend(draft, 8, (0, 0, rows), (0, 4, rows))
    exported = dict(draft.rows.export(0, 0, 64))
    with pytest.raises(ValueError, match=r"draft\.layers\.9\.k"):
        draft.rows.import_(1, 0, {**exported, "draft.layers.9.k": exported["draft.layers.0.k"]})
    with pytest.raises(ValueError, match=r"draft\.layers\.0\.v: torch\.float64"):
        draft.rows.import_(1, 0, {**exported, "draft.layers.0.v": exported["draft.layers.0.v"].double()})
    with pytest.raises(ValueError, match=r"rows 50\.\.114"):
        draft.rows.import_(1, 50, exported)
    with pytest.raises(ValueError, match="do not hold a block of 16"):
        draft_of(config_of(), buckets=(4, 8))
    with pytest.raises(ValueError, match=r"the target's embedding is torch\.float32"):
        DFlashDraft(
            config_of(),
            random_tensors(config_of()),
            CpuKernels(torch.bfloat16),
            head_of(config_of(), CpuKernels(torch.float32)),
            DraftPlacement(dtype=torch.bfloat16),
        )


def test_the_identity_is_of_what_rows_depend_on():
    config = config_of()
    kernels, ours = proven_draft(config, torch.float32, 1200), draft_of(config).identity
    assert draft_of(config, slots=2, capacity=64, buckets=(16, 64), kernels=kernels.copy_for_shard()).identity == ours
    assert draft_of(evolve(config, block=8)).identity == ours
    other = [
        draft_of(config, dtype=torch.bfloat16),
        draft_of(evolve(config, aux_layers=(4, 1, 6))),
        draft_of(evolve(config, rotary=Rotary(16, 1e5))),
        draft_of(evolve(config, rms_norm_eps=1e-5)),
        draft_of(config, RandomDraft(config, seed=1)),
        draft_of(config, RandomDraft(config, seed=2)),
        draft_of(config, kernels=kernels.with_plan(evolve(kernels._plan, steps=()))),  # noqa: SLF001 - other products
    ]
    assert len({ours, *(draft.identity for draft in other)}) == 1 + len(other)


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def large(tmp_path):
    """A draft of some 60 MB in a folder, with a context."""
    config = config_of(num_layers=1, hidden_size=512, intermediate_size=8192, masks=config_of().masks[:1])
    save_draft(tmp_path, config, random_tensors(config))
    target = evolve(TARGET, hidden_size=512)
    draft = draft_of(config, DraftCheckpoint.open(tmp_path, target), capacity=64, kernels=CpuKernels(torch.float32))
    extend(draft, 64, (0, 0, aux_hidden_states_of(config, 50)))
    return draft


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read where Linux tells it")  # noqa: PTH110
def test_parking_gives_memory_back_and_unparking_the_same_bits(large):
    asks = [BlockRequest(0, 0, 50, 9, 15)]
    expected = large.logits(asks).clone()
    loaded, before = large.memory(), resident()
    assert loaded["weights"] > 50 << 20
    assert large.weights_state == "loaded"
    assert large.offload() == loaded["weights"]
    assert before - resident() > 0.8 * loaded["weights"]
    assert large.weights_state == "parked"
    assert large.memory() == {**large.memory(), "weights": 0, "host": 0, "kv": loaded["kv"]}
    assert large.offload() == 0
    for forward in (
        lambda: large.logits(asks),
        lambda: extend(large, 4, (1, 0, aux_hidden_states_of(large.config, 1))),
    ):
        with pytest.raises(NotLoaded, match="the draft is parked"):
            forward()
    rows = large.rows.export(0, 0, 50)
    assert large.load_back() == loaded["weights"]
    assert large.load_back() == 0
    assert large.memory()["weights"] == loaded["weights"]
    assert same_bits(large.logits(asks), expected)
    large.release()
    assert (large.weights_state, large.memory()["weights"]) == ("released", 0)
    large.load_back()
    large.rows.import_(1, 0, rows)
    assert same_bits(large.logits([BlockRequest(1, 0, 50, 9, 15)]), expected)


def test_files_that_have_gone_leave_a_parked_draft(large, tmp_path):
    large.offload()
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        large.load_back()
    assert large.weights_state == "parked"
    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    large.load_back()
    assert large.weights_state == "loaded"


class Failing(Tensors):
    error: Exception | None = None

    def read(self, name):
        if self.error is not None and name == "norm.weight":
            raise self.error
        return super().read(name)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), torch.OutOfMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError),
        (CheckpointError("gone"), CheckpointError),
        (RuntimeError("something else"), RuntimeError),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else "",
)
def test_an_unparking_that_fails_leaves_a_parked_draft_that_can_be_unparked(error, raised):
    config = config_of()
    weights = Failing(random_tensors(config))
    draft = draft_of(config, weights)
    extend(draft, 32, (0, 0, aux_hidden_states_of(config, 20)))
    expected = draft.logits([BlockRequest(0, 0, 20, 9, 15)]).clone()
    draft.offload()
    weights.error = error
    with pytest.raises(raised):
        draft.load_back()
    assert draft.weights_state == "parked"
    assert draft.memory()["weights"] == 0
    weights.error = None
    draft.load_back()
    assert same_bits(draft.logits([BlockRequest(0, 0, 20, 9, 15)]), expected)


def test_memory_is_what_weights_caches_and_buffers_take(config):
    kernels = CpuKernels(torch.float32, own=False)  # other ways may pad weights, or keep those of 16 bits in float32
    draft = draft_of(config, kernels=kernels)
    published = sum(tensor.numel() * 4 for tensor in random_tensors(config).values())
    twice = sum(  # context rows go through a copy of their part of qkv
        tensor.numel() * 4 for name, tensor in random_tensors(config).items() if "k_proj" in name or "v_proj" in name
    )
    held = draft.memory()
    assert held["weights"] == published + twice
    rows = -(-(1200 + config.block) // CpuKernels.kv_tile) * CpuKernels.kv_tile
    assert held["kv"] == 4 * rows * config.kv_bytes_per_token(torch.float32)
    extend(draft, 64, (0, 0, aux_hidden_states_of(config, 40)))
    assert draft.memory()["buffers"] - held["buffers"] >= 64 * len(config.aux_layers) * config.hidden_size * 4


def test_weights_that_share_memory_share_it_in_the_copy_too():
    """Make weights parkable on any device, as they are on CUDA."""
    whole = torch.randn(10, 8)
    tree = (whole, [whole[4:], torch.arange(5, dtype=torch.bfloat16)], None)
    size, host = copy_to_host(tree)
    assert size == 512 + 256
    back = copy_tree(host, lambda count: torch.empty(count, dtype=torch.uint8))
    for copy in (host, back):
        assert same_bits(copy[0], whole)
        assert same_bits(copy[1][1], tree[1][1])
        assert copy[1][0].data_ptr() - copy[0].data_ptr() == 4 * 8 * 4
        assert copy[2] is None
    assert count_bytes(tree) == 10 * 8 * 4 + 5 * 2
    assert count_bytes(host) == count_bytes(back) == size


def test_weights_that_were_never_loaded_are_released():
    parking = OffloadableWeights(lambda: (torch.zeros(4),), torch.device("cpu"))
    assert (parking.state, parking.offload(), parking.weights_bytes) == ("released", 0, 0)
    assert parking.load_back() == 16
    assert parking.state == "loaded"
