"""Products of many pairs of rows and experts on Hopper (compute capability 9.0), with weights that stay packed.

The sums are those of `packed_groups.multiply_many`. What differs is who does what, as in `hopper_packed_wide`: two
consumers have 64 rows of the weight each and unpack them in registers, and one warp brings the rows of x. It brings
them in bulk, because rows are first gathered in the order of their experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_packed_wide import fill_ring, multiply_blocks
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.hopper.many_rows.left_side import HEIGHT, load_packed, unpack_block
from adapters.models.kernels.triton.packed import lanes_of, locate_piece, restore
from adapters.models.kernels.triton.packed_groups import matrix_of, store_pairs


@gluon.jit(do_not_specialize=["pairs", "rows"])
def gather_rows(
    x_ptr,
    pairs_ptr,
    out_ptr,
    pairs,
    rows,
    depth,
    SHARE: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[i] = x[pairs[i] // SHARE]. Behind the pairs of all experts are any numbers, and rows of no use.

    A warp has BLOCK columns of a row. It first waits for the tiles, and only then lets the product start: kernels
    behind the product read the choice of experts, or tiles, before they wait.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    m = gl.program_id(0) * num_warps + gl.arange(0, num_warps, layout=gl.SliceLayout(1, LANES))[:, None]
    k = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LANES))[None, :]
    row = gl.load(pairs_ptr + m, mask=m < pairs, other=0) // SHARE
    row = gl.maximum(gl.minimum(row, rows - 1), 0).to(gl.int64)
    found = gl.load(x_ptr + row * depth + k, mask=k < depth)
    gl.store(out_ptr + m.to(gl.int64) * depth + k, found, mask=(m < pairs) & (k < depth))


@gluon.jit
def _consume(
    matrix,
    out_ptr,
    own_pairs,
    ring,
    come,
    free,
    n0,
    count,
    columns,
    blocks,
    steps,
    each,
    NUMBER: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Compute consumer NUMBER's rows of the weight for the pairs of a tile. steps: blocks that are multiplied. each:
    blocks of a piece.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LANES: gl.constexpr = lanes_of(1, 4, HEIGHT)
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    own = n0 + NUMBER * HEIGHT
    coordinates = locate_piece(own, columns, HEIGHT, LANES)
    held = load_packed(matrix, coordinates, 0, blocks, FORM, False)
    w = unpack_block(held, coordinates, (0, 0, 0), 0, NUMBER, dtype, FORM, LEFT, False)
    held = load_packed(matrix, coordinates, 1, blocks, FORM, False)
    total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    whole = steps // each * each
    for first in range(0, whole, each):
        acc, w, held = multiply_blocks(
            first, first + each, w, held, matrix, coordinates, ring, come, free, (0, 0, 0), blocks, 0, 0, NUMBER, dtype,
            FORM, MMA, STAGES, PARTS, False,
        )  # fmt: skip
        total = total + acc
    for first in range(whole, steps, each):  # a last piece with fewer blocks
        acc, w, held = multiply_blocks(
            first, steps, w, held, matrix, coordinates, ring, come, free, (0, 0, 0), blocks, 0, 0, NUMBER, dtype, FORM,
            MMA, STAGES, 1, False,
        )  # fmt: skip
        total = total + acc
    out = gl.convert_layout(restore(total, dtype, FORM).to(dtype), PAIRS)  # gates round their inputs like this as well
    store_pairs(out, out_ptr, own_pairs, own, count, columns, GATED, 0)


@gluon.jit(do_not_specialize=["blocks", "each"])
def multiply_many_ahead(
    words_ptr,
    levels_ptr,
    x_desc,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    words_apart,
    levels_apart,
    columns,
    blocks,
    each,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute out[pairs[i]] = x[i] @ w[slot].T for tiles of pairs. x_desc: rows of x in the order of `pairs`.

    A program has one tile of pairs and 128 rows of the expert's weight. Of STAGES blocks of x one is multiplied, and
    the others are on their way. A program behind the last tile has no steps. blocks, each, PARTS: as in `packed_wide`.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    across = gl.cdiv(columns, 2 * HEIGHT)
    tile = gl.program_id(0) // across
    n0 = gl.program_id(0) % across * (2 * HEIGHT)
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, FORM.block], x_desc.layout)
    come = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_used = tile < gl.load(total_ptr)
    at = tiles_ptr + tile * 4
    slot = gl.load(at, mask=is_used, other=0)
    first = gl.load(at + 1, mask=is_used, other=0)
    count = gl.load(at + 2, mask=is_used, other=0)
    steps = gl.where(is_used, blocks, 0)
    matrix = matrix_of(words_ptr, levels_ptr, words_apart, levels_apart, slot)
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    matrix, out_ptr, pairs_ptr + first, ring, come, free, n0, count, columns, blocks, steps, each, 0,
                    FORM, GATED, STAGES, PARTS,
                ),
            ),
            (
                _consume,
                (
                    matrix, out_ptr, pairs_ptr + first, ring, come, free, n0, count, columns, blocks, steps, each, 1,
                    FORM, GATED, STAGES, PARTS,
                ),
            ),
            (fill_ring, (x_desc, ring, come, free, first, steps, 0, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
