"""A Hugging Face folder, or a GGUF file, with a model of one of our families: checked before weights are allocated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import DTYPES, read_json
from adapters.checkpoint.gguf.header import is_gguf
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout
from adapters.checkpoint.quantised.packed_tensors import fold_packed_tensors
from adapters.checkpoint.quantised.quantisation_config import find_quantisation
from adapters.checkpoint.quantised.rounding import GROUP, measure_error, round_matrices
from adapters.checkpoint.safetensors_folder import (
    ALL,
    Shapes,
    StoredTensor,
    check_tensors,
    digest_tensors,
    scan_tensors,
)
from adapters.models.decoder.family import Family, ModelConfig, family_of
from adapters.models.decoder.feed_forward import cut_up

DECIDING = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
"""What chooses experts, and how a recurrent layer forgets: a small part of a model's numbers."""


@frozen
class Checkpoint:
    """An opened, validated folder or GGUF file. `open` reads headers only; `read` reads one tensor.

    folder: or the file. others: tensors that the model is served without, by their published names: those of a draft
    may be among them. heard: called after each tensor that is read.
    """

    folder: Path
    family: Family
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    others: Mapping[str, StoredTensor] = {}
    heard: Callable[[], object] = field(default=lambda: None, eq=False, repr=False)

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Raises CheckpointError, one line, for whatever keeps the folder from being served."""
        path = Path(folder)
        if is_gguf(path):
            from adapters.models.gguf.open_gguf import open_gguf  # noqa: PLC0415 - few need it, and then all families

            found = open_gguf(path)
            return cls(path, found.family, found.config, found.tensors, found.others)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder")
        raw = read_json(path / "config.json")
        try:
            family = family_of(raw)
            config = family.parse(raw)
            quantised = find_quantisation(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        if not (path / "tokenizer.json").is_file():
            raise CheckpointError(f"{path}: tokenizer.json is missing")
        scanned = (
            scan_tensors(path) if quantised is None else fold_packed_tensors(path, scan_tensors(path, ALL), quantised)
        )
        expected = config.tensors()
        tensors, others = _named(path, family, scanned, expected)
        # A tied checkpoint may still carry its head; rotary buffers are recomputed.
        spare = {name for name in tensors if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
        spare |= {name for name in tensors.keys() - expected.keys() if _adds_nothing(name, tensors)}
        used = {name: entry for name, entry in tensors.items() if name in expected or name not in spare}
        check_tensors(path, used, expected, f"a {config.num_layers}-layer {family.model_type}")
        return cls(path, family, config, tensors, others)

    def read(self, name: str) -> Tensor:
        """One tensor, as stored, on the host."""
        tensor = self.tensors[name].read(name)
        self.heard()
        return tensor

    def find_layout(self, name: str) -> StepLayout | None:
        return self.tensors[name].layout

    def read_packed(self, name: str) -> PackedMatrix:
        """One tensor that has a layout, as it is packed."""
        matrix = self.tensors[name].read_packed(name)
        self.heard()
        return matrix

    @property
    def layouts(self) -> Mapping[str, StepLayout]:
        """Of all tensors that can be multiplied with as they are packed."""
        found = ((name, entry.layout) for name, entry in self.tensors.items())
        return {name: layout for name, layout in found if layout is not None}

    def followed(self, heard: Callable[[], object]) -> Checkpoint:
        """The same, with somebody who wants to know how far reading has got."""
        return evolve(self, heard=heard)

    def digest(self) -> str:
        return digest_tensors(self.tensors)

    @property
    def forms(self) -> tuple[str, ...]:
        """How weights are packed, what most of them are in first; none where they are not."""
        sizes = Counter[str]()
        for entry in self.tensors.values():
            sizes[entry.packing_name] += math.prod(entry.shape)
        return tuple(form for form, _ in sizes.most_common() if form)

    @property
    def bits(self) -> float:
        """Of one weight, as they are stored."""
        return self.bits_of(sum(entry.nbytes for entry in self.tensors.values()))

    def bits_of(self, nbytes: int) -> float:
        """Of one weight, where all take so many bytes."""
        return 8 * nbytes / sum(math.prod(entry.shape) for entry in self.tensors.values())

    @property
    def error(self) -> float | None:
        """Of weights that `quantised` rounds, once they have been read: relative, by root mean square."""
        return measure_error(self.tensors)

    def quantised(self, bits: int) -> Checkpoint:
        """The same, with its matrices to be rounded to so many bits as they are read. Raises CheckpointError."""
        if self.forms:
            what = f"weights are packed already ({'; '.join(self.forms[:3])})"
            raise CheckpointError(f"{self.folder}: --quantize int{bits}: its {what}; accepted: none")
        chosen = {name for name, entry in self.tensors.items() if _worth_rounding(name, entry.shape)}
        return evolve(self, tensors=round_matrices(self.tensors, bits, chosen))

    def rounded(self, dtype: torch.dtype) -> Checkpoint:
        """The same, with packed weights to be read in `dtype`: what they are computed in."""
        tensors, others = (
            {name: entry.with_dtype(dtype) for name, entry in entries.items()}
            for entries in (self.tensors, self.others)
        )
        return evolve(self, tensors=tensors, others=others)


def _worth_rounding(name: str, shape: tuple[int, ...]) -> bool:
    """Matrices of layers, but for those that are small and decide much: packed checkpoints leave them alone, too."""
    inner = name.startswith("model.layers.") and len(shape) == 2 and shape[1] >= GROUP
    return inner and name.split(".")[-2] not in DECIDING


def _adds_nothing(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """A bias of zeros beside a packed matrix: tools for GPTQ write one where the model has none."""
    matrix = tensors.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
    bias = tensors[name]
    return (
        matrix is not None
        and matrix.packing_name != ""
        and bias.shape == matrix.shape[:1]
        and not bias.read(name).any()
    )


def _named(
    path: Path, family: Family, scanned: Mapping[str, StoredTensor], expected: Shapes
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors as the family calls them, and those that it is served without; of experts, those of each."""
    tensors, others = dict[str, StoredTensor](), dict[str, StoredTensor]()
    for published, entry in scanned.items():
        name = family.named(published)
        found = tensors if name else others
        for part, stored in cut_up(name or published, entry, expected).items():
            if part in found:
                raise CheckpointError(f"{path}: tensor {part[:200]} is there twice, under different names")
            found[part] = stored
    return tensors, others


def resolve_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """`--dtype`: auto is what config.json says, or else what the embedding is stored in."""
    if name == "auto":
        return checkpoint.config.dtype or checkpoint.tensors["model.embed_tokens.weight"].dtype
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; accepted: auto, {', '.join(DTYPES)}")
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
