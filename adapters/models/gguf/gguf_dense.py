"""`llama`, `qwen2`, `qwen3` and `qwen3moe`: names alone, but for the rows of queries and keys of `llama`.

There, llama.cpp rotates neighbours, where all else rotates the two halves of a head: its converter interleaves them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attrs import evolve
from torch import Tensor

from adapters.checkpoint.gguf.gguf_tensor import make_tensor
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.decoder.dense_config import DenseConfig
from adapters.models.decoder.rope import Divided
from adapters.models.families.llama import THETA, LlamaConfig
from adapters.models.gguf.architecture import ATTENTION, EXPERTS, FRAME, Architecture, Undo, shared_settings

FREQUENCIES = "rope_freqs.weight"


def settings(found: Metadata, *, theta: float | None = None) -> dict[str, Any]:
    shared = shared_settings(found)
    found.refuse("rope.dimension_count", shared["head_dim"])
    return {**shared, "rope_parameters": {"rope_theta": found.read_number("rope.freq_base", theta), **scaling(found)}}


def scaling(found: Metadata) -> dict[str, Any]:
    """As config.json has it. `linear` is what files mean that only tell a factor."""
    kind = found.find_field("rope.scaling.type") or "linear"
    factor = found.read_number("rope.scaling.factor", found.read_number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in {0, 1}):
        return {"rope_type": "default"}
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    for name, plain in {
        "attn_factor": 1,
        "yarn_attn_factor": 1,
        "yarn_ext_factor": 1,
        "yarn_log_multiplier": 0,
    }.items():
        found.refuse(f"rope.scaling.{name}", plain)
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": found.read_count("rope.scaling.original_context_length"),
        "beta_fast": found.read_number("rope.scaling.yarn_beta_fast", 32),
        "beta_slow": found.read_number("rope.scaling.yarn_beta_slow", 1),
    }


def nothing_to_undo(config: DenseConfig, name: str) -> None:  # noqa: ARG001 - as other architectures have it
    return None


def halves(config: DenseConfig, name: str) -> Undo | None:
    """Of `llama`: heads whose numbers are neighbours' pairs become heads whose numbers are pairs across two halves."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    return None if heads is None else partial(uninterleaved, heads=heads)


def uninterleaved(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def divided(config: LlamaConfig, found: Metadata) -> LlamaConfig:
    """Frequencies that a tensor divides: so files have Llama 3's scaling."""
    stored = found.tensors.get(FREQUENCIES)
    if stored is None:
        return config
    if stored.shape != (config.head_dim // 2,) or stored.packing.name != "F32" or config.rope_scaling is not None:
        raise found.make_error(
            f"{FREQUENCIES} is not {config.head_dim // 2} numbers of type F32, or beside another scaling"
        )
    factors = make_tensor(stored).read(FREQUENCIES).tolist()
    if min(factors) <= 0:
        raise found.make_error(f"{FREQUENCIES} has numbers that are not positive")
    return evolve(config, rope_scaling=Divided(tuple(factors)))


LLAMA = Architecture(
    partial(settings, theta=THETA), FRAME | ATTENTION, halves, adjusted=divided, spare=frozenset({FREQUENCIES})
)
QWEN = Architecture(settings, FRAME | ATTENTION, nothing_to_undo)
QWEN_MOE = Architecture(settings, {**FRAME, **ATTENTION, **EXPERTS}, nothing_to_undo)
