"""Measures what the engine adds to the model's time in a decode step: fold, event loop, hand-off to the lane and back,
streams.

The shard here does nothing, so what is left of a decode step is the engine, its executor and sampling one argmax for
each request. Requests decode as on a GPU (*overlapped*: the next step is launched before the last one is read), or as
on a CPU. Threads may keep the interpreter as long as those of a server.

Each case is measured in two ways:

* In lockstep, a step begins once streams have read the tokens of the steps before it. That is the pace of a server,
  whose model takes longer than the event loop. These are its figures: microseconds of processor time in a step, on the
  device lane (`lane_us`) and on the event loop (`loop_us`), and calls of functions, which nothing disturbs. Calls of C
  functions count as well.
* Running freely, the lane never waits for the event loop, and the two share the interpreter. The event loop falls
  behind and takes several steps at once (`tokens_a_message`). A cheaper event loop takes fewer at once, and hardly
  makes steps faster (`us_a_step`).

`python -m benchmarks.engine_overhead [--steps 1000] [--rounds 5] [--instructions] [--before CHECKOUT]`. Times are the
least of the rounds. Each round has new processes, because those of one program differ from each other. With
--instructions, valgrind counts them in lockstep, which no other program disturbs. With --before, the other checkout is
measured in turn with this one. Goals: 2 % of a 10 ms decode step for up to four requests, and 10 % for 64; and nowhere
more than 3 % above the other checkout.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import anyio
from attrs import define, evolve, frozen

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from benchmarks.arguments import benchmark_parser
from benchmarks.instructions import callgrind_command, count_instructions
from benchmarks.no_model import MOST_REQUESTS, SPEC, NoModel
from benchmarks.results import ROOT, Figure, Goal, find_commit, publish
from benchmarks.tables import median, print_table
from benchmarks.worker import Worker, serve_requests, start_worker
from effects.job import Job
from effects.stream import EmitTokens
from engine.serving.wiring import run_engine
from engine.settings.import_order import SWITCH_S
from states.settings import Settings

MODULE = "benchmarks.engine_overhead"
BUCKETS = (4, 8, 16, 32, 64, 256)
COUNTED_STEPS = 64  # in which calls are counted
WARM_UP_STEPS = 64


@define
class CallCounter:
    """Counts the calls of functions on the thread that it is the profiler of."""

    count: int = 0

    def __call__(self, _: FrameType, event: str, __: Any) -> None:
        self.count += event in ("call", "c_call")

    def start(self) -> None:
        sys.setprofile(self)


@frozen
class DecodeCase:
    """A number of requests that decode together, as on a GPU (`overlapped`) or as on a CPU."""

    requests: int
    overlapped: bool

    @property
    def name(self) -> str:
        way = ", overlapped" if self.overlapped else ""
        return f"{self.requests} request{'s' * (self.requests > 1)}{way}"


CASES = (DecodeCase(1, False), DecodeCase(4, False), DecodeCase(1, True), DecodeCase(16, True), DecodeCase(64, True))
SHOWN = (0, len(CASES) - 1)  # the cases that the page of benchmarks shows


def goal_of(case: DecodeCase) -> Goal:
    return Goal(at_most=200 if case.requests <= 4 else 1000)


@frozen
class DecodeRun:
    """The times of one run. messages: of one stream, each with its arrival, the processor time of the event loop's
    thread then, and the tokens in it.
    """

    lane_ns: Sequence[int]  # processor time of the lane's thread at the beginning of each step
    messages: Sequence[tuple[int, int, int]]

    @property
    def steady_messages(self) -> Sequence[tuple[int, int, int]]:
        """The messages of the middle half: all requests decode then."""
        quarter = len(self.messages) // 4
        return self.messages[quarter : len(self.messages) - quarter]

    @property
    def lane_us(self) -> float:
        """Processor time of the lane in a step, of the middle half."""
        quarter = len(self.lane_ns) // 4
        middle = self.lane_ns[quarter : len(self.lane_ns) - quarter]
        return (middle[-1] - middle[0]) / (len(middle) - 1) / 1000

    def per_step(self, index: int) -> float:
        """Return the growth in a step of what a message has at this index, in microseconds."""
        first, *later = self.steady_messages
        return (later[-1][index] - first[index]) / sum(message[2] for message in later) / 1000

    @property
    def tokens_a_message(self) -> float:
        messages = self.steady_messages
        return sum(message[2] for message in messages) / len(messages)


async def decode_steps(
    case: DecodeCase, count: int, *, lockstep: bool, counters: tuple[CallCounter, CallCounter] | None = None
) -> DecodeRun:
    """Let the requests of a case decode `count` steps.

    counters: of the event loop's thread and of the lane's, if calls are counted.
    """
    lane = DeviceLane("cpu")
    awaited = SimpleQueue[None]() if lockstep else None
    shard = NoModel(evolve(SPEC, runs_ahead=case.overlapped), awaited)
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane))
    messages = list[tuple[int, int, int]]()

    async def read(number: int) -> None:
        async for message in running.submissions.submit(Job((number + 1, 2, 3, 4), count)):
            if isinstance(message, EmitTokens):
                if number == 0:
                    messages.append((time.perf_counter_ns(), time.thread_time_ns(), len(message.tokens)))
                if awaited is not None:
                    for _ in message.tokens:
                        awaited.put(None)

    if counters is not None:
        await lane.run(counters[1].start)
        counters[0].start()
    settings = Settings(slots=MOST_REQUESTS, batch_rows=MOST_REQUESTS)
    async with run_engine(settings, executor) as running, anyio.create_task_group() as tasks:
        for number in range(case.requests):
            tasks.start_soon(read, number)
    sys.setprofile(None)
    await anyio.to_thread.run_sync(executor.close)
    return DecodeRun(shard.decode_ns, messages)


def run_case(case: DecodeCase, count: int, *, lockstep: bool) -> DecodeRun:
    async def decode() -> DecodeRun:
        return await decode_steps(case, count, lockstep=lockstep)

    return anyio.run(decode)


def count_calls(case: DecodeCase) -> tuple[float, float]:
    """Return the calls of functions in a step: on the event loop's thread, and on the lane's.

    Two runs are compared that differ by COUNTED_STEPS steps, so that their beginnings and ends do not count.
    """
    found = list[tuple[int, int]]()

    async def decode(count: int) -> None:
        counters = (CallCounter(), CallCounter())
        await decode_steps(case, count, lockstep=True, counters=counters)
        found.append((counters[0].count, counters[1].count))

    for count in (COUNTED_STEPS, COUNTED_STEPS, 2 * COUNTED_STEPS):  # once more for what is done once in a process
        anyio.run(decode, count)
    _, (loop, lane), (longer_loop, longer_lane) = found
    return (longer_loop - loop) / COUNTED_STEPS, (longer_lane - lane) / COUNTED_STEPS


def count_step_instructions(case: DecodeCase, folder: Path) -> float:
    """Return the instructions of a step on both threads, in lockstep. Two runs are compared, as in `count_calls`."""
    run_case(case, COUNTED_STEPS, lockstep=True)
    counts = [
        count_instructions(folder, partial(run_case, case, steps, lockstep=True))
        for steps in (COUNTED_STEPS, 2 * COUNTED_STEPS)
    ]
    return (counts[1] - counts[0]) / COUNTED_STEPS


def measure(request: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of one case. request: the index of the `case`, and one of the following.

    `steps`: measure times of so many steps. `folder`: count instructions, as in `count_instructions`. Neither: count
    calls.
    """
    case = CASES[request["case"]]
    if "folder" in request:
        sys.setswitchinterval(1)  # seconds: callgrind is slow, and threads take turns by themselves in lockstep
        gc.disable()  # one collection of all objects costs more than the steps that are counted
        return {"instructions": count_step_instructions(case, Path(request["folder"]))}
    if "steps" not in request:
        loop, lane = count_calls(case)
        return {"loop_calls": loop, "lane_calls": lane, "calls_a_token": (loop + lane) / case.requests}
    run_case(case, WARM_UP_STEPS, lockstep=True)
    paced = run_case(case, request["steps"], lockstep=True)
    free = run_case(case, request["steps"], lockstep=False)
    loop_us = paced.per_step(1)
    return {
        "processor_us": paced.lane_us + loop_us,
        "lane_us": paced.lane_us,
        "loop_us": loop_us,
        "us_a_step": free.per_step(0),
        "tokens_a_message": free.tokens_a_message,
    }


