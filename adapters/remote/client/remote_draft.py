"""A draft in another process. What it needs of the target is projected here and crosses with the next question, so a
decode step is one exchange: rows to follow and slots that want proposals there, token ids back.

Nothing that becomes of that process is anybody's failure: without it nothing is proposed, and a thread of its own has
it started again. Which rows the one that is there has is known here, so of those of an earlier one nothing is believed.
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
    DraftRound,
    FollowedRows,
    LoadDraft,
    SendAway,
)
from adapters.remote.protocol.messages import Nothing, Op, T, WireMessage, encode_step
from adapters.remote.protocol.payload_tensors import describe_tensors
from adapters.sequence_layout import RowSpec
from effects.ports import RowsLost

log = logging.getLogger("rekindle.shard")
AHEAD_ROWS = 512  # that are followed with the next question, at most: of 8B parameters 4 MiB of features
CLOSE_S = 5  # for whoever was about to have it again
GONE: DraftBytes = (0, 0, 0, 0)


@define(eq=False)
class RemoteDraft:
    """Asked on the lane; what it says about itself, by anybody. digests: of the weights and of what its rows are, as
    the other end must have them. projection: here, beside the target's last layers.
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
    _told: Callable[[bool], object] = lambda _: None
    _ahead: list[tuple[FollowedRows, Tensor]] = field(factory=list)  # their features, on the host
    _moving: threading.Lock = field(factory=threading.Lock)
    _returning: threading.Thread | None = None
    _ended: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        """Raises ValueError for another draft than what was asked for, RowsLost, or what loading failed with."""
        self._loaded = loaded = self.peer.load_draft(self.asked)
        if (loaded.weights, loaded.facts) != self.digests:
            raise ValueError(f"{self.place} has another draft than this one")
        rows = loaded.rows
        spec = RowSpec(rows.names, rows.heads, rows.width, rows.dtype)
        self.rows = RemoteDraftRows(self.peer, spec, self.place, self._ask, self._flush)
        self._memory = loaded.memory
        self.peer.waits = False
        self.peer.set_loss_listener(self._on_lost)

    # --- what it is ---

    @property
    def identity(self) -> str:
        facts = (*self.digests, self._loaded.numbers, self.projection.bit_signature)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @property
    def place(self) -> str:
        return self.peer.dial.name

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.shape.aux_layers

    @property
    def block(self) -> int:
        return self.shape.block

    @property
    def can_branch(self) -> bool:
        return self._loaded.branches

    @property
    def state(self) -> Literal["loaded", "parked", "released", "lost"]:
        return self._wanted if self._there else "lost"

    def set_presence_listener(self, told: Callable[[bool], object]) -> None:
        """From now on this hears when it is gone, and when it is there again. From any thread."""
        self._told = told

    # --- rounds ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        """With the next question, or at once where much is to be said already."""
        if self.state != "loaded":
            return
        features = self.projection.project(step, aux_hidden_states)[: step.rows].to("cpu", copy=True)
        self._ahead.append((FollowedRows(encode_step(step), tuple(tokens.tolist())), features))
        for one in step.segments:
            self._hold(one.slot, one.start, one.start + one.count)
        if len(self._ahead) == MOST_FOLLOWED or sum(len(one.tokens) for one, _ in self._ahead) >= AHEAD_ROWS:
            self.round(())

    def round(self, asked: Sequence[AskedProposals]) -> list[Tree] | None:
        """What may follow; None where that cannot be known, for it is gone. Raises torch.OutOfMemoryError."""
        ahead = self._ahead
        self._ahead = []
        if not self._there or not (ahead or asked):
            return None
        features = {"features": torch.cat([own for _, own in ahead])} if ahead else {}
        message = DraftRound(tuple(one for one, _ in ahead), tuple(asked), describe_tensors(features))
        began = time.perf_counter_ns()
        try:
            done = self._ask(Op.DRAFT_ROUND, message, DraftProposed, features)
        except (torch.OutOfMemoryError, ValueError) as error:
            self.rows.forget()  # who knows which of them it has followed
            if isinstance(error, ValueError):
                return None
            raise
        except RowsLost:
            return None
        self.peer.count_hop(time.perf_counter_ns() - began, done.ns)
        self._memory = done.memory or self._memory
        return [Tree(tree.tokens, tree.parents) for tree in done.trees]

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """As far as it has them; nobody counts on more."""
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
            self.round(())

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
            with suppress(OSError):  # refused: they stay where they are, and are fetched from there
                moved = self._move(Op.SEND_DRAFT_AWAY, SendAway(where == "parked"))
        moved += self.projection.offload()
        if where == "released":
            self.projection.release()
        return moved

    def load_back(self) -> int:
        """Raises torch.OutOfMemoryError, and OSError where it is not there."""
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
            raise OSError(f"{self.place}: {self.peer.error}")

    def _move(self, op: Op, message: WireMessage) -> int:
        """Bytes. What is gone has nothing to move: there it is wanted so when it comes back."""
        if not self._there:
            return 0
        try:
            done = self._ask(op, message, DraftMoved, seconds=self.peer.deadlines.load)
        except RowsLost:
            return 0
        except ValueError as error:
            raise OSError(f"{self.place}: {error}") from error
        self._memory = done.memory
        return done.bytes

    def memory(self) -> Mapping[str, int]:
        """Of both ends. Asked from other threads, too."""
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
        """Is somebody about to have it again?"""
        return self._returning is not None and self._returning.is_alive()

    def wait(self, seconds: float) -> None:
        """Until it is there again, if that is so."""
        if self._returning is not None:
            self._returning.join(seconds)

    # --- asking ---

    def _ask(
        self, op: Op, message: WireMessage, kind: type[T], tensors: NamedTensors | None = None, *, seconds: float = 0
    ) -> T:
        """Raises RowsLost, torch.OutOfMemoryError, and ValueError for what it refuses, which has changed nothing."""
        try:
            return self.peer.ask(op, message, kind, [*(tensors or {}).values()], seconds=seconds)[0]
        except torch.OutOfMemoryError:
            raise
        except ValueError as error:
            log.warning("the draft at %s refused %s: %s", self.place, op.name.lower(), error)
            raise
        except RuntimeError as error:
            raise self.peer.lose(ConnectionBroken(f"{op.name.lower()}: {error}")) from error

    # --- losing it ---

    def _on_lost(self, why: str) -> None:
        """By whoever asked it. Nobody waits for it to come back."""
        was = self._there
        self._there = False
        self._ahead.clear()
        self.rows.forget()
        if not was or self._ended.is_set():
            return
        log.warning("the draft is lost, and nothing is proposed until it is back: %s", why)
        self._told(False)
        self._returning = threading.Thread(target=self._return, name="draft-return", daemon=True)
        self._returning.start()

    def _return(self) -> None:
        """On a thread of its own: started, loaded and where it is wanted; then it counts."""
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
                self._told(True)
                return
