"""How far a target agrees with what was proposed: what each member of a batched decode step keeps of it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from adapters.device.sampling.sampler import DeadEnd, Draw, Pick, Picked
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposal_tree import Tree
from effects.decode import Decoded, Logprob
from effects.ids import DeviceFailed, FailureKind, Tokens


@frozen(eq=False)
class Member:
    """One request's part in a batched decode step: its last token and what may follow."""

    index: int  # in the launch
    slot: int
    state: SlotState
    tree: Tree

    @property
    def rows(self) -> list[Draw]:
        """Each picks the token after one that is fed, presuming the proposals up to there."""
        first, sampler = self.state.valid + 1, self.state.sampler
        return [Draw(sampler, first + len(path), path) for path in self.tree.paths()]


@frozen
class Agreed:
    """What a member's decode step comes to. path: the nodes that stay, from 0 on. logprobs: as `Decoded` has them."""

    path: tuple[int, ...]
    tokens: Tokens
    logprobs: tuple[Logprob, ...]
    accepted: int  # how many of the tokens were proposed


def agree(member: Member, picked_at: Callable[[int], Picked], first: int) -> Agreed | DeviceFailed:
    """Down the tree along what the target picks: the proposals that it picked too, and its first pick that differs or
    goes beyond them. Nothing is kept past a token that ends the answer. first: the step's row of node 0.
    """
    node, path = 0, [0]
    tokens: list[int] = []
    logprobs: list[Logprob] = []
    while True:
        picked = picked_at(first + node)
        if not isinstance(picked, Pick):
            if not tokens:
                kind: FailureKind = "dead_end" if isinstance(picked, DeadEnd) else "broken"
                return DeviceFailed(kind, f"slot {member.slot}: {picked.detail}")
            return Agreed(tuple(path[:-1]), tuple(tokens), tuple(logprobs), len(tokens))
        tokens.append(picked.token)
        if picked.logprob is not None:
            logprobs.append(picked.logprob)
        child = member.tree.child(node, picked.token)
        if child is None or picked.token in member.state.stops:
            return Agreed(tuple(path), tuple(tokens), tuple(logprobs), len(tokens) - (child is None))
        path.append(node := child)


def decoded(member: Member, agreed: Agreed | DeviceFailed, ns: int) -> Decoded | DeviceFailed:
    """The outcome of what has been committed."""
    if isinstance(agreed, DeviceFailed):
        return agreed
    return Decoded(agreed.tokens, member.tree.size, agreed.logprobs, ns, agreed.accepted)
