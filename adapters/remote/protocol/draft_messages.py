"""What is asked of a draft in another process, and what it answers."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from adapters.remote.protocol.messages import (
    Big,
    Count,
    Element,
    HeldRows,
    Number,
    RowSpan,
    Stepped,
    Tensors,
    Text,
    WireMessage,
)

Tokens: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=1 << 16)]
DraftBytes: TypeAlias = tuple[Number, Number, Number, Number]  # weights, of them parked on the host, rows, buffers
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Nodes: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=-1, le=4096)], ...], Meta(min_length=1, max_length=4096)]
MOST_FOLLOWED = 64  # steps of a round


class LoadDraft(WireMessage, frozen=True):
    """bits: of the target's matrices, as in `Prove`. nodes: of trees; 0: chains. rows: of a decode step, at most.
    limit, shared: as in `LoadLayers`.
    """

    dtype: Element
    bits: Literal[0, 4, 8]
    slots: Annotated[int, Meta(ge=1, le=4096)]
    capacity: Count
    buckets: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=256)]
    nodes: Annotated[int, Meta(ge=0, le=63)]
    rows: Annotated[int, Meta(ge=1, le=1 << 16)]
    fast: bool
    limit: Big
    shared: tuple[Big, Big] = (0, 0)


class DraftReady(WireMessage, frozen=True):
    """weights: their digest. facts: of its rows, digested, too. numbers: what its bits depend on, besides."""

    weights: Text
    facts: Text
    numbers: Text
    branches: bool
    rows: HeldRows
    memory: DraftBytes
    shared: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """What the next one has to have, too."""
        return self.weights, self.facts, self.numbers, self.rows


class FollowedRows(WireMessage, frozen=True):
    """Rows that the target has computed. Their features are the payload, those of all steps one after the other."""

    step: Stepped
    tokens: Tokens


class AskedProposals(WireMessage, frozen=True):
    """`BlockRequest`, and what is picked by. most: of a tree. Penalties, biases and grammars are left out: a proposal
    may be wrong.
    """

    slot: Count
    first: Count
    position: Count
    token: Count
    count: Count
    most: Count
    stops: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    top_k: Number = 0  # clients may send 2**31, which is no `Count`
    top_p: Share = 1.0
    min_p: Share = 0.0
    seed: Number = 0


class DraftRound(WireMessage, frozen=True):
    """First these rows are followed, then these slots are proposed to: one exchange of a decode step."""

    follow: Annotated[tuple[FollowedRows, ...], Meta(max_length=MOST_FOLLOWED)]
    asked: Annotated[tuple[AskedProposals, ...], Meta(max_length=4096)]
    tensors: Tensors


class ProposedTree(WireMessage, frozen=True, array_like=True):
    tokens: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    parents: Nodes


class DraftProposed(WireMessage, frozen=True):
    """ns: that it took there. memory: where it has changed."""

    ns: Number
    trees: Annotated[tuple[ProposedTree, ...], Meta(max_length=4096)] = ()
    memory: DraftBytes | None = None


class CopyContext(RowSpan, frozen=True):
    """Rows of a slot, into another one."""

    target: Count


class SendAway(WireMessage, frozen=True):
    """keep: parked, else released."""

    keep: bool


class DraftMoved(WireMessage, frozen=True):
    bytes: Number
    memory: DraftBytes
