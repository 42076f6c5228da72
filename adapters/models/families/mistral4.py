"""Mistral 4: attention over compressed rows with queries that are scaled by position, and softmax routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from adapters.checkpoint.config_fields import check_field, find_text_settings, read_positive, read_rope, read_size
from adapters.models.decoder.config.deepseek_names import find_deepseek_name
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.experts_config import read_softmax_experts
from adapters.models.decoder.config.latent_config import ROPES, LatentConfig, read_latent_fields
from adapters.models.decoder.config.rope import Rotary, ScaledRotary
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.families.mistral import find_text_name

BETA = 0.1  # the defaults of transformers
ORIGINAL = 8192


@frozen
class Mistral4Config(LatentConfig):
    """A model whose queries are scaled as `ScaledRotary` says."""

    beta: float = field(kw_only=True)
    original: int = field(kw_only=True)

    @property
    def rotary(self) -> Rotary:
        plain = super().rotary
        return ScaledRotary(plain.head_dim, plain.theta, plain.scaling, beta=self.beta, original=self.original)


def parse(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    text = find_text_settings(raw, "mistral4")
    check_field(text, "n_group", (1,))
    shared = read_size(text, "moe_intermediate_size") * read_size(text, "n_shared_experts", 1)
    own = {"norm_topk_prob": True, **text}
    experts = read_softmax_experts(own, count="n_routed_experts", inner="moe_intermediate_size", shared=shared)
    rope = read_rope(text, ROPES, partial=1.0)
    original = read_positive(rope.get("original_max_position_embeddings", ORIGINAL), "original_max_position_embeddings")
    beta = read_positive(rope.get("llama_4_scaling_beta", BETA), "llama_4_scaling_beta")
    fields = read_latent_fields({"q_lora_rank": 1024, **text})
    return Mistral4Config(**fields, experts=experts, beta=beta, original=int(original))


def find_name(published: str, config: DenseConfig) -> str:
    """Return our name of a tensor of the text model; empty for those of image parts."""
    name = find_text_name(published, config)
    return find_deepseek_name(name, config) if name else ""


FAMILY = Family("mistral4", parse, DenseShard, find_name)
