"""`qwen3next`: what llama.cpp's converter does to Qwen3-Next, undone.

As with `qwen35`, norms are stored with their 1, decays as they multiply, and the prediction head is one layer more.
Value heads stay in their order. What is projected is published as one tensor, rows of one key head after the other;
files have it in two, `q | k | v` of all heads and `z` of all, older ones as it was published.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.models.families.qwen3_next import Qwen3NextConfig
from adapters.models.gguf.architecture import Architecture, Parts, Undo
from adapters.models.gguf.qwen35 import HEAD, RECURRENT, SPARSE, sparse_settings, uncentred
from adapters.models.kernels.delta_interface import DeltaShape

PROJECTED = "linear_attn.in_proj_qkvz.weight"
OWN = {PROJECTED: "ssm_in.weight", "linear_attn.in_proj_ba.weight": "ssm_ba.weight"}
LAYER = {name: there for name, there in SPARSE.items() if not name.startswith("linear_attn.in_proj")} | OWN
KEYS_VALUES = RECURRENT["linear_attn.in_proj_qkv.weight"]
GATE = RECURRENT["linear_attn.in_proj_z.weight"]


def undo(config: Qwen3NextConfig, name: str) -> Undo | None:  # noqa: ARG001 - as other architectures have it
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    own = ".linear_attn." in name
    if "norm" in part:
        return None if own else uncentred
    return {"conv1d": taps, "A_log": logarithm}.get(part) if own else None


def taps(rows: Tensor) -> Tensor:
    return rows.unsqueeze(1)


def logarithm(decay: Tensor) -> Tensor:
    """As of `qwen35`, to within the last bit of a float32."""
    return (-decay).log()


def rows_apart(config: Qwen3NextConfig) -> tuple[int, int]:
    return config.linear.channels, config.linear.values


def by_key_head(config: Qwen3NextConfig, parts: Sequence[Tensor]) -> Tensor:
    delta: DeltaShape = config.linear
    keys = delta.key_heads * delta.key_size
    q, k, v = torch.split(parts[0], [keys, keys, delta.values])
    heads = [rows.reshape(delta.key_heads, -1, rows.shape[1]) for rows in (q, k, v, parts[1])]
    return torch.cat(heads, 1).flatten(0, 1)


QWEN3_NEXT = Architecture(
    sparse_settings, LAYER, undo, head=HEAD, apart={PROJECTED: Parts((KEYS_VALUES, GATE), rows_apart, by_key_head)}
)
