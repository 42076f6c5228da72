"""Says whether prompts go along with decode steps of a launch, and how much of a prompt is launched at once there."""

from __future__ import annotations

from attrs import evolve

from adapters.models.decoder.pipeline.pipeline import Pipeline
from states.settings import Settings

# A chunk of 1,024 rows of a 27B hybrid takes 90 to 130 ms on an H200, and 2 to 3 ms more if the host hears of each one.
# What comes meanwhile waits for two chunks at most.
CHUNKS_ALONE = 4


def with_prompts_along(settings: Settings, shard: Pipeline) -> Settings:
    """Return the settings with prompts that go along with decode steps, where that is possible.

    There must be mixed forwards and no draft. The device must run ahead of the host, and kernels must settle the rows
    of a prompt but not decode rows. Such launches can be stopped between two chunks, so a prompt that nothing waits for
    gets a few at a time.
    """
    settles = settings.stateful and settings.commits_per_segment
    if not (settings.mixed_rows and settles and shard.spec.runs_ahead) or settings.max_proposals:
        return settings
    return evolve(settings, mixed_launches=True, chunks_per_prefill=min(shard.span, CHUNKS_ALONE))
