"""Rates that tests give to a model instead of measuring them.

A start measures how long chunks and decode steps take, or checks what an earlier start has kept. That is up to a
second for each server, and the scheduler then decides by how busy the machine was. Here a chunk and a step always take
the same time at first. The scheduler learns from what follows as it always does. The measurements are tested in
`tests/engine/loading/calibration`, and by all servers that are started with `plainly`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.loading import choose_settings
from engine.loading.calibration.calibrate_compute import RateShape
from states.rates import FIRST_SPAN, DecodeTimes, Rates, TimedStep
from states.step_prices import Shape

PREFILL_NS = 50_000  # for each token
STEP_NS = 2_000_000
ROW_NS = 100_000  # for each row that a step with proposals feeds


@contextmanager
def given_rates() -> Iterator[None]:
    """Let this process measure no rates inside the block."""
    before = choose_settings.load_or_measure_rates
    choose_settings.load_or_measure_rates = lambda _kept, _key, _executor, _shard, shape: make_rates(shape)
    try:
        yield
    finally:
        choose_settings.load_or_measure_rates = before


def make_rates(shape: RateShape) -> Rates:
    """Return rates for the same chunks and steps that a start would measure."""
    spans = 1
    while FIRST_SPAN << (spans - 1) < shape.context:
        spans += 1
    return Rates(
        prefill=(PREFILL_NS,) * spans,
        decode=make_steps((0, *shape.widths)),
        copy_times=make_steps(shape.copied),
        branch_times=make_steps(shape.copied) if shape.max_branch else (),
    )


def make_steps(widths: Sequence[int]) -> DecodeTimes:
    """Return the times of steps with these numbers of proposals, each of a request alone at its beginning."""
    rows = {Shape(0, 1, 1 + width if width else 0).key for width in widths}
    return tuple(TimedStep(*key, STEP_NS + ROW_NS * key[2], STEP_NS if key[2] else 0) for key in sorted(rows))
