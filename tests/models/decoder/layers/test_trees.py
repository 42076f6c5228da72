"""A tree of tokens in one forward: every node as if it stood at the end of a chain, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from attrs import evolve

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.llama import LlamaConfig
from adapters.models.families.qwen2 import Qwen2Config
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import proven, run, same_bits, same_rows, tokens_of

KINDS = [
    pytest.param((torch.float32, "cpu"), id="float32"),
    pytest.param((torch.bfloat16, "cpu"), id="bfloat16"),
    pytest.param((torch.float32, "cuda"), id="cuda float32", marks=[pytest.mark.cuda, pytest.mark.timeout(300)]),
    pytest.param((torch.bfloat16, "cuda"), id="cuda bfloat16", marks=[pytest.mark.cuda, pytest.mark.timeout(300)]),
]


@pytest.fixture(scope="module", params=[Qwen3Config, LlamaConfig, Qwen2Config], ids=lambda kind: kind.__name__)
def config(request):
    return request.param(203, 100, 212, 2, 8, 2, 24, 2048, 1e4)


@pytest.fixture(scope="module", params=KINDS)
def shard(request, config):
    """Slots 0 and 1 hold two sequences of 510 rows, just before a key tile's end; the others are empty."""
    dtype, device = request.param
    kernels = None
    if device == "cuda":
        from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - comes with CUDA only

        config = evolve(config, hidden_size=128, intermediate_size=224, head_dim=32)
        kernels = TritonKernels(torch.device(device))
    kernels = kernels or proven(config, dtype, 1024).copy_for_shard()
    weights = RandomWeights(config, scale=config.hidden_size**-0.5)
    shape = {"device": device, "dtype": dtype, "slots": 4, "capacity": 1024, "aux_layers": (0, 1)}
    made = DenseShard(config, weights, kernels, ShardPlacement(**shape))
    for slot in (0, 1):
        for start in (0, 256):
            run(made, 256, (slot, start, tokens_of(510, config.vocab_size, slot)[start : start + 256]))
    return made


def grown(rng: random.Random, nodes: int, start: int) -> tuple[list[int], list[int], list[Segment]]:
    """A random tree of so many nodes in depth-first order: parents (-1: the root), depths, and its chain pieces."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        # the path to the last node; hanging the next one anywhere on it keeps the order depth first
        path = [len(parents) - 1]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        parent = path[0] if rng.random() < 0.6 else rng.choice(path)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    pieces: list[Segment] = []
    for node, depth in enumerate(depths):
        if pieces and parents[node] == node - 1:
            pieces[-1] = evolve(pieces[-1], count=pieces[-1].count + 1)
        else:
            pieces.append(Segment(0, start + depth, 1))
    return parents, depths, pieces


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("seed", range(6))
def test_every_node_has_the_bits_of_a_chain_and_the_accepted_path_stays(shard, seed):
    rng = random.Random(seed)
    trees = [grown(rng, rng.randint(2, 13), 510) for _ in range(2)]
    tokens = [tokens_of(len(parents), shard.config.vocab_size, 90 + n) for n, (parents, _, _) in enumerate(trees)]
    segments = [evolve(piece, slot=slot) for slot, (_, _, pieces) in enumerate(trees) for piece in pieces]
    step = Step(tuple(segments), 32)
    forward = shard.forward(step, torch.cat(tokens))
    aux_hidden_states = {layer: rows.clone() for layer, rows in forward.aux_hidden_states.items()}
    logits = shard.logits(step, forward.hidden).clone()
    paths, row = [], 0
    for slot, (parents, _, _) in enumerate(trees):
        for node in range(len(parents)):
            path = path_to(parents, node)
            shard.rows.copy(slot, 2, 510)
            chain = Step((Segment(2, 510, len(path)),), rng.choice([16, 64]))
            alone = shard.forward(chain, tokens[slot][path])
            found = shard.logits(chain, alone.hidden)[len(path) - 1]
            assert same_bits(found, logits[row + node])
            assert all(
                same_bits(alone.aux_hidden_states[at][len(path) - 1], aux_hidden_states[at][row + node])
                for at in (0, 1)
            )
        paths.append(tuple(path_to(parents, rng.randrange(len(parents)))))
        row += len(parents)
    shard.commit(step, paths)
    for slot, path in enumerate(paths):
        shard.rows.copy(slot, 2, 510)
        run(shard, 32, (2, 510, tokens[slot][list(path)]))
        assert same_rows(shard, slot, 2, 0, 510 + len(path))


def test_a_tree_goes_with_chains_of_other_slots(shard):
    tokens = tokens_of(9, shard.config.vocab_size, 5)
    step = Step((Segment(0, 510, 4), Segment(0, 512, 2), Segment(1, 510, 3)), 16)
    forward = shard.forward(step, tokens)
    logits = shard.logits(step, forward.hidden).clone()
    shard.commit(step, [(0, 1, 4, 5), 3])
    for slot, rows in ((0, [0, 1, 4, 5]), (1, [6, 7, 8])):
        shard.rows.copy(slot, 2, 510)
        assert same_bits(run(shard, 16, (2, 510, tokens[rows])), logits[rows])
        assert same_rows(shard, slot, 2, 0, 510 + len(rows))


def test_what_is_no_tree_and_no_path_of_it_is_refused_by_name(config):
    shape = {"slots": 2, "capacity": 64, "buckets": (16,)}
    shard = DenseShard(config, RandomWeights(config), ReferenceKernels(), ShardPlacement(**shape))
    for segments in (
        (Segment(0, 0, 3), Segment(0, 4, 1)),
        (Segment(0, 5, 3), Segment(0, 5, 1)),
        (Segment(0, 5, 3), Segment(1, 0, 1), Segment(0, 6, 1)),
    ):
        with pytest.raises(ValueError, match="appears twice in one step"):
            shard.forward(Step(segments, 16), torch.arange(sum(one.count for one in segments)))
    step = Step((Segment(0, 0, 3), Segment(0, 1, 2)), 16)
    shard.forward(step, torch.arange(5))
    for path in ((1,), (0, 3, 2), (0, 1, 2, 3), (0, 9)):
        with pytest.raises(ValueError, match="not a path from the root"):
            shard.commit(step, [path])
    with pytest.raises(ValueError, match="2 answers for a step of 1 slots"):
        shard.commit(step, [1, 1])
