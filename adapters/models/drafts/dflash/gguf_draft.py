"""Reads a DFlash, DFlash 2 or DSpark draft from a GGUF file: its settings as config.json has them, and its tensors.

Two forms are published. llama.cpp's has the architecture `dflash`. It numbers the target's layers by what enters them,
so each number is one more than in config.json. The form of Lucebox has an architecture that ends in `dflash-draft`, own
settings below `dflash.`, and layers numbered as in config.json. Norms are stored as published in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor, make_tensor
from adapters.checkpoint.gguf.header import is_gguf, read_header
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.checkpoint.text_files import read_text_files
from adapters.models.gguf.architecture import ATTENTION, FRAME
from adapters.models.gguf.gguf_dense import read_scaling

MAINLINE = "dflash"
SUFFIX = "dflash-draft"
TOKENS = "tokenizer.ggml.tokens"
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
# Names in files, and the published ones. Where there are several, forms differ.
_OUTSIDE = {
    **dict.fromkeys(("fc.weight", "dflash.fc.weight", "dflash_fc.weight"), "fc.weight"),
    **dict.fromkeys(
        ("enc.output_norm.weight", "dflash.hidden_norm.weight", "dflash_hidden_norm.weight"), "hidden_norm.weight"
    ),
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector.hidden_proj.weight": "candidate_selector.hidden_projection.weight",
    "selector.pred_codebook": "candidate_selector.predecessor_codebook",
    "selector.succ_codebook": "candidate_selector.successor_codebook",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
_PLACES = {"attn": "attention", "ffn": "mlp"}
_WITHIN = {
    **{stored: published for published, stored in (FRAME | ATTENTION).items()},
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    **{f"{short}_conv{mark}base": f"{place}_conv.base_kernel" for short, place in _PLACES.items() for mark in "_."},
    **{
        f"{short}_conv{mark}proj.weight": f"{place}_conv.kernel_projection.weight"
        for short, place in _PLACES.items()
        for mark in "_."
    },
}


def find_gguf_draft(path: Path) -> Path | None:
    """Return the GGUF file that holds a draft: the path itself, or the only one of a folder without config.json.

    Names that begin with `dflash-draft` are preferred. Raises CheckpointError if there are several.
    """
    if is_gguf(path):
        return path
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path}: no such file")
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    preferred = [file for file in files if file.name.startswith(SUFFIX)] or files
    if len(preferred) > 1:
        names = ", ".join(file.name for file in preferred[:4])
        raise CheckpointError(f"{path}: several GGUF files ({names}); accepted: the path of one of them")
    return preferred[0] if preferred else None


def find_gguf_tensors(metadata: Metadata) -> dict[str, GgufTensor]:
    """Return all tensors of a file, by their published names; unknown ones keep their names. Raises CheckpointError."""
    _check_architecture(metadata)
    tensors: dict[str, GgufTensor] = {}
    for stored_name, stored in metadata.tensors.items():
        layer = _LAYER.fullmatch(stored_name)
        name = _OUTSIDE.get(stored_name, stored_name)
        if layer is not None:
            name = f"layers.{layer[1]}.{_WITHIN.get(layer[2], layer[2])}"
        if name in tensors:
            raise metadata.make_error(f"tensor {name} is there twice, under different names")
        # Writers leave out leading dimensions of size one.
        has_one_row = name == "confidence_head.proj.weight" and len(stored.shape) == 1
        tensors[name] = make_tensor(evolve(stored, shape=(1, *stored.shape)) if has_one_row else stored)
    return tensors


def read_gguf_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a draft as config.json has them. Raises CheckpointError."""
    _check_architecture(metadata)
    layers = metadata.read_count("block_count")
    head = metadata.read_count("attention.key_length")
    metadata.refuse("attention.value_length", head)
    metadata.refuse("rope.dimension_count", head)
    for name in ("hyper_connection_count", "expert_count"):
        metadata.refuse(name, 0)
    own = "" if metadata.architecture == MAINLINE else "dflash."
    settings = {
        "model_type": "qwen3",
        "hidden_size": metadata.read_count("embedding_length"),
        "intermediate_size": metadata.read_count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": metadata.read_count("attention.head_count"),
        "num_key_value_heads": metadata.read_count("attention.head_count_kv"),
        "head_dim": head,
        "rms_norm_eps": metadata.read_number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": metadata.read_number("rope.freq_base"),
            **read_scaling(metadata, keeps_multiplier=False),
        },
        "vocab_size": _count_tokens(metadata),
        "block_size": metadata.find_field(own + "block_size"),
        "mask_token_id": metadata.find_field(own + "mask_token_id")
        or metadata.header.fields.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": _read_target_layers(metadata),
        "causal": metadata.find_field("attention.causal"),
        "sample_from_anchor": metadata.find_field(own + "sample_from_anchor"),
        "output_multiplier": metadata.find_field("logit_scale") or None,
        "final_logit_softcapping": metadata.find_field("final_logit_softcapping"),
        **{name: metadata.find_field(own + name) for name in ("conv_kernel_size", "conv_group_size")},
        **{name: metadata.find_field(own + name) for name in ("selector_rank", "selector_top_k")},
        **_read_windows(metadata, layers),
        **_read_markov(metadata),
    }
    return {name: value for name, value in settings.items() if value is not None}


