"""The factor of a chunk for kernels that work on single rows, in fewer instructions than `delta_factor` takes.

Each program of such a kernel computes one factor and reads one row, so most of its time goes into the factor. Diagonal
blocks of 16 are inverted as quarters, of which one is zeros, and products with a half of zeros are computed for the
other half only. Each sum has the terms of `delta_factor._inverse` in the same order, so the bits are the same. That
order also depends on the fragments that Triton chooses for an operand (`_hide_origin`).

`delta_factor` keeps its own form. A prompt would gain 0.6 % from this one. For 16 rows of a chunk the assembler of CUDA
12.8, which Triton 3.6 brings, made it read a wrong address of shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adapters.models.kernels.triton.delta_factor import BLOCK, CHUNK, _product, _transpose_parts


@triton.jit
def _split_in_two(x, ONCE: tl.constexpr = False):
    """x, float32, as a sum of two bfloat16 tensors, the larger first. ONCE: the compiler may not do it again elsewhere.

    A program splits several hundred numbers a thread. One instruction converts two of them. Of numbers that are needed
    again in float32, Triton converts each by an instruction of its own, and a processor does few of these at a time.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high;
            .reg .f32 first, second;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 low, $0, 16;
            and.b32 high, $0, 0xffff0000;
            mov.b32 first, low;
            mov.b32 second, high;
            sub.rn.f32 first, $2, first;
            sub.rn.f32 second, $3, second;
            cvt.rn.bf16x2.f32 $1, second, first;
        }
        """,
        "=r,=r,f,f",
        [x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=not ONCE,
        pack=2,
    )


@triton.jit
def _split(x, PARTS: tl.constexpr, ONCE: tl.constexpr = False):
    """x as a sum of one or two bfloat16 tensors, as `delta_factor._split` takes them."""
    tl.static_assert(PARTS <= 2)
    return (x.to(tl.bfloat16),) if PARTS == 1 else _split_in_two(x.to(tl.float32), ONCE)


@triton.jit
def _hide_origin(x):
    """Return x, float32, so that Triton does not see that it was joined.

    For operands that were joined, Triton 3.6 chooses fragments of twice as many columns. These add in another
    order, and a product of 16 columns has none of them.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=False, pack=1)


@triton.jit
def _column(x, j):
    """Column j of each 8 x 8 block, repeated."""
    column = tl.arange(0, 8)[None, None, :]
    return tl.broadcast_to(tl.sum(tl.where(column == j, x, 0.0), 2)[:, :, None], (4, 8, 8))


@triton.jit
def _row(x, j):
    """Row j of each 8 x 8 block, repeated."""
    row = tl.arange(0, 8)[None, :, None]
    return tl.broadcast_to(tl.sum(tl.where(row == j, x, 0.0), 1)[:, None, :], (4, 8, 8))


@triton.jit
def _invert_diagonal(a):
    """Return the inverses of I + a's diagonal blocks of 16, `[4, 16, 16]`, by forward substitution.

    A block is computed as its quarters, of which one is zeros. The order of sums is that of whole blocks.
    """
    one = tl.arange(0, 4)[:, None, None, None]
    other = tl.arange(0, 4)[None, None, :, None]
    blocks = tl.sum(tl.where(one == other, tl.reshape(a, (4, 16, 4, 16)), 0.0), 2)
    left, right = tl.split(tl.permute(tl.reshape(blocks, (4, 2, 8, 2, 8)), (0, 2, 4, 1, 3)))
    upper, lower = tl.split(left)
    _, last = tl.split(right)
    eye = tl.where(tl.arange(0, 8)[None, :, None] == tl.arange(0, 8)[None, None, :], 1.0, 0.0)
    none = tl.zeros((4, 8, 8), tl.float32)
    upper_left = tl.broadcast_to(eye, (4, 8, 8))
    lower_left = none
    lower_right = upper_left
    for j in tl.static_range(8):
        done = _row(upper_left, j)
        lower_left = lower_left - _column(lower, j) * done
        if j < 7:
            upper_left = upper_left - _column(upper, j) * done
    for j in tl.static_range(7):
        below = _column(last, j)
        done = _row(lower_left, j)
        lower_left = lower_left - below * done
        lower_right = lower_right - below * _row(lower_right, j)
    left = tl.join(upper_left, lower_left)
    right = tl.join(none, lower_right)
    return tl.reshape(tl.permute(tl.join(left, right), (0, 3, 1, 4, 2)), (4, 16, 16))


