"""Opens a DFlash, DFlash 2 or DSpark draft: a folder with config.json and safetensors files, or a GGUF file.

Other kinds of draft are refused by name. Everything is checked against the headers of the files and against the target
before weights are allocated. Pickle files are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_json
from adapters.checkpoint.gguf.metadata import read_metadata
from adapters.checkpoint.safetensors_folder import (
    Shapes,
    StoredTensor,
    check_expected_tensors,
    read_header,
    scan_tensors,
)
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.decoder_layer import layer_tensors
from adapters.models.drafts.dflash.config import DFlashConfig, DraftShapes, parse_draft_config, refuse_other_formats
from adapters.models.drafts.dflash.gguf_draft import find_gguf_tensors, read_gguf_settings
from adapters.models.drafts.gguf_files import find_gguf_draft
from adapters.models.drafts.stored_tensors import StoredTensors

MASK_EMBEDDING = "mask_embedding"
# Parts of tensor names that other kinds of draft have. Without such a tensor a different model would run.
_FOREIGN = {
    "domino": "Domino",
    "prefix_gru": "Domino",
    "attn_gate": "gated-attention",
    "attention_sink_bias": "attention-sink",
    "attn_sinks": "attention-sink",
    "aux_hidden_norm": "normalised-tap",
    "mtp": "DeepSeek-V4",
    "d2t": "Speculators",
    "t2d": "Speculators",
}
_NATIVE_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# The frequencies are computed anew. The embedding and the head of the target are used.
_IGNORED = ("rotary_emb.inv_freq", "embed_tokens.weight", "lm_head.weight")


def list_draft_tensors(config: DFlashConfig) -> Shapes:
    """Return the published names and shapes of the draft's tensors."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.aux_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **config.parts.list_tensors(hidden),
    }
    own = config.parts.list_layer_tensors(hidden)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        shapes |= layer_tensors(config, prefix)
        shapes |= {prefix + name: shape for name, shape in own.items()}
    return shapes


@frozen
class DraftCheckpoint(StoredTensors):
    """An opened, validated draft. `open` reads headers only; `read` reads one tensor, named as published.

    There is a tensor `mask_embedding` `[D]` if the folder has mask_embedding.safetensors. It replaces the target's
    embedding of the mask token.
    """

    folder: Path
    config: DFlashConfig

    @classmethod
    def open(cls, folder: Path | str, target: ModelConfig) -> DraftCheckpoint:
        """Open a draft for `target`: a folder or a GGUF file. Raises CheckpointError, one line, if none fits."""
        path = Path(folder)
        file = find_gguf_draft(path)
        if file is not None:
            return cls._open_gguf(file, target)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder")
        raw = read_json(path / "config.json")
        try:
            refuse_other_formats(raw)
            tensors = _translate_names(scan_tensors(path))
        except CheckpointError as error:
            raise _name_place(error, path) from None
        config = _check_draft(path, raw, tensors, target)
        mask = _find_mask_embedding(path, config.hidden_size)
        used = tensors if mask is None else {**tensors, MASK_EMBEDDING: mask}
        return cls(folder=path, config=config, tensors=used)

    @classmethod
    def _open_gguf(cls, file: Path, target: ModelConfig) -> DraftCheckpoint:
        metadata = read_metadata(file)
        try:
            tensors = _translate_names(find_gguf_tensors(metadata))
            config = _check_draft(file, read_gguf_settings(metadata), tensors, target)
        except CheckpointError as error:
            said = str(error).replace("config.json: ", "its metadata, as config.json would have them: ")
            raise _name_place(CheckpointError(said), file) from None
        return cls(folder=file, config=config, tensors=tensors)


def _check_draft(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor], target: ModelConfig
) -> DFlashConfig:
    """Return the configuration of a draft. Raises CheckpointError if tensors, configuration and target do not fit."""
    try:
        config = parse_draft_config(raw, _read_shapes(tensors), target, tensors.keys())
    except CheckpointError as error:
        raise _name_place(error, path) from None
    check_expected_tensors(
        path, tensors, list_draft_tensors(config), f"a {config.num_layers}-layer {config.parts.name} draft"
    )
    return config


def _name_place(error: CheckpointError, path: Path) -> CheckpointError:
    """Return the error with the path in front, unless it is there already."""
    text = str(error)
    return CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}")


def _translate_names(scanned: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that are used, by their published names. Raises CheckpointError.

    A prefix `model.` is dropped, and the names that transformers gives are translated.
    """
    tensors: dict[str, StoredTensor] = {}
    for full, entry in scanned.items():
        bare = full.removeprefix("model.")
        foreign = next((_FOREIGN[key] for part in bare.split(".") for key in _FOREIGN if part.startswith(key)), None)
        if foreign is not None:
            raise CheckpointError(
                f"tensor {bare} belongs to a {foreign} drafter, which is not supported; "
                "accepted: DFlash, DFlash 2 and DSpark"
            )
        if bare.endswith(_IGNORED):
            continue
        name = _NATIVE_NAMES.get(bare, bare)
        if name in tensors:
            raise CheckpointError(f"tensor {name} is there twice, under different names")
        tensors[name] = entry
    return tensors


def _read_shapes(tensors: Mapping[str, StoredTensor]) -> DraftShapes:
    """Return the sizes that the tensors' shapes show. Raises CheckpointError. The caller checks the rest."""

    def rows_of(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing; accepted: a flat DFlash checkpoint")
        shape = tensors[name].shape
        if len(shape) != dimensions or 0 in shape:
            raise CheckpointError(f"tensor {name} has shape {list(shape)}, not {dimensions} dimensions above zero")
        return shape

    hidden, fused = rows_of("fc.weight", 2)
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    [head] = rows_of("layers.0.self_attn.q_norm.weight", 1)
    q, kv = (rows_of(f"layers.0.self_attn.{part}_proj.weight", 2)[0] for part in "qk")
    inner = rows_of("layers.0.mlp.gate_proj.weight", 2)[0]
    if fused % hidden:
        raise CheckpointError(f"tensor fc.weight has shape {[hidden, fused]}: not a whole number of target layers")
    if q % head or kv % head or (q // head) % (kv // head):
        raise CheckpointError(f"layer 0 has {q} query and {kv} key rows, which heads of {head} do not divide evenly")
    return DraftShapes(hidden, inner, len(layers), q // head, kv // head, head, fused // hidden)


def _find_mask_embedding(folder: Path, hidden: int) -> StoredTensor | None:
    file = folder / f"{MASK_EMBEDDING}.safetensors"
    if not file.is_file():
        if (folder / f"{MASK_EMBEDDING}.pt").exists():
            raise CheckpointError(f"{folder}: mask_embedding.pt is a pickle; accepted: mask_embedding.safetensors")
        return None
    found = list(read_header(file).values())
    if len(found) != 1 or found[0].shape not in ((hidden,), (1, hidden)):
        shapes = [list(entry.shape) for entry in found]
        raise CheckpointError(f"{file}: tensors of shapes {shapes}; accepted: one of shape {[hidden]}")
    return found[0]