def measure_round(
    checkouts: Mapping[str, Path], *, steps: int = 0, instructions: bool = False
) -> list[dict[str, dict[str, float]]]:
    """Return for each case the figures of each checkout. They are measured in turn, by new processes.

    steps, instructions: what is asked for, as in `measure`.
    """
    with ExitStack() as started:
        workers = dict[str, tuple[Worker, dict[str, Any]]]()
        for name, checkout in checkouts.items():
            request: dict[str, Any] = {"steps": steps} if steps else {}
            under: list[str] = []
            if instructions:
                request = {"folder": started.enter_context(TemporaryDirectory())}
                under = callgrind_command(Path(request["folder"]))
            workers[name] = started.enter_context(start_worker(checkout, MODULE, under)), request
        return [
            {name: worker.ask({"case": index, **request}) for name, (worker, request) in workers.items()}
            for index in range(len(CASES))
        ]


def make_row(case: DecodeCase, checkout: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the row of a case: the least of each time, because other programs make times longer and never shorter."""
    row: dict[str, Any] = {"requests": case.name, "checkout": checkout}
    for name in dict.fromkeys(name for one in rounds for name in one):
        values = [one[name] for one in rounds if name in one]
        row[name] = median(values) if name == "tokens_a_message" else min(values)
    return row


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of two rows of one case, for all figures but `tokens_a_message`."""
    names = [name for name in ours if name not in ("requests", "checkout", "tokens_a_message")]
    return {"requests": ours["requests"], **{name: ours[name] / theirs[name] for name in names}}


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--instructions", action="store_true", help="count them as well, with valgrind")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--worker", action="store_true", help="measure what is asked for on stdin")
    given = parser.parse_args()
    if given.worker:
        sys.setswitchinterval(SWITCH_S)
        serve_requests(measure)
        return 0
    checkouts = {"this": ROOT} if given.before is None else {"this": ROOT, "before": given.before.resolve()}
    backwards = dict(reversed(checkouts.items()))
    rounds = [measure_round(backwards if at % 2 else checkouts, steps=given.steps) for at in range(given.rounds)]
    rounds.append(measure_round(checkouts))
    if given.instructions:
        rounds.append(measure_round(checkouts, instructions=True))
    rows = {
        name: [make_row(case, name, [one[at][name] for one in rounds]) for at, case in enumerate(CASES)]
        for name in checkouts
    }
    both = [row for of_case in zip(*rows.values(), strict=True) for row in of_case]
    print_table("Engine, event loop, hand-off and sampling of a decode step, without a model", both)
    work, calls = "a step's processor time without a model", "calls of functions for a token without a model"
    shown = [(CASES[at], rows["this"][at]) for at in SHOWN]
    figures = [
        *(Figure("service", work, case.name, "us", row["processor_us"], goal=goal_of(case)) for case, row in shown),
        *(Figure("service", calls, case.name, "calls", row["calls_a_token"]) for case, row in shown),
    ]
    raw: dict[str, Any] = {"rows": both, "steps": given.steps, "rounds": given.rounds}
    if given.before is not None:
        raw["ratios"] = list(map(compare, rows["this"], rows["before"]))
        print_table("This checkout over the one before", raw["ratios"])
        what = "instructions" if given.instructions else "processor_us"
        at = f"over {find_commit(given.before)}, the most of {len(CASES)} cases"
        worst = max(ratio[what] for ratio in raw["ratios"])
        figures.append(Figure("service", f"{what} of a step without a model", at, "x", worst, goal=Goal(at_most=1.03)))
    publish(given, "engine_overhead", raw, figures, "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
