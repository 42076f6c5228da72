"""The interface of proposers, which say what may follow a slot's last token, and of the drafts that they ask."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from attrs import frozen
from torch import Tensor

from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import StepMember
from adapters.device.speculation.deferred_rows import DeferredRows
from adapters.device.speculation.launched_proposals import LaunchedProposals
from adapters.device.speculation.proposal_tree import Tree, chain, fork_chain, prune_tree
from adapters.models.decoder.shard import Kept, ReadableRows, ShardSpec
from adapters.models.drafts.cached_draft import BlockRequest, ChooseTokens
from adapters.models.drafts.draft_parts import LaunchPicks
from adapters.models.kernels.host_addresses import HostAddresses
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.text_matching import NO_BRANCH, Branch
from adapters.models.kernels.step import Forward, Step
from effects.decode import RunDecode
from effects.ids import Tokens

log = logging.getLogger("rekindle.device")


class DraftModel(Protocol):
    """A draft, wherever its weights are. Every call runs on the lane. `CachedDraft` is the one of this process.

    The state "lost" means that its process is gone. Nothing is asked of it until there is another one.
    """

    @property
    def identity(self) -> str:
        """The digest of everything that changes its proposals."""
        ...

    @property
    def location(self) -> str:
        """The device, or the address of the process, that it runs on."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs `extend` needs."""
        ...

    @property
    def block(self) -> int:
        """The rows of a block: one more than the most proposals of a chain."""
        ...

    @property
    def weights_state(self) -> Literal["loaded", "parked", "released", "lost"]: ...

    @property
    def rows(self) -> ReadableRows:
        """The context rows of its slots."""
        ...

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        """Compute its own rows for the rows of a step of the target."""
        ...

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy its rows `[start, stop)` of one slot to another."""
        ...

    def offload(self) -> int:
        """Free the memory of its weights on the device, and return its bytes. `load_back` brings them back."""
        ...

    def load_back(self) -> int:
        """Load its weights to the device again, and return their bytes."""
        ...

    def release(self) -> None:
        """Free offloaded weights on the host as well. `load_back` reads the checkpoint again."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Return bytes by what they are for."""
        ...

    def close(self) -> None: ...


class LocalDraft(DraftModel, Protocol):
    """A draft of this process: the caller picks the proposals from its logits."""

    @property
    def device(self) -> torch.device: ...

    def propose(self, requests: Sequence[BlockRequest], pick: ChooseTokens) -> None:
        """Compute logits for the proposals of each request. `pick` gets the logits and chooses the tokens."""
        ...

    def launch_proposals(self, requests: Sequence[BlockRequest], pick: LaunchPicks) -> Tensor | None:
        """Launch the proposals of each request and their picks, without waiting. Return int64 `[requests, most]`.

        None: the host has to know a token before the next one can be proposed.
        """
        ...

    def build_draft_pass(self, count: int, target: DecodePass) -> DraftPass | None:
        """Return the part of a fused step that makes `count` proposals; None if the library cannot make them."""
        ...

    def list_rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Return batches of requests that run every shape that serving is likely to need."""
        ...


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


class CopiedTexts(NamedTuple):
    """The tokens that the requests of a decode step copy from earlier text, by slot. Hardly any chain has a branch."""

    chains: Mapping[int, Tokens]
    branches: Mapping[int, Branch]

    def build_tree(self, slot: int, token: int) -> Tree:
        """Return the tree of the slot's copies behind its last token. The slot has a chain."""
        return fork_chain((token, *self.chains[slot]), *self.branches.get(slot, NO_BRANCH))


NO_COPIES = CopiedTexts({}, {})


