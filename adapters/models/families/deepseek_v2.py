"""DeepSeek-V2 and V2-Lite: attention over compressed rows, and experts that a router scores by a softmax.

Experts may be in groups. All rows go through one more expert, which has no gate. The first layers have a dense
feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.checkpoint.config_fields import check_field, read_size, refuse_flag
from adapters.models.decoder.config.deepseek_names import find_deepseek_name
from adapters.models.decoder.config.experts_config import read_softmax_experts
from adapters.models.decoder.config.latent_config import LatentConfig, read_latent_fields
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family

GREEDY = "greedy"  # routing that looks at no groups


def parse(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    refuse_flag(raw, "mlp_bias")
    refuse_flag(raw, "norm_topk_prob")  # transformers and DeepSeek's own code differ for it
    check_field(raw, "scoring_func", ("softmax",))
    check_field(raw, "moe_layer_freq", (1,))
    check_field(raw, "topk_method", (GREEDY, "group_limited_greedy"))
    alone = raw.get("topk_method", GREEDY) == GREEDY
    own = {**raw, "norm_topk_prob": False} | ({"n_group": 1, "topk_group": 1} if alone else {})
    shared = read_size(raw, "moe_intermediate_size") * read_size(raw, "n_shared_experts", 2)
    experts = read_softmax_experts(own, count="n_routed_experts", inner="moe_intermediate_size", shared=shared)
    return LatentConfig(experts=experts, **read_latent_fields({"q_lora_rank": 1536, **raw}))


FAMILY = Family("deepseek_v2", parse, DenseShard, find_deepseek_name)
