"""Biases and penalties of all rows of a step in one launch, in Triton: to the bit what a host makes of each row.

Launch with `enable_fp_fusion=False`, as the kernels of `draw_kernel.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHANGED = tl.constexpr(7)  # numbers of a row


@triton.jit(do_not_specialize=["rows"])
def change_part(logits_ptr, out_ptr, asked_ptr, stride, width, rows, BLOCK: tl.constexpr):
    """Adjust BLOCK logits of a row by its bias and penalties: out float32 `[rows, width]`.

    asked: int64 `[rows, CHANGED]`. The numbers of a row are:
    * The address of its history, int32 `[V]`: twice how often a token is in the answer, plus 1 if it is in the prompt.
    * The address of its bias, float32 `[V]`, or 0.
    * The bits of three float32 penalties: repetition, presence, frequency.
    * The offset, behind all rows, of the tokens that the history does not count yet, and their number.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    asked = asked_ptr + CHANGED * row
    history = tl.load(asked)
    bias = tl.load(asked + 1)
    at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(logits_ptr + row * stride + at, inside, 0.0)
    if bias != 0:
        x += tl.load(bias.to(tl.pointer_type(tl.float32)) + at, inside, 0.0)
    if history != 0:
        repetition = tl.load(asked + 2).to(tl.int32).to(tl.float32, bitcast=True)
        presence = tl.load(asked + 3).to(tl.int32).to(tl.float32, bitcast=True)
        frequency = tl.load(asked + 4).to(tl.int32).to(tl.float32, bitcast=True)
        more = asked_ptr + CHANGED * rows + tl.load(asked + 5)
        count = tl.load(asked + 6)
        seen = tl.load(history.to(tl.pointer_type(tl.int32)) + at, inside, 0)
        one = count * 0
        while one < count:
            seen += tl.where(at == tl.load(more + one), 2, 0)
            one += 1
        x = tl.where(seen != 0, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
        x = x - (seen >> 1).to(tl.float32) * frequency
        x = x - tl.where(seen > 1, presence, 0.0)
    tl.store(out_ptr + row * width + at, x, inside)


@triton.jit
def mark_token(history_ptr, tokens_ptr):
    """Mark a token of the prompt; each program marks its own."""
    tl.store(history_ptr + tl.load(tokens_ptr + tl.program_id(0)), 1)


@triton.jit
def count_token(history_ptr, tokens_ptr):
    """Count one more occurrence of a token in the answer."""
    tl.atomic_add(history_ptr + tl.load(tokens_ptr + tl.program_id(0)), 2)


@triton.jit
def put_bias(biases_ptr, tokens_ptr, values_ptr):
    tl.store(biases_ptr + tl.load(tokens_ptr + tl.program_id(0)), tl.load(values_ptr + tl.program_id(0)))
