"""Whoever proposes what may follow a slot's last token, and the draft that most of them ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from attrs import frozen
from torch import Tensor

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import Member
from adapters.device.speculation.proposal_tree import Tree, chain, fitted
from adapters.models.decoder.shard import Kept, NamedTensors
from adapters.models.drafts.cached_draft import BlockRequest, Pick
from adapters.models.kernels.step import Step
from adapters.sequence_layout import RowSpec


class DraftModel(Protocol):
    """What every draft is, wherever its weights are: `CachedDraft` says what its members mean. Every call runs on the
    lane's thread. lost: its process is gone, and nothing is asked of it until there is another one.
    """

    @property
    def identity(self) -> str: ...

    @property
    def place(self) -> str: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> int:
        """At most so many proposals, less one."""
        ...

    @property
    def state(self) -> Literal["loaded", "parked", "released", "lost"]: ...

    @property
    def branches(self) -> bool: ...

    @property
    def row_spec(self) -> RowSpec: ...

    @property
    def addressed(self) -> bool: ...

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None: ...

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None: ...

    def rows(self, slot: int, start: int, stop: int) -> Tensor: ...

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors: ...

    def offload(self) -> int: ...

    def load_back(self) -> int: ...

    def release(self) -> None: ...

    def memory(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class DraftHere(DraftModel, Protocol):
    """A draft of this process: it is asked by whoever picks."""

    def propose(self, requests: Sequence[BlockRequest], pick: Pick) -> None: ...

    def rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]: ...


@frozen(eq=False)
class DraftRequest:
    """A slot that may be proposed to: at most `most` rows after the one that is fed, of which `depth` in a row."""

    slot: int
    state: SlotState
    most: int
    depth: int


class Proposer(Protocol):
    """Whoever proposes. Every call runs on the lane's thread."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Tree]:
        """For each request a tree from the slot's last token on; node 0 alone where there is nothing to say."""
        ...

    def follow(
        self, step: Step, aux_hidden_states: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        """The target has run `step`; for each of its slots in order what stays of it, and the slot's state, which has
        the tokens of all rows that stay.

        aux_hidden_states are the target's static buffers.
        """
        ...

    def catch_up(self, slot: int) -> None:
        """The slot's rows are about to be taken over by another request, or kept."""
        ...

    def opened(self, source: int, target: int, state: SlotState) -> None:
        """Slot `target` was opened with `state.valid` rows of `source`, which may be itself."""
        ...


def proposed(proposer: Proposer | None, taken: Mapping[int, tuple[int, SlotState, int]], capacity: int) -> list[Member]:
    """The members of a decode step. Whoever may be proposed to and has room is, all in one call.

    taken: by slot, its place in the launch, its state, and how much may be proposed at most.
    """
    requests: list[DraftRequest] = []
    members: list[Member] = []
    trees: dict[int, Tree] = {}
    for slot, (_, state, most) in taken.items():
        if most and (room := capacity - state.valid - 1):
            requests.append(DraftRequest(slot, state, most, room))
    if proposer is not None and requests:
        trees.update(zip((one.slot for one in requests), proposer.propose(requests), strict=True))
    for slot, (index, state, _) in taken.items():
        tree, matching = trees.get(slot) or chain((state.tokens[-1],)), state.sampler.matching
        members.append(Member(index, slot, state, tree if matching is None else fitted(tree, matching.fitting)))
    return members
