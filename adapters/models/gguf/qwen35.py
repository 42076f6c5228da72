"""`qwen35` and `qwen35moe`: what llama.cpp's converter does to Qwen3.5, undone.

Norms are stored with their 1, decays as they multiply, and value heads in turns (the first of every key head, then the
second of each ...), where published tensors have those of one key head together. The prediction head is one layer more.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adapters.checkpoint.config_fields import LIMITS
from adapters.checkpoint.gguf.gguf_tensor import ColumnOrder
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.families.qwen3_5 import FULL, LINEAR, Qwen35Config
from adapters.models.gguf.architecture import ATTENTION, EXPERTS, FRAME, SHARED, Architecture, Undo, shared_settings
from adapters.models.kernels.delta_interface import DeltaShape

RECURRENT = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
LAYER = FRAME | ATTENTION | RECURRENT | {"post_attention_layernorm.weight": "post_attention_norm.weight"}
SPARSE = LAYER | EXPERTS | SHARED
HEAD = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
    **{f"mtp.layers.0.{published}": name for published, name in SPARSE.items() if published not in RECURRENT},
}


def sparse_settings(found: Metadata) -> dict[str, Any]:
    return {**settings(found), "shared_expert_intermediate_size": found.read_count("expert_shared_feed_forward_length")}


def settings(found: Metadata) -> dict[str, Any]:
    shared = shared_settings(found)
    head = shared["head_dim"]
    heads = found.read_count("ssm.time_step_rank")
    rotated = found.read_count("rope.dimension_count", head // 4)
    found.refuse("rope.scaling.type", "none")
    # a little more than the quotient: what is rotated is the whole part of its product with the head
    part = rotated / max(head, 1) if rotated >= head else math.nextafter(rotated / max(head, 1), 1)
    layers = range(min(shared["num_hidden_layers"], LIMITS["num_hidden_layers"]))
    kinds = [LINEAR if f"blk.{layer}.ssm_a" in found.tensors else FULL for layer in layers]
    return {
        **shared,
        "rope_parameters": {"rope_theta": found.read_number("rope.freq_base"), "partial_rotary_factor": part},
        "linear_conv_kernel_dim": found.read_count("ssm.conv_kernel"),
        "linear_num_key_heads": found.read_count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": found.read_count("ssm.state_size"),
        "linear_value_head_dim": found.read_count("ssm.inner_size") // max(heads, 1),
        "layer_types": kinds,
    }


def undo(config: Qwen35Config, name: str) -> Undo | None:
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    own = ".linear_attn." in name
    if "norm" in part:
        return None if own else uncentred
    if not own:
        return None
    if part == "out_proj":
        return ColumnOrder(partial(columns, delta=config.linear), config.linear.value_size)
    return partial(RESTORED.get(part, numbers_together), delta=config.linear)


def uncentred(norm: Tensor) -> Tensor:
    """In float32 this gives back exactly what adding 1 again makes."""
    return norm - 1


def grouped(rows: Tensor, delta: DeltaShape, size: int) -> Tensor:
    """Rows of value heads, from turns to those of one key head together. size: rows of a head."""
    turns = rows.reshape(delta.value_heads // delta.key_heads, delta.key_heads, size, *rows.shape[1:])
    return turns.transpose(0, 1).reshape(rows.shape)


def heads_together(rows: Tensor, delta: DeltaShape) -> Tensor:
    return grouped(rows, delta, delta.value_size)


def numbers_together(rows: Tensor, delta: DeltaShape) -> Tensor:
    """Of one row a head."""
    return grouped(rows, delta, 1)


def values_last(rows: Tensor, delta: DeltaShape) -> Tensor:
    """Queries and keys stay, the values behind them are grouped."""
    first = delta.channels - delta.values
    return torch.cat((rows[:first], heads_together(rows[first:], delta)))


def taps(rows: Tensor, delta: DeltaShape) -> Tensor:
    return values_last(rows, delta).unsqueeze(1)


def columns(weight: Tensor, delta: DeltaShape) -> Tensor:
    return heads_together(weight.T, delta).T


def logarithm(decay: Tensor, delta: DeltaShape) -> Tensor:
    """Of what multiplies the state's age: its exponential is that again to within the last bit of a float32."""
    return numbers_together((-decay).log(), delta)


RESTORED = {
    "in_proj_qkv": values_last,
    "conv1d": taps,
    "in_proj_z": heads_together,
    "A_log": logarithm,
}
QWEN35 = Architecture(settings, LAYER, undo, head=HEAD)
QWEN35_MOE = Architecture(sparse_settings, SPARSE, undo, head=HEAD)
