"""The gated delta rule on CUDA: right against plain torch, and the same bits however a sequence is cut, and by whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import astuple
from torch import Tensor

from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.delta_interface import (
    DeltaShape,
    DeltaState,
    DeltaWeights,
    LayerStates,
    make_row_state,
)
from adapters.models.kernels.reference.delta import ReferenceDelta
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import StateBatch

triton_delta = pytest.importorskip(
    "adapters.models.kernels.cuda.delta", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
SHAPES = [
    DeltaShape(16, 48, 128, 128),
    DeltaShape(2, 4, 32, 64),
    DeltaShape(3, 3, 64, 32),
    DeltaShape(1, 2, 16, 16),
    DeltaShape(4, 8, 128, 64),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}
LENGTH = 330
SLOTS = 4


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = make_generator(seed, DEVICE)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


class Rows:
    """One layer's inputs for the rows of a sequence; columns of a wider tensor, as the projection leaves them."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, length: int = LENGTH, seed: int = 0) -> None:
        heads = shape.value_heads
        self.shape, self.dtype = shape, dtype
        self.weights = DeltaWeights(
            shape, normal(shape.channels, 4, seed=1) / 2, -normal(heads, seed=2).exp() / 8, normal(heads, seed=3)
        )
        self.mixed = normal(length, shape.channels, dtype=dtype, seed=seed + 4)
        self.gates = normal(length, 2 * heads, dtype=dtype, seed=seed + 5)

    def step(self, kernels, state: DeltaState, batch: StateBatch, rows: Tensor) -> Tensor:
        """Return what the rows of a loaded batch read. Its padded rows get random numbers."""
        columns = self.shape.channels
        own = normal(batch.bucket, columns + 2 * self.shape.value_heads + 8, dtype=self.dtype, seed=batch.bucket)
        own[: len(rows), :columns] = self.mixed[rows]
        own[: len(rows), columns : columns + self.gates.shape[1]] = self.gates[rows]
        mixed, gates = own[:, :columns], own[:, columns : columns + self.gates.shape[1]]
        convolved = kernels.convolve(mixed, self.weights, state, batch)
        read = kernels.delta_rule(convolved, gates, self.weights, state, batch)
        assert read.isfinite().all()
        return read[: len(rows)].clone()


def loaded(bucket: int, segments: Sequence[Segment], bases: Sequence[int], *, settles: bool) -> StateBatch:
    batch = StateBatch(bucket, DEVICE)
    batch.before, batch.settles = tuple(bases), settles
    batch.single = not settles and all(one.count == 1 for one in segments)
    step = Step(tuple(segments), bucket)
    batch.load(step, torch.zeros(step.rows, dtype=torch.int64))
    return batch


def in_pieces(
    kernels, sequence: Rows, state: DeltaState, pieces: Sequence[tuple[int, int, int]], slot: int = 0
) -> Tensor:
    """The whole sequence; pieces: bucket, rows, and rows that are kept (0: the step settles), the last one repeated."""
    length = len(sequence.mixed)
    found, at, base, index = [], 0, 0, 0
    state.memory[slot], state.conv[slot] = 0, 0
    while at < length:
        bucket, count, keep = pieces[min(index, len(pieces) - 1)]
        count = min(count, length - at)
        batch = loaded(bucket, [Segment(slot, at, count)], [base], settles=not keep)
        kernels.begin_body("test", batch)
        read = sequence.step(kernels, state, batch, torch.arange(at, at + count, device=DEVICE))
        kept = min(keep or count, count)
        found.append(read[:kept])
        at, index = at + kept, index + 1
        if not keep:
            base = at // 64 * 64
        elif at // 64 * 64 > base:
            kernels.advance_state(LayerStates.of_layers(state, 1), slot, base)
            base += 64
    return torch.cat(found)


IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture
def kernels():
    return triton_delta.CudaDelta(DEVICE, True, IS_HOPPER)


