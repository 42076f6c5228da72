"""Small random models cut into shards, and a life of some slots on them whose bits can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import proven, tokens_of
from tests.models.families.test_hybrid_exact import config as hybrid

CONFIGS: dict[str, DenseConfig] = {
    "dense": Qwen3Config(512, 96, 160, 5, 4, 2, 24, 2048, 1e6, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        512, 96, 160, 5, 4, 2, 24, 2048, 1e6, experts=ExpertsShape(7, 2, 48, is_normalized=True), dense_layers=(1,)
    ),
    "hybrid": hybrid((2, 4, 32, 32), 512, 96, 160, 5, 3, 1, 32, 2048, 1e6, rotated=8, kinds="llflf"),
}
CUTS: dict[str, tuple[int, ...]] = {"one": (5,), "two": (3, 5), "three": (1, 4, 5), "one a layer": (1, 2, 3, 4, 5)}
AUX = (0, 2, 4)
TOKENS = tokens_of(400, 512)


def pipeline(kind: str, cuts: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Pipeline:
    own, begin, parts = CONFIGS[kind], 0, list[DenseShard]()
    kernels = proven(own, dtype, 512)
    for end in cuts:
        weights = RandomWeights(own, scale=own.hidden_size**-0.5)
        how = {"slots": 3, "capacity": 512, "aux_layers": AUX, "state_checkpoints": 2, "layers": range(begin, end)}
        parts.append(DenseShard(own, weights, kernels.copy_for_shard(), ShardPlacement(dtype=dtype, **how)))
        begin = end
    return Pipeline(parts)


@cache
def whole_of(kind: str) -> DenseShard:
    """All layers in one shard, and nothing around it."""
    (part,) = pipeline(kind, (5,)).parts
    return part


def chunk(shard, slot: int, start: int, stop: int) -> None:
    bucket = next(bucket for bucket in shard.spec.buckets if bucket >= stop - start)
    shard.forward(Step((Segment(slot, start, stop - start),), bucket, rows_only=True), TOKENS[start:stop])


def step(shard, *parts: tuple[int, int, int], kept: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits and auxiliary hidden states of (slot, start, count) rows, of which so many are kept."""
    rows = sum(count for _, _, count in parts)
    own = Step(tuple(Segment(*part) for part in parts), next(bucket for bucket in shard.spec.buckets if bucket >= rows))
    left = shard.forward(own, torch.cat([TOKENS[start : start + count] for _, start, count in parts]))
    found = shard.logits(own, left.hidden)[:rows].clone(), [left.aux_hidden_states[one][:rows].clone() for one in AUX]
    shard.commit(own, kept)
    return found


def story(shard) -> str:
    """A digest of all bits that a life of some slots leaves: chunks, decode steps, roll back, copies, a checkpoint."""
    heard = list[Tensor]()

    def told(found: tuple[Tensor, list[Tensor]]) -> None:
        heard.extend((found[0], *found[1]))

    chunk(shard, 0, 0, 256)
    chunk(shard, 0, 256, 300)
    told(step(shard, (0, 300, 1), kept=[1]))
    told(step(shard, (0, 301, 9), kept=[4]))
    told(step(shard, (0, 305, 16), kept=[16]))
    shard.rows.copy(0, 1, 321)
    shard.states.copy(0, 1)
    told(step(shard, (0, 321, 3), (1, 321, 2), kept=[3, 1]))
    if shard.states.specs:
        shard.states.keep(0, 1)
        shard.states.load(1, 2)
    shard.rows.import_(2, 0, shard.rows.export(0, 0, 320))
    shard.states.import_(2, shard.states.export(0), 320)
    told(step(shard, (2, 320, 5), kept=[5]))
    heard += [one for _, one in sorted({**shard.rows.export(2, 0, 325), **shard.states.export(2)}.items())]
    digest = hashlib.blake2b()
    for one in heard:
        digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@cache
def story_of(kind: str) -> str:
    """Return the story of a shard that has all layers."""
    return story(whole_of(kind))


def assert_alike(split, whole) -> None:
    """All that a pipeline says of itself is what one shard says."""
    assert split.spec == whole.spec
    assert (split.rows.spec, split.states.specs) == (whole.rows.spec, whole.states.specs)
    assert (split.states.block, split.states.checkpoint_count) == (whole.states.block, whole.states.checkpoint_count)
    assert split.memory()["kv"] == whole.memory()["kv"]
