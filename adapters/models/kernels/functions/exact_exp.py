"""exp and log by operations that have one right answer, so that their results have the same bits on every processor.

IEEE 754 defines the product, the sum and the rounding of float64 numbers; libraries differ in the last bit of exp and
log. With these functions the sum of a row's weights, and with it every log-probability, is the same wherever the row
lies. Each operation is a call of its own, so no compiler merges two roundings into one.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import torch
from torch import Tensor

from adapters.models.kernels.functions.exact_functions import HALF_ROOT, INVERSE, LOWEST, PARTS, REST, SERIES, STEP

DOUBT = 2.0**-7  # error that is allowed for in a weight up to 2**42, whose last bit is 2**-10


def exact_weights(values: Tensor, bits: int) -> Tensor:
    """Return round(exp(values) * 2**bits) as int64. values: float64, at most 0. bits: up to 42.

    Runs on a host, where the library's exp decides unless its last bits could change the rounding. That takes a part
    of the time of `rounded_exp`. The result for NaN is arbitrary.
    """
    found = values.exp().mul_(2.0**bits)
    whole = found.round()
    near = (found.sub_(whole).abs_() > 0.5 - DOUBT).nonzero(as_tuple=True)
    whole = whole.long()
    whole[near] = rounded_exp(values[near], bits)
    return whole


def rounded_exp(values: Tensor, bits: int) -> Tensor:
    """Return the same as `exact_weights`, computed for every value by the operations below."""
    values = values.clamp_min(LOWEST)
    steps = (values * INVERSE).round_()
    rest = values.sub_(steps * STEP).sub_(steps * REST)
    series = rest * SERIES[0]
    for factor in SERIES[1:]:
        series.add_(factor).mul_(rest)
    whole = steps.long()
    parts = exp_factors(str(values.device))[whole & ((1 << PARTS) - 1)]
    found = (parts * series).add_(parts)
    powers = ((whole >> PARTS) + (bits + 1023)).bitwise_left_shift_(52).view(torch.float64)  # of 2, exactly
    return found.mul_(powers).round_().long()


def exact_log(values: Tensor) -> Tensor:
    """Return the natural logarithm of positive, normal float64 values, within two units in the last place.

    Only operations with one right answer are used.
    """
    bits = values.view(torch.int64) - HALF_ROOT
    power = (bits >> 52).double()
    rest = (bits & ((1 << 52) - 1)).add_(HALF_ROOT).view(torch.float64) - 1
    part = rest / (rest + 2)
    square = part * part
    series = square * (2 / 23)
    for odd in range(21, 1, -2):
        series.add_(2 / odd).mul_(square)
    return series.mul_(part).add_(power * (256 * REST)).add_(part + part).add_(power * (256 * STEP))


@lru_cache(maxsize=8)
def exp_factors(device: str) -> Tensor:
    """Return 2**(i / 256) for i in 0..255, each rounded once: float64 `[256]` on a device."""
    with localcontext() as context:
        context.prec = 40
        step = Decimal(2) ** (Decimal(1) / (1 << PARTS))
        every = [float(step**at) for at in range(1 << PARTS)]
    return torch.tensor(every, dtype=torch.float64).to(device)
