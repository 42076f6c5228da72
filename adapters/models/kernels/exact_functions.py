"""Numbers of what has the same bits on every processor: exp and log by operations that have one right answer
(`device/sampling/exact_exp.py`, `models/kernels/triton/draw_kernel.py`), and of the noise that tokens are drawn with
(`device/sampling/noise.py`).
"""

from __future__ import annotations

BITS = 42  # the likeliest token's weight is 2**BITS; the sum of 2**20 tokens of it still fits an int64
PARTS = 8  # bits: of the factors 2**(1/256), 2**(2/256), ... as many are known as it takes to be that near
LOWEST = -128.0  # whose weight is 0, as that of all below
STEP = float.fromhex("0x1.62e42fefap-9")  # ln(2) / 256: 36 bits, so that so many times it is exact
REST = float.fromhex("0x1.cf79abc9e3b3ap-48")  # what it lacks
INVERSE = float.fromhex("0x1.71547652b82fep+8")
HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of the square root of a half
SERIES = (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0)  # of exp(r) - 1, |r| <= ln(2) / 512: what follows is 1e-20

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # of SplitMix64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64

MANY = 512  # of the top-k, as many as are taken one after the other
