"""DeepSeek-V3 and R1, and models of the same structure: attention over compressed rows, and sigmoid routing by groups.

All rows go through one more expert, which has no gate. The first layers have a dense feed-forward. Published
checkpoints have a prediction head, whose layer is like the model's own layers with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.checkpoint.config_fields import check_field, read_size
from adapters.models.decoder.config.deepseek_names import find_deepseek_name
from adapters.models.decoder.config.experts_config import read_sigmoid_experts
from adapters.models.decoder.config.latent_config import LatentConfig, read_latent_fields
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, use_own_shape
from adapters.models.kernels.interfaces.experts_interface import SigmoidExpertsShape


def parse(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    check_field(raw, "moe_layer_freq", (1,))
    return LatentConfig(experts=read_experts(raw), **read_latent_fields({"q_lora_rank": 1536, **raw}))


def read_experts(raw: Mapping[str, Any]) -> SigmoidExpertsShape:
    """Return the shape of the feed-forwards with experts. Raises CheckpointError."""
    check_field(raw, "scoring_func", ("sigmoid",))
    check_field(raw, "topk_method", ("noaux_tc",))
    shared = read_size(raw, "moe_intermediate_size") * read_size(raw, "n_shared_experts", 1)
    return read_sigmoid_experts(
        raw, count="n_routed_experts", inner="moe_intermediate_size", shared=shared, groups=True
    )


FAMILY = Family("deepseek_v3", parse, DenseShard, find_deepseek_name, head_shape=use_own_shape)
