"""Finds the time to restore rows from a shared store before the first request, kept by an earlier start or measured."""

from __future__ import annotations

import json
import logging
from hashlib import blake2b

import torch
from attrs import frozen

from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.processors import count_processors
from adapters.store.shared.shared_tier import SharedTier
from adapters.transfer.measure_copies import CopyMeasurement
from engine.loading.shard_peers import describe_placement
from engine.settings.calibration_cache import CalibrationCache, are_similar

log = logging.getLogger("rekindle")

VERSION = 1
MOST_NS = 10**9  # a second for one token's rows
SAMPLES = 4  # objects that are written and read at once: enough to see whether the store answers side by side


@frozen
class SharedTimes:
    """Nanoseconds to load one token's rows from the store: of several runs at once, and of one run alone."""

    together: int
    single: int

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, "together": self.together, "single": self.single})

    @classmethod
    def from_json(cls, text: str) -> SharedTimes:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.pop("version", None) != VERSION or set(value) != {"together", "single"}:
            raise ValueError("not what this version keeps of a shared store")
        if not all(type(time) is int and 0 < time <= MOST_NS for time in value.values()):
            raise ValueError("a time that cannot be")
        return cls(**value)


def build_shared_key(tier: SharedTier, shard: Pipeline, run_bytes: int) -> str:
    """Return the key under which times are kept: 32 hex digits over what they depend on."""
    placement = describe_placement(shard.parts)
    machine = torch.get_num_threads(), count_processors()
    parts = ("shared", VERSION, tier.client.url, tier.layout, tier.chooser.choice, run_bytes, placement, machine)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def find_shared_time(tier: SharedTier, rehearsal: CopyMeasurement, kept: CalibrationCache, key: str) -> int:
    """Return the nanoseconds to load one token's rows from the store; 0 if they cannot be measured.

    One sample is read in any case, because a store may be nearer or farther than it was. If it takes as long as at the
    earlier start, the earlier time of several at once counts, in the same proportion.
    """
    before = kept.recall(key, SharedTimes.from_json)
    try:
        with rehearsal.write_shared_samples(tier, 1 if before is not None else SAMPLES) as loads:
            single = rehearsal.measure_single(loads)
            if before is not None and single and are_similar(single, before.single):
                return min(MOST_NS, max(1, before.together * single // before.single))
            together = rehearsal.measure_alone(loads) if before is None else 0
        if before is not None and single:  # the store has changed: all samples are needed
            with rehearsal.write_shared_samples(tier, SAMPLES) as loads:
                together = rehearsal.measure_alone(loads)
    except OSError as error:
        log.warning("the speed of the shared tier could not be measured: %s", error)
        return 0
    if together and single:
        found = SharedTimes(min(together, MOST_NS), min(single, MOST_NS))
        kept.remember(key, found.to_json())
    return together
