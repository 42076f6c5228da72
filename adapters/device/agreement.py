"""How far a target agrees with what was proposed: what each member of a batched decode step keeps of it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from adapters.device.sampling import DeadEnd, Draw, NotFinite, Pick, Picked
from adapters.device.slots import SlotState
from adapters.device.tree import Tree
from effects.decode import Decoded
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
        first = self.state.valid + 1
        return [Draw(self.state.sampler, first + len(path), path) for path in self.tree.paths()]


@frozen
class Agreed:
    """What a member's decode step comes to. path: the nodes that stay, from 0 on."""

    path: tuple[int, ...]
    picks: tuple[Pick, ...]
    accepted: int  # how many of the picks were proposed

    @property
    def tokens(self) -> Tokens:
        return tuple(picked.token for picked in self.picks)


def agree(member: Member, picked_at: Callable[[int], Picked], first: int) -> Agreed | DeviceFailed:
    """Down the tree along what the target picks: the proposals that it picked too, and its first pick that differs or
    goes beyond them. Nothing is kept past a token that ends the answer. first: the step's row of node 0.
    """
    children = member.tree.children()
    path, kept = [0], list[Pick]()
    while True:
        picked = picked_at(first + path[-1])
        if isinstance(picked, NotFinite | DeadEnd):
            if not kept:
                kind: FailureKind = "dead_end" if isinstance(picked, DeadEnd) else "broken"
                return DeviceFailed(kind, f"slot {member.slot}: {picked.detail}")
            return Agreed(tuple(path[:-1]), tuple(kept), len(kept))
        kept.append(picked)
        child = children.get((path[-1], picked.token))
        if child is None or picked.token in member.state.stops:
            return Agreed(tuple(path), tuple(kept), len(kept) - (child is None))
        path.append(child)


def decoded(member: Member, agreed: Agreed | DeviceFailed, ns: int) -> Decoded | DeviceFailed:
    """The outcome of what has been committed."""
    if isinstance(agreed, DeviceFailed):
        return agreed
    logprobs = tuple(picked.logprob for picked in agreed.picks if picked.logprob is not None)
    return Decoded(agreed.tokens, member.tree.size, logprobs, ns, agreed.accepted)