class TextProposer(Protocol):
    """Proposes tokens without a model: where an earlier text ended as a slot's text does now, it copies what followed.

    Every call runs on the lane.
    """

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        """Return `Decoded.matched` for slots whose states have the tokens of a step already."""
        ...

    def index_texts(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        """Index what these slots have of their texts, so that `find_matches` need not do it after a step."""
        ...

    def note_tokens(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        """Note these states, which have the tokens of a step, where no match is asked for.

        It need not be called after each step: states that it has seen keep their tokens themselves.
        """
        ...

    def copy(self, slot: int, count: int) -> Tokens:
        """Return up to `count` tokens that followed at the position that `find_matches` found for the slot last."""
        ...

    def find_branch(self, slot: int, chain: int, count: int) -> Branch:
        """Return how else the text could go on where `chain` tokens were copied: at most `count` tokens."""
        ...

    def count_on_branch(self, slot: int) -> int:
        """Return `Decoded.on_branch` of the step before which `copy` was called, once `find_matches` was called."""
        ...

    def archive_all(self) -> None:
        """Keep the answers of all slots for a later server, if anything keeps them. Called at the end."""


class Proposer(Protocol):
    """Asks a draft for proposals, and gives it what the target has computed. Every call runs on the lane."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Tree]:
        """Return a tree for each request. Node 0 is the slot's last token; it is alone if nothing is proposed."""
        ...

    def follow(
        self,
        step: Step,
        aux_hidden_states: Mapping[int, Tensor],
        kept: Sequence[Kept],
        states: Sequence[SlotState],
        plain_steps: int = 0,
    ) -> None:
        """Give the draft what the target's forward of `step` left of the rows that stay.

        kept: for each slot of the step, in order, which rows stay. states: their slots' states, which have the tokens
        of these rows already. aux_hidden_states: by layer; static buffers that the next forward overwrites.
        plain_steps: further steps that the launch may take, in none of which the draft proposes; 0: it is not known.
        """
        ...

    def catch_up(self, slot: int) -> None:
        """Let the draft follow all rows of the slot now, because another slot copies them or they are stored."""
        ...

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        """Let slot `target` continue from the draft's rows of slot `source`, which may be itself.

        The slot was opened with `state.valid` rows of the target from there.
        """
        ...

    def launch_proposals(self, requests: Sequence[DraftRequest]) -> LaunchedProposals | None:  # noqa: ARG002 - a default
        """Launch a chain for each of these requests that may have one; None if `propose` has to be asked instead.

        The target reads the proposals on the device, and the host does so after the target's forward.
        """
        return None

    def plan_fused_step(self, request: DraftRequest) -> FusedPlan | None:  # noqa: ARG002 - a default
        """Plan proposals that the library makes within a decode step; None if `propose` has to be asked instead."""
        return None

    def find_next_row(self, slot: int, state: SlotState) -> BacklogRow | None:  # noqa: ARG002 - a default
        """Return where a step without proposals may put the slot's next row itself; None if `follow` needs to get it.

        The caller that puts the row there counts it in `rows.count`.
        """
        return None


class DecodingSlot(NamedTuple):
    """A decode step of one request, and the state of its slot."""

    effect: RunDecode
    state: SlotState

    @property
    def is_last_step(self) -> bool:
        """Does the launch end for the request with this step? It has to be asked before the step is taken."""
        return self.effect.steps <= 1


def make_members(
    proposer: Proposer | None,
    copies: CopiedTexts,
    taken: Mapping[int, tuple[int, DecodingSlot]],
    spec: ShardSpec,
) -> list[StepMember]:
    """Return the members of a decode step, with proposals for those that may have some and have room.

    All proposals of the draft are asked for in one call, and what a grammar forbids is cut off. copies: what some
    slots propose instead. taken: by slot, the index of its effect request in the launch, its effect and its state.
    spec: of the target. If its forwards are launched ahead of the host, proposals may be too.
    """
    requests: list[DraftRequest] = []
    members: list[StepMember] = []
    trees: dict[int, Tree] = {}
    for slot, (_, (effect, state)) in taken.items():
        if slot in copies.chains:
            trees[slot] = copies.build_tree(slot, state.tokens[-1])
        elif effect.propose and (room := spec.capacity - state.valid - 1):
            requests.append(DraftRequest(slot, state, effect.propose, room))
    launched = None
    if proposer is not None and requests:
        launched = proposer.launch_proposals(requests) if spec.runs_ahead else None
        if launched is None:
            trees.update(zip((one.slot for one in requests), proposer.propose(requests), strict=True))
    for slot, (index, (_, state)) in taken.items():
        token = state.tokens[-1]
        launched_chain = None if launched is None else launched.find_chain(slot)
        if launched_chain is not None:
            members.append(StepMember(index, slot, state, launched_chain.make_stand_in(token), launched_chain))
            continue
        tree = trees.get(slot) or chain((token,))
        matching = state.sampler.matching
        members.append(
            StepMember(index, slot, state, tree if matching is None else prune_tree(tree, matching.count_allowed))
        )
    return members


def follow_rows(
    proposer: Proposer,
    step: Step,
    forward: Forward,
    kept: Sequence[Kept],
    states: Sequence[SlotState],
    *,
    plain_steps: int,
) -> None:
    """Give a draft what the target left of the rows that stay (`Proposer.follow`).

    The target's state has moved by now, whether or not the draft finds the memory to follow it.
    """
    try:
        proposer.follow(step, forward.aux_hidden_states, kept, states, plain_steps)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.warning("the draft missed a step and proposes nothing for this request: %s", error)
