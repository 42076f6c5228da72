"""Computes the figures of a level of load from its samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

from engine.tools.bench.load_level import Level

SHARES = (50, 90, 99)  # percentiles


@frozen(kw_only=True)
class LoadFigures:
    """The figures of one level. Triples are the 50th, 90th and 99th percentile; None if there was nothing to count."""

    level: str
    requests: int
    answered: int
    errors: dict[str, int]
    unfinished: int
    unsent: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int | None
    answer_tokens: int
    first_token_ms: tuple[float, ...] | None
    inter_token_ms: tuple[float, ...] | None
    tokens_an_event: float | None
    stream_tokens_s: tuple[float, ...] | None
    tokens_s: float
    requests_s: float
    busy: float
    late_ms: float | None

    @property
    def hit_share(self) -> float | None:
        return None if self.cached_tokens is None or not self.prompt_tokens else self.cached_tokens / self.prompt_tokens


def compute_percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as `share` percent of the values."""
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def compute_percentiles(values: Sequence[float]) -> tuple[float, ...] | None:
    ordered = sorted(values)
    return tuple(compute_percentile(ordered, share) for share in SHARES) if ordered else None


def collect_gaps(level: Level) -> list[float]:
    """Return the milliseconds between neighbouring events of each stream, for all streams."""
    return [1e3 * (after - before) for one in level.samples for before, after in pairwise(one.times)]


def compute_figures(level: Level) -> LoadFigures:
    samples = level.samples
    fine = [one for one in samples if one.ended and not one.error]
    cached_counts = [one.cached for one in fine if one.cached is not None]
    spoken = [one for one in fine if one.tokens > 1 and one.times[-1] > one.times[0]]
    # The level ends with its last answer: the time that the client needs to close down is not the server's.
    seconds = max((one.ended or level.ended for one in samples), default=level.ended) - level.began
    return LoadFigures(
        level=level.name,
        requests=len(samples),
        answered=len(fine),
        errors=dict(Counter(one.error for one in samples if one.error)),
        unfinished=sum(1 for one in samples if not one.ended),
        unsent=level.unsent,
        seconds=seconds,
        prompt_tokens=sum(one.prompt or 0 for one in fine),
        cached_tokens=sum(cached_counts) if cached_counts else None,
        answer_tokens=sum(one.tokens for one in samples),
        first_token_ms=compute_percentiles([1e3 * one.first for one in samples if one.first is not None]),
        inter_token_ms=compute_percentiles(collect_gaps(level)),
        tokens_an_event=sum(one.tokens for one in fine) / sum(len(one.times) for one in fine) if fine else None,
        stream_tokens_s=compute_percentiles([(one.tokens - 1) / (one.times[-1] - one.times[0]) for one in spoken]),
        tokens_s=sum(one.tokens for one in samples) / seconds if seconds > 0 else 0.0,
        requests_s=len(fine) / seconds if seconds > 0 else 0.0,
        busy=level.processor_s / seconds if seconds > 0 else 0.0,
        late_ms=1e3 * compute_percentile(sorted(level.late), 99) if level.late else None,
    )
