"""GGUF files of models with windows: metadata and names as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapters.models.decoder.config.layered_config import LayeredConfig, LayerKind
from adapters.models.decoder.config.rope import Linear, Proportional, Yarn

WINDOWED_NAMES = {"gemma3": "gemma3", "gemma4": "gemma4", "gpt_oss": "gpt-oss"}
# Published parts of names, by ours; the package's tables have the published ones.
WRITTEN: Mapping[str, Mapping[str, str]] = {
    "gemma4": {
        ".mlp.gate.": ".router.proj.",
        ".mlp.experts.": ".experts.",
        ".gate_proj.weight": ".gate_up_proj.weight",
        "layer_scalar": "layer_scalar.weight",
    },
    "gpt-oss": {".mlp.gate.": ".mlp.router.", ".sinks": ".sinks.weight"},
}


def written_as(name: str, architecture: str) -> str:
    """The published name of a tensor."""
    for ours, published in WRITTEN.get(architecture, {}).items():
        if "gate_proj" not in ours or ".experts." in name:
            name = name.replace(ours, published, 1)
    return name


def find_scale_name(published: str) -> str | None:
    """Return the name of one of Gemma 4's scales, which the package's tables do not have; None for other tensors."""
    parts = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    part = next((part for name, part in parts.items() if published.endswith(name)), None)
    return part and f"blk.{published.split('.')[2]}.{part}.scale"


def join_halves(every: Tensor, name: str, read: Callable[[str], Tensor | None]) -> Tensor | None:
    """Return gates and up-projection of Gemma 4's experts as one tensor, in the gates' place; None in the place of the
    other.
    """
    if "up_proj" in name:
        return None
    other = read(name.replace("gate_proj", "up_proj"))
    assert other is not None
    return torch.cat((every, other), 1)


def make_frequency_factors(config: Any) -> np.ndarray:
    rotary = full_kind(config).rotary
    assert isinstance(rotary.scaling, Proportional)
    pairs = rotary.scaling.pairs
    return np.array([1.0] * pairs + [1e30] * (rotary.head_dim // 2 - pairs), np.float32)


def full_kind(config: LayeredConfig) -> LayerKind:
    return next(kind for kind in config.kinds if not kind.traits.window)


def windowed_settings(config: Any, name: str) -> dict[str, Any]:
    full = full_kind(config)
    sliding = next(kind for kind in config.kinds if kind.traits.window)
    flags = [kind.traits.window > 0 for kind in config.kinds]
    found: dict[str, Any] = {
        "ARCH.block_count": config.num_layers,
        "ARCH.context_length": config.max_positions,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.feed_forward_length": config.kinds[0].intermediate_size,
        "ARCH.attention.head_count": config.num_heads,
        "ARCH.attention.head_count_kv": config.num_kv_heads,
        "ARCH.attention.key_length": full.head_dim,
        "ARCH.attention.value_length": full.head_dim,
        "ARCH.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ARCH.attention.sliding_window": sliding.traits.window,
        "ARCH.rope.freq_base": float(full.rotary.theta),
        **scaling_settings(full),
    }
    experts = config.experts
    if experts is not None:
        found |= {
            "ARCH.expert_count": experts.count,
            "ARCH.expert_used_count": experts.chosen,
            "ARCH.expert_feed_forward_length": experts.inner,
        }
    if name == "gpt-oss":
        return found
    found["ARCH.rope.freq_base_swa"] = float(sliding.rotary.theta)
    found["ARCH.final_logit_softcapping"] = float(config.final_cap) or None
    if name == "gemma3":
        return found | {"ARCH.attention.sliding_window_pattern": flags}
    widths = [kind.intermediate_size for kind in config.kinds]
    return found | {
        "ARCH.attention.sliding_window_pattern": flags,
        "ARCH.attention.head_count_kv": [kind.num_kv_heads for kind in config.kinds],
        "ARCH.attention.key_length_swa": sliding.head_dim,
        "ARCH.attention.value_length_swa": sliding.head_dim,
        "ARCH.attention.shared_kv_layers": sum(kind.traits.source is not None for kind in config.kinds),
        "ARCH.embedding_length_per_layer_input": config.inputs,
        "ARCH.feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "ARCH.rope.dimension_count": full.head_dim,
        "ARCH.rope.dimension_count_swa": sliding.head_dim,
    }


def scaling_settings(full: LayerKind) -> dict[str, Any]:
    match full.rotary.scaling:
        case Linear(factor=factor):
            return {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": factor}
        case Yarn() as yarn:
            return {
                "ARCH.rope.scaling.type": "yarn",
                "ARCH.rope.scaling.factor": yarn.factor,
                "ARCH.rope.scaling.original_context_length": int(yarn.original),
            }
        case _:
            return {}
