"""MiMo (dense, 7B): the layers of Qwen2, and a prediction head in the same checkpoint.

The head is published as `model.mtp_layers.0`. It reads the target's last hidden state before the final norm.
"""

from __future__ import annotations

from adapters.models.decoder.config.deepseek_names import HEAD_PREFIX
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, HeadInputs, use_own_shape
from adapters.models.families.qwen2 import parse

HEAD = "model.mtp_layers."
# The tensors around the layer of the head, as published and by our names.
AROUND_LAYER = {
    "0.input_proj.weight": "fc.weight",
    "0.token_layernorm.weight": "pre_fc_norm_embedding.weight",
    "0.hidden_layernorm.weight": "pre_fc_norm_hidden.weight",
    "0.final_layernorm.weight": "norm.weight",
}


def find_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    """Return our name of a tensor."""
    if not published.startswith(HEAD):
        return published
    part = published.removeprefix(HEAD)
    return HEAD_PREFIX + AROUND_LAYER.get(part, f"layers.{part}")


INPUTS = HeadInputs(is_normed=False, hidden_first=True)
FAMILY = Family("mimo", parse, DenseShard, find_name, head_shape=use_own_shape, head_inputs=INPUTS)
