"""Tokens picked in C are those of the operations in torch, to the bit, whatever instructions there are."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

from adapters.device.sampling.grammar_mask import Mask
from adapters.device.sampling.sampler import Draw, NotFinite, Sampler, adjust_logits, pick, start_picking
from adapters.models.kernels.cpu import host_draw
from adapters.models.kernels.cpu.native.draw import pick_rows
from adapters.models.kernels.cpu.native.native_library import SWITCH, find_library
from adapters.models.kernels.functions import exact_exp
from adapters.models.kernels.functions.exact_exp import exact_log
from adapters.models.kernels.functions.noise import exact_gumbel_at, gumbel_at, noise_key
from adapters.models.kernels.functions.seeded import make_generator
from effects.ids import Tokens
from effects.job import Sampling
from tests.pairs import one_in

in_c = pytest.mark.skipif(find_library() is None, reason="no products in C here")


@frozen(eq=False)
class Masked:
    """A grammar that lets the same tokens follow whatever there was."""

    bits: Mask | str

    def mask(self, path: Tokens) -> Mask | str:
        return self.bits

    def count_allowed(self, path: Tokens) -> int:
        return len(path)

    def append(self, tokens: object) -> None:
        pass


def odd_logits(chance: random.Random, vocab: int) -> Tensor:
    """With ties, zeros of both signs, numbers as large as they come, and what is no number."""
    noise = torch.randn(vocab, generator=make_generator(chance.randrange(1 << 30)))
    logits = noise * chance.choice([0.01, 0.5, 3, 10, 100])
    match chance.randrange(8):
        case 0:
            return logits.round()
        case 1:
            return logits.sign() * 0.0
        case 2:
            return logits.bfloat16().float()
        case 3:
            logits[chance.randrange(vocab)] = chance.choice([50.0, -3e38, 3e38])
        case 4:
            logits[torch.arange(0, vocab, 3)] = logits.amax()
        case 5 if chance.random() < 0.3:
            logits[chance.randrange(vocab)] = chance.choice([math.nan, math.inf, -math.inf])
        case _:
            pass
    return logits


def odd_sampling(chance: random.Random, vocab: int) -> Sampling:
    return Sampling(
        temperature=chance.choice([0, 5e-324, 1e-300, 1e-3, 0.2, 0.7, 1, 1.7, 50, 1e6, 1e300]),
        top_k=chance.choice([0, 0, 1, 3, 20, vocab - 1, vocab, 10 * vocab]),
        top_p=chance.choice([5e-324, 1e-6, 0.3, 0.9, 0.95, 0.999, 1 - 2**-53, 1, 1]),
        min_p=chance.choice([0, 0, 0.01, 0.3, 1]),
        repetition_penalty=chance.choice([1, 1, 1.3]),
        presence_penalty=chance.choice([0, 0, 1.5]),
        frequency_penalty=chance.choice([0, 0, 0.5]),
        logit_bias=chance.choice([(), (), ((0, 5.0),), ((vocab - 1, -100.0),)]),
        logprobs=chance.choice([-1, -1, 0, 1, 5, vocab + 5]),
        seed=chance.randrange(2**63),
    )


def odd_mask(chance: random.Random, vocab: int) -> Masked | None:
    if chance.random() < 0.7:
        return None
    bits = np.array([chance.randrange(256) for _ in range((vocab + 7) // 8 - (vocab > 16 and chance.random() < 0.3))])
    bits[1:] *= chance.random() < 0.5
    bits[0] |= 1
    return Masked("the end" if chance.random() < 0.1 else bits.astype(np.uint8))


def odd_rows(seed: int) -> tuple[Tensor, list[Draw]]:
    chance = random.Random(seed)
    vocab, count = chance.choice([1, 2, 63, 64, 65, 300, 1001, 4099]), chance.choice([1, 1, 2, 5])
    rows = [
        Draw(
            Sampler(odd_sampling(chance, vocab), (0,), vocab, "cpu", odd_mask(chance, vocab)), chance.randrange(10_000)
        )
        for _ in range(count)
    ]
    for row in rows:
        row.sampler.append((0, vocab - 1))
    return torch.stack([odd_logits(chance, vocab) for _ in rows]), rows


@in_c
@one_in(2, "seed")
@pytest.mark.parametrize("seed", range(8))
def test_what_is_picked_is_what_torch_picks_to_the_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in range(40):
        logits, rows = odd_rows(1000 * seed + case)
        before = logits.clone()
        expected = start_picking(logits, rows).read()
        assert pick(logits, rows) == expected, (seed, case)
        alone = [pick(logits[at : at + 1], rows[at : at + 1])[0] for at in range(len(rows))]
        assert alone == expected, (seed, case)
        assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))
    monkeypatch.setenv(SWITCH, "off")
    assert odd_rows(seed)[1][0].sampler.native is None
    monkeypatch.setattr(rows[0].sampler, "native", None)
    assert pick(logits, rows) == expected


@in_c
def test_what_a_librarys_logarithms_leave_open_is_decided_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_draw, "CLOSE", math.inf)
    asked = list[int]()
    steady = host_draw.exact_gumbel_at
    monkeypatch.setattr(host_draw, "exact_gumbel_at", lambda *given: asked.append(1) or steady(*given))
    for seed in range(40):
        logits, rows = odd_rows(seed)
        assert pick(logits, rows) == start_picking(logits, rows).read()
    assert asked


@in_c
def test_every_level_of_instructions_finds_the_same() -> None:
    native = find_library()
    assert native is not None
    for seed in range(60):
        logits, rows = odd_rows(seed)
        used, finite = adjust_logits(logits, rows), logits.isfinite().all(-1).tolist()
        wanted = [(row.sampler.sampling, row.position, None) for row in rows]
        first, *others = (pick_rows(native, level, logits, used, wanted) for level in range(native.level + 1))
        for found in others:
            assert [one for one, whole in zip(found, finite, strict=True) if whole] == [
                one for one, whole in zip(first, finite, strict=True) if whole
            ]


@in_c
@pytest.mark.parametrize(
    "change", [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.5, "logprobs": 3}, {"min_p": 0.05}], ids=str
)
def test_a_vocabulary_of_152_thousand_is_drawn_from_alike(change: dict[str, float]) -> None:
    logits = 3 * torch.randn(3, 151_936, generator=make_generator(1))
    logits[1] = logits[1].mul(4).round()  # thousands of ties
    sampling = Sampling(temperature=1.1, seed=9, **change)  # type: ignore[arg-type]
    rows = [Draw(Sampler(sampling, (), 151_936), position) for position in range(3)]
    assert pick(logits, rows) == start_picking(logits, rows).read()


@in_c
@pytest.mark.parametrize("bits", [0, 3])
def test_where_no_token_may_follow_the_first_one_is_named_and_nothing_told(bits: int) -> None:
    native, vocab = find_library(), 20
    assert native is not None
    logits, mask = torch.randn(1, vocab), np.zeros(bits, np.uint8)
    for level in range(native.level + 1):
        for change in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0}):
            sampling = Sampling(**{"temperature": 1, "logprobs": 2, "seed": 1} | change)  # type: ignore[arg-type]
            [((token, lowest, highest), weights)] = pick_rows(native, level, logits, logits, [(sampling, 7, mask)])
            assert (token, lowest, highest) == (0, logits.amin().item(), logits.amax().item())
            assert weights == [0.0] * 6


@in_c
def test_logits_that_lie_otherwise_are_read_all_the_same_and_others_refused() -> None:
    native = find_library()
    assert native is not None
    logits = torch.randn(2, 300, generator=make_generator(2))
    rows = [Draw(Sampler(Sampling(temperature=1, seed=at, logprobs=2), (), 300), at) for at in range(2)]
    assert pick(logits.t().contiguous().t(), rows) == pick(logits, rows)
    assert pick(torch.cat((logits, logits)), rows) == pick(logits, rows)
    for bad in (logits.double(), logits[:1], torch.empty(2, 0)):
        with pytest.raises(ValueError, match="logits"):
            pick_rows(native, 0, bad, bad, [(row.sampler.sampling, row.position, None) for row in rows])
    with pytest.raises(ValueError, match="with"):
        pick_rows(native, 0, logits, logits[:, :5], [(row.sampler.sampling, row.position, None) for row in rows])


@pytest.mark.parametrize("switch", ["on", "off"])
def test_a_row_that_is_no_number_is_told_of_however_it_is_drawn(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    logits = torch.randn(3, 300, generator=make_generator(3))
    logits[1, 200] = math.nan
    rows = [Draw(Sampler(Sampling(temperature=1, seed=at), (), 300), at) for at in range(3)]
    first, broken, last = pick(logits, rows)
    assert [first] == pick(logits[:1], rows[:1])
    assert [last] == pick(logits[2:], rows[2:])
    assert isinstance(broken, NotFinite)


def test_the_logarithm_is_the_same_operations_in_this_interpreters_floats_and_right() -> None:
    chance = random.Random(4)
    values = [chance.random() for _ in range(300)] + [2**-53, 1 - 2**-53, 0.5, 1.0, math.sqrt(0.5), 36.7, 1e300]
    with localcontext() as context:
        context.prec = 40
        for value, found in zip(values, exact_log(torch.tensor(values, dtype=torch.float64)).tolist(), strict=True):
            mantissa, power = math.frexp(value)
            mantissa, power = (2 * mantissa, power - 1) if mantissa < math.sqrt(0.5) else (mantissa, power)
            part = (mantissa - 1) / ((mantissa - 1) + 2)
            series = part * part * (2 / 23)
            for odd in range(21, 1, -2):
                series = (series + 2 / odd) * (part * part)
            assert found == ((series * part + power * (256 * exact_exp.REST)) + (part + part)) + power * (
                256 * exact_exp.STEP
            )
            assert abs(Decimal(value).ln() - Decimal(found)) <= Decimal(2.5 * math.ulp(found))


def test_steady_noise_is_the_noise_but_for_its_last_bits() -> None:
    keys, tokens = torch.tensor([[noise_key(1, 2)], [noise_key(3, 4)]]), torch.arange(5000)
    torch.testing.assert_close(exact_gumbel_at(keys, tokens), gumbel_at(keys, tokens), rtol=1e-14, atol=1e-14)
