"""A row of a model with windows has the same bits however rows before it, and it itself, were computed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from adapters.models.decoder.cache.window_pages import WindowPages, count_shared_rows, count_window_rows
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import family_of
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from adapters.transfer.copy_rows import create_movers
from effects.ids import PAGE
from tests.models.checkpoints import proven, same_bits, tokens_of
from tests.models.hybrids import (
    CHUNKS,
    LENGTH,
    check_rolled_back_rows,
    check_rows_in_pieces,
    check_slots_side_by_side,
    computed,
    in_pieces,
    same_sequence,
    whole_of,
)
from tests.models.windowed import WINDOWED, read_config
from tests.pairs import in_turns, take_turns

SLOTS = 4
MIXED = read_row_types("k=int8,v=fp8", torch.float32)
MODELS = ("gemma3", "gemma4, inputs of layers, rows shared", "gemma4, experts", "laguna")
pytestmark = pytest.mark.usefixtures("two_threads")


def shard_of(name: str, kernels, dtype=torch.float32, **more: object) -> DenseShard:
    own = read_config(name)
    weights = RandomWeights(own, scale=own.hidden_size**-0.5)
    how = {"slots": SLOTS, "capacity": 512, "aux_layers": (own.num_layers - 1,), "state_checkpoints": 2, **more}
    return DenseShard(own, weights, kernels, ShardPlacement(dtype=dtype, **how))


@pytest.fixture(scope="module", params=take_turns(MODELS, [torch.float32, torch.bfloat16]))
def whole(request):
    """A shard whose slot 0 holds a sequence computed in chunks of C, with the last layer's output."""
    name, dtype = request.param
    kernels = proven(read_config(name), dtype, 512).copy_for_shard()
    return whole_of(shard_of(name, kernels, dtype))


@in_turns("whole", "pieces", full=1, one_in=5)
@in_pieces
def test_rows_in_any_pieces_are_rows_of_chunks_bit_for_bit(whole, pieces):
    check_rows_in_pieces(whole, pieces)


def test_rows_in_random_pieces_too(whole):
    shard, tokens, expected = whole
    draw = random.Random(5)
    counts = [draw.choice((1, 1, 3, 7, 16, 40, 64, 90, 150)) for _ in range(60)]
    pieces = [(next(bucket for bucket in shard.spec.buckets if bucket >= count), count) for count in counts]
    assert same_bits(computed(shard, tokens, pieces, slot=1), expected)
    assert same_sequence(shard, 0, 1)


@in_turns("whole", "start", full=1, one_in=4)
@pytest.mark.parametrize(("start", "kept"), [(64, 0), (100, 30), (127, 1), (128, 5), (250, 30)])
def test_what_is_rolled_back_has_never_happened(whole, start, kept):
    check_rolled_back_rows(whole, start, kept)


def test_a_slot_goes_on_from_any_row_behind_its_state(whole):
    shard, tokens, expected = whole
    computed(shard, tokens[:300], CHUNKS, slot=1)
    for start in (299, 260, 256):
        assert same_bits(computed(shard, tokens[:300], [(4, 3)], slot=1, start=start), expected[start:300])
    for start in (255, 301, 320):
        with pytest.raises(ValueError, match=f"nothing continues from {start}"):
            computed(shard, tokens, [(4, 3)], slot=1, start=start)


def test_slots_side_by_side_are_each_as_if_alone(whole):
    check_slots_side_by_side(whole)


def test_windows_are_kept_in_places_taken_out_and_copied(whole):
    shard, tokens, expected = whole
    computed(shard, tokens[:200], CHUNKS, slot=1)
    shard.states.keep(1, 0)  # at 192
    state = {name: tensor.clone() for name, tensor in shard.states.export(1).items()}
    computed(shard, tokens.flip(0), CHUNKS, slot=1)
    computed(shard, tokens.flip(0), CHUNKS, slot=3)
    shard.rows.copy(0, 1, LENGTH)
    shard.rows.copy(0, 3, LENGTH)
    shard.states.load(0, 1)
    shard.states.import_(3, state, 192)
    for slot in (1, 3):
        assert same_bits(computed(shard, tokens, [(16, 9), (0, 0)], slot=slot, start=192), expected[192:])
    shard.states.copy(0, 2)
    shard.rows.copy(0, 2, LENGTH)
    assert same_sequence(shard, 0, 2)
    with pytest.raises(ValueError, match="states stand at multiples of 64"):
        shard.states.import_(3, state, 200)
    with pytest.raises(ValueError, match="checkpoint 2 is not one of 2"):
        shard.states.keep(1, 2)


def test_a_chunk_that_fails_takes_the_window_of_its_slot_and_no_other(whole, monkeypatch):
    shard, tokens, expected = whole
    for slot in (1, 2):
        computed(shard, tokens[:100], CHUNKS, slot=slot)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(shard._kernels, "attend", exhausted)  # noqa: SLF001
        with pytest.raises(torch.OutOfMemoryError):
            computed(shard, tokens[:356], CHUNKS, slot=1, start=100)
        with pytest.raises(torch.OutOfMemoryError):
            computed(shard, tokens[:120], [(64, 20)], slot=2, start=100)
    assert not shard.states.survives_failure
    with pytest.raises(ValueError, match="nothing continues from 100"):
        computed(shard, tokens, [(64, 20), (0, 0)], slot=1, start=100)
    assert same_bits(computed(shard, tokens, [(64, 20), (0, 0)], slot=2, start=100), expected[100:])
    assert same_bits(computed(shard, tokens, CHUNKS, slot=1), expected)


