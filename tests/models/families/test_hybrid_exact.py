"""On CPU a row of a hybrid model has the same bits however rows before it, and it itself, were computed."""

from __future__ import annotations

import random

import pytest
import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_5 import FAMILY
from adapters.models.kernels.cpu.delta import CpuDelta
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.delta import NativeDelta
from adapters.models.kernels.interfaces.delta_interface import DeltaShape
from adapters.models.kernels.interfaces.product_list import UnprovenProductError
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.probe_result import Numerics
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import proven, same_bits
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
from tests.pairs import in_turns, take_turns

CONFIGS = {
    "two value heads to a key head": config((2, 4, 32, 32), 512, 96, 160, 3, 3, 1, 32, 2048, 1e6, rotated=8),
    "nothing a multiple of a vector": config((3, 3, 24, 20), 203, 100, 212, 3, 4, 2, 24, 2048, 1e4, rotated=6),
    "linear alone around attention": config(
        (1, 6, 64, 48), 300, 64, 130, 3, 2, 2, 32, 2048, 1e4, kinds="lfl", rotated=32
    ),
}
BATCHED = "by batched products"
SLOTS = 4
STARTS_AND_KEPT = [(64, 0), (64, 30), (70, 1), (100, 5), (100, 0), (127, 30), (128, 0), (250, 1)]
pytestmark = pytest.mark.usefixtures("two_threads")


DTYPES = (torch.float32, torch.bfloat16)
MODELS = (*CONFIGS, BATCHED)


@pytest.fixture(scope="module", params=take_turns(MODELS, DTYPES))
def whole(request):
    """A shard whose slot 0 holds a sequence computed in chunks of C, with the last layer's output. By what is in C, if
    this installation has it, and by batched products.
    """
    name, dtype = request.param
    in_c = name != BATCHED
    own = CONFIGS[name if in_c else "nothing a multiple of a vector"]
    weights = RandomWeights(own, scale=own.hidden_size**-0.5)
    kernels = proven(own, dtype, 512, own=in_c).copy_for_shard()
    how = {"slots": SLOTS, "capacity": 512, "aux_layers": (own.num_layers - 1,), "state_checkpoints": 2}
    shard = DenseShard(own, weights, kernels, ShardPlacement(dtype=dtype, **how))
    return whole_of(shard)


@in_turns("whole", "pieces", full=1, one_in=5)
@in_pieces
def test_rows_in_any_pieces_are_rows_of_chunks_bit_for_bit(whole, pieces):
    check_rows_in_pieces(whole, pieces)


def test_rows_in_random_pieces_too(whole):
    shard, tokens, expected = whole
    draw = random.Random(5)
    for _ in range(3):
        counts = [draw.choice((1, 1, 3, 7, 16, 40, 64, 90, 150)) for _ in range(60)]
        pieces = [(next(bucket for bucket in shard.spec.buckets if bucket >= count), count) for count in counts]
        assert same_bits(computed(shard, tokens, pieces, slot=1), expected)
        assert same_sequence(shard, 0, 1)


@in_turns("whole", "start", full=1, one_in=4)
@pytest.mark.parametrize(("start", "kept"), STARTS_AND_KEPT)
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


def test_what_is_no_number_stays_in_its_slot_and_leaves_with_its_sequence(whole):
    shard, tokens, expected = whole
    state = shard.states.export(0)
    shard.states.import_(2, {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}, 64)
    computed(shard, tokens[:100], CHUNKS, slot=1)
    step = Step((Segment(2, 64, 3), Segment(1, 100, 3)), 8)
    hidden = shard.forward(step, torch.cat((tokens[64:67], tokens[100:103]))).hidden
    assert hidden[:3].isnan().any()
    assert same_bits(hidden[3:6], expected[100:103])
    shard.commit(step, [3, 3])
    shard.rows.copy(0, 2, LENGTH)  # keys and values are finite wherever they are read
    assert same_bits(computed(shard, tokens, [(64, 50), (0, 0)], slot=2), expected)


