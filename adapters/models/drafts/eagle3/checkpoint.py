"""Opens an EAGLE-3 draft: a folder with config.json and safetensors files, or a GGUF file.

Everything is checked against the headers of the files and against the target before weights are allocated. Pickle files
are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_json, read_optional
from adapters.checkpoint.gguf.header import read_header
from adapters.checkpoint.gguf.metadata import read_metadata
from adapters.checkpoint.safetensors_folder import FLOATS, Shapes, StoredTensor, check_expected_tensors, scan_tensors
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.decoder_layer import layer_tensors
from adapters.models.drafts.eagle3.config import (
    EAGLE3,
    Eagle3Config,
    Eagle3Shapes,
    is_eagle3_config,
    parse_eagle3_config,
)
from adapters.models.drafts.eagle3.gguf_draft import (
    add_eagle3_frequencies,
    find_eagle3_tensors,
    read_eagle3_settings,
)
from adapters.models.drafts.gguf_files import DRAFT_PACKINGS, find_gguf_draft
from adapters.models.drafts.stored_tensors import StoredTensors

LAYER = "layers.0."
TOKEN_MAP = "d2t"  # noqa: S105 - the name of a tensor
# Tensors that show an EAGLE-3 draft whose config.json does not say it, as that of the first ones.
_OWN_NAMES = ("midlayer.hidden_norm.weight", f"{LAYER}hidden_norm.weight")
# The inverse of `d2t` is not needed, and frequencies are computed anew.
_IGNORED = ("t2d", "rotary_emb.inv_freq")
_MAP_DTYPES = (torch.int64, torch.int32)
_KINDS = {**FLOATS, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8}


def is_eagle3(path: Path) -> bool:
    """Return whether this is an EAGLE-3 draft, a folder or a GGUF file. Raises CheckpointError."""
    file = find_gguf_draft(path)
    if file is not None:
        return read_header(file, DRAFT_PACKINGS).fields.get("general.architecture") == EAGLE3
    if is_eagle3_config(read_optional(path / "config.json")):
        return True
    try:
        names = {name.removeprefix("model.") for name in scan_tensors(path, _KINDS)}
    except CheckpointError:
        return False
    return not names.isdisjoint(_OWN_NAMES)


def list_eagle3_tensors(config: Eagle3Config) -> Shapes:
    """Return the published names and shapes of the draft's tensors."""
    hidden = config.hidden_size
    fused = len(config.aux_layers) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        **layer_tensors(config, LAYER),
        f"{LAYER}hidden_norm.weight": (hidden,),
    }
    for part in "qkv":
        name = f"{LAYER}self_attn.{part}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * hidden)
    if config.norms.before_fc:
        shapes["input_norm.weight"] = (fused,)
    if config.norms.each_layer:
        layers = range(len(config.aux_layers))
        shapes |= {f"fc_norm.{number}.weight": (config.target_hidden_size,) for number in layers}
    if config.vocab:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    if config.has_map:
        shapes[TOKEN_MAP] = (config.vocab,)
    return shapes


