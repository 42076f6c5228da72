"""The gated delta rule in Triton for rows that are the only ones of their slots and do not settle, as decode rows are.

`delta_factor.factor` and `delta.scan` would write whole factors to memory and read them back. Of a single row only its
own row of P T is needed. The products are theirs, in the same order, so the bits are the same.

Most decode steps have no other rows. `factor_single_rows` leaves the row of P T, and `read_single_rows` reads from the
state. Before it waits for the factors, it has multiplied with the state. Each of the two fits into fewer registers than
both together, so more programs run on one processor. If a step takes a prompt along, one launch serves its decode rows
and computes the factors of the prompt's chunks.
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
    _load_gates,
    _product,
    _transpose_parts,
)
from adapters.models.kernels.triton.hopper.hopper_factor import _mix_row, _split


@triton.jit
def factor_single_rows(
    slots_ptr,
    positions_ptr,
    convolved_ptr,
    gates_ptr,
    kept_ptr,
    kept_gates_ptr,
    rate_ptr,
    bias_ptr,
    mix_ptr,
    lines_ptr,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute of one row and one head of values what does not depend on the state. The row's gates are kept for later
    steps.

    slots, positions: int64 `[bucket]`; nothing is written for padded rows, at position -1. mix: bfloat16
    `[bucket, HEADS, PARTS, 64]`, the row's own row of P T, in parts. lines: float32 `[bucket, HEADS, 2, 64]`, the sums
    of decays and beta. The other tensors are those of `delta_factor.factor`. What earlier steps have left is loaded
    before the kernels of this step end.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int32)
    slot = tl.load(slots_ptr + row)
    if position < 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
    else:
        width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
        old = position % CHUNK
        base = position - old
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)
        is_old = i < old
        is_new = i == old
        key = head // (HEADS // KEY_HEADS) * DK
        ring = kept_ptr + (slot * RING + base % RING) * width
        fresh = convolved_ptr + row * (width + KEY_HEADS * DK)
        kept_key = tl.load((ring + i * width)[:, None] + key + d[None, :], is_old[:, None], 0.0)
        kept_gates = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + base % RING + i
        kept_beta = tl.load(kept_gates, is_old, 0.0)
        kept_rate = tl.load(kept_gates + RING, is_old, 0.0)
        if PDL:
            gdc_wait()
            # The next kernel reads what is convolved before it waits for this one, so it may not start earlier.
            gdc_launch_dependents()
        gates = gates_ptr + row * gates_stride + head + i * 0
        beta, rate = _load_gates(gates, rate_ptr + head, bias_ptr + head, is_new, kept_beta, kept_rate, HEADS)
        tl.store(kept_gates, beta, is_new)
        tl.store(kept_gates + RING, rate, is_new)
        g = tl.cumsum(rate, 0)
        g_own = tl.sum(tl.where(is_new, g, 0.0), 0)
        k = _split(tl.where(is_new[:, None], tl.load(fresh + KEY_HEADS * DK + key + d)[None, :], kept_key), INPUTS)
        _, mix = _mix_row(fresh + key + d, k, g, g_own, beta, old, scale, DK, INPUTS, PARTS)
        is_first = tl.arange(0, BLOCK)[:, None] == 0
        to = mix_ptr + (row * HEADS + head) * PARTS * CHUNK + i[None, :]
        for n in tl.static_range(PARTS):
            tl.store(tl.broadcast_to(to + n * CHUNK, (BLOCK, CHUNK)), mix[n], is_first)
        lines = lines_ptr + (row * HEADS + head) * 2 * CHUNK + i
        tl.store(lines, g)
        tl.store(lines + CHUNK, beta)


@triton.jit
def read_single_rows(
    slots_ptr,
    positions_ptr,
    convolved_ptr,
    kept_ptr,
    memory_ptr,
    mix_ptr,
    lines_ptr,
    out_ptr,
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
    """Compute what one row reads, TILE values of one head, with what `factor_single_rows` has left.

    Products are turned: the tile's values are the 64 rows that the tensor cores multiply at once, and the row that
    reads is repeated in 16 columns. Padded rows, at position -1, read zeros.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = DV // TILE
    head = tl.program_id(1) // tiles
    first = tl.program_id(1) % tiles * TILE
    position = tl.load(positions_ptr + row).to(tl.int32)
    slot = tl.load(slots_ptr + row)
    at = first + tl.arange(0, TILE)[None, :]
    is_first = tl.arange(0, BLOCK)[None, :] == 0
    to = out_ptr + (row * HEADS + head) * DV + first + tl.arange(0, TILE)[:, None]
    if position < 0:
        if PDL:
            gdc_wait()
        tl.store(tl.broadcast_to(to, (TILE, BLOCK)), tl.zeros((TILE, BLOCK), tl.float32), is_first)
    else:
        width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
        old = position % CHUNK
        base = position - old
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)
        is_old = i < old
        is_new = i == old
        key = head // (HEADS // KEY_HEADS) * DK
        values = KEY_HEADS * DK + head * DV
        fresh = convolved_ptr + row * (width + KEY_HEADS * DK)
        own_rows = fresh + KEY_HEADS * DK
        memory = memory_ptr + (slot * HEADS + head) * DK * DV
        kept = (kept_ptr + (slot * RING + base % RING) * width + i * width)[:, None]
        state = tl.load(memory + d[:, None] * DV + at, (d < DK)[:, None] & (base > 0), 0.0)
        states = _transpose_parts(_split(state, PARTS, True), PARTS)
        kept_key = tl.load(kept + key + d[None, :], is_old[:, None], 0.0)
        kept_value = tl.load(kept + values + at, is_old[:, None], 0.0)
        k = _split(tl.where(is_new[:, None], tl.load(own_rows + key + d)[None, :], kept_key), INPUTS)
        value = tl.trans(tl.where(is_new[:, None], tl.load(own_rows + values + at), kept_value))
        q = _split(tl.broadcast_to(tl.load(fresh + key + d)[:, None], (DK, BLOCK)), INPUTS)
        k_turned = _transpose_parts(k, INPUTS)
        known = _multiply_turned(k_turned, states, tl.zeros((TILE, CHUNK), tl.float32), INPUTS, PARTS, PARTS)
        read = _multiply_turned(q, states, tl.zeros((TILE, BLOCK), tl.float32), INPUTS, PARTS, PARTS)
        if PDL:
            gdc_wait()
        lines = lines_ptr + (row * HEADS + head) * 2 * CHUNK + i
        g = tl.load(lines)
        beta = tl.load(lines + CHUNK)
        g_own = tl.sum(tl.where(is_new, g, 0.0), 0)
        grown = tl.exp(g)
        own = tl.exp(g_own) * scale
        from_mix = mix_ptr + (row * HEADS + head) * PARTS * CHUNK + i[:, None]
        mix = ()
        for n in tl.static_range(PARTS):
            mix = mix + (tl.load(tl.broadcast_to(from_mix + n * CHUNK, (CHUNK, BLOCK))),)  # noqa: RUF005
        u = _split(beta[None, :] * (value.to(tl.float32) - grown[None, :] * known), PARTS)
        read = _multiply_turned(mix, u, read * own, PARTS, PARTS, PARTS)
        tl.store(tl.broadcast_to(to, (TILE, BLOCK)), read, is_first)


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
    """Compute what the rows read that the plan lists as single, and do what `factor` does for all chunks.

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
                position, head, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, TILE, INPUTS, PARTS,
            )  # fmt: skip
    else:
        item = (tl.program_id(0) - single_limit).to(tl.int64)
        _factor_chunk(
            chunks_ptr, convolved_ptr, gates_ptr, kept_ptr, kept_gates_ptr, rate_ptr, bias_ptr, mix_ptr, fold_ptr,
            lines_ptr, item, head, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, INPUTS, PARTS, READ,
        )  # fmt: skip


@triton.jit
def _fetch(pointers):
    """Bring the lines of memory that hold these addresses nearer."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _multiply_turned(right, left, acc, RIGHT: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr):
    """Return acc + left right of split operands. Its sums are those of `_product` of the turned operands: right comes
    first there.
    """
    for m in tl.static_range(RIGHT):
        for n in tl.static_range(LEFT):
            if m + n < PARTS:
                acc = tl.dot(left[n], right[m], acc)
    return acc


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
):
    """Compute what one real row reads of one head. The row's gates are kept for later steps."""
    width: tl.constexpr = KEY_HEADS * DK + HEADS * DV
    old = position % CHUNK
    base = position - old
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, DK)
    is_old = i < old
    is_new = i == old
    key = head // (HEADS // KEY_HEADS) * DK
    values = KEY_HEADS * DK + head * DV
    ring = kept_ptr + (slot * RING + base % RING) * width
    fresh = convolved_ptr + row * (width + KEY_HEADS * DK)
    memory = memory_ptr + (slot * HEADS + head) * DK * DV
    if base > 0:  # one thread fetches 128 bytes
        _fetch(memory + tl.arange(0, DK * DV // 32) * 32)
    tiles: tl.constexpr = DV // TILE
    v = tl.arange(0, TILE)[None, :]
    kept = (ring + i * width)[:, None]
    kept_key = tl.load(kept + key + d[None, :], is_old[:, None], 0.0)
    kept_values = ()
    for number in tl.static_range(tiles):
        at = values + number * TILE + v
        kept_values = kept_values + (tl.load(kept + at, is_old[:, None], 0.0),)  # noqa: RUF005 - there is no other way
    kept_gates = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + base % RING + i
    kept_beta = tl.load(kept_gates, is_old, 0.0)
    kept_rate = tl.load(kept_gates + RING, is_old, 0.0)
    gates = gates_ptr + row * gates_stride + head + i * 0
    beta, rate = _load_gates(gates, rate_ptr + head, bias_ptr + head, is_new, kept_beta, kept_rate, HEADS)
    tl.store(kept_gates, beta, is_new)
    tl.store(kept_gates + RING, rate, is_new)
    g = tl.cumsum(rate, 0)
    g_own = tl.sum(tl.where(is_new, g, 0.0), 0)
    own_rows = fresh + KEY_HEADS * DK
    k = _split(tl.where(is_new[:, None], tl.load(own_rows + key + d)[None, :], kept_key), INPUTS)
    q, mix = _mix_row(fresh + key + d, k, g, g_own, beta, old, scale, DK, INPUTS, PARTS)
    grown = tl.exp(g)
    own = tl.exp(g_own) * scale
    is_first = tl.arange(0, BLOCK)[:, None] == 0
    for number in tl.static_range(tiles):
        at = number * TILE + v
        state = tl.load(memory + d[:, None] * DV + at, (d < DK)[:, None] & (base > 0), 0.0)
        value = tl.where(is_new[:, None], tl.load(own_rows + values + at), kept_values[number])
        states = _split(state, PARTS, True)  # or it would be done for each of two products
        known = _product(k, states, tl.zeros((CHUNK, TILE), tl.float32), INPUTS, PARTS, PARTS)
        u = _split(beta[:, None] * (value.to(tl.float32) - grown[:, None] * known), PARTS)
        none = tl.zeros((BLOCK, TILE), tl.float32)
        read = _product(q, states, none, INPUTS, PARTS, PARTS) * own
        read = _product(mix, u, read, PARTS, PARTS, PARTS)
        to = out_ptr + (row * HEADS + head) * DV + at
        tl.store(tl.broadcast_to(to, (BLOCK, TILE)), read, is_first)