def test_states_are_kept_in_places_and_put_back_into_any_slot(whole):
    shard, tokens, expected = whole
    assert shard.states.checkpoint_count == 2
    computed(shard, tokens[:200], CHUNKS, slot=1)
    shard.states.keep(1, 0)  # at 192
    computed(shard, tokens[:300], CHUNKS, slot=1, start=200)
    shard.states.keep(1, 1)  # at 256
    computed(shard, tokens[:70].flip(0), [(64, 64)], slot=1)
    shard.rows.copy(0, 2, LENGTH)
    for slot, checkpoint, at in ((1, 0, 192), (2, 1, 256), (2, 0, 192)):
        if slot == 1:
            shard.rows.copy(0, 1, LENGTH)
        shard.states.load(checkpoint, slot)
        assert same_bits(computed(shard, tokens, [(16, 9), (0, 0)], slot=slot, start=at), expected[at:])
    with pytest.raises(ValueError, match="checkpoint 2 is not one of 2"):
        shard.states.keep(1, 2)
    with pytest.raises(ValueError, match="checkpoint -1 is not one of 2"):
        shard.states.load(-1, 1)


def test_a_state_taken_out_and_put_back_goes_on_as_if_it_had_never_left(whole):
    shard, tokens, expected = whole
    computed(shard, tokens[:150], CHUNKS, slot=1)
    state = {name: tensor.clone() for name, tensor in shard.states.export(1).items()}
    assert {name: (tuple(one.shape), one.dtype) for name, one in state.items()} == {
        spec.name: (spec.shape, {"F32": torch.float32, "BF16": torch.bfloat16}[spec.dtype])
        for spec in shard.states.specs
    }
    computed(shard, tokens.flip(0), CHUNKS, slot=1)
    shard.states.import_(3, state, 128)
    shard.rows.copy(0, 3, 128)
    assert same_bits(computed(shard, tokens, [(4, 1), (0, 0)], slot=3, start=128), expected[128:])
    name = shard.states.specs[0].name
    for wrong, said in (
        ({**state, "layers.9.conv": state[name]}, r"layers\.9\.conv is missing or not expected"),
        ({**state, name: state[name].double()}, "torch.float64"),
        ({**state, name: state[name][:-1]}, r"\[2, "),
    ):
        with pytest.raises(ValueError, match=said):
            shard.states.import_(3, wrong, 128)


def test_a_forward_that_fails_leaves_states_as_they_were(whole, monkeypatch):
    """Some layers have moved theirs when it does."""
    shard, tokens, expected = whole
    computed(shard, tokens[:100], CHUNKS, slot=1)
    attend = shard._kernels.attend  # noqa: SLF001

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(shard._kernels, "attend", exhausted)  # noqa: SLF001
    with pytest.raises(torch.OutOfMemoryError):
        computed(shard, tokens[:356], CHUNKS, slot=1, start=100)
    monkeypatch.setattr(shard._kernels, "attend", attend)  # noqa: SLF001
    assert same_bits(computed(shard, tokens, [(64, 20), (0, 0)], slot=1, start=100), expected[100:])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_a_forward_copies_the_state_of_one_prompt_and_of_several_none(whole, prompts, monkeypatch):
    """The estimate of memory has no room for copies of several states."""
    shard, tokens, expected = whole
    slots = range(1, 1 + prompts)
    for slot in slots:
        computed(shard, tokens[:64], CHUNKS, slot=slot)
    copied, clone = list[int](), torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda own: copied.append(own.nbytes) or clone(own))
    step = Step(tuple(Segment(slot, 64, 64) for slot in slots), 64 * prompts, rows_only=True)
    shard.states.start(step)
    with pytest.raises(torch.OutOfMemoryError), shard.states.settling(step):
        raise torch.OutOfMemoryError
    assert sum(copied) == (sum(spec.nbytes for spec in shard.states.specs) if prompts == 1 else 0)
    monkeypatch.undo()
    if prompts > 1:
        with pytest.raises(ValueError, match="nothing continues from 64"):
            computed(shard, tokens[:128], CHUNKS, slot=1, start=64)
    start = 64 if prompts == 1 else 0
    assert same_bits(computed(shard, tokens, CHUNKS, slot=1, start=start), expected[start:])


