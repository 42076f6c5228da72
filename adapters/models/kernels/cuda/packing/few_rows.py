"""Products of up to 64 rows with packed weights on any GPU, unpacked in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.tiles import count_parts
from adapters.models.kernels.triton import packed
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

_WARPS = 8  # of a program with pieces: one for each
_AHEAD = 256  # columns that each warp loads ahead
_LOW = 16  # rows of the weight that a program with pieces has
_ROOMY = 200 << 10  # bytes of shared memory


@frozen
class PackedTile:
    """Rows of x and of the weight that a program has, blocks of the weight that each warp loads ahead, and warps.

    registers: the most of a thread; None: as many as the compiler likes.
    """

    rows: int
    columns: int
    ahead: int
    warps: int = _WARPS
    registers: int | None = None


def choose_packed_tile(count: int, weight: CudaPackedMatrix, processors: int, shared: int) -> PackedTile:
    """Choose the tile of a packed product of this many rows. processors: of the device. shared: bytes of shared memory
    that a program may have.

    A thread's registers hold the words that are on their way, so their number is given: the compiler would take fewer
    and request words later. 32 rows of eight pieces need more shared memory than small GPUs have.
    """
    rows = 8 if count <= 8 else 16 if count <= 16 or (weight.pieces > 1 and shared < _ROOMY) else 32
    block = weight.block_form.block
    if weight.pieces == 1:
        return PackedTile(rows, 64, _AHEAD // block if rows <= 16 else 2, warps=4, registers=168)
    if rows == 8 and saves_round(count_parts(weight.outputs, _LOW), processors):
        return PackedTile(rows, _LOW, 1, registers=80)
    return PackedTile(rows, _LOW, _AHEAD // block, registers=128 if rows <= 16 else None)


def saves_round(programs: int, processors: int) -> bool:
    """Return whether programs of 80 registers run in fewer rounds than those of 128.

    A processor has 65,536 registers. So it has two programs of 256 threads with 128 registers at a time, and three with
    80, which request half as many words ahead. With 132 processors and 6,144 outputs, the last of 384 programs would
    have to wait until others have ended.
    """
    return count_parts(programs, 3 * processors) < count_parts(programs, 2 * processors)


def multiply_narrow(
    x: Tensor, weight: CudaPackedMatrix, out: Tensor, tile: PackedTile, *, gated: int, pdl: bool | None
) -> None:
    grid = (count_parts(weight.outputs, tile.columns), count_parts(len(x), tile.rows))
    form = weight.block_form
    each = weight.piece // form.block
    sizes = (len(x), weight.outputs, weight.columns, weight.blocks, each, out.stride(0))
    constants = {
        "PIECES": weight.pieces,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "AHEAD": tile.ahead,
        "EVEN": weight.columns == weight.pieces * weight.piece and each % tile.ahead == 0,
        "FORM": form,
        "GATED": gated,
    }
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    launch(packed.packed_narrow, grid, *weight.tensors, x, out, *sizes, **constants, **options)
