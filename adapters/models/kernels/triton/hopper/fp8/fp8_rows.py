"""Rows quantised to E4M3 in groups of 128 columns, each with its own scale."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SIDE = gl.constexpr(128)  # columns of a group, and rows and columns of a block of a weight
_LARGEST = gl.constexpr(448.0)  # number of E4M3
_TINY = gl.constexpr(1e-10)  # in place of a smaller largest number, so that rows of zeros have a scale


@gluon.jit
def quantise_groups(x):
    """Return groups `[groups, SIDE]` in E4M3 and their scales in float32."""
    numbers = x.to(gl.float32)
    most = gl.maximum(gl.max(gl.abs(numbers), 1), _TINY)
    LANES: gl.constexpr = most.type.layout
    largest = gl.full([most.shape[0]], _LARGEST, gl.float32, layout=LANES)
    return (numbers * gl.div_rn(largest, most)[:, None]).to(gl.float8e4nv), most * (1.0 / _LARGEST)


@gluon.jit
def quantise_rows(x_ptr, out_ptr, scales_ptr, columns, x_stride, stride, PDL: gl.constexpr, num_warps: gl.constexpr):
    """Quantise rows to `[rows, columns]`, scales to `[columns / 128, stride]`. A program has 4 groups of each warp."""
    EACH: gl.constexpr = 4 * num_warps
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = gl.program_id(0)
    group = gl.program_id(1) * EACH + gl.arange(0, EACH, layout=gl.SliceLayout(1, LANES))
    k = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LANES))
    here = group < columns // SIDE
    at = group[:, None] * SIDE + k[None, :]
    x = gl.load(x_ptr + row * x_stride + at, mask=here[:, None], other=0.0)
    codes, scales = quantise_groups(x)
    gl.store(out_ptr + row * columns + at, codes, mask=here[:, None])
    gl.store(scales_ptr + group * stride + row, scales, mask=here)
