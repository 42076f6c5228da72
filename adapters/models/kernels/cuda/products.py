"""Launches of products with weights that are not packed, and with parts of packed weights that have been unpacked."""

from __future__ import annotations

import torch
from attrs import define
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options
from adapters.models.kernels.cuda.tiles import (
    FITTED,
    Cut,
    choose_tile_ahead,
    choose_tile_in_pieces,
    choose_tile_of_tall_rows,
    count_parts,
    cut_columns,
    fits_processors,
    limit_stages,
    round_up_to_power,
)
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.triton import linear
from adapters.models.kernels.triton.hopper import hopper_pieces
from adapters.models.kernels.triton.hopper import hopper_products as hopper
from adapters.models.kernels.triton.hopper.hopper_router import route_few
from adapters.models.kernels.triton.hopper.many_rows import fitted_tiles
from adapters.models.kernels.triton_launch import launch

_STEP = 64  # columns that a warp of `route_few` loads at once
_HELD = 4  # such steps that it loads ahead, at most
_STAGES_BESIDE = 3  # that fit into the memory of a processor that has one program of two of another kernel


@define
class CudaProducts:
    """Products of one device. hopper: its compute capability is 9.0. Its other kernels give the same bits.

    plain: kernels get pointers in place of descriptors; see `linear.load_tile`.
    """

    processors: int
    shared: int
    pdl: bool | None
    hopper: bool
    plain: bool

    def multiply(
        self, x: Tensor, w: Tensor, out: Tensor, *, gated: int, piece: int = 0, is_beside: bool = False
    ) -> None:
        """Write x @ w.T to out. gated: see `CudaWeight`. piece: columns of which the sum is one chain, whatever the
        number of rows; 0: all. is_beside: the kernel before this one lets the next one run at the same time. out: of
        the type of x, or float32 if `can_widen` says so.
        """
        if self.hopper and piece:
            self._multiply_pieces_ahead(x, w, out, gated=gated, piece=piece)
        elif self.hopper and len(x) <= NARROW and x.dtype != torch.float32:
            self._multiply_ahead(x, w, out, gated=gated, is_beside=is_beside)
        elif self.hopper and not gated and fits_processors(len(x), len(w), x.dtype, self.processors):
            self._multiply_fitted(x, w, out)
        else:
            self._multiply_anywhere(x, w, out, gated=gated, piece=piece)

    def can_widen(self, x: Tensor) -> bool:
        """Return whether products of these rows can be written as float32, once they are rounded to the type of x."""
        return self.hopper and len(x) <= NARROW and x.dtype != torch.float32

    def route(self, x: Tensor, w: Tensor, out: Tensor, piece: int) -> None:
        """Write x @ w.T to out for a router's weight, whose sums have pieces of so many columns."""
        if not self.hopper or len(x) > NARROW:
            self.multiply(x, w, out, gated=0, piece=piece)
            return
        (count, depth) = x.shape
        columns = w.shape[0]
        warps = max(4, round_up_to_power(count_parts(depth, piece)))
        options = launch_options(warps, self.pdl) | {"PIECE": piece, "STEP": _STEP, "HELD": min(piece // _STEP, _HELD)}
        grid = (count_parts(columns, 16), count_parts(count, 8))
        launch(route_few, grid, w, x, out, count, columns, depth, out.stride(0), **options)

    def _multiply_anywhere(self, x: Tensor, w: Tensor, out: Tensor, *, gated: int, piece: int) -> None:
        if piece:
            cuts: tuple[Cut, ...] = (Cut(choose_tile_in_pieces(x.dtype, self.shared), 0, len(w)),)
        else:
            cuts = cut_columns(len(x), len(w), gated, x.dtype, self.processors, self.shared)
        for cut in cuts:
            part = w[cut.first : cut.first + cut.columns]
            self._multiply_cut(x, part, out[:, cut.first // 2 if gated else cut.first :], cut, gated=gated, piece=piece)

    def _multiply_cut(self, x: Tensor, w: Tensor, out: Tensor, cut: Cut, *, gated: int, piece: int) -> None:
        """Write the products with a part of a weight's rows to a part of the columns of out."""
        (count, depth) = x.shape
        columns = cut.columns
        tile = cut.tile
        x_desc = x.contiguous() if self.plain else TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        w_desc = w if self.plain else TensorDescriptor.from_tensor(w, [tile.columns, tile.depth])
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        shape = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "STAGES": tile.stages}
        options = launch_options(tile.warps, self.pdl) | {"GATED": gated, "PRECISION": precision, "PLAIN": self.plain}
        sizes = (count, columns, depth, out.stride(0))
        if count <= NARROW and not piece:
            grid = (count_parts(columns, tile.columns), count_parts(count, tile.rows))
            launch(linear.linear_narrow, grid, w_desc, x_desc, out, *sizes, **shape, **options)
        else:
            options |= {"GROUP": 8 if gated else 4, "IN_PIECES": piece > 0}
            grid = (count_parts(count, tile.rows) * count_parts(columns, tile.columns), 1)
            launch(linear.linear_wide, grid, x_desc, w_desc, out, piece, *sizes, **shape, **options)

    def _multiply_pieces_ahead(self, x: Tensor, w: Tensor, out: Tensor, *, gated: int, piece: int) -> None:
        (count, depth) = x.shape
        columns = w.shape[0]
        tile = choose_tile_in_pieces(x.dtype, self.shared)
        grid = (min(count_parts(count, tile.rows) * count_parts(columns, tile.columns), self.processors),)
        descriptors = describe_blocks(x, tile.rows, tile.depth), describe_blocks(w, tile.columns, tile.depth)
        sizes = (count, columns, depth, piece, out.stride(0))
        options = launch_options(4, self.pdl) | {"STAGES": tile.stages, "GROUP": 8, "GATED": gated}
        options["PIECES"] = count_parts(depth, piece)
        launch(hopper_pieces.linear_pieces, grid, *descriptors, out, *sizes, **options)

    def _multiply_fitted(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        """Multiply with tiles of a block of columns and a narrower one."""
        (count, depth) = x.shape
        columns = w.shape[0]
        tile = limit_stages(FITTED, x.dtype, self.shared)
        wide = 1 << (tile.columns.bit_length() - 1)
        blocks = (tile.rows, x), (wide, w), (tile.columns - wide, w)
        descriptors = (describe_blocks(matrix, rows, tile.depth) for rows, matrix in blocks)
        grid = (count_parts(count, tile.rows) * count_parts(columns, tile.columns),)
        options = launch_options(tile.warps, self.pdl) | {"STAGES": tile.stages}
        launch(fitted_tiles.linear_fitted, grid, *descriptors, out, count, columns, depth, out.stride(0), **options)

    def _multiply_ahead(self, x: Tensor, w: Tensor, out: Tensor, *, gated: int, is_beside: bool) -> None:
        (count, depth) = x.shape
        columns = w.shape[0]
        tall = choose_tile_of_tall_rows(count, columns, depth, x.dtype, self.processors, self.shared)
        tile = tall or choose_tile_ahead(count, x.dtype, self.shared)
        grid = (count_parts(columns, tile.columns), count_parts(count, tile.rows))
        descriptors = describe_blocks(w, tile.columns, tile.depth), describe_blocks(x, tile.rows, tile.depth)
        stages = min(tile.stages, _STAGES_BESIDE) if is_beside else tile.stages
        options = launch_options(tile.warps, self.pdl) | {"STAGES": stages, "GATED": gated, "BESIDE": is_beside}
        options |= {"TALL_ROWS": tall is not None}
        launch(hopper.linear_ahead, grid, *descriptors, out, count, columns, depth, out.stride(0), **options)
