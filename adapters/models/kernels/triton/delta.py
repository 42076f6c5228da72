"""The gated delta rule in Triton, chunk by chunk: every row comes out of the same tiles in every step.

A chunk is 64 rows from a multiple of 64 on. For every chunk that a step touches and every head, `factor` computes all
that does not depend on the state. `scan` then walks through a segment's chunks with the state in its registers. Both
always compute whole chunks: rows of earlier steps are read back from the slot's rings, and rows that have not come
yet are zeros. So a row has the same position in the same products in every step, and only rows up to itself
influence it.

With the terms of `delta_interface.py`, d = T u is never written down. Instead o = e^G S0^T q + (P T) u and S' =
e^(G_63) S0 + (K^T D T) u. P holds the decayed products of queries and keys, and D the decays to the chunk's end.
`factor` leaves the matrices P T and K^T D T, and `scan` multiplies them with u.

What rows read is computed for blocks of READ rows. A prefill reads whole chunks. A step that decodes has one new row in
most chunks, and computes the 16 rows around it. The rows of a product do not influence each other.

Numbers beyond the model's dtype are multiplied as sums of bfloat16 numbers, so that every product runs on the tensor
cores. PARTS exact pieces of each number are taken: two leave a relative error of 2^-17, three of 2^-24.
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
def _inverse(a, PARTS: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower triangular a: forward substitution in diagonal blocks, then in pairs of
    blocks.
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
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row0, count, slot, base, old = _load_chunk(chunks_ptr + item * FIELDS)
    if old + count > 0:
        width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)[None, :]
        key_head = head // (HEADS // KEY_HEADS)
        is_old = i < old
        is_new = (i >= old) & (i < old + count)
        gates = gates_ptr + (row0 + i - old) * gates_stride + head
        b = tl.load(gates, is_new, 0.0).to(tl.float32)
        a = tl.load(gates + HEADS, is_new, 0.0).to(tl.float32)
        kept = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + (base + i) % RING
        beta = tl.where(is_new, 1.0 / (1.0 + tl.exp(-b)), tl.load(kept, is_old, 0.0))
        a += tl.load(bias_ptr + head)
        grown = tl.exp(tl.minimum(a, 20.0))
        more = 1.0 + grown  # where it rounds, the logarithm is put right by what was rounded off
        soft = tl.where(more == 1.0, grown, tl.log(more) * (grown / tl.where(more == 1.0, 1.0, more - 1.0)))
        soft = tl.where(a > 20.0, a, soft)
        rate = tl.where(is_new, tl.load(rate_ptr + head) * soft, tl.load(kept + RING, is_old, 0.0))
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
        zero = tl.zeros((CHUNK, CHUNK), tl.float32)
        lower = i[:, None] >= i[None, :]
        decay = tl.where(lower, tl.exp(tl.where(lower, g[:, None] - g[None, :], 0.0)), 0.0)
        kk = _product(k, k_turned, zero, INPUTS, INPUTS, PARTS)
        t = _inverse(tl.where(i[:, None] > i[None, :], beta[:, None] * decay * kk, 0.0), PARTS)
        t_parts = _split(t, PARTS)
        for block in range(old // READ, tl.cdiv(old + count, READ)):
            r = block * READ + tl.arange(0, READ)
            is_read = ((r >= old) & (r < old + count))[:, None]
            from_step = convolved_ptr + (row0 + r - old)[:, None] * whole + at
            q = _split(tl.load(from_step, is_read, 0.0), INPUTS)
            own = tl.sum(tl.where(r[:, None] == i[None, :], g[None, :], 0.0), 1)[:, None]
            before = r[:, None] >= i[None, :]
            decayed = tl.where(before, tl.exp(tl.where(before, own - g[None, :], 0.0)), 0.0)
            none = tl.zeros((READ, CHUNK), tl.float32)
            p = decayed * (_product(q, k_turned, none, INPUTS, INPUTS, PARTS) * scale)
            parts = _split(_product(_split(p, PARTS), t_parts, none, PARTS, PARTS, PARTS), PARTS)
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


@triton.jit
def _parts(at, size, PARTS: tl.constexpr):
    """Load parts that lie one behind the other."""
    parts = ()
    for n in tl.static_range(PARTS):
        parts = parts + (tl.load(at + n * size),)  # noqa: RUF005
    return parts


@triton.jit
def _clear_padding(out_ptr, first, bucket, head, v, HEADS: tl.constexpr, DV: tl.constexpr):
    """Set what padded rows read to zero, for one head's columns v."""
    for row in range(first, bucket, CHUNK):
        rows = (row + tl.arange(0, CHUNK))[:, None].to(tl.int64)
        nothing = tl.zeros((CHUNK, v.shape[1]), tl.float32)
        tl.store(out_ptr + (rows * HEADS + head) * DV + v, nothing, rows < bucket)


