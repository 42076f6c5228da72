"""Chunks of packed weights on their way into shared memory, and from there into registers.

A ring has room for some chunks of words and of each kind of levels. Its slots are filled by asynchronous copies and
read as `packed` reads memory: a block's words, and the levels of its groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def _ring(ptr, LENGTH: gl.constexpr, COUNT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate room for STAGES times COUNT numbers of each row, eight rows side by side; for words LENGTH is 128."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return gl.allocate_shared_memory(ptr.dtype.element_ty, [STAGES, COUNT, GROUPS, LENGTH], LAYOUT)


@gluon.jit
def _fetch_numbers(ptr, buffer, group0, groups, first, limit, num_warps: gl.constexpr):
    """Fetch numbers `[first, first + COUNT)` of each row, of `limit`; for rows behind the last group those of the
    last one.
    """
    COUNT: gl.constexpr = buffer.shape[0]
    GROUPS: gl.constexpr = buffer.shape[1]
    LENGTH: gl.constexpr = buffer.shape[2]
    EACH: gl.constexpr = min(LENGTH, 128 // ptr.dtype.element_ty.primitive_bitwidth)
    ACROSS: gl.constexpr = LENGTH // EACH  # threads that have eight rows' numbers
    DOWN: gl.constexpr = min(32 // ACROSS, GROUPS)
    WARPS: gl.constexpr = [1, num_warps, 1] if DOWN * num_warps <= GROUPS else [num_warps, 1, 1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, EACH], [32 // ACROSS // DOWN, DOWN, ACROSS], WARPS, [2, 1, 0])
    number = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    group = group0 + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    within = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    at = (gl.minimum(group, groups - 1) * limit + number) * LENGTH + within
    async_copy.async_copy_global_to_shared(buffer, ptr + at, mask=number < limit)


@gluon.constexpr_function
def _count(columns, block, group):
    """Return how many numbers of a row cover this many columns, where a block's groups share one or two numbers."""
    if group >= block:
        return max(1, columns // group)
    return columns // block * (1 if group * 4 >= block else 2)


@gluon.constexpr_function
def _share(block, group):
    """Return how many blocks one number serves."""
    return max(1, group // block)


@gluon.jit
def rings_of(matrix, CHUNK: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr):
    words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr = matrix
    words = _ring(words_ptr, 128, CHUNK // FORM.block, GROUPS, STAGES)
    scale = _ring(scale_ptr, 8, _count(CHUNK, FORM.block, FORM.span), GROUPS, STAGES)
    inner = scale
    least = scale
    own = scale  # never read where there are none
    if FORM.inner:
        inner = _ring(inner_ptr, 8, _count(CHUNK, FORM.block, FORM.group), GROUPS, STAGES)
    if FORM.least != "":
        least = _ring(least_ptr, 8, _count(CHUNK, FORM.block, FORM.group), GROUPS, STAGES)
    if FORM.least == "own":
        own = _ring(own_ptr, 8, _count(CHUNK, FORM.block, FORM.span), GROUPS, STAGES)
    return words, scale, inner, least, own


@gluon.jit
def _fetch_levels(
    ptr, ring, slot, group0, groups, block, blocks, BLOCK: gl.constexpr, GROUP: gl.constexpr, num_warps: gl.constexpr
):
    """Fetch the levels of the same chunk, one for each group of GROUP columns, as `_levels` reads them."""
    SHARE: gl.constexpr = _share(BLOCK, GROUP)
    TIMES: gl.constexpr = 1 if GROUP * 4 >= BLOCK else 2
    _fetch_numbers(ptr, ring.index(slot), group0, groups, block // SHARE * TIMES, blocks // SHARE * TIMES, num_warps)


@gluon.jit
def fetch_weights(matrix, rings, slot, group0, groups, block, blocks, FORM: gl.constexpr, num_warps: gl.constexpr):
    """Fetch the chunk from this block on in packed form; data behind the last block is zeros."""
    words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr = matrix
    words, scale, inner, least, own = rings
    _fetch_numbers(words_ptr, words.index(slot), group0, groups, block, blocks, num_warps)
    _fetch_levels(scale_ptr, scale, slot, group0, groups, block, blocks, FORM.block, FORM.span, num_warps)
    if FORM.inner:
        _fetch_levels(inner_ptr, inner, slot, group0, groups, block, blocks, FORM.block, FORM.group, num_warps)
    if FORM.least != "":
        _fetch_levels(least_ptr, least, slot, group0, groups, block, blocks, FORM.block, FORM.group, num_warps)
    if FORM.least == "own":
        _fetch_levels(own_ptr, own, slot, group0, groups, block, blocks, FORM.block, FORM.span, num_warps)


@gluon.jit
def _read_held(
    ring, slot, AT: gl.constexpr, S: gl.constexpr, LANES: gl.constexpr, BLOCK: gl.constexpr, GROUP: gl.constexpr
):
    """Read as `_load_held` does, for block AT of a chunk in the ring."""
    NUMBER: gl.constexpr = AT // _share(BLOCK, GROUP) * (1 if GROUP * 4 >= BLOCK else 2) + S
    COUNT: gl.constexpr = ring.shape[1]
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = ring._reinterpret(ring.dtype, (ring.shape[0] * COUNT, ring.shape[2] * 8), LINE)  # noqa: SLF001
    return flat.index(slot * COUNT + NUMBER).load(gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]


@gluon.jit
def _read_levels(rings, slot, AT: gl.constexpr, SECOND: gl.constexpr, LANES: gl.constexpr, FORM: gl.constexpr):
    _, scale_ring, inner_ring, least_ring, own_ring = rings
    S_OUTER: gl.constexpr = SECOND if FORM.span * 4 < FORM.block else 0
    scale = _read_held(scale_ring, slot, AT, S_OUTER, LANES, FORM.block, FORM.span)
    inner = scale
    least = scale
    own = scale
    if FORM.inner:
        inner = _read_held(inner_ring, slot, AT, SECOND, LANES, FORM.block, FORM.group)
    if FORM.least != "":
        least = _read_held(least_ring, slot, AT, SECOND, LANES, FORM.block, FORM.group)
    if FORM.least == "own":
        own = _read_held(own_ring, slot, AT, S_OUTER, LANES, FORM.block, FORM.span)
    return scale, inner, least, own


@gluon.jit
def _read_block(rings, slot, AT: gl.constexpr, LANES: gl.constexpr, FORM: gl.constexpr):
    """Read as `_load` does, for block AT of a chunk that has arrived."""
    ring = rings[0]
    COUNT: gl.constexpr = ring.shape[1]
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    cubes = ring._reinterpret(ring.dtype, (ring.shape[0] * COUNT, ring.shape[2] * 8, 4, 4), CUBE)  # noqa: SLF001
    words = cubes.index(slot * COUNT + AT).load(LANES)
    first = _read_levels(rings, slot, AT, 0, LANES, FORM)
    second = first
    if FORM.group * 4 < FORM.block:
        second = _read_levels(rings, slot, AT, 1, LANES, FORM)
    return words, first, second


@gluon.jit
def read_chunk(rings, slot, COUNT: gl.constexpr, LANES: gl.constexpr, FORM: gl.constexpr):
    found = (_read_block(rings, slot, 0, LANES, FORM),)
    for more in gl.static_range(1, COUNT):
        found = found + (_read_block(rings, slot, more, LANES, FORM),)  # noqa: RUF005
    return found