def poisoned(kernels, sequence: Rows) -> DeltaState:
    """A state in which whatever no row has written is no number."""
    state = kernels.make_state(sequence.shape, SLOTS, 1, sequence.dtype, DEVICE)
    for tensor in astuple(state, recurse=False):
        tensor.fill_(torch.nan)
    return state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_states_are_those_of_the_rule_and_the_same_bits_in_any_pieces(kernels, shape, dtype):
    sequence = Rows(shape, dtype)
    state = poisoned(kernels, sequence)
    whole = in_pieces(kernels, sequence, state, [(512, LENGTH, 0)])
    wide = Rows(shape, torch.float32)
    wide.mixed, wide.gates = sequence.mixed.float(), sequence.gates.float()
    plain = make_row_state(shape, SLOTS, 1, torch.float32, DEVICE)
    batch = loaded(512, [Segment(0, 0, LENGTH)], [0], settles=True)
    expected = wide.step(ReferenceDelta(), plain, batch, torch.arange(LENGTH, device=DEVICE))
    assert distance(whole, expected) < TOLERANCE[dtype]
    assert distance(state.memory[0], plain.memory[0]) < TOLERANCE[dtype]
    assert same_bits(state.conv[0].float(), plain.conv[0])
    for pieces in (
        [(64, 64, 64)],
        [(4, 1, 1)],
        [(16, 16, 5)],
        [(256, 256, 0), (4, 1, 1), (16, 9, 9)],
        [(128, 100, 0), (64, 64, 40), (256, 200, 0)],
        [(64, 63, 0), (64, 2, 0), (64, 64, 64), (64, 61, 0)],
        [(256, 130, 0), (128, 65, 0), (4, 3, 2)],
    ):
        again = poisoned(kernels, sequence)
        assert same_bits(in_pieces(kernels, sequence, again, pieces, slot=2), whole), pieces
        assert same_bits(again.memory[2], state.memory[0]), pieces
        assert same_bits(again.conv[2], state.conv[0]), pieces


