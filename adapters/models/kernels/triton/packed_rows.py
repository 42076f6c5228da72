"""Kernels in Triton that write rows of any format, one head in each program, and that rotate heads.

They serve rows in fewer than 8 bits, and rows whose keys and values have different formats (`row_format.py`): there
`rotate_store` leaves all heads in other memory, and `keep_heads` puts them there. Codes are those that torch makes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.rows import find_codes

# What a row is made of: numbers, codes of a byte each, and packed codes, as `row_kind` in cuda/packed_rows.py says.
BYTES = tl.constexpr(1)
INT35 = tl.constexpr(3)
INT4 = tl.constexpr(4)


@triton.jit
def rotate_blocks(x, COUNT: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr):
    """Multiply each row of x float32 `[COUNT, BLOCK]` with an orthonormal Hadamard matrix, as torch does it here."""
    for s in tl.static_range(LOG):
        pairs = tl.reshape(x, (COUNT, BLOCK // (2 << s), 2, 1 << s))
        left, right = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2)), (COUNT, BLOCK))
    return x * ROOT


@triton.jit
def _scale_of(x, LIMIT: tl.constexpr):
    """Return the scale of a head, and its inverse."""
    most = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = tl.div_rn(most, most * 0.0 + LIMIT)
    scale = tl.where(scale >= 1.1754943508222875e-38, scale, 0.0)
    found = scale > 0.0
    return scale, tl.where(found, tl.div_rn(scale * 0.0 + 1.0, tl.where(found, scale, 1.0)), 0.0)


@triton.jit
def _put_plane(
    to_ptr,
    codes,
    kept,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write BITS of the codes of COUNT numbers from FIRST on, several in each byte (`Plane` in row_format.py)."""
    each: tl.constexpr = COUNT * BITS // 8
    j = tl.arange(0, PADDED)
    inside = j < each
    byte = tl.zeros((PADDED,), tl.int32)
    for place in tl.static_range(8 // BITS):
        at = tl.where(inside, FIRST + place * each + j, 0)
        byte |= ((tl.gather(codes, at, 0) >> SHIFT) & ((1 << BITS) - 1)) << (place * BITS)
    tl.store(to_ptr + j, byte.to(tl.uint8), inside & kept)


@triton.jit
def _keep_head(
    x,
    row_ptr,
    scale_ptr,
    kept,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG: tl.constexpr,
    ROOT: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write one head float32 `[COUNT, BLOCK]`, of which SIZE numbers are real, as a row."""
    i = tl.arange(0, COUNT)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if KIND < INT35:
        if KIND == BYTES:
            scale, inverse = _scale_of(x, LIMIT)
            tl.store(scale_ptr + SIZE // 4, scale, kept)
            x = find_codes(x, inverse, row_ptr.dtype.element_ty)
        tl.store(row_ptr + i, x.to(row_ptr.dtype.element_ty), (i < SIZE) & kept)
    else:
        turned = rotate_blocks(x, COUNT, BLOCK, LOG, ROOT)
        scale, inverse = _scale_of(turned, LIMIT)
        steps = turned * inverse
        places = steps * 0.5 + LIMIT / 2
        codes = tl.minimum(tl.where(places >= 0.0, places, 0.0), LIMIT - 1).to(tl.int32)
        flat = tl.reshape(codes, (COUNT * BLOCK,))
        half: tl.constexpr = SIZE // 2
        if KIND == INT4:
            _put_plane(row_ptr, flat, kept, 0, SIZE, 4, 0, PADDED)
            tl.store(scale_ptr + half // 4, scale, kept)
        else:
            _put_plane(row_ptr, flat, kept, 0, half, 4, 0, PADDED)
            _put_plane(row_ptr + half // 2, flat, kept, half, half, 2, 2, PADDED)
            _put_plane(row_ptr + half // 2 + half // 4, flat, kept, half, half, 1, 1, PADDED)
            tl.store(scale_ptr + (half // 2 + half // 4 + half // 8 + 3) // 4, scale, kept)


@triton.jit
def keep_heads(
    x_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales,
    v_scales,
    slots_ptr,
    positions_ptr,
    pages_ptr,
    capacity,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG: tl.constexpr,
    ROOT: tl.constexpr,
    PADDED: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_LIMIT: tl.constexpr,
    V_LIMIT: tl.constexpr,
    K_APART: tl.constexpr,
    V_APART: tl.constexpr,
    APART: tl.constexpr,
    PAGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take AT_ONCE heads of one row of x `[R, HEADS + KV + VALUES, SIZE]`: rotate a query if keys are, write a key or
    value.

    K_APART, V_APART: elements between rows of keys, and of values. APART: the float32 numbers between rows of either.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, COUNT)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row)
    kept = position >= 0
    place = tl.maximum(position, 0)
    if PAGE > 0:
        slot = tl.load(pages_ptr + slot * (capacity // PAGE) + place // PAGE).to(tl.int64)
        capacity = PAGE
        place = place % PAGE
    for number in range(AT_ONCE):
        head = tl.program_id(1) * AT_ONCE + number
        inside = (i < SIZE) & (head < HEADS + KV + VALUES)
        x = tl.load(x_ptr + (row * (HEADS + KV + VALUES) + head) * SIZE + i, inside, 0.0).to(tl.float32)
        if head < HEADS:
            if K_KIND >= INT35:
                x = rotate_blocks(x, COUNT, BLOCK, LOG, ROOT)
            tl.store(q_ptr + (row * HEADS + head) * SIZE + i, x.to(q_ptr.dtype.element_ty), i < SIZE)
        elif head < HEADS + KV:
            at = (slot * KV + head - HEADS) * capacity + place
            _keep_head(
                x, k_ptr + at * K_APART, k_scales + at * APART, kept, SIZE, COUNT, BLOCK, LOG, ROOT, PADDED, K_KIND,
                K_LIMIT,
            )  # fmt: skip
        elif head < HEADS + KV + VALUES:
            at = (slot * KV + head - HEADS - KV) * capacity + place
            _keep_head(
                x, v_ptr + at * V_APART, v_scales + at * APART, kept, SIZE, COUNT, BLOCK, LOG, ROOT, PADDED, V_KIND,
                V_LIMIT,
            )  # fmt: skip


@triton.jit
def rotate_heads(
    x_ptr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG: tl.constexpr,
    ROOT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate AT_ONCE heads of x `[heads, SIZE]` in place."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, COUNT)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(0).to(tl.int64) * AT_ONCE
    for number in range(AT_ONCE):
        to = x_ptr + (first + number) * SIZE + i
        x = rotate_blocks(tl.load(to, i < SIZE, 0.0).to(tl.float32), COUNT, BLOCK, LOG, ROOT)
        tl.store(to, x.to(x_ptr.dtype.element_ty), i < SIZE)
