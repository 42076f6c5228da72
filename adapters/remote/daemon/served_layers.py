"""Layers of a target in a daemon: every request is checked and then carried out by a `Shard` in this process."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import ClassVar

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.cache.host_copy import Integers, bits
from adapters.models.decoder.shard import NamedTensors, Shard
from adapters.models.kernels.step import Step
from adapters.remote.daemon.answer_handlers import OpAnswer, Ops
from adapters.remote.protocol.lent_memory import LentTensors
from adapters.remote.protocol.messages import (
    Commit,
    Described,
    Exported,
    Forwarded,
    HeldRows,
    LentRun,
    Loaded,
    Nothing,
    Op,
    RunStep,
    Settle,
    StepSettled,
    Unacceptable,
    decode_step,
    with_logits,
)
from adapters.remote.protocol.payload_tensors import TensorBytes, bytes_of, describe_tensors
from adapters.remote.protocol.slot_messages import (
    CopyRows,
    CopyState,
    ImportRows,
    ImportRuns,
    ImportState,
    OneSlot,
    RowSpan,
    SlotCheckpoint,
)
from adapters.sequence_layout import dtype_name, torch_dtype


@define(eq=False)
class ServedLayers:
    """Layers that a daemon serves.

    layers, hidden_size: of the whole model. given_width: the numbers of a token that these layers are given.
    """

    shard: Shard
    layers: int
    hidden_size: int
    given_width: int
    _settling: AbstractContextManager[None] | None = None
    _inputs: dict[tuple[int, int], Tensor] = field(factory=dict[tuple[int, int], Tensor])
    _seen: set[tuple[int, bool, bool]] = field(factory=set["tuple[int, bool, bool]"])
    ops: ClassVar[Ops]

    @property
    def device(self) -> torch.device:
        return self.shard.spec.device

    def describe_loaded(self, *, shared: bool) -> Loaded:
        shard = self.shard
        rows = self.shard.rows.spec
        return Loaded(
            capacity=shard.spec.capacity,
            vocab=shard.spec.vocab_size,
            dtype=dtype_name(shard.spec.dtype),  # type: ignore[arg-type]
            rows=HeldRows(rows.names, rows.heads, rows.width, rows.dtype),  # type: ignore[arg-type]
            states=tuple(Described(spec.name, spec.dtype, spec.shape) for spec in shard.states.specs),  # type: ignore[arg-type]
            state_block=shard.states.block,
            state_checkpoints=shard.states.checkpoint_count,
            memory=self._memory(),
            shared=shared,
        )

    def close(self) -> None:
        if self._settling is not None:
            self._settling.__exit__(None, None, None)
            self._settling = None
        self._inputs.clear()
        self.shard.close()

    def _memory(self) -> tuple[int, int, int]:
        held = self.shard.memory()
        return held["weights"], held["kv"], held["buffers"]

    # --- steps ---

    def forward(self, asked: RunStep, given: TensorBytes) -> OpAnswer:
        """Run a step. The logits of a decode step come with its hidden states, because they are needed next."""
        shard = self.shard
        step = self._step(decode_step(asked.step))
        began = time.perf_counter_ns()
        inputs = self._input(step, given, self.given_width) if shard.spec.layers.start else self._tokens(step, given)
        left = shard.forward(step, inputs)
        found = {f"aux.{layer}": hidden[: step.rows] for layer, hidden in left.aux_hidden_states.items()}
        if not (step.rows_only and self._last):
            found["hidden"] = left.hidden[: step.rows]
        if self._last and with_logits(step):
            found["logits"] = shard.logits(step, left.hidden)[: step.rows]
        shard.synchronize()
        return self._answer_step(step, found, began)

    def logits(self, asked: RunStep, given: TensorBytes) -> OpAnswer:
        if not self._last:
            raise Unacceptable("these layers have no head")
        step = self._step(decode_step(asked.step))
        began = time.perf_counter_ns()
        return self._answer_step(
            step, {"logits": self.shard.logits(step, self._input(step, given, self.hidden_size))[: step.rows]}, began
        )

    def _answer_step(self, step: Step, found: dict[str, Tensor], began: int) -> OpAnswer:
        took = time.perf_counter_ns() - began
        shape = (step.bucket, step.rows_only, step.branches)
        changed = shape not in self._seen  # buffers are made when they are first used
        self._seen.add(shape)
        return OpAnswer(Forwarded(took, describe_tensors(found), self._memory() if changed else None), found)

    @property
    def _last(self) -> bool:
        return self.shard.spec.layers.stop == self.layers

    def _step(self, step: Step) -> Step:
        """Check what a shard does not check itself: the bucket, the number of rows and the slots."""
        if step.bucket not in self.shard.spec.buckets or not 0 < step.rows <= step.bucket:
            raise Unacceptable(f"{step.rows} rows at bucket {step.bucket}; accepted: {self.shard.spec.buckets}")
        for segment in step.segments:
            self._slot(segment.slot)
        return step

    def _slot(self, *slots: int) -> None:
        for slot in slots:
            if slot >= self.shard.spec.slots:
                raise Unacceptable(f"slot {slot} is not in 0..{self.shard.spec.slots - 1}")

    def _check_checkpoint(self, checkpoint: int) -> None:
        if checkpoint >= self.shard.states.checkpoint_count:
            raise Unacceptable(f"checkpoint {checkpoint} is not one of {self.shard.states.checkpoint_count}")

    def _tokens(self, step: Step, given: TensorBytes) -> Tensor:
        """Return the tokens of a step. Tokens outside the vocabulary are refused: after one, a GPU cannot be used."""
        if given.tensors != (accepted := Described("tokens", "I64", (step.rows,)),):
            raise Unacceptable(f"the first layers of a model are given tokens; here {accepted}")
        tokens = given.views()["tokens"].clone()
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.shard.spec.vocab_size:
            raise Unacceptable(f"a step of what are no tokens; accepted: 0..{self.shard.spec.vocab_size - 1}")
        return tokens

    def _input(self, step: Step, given: TensorBytes, width: int) -> Tensor:
        """Return what a step begins with, `width` numbers for each row, padded to its bucket with finite values."""
        shard = self.shard
        rows = step.rows
        accepted = Described("hidden", dtype_name(shard.spec.dtype), (rows, width))  # type: ignore[arg-type]
        if given.tensors != (accepted,):
            raise Unacceptable(f"a step is given hidden states in the model's dtype; here {accepted}")
        if (step.bucket, width) not in self._inputs:
            shape = (step.bucket, width)
            self._inputs[shape] = torch.zeros(
                shape, dtype=shard.spec.dtype, pin_memory=shard.spec.device.type == "cuda"
            )
        (piece,) = given.pieces
        own = self._inputs[step.bucket, width]
        bytes_of(own)[: piece.nbytes] = piece
        return own.to(shard.spec.device)

    def commit(self, asked: Commit, _: TensorBytes) -> OpAnswer:
        self.shard.commit(self._step(decode_step(asked.step)), asked.kept)
        return OpAnswer(Nothing())

    def settle(self, asked: Settle, _: TensorBytes) -> OpAnswer:
        """Begin a step that settles positional state, which `end_settling` keeps or restores."""
        step = self._step(decode_step(asked.step))
        if self._settling is not None:  # a server that has lost its rows says nothing more of a step
            self._settle_with(RuntimeError("the server has begun another step"))
        settling = self.shard.settling(step)
        settling.__enter__()
        self._settling = settling
        return OpAnswer(Nothing())

    def end_settling(self, asked: StepSettled, _: TensorBytes) -> OpAnswer:
        if self._settling is None:
            raise Unacceptable("no step is being settled")
        self._settle_with(RuntimeError("a later shard failed") if asked.raised else None)
        return OpAnswer(Nothing())

    def _settle_with(self, error: RuntimeError | None) -> None:
        """End the step that is being settled, well or not."""
        settling = self._settling
        self._settling = None
        assert settling is not None
        if error is None:
            settling.__exit__(None, None, None)
            return
        try:
            settling.__exit__(type(error), error, None)
        except RuntimeError as raised:
            if raised is not error:
                raise

    # --- rows and states ---

    def copy_rows(self, asked: CopyRows, _: TensorBytes) -> OpAnswer:
        self._slot(asked.source, asked.target)
        self.shard.rows.copy(asked.source, asked.target, asked.count)
        return OpAnswer(Nothing())

    def copy_state(self, asked: CopyState, _: TensorBytes) -> OpAnswer:
        self._slot(asked.source, asked.target)
        self.shard.states.copy(asked.source, asked.target)
        return OpAnswer(Nothing())

    def export_rows(self, asked: RowSpan, _: TensorBytes) -> OpAnswer:
        return answer_exported(self.shard.rows.export(asked.slot, asked.start, asked.stop))

    def import_rows(self, asked: ImportRows, given: TensorBytes | LentTensors) -> OpAnswer:
        self._slot(asked.slot)
        self.shard.rows.import_(asked.slot, asked.start, given.views())
        return OpAnswer(Nothing())

    def import_runs(self, asked: ImportRuns, given: LentTensors) -> OpAnswer:
        self._slot(asked.slot)
        for run in asked.lent:
            self._put(asked.slot, run, given.borrower.run(self.shard.rows.spec, run))
        return OpAnswer(Nothing())

    def _put(self, slot: int, run: LentRun, rows: Integers) -> None:
        """Put lent rows into a slot: in one copy if the slot is in host memory, tensor by tensor if not."""
        shard = self.shard
        spec = self.shard.rows.spec
        if shard.spec.device.type == "cpu":
            own = bits(shard.rows.view(slot, run.start, run.start + run.count))
            np.copyto(own, rows.reshape(own.shape))
        else:
            named = torch.from_numpy(rows).view(torch_dtype(spec.dtype))
            shard.rows.import_(slot, run.start, dict(zip(spec.names, named, strict=True)))

    def export_state(self, asked: OneSlot, _: TensorBytes) -> OpAnswer:
        self._slot(asked.slot)
        return answer_exported({name: state.cpu() for name, state in self.shard.states.export(asked.slot).items()})

    def import_state(self, asked: ImportState, given: TensorBytes | LentTensors) -> OpAnswer:
        self._slot(asked.slot)
        self.shard.states.import_(asked.slot, given.views(), asked.at)
        return OpAnswer(Nothing())

    def keep_state(self, asked: SlotCheckpoint, _: TensorBytes) -> OpAnswer:
        self._slot(asked.slot)
        self._check_checkpoint(asked.checkpoint)
        self.shard.states.keep(asked.slot, asked.checkpoint)
        return OpAnswer(Nothing())

    def load_state(self, asked: SlotCheckpoint, _: TensorBytes) -> OpAnswer:
        self._slot(asked.slot)
        self._check_checkpoint(asked.checkpoint)
        self.shard.states.load(asked.checkpoint, asked.slot)
        return OpAnswer(Nothing())


def answer_exported(found: NamedTensors) -> OpAnswer:
    return OpAnswer(Exported(describe_tensors(found)), found)


ServedLayers.ops = {
    Op.FORWARD: (RunStep, ServedLayers.forward),
    Op.LOGITS: (RunStep, ServedLayers.logits),
    Op.COMMIT: (Commit, ServedLayers.commit),
    Op.SETTLE: (Settle, ServedLayers.settle),
    Op.SETTLED: (StepSettled, ServedLayers.end_settling),
    Op.COPY_ROWS: (CopyRows, ServedLayers.copy_rows),
    Op.COPY_STATE: (CopyState, ServedLayers.copy_state),
    Op.EXPORT_ROWS: (RowSpan, ServedLayers.export_rows),
    Op.IMPORT_ROWS: (ImportRows, ServedLayers.import_rows),
    Op.IMPORT_RUNS: (ImportRuns, ServedLayers.import_runs),
    Op.EXPORT_STATE: (OneSlot, ServedLayers.export_state),
    Op.IMPORT_STATE: (ImportState, ServedLayers.import_state),
    Op.KEEP_STATE: (SlotCheckpoint, ServedLayers.keep_state),
    Op.LOAD_STATE: (SlotCheckpoint, ServedLayers.load_state),
}
