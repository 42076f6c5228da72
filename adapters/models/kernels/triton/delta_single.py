"""The gated delta rule in Triton for rows that are the only ones of their slots and do not settle, as decode rows are.

One program computes the factor of a row's chunk and reads from the state right after it. `delta_factor.factor` and
`delta.scan` would write the factor to memory and read it back, and wait for each other. The products are theirs, in the
same order, so the bits are the same. Most decode steps have no other rows. If a step takes a prompt along, one launch
serves its decode rows and computes the factors of the prompt's chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.delta_factor import (
    BLOCK,
    CHUNK,
    RING,
    _factor_chunk,
    _factor_rows,
    _load_gates,
    _mix_rows,
    _product,
    _rows,
    _split,
    _transpose_parts,
)


@triton.jit
def read_single_rows(
    slots_ptr,
    positions_ptr,
    convolved_ptr,
    gates_ptr,
    kept_ptr,
    kept_gates_ptr,
    rate_ptr,
    bias_ptr,
    memory_ptr,
    out_ptr,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute what one row reads of one head of values. The row's gates are kept for later steps.

    slots, positions: int64 `[bucket]`; padded rows, at position -1, read zeros. The other tensors are those of
    `delta_factor.factor` and `delta.scan`. What earlier steps have left is loaded before the kernels of this step end.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int32)
    slot = tl.load(slots_ptr + row)
    to = out_ptr + (row * HEADS + head) * DV
    if position < 0:
        if PDL:
            gdc_wait()
        tl.store(to + tl.arange(0, DV), tl.zeros((DV,), tl.float32))
    else:
        _read_row(
            convolved_ptr, gates_ptr, kept_ptr, kept_gates_ptr, rate_ptr, bias_ptr, memory_ptr, out_ptr, row, slot,
            position, head, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, TILE, INPUTS, PARTS, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["single_limit"])
def factor_and_read(
    chunks_ptr,
    singles_ptr,
    convolved_ptr,
    gates_ptr,
    kept_ptr,
    kept_gates_ptr,
    rate_ptr,
    bias_ptr,
    mix_ptr,
    fold_ptr,
    lines_ptr,
    memory_ptr,
    out_ptr,
    gates_stride,
    single_limit,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    """Do what `read_single_rows` does for the rows that the plan lists as single, and `factor` for all chunks.

    Programs of rows come first. singles: of `delta_rows.plan_chunks`, `single_limit` possible ones.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    if tl.program_id(0) < single_limit:
        single = singles_ptr + tl.program_id(0) * 4
        row = tl.load(single).to(tl.int64)
        if row >= 0:
            slot = tl.load(single + 1).to(tl.int64)
            position = tl.load(single + 2)
            _read_row(
                convolved_ptr, gates_ptr, kept_ptr, kept_gates_ptr, rate_ptr, bias_ptr, memory_ptr, out_ptr, row, slot,
                position, head, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, TILE, INPUTS, PARTS, False,
            )  # fmt: skip
    else:
        item = (tl.program_id(0) - single_limit).to(tl.int64)
        _factor_chunk(
            chunks_ptr, convolved_ptr, gates_ptr, kept_ptr, kept_gates_ptr, rate_ptr, bias_ptr, mix_ptr, fold_ptr,
            lines_ptr, item, head, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, INPUTS, PARTS, READ,
        )  # fmt: skip


@triton.jit
def _read_row(
    convolved_ptr,
    gates_ptr,
    kept_ptr,
    kept_gates_ptr,
    rate_ptr,
    bias_ptr,
    memory_ptr,
    out_ptr,
    row,
    slot,
    position,
    head,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Compute what one real row reads of one head. WAITS: kernels before this one may still run."""
    width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
    whole: tl.constexpr = width + KEY_HEADS * DK
    old = position % CHUNK
    base = position - old
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, DK)
    keys = head // (HEADS // KEY_HEADS) * DK + d[None, :]
    kept, is_old, step, is_new = _rows(convolved_ptr, whole, kept_ptr, width, row, 1, slot, base, old)
    kept_gates = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + (base + i) % RING
    kept_beta = tl.load(kept_gates, is_old, 0.0)
    kept_rate = tl.load(kept_gates + RING, is_old, 0.0)
    k_old = tl.load(kept[:, None] + keys, is_old[:, None], 0.0)
    if WAITS:
        gdc_wait()
    gates = gates_ptr + (row + i - old) * gates_stride + head
    beta, rate = _load_gates(gates, rate_ptr + head, bias_ptr + head, is_new, kept_beta, kept_rate, HEADS)
    tl.store(kept_gates, beta, is_new)
    tl.store(kept_gates + RING, rate, is_new)
    g = tl.cumsum(rate, 0)
    k_new = tl.load(step[:, None] + KEY_HEADS * DK + keys, is_new[:, None], 0.0)
    k = _split(tl.where(is_old[:, None], k_old, k_new), INPUTS)
    k_turned = _transpose_parts(k, INPUTS)
    t_parts = _split(_factor_rows(k, k_turned, g, beta, old + 1, INPUTS, PARTS), PARTS)
    r = old // BLOCK * BLOCK + tl.arange(0, BLOCK)
    is_read = (r == old)[:, None]
    q = _split(tl.load(convolved_ptr + (row + r - old)[:, None] * whole + keys, is_read, 0.0), INPUTS)
    mix = _mix_rows(q, k_turned, t_parts, g, r, scale, INPUTS, PARTS, BLOCK)
    own = tl.sum(tl.where(r[:, None] == i[None, :], g[None, :], 0.0), 1)
    memory = memory_ptr + (slot * HEADS + head) * DK * DV + d[:, None] * DV
    for tile in tl.static_range(DV // TILE):
        v = tile * TILE + tl.arange(0, TILE)[None, :]
        values = KEY_HEADS * DK + head * DV + v
        state = tl.load(memory + v, (d < DK)[:, None] & (base > 0), 0.0)
        value_old = tl.load(kept[:, None] + values, is_old[:, None], 0.0)
        value_new = tl.load(step[:, None] + KEY_HEADS * DK + values, is_new[:, None], 0.0)
        value = tl.where(is_old[:, None], value_old, value_new)
        states = _split(state, PARTS)
        known = _product(k, states, tl.zeros((CHUNK, TILE), tl.float32), INPUTS, PARTS, PARTS)
        u = _split(beta[:, None] * (value.to(tl.float32) - tl.exp(g)[:, None] * known), PARTS)
        none = tl.zeros((BLOCK, TILE), tl.float32)
        read = _product(q, states, none, INPUTS, PARTS, PARTS) * (tl.exp(own) * scale)[:, None]
        read = _product(mix, u, read, PARTS, PARTS, PARTS)
        tl.store(out_ptr + ((row + r - old) * HEADS + head)[:, None] * DV + v, read, is_read)
