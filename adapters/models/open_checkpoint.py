"""Opens a Hugging Face folder or a GGUF file with a model of one of our families.

Everything is checked before weights are allocated.
"""

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
    StoredTensor,
    check_expected_tensors,
    digest_tensors,
    scan_tensors,
)
from adapters.checkpoint.tekken import TEKKEN_FILE
from adapters.models.decoder.config.deepseek_names import HEAD_PREFIX
from adapters.models.decoder.family import Family, ModelConfig, family_of

DECIDING = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
"""Names of small matrices that decide much: which experts are chosen, and how recurrent layers forget."""
EXPERTS = ".mlp.experts."
"""A part of the names of all tensors of experts."""


@frozen
class Checkpoint:
    """An opened, validated folder or GGUF file. `open` reads headers only; `read` reads one tensor.

    folder: the folder or the file. others: tensors that the model is served without, by their published names. Those of
    a draft may be among them. on_read: called after each tensor that is read. packs_experts: experts may be read
    packed.
    """

    folder: Path
    family: Family
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    others: Mapping[str, StoredTensor] = {}
    on_read: Callable[[], object] = field(default=lambda: None, eq=False, repr=False)
    packs_experts: bool = True

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Open a folder or a file. Raises CheckpointError, one line, if it cannot be served."""
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
        if not any((path / name).is_file() for name in ("tokenizer.json", TEKKEN_FILE)):
            raise CheckpointError(f"{path}: tokenizer.json is missing")
        scanned = (
            scan_tensors(path) if quantised is None else fold_packed_tensors(path, scan_tensors(path, ALL), quantised)
        )
        expected = config.tensors()
        tensors, others = _name_tensors(path, family, config, scanned)
        # A tied checkpoint may still carry its head; rotary buffers are recomputed.
        unneeded = {name for name in tensors if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
        others_left = tensors.keys() - expected.keys()
        unneeded |= {name for name in others_left if family.is_unused(name) or _adds_nothing(name, tensors)}
        used = {name: entry for name, entry in tensors.items() if name in expected or name not in unneeded}
        check_expected_tensors(path, used, expected, f"a {config.num_layers}-layer {family.model_type}")
        return cls(path, family, config, tensors, others)

    def read(self, name: str) -> Tensor:
        """Return one tensor on the host, in its stored dtype."""
        tensor = self.tensors[name].read(name)
        self.on_read()
        return tensor

    def find_layout(self, name: str) -> StepLayout | None:
        return self.tensors[name].layout if self.packs_experts or EXPERTS not in name else None

    def read_packed(self, name: str) -> PackedMatrix:
        """Return one tensor that has a layout, packed."""
        matrix = self.tensors[name].read_packed(name)
        self.on_read()
        return matrix

    @property
    def layouts(self) -> Mapping[str, StepLayout]:
        """The layouts of all tensors that products can use packed."""
        found = ((name, self.find_layout(name)) for name in self.tensors)
        return {name: layout for name, layout in found if layout is not None}

    def with_hook(self, on_read: Callable[[], object]) -> Checkpoint:
        """Return this checkpoint with a function that is called after each tensor that is read."""
        return evolve(self, on_read=on_read)

    def digest(self) -> str:
        return digest_tensors(self.tensors)

    @property
    def packing_names(self) -> tuple[str, ...]:
        """The formats of packed weights, the one of most weights first. Empty if no weights are packed."""
        sizes = Counter[str]()
        for entry in self.tensors.values():
            sizes[entry.packing_name] += math.prod(entry.shape)
        return tuple(form for form, _ in sizes.most_common() if form)

    @property
    def stored_bits(self) -> float:
        """The stored bits per weight."""
        return self.compute_bits(sum(entry.nbytes for entry in self.tensors.values()))

    def compute_bits(self, nbytes: int) -> float:
        """Return the bits per weight if all weights take this many bytes."""
        return 8 * nbytes / sum(math.prod(entry.shape) for entry in self.tensors.values())

    @property
    def rounding_error(self) -> float | None:
        """The relative error of the weights that were rounded, by root mean square. It is known once they are read."""
        return measure_error(self.tensors)

    def with_unpacked_experts(self) -> Checkpoint:
        """Return this checkpoint with experts that are unpacked when they are read."""
        return evolve(self, packs_experts=False)

    def with_quantisation(self, bits: int) -> Checkpoint:
        """Return this checkpoint with matrices that are rounded to this many bits when read. Raises CheckpointError."""
        if self.packing_names:
            what = f"weights are packed already ({'; '.join(self.packing_names[:3])})"
            raise CheckpointError(f"{self.folder}: --quantize int{bits}: its {what}; accepted: none")
        chosen = {name for name, entry in self.tensors.items() if _is_worth_rounding(name, entry.shape)}
        return evolve(self, tensors=round_matrices(self.tensors, bits, chosen))

    def with_dtype(self, dtype: torch.dtype) -> Checkpoint:
        """Return this checkpoint with packed weights that are unpacked to `dtype`, in which they are computed."""
        tensors, others = (
            {name: entry.with_dtype(dtype) for name, entry in entries.items()}
            for entries in (self.tensors, self.others)
        )
        return evolve(self, tensors=tensors, others=others)


def _is_worth_rounding(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for matrices of layers, except small ones that decide much. Packed checkpoints keep those as well."""
    inner = name.startswith("model.layers.") and len(shape) == 2 and shape[1] >= GROUP
    return inner and name.split(".")[-2] not in DECIDING


def _adds_nothing(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return True for a bias of zeros of a packed matrix. Tools for GPTQ write one if the model has none."""
    matrix = tensors.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
    bias = tensors[name]
    return (
        matrix is not None
        and matrix.packing_name != ""
        and bias.shape == matrix.shape[:1]
        and not bias.read(name).any()
    )


def _name_tensors(
    path: Path, family: Family, config: ModelConfig, scanned: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return the tensors by the family's names, and those that it is served without. Experts get a tensor each."""
    tensors = dict[str, StoredTensor]()
    others = dict[str, StoredTensor]()
    expected = config.tensors()
    for published, entry in scanned.items():
        name = family.named(published, config)
        found = tensors if name and not name.startswith(HEAD_PREFIX) else others
        for part, stored in family.cut_up(name or published, entry, expected).items():
            if part in found:
                raise CheckpointError(f"{path}: tensor {part[:200]} is there twice, under different names")
            found[part] = stored
    return tensors, others


def resolve_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of `--dtype`. For `auto` it is that of config.json, or else the stored one of the embedding."""
    if name == "auto":
        return checkpoint.config.dtype or checkpoint.tensors["model.embed_tokens.weight"].dtype
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; accepted: auto, {', '.join(DTYPES)}")
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
