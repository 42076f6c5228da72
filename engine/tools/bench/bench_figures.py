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
    return [1e3 * (after - before) for sample in level.samples for before, after in pairwise(sample.times)]


def compute_figures(level: Level) -> LoadFigures:
    samples = level.samples
    fine = [sample for sample in samples if sample.ended and not sample.error]
    cached_counts = [sample.cached for sample in fine if sample.cached is not None]
    spoken = [sample for sample in fine if sample.tokens > 1 and sample.times[-1] > sample.times[0]]
    # The level ends with its last answer: the time that the client needs to close down is not the server's.
    seconds = max((sample.ended or level.ended for sample in samples), default=level.ended) - level.began
    return LoadFigures(
        level=level.name,
        requests=len(samples),
        answered=len(fine),
        errors=dict(Counter(sample.error for sample in samples if sample.error)),
        unfinished=sum(1 for sample in samples if not sample.ended),
        unsent=level.unsent,
        seconds=seconds,
        prompt_tokens=sum(sample.prompt or 0 for sample in fine),
        cached_tokens=sum(cached_counts) if cached_counts else None,
        answer_tokens=sum(sample.tokens for sample in samples),
        first_token_ms=compute_percentiles([1e3 * sample.first for sample in samples if sample.first is not None]),
        inter_token_ms=compute_percentiles(collect_gaps(level)),
        tokens_an_event=sum(sample.tokens for sample in fine) / sum(len(sample.times) for sample in fine)
        if fine
        else None,
        stream_tokens_s=compute_percentiles(
            [(sample.tokens - 1) / (sample.times[-1] - sample.times[0]) for sample in spoken]
        ),
        tokens_s=sum(sample.tokens for sample in samples) / seconds if seconds > 0 else 0.0,
        requests_s=len(fine) / seconds if seconds > 0 else 0.0,
        busy=level.processor_s / seconds if seconds > 0 else 0.0,
        late_ms=1e3 * compute_percentile(sorted(level.late), 99) if level.late else None,
    )
