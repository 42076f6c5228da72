"""Prompts of logs as paths of keys: blocks that always occur together have one key, so that a prompt has few of them.

A prompt of 100,000 tokens has 1,600 blocks, and a fleet gets tens of thousands of such prompts. But a log has few
positions where two prompts part or one ends. So blocks between two such positions are one piece here, with the key of
its last block. What is found of a prompt is the same as with every block, because nothing is ever kept of a piece but
all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from attrs import frozen

from engine.tools.simulation.logs.logged_requests import Agent, Request, Session
from engine.tools.simulation.tally import InfiniteCache

LINK = (1 << 64) - 1


@frozen(eq=False)
class PromptPath:
    """A prompt and its answer. stops: for each key, the tokens up to the end of its piece.

    usable: the number of keys that belong to the prompt and can be reused.
    """

    keys: tuple[bytes, ...]
    stops: tuple[int, ...]
    usable: int
    tokens: int  # of the prompt
    answer: int  # tokens

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *self.stops[:-1])


@frozen(eq=False)
class PieceChain:
    """The pieces of a logged prompt: (link, end in tokens, is it shared between sessions)."""

    pieces: tuple[tuple[int, int, bool], ...]
    usable: int
    tokens: int
    answer: int

    def build_path(self, copy: int) -> PromptPath:
        """Return the path of one copy of the session. Only what is shared has the same keys in all copies."""
        keys = (
            (link & LINK).to_bytes(8, "big") + (0 if shared else copy).to_bytes(8, "big")
            for link, _, shared in self.pieces
        )
        stops = tuple(stop for _, stop, _ in self.pieces)
        return PromptPath(tuple(keys), stops, self.usable, self.tokens, self.answer)


def chain_pieces(sessions: Sequence[Session], block_size: int) -> dict[int, PieceChain]:
    """Return the chain of each request, by its `id`.

    Two kinds of blocks are shared between sessions: blocks that several sessions of the logs begin with, and the first
    message of a session. That is usually the list of tools, which other sessions of the same client have as well.
    """
    blocks = InfiniteCache(block_size)
    links = {
        id(request): blocks.chain_blocks(request.prompt + request.answer[:-1])
        for session in sessions
        for request in list_requests(session.agents)
    }
    shared = find_shared_links(sessions, links, block_size)
    ends = find_piece_ends(sessions, links, shared, block_size)
    chains = dict[int, PieceChain]()
    for session in sessions:
        for request in list_requests(session.agents):
            pieces = tuple(
                (link, (number + 1) * block_size, link in shared)
                for number, link in enumerate(links[id(request)])
                if link in ends
            )
            usable = sum(stop <= request.length - 1 for _, stop, _ in pieces)
            chains[id(request)] = PieceChain(pieces, usable, request.length, len(request.answer))
    return chains


def list_requests(agents: Iterable[Agent]) -> list[Request]:
    return [request for agent in agents for request in agent.requests]


def find_shared_links(
    sessions: Sequence[Session], links: Mapping[int, Sequence[int]], block_size: int
) -> frozenset[int]:
    """Return the links of blocks that belong to more than one session."""
    owner = dict[int, int]()
    shared = set[int]()
    for number, session in enumerate(sessions):
        for request in list_requests(session.agents):
            chain = links[id(request)]
            first_message = min(request.boundaries, default=0) // block_size
            shared.update(chain[:first_message])
            shared.update(link for link in chain if owner.setdefault(link, number) != number)
    return frozenset(shared)


def find_piece_ends(
    sessions: Sequence[Session], links: Mapping[int, Sequence[int]], shared: frozenset[int], block_size: int
) -> frozenset[int]:
    """Return the links at which a prompt or an answer ends, sequences part, or sharing ends."""
    ends = set[int]()
    following = dict[int, int]()
    for session in sessions:
        for request in list_requests(session.agents):
            chain = links[id(request)]
            usable = (request.length - 1) // block_size
            ends.update(chain[usable - 1 : usable] if usable else ())
            ends.update(chain[-1:])
            for link, after in pairwise(chain):
                if following.setdefault(link, after) != after or (link in shared) != (after in shared):
                    ends.add(link)
    return frozenset(ends)
