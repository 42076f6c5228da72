"""What an answer tells about itself: usage, timings, and the `rekindle` object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.http.answer import cache_misses
from adapters.http.answer.job_stream import Ended, Progress
from adapters.http.edge_options import EdgeOptions
from effects.compression import WHOLE
from effects.job import Report
from effects.ports import ANSWER_STAGES, PROMPT_STAGES

KEPT = {None: None, True: "kept", False: "not_kept"}  # answers are not held to a call that was asked for


def usage(ended: Sequence[Ended]) -> dict[str, Any]:
    """Tokens of a whole request: each prompt counts once, the answers add up."""
    first = {one.planned.prompt: one for one in reversed(ended)}.values()
    prompt = sum(len(one.planned.job.prompt) for one in first)
    answer = sum(one.tokens for one in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(one.closed.report.restored_tokens for one in first)},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning for one in ended)},
    }


def prompt_progress(progress: Progress, elapsed_ms: float) -> dict[str, Any]:
    """llama.cpp's report of a prompt that is being read."""
    told = {"total": progress.total, "cache": progress.cached, "processed": progress.done}
    return {**told, "time_ms": round(elapsed_ms, 3)}


def written(ended: Ended) -> int:
    """Tokens of the prompt that were computed and are kept for later."""
    report = ended.closed.report
    return max(0, min(report.cache.rows, len(ended.planned.job.prompt)) - report.restored_tokens)


def timings(ended: Ended) -> dict[str, Any]:
    """llama.cpp's figures: what was restored, computed and generated, and how fast."""
    report = ended.closed.report
    computed = max(0, len(ended.planned.job.prompt) - report.restored_tokens)
    prompt_ms = round(ended.closed.spent_ms(PROMPT_STAGES), 3)
    answer_ms = round(ended.closed.spent_ms(ANSWER_STAGES), 3)
    return {
        "cache_n": report.restored_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": ratio(prompt_ms, computed),
        "prompt_per_second": ratio(1000 * computed, prompt_ms),
        "predicted_n": ended.tokens,
        "predicted_ms": answer_ms,
        "predicted_per_token_ms": ratio(answer_ms, ended.tokens),
        "predicted_per_second": ratio(1000 * ended.tokens, answer_ms),
    }


def rekindle(ended: Ended, options: EdgeOptions) -> dict[str, Any]:
    """What became of this job inside the engine."""
    report = ended.closed.report
    kept = report.cache.rows
    return {
        "restored_tokens": report.restored_tokens,
        "remembered": 0 if ended.planned.turn is None else ended.planned.turn.remembered,
        "tier": report.tier,
        "miss": report.miss or None,
        "prefix_cache": {
            "scope": report.cache.scope,
            "shared": report.cache.shared if report.cache.scope.startswith("auto") else None,
            "selected": report.cache.boundary,
            "kept": kept,
            "reason": "disk_off" if ended.planned.asked_scope and kept and not options.disk else report.cache.reason,
            "miss": cache_misses.told(ended),
        },
        "stabilized": list(ended.planned.stabilized),
        "compression": compressed(report),
        "speculation": {
            "rounds": report.decode_steps,
            "proposed": report.proposed,
            "accepted": report.accepted,
            "acceptance_length": ratio(report.completion_tokens, report.decode_steps),  # tokens a decode step
            "why": report.speculation or None,
        },
        "tool_choice": KEPT[ended.planned.reader.check_choice(ended.called)],
        "numerics": options.numerics.get("mode", "exact"),
        "stages_ms": {stage: round(spent_ms, 3) for stage, spent_ms in ended.closed.stages_ms.items()},
    }


def compressed(report: Report) -> dict[str, Any] | None:
    """None where nobody asked for it. spans: of the prompt as it was sent, where they are known."""
    told = report.compression
    if told is None:
        return None
    return {
        "original_tokens": told.original,
        "kept_tokens": report.prompt_tokens,
        "keep_ratio": told.keep / WHOLE or None,
        "spans": list(map(list, told.kept)),
        "forced_spans": list(map(list, told.forced)),
        "time_ms": round(told.ns / 1e6, 3),
        "why": told.why_not or None,
    }


def rekindle_all(ended: Sequence[Ended], options: EdgeOptions) -> dict[str, Any]:
    """The first job's figures; with several, `jobs` lists those of each in the order of the choices."""
    told = [rekindle(one, options) for one in ended]
    return told[0] if len(told) == 1 else {**told[0], "jobs": told}


def ratio(amount: float, parts: float) -> float:
    return round(amount / parts, 3) if parts else 0.0
