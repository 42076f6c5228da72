"""A packed matrix of a quantised folder, stored as several tensors. It is unpacked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, check_levels, choose_piece_size, find_group_size
from adapters.checkpoint.quantised.packed_grid import Grid, build_grid
from adapters.checkpoint.quantised.quantisation_config import Awq, Gptq, Int32Words, Packing, ScaledBlocks
from adapters.checkpoint.safetensors_folder import Fetch, TensorEntry


@frozen
class PackedTensor:
    """A packed matrix. parts: its stored tensors, by the last part of their names. dtype: that of `read`'s result."""

    packing: Packing
    parts: Mapping[str, TensorEntry]
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def files(self) -> Mapping[Path, int]:
        return {file: header for part in self.parts.values() for file, header in part.files.items()}

    @property
    def packing_name(self) -> str:
        return str(self.packing)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return tuple(self.parts.values())

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        """Return the unpacked matrix. name: for error messages.

        The packed parts are read whole and unpacked in pieces, so that float32 needs little memory.
        """
        file = next(iter(self.parts.values())).file
        found = self._read_grid(name, fetch)
        tensor = torch.empty(self.shape, dtype=self.dtype, device=found.scale.device)
        step = max(8, choose_piece_size(tensor.device) // self.shape[1] // 8 * 8)
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            tensor[start:stop].copy_(found.unpack_rows(start, stop))
        check_finite(tensor, file, name)
        return tensor

    @property
    def layout(self) -> StepLayout | None:
        """The packed layout, or None.

        The columns of a group must be neighbours, and multiplying must not round anything that `read` does not round.
        """
        packing = self.packing
        dtypes = {part: entry.dtype for part, entry in self.parts.items()}
        size = find_group_size(packing.columns if isinstance(packing, ScaledBlocks) else packing.group, self.shape[1])
        if not size or not self._has_groups_in_turn(size):
            return None
        if isinstance(packing, ScaledBlocks):
            rounds_rows = packing.rounds_rows and packing.rows == packing.columns == size
            own = name_dtype(dtypes[packing.scale])
            return StepLayout("e4m3" if packing.floating else "int8", size, scale=own, rounds_rows=rounds_rows)
        scale = dtypes["weight_scale" if isinstance(packing, Int32Words) else "scales"]
        if scale == torch.float32:  # step * scale - zero * scale would be rounded twice
            return None
        zeros = isinstance(packing, Awq | Gptq) or packing.zeros
        steps = "int8" if packing.bits == 8 else "uint4" if zeros else "int4"
        return StepLayout(steps, size, scale=name_dtype(scale), least="scale" if zeros else "")

    def _has_groups_in_turn(self, size: int) -> bool:
        """Return whether each group consists of neighbours. size: the columns of a group.

        Tools for GPTQ write the group of each column whether or not they have reordered columns.
        """
        return all(
            are_groups_in_turn(entry, size, entry.file.stat().st_mtime_ns)
            for part, entry in self.parts.items()
            if part.endswith("g_idx")
        )

    def read_packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:
        """Return a tensor that has a layout, packed. Its parts are only rearranged."""
        layout = self.layout
        file = next(iter(self.parts.values())).file
        assert layout is not None
        return check_levels(self._read_grid(name, fetch).to_packed(layout, self.shape[0]), file, name)

    def _read_grid(self, name: str, fetch: Fetch) -> Grid:
        """Read all parts of the matrix, and return its steps with their scales. name: of the matrix, for messages.

        Raises CheckpointError for numbers that no such matrix has.
        """
        module = name.removesuffix(".weight")
        file = next(iter(self.parts.values())).file
        parts = {part: fetch(entry, f"{module}.{part}") for part, entry in self.parts.items()}
        if isinstance(self.packing, ScaledBlocks) and self.packing.floating:
            check_numbers(parts["weight"], file, name)
        try:
            return build_grid(self.packing, parts, self.shape)
        except ValueError as error:
            raise CheckpointError(f"{file}: {module}: {error}") from None

    def with_dtype(self, dtype: torch.dtype) -> PackedTensor:
        return evolve(self, dtype=dtype)


@lru_cache(maxsize=1 << 16)
def are_groups_in_turn(entry: TensorEntry, size: int, _: int) -> bool:
    """Return whether a stored tensor says that columns belong to groups of `size` in turn.

    The last argument is the time at which the file was changed, because the result is kept.
    """
    stored = entry.read("g_idx")
    return torch.equal(stored, (torch.arange(len(stored)) // size).to(stored.dtype))


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_numbers(weight: Tensor, file: Path, name: str) -> None:
    """Raise CheckpointError for NaN. E4M3 has no infinity, and one NaN of each sign."""
    if int((weight.view(torch.uint8) & 127).max()) == 127:
        raise CheckpointError(f"{file}: {name} has values that are no numbers")
