"""The figures that an answer has about itself: usage, timings, and the `rekindle` object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.http.answer import cache_misses
from adapters.http.answer.job_stream import AnswerDelta, AnswerPace, FinishedChoice, PromptProgress
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.controls import Controls
from effects.compression import WHOLE
from effects.job import Report
from effects.ports import ANSWER_STAGES, PROMPT_STAGES

# Whether the answer has the call that the request requires.
TOOL_CHOICE_RESULTS = {None: None, True: "kept", False: "not_kept"}


def count_usage(ended: Sequence[FinishedChoice]) -> dict[str, Any]:
    """Return the tokens of a whole request. Each prompt counts once, and the answers add up."""
    first = {choice.planned_job.prompt_index: choice for choice in reversed(ended)}.values()
    prompt = sum(len(choice.planned_job.job.prompt) for choice in first)
    answer = sum(choice.tokens for choice in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(choice.outcome.report.restored_tokens for choice in first)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in ended)},
    }


def make_progress(progress: PromptProgress, elapsed_ms: float) -> dict[str, Any]:
    """Return llama.cpp's report of a prompt that is being read."""
    report = {"total": progress.total, "cache": progress.cached, "processed": progress.done}
    return {**report, "time_ms": round(elapsed_ms, 3)}


def count_cache_writes(ended: FinishedChoice) -> int:
    """Return how many tokens of the prompt were computed and are kept in the cache."""
    report = ended.outcome.report
    return max(0, min(report.cache.rows, len(ended.planned_job.job.prompt)) - report.restored_tokens)


def make_progress_fields(progress: PromptProgress, elapsed_ms: float, controls: Controls) -> dict[str, Any]:
    """Return what llama.cpp's streams have while a prompt is read: the progress, and timings if they were asked for."""
    report = {"prompt_progress": make_progress(progress, elapsed_ms)}
    if not controls.shows_timings:
        return report
    computed = progress.done - progress.cached
    pace = AnswerPace(progress.cached, computed, elapsed_ms if computed else 0.0, 0, 0.0)
    return {**report, "timings": format_timings(pace)}


def make_pace_fields(said: AnswerDelta, controls: Controls) -> dict[str, Any]:
    """Return the timings of an answer so far, if they were asked for (`timings_per_token`)."""
    if not controls.shows_timings or said.measure_pace is None:
        return {}
    return {"timings": format_timings(said.measure_pace())}


def make_timings(ended: FinishedChoice) -> dict[str, Any]:
    """Return llama.cpp's figures: what was reused, computed and generated, and how fast."""
    report = ended.outcome.report
    computed = max(0, len(ended.planned_job.job.prompt) - report.restored_tokens)
    prompt_ms = ended.outcome.spent_ms(PROMPT_STAGES)
    answer_ms = ended.outcome.spent_ms(ANSWER_STAGES)
    draft = {"draft_n": report.proposed, "draft_n_accepted": report.accepted} if report.proposed else {}
    return {**format_timings(AnswerPace(report.restored_tokens, computed, prompt_ms, ended.tokens, answer_ms)), **draft}


def format_timings(pace: AnswerPace) -> dict[str, Any]:
    """Return llama.cpp's `timings`. The first token comes with the prompt, so the rate of an answer is that of the
    others.
    """
    prompt_ms = round(pace.prompt_ms, 3)
    answer_ms = round(pace.answer_ms, 3)
    steps = max(0, pace.generated - 1)
    return {
        "cache_n": pace.reused,
        "prompt_n": pace.computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": divide(prompt_ms, pace.computed, 6),
        "prompt_per_second": divide(1000 * pace.computed, prompt_ms, 6),
        "predicted_n": pace.generated,
        "predicted_ms": answer_ms,
        "predicted_per_token_ms": divide(answer_ms, steps, 6),
        "predicted_per_second": divide(1000 * steps, answer_ms, 6),
    }


def describe_choice(ended: FinishedChoice, options: EdgeOptions) -> dict[str, Any]:
    """Return the `rekindle` object of one choice: what the engine did for it."""
    report = ended.outcome.report
    kept = report.cache.rows
    return {
        "restored_tokens": report.restored_tokens,
        "remembered": 0 if ended.planned_job.pending_turn is None else ended.planned_job.pending_turn.remembered_tokens,
        "tier": report.tier,
        "miss": report.miss or None,
        "prefix_cache": {
            "scope": report.cache.scope,
            "shared": report.cache.shared if report.cache.scope.startswith("auto") else None,
            "selected": report.cache.boundary,
            "kept": kept,
            "reason": "disk_off"
            if ended.planned_job.requests_scope and kept and not options.defaults.disk
            else report.cache.reason,
            "followed": report.followed_tokens,
            "follow_wait_ms": round(report.follow_wait_ns / 1e6, 3),
            "follow_compute_ms": round(report.follow_compute_ns / 1e6, 3),
            "miss": cache_misses.describe_miss(ended),
        },
        "stabilized": list(ended.planned_job.stabilize_rules),
        "compression": describe_compression(report),
        "speculation": {
            "rounds": report.decode_steps,
            "proposed": report.proposed,
            "accepted": report.accepted,
            "acceptance_length": divide(report.completion_tokens, report.decode_steps),  # tokens per decode step
            "why": report.speculation or None,
        },
        "tool_choice": TOOL_CHOICE_RESULTS[ended.planned_job.reader.check_choice(ended.called_functions)],
        "numerics": options.model.mode,
        "stages_ms": {stage: round(spent_ms, 3) for stage, spent_ms in ended.outcome.stages_ms.items()},
    }


def describe_compression(report: Report) -> dict[str, Any] | None:
    """Return what compression did to the prompt, or None if it was not asked for. `spans` are of the prompt as it was
    sent, if they are known.
    """
    compression = report.compression
    if compression is None:
        return None
    return {
        "original_tokens": compression.original,
        "kept_tokens": report.prompt_tokens,
        "keep_ratio": compression.keep / WHOLE or None,
        "spans": list(map(list, compression.kept)),
        "forced_spans": list(map(list, compression.forced)),
        "time_ms": round(compression.ns / 1e6, 3),
        "why": compression.why_not or None,
    }


def describe_choices(ended: Sequence[FinishedChoice], options: EdgeOptions) -> dict[str, Any]:
    """Return the first choice's `rekindle` object. With several choices, `jobs` lists the objects of all in their
    order.
    """
    described = [describe_choice(choice, options) for choice in ended]
    return described[0] if len(described) == 1 else {**described[0], "jobs": described}


def divide(amount: float, parts: float, digits: int = 3) -> float:
    return round(amount / parts, digits) if parts else 0.0
