"""Trees of proposals: the tokens that one decode step verifies after the token that it feeds.

Problem. A draft proposes tokens, and the target accepts a prefix of one path. A chain spends all its nodes on one path.
If the draft is unsure early, nodes for the second choice there are worth more than nodes at the end of the chain.

Idea. Node 0 is the fed token, and each other node proposes a token that follows its parent. The likelihood of a path
is the product of the likelihoods of its nodes, and the tree of N nodes with the longest expected acceptance has the N
likeliest paths. `grow_tree` takes the likeliest chain as a whole, and then adds the likeliest other path each time
(best first; Ringel & Romano 2026).

A block draft predicts its positions independently of each other, so every path has a likelihood. Other drafts predict a
position after the proposals that they chose before it (`is_conditional`). Of a token beside the chain they do not know
what follows it, so such a node has no children. A tree costs such a draft no more forwards than a chain.

Invariants. Nodes are in depth-first order, and a parent has a smaller number than its children. So a path that goes on
to the first child is a run of neighbouring rows, which `Tree.chain_segments` gives to the target as one segment.

Example. After "the", the draft finds "red fox" (0.6 x 0.5) and, in place of "red", "old" (0.3). With three nodes the
tree is `red`, `fox`, `old`; their parents are 0, 1 and 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import takewhile

from attrs import frozen

from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Segment
from effects.ids import Tokens


@frozen
class Tree:
    """A tree of nodes 0 to N in depth-first order. parents: each less than the number of its node; -1 for node 0."""

    tokens: Tokens
    parents: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of proposals."""
        return len(self.tokens) - 1

    @property
    def chain_length(self) -> int:
        """The proposals of the chain that it begins with, up to the first node that follows another one."""
        if not self.has_branches:
            return self.size
        return next(node for node in range(self.size) if self.parents[node + 1] != node)

    @property
    def has_branches(self) -> bool:
        return self.parents != list_chain_parents(len(self.parents))

    def paths(self) -> list[Tokens]:
        """Return for every node the tokens after the fed one that lead to it, its own included."""
        found: list[Tokens] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            found.append((*found[parent], token))
        return found

    def chain_segments(self, slot: int, start: int) -> list[Segment]:
        """Return its pieces that are chains, as segments of the slot, with node 0 at row `start`."""
        if len(self.tokens) == 1:
            return [Segment(slot, start, 1)]
        found: list[Segment] = []
        first = 0
        for node, parent in enumerate((*self.parents[1:], -1), 1):
            if parent != node - 1:
                found.append(Segment(slot, start + self._depth(first), node - first))
                first = node
        return found

    def _depth(self, node: int) -> int:
        return 1 + self._depth(self.parents[node]) if node else 0

    def find_child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that proposes this token, if there is one."""
        # In depth-first order the descendants of a node follow it, up to the first node with an earlier parent.
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] < node:
                break
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None


def rows_to_keep(path: tuple[int, ...]) -> Kept:
    """Return a path from node 0 on in the form that `Shard.commit` takes: a count if it is the first rows."""
    return path if path and path[-1] >= len(path) else len(path)


def subtree(tree: Tree, nodes: Collection[int]) -> Tree:
    """Return the tree of these nodes only. They must be connected and include node 0."""
    numbers = {node: index for index, node in enumerate(sorted(nodes))}
    return Tree(
        tuple(tree.tokens[node] for node in numbers), tuple(numbers.get(tree.parents[node], -1) for node in numbers)
    )


def prune_tree(tree: Tree, count_allowed: Callable[[Tokens], int]) -> Tree:
    """Return the tree without nodes that may not follow. count_allowed: returns how many tokens of a path may."""
    if not tree.size:
        return tree
    paths = tree.paths()
    inner = set(tree.parents)
    keep = {0}
    for leaf in range(1, len(tree.tokens)):
        if leaf not in inner:
            line = [leaf]
            while tree.parents[line[-1]] > 0:
                line.append(tree.parents[line[-1]])
            keep.update(line[::-1][: count_allowed(paths[leaf])])
    return tree if len(keep) == len(tree.tokens) else subtree(tree, keep)


def chain(tokens: Tokens) -> Tree:
    """Return the tree in which each token follows the one before it."""
    return Tree(tokens, list_chain_parents(len(tokens)))


@cache
def list_chain_parents(count: int) -> tuple[int, ...]:
    """Return the parents of a chain of this many nodes. Chains have few lengths, and every decode step makes some."""
    return tuple(range(-1, count - 1))


def fork_chain(tokens: Tokens, fork: int, branch: Tokens) -> Tree:
    """Return a chain with one branch that follows its node `fork`. tokens: as in `chain`."""
    if not branch:
        return chain(tokens)
    first = len(tokens)
    return Tree((*tokens, *branch), (*list_chain_parents(first), fork, *range(first, first + len(branch) - 1)))


def grow_tree(
    token: int, ranked: Sequence[Sequence[tuple[int, float]]], nodes: int, *, is_conditional: bool = False
) -> Tree:
    """Return the tree of the likeliest chain and the likeliest other paths, with at most `nodes` proposals.

    ranked: for each position after the fed token its candidates with their log-likelihoods, likeliest first.
    is_conditional: the candidates of a position are those after the likeliest ones of all positions before it.
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
        if not is_conditional:
            offer(-negative, len(grown), depth + 1, 0)
    return to_depth_first(token, [(parent, ranked[depth][rank][0]) for parent, depth, rank in grown])


def to_depth_first(token: int, grown: Sequence[tuple[int, int]]) -> Tree:
    """Return the tree in depth-first order. grown: (number of the parent, token) of nodes 1 and on, parents first."""
    children: list[list[int]] = [[] for _ in range(len(grown) + 1)]
    for node, (parent, _) in enumerate(grown, 1):
        children[parent].append(node)
    tokens = list[int]()
    parents = list[int]()
    stack = [(0, -1)]
    while stack:
        node, parent = stack.pop()
        here = len(tokens)
        tokens.append(grown[node - 1][1] if node else token)
        parents.append(parent)
        stack.extend((child, here) for child in reversed(children[node]))
    return Tree(tuple(tokens), tuple(parents))
