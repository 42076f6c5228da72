"""Small hybrid models, and what tests do with a shard whose rows are settled step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.models.dense import DenseShard
from adapters.models.qwen3_5 import FULL, LINEAR
from adapters.models.shard import Segment, Step

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def sizes(attention: tuple[int, int, int], linear: tuple[int, int, int, int], layers: int, **more: object):
    """attention: H, KV, hd. linear: Nk, Nv, dk, dv."""
    heads, kv, head = attention
    key_heads, value_heads, key, value = linear
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "num_hidden_layers": layers,
        "rope_parameters": ROPE,
        **more,
    }


# What transformers is told of each.
HYBRIDS: dict[str, dict[str, object]] = {
    "three of four, key heads shared, tied": sizes((4, 2, 16), (2, 4, 16, 16), 4, tie_word_embeddings=True),
    "every key head its own": sizes((3, 3, 24), (3, 3, 24, 16), 3, layer_types=[LINEAR, FULL, LINEAR]),
    "three value heads to a key head, mqa": sizes(
        (5, 1, 32), (2, 6, 32, 48), 2, layer_types=[LINEAR, FULL], hidden_size=80
    ),
}


def advance(shard: DenseShard, tokens: Tensor, counts: Sequence[int], *, slot: int = 0, start: int = 0) -> Tensor:
    """Logits of every row; counts: rows of each step, the last one repeated. All of them are settled."""
    found, at, index = [], 0, 0
    while at < len(tokens):
        part = tokens[at : at + counts[min(index, len(counts) - 1)]]
        bucket = next(bucket for bucket in shard.buckets if bucket >= len(part))
        step = Step((Segment(slot, start + at, len(part)),), bucket)
        forward = shard.forward(step, part)
        found.append(shard.logits(step, forward.hidden)[: len(part)].clone())
        shard.commit(step, [len(part)])
        at, index = at + len(part), index + 1
    return torch.cat(found)
