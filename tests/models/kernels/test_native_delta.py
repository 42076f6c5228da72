"""Tests of recurrent layers in C: they are right, and have the same bits in any pieces, with any other rows, in any
instructions.
"""

from __future__ import annotations

import pytest
import torch
from attrs import astuple, evolve

from adapters.models.kernels.cpu.delta import CpuDelta
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native import native_library
from adapters.models.kernels.cpu.native.delta import NativeDelta
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.delta_interface import CHUNK, RING, DeltaShape, DeltaWeights, LayerStates
from adapters.models.kernels.interfaces.product_list import NATIVE, Products, UnprovenProductError, check_plan
from adapters.models.kernels.proof.trials import restore_threads
from adapters.models.kernels.reference.delta import ReferenceDelta
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import StateBatch
from adapters.models.numerics import probe_result
from adapters.models.numerics.probe_result import build_proof_key, plan_from_json, plan_to_json

FLOAT, BRAIN, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
SLOTS, PADDED, LENGTH = 3, 3, 330
SHAPES = [DeltaShape(2, 4, 32, 32), DeltaShape(1, 3, 24, 20), DeltaShape(2, 2, 7, 5), DeltaShape(1, 1, 130, 33)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
pytestmark = pytest.mark.usefixtures("two_threads")
# Rows of each step, and whether it settles at once; otherwise so many of them are kept.
PIECES = {
    "at once": [(330, True)],
    "chunks": [(64, True), (130, True), (136, True)],
    "one by one": [(1, 1)] * 330,
    "in between": [(7, 7), (64, 64), (200, True), (1, 1), (40, 40), (18, 18)],
    "rolled back": [(60, 3), (64, 64), (33, 0), (64, True), (30, 30), (64, 1), (64, 64), (50, 50), (54, True)],
}


@pytest.fixture(scope="module")
def own(native_code):
    return NativeDelta(native_code, native_code.level)


@pytest.fixture(scope="module")
def levels(native_code):
    return [NativeDelta(native_code, level) for level in range(native_code.level + 1)]


@pytest.fixture
def installed(native_code, monkeypatch):
    monkeypatch.setattr(native_library, "load_library", lambda: (native_code, ""))
    monkeypatch.delenv(native_library.SWITCH, raising=False)


def random(*shape, seed=1, dtype=FLOAT):
    return torch.randn(shape, generator=make_generator(seed)).to(dtype)


def weights_of(shape):
    heads = shape.value_heads
    return DeltaWeights(shape, random(shape.channels, 4) * 0.5, -random(heads, seed=2).exp(), random(heads, seed=3))


def inputs_of(shape, dtype, rows=LENGTH):
    return random(rows, shape.channels, seed=4, dtype=dtype), random(rows, 2 * shape.value_heads, seed=5, dtype=dtype)


def same(found, expected):
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def batch_of(bucket, segments, bases, *, settles):
    batch = StateBatch(bucket, CPU)
    batch.before, batch.settles = bases, settles
    rows = sum(segment.count for segment in segments)
    batch.load(Step(segments, bucket, rows_only=settles), torch.zeros(rows, dtype=torch.int64))
    return batch


def step(kernels, weights, state, *, inputs, segments, bases, settles=False):
    """Return what the rows of the segments read. inputs: of each segment. Behind them come padded rows with random
    numbers.
    """
    shape, dtype = weights.shape, inputs[0][0].dtype
    padding = random(PADDED, shape.channels, seed=9, dtype=dtype), random(PADDED, 2 * shape.value_heads, dtype=dtype)
    mixed, gates = (torch.cat(parts) for parts in zip(*inputs, padding, strict=True))
    wide = torch.cat((mixed, gates), 1)  # columns of a wider tensor
    batch = batch_of(len(wide), segments, bases, settles=settles)
    convolved = kernels.convolve(wide[:, : shape.channels], weights, state, batch)
    found = kernels.delta_rule(convolved, wide[:, shape.channels :], weights, state, batch)
    assert not found[-PADDED:].count_nonzero(), "padded rows are finite, and nothing"
    return found[:-PADDED]


def gone_over(kernels, shape, dtype, pieces, inputs=None):
    """Return what rows of a slot read in such pieces, and the state that they leave at the last multiple of 64."""
    weights, (mixed, gates) = weights_of(shape), inputs or inputs_of(shape, dtype)
    state, found, at, base = kernels.make_state(shape, SLOTS, 0, dtype, CPU), [], 0, 0
    for tensor in astuple(state, recurse=False):
        tensor[[0, 2]] = 7.0
    for count, stays in pieces:
        settles, rows = stays is True, slice(at, min(at + count, len(mixed)))
        how = {"segments": (Segment(1, at, rows.stop - at),), "bases": (base,), "settles": settles}
        read = step(kernels, weights, state, inputs=[(mixed[rows], gates[rows])], **how)
        kept = len(read) if settles else min(stays, len(read))
        found.append(read[:kept])
        at += kept
        if settles:
            base = at - at % CHUNK
        elif at >= base + CHUNK:
            kernels.advance_state(LayerStates.of_layers(state, 1), 1, base)
            base += CHUNK
    assert all((tensor[[0, 2]] == 7).all() for tensor in astuple(state, recurse=False)), "other slots are left alone"
    return torch.cat(found), state.memory[1].clone(), state.conv[1].clone()


@shapes
@dtypes
def test_rows_read_what_the_rule_says(own, shape, dtype):
    found, memory, conv = gone_over(own, shape, dtype, PIECES["chunks"])
    expected, theirs, inputs = gone_over(ReferenceDelta(), shape, dtype, PIECES["chunks"])
    assert torch.allclose(found, expected, rtol=1e-4, atol=2e-6)
    assert torch.allclose(memory, theirs, rtol=1e-4, atol=2e-6)
    assert same(conv, inputs)


@shapes
@pytest.mark.parametrize("pieces", [name for name in PIECES if name != "at once"])
def test_rows_and_state_are_the_same_in_any_pieces(own, shape, pieces):
    for found, expected in zip(
        gone_over(own, shape, BRAIN, PIECES[pieces]), gone_over(own, shape, BRAIN, PIECES["at once"]), strict=True
    ):
        assert same(found[: len(expected)], expected)


@shapes
@dtypes
def test_bits_are_the_same_in_any_instructions_and_on_any_threads(levels, shape, dtype):
    every = [gone_over(each, shape, dtype, PIECES["in between"]) for each in levels]
    with restore_threads():
        torch.set_num_threads(1)
        every.append(gone_over(levels[-1], shape, dtype, PIECES["in between"]))
    for other in every[1:]:
        assert all(same(one, two) for one, two in zip(every[0], other, strict=True))


def test_slots_side_by_side_are_each_as_if_alone(own):
    shape, starts, counts = SHAPES[1], (5, 63, 0), (3, 4, 6)
    weights, (mixed, gates) = weights_of(shape), inputs_of(shape, BRAIN)
    expected = gone_over(own, shape, BRAIN, PIECES["at once"])[0]
    state = own.make_state(shape, SLOTS, 0, BRAIN, CPU)
    for slot, start in enumerate(starts):
        if start:
            before = {"segments": (Segment(slot, 0, start),), "bases": (0,)}
            step(own, weights, state, inputs=[(mixed[:start], gates[:start])], **before)
    spans = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
    segments = tuple(Segment(slot, start, stop - start) for slot, (start, stop) in enumerate(spans))
    some = [(mixed[start:stop], gates[start:stop]) for start, stop in spans]
    some[2] = tuple(torch.full_like(part, torch.nan) for part in some[2])
    found = step(own, weights, state, inputs=some, segments=segments, bases=(0, 0, 0))
    assert same(found[:7], torch.cat([expected[5:8], expected[63:67]])), "also next to rows of NaN"
    assert found[7:].isnan().all()


@pytest.mark.parametrize("value", [0.0, 1e-30, 300.0, -300.0])
@pytest.mark.parametrize("gate", [0.0, 200.0, -200.0])
def test_what_is_hardly_a_number_stays_one(own, value, gate):
    """Rows of no length, gates that are open or shut, states that fade at once."""
    shape = SHAPES[1]
    inputs = torch.full((LENGTH, shape.channels), value), torch.full((LENGTH, 2 * shape.value_heads), gate)
    found, memory, _ = gone_over(own, shape, FLOAT, PIECES["chunks"], inputs)
    expected, theirs, _ = gone_over(ReferenceDelta(), shape, FLOAT, PIECES["chunks"], inputs)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert torch.allclose(memory, theirs, rtol=1e-3, atol=1e-5)


@dtypes
@pytest.mark.parametrize("shape", [(50, 4, 32), (3, 3, 20), (17, 1, 5)], ids=str)
def test_gates_are_right_and_rows_their_own(levels, dtype, shape):
    (rows, heads, size), bound = shape, 2e-6 if dtype is FLOAT else 2**-8
    x, weight = random(*shape), random(size, seed=2)
    gate = random(rows, heads * size + 3, seed=3, dtype=dtype)[:, 3:] * 5
    normed = torch.rms_norm(x.double(), (size,), weight.double(), 1e-6).flatten(1)
    expected = normed * torch.nn.functional.silu(gate.double())
    plain = x.flatten(1).to(dtype)
    for found, right in (
        ([each.gated_norm(x, gate, weight, 1e-6) for each in levels], expected),
        ([each.apply_gate(plain, gate) for each in levels], plain.double() * gate.double().sigmoid()),
    ):
        assert found[0].dtype is dtype
        assert torch.allclose(found[0].double(), right, rtol=bound, atol=1e-6)
        assert all(same(one, found[0]) for one in found)
    alone = torch.cat(
        [levels[-1].gated_norm(x[row : row + 1], gate[row : row + 1], weight, 1e-6) for row in range(rows)]
    )
    assert same(alone, levels[-1].gated_norm(x, gate, weight, 1e-6))


def test_what_does_not_go_together_is_refused_before_anything_is_written(own):
    shape = SHAPES[0]
    weights, (mixed, gates), state = (
        weights_of(shape),
        inputs_of(shape, FLOAT, 70),
        own.make_state(shape, 2, 0, FLOAT, CPU),
    )

    def convolve(segment, base=0, some=mixed, bucket=70):
        return own.convolve(some, weights, state, batch_of(bucket, (segment,), (base,), settles=False))

    for segment in (Segment(2, 0, 1), Segment(0, 0, 65), Segment(0, 64, 1)):
        with pytest.raises(IndexError, match="in 2 slots"):
            convolve(segment)
    with pytest.raises(IndexError, match="from a state at 8"):
        convolve(Segment(0, 9, 1), 8)
    with pytest.raises(ValueError, match="70 rows for a step of 71"):
        convolve(Segment(0, 0, 60), bucket=71)
    for some in (mixed.half(), mixed.bfloat16(), mixed[:, 1:]):
        with pytest.raises(TypeError, match="a convolution of"):
            convolve(Segment(0, 0, 60), some=some)
    batch = batch_of(70, (Segment(0, 0, 60),), (0,), settles=False)
    with pytest.raises(TypeError, match="gates of"):
        own.delta_rule(mixed, gates[:, 1:], weights, state, batch)
    with pytest.raises(TypeError, match="rows of"):
        own.delta_rule(mixed.double(), gates, weights, state, batch)
    for weight in (random(5), random(8)[::2]):
        with pytest.raises(ValueError, match="a norm's weight"):
            own.gated_norm(random(2, 3, 4), random(2, 12), weight, 1e-6)
    with pytest.raises(TypeError, match="a gate of"):
        own.gated_norm(random(2, 3, 4), random(2, 13), random(4), 1e-6)
    with pytest.raises(TypeError, match="with a gate in"):
        own.apply_gate(random(2, 3), random(2, 3, dtype=BRAIN))
    assert not any(tensor.count_nonzero() for tensor in astuple(state, recurse=False))


@pytest.mark.parametrize("name", ["memory", "conv", "inputs", "keys", "deltas", "decays"])
def test_a_state_of_another_shape_or_dtype_or_for_fewer_slots_is_refused(own, name):
    shape, segment = SHAPES[0], Segment(0, 0, 60)
    weights, (mixed, gates), state = (
        weights_of(shape),
        inputs_of(shape, FLOAT, 70),
        own.make_state(shape, 2, 0, FLOAT, CPU),
    )
    tensor = getattr(state, name)
    for wrong in (tensor[:1], tensor[..., :-1].contiguous(), tensor.double(), tensor.transpose(0, -1)):
        if name in {"inputs", "keys"} and len(wrong) == 1:
            segment = Segment(1, 0, 60)  # these say how many slots there are
        broken, batch = evolve(state, **{name: wrong}), batch_of(70, (segment,), (0,), settles=False)
        with pytest.raises((TypeError, ValueError, IndexError)):
            own.delta_rule(own.convolve(mixed, weights, broken, batch), gates, weights, broken, batch)
        if name not in {"conv", "inputs"}:
            with pytest.raises((TypeError, ValueError, IndexError)):
                own.advance_state(LayerStates.of_layers(broken, 1), segment.slot, 0)
    for change in ({"rate": weights.rate[:-1]}, {"dt_bias": weights.dt_bias.double()}, {"taps": weights.taps[1:]}):
        other, batch = evolve(weights, **change), batch_of(70, (Segment(0, 0, 60),), (0,), settles=False)
        with pytest.raises((TypeError, ValueError)):
            own.delta_rule(own.convolve(mixed, other, state, batch), gates, other, state, batch)
    for slot, base in ((2, 0), (-1, 0), (0, 8), (0, -64)):
        with pytest.raises(IndexError, match="with its state at"):
            own.advance_state(LayerStates.of_layers(state, 1), slot, base)


def test_less_is_kept_of_rows_than_batched_products_need(own):
    shape = SHAPES[0]
    ours, theirs = (kernels.make_state(shape, 2, 1, BRAIN, CPU) for kernels in (own, CpuDelta(None)))
    assert (ours.memory.shape, ours.conv.shape) == (theirs.memory.shape, theirs.conv.shape)
    assert not ours.factors.numel()
    assert theirs.factors.shape[2] == RING


LISTED = Products((), (), (4, 64), (1, 2), deltas=(SHAPES[0],))


@pytest.mark.parametrize("way", [NATIVE, "float32"])
def test_the_rule_of_the_library_serves_where_it_is(installed, way):
    found = CpuKernels(BRAIN, own=way == NATIVE).prove(LISTED)
    [served] = found.plan.deltas
    assert served.way == way
    assert any(f"4 heads of 32 x 32: {way}" in line for line in found.plan.describe_lines())
    assert isinstance(CpuKernels(BRAIN, found.plan).delta, NativeDelta if way == NATIVE else CpuDelta)
    assert plan_from_json(plan_to_json(found.plan)) == found.plan
    with pytest.raises(ValueError, match="an unknown way"):
        check_plan(evolve(found.plan, deltas=(evolve(served, way="float64"),)))


def test_rows_that_others_change_are_not_served(installed, monkeypatch):
    rule = NativeDelta.delta_rule
    monkeypatch.setattr(NativeDelta, "delta_rule", lambda own, rows, *rest: rule(own, rows, *rest) * len(rows))
    [served] = CpuKernels(BRAIN).prove(LISTED).plan.deltas
    assert served.way == "float32"


def test_an_installation_without_it_serves_by_batched_products_and_no_plan_of_it(installed):
    plan = CpuKernels(BRAIN).prove(LISTED).plan
    without = CpuKernels(BRAIN, own=False)
    assert without.native_rule(SHAPES[0]) is None
    assert [served.way for served in without.prove(LISTED).plan.deltas] == ["float32"]
    shape, weights = SHAPES[0], weights_of(SHAPES[0])
    kernels = CpuKernels(BRAIN, plan, own=False).delta
    state = kernels.make_state(shape, 1, 0, BRAIN, CPU)
    with pytest.raises(UnprovenProductError, match="what was proven is in C"):
        step(kernels, weights, state, inputs=[inputs_of(shape, BRAIN, 4)], segments=(Segment(0, 0, 4),), bases=(0,))


def test_a_head_that_it_has_no_room_for_is_left_to_batched_products(installed):
    plan = CpuKernels(BRAIN).prove(evolve(LISTED, rows=(4,), deltas=(DeltaShape(1, 1, 1025, 3),))).plan
    assert [served.way for served in plan.deltas] == ["float32"]


def test_what_was_proven_of_models_without_such_layers_is_kept():
    """Their outcomes are found under the same key as before there was a choice of ways."""
    kernels, dense = CpuKernels(BRAIN, own=False), evolve(LISTED, deltas=())
    before = build_proof_key(dense, kernels, CPU)
    keys = [build_proof_key(LISTED, kernels, CPU)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_result, "_RECURRENT", 0)
        assert build_proof_key(dense, kernels, CPU) == before
        assert build_proof_key(LISTED, kernels, CPU) not in keys
