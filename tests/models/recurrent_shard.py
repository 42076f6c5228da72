"""A small hybrid target with real arithmetic: a gated delta rule behind a causal convolution, then attention.

The first layer keeps positional state, of two element types, and no rows. The second one keeps rows and no state. Every
row is computed alone, in the same operations whatever else the step has, so chunks, batches and proposals cannot change
a bit. A difference from a cold computation is a state or a row that is not the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define, frozen
from torch import Tensor
from torch.nn.functional import normalize, rms_norm, silu, softplus

from adapters.models.decoder.shard import Kept, NamedTensors, ShardSpec
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Forward, Segment, Step
from adapters.sequence_layout import RowSpec, TensorSpec

VOCAB, WIDTH, HEADS, HEAD, TAPS = 97, 32, 2, 8, 4
MIXED = 3 * HEADS * HEAD  # queries, keys and values of the recurrent layer, convolved together


@frozen(eq=False)
class Moved:
    """The input by which a row changes the recurrent layer's state. mixed: not convolved yet, bfloat16."""

    mixed: Tensor
    beta: Tensor
    decay: Tensor


@frozen(eq=False)
class State:
    """The state behind some position of a slot. conv: the last inputs of the convolution; memory: `[heads, keys,
    values]`.
    """

    conv: Tensor
    memory: Tensor


@define(eq=False)
class Behind:
    """All that a slot goes on from: the state at the last multiple of the block, and what the rows after it move it by.

    base: None where the state was imported: it stands where the next forward starts.
    """

    base: int | None
    state: State
    moved: list[Moved]


@define(eq=False)
class Unsettled:
    """A step that ran, and waits for the commit that says which rows stay. before: what each slot would be
    without it.
    """

    step: Step
    before: list[Behind]
    moved: list[list[Moved]]


ROW_SPEC = RowSpec(("layers.1.k", "layers.1.v"), HEADS, HEAD, "F32")
STATE_SPECS = (
    TensorSpec("layers.0.conv", "BF16", (TAPS - 1, MIXED)),
    TensorSpec("layers.0.memory", "F32", (HEADS, HEAD, HEAD)),
)


class RecurrentRows:
    """Keys and values of the second layer. They are not a number until they are written, which shows who reads them."""

    spec = ROW_SPEC
    is_addressable = True

    def __init__(self, slots: int, capacity: int) -> None:
        self.cache = torch.full((1, 2, slots, HEADS, capacity, HEAD), torch.nan)

    def copy(self, source: int, target: int, count: int) -> None:
        self.cache[:, :, target, :, :count] = self.cache[:, :, source, :, :count]

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        return self.cache[:, :, slot, :, start:stop]

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        return dict(zip(self.spec.names, self.view(slot, start, stop)[0].clone(), strict=True))

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        for cache, name in zip(self.cache[0], self.spec.names, strict=True):
            cache[slot, :, start : start + rows[name].shape[1]] = rows[name]


class RecurrentStates:
    """The states that slots go on from, and checkpoints for more."""

    specs = STATE_SPECS
    commits_per_segment = False
    survives_failure = True
    tree_obstacle = "each node of a tree would need a state of its own"

    def __init__(self, slots: int, block: int, checkpoints: int) -> None:
        self.block = block
        self.checkpoint_count = checkpoints
        self.standing: list[Behind | None] = [None] * slots
        self.kept: list[Behind | None] = [None] * checkpoints

    def copy(self, source: int, target: int) -> None:
        self.standing[target] = self.standing[source]

    def export(self, slot: int) -> NamedTensors:
        found = self.standing[slot]
        assert found is not None, "nothing was computed here"
        return {"layers.0.conv": found.state.conv, "layers.0.memory": found.state.memory}

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        for spec in self.specs:
            if state[spec.name].shape != spec.shape:
                raise ValueError(f"{spec.name}: {list(state[spec.name].shape)}, not {list(spec.shape)}")
        self.standing[slot] = Behind(at, State(state["layers.0.conv"].clone(), state["layers.0.memory"].clone()), [])

    def keep(self, slot: int, index: int) -> None:
        found = self.standing[slot]
        assert found is not None, "nothing was computed here"
        self.kept[index] = Behind(found.base, found.state, [])

    def load(self, index: int, slot: int) -> None:
        found = self.kept[index]
        assert found is not None, "nothing was kept here"
        self.standing[slot] = found


