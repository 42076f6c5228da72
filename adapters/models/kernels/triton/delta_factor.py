"""The factors of the gated delta rule in Triton: what of a chunk does not depend on the state. `delta.py` uses them.

Each helper computes whole chunks of 64 rows, so that a row has the same position in the same products in every kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = tl.constexpr(64)
RING = tl.constexpr(128)
BLOCK = tl.constexpr(16)  # of the factor's diagonal, which is inverted row by row
FIELDS = tl.constexpr(8)  # of a chunk in the plan: first row, rows, slot, base, rows before


@triton.jit
def _split(x, PARTS: tl.constexpr):
    """x as a sum of PARTS bfloat16 tensors, the largest first; one part: x is bfloat16 as it is."""
    if PARTS == 1:
        parts = (x.to(tl.bfloat16),)
    else:
        rest = x.to(tl.float32)
        parts = ()
        for _ in tl.static_range(PARTS):
            part = rest.to(tl.bfloat16)
            rest = rest - part.to(tl.float32)
            parts = parts + (part,)  # noqa: RUF005 - Triton knows no other way
    return parts


@triton.jit
def _product(a, b, acc, A: tl.constexpr, B: tl.constexpr, PARTS: tl.constexpr):
    """Return acc + a b of split operands, which have A and B parts; products below the last of PARTS are left out."""
    for i in tl.static_range(A):
        for j in tl.static_range(B):
            if i + j < PARTS:
                acc = tl.dot(a[i], b[j], acc)
    return acc


@triton.jit
def _transpose_parts(a, A: tl.constexpr):
    turned = ()
    for i in tl.static_range(A):
        turned = turned + (tl.trans(a[i]),)  # noqa: RUF005
    return turned


@triton.jit
def _times(a, b, PARTS: tl.constexpr):
    """Return the product of two float32 matrices of one chunk."""
    zero = tl.zeros((CHUNK, CHUNK), tl.float32)
    return _product(_split(a, PARTS), _split(b, PARTS), zero, PARTS, PARTS, PARTS)


@triton.jit
def _inverse(a, rows, PARTS: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower triangular a: forward substitution in diagonal blocks, then in pairs of
    blocks. Rows of `a` from `rows` on are zeros.
    """
    number: tl.constexpr = CHUNK // BLOCK
    one = tl.arange(0, number)[:, None, None, None]
    other = tl.arange(0, number)[None, None, :, None]
    blocks = tl.sum(tl.where(one == other, tl.reshape(a, (number, BLOCK, number, BLOCK)), 0.0), 2)
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    found = tl.broadcast_to(tl.where(row == column, 1.0, 0.0), (number, BLOCK, BLOCK))
    for j in range(BLOCK - 1):
        below = tl.sum(tl.where(column == j, blocks, 0.0), 2)
        done = tl.sum(tl.where(row == j, found, 0.0), 1)
        found = found - below[:, :, None] * done[:, None, :]
    spread = tl.broadcast_to(found[:, :, None, :], (number, BLOCK, number, BLOCK))
    t = tl.reshape(tl.where(one == other, spread, 0.0), (CHUNK, CHUNK))
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    size: tl.constexpr = BLOCK
    for level in tl.static_range(2):
        width = size << level
        if rows > width:  # otherwise no pair has a second block
            pair = (i // (2 * width) == j // (2 * width)) & (i // width != j // width)
            t = t - _times(t, _times(tl.where(pair, a, 0.0), t, PARTS), PARTS)
    return t


@triton.jit
def _load_chunk(chunk_ptr):
    """Load a chunk of the plan: first row, rows, slot, base, and how many of its rows came in earlier steps."""
    row0 = tl.load(chunk_ptr).to(tl.int64)
    slot = tl.load(chunk_ptr + 2).to(tl.int64)
    return row0, tl.load(chunk_ptr + 1), slot, tl.load(chunk_ptr + 3), tl.load(chunk_ptr + 4)


@triton.jit
def _rows(step_ptr, stride, ring_ptr, WIDTH: tl.constexpr, row0, count, slot, base, old):
    """Return where a chunk's rows begin, in the slot's ring and in the step, and which of them exist there."""
    i = tl.arange(0, CHUNK)
    rings = ring_ptr + (slot * RING + (base + i) % RING) * WIDTH
    steps = step_ptr + (row0 + i - old) * stride
    return rings, i < old, steps, (i >= old) & (i < old + count)


@triton.jit
def _load_gates(gates, rate_ptr, bias_ptr, is_new, kept_beta, kept_rate, HEADS: tl.constexpr):
    """Return beta and g of a chunk's rows: computed for new rows, and as kept for the others."""
    b = tl.load(gates, is_new, 0.0).to(tl.float32)
    a = tl.load(gates + HEADS, is_new, 0.0).to(tl.float32) + tl.load(bias_ptr)
    grown = tl.exp(tl.minimum(a, 20.0))
    more = 1.0 + grown  # where it rounds, the logarithm is put right by what was rounded off
    soft = tl.where(more == 1.0, grown, tl.log(more) * (grown / tl.where(more == 1.0, 1.0, more - 1.0)))
    soft = tl.where(a > 20.0, a, soft)
    beta = tl.where(is_new, 1.0 / (1.0 + tl.exp(-b)), kept_beta)
    return beta, tl.where(is_new, tl.load(rate_ptr) * soft, kept_rate)


@triton.jit
def _factor_rows(k, k_turned, g, beta, rows, INPUTS: tl.constexpr, PARTS: tl.constexpr):
    """Return the factor T of a chunk that has this many rows."""
    i = tl.arange(0, CHUNK)
    lower = i[:, None] >= i[None, :]
    decay = tl.where(lower, tl.exp(tl.where(lower, g[:, None] - g[None, :], 0.0)), 0.0)
    kk = _product(k, k_turned, tl.zeros((CHUNK, CHUNK), tl.float32), INPUTS, INPUTS, PARTS)
    return _inverse(tl.where(i[:, None] > i[None, :], beta[:, None] * decay * kk, 0.0), rows, PARTS)


@triton.jit
def _mix_rows(q, k_turned, t_parts, g, r, scale, INPUTS: tl.constexpr, PARTS: tl.constexpr, READ: tl.constexpr):
    """Return parts of P T for rows r of a chunk, `[READ, 64]`."""
    i = tl.arange(0, CHUNK)
    own = tl.sum(tl.where(r[:, None] == i[None, :], g[None, :], 0.0), 1)[:, None]
    before = r[:, None] >= i[None, :]
    decayed = tl.where(before, tl.exp(tl.where(before, own - g[None, :], 0.0)), 0.0)
    none = tl.zeros((READ, CHUNK), tl.float32)
    p = decayed * (_product(q, k_turned, none, INPUTS, INPUTS, PARTS) * scale)
    return _split(_product(_split(p, PARTS), t_parts, none, PARTS, PARTS, PARTS), PARTS)


@triton.jit
def factor(
    chunks_ptr,
    convolved_ptr,
    gates_ptr,
    kept_ptr,
    kept_gates_ptr,
    rate_ptr,
    bias_ptr,
    mix_ptr,
    fold_ptr,
    lines_ptr,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the factors of one chunk and one head of values. READ: rows of a block that is computed for reading.

    Leaves parts of P T in mix `[chunks, HEADS, PARTS, 64, 64]`, of K^T D T in fold `[.., DK, 64]` (if the chunk is
    complete), and G, beta and g in lines `[chunks, HEADS, 3, 64]`. convolved: `[bucket, q | k | v]`. gates: `[bucket,
    b | a]`. kept of earlier steps: `[slots, 128, k | v]`, and float32 `[slots, HEADS, beta | g, 128]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _factor_chunk(
        chunks_ptr, convolved_ptr, gates_ptr, kept_ptr, kept_gates_ptr, rate_ptr, bias_ptr, mix_ptr, fold_ptr,
        lines_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1), gates_stride, scale, KEY_HEADS, HEADS, DK, DV,
        INPUTS, PARTS, READ,
    )  # fmt: skip


@triton.jit
def _factor_chunk(
    chunks_ptr,
    convolved_ptr,
    gates_ptr,
    kept_ptr,
    kept_gates_ptr,
    rate_ptr,
    bias_ptr,
    mix_ptr,
    fold_ptr,
    lines_ptr,
    item,
    head,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    READ: tl.constexpr,
):
    """Compute the factors of chunk `item` for one head, as `factor` says."""
    row0, count, slot, base, old = _load_chunk(chunks_ptr + item * FIELDS)
    if old + count > 0:
        width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)[None, :]
        key_head = head // (HEADS // KEY_HEADS)
        is_old = i < old
        is_new = (i >= old) & (i < old + count)
        kept = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + (base + i) % RING
        gates = gates_ptr + (row0 + i - old) * gates_stride + head
        kept_beta = tl.load(kept, is_old, 0.0)
        kept_rate = tl.load(kept + RING, is_old, 0.0)
        beta, rate = _load_gates(gates, rate_ptr + head, bias_ptr + head, is_new, kept_beta, kept_rate, HEADS)
        g = tl.cumsum(rate, 0)
        lines = lines_ptr + (item * HEADS + head) * 3 * CHUNK + i
        tl.store(lines, g)
        tl.store(lines + CHUNK, beta)
        tl.store(lines + 2 * CHUNK, rate)
        whole: tl.constexpr = width + KEY_HEADS * DK
        kept, is_old, step, is_new = _rows(convolved_ptr, whole, kept_ptr, width, row0, count, slot, base, old)
        at = key_head * DK + d
        k_old = tl.load(kept[:, None] + at, is_old[:, None], 0.0)
        k_new = tl.load(step[:, None] + KEY_HEADS * DK + at, is_new[:, None], 0.0)
        k = _split(tl.where(is_old[:, None], k_old, k_new), INPUTS)
        k_turned = _transpose_parts(k, INPUTS)
        t = _factor_rows(k, k_turned, g, beta, old + count, INPUTS, PARTS)
        t_parts = _split(t, PARTS)
        for block in range(old // READ, tl.cdiv(old + count, READ)):
            r = block * READ + tl.arange(0, READ)
            is_read = ((r >= old) & (r < old + count))[:, None]
            from_step = convolved_ptr + (row0 + r - old)[:, None] * whole + at
            q = _split(tl.load(from_step, is_read, 0.0), INPUTS)
            parts = _mix_rows(q, k_turned, t_parts, g, r, scale, INPUTS, PARTS, READ)
            to = mix_ptr + (item * HEADS + head) * PARTS * CHUNK * CHUNK + r[:, None] * CHUNK + i[None, :]
            for n in tl.static_range(PARTS):
                tl.store(to + n * CHUNK * CHUNK, parts[n])
        if old + count == CHUNK:
            last = tl.sum(tl.where(i == CHUNK - 1, g, 0.0), 0)
            ends = _split(t * tl.exp(last - g)[:, None], PARTS)
            tall = tl.zeros((DK, CHUNK), tl.float32)
            parts = _split(_product(k_turned, ends, tall, INPUTS, PARTS, PARTS), PARTS)
            to = fold_ptr + (item * HEADS + head) * PARTS * CHUNK * DK
            to += tl.arange(0, DK)[:, None] * CHUNK + i[None, :]
            for n in tl.static_range(PARTS):
                tl.store(to + n * CHUNK * DK, parts[n])
