"""Chooses the settings that the engine starts with, from options, the loaded model and measured rates."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import asdict

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.pipeline.pipeline import Pipeline
from engine.loading.calibration.calibrate_compute import (
    RateShape,
    build_rates_key,
    choose_concurrent_rows,
    choose_mixed_rows,
    choose_prefill_span,
    load_or_measure_rates,
)
from engine.loading.calibration.prompts_along import with_prompts_along
from engine.loading.drafts.attach_draft import count_most_branch, count_most_copied
from engine.loading.drafts.load_draft import (
    BATCH_ROWS,
    choose_proposal_widths,
    count_most_proposals,
    is_short_of_memory,
)
from engine.loading.load_scorer import FoundScorer, cannot_stay
from engine.loading.memory.device_survey import Placement, count_state_tokens
from engine.loading.memory.expert_placement import with_expert_counts
from engine.loading.memory_estimate import shares_pages
from engine.loading.plan_load import ProvenPlan
from engine.loading.shard_peers import (
    describe_placement,
)
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_options import SpeculationOptions
from engine.settings.options import Options
from engine.settings.paths import AUTO
from states.residency import resolve_residency
from states.settings import Settings
from states.speculation_control import list_bucket_widths

log = logging.getLogger("rekindle")


def choose_settings(
    options: Options,
    parts: ExecutorParts,
    shard: Pipeline,
    draft: DraftModel | None,
    scores: FoundScorer | None = None,
    *,
    plan: Sequence[Placement],
    proven: ProvenPlan,
    kept: CalibrationCache,
) -> Settings:
    """Return the settings that the engine starts with, and measure their rates. They do not know of a store yet."""
    fit = proven.fit
    numerics = proven.numerics
    has_draft = draft is not None
    stateful = bool(shard.states.specs)
    tree, no_trees = choose_tree(options.speculation, shard.states.tree_obstacle, has_draft=has_draft)
    residency, message = resolve_residency(
        options.speculation.residency_policy,
        has_draft=has_draft,
        has_prompt_scorer=scores is not None,
        low_memory=is_short_of_memory(shard.spec.device),
        scorer_low_memory=scores is not None and cannot_stay(scores),
    )
    if message:
        log.warning(message)
    block = count_most_proposals(draft, shard)
    has_buckets = numerics.mode == "buckets"
    concurrent_rows = choose_concurrent_rows(plan, shard, numerics.buckets, drafted=has_draft) if has_buckets else 0
    max_copied = count_most_copied(parts.text_proposer, shard, numerics.batch_rows)
    timed = list_timed_copies(options, max_copied)
    widths = choose_proposal_widths(block, tree)
    shape = RateShape(numerics.chunk, fit.context, widths, timed, count_most_branch(parts.text_proposer, shard))
    locations = describe_locations(options, shard, draft)
    times = build_rates_key(proven.identity, None if draft is None else draft.identity, locations, asdict(shape))
    found = Settings(
        slots=shard.spec.slots,
        spare_slots=fit.spare,
        max_context=fit.context,
        pages=fit.pages,
        shares_pages=bool(fit.pages) and not stateful and shares_pages(plan),
        max_queue=options.http.max_queue,
        chunk=numerics.chunk,
        chunks_per_prefill=choose_prefill_span(shard, concurrent=bool(concurrent_rows)),
        block_size=numerics.block_size,
        keep_decoded=has_buckets,
        batch_rows=min(BATCH_ROWS, numerics.batch_rows),
        mixed_rows=choose_mixed_rows({part.compute_device.type for part in plan}, shard) if has_buckets else 0,
        commits_per_segment=stateful and shard.states.commits_per_segment,
        prompt_lane_min_rows=concurrent_rows,
        latency_target_ns=options.runtime.latency_target * 1_000_000,
        max_proposals=block,
        max_copied=max_copied,
        max_branch=shape.max_branch,
        tree=tree,
        no_trees=no_trees,
        residency=residency,
        rates=load_or_measure_rates(kept, times, DeviceExecutor(parts), shard, shape),
        min_tokens=options.cache.kv_cache_min_tokens,
        stateful=stateful,
        state_checkpoints=shard.states.checkpoint_count,
        state_tokens=count_state_tokens(shard),
        checkpoint_interval=options.checkpoints.kv_cache_interval,
        shared_checkpoint_limit=options.checkpoints.kv_cache_cold_max,
    )
    return with_prompts_along(with_expert_counts(found, parts.experts), shard)


def choose_tree(options: SpeculationOptions, obstacle: str, *, has_draft: bool) -> tuple[int, bool]:
    """Return the most tokens of a proposed tree, 0 for chains, and whether trees were asked for in vain.

    obstacle: why the model cannot verify trees; empty if it can.
    """
    if not (options.ddtree and has_draft):
        return 0, False
    if obstacle:
        log.warning("--ddtree: %s; chains are proposed instead of trees", obstacle)
        return 0, True
    return options.ddtree_budget, False


def list_timed_copies(options: Options, max_copied: int) -> tuple[int, ...]:
    """List the numbers of copied tokens that a start measures.

    By default copies do not make a start longer: what they cost is learned from the first ones that are made.
    """
    return () if options.speculation.draft == AUTO else list_bucket_widths(max_copied)


def describe_locations(options: Options, shard: Pipeline, draft: DraftModel | None) -> str:
    """Return where layers, draft and experts are: measured times depend on it."""
    found = describe_placement(shard.parts) + ("" if draft is None else f",draft@{draft.location}")
    return found if options.weights.device_expert_bytes is None else f"{found},experts {options.weights.experts}"
