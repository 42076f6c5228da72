"""The other end: serves layers of a target, a draft or a drafter to one server, until either closes the connection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from attrs import define
from torch import Tensor

from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.models.decoder.pipelined_chunks import current
from adapters.remote.daemon.answer_handlers import Answerer, Answering, Work
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.daemon.served_scorer import ServedDrafter
from adapters.remote.protocol import handshake
from adapters.remote.protocol.channel import Channel, ConnectionBroken, Shared, WireFrame
from adapters.remote.protocol.draft_messages import LoadDraft
from adapters.remote.protocol.frames import FAILED, REPLY
from adapters.remote.protocol.lent_memory import LentTensors
from adapters.remote.protocol.messages import (
    Facts,
    Failure,
    FailureKind,
    LoadLayers,
    Offer,
    Op,
    Prove,
    Unacceptable,
    decode_message,
    encode_message,
)
from adapters.remote.protocol.payload_tensors import TensorBytes, unpack_tensors
from adapters.remote.protocol.scorer_messages import LoadDrafter

log = logging.getLogger("rekindle.shard")
SECONDS = 120  # for what is left of a frame once it has begun, and for an answer to be taken


class ServableModel(Protocol):
    """What there is to serve."""

    def facts(self) -> Facts: ...

    def prove(self, asked: Prove) -> Offer:
        """What holds here, under the key that it may be believed by."""
        ...

    def load(self, asked: LoadLayers) -> ServedLayers:
        """As they were proven last. ValueError for what cannot be."""
        ...

    def load_draft(self, asked: LoadDraft) -> ServedDraft:
        """The model's draft. ValueError where there is none, or it cannot be."""
        ...

    def load_drafter(self, asked: LoadDrafter) -> ServedDrafter:
        """The model as a drafter, as it was proven last. ValueError where it cannot be."""
        ...


@define(eq=False)
class Daemon:
    """join: maps the memory that both ends have, of so many bytes to here and from here; None: there is none.

    proven: the server has said its hello already. patience: seconds for one that has not.
    """

    channel: Channel
    model: ServableModel
    secret: bytes
    version: str
    join: Callable[[tuple[int, int]], Shared | None] = lambda _: None
    proven: handshake.ProvenServer | None = None
    patience: float = SECONDS
    _served: Answerer | None = None
    _after: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Until the connection ends. Raises Broken where it did not end well."""
        try:
            proven = self.proven or handshake.challenge(self.channel, self.secret, self.patience)
            handshake.welcome(self.channel, proven, self.version, self.model.facts(), SECONDS)
            with torch.inference_mode():
                while True:
                    self._answer(self.channel.receive(SECONDS, patient=True))
        finally:
            self.channel.close()
            if self._served is not None:
                self._served.close()
                self._served = None

    def _answer(self, frame: WireFrame) -> None:
        """A frame that is well framed has an answer, whatever is in it."""
        head = frame.head
        flags = REPLY
        tensors = list[Tensor]()
        self._after = lambda: None
        try:
            answer = self._carried_out(frame)
            said = encode_message(answer.message)
            tensors = list(answer.tensors.values())
        except Exception as error:  # the server is told
            if isinstance(error, ConnectionBroken):
                raise
            kind: FailureKind = "out_of_memory" if is_out_of_memory(error) else "failed"
            if isinstance(error, ValueError):
                kind = "refused"
            if kind == "failed":
                log.exception("an op failed")
            said = encode_message(Failure.of(kind, error))
            flags = REPLY | FAILED
        self.channel.send(head.op, head.request, said, tensors, flags=flags, seconds=SECONDS)
        self._after()

    def _carried_out(self, frame: WireFrame) -> Answering:
        if frame.head.op not in OPS:
            raise Unacceptable(f"there is no op {frame.head.op}")
        kind, work = OPS[op := Op(frame.head.op)]
        asked = decode_message(frame.arguments, kind)
        given = self._given(asked, frame)
        if work is not None:
            return work(self, asked, given)
        if self._served is None:
            raise Unacceptable("no layers are loaded, nor a draft or drafter")
        if op not in self._served.ops:
            raise Unacceptable(f"{op.name.lower()} is not for what is loaded here")
        with current(self._served.device):
            return self._served.ops[op][1](self._served, asked, given)

    def _given(self, asked: Any, frame: WireFrame) -> TensorBytes | LentTensors:
        """In the payload, or where the server has them."""
        given = unpack_tensors(getattr(asked, "tensors", ()), frame.payload)
        if not (lent := getattr(asked, "lent", ())):
            return given
        shared = self.channel.shared
        if given.tensors or shared is None or shared.borrower is None:
            raise Unacceptable("nothing is lent here, or it is given twice")
        return LentTensors(lent, shared.borrower)

    def prove(self, asked: Prove, _: TensorBytes) -> Answering:
        return Answering(self.model.prove(asked))

    def load(self, asked: LoadLayers | LoadDraft | LoadDrafter, _: TensorBytes) -> Answering:
        if self._served is not None:
            raise Unacceptable("something is loaded already: connect again for another thing")
        shared = self.join(asked.shared) if all(asked.shared) else None
        loads: Mapping[type[Any], Callable[[Any], Answerer]] = {
            LoadLayers: self.model.load,
            LoadDraft: self.model.load_draft,
            LoadDrafter: self.model.load_drafter,
        }
        self._served = loads[type(asked)](asked)

        def after() -> None:
            self.channel.limit = asked.limit
            self.channel.shared = shared

        self._after = after  # this answer is still as small as all before it
        return Answering(self._served.loaded(shared=shared is not None))


# What comes before all else is the daemon's own; the rest is asked of what is loaded.
OPS: Mapping[Op, tuple[type[Any], Work | None]] = {
    **{
        op: (kind, None)
        for served in (ServedLayers, ServedDraft, ServedDrafter)
        for op, (kind, _) in served.ops.items()
    },
    Op.PROVE: (Prove, Daemon.prove),
    Op.LOAD: (LoadLayers, Daemon.load),
    Op.LOAD_DRAFT: (LoadDraft, Daemon.load),
    Op.LOAD_DRAFTER: (LoadDrafter, Daemon.load),
}
