"""Row-wise kernels in Triton: residual and norm, q/k norm with rotary and the cache write.

One program owns whole rows and reduces each along one axis with a fixed layout, so its bits depend on that row only.

Norms let the next kernel start first of all. It loads weights while they still run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gather(table_ptr, tokens_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Copy out[row] = table[tokens[row]], one row in each program. The table may be host memory that the device can
    read.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * width + at, tl.load(table_ptr + token * width + at, at < width), at < width)


@triton.jit(do_not_specialize=["tokens_ptr", "known", "count"])
def bring_table(staged_ptr, tokens_ptr, table_ptr, known, count, BLOCK: tl.constexpr):
    """Set table[:known] = tokens, and the rest of its `count` numbers to those staged in host memory that the device
    can read.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    staged = tl.load(staged_ptr + at, (at >= known) & (at < count), 0)
    tl.store(table_ptr + at, tl.where(at < known, tl.load(tokens_ptr + at, at < known, 0), staged), at < count)


@triton.jit
def add_norm(
    residual_ptr,
    delta_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute residual[row] += delta[row] in place and out[row] = RMSNorm(residual[row]) * weight. One program, one
    row.

    WIDE: the weight is float32, and the normed row is not rounded before it is multiplied. HAS_BIAS: a bias `[width]`
    is added to delta first, and the sum is rounded.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = tl.program_id(0).to(tl.int64) * width + i
    weight = tl.load(weight_ptr + i, inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + i, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(residual_ptr + at, inside, 0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + at, inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            delta = (delta + bias).to(dtype).to(tl.float32)
        x = (x.to(tl.float32) + delta).to(dtype)
        tl.store(residual_ptr + at, x, inside)
    tl.store(out_ptr + at, norm_row(x.to(tl.float32), weight, width, eps, dtype, WIDE), inside)


@triton.jit
def norm_row(x, weight, width, eps, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Return the RMSNorm of a row, float32, times weight, rounded to dtype."""
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if not WIDE:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight).to(dtype)


@triton.jit
def add_normed(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    parallel_ptr,
    parallel_weight_ptr,
    own_weight_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    out_ptr,
    width,
    eps,
    factor,
    OUTER: tl.constexpr,
    PARALLEL: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Do what `Kernels.add_normed` says for one row, with the roundings of the operations one by one.

    OUTER: how many norms of the sum are returned, `[OUTER, R, width]`; first, second, third: their weights. PARALLEL:
    there are other rows. SCALED: the sum is multiplied with `factor`.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = tl.program_id(0).to(tl.int64) * width + i
    weight = tl.load(weight_ptr + i, inside, 0.0).to(tl.float32)
    if PARALLEL:
        parallel_weight = tl.load(parallel_weight_ptr + i, inside, 0.0).to(tl.float32)
        own_weight = tl.load(own_weight_ptr + i, inside, 0.0).to(tl.float32)
    outer = ()
    for j in tl.static_range(OUTER):
        outer_ptr = first_ptr if j == 0 else second_ptr if j == 1 else third_ptr
        outer = outer + (tl.load(outer_ptr + i, inside, 0.0).to(tl.float32),)  # noqa: RUF005 - Triton knows no other way
    if PDL:
        gdc_wait()
    delta = tl.load(delta_ptr + at, inside, 0.0).to(tl.float32)
    x = tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
    if PARALLEL:
        parallel = tl.load(parallel_ptr + at, inside, 0.0).to(tl.float32)
        delta = norm_row(delta, own_weight, width, eps, dtype, WIDE).to(tl.float32)
        delta += norm_row(parallel, parallel_weight, width, eps, dtype, WIDE).to(tl.float32)
        delta = delta.to(dtype).to(tl.float32)
    x = (x + norm_row(delta, weight, width, eps, dtype, WIDE).to(tl.float32)).to(dtype)
    if SCALED:
        x = (x.to(tl.float32) * factor).to(dtype)
    tl.store(residual_ptr + at, x, inside)
    if OUTER > 0:
        x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        normed = x * scale
        if not WIDE:
            normed = normed.to(dtype).to(tl.float32)
        for j in tl.static_range(OUTER):
            to = out_ptr + j * tl.num_programs(0).to(tl.int64) * width + at
            tl.store(to, (normed * outer[j]).to(dtype), inside)


@triton.jit
def _normalize(x, scale, weight, dtype: tl.constexpr, WIDE: tl.constexpr):
    x = x * scale
    if not WIDE:
        x = x.to(dtype).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _scale_values(x, scale, V_NORM: tl.constexpr):
    return (x.to(tl.float32) * scale).to(x.dtype) if V_NORM else x


@triton.jit
def find_codes(numbers, inverse, dtype: tl.constexpr):
    """Return the nearest code of each number, ties to even."""
    steps = numbers.to(tl.float32) * inverse
    if dtype == tl.int8:
        codes = (steps + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:  # as `encoded` in C does it, because a cast differs between devices and the interpreter
        bits = steps.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        small = (tl.abs(steps) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        found = tl.minimum(tl.where(size < 0x3C800000, small, large), 0x7E)
        codes = (((bits >> 24) & 0x80) | found).to(tl.int8).to(dtype, bitcast=True)
    return codes


@triton.jit
def _keep(
    to_ptr,
    scales_ptr,
    lo,
    hi,
    rest,
    at,
    kept,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write heads of keys or values to the rows `at`, where they are `kept`: as they are, or as codes (LIMIT > 0)."""
    size: tl.constexpr = 2 * HALF + REST
    d = tl.arange(0, HALF)
    width: tl.constexpr = size + (4 if LIMIT > 0 else 0)
    if LIMIT > 0:
        coded: tl.constexpr = to_ptr.dtype.element_ty
        most = tl.maximum(tl.max(tl.abs(lo.to(tl.float32)), 1), tl.max(tl.abs(hi.to(tl.float32)), 1))
        if REST > 0:
            most = tl.maximum(most, tl.max(tl.abs(rest.to(tl.float32)), 1))
        scale = tl.div_rn(most, tl.zeros_like(most) + LIMIT)
        scale = tl.where(scale >= 1.1754943508222875e-38, scale, 0.0)
        found = scale > 0.0
        inverse = tl.where(found, tl.div_rn(tl.zeros_like(most) + 1.0, tl.where(found, scale, 1.0)), 0.0)[:, None]
        tl.store(scales_ptr + (at * width + size) // 4, scale, kept)
        lo = find_codes(lo, inverse, coded)
        hi = find_codes(hi, inverse, coded)
        rest = find_codes(rest, inverse, coded)
    to = (at * width)[:, None]
    tl.store(to_ptr + to + d[None, :], lo, kept[:, None])
    tl.store(to_ptr + to + HALF + d[None, :], hi, kept[:, None])
    if REST > 0:
        r = tl.arange(0, PADDED)
        tl.store(to_ptr + to + 2 * HALF + r[None, :], rest, kept[:, None] & (r < REST)[None, :])


@triton.jit
def rotate_store(
    qkv_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales,
    v_scales,
    pages_ptr,
    stride,
    capacity,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    LIMIT: tl.constexpr,
    LEFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process one row and BLOCK of its q, k and v heads: bias, RMSNorm of q and k, half-split rotary, write k and v.

    The rotated part of a head is read as its two halves `[BLOCK, HALF]`. The squares of a pair are added first, then
    those along the half, then those of the REST, which is not rotated. What the model does not have is not computed,
    and its pointer is never read. VALUES: heads of values; none where rows are keys and values at once. V_NORM: values
    are normed as well. WIDE: weights of norms are float32, and nothing is rounded before they are multiplied. PAGE:
    rows of a page, where a slot's rows are paged; 0: they lie in one piece.
    LIMIT: the greatest code of coded rows (`RowFormat`), whose scales are the last four bytes of each cached row; 0:
    rows are not coded. LEFT: the heads that go to q; if these are more than the HEADS of queries, no row is
    written.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HALF)
    is_q = head < HEADS
    is_v = head >= HEADS + KV
    known = (head < HEADS + KV + VALUES)[:, None]
    size: tl.constexpr = 2 * HALF + REST
    of_head = head[:, None] * size + d[None, :]
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row)
    angle = tl.maximum(position, 0) * HALF + d
    cos = tl.load(cos_ptr + angle)[None, :]
    sin = tl.load(sin_ptr + angle)[None, :]
    if HAS_BIAS:
        b_lo = tl.load(bias_ptr + of_head, known, 0.0).to(tl.float32)
        b_hi = tl.load(bias_ptr + of_head + HALF, known, 0.0).to(tl.float32)
    if HAS_NORM:
        q_lo = tl.load(q_norm_ptr + d).to(tl.float32)
        q_hi = tl.load(q_norm_ptr + HALF + d).to(tl.float32)
        k_lo = tl.load(k_norm_ptr + d).to(tl.float32)
        k_hi = tl.load(k_norm_ptr + HALF + d).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = row * stride + of_head
    raw_lo = tl.load(qkv_ptr + at, known, 0.0)
    raw_hi = tl.load(qkv_ptr + at + HALF, known, 0.0)
    lo = raw_lo.to(tl.float32)
    hi = raw_hi.to(tl.float32)
    if HAS_BIAS:
        raw_lo = (lo + b_lo).to(dtype)
        raw_hi = (hi + b_hi).to(dtype)
        lo = raw_lo.to(tl.float32)
        hi = raw_hi.to(tl.float32)
    if REST > 0:
        r = tl.arange(0, PADDED)
        within = known & (r < REST)[None, :]
        of_rest = head[:, None] * size + 2 * HALF + r[None, :]
        raw_rest = tl.load(qkv_ptr + row * stride + of_rest, within, 0.0)
        if HAS_BIAS:
            raw_rest = (raw_rest.to(tl.float32) + tl.load(bias_ptr + of_rest, within, 0.0).to(tl.float32)).to(dtype)
        rest = raw_rest.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(lo * lo + hi * hi, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / size + eps)[:, None]
        raw_lo = _scale_values(raw_lo, scale, V_NORM)
        raw_hi = _scale_values(raw_hi, scale, V_NORM)
        lo = _normalize(lo, scale, tl.where(is_q[:, None], q_lo[None, :], k_lo[None, :]), dtype, WIDE)
        hi = _normalize(hi, scale, tl.where(is_q[:, None], q_hi[None, :], k_hi[None, :]), dtype, WIDE)
        if REST > 0:
            q_rest = tl.load(q_norm_ptr + 2 * HALF + r, r < REST, 0.0).to(tl.float32)
            k_rest = tl.load(k_norm_ptr + 2 * HALF + r, r < REST, 0.0).to(tl.float32)
            raw_rest = _scale_values(raw_rest, scale, V_NORM)
            rest = _normalize(rest, scale, tl.where(is_q[:, None], q_rest[None, :], k_rest[None, :]), dtype, WIDE)
    new_lo = (lo * cos - hi * sin).to(dtype)
    new_hi = (hi * cos + lo * sin).to(dtype)
    left = (head < LEFT)[:, None]
    to_q = row * (LEFT * size) + of_head
    tl.store(q_ptr + to_q, tl.where(is_v[:, None], raw_lo, new_lo), left)
    tl.store(q_ptr + to_q + HALF, tl.where(is_v[:, None], raw_hi, new_hi), left)
    if REST > 0:
        new_rest = rest.to(dtype)
        to_rest = row * (LEFT * size) + of_rest
        tl.store(q_ptr + to_rest, tl.where(is_v[:, None], raw_rest, new_rest), within & left)
    else:
        new_rest = new_lo
        raw_rest = raw_lo  # of the same shape, never read
    kept = (head >= HEADS) & (head < HEADS + KV + VALUES) & (position >= 0) & (LEFT == HEADS)
    if PAGE > 0:
        page = tl.load(pages_ptr + slot * (capacity // PAGE) + tl.maximum(position, 0) // PAGE).to(tl.int64)
        slot = page
        capacity = PAGE
        position = position % PAGE
    at = (slot * KV + head - HEADS) * capacity + position
    _keep(k_ptr, k_scales, new_lo, new_hi, new_rest, at, kept & ~is_v, HALF, REST, PADDED, LIMIT)
    _keep(v_ptr, v_scales, raw_lo, raw_hi, raw_rest, at - KV * capacity, kept & is_v, HALF, REST, PADDED, LIMIT)
