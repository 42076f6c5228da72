"""Layers in another process, as a shard: every operation is a request to the daemon that has them.

A decode step is one exchange. Its logits come with the answer to the forward, and the commit is posted without waiting
for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.shard import Kept, NamedTensors, OutputHead, ShardSpec
from adapters.models.kernels.step import Forward, Step
from adapters.remote.client.crossing import ask_tensors
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_rows import RemoteRows, RemoteStates
from adapters.remote.protocol import messages
from adapters.remote.protocol.messages import (
    Commit,
    Described,
    Element,
    Forwarded,
    Having,
    Loaded,
    LoadLayers,
    Op,
    Settle,
    StepSettled,
    encode_step,
    with_logits,
)
from adapters.remote.protocol.payload_tensors import TensorBytes, bytes_of, describe_tensors
from adapters.sequence_layout import torch_dtype
from effects.ports import RowsLost


class Ends(Protocol):
    """The embedding and the head of the whole model in this process, for a draft that shares them with its target."""

    @property
    def embedding(self) -> Tensor: ...

    @property
    def output(self) -> OutputHead: ...

    @property
    def nbytes(self) -> int:
        """The bytes of those that were read so far."""
        ...


@define(eq=False)
class StepBuffers:
    """The results of forwards of one bucket, in this process.

    fresh: the logits belong to the hidden states. bytes: the memory of each tensor, by its name in messages. expected:
    the tensors of an answer, by the rows of the step and by `rows_only`.
    """

    hidden: Tensor
    aux_hidden_states: dict[int, Tensor]
    logits: Tensor | None = None
    fresh: bool = False
    bytes: dict[str, memoryview] = field(init=False)
    expected: dict[tuple[int, bool], tuple[Described, ...]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        named = {"hidden": self.hidden, **{f"aux.{layer}": own for layer, own in self.aux_hidden_states.items()}}
        self.bytes = {name: bytes_of(own) for name, own in named.items()}

    def take(self, found: TensorBytes) -> None:
        for described, piece in zip(found.tensors, found.pieces, strict=True):
            self.bytes[described.name][: piece.nbytes] = piece


@define(eq=False)
class RemoteShard:
    """Layers `[first, last)` in another process. Results arrive in host memory: `spec.device` is the CPU here.

    left_width: the numbers of a token that the next shard is given.
    """

    peer: Peer
    asked: LoadLayers
    ends: Ends
    hidden_size: int
    num_layers: int
    left_width: int
    spec: ShardSpec = field(init=False)
    rows: RemoteRows = field(init=False)
    states: RemoteStates = field(init=False)
    _dtype_name: Element = field(init=False)
    _memory: tuple[int, int, int] = field(init=False)
    _buffers: dict[int, StepBuffers] = field(factory=dict[int, StepBuffers])

    def __attrs_post_init__(self) -> None:
        loaded = self.peer.load(self.asked, Loaded)
        self._memory = loaded.memory
        self._dtype_name = loaded.dtype
        self.spec = ShardSpec(
            layers=range(*self.asked.layers),
            slots=self.asked.slots,
            capacity=loaded.capacity,
            buckets=self.asked.buckets,
            vocab_size=loaded.vocab,
            device=torch.device("cpu"),
            dtype=torch_dtype(loaded.dtype),
        )
        having = Having.of(loaded)
        self.rows = RemoteRows(self.peer, having.rows)
        self.states = RemoteStates(self.peer, having.states, loaded.state_block, loaded.state_checkpoints)

    # --- what it is ---

    @property
    def embedding(self) -> Tensor:
        self._check_end(first=True)
        return self.ends.embedding

    @property
    def output(self) -> OutputHead:
        self._check_end(first=False)
        return self.ends.output

    @property
    def _last(self) -> bool:
        return self.spec.layers.stop == self.num_layers

    def _check_end(self, *, first: bool) -> None:
        if not (self.spec.layers.start == 0 if first else self._last):
            what = "embedding" if first else "head"
            raise ValueError(f"layers {self.spec.layers.start}..{self.spec.layers.stop - 1} lack the {what}")

    # --- steps ---

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        name = "hidden" if self.spec.layers.start else "tokens"
        buffers = self._at(step.bucket)
        with self.peer.lock:
            buffers.take(
                self._step(Op.FORWARD, step, {name: inputs[: step.rows]}, self._describe_answer(step, buffers))
            )
            buffers.fresh = self._last and with_logits(step)
        return Forward(buffers.hidden, buffers.aux_hidden_states)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        self._check_end(first=False)
        buffers = self._at(step.bucket)
        own = self._logits(buffers)
        if hidden is not buffers.hidden or not buffers.fresh:
            with self.peer.lock:
                shape = (Described("logits", "F32", (step.rows, self.spec.vocab_size)),)
                buffers.take(self._step(Op.LOGITS, step, {"hidden": hidden[: step.rows]}, shape))
            buffers.fresh = hidden is buffers.hidden
        return own

    @contextmanager
    def settling(self, step: Step) -> Iterator[None]:
        """Tell the daemon that a forward settles positional state, and afterwards whether all shards have done so.

        Nothing is sent for steps that settle nothing.
        """
        if not (step.rows_only and self.states.specs):
            yield
            return
        self.peer.post(Op.SETTLE, Settle(encode_step(step)))
        try:
            yield
        except RowsLost:
            raise  # all rows and states are lost anyway, so there is nothing to restore
        except BaseException:
            self.peer.post(Op.SETTLED, StepSettled(True))
            raise
        self.peer.post(Op.SETTLED, StepSettled(False))

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        """Keep rows of a step. The request is posted; if it fails, the next request raises a loss of all rows."""
        if len(kept) != len(step.parts):
            raise ValueError(f"{len(kept)} answers for a step of {len(step.parts)} slots")
        self.peer.post(Op.COMMIT, Commit(encode_step(step), tuple(kept)))

    def synchronize(self) -> None:
        """Do nothing: every answer was waited for. Only posted requests may still be carried out, before later ones."""

    def _describe_answer(self, step: Step, buffers: StepBuffers) -> tuple[Described, ...]:
        """Return the tensors of the answer to a forward, in the order of `ServedLayers.forward`."""
        asked = step.rows, step.rows_only
        if (known := buffers.expected.get(asked)) is not None:
            return known
        wide = (step.rows, self.hidden_size)
        dtype = self._dtype_name
        found = [Described(f"aux.{layer}", dtype, wide) for layer in buffers.aux_hidden_states]
        if not (step.rows_only and self._last):
            found.append(Described("hidden", dtype, (step.rows, self.left_width)))
        if self._last and with_logits(step):
            self._logits(buffers)
            found.append(Described("logits", "F32", (step.rows, self.spec.vocab_size)))
        return buffers.expected.setdefault(asked, tuple(found))

    def _step(self, op: Op, step: Step, given: NamedTensors, expected: tuple[Described, ...]) -> TensorBytes:
        began = time.perf_counter_ns()
        message = messages.RunStep(encode_step(step), describe_tensors(given))
        done, found = ask_tensors(self.peer, op, message, Forwarded, sent=given, expected=expected)
        self.peer.hops.add(time.perf_counter_ns() - began, done.ns)
        self._memory = done.memory or self._memory
        return found

    def _at(self, bucket: int) -> StepBuffers:
        if bucket not in self._buffers:
            shape = (bucket, self.hidden_size)
            aux = [layer for layer in self.asked.aux_layers if layer in self.spec.layers]
            self._buffers[bucket] = StepBuffers(
                torch.zeros(bucket, self.left_width, dtype=self.spec.dtype),
                {layer: torch.zeros(shape, dtype=self.spec.dtype) for layer in aux},
            )
        return self._buffers[bucket]

    def _logits(self, buffers: StepBuffers) -> Tensor:
        if buffers.logits is None:
            buffers.logits = torch.zeros(len(buffers.hidden), self.spec.vocab_size)
            buffers.bytes["logits"] = bytes_of(buffers.logits)
        return buffers.logits

    # --- memory ---

    def memory(self) -> Mapping[str, int]:
        """Return the daemon's last report plus the buffers here. May be called on any thread."""
        weights, kv, buffers = self._memory
        for own in tuple(self._buffers.values()):
            buffers += own.hidden.nbytes + sum(aux_states.nbytes for aux_states in own.aux_hidden_states.values())
            buffers += 0 if own.logits is None else own.logits.nbytes
        return {"weights": weights + self.ends.nbytes, "host": 0, "kv": kv, "buffers": buffers}

    def close(self) -> None:
        self.peer.close()
        self._buffers.clear()
