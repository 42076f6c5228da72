"""A prompt scorer in another process: the tokens of a prompt cross once, and its scores when all layers are done there.

A loss of that process is a failure of the scorer, so the prompt is served uncompressed. The next prompt that is to be
scored starts the process again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from typing import Literal

import torch
from attrs import define, field

from adapters.remote.client.peer import Peer
from adapters.remote.protocol.channel import ConnectionBroken
from adapters.remote.protocol.draft_messages import DraftBytes, DraftMoved, SendAway
from adapters.remote.protocol.frames import MOST_PAYLOAD
from adapters.remote.protocol.load_request import SHARED
from adapters.remote.protocol.messages import Described, Nothing, Op, T, Unacceptable, WireMessage
from adapters.remote.protocol.payload_tensors import describe_tensors, unpack_tensors
from adapters.remote.protocol.peer_expectation import Deadlines
from adapters.remote.protocol.scorer_messages import DropScoring, LoadScorer, PromptAdvanced, ScorePrompt, ScorerReady
from effects.ports import RowsLost

SCORER_DEADLINES = Deadlines(step=60)  # seconds for a chunk through all layers of a small model on few cores


def build_scorer_request(most: int, *, fast: bool) -> LoadScorer:
    """Return the request to load a scorer. At most the tokens of a prompt, or its scores, cross at once.

    most: tokens of a prompt.
    """
    limit = 4 * most + MOST_PAYLOAD
    room = min(SHARED, limit)
    return LoadScorer(most, fast, limit, (room, room))


@define(eq=False)
class RemoteWeights:
    """The weights of a scorer in its process. They are moved on the lane. Their sizes may be read on any thread.

    loaded: True if they should be on the device, else None. lives: processes that were lost so far. Weights that were
    fetched in an earlier process are fetched again before a prompt is scored.
    """

    peer: Peer
    loaded: Literal[True] | None = None
    lives: int = 0
    _fetched: int = -1
    _memory: DraftBytes = (0, 0, 0, 0)

    def __attrs_post_init__(self) -> None:
        self.peer.set_loss_listener(self._on_lost)

    def _on_lost(self, _: str) -> None:
        self.lives += 1
        self._memory = (0, 0, 0, 0)

    @property
    def weights_bytes(self) -> int:
        return self._memory[0]

    @property
    def host_bytes(self) -> int:
        return self._memory[1]

    def load_back(self) -> int:
        """Bring the weights to the device and return their bytes. Raises OSError or torch.OutOfMemoryError."""
        done = self.ask(Op.FETCH_DRAFT, Nothing(), DraftMoved, seconds=self.peer.deadlines.load)
        self.loaded = True
        self._fetched = self.lives
        self._memory = done.memory
        return done.bytes

    def ensure_loaded(self) -> None:
        """Bring the weights to the device if the present process does not have them. Raises as `load_back` does."""
        if self._fetched != self.lives:
            self.load_back()

    def offload(self) -> None:
        self._send_away(keep=True)

    def release(self) -> None:
        self._send_away(keep=False)

    def _send_away(self, *, keep: bool) -> None:
        self.loaded = None
        if self._fetched == self.lives:  # else there is nothing to send
            with suppress(OSError):
                self._memory = self.ask(Op.SEND_DRAFT_AWAY, SendAway(keep), DraftMoved).memory

    def ask(self, op: Op, message: WireMessage, kind: type[T], *, seconds: float = 0) -> T:
        """Send a request and return the answer. Every failure raises OSError or torch.OutOfMemoryError."""
        return self.ask_for_copies(op, message, kind, {}, seconds=seconds)[0]

    def ask_for_copies(
        self, op: Op, message: WireMessage, kind: type[T], tensors: dict[str, torch.Tensor], *, seconds: float = 0
    ) -> tuple[T, dict[str, torch.Tensor]]:
        """Send a request with tensors. Return the answer and copies of its tensors. Raises as `ask` does."""
        with self.peer.lock:
            try:
                done, frame = self.peer.ask(op, message, kind, list(tensors.values()), seconds=seconds)
            except torch.OutOfMemoryError:
                raise
            except RowsLost as error:
                raise ConnectionError(str(error)) from error
            except ValueError as error:  # refused
                raise OSError(f"{self.peer.dial.name} has refused {op.name.lower()}: {error}") from error
            except RuntimeError as error:
                raise self.give_up(f"{op.name.lower()}: {error}") from error
            try:
                found = unpack_tensors(getattr(done, "tensors", ()), frame.payload)
            except Unacceptable as error:
                raise self.give_up(f"{op.name.lower()}: {error}") from error
            return done, {name: tensor.clone() for name, tensor in found.views().items()}

    def give_up(self, why: str) -> ConnectionError:
        """Disconnect, because an answer cannot be used, and return the error to raise."""
        return ConnectionError(str(self.peer.lose(ConnectionBroken(why))))


@define(eq=False)
class RemoteScorer:
    """A scorer in another process, with the interface of `adapters.models.decoder.scorer.Scorer`."""

    peer: Peer
    asked: LoadScorer
    weights: RemoteWeights = field(init=False)
    _ready: ScorerReady = field(init=False)
    _numbers: count[int] = field(init=False, factory=count)

    def __attrs_post_init__(self) -> None:
        """Load the scorer there. Raises RowsLost, or the daemon's failure."""
        self._ready = self.peer.load(self.asked, ScorerReady)
        self.weights = RemoteWeights(self.peer)

    @property
    def chunk(self) -> int:
        return self._ready.chunk

    def begin(self, tokens: tuple[int, ...]) -> RemoteScoring:
        """Begin to score a prompt. Raises OSError or torch.OutOfMemoryError."""
        self.weights.ensure_loaded()
        return RemoteScoring(self.weights, next(self._numbers) % (1 << 31), tokens, self.weights.lives)


@define(eq=False)
class RemoteScoring:
    """One prompt. life: `RemoteWeights.lives` of the process that has its state. nbytes: that it holds there."""

    weights: RemoteWeights
    number: int
    tokens: tuple[int, ...]
    life: int
    nbytes: int = 0
    _begun: bool = False
    _scores: list[float] | None = None

    @property
    def complete(self) -> bool:
        return self._scores is not None

    def advance(self) -> None:
        """Score further. Raises OSError, also if the process that began is gone, or torch.OutOfMemoryError."""
        if self.life != self.weights.lives:
            raise ConnectionError(f"the process that was scoring the prompt is gone: {self.weights.peer.error}")
        tokens = {} if self._begun else {"tokens": torch.tensor(self.tokens, dtype=torch.int32)}
        self._begun = True
        message = ScorePrompt(self.number, describe_tensors(tokens))
        began = time.perf_counter_ns()
        done, found = self.weights.ask_for_copies(Op.SCORE, message, PromptAdvanced, tokens)
        self.weights.peer.hops.add(time.perf_counter_ns() - began, done.ns)
        self.nbytes = done.held
        if found:
            if done.tensors != (Described("scores", "F32", (len(self.tokens),)),):
                raise self.weights.give_up("it answered with other scores than were asked for")
            self._scores = found["scores"].tolist()

    def scores(self) -> list[float]:
        assert self._scores is not None, "the prompt is not complete"
        return self._scores

    def drop(self) -> None:
        if self._begun and not self.complete and self.life == self.weights.lives:
            with suppress(OSError):
                self.weights.ask(Op.DROP_SCORING, DropScoring(self.number), Nothing)
