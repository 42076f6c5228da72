"""The projection of one row before attention on Hopper, with what `rows.rotate_store` does with its heads.

A program has 64 rows of the weight, and these are one head of 64. So it adds biases, rotates the head, and writes it
where attention reads it. Sums are those of `hopper_products.linear_ahead`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adapters.models.kernels.triton.hopper.hopper_products import multiply_requested, request_weights

_HALF = gl.constexpr(32)  # of a head


@gluon.jit
def project_rotated(
    w_desc,
    x_desc,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    pages_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    depth,
    capacity,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute x @ w.T + bias for one row of x, by a program for each of the HEADS of queries, then KV of keys and KV of
    values. Rotate queries and keys. Queries go to q, the others to the row's place in their caches unless it is padded.

    PAGE: rows of a page, where a slot's rows are paged; 0: they lie in one piece.
    """
    dtype: gl.constexpr = w_desc.dtype
    WIDTH: gl.constexpr = x_desc.block_type.shape[0]
    HEAD: gl.constexpr = 2 * _HALF
    HALVES: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, num_warps, 1], [2, 1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [1, 0])
    head = gl.program_id(0)
    rings = request_weights(w_desc, x_desc, head * HEAD, depth, STAGES)
    d = gl.arange(0, _HALF, layout=gl.SliceLayout(1, LINES))
    position = gl.load(positions_ptr).to(gl.int64)
    slot = gl.load(slots_ptr).to(gl.int64)
    at = gl.maximum(position, 0)
    cos = gl.load(cos_ptr + at * _HALF + d)[:, None]
    sin = gl.load(sin_ptr + at * _HALF + d)[:, None]
    if HAS_BIAS:
        low_bias = gl.load(bias_ptr + head * HEAD + d).to(gl.float32)[:, None]
        high_bias = gl.load(bias_ptr + head * HEAD + _HALF + d).to(gl.float32)[:, None]
    kv_head = (head - HEADS) % KV
    row = (slot * KV + kv_head) * capacity + at
    if PAGE > 0:
        page = gl.load(pages_ptr + slot * (capacity // PAGE) + at // PAGE).to(gl.int64)
        row = (page * KV + kv_head) * PAGE + at % PAGE
    acc = multiply_requested(w_desc, x_desc, rings, head * HEAD, 0, depth, STAGES, False, False, PDL, num_warps)
    halves = acc.to(dtype).reshape((2, _HALF, WIDTH)).permute((1, 2, 0))
    low, high = gl.split(gl.convert_layout(halves, HALVES))
    low = gl.convert_layout(low, LINES).to(gl.float32)
    high = gl.convert_layout(high, LINES).to(gl.float32)
    if HAS_BIAS:
        low = (low + low_bias).to(dtype).to(gl.float32)
        high = (high + high_bias).to(dtype).to(gl.float32)
    if head < HEADS + KV:  # rounded as the compiler of `rotate_store` does it
        spread = gl.zeros([_HALF, WIDTH], gl.float32, layout=LINES) + cos
        turned = gl.fma(low, spread, -(high * sin))
        high = gl.fma(high, spread, low * sin)
        low = turned
    m = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LINES))[None, :]
    if head < HEADS:
        to = q_ptr + head * HEAD + d[:, None]
        kept = m < 1
    else:
        cache = k_ptr if head < HEADS + KV else v_ptr
        to = cache + row * HEAD + d[:, None]
        kept = (m < 1) & (position >= 0)
    gl.store(to + m * 0, low.to(dtype), mask=kept)
    gl.store(to + _HALF + m * 0, high.to(dtype), mask=kept)