def run_tree(shard: DenseShard, slot: int, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Run a tree behind `start` rows, of which a path in its second branch stays. Returns the output of its nodes."""
    branches = Step((Segment(slot, start, 6), Segment(slot, start + 2, 3)), 16)
    given = torch.cat((tokens[start : start + 6], tokens[:3]))
    found = shard.forward(branches, given).hidden[:9].clone()
    shard.commit(branches, [(0, 1, 6, 7)])
    return found


@pytest.mark.parametrize("start", [3, 250])
def test_nodes_of_trees_are_rows_of_chains(whole, start):
    shard, tokens, expected = whole
    computed(shard, tokens[:start], CHUNKS, slot=1)
    found = run_tree(shard, 1, tokens, start)
    assert same_bits(found[:6], expected[start : start + 6])
    path = torch.cat((tokens[: start + 2], tokens[:3]))
    assert same_bits(found[6:], computed(shard, path, CHUNKS, slot=2)[start + 2 :])
    after = torch.cat((path[: start + 4], tokens[50:120]))
    whole_sequence = computed(shard, after, CHUNKS, slot=2)
    assert same_bits(computed(shard, after, [(64, 35)], slot=1, start=start + 4), whole_sequence[start + 4 :])
    first, second = shard.states.export(1), shard.states.export(2)
    assert all(same_bits(first[name], second[name]) for name in first)


def test_trees_are_refused_by_name_where_rows_cross_a_cut():
    name = "gemma4, inputs of layers, rows shared"
    shard = shard_of(name, ReferenceKernels(), layers=range(2), aux_layers=())
    assert shard.states.tree_obstacle == "layers of one shard read rows of layers of another one"
    with pytest.raises(ValueError, match="a tree: layers of one shard read rows of layers of another one"):
        shard.forward(Step((Segment(1, 0, 2), Segment(1, 1, 1)), 4), tokens_of(3))
    assert shard_of(name, ReferenceKernels()).states.tree_obstacle == ""


class PagedReference(ReferenceKernels):
    is_paged = True


PAGED = ("gemma3, twelve layers", "gemma3, a long window", "gemma4", "gemma4, inputs of layers, rows shared")


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in PAGED)])
def test_windows_in_pages_are_those_in_one_piece(name):
    """It is so on a GPU: there are fewer pages than a sequence has, and layers of a chunk use each other's pages."""
    plain = whole_of(shard_of(name, ReferenceKernels()))
    paged = shard_of(name, PagedReference(), pages=SLOTS * 2)
    assert isinstance(paged.states.cache, WindowPages)
    one_by_one = [(0, PAGE - 20), *[(4, 1)] * 40, (0, 0)]  # from one page into the next
    for number, pieces in enumerate(([(0, 0)], [(64, 64)], one_by_one, [(128, 100), (0, 300), (16, 9)])):
        shard, tokens, _ = plain
        slot = number % SLOTS
        assert torch.equal(computed(paged, tokens, pieces, slot=slot), computed(shard, tokens, pieces, slot=1))
        first, second = shard.states.export(1), paged.states.export(slot)
        assert all(torch.equal(first[name], second[name]) for name in first)
    shard, tokens, _ = plain
    for one in (shard, paged):
        computed(one, tokens[:250], [(0, 0)], slot=1)
    assert torch.equal(run_tree(shard, 1, tokens, 250), run_tree(paged, 1, tokens, 250))


def test_memory_of_windows_is_counted(whole):
    shard, _, _ = whole
    own = shard.config
    held, checkpoint = own.state_bytes(shard.spec.dtype)
    assert checkpoint == sum(spec.nbytes for spec in shard.states.specs)
    rows = SLOTS * shard.spec.capacity * own.kv_bytes_per_token(shard.spec.dtype)
    assert shard.memory()["kv"] == rows + 2 * checkpoint + SLOTS * held
    window = max(kind.traits.window for kind in own.kinds)
    token = checkpoint // window
    assert held == token * count_window_rows(window)
    paged = shard_of("gemma3", PagedReference(), pages=SLOTS * 2)
    held, checkpoint = paged.config.state_bytes(torch.float32)
    shared = paged.config.shared_bytes(torch.float32, paged.spec.buckets[-1])
    windowed = len(paged.states.layers)
    row = checkpoint // paged.config.kinds[0].traits.window // windowed
    assert shared == row * count_shared_rows(paged.spec.buckets[-1], windowed, lasting=0)
    assert paged.states.nbytes == SLOTS * held + 2 * checkpoint + shared + paged.states.cache.table.nbytes


@pytest.mark.parametrize("cut", [0, 3, 4, 5])
def test_rows_that_are_read_after_their_own_layer_last_until_the_step_ends(cut):
    """Layers 2 and 3 are read by layers 4 and 5, in the same shard or in the next one. Layer 2 has a window."""
    own = read_config("gemma4, inputs of layers, rows shared")
    assert own.list_lasting(range(cut)) == ((2,) if cut > 2 else ())
    assert own.list_lasting(range(cut, 6)) == ((2,) if cut < 5 else ())
    assert own.list_windowed(range(cut, 6)) == {0: (0, 2), 3: (2,), 4: (2,), 5: ()}[cut]
    assert read_config("gemma3").list_lasting(range(3)) == ()


def test_rows_behind_a_window_give_their_memory_back():
    shard = shard_of("gemma3", CpuKernels(torch.float32), capacity=8 * PAGE)
    step = 512
    for start in range(0, 7 * PAGE, step):
        part = Step((Segment(0, start, min(step, 7 * PAGE - start)),), step, rows_only=True)
        shard.forward(part, torch.ones(part.rows, dtype=torch.int64))
    keys = shard.states.layers[0][0]
    kept = 7 * PAGE - 64  # whole pages of 64 rows, the first of which the window of 48 rows begins in
    assert not keys[0, :, :kept].any()
    assert keys[0, :, kept : 7 * PAGE].all()


@pytest.mark.parametrize("name", ["gemma3", "gemma4, inputs of layers, rows shared"])
def test_the_probe_finds_that_every_bucket_holds(name):
    own = read_config(name)
    family = family_of({"model_type": WINDOWED[name][0]})
    shape = ProbeShape(device=torch.device("cpu"), dtype=torch.float32, chunk=256, capacity=512, sizes=(4, 16))
    found = probe(family, own, CpuKernels(torch.float32), shape)
    assert (found.mode, found.buckets) == ("buckets", (4, 16, 256))
    assert not [why for why in found.failures if "bucket" in why]


def test_layers_split_over_shards_give_the_bits_of_one():
    """The first of them has no layer that keeps all rows."""
    name, tokens = "gemma4", tokens_of(LENGTH)
    whole = shard_of(name, CpuKernels(torch.float32))
    cuts = (range(2), range(2, 4))
    split = Pipeline([shard_of(name, CpuKernels(torch.float32), layers=layers) for layers in cuts])
    expected = computed(whole, tokens, CHUNKS)
    assert same_bits(computed(split, tokens, [(0, 200), (16, 16), (4, 1), (64, 64)]), expected)
    assert split.rows.spec == whole.rows.spec
    assert {spec.name for spec in split.states.specs} == {spec.name for spec in whole.states.specs}
    split.rows.import_(2, 0, whole.rows.export(0, 0, 192))
    computed(whole, tokens[:200], CHUNKS, slot=1)
    split.states.import_(2, whole.states.export(1), 192)
    assert same_bits(computed(split, tokens, [(64, 50), (0, 0)], slot=2, start=192), expected[192:])


@in_turns("cuts", "rows", full=1)
@pytest.mark.parametrize("rows", [None, torch.int8, MIXED], ids=["plain", "coded", "of two types"])
@pytest.mark.parametrize("cuts", [(1,), (3,), (4,), (5,), (2, 5)], ids=str)
def test_layers_split_from_those_whose_rows_they_read_give_the_bits_of_one(cuts, rows):
    """Layers 4 and 5 read the rows of layers 2 and 3, and each layer has inputs that the first shard makes."""
    name, tokens = "gemma4, inputs of layers, rows shared", tokens_of(LENGTH)
    how = {"rows": rows}
    whole = shard_of(name, CpuKernels(torch.float32), **how)
    bounds = (0, *cuts, 6)
    runs = [range(begin, end) for begin, end in pairwise(bounds)]
    split = Pipeline([shard_of(name, CpuKernels(torch.float32), layers=run, **how) for run in runs])
    expected = computed(whole, tokens, CHUNKS)
    assert same_bits(computed(split, tokens, [(0, 200), (16, 16), (4, 1), (64, 64)]), expected)
    assert split.rows.spec == whole.rows.spec
    assert list(split.states.specs) == list(whole.states.specs)
    create_movers([part.rows for part in split.parts], split.rows.spec)
    split.rows.import_(2, 0, whole.rows.export(0, 0, 192))
    computed(whole, tokens[:200], CHUNKS, slot=1)
    split.states.import_(2, whole.states.export(1), 192)
    assert same_bits(computed(split, tokens, [(64, 50), (0, 0)], slot=2, start=192), expected[192:])
    layers = [part.config.kv_bytes_per_token(torch.float32, run) for part, run in zip(split.parts, runs, strict=True)]
    assert layers == [part.rows.spec.token_bytes for part in split.parts] or rows is not None


def test_a_draft_gets_the_scaled_embedding():
    shard = shard_of("gemma3", CpuKernels(torch.float32))
    before = shard.memory()["weights"]
    hidden = shard._kernels.embed(shard._embedding, torch.tensor([7]), out=torch.zeros(1, 64))  # noqa: SLF001
    assert torch.equal(shard.embedding[7], hidden[0] * 8.0)
    assert shard.memory()["weights"] == before + shard.embedding.nbytes
