"""Measures what a hop to a shard in another process costs a decode step: question and answer, less the computing there.

`python -m benchmarks.remote_hop [--model demo] [--steps 400]`; goal on two cores: at most 0.5 ms at the median.
"""

from __future__ import annotations

import time

import anyio
import torch
from attrs import define, field

from adapters.models.kernels.step import Segment, Step
from adapters.remote.client.remote_shard import RemoteShard
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options

PLANS = {"cpu:0": "cpu:0", "cpu:0,cpu:0": "cpu:0,cpu:0", "cpu:0,ipc+cpu:0": "cpu:0,ipc+cpu:0"}


@define
class Found:
    """Microseconds of each step, and of what of it was the hop."""

    steps: list[float] = field(factory=list[float])
    hops: list[float] = field(factory=list[float])


def measure_hops(target: LoadedModel, steps: int) -> Found:
    """On the lane. Rows behind a prompt of one chunk: fed, picked from, kept."""
    found, shard = Found(), target.shard
    peers = [part.peer for part in shard.parts if isinstance(part, RemoteShard)]
    start = target.settings.chunk
    shard.forward(Step((Segment(0, 0, start),), start, rows_only=True), torch.arange(start) % 1000)
    for at in range(start, start + steps):
        before, began = sum(peer.hops.ns for peer in peers), time.perf_counter_ns()
        step = Step((Segment(0, at, 1),), shard.spec.buckets[0])
        left = shard.forward(step, torch.tensor([at % 1000]))
        int(shard.logits(step, left.hidden)[0].argmax())
        shard.commit(step, [1])
        found.steps.append((time.perf_counter_ns() - began) / 1e3)
        if peers:
            found.hops.append((sum(peer.hops.ns for peer in peers) - before) / 1e3)
    return found


async def plan(model: str, devices: str, steps: int) -> Found:
    how = {"max_ctx": 1024, "draft": "none", "disk_prefix_cache": "off", "host_cache_budget": 0}
    target = await load_target(build_options(model=model, target_devices=devices, **how))  # type: ignore[arg-type]
    found = await target.lane.run(lambda: measure_hops(target, steps))
    await target.close()
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    found = {name: anyio.run(plan, given.model, devices, given.steps) for name, devices in PLANS.items()}
    rows = [
        {
            "plan": name,
            "step p50, us": median(one.steps),
            "hop p50, us": median(one.hops) if one.hops else "",
            "hop p90, us": sorted(one.hops)[len(one.hops) * 9 // 10] if one.hops else "",
        }
        for name, one in found.items()
    ]
    print_table(f"A decode step of one row, {given.model}", rows)
    hop = median(found["cpu:0,ipc+cpu:0"].hops) / 1e3
    figures = [Figure("split", "a hop to a shard in another process", "p50", "ms", hop, goal=Goal(at_most=0.5))]
    publish(given, "remote_hop", {"rows": rows, "hops_us": found["cpu:0,ipc+cpu:0"].hops[:40]}, figures, "cpu")


if __name__ == "__main__":
    main()
