"""A draft in another process, as the device executor uses it.

The target's hidden states are projected here. The projected rows (features) wait for the next request, so a decode step
is one exchange: rows to follow and slots to propose for go there, token ids come back.

A loss of that process fails no request. Without it nothing is proposed, and a thread starts it again. `RemoteDraftRows`
knows which rows the present process has, so rows of an earlier process are never used.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import torch
from attrs import define, field
from torch import Tensor

from adapters.device.speculation.proposal_tree import Tree
from adapters.models.decoder.shard import NamedTensors
from adapters.models.drafts.draft_parts import DraftShape, Projection
from adapters.models.kernels.step import Step
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_draft_rows import RemoteDraftRows
from adapters.remote.protocol.channel import ConnectionBroken
from adapters.remote.protocol.draft_messages import (
    MOST_FOLLOWED,
    AskedProposals,
    CopyContext,
    DraftBytes,
    DraftMoved,
    DraftProposed,
    DraftReady,
    DraftStep,
    FollowedRows,
    LoadDraft,
    SendAway,
)
from adapters.remote.protocol.messages import Nothing, Op, T, WireMessage, encode_step
from adapters.remote.protocol.payload_tensors import describe_tensors
from adapters.sequence_layout import RowSpec
from effects.ports import RowsLost

log = logging.getLogger("rekindle.shard")
AHEAD_ROWS = 512  # rows that may wait for the next request: 4 MiB of features for a model with 8B parameters
CLOSE_S = 5  # seconds that `close` waits for the thread that starts the process again
GONE: DraftBytes = (0, 0, 0, 0)


@define(eq=False)
class RemoteDraft:
    """A draft in another process. Its work is asked for on the lane. `state` and `memory` may be read on any thread.

    digests: of the weights and of what defines the rows; the other end must have the same. projection: of the target's
    hidden states, on the device of the target's last layers.
    """

    peer: Peer
    asked: LoadDraft
    shape: DraftShape
    digests: tuple[str, str]
    projection: Projection
    _loaded: DraftReady = field(init=False)
    rows: RemoteDraftRows = field(init=False)
    _memory: DraftBytes = field(init=False)
    _there: bool = True
    _wanted: Literal["loaded", "parked", "released"] = "loaded"
    _notify_presence: Callable[[bool], object] = lambda _: None
    _ahead: list[tuple[FollowedRows, Tensor]] = field(factory=list)  # rows that were not sent yet, with their features
    _moving: threading.Lock = field(factory=threading.Lock)
    _returning: threading.Thread | None = None
    _ended: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        """Load the draft there. Raises ValueError if it has another draft, RowsLost, or the daemon's failure."""
        self._loaded = loaded = self.peer.load(self.asked, DraftReady)
        if (loaded.weights, loaded.facts) != self.digests:
            raise ValueError(f"{self.location} has another draft than this one")
        rows = loaded.rows
        spec = RowSpec(rows.names, rows.heads, rows.width, rows.dtype)
        self.rows = RemoteDraftRows(self.peer, spec, self.location, self._ask, self._flush)
        self._memory = loaded.memory
        self.peer.waits = False
        self.peer.set_loss_listener(self._on_lost)

    # --- what it is ---

    @property
    def identity(self) -> str:
        facts = (*self.digests, self._loaded.numbers, self.projection.bit_signature)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @property
    def location(self) -> str:
        return self.peer.dial.name

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.shape.aux_layers

    @property
    def block(self) -> int:
        return self.shape.block

    @property
    def weights_state(self) -> Literal["loaded", "parked", "released", "lost"]:
        return self._wanted if self._there else "lost"

    def set_presence_listener(self, listener: Callable[[bool], object]) -> None:
        """Call `listener` with False when the process is lost and with True when it is back, on any thread."""
        self._notify_presence = listener

    # --- rows to follow, and proposals ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        """Let the draft follow rows of the target: with the next request, or at once if many rows wait."""
        if self.weights_state != "loaded":
            return
        features = self.projection.project(step, aux_hidden_states)[: step.rows].to("cpu", copy=True)
        self._ahead.append((FollowedRows(encode_step(step), tuple(tokens.tolist())), features))
        for segment in step.segments:
            self._hold(segment.slot, segment.start, segment.start + segment.count)
        if len(self._ahead) == MOST_FOLLOWED or sum(len(rows.tokens) for rows, _ in self._ahead) >= AHEAD_ROWS:
            self.send_draft_step(())

    def send_draft_step(self, asked: Sequence[AskedProposals]) -> list[Tree] | None:
        """Send the rows that wait, and return the proposals for each request.

        Returns None without a process, if it refused, or if there was nothing to send. Raises torch.OutOfMemoryError.
        """
        ahead = self._ahead
        self._ahead = []
        if not self._there or not (ahead or asked):
            return None
        features = {"features": torch.cat([own for _, own in ahead])} if ahead else {}
        message = DraftStep(tuple(rows for rows, _ in ahead), tuple(asked), describe_tensors(features))
        began = time.perf_counter_ns()
        try:
            done = self._ask(Op.DRAFT_STEP, message, DraftProposed, features)
        except (torch.OutOfMemoryError, ValueError) as error:
            self.rows.forget()  # it is unknown which of the rows it has followed
            if isinstance(error, ValueError):
                return None
            raise
        except RowsLost:
            return None
        self.peer.hops.add(time.perf_counter_ns() - began, done.ns)
        self._memory = done.memory or self._memory
        return [Tree(tree.tokens, tree.parents) for tree in done.trees]

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy rows of one slot to another, if the process has all of them. Otherwise the draft lacks them there."""
        if not self.rows.has_rows(source, start, stop):
            return
        try:
            self._flush()
            self._ask(Op.COPY_CONTEXT, CopyContext(source, start, stop, target), Nothing)
        except (RowsLost, ValueError):
            return
        self._hold(target, start, stop)

    def _hold(self, slot: int, start: int, stop: int) -> None:
        if self._there:
            self.rows.add_held_rows(slot, start, stop)

    def _flush(self) -> None:
        if self._ahead:
            self.send_draft_step(())

    # --- residency ---

    def offload(self) -> int:
        return self._send_away("parked")

    def release(self) -> None:
        self._send_away("released")

    def _send_away(self, where: Literal["parked", "released"]) -> int:
        moved = 0
        if self._wanted == where:
            return moved
        self._flush()
        with self._moving:
            self._wanted = where
            with suppress(OSError):  # refused: the weights stay where they are, and `load_back` finds them there
                moved = self._move(Op.SEND_DRAFT_AWAY, SendAway(where == "parked"))
        moved += self.projection.offload()
        if where == "released":
            self.projection.release()
        return moved

    def load_back(self) -> int:
        """Bring the weights back and return the moved bytes.

        Raises torch.OutOfMemoryError, and OSError if the process is gone.
        """
        self._check()
        if self._wanted == "loaded":
            return 0
        here = self.projection.load_back()
        try:
            with self._moving:
                moved = self._move(Op.FETCH_DRAFT, Nothing())
                self._check()
                self._wanted = "loaded"
        except BaseException:
            self.projection.offload()
            raise
        return here + moved

    def _check(self) -> None:
        if not self._there:
            raise OSError(f"{self.location}: {self.peer.error}")

    def _move(self, op: Op, message: WireMessage) -> int:
        """Ask for weights to be moved, and return the bytes. A process that is lost moves its weights when it is back.

        Raises OSError if it refuses.
        """
        if not self._there:
            return 0
        try:
            done = self._ask(op, message, DraftMoved, seconds=self.peer.deadlines.load)
        except RowsLost:
            return 0
        except ValueError as error:
            raise OSError(f"{self.location}: {error}") from error
        self._memory = done.memory
        return done.bytes

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of both ends: the other process and the projection here. May be called on any thread."""
        weights, host, rows, buffers = self._memory if self._there else GONE
        here = self.projection.memory()
        return {
            "weights": weights + here["weights"],
            "host": host + here["host"],
            "kv": rows,
            "buffers": buffers + here["buffers"],
        }

    def close(self) -> None:
        self._ended.set()
        self.peer.close()
        self.projection.release()
        self.wait(CLOSE_S)

    @property
    def returning(self) -> bool:
        """Is a thread about to start the process again?"""
        return self._returning is not None and self._returning.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for the thread that starts the process again, if there is one."""
        if self._returning is not None:
            self._returning.join(seconds)

    # --- asking ---

    def _ask(
        self, op: Op, message: WireMessage, kind: type[T], tensors: NamedTensors | None = None, *, seconds: float = 0
    ) -> T:
        """Send a request and return the answer.

        Raises RowsLost, torch.OutOfMemoryError, or ValueError for a refusal. A draft step that is refused may have
        followed some of its rows.
        """
        try:
            return self.peer.ask(op, message, kind, [*(tensors or {}).values()], seconds=seconds)[0]
        except torch.OutOfMemoryError:
            raise
        except ValueError as error:
            log.warning("the draft at %s refused %s: %s", self.location, op.name.lower(), error)
            raise
        except RuntimeError as error:
            raise self.peer.lose(ConnectionBroken(f"{op.name.lower()}: {error}")) from error

    # --- losing it ---

    def _on_lost(self, why: str) -> None:
        """Forget all rows and start the process again on a thread of its own. Called by `Peer` on the asking thread."""
        was = self._there
        self._there = False
        self._ahead.clear()
        self.rows.forget()
        if not was or self._ended.is_set():
            return
        log.warning("the draft is lost, and nothing is proposed until it is back: %s", why)
        self._notify_presence(False)
        self._returning = threading.Thread(target=self._return, name="draft-return", daemon=True)
        self._returning.start()

    def _return(self) -> None:
        """Start the process, load the draft, move its weights where they are wanted, then use it again.

        Runs on a thread of its own.
        """
        while not self._ended.is_set():
            try:
                self.peer.reconnect()
                with self._moving:
                    if self._wanted != "loaded":
                        self.peer.ask(Op.SEND_DRAFT_AWAY, SendAway(self._wanted == "parked"), DraftMoved)
                    self.rows.forget()
                    self._there = True
            except (RowsLost, RuntimeError, ValueError) as error:
                log.debug("the draft is not back yet: %s", error)
                self._ended.wait(self.peer.pause_s)
            else:
                self._notify_presence(True)
                return
