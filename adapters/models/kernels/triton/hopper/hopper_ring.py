"""Rings of tiles in shared memory on Hopper, filled by bulk copies that run ahead of the computation."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from adapters.models.kernels.triton.hopper.hopper_products import bring


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr):
    """Allocate memory for STAGES tiles, and barriers that tell when each has arrived."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    ring = gl.allocate_shared_memory(desc.dtype, [STAGES, ROWS, WIDTH], desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    return ring, come


@gluon.jit
def request_tile(desc, ring, come, number, row, STAGES: gl.constexpr, pred, column=0):
    """Load tile `number` of those that this program reads, from a row and column on, to its slot of the ring."""
    at = number % STAGES
    mbarrier.expect(come.index(at), desc.block_type.nbytes, pred=pred)
    bring(desc, [row, column], come.index(at), ring.index(at), pred=pred)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, count: gl.constexpr):
    """Allocate STAGES barriers whose phases end after `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(bars.index(at), count=count)
    return bars


@gluon.jit
def fill_rings(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    bars,
    pages_ptr,
    base,
    kv_head,
    low,
    tiles,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    read=0,
):
    """Bring tiles of keys and values in order, from tile `low` on, each as soon as its slot of the ring is free.

    read: tiles that were brought before.

    bars: of keys and of values those that tell what has come, and those that tell what is free.
    """
    k_come, k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    for number in range(tiles):
        at = (low + number) * BLOCK_N
        row = base + at
        if PAGE > 0:
            row = (gl.load(pages_ptr + at // PAGE) * KV + kv_head) * PAGE + at % PAGE
        k_at = (read + number) % K_STAGES
        mbarrier.wait(k_free.index(k_at), ((read + number) // K_STAGES & 1) ^ 1)
        mbarrier.expect(k_come.index(k_at), k_desc.block_type.nbytes)
        bring(k_desc, [row, 0], k_come.index(k_at), k_ring.index(k_at))
        v_at = (read + number) % V_STAGES
        mbarrier.wait(v_free.index(v_at), ((read + number) // V_STAGES & 1) ^ 1)
        mbarrier.expect(v_come.index(v_at), v_desc.block_type.nbytes)
        bring(v_desc, [row, 0], v_come.index(v_at), v_ring.index(v_at))
