"""Matrix products in Triton whose sums run in one order at every row count.

Every output element is one chain: k rises from 0 in steps of 16 (one tensor-core instruction each), the products of a
step are added to a float32 accumulator, and the total is rounded once. Tiles cut rows and columns, never k. So the
tile that computes an element, its position in the tile and the number of rows cannot change the element's bits. Neither
does it matter which operand is the tall one, nor which instruction multiplies. On an H200 `wgmma` and `mma.sync` gave
the same bits for every product tried. Where a device differs, the numerics probe finds it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def apply_gate(gate, up, dtype: tl.constexpr, GATE: tl.constexpr):
    """Return what a gate lets through of `up`. Products are rounded to `dtype` first, as a product without a gate is.

    GATE: a number of `activations.GATES`. The results of SiLU and GELU are rounded before they are multiplied. The
    approximation of GELU by tanh is x * sigmoid(1.6 (x + 0.045 x^3)). A sum of a product and a number is an `fma`, so
    that every kernel rounds it alike.
    """
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if GATE == 1:
        found = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    elif GATE == 2:
        bent = tl.fma(gate * gate * gate, 0.044715, gate)
        found = (gate / (1.0 + tl.exp(bent * -1.5957691216057308))).to(dtype).to(tl.float32) * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        found = gate / (1.0 + tl.exp(gate * -1.702)) * (up + 1.0)
    return found.to(dtype)


@triton.jit
def load_tile(source, row, k, rows, depth, ROWS: tl.constexpr, WIDTH: tl.constexpr, PLAIN: tl.constexpr):
    """Load a tile of a matrix `[rows, depth]` from (row, k) on, with zeros behind its ends.

    source: a descriptor, or if PLAIN the pointer to the matrix. Devices without bulk copies take pointers: there the
    compiler makes short loads of a descriptor, which it cannot request ahead.
    """
    if PLAIN:
        r = row + tl.arange(0, ROWS)
        c = k + tl.arange(0, WIDTH)
        inside = (r < rows)[:, None] & (c < depth)[None, :]
        return tl.load(source + r.to(tl.int64)[:, None] * depth + c[None, :], inside, 0.0)
    else:  # noqa: RET505 - one of the two is compiled
        return source.load([row, k])


@triton.jit(do_not_specialize=["rows"])
def linear_narrow(
    w_desc,
    x_desc,
    out_ptr,
    rows,
    columns,
    depth,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. Reading w once is the limit, so the weights are the tall
    operand.

    stride: from one row of out to the next. PLAIN: see `load_tile`. GATED: 0, or as in `apply_gate`, and rows of gates
    and of what they let through alternate in w.

    One program owns BLOCK_N weight rows over the whole depth. All programs stream their weights at the same time.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n0 = tl.program_id(0) * BLOCK_N
    m0 = tl.program_id(1) * BLOCK_M
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        w = load_tile(w_desc, n0, k, columns, depth, BLOCK_N, BLOCK_K, PLAIN)
        x = load_tile(x_desc, m0, k, rows, depth, BLOCK_M, BLOCK_K, PLAIN)
        acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
    if PDL:
        gdc_launch_dependents()
    m = m0 + tl.arange(0, BLOCK_M)
    if GATED:
        gate, up = tl.split(acc.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        width = columns // 2
        out = apply_gate(gate, up, dtype, GATED)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        width = columns
        out = acc.to(dtype)
    at = m.to(tl.int64)[None, :] * stride + n[:, None]
    tl.store(out_ptr + at, out, mask=(m < rows)[None, :] & (n < width)[:, None])


@triton.jit(do_not_specialize=["rows"])
def linear_wide(
    x_desc,
    w_desc,
    out_ptr,
    piece,
    rows,
    columns,
    depth,
    stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    IN_PIECES: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. Arithmetic is the limit; groups of row tiles share weights
    in L2.

    IN_PIECES: every `piece` columns, a multiple of BLOCK_K, are a chain of their own, as in `packed`.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = min(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * BLOCK_N
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IN_PIECES:
        for first in range(0, depth, piece):
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in tl.range(first, tl.minimum(first + piece, depth), BLOCK_K, num_stages=STAGES):
                x = load_tile(x_desc, m0, k, rows, depth, BLOCK_M, BLOCK_K, PLAIN)
                w = load_tile(w_desc, n0, k, columns, depth, BLOCK_N, BLOCK_K, PLAIN)
                part = tl.dot(x, w.T, part, input_precision=PRECISION)
            acc += part
    else:
        for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            x = load_tile(x_desc, m0, k, rows, depth, BLOCK_M, BLOCK_K, PLAIN)
            w = load_tile(w_desc, n0, k, columns, depth, BLOCK_N, BLOCK_K, PLAIN)
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
    if PDL:
        gdc_launch_dependents()
    m = m0 + tl.arange(0, BLOCK_M)
    if GATED:
        gate, up = tl.split(acc.reshape(BLOCK_M, BLOCK_N // 2, 2))
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        width = columns // 2
        out = apply_gate(gate, up, dtype, GATED)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        width = columns
        out = acc.to(dtype)
    at = m.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(out_ptr + at, out, mask=(m < rows)[:, None] & (n < width)[None, :])
