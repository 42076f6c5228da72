"""The settings of an engine, from the options, the loaded target and the times that its steps take."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.numerics.probe_result import Numerics
from engine.loading.calibrate_compute import beside_rows, kept_or_measured, key, mixed_rows, span
from engine.loading.device_survey import Placement, state_tokens
from engine.loading.load_draft import BATCH_ROWS, proposals, short_of_memory, widths
from engine.loading.load_scorer import FoundDrafter, cannot_stay
from engine.loading.memory_estimate import shares_pages
from engine.loading.memory_fit import Fit
from engine.loading.shard_peers import (
    placement,
)
from engine.settings.calibration_cache import Kept
from engine.settings.options import Options
from states.residency import resolve_residency
from states.settings import Settings

log = logging.getLogger("rekindle")


def decide(
    options: Options,
    parts: ExecutorParts,
    shard: Pipeline,
    draft: DraftModel | None,
    scores: FoundDrafter | None,
    *,
    plan: Sequence[Placement],
    numerics: Numerics,
    named: str,
    kept: Kept,
    fit: Fit,
) -> Settings:
    """Return the settings of an engine without a store. Measures times where none of an earlier start are kept."""
    has_draft = draft is not None
    stateful = bool(shard.state_specs)
    branches = draft is not None and draft.branches and not stateful
    no_trees = options.ddtree and has_draft and not branches
    if no_trees:
        why = "each node of a tree would need a state of its own in this model's recurrent layers" if stateful else ""
        log.warning("--ddtree: %s; chains are proposed", why or "a prediction head says one token after the other")
    tree = options.ddtree_budget if options.ddtree and branches else 0
    residency, message = resolve_residency(
        options.residency,
        has_draft=has_draft,
        has_prompt_scorer=scores is not None,
        low_memory=short_of_memory(shard.device),
        scorer_low_memory=scores is not None and cannot_stay(scores),
    )
    if message:
        log.warning(message)
    block = proposals(draft, shard)
    proven = numerics.mode == "buckets"
    beside = beside_rows(plan, shard, numerics.buckets, drafted=has_draft) if proven else 0
    shape: dict[str, Any] = {"chunk": numerics.chunk, "context": fit.context, "widths": widths(block, tree)}
    places = placement(shard.parts) if draft is None else f"{placement(shard.parts)},draft@{draft.place}"
    places += "" if options.experts_room is None else f",experts {options.experts}"
    times = key(named, None if draft is None else draft.identity, places, shape)
    return Settings(
        slots=shard.slots,
        max_context=fit.context,
        pages=fit.pages,
        shares_pages=bool(fit.pages) and not stateful and shares_pages(plan),
        max_queue=options.max_queue,
        chunk=numerics.chunk,
        span=span(shard, beside=bool(beside)),
        block_size=numerics.block_size,
        keep_decoded=proven,
        batch_rows=min(BATCH_ROWS, numerics.batch_rows),
        mixed_rows=mixed_rows({one.computes.type for one in plan}) if proven else 0,
        beside_rows=beside,
        block=block,
        tree=tree,
        no_trees=no_trees,
        residency=residency,
        rates=kept_or_measured(kept, times, DeviceExecutor(parts), shard, **shape),
        min_tokens=options.kv_cache_min_tokens,
        stateful=stateful,
        state_places=shard.state_places,
        state_tokens=state_tokens(shard),
        interval=options.kv_cache_interval,
        cold_max=options.kv_cache_cold_max,
    )
