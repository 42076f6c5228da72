"""Qwen3.5 for training: gated DeltaNet, gated attention and a head that predicts one token further; no cache.

Parameters are named as Hugging Face names them, those of the head (`mtp.*`) as published checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from training.chat_format import CONTROLS, END_OF_TURN, PAD
from training.delta_rule import CHUNK, gated_delta_rule
from training.model import UNUSED_IDS, Feed, Geometry, rotate

DEPTHS = 2
"""The tokens that the head predicts in a row while training. So it learns to continue from its own predictions."""

HEAD_SHARE = 0.5
"""The weight of the head's losses against the model's. They do not change the model."""


Loss = Callable[..., Any]


@frozen
class HybridGeometry:
    """A dense Qwen3.5 with tied embeddings. The defaults are the hybrid demo's: 2.5 million parameters."""

    vocabulary: int = 4096
    hidden: int = 160
    inner: int = 256
    layers: int = 8
    interval: int = 4
    """The last layer of each group of this many layers is an attention layer."""

    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    rotary: float = 0.25
    """The part of a head that turns with the position."""

    key_heads: int = 2
    value_heads: int = 4
    linear_dim: int = 32
    """The size of a key or value head of the linear layers."""

    conv: int = 4
    context: int = 8192
    theta: float = 1e6
    eps: float = 1e-6

    @property
    def kinds(self) -> list[str]:
        every = range(1, self.layers + 1)
        return ["linear_attention" if layer % self.interval else "full_attention" for layer in every]

    def config(self) -> dict[str, Any]:
        """config.json of a text-only model, as transformers 5 writes it, and what published ones say besides."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": CONTROLS.index(END_OF_TURN),
            "full_attention_interval": self.interval,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.inner,
            "layer_types": self.kinds,
            "linear_conv_kernel_dim": self.conv,
            "linear_key_head_dim": self.linear_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.linear_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": self.context,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": CONTROLS.index(PAD),
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "partial_rotary_factor": self.rotary,
                "rope_theta": self.theta,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }

    def generation(self) -> dict[str, Any]:
        return Geometry().generation()


class OffsetNorm(nn.Module):
    """RMS norm that multiplies by 1 + weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (normal(x.float(), self.eps) * (1 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm that multiplies by weight and by silu(gate), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (normal(x.float(), self.eps) * self.weight.float() * functional.silu(gate.float())).to(gate.dtype)


def normal(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class GatedAttention(nn.Module):
    """Attention with a gate on each head's output. The first part of a head has rotary embedding."""

    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        size, dim = geometry.hidden, geometry.head_dim
        self.heads, self.kv_heads, self.dim = geometry.heads, geometry.kv_heads, dim
        self.q_proj = nn.Linear(size, geometry.heads * 2 * dim, bias=False)  # of each head: query, gate
        self.k_proj = nn.Linear(size, geometry.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, geometry.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(geometry.heads * dim, size, bias=False)
        self.q_norm = OffsetNorm(dim, geometry.eps)
        self.k_norm = OffsetNorm(dim, geometry.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.dim)).chunk(2, -1)
        k, v = (project(x).unflatten(-1, (self.kv_heads, self.dim)) for project in (self.k_proj, self.v_proj))
        q, k = (rotate_first_dimensions(part.transpose(1, 2), cos, sin) for part in (self.q_norm(q), self.k_norm(k)))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v.transpose(1, 2)))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((mixed * gate.sigmoid()).flatten(2))


def rotate_first_dimensions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions of [rows, heads, length, dim], as many as there are angles for."""
    rotary = 2 * cos.shape[-1]
    return torch.cat((rotate(x[..., :rotary], (cos, sin)), x[..., rotary:]), -1)


class DeltaNet(nn.Module):
    """A gated delta rule behind a short convolution."""

    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        dim = geometry.linear_dim
        self.dim, self.repeats = dim, geometry.value_heads // geometry.key_heads
        self.sizes = [geometry.key_heads * dim, geometry.key_heads * dim, geometry.value_heads * dim]
        channels = sum(self.sizes)
        self.in_proj_qkv = nn.Linear(geometry.hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(geometry.hidden, geometry.value_heads * dim, bias=False)
        self.in_proj_b = nn.Linear(geometry.hidden, geometry.value_heads, bias=False)
        self.in_proj_a = nn.Linear(geometry.hidden, geometry.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, geometry.conv, groups=channels, bias=False)
        # Heads forget at rates from one row to hundreds: half of it is gone after 1 / exp(A_log) rows at first.
        self.A_log = nn.Parameter(torch.linspace(-5.5, 0.7, geometry.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(geometry.value_heads))
        self.norm = GatedNorm(dim, geometry.eps)
        self.out_proj = nn.Linear(geometry.value_heads * dim, geometry.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = functional.silu(convolve(self.in_proj_qkv(x).float(), self.conv1d.weight.float()))
        parts = torch.split(mixed, self.sizes, -1)
        q, k, v = (torch.unflatten(part, -1, (-1, self.dim)).transpose(1, 2) for part in parts)
        q, k = (unit(part).repeat_interleave(self.repeats, 1) for part in (q, k))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        pace = functional.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        decay = (-self.A_log.float().exp() * pace).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta_rule(q * self.dim**-0.5, k, v, decay, beta).transpose(1, 2)
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.dim))
        return self.out_proj(self.norm(out, gate).flatten(2))


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve each channel of [rows, length, channels] with taps [channels, 1, taps], over rows up to its own."""
    taps, length = weight.shape[-1], x.shape[1]
    padded = functional.pad(x, (0, 0, taps - 1, 0))
    return reduce(add, (padded[:, tap : tap + length] * weight[:, 0, tap] for tap in range(taps)))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class AttentionBlock(nn.Module):
    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(geometry.hidden, geometry.eps)
        self.self_attn = GatedAttention(geometry)
        self.post_attention_layernorm = OffsetNorm(geometry.hidden, geometry.eps)
        self.mlp = Feed(geometry.hidden, geometry.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeltaBlock(nn.Module):
    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(geometry.hidden, geometry.eps)
        self.linear_attn = DeltaNet(geometry)
        self.post_attention_layernorm = OffsetNorm(geometry.hidden, geometry.eps)
        self.mlp = Feed(geometry.hidden, geometry.inner)

    def forward(self, x: Tensor, _cos: Tensor, _sin: Tensor) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridBackbone(nn.Module):
    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(geometry.vocabulary, geometry.hidden)
        blocks = {"linear_attention": DeltaBlock, "full_attention": AttentionBlock}
        self.layers = nn.ModuleList(blocks[kind](geometry) for kind in geometry.kinds)
        self.norm = OffsetNorm(geometry.hidden, geometry.eps)


class PredictionHead(nn.Module):
    """Multi-token prediction: of a row's token and the hidden state of the row before it, the hidden state that the
    model would have after the row, or nearly so."""

    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = OffsetNorm(geometry.hidden, geometry.eps)
        self.pre_fc_norm_hidden = OffsetNorm(geometry.hidden, geometry.eps)
        self.fc = nn.Linear(2 * geometry.hidden, geometry.hidden, bias=False)
        self.layers = nn.ModuleList([AttentionBlock(geometry)])
        self.norm = OffsetNorm(geometry.hidden, geometry.eps)

    def forward(self, embedded: Tensor, before: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)), -1)
        x = self.fc(joined)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Hybrid(nn.Module):
    """`state_dict` has the names and shapes of a Hugging Face checkpoint with tied embeddings, text only."""

    cos: Tensor
    sin: Tensor
    unused: Tensor

    def __init__(self, geometry: HybridGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = HybridBackbone(geometry)
        self.mtp = PredictionHead(geometry)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * geometry.layers) ** 0.5 if deep else 0.02)
        rotary = round(geometry.head_dim * geometry.rotary)
        powers = torch.arange(0, rotary, 2).double() / rotary
        turns = torch.outer(torch.arange(geometry.context).double(), geometry.theta**-powers)
        self.register_buffer("cos", turns.cos().float(), persistent=False)
        self.register_buffer("sin", turns.sin().float(), persistent=False)
        unused = torch.zeros(geometry.vocabulary)
        unused[list(UNUSED_IDS)] = -torch.inf
        self.register_buffer("unused", unused, persistent=False)
        self.losses: tuple[Loss, Loss] = (compute_model_loss, compute_head_loss)

    def compute_hidden(self, tokens: Tensor) -> Tensor:
        """[rows, length] token ids to [rows, length, hidden], after the last norm."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, *self.angles(tokens))
        return self.model.norm(x)

    def ahead(self, tokens: Tensor, hidden: Tensor, *, first: bool) -> Tensor:
        """Run the head on each row's token and the hidden state of the row before. The shapes are those of `hidden`.

        first: `hidden` is the model's own. Then rows at multiples of 64 get zeros for the row before, as in the server,
        where a sequence may be continued there from kept rows alone.
        """
        before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        if first:
            continued = torch.arange(tokens.shape[1], device=tokens.device) % CHUNK == 0
            before = before.masked_fill(continued[:, None], 0)
        return self.mtp(self.model.embed_tokens(tokens).detach(), before, *self.angles(tokens))

    def angles(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean loss in nats over the tokens after the first, by weight, and HEAD_SHARE of the head's.

        tokens, weights: [rows, length + 1]. Ids that are never used stay out of the softmax, as in `Qwen3`. The head
        learns to predict the model's distributions, wherever the model learns. Its loss changes the head alone.
        """
        tokens, weights = tokens.long(), weights[:, 1:].float()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        weights = weights.masked_fill(self.unused[labels] < 0, 0)
        hidden = self.compute_hidden(inputs)
        model_loss, head_loss = self.losses
        table = self.model.embed_tokens.weight
        loss, said = model_loss(hidden, table, self.unused, labels, weights)
        ahead, first = hidden.detach(), True
        for _ in range(DEPTHS):
            ahead = self.ahead(inputs, ahead, first=first)
            loss = loss + HEAD_SHARE / DEPTHS * head_loss(ahead, table.detach(), self.unused, said, weights)
            first = False
        return loss

    def compile_parts(self) -> Hybrid:
        """Compile layers and losses in place.

        Layers of a kind share one program. That takes seconds, where compiling the whole model would take minutes.
        """
        for layer in (*self.model.layers, *self.mtp.layers):
            layer.compile(dynamic=False)
        self.losses = torch.compile(compute_model_loss, dynamic=False), torch.compile(compute_head_loss, dynamic=False)
        return self


def compute_model_loss(
    hidden: Tensor, table: Tensor, unused: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the model's loss, and the logarithms of its distributions."""
    scores = (functional.linear(hidden, table).float() + unused).log_softmax(-1)
    losses = -scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (losses.masked_fill(weights == 0, 0) * weights).sum() / weights.sum().clamp_min(1), scores.detach()


def compute_head_loss(ahead: Tensor, table: Tensor, unused: Tensor, said: Tensor, weights: Tensor) -> Tensor:
    """Return the head's loss: the cross-entropy to the model's distributions, wherever the model learns."""
    scores = (functional.linear(ahead, table).float() + unused).log_softmax(-1)
    shares = said.exp()
    losses = -(shares * scores.masked_fill(shares == 0, 0)).sum(-1)
    counted = (weights > 0).float()
    return (losses * counted).sum() / counted.sum().clamp_min(1)
