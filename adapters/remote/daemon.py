"""The other end: serves one shard to one server over one connection, until either closes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from attrs import define, field
from torch import Tensor

from adapters.device.memory import ran_out_of_memory
from adapters.layout import dtype_name
from adapters.models.shard import NamedTensors, Shard, Step
from adapters.models.waves import current
from adapters.remote import hello
from adapters.remote.channel import Channel, ConnectionBroken, Shared, WireFrame
from adapters.remote.frames import FAILED, REPLY
from adapters.remote.messages import (
    Commit,
    CopyRows,
    CopyState,
    Described,
    Exported,
    Facts,
    Failure,
    FailureKind,
    Forwarded,
    HeldRows,
    ImportRows,
    ImportState,
    Loaded,
    LoadLayers,
    Nothing,
    Offer,
    OneSlot,
    Op,
    Prove,
    RowSpan,
    RunStep,
    Settle,
    SlotPlace,
    StepSettled,
    Unacceptable,
    WireMessage,
    decoded,
    encoded,
    step_of,
    with_logits,
)
from adapters.remote.tensors import TensorBytes, bytes_of, described, unpacked

log = logging.getLogger("rekindle.shard")
SECONDS = 120  # for what is left of a frame once it has begun, and for an answer to be taken


class ShardModel(Protocol):
    """What there is to serve. layers, hidden_size: of the whole model."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def facts(self) -> Facts: ...

    def prove(self, asked: Prove) -> Offer:
        """What holds here, under the key that it may be believed by."""
        ...

    def load(self, asked: LoadLayers) -> Shard:
        """Of layers as they were proven last. ValueError for what cannot be."""
        ...


@define(eq=False)
class Answering:
    """What an op came to, and its tensors."""

    message: WireMessage
    tensors: Mapping[str, Tensor] = field(factory=dict[str, Tensor])


