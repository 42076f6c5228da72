"""Generates continuations of many prompts at once with the target, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from training.batches import PAD_ID
from training.draft_model import head, layers_of
from training.model import Qwen3, SelfAttention, rotate

Pick = Callable[[Tensor, Tensor], Tensor]
"""From logits float32 [rows, vocabulary] and the positions [rows] of the tokens to pick: the tokens [rows]."""

CACHE_STEP = 64


@frozen(eq=False)
class Cache:
    """Keys and values of a layer, each [rows, heads, capacity, dim]."""

    keys: Tensor
    values: Tensor


def greedy(logits: Tensor, _positions: Tensor) -> Tensor:
    return logits.argmax(-1)


@torch.inference_mode()
def generate(target: Qwen3, prompts: Sequence[Sequence[int]], count: int, pick: Pick) -> Tensor:
    """Each prompt with its `count` next tokens, then padding: int64 [rows, longest prompt + count]. Nothing ends early.

    Raises ValueError if that is longer than the target's context.
    """
    device = target.cos.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    if longest + count > target.geometry.context:
        raise ValueError(f"{longest} + {count} tokens are more than the context of {target.geometry.context}")
    tokens = torch.full((len(prompts), longest + count), PAD_ID)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    every = torch.arange(len(prompts), device=device)
    hidden, caches = prefill(target, tokens[:, :longest], longest + count)
    last = hidden[every, lengths - 1]
    for step in range(count):
        positions = lengths + step
        picked = pick(head(target, target.model.norm(last)), positions)
        tokens[every, positions] = picked
        if step < count - 1:
            last = decode(target, picked, positions, caches, longest + step + 1)
    return tokens


def prefill(target: Qwen3, tokens: Tensor, capacity: int) -> tuple[Tensor, list[Cache]]:
    """The last layer's output [rows, length, hidden], and the caches. Rows may end in padding, which is not read."""
    rows, length = tokens.shape
    angles = target.cos[:length], target.sin[:length]
    capacity = -(-capacity // CACHE_STEP) * CACHE_STEP
    x = target.model.embed_tokens(tokens)
    caches = []
    for layer in layers_of(target.model.layers):
        attention = layer.self_attn
        q, k, v = project(attention, layer.input_layernorm(x), angles)
        shape = (rows, attention.kv_heads, capacity, attention.dim)
        cache = Cache(x.new_zeros(shape), x.new_zeros(shape))
        cache.keys[:, :, :length] = k
        cache.values[:, :, :length] = v
        caches.append(cache)
        k, v = (part.repeat_interleave(attention.heads // attention.kv_heads, 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x, caches


def decode(target: Qwen3, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], used: int) -> Tensor:
    """One token a row, [rows], at its own position: the last layer's output [rows, hidden]. `used`: rows of the caches
    that hold anything."""
    every = torch.arange(len(tokens), device=tokens.device)
    upto = -(-used // CACHE_STEP) * CACHE_STEP
    visible = (torch.arange(upto, device=tokens.device) <= positions.unsqueeze(1))[:, None, None]
    angles = target.cos[positions][:, None, None], target.sin[positions][:, None, None]
    x = target.model.embed_tokens(tokens).unsqueeze(1)
    for layer, cache in zip(layers_of(target.model.layers), caches, strict=True):
        attention = layer.self_attn
        q, k, v = project(attention, layer.input_layernorm(x), angles)
        cache.keys[every, :, positions] = k.squeeze(2)
        cache.values[every, :, positions] = v.squeeze(2)
        # the query heads of a key head are rows of one attention: its keys are read once
        q = q.view(len(tokens), attention.kv_heads, -1, attention.dim)
        mixed = functional.scaled_dot_product_attention(
            q, cache.keys[:, :, :upto], cache.values[:, :, :upto], attn_mask=visible.expand(-1, -1, q.shape[2], -1)
        )
        x = x + attention.o_proj(mixed.reshape(len(tokens), 1, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x.squeeze(1)


def project(attention: SelfAttention, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [rows, heads, length, dim] of x [rows, length, hidden]."""
    rows, length, _ = x.shape
    q = attention.q_proj(x).view(rows, length, attention.heads, attention.dim)
    k = attention.k_proj(x).view(rows, length, attention.kv_heads, attention.dim)
    v = attention.v_proj(x).view(rows, length, attention.kv_heads, attention.dim)
    q = rotate(attention.q_norm(q).transpose(1, 2), angles)
    k = rotate(attention.k_norm(k).transpose(1, 2), angles)
    return q, k, v.transpose(1, 2)
