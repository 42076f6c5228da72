"""Trees of proposals against brute force, and their ways from one form into another."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from adapters.device.speculation.drafting import cut_after_stops
from adapters.device.speculation.proposal_tree import Tree, chain, grow_tree, rows_to_keep
from adapters.models.kernels.step import Segment


def ranked_of(rng: random.Random, depth: int, width: int) -> list[list[tuple[int, float]]]:
    found = []
    for _ in range(depth):
        weights = sorted((rng.random() ** 3 for _ in range(width)), reverse=True)
        tokens = rng.sample(range(100, 200), width)
        found.append([(token, math.log(each / sum(weights))) for token, each in zip(tokens, weights, strict=True)])
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_chain_of_the_likeliest_and_then_the_likeliest_paths(seed):
    rng = random.Random(seed)
    depth, width = rng.randint(1, 4), rng.randint(1, 4)
    ranked = ranked_of(rng, depth, width)
    scores = {
        tuple(token for token, _ in path): sum(value for _, value in path)
        for length in range(1, depth + 1)
        for path in itertools.product(*ranked[:length])
    }
    nodes = rng.randint(1, len(scores) + 3)
    tree = grow_tree(7, ranked, nodes)
    spine = [tuple(candidates[0][0] for candidates in ranked[:length]) for length in range(1, min(depth, nodes) + 1)]
    others = sorted((scores[path] for path in scores if path not in spine), reverse=True)[: max(0, nodes - depth)]
    paths = tree.paths()[1:]
    assert paths[: len(spine)] == spine
    assert len(set(paths)) == len(paths) == min(nodes, len(scores))
    assert sorted((scores[path] for path in paths if path not in spine), reverse=True) == pytest.approx(others)
    assert tree.tokens[0] == 7


@pytest.mark.parametrize("seed", range(20))
def test_a_conditional_tree_is_the_chain_and_the_likeliest_tokens_beside_it(seed):
    rng = random.Random(seed)
    depth, width = rng.randint(1, 5), rng.randint(1, 5)
    ranked = ranked_of(rng, depth, width)
    spine = tuple(candidates[0][0] for candidates in ranked)
    above = [sum(candidates[0][1] for candidates in ranked[:length]) for length in range(depth)]
    scores = {
        (*spine[:length], token): above[length] + value
        for length, candidates in enumerate(ranked)
        for token, value in candidates[1:]
    }
    nodes = rng.randint(1, depth * width + 2)
    paths = grow_tree(7, ranked, nodes, is_conditional=True).paths()[1:]
    chains = [spine[:length] for length in range(1, min(depth, nodes) + 1)]
    best = sorted(scores, key=lambda path: -scores[path])[: max(0, nodes - depth)]
    assert sorted(paths) == sorted([*chains, *best])


@pytest.mark.parametrize("seed", range(10))
def test_nodes_are_in_depth_first_order_and_pieces_are_their_chains(seed):
    rng = random.Random(seed)
    tree = grow_tree(0, ranked_of(rng, 5, 3), rng.randint(5, 22))
    assert all(parent < node for node, parent in enumerate(tree.parents))
    for node in range(1, len(tree.tokens)):
        ancestors = {-1}
        above = node - 1
        while above >= 0:
            ancestors.add(above)
            above = tree.parents[above]
        assert tree.parents[node] in ancestors, "a branch that was left is never come back to"
    depths = [len(path) for path in tree.paths()]
    pieces = tree.chain_segments(3, 50)
    assert [50 + depth for depth in depths] == [
        position for piece in pieces for position in range(piece.start, piece.start + piece.count)
    ]
    assert pieces[0] == Segment(3, 50, 6)


def test_a_chain_is_a_tree_without_branches():
    tree = chain((5, 6, 7))
    assert (tree.size, tree.paths()) == (2, [(), (6,), (6, 7)])
    assert tree.chain_segments(1, 10) == [Segment(1, 10, 3)]
    assert [tree.find_child(0, 6), tree.find_child(0, 7), tree.find_child(1, 7), tree.find_child(2, 7)] == [
        1,
        None,
        2,
        None,
    ]
    branched = Tree((5, 6, 7, 6, 8), (-1, 0, 1, 0, 3))
    assert branched.chain_segments(1, 10) == [Segment(1, 10, 3), Segment(1, 11, 2)]
    assert [branched.find_child(0, 6), branched.find_child(1, 8), branched.find_child(3, 8)] == [1, None, 4]


def test_of_a_path_a_shard_hears_how_many_rows_stay_or_which_where_one_is_left_out():
    assert [rows_to_keep(path) for path in ((), (0,), (0, 1, 2), (0, 2), (0, 1, 4))] == [0, 1, 3, (0, 2), (0, 1, 4)]


def test_nothing_is_proposed_behind_a_token_that_ends_the_answer():
    assert cut_after_stops(chain((1, 2, 3, 4)), frozenset({3})) == chain((1, 2, 3))
    assert cut_after_stops(chain((3, 2, 1)), frozenset({3})) == chain((3, 2, 1)), "the fed token has not ended it"
    tree = Tree((0, 1, 2, 3, 4, 5, 2), (-1, 0, 1, 2, 1, 0, 5))
    assert cut_after_stops(tree, frozenset({2})) == Tree((0, 1, 2, 4, 5, 2), (-1, 0, 1, 1, 0, 4))
    assert cut_after_stops(tree, frozenset({9})) is tree
