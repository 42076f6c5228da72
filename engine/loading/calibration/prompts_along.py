"""Says whether prompts go along with decode steps of a launch, and how much of a prompt is launched at once there."""

from __future__ import annotations

from attrs import evolve

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from states.settings import Settings

# A chunk of 2,048 rows of a 27B hybrid takes 180 to 220 ms on an H200, and 2 to 3 ms more if the host hears of each.
# What comes meanwhile waits for two chunks at most, because the launch is ended for it. So is one that would pass the
# rows that a follower waits for (`states/followers.py`).
CHUNKS_ALONE = 64
# Rows of a forward of a model without positional state, decode rows included.
FORWARD_ROWS = 1024


def with_prompts_along(settings: Settings, shard: Pipeline) -> Settings:
    """Return the settings with prompts that go along with decode steps, where that is possible.

    There must be no draft, and the device must run ahead of the host.

    * With positional state there must be mixed forwards, and kernels must settle the rows of a prompt but not decode
      rows. A prompt that nothing waits for gets a few chunks at a time, since such launches end between two chunks.
    * Without, prompts go along instead of having a lane of their own. Those of models with experts keep that lane,
      because the two were not compared for them.
    """
    if settings.max_proposals or not shard.spec.runs_ahead:
        return settings
    if settings.mixed_rows and settings.stateful and settings.commits_per_segment:
        return evolve(settings, mixed_launches=True, chunks_per_prefill=min(shard.span, CHUNKS_ALONE))
    if settings.prompt_lane_min_rows and not has_experts(shard):
        rows = min(settings.chunk, FORWARD_ROWS)
        return evolve(settings, mixed_launches=True, mixed_rows=rows, prompt_lane_min_rows=0)
    return settings


def has_experts(shard: Pipeline) -> bool:
    """Do layers of the first part have experts?"""
    part = shard.parts[0]
    return isinstance(part, DenseShard) and part.config.experts is not None
