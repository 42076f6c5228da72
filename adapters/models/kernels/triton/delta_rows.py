"""Row-wise kernels of recurrent layers in Triton: the plan of chunks, rings, norm and gates.

A sequence is cut at multiples of 64 rows into chunks. A segment, which is what a step has of one slot, covers one or
several chunks; these follow each other in the plan and are called its run. The state of a slot stands at a chunk's
beginning. The rows after it are in a ring of 128 rows, because proposals may have to be rolled back. A row is settled
when it stays for certain. The edge is the last three rows before the state, which the convolution reads: each row is
convolved with the three before it, by the weights called taps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.delta_factor import CHUNK, FIELDS, RING, _load_chunk, _rows


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["bucket", "chunk_limit", "run_limit"])
def plan_chunks(
    slots_ptr,
    positions_ptr,
    counts_ptr,
    settled_ptr,
    chunks_ptr,
    runs_ptr,
    walks_ptr,
    singles_ptr,
    bucket,
    chunk_limit,
    run_limit,
    ROWS: tl.constexpr,
    LIMIT: tl.constexpr,
    RUNS: tl.constexpr,
    APART: tl.constexpr,
):
    """Cut the step's segments at multiples of 64. One program, once a forward.

    chunks[c] = first row, rows (0: there is no such chunk), slot, base, rows of the chunk in earlier steps, slot of the
    state. runs[s] = the segment's first chunk and how many it has. The entry after the last possible run holds the
    number of real rows.
    walks[w], for the segments that settle: its first chunk without rows in earlier steps, how many chunks follow from
    there on, their first row, slot, position of that row, and number of rows. The entry after the last possible walk
    holds the number of walks.
    singles[n] = row (-1: there is none), slot and position, if APART: rows that are the only ones of their segment and
    do not settle. Their segments are no runs, and have no chunks.
    """
    i = tl.arange(0, ROWS)
    inside = i < bucket
    position = tl.load(positions_ptr + i, inside, -1).to(tl.int32)
    slot = tl.load(slots_ptr + i, inside, 0).to(tl.int32)
    count = tl.load(counts_ptr + i, inside, 0).to(tl.int32)
    settled = tl.load(settled_ptr + i, inside, 0) != 0
    real = position >= 0
    s = tl.arange(0, RUNS)
    walked = real
    if APART:
        single = real & (count == 1) & ~settled
        to = singles_ptr + (tl.cumsum(single.to(tl.int32), 0) - 1) * 4
        tl.store(to, i, single)
        tl.store(to + 1, slot, single)
        tl.store(to + 2, position, single)
        unused = (s >= tl.sum(single.to(tl.int32), 0)) & (s < run_limit)
        tl.store(singles_ptr + s * 4, tl.full((RUNS,), -1, tl.int32), unused)
        walked = real & ~single
    starts = walked & (count > 0)
    opens = walked & (starts | (position % CHUNK == 0))
    chunk = tl.cumsum(opens.to(tl.int32), 0) - 1
    run = tl.cumsum(starts.to(tl.int32), 0) - 1
    stop = tl.associative_scan(tl.where(starts, i + count, 0), 0, _larger)  # of the segment
    rows = tl.minimum(CHUNK - position % CHUNK, stop - i)
    tl.store(chunks_ptr + chunk * FIELDS, i, opens)
    tl.store(chunks_ptr + chunk * FIELDS + 1, rows, opens)
    tl.store(chunks_ptr + chunk * FIELDS + 2, slot, opens)
    tl.store(chunks_ptr + chunk * FIELDS + 3, position // CHUNK * CHUNK, opens)
    tl.store(chunks_ptr + chunk * FIELDS + 4, position % CHUNK, opens)
    tl.store(chunks_ptr + chunk * FIELDS + 5, slot, opens)
    c = tl.arange(0, LIMIT)
    unused = (c >= tl.sum(opens.to(tl.int32), 0)) & (c < chunk_limit)
    tl.store(chunks_ptr + c * FIELDS + 1, tl.zeros((LIMIT,), tl.int32), unused)
    tl.store(chunks_ptr + c * FIELDS + 4, tl.zeros((LIMIT,), tl.int32), unused)
    tl.store(runs_ptr + run * 2, chunk, starts)
    tl.store(runs_ptr + run * 2 + 1, (position + count - 1) // CHUNK - position // CHUNK + 1, starts)
    unused = (s >= tl.sum(starts.to(tl.int32), 0)) & (s < run_limit)
    tl.store(runs_ptr + s * 2 + 1, tl.zeros((RUNS,), tl.int32), unused)
    tl.store(runs_ptr + run_limit * 2, tl.sum(real.to(tl.int32), 0))
    begin = (position + CHUNK - 1) // CHUNK * CHUNK
    ahead = position + count - begin
    walks = starts & (ahead > 0) & settled
    walk = walks_ptr + (tl.cumsum(walks.to(tl.int32), 0) - 1) * FIELDS
    tl.store(walk, chunk + (begin > position).to(tl.int32), walks)
    tl.store(walk + 1, (ahead + CHUNK - 1) // CHUNK, walks)
    tl.store(walk + 2, i + begin - position, walks)
    tl.store(walk + 3, slot, walks)
    tl.store(walk + 4, begin, walks)
    tl.store(walk + 5, ahead, walks)
    tl.store(walks_ptr + run_limit * FIELDS, tl.sum(walks.to(tl.int32), 0))


@triton.jit
def store_settled_rows(
    chunks_ptr,
    runs_ptr,
    settled_ptr,
    rows_ptr,
    ring_ptr,
    edge_ptr,
    stride,
    WIDTH: tl.constexpr,
    EDGE: tl.constexpr,
    HOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the settled rows of each segment. One program handles one segment and BLOCK columns.

    Rows `[bucket, WIDTH]` after a segment's last multiple of 64 go into the ring `[slots, 128, WIDTH]`. If EDGE, the
    three rows before that multiple go into edge `[slots, 3, WIDTH]`, from the step or else from the ring. HOLDS: the
    multiple is below the segment's end and not at it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    run = tl.program_id(0)
    first = tl.load(runs_ptr + run * 2)
    number = tl.load(runs_ptr + run * 2 + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    known = column < WIDTH
    row = tl.load(chunks_ptr + first * FIELDS, number > 0, 0)
    if tl.load(settled_ptr + row, number > 0, 0) != 0:
        row0, count, slot, base, old = _load_chunk(chunks_ptr + (first + number - 1) * FIELDS)
        ring, _came, step, is_new = _rows(rows_ptr, stride, ring_ptr, WIDTH, row0, count, slot, base, old)
        complete = (old + count == CHUNK) & (not HOLDS)
        if EDGE and (complete or number > 1):
            begin, _count, _slot, before, came = _load_chunk(chunks_ptr + first * FIELDS)
            at = base + tl.where(complete, CHUNK, 0) - 4 + tl.arange(0, 4)[:, None]
            wanted = known & (tl.arange(0, 4)[:, None] > 0)
            here = at >= before + came
            from_step = rows_ptr + (begin + at - before - came) * stride + column
            from_ring = ring_ptr + (slot * RING + at % RING) * WIDTH + column
            x = tl.where(
                here, tl.load(from_step, wanted & here, 0.0), tl.load(from_ring, wanted & (at < before + came), 0.0)
            )
            tl.store(edge_ptr + (slot * 3 + tl.arange(0, 4)[:, None] - 1) * WIDTH + column, x, wanted)
        if not complete:
            mask = known & is_new[:, None]
            tl.store(ring[:, None] + column, tl.load(step[:, None] + column, mask), mask)


@triton.jit
def gated_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute RMSNorm of each head times weight times silu(gate), of x float32 `[bucket, HEADS, DV]`. One row,
    AT_ONCE heads.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    d = tl.arange(0, DV)[None, :]
    known = (head < HEADS) & (d < DV)
    weight = tl.load(weight_ptr + d)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * HEADS * DV + head * DV + d, known, 0.0)
    gate = tl.load(gate_ptr + row * gate_stride + head * DV + d, known, 0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / DV + eps)[:, None] * weight
    out = x * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + row * HEADS * DV + head * DV + d, out.to(out_ptr.dtype.element_ty), known)


@triton.jit
def gate(x_ptr, gate_ptr, out_ptr, x_stride, gate_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute x times sigmoid(gate). One row, BLOCK columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, column < width, 0.0).to(tl.float32)
    by = tl.load(gate_ptr + row * gate_stride + column, column < width, 0.0).to(tl.float32)
    out = (x / (1.0 + tl.exp(-by))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, column < width)
