"""Qwen3 for training: parameters named as Hugging Face names them, a loss over weighted tokens, no cache."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from training.chat_format import CONTROLS, END_OF_TEXT, END_OF_TURN, PAD, UNUSED

IGNORED = -100
UNUSED_IDS = tuple(CONTROLS.index(control) for control in UNUSED)


@frozen
class Geometry:
    """A dense Qwen3 with tied embeddings. The defaults are the demo target's: 11.8 million parameters."""

    vocabulary: int = 4096
    hidden: int = 320
    inner: int = 832
    layers: int = 10
    heads: int = 5
    kv_heads: int = 1
    head_dim: int = 64
    context: int = 8192
    theta: float = 1e6
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """config.json, as transformers 5 writes it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": CONTROLS.index(END_OF_TURN),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.inner,
            "layer_types": ["full_attention"] * self.layers,
            "max_position_embeddings": self.context,
            "max_window_layers": self.layers,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": CONTROLS.index(PAD),
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_theta": self.theta, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }

    def generation(self) -> dict[str, Any]:
        """generation_config.json: sampled as Qwen3's cards advise without thinking, and both ways to end an answer."""
        ends = [CONTROLS.index(END_OF_TURN), CONTROLS.index(END_OF_TEXT)]
        sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
        return {**sampling, "eos_token_id": ends, "pad_token_id": CONTROLS.index(PAD)}


class Trainable(nn.Module):
    """A model whose forward is its loss of a batch."""

    def compile_parts(self) -> None:
        """Compile what there is many of, once, and what is large."""


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        size, dim = geometry.hidden, geometry.head_dim
        self.heads, self.kv_heads, self.dim = geometry.heads, geometry.kv_heads, dim
        self.q_proj = nn.Linear(size, geometry.heads * dim, bias=False)
        self.k_proj = nn.Linear(size, geometry.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, geometry.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(geometry.heads * dim, size, bias=False)
        self.q_norm = Norm(dim, geometry.eps)
        self.k_norm = Norm(dim, geometry.eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (rotate(k, angles), v))
        mixed = functional.scaled_dot_product_attention(rotate(q, angles), k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, self.heads * self.dim))


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotary embedding of [rows, heads, length, dim] at positions 0, 1, ..."""
    cos, sin = angles
    one, two = x.float().chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


class Feed(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.input_layernorm = Norm(geometry.hidden, geometry.eps)
        self.self_attn = SelfAttention(geometry)
        self.post_attention_layernorm = Norm(geometry.hidden, geometry.eps)
        self.mlp = Feed(geometry.hidden, geometry.inner)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(geometry.vocabulary, geometry.hidden)
        self.layers = nn.ModuleList(DecoderBlock(geometry) for _ in range(geometry.layers))
        self.norm = Norm(geometry.hidden, geometry.eps)


class Qwen3(Trainable):
    """`state_dict` has the names and shapes of a Hugging Face checkpoint with tied embeddings."""

    cos: Tensor
    sin: Tensor
    unused: Tensor

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = Backbone(geometry)
        self._loss = token_loss
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * geometry.layers) ** 0.5 if deep else 0.02)
        powers = torch.arange(0, geometry.head_dim, 2).double() / geometry.head_dim
        turns = torch.outer(torch.arange(geometry.context).double(), geometry.theta**-powers)
        self.register_buffer("cos", turns.cos().float(), persistent=False)
        self.register_buffer("sin", turns.sin().float(), persistent=False)
        unused = torch.zeros(geometry.vocabulary)
        unused[list(UNUSED_IDS)] = -torch.inf
        self.register_buffer("unused", unused, persistent=False)

    def compute_hidden(self, tokens: Tensor) -> Tensor:
        """[rows, length] token ids to [rows, length, hidden], after the last norm."""
        x = self.model.embed_tokens(tokens)
        angles = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model.layers:
            x = layer(x, angles)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean loss in nats over the tokens after the first, by weight. tokens, weights: [rows, length + 1].

        Ids that are never used stay out of the softmax: as an output they would only be pushed away, and with tied
        embeddings their rows would drift far from the others. Where a text spells one, it is no label either.
        """
        hidden = self.compute_hidden(tokens[:, :-1].long())
        return self._loss(hidden, self.model.embed_tokens.weight, self.unused, tokens[:, 1:].long(), weights[:, 1:])

    def compile_parts(self) -> None:
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self._loss = torch.compile(token_loss, dynamic=False)


def token_loss(hidden: Tensor, table: Tensor, unused: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return the mean loss of predicting `tokens`. unused: minus infinity for ids that are never predicted."""
    weights = weights.float().masked_fill(unused[tokens] < 0, 0)
    labels = tokens.masked_fill(weights == 0, IGNORED)
    scores = functional.linear(hidden, table).float() + unused
    losses = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1)
