"""The campaign: so many cases of all kinds, a table of what came of them, and how to repeat what failed.

    python -m tests.campaign.run --cases 10000 [--seed S] [--kinds kills faults ...] [--processes 2] [--limit SECONDS]
    python -m tests.campaign.run --case 7:kills:31

Cases run in a few processes. One that is silent for longer than its deadline hangs: it is ended, and the rest goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from attrs import asdict, define, field, frozen

from benchmarks.results import describe_machine
from benchmarks.tables import print_table
from tests.campaign.case import VERDICTS, Kind, Leak, Watchdog, resident, seed_of, verdict
from tests.campaign.kinds import KINDS

PROCESSES = 2
STARTING_S = 120  # of a bench: servers load a model
MEMORY_MIB = 96  # that the cases of one bench may leave to their process: its allocator's, no more with more cases


@frozen
class Share:
    """Cases that share a bench."""

    kind: str
    first: int
    stop: int


@frozen
class Failed:
    """case: its seed; of a bench, the first one that shared it."""

    case: str
    verdict: str
    said: str


@define
class Campaign:
    seed: int
    done: Counter[str] = field(factory=Counter[str])
    failed: list[Failed] = field(factory=list[Failed])

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for name in names:
            counted = Counter(one.verdict for one in self.failed if one.case.split(":")[1] == name)
            seeds = f"{self.seed}:0-{self.done[name] - 1}"
            verdicts = {verdict: counted[verdict] for verdict in VERDICTS}
            found.append({"kind": name, "cases": self.done[name], "seeds": seeds, **verdicts})
        totals = {verdict: sum(row[verdict] for row in found) for verdict in VERDICTS}
        return [*found, {"kind": "all", "cases": sum(self.done.values()), "seeds": "", **totals}]


# --- in a process of its own ---


def work(parts: Connection, seed: int) -> None:
    """Parts come in, what became of each case goes out."""
    os.setpgrp()  # whatever it starts ends with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    while (part := parts.recv()) is not None:
        first = part.first
        while first < part.stop:
            first = bench(KINDS[part.kind], first, part.stop, seed, parts)
        parts.send(("part", None))


def bench(kind: Kind, first: int, stop: int, seed: int, pipe: Connection) -> int:
    """Cases from `first` on, until one fails, which ends its bench. The one to go on with."""
    number, name = first, seed_of(seed, kind.name, first)
    try:
        pipe.send(("starting", STARTING_S))
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder, kind.bench(Path(folder)) as case:
            guard, before = Watchdog(), 0
            for number in range(first, stop):
                name = seed_of(seed, kind.name, number)
                faulthandler.dump_traceback_later(kind.deadline_s)
                pipe.send(("case", (name, kind.deadline_s + 10)))
                guard(case, Random(name))
                before = before or (resident() if number - first > (stop - first) // 4 else 0)
            pipe.send(("ending", STARTING_S))
            name = seed_of(seed, kind.name, first)
            given_back(before)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
        pipe.send(("failed", Failed(name, verdict(error), "".join(traceback.format_exception(error)))))
    finally:
        faulthandler.cancel_dump_traceback_later()
    return number + 1


def given_back(before: int) -> None:
    """before: MiB after the first quarter of the cases; 0 where there were too few."""
    if before and resident() - before > MEMORY_MIB:
        raise Leak(f"{resident() - before} MiB more than after the first quarter")


# --- and the one that counts ---


@define(eq=False)
class CaseWorker:
    process: BaseProcess
    pipe: Connection
    part: Share | None = None
    case: str = ""
    until: float = 0

    @classmethod
    def start(cls, seed: int) -> CaseWorker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, seed))
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, part: Share | None) -> None:
        self.part, self.case, self.until = part, "", time.monotonic() + STARTING_S
        with suppress(OSError):
            self.pipe.send(part)

    def end(self) -> None:
        with suppress(OSError):
            self.process.terminate()
        self.process.join(10)
        with suppress(OSError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join(10)
        self.pipe.close()


def campaign(
    cases: int,
    seed: int,
    processes: int = PROCESSES,
    kinds: Sequence[str] = tuple(KINDS),
    *,
    quiet: bool = True,
    limit_s: float = math.inf,
) -> Campaign:
    """limit_s: after so many seconds, what has been done is all there is."""
    result, waiting = Campaign(seed), parts_of(cases, kinds, processes)
    total = sum(part.stop - part.first for part in waiting)
    workers = [CaseWorker.start(seed) for _ in range(min(processes, len(waiting)))]
    shown = started = time.monotonic()
    try:
        for worker in workers:
            worker.give(waiting.popleft() if waiting else None)
        while (busy := [one for one in workers if one.part is not None]) and time.monotonic() - started < limit_s:
            wait([worker.pipe for worker in busy], 1)
            for worker in busy:
                heard(worker, result, waiting)
                if worker.part is not None and time.monotonic() > worker.until:
                    lost(worker, "hang", "silent beyond its deadline", result, waiting)
                if worker.part is None and waiting:
                    if worker.pipe.closed:
                        workers[workers.index(worker)] = worker = CaseWorker.start(seed)  # noqa: PLW2901
                    worker.give(waiting.popleft())
            if not quiet and time.monotonic() > shown + 10:
                shown = time.monotonic()
                print(f"  {sum(result.done.values())} of {total}, {len(result.failed)} failed", flush=True)  # noqa: T201
    finally:
        for worker in workers:
            if not worker.pipe.closed:
                worker.give(None)
                worker.end()
    return result


def parts_of(cases: int, kinds: Sequence[str], processes: int) -> deque[Share]:
    """The longest ones first and each kind for all, so that no process is left with one at the end."""
    chosen = [KINDS[name] for name in kinds]
    shares = sum(kind.share for kind in chosen)
    parts = deque[Share]()
    for kind in chosen:
        count = max(1, round(cases * kind.share / shares))
        together = min(kind.together, -(-count // processes))
        parts += [Share(kind.name, at, min(at + together, count)) for at in range(0, count, together)]
    return parts


def heard(worker: CaseWorker, result: Campaign, waiting: deque[Share]) -> None:
    """Everything that it has said."""
    try:
        while worker.part is not None and worker.pipe.poll():
            match worker.pipe.recv():
                case ("case", (name, seconds)):
                    worker.case, worker.until = name, time.monotonic() + seconds
                    result.done[worker.part.kind] += 1
                case ("failed", failed):
                    print_failure(failed)
                    result.failed.append(failed)
                case ("part", _):
                    worker.part = None
                case (_, seconds):
                    worker.until = time.monotonic() + seconds
    except (EOFError, OSError):
        lost(worker, "crash", f"its process ended: {worker.process.exitcode}", result, waiting)


def lost(worker: CaseWorker, verdict: str, why: str, result: Campaign, waiting: deque[Share]) -> None:
    """A process that hangs or has ended. What it had not done yet goes to another one."""
    assert worker.part is not None
    case = worker.case or seed_of(result.seed, worker.part.kind, worker.part.first)
    failed = Failed(case, verdict, why)
    print_failure(failed)
    result.failed.append(failed)
    following = int(case.split(":")[2]) + 1
    if following < worker.part.stop:
        waiting.append(Share(worker.part.kind, following, worker.part.stop))
    worker.part = None
    worker.end()


def print_failure(failed: Failed) -> None:
    print(f"\n{failed.verdict}: python -m tests.campaign.run --case '{failed.case}'\n{failed.said}", flush=True)  # noqa: T201


def alone(name: str) -> int:
    """One case again, here."""
    kind = KINDS[name.split(":")[1]]
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder, kind.bench(Path(folder)) as case:
        try:
            Watchdog()(case, Random(name))
        except Exception as error:
            print(verdict(error))  # noqa: T201
            raise
    print("nothing wrong")  # noqa: T201
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.run", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which what is done is all")
    parser.add_argument("--case", help="one case alone, as it was printed")
    asked = parser.parse_args()
    if asked.case:
        return alone(asked.case)
    started = time.monotonic()
    result = campaign(asked.cases, asked.seed, asked.processes, asked.kinds, quiet=False, limit_s=asked.limit)
    rows = result.rows(asked.kinds)
    print_table(f"{asked.cases} cases, seed {asked.seed}, {time.monotonic() - started:.0f} s", rows)
    print(json.dumps({"campaign": rows, "seed": asked.seed, "machine": asdict(describe_machine())}))  # noqa: T201
    return 1 if result.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
