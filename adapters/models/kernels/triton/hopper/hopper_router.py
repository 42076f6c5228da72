"""Products of few rows with a router's weight on Hopper (compute capability 9.0), in pieces of columns.

A router has few columns of output, so a chain over its whole depth keeps few processors busy, one step after the other.
Here a sum has as many chains as a program has warps, side by side. The sums are those of `hopper_pieces`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.packed import add_pieces, store_narrow


@gluon.jit(do_not_specialize=["rows"])
def route_few(
    w_ptr,
    x_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    stride,
    PIECE: gl.constexpr,
    STEP: gl.constexpr,
    HELD: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. stride: from one row of out to the next.

    A program has 16 rows of w and eight of x, and each warp a piece of PIECE columns. Weights depend on no kernel of
    this step, so HELD steps of STEP columns are loaded while the kernels before still run.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    PIECES: gl.constexpr = num_warps
    STEPS: gl.constexpr = PIECE // STEP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    gl.static_assert(PIECE % STEP == 0)
    n0 = gl.program_id(0) * 16
    m0 = gl.program_id(1) * 8
    first = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None] * PIECE
    n = n0 + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    k = first + gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    held = ()
    for step in gl.static_range(HELD):
        column = k + step * STEP
        inside = (n < columns) & (column < depth)
        held = held + (gl.load(w_ptr + n * depth + column, mask=inside, other=0.0),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    of_x = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None] * PIECE
    x_k = of_x + gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    m = m0 + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    right = ()
    for step in gl.static_range(STEPS):
        column = x_k + step * STEP
        inside = (m < rows) & (column < depth)
        right = right + (gl.load(x_ptr + m.to(gl.int64) * depth + column, mask=inside, other=0.0),)  # noqa: RUF005
    acc = gl.zeros([PIECES, 16, 8], gl.float32, layout=MMA)
    for step in gl.static_range(STEPS):
        if step < HELD:
            w = held[step]
        else:
            column = k + step * STEP
            w = gl.load(w_ptr + n * depth + column, mask=(n < columns) & (column < depth), other=0.0)
        acc = mma_v2(w, right[step], acc)
    store_narrow(add_pieces(acc, num_warps), out_ptr, n0, m0, rows, columns, stride, dtype, 0)
