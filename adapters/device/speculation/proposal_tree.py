"""Trees of proposals: which tokens to try after a fed one, and how far the target agreed.

Node 0 is the fed token. A draft's words on the positions after it are independent of each other, so the likelihood of a
path is the product of its nodes', and the tree of N nodes that is expected to be agreed to furthest is made of the N
likeliest paths. It is grown best first (Ringel & Romano 2026); the likeliest chain goes in whole before the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from attrs import frozen

from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Segment
from effects.ids import Tokens


@frozen
class Tree:
    """tokens: of nodes 0 to N, in depth-first order. parents: each less than its node's number; -1 of node 0."""

    tokens: Tokens
    parents: tuple[int, ...]

    @property
    def size(self) -> int:
        """Proposals."""
        return len(self.tokens) - 1

    def paths(self) -> list[Tokens]:
        """Of every node the tokens after the fed one that lead to it, its own included."""
        found: list[Tokens] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            found.append((*found[parent], token))
        return found

    def pieces(self, slot: int, start: int) -> list[Segment]:
        """Its chain pieces, node 0 at row `start`."""
        found: list[Segment] = []
        first = 0
        for node, parent in enumerate((*self.parents[1:], -1), 1):
            if parent != node - 1:
                found.append(Segment(slot, start + self._depth(first), node - first))
                first = node
        return found

    def _depth(self, node: int) -> int:
        return 1 + self._depth(self.parents[node]) if node else 0

    def child(self, node: int, token: int) -> int | None:
        """Who proposes that token after this node: those after it follow it, up to the next one that does not."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] < node:
                break
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None


def kept(path: tuple[int, ...]) -> Kept:
    """A path from node 0 on, as a shard wants to be told of it."""
    return path if path and path[-1] >= len(path) else len(path)


def subtree(tree: Tree, nodes: Collection[int]) -> Tree:
    """Of these nodes only, which hang together and hold node 0."""
    numbers = {node: place for place, node in enumerate(sorted(nodes))}
    return Tree(
        tuple(tree.tokens[node] for node in numbers), tuple(numbers.get(tree.parents[node], -1) for node in numbers)
    )


def fitted(tree: Tree, fitting: Callable[[Tokens], int]) -> Tree:
    """Without what may not follow. fitting: how many tokens of a path may."""
    if not tree.size:
        return tree
    paths, inner, keep = tree.paths(), set(tree.parents), {0}
    for leaf in range(1, len(tree.tokens)):
        if leaf not in inner:
            line = [leaf]
            while tree.parents[line[-1]] > 0:
                line.append(tree.parents[line[-1]])
            keep.update(line[::-1][: fitting(paths[leaf])])
    return tree if len(keep) == len(tree.tokens) else subtree(tree, keep)


def chain(tokens: Tokens) -> Tree:
    return Tree(tokens, tuple(range(-1, len(tokens) - 1)))


def best_first(token: int, ranked: Sequence[Sequence[tuple[int, float]]], nodes: int) -> Tree:
    """The chain of the likeliest, and the likeliest other paths: `nodes` proposals in all, or fewer if none are left.

    ranked: for each position after the fed token the candidates, likeliest first, with their log-likelihoods.
    """
    ranked = list(takewhile(bool, ranked[:nodes]))
    grown: list[tuple[int, int, int]] = []  # (parent, depth, rank) in order of growth; node numbers start at 1
    waiting: list[tuple[float, int, int, int]] = []  # (-score, parent, depth, rank)

    def offer(score: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(ranked) and rank < len(ranked[depth]):
            heapq.heappush(waiting, (-(score + ranked[depth][rank][1]), parent, depth, rank))

    above = 0.0
    for depth, candidates in enumerate(ranked):
        grown.append((depth, depth, 0))
        offer(above, depth, depth, 1)
        above += candidates[0][1]
    while waiting and len(grown) < nodes:
        negative, parent, depth, rank = heapq.heappop(waiting)
        grown.append((parent, depth, rank))
        offer(-negative - ranked[depth][rank][1], parent, depth, rank + 1)
        offer(-negative, len(grown), depth + 1, 0)
    return ordered(token, [(parent, ranked[depth][rank][0]) for parent, depth, rank in grown])


def ordered(token: int, grown: Sequence[tuple[int, int]]) -> Tree:
    """In depth-first order, first grown first. grown: (parent's number, token) of nodes 1 and on, parents first."""
    children: list[list[int]] = [[] for _ in range(len(grown) + 1)]
    for node, (parent, _) in enumerate(grown, 1):
        children[parent].append(node)
    tokens, parents, stack = list[int](), list[int](), [(0, -1)]
    while stack:
        node, parent = stack.pop()
        here = len(tokens)
        tokens.append(grown[node - 1][1] if node else token)
        parents.append(parent)
        stack.extend((child, here) for child in reversed(children[node]))
    return Tree(tuple(tokens), tuple(parents))
