"""Matrix products with packed weights: unpacked in registers, and added up in `linear`'s order.

A weight becomes step * scale - least in float32, rounded to what is computed in, before it is multiplied: the very
number that unpacking at load gives. The sums are those of `linear`: one chain over ascending k in steps of 16. So the
bits are those of products with unpacked weights, at every row count.

Words lie as the registers of the tensor cores want their numbers, so nothing moves between lanes: lane t of four has,
of every 16 columns of its row, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and takes four words at once. What lanes are at is
`[rows, 4 lanes, 4 words]`; a block is the columns of a row's words.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.linear import silu_times

_silu_times = gluon.jit(silu_times.fn)


@frozen
class BlockForm:
    """How a packed matrix lies, as `StepLayout` has it. scale: Triton's dtype. block: columns of one."""

    steps: str
    block: int
    group: int
    span: int
    scale: Any
    inner: bool
    least: str

    @property
    def width(self) -> int:
        """Bits of a step, once it has been looked up."""
        return 4 if self.steps in {"uint4", "int4"} else 8


@gluon.jit
def _number(word, AT: gl.constexpr, FORM: gl.constexpr):
    """What step AT of a word stands for, float32, exactly; of E4M3 2 ** -120 of that.

    Whole numbers are put into the mantissa of a power of two, which is subtracted again.
    """
    if FORM.steps == "e4m3":
        # Sign, exponent and mantissa go where float32 has them; subnormal numbers come out right, too.
        return (((word << (24 - 8 * AT)) >> 4) & -0x78100000).to(gl.float32, bitcast=True)
    WIDTH: gl.constexpr = FORM.width
    SHIFT: gl.constexpr = 0 if (AT + 1) * WIDTH <= 23 else 12 if WIDTH == 4 else 16
    PLACE: gl.constexpr = AT * WIDTH - SHIFT
    MASK: gl.constexpr = ((1 << WIDTH) - 1) << PLACE
    OFFSET: gl.constexpr = 128 if WIDTH == 8 else 8 if FORM.steps == "int4" else 0
    if SHIFT > 0:
        word = word >> SHIFT
    bits = _masked(word, MASK, (127 + 23 - PLACE) << 23)
    return bits.to(gl.float32, bitcast=True) - (2.0 ** (23 - PLACE) + OFFSET)


