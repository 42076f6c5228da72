"""Products of many rows in FP8 on Hopper (compute capability 9.0).

The product of a group of 128 columns is one chain of four instructions from zero, in the tensor cores. It is multiplied
with the scales of the rows and of the block of the weight, and added to the sum in float32 by one rounding, group after
group. So no order of sums depends on a tile.

One warp brings boxes of x and w to rings in shared memory. Each of two consumers multiplies its rows of x and does not
wait for the other: while one adds a group, the tensor cores work for the other one. A program computes tile after tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.fp8.fp8_rows import SIDE
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.packed import apply_gate

HEIGHT = gl.constexpr(64)  # rows of an instruction


@gluon.jit
def _locate(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """Return the tile of rows and the tile of columns of a tile. GROUP tiles of rows follow each other."""
    group = tile // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return group * GROUP + within % height, within // height


@gluon.jit
def _fill(
    x_desc, w_desc, x_ring, w_ring, come, free, first, step_tiles, row_tiles, column_tiles, groups,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Bring all groups of columns of all tiles in order, each as soon as its slot of the rings is free."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    step = 0
    for tile in range(first, row_tiles * column_tiles, step_tiles):
        m, n = _locate(tile, row_tiles, column_tiles, GROUP)
        for group in range(groups):
            at = step % STAGES
            mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
            mbarrier.expect(come.index(at), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            bring(x_desc, [m * ROWS, group * SIDE], come.index(at), x_ring.index(at))
            bring(w_desc, [n * SIDE, group * SIDE], come.index(at), w_ring.index(at))
            step += 1


@gluon.jit
def _add_group(total, product, rows, first, second):
    """Add a group's product, multiplied with the scales of rows, and of both halves of a block of w."""
    n = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))[None, :]
    scale = gl.where(n < HEIGHT, (rows * first)[:, None], (rows * second)[:, None])
    return gl.fma(product, scale, total)


@gluon.jit
def _store(total, out_ptr, m0, n, rows, stride, GATED: gl.constexpr):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(total.reshape((HEIGHT, 2, HEIGHT)).permute((0, 2, 1)))
        out = apply_gate(gate, up, dtype, GATED)
    else:
        out = total.to(dtype)
    row = m0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    column = n * out.shape[1] + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + row.to(gl.int64) * stride + column, out, mask=(row < rows) & (column >= 0))


@gluon.jit
def _consume(
    out_ptr, xs_ptr, ws_ptr, x_ring, w_ring, come, free, first, step_tiles, row_tiles, column_tiles, groups, rows,
    xs_stride, apart, stride, NUMBER: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Compute consumer NUMBER's rows of every tile: one or two times HEIGHT."""
    ROWS: gl.constexpr = x_ring.shape[1]
    HALVES: gl.constexpr = ROWS // 2 // HEIGHT
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HEIGHT, 32])
    i = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, MMA))
    nothing = gl.zeros([HEIGHT, 2 * HEIGHT], gl.float32, layout=MMA)
    step = 0
    for tile in range(first, row_tiles * column_tiles, step_tiles):
        m, n = _locate(tile, row_tiles, column_tiles, GROUP)
        m0 = m * ROWS + NUMBER * (ROWS // 2)
        n0 = n * (HEIGHT if GATED else SIDE)
        own = xs_ptr + m0 + i
        first_scales = ws_ptr + n0 // SIDE * groups
        second_scales = ws_ptr + (n0 + apart) // SIDE * groups
        top = gl.zeros([HEIGHT, 2 * HEIGHT], gl.float32, layout=MMA)
        bottom = top
        for group in range(groups):
            at = step % STAGES
            top_rows = gl.load(own + group * xs_stride, mask=m0 + i < rows, other=0.0)
            if HALVES == 2:
                bottom_rows = gl.load(own + group * xs_stride + HEIGHT, mask=m0 + HEIGHT + i < rows, other=0.0)
            one = gl.load(first_scales + group)
            two = gl.load(second_scales + group)
            mbarrier.wait(come.index(at), step // STAGES & 1)
            w = w_ring.index(at).permute((1, 0))
            left = x_ring.index(at).slice(NUMBER * (ROWS // 2), HEIGHT, 0)
            begun = warpgroup_mma(left, w, nothing, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
            if HALVES == 2:
                top = _add_group(top, product, top_rows, one, two)
                left = x_ring.index(at).slice(NUMBER * (ROWS // 2) + HEIGHT, HEIGHT, 0)
                begun = warpgroup_mma(left, w, nothing, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
                mbarrier.arrive(free.index(at), count=1)
                bottom = _add_group(bottom, product, bottom_rows, one, two)
            else:
                mbarrier.arrive(free.index(at), count=1)
                top = _add_group(top, product, top_rows, one, two)
            step += 1
        _store(top, out_ptr, m0, n, rows, stride, GATED)
        if HALVES == 2:
            _store(bottom, out_ptr, m0 + HEIGHT, n, rows, stride, GATED)


@gluon.jit(do_not_specialize=["rows"])
def multiply_wide(
    x_desc, w_desc, xs_ptr, ws_ptr, out_ptr, rows, columns, groups, apart, xs_stride, stride,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute out[rows, columns] = x @ w.T for many rows. stride: from one row of out to the next.

    x_desc: boxes of 128 or 256 rows. w_desc: of 128. xs_ptr: `[groups, xs_stride]`. ws_ptr: `[columns / 128, groups]`.
    apart: rows of the scales of a gate. GATED: rows of w are 64 of a gate and 64 of what it gates in turn, its scales
    first those of the gate, and out has half of the columns.
    """
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    row_tiles = gl.cdiv(rows, ROWS)
    column_tiles = columns // SIDE
    first = gl.program_id(0)
    step_tiles = gl.num_programs(0)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, SIDE], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, SIDE, SIDE], w_desc.layout)
    come = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_ptr, xs_ptr, ws_ptr, x_ring, w_ring, come, free, first, step_tiles, row_tiles, column_tiles,
                    groups, rows, xs_stride, apart, stride, 0, STAGES, GROUP, GATED,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, xs_ptr, ws_ptr, x_ring, w_ring, come, free, first, step_tiles, row_tiles, column_tiles,
                    groups, rows, xs_stride, apart, stride, 1, STAGES, GROUP, GATED,
                ),
            ),
            (
                _fill,
                (
                    x_desc, w_desc, x_ring, w_ring, come, free, first, step_tiles, row_tiles, column_tiles, groups,
                    STAGES, GROUP,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
