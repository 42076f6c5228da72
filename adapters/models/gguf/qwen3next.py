"""The architecture `qwen3next`: Qwen3-Next without the changes of llama.cpp's converter.

As with `qwen35`, the converter adds 1 to norms, stores the factor -exp(A_log), and stores the prediction head as one
more layer. Value heads keep their order. The recurrent layers' input projection is published as one tensor, which has
the rows of one key head after those of the other. Files store it as two tensors: `q | k | v` of all heads, and `z` of
all heads. Older files store it as published.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.models.families.qwen3_next import Qwen3NextConfig
from adapters.models.gguf.architecture import Architecture, Inverse, SplitTensor
from adapters.models.gguf.qwen35 import HEAD, RECURRENT, SPARSE, read_sparse_settings, subtract_one
from adapters.models.kernels.interfaces.delta_interface import DeltaShape

PROJECTED = "linear_attn.in_proj_qkvz.weight"
OWN = {PROJECTED: "ssm_in.weight", "linear_attn.in_proj_ba.weight": "ssm_ba.weight"}
LAYER = {name: stored_name for name, stored_name in SPARSE.items() if not name.startswith("linear_attn.in_proj")} | OWN
KEYS_VALUES = RECURRENT["linear_attn.in_proj_qkv.weight"]
GATE = RECURRENT["linear_attn.in_proj_z.weight"]


def find_inverse(config: Qwen3NextConfig, name: str) -> Inverse | None:  # noqa: ARG001 - the interface of `Architecture`
    """Return the function that undoes the converter's change of a published tensor; None if it has none."""
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    own = ".linear_attn." in name
    if "norm" in part:
        return None if own else subtract_one
    return {"conv1d": restore_taps, "A_log": restore_log_decay}.get(part) if own else None


def restore_taps(rows: Tensor) -> Tensor:
    """Return a convolution's taps with a dimension for their single channel."""
    return rows.unsqueeze(1)


def restore_log_decay(decay: Tensor) -> Tensor:
    """Return A_log from the stored factor -exp(A_log), to within the last bit of a float32."""
    return (-decay).log()


def list_part_shapes(config: Qwen3NextConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the two stored tensors: that of `q | k | v`, and that of `z`."""
    return (config.linear.channels, config.hidden_size), (config.linear.values, config.hidden_size)


def join_by_key_head(config: Qwen3NextConfig, parts: Sequence[Tensor]) -> Tensor:
    """Return the published projection: for each key head its rows of q, k, v and z."""
    delta: DeltaShape = config.linear
    keys = delta.key_heads * delta.key_size
    q, k, v = torch.split(parts[0], [keys, keys, delta.values])
    heads = [rows.reshape(delta.key_heads, -1, rows.shape[1]) for rows in (q, k, v, parts[1])]
    return torch.cat(heads, 1).flatten(0, 1)


QWEN3_NEXT = Architecture(
    read_sparse_settings,
    LAYER,
    find_inverse,
    head_names=HEAD,
    split_tensors={PROJECTED: SplitTensor((KEYS_VALUES, GATE), list_part_shapes, join_by_key_head)},
)
