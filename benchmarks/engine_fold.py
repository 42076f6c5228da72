"""Measures what one decode event costs in the pure core: `advance`, in microseconds, with a fresh world and after many
requests.

`python -m benchmarks.engine_fold [--finished 100000] [--steps 400] [--check]`; no model and no device are
involved. `--check` exits with status 1 if a median is above the goal.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Any

from attrs import frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from effects.all import Launch
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId
from effects.job import Job
from effects.prefill import PrefillAdvanced, RunPrefill
from states.events import ForRequest, Submitted
from states.settings import Settings
from states.world import Output, World, advance, make_world

GOAL_US = 50


@frozen
class Case:
    live: int  # requests that decode at once
    prompt: int  # tokens of each
    waiting: int = 0  # requests in the queue behind them
    draft: bool = False  # a draft proposes; every third proposal is right


CASES = (
    *(Case(1, 100), Case(4, 100), Case(1, 8000), Case(4, 8000), Case(4, 8000, waiting=64)),
    *(Case(1, 8000, draft=True), Case(4, 8000, draft=True)),
)


def launches(outs: tuple[Output, ...]) -> list[Launch]:
    return [out for out in outs if isinstance(out, Launch)]


def answer(effect: Any) -> Decoded | PrefillAdvanced:
    if isinstance(effect, RunPrefill):
        return PrefillAdvanced(effect.stop)
    return Decoded((7,) * (1 + effect.propose // 3), effect.propose, ns=10**6)


def aged(world: World, finished: int) -> World:
    """The world after this many short requests have come and gone."""
    job = Job(prompt=(1, 2), max_tokens=1, speculate=False)
    for number in range(finished):
        request = RequestId(number)
        world, outs = advance(world, ForRequest(request, Submitted(job)))
        todo = deque(launches(outs))
        while todo:
            for effect_request in todo.popleft().effect_requests:
                world, outs = advance(world, ForRequest(effect_request.request, answer(effect_request.effect)))
                todo.extend(launches(outs))
    return world


def measure(world: World, case: Case, decode_steps: int) -> list[float]:
    """Microseconds of each decode event, once every live request decodes."""
    todo, first = deque[Launch](), 10**9
    for number in range(case.live + case.waiting):
        job = Job(tuple(range(number, number + case.prompt)), max_tokens=10**6, speculate=case.draft)
        world, outs = advance(world, ForRequest(RequestId(first + number), Submitted(job)))
        todo.extend(launches(outs))
    took = list[float]()
    while len(took) < decode_steps:
        for effect_request in todo.popleft().effect_requests:
            event, decoding = (
                ForRequest(effect_request.request, answer(effect_request.effect)),
                isinstance(effect_request.effect, RunDecode),
            )
            start = time.perf_counter_ns()
            world, outs = advance(world, event)
            if decoding:
                took.append((time.perf_counter_ns() - start) / 1000)
            todo.extend(launches(outs))
    return took


def run(worlds: dict[int, World], decode_steps: int) -> list[dict[str, Any]]:
    """Every case in every world; the worlds take turns, so that a noisy moment meets them alike."""
    rows = []
    for case in CASES:
        took: dict[int, list[float]] = {finished: [] for finished in worlds}
        for _ in range(4):
            for finished, world in worlds.items():
                took[finished] += measure(world, case, decode_steps // 4)
        for finished, events in took.items():
            events.sort()
            rows.append(
                {
                    "live": case.live,
                    "prompt": case.prompt,
                    "waiting": case.waiting,
                    "draft": "yes" if case.draft else "no",
                    "finished before": finished,
                    "median_us": median(events),
                    "p99_us": events[len(events) * 99 // 100],
                }
            )
    return rows


def make_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """The slowest case is what the goal is about."""
    worst = max(rows, key=lambda row: row["median_us"])
    at = f"slowest of {len(rows)} cases"
    return [Figure("service", "folding one decode event", at, "us", worst["median_us"], goal=Goal(at_most=GOAL_US))]


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--finished", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    fresh = make_world(Settings(slots=4, max_queue=64, max_context=16_384, max_proposals=15, batch_rows=64))
    worlds = {0: fresh, options.finished: aged(fresh, options.finished)}
    gc.collect()
    gc.freeze()
    rows = run(worlds, options.steps)
    print_table(f"advance, one decode event (goal: median <= {GOAL_US} us)", rows)
    publish(options, "engine_fold", {"goal_us": GOAL_US, "rows": rows}, make_figures(rows), "cpu")
    return int(options.check and any(row["median_us"] > GOAL_US for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