@frozen
class Eagle3Checkpoint(StoredTensors):
    """An opened, validated draft. `open` reads headers and the map only; `read` reads one tensor, named as published.

    The tensor `d2t` has the target's token for each row of the draft's head. has_differences: the file has what must be
    added to the number of the row instead.
    """

    folder: Path
    config: Eagle3Config
    has_differences: bool

    @classmethod
    def open(cls, path: Path, target: ModelConfig) -> Eagle3Checkpoint:
        """Open a draft for `target`: a folder or a GGUF file. Raises CheckpointError, one line, if none fits."""
        file = find_gguf_draft(path)
        location = path if file is None else file
        try:
            config, tensors = _open_folder(path, target) if file is None else _open_gguf(file, target)
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(text if text.startswith(str(location)) else f"{location}: {text}") from None
        expected = {**list_eagle3_tensors(config)}
        if config.has_embedding:
            expected["embed_tokens.weight"] = (target.vocab_size, config.hidden_size)
        check_expected_tensors(location, tensors, expected, "an EAGLE-3 draft")
        for name, entry in tensors.items():
            accepted = _MAP_DTYPES if name == TOKEN_MAP else FLOATS.values()
            if entry.dtype not in accepted:
                names = ", ".join(map(str, accepted))
                raise CheckpointError(f"{location}: tensor {name} has dtype {entry.dtype}; accepted: {names}")
        found = cls(folder=location, config=config, tensors=tensors, has_differences=file is None)
        if config.has_map:
            found.check_map(target.vocab_size)
        return found

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name != TOKEN_MAP:
            return tensor
        tokens = tensor.long()
        return tokens + torch.arange(len(tokens)) if self.has_differences else tokens

    def check_map(self, vocab: int) -> None:
        """Raise CheckpointError if rows of the draft's head are no tokens of the target, or the same one."""
        tokens = self.read(TOKEN_MAP)
        least, most = tokens.aminmax()
        if least < 0 or most >= vocab:
            raise CheckpointError(
                f"{self.folder}: tensor {TOKEN_MAP} names tokens {int(least)}..{int(most)}; accepted: 0..{vocab - 1}"
            )
        if len({*tokens.tolist()}) != len(tokens):
            raise CheckpointError(f"{self.folder}: tensor {TOKEN_MAP} names a token twice")


def _open_folder(folder: Path, target: ModelConfig) -> tuple[Eagle3Config, Mapping[str, StoredTensor]]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    raw = read_json(folder / "config.json")
    if next(folder.glob("*.bin"), None) is not None and next(folder.glob("*.safetensors"), None) is None:
        raise CheckpointError("weights are there as pickle (*.bin) only; accepted: safetensors")
    tensors = _translate_names(scan_tensors(folder, _KINDS))
    return parse_eagle3_config(raw, _read_shapes(tensors), target), tensors


def _open_gguf(file: Path, target: ModelConfig) -> tuple[Eagle3Config, Mapping[str, StoredTensor]]:
    metadata = read_metadata(file, DRAFT_PACKINGS)
    settings = read_eagle3_settings(metadata)
    tensors = find_eagle3_tensors(metadata, settings)
    try:
        config = parse_eagle3_config(settings, _read_shapes(tensors), target)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("config.json: ", "its metadata, as config.json has them: ")) from None
    return add_eagle3_frequencies(config, metadata), tensors


def _translate_names(scanned: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that are used, by the names of vLLM's layout, without a prefix. Raises CheckpointError."""
    tensors: dict[str, StoredTensor] = {}
    for full, entry in scanned.items():
        name = full.removeprefix("model.")
        if name.endswith(_IGNORED):
            continue
        if name.startswith("midlayer."):
            name = LAYER + name.removeprefix("midlayer.")
        if name in tensors:
            raise CheckpointError(f"tensor {name} is there twice, under different names")
        tensors[name] = entry
    return tensors


def _read_shapes(tensors: Mapping[str, StoredTensor]) -> Eagle3Shapes:
    """Return the sizes that the tensors' shapes show. Raises CheckpointError. The caller checks the rest."""

    def rows_of(name: str) -> tuple[int, int]:
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing; accepted: an EAGLE-3 draft of one layer")
        shape = tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"tensor {name} has shape {list(shape)}, not 2 dimensions above zero")
        return shape[0], shape[1]

    hidden, fused = rows_of("fc.weight")
    query_rows, _ = rows_of(f"{LAYER}self_attn.q_proj.weight")
    key_rows, _ = rows_of(f"{LAYER}self_attn.k_proj.weight")
    inner, _ = rows_of(f"{LAYER}mlp.gate_proj.weight")
    vocab = rows_of("lm_head.weight")[0] if "lm_head.weight" in tensors else 0
    return Eagle3Shapes(hidden, inner, fused, query_rows, key_rows, vocab, frozenset(tensors))
