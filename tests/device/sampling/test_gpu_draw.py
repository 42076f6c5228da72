"""Tests that a GPU's kernels draw and report what a host does, to the bit. Triton's interpreter runs them without a
GPU.
"""

from __future__ import annotations

import math
import random
from importlib import import_module

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.cpu.host_draw import draw_rows
from adapters.models.kernels.cpu.penalties import HostPenalties
from adapters.models.kernels.cpu.sampling import HostSampling
from adapters.models.kernels.factory import build_sampling
from adapters.models.kernels.interfaces.sampling_interface import PENDING, Penalties
from effects.job import Sampling
from tests.child_code import check_interpreted

INTERPRETED = 24
BLOCK = 1024  # of `cuda/draw.py`, which needs Triton
HOST = HostSampling(torch.device("cpu"))
pytestmark = pytest.mark.timeout(300)


def case(seed: int, vocabularies: tuple[int, ...]) -> tuple[Tensor, list[Sampling], list[int]]:
    """Logits, some of them equal, some impossible; how each row is drawn, and the positions."""
    chance = random.Random(seed)
    drawing = torch.Generator().manual_seed(seed)
    rows, vocab = chance.choice([1, 2, 4]), chance.choice(vocabularies)
    logits = torch.randn(rows, vocab, generator=drawing) * chance.choice([0.1, 1, 3, 8])
    if chance.random() < 0.3:
        logits = (2 * logits).round() / 2
    if chance.random() < 0.2:
        logits[:, torch.rand(vocab, generator=drawing) < 0.5] = -math.inf
        logits[:, chance.randrange(vocab)] = 0.0
    samplings = [
        Sampling(
            seed=chance.randrange(1 << 30),
            temperature=chance.choice([0.2, 0.7, 1.0, 1.5]),
            top_k=chance.choice([0, 0, 1, 5, 20, 64, 65, 200, 511, 512, 513, 2000, 4999]),
            top_p=chance.choice([1.0, 1.0, 0.1, 0.5, 0.8, 0.95, 0.999]),
            min_p=chance.choice([0.0, 0.0, 0.01, 0.2]),
        )
        for _ in range(rows)
    ]
    return logits, samplings, [chance.randrange(10_000) for _ in range(rows)]


def check_draws(seed: int, device: str, vocabularies: tuple[int, ...]) -> None:
    host, samplings, positions = case(seed, vocabularies)
    logits, rows = host.to(device), range(len(samplings))
    launches = import_module("adapters.models.kernels.cuda.draw")  # needs Triton
    find_extremes = build_sampling(logits.device).find_extremes
    tokens, found = find_extremes(logits)
    launches.draw_tokens(logits, found, rows, samplings, positions, tokens=tokens, found=found)
    expected = draw_rows(host, samplings, positions)
    assert torch.equal(tokens.cpu(), expected), (seed, samplings)
    assert torch.equal(found[:, 0].cpu(), expected.double())
    most, backwards = min(seed % 7, host.shape[-1]), [*reversed(rows)]
    weighed = launches.weigh_tokens(logits, find_extremes(logits)[1], backwards, tokens, most)
    assert torch.equal(weighed.cpu(), HOST.weigh_tokens(host, backwards, expected, most)), seed


@pytest.mark.cuda
@pytest.mark.parametrize("vocabulary", [5, BLOCK, BLOCK + 1, 5000, 151_936])
def test_a_gpu_draws_and_tells_what_a_host_does(vocabulary: int) -> None:
    for seed in range(100):
        check_draws(seed, "cuda", (vocabulary,))


def check_penalties(seed: int, device: str, vocab: int) -> None:
    """Rows of requests with penalties and without, before and behind proposals, and behind more than are pending."""
    gpu = import_module("adapters.models.kernels.cuda.sampling").CudaSampling(torch.device(device))
    chance, host = random.Random(seed), torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    prompt = tuple(chance.choices(range(vocab), k=20))
    answer = chance.choices(range(vocab), k=chance.choice([0, 3, PENDING, PENDING + 2]))
    rows = list[tuple[HostPenalties | None, Penalties | None, list[int]]]()
    for _ in range(len(host)):
        biases = (
            {token: chance.uniform(-5, 5) for token in chance.sample(range(vocab), 4)} if chance.random() < 0.5 else {}
        )
        sampling = Sampling(
            repetition_penalty=chance.choice([1.0, 1.1, 0.7]),
            presence_penalty=chance.choice([0.0, 0.5, -0.3]),
            frequency_penalty=chance.choice([0.0, 0.2]),
        )
        if not biases and sampling == Sampling():
            rows.append((None, None, []))
            continue
        both = (
            HostPenalties(sampling, prompt, vocab, biases, torch.device("cpu")),
            gpu.make_penalties(sampling, prompt if sampling.repetition_penalty != 1 else (), vocab, biases),
        )
        assert both[0].remembers == both[1].remembers
        for one in both:
            for start in range(0, len(answer), 50):
                one.append(answer[start : start + 50])
        rows.append((*both, chance.choices(range(vocab), k=chance.choice([0, 0, 5]))))
    found = gpu.apply_penalties(host.to(device), [(there, drafted) for _, there, drafted in rows]).cpu()
    for row, (here, _, drafted) in enumerate(rows):
        assert torch.equal(found[row], host[row] if here is None else here.adjust(host[row], drafted)), (seed, row)


@pytest.mark.cuda
@pytest.mark.parametrize("vocabulary", [30, BLOCK, 5000])
def test_a_gpu_changes_logits_as_a_host_does(vocabulary: int) -> None:
    for seed in range(40):
        check_penalties(seed, "cuda", vocabulary)


def check_token_is_drawn(value: float, device: str) -> None:
    """One row is not finite. The token of the row after it is drawn as it should be."""
    launches = import_module("adapters.models.kernels.cuda.draw")
    for how in ({}, {"top_k": 20}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.5, "min_p": 0.1}):
        logits = torch.zeros(2, 3000, device=device)
        logits[0] = value
        tokens, found = build_sampling(logits.device).find_extremes(logits)
        sampling = Sampling(temperature=1.0, seed=3, **how)
        launches.draw_tokens(logits, found, range(2), [sampling] * 2, [5, 5], tokens=tokens, found=found)
        assert 0 <= int(tokens[0]) < 3000
        assert int(tokens[1]) == int(draw_rows(torch.zeros(1, 3000), [sampling], [5]))


@pytest.mark.cuda
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_of_a_row_that_is_not_finite_some_token_is_drawn(value: float) -> None:
    check_token_is_drawn(value, "cuda")


def test_the_interpreter_draws_and_tells_what_a_host_does() -> None:
    code = (
        "from math import inf, nan\n"
        "from tests.device.sampling.test_gpu_draw import BLOCK, check_draws, check_penalties, check_token_is_drawn\n"
        f"for seed in range({INTERPRETED}): check_draws(seed, 'cpu', (5, 300, BLOCK, BLOCK + 1, 5000))\n"
        "for value in (nan, inf, -inf): check_token_is_drawn(value, 'cpu')\n"
        "for seed in range(20): check_penalties(seed, 'cpu', (30, BLOCK, 1500)[seed % 3])"
    )
    check_interpreted(code, 110)