class RecurrentShard:
    def __init__(
        self,
        slots: int = 3,
        capacity: int = 256,
        buckets: Sequence[int] = (4, 8, 16, 32),
        *,
        state_block: int = 1,
        state_checkpoints: int = 0,
    ) -> None:
        self.spec = ShardSpec(
            layers=range(2),
            slots=slots,
            capacity=capacity,
            buckets=tuple(buckets),
            vocab_size=VOCAB,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        self.rows = RecurrentRows(slots, capacity)
        self.states = RecurrentStates(slots, state_block, state_checkpoints)
        draw = make_generator(11)

        def weight(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, generator=draw) / inputs**0.5

        self.embedding, self.output = torch.randn(VOCAB, WIDTH, generator=draw), weight(VOCAB, WIDTH)
        self.mix, self.taps = weight(MIXED, WIDTH), torch.randn(TAPS, MIXED, generator=draw) / 2
        self.beta, self.decay, self.gate = weight(HEADS, WIDTH), weight(HEADS, WIDTH), weight(HEADS * HEAD, WIDTH)
        self.recurrent_out, self.qkv = weight(WIDTH, HEADS * HEAD), weight(3 * HEADS * HEAD, WIDTH)
        self.attention_out = weight(WIDTH, HEADS * HEAD)
        self.unsettled: Unsettled | None = None
        self.closed = False

    # --- forwards ---

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        """Compute a step. If it raises, no state has moved."""
        if step.branches:
            raise ValueError("a tree: each of its nodes would need a recurrent state of its own")
        assert step.bucket in self.spec.buckets
        assert inputs.shape == (step.rows,)
        hidden, tokens = torch.zeros(step.bucket, WIDTH), iter(inputs.tolist())
        aux = torch.zeros(step.bucket, WIDTH)
        now, row = Unsettled(step, [], []), 0
        for segment in step.segments:
            now.before.append(before := self._before(segment))
            now.moved.append([])
            state = before.state
            for one in before.moved:
                state, _ = self._delta(state, one)
            for position in range(segment.start, segment.start + segment.count):
                residual = self.embedding[next(tokens)]
                one = self._moved_by(residual)
                state, added = self._recur(state, one, residual)
                aux[row] = residual = residual + added
                hidden[row] = residual + self._attend(segment.slot, position, residual)
                now.moved[-1].append(one)
                row += 1
        self.unsettled = now
        if step.rows_only:
            self.commit(step, [segment.count for segment in step.segments])
        return Forward(hidden, {0: aux, 1: hidden})

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        """Whole blocks of what stays move the state, the rest is set aside."""
        now, self.unsettled = self.unsettled, None
        assert now is not None
        assert step == now.step
        for segment, before, moved, keep in zip(step.segments, now.before, now.moved, kept, strict=True):
            assert before.base is not None
            base, state = before.base, before.state
            aside = before.moved + moved[: keep if isinstance(keep, int) else len(keep)]
            while len(aside) >= self.states.block:
                for one in aside[: self.states.block]:
                    state, _ = self._delta(state, one)
                base, aside = base + self.states.block, aside[self.states.block :]
            self.states.standing[segment.slot] = Behind(base, state, aside)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        found = torch.zeros(step.bucket, VOCAB)
        for row in range(step.rows):
            found[row] = self.output @ rms_norm(hidden[row], (WIDTH,))
        return found

    def _before(self, segment: Segment) -> Behind:
        """Return what the segment goes on from. Rows of the slot from the segment's start on are left out."""
        if not segment.start:
            nothing = State(torch.zeros(TAPS - 1, MIXED, dtype=torch.bfloat16), torch.zeros(HEADS, HEAD, HEAD))
            return Behind(0, nothing, [])
        return self._at(segment.slot, segment.start)

    def _at(self, slot: int, start: int) -> Behind:
        """Return what the slot goes on from at `start`."""
        found = self.states.standing[slot]
        base = None if found is None else start if found.base is None else found.base
        if found is None or base is None or base % self.states.block or not base <= start <= base + len(found.moved):
            where = "nowhere" if found is None else f"at {found.base}, with {len(found.moved)} rows behind it"
            raise ValueError(f"slot {slot} has its state {where}; nothing continues from {start}")
        return Behind(base, found.state, found.moved[: start - base])

    def _moved_by(self, residual: Tensor) -> Moved:
        x = rms_norm(residual, (WIDTH,))
        return Moved((self.mix @ x).bfloat16(), (self.beta @ x).sigmoid(), (-softplus(self.decay @ x)).exp())

    def _delta(self, state: State, one: Moved) -> tuple[State, Tensor]:
        """The state behind the row, and what the row reads from it `[heads, values]`."""
        window = torch.cat((state.conv, one.mixed.unsqueeze(0)))
        q, k, v = silu((window.float() * self.taps).sum(0)).view(3, HEADS, HEAD).clone()
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        memory = state.memory * one.decay.view(HEADS, 1, 1)
        known = (memory * k.unsqueeze(-1)).sum(1)
        memory = memory + k.unsqueeze(-1) * (one.beta.unsqueeze(-1) * (v - known)).unsqueeze(1)
        return State(window[1:].clone(), memory), (memory * q.unsqueeze(-1)).sum(1)

    def _recur(self, state: State, one: Moved, residual: Tensor) -> tuple[State, Tensor]:
        state, read = self._delta(state, one)
        gate = silu(self.gate @ rms_norm(residual, (WIDTH,)))
        return state, self.recurrent_out @ (rms_norm(read, (HEAD,)).flatten() * gate)

    def _attend(self, slot: int, position: int, residual: Tensor) -> Tensor:
        q, k, v = (self.qkv @ rms_norm(residual, (WIDTH,))).view(3, HEADS, HEAD)
        self.rows.cache[0, 0, slot, :, position], self.rows.cache[0, 1, slot, :, position] = k, v
        keys, values = self.rows.cache[0, :, slot, :, : position + 1].clone()
        weights = ((keys * q.unsqueeze(1)).sum(-1) / HEAD**0.5).softmax(-1)
        return self.attention_out @ (weights.unsqueeze(-1) * values).sum(1).flatten()

    def synchronize(self) -> None:
        """Nothing runs ahead here."""

    def memory(self) -> Mapping[str, int]:
        kept = sum(spec.nbytes for spec in self.states.specs) * (self.spec.slots + self.states.checkpoint_count)
        return {"weights": 0, "host": 0, "kv": self.rows.cache.nbytes + kept, "buffers": 0}

    def close(self) -> None:
        self.closed = True
