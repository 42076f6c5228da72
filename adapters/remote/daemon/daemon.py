"""The daemon: serves layers, a draft or a prompt scorer to one server, until either closes the connection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from attrs import define
from torch import Tensor

from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.remote.daemon.answer_handlers import Answerer, OpAnswer, Work
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.daemon.served_scorer import ServedScorer
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
from adapters.remote.protocol.scorer_messages import LoadScorer

log = logging.getLogger("rekindle.shard")
SECONDS = 120  # for the rest of a frame after its first byte, and for sending an answer


class ServableModel(Protocol):
    """The model of a daemon, from which it can load layers, a draft or a prompt scorer."""

    def facts(self) -> Facts: ...

    def prove(self, asked: Prove) -> Offer:
        """Return the outcome of the numerics probe on this machine, with the key of what it depends on."""
        ...

    def load(self, asked: LoadLayers) -> ServedLayers:
        """Load layers with the numerics that were proven last. Raises ValueError for impossible requests."""
        ...

    def load_draft(self, asked: LoadDraft) -> ServedDraft:
        """Load the model's draft. Raises ValueError if there is none, or for impossible requests."""
        ...

    def load_scorer(self, asked: LoadScorer) -> ServedScorer:
        """Load the model as a prompt scorer, with the numerics that were proven last.

        Raises ValueError for impossible requests.
        """
        ...


@define(eq=False)
class Daemon:
    """One connection to a server.

    join: maps the shared memory; its argument is the bytes to here and from here. It returns None if there is none.
    proven: the server, if it has proven already that it knows the secret. patience: seconds for its proof otherwise.
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
        """Answer requests until the connection ends, which raises ConnectionEnded or ConnectionBroken."""
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
        """Answer one frame. A failure is an answer as well; only a broken connection raises."""
        head = frame.head
        flags = REPLY
        tensors = list[Tensor]()
        self._after = lambda: None
        try:
            answer = self._carry_out(frame)
            said = encode_message(answer.message)
            tensors = list(answer.tensors.values())
        except Exception as error:  # it is reported to the server
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

    def _carry_out(self, frame: WireFrame) -> OpAnswer:
        if frame.head.op not in OPS:
            raise Unacceptable(f"there is no op {frame.head.op}")
        kind, work = OPS[op := Op(frame.head.op)]
        asked = decode_message(frame.arguments, kind)
        given = self._find_tensors(asked, frame)
        if work is not None:
            return work(self, asked, given)
        if self._served is None:
            raise Unacceptable("no layers are loaded, nor a draft or drafter")
        if op not in self._served.ops:
            raise Unacceptable(f"{op.name.lower()} is not for what is loaded here")
        with use_device(self._served.device):
            return self._served.ops[op][1](self._served, asked, given)

    def _find_tensors(self, asked: Any, frame: WireFrame) -> TensorBytes | LentTensors:
        """Return the tensors of a request, from the payload or from lent memory."""
        given = unpack_tensors(getattr(asked, "tensors", ()), frame.payload)
        if not (lent := getattr(asked, "lent", ())):
            return given
        shared = self.channel.shared
        if given.tensors or shared is None or shared.borrower is None:
            raise Unacceptable("nothing is lent here, or it is given twice")
        return LentTensors(lent, shared.borrower)

    def prove(self, asked: Prove, _: TensorBytes) -> OpAnswer:
        return OpAnswer(self.model.prove(asked))

    def load(self, asked: LoadLayers | LoadDraft | LoadScorer, _: TensorBytes) -> OpAnswer:
        if self._served is not None:
            raise Unacceptable("something is loaded already: connect again for another thing")
        shared = self.join(asked.shared) if all(asked.shared) else None
        loads: Mapping[type[Any], Callable[[Any], Answerer]] = {
            LoadLayers: self.model.load,
            LoadDraft: self.model.load_draft,
            LoadScorer: self.model.load_scorer,
        }
        self._served = loads[type(asked)](asked)

        def after() -> None:
            self.channel.limit = asked.limit
            self.channel.shared = shared

        self._after = after  # the answer to the load itself still has the old limit
        return OpAnswer(self._served.describe_loaded(shared=shared is not None))


# The daemon itself proves and loads. The loaded object has all other ops (None here).
OPS: Mapping[Op, tuple[type[Any], Work | None]] = {
    **{
        op: (kind, None) for served in (ServedLayers, ServedDraft, ServedScorer) for op, (kind, _) in served.ops.items()
    },
    Op.PROVE: (Prove, Daemon.prove),
    Op.LOAD: (LoadLayers, Daemon.load),
    Op.LOAD_DRAFT: (LoadDraft, Daemon.load),
    Op.LOAD_SCORER: (LoadScorer, Daemon.load),
}
