"""The names of tensors in checkpoints of DeepSeek and of GLM, which publish a prediction head as one more layer."""

from __future__ import annotations

from typing import Protocol

HEAD_PREFIX = "mtp."  # of the names that we give to a prediction head's tensors
# The tensors around the layer of the head, as published and by our names.
AROUND_LAYER = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "norm.weight",
}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the model's embedding and of its head


class Layers(Protocol):
    @property
    def num_layers(self) -> int: ...


def find_deepseek_name(published: str, config: Layers) -> str:
    """Return our name of a tensor. The prediction head is the layer behind the model's last one.

    It is empty for copies of the model's embedding and of its head, which are not used.
    """
    name = published.replace(".mlp.shared_experts.", ".mlp.shared_expert.", 1)
    behind = f"model.layers.{config.num_layers}."
    if not name.startswith(behind):
        return name
    part = name.removeprefix(behind)
    return "" if part in COPIES else HEAD_PREFIX + AROUND_LAYER.get(part, f"layers.0.{part}")
