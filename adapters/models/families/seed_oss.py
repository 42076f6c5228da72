"""Seed-OSS: the projections of queries, keys and values have a bias, and the one behind attention may have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen

from adapters.checkpoint.config_fields import check_field, read_flag, refuse_flag
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.rope import parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.layers.layer_traits import LayerTraits

HEAD_DIM = 128  # the default of transformers, for files without head_dim


@frozen
class SeedOssConfig(DenseConfig):
    qkv_bias: ClassVar[bool] = True

    out_bias: bool = field(kw_only=True, default=False)

    @property
    def traits(self) -> LayerTraits:
        return LayerTraits(out_bias=self.out_bias)


def parse(raw: Mapping[str, Any]) -> SeedOssConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    check_field(raw, "attention_bias", (True,))
    refuse_flag(raw, "mlp_bias")
    theta, _ = parse_rope(raw, ("default",))
    out_bias = read_flag(raw, "attention_out_bias")
    return SeedOssConfig(**read_dense_fields(raw, head_dim=HEAD_DIM), rope_theta=theta, out_bias=out_bias)


FAMILY = Family("seed_oss", parse, DenseShard)
