"""The messages for a draft in another process: requests of the server and answers of the daemon."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from adapters.remote.protocol.messages import Big, Count, Element, HeldRows, Number, Stepped, Tensors, Text, WireMessage
from adapters.remote.protocol.slot_messages import RowSpan

Tokens: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=1 << 16)]
DraftBytes: TypeAlias = tuple[Number, Number, Number, Number]  # weights, offloaded weights, rows, buffers
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Nodes: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=-1, le=4096)], ...], Meta(min_length=1, max_length=4096)]
MOST_FOLLOWED = 64  # steps of the target that one `DraftStep` carries to the draft


class LoadDraft(WireMessage, frozen=True):
    """The request to load a draft.

    bits: of the target's matrices, as in `Prove`. nodes: of a proposed tree; 0 for chains. rows: the most rows of a
    decode step. limit, shared: as in `LoadLayers`.
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
    """A loaded draft.

    weights: digest of its weights. facts: digest of what defines its rows. numbers: identity of everything else that
    its bits depend on.
    """

    weights: Text
    facts: Text
    numbers: Text
    rows: HeldRows
    memory: DraftBytes
    shared: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """The facts that must be the same after the process was started again."""
        return self.weights, self.facts, self.numbers, self.rows


class FollowedRows(WireMessage, frozen=True):
    """Rows that the target has computed. Their features are in the payload, step after step."""

    step: Stepped
    tokens: Tokens


class AskedProposals(WireMessage, frozen=True):
    """A `BlockRequest` with the sampling settings. most: of proposed tokens.

    Penalties, biases and grammars do not cross. Without them a proposal is only less likely to be accepted.
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


class DraftStep(WireMessage, frozen=True):
    """The request of one decode step: the draft computes its own rows for these rows of the target, then proposes.

    follow: the rows of the target. asked: what each slot wants to have proposed. tensors: the features of the rows.
    """

    follow: Annotated[tuple[FollowedRows, ...], Meta(max_length=MOST_FOLLOWED)]
    asked: Annotated[tuple[AskedProposals, ...], Meta(max_length=4096)]
    tensors: Tensors


class ProposedTree(WireMessage, frozen=True, array_like=True):
    """A proposed tree. parents: for each node the index of its parent; -1 for the root."""

    tokens: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    parents: Nodes


class DraftProposed(WireMessage, frozen=True):
    """The proposals. ns: time that the daemon spent. memory: given if it has changed."""

    ns: Number
    trees: Annotated[tuple[ProposedTree, ...], Meta(max_length=4096)] = ()
    memory: DraftBytes | None = None


class CopyContext(RowSpan, frozen=True):
    """The request to copy rows of a slot into another slot."""

    target: Count


class SendAway(WireMessage, frozen=True):
    """The request to free device memory. keep: offload the weights to the host; otherwise release them."""

    keep: bool


class DraftMoved(WireMessage, frozen=True):
    """Moved weights. bytes: that were moved."""

    bytes: Number
    memory: DraftBytes
