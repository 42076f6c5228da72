"""Opens the folder of a DFlash draft: config.json and safetensors files, as published.

Folders of other kinds of draft are refused by name. Everything is checked against the headers of the files and against
the target before weights are allocated. Pickle files are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_json
from adapters.checkpoint.safetensors_folder import (
    Shapes,
    TensorEntry,
    check_tensors,
    read_header,
    scan_tensors,
)
from adapters.models.decoder.decoder_layer import layer_tensors
from adapters.models.decoder.family import ModelConfig
from adapters.models.drafts.dflash.config import DFlashConfig, DraftShapes, parse_draft_config, refuse_other_formats
from adapters.models.drafts.stored_tensors import StoredTensors

MASK_EMBEDDING = "mask_embedding"
# Parts of tensor names that other kinds of draft have. Without such a tensor a different model would run.
_FOREIGN = {
    "midlayer": "EAGLE",
    "domino": "Domino",
    "prefix_gru": "Domino",
    "markov_head": "DSpark",
    "confidence_head": "DSpark",
    "selector": "DFlash 2",
    "conv": "DFlash 2",
    "attn_gate": "gated-attention",
    "attention_sink_bias": "attention-sink",
    "aux_hidden_norm": "normalised-tap",
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
    }
    for layer in range(config.num_layers):
        shapes |= layer_tensors(config, f"layers.{layer}.")
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
        """Open a draft for `target`. Raises CheckpointError, one line, if the folder has none that fits."""
        path = Path(folder)
        _refuse_gguf(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder")
        raw = read_json(path / "config.json")
        try:
            refuse_other_formats(raw)
            tensors = _translate_names(scan_tensors(path))
            shapes = _read_shapes(tensors)
            config = parse_draft_config(raw, shapes, target)
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None
        check_tensors(path, tensors, list_draft_tensors(config), f"a {config.num_layers}-layer DFlash draft")
        mask = _find_mask_embedding(path, config.hidden_size)
        used = tensors if mask is None else {**tensors, MASK_EMBEDDING: mask}
        return cls(folder=path, config=config, tensors=used)


def _refuse_gguf(path: Path) -> None:
    found = [path] if path.suffix == ".gguf" else []
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
    if found:
        raise CheckpointError(f"{found[0]}: GGUF drafts are not supported; accepted: a folder with safetensors")


def _translate_names(scanned: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors that are used, by their published names. Raises CheckpointError.

    A prefix `model.` is dropped, and the names that transformers gives are translated.
    """
    tensors: dict[str, TensorEntry] = {}
    for full, entry in scanned.items():
        bare = full.removeprefix("model.")
        foreign = next((_FOREIGN[key] for part in bare.split(".") for key in _FOREIGN if part.startswith(key)), None)
        if foreign is not None:
            raise CheckpointError(
                f"tensor {bare} belongs to a {foreign} drafter, which is not supported; accepted: plain DFlash"
            )
        if bare.endswith(_IGNORED):
            continue
        name = _NATIVE_NAMES.get(bare, bare)
        if name in tensors:
            raise CheckpointError(f"tensor {name} is there twice, under different names")
        tensors[name] = entry
    return tensors


def _read_shapes(tensors: Mapping[str, TensorEntry]) -> DraftShapes:
    """Return the sizes that the tensors' shapes show. Raises CheckpointError. `check_tensors` checks the rest."""

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


def _find_mask_embedding(folder: Path, hidden: int) -> TensorEntry | None:
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
