"""A shard's daemon as the server sees it: requests and answers over a connection that is restored when it is lost.

Theory of operation
-------------------

`connect` greets the daemon, `prove` and `load...` set it up. Then `ask` sends one request and waits for the answer.
`post` sends a request without waiting. A daemon answers in order, so the next `ask` first reads the answers to posted
requests.

A connection that fails ends for good, and everything that the daemon had is lost. The listener of `set_loss_listener`
is called, and the caller gets `RowsLost`. The next call connects anew (`reconnect`), if `waits` is set and there is a
listener. It repeats the proof and the load, and checks that the new process computes as the old one did. If that fails,
calls fail at once for a pause, so that a missing daemon does not slow down every request.

A posted request that was refused loses all rows as well, but the connection stays. `ask` and `post` take `lock`. A
caller that reads tensors of an answer holds it until they are read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

from attrs import define, field
from msgspec import structs
from torch import Tensor

from adapters.models.numerics.probe_result import Numerics
from adapters.remote.client.dial import Dial
from adapters.remote.client.hop_counter import HopCounter
from adapters.remote.client.pending_answers import Posted, PostedQuestion, PostedRefused
from adapters.remote.protocol.channel import Channel, ConnectionBroken, WireFrame, is_failure, read_failure
from adapters.remote.protocol.draft_messages import DraftReady, LoadDraft
from adapters.remote.protocol.handshake import greet
from adapters.remote.protocol.lent_memory import Lender
from adapters.remote.protocol.messages import (
    Facts,
    Loaded,
    LoadLayers,
    Offer,
    Op,
    Prove,
    Unacceptable,
    WireMessage,
    decode_message,
    encode_message,
)
from adapters.remote.protocol.peer_expectation import Deadlines, ExpectedModel
from adapters.remote.protocol.scorer_messages import LoadScorer, ScorerReady
from effects.ids import SlotId
from effects.ports import RowsLost

T = TypeVar("T", bound=WireMessage)
Load: TypeAlias = LoadLayers | LoadDraft | LoadScorer
Ready: TypeAlias = Loaded | DraftReady | ScorerReady
LOADING: dict[type[Load], Op] = {LoadLayers: Op.LOAD, LoadDraft: Op.LOAD_DRAFT, LoadScorer: Op.LOAD_SCORER}
A = TypeVar("A", bound=Ready)
log = logging.getLogger("rekindle.shard")
PAUSE_S = 5.0
PAUSE_SHARE = 50  # the pause is at most this many times the try before it: a closed port refuses within 0.3 ms


@define(eq=False)
class Peer:
    """The connection to one daemon. One thread at a time asks over it.

    waits: a call that finds the connection lost connects anew and waits for that; otherwise the owner calls
    `reconnect`.
    pause_s: seconds that calls fail at once after a failed try; fewer if the try was short (PAUSE_SHARE).
    error: the last reason for a loss of rows; empty after a reconnect.
    gone: why there is no connection; empty while there is one.
    restarts: new connections so far.
    slots: of what is loaded.
    """

    dial: Dial
    secret: bytes
    version: str
    model: ExpectedModel
    deadlines: Deadlines = field(factory=Deadlines)
    pause_s: float = PAUSE_S
    waits: bool = True
    error: str = ""
    gone: str = ""
    restarts: int = 0
    hops: HopCounter = field(factory=HopCounter)
    facts: Facts | None = None
    slots: int = 0
    _channel: Channel | None = None
    _opening: Channel | None = None  # it is not set up yet
    _request: int = 2  # after those of the hello
    _posted: Posted = field(factory=Posted)
    _lock: threading.RLock = field(factory=threading.RLock)
    _notify_loss: Callable[[str], object] | None = None
    _proof: tuple[Prove, Offer] | None = None
    _load: tuple[Load, Ready] | None = None
    _refused_until: float = 0.0
    _closed: bool = False

    # --- to begin with ---

    def connect(self) -> Facts:
        """Connect, and check that the daemon knows the secret and has the model. Raises RowsLost."""
        with self._lock:
            try:
                self._channel = self._open_connection()
            except (ConnectionBroken, OSError) as error:
                raise self.lose(error) from error
            assert self.facts is not None
            return self.facts

    def prove(self, asked: Prove) -> Numerics:
        """Return the numerics of layers that the daemon computes. Raises RowsLost, or the daemon's failure."""
        found = self.ask(Op.PROVE, asked, Offer, seconds=self.deadlines.prove)[0]
        self._proof = asked, found
        return Numerics.from_json(found.outcome)

    def load(self, asked: Load, kind: type[A]) -> A:
        """Load layers, a draft or a prompt scorer. kind: of the answer. Raises RowsLost, or the daemon's failure."""
        with self._lock:
            try:
                loaded = self._load_over(self._get_channel(), asked, kind)
            except ConnectionBroken as error:
                raise self.lose(error) from error
            self.slots = asked.slots
            self._load = (asked, loaded)
            return loaded

    def set_loss_listener(self, listener: Callable[[str], object]) -> None:
        """Call `listener` with the reason whenever all rows are lost, before a new connection is made."""
        self._notify_loss = listener

    # --- asking ---

    def ask(
        self, op: Op, message: WireMessage, answer: type[T], tensors: Sequence[Tensor] = (), *, seconds: float = 0
    ) -> tuple[T, WireFrame]:
        """Send a request and return the answer. Its frame must be read before the next request.

        Raises RowsLost if the daemon is gone, its answer is not acceptable, or a posted request was refused. Raises
        ValueError if the daemon refused this request, and torch.OutOfMemoryError or RuntimeError if it failed.
        """
        with self._lock:
            channel = self._get_channel()
            try:
                return self._ask_over(channel, op, message, answer, tensors, seconds=seconds or self.deadlines.step)
            except ConnectionBroken as error:
                raise self.lose(error) from error
            except PostedRefused as error:
                raise self._lose_rows(str(error)) from error

    def read_posted_answers(self) -> None:
        """Wait for the answers to all posted questions. Raises RowsLost, also where one was refused."""
        with self._lock:
            if self._channel is None:
                raise RowsLost((), f"{self.dial.name}: {self.error}")
            try:
                refused = self._posted.read_answers(self._channel, self.deadlines.step)
            except ConnectionBroken as error:
                raise self.lose(error) from error
            if refused:
                raise self._lose_rows(refused)

    def post(self, op: Op, message: WireMessage, keep: Sequence[object] = (), nbytes: int = 0) -> None:
        """Send a request without waiting for the answer, which is read before that of the next request.

        A posted request that was refused or failed is a loss of all rows. nbytes: of rows that the daemon reads in lent
        memory. keep: objects that own this memory; they are kept until the answer.
        """
        with self._lock:
            if nbytes and self._posted.is_crowded(nbytes):
                self.read_posted_answers()
            channel = self._get_channel()
            try:
                self._posted.add(PostedQuestion(op, self._send(channel, op, message, ()), keep, nbytes))
            except ConnectionBroken as error:
                raise self.lose(error) from error

    def close(self) -> None:
        """Close the connection and end the process, for good. May be called again, and on any thread."""
        self._closed = True
        for channel in (self._channel, self._opening):
            if channel is not None:
                channel.close()
        self.dial.end()

    @property
    def lender(self) -> Lender | None:
        """The memory that the daemon can read, if it is connected and there is some."""
        return None if self._channel is None else self._channel.lender

    @property
    def has_ended(self) -> bool:
        """Is the connection lost, as far as that can be seen without a request? May be called on any thread."""
        return not self._closed and ((channel := self._channel) is None or channel.has_ended)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def lock(self) -> threading.RLock:
        """The lock that a caller holds while it asks and then reads the frame."""
        return self._lock

    def figures(self) -> Mapping[str, float]:
        return {**self.hops.build_figures(), "restarts": self.restarts}

    def check_connection(self) -> None:
        """Report a lost connection and try to connect anew. Called on the asking thread, between requests."""
        with self._lock, suppress(RowsLost):
            if self._channel is not None and self._channel.has_ended:
                self.lose(ConnectionBroken("the other end has closed the connection"))
            if self._channel is None:
                self._get_channel()

    # --- how ---

    def _send(self, channel: Channel, op: Op, message: WireMessage, tensors: Sequence[Tensor]) -> int:
        self._request = request = (self._request + 1) % (1 << 32)
        channel.send(op, request, encode_message(message), tensors, seconds=self.deadlines.step)
        return request

    def _ask_over(
        self,
        channel: Channel,
        op: Op,
        message: WireMessage,
        answer: type[T],
        tensors: Sequence[Tensor] = (),
        *,
        seconds: float,
    ) -> tuple[T, WireFrame]:
        request = self._send(channel, op, message, tensors)
        refused = self._posted.read_answers(channel, seconds)
        frame = channel.answer(op, request, seconds)
        # The daemon has answered with rows that lack a posted change, so the answer must not be used.
        if refused:
            raise PostedRefused(refused)
        if is_failure(frame):
            raise read_failure(channel, frame)
        try:
            return decode_message(frame.arguments, answer), frame
        except Unacceptable as error:
            raise channel.abort(str(error)) from error

    def _get_channel(self) -> Channel:
        """Return the connection, or a new one to a daemon that has no rows yet. Raises RowsLost."""
        if self._closed:
            raise RowsLost((), f"{self.dial.name} is closed")
        if self._channel is not None:
            return self._channel
        if time.monotonic() < self._refused_until or self._notify_loss is None or not self.waits:
            raise RowsLost((), f"{self.dial.name}: {self.error}")
        return self.reconnect()

    def reconnect(self) -> Channel:
        """Connect anew and repeat proof and load. Raises RowsLost. Without `waits`, other calls fail meanwhile."""
        began = time.monotonic()
        try:
            channel = self._opening = self._open_connection()
            self._set_up_again(channel)
        except (ConnectionBroken, OSError, ValueError, RuntimeError) as error:
            now = time.monotonic()
            self._refused_until = now + min(self.pause_s, PAUSE_SHARE * (now - began))
            raise RowsLost((), self._disconnect(error)) from error  # no rows: their loss is reported already
        self._channel = channel
        self._opening = None
        self.error = self.gone = ""
        self.restarts += 1
        log.warning("shard %s is back after %.1f s", self.dial.name, time.monotonic() - began)
        return channel

    def _open_connection(self) -> Channel:
        channel = self.dial.open()
        facts = greet(channel, self.secret, self.version, self.dial.hello_s)
        for name, theirs, ours in (
            ("weights", facts.weights, self.model.weights),
            ("configuration", facts.config, self.model.config),
        ):
            if theirs != ours:
                raise channel.abort(f"it has another model: its {name} are {theirs[:40]}, those here {ours[:40]}")
        self.facts = facts
        return channel

    def _set_up_again(self, channel: Channel) -> None:
        """Check that the new process computes as the last one did, and load the same there."""
        if self._proof is not None:
            asked, found = self._proof
            asked = structs.replace(asked, offers=(*asked.offers[:15], found))
            now, _ = self._ask_over(channel, Op.PROVE, asked, Offer, seconds=self.deadlines.prove)
            before = Numerics.from_json(found.outcome)
            if _bits(Numerics.from_json(now.outcome)) != _bits(before):
                raise ValueError("it computes otherwise than before")
        if self._load is not None:
            asked_for, before_that = self._load
            loaded = self._load_over(channel, asked_for, type(before_that))
            if loaded.shape != before_that.shape:
                raise ValueError("it has other rows or states than before")

    def _load_over(self, channel: Channel, asked: Load, kind: type[A]) -> A:
        """Load, and let both ends send payloads as large as this model needs, in shared memory if there is some."""
        shared = self.dial.share(asked.shared)
        asked = asked if shared is not None else structs.replace(asked, shared=(0, 0))
        loaded, _ = self._ask_over(channel, LOADING[type(asked)], asked, kind, seconds=self.deadlines.load)
        channel.limit = asked.limit
        channel.shared = shared if loaded.shared else None
        return loaded

    def lose(self, error: Exception) -> RowsLost:
        """Disconnect and return the error to raise. The listener has heard of the loss when this returns."""
        return self._rows_lost(self._disconnect(error))

    def _lose_rows(self, why: str) -> RowsLost:
        """Return the loss of all rows, because a posted question was refused. The process stays."""
        self.error = why
        log.warning("shard %s refused a command: %s", self.dial.name, why)
        return self._rows_lost(f"shard {self.dial.name}: {why}")

    def _rows_lost(self, why: str) -> RowsLost:
        if self._notify_loss is None:
            return RowsLost(map(SlotId, range(self.slots)), why)
        self._notify_loss(why)
        return RowsLost((), why)

    def _disconnect(self, error: Exception) -> str:
        """Close the connection, end the process, and return the reason in words."""
        for channel in (self._channel, self._opening):
            if channel is not None:
                channel.close(str(error))
        self._channel = self._opening = None
        self._posted.clear()
        became = self.dial.end()
        before = self.gone
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        self.error = f"{reason}; {became}" if became else reason
        if not self._closed:
            self.gone = self.error
            level = logging.DEBUG if before == self.gone else logging.WARNING  # a try that found nothing new
            log.log(level, "shard %s is lost: %s", self.dial.name, self.error)
        return f"shard {self.dial.name}: {self.error}"


def _bits(numerics: Numerics) -> tuple[object, ...]:
    return numerics.numerics_class, numerics.mode, numerics.buckets, numerics.block_size