@triton.jit(do_not_specialize=["run_limit", "bucket"])
def scan(
    chunks_ptr,
    runs_ptr,
    settled_ptr,
    convolved_ptr,
    kept_ptr,
    kept_gates_ptr,
    mix_ptr,
    fold_ptr,
    lines_ptr,
    memory_ptr,
    out_ptr,
    run_limit,
    bucket,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    READ: tl.constexpr,
    SETTLES: tl.constexpr,
    HOLDS: tl.constexpr,
    WALKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process the chunks of segments (runs), TILE values of one head. out: float32 `[bucket, HEADS, DV]`.

    WALKED: `hopper_delta.walk` follows, which processes the chunks without earlier rows of the segments that settle.
    The last programs clear the padded rows, and the others share the runs. memory, float32 `[slots, HEADS, DK, DV]`, is
    moved if the segment settles. SETTLES: 0 if no segment does, 1 if all do, 2 if settled, int64 `[bucket]`, tells it
    of each row. HOLDS: the last chunk of a segment that settles does not move it. What later steps need of the gates is
    kept.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
    whole: tl.constexpr = width + KEY_HEADS * DK
    sharing = tl.num_programs(0) - 1
    head = tl.program_id(1) // (DV // TILE)
    v = tl.program_id(1) % (DV // TILE) * TILE + tl.arange(0, TILE)[None, :]
    i = tl.arange(0, CHUNK)
    if tl.program_id(0) == sharing:
        _clear_padding(out_ptr, tl.load(runs_ptr + run_limit * 2), bucket, head, v, HEADS, DV)
    run = tl.where(tl.program_id(0) == sharing, run_limit, tl.program_id(0))
    number = tl.load(runs_ptr + run * 2 + 1, run < run_limit, 0)
    while number > 0:  # runs are without gaps, so there is none behind one that has no chunks
        first = tl.load(runs_ptr + run * 2)
        stop = first + number
        d = tl.arange(0, DK)
        keys = head // (HEADS // KEY_HEADS) * DK + d[None, :]
        values = KEY_HEADS * DK + head * DV + v
        row0, count, slot, base, old = _load_chunk(chunks_ptr + first * FIELDS)
        settles = tl.full((), SETTLES, tl.int32)
        if SETTLES == 2:
            settles = tl.load(settled_ptr + row0).to(tl.int32)
        if WALKED:
            stop = tl.where(settles != 0, first + (old > 0).to(tl.int32), stop)
        # Where one launch serves several layers, their states are further apart than the rings.
        place = tl.load(chunks_ptr + first * FIELDS + 5).to(tl.int64)
        memory = memory_ptr + (place * HEADS + head) * DK * DV
        state = tl.load(memory + d[:, None] * DV + v, (d < DK)[:, None] & (base > 0) & (stop > first), 0.0)
        for item in range(first, stop):
            row0, count, slot, base, old = _load_chunk(chunks_ptr + item * FIELDS)
            kept, is_old, step, is_new = _rows(convolved_ptr, whole, kept_ptr, width, row0, count, slot, base, old)
            is_old = is_old[:, None]
            is_new = is_new[:, None]
            k = tl.load(step[:, None] + KEY_HEADS * DK + keys, is_new, 0.0)
            value = tl.load(step[:, None] + KEY_HEADS * DK + values, is_new, 0.0)
            if old > 0:
                k = tl.where(is_old, tl.load(kept[:, None] + keys, is_old, 0.0), k)
                value = tl.where(is_old, tl.load(kept[:, None] + values, is_old, 0.0), value)
            here = (tl.zeros((), tl.int64) + item) * HEADS + head
            g = tl.load(lines_ptr + here * 3 * CHUNK + i)
            beta = tl.load(lines_ptr + here * 3 * CHUNK + CHUNK + i)
            moves = old + count == CHUNK
            if HOLDS:
                moves = moves & ((settles == 0) | (item + 1 < first + number))
            if (settles == 0) | (not moves):
                keep = (i >= old) & (i < old + count) & (tl.program_id(1) % (DV // TILE) == 0)
                gates = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + (base + i) % RING
                tl.store(gates, beta, keep)
                tl.store(gates + RING, tl.load(lines_ptr + here * 3 * CHUNK + 2 * CHUNK + i), keep)
            zero = tl.zeros((CHUNK, TILE), tl.float32)
            states = _split(state, PARTS)
            known = _product(_split(k, INPUTS), states, zero, INPUTS, PARTS, PARTS)
            u = _split(beta[:, None] * (value.to(tl.float32) - tl.exp(g)[:, None] * known), PARTS)
            for block in range(old // READ, tl.cdiv(old + count, READ)):
                r = block * READ + tl.arange(0, READ)
                is_read = ((r >= old) & (r < old + count))[:, None]
                from_step = convolved_ptr + (row0 + r - old)[:, None] * whole + keys
                q = _split(tl.load(from_step, is_read, 0.0), INPUTS)
                own = tl.load(lines_ptr + here * 3 * CHUNK + r)
                none = tl.zeros((READ, TILE), tl.float32)
                read = _product(q, states, none, INPUTS, PARTS, PARTS) * (tl.exp(own) * scale)[:, None]
                at = mix_ptr + here * PARTS * CHUNK * CHUNK + r[:, None] * CHUNK + i[None, :]
                read = _product(_parts(at, CHUNK * CHUNK, PARTS), u, read, PARTS, PARTS, PARTS)
                to = out_ptr + ((row0 + r - old) * HEADS + head)[:, None] * DV + v
                tl.store(to, read, is_read)
            if moves:
                last = tl.sum(tl.where(i == CHUNK - 1, g, 0.0), 0)
                at = fold_ptr + here * PARTS * CHUNK * DK + d[:, None] * CHUNK + i[None, :]
                state = _product(_parts(at, CHUNK * DK, PARTS), u, state * tl.exp(last), PARTS, PARTS, PARTS)
        if (settles != 0) & (stop > first):
            tl.store(memory + d[:, None] * DV + v, state)
        run += sharing
        number = tl.load(runs_ptr + run * 2 + 1, run < run_limit, 0)