def test_what_recurrent_layers_cannot_do_is_refused_by_name(whole):
    shard, tokens, _ = whole
    with pytest.raises(ValueError, match="a tree: each of its nodes would need a recurrent state of its own"):
        shard.forward(Step((Segment(1, 0, 2), Segment(1, 1, 1)), 4), tokens[:3])
    with pytest.raises(ValueError, match="65 rows of slot 1 in a step that may be rolled back; accepted: at most 64"):
        shard.forward(Step((Segment(1, 0, 65),), 128), tokens[:65])
    other = proven(CONFIGS["nothing a multiple of a vector"], shard.spec.dtype, 512, own=False).copy_for_shard().delta
    with pytest.raises(UnprovenProductError, match="key_size=99"):
        other._multiply(DeltaShape(1, 1, 99, 7), torch.zeros(1, 4, 99), torch.zeros(1, 99, 7))  # noqa: SLF001


def test_states_are_counted(whole):
    shard, _, _ = whole
    held, checkpoint = shard.config.state_bytes(shard.spec.dtype)
    assert checkpoint == sum(spec.nbytes for spec in shard.states.specs)
    rows = SLOTS * shard.spec.capacity * shard.config.kv_bytes_per_token(shard.spec.dtype)
    taken, kernels = shard.memory()["kv"] - rows - 2 * checkpoint, shard._kernels.delta  # noqa: SLF001
    assert taken == SLOTS * held if isinstance(kernels, CpuDelta) else SLOTS * checkpoint < taken < SLOTS * held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_probe_finds_that_every_bucket_holds(dtype):
    own = CONFIGS["two value heads to a key head"]
    found = probe(
        FAMILY,
        own,
        CpuKernels(dtype),
        ProbeShape(device=torch.device("cpu"), dtype=dtype, chunk=256, capacity=512, sizes=(4, 16)),
    )
    assert (found.mode, found.buckets) == ("buckets", (4, 16, 256))
    assert not [why for why in found.failures if "bucket" in why], "ways of one product that were tried and not taken"
    assert found.numerics_class.count("-") >= 2, "both kinds of layers were tried"
    assert any("delta rule" in line for line in found.build_report()["products"])
    assert found == Numerics.from_json(found.to_json())


@pytest.mark.parametrize(("kernels", "dtype"), [(CpuDelta, torch.float32), (NativeDelta, torch.bfloat16)])
def test_the_probe_sees_rows_that_depend_on_their_step(dtype, monkeypatch, kernels):
    """A kernel that convolves otherwise where several rows come at once. A bucket of one row has none beside it."""
    own, in_c = CONFIGS["two value heads to a key head"], kernels is NativeDelta
    if in_c and CpuKernels(dtype).native_rule(DeltaShape(1, 1, 8, 8)) is None:
        pytest.skip("nothing in C here")
    convolve = kernels.convolve

    def careless(self, mixed, *rest):
        rows = sum(segment.count for segment in rest[-1].segments)
        return convolve(self, mixed, *rest) * (1.0 if rows > 16 else 1.1)

    monkeypatch.setattr(kernels, "convolve", careless)
    how = {"device": torch.device("cpu"), "dtype": dtype, "chunk": 256, "capacity": 512, "sizes": (1, 4, 16)}
    found = probe(FAMILY, own, CpuKernels(dtype, own=in_c), ProbeShape(**how))
    assert found.mode == "grid"
    assert any("of a recurrent layer differ from a chunk's" in why for why in found.failures)