@define(eq=False)
class Daemon:
    """join: maps the memory that both ends have, of so many bytes to here and from here; None: there is none."""

    channel: Channel
    model: ShardModel
    secret: bytes
    version: str
    join: Callable[[tuple[int, int]], Shared | None] = lambda _: None
    _shard: Shard | None = None
    _settling: AbstractContextManager[None] | None = None
    _inputs: dict[int, Tensor] = field(factory=dict[int, Tensor])
    _seen: set[tuple[int, bool, bool]] = field(factory=set["tuple[int, bool, bool]"])
    _after: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Until the connection ends. Raises Broken where it did not end well."""
        try:
            hello.receive(self.channel, self.secret, self.version, self.model.facts, SECONDS)
            with torch.inference_mode():
                while True:
                    self._answer(self.channel.receive(SECONDS, patient=True))
        finally:
            self.channel.close()
            self._give_back()

    def _give_back(self) -> None:
        if self._settling is not None:
            self._settling.__exit__(None, None, None)
            self._settling = None
        self._inputs.clear()
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _answer(self, frame: WireFrame) -> None:
        """A frame that is well framed has an answer, whatever is in it."""
        head, flags = frame.head, REPLY
        self._after = lambda: None
        try:
            answer = self._carried_out(frame)
        except Exception as error:  # the server is told
            if isinstance(error, ConnectionBroken):
                raise
            kind: FailureKind = "out_of_memory" if ran_out_of_memory(error) else "failed"
            if isinstance(error, ValueError):
                kind = "refused"
            if kind == "failed":
                log.exception("an op failed")
            answer, flags = Answering(Failure(kind, str(error)[:4000] or type(error).__name__)), REPLY | FAILED
        sent: dict[str, Any] = {"flags": flags, "seconds": SECONDS}
        self.channel.send(head.op, head.request, encoded(answer.message), list(answer.tensors.values()), **sent)
        self._after()

    def _carried_out(self, frame: WireFrame) -> Answering:
        if frame.head.op not in OPS:
            raise Unacceptable(f"there is no op {frame.head.op}")
        kind, work = OPS[Op(frame.head.op)]
        asked = decoded(frame.arguments, kind)
        given = unpacked(getattr(asked, "tensors", ()), frame.payload)
        if kind is Prove or kind is LoadLayers:
            return work(self, asked, given)
        with current(self.shard.device):
            return work(self, asked, given)

    @property
    def shard(self) -> Shard:
        if self._shard is None:
            raise Unacceptable("no layers are loaded")
        return self._shard

    # --- to begin with ---

    def prove(self, asked: Prove, _: TensorBytes) -> Answering:
        return Answering(self.model.prove(asked))

    def load(self, asked: LoadLayers, _: TensorBytes) -> Answering:
        if self._shard is not None:
            raise Unacceptable("layers are loaded already: connect again for others")
        shared = self.join(asked.shared) if all(asked.shared) else None
        shard = self._shard = self.model.load(asked)
        rows = shard.row_spec

        def after() -> None:
            self.channel.limit, self.channel.shared = asked.limit, shared

        self._after = after  # this answer is still as small as all before it
        return Answering(
            Loaded(
                capacity=shard.capacity,
                vocab=shard.vocab_size,
                dtype=dtype_name(shard.dtype),  # type: ignore[arg-type]
                rows=HeldRows(rows.names, rows.heads, rows.width, rows.dtype),  # type: ignore[arg-type]
                states=tuple(Described(one.name, one.dtype, one.shape) for one in shard.state_specs),  # type: ignore[arg-type]
                state_block=shard.state_block,
                state_places=shard.state_places,
                memory=self._memory(),
                shared=shared is not None,
            )
        )

    def _memory(self) -> tuple[int, int, int]:
        held = self.shard.memory()
        return held["weights"], held["kv"], held["buffers"]

    # --- steps ---

    def forward(self, asked: RunStep, given: TensorBytes) -> Answering:
        """Logits come with the hidden states they are of: they will be asked for."""
        shard, step, began = self.shard, self._step(step_of(asked.step)), time.perf_counter_ns()
        left = shard.forward(step, self._input(step, given))
        found = {f"aux.{layer}": hidden[: step.rows] for layer, hidden in left.aux_hidden_states.items()}
        if not (step.rows_only and self._last):
            found["hidden"] = left.hidden[: step.rows]
        if self._last and with_logits(step):
            found["logits"] = shard.logits(step, left.hidden)[: step.rows]
        shard.synchronize()
        return self._forwarded(step, found, began)

    def logits(self, asked: RunStep, given: TensorBytes) -> Answering:
        if not self._last:
            raise Unacceptable("these layers have no head")
        step, began = self._step(step_of(asked.step)), time.perf_counter_ns()
        return self._forwarded(step, {"logits": self.shard.logits(step, self._input(step, given))[: step.rows]}, began)

    def _forwarded(self, step: Step, found: dict[str, Tensor], began: int) -> Answering:
        took, shape = time.perf_counter_ns() - began, (step.bucket, step.rows_only, step.branches)
        changed = shape not in self._seen  # buffers are made when they are first used
        self._seen.add(shape)
        return Answering(Forwarded(took, described(found), self._memory() if changed else None), found)

    @property
    def _last(self) -> bool:
        return self.shard.layers.stop == self.model.layers

    def _step(self, step: Step) -> Step:
        """As far as no shard checks it: there is room for what is counted."""
        if step.bucket not in self.shard.buckets or not 0 < step.rows <= step.bucket:
            raise Unacceptable(f"{step.rows} rows at bucket {step.bucket}; accepted: {self.shard.buckets}")
        for segment in step.segments:
            self._slot(segment.slot)
        return step

    def _slot(self, *slots: int) -> None:
        for slot in slots:
            if slot >= self.shard.slots:
                raise Unacceptable(f"slot {slot} is not in 0..{self.shard.slots - 1}")

    def _place(self, place: int) -> None:
        if place >= self.shard.state_places:
            raise Unacceptable(f"place {place} is not one of {self.shard.state_places}")

    def _input(self, step: Step, given: TensorBytes) -> Tensor:
        """Tokens, or hidden states, of which only real rows came: those after them are finite, and nobody's."""
        shard, rows = self.shard, step.rows
        if [one.name for one in given.tensors] == ["tokens"] and shard.layers.start == 0:
            return given.views()["tokens"].clone()
        accepted = Described("hidden", dtype_name(shard.dtype), (rows, self.model.hidden_size))  # type: ignore[arg-type]
        if given.tensors != (accepted,):
            raise Unacceptable(f"a step is given tokens, or hidden states in the model's dtype; here {accepted}")
        if step.bucket not in self._inputs:
            shape = (step.bucket, self.model.hidden_size)
            self._inputs[step.bucket] = torch.zeros(shape, dtype=shard.dtype, pin_memory=shard.device.type == "cuda")
        (piece,), own = given.pieces, self._inputs[step.bucket]
        bytes_of(own)[: piece.nbytes] = piece
        return own.to(shard.device)

    def commit(self, asked: Commit, _: TensorBytes) -> Answering:
        self.shard.commit(self._step(step_of(asked.step)), asked.kept)
        return Answering(Nothing())

    def settle(self, asked: Settle, _: TensorBytes) -> Answering:
        """What the next forward settles is put back if a later shard fails."""
        if self._settling is not None:
            raise Unacceptable("a step is being settled already")
        settling = self.shard.settling(self._step(step_of(asked.step)))
        settling.__enter__()
        self._settling = settling
        return Answering(Nothing())

    def settled(self, asked: StepSettled, _: TensorBytes) -> Answering:
        if self._settling is None:
            raise Unacceptable("no step is being settled")
        settling, self._settling = self._settling, None
        if asked.raised:
            error = RuntimeError("a later shard failed")
            try:
                settling.__exit__(type(error), error, None)
            except RuntimeError as raised:
                if raised is not error:
                    raise
        else:
            settling.__exit__(None, None, None)
        return Answering(Nothing())

    # --- rows and states ---

    def copy_rows(self, asked: CopyRows, _: TensorBytes) -> Answering:
        self._slot(asked.source, asked.target)
        self.shard.copy_rows(asked.source, asked.target, asked.count)
        return Answering(Nothing())

    def copy_state(self, asked: CopyState, _: TensorBytes) -> Answering:
        self._slot(asked.source, asked.target)
        self.shard.copy_state(asked.source, asked.target)
        return Answering(Nothing())

    def export_rows(self, asked: RowSpan, _: TensorBytes) -> Answering:
        return _moved(self.shard.export_rows(asked.slot, asked.start, asked.stop))

    def import_rows(self, asked: ImportRows, given: TensorBytes) -> Answering:
        self._slot(asked.slot)
        self.shard.import_rows(asked.slot, asked.start, given.views())
        return Answering(Nothing())

    def export_state(self, asked: OneSlot, _: TensorBytes) -> Answering:
        self._slot(asked.slot)
        return _moved(self.shard.export_state(asked.slot))

    def import_state(self, asked: ImportState, given: TensorBytes) -> Answering:
        self._slot(asked.slot)
        self.shard.import_state(asked.slot, given.views())
        return Answering(Nothing())

    def keep_state(self, asked: SlotPlace, _: TensorBytes) -> Answering:
        self._slot(asked.slot)
        self._place(asked.place)
        self.shard.keep_state(asked.slot, asked.place)
        return Answering(Nothing())

    def load_state(self, asked: SlotPlace, _: TensorBytes) -> Answering:
        self._slot(asked.slot)
        self._place(asked.place)
        self.shard.load_state(asked.place, asked.slot)
        return Answering(Nothing())


