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

from adapters.models.kernels.triton.delta_factor import CHUNK, FIELDS, RING, _load_chunk, _product, _rows, _split


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
            moves = (old + count == CHUNK) & ((settles == 0) | (item + 1 < first + number) | (not HOLDS))
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