def check_gguf_tokens(path: Path, target: Path) -> None:
    """Raise CheckpointError if a GGUF draft has other tokens than its target. Other drafts have no tokens to compare.

    Only ids that both have are compared, because vocabularies are filled up differently.
    """
    file = find_gguf_draft(path)
    if file is None:
        return
    header = read_header(file)
    if TOKENS not in header.fields:
        return
    known = _list_tokens(read_text_files(target).tokenizer)
    for number, token in enumerate(header.read_texts(TOKENS)):
        theirs = known.get(number, token)
        if theirs != token:
            raise CheckpointError(
                f"{file}: token {number} is {describe_value(token)}, but the target has {describe_value(theirs)}: "
                "a draft of another target"
            )


def _list_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by id. Vocabularies that are lists, as few models have, are left out."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = tokenizer.get("added_tokens") or ()
    found = {id_: token for token, id_ in vocabulary.items()} if isinstance(vocabulary, Mapping) else {}
    return found | {token["id"]: token["content"] for token in added}


def _check_architecture(metadata: Metadata) -> None:
    if metadata.architecture != MAINLINE and not metadata.architecture.endswith(SUFFIX):
        raise metadata.make_error(
            f"general.architecture {describe_value(metadata.architecture)} is no DFlash draft; "
            f"accepted: {MAINLINE!r}, {SUFFIX!r}, and names that end in it"
        )


def _count_tokens(metadata: Metadata) -> int | None:
    """Return the number of the draft's tokens, or None if the file does not say it."""
    tokens = metadata.header.fields.get(TOKENS)
    count = getattr(tokens, "count", None)
    return count if metadata.find_field("vocab_size") is None else metadata.read_count("vocab_size")


def _read_target_layers(metadata: Metadata) -> list[int] | None:
    if metadata.architecture == MAINLINE:
        return [number - 1 for number in metadata.header.read_integers(f"{MAINLINE}.target_layers")]
    name = f"{metadata.architecture}.dflash.target_layer_ids"
    return metadata.header.read_integers(name) if name in metadata.header.fields else None


def _read_windows(metadata: Metadata, layers: int) -> dict[str, Any]:
    """Return which layers have a window. Lucebox ignores a window without a pattern."""
    window = metadata.read_count("attention.sliding_window", 0)
    pattern = "attention.sliding_window_pattern"
    if not window or (metadata.architecture != MAINLINE and metadata.find_field(pattern) is None):
        return {}
    kinds = [
        "sliding_attention" if slides else "full_attention" for slides in metadata.read_layer_flags(pattern, layers)
    ]
    return {"layer_types": kinds, "sliding_window": window}


def _read_markov(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a Markov head. Files have the plain kind only, and its sizes are those of the tensors."""
    stored = metadata.tensors.get("markov_w1.weight")
    return {} if stored is None else {"markov_head_type": "vanilla", "markov_rank": stored.shape[-1]}
