"""Matrix products with packed weights, unpacked in registers and added up in `linear`'s order.

A weight becomes step * scale - least in float32, rounded to the dtype of the computation before it is multiplied.
That is the very number that unpacking at load gives. The sums are those of `linear`: one chain over ascending k in
steps of 16. So the bits are those of products with unpacked weights, at every row count. `packed_numbers` says how
words lie.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.linear import silu_times
from adapters.models.kernels.triton.packed_numbers import weights_of
from adapters.models.kernels.triton.packed_ring import fetch_weights, read_chunk, rings_of

_silu_times = gluon.jit(silu_times.fn)


@gluon.jit
def _load_held(ptr, n, block, S: gl.constexpr, blocks, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """Load for each row the number that holds a block's groups; S selects the first or second 16 of each 32 columns."""
    if GROUP >= BLOCK:
        return gl.load(ptr + ((n // 8) * (blocks // (GROUP // BLOCK)) + block // (GROUP // BLOCK)) * 8 + n % 8)
    if GROUP * 4 >= BLOCK:
        return gl.load(ptr + ((n // 8) * blocks + block) * 8 + n % 8)
    return gl.load(ptr + ((n // 8) * (blocks * 2) + block * 2 + S) * 8 + n % 8)


@gluon.jit
def _levels(matrix, n, block, S: gl.constexpr, blocks, FORM: gl.constexpr):
    _, scale_ptr, inner_ptr, least_ptr, own_ptr = matrix
    scale = _load_held(scale_ptr, n, block, S, blocks, FORM.block, FORM.span)
    inner = scale
    least = scale
    own = scale  # never read where there are none
    if FORM.inner:
        inner = _load_held(inner_ptr, n, block, S, blocks, FORM.block, FORM.group)
    if FORM.least != "":
        least = _load_held(least_ptr, n, block, S, blocks, FORM.block, FORM.group)
    if FORM.least == "own":
        own = _load_held(own_ptr, n, block, S, blocks, FORM.block, FORM.span)
    return scale, inner, least, own


@gluon.jit
def _load(matrix, places, block, blocks, FORM: gl.constexpr):
    """Load a block of some rows in packed form. matrix: pointers to its words, scales, inner scales, minima, and
    scales of those.
    """
    n, t, c = places
    words = gl.load(matrix[0] + ((n // 8) * blocks + block) * 128 + (n % 8) * 16 + t * 4 + c)
    first = _levels(matrix, n, block, 0, blocks, FORM)
    second = first
    if FORM.group * 4 < FORM.block:
        second = _levels(matrix, n, block, 1, blocks, FORM)
    return words, first, second


@gluon.jit
def _places(n0, stop, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return rows, lanes of a row, and words; no row lies behind the last one."""
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
        n0 = n0 // 2
        columns = columns // 2
    else:
        out = acc.to(dtype)
    m = m0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    n = n0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * stride + n, out, mask=(m < rows) & (n < columns))


@gluon.jit(do_not_specialize=["rows", "blocks"])
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
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. blocks: of a row of w. stride: from one row of out to the
    next.

    A program owns BLOCK_N rows of w over the whole depth. STAGES chunks of CHUNK columns, of w and of x, are in
    shared memory or on their way there. A warp already has its words of the next chunk while it multiplies this one.
    Even and odd chunks have separate memory: otherwise the compiler puts a barrier between what is fetched into one
    and what is read from the other.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    COUNT: gl.constexpr = CHUNK // FORM.block
    GROUPS: gl.constexpr = BLOCK_N // 8
    HALF: gl.constexpr = STAGES // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [num_warps, 1, 1], [2, 1, 0])
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    group0 = n0 // 8
    groups = gl.cdiv(columns, 8)
    matrix = (words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr)
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))[:, None]
    k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))[None, :]
    even_x = gl.allocate_shared_memory(dtype, [HALF, BLOCK_M, CHUNK], SHARED)
    odd_x = gl.allocate_shared_memory(dtype, [HALF, BLOCK_M, CHUNK], SHARED)
    even_w = rings_of(matrix, CHUNK, GROUPS, HALF, FORM)
    odd_w = rings_of(matrix, CHUNK, GROUPS, HALF, FORM)
    for at in gl.static_range(STAGES):
        rings = odd_w if at % 2 else even_w
        fetch_weights(matrix, rings, at // 2, group0, groups, at * COUNT, blocks, FORM, num_warps)
    if PDL:
        gdc_wait()
    for at in gl.static_range(STAGES - 1):
        buffers = odd_x if at % 2 else even_x
        _fetch(x_ptr, buffers.index(at // 2), m, k + at * CHUNK, rows, depth)
    async_copy.wait_group(STAGES - 2)
    gl.thread_barrier()
    w = read_chunk(even_w, 0, COUNT, LANES, FORM)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    k += (STAGES - 1) * CHUNK
    here = 0
    last = HALF - 1
    for block in range(0, blocks, 2 * COUNT):
        behind = block + STAGES * COUNT
        after = (here + 1) % HALF
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        fetch_weights(matrix, even_w, here, group0, groups, behind, blocks, FORM, num_warps)
        _fetch(x_ptr, odd_x.index(last), m, k, rows, depth)
        coming = read_chunk(odd_w, here, COUNT, LANES, FORM)
        acc = _multiply_chunk(acc, even_x.index(here), w, c, FORM)
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        fetch_weights(matrix, odd_w, here, group0, groups, behind + COUNT, blocks, FORM, num_warps)
        _fetch(x_ptr, even_x.index(here), m, k + CHUNK, rows, depth)
        w = read_chunk(even_w, after, COUNT, LANES, FORM)
        acc = _multiply_chunk(acc, odd_x.index(here), coming, c, FORM)
        k += 2 * CHUNK
        here, last = after, here
    async_copy.wait_group(0)
    if PDL:  # only now: programs of the next product would crowd some processors and leave others idle
        gdc_launch_dependents()
    _store(acc, out_ptr, m0, n0, rows, columns, stride, GATED)


@gluon.jit
def _multiply_chunk(acc, x, w, c, FORM: gl.constexpr):
    """Return acc plus a chunk's products. Behind the last block x is zeros, whatever w is multiplied with them."""
    MMA: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for at in gl.static_range(x.shape[1] // FORM.block):
        part = x.slice(at * FORM.block, FORM.block, 1)
        acc = mma_v2(part.load(LEFT), weights_of(w[at], c, RIGHT, x.dtype, FORM), acc)
    return acc


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
    """Unpack rows `[first, stop)` of w to the dtype of the computation, `[stop - first, depth]`."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [num_warps, 1], [1, 0])
    n0 = gl.program_id(0) * BLOCK_N
    block = gl.program_id(1)
    places = _places(first + n0, stop, BLOCK_N, num_warps)
    packed = _load((words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr), places, block, blocks, FORM)
    found = weights_of(packed, places[2], gl.DotOperandLayout(1, MMA, 2), dtype, FORM)
    found = gl.convert_layout(found.permute((1, 0)), ROWS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ROWS))[:, None]
    k = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out_ptr + n * depth + k, found, mask=(n < stop - first) & (k < depth))
