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
def request_tile(desc, ring, come, number, row, STAGES: gl.constexpr, pred):
    """Load tile `number` of those that this program reads to its slot of the ring."""
    at = number % STAGES
    mbarrier.expect(come.index(at), desc.block_type.nbytes, pred=pred)
    bring(desc, [row, 0], come.index(at), ring.index(at), pred=pred)
