"""Tests of DFlash 2 and DSpark: proposals follow the equations, and have the same bits whatever else is asked for."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.draft_blocks import BlockSizes
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.reference.kernels import ReferenceKernels
from tests.models.checkpoints import same_bits
from tests.models.corrected_drafts import CORRECTED, dspark, proposed, slow_proposals, tensors_of
from tests.models.draft_models import aux_hidden_states_of, config_of, draft_of, extend_in_pieces, head_of
from tests.pairs import usual_where

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


@pytest.fixture(scope="module", params=[*CORRECTED])
def config(request):
    return CORRECTED[request.param]


def distance(found, expected) -> float:
    seen = expected.isfinite()
    assert torch.equal(found.isfinite(), seen)
    return ((found[seen].double() - expected[seen]).norm() / expected[seen].norm()).item()


@usual_where(lambda places: places["kernels"] == 0 or places["config"] == 0)
@pytest.mark.parametrize("kernels", [None, ReferenceKernels()], ids=["cpu", "reference"])
def test_proposals_are_those_of_the_equations(config, kernels):
    tensors = tensors_of(config)
    draft = draft_of(config, tensors, kernels=kernels)
    rows = aux_hidden_states_of(config, 90)
    table = head_of(config, ReferenceKernels()).embedding
    assert config.parts.is_corrected
    for length, first, count in ((90, 0, config.block - 1), (90, 70, 3), (3, 2, 5)):
        extend_in_pieces(draft, rows[:, :length], [(64, 64)], slot=2)
        request = BlockRequest(2, first, length, 17, count)
        tokens, logits = slow_proposals(config, tensors, table, rows[:, :length], request)
        found = proposed(draft, [request])
        assert found.tokens == [tokens]
        assert len(tokens) == count
        assert max(map(distance, found.logits[0], logits)) < TOLERANCE[torch.float32]


def test_half_precision_is_close(config):
    tensors = tensors_of(config)
    rows = aux_hidden_states_of(config, 60)
    draft = draft_of(config, tensors, torch.bfloat16)
    extend_in_pieces(draft, rows.bfloat16(), [(64, 64)])
    request = BlockRequest(0, 0, 60, 17, 1)
    table = head_of(config, ReferenceKernels(), torch.bfloat16).embedding
    _, [exact] = slow_proposals(config, tensors, table, rows, request)
    [found] = proposed(draft, [request]).logits[0]
    seen = exact.isfinite() & found.isfinite()
    assert seen.sum() > 8
    assert ((found[seen].double() - exact[seen]).norm() / exact[seen].norm()).item() < TOLERANCE[torch.bfloat16]


def test_a_chain_depends_on_what_is_chosen(config):
    """Another token in front, or another choice, changes what follows: places are not independent."""
    draft = draft_of(config, tensors_of(config))
    extend_in_pieces(draft, aux_hidden_states_of(config, 40), [(64, 64)])
    request = BlockRequest(0, 0, 40, 17, 3)
    first = proposed(draft, [request])
    calls = list[int]()

    def choose_second(parts):
        calls.append(len(parts[0]))
        return [part.topk(2).indices[:, 1].tolist() for part in parts]

    seen = list[torch.Tensor]()
    draft.propose([request], lambda parts: (seen.append(parts[0].clone()), choose_second(parts))[1])
    assert calls == [1, 1, 1]
    assert same_bits(seen[0][0], first.logits[0][0])
    assert not torch.equal(seen[1][0], first.logits[0][1])


def test_requests_together_get_what_each_gets_alone(config):
    draft = draft_of(config, tensors_of(config))
    requests = []
    for slot, (length, count) in enumerate([(30, 3), (70, config.block - 1), (5, 1), (44, 6)]):
        extend_in_pieces(draft, aux_hidden_states_of(config, length, seed=slot), [(64, 64)], slot=slot)
        requests.append(BlockRequest(slot, 0, length, 3 + slot, min(count, config.block - 1)))
    together = proposed(draft, requests)
    for index, request in enumerate(requests):
        alone = proposed(draft, [request])
        assert alone.tokens[0] == together.tokens[index]
        assert all(map(same_bits, alone.logits[0], together.logits[index]))


def test_more_blocks_than_a_forward_holds_are_proposed_to_in_turns(config):
    draft = draft_of(config, tensors_of(config), slots=20, capacity=64)
    for slot in range(20):
        extend_in_pieces(draft, aux_hidden_states_of(config, 9, seed=slot), [(16, 16)], slot=slot)
    requests = [BlockRequest(slot, 0, 9, slot, config.block - 1) for slot in range(20)]
    together = proposed(draft, requests)
    for slot in (0, 7, 19):
        assert proposed(draft, [requests[slot]]).tokens[0] == together.tokens[slot]


def test_weights_come_back_with_the_same_bits(config):
    draft = draft_of(config, tensors_of(config))
    extend_in_pieces(draft, aux_hidden_states_of(config, 40), [(64, 64)])
    request = BlockRequest(0, 0, 40, 17, config.block - 1)
    before = proposed(draft, [request])
    held = draft.memory()["weights"]
    assert draft.offload() == held
    assert draft.memory()["weights"] == 0
    assert draft.load_back() == held
    after = proposed(draft, [request])
    assert after.tokens == before.tokens
    assert all(map(same_bits, after.logits[0], before.logits[0]))


def test_rehearsals_run_all_sizes_of_blocks(config):
    draft = draft_of(config, tensors_of(config))
    asked = [requests[0].count + config.lead for requests in draft.list_rehearsals(1, 64)]
    assert asked == BlockSizes(config.rows, config.lead).list_sizes()
    for requests in draft.list_rehearsals(3, 64):
        draft.propose(requests, lambda parts: [[0] * len(part) for part in parts])


# --- confidence ---


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_proposals_end_before_they_become_unlikely(kind):
    config = config_of(parts=dspark(kind=kind, has_confidence=True), block=8)
    rows = aux_hidden_states_of(config, 50)
    lengths = set()
    table = head_of(config, ReferenceKernels()).embedding
    for bias in (30.0, 1.0, 0.0, -1.0, -30.0):
        tensors = tensors_of(config)
        tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"] * 0.1
        tensors["confidence_head.proj.bias"] = torch.tensor([bias])
        draft = draft_of(config, tensors)
        extend_in_pieces(draft, rows, [(64, 64)])
        request = BlockRequest(0, 0, 50, 17, 7)
        expected, _ = slow_proposals(config, tensors, table, rows, request)
        assert proposed(draft, [request]).tokens == [expected]
        lengths.add(len(expected))
    assert {0, 7} < lengths


def test_one_unlikely_request_ends_alone():
    config = config_of(parts=dspark(has_confidence=True), block=8)
    tensors = tensors_of(config, sure=False)
    tensors["confidence_head.proj.weight"] = torch.zeros(1, 96)
    tensors["confidence_head.proj.weight"][0, 64:] = 40.0  # only the token before says something
    tensors["markov_head.markov_w1.weight"] = torch.ones(211, 32)
    tensors["markov_head.markov_w1.weight"][5] = -1.0
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    draft = draft_of(config, tensors)
    for slot in range(3):
        extend_in_pieces(draft, aux_hidden_states_of(config, 20, seed=slot), [(64, 64)], slot=slot)
    found = proposed(draft, [BlockRequest(0, 0, 20, 7, 2), BlockRequest(1, 0, 20, 5, 2), BlockRequest(2, 0, 20, 8, 1)])
    assert len(found.tokens[0]) >= 1
    assert found.tokens[1] == []
    assert len(found.tokens[2]) == 1


def test_a_block_of_dspark_gives_as_many_proposals_as_it_has_rows():
    config = CORRECTED["DSpark"]
    assert (config.block, config.rows, config.lead) == (8, 7, 0)
    sizes = BlockSizes(config.rows, config.lead)
    assert [sizes.count_rows(count) for count in (1, 4, 5, 7)] == [4, 4, 7, 7]
    plain = evolve(config_of(), block=16)
    assert [BlockSizes(plain.rows, plain.lead).count_rows(count) for count in (1, 3, 4, 15)] == [4, 4, 8, 16]


def test_the_at_once_pass_of_the_library_is_for_plain_drafts(config):
    draft = draft_of(config, tensors_of(config))
    assert draft.build_draft_pass(3, None) is None  # type: ignore[arg-type]


def test_memory_counts_what_corrections_need(config):
    kernels = CpuKernels(torch.float32)
    plain = draft_of(evolve(config, parts=config_of().parts, block=config.rows), kernels=kernels)
    own = draft_of(config, tensors_of(config), kernels=CpuKernels(torch.float32))
    assert own.memory()["weights"] > plain.memory()["weights"] + 2 * 211 * 32 * 4
