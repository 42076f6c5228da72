"""The gated delta rule in Triton for rows that are the only ones of their slots and do not settle, as decode rows are.

One program computes the factor of a row's chunk and reads from the state right after it. `delta_factor.factor` and
`delta.scan` would write the factor to memory and read it back, and wait for each other. The products are theirs, in the
same order, so the bits are the same. Most decode steps have no other rows; many of them take two launches
(`hopper_many_rows`). If a step takes a prompt along, one launch
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
    _load_gates,
    _product,
)
from adapters.models.kernels.triton.hopper.hopper_factor import _mix_row, _split


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
    APART: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute what one row reads of one head of values. The row's gates are kept for later steps.

    slots, positions: int64 `[bucket]`; padded rows, at position -1, read zeros. The other tensors are those of
    `delta_factor.factor` and `delta.scan`. APART: a program has one tile of a head's values in place of all. What
    earlier steps have left is loaded before the kernels of this step end.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = DV // TILE if APART else 1
    head = tl.program_id(1) // tiles
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
            position, head, tl.program_id(1) % tiles, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, TILE, APART,
            INPUTS, PARTS, PDL,
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
                position, head, 0, gates_stride, scale, KEY_HEADS, HEADS, DK, DV, TILE, False, INPUTS, PARTS, False,
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
    own_tile,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    APART: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Compute what one real row reads of one head, if APART only of `own_tile` of its values.

    WAITS: kernels before this one may still run.
    """
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
        in_state: tl.constexpr = (TILE if APART else DV) // 32
        n = tl.arange(0, DK * in_state)
        _fetch(memory + (own_tile * TILE if APART else 0) + n // in_state * DV + n % in_state * 32)
    tiles: tl.constexpr = 1 if APART else DV // TILE
    first = own_tile * TILE if APART else 0
    v = tl.arange(0, TILE)[None, :]
    kept = (ring + i * width)[:, None]
    kept_key = tl.load(kept + key + d[None, :], is_old[:, None], 0.0)
    kept_values = ()
    for number in tl.static_range(tiles):
        at = values + first + number * TILE + v
        kept_values = kept_values + (tl.load(kept + at, is_old[:, None], 0.0),)  # noqa: RUF005 - there is no other way
    kept_gates = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + base % RING + i
    kept_beta = tl.load(kept_gates, is_old, 0.0)
    kept_rate = tl.load(kept_gates + RING, is_old, 0.0)
    if WAITS:
        gdc_wait()
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
        at = first + number * TILE + v
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
