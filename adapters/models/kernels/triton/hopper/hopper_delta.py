"""The gated delta rule on Hopper (compute capability 9.0): chunks of new rows that settle, as `delta.scan` has them.

Only the state passes from chunk to chunk. So one group of warps does nothing else: it multiplies the keys with the
state, makes the corrections u, and moves the state. Another group computes what the chunk's rows read, from the same
state and the same u in shared memory, while the first one is at the next chunk. One warp brings what both need, by
bulk copies that run ahead. The sums are those of `delta.scan`, in the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_products import bring

CHUNK = gl.constexpr(64)
FIELDS = gl.constexpr(8)
RING = gl.constexpr(128)
PARTS = gl.constexpr(2)  # pieces of bfloat16 that computed numbers are multiplied in


@gluon.jit
def _make_barriers(STAGES: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(bars.index(at), count=1)
    return bars


@gluon.jit
def _write_parts(x, parts):
    """Write x as a sum of two bfloat16 tensors, the larger first, where the tensor cores can read them."""
    large = x.to(gl.bfloat16)
    parts.index(0).store(large)
    parts.index(1).store((x - large.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def _add_product(a_ring, at, parts, acc):
    """Return acc + a b of operands in two parts each; the product of the smaller ones is left out."""
    acc = warpgroup_mma(a_ring.index(at * PARTS), parts.index(0), acc, is_async=True)
    acc = warpgroup_mma(a_ring.index(at * PARTS), parts.index(1), acc, is_async=True)
    acc = warpgroup_mma(a_ring.index(at * PARTS + 1), parts.index(0), acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(acc,))


@gluon.jit
def _add_exact_product(a, parts, zero):
    """Return a b of an operand that is exact in one part."""
    acc = warpgroup_mma(a, parts.index(0), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(a, parts.index(1), acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(acc,))


@gluon.jit
def _load_walk(walks_ptr, walk):
    """Load a walk of the plan: first chunk, chunks, first row, slot, position of that row, rows."""
    at = walks_ptr + walk * FIELDS
    return (
        gl.load(at),
        gl.load(at + 1),
        gl.load(at + 2),
        gl.load(at + 3).to(gl.int64),
        gl.load(at + 4),
        gl.load(at + 5),
    )


@gluon.jit
def _bring(
    descs, rings, bars, walks_ptr, walks, head_columns, KEYS: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr
):
    """Bring what each chunk needs. KEYS: columns of all keys."""
    rows_desc, values_desc, mix_desc, fold_desc = descs
    k_ring, v_ring, fold_ring, q_ring, mix_ring = rings
    moved, moved_free, read, read_free = bars
    head, key_column, value_column = head_columns
    DK: gl.constexpr = fold_desc.block_type.shape[0]
    number = 0
    for walk in range(walks):
        item, chunks, row, _slot, _base, _count = _load_walk(walks_ptr, walk)
        for chunk in range(chunks):
            at = number % STAGES
            turn = (number // STAGES & 1) ^ 1
            of_parts = ((item + chunk) * HEADS + head) * PARTS
            here = row + chunk * CHUNK
            mbarrier.wait(moved_free.index(at), turn)
            mbarrier.expect(
                moved.index(at),
                rows_desc.block_type.nbytes + values_desc.block_type.nbytes + PARTS * fold_desc.block_type.nbytes,
            )
            bring(rows_desc, [here, KEYS + key_column], moved.index(at), k_ring.index(at))
            bring(values_desc, [here, value_column], moved.index(at), v_ring.index(at))
            for part in gl.static_range(PARTS):
                bring(fold_desc, [(of_parts + part) * DK, 0], moved.index(at), fold_ring.index(at * PARTS + part))
            mbarrier.wait(read_free.index(at), turn)
            mbarrier.expect(read.index(at), rows_desc.block_type.nbytes + PARTS * mix_desc.block_type.nbytes)
            bring(rows_desc, [here, key_column], read.index(at), q_ring.index(at))
            for part in gl.static_range(PARTS):
                bring(mix_desc, [(of_parts + part) * CHUNK, 0], read.index(at), mix_ring.index(at * PARTS + part))
            number += 1


@gluon.jit
def _move(
    memory_ptr,
    lines_ptr,
    kept_gates_ptr,
    rings,
    bars,
    shared,
    turns,
    walks_ptr,
    walks,
    head_columns,
    keeps,
    HEADS: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
    HOLDS: gl.constexpr,
):
    """Move the states through all chunks. keeps: this program keeps the gates of a chunk that moves no state."""
    k_ring, v_ring, fold_ring, _q_ring, _mix_ring = rings
    moved, moved_free, _read, _read_free = bars
    states, us = shared
    state_ready, state_free, u_ready, u_free = turns
    head, _key_column, _value_column = head_columns
    DK: gl.constexpr = k_ring.shape[2]
    TILE: gl.constexpr = v_ring.shape[2]
    TENSOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, TENSOR)
    d = gl.arange(0, DK, layout=OF_ROWS)[:, None]
    v = gl.arange(0, TILE, layout=gl.SliceLayout(0, TENSOR))[None, :]
    i = gl.arange(0, CHUNK, layout=OF_ROWS)
    zero = gl.zeros([CHUNK, TILE], gl.float32, layout=TENSOR)
    number = 0
    for walk in range(walks):
        item, chunks, _row, slot, base, count = _load_walk(walks_ptr, walk)
        own = memory_ptr + slot * HEADS * DK * DV + d * DV + v
        state = gl.load(own, mask=(d < gl.where(base > 0, DK, 0)) & (v < TILE), other=0.0)
        lines = lines_ptr + (item.to(gl.int64) * HEADS + head) * 3 * CHUNK
        for chunk in range(chunks):
            at = number % STAGES
            rows = count - chunk * CHUNK
            g = gl.load(lines + i)
            beta = gl.load(lines + CHUNK + i)
            last = gl.load(lines + CHUNK - 1)
            mbarrier.wait(state_free, (number & 1) ^ 1)
            _write_parts(state, states)
            mbarrier.arrive(state_ready, count=1)
            mbarrier.wait(moved.index(at), number // STAGES & 1)
            known = _add_exact_product(k_ring.index(at), states, zero)
            value = v_ring.index(at).load(TENSOR).to(gl.float32)
            u = beta[:, None] * (value - gl.exp(g)[:, None] * known)
            u = gl.where((i < rows)[:, None], u, 0.0)  # rows of others follow, or none at all
            mbarrier.wait(u_free, (number & 1) ^ 1)
            _write_parts(u, us)
            mbarrier.arrive(u_ready, count=1)
            if rows >= CHUNK + HOLDS:
                state = _add_product(fold_ring, at, us, state * gl.exp(last))
            elif keeps:
                gates = kept_gates_ptr + (slot * HEADS + head) * 2 * RING + (base + chunk * CHUNK + i) % RING
                gl.store(gates, beta, mask=i < rows)
                gl.store(gates + RING, gl.load(lines + 2 * CHUNK + i), mask=i < rows)
            mbarrier.arrive(moved_free.index(at), count=1)
            lines += HEADS * 3 * CHUNK
            number += 1
        gl.store(own, state)


@gluon.jit
def _read(
    out_ptr,
    lines_ptr,
    rings,
    bars,
    shared,
    turns,
    walks_ptr,
    walks,
    head_columns,
    scale,
    HEADS: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute what the rows of all chunks read."""
    _k_ring, v_ring, _fold_ring, q_ring, mix_ring = rings
    _moved, _moved_free, read, read_free = bars
    states, us = shared
    state_ready, state_free, u_ready, u_free = turns
    head, _key_column, _value_column = head_columns
    TILE: gl.constexpr = v_ring.shape[2]
    TENSOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, TENSOR))
    v = gl.arange(0, TILE, layout=gl.SliceLayout(0, TENSOR))[None, :]
    zero = gl.zeros([CHUNK, TILE], gl.float32, layout=TENSOR)
    number = 0
    for walk in range(walks):
        item, chunks, row, _slot, _base, count = _load_walk(walks_ptr, walk)
        lines = lines_ptr + (item.to(gl.int64) * HEADS + head) * 3 * CHUNK
        for chunk in range(chunks):
            at = number % STAGES
            g = gl.load(lines + i)
            lines += HEADS * 3 * CHUNK
            mbarrier.wait(read.index(at), number // STAGES & 1)
            mbarrier.wait(state_ready, number & 1)
            out = _add_exact_product(q_ring.index(at), states, zero)
            mbarrier.arrive(state_free, count=1)
            out = out * (gl.exp(g) * scale)[:, None]
            mbarrier.wait(u_ready, number & 1)
            out = _add_product(mix_ring, at, us, out)
            mbarrier.arrive(u_free, count=1)
            mbarrier.arrive(read_free.index(at), count=1)
            to = ((row + chunk * CHUNK + i).to(gl.int64) * HEADS)[:, None] * DV + v
            gl.store(out_ptr + to, out, mask=(i < count - chunk * CHUNK)[:, None])
            number += 1


@gluon.jit
def walk(
    rows_desc,
    values_desc,
    mix_desc,
    fold_desc,
    walks_ptr,
    lines_ptr,
    kept_gates_ptr,
    memory_ptr,
    out_ptr,
    limit,
    scale,
    KEY_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
    HOLDS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Process the step's chunks of new rows that settle, one segment after the other, for a tile of one head's values.

    HOLDS: 1 if the last chunk of a segment does not move its state. walks: of the plan, `limit` possible ones.
    Other pointers are those of `delta.scan`. Descriptors bring 64 rows of a key head from `convolved`, 64 rows of the
    tile's values from there, and one part of mix and of fold.
    """
    TILE: gl.constexpr = values_desc.block_type.shape[1]
    DK: gl.constexpr = rows_desc.block_type.shape[1]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = gl.program_id(0) // (DV // TILE)
    tile = gl.program_id(0) % (DV // TILE) * TILE
    walks = gl.load(walks_ptr + limit * FIELDS)
    k_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, CHUNK, DK], rows_desc.layout)
    q_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, CHUNK, DK], rows_desc.layout)
    v_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, CHUNK, TILE], values_desc.layout)
    mix_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES * PARTS, CHUNK, CHUNK], mix_desc.layout)
    fold_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES * PARTS, DK, CHUNK], fold_desc.layout)
    states = gl.allocate_shared_memory(rows_desc.dtype, [PARTS, DK, TILE], values_desc.layout)
    us = gl.allocate_shared_memory(rows_desc.dtype, [PARTS, CHUNK, TILE], values_desc.layout)
    rings = (k_ring, v_ring, fold_ring, q_ring, mix_ring)
    bars = (_make_barriers(STAGES), _make_barriers(STAGES), _make_barriers(STAGES), _make_barriers(STAGES))
    one = _make_barriers(4)
    turns = (one.index(0), one.index(1), one.index(2), one.index(3))
    shared = (states, us)
    head_columns = (head, head // (HEADS // KEY_HEADS) * DK, 2 * KEY_HEADS * DK + head * DV + tile)
    memory = memory_ptr + head.to(gl.int64) * DK * DV + tile
    out = out_ptr + head * DV + tile
    descs = (rows_desc, values_desc, mix_desc, fold_desc)
    gates = kept_gates_ptr
    # Tuples stand in the call, because a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _move,
                (
                    memory,
                    lines_ptr,
                    gates,
                    rings,
                    bars,
                    shared,
                    turns,
                    walks_ptr,
                    walks,
                    head_columns,
                    tile == 0,
                    HEADS,
                    DV,
                    STAGES,
                    HOLDS,
                ),
            ),
            (
                _read,
                (out, lines_ptr, rings, bars, shared, turns, walks_ptr, walks, head_columns, scale, HEADS, DV, STAGES),
            ),
            (_bring, (descs, rings, bars, walks_ptr, walks, head_columns, KEY_HEADS * DK, HEADS, STAGES)),
        ],
        [4, 1],
        [168, 24],
    )
