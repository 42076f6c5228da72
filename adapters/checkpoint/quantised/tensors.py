"""A packed matrix of a checkpoint, which lies in several tensors of its files: unpacked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, checked, group_of, piece_of
from adapters.checkpoint.quantised.quantisation_config import Awq, Gptq, Int32Words, Packing, Scaled
from adapters.checkpoint.quantised.unpack import Grid, grid
from adapters.checkpoint.safetensors_folder import Fetch, TensorEntry


@frozen
class PackedTensor:
    """parts: by the last part of their names. dtype: what is read."""

    packing: Packing
    parts: Mapping[str, TensorEntry]
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def files(self) -> Mapping[Path, int]:
        return {file: header for part in self.parts.values() for file, header in part.files.items()}

    @property
    def form(self) -> str:
        return str(self.packing)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return tuple(self.parts.values())

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        """The matrix; it is called `name` if that fails. What is packed is read whole, and unpacked in pieces: nobody
        needs the room of all of it in float32.
        """
        file, found = next(iter(self.parts.values())).file, self._grid(name, fetch)
        tensor = torch.empty(self.shape, dtype=self.dtype, device=found.scale.device)
        step = max(8, piece_of(tensor.device) // self.shape[1] // 8 * 8)
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            tensor[start:stop].copy_(found.rows(start, stop))
        check_finite(tensor, file, name)
        return tensor

    @property
    def layout(self) -> StepLayout | None:
        """As it can be multiplied with: where columns are in groups one after the other, and nothing is rounded that
        `read` does not round.
        """
        packing, dtypes = self.packing, {part: entry.dtype for part, entry in self.parts.items()}
        size = group_of(packing.columns if isinstance(packing, Scaled) else packing.group, self.shape[1])
        if not size or any(part.endswith("g_idx") for part in self.parts):
            return None
        if isinstance(packing, Scaled):
            return StepLayout("e4m3" if packing.floating else "int8", size, scale=short(dtypes[packing.scale]))
        scale = dtypes["weight_scale" if isinstance(packing, Int32Words) else "scales"]
        if scale == torch.float32:  # step * scale - zero * scale would be rounded twice
            return None
        zeros = isinstance(packing, Awq | Gptq) or packing.zeros
        steps = "int8" if packing.bits == 8 else "uint4" if zeros else "int4"
        return StepLayout(steps, size, scale=short(scale), least="scale" if zeros else "")

    def packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:
        """Of a tensor that has a layout: only put together anew."""
        layout, file = self.layout, next(iter(self.parts.values())).file
        assert layout is not None
        return checked(self._grid(name, fetch).packed(layout, self.shape[0]), file, name)

    def _grid(self, name: str, fetch: Fetch) -> Grid:
        module, file = name.removesuffix(".weight"), next(iter(self.parts.values())).file
        parts = {part: fetch(entry, f"{module}.{part}") for part, entry in self.parts.items()}
        if isinstance(self.packing, Scaled) and self.packing.floating:
            check_numbers(parts["weight"], file, name)
        try:
            return grid(self.packing, parts, self.shape)
        except ValueError as error:
            raise CheckpointError(f"{file}: {module}: {error}") from None

    def rounded(self, dtype: torch.dtype) -> PackedTensor:
        return evolve(self, dtype=dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_numbers(weight: Tensor, file: Path, name: str) -> None:
    """E4M3 has no infinity, and one NaN of each sign."""
    if int((weight.view(torch.uint8) & 127).max()) == 127:
        raise CheckpointError(f"{file}: {name} has values that are no numbers")