@triton.jit
def _halve(x):
    """Return the left and the right 32 columns of x."""
    return tl.split(tl.permute(tl.reshape(x, (CHUNK, 2, CHUNK // 2)), (0, 2, 1)))


@triton.jit
def _unite(left, right):
    """Return what `_halve` has halved."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (CHUNK, CHUNK))


@triton.jit
def _unite_parts(left, right, PARTS: tl.constexpr):
    parts = ()
    for n in tl.static_range(PARTS):
        parts = parts + (_unite(left[n], right[n]),)  # noqa: RUF005
    return parts


@triton.jit
def _join_blocks(a, found, rows, PARTS: tl.constexpr):
    """Return the inverse of I + a's diagonal blocks of 32, `[64, 64]`. found: those of 16."""
    one = tl.arange(0, 4)[:, None, None, None]
    other = tl.arange(0, 4)[None, None, :, None]
    is_below = (other == one - 1) & (one % 2 == 1)
    below = tl.zeros((4, BLOCK, BLOCK), tl.float32)
    if rows > BLOCK:  # otherwise no pair has a second block
        apart = tl.sum(tl.where(is_below, tl.reshape(a, (4, BLOCK, 4, BLOCK)), 0.0), 2)
        is_first = tl.arange(0, 2)[None, :, None, None] == 0
        first = tl.sum(tl.where(is_first, tl.reshape(found, (2, 2, BLOCK, BLOCK)), 0.0), 1)
        first = tl.reshape(tl.broadcast_to(first[:, None, :, :], (2, 2, BLOCK, BLOCK)), (4, BLOCK, BLOCK))
        zero = tl.zeros((4, BLOCK, BLOCK), tl.float32)
        inner = _product(_split(apart, PARTS), _split(first, PARTS), zero, PARTS, PARTS, PARTS)
        below = below - _product(_split(found, PARTS), _split(inner, PARTS), zero, PARTS, PARTS, PARTS)
    shape: tl.constexpr = (4, BLOCK, 4, BLOCK)
    t = tl.where(is_below, tl.broadcast_to(below[:, :, None, :], shape), 0.0)
    t = tl.where(one == other, tl.broadcast_to(found[:, :, None, :], shape), t)
    return tl.reshape(t, (CHUNK, CHUNK))


@triton.jit
def _inverse(a, rows, PARTS: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower triangular a, as its left and right halves: forward substitution in
    diagonal blocks, then in pairs of blocks. Rows of `a` from `rows` on are zeros.
    """
    left, right = _halve(_join_blocks(a, _hide_origin(_invert_diagonal(a)), rows, PARTS))
    if rows > CHUNK // 2:
        half: tl.constexpr = CHUNK // 2
        zero = tl.zeros((CHUNK, half), tl.float32)
        nothing = _split(zero, PARTS)
        first, _ = _halve(a)
        apart = _split(tl.where(tl.arange(0, CHUNK)[:, None] >= half, first, 0.0), PARTS)
        inner = _product(_unite_parts(apart, nothing, PARTS), _split(left, PARTS), zero, PARTS, PARTS, PARTS)
        second = _unite_parts(nothing, _split(right, PARTS), PARTS)
        left = left - _product(second, _split(inner, PARTS), zero, PARTS, PARTS, PARTS)
    return left, right


@triton.jit
def _factor_rows(k, k_turned, g, beta, rows, INPUTS: tl.constexpr, PARTS: tl.constexpr):
    """Return the halves of the factor T of a chunk that has this many rows."""
    i = tl.arange(0, CHUNK)
    decay = tl.exp(g[:, None] - g[None, :])  # above the diagonal it may be infinite, and is not used
    kk = _product(k, k_turned, tl.zeros((CHUNK, CHUNK), tl.float32), INPUTS, INPUTS, PARTS)
    return _inverse(tl.where(i[:, None] > i[None, :], beta[:, None] * decay * kk, 0.0), rows, PARTS)


@triton.jit
def _mix_row(query_ptr, k, g, g_own, beta, old, scale, DK: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr):
    """Return the query of row `old` of a chunk in parts, and its row of P T in parts, each repeated in 16 rows.

    k: the chunk's keys in parts. g: its sums of decays. g_own: that of row `old`. The smallest product has 16 rows,
    which are all the one row that reads.
    """
    i = tl.arange(0, CHUNK)
    exists = i <= old
    k_turned = _transpose_parts(k, INPUTS)
    left, right = _factor_rows(k, k_turned, g, beta, old + 1, INPUTS, PARTS)
    t_parts = _split(_hide_origin(_unite(left, right)), PARTS)
    q = _split(tl.broadcast_to(tl.load(query_ptr)[None, :], (BLOCK, DK)), INPUTS)
    decayed = tl.where(exists, tl.exp(tl.where(exists, g_own - g, 0.0)), 0.0)
    none = tl.zeros((BLOCK, CHUNK), tl.float32)
    p = decayed[None, :] * (_product(q, k_turned, none, INPUTS, INPUTS, PARTS) * scale)
    return q, _split(_product(_split(p, PARTS), t_parts, none, PARTS, PARTS, PARTS), PARTS)