def _moved(found: NamedTensors) -> Answering:
    return Answering(Exported(described(found)), found)


OPS: Mapping[Op, tuple[type[Any], Callable[[Daemon, Any, TensorBytes], Answering]]] = {
    Op.PROVE: (Prove, Daemon.prove),
    Op.LOAD: (LoadLayers, Daemon.load),
    Op.FORWARD: (RunStep, Daemon.forward),
    Op.LOGITS: (RunStep, Daemon.logits),
    Op.COMMIT: (Commit, Daemon.commit),
    Op.SETTLE: (Settle, Daemon.settle),
    Op.SETTLED: (StepSettled, Daemon.settled),
    Op.COPY_ROWS: (CopyRows, Daemon.copy_rows),
    Op.COPY_STATE: (CopyState, Daemon.copy_state),
    Op.EXPORT_ROWS: (RowSpan, Daemon.export_rows),
    Op.IMPORT_ROWS: (ImportRows, Daemon.import_rows),
    Op.EXPORT_STATE: (OneSlot, Daemon.export_state),
    Op.IMPORT_STATE: (ImportState, Daemon.import_state),
    Op.KEEP_STATE: (SlotPlace, Daemon.keep_state),
    Op.LOAD_STATE: (SlotPlace, Daemon.load_state),
}
