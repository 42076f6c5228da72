"""The architectures `llama`, `qwen2`, `qwen3` and `qwen3moe`.

Only their names differ from the published ones, except for the rows of queries and keys of `llama`. For this
architecture llama.cpp rotates neighbouring numbers of a head, and published models rotate its two halves. Therefore
the converter interleaves the two halves, and `split_halves` takes them apart again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attrs import evolve
from torch import Tensor

from adapters.checkpoint.gguf.gguf_tensor import make_tensor
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.rope import Divided
from adapters.models.families.llama import THETA, LlamaConfig
from adapters.models.gguf.architecture import ATTENTION, EXPERTS, FRAME, Architecture, Inverse, read_shared_settings

FREQUENCIES = "rope_freqs.weight"
ATTENTION_FACTOR = "rope.scaling.yarn_attn_factor"


def read_settings(metadata: Metadata, *, theta: float | None = None, keeps_multiplier: bool = False) -> dict[str, Any]:
    """Return the settings as config.json has them. theta: for files without a base of rotary embedding.

    keeps_multiplier: the caller reads the multiplier of YaRN's logarithm.
    """
    shared = read_shared_settings(metadata)
    metadata.refuse("rope.dimension_count", shared["head_dim"])
    return {
        **shared,
        "rope_parameters": {
            "rope_theta": metadata.read_number("rope.freq_base", theta),
            **read_scaling(metadata, keeps_multiplier=keeps_multiplier),
        },
    }


def read_scaling(metadata: Metadata, *, keeps_multiplier: bool) -> dict[str, Any]:
    """Return the scaling of rotary embedding as config.json has it. Files with nothing but a factor mean `linear`."""
    kind = metadata.find_field("rope.scaling.type") or "linear"
    factor = metadata.read_number("rope.scaling.factor", metadata.read_number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in {0, 1}):
        return {"rope_type": "default"}
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    for name, plain in {
        "attn_factor": 1,
        "yarn_ext_factor": 1,
        "yarn_log_multiplier": 0,
    }.items():
        if not (keeps_multiplier and name == "yarn_log_multiplier"):
            metadata.refuse(f"rope.scaling.{name}", plain)
    # The converter stores a published attention_factor. Without one, YaRN recommends one for the factor.
    given = metadata.find_field(ATTENTION_FACTOR) is not None
    return {
        "rope_type": kind,
        "factor": factor,
        **({"attention_factor": metadata.read_number(ATTENTION_FACTOR)} if given else {}),
        "original_max_position_embeddings": metadata.read_count("rope.scaling.original_context_length"),
        "beta_fast": metadata.read_number("rope.scaling.yarn_beta_fast", 32),
        "beta_slow": metadata.read_number("rope.scaling.yarn_beta_slow", 1),
    }


def find_no_inverse(config: DenseConfig, name: str) -> None:  # noqa: ARG001 - the interface of `Architecture`
    """Return None: the converter changes no tensor of these architectures."""
    return


def find_llama_inverse(config: DenseConfig, name: str) -> Inverse | None:
    """Return the function that takes the halves of heads apart, for queries and keys of `llama`."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    return None if heads is None else partial(split_halves, heads=heads)


def split_halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows whose heads have all numbers at even indices first, then those at odd indices."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def add_frequency_factors(config: LlamaConfig, metadata: Metadata) -> LlamaConfig:
    """Return the configuration with the factors that divide rotary frequencies. Files store Llama 3's scaling so."""
    factors = read_frequency_factors(metadata, config.head_dim, has_scaling=config.rope_scaling is not None)
    return config if factors is None else evolve(config, rope_scaling=factors)


def read_frequency_factors(metadata: Metadata, head_dim: int, *, has_scaling: bool) -> Divided | None:
    """Return the factors that divide rotary frequencies, if the file has some. Raises CheckpointError.

    has_scaling: the metadata have a scaling as well, which is refused.
    """
    stored = metadata.tensors.get(FREQUENCIES)
    if stored is None:
        return None
    if stored.shape != (head_dim // 2,) or stored.packing.name != "F32" or has_scaling:
        raise metadata.make_error(
            f"{FREQUENCIES} is not {head_dim // 2} numbers of type F32, or comes with another scaling"
        )
    factors = make_tensor(stored).read(FREQUENCIES).tolist()
    if min(factors) <= 0:
        raise metadata.make_error(f"{FREQUENCIES} has numbers that are not positive")
    return Divided(tuple(factors))


LLAMA = Architecture(
    partial(read_settings, theta=THETA),
    FRAME | ATTENTION,
    find_llama_inverse,
    adjust_config=add_frequency_factors,
    ignored=frozenset({FREQUENCIES}),
)
QWEN = Architecture(read_settings, FRAME | ATTENTION, find_no_inverse)
QWEN_MOE = Architecture(read_settings, {**FRAME, **ATTENTION, **EXPERTS}, find_no_inverse)
