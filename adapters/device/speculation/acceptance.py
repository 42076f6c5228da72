"""The acceptance of proposals: what each member of a batched decode step keeps of them.

It is pure: `decode/decode_step.py` runs the forward, and passes on what the target picked behind each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from attrs import frozen

from adapters.device.sampling.sampler import DeadEnd, Draw, NotFinite, PickResult, TokenPick
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.launched_proposals import LaunchedChain
from adapters.device.speculation.proposal_tree import Tree
from adapters.models.kernels.step import Forward, Step
from effects.decode import Decoded, Logprob
from effects.ids import DeviceFailed, FailureKind, Tokens


@frozen(eq=False)
class StepMember:
    """One request's part in a batched decode step: its last token and the proposals behind it.

    tree: where the proposals were launched, it has zeros in their place; `read_tree` has them.
    """

    index: int  # of its effect request in the launch
    slot: int
    state: SlotState
    tree: Tree
    launched: LaunchedChain | None = None

    def read_tree(self) -> Tree:
        """Return the tree with all proposals. Waits for the device if they were launched."""
        return self.tree if self.launched is None else self.launched.read_tree(self.tree.tokens[0])

    @property
    def rows(self) -> list[Draw]:
        """The draws of its rows: each picks the token after one that is fed, given the proposals that lead there."""
        first = self.state.valid + 1
        sampler = self.state.sampler
        if len(self.tree.tokens) == 1:
            return [Draw(sampler, first)]
        return [Draw(sampler, first + len(path), path) for path in self.tree.paths()]


@frozen
class Acceptance:
    """The part of a decode step that a member keeps.

    path: the nodes that stay, from 0 on. logprobs: as in `Decoded`.
    """

    path: tuple[int, ...]
    tokens: Tokens
    logprobs: tuple[Logprob, ...]
    accepted: int  # how many of the tokens were proposed


class CopyCounts(NamedTuple):
    """The part of a member's outcome that tells of copies in its step. The fields are those of `Decoded`."""

    rows: int = 0
    branched: bool = False
    copied: int = 0
    on_branch: int = 0


NOT_COPIED = CopyCounts()


@frozen(eq=False)
class VerifiedStep:
    """The result of the forward of a step: the step as it ran, and per member what it keeps."""

    step: Step
    forward: Forward
    found: Sequence[Acceptance | DeviceFailed]


def accept_proposals(
    member: StepMember, picked_at: Callable[[int], PickResult], first: int
) -> Acceptance | DeviceFailed:
    """Return the part of a member's tree that the target agrees with, or why the step has failed for the member.

    The path begins at node 0, which is the token that was fed. As long as the target picks a token that a child of the
    current node proposes, the path goes on to that child. The first pick that no child proposes is kept as well: it is
    the target's own token. Nothing is kept past a token that ends the answer.

    picked_at: returns the target's pick behind a row of the step. first: the row of node 0 in the step. If a pick fails
    after others were accepted, those are kept, and the next step meets the failure again.
    """
    if len(member.tree.tokens) == 1:
        picked = picked_at(first)
        if isinstance(picked, TokenPick):
            return Acceptance((0,), (picked.token,), () if picked.logprob is None else (picked.logprob,), 0)
        return describe_failed_pick(member.slot, picked)
    tree = member.read_tree()
    node = 0
    path = [0]
    tokens: list[int] = []
    logprobs: list[Logprob] = []
    while True:
        picked = picked_at(first + node)
        if not isinstance(picked, TokenPick):
            if not tokens:
                return describe_failed_pick(member.slot, picked)
            return Acceptance(tuple(path[:-1]), tuple(tokens), tuple(logprobs), len(tokens))
        tokens.append(picked.token)
        if picked.logprob is not None:
            logprobs.append(picked.logprob)
        child = tree.find_child(node, picked.token)
        if child is None or picked.token in member.state.stops:
            return Acceptance(tuple(path), tuple(tokens), tuple(logprobs), len(tokens) - (child is None))
        node = child
        path.append(node)


def describe_failed_pick(slot: int, picked: NotFinite | DeadEnd) -> DeviceFailed:
    """Return the failure of a step in whose slot no token could be picked."""
    kind: FailureKind = "dead_end" if isinstance(picked, DeadEnd) else "broken"
    return DeviceFailed(kind, f"slot {slot}: {picked.detail}")


def decode_outcome(
    member: StepMember, agreed: Acceptance | DeviceFailed, ns: int, matched: int, copies: CopyCounts, *, more: bool
) -> Decoded | DeviceFailed:
    """Return the outcome of what has been committed. ns: the time of the step. matched: as in `Decoded`."""
    if isinstance(agreed, DeviceFailed):
        return agreed
    return Decoded(
        agreed.tokens,
        member.tree.size,
        agreed.logprobs,
        ns,
        agreed.accepted,
        more=more,
        matched=matched,
        copied=copies.copied,
        rows=copies.rows,
        branched=copies.branched,
        on_branch=copies.on_branch,
    )
