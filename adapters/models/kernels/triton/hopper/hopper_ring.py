"""Rings of tiles in shared memory on Hopper, filled by bulk copies that run ahead of the computation."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from adapters.models.kernels.triton.hopper.hopper_products import bring

everybody_here = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 has renamed it


@gluon.jit
def make_barriers(STAGES: gl.constexpr, count: gl.constexpr):
    """Allocate STAGES barriers. A phase of one ends after `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(bars.index(at), count=count)
    return bars


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr):
    """Allocate memory for STAGES tiles, and barriers that tell when each has arrived."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    ring = gl.allocate_shared_memory(desc.dtype, [STAGES, ROWS, WIDTH], desc.layout)
    return ring, make_barriers(STAGES, 1)


@gluon.jit
def request_tile(desc, ring, come, number, row, STAGES: gl.constexpr, pred):
    """Load tile `number` of those that this program reads to its slot of the ring."""
    at = number % STAGES
    mbarrier.expect(come.index(at), desc.block_type.nbytes, pred=pred)
    bring(desc, [row, 0], come.index(at), ring.index(at), pred=pred)