@gluon.jit
def _masked(word, MASK: gl.constexpr, BITS: gl.constexpr):
    """word & MASK | BITS in one instruction, where the compiler takes two."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,n,r", [word, MASK, BITS], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _looked_up(word):
    """A byte for each of a word's lower four steps: what IQ4's table has there, and 128."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 place, low, high, from;
        and.b32 place, $1, 0x7777;
        prmt.b32 low, 0x3f2d1801, 0x766a5d4f, place;
        prmt.b32 high, 0xa6998d81, 0xf1d9c5b5, place;
        and.b32 from, $1, 0x8888;
        shr.u32 from, from, 1;
        or.b32 from, from, 0x3210;
        prmt.b32 $0, low, high, from;
        }""",
        "=r,r",
        [word],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _held(ptr, n, block, S: gl.constexpr, blocks, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """Of each row the number in which those of a block's groups are; S: of each 32 columns the first or second 16."""
    if GROUP >= BLOCK:
        return gl.load(ptr + n * (blocks // (GROUP // BLOCK)) + block // (GROUP // BLOCK))
    if GROUP * 4 >= BLOCK:
        return gl.load(ptr + n * blocks + block)
    return gl.load(ptr + n * (blocks * 2) + block * 2 + S)


@gluon.jit
def _of_word(held, c, BLOCK: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """That of each word's group, float32."""
    if GROUP < BLOCK:
        COUNT: gl.constexpr = 2 if GROUP * 2 == BLOCK else 4
        held = held >> (c * COUNT // 4 * KIND.primitive_bitwidth).to(held.dtype)
        held = held.to(gl.int16 if KIND.is_floating() else KIND)
        if KIND.is_floating():
            held = held.to(KIND, bitcast=True)
    return held.to(gl.float32)


@gluon.jit
def _levels(matrix, n, block, S: gl.constexpr, blocks, FORM: gl.constexpr):
    _, scale_ptr, inner_ptr, least_ptr, own_ptr = matrix
    scale = _held(scale_ptr, n, block, S, blocks, FORM.block, FORM.span)
    inner, least, own = scale, scale, scale  # never read where there are none
    if FORM.inner:
        inner = _held(inner_ptr, n, block, S, blocks, FORM.block, FORM.group)
    if FORM.least != "":
        least = _held(least_ptr, n, block, S, blocks, FORM.block, FORM.group)
    if FORM.least == "own":
        own = _held(own_ptr, n, block, S, blocks, FORM.block, FORM.span)
    return scale, inner, least, own


@gluon.jit
def _load(matrix, places, block, blocks, FORM: gl.constexpr):
    """A block of some rows, as it is packed. matrix: pointers to its words, scales, inner ones, what is least, and the
    scales of that.
    """
    n, t, c = places
    words = gl.load(matrix[0] + ((n // 8) * blocks + block) * 128 + (n % 8) * 16 + t * 4 + c)
    first = _levels(matrix, n, block, 0, blocks, FORM)
    second = first
    if FORM.group * 4 < FORM.block:
        second = _levels(matrix, n, block, 1, blocks, FORM)
    return words, first, second


@gluon.jit
def _chunk(matrix, places, block, blocks, COUNT: gl.constexpr, FORM: gl.constexpr):
    """So many blocks from this one on, none of them behind the last."""
    found = (_load(matrix, places, gl.minimum(block, blocks - 1), blocks, FORM),)
    for more in gl.static_range(1, COUNT):
        found = found + (_load(matrix, places, gl.minimum(block + more, blocks - 1), blocks, FORM),)  # noqa: RUF005
    return found


@gluon.jit
def _scales(levels, c, FORM: gl.constexpr):
    """What steps are multiplied with, and what is subtracted then."""
    scale, inner, least, own = levels
    outer = _of_word(scale, c, FORM.block, FORM.span, FORM.scale)
    factor, below = outer, outer
    if FORM.inner:
        factor = outer * _of_word(inner, c, FORM.block, FORM.group, gl.int8)
    if FORM.least == "own":
        below = _of_word(own, c, FORM.block, FORM.span, FORM.scale)
    if FORM.least != "":
        below = below * _of_word(least, c, FORM.block, FORM.group, gl.int8)
    return factor, below


@gluon.jit
def _value(word, AT: gl.constexpr, scales, FORM: gl.constexpr):
    factor, below = scales
    found = _number(word, AT, FORM) * factor
    if FORM.least != "":
        found = found - below
    return found


@gluon.jit
def _four(word, AT: gl.constexpr, scales, FORM: gl.constexpr):
    """A word's numbers of 16 columns: ..., one of a pair, half of the 16."""
    FIRST: gl.constexpr = 0 if FORM.steps == "iq4" else AT
    if FORM.steps == "iq4":
        word = _looked_up(word >> (4 * AT))
    low = gl.join(_value(word, FIRST, scales, FORM), _value(word, FIRST + 1, scales, FORM))
    return gl.join(low, gl.join(_value(word, FIRST + 2, scales, FORM), _value(word, FIRST + 3, scales, FORM)))


@gluon.jit
def _weights(packed, c, LAYOUT: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr):
    """A loaded block as `[block, rows]` of what is computed in, laid out as the right side of a product."""
    words, first, second = packed
    found = _four(words, 0, _scales(first, c, FORM), FORM)
    if FORM.block == 128:
        found = gl.join(found, _four(words, 4, _scales(second, c, FORM), FORM))
        found = found.permute((0, 2, 5, 4, 1, 3))
    else:
        found = found.permute((0, 2, 4, 1, 3))
    found = found.reshape((words.shape[0], FORM.block)).permute((1, 0))
    return gl.convert_layout(found, LAYOUT, assert_trivial=True).to(dtype)


@gluon.jit
def _places(n0, stop, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Rows, lanes of a row and words; no row is behind the last."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [WARPS, 1, 1], [2, 1, 0])
    n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    return gl.minimum(n, stop - 1), t, c


@gluon.jit
def _fetch(x_ptr, buffer, m, k, rows, depth):
    async_copy.async_copy_global_to_shared(buffer, x_ptr + m * depth + k, mask=(m < rows) & (k < depth))
    async_copy.commit_group()


@gluon.jit
def _store(acc, out_ptr, m0, n0, rows, columns, stride, GATED: gl.constexpr):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape((acc.shape[0], acc.shape[1] // 2, 2)))
        out = _silu_times(gate, up, dtype)
        n0, columns = n0 // 2, columns // 2
    else:
        out = acc.to(dtype)
    m = m0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    n = n0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * stride + n, out, mask=(m < rows) & (n < columns))


@gluon.jit(do_not_specialize=["rows"])
def packed_narrow(
    words_ptr,
    scale_ptr,
    inner_ptr,
    least_ptr,
    own_ptr,
    x_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    blocks,
    stride,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[rows, columns] = x @ w.T for few rows. blocks: of a row of w. stride: from one row of out to the next.

    A program owns BLOCK_N rows of w over the whole depth. CHUNK columns of them and of x are on their way while those
    before them are multiplied.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    COUNT: gl.constexpr = CHUNK // FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    matrix = (words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr)
    places = _places(n0, columns, BLOCK_N, num_warps)
    c = places[2]
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))[:, None]
    k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))[None, :]
    buffers = gl.allocate_shared_memory(dtype, [2, BLOCK_M, CHUNK], SHARED)
    w = _chunk(matrix, places, 0, blocks, COUNT, FORM)
    if PDL:
        gdc_wait()
    _fetch(x_ptr, buffers.index(0), m, k, rows, depth)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    for block in range(0, blocks, COUNT):
        x = buffers.index(block // COUNT % 2)
        k += CHUNK
        # Loads stay in front of the barrier, long before anything waits for them; else the compiler puts them last.
        coming = _chunk(matrix, places, block + COUNT, blocks, COUNT, FORM)
        async_copy.wait_group(0)
        gl.thread_barrier()
        _fetch(x_ptr, buffers.index(1 - block // COUNT % 2), m, k, rows, depth)
        for at in gl.static_range(COUNT):  # behind the last block x is zeros, whatever w is multiplied with them
            part = x.slice(at * FORM.block, FORM.block, 1)
            acc = mma_v2(part.load(LEFT), _weights(w[at], c, RIGHT, dtype, FORM), acc)
        w = coming
    async_copy.wait_group(0)
    if PDL:
        gdc_launch_dependents()
    _store(acc, out_ptr, m0, n0, rows, columns, stride, GATED)


@gluon.jit
def unpack(
    words_ptr,
    scale_ptr,
    inner_ptr,
    least_ptr,
    own_ptr,
    out_ptr,
    first,
    stop,
    depth,
    blocks,
    BLOCK_N: gl.constexpr,
    FORM: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Rows `[first, stop)` of w as what is computed in, `[stop - first, depth]`."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [num_warps, 1], [1, 0])
    n0 = gl.program_id(0) * BLOCK_N
    block = gl.program_id(1)
    places = _places(first + n0, stop, BLOCK_N, num_warps)
    packed = _load((words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr), places, block, blocks, FORM)
    found = _weights(packed, places[2], gl.DotOperandLayout(1, MMA, 2), dtype, FORM)
    found = gl.convert_layout(found.permute((1, 0)), ROWS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ROWS))[:, None]
    k = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out_ptr + n * depth + k, found, mask=(n < stop - first) & (k < depth))
