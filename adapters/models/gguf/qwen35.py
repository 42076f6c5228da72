"""The architectures `qwen35` and `qwen35moe`: Qwen3.5 without the changes of llama.cpp's converter.

The converter makes three changes, and the functions below undo them:
* It adds 1 to the weights of norms, except for those inside recurrent layers.
* It stores the decay as the factor -exp(A_log) instead of A_log.
* It orders value heads by their number within a key head: the first value head of every key head, then the second of
  each, and so on. Published tensors have the value heads of one key head together.
The prediction head is stored as one more layer.
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
from adapters.models.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    FRAME,
    HEAD_AROUND_LAYER,
    SHARED,
    Architecture,
    Inverse,
    read_shared_settings,
)
from adapters.models.kernels.interfaces.delta_interface import DeltaShape

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
    **HEAD_AROUND_LAYER,
    **{f"mtp.layers.0.{published}": name for published, name in SPARSE.items() if published not in RECURRENT},
}


def read_sparse_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a model with experts as config.json has them. Raises CheckpointError."""
    return {
        **read_settings(metadata),
        "shared_expert_intermediate_size": metadata.read_count("expert_shared_feed_forward_length"),
    }


def read_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings as config.json has them. Raises CheckpointError."""
    shared = read_shared_settings(metadata)
    head = shared["head_dim"]
    heads = metadata.read_count("ssm.time_step_rank")
    rotated = metadata.read_count("rope.dimension_count", head // 4)
    metadata.refuse("rope.scaling.type", "none")
    # A little more than the quotient, because the family rotates the whole part of its product with the head's size.
    part = rotated / max(head, 1) if rotated >= head else math.nextafter(rotated / max(head, 1), 1)
    layers = range(min(shared["num_hidden_layers"], LIMITS["num_hidden_layers"]))
    kinds = [LINEAR if f"blk.{layer}.ssm_a" in metadata.tensors else FULL for layer in layers]
    return {
        **shared,
        "rope_parameters": {"rope_theta": metadata.read_number("rope.freq_base"), "partial_rotary_factor": part},
        "linear_conv_kernel_dim": metadata.read_count("ssm.conv_kernel"),
        "linear_num_key_heads": metadata.read_count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.read_count("ssm.state_size"),
        "linear_value_head_dim": metadata.read_count("ssm.inner_size") // max(heads, 1),
        "layer_types": kinds,
    }


def find_inverse(config: Qwen35Config, name: str) -> Inverse | None:
    """Return the function that undoes the converter's change of a published tensor; None if it has none."""
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    own = ".linear_attn." in name
    if "norm" in part:
        return None if own else subtract_one
    if not own:
        return None
    if part == "out_proj":
        return ColumnOrder(partial(group_columns, delta=config.linear), config.linear.value_size)
    return partial(RESTORED.get(part, group_head_numbers), delta=config.linear)


def subtract_one(norm: Tensor) -> Tensor:
    """Return a norm's weights as published. In float32, adding 1 to them again gives exactly the stored ones."""
    return norm - 1


def group_value_heads(rows: Tensor, delta: DeltaShape, size: int) -> Tensor:
    """Return the rows of value heads in the published order: those of one key head together. size: rows of a head."""
    turns = rows.reshape(delta.value_heads // delta.key_heads, delta.key_heads, size, *rows.shape[1:])
    return turns.transpose(0, 1).reshape(rows.shape)


def group_head_rows(rows: Tensor, delta: DeltaShape) -> Tensor:
    """Group rows of which every value head has `value_size`."""
    return group_value_heads(rows, delta, delta.value_size)


def group_head_numbers(rows: Tensor, delta: DeltaShape) -> Tensor:
    """Group rows of which every value head has one."""
    return group_value_heads(rows, delta, 1)


def group_value_rows(rows: Tensor, delta: DeltaShape) -> Tensor:
    """Group the rows of values; the rows of queries and keys before them stay as they are."""
    first = delta.channels - delta.values
    return torch.cat((rows[:first], group_head_rows(rows[first:], delta)))


def restore_taps(rows: Tensor, delta: DeltaShape) -> Tensor:
    """Return a convolution's taps as published: grouped, with a dimension for the single channel."""
    return group_value_rows(rows, delta).unsqueeze(1)


def group_columns(weight: Tensor, delta: DeltaShape) -> Tensor:
    """Group the columns of the output projection, which follow the value heads."""
    return group_head_rows(weight.T, delta).T


def restore_log_decay(decay: Tensor, delta: DeltaShape) -> Tensor:
    """Return A_log from the stored factor -exp(A_log), to within the last bit of a float32."""
    return group_head_numbers((-decay).log(), delta)


RESTORED = {
    "in_proj_qkv": group_value_rows,
    "conv1d": restore_taps,
    "in_proj_z": group_head_rows,
    "A_log": restore_log_decay,
}
QWEN35 = Architecture(read_settings, LAYER, find_inverse, head_names=HEAD)
QWEN35_MOE = Architecture(read_sparse_settings, SPARSE, find_inverse, head_names=HEAD)
