"""Picking tokens: the right distribution, the documented order, and nothing but a row's own logits."""

from __future__ import annotations

import math
import random
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.device.sampling.sampler import Draw, NotFinite, Sampler, TokenPick, pick
from adapters.models.kernels.functions.noise import gumbel
from adapters.models.kernels.functions.seeded import make_generator
from effects.job import Sampling
from tests.lazy_module import LazyModule

transformers: Any = LazyModule("transformers")
VOCAB = 300
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def logits_of(seed: int, vocab: int = VOCAB, rows: int = 1, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=make_generator(seed)) * scale


def sampler_of(sampling: Sampling, answer: tuple[int, ...] = (), vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(sampling, PROMPT, vocab)
    if answer:
        sampler.append(answer)
    return sampler


def picked(logits: Tensor, sampling: Sampling, position: int = 0, answer: tuple[int, ...] = ()) -> TokenPick:
    (found,) = pick(logits.reshape(1, -1), [Draw(sampler_of(sampling, answer, logits.numel()), position)])
    assert isinstance(found, TokenPick)
    return found


def drawn(logits: Tensor, sampling: Sampling, count: int) -> np.ndarray:
    """Return how often each token is picked at the first `count` positions."""
    sampler = sampler_of(sampling, vocab=logits.numel())
    rows = [Draw(sampler, position) for position in range(count)]
    picks = pick(logits.expand(count, -1), rows)
    return np.bincount([found.token for found in picks], minlength=logits.numel())


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square at five standard deviations of its distribution; seeds are fixed, so it never flickers."""
    assert counts[expected == 0].sum() == 0
    total = counts.sum()
    common = expected * total >= 5
    cells = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * total
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    chi = ((cells - wanted) ** 2 / wanted).sum()
    freedom = len(cells) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


def reference(logits: Tensor, sampling: Sampling) -> np.ndarray:
    """Return the probabilities of all tokens, computed step by step in float64, without any of our shortcuts."""
    scores = logits.double().numpy() / sampling.temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    allowed = order[: sampling.top_k] if sampling.top_k else order
    weights = {token: math.exp(scores[token] - scores[order[0]]) for token in allowed}
    whole, before, nucleus = sum(weights.values()), 0.0, []
    for token in allowed:
        if before < sampling.top_p * whole or sampling.top_p == 1:
            nucleus.append(token)
        before += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= sampling.min_p]
    chances = np.zeros(len(scores))
    chances[nucleus] = [weights[token] for token in nucleus]
    return chances / chances.sum()


SAMPLED = Sampling(temperature=0.9, seed=42)
KINDS = {
    "plain": SAMPLED,
    "hot": evolve(SAMPLED, temperature=2.0),
    "cold": evolve(SAMPLED, temperature=0.3),
    "top_k": evolve(SAMPLED, top_k=7),
    "top_p": evolve(SAMPLED, top_p=0.8),
    "min_p": evolve(SAMPLED, min_p=0.05),
    "all": evolve(SAMPLED, temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_drawn_from_the_exact_distribution(kind):
    logits = logits_of(1)[0]
    assert_distributed(drawn(logits, KINDS[kind], 2500), reference(logits, KINDS[kind]))


def test_seeds_give_independent_draws_from_the_exact_distribution():
    logits = logits_of(2, vocab=50)
    samplers = [Sampler(evolve(SAMPLED, seed=seed), PROMPT, 50) for seed in range(2000)]
    picks = pick(logits.expand(2000, -1), [Draw(sampler, 17) for sampler in samplers])
    counts = np.bincount([found.token for found in picks], minlength=50)
    assert_distributed(counts, reference(logits[0], SAMPLED))


def test_consecutive_positions_are_independent():
    logits = torch.tensor([0.0, 0.5, 1.0])
    chances = reference(logits, evolve(SAMPLED, temperature=1.0))
    sampler = sampler_of(evolve(SAMPLED, temperature=1.0), vocab=3)
    tokens = [found.token for found in pick(logits.expand(3001, -1), [Draw(sampler, at) for at in range(3001)])]
    pairs = np.bincount([3 * a + b for a, b in pairwise(tokens)], minlength=9)
    assert_distributed(pairs, np.outer(chances, chances).flatten())


@pytest.mark.parametrize("vocab", [5, 97, 2000])
def test_what_may_be_drawn_is_what_a_straightforward_reference_allows(vocab):
    chance = random.Random(vocab)
    for case in range(60):
        logits = logits_of(case, vocab)[0]
        sampling = Sampling(
            temperature=chance.choice([0.2, 0.7, 1.0, 1.7]),
            top_k=chance.choice([0, 1, 3, vocab - 1, vocab, 10 * vocab]),
            top_p=chance.choice([1e-6, 0.3, 0.9, 0.999, 1.0]),
            min_p=chance.choice([0.0, 0.01, 0.3, 1.0]),
            seed=case,
        )
        chances = reference(logits, sampling)
        scores = logits.double() / sampling.temperature + gumbel([(case, 5)], vocab)[0]
        scores[chances == 0] = -math.inf
        assert picked(logits, sampling, 5).token == int(scores.argmax())


def test_a_nucleus_that_is_wider_than_the_first_look_is_found_all_the_same():
    logits = logits_of(3, 4000, scale=0.3)[0]
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=1)
    chances = reference(logits, sampling)
    assert (chances > 0).sum() > 1000
    for position in range(30):
        scores = logits.double() + gumbel([(1, position)], 4000)[0]
        scores[chances == 0] = -math.inf
        assert picked(logits, sampling, position).token == int(scores.argmax())


def test_truncation_agrees_with_transformers():
    def processed(logits: Tensor, *warpers) -> np.ndarray:
        for warper in warpers:
            logits = warper(None, logits)
        return logits.softmax(-1)[0].double().numpy()

    logits = logits_of(4)
    for sampling, warpers in (
        (evolve(SAMPLED, top_k=12), [transformers.TemperatureLogitsWarper(0.9), transformers.TopKLogitsWarper(12)]),
        (evolve(SAMPLED, top_p=0.7), [transformers.TemperatureLogitsWarper(0.9), transformers.TopPLogitsWarper(0.7)]),
        (evolve(SAMPLED, min_p=0.1), [transformers.TemperatureLogitsWarper(0.9), transformers.MinPLogitsWarper(0.1)]),
        (
            evolve(SAMPLED, top_k=12, top_p=0.7, min_p=0.1),
            [
                transformers.TemperatureLogitsWarper(0.9),
                transformers.TopKLogitsWarper(12),
                transformers.TopPLogitsWarper(0.7),
                transformers.MinPLogitsWarper(0.1),
            ],
        ),
    ):
        expected = processed(logits, *warpers)
        np.testing.assert_allclose(reference(logits[0], sampling), expected, rtol=1e-4, atol=1e-9)
        assert_distributed(drawn(logits[0], sampling, 800), reference(logits[0], sampling))


def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_answer():
    answer = (200, 7, 7)
    ids = torch.tensor([[*PROMPT, *answer]])
    for penalty in (0.5, 1.1, 1.7):
        logits = logits_of(5)
        expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())[0]
        sampler = sampler_of(Sampling(repetition_penalty=penalty), answer)
        torch.testing.assert_close(sampler.penalties.adjust(logits[0]), expected, rtol=1e-6, atol=0)


def test_presence_and_frequency_penalties_follow_openai_over_the_answer_only():
    answer = (200, 7, 7, 7, PROMPT[0])
    logits = logits_of(6)[0]
    expected = logits.double().numpy().copy()
    for token in set(answer):
        expected[token] -= answer.count(token) * 0.7 + 1.3
    sampler = sampler_of(Sampling(presence_penalty=1.3, frequency_penalty=0.7), answer)
    np.testing.assert_allclose(sampler.penalties.adjust(logits).numpy(), expected, rtol=1e-5, atol=1e-5)
    negative = sampler_of(Sampling(frequency_penalty=-2.0), answer).penalties.adjust(logits)
    assert negative[7] == logits[7] + 6


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others():
    logits = torch.full((VOCAB,), -1.0)
    sampling = Sampling(logit_bias=((9, 3.0),), repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    adjusted = sampler_of(sampling, (9, 9, 100)).penalties.adjust(logits)
    assert adjusted[9] == (-1 + 3) / 2 - 2 * 0.5 - 0.25
    assert adjusted[100] == -1 * 2 - 0.5 - 0.25
    assert adjusted[PROMPT[0]] == -2
    assert adjusted[150] == -1
    assert (logits == -1).all()


def test_drafted_tokens_count_as_if_they_had_been_answered_and_are_forgotten_afterwards():
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    logits = logits_of(7)[0]
    before, after = sampler_of(sampling, (20, 30)), sampler_of(sampling, (20, 30, 40, 20))
    assert torch.equal(before.penalties.adjust(logits, (40, 20)), after.penalties.adjust(logits))
    assert torch.equal(before.penalties.adjust(logits), sampler_of(sampling, (20, 30)).penalties.adjust(logits))


def test_one_row_of_a_block_is_picked_like_the_same_position_alone():
    sampling = evolve(SAMPLED, presence_penalty=1.0, repetition_penalty=1.3, top_p=0.9)
    logits, drafted = logits_of(8, rows=4), (11, 12, 13)
    sampler = sampler_of(sampling, (10,))
    block = pick(logits, [Draw(sampler, 20 + at, drafted[:at]) for at in range(4)])
    for at in range(4):
        assert block[at] == picked(logits[at], sampling, 20 + at, (10, *drafted[:at]))


def test_bias_forces_and_bans():
    for seed in range(20):
        logits = logits_of(seed)[0]
        best = int(logits.argmax())
        assert picked(logits, Sampling(logit_bias=((250, 100.0),))).token == 250
        assert picked(logits, evolve(SAMPLED, seed=seed, logit_bias=((250, 100.0),))).token == 250
        assert picked(logits, Sampling(logit_bias=((best, -100.0),))).token == int(logits.topk(2).indices[1])
        for position in range(20):
            banned = evolve(SAMPLED, temperature=2.0, seed=seed, logit_bias=((best, -100.0),))
            assert picked(logits, banned, position).token != best


def test_a_bias_on_a_token_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"token 300; the model's are 0\.\.299"):
        Sampler(Sampling(logit_bias=((300, 1.0),)), PROMPT, VOCAB)


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals():
    logits = logits_of(9)[0]
    assert picked(logits, Sampling()).token == int(logits.argmax())
    logits[[40, 41, 299]] = 50.0
    assert picked(logits, Sampling()).token == 40
    assert picked(torch.tensor([-0.0, 0.0, -0.0]), Sampling()).token == 0


def test_top_k_of_one_a_tiny_nucleus_and_full_min_p_are_greedy():
    for seed in range(30):
        logits = logits_of(seed)[0]
        logits[[5, 250]] = logits.max() + (seed % 2)
        for change in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0, "top_k": 1}):
            sampling = evolve(SAMPLED, temperature=1.9, seed=seed, **change)
            assert picked(logits, sampling, seed).token == picked(logits, Sampling()).token


def test_equal_logits_at_the_edge_of_top_k_go_to_the_lower_ids():
    logits = torch.zeros(VOCAB)
    tokens = np.flatnonzero(drawn(logits, evolve(SAMPLED, top_k=3), 200))
    assert tokens.tolist() == [0, 1, 2]
    zeros = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    assert np.flatnonzero(drawn(zeros, evolve(SAMPLED, top_k=2), 100)).tolist() == [0, 1]


def test_a_nucleus_ends_with_the_token_that_reaches_the_mass():
    logits = torch.tensor([-50.0, 1.0, 1.0, 1.0, 1.0])
    for mass, tokens in ((0.25, [1]), (0.250001, [1, 2]), (0.75, [1, 2, 3])):
        found = drawn(logits, evolve(SAMPLED, top_p=mass), 100)
        assert np.flatnonzero(found).tolist() == tokens


def test_extreme_temperatures_hold():
    for seed in range(20):
        logits = logits_of(seed)[0]
        assert picked(logits, evolve(SAMPLED, temperature=1e-3, seed=seed)).token == int(logits.argmax())
        assert picked(logits, evolve(SAMPLED, temperature=5e-324, seed=seed)).token == int(logits.argmax())
    flat = drawn(torch.zeros(20), evolve(SAMPLED, temperature=2.0), 4000)
    assert_distributed(flat, np.full(20, 1 / 20))
    assert_distributed(drawn(logits_of(0, 20)[0], evolve(SAMPLED, temperature=1e6), 4000), np.full(20, 1 / 20))


MIX = [
    Sampling(),
    SAMPLED,
    evolve(SAMPLED, top_k=5, seed=1),
    evolve(SAMPLED, top_p=0.5, seed=2),
    Sampling(logprobs=3),
    evolve(SAMPLED, min_p=0.1, seed=3, logprobs=0),
    Sampling(repetition_penalty=1.4, logit_bias=((8, 2.0),)),
    evolve(SAMPLED, presence_penalty=1.0, top_k=30, top_p=0.9, seed=4, logprobs=2),
]


@pytest.mark.parametrize("vocab", [VOCAB, 4099])
def test_a_pick_depends_on_its_own_row_only(vocab):
    logits = logits_of(10, vocab, rows=len(MIX))
    rows = [Draw(sampler_of(sampling, (6, 7), vocab), 50 + index) for index, sampling in enumerate(MIX)]
    alone = [pick(logits[index : index + 1].clone(), [row])[0] for index, row in enumerate(rows)]
    assert pick(logits, rows) == alone
    order = list(range(len(MIX)))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        assert pick(logits[order], [rows[index] for index in order]) == [alone[index] for index in order]


def test_the_same_request_gives_the_same_tokens_and_another_seed_others():
    logits = logits_of(11, rows=40)
    runs = [
        [found.token for found in pick(logits, [Draw(sampler_of(evolve(SAMPLED, seed=seed)), at) for at in range(40)])]
        for seed in (1, 1, 2, 2**63 - 1)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3


def test_logprobs_are_the_models_own_before_bias_penalties_and_temperature():
    logits = logits_of(12)[0]
    expected = torch.log_softmax(logits.double(), -1)
    forced = Sampling(logit_bias=((250, 100.0),), repetition_penalty=1.5, logprobs=4)
    found = picked(logits, forced)
    assert found.token == 250
    assert found.logprob[0] == pytest.approx(expected[250].item(), abs=1e-12)
    best = expected.topk(4)
    assert [token for token, _ in found.logprob[1]] == best.indices.tolist()
    assert [value for _, value in found.logprob[1]] == pytest.approx(best.values.tolist(), abs=1e-12)


def test_logprobs_hold_as_many_alternatives_as_asked_for_and_none_unasked():
    logits = logits_of(13, 6)[0]
    assert picked(logits, Sampling()).logprob is None
    assert picked(logits, Sampling(logprobs=0)).logprob[1] == ()
    assert len(picked(logits, Sampling(logprobs=20)).logprob[1]) == 6
    tied = picked(torch.zeros(6), Sampling(logprobs=6)).logprob[1]
    assert tied == tuple((token, pytest.approx(-math.log(6))) for token in range(6))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), MIX[7]], ids=["greedy", "sampled"])
def test_a_row_that_is_not_finite_fails_alone(bad, sampling):
    logits = logits_of(14, rows=3)
    rows = [Draw(sampler_of(sampling), 30 + index) for index in range(3)]
    expected = pick(logits, rows)
    logits[1, 77] = bad
    first, broken, last = pick(logits, rows)
    assert (first, last) == (expected[0], expected[2])
    assert broken == NotFinite("the logits for position 31 are not finite")


def test_penalties_that_overflow_fail_clearly():
    sampler = sampler_of(Sampling(repetition_penalty=1e-40))
    (found,) = pick(logits_of(15), [Draw(sampler, 1)])
    assert isinstance(found, NotFinite)


def test_the_logits_are_left_as_they_were():
    logits = logits_of(16, rows=len(MIX))
    before = logits.clone()
    pick(logits, [Draw(sampler_of(sampling), 3) for sampling in MIX])
    assert torch.equal(logits, before)


@pytest.mark.cuda
def test_cuda_picks_what_the_host_picks_and_a_batch_picks_what_one_row_does():
    logits = logits_of(17, 4099, rows=len(MIX))
    rows = [Draw(sampler_of(sampling, (6, 7), 4099), 50 + index) for index, sampling in enumerate(MIX)]
    there = []
    for index, sampling in enumerate(MIX):
        sampler = Sampler(sampling, PROMPT, 4099, "cuda")
        sampler.append((6, 7))
        there.append(Draw(sampler, 50 + index))
    together = pick(logits.cuda(), there)
    assert [found.token for found in together] == [found.token for found in pick(logits, rows)]
    assert together == [pick(logits[index : index + 1].cuda(), [row])[0] for index, row in enumerate(there)]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_decode_step_of_picks_waits_for_nothing_but_what_it_picked():
    logits = logits_of(18, 4099, rows=len(MIX)).cuda()
    rows = [Draw(Sampler(sampling, PROMPT, 4099, "cuda"), index) for index, sampling in enumerate(MIX)]
    pick(logits, rows)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            pick(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any("synchronizing" in str(warning.message) for warning in warned), "an event tells of the one transfer"
