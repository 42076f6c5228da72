"""The interface of proposers, which say what may follow a slot's last token, and of the drafts that they ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from attrs import frozen
from torch import Tensor

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import StepMember
from adapters.device.speculation.deferred_rows import DeferredRows
from adapters.device.speculation.proposal_tree import Tree, chain, prune_tree
from adapters.models.decoder.shard import Kept, ReadableRows
from adapters.models.drafts.cached_draft import BlockRequest, ChooseTokens
from adapters.models.kernels.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.host_addresses import HostAddresses
from adapters.models.kernels.step import Step
from effects.all import EffectRequest
from effects.decode import RunDecode


class DraftModel(Protocol):
    """A draft, wherever its weights are. `CachedDraft` says what the members mean. Every call runs on the lane.

    The state "lost" means that its process is gone. Nothing is asked of it until there is another one.
    """

    @property
    def identity(self) -> str: ...

    @property
    def location(self) -> str: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> int:
        """The rows of a block: one more than the most proposals of a chain."""
        ...

    @property
    def weights_state(self) -> Literal["loaded", "parked", "released", "lost"]: ...

    @property
    def can_branch(self) -> bool: ...

    @property
    def rows(self) -> ReadableRows:
        """The context rows of its slots."""
        ...

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None: ...

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None: ...

    def offload(self) -> int: ...

    def load_back(self) -> int: ...

    def release(self) -> None: ...

    def memory(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class LocalDraft(DraftModel, Protocol):
    """A draft of this process: the caller picks the proposals from its logits."""

    def propose(self, requests: Sequence[BlockRequest], pick: ChooseTokens) -> None: ...

    def build_draft_pass(self, count: int, target: DecodePass) -> DraftPass | None:
        """Return the part of a fused step that makes `count` proposals; None if the library cannot make them."""
        ...

    def list_rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]: ...


@frozen(eq=False)
class FusedPlan:
    """The plan by which the compiled library makes the proposals of one request within its decode step.

    draft: None where nothing is proposed. first: the row that the draft's context begins at. count: proposals.
    """

    draft: LocalDraft | None
    first: int
    count: int


NO_PROPOSALS = FusedPlan(None, 0, 0)


@frozen(eq=False)
class BacklogRow:
    """The destination of a slot's next row, for a draft that reads the row later.

    The row goes behind the last of `rows`, in the copies at `addresses`: one per auxiliary layer of `layers`.
    """

    rows: DeferredRows
    layers: Sequence[int]
    addresses: HostAddresses | None


@frozen(eq=False)
class DraftRequest:
    """A slot that wants proposals: at most `most` in all, of which at most `depth` follow each other."""

    slot: int
    state: SlotState
    most: int
    depth: int


class TreeSource(Protocol):
    """Says what may follow the last tokens of slots. Every call runs on the lane."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Tree]:
        """Return for each request a tree from the slot's last token on; node 0 alone where nothing is proposed."""
        ...


class TextProposer(TreeSource, Protocol):
    """Proposes what followed earlier text that ended as a slot's text does now."""

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        """Return `Decoded.matched` for slots whose states have the tokens of a step already."""
        ...


class Proposer(TreeSource, Protocol):
    """A draft, which follows the target."""

    def follow(
        self, step: Step, aux_hidden_states: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        """Take in what the target's forward of `step` left.

        kept: for each slot of the step, in order, which rows stay. states: their slots' states, which have the tokens
        of these rows already. aux_hidden_states: by layer; static buffers that the next forward overwrites.
        """
        ...

    def catch_up(self, slot: int) -> None:
        """Follow all rows of the slot now: another request takes them over, or they are stored."""
        ...

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        """Take over the draft's rows: slot `target` was opened with `state.valid` rows of `source`, or of itself."""
        ...

    def plan_fused_step(self, request: DraftRequest) -> FusedPlan | None:  # noqa: ARG002 - a default
        """Plan proposals that the library makes within a decode step; None if `propose` has to be asked instead."""
        return None

    def find_next_row(self, slot: int, state: SlotState) -> BacklogRow | None:  # noqa: ARG002 - a default
        """Return where a step without proposals may put the slot's next row itself; None if `follow` needs to get it.

        Whoever puts the row there counts it by `rows.count`.
        """
        return None


def is_proposing(effect_request: EffectRequest) -> bool:
    """Is it a decode step with proposals?"""
    return isinstance(effect_request.effect, RunDecode) and effect_request.effect.propose > 0


def choose_tree_source(
    effect_requests: Sequence[EffectRequest], proposer: Proposer | None, text_proposer: TextProposer | None
) -> TreeSource | None:
    """Return what makes the proposals of these decode steps. All of them name the same source."""
    copies = any(isinstance(one.effect, RunDecode) and one.effect.source == "suffix" for one in effect_requests)
    return text_proposer if copies and text_proposer is not None else proposer


def make_members(
    proposer: TreeSource | None, taken: Mapping[int, tuple[int, SlotState, int]], capacity: int
) -> list[StepMember]:
    """Return the members of a decode step, with proposals for those that may have some and have room.

    All proposals are asked for in one call, and what a grammar forbids is cut off. taken: by slot, the index of its
    effect request in the launch, its state, and the most proposals.
    """
    requests: list[DraftRequest] = []
    members: list[StepMember] = []
    trees: dict[int, Tree] = {}
    for slot, (_, state, most) in taken.items():
        if most and (room := capacity - state.valid - 1):
            requests.append(DraftRequest(slot, state, most, room))
    if proposer is not None and requests:
        trees.update(zip((one.slot for one in requests), proposer.propose(requests), strict=True))
    for slot, (index, state, _) in taken.items():
        tree = trees.get(slot) or chain((state.tokens[-1],))
        matching = state.sampler.matching
        members.append(
            StepMember(index, slot, state, tree if matching is None else prune_tree(tree, matching.count_allowed))
        )
    return members
