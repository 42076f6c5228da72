"""Constants of exp, log and noise that have the same bits on every processor.

`exact_exp.py` and `triton/logit_parts.py` compute with them operations that have a single right answer; `noise.py`
uses the constants of its generator.
"""

from __future__ import annotations

BITS = 42  # the likeliest token's weight is 2**BITS; the sum of 2**20 tokens of it still fits an int64
PARTS = 8  # bits of the index into the table of factors 2**(i / 256)
LOWEST = -128.0  # the weight of this and of all lower values is 0
STEP = float.fromhex("0x1.62e42fefap-9")  # ln(2) / 256 in 36 bits, so that its multiples are exact
REST = float.fromhex("0x1.cf79abc9e3b3ap-48")  # ln(2) / 256 - STEP
INVERSE = float.fromhex("0x1.71547652b82fep+8")
HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of the square root of a half
SERIES = (
    1 / 120,
    1 / 24,
    1 / 6,
    1 / 2,
    1.0,
)  # series of exp(r) - 1 for |r| <= ln(2) / 512; further terms are below 1e-20

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # of SplitMix64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64

MOST_TAKEN = 512  # a larger top-k is not found by taking tokens out one after the other
