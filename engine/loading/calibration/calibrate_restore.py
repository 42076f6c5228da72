"""Finds the times to restore rows on this machine before the first request: kept by an earlier start, or measured."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b

import torch
from attrs import asdict, evolve, fields, frozen

from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.processors import count_processors
from adapters.store.disk.disk_tier import DiskTier
from adapters.store.files.codec import SLOW_RATIO, Fixed, choose_codec, compute_ratio
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.store import Store
from adapters.store.tier import ReadableTier
from adapters.transfer.measure_copies import CopyMeasurement, Load
from effects.ids import Tier
from engine.loading.calibration.calibrate_compute import run_chunk, time_quickest
from engine.loading.calibration.calibrate_shared import build_shared_key, find_shared_time
from engine.loading.shard_peers import describe_placement
from engine.settings.calibration_cache import CalibrationCache, are_similar
from states.rates import ALONE, SLOWEST, Rates, compute_slowdown, estimate_prefill_time

log = logging.getLogger("rekindle")

SLOWLY = (
    "compressed cache files take %.2f times as long to restore as plain ones; --kv-cache-codec store writes plain ones"
)
VERSION = 4
MOST_NS = 10**9  # a second for one token's rows
# Passes over each codec's samples, in turn. The quicker one counts, because other work on the machine only slows them.
PASSES = 2
# Nanoseconds of a chunk. If computing takes longer, it is not measured how loading slows it: the start would take too
# long.
SLOW_NS = 50_000_000


@frozen
class RestoreTimes:
    """Nanoseconds to load one token's rows from host memory and from the disk tier's files.

    prefill_slowdown, load_slowdown: how much longer computing and loading take at the same time, as in `Rates`.
    single: as `from_files` if only one run is being read; 0: the store had no runs of its own.
    zstd: the time of zstd files relative to plain ones, in thousandths; 0: it was not measured.
    """

    from_memory: int = 0
    from_files: int = 0
    prefill_slowdown: int = 0
    load_slowdown: int = 0
    single: int = 0
    zstd: int = 0

    def add_to(self, rates: Rates, loads: Mapping[Tier, int]) -> Rates:
        """Return the rates with these times. loads: the time of each tier by its name."""
        known = {tier: time for tier, time in loads.items() if time}
        return evolve(rates, loads=known, prefill_slowdown=self.prefill_slowdown, load_slowdown=self.load_slowdown)

    def scale_to(self, single: int) -> RestoreTimes:
        """Return the times for today, if one run alone takes `single` now. Several runs at once change in the same
        proportion.
        """
        return evolve(self, from_files=min(max(1, self.from_files * single // self.single), MOST_NS), single=single)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> RestoreTimes:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.pop("version", None) != VERSION:
            raise ValueError("not what this version keeps of loading times")
        if set(value) != {field.name for field in fields(cls)}:
            raise ValueError("missing or unknown fields")
        times = value["from_memory"], value["from_files"], value["single"], value["zstd"]
        factors = value["prefill_slowdown"], value["load_slowdown"]
        if not all(type(number) is int for number in (*times, *factors)):
            raise ValueError("a time that is no whole number")
        possible = all(0 <= ns <= MOST_NS for ns in times) and (value["from_files"] or not value["single"])
        if not possible or not all(factor == 0 or ALONE <= factor <= SLOWEST for factor in factors):
            raise ValueError("a time that cannot be")
        return cls(**value)


def build_restore_key(store: Store[ReadableTier], shard: Pipeline, chunk: int) -> str:
    """Return the key under which times are kept: 32 hex digits over what they depend on, the model's numerics and the
    disk included.
    """
    tier = store.find_tier(DiskTier)
    disk = None if tier is None else (tier.folder.path, tier.folder.path.stat().st_dev)
    codec = None if tier is None else tier.chooser.codec
    parts = (
        VERSION,
        store.layout,
        store.run_bytes,
        describe_placement(shard.parts),
        torch.get_num_threads(),
        count_processors(),
        chunk,
    )
    return blake2b(repr((*parts, disk, codec)).encode(), digest_size=16).hexdigest()


def add_restore_times(
    rates: Rates, store: Store[ReadableTier], shard: Pipeline, *, chunk: int, kept: CalibrationCache
) -> Rates:
    """Return rates with the times of the store. Called on the lane while no request is served. What cannot be measured
    stays unknown.
    """
    started = time.perf_counter()
    rows = min(chunk, shard.spec.capacity)
    try:
        rehearsal = CopyMeasurement(store, shard.parts, shard.spec.capacity, rows)
        quick = estimate_prefill_time(rates, 0, rows) <= SLOW_NS
        compute = partial(run_chunk, shard, 0, rows, chunk) if quick else None
        found = load_or_measure_times(kept, build_restore_key(store, shard, chunk), rehearsal, compute)
    except (OSError, MemoryError, RuntimeError) as error:
        log.warning("the speed of restoring could not be measured: %s", error)
        return rates
    tier = store.find_tier(DiskTier)
    if tier is not None:
        tier.codec_choice.settle(choose_codec(found.zstd))
        if tier.chooser.codec == "zstd" and found.zstd > SLOW_RATIO:
            log.info(SLOWLY, found.zstd / 1000)
    log.debug("loading: %s, known after %.0f ms", asdict(found), 1e3 * (time.perf_counter() - started))
    loads = {store.memory_tier.name: found.from_memory} | ({} if tier is None else {tier.name: found.from_files})
    shared = store.find_tier(SharedTier)
    if shared is not None:
        key = build_shared_key(shared, shard, store.run_bytes)
        loads[shared.name] = find_shared_time(shared, rehearsal, kept, key)
    return found.add_to(rates, loads)


def load_or_measure_times(
    kept: CalibrationCache, key: str, rehearsal: CopyMeasurement, compute: Callable[[], None] | None
) -> RestoreTimes:
    """Return the times of this machine's memory and disk, kept or measured.

    A few of the store's own files are read in any case, because a disk may be slower or faster than it was. First they
    are read one after the other, which is quick. If that differs from the earlier start, or if the earlier start had
    only samples, they are read again as a restore reads them.
    """
    before = kept.recall(key, RestoreTimes.from_json)
    disk = rehearsal.store.find_tier(DiskTier)
    with ExitStack() as stack:
        own = [] if disk is None else stack.enter_context(rehearsal.lease_files(disk))
        if before is not None and not own:
            return before
        # Buffers that were not prepared yet would be slower.
        rehearsal.store.memory_ready.wait()
        single = rehearsal.measure_single(own)
        if before is not None and before.single and are_similar(single, before.single):
            return before.scale_to(single)
        now = rehearsal.measure_alone(own) if own else 0
        if before is not None:
            if now:
                kept.remember(key, (before := evolve(before, from_files=now, single=single)).to_json())
            return before
        host = rehearsal.measure_alone(rehearsal.create_copies())
        loads = dict[Fixed, list[Load]]()
        if disk is not None:
            loads |= {
                codec: stack.enter_context(rehearsal.write_samples(disk, codec)) for codec in choose_codecs(disk, own)
            }
        passes = [{codec: rehearsal.measure_alone(some) for codec, some in loads.items()} for _ in range(PASSES)]
        times = {codec: min(seconds_by_codec[codec] for seconds_by_codec in passes) for codec in loads}
        ratio = compute_ratio(times.get("store", 0), times.get("zstd", 0))
        codec: Fixed = "store" if disk is None else disk.codec_choice.get_written_codec(choose_codec(ratio))
        found = RestoreTimes(host, now or times.get(codec, 0), single=single, zstd=ratio)
        if compute is not None:
            alone = time_quickest(compute)
            load_ns, compute_ns = rehearsal.measure_during(
                own or loads.get(codec) or rehearsal.create_copies(), compute
            )
            prefill = compute_slowdown(compute_ns, alone)
            load = compute_slowdown(load_ns, found.from_files or found.from_memory)
            found = evolve(found, prefill_slowdown=prefill, load_slowdown=load)
    kept.remember(key, found.to_json())
    return found


def choose_codecs(disk: DiskTier, loads: Sequence[Load]) -> list[Fixed]:
    """Return the codecs to try: both if zstd is to be compared with plain files, none if there are files enough."""
    if disk.chooser.codec != "store":
        return ["store", "zstd"]
    return [] if loads else ["store"]
