"""Packed weights on CUDA: which stay packed, how they lie on the device, and how they are multiplied.

Few rows are multiplied by kernels that unpack in registers. For many rows it is cheaper to unpack a part of the
weight once and to multiply with that. The memory of the part is reused for the next one. On Hopper, some formats are
unpacked in registers there, too. All ways add up columns in the same pieces, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import torch
import triton
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental.gluon import language as gl

from adapters.checkpoint.packed_matrix import PackedMatrix, StackedWeight, StepLayout
from adapters.models.kernels.activations import GATES
from adapters.models.kernels.cuda import packed_ahead
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.fp8.fp8_products import CudaFp8Matrix, Fp8Products
from adapters.models.kernels.cuda.packing.few_rows import choose_packed_tile, multiply_narrow
from adapters.models.kernels.cuda.packing.many_rows import multiply_wide
from adapters.models.kernels.cuda.packing.part_rows import PartScratch, has_parts, multiply_parts
from adapters.models.kernels.formats.packed_formats import block_columns, has_packed_kernel
from adapters.models.kernels.formats.packed_words import SIDE, arrange_words
from adapters.models.kernels.triton import packed
from adapters.models.kernels.triton.packed_levels import LARGEST_SCALE, BlockForm
from adapters.models.kernels.triton_launch import launch

SCRATCH_BYTES = 128 << 20  # for unpacked weights: a whole one, or pieces that keep every processor busy
PIECES = 8  # into which columns are cut; another number, or another FEW, is another numerics version
FEW = 16384  # outputs; a matrix with fewer is cut into pieces, because its programs are too few for a GPU
_IN_PIECES = FEW  # the most outputs of weights in pieces
_ALIGNED = 128  # a piece has a multiple of so many columns: whole blocks, and whole steps of wide products
NARROW_PACKED = 64  # rows that are multiplied without unpacking the weight first
_WIDEST = 256  # columns of whole tiles of every wide product
_TILES = 8  # tiles of rows that a chunk of 1,024 has
_PIECE = 1 << 24  # steps that are rearranged together
# The largest scales that are kept. Those of E2M1 are powers of two. Of 2 ** 127 times their numbers the exponent is
# stored as bfloat16 has it, its last bit first. Those of E4M3 are stored 2 ** 120 times as great on devices without
# instructions for it. Those of whole steps are stored as they are, and multiplied with great powers of two.
_LARGEST = {"e4m3": 2.0**7, "e2m1": 1.0, "uint4": LARGEST_SCALE, "int4": LARGEST_SCALE, "int8": LARGEST_SCALE}
_EXPONENT = 0x7F80  # the bits of bfloat16 that are its exponent
_NUMBERS = {"uint8": gl.uint8, "float16": gl.float16, "bfloat16": gl.bfloat16, "float32": gl.float32}
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@frozen(eq=False)
class CudaPackedMatrix:
    """A packed matrix as `triton/packed.py` reads it, or those of all experts of a layer, one behind the other.

    columns: of x; the words may have zeros behind them. levels: int32 `[rows / 8, columns / 128, planes, 8]`, as
    `arrange_levels` makes them.
    """

    layout: StepLayout
    outputs: int
    columns: int
    words: Tensor
    levels: Tensor
    converts_e4m3: bool

    @property
    def blocks(self) -> int:
        return self.words.shape[-2]

    @property
    def pieces(self) -> int:
        """The number of chains of which a sum consists."""
        return PIECES if self.outputs < FEW else 1

    @property
    def piece(self) -> int:
        """The columns of a piece. The last pieces may have fewer or none."""
        return -(-self.columns // self.pieces // _ALIGNED) * _ALIGNED

    @property
    def tensors(self) -> list[Tensor]:
        return [self.words, self.levels]

    @property
    def block_form(self) -> BlockForm:
        return form_of(self.layout, converts_e4m3=self.converts_e4m3)


Packed: TypeAlias = CudaPackedMatrix | CudaFp8Matrix


@frozen(eq=False)
class CudaStack:
    """A weight made of parts, one below the other, at least one of them packed. gated: see `CudaWeight`; there is one
    part then. widths: outputs of each part.
    """

    parts: tuple[Any, ...]
    widths: tuple[int, ...]
    gated: int = 0


def find_only_part(weight: Any) -> CudaPackedMatrix | None:
    """Return the packed matrix that a weight consists of; None for other weights."""
    part = weight.parts[0] if isinstance(weight, CudaStack) and len(weight.parts) == 1 else None
    return part if isinstance(part, CudaPackedMatrix) else None


class Multiply(Protocol):
    """A product with a weight `[N, K]` that is not packed. gated: see `CudaWeight`. piece: columns of which the sum is
    one chain; 0: all. is_beside: see `CudaProducts.multiply`.
    """

    def __call__(
        self, x: Tensor, w: Tensor, out: Tensor, *, gated: int, piece: int = 0, is_beside: bool = False
    ) -> None: ...


@define(eq=False)
class CudaPacking:
    """Packs and multiplies weights of one device. Its scratch memory is kept for good, because recorded graphs hold
    its address. converts_e4m3, hopper: see `CudaCapability`.
    """

    device: torch.device
    processors: int
    shared: int
    pdl: bool | None
    converts_e4m3: bool
    hopper: bool
    _scratch: Tensor | None = field(init=False, default=None)
    _parts: PartScratch | None = field(init=False, default=None)
    _fp8: Fp8Products = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._fp8 = Fp8Products(self.device, self.processors, self.shared, self.pdl, self.hopper)

    def pack_stack(self, stack: StackedWeight, plain: Callable[[Tensor], Any]) -> CudaStack | None:
        """Return the packed stack, or None where it is to be unpacked. plain: packs a part that is not packed."""
        joined = stack.merge_parts()
        parts = [
            self._pack_matrix(part, stack.dtype) if isinstance(part, PackedMatrix) else None for part in joined.parts
        ]
        if all(part is None for part in parts):
            return None
        filled = list[Any]()
        widths = list[int]()
        for is_plain, group in groupby(zip(parts, joined.parts, strict=True), lambda pair: pair[0] is None):
            each = list(group)
            if is_plain:  # neighbours are one product
                rows = torch.cat([joined.unpack_part(part) for _, part in each])
                each = [(plain(rows), rows)]
            filled += [own for own, _ in each]
            widths += [part.shape[0] for _, part in each]
        return CudaStack(tuple(filled), tuple(widths))

    def pack_gated(self, stack: StackedWeight, activation: str) -> CudaStack | None:
        """Return a gate and what it gates, packed alike, or None where they are to be unpacked."""
        gate, up = stack.parts
        if not isinstance(gate, PackedMatrix) or not isinstance(up, PackedMatrix) or gate.layout != up.layout:
            return None
        if (whole := self._fp8.pack_gated(gate, up, stack.dtype)) is not None:
            return CudaStack((whole,), (whole.outputs,), GATES[activation])
        pairs = zip(gate.tensors, up.tensors, strict=True)
        both = (None if one is None or two is None else torch.stack((one, two), 1).flatten(0, 1) for one, two in pairs)
        own = self._pack_matrix(PackedMatrix(gate.layout, *both), stack.dtype)  # type: ignore[arg-type]
        return None if own is None else CudaStack((own,), (own.outputs,), GATES[activation])

    def _pack_matrix(self, matrix: PackedMatrix, dtype: torch.dtype) -> Packed | None:
        if (whole := self._fp8.pack(matrix, dtype)) is not None:
            return whole
        if not has_packed_kernel(matrix.layout, matrix.shape[1], dtype):
            return None
        if self._scratch is None:
            self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)
        if self._parts is None and self.hopper:
            self._parts = PartScratch.allocate(_IN_PIECES, PIECES, self.device)
        return pack_steps(matrix, self.device, converts_e4m3=self.converts_e4m3)

    def multiply(self, x: Tensor, weight: CudaStack, plain: Multiply) -> Tensor:
        """Return the product. Parts that are not packed are small. They come last, and run at the same time as the one
        before if that can be.
        """
        share = 2 if weight.gated else 1
        out = x.new_empty(len(x), sum(weight.widths) // share)
        places = zip(weight.parts, torch.split(out, [width // share for width in weight.widths], 1), strict=True)
        plain_last = sorted(places, key=lambda place: not isinstance(place[0], Packed))
        is_beside = False
        for part, columns in plain_last:
            if isinstance(part, Packed):
                more = not isinstance(plain_last[-1][0], Packed)
                is_beside = self._multiply_part(x, part, columns, plain, gated=weight.gated, is_late=more)
            else:
                plain(x, part.weight, columns, gated=0, is_beside=is_beside)
        return out

    def _multiply_part(
        self, x: Tensor, part: Packed, out: Tensor, plain: Multiply, *, gated: int, is_late: bool
    ) -> bool:
        """Return whether the next kernel may run at the same time, which is_late asks for."""
        if isinstance(part, CudaFp8Matrix):
            self._fp8.multiply(x, part, out, gated=gated)
            return False
        tile = packed_ahead.choose_row_tile(x, part, self.processors, self.shared) if self.hopper else None
        if tile is not None:
            is_late = is_late and tile.stages > 0
            packed_ahead.multiply_row(x, part, out, tile, gated=gated, pdl=self.pdl, is_late=is_late)
            return is_late
        if self.hopper and packed_ahead.comes_ahead(len(x), part, x.dtype):
            packed_ahead.multiply_ahead(x, part, out, gated=gated, pdl=self.pdl)
        elif self.hopper and has_parts(len(x), part, x.dtype):
            assert self._parts is not None
            multiply_parts(x, part, out, self._parts, gated=gated, pdl=self.pdl)
        elif len(x) <= NARROW_PACKED:
            narrow = choose_packed_tile(len(x), part, self.processors, self.shared)
            multiply_narrow(x, part, out, narrow, gated=gated, pdl=self.pdl)
        else:
            self._multiply_wide(x, part, out, plain, gated=gated)
        return False

    def _multiply_wide(self, x: Tensor, weight: CudaPackedMatrix, out: Tensor, plain: Multiply, *, gated: int) -> None:
        if self.hopper and multiply_wide(x, weight, out, self.processors, gated=gated, pdl=self.pdl):
            return
        assert self._scratch is not None
        share = 2 if gated else 1
        piece = weight.piece if weight.pieces > 1 else 0
        whole = self._scratch.view(x.dtype)
        # As many outputs as keep every processor busy once. They are still in the L2 cache when they are multiplied.
        most = min(self.processors // _TILES, len(whole) // weight.columns // _WIDEST) * _WIDEST
        for first in range(0, weight.outputs, most):
            stop = min(first + most, weight.outputs)
            part = whole[: (stop - first) * weight.columns].view(stop - first, weight.columns)
            unpack_rows(weight, first, part, self.pdl)
            plain(x, part, out[:, first // share : stop // share], gated=gated, piece=piece)


def pack_steps(matrix: PackedMatrix, device: torch.device, *, converts_e4m3: bool) -> CudaPackedMatrix | None:
    """Arrange a packed matrix for which there are kernels; None for scales that are too great."""
    layout = matrix.layout
    (rows, columns) = matrix.shape
    scale = matrix.scale
    converts = layout.steps == "e4m3" and converts_e4m3
    if layout.steps in _LARGEST and float(scale.abs().max()) > _LARGEST[layout.steps]:
        return None
    if layout.steps == "e2m1":
        raised = (scale * 2.0**127).view(torch.int16)
        if bool((raised & ~_EXPONENT).any()):
            return None  # not a power of two
        layout = evolve(layout, scale="uint8")
        scale = ((raised >> 8) | (raised & 0x80)).to(torch.uint8)
    if layout.steps == "e4m3":
        layout = evolve(layout, scale="float32")
        scale = scale.float() * (1.0 if converts else 2.0**120)
    step = max(1, _PIECE // columns // SIDE)
    words = torch.empty(-(-rows // SIDE), -(-columns // block_columns(layout)), 128, dtype=torch.int32, device=device)
    for first in range(0, len(words), step):
        piece = matrix.steps[first * SIDE : (first + step) * SIDE].to(device)
        words[first : first + step].copy_(arrange_words(piece, layout))
    whole = evolve(matrix, layout=layout, scale=scale)
    levels = arrange_levels(whole, form_of(layout, converts_e4m3=converts), device)
    return CudaPackedMatrix(layout, rows, columns, words, levels, converts)


def form_of(layout: StepLayout, *, converts_e4m3: bool) -> BlockForm:
    levels = (layout.group, layout.span, _NUMBERS[layout.scale], layout.inner, layout.least)
    return BlockForm(layout.steps, block_columns(layout), *levels, converts_e4m3)


def arrange_levels(matrix: PackedMatrix, form: BlockForm, device: torch.device) -> Tensor:
    """Arrange all levels as int32 `[rows / 8, columns / 128, planes, 8]`, those of 128 columns together.

    Whole numbers are stored 128 greater. Where a block has numbers for each 16 columns, those of the first 16 of each
    32 come first.
    """
    rows, columns = matrix.shape
    records = -(-columns // _ALIGNED)
    found = torch.zeros(-(-rows // SIDE) * SIDE, records, form.planes * 4, dtype=torch.uint8, device=device)
    at = 0
    for name, (bits, count) in form.level_sizes.items():
        level = getattr(matrix, name).to(device)
        level = level ^ -128 if level.dtype == torch.int8 else level
        if name in {"scale", "own"}:
            level = level.repeat_interleave(max(1, form.span // _ALIGNED), 1)
        level = pad(level.view(_WHOLE[level.itemsize]), (0, records * count - level.shape[1]))
        if form.find_share(name).is_twofold:
            level = level.view(rows, -1, 4, 2).transpose(2, 3)
        size = bits * count // 8
        found[:rows, :, at : at + size] = level.reshape(rows, records, count).view(torch.uint8)
        at += size
    return found.view(torch.int32).view(-1, SIDE, records, form.planes).permute(0, 2, 3, 1).contiguous()


def unpack_rows(weight: CudaPackedMatrix, first: int, out: Tensor, pdl: bool | None) -> None:
    """Unpack as many rows as out has, from row `first` on, rounded to out's dtype."""
    grid = (triton.cdiv(len(out), 64), weight.blocks)
    sizes = (first, first + len(out), weight.columns, weight.blocks)
    launch(
        packed.unpack, grid, *weight.tensors, out, *sizes, BLOCK_N=64, FORM=weight.block_form, **launch_options(4, pdl)
    )
