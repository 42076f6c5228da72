"""Rows of logits in parts, for kernels that pick from them: comparing, weighing and noise, in Triton.

exp and log are those of `exact_exp.py`. Launch with `enable_fp_fusion=False`: no compiler may merge two roundings
into one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adapters.models.kernels.functions import exact_functions

LOWEST = tl.constexpr(exact_functions.LOWEST)
STEP = tl.constexpr(exact_functions.STEP)
REST = tl.constexpr(exact_functions.REST)
INVERSE = tl.constexpr(exact_functions.INVERSE)
S0, S1, S2, S3, S4 = map(tl.constexpr, exact_functions.SERIES)
INDEX_BITS = tl.constexpr(exact_functions.PARTS)
INDEX = tl.constexpr((1 << exact_functions.PARTS) - 1)
EXPONENT = tl.constexpr(exact_functions.BITS + 1023)
FRACTION = tl.constexpr((1 << 52) - 1)
HALF_ROOT = tl.constexpr(exact_functions.HALF_ROOT)
POWER_HIGH = tl.constexpr(256 * exact_functions.STEP)
POWER_LOW = tl.constexpr(256 * exact_functions.REST)
GOLDEN = tl.constexpr(exact_functions.GOLDEN)
FIRST = tl.constexpr(exact_functions.FIRST)
SECOND = tl.constexpr(exact_functions.SECOND)
WHOLE = tl.constexpr(1.5 * 2.0**52)  # added and taken away again, it rounds to whole numbers
NONE = tl.constexpr(-(2**63))  # below every key


@triton.jit
def exact_weight(scaled, factors_ptr):
    """Return round(exp(scaled) * 2**BITS) of float64 values that are at most 0, as int64."""
    values = tl.where(scaled < LOWEST, LOWEST, scaled)
    steps = values * INVERSE + WHOLE - WHOLE
    rest = values - steps * STEP - steps * REST
    series = rest * S0
    series = (series + S1) * rest
    series = (series + S2) * rest
    series = (series + S3) * rest
    series = (series + S4) * rest
    whole = steps.to(tl.int64)
    factor = tl.load(factors_ptr + (whole & INDEX))
    power = (((whole >> INDEX_BITS) + EXPONENT) << 52).to(tl.float64, bitcast=True)
    return ((factor * series + factor) * power + WHOLE - WHOLE).to(tl.int64)


@triton.jit
def exact_log(values):
    """Return the natural logarithm of positive, normal float64 values."""
    bits = values.to(tl.int64, bitcast=True) - HALF_ROOT
    power = (bits >> 52).to(tl.float64)
    rest = ((bits & FRACTION) + HALF_ROOT).to(tl.float64, bitcast=True) - 1
    part = rest / (rest + 2)
    square = part * part
    series = square * (2 / 23)
    for odd in tl.static_range(21, 1, -2):
        series = (series + 2 / odd) * square
    return series * part + power * POWER_LOW + (part + part) + power * POWER_HIGH


@triton.jit
def shift_right(z, BY: tl.constexpr):
    """Shift right and fill with zeros."""
    return (z.to(tl.uint64, bitcast=True) >> BY).to(tl.int64, bitcast=True)


@triton.jit
def gumbel(key, token):
    """Return the noise of `noise.py` for a key and token ids, int64 to float64."""
    z = key + (token + 1) * GOLDEN
    z = (z ^ shift_right(z, 30)) * FIRST
    z = (z ^ shift_right(z, 27)) * SECOND
    z = z ^ shift_right(z, 31)
    uniform = (shift_right(z, 12).to(tl.float64) + 0.5) * (1 / 2**52)
    return -exact_log(-exact_log(uniform))


@triton.jit
def order_key(x, token):
    """Return int64 keys, the larger the likelier: by the logit, float32, whose zeros are equal, then by the lower id,
    int64.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) + (0xFFFFFFFF - token)


@triton.jit
def token_of(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def logit_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def block_of(logits_ptr, part, width, BLOCK: tl.constexpr):
    """Return the logits of a part, their keys and their ids; beyond the row's end minus infinity, and a value below
    every key.
    """
    at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(logits_ptr + at, inside, float("-inf"))
    return x, tl.where(inside, order_key(x, at), NONE), at


@triton.jit
def next_part(keys, lanes, bound, last, parts):
    """Return the first part behind `last` that has a key above the bound; `parts` if there is none."""
    return tl.min(tl.where((keys > bound) & (lanes > last), lanes, parts), 0)


@triton.jit
def ahead(logits_ptr, factors_ptr, keys, lanes, bound, largest, temperature, width, parts, BLOCK: tl.constexpr):
    """Return how many tokens are likelier than the bound's, and the sum of their weights, int64."""
    count = tl.zeros((), tl.int64)
    before = tl.zeros((), tl.int64)
    part = next_part(keys, lanes, bound, -1, parts)
    while part < parts:
        x, found, _ = block_of(logits_ptr, part, width, BLOCK)
        weights = exact_weight((x.to(tl.float64) - largest) / temperature, factors_ptr)
        before += tl.sum(tl.where(found > bound, weights, 0), 0)
        count += tl.sum((found > bound).to(tl.int64), 0)
        part = next_part(keys, lanes, bound, part, parts)
    return count, before


@triton.jit
def without(logits_ptr, keys, lanes, key, width, BLOCK: tl.constexpr):
    """Return the likeliest keys of the parts after the likeliest of all, `key`, has been taken out."""
    part = tl.max(tl.where(keys == key, lanes, 0), 0)
    _, found, _ = block_of(logits_ptr, part, width, BLOCK)
    return tl.where(lanes == part, tl.max(tl.where(found < key, found, NONE), 0), keys)