@pytest.mark.parametrize("start", [1, 60, 64, 70, 127, 128, 250])
def test_rows_that_are_rolled_back_leave_memory_and_inputs_as_they_were(kernels, start):
    sequence, other = Rows(SHAPES[1], torch.bfloat16), Rows(SHAPES[1], torch.bfloat16, 64, seed=9)
    state = poisoned(kernels, sequence)
    whole = in_pieces(kernels, sequence, state, [(512, LENGTH, 0)])
    before = poisoned(kernels, sequence)
    sequence.mixed, rest = sequence.mixed[:start], sequence.mixed[start:]
    gates = sequence.gates
    in_pieces(kernels, sequence, before, [(512, LENGTH, 0)])
    memory, conv = before.memory.clone(), before.conv.clone()
    for count in (64, 5):
        batch = loaded(64, [Segment(0, start, count)], [start // 64 * 64], settles=False)
        kernels.begin_body("test", batch)
        other.step(kernels, before, batch, torch.arange(count, device=DEVICE))
    assert same_bits(before.memory, memory)
    assert same_bits(before.conv, conv)
    batch = loaded(512, [Segment(0, start, len(rest))], [start // 64 * 64], settles=True)
    kernels.begin_body("test", batch)
    sequence.mixed, sequence.gates = rest, gates[start:]
    read = sequence.step(kernels, before, batch, torch.arange(len(rest), device=DEVICE))
    assert same_bits(read, whole[start:])
    assert same_bits(before.memory[0], state.memory[0])


@pytest.mark.parametrize(("counts", "bucket"), [((1, 1, 1), 4), ((16, 7, 9), 32), ((64, 1, 60), 128)])
def test_slots_side_by_side_are_each_as_if_alone_and_padded_rows_write_nothing(kernels, counts, bucket):
    sequence, starts = Rows(SHAPES[0], torch.bfloat16), (63, 190, 5)
    whole = in_pieces(kernels, sequence, poisoned(kernels, sequence), [(512, LENGTH, 0)])
    state = poisoned(kernels, sequence)
    mixed, gates = sequence.mixed, sequence.gates
    for slot, start in zip((2, 0, 1), starts, strict=True):
        sequence.mixed, sequence.gates = mixed[:start], gates[:start]
        in_pieces(kernels, sequence, state, [(256, 256, 0)], slot=slot)
    sequence.mixed, sequence.gates = mixed, gates
    untouched = [tensor[3].clone() for tensor in astuple(state, recurse=False) if len(tensor)]
    segments = [Segment(slot, start, count) for slot, start, count in zip((2, 0, 1), starts, counts, strict=True)]
    rows = torch.cat([torch.arange(one.start, one.start + one.count, device=DEVICE) for one in segments])
    for settles in (False, True):
        batch = loaded(bucket, segments, [start // 64 * 64 for start in starts], settles=settles)
        kernels.begin_body("test", batch)
        assert same_bits(sequence.step(kernels, state, batch, rows), whole[rows])
    after = [tensor[3] for tensor in astuple(state, recurse=False) if len(tensor)]
    assert all(same_bits(ours, theirs) for ours, theirs in zip(untouched, after, strict=True))


@pytest.mark.skipif(not IS_HOPPER, reason="a kernel of Hopper's")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], DeltaShape(2, 6, 64, 128)], ids=str)
def test_the_kernel_of_hopper_has_the_bits_of_the_one_for_every_gpu(kernels, shape):
    """Whole chunks and parts of them, of sequences that begin or go on, with and without padded rows."""
    plain = triton_delta.CudaDelta(DEVICE, True)
    sequence = Rows(shape, torch.bfloat16, 900)
    for pieces in ([(1024, 900, 0)], [(256, 192, 0)], [(256, 130, 0)], [(256, 64, 0), (256, 7, 0), (1024, 829, 0)]):
        states = [poisoned(kernels, sequence) for _ in range(2)]
        found = [
            in_pieces(own, sequence, state, pieces, 1) for own, state in zip((kernels, plain), states, strict=True)
        ]
        assert same_bits(*found)
        assert same_bits(states[0].memory[1], states[1].memory[1])
        for ours, theirs in zip(*(astuple(state, recurse=False) for state in states), strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.skipif(not IS_HOPPER, reason="a kernel of Hopper's")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=str)
@pytest.mark.parametrize("count", [1, 3, 16, 64])
def test_single_rows_of_any_number_of_slots_have_the_bits_of_the_kernels_for_every_gpu(kernels, shape, count):
    """Slots are at the beginning of a chunk, within it and at its end, with and without a state. Some rows are padded.
    In the second step, rows follow that the first one has kept.
    """
    plain = triton_delta.CudaDelta(DEVICE, True)
    sequence = Rows(shape, torch.bfloat16)
    states = [own.make_state(shape, count, 0, torch.bfloat16, DEVICE) for own in (kernels, plain)]
    for tensor, other in zip(*(astuple(state, recurse=False) for state in states), strict=True):
        tensor.copy_(normal(*tensor.shape, seed=tensor.dim()) / 10)
        other.copy_(tensor)
    starts = [(64, 0, 127, 95, 70)[slot] if slot < 5 else 37 * slot % 250 for slot in range(count)]
    for ahead in range(2):
        places = [start + ahead for start in starts]
        rows = torch.tensor(places, device=DEVICE)
        # A state that would have moved between the two steps is taken as it is.
        bases = [place // 64 * 64 for place in places]
        found = []
        for own, state in zip((kernels, plain), states, strict=True):
            batch = loaded(
                count + 3, [Segment(slot, place, 1) for slot, place in enumerate(places)], bases, settles=False
            )
            batch.single = own is kernels
            own.begin_body(f"test {ahead}", batch)
            found.append(sequence.step(own, state, batch, rows))
        assert same_bits(*found)
        for ours, theirs in zip(*(astuple(state, recurse=False) for state in states), strict=True):
            assert same_bits(ours, theirs)


def fill(kernels, sequence: Rows, state: DeltaState, slot: int, length: int) -> None:
    """Bring a slot to the state behind the sequence's first rows, of which there may be none."""
    if not length:
        state.memory[slot], state.conv[slot] = 0, 0
        return
    mixed, gates = sequence.mixed, sequence.gates
    sequence.mixed, sequence.gates = mixed[:length], gates[:length]
    in_pieces(kernels, sequence, state, [(256, 256, 0)], slot=slot)
    sequence.mixed, sequence.gates = mixed, gates


@pytest.mark.skipif(not IS_HOPPER, reason="a kernel of Hopper's")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], DeltaShape(2, 6, 64, 128)], ids=str)
@pytest.mark.parametrize(
    "spans",
    [
        [(64, 150, 1), (190, 1, 0), (70, 140, 1)],
        [(0, 1, 0), (3, 1, 0), (128, 1, 0), (70, 200, 1)],
        [(5, 100, 1), (188, 3, 0), (65, 1, 0)],
        [(253, 1, 0), (0, 310, 1)],
    ],
    ids=str,
)
def test_prompts_beside_answers_have_their_own_bits(kernels, shape, spans):
    """Segments that settle begin and go on within a chunk. Others may be rolled back, most of which have one row.

    spans: start, rows and whether they settle, by slot.
    """
    sequence = Rows(shape, torch.bfloat16)
    whole = in_pieces(kernels, sequence, poisoned(kernels, sequence), [(512, LENGTH, 0)])
    state = poisoned(kernels, sequence)
    for slot, (start, _, _) in enumerate(spans):
        fill(kernels, sequence, state, slot, start)
    segments = tuple(Segment(slot, start, count) for slot, (start, count, _) in enumerate(spans))
    batch = StateBatch(512, DEVICE)
    batch.before, batch.mixed, batch.holds = tuple(one.start // 64 * 64 for one in segments), True, True
    rows = torch.cat([torch.arange(one.start, one.start + one.count, device=DEVICE) for one in segments])
    batch.load(Step(segments, 512), torch.zeros(len(rows), dtype=torch.int64))
    settled = [settles for _, count, settles in spans for _ in range(count)]
    batch.settled[: len(rows)] = torch.tensor(settled, device=DEVICE)
    kernels.begin_body("test", batch)
    assert same_bits(sequence.step(kernels, state, batch, rows), whole[rows])
    behind = [Segment(one.slot, one.start + one.count, 1) for one in segments]
    bases = [(one.start - 1) // 64 * 64 for one in behind]  # no state has moved since
    batch = loaded(4, behind, bases, settles=False)
    kernels.begin_body("behind", batch)
    rows = torch.tensor([one.start for one in behind], device=DEVICE)
    assert same_bits(sequence.step(kernels, state, batch, rows), whole[rows])


@pytest.mark.parametrize("length", [128, 129, 191, 192, 320])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_rows_that_settle_but_for_the_last_ones_go_on_from_any_of_these(kernels, shape, length):
    """The state stays at the last multiple of 64 below the end, and the rows behind it can be moved over later."""
    sequence = Rows(shape, torch.bfloat16)
    state = poisoned(kernels, sequence)
    whole = in_pieces(kernels, sequence, state, [(512, LENGTH, 0)])
    mixed, gates = sequence.mixed, sequence.gates
    held = poisoned(kernels, sequence)
    held.memory[1], held.conv[1] = 0, 0
    batch = loaded(512, [Segment(1, 0, length)], [0], settles=True)
    batch.holds = True
    kernels.begin_body("test", batch)
    assert same_bits(sequence.step(kernels, held, batch, torch.arange(length, device=DEVICE)), whole[:length])
    base = (length - 1) // 64 * 64
    sequence.mixed, sequence.gates = mixed[:base], gates[:base]
    before = poisoned(kernels, sequence)
    in_pieces(kernels, sequence, before, [(512, base, 0)], slot=1)
    assert same_bits(held.memory[1], before.memory[1])
    assert same_bits(held.conv[1], before.conv[1])
    sequence.mixed, sequence.gates = mixed, gates
    for start in (length - 1, length):
        again = DeltaState(*(tensor.clone() for tensor in astuple(held, recurse=False)))
        at = base
        if start - base == 64:
            kernels.advance_state(LayerStates.of_layers(again, 1), 1, base)
            at += 64
        batch = loaded(512, [Segment(1, start, LENGTH - start)], [at], settles=True)
        kernels.begin_body("test", batch)
        rows = torch.arange(start, LENGTH, device=DEVICE)
        assert same_bits(sequence.step(kernels, again, batch, rows), whole[start:])
        assert same_bits(again.memory[1], state.memory[0])


def test_states_of_many_layers_move_in_few_launches_with_the_bits_of_each_alone(kernels):
    layers, shape = 19, SHAPES[1]
    sequences = [Rows(shape, torch.bfloat16, 128, seed=100 * layer) for layer in range(layers)]
    whole = kernels.make_state(shape, layers * SLOTS, layers, torch.bfloat16, DEVICE)
    states = LayerStates.of_layers(whole, layers)
    alone = [poisoned(kernels, sequence) for sequence in sequences]
    for sequence, own, other in zip(sequences, states.layers, alone, strict=True):
        for state in (own, other):
            batch = loaded(128, [Segment(2, 0, 100)], [0], settles=True)
            kernels.begin_body("test", batch)
            state.memory[2], state.conv[2] = 0, 0
            sequence.step(kernels, state, batch, torch.arange(100, device=DEVICE))
            batch = loaded(32, [Segment(2, 100, 28)], [64], settles=False)
            kernels.begin_body("test", batch)
            sequence.step(kernels, state, batch, torch.arange(100, 128, device=DEVICE))
    before = whole.memory.clone()
    kernels.advance_state(states, 2, 64)
    for own, other in zip(states.layers, alone, strict=True):
        kernels.advance_state(LayerStates.of_layers(other, 1), 2, 64)
        assert same_bits(own.memory[2], other.memory[2])
        assert same_bits(own.conv[2], other.conv[2])
    places = torch.arange(len(before), device=DEVICE) % (SLOTS + 1) != 2
    assert same_bits(whole.memory[places], before[places])


def test_keys_that_repeat_and_hardly_decay_stay_exact_enough(kernels):
    """The same token again and again: the factor's entries are near one, and powers of it would overflow."""
    sequence = Rows(SHAPES[0], torch.bfloat16)
    sequence.mixed[:] = sequence.mixed[0]
    sequence.gates[:] = 4.0
    heads = sequence.shape.value_heads
    sequence.weights = DeltaWeights(
        sequence.shape, sequence.weights.taps, torch.full((heads,), -1e-4, device=DEVICE), sequence.weights.dt_bias
    )
    whole = in_pieces(kernels, sequence, poisoned(kernels, sequence), [(512, LENGTH, 0)])
    batch = loaded(512, [Segment(0, 0, LENGTH)], [0], settles=True)
    plain = make_row_state(sequence.shape, SLOTS, 1, torch.float32, DEVICE)
    sequence.mixed, sequence.gates, sequence.dtype = sequence.mixed.float(), sequence.gates.float(), torch.float32
    expected = sequence.step(ReferenceDelta(), plain, batch, torch.arange(LENGTH, device=DEVICE))
    assert distance(whole, expected) < 2 * TOLERANCE[torch.bfloat16]


def test_heads_without_a_kernel_are_refused(kernels):
    with pytest.raises(ValueError, match="recurrent heads of 24 are not supported on CUDA; accepted: 16, 32, 64, 128"):
        kernels.make_state(DeltaShape(1, 1, 24, 32), 1, 0, torch.bfloat16, DEVICE)
