"""Weights of log-probabilities have one right answer, to the bit, whichever way they are found."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch

from adapters.device.sampling.sampler import logprobs_of
from adapters.models.kernels.functions import exact_exp
from adapters.models.kernels.functions.exact_exp import exact_weights, rounded_exp
from adapters.models.kernels.functions.seeded import make_generator

BITS = 42
LEAST = -700.0  # whose exp is not 0 yet


def by_hand(value: float) -> int:
    """Compute the exponential in this interpreter's floats: the same operations, one after the other."""
    value = max(value, exact_exp.LOWEST)
    steps = float(round(value * exact_exp.INVERSE))
    rest = value - steps * exact_exp.STEP - steps * exact_exp.REST
    series = rest * exact_exp.SERIES[0]
    for factor in exact_exp.SERIES[1:]:
        series = (series + factor) * rest
    with localcontext() as context:
        context.prec = 40
        factor = float((Decimal(2) ** (Decimal(1) / 256)) ** (int(steps) & 255))
    return round((factor * series + factor) * 2.0 ** ((int(steps) >> 8) + BITS))


def values_of(count: int, lowest: float = 45.0) -> torch.Tensor:
    drawn = -lowest * torch.rand(count, dtype=torch.float64, generator=make_generator(5)) ** 3
    drawn[:4] = torch.tensor([0.0, -1e-300, -math.inf, -0.6931471805599453])
    return drawn


def test_every_operation_is_one_that_this_interpreter_does_to_the_bit() -> None:
    values = values_of(500)
    assert rounded_exp(values, BITS).tolist() == [by_hand(one) for one in values.tolist()]


def test_weights_are_those_of_exact_arithmetic_but_for_halves() -> None:
    with localcontext() as context:
        context.prec = 50
        values = values_of(300)[4:]
        for value, found in zip(values.tolist(), rounded_exp(values, BITS).tolist(), strict=True):
            assert abs(Decimal(value).exp() * 2**BITS - found) < Decimal("0.502")


def test_a_library_that_is_off_in_its_last_bits_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    values, exp = values_of(20_000).view(4, 5000), torch.Tensor.exp
    right = rounded_exp(values, BITS)
    off = torch.randint(-2, 3, values.shape, generator=make_generator(6)) * (values > LEAST)
    monkeypatch.setattr(torch.Tensor, "exp", lambda self: (exp(self).view(torch.int64) + off).view(torch.float64))
    assert (values.exp() != exp(values)).any()
    assert torch.equal(exact_weights(values, BITS), right)


def test_log_probabilities_of_a_row_do_not_depend_on_where_it_lies_nor_on_its_neighbours() -> None:
    logits = 6 * torch.randn(7, 1001, generator=make_generator(7))
    tokens = [3, 4, 5, 6, 7, 8, 9]
    every = logprobs_of(logits, tokens, 4)
    apart = torch.full((7, 1005), math.nan)[:, 2:-2]
    assert logprobs_of(apart.copy_(logits), tokens, 4) == every
    assert [logprobs_of(logits[at : at + 1], tokens[at : at + 1], 4)[0] for at in range(7)] == every
    wanted = torch.log_softmax(logits.double(), -1)
    for row, (token, (own, others)) in enumerate(zip(tokens, every, strict=True)):
        assert own == pytest.approx(float(wanted[row, token]), abs=1e-11)
        assert [id_ for id_, _ in others] == wanted[row].topk(4).indices.tolist()


def test_a_row_that_is_not_finite_has_no_log_probability_and_breaks_nothing() -> None:
    for odd in (math.nan, math.inf):
        ((own, _),) = logprobs_of(torch.tensor([[0.0, odd, 1.0]]), [0], 1)
        assert math.isnan(own) or own == -math.inf
