"""EAGLE-3 drafts: right by the published formulas, and the same bits however their rows came about."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.device.sampling.sampler import Sampler
from adapters.device.speculation.drafting import ProposalPicker, ProposalRequest
from adapters.models.decoder.shard import BUCKETS
from adapters.models.drafts.cached_draft import BlockRequest, NotLoaded
from adapters.models.drafts.eagle3.weights import describe_taps, list_eagle3_products
from adapters.models.drafts.feature_projection import FeatureProjection
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.step import Segment, Step
from effects.job import Sampling
from tests.models.checkpoints import same_bits
from tests.models.draft_models import TARGET
from tests.models.eagle3_drafts import (
    CAPACITY,
    KINDS,
    PLAIN,
    SimpleKernels,
    draft_of,
    follow,
    proposed,
    prove_kernels,
    random_eagle3,
    slow_proposals,
    taps_of,
    target_head,
)

LENGTH = 200


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, TARGET.vocab_size, (LENGTH + 1,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request):
    """A draft, and what its target left of every row."""
    dtype = getattr(torch, request.param)
    return draft_of(PLAIN, dtype=dtype), taps_of(PLAIN, LENGTH, dtype)


def ask(tokens: Tensor, position: int, slot: int = 0, count: int = 5, first: int = 0) -> BlockRequest:
    return BlockRequest(slot, first, position, int(tokens[position]), count)


@pytest.mark.parametrize("kind", [*KINDS])
def test_it_says_what_the_published_formulas_say(tokens, kind):
    config = KINDS[kind]
    tensors, taps = random_eagle3(config), taps_of(config, LENGTH)
    draft = draft_of(config, tensors)
    for position, first in ((1, 0), (2, 0), (64, 0), (65, 0), (150, 0), (150, 128)):
        follow(draft, 0, tokens[:position], taps, [40])
        request = ask(tokens, position, first=first, count=7)
        found = proposed(draft, request)
        picked, logits = slow_proposals(config, tensors, tokens, taps, request)
        assert found.tokens == [picked]
        torch.testing.assert_close(torch.stack(found.logits[0]).double(), torch.stack(logits), atol=2e-4, rtol=1e-4)


def test_tokens_outside_the_reduced_vocabulary_are_never_proposed(pair, tokens):
    draft, taps = pair
    follow(draft, 0, tokens[:LENGTH], taps, [128])
    known = random_eagle3(PLAIN)["d2t"].tolist()
    [logits] = proposed(draft, ask(tokens, LENGTH)).logits
    for row in logits:
        assert row.isfinite().nonzero().flatten().tolist() == known


def test_the_same_bits_in_whatever_pieces_its_rows_were_made(pair, tokens):
    draft, taps = pair
    follow(draft, 0, tokens[:LENGTH], taps, [256])
    expected = proposed(draft, ask(tokens, LENGTH)).logits[0]
    for slot, pieces in enumerate(([64], [1, 63, 130, 7], [33, 100, 3]), 1):
        follow(draft, slot, tokens[:LENGTH], taps, pieces)
        assert all(map(same_bits, proposed(draft, ask(tokens, LENGTH, slot)).logits[0], expected))
        assert same_bits(draft.rows.view(slot, 0, LENGTH), draft.rows.view(0, 0, LENGTH))


def test_the_same_bits_beside_others_who_want_more_or_less(pair, tokens):
    draft, taps = pair
    for slot, length in enumerate((LENGTH, 64, 130, 7)):
        follow(draft, slot, tokens[:length], taps, [128])
    requests = [ask(tokens, LENGTH, 0, 3), ask(tokens, 64, 1, 7), ask(tokens, 130, 2, 1), ask(tokens, 7, 3, 7)]
    together = proposed(draft, *requests)
    for index, request in enumerate(requests):
        alone = proposed(draft, request)
        assert alone.tokens[0] == together.tokens[index]
        assert len(alone.tokens[0]) == request.count
        assert all(map(same_bits, alone.logits[0], together.logits[index]))


def test_a_launched_chain_has_the_same_proposals(pair, tokens):
    draft, taps = pair
    for slot, length in enumerate((LENGTH, 64, 130, 7)):
        follow(draft, slot, tokens[:length], taps, [128])
    requests = [ask(tokens, LENGTH, 0, 3), ask(tokens, 64, 1, 7), ask(tokens, 130, 2, 1), ask(tokens, 7, 3, 7)]
    expected = proposed(draft, *requests).tokens
    steps: list[int] = []

    def pick(logits: Tensor, draft_step: int) -> Tensor:
        steps.append(draft_step)
        assert len(logits) == len(requests)
        return logits.argmax(-1)

    found = draft.launch_proposals(requests, pick)
    assert steps == [*range(7)]
    assert found.shape == (4, 7)
    assert [row[: len(one)].tolist() for row, one in zip(found, expected, strict=True)] == expected
    assert proposed(draft, *requests).tokens == expected, "the next proposals begin where the target is"


def test_the_same_bits_from_kept_rows_alone_and_in_another_slot(pair, tokens):
    draft, taps = pair
    follow(draft, 0, tokens[:LENGTH], taps, [256])
    expected = proposed(draft, ask(tokens, LENGTH)).logits[0]
    rows = draft.rows.export(0, 0, 192)
    follow(draft, 1, torch.flip(tokens[:LENGTH], (0,)), torch.flip(taps, (1,)), [256])  # states of another sequence
    draft.rows.import_(1, 0, rows)
    follow(draft, 1, tokens[:LENGTH], taps, [5, 64], start=192)
    assert all(map(same_bits, proposed(draft, ask(tokens, LENGTH, 1)).logits[0], expected))
    draft.copy_rows(0, 2, 0, LENGTH)  # not at a multiple of 64: the kept states come with the rows
    assert all(map(same_bits, proposed(draft, ask(tokens, LENGTH, 2)).logits[0], expected))


def test_a_tree_has_the_proposals_of_the_chain_and_the_likeliest_tokens_beside_them(pair, tokens):
    draft, taps = pair
    follow(draft, 0, tokens[:LENGTH], taps, [128])
    request = ask(tokens, LENGTH, count=7)
    alone = proposed(draft, request)
    sampler = Sampler(Sampling(), (), TARGET.vocab_size, draft.device)
    picker = ProposalPicker([ProposalRequest(sampler, LENGTH, request.token, 15, frozenset())], 22, draft.block)
    draft.propose([request], picker)
    [tree] = picker.trees()
    spine = tuple(alone.tokens[0])
    paths = tree.paths()[1:]
    assert paths[:7] == [spine[:length] for length in range(1, 8)]
    side_tokens: dict[int, list[int]] = {}
    for path in paths[7:]:
        assert path[:-1] == spine[: len(path) - 1], "nothing follows a token beside the chain"
        side_tokens.setdefault(len(path) - 1, []).append(path[-1])
    for depth, found in side_tokens.items():
        row = alone.logits[0][depth]
        assert sorted(row[found].tolist()) == sorted(row.topk(1 + len(found)).values[1:].tolist()), "bf16 has ties"
    assert sum(map(len, side_tokens.values())) == 8


def test_rows_that_were_taken_back_are_forgotten(pair, tokens):
    draft, taps = pair
    follow(draft, 0, tokens[:LENGTH], taps, [256])
    expected = proposed(draft, ask(tokens, LENGTH)).logits[0]
    wrong = tokens.clone()
    wrong[190:] = 99
    follow(draft, 3, wrong[:LENGTH], torch.cat((taps[:, :190], -taps[:, 190:]), 1), [128])
    follow(draft, 3, tokens[:LENGTH], taps, [5], start=190)
    assert all(map(same_bits, proposed(draft, ask(tokens, LENGTH, 3)).logits[0], expected))


def test_parked_it_says_nothing_and_comes_back_the_same(pair, tokens):
    draft, taps = pair
    follow(draft, 0, tokens[:LENGTH], taps, [256])
    expected = proposed(draft, ask(tokens, LENGTH)).logits[0]
    held = draft.memory()["weights"]
    assert draft.offload() == held > 0
    with pytest.raises(NotLoaded, match="the draft is parked"):
        proposed(draft, ask(tokens, LENGTH))
    assert draft.load_back() == held
    assert all(map(same_bits, proposed(draft, ask(tokens, LENGTH)).logits[0], expected))


@pytest.mark.parametrize(
    "kind", ["reduced vocabulary", "all other norms, five layers", "another width than the target"]
)
def test_features_that_were_projected_elsewhere_give_the_same_bits(tokens, kind):
    config = KINDS[kind]
    tensors, taps = random_eagle3(config), taps_of(config, LENGTH)
    here, there = draft_of(config, tensors), draft_of(config, tensors)
    follow(here, 0, tokens[:LENGTH], taps, [64])
    kernels = prove_kernels(config).copy_for_shard()
    projection = FeatureProjection(describe_taps(config), tensors, kernels, torch.device("cpu"), torch.float32)
    for start in range(0, LENGTH, 64):
        part = taps[:, start : start + 64]
        step = Step((Segment(0, start, part.shape[1]),), 64)
        left = torch.nn.functional.pad(part, (0, 0, 0, 64 - part.shape[1]))
        features = projection.project(step, dict(zip(config.aux_layers, left, strict=True)))[: step.rows].clone()
        there.extend_projected(step, tokens[start : start + step.rows], features)
    ours, theirs = (proposed(draft, ask(tokens, LENGTH)) for draft in (here, there))
    assert ours.tokens == theirs.tokens
    assert all(map(same_bits, ours.logits[0], theirs.logits[0]))


@pytest.mark.parametrize("kind", [*KINDS])
def test_all_products_of_a_draft_are_listed(kind):
    """A head of the target's shape is listed as well: the target's kernels have packed the target's head only."""
    config = KINDS[kind]
    target = TARGET.products(BUCKETS, capacity=CAPACITY, dtype=torch.float32, threads=1)
    listed = list_eagle3_products(config, target, capacity=CAPACITY, vocab=TARGET.vocab_size).weights
    assert (Weight(config.vocab, config.hidden_size) in listed) == (config.vocab > 0)
    assert Weight((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, 2 * config.hidden_size) in listed


def test_an_embedding_that_is_the_targets_is_not_kept_twice(tokens):
    config = evolve(PLAIN, has_embedding=True)
    other, table = draft_of(config), target_head(SimpleKernels()).embedding
    tensors = random_eagle3(config)
    same = draft_of(config, type(tensors)({**tensors, "embed_tokens.weight": table.clone()}))
    assert other.memory()["weights"] - same.memory()["weights"] == table.nbytes
    plain = draft_of(PLAIN, type(tensors)({name: one for name, one in tensors.items() if "embed" not in name}))
    taps = taps_of(config, LENGTH)
    for draft in (same, plain):
        follow(draft, 0, tokens[:LENGTH], taps, [64])
    ours, theirs = (proposed(draft, ask(tokens, LENGTH)) for draft in (same, plain))
    assert all(map(same_bits, ours.logits[0], theirs.logits[0]))
