"""The kernels of a recurrent layer of the 27B's heads against what they must move through memory: decode and prefill.

    python -m benchmarks.hybrid_kernels [--record]

Each figure is the replay of a graph over many layers' states, which together do not fit into the cache, divided by
their number. Bytes: decode must read the state and the rows since; prefill must read what is projected and write what
is read from the state, and read and write the state once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from adapters.models.kernels.cuda import delta
from adapters.models.kernels.cuda.delta import CudaDelta
from adapters.models.kernels.interfaces.delta_interface import DeltaShape, DeltaState, DeltaWeights
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import StateBatch
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth
from benchmarks.results import publish

T = TypeVar("T")

SHAPE = DeltaShape(16, 48, 128, 128)
# Slots, rows of each, where they start, the bucket, and whether the step settles.
DECODE = ((1, 1, 2080, 4), (4, 1, 2080, 4), (16, 1, 2080, 16), (1, 4, 2080, 4), (1, 16, 2080, 16), (1, 16, 2104, 16))
PREFILL = ((1, 256, 2048, 256), (1, 1024, 2048, 1024), (1, 4096, 2048, 4096))
ROW = 2 * SHAPE.channels + 4 * SHAPE.value_heads  # bytes of a row of what is projected, without the output's gate
STATE = 4 * SHAPE.value_heads * SHAPE.key_size * SHAPE.value_size


def weights() -> DeltaWeights:
    heads = SHAPE.value_heads
    rate = -torch.rand(heads, device=DEVICE)
    return DeltaWeights(SHAPE, torch.randn(SHAPE.channels, 4, device=DEVICE) / 2, rate, torch.randn_like(rate))


def replay_us(states: Sequence[T], one: Callable[[T], object], repeat: int = 20) -> float:
    """Microseconds a layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one(states[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for state in states:
            one(state)
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(states))
    return statistics.median(times)


def figure(
    slots: int, rows: int, start: int, bucket: int, *, settles: bool, speed: float, layers: int
) -> dict[str, Any]:
    kernels, own = CudaDelta(DEVICE, True, torch.cuda.get_device_capability()[0] == 9), weights()
    states = [kernels.make_state(SHAPE, slots, 0, DTYPE, DEVICE) for _ in range(layers)]
    for state in states:
        state.memory.normal_(0, 0.1)
        state.keys.normal_(0, 0.1)
    batch = StateBatch(bucket, DEVICE)
    step = Step(tuple(Segment(slot, start, rows) for slot in range(slots)), bucket, rows_only=settles)
    batch.before = (start // 64 * 64,) * slots
    batch.settle(step)
    batch.load(step, torch.zeros(step.rows, dtype=torch.int64))
    mixed = torch.randn(bucket, SHAPE.channels, device=DEVICE).to(DTYPE)
    gates = torch.randn(bucket, 2 * SHAPE.value_heads, device=DEVICE).to(DTYPE)
    z, norm = torch.randn(bucket, SHAPE.values, device=DEVICE).to(DTYPE), torch.ones(128, device=DEVICE)
    kernels.begin_body("bench", batch)
    convolved = kernels.convolve(mixed, own, states[0], batch)
    read = kernels.delta_rule(convolved, gates, own, states[0], batch)

    def whole(state: DeltaState) -> None:
        made = kernels.delta_rule(kernels.convolve(mixed, own, state, batch), gates, own, state, batch)
        kernels.gated_norm(made, z, norm, 1e-6)

    took = {
        "convolve": replay_us(states, lambda state: kernels.convolve(mixed, own, state, batch)),
        "delta rule": replay_us(states, lambda state: kernels.delta_rule(convolved, gates, own, state, batch)),
        "norm": replay_us(states, lambda _: kernels.gated_norm(read, z, norm, 1e-6)),
        "all": replay_us(states, whole),
    }
    behind = start % 64 * (SHAPE.keys + SHAPE.values) * 2
    moved = slots * (STATE * (2 if settles else 1) + behind) + slots * rows * (ROW + 2 * SHAPE.values * 2)
    return {
        "slots": slots,
        "rows": rows,
        "start": start,
        **{f"{name} us": round(value, 1) for name, value in took.items()},
        "limit us": round(1e6 * moved / speed, 1),
        "share": round(1e6 * moved / speed / took["all"], 3),
        "us a chunk": round(took["delta rule"] / max(1, rows // 64), 2),
    }


def measured(layers: int = 16) -> dict[str, Any]:
    speeds = bandwidth()
    torch.cuda.empty_cache()
    speed = max(speeds.values())
    found = [figure(*one, settles=False, speed=speed, layers=layers) for one in DECODE]
    found += [figure(*one, settles=True, speed=speed, layers=4) for one in PREFILL]
    return {"device": torch.cuda.get_device_name(), "bandwidth": speeds, "tile": delta.TILE, "figures": found}


def main() -> None:
    parser = benchmark_parser(__doc__)
    given = parser.parse_args()
    found = measured()
    publish(given, "hybrid_kernels", found)
    print(found["device"], found["bandwidth"])
    for one in found["figures"]:
        print(one)


if __name__ == "__main__":
    main()
