"""Servers that are measured at the same moment, each in a process that is pinned to cores of its own.

What disturbs the machine then disturbs all of them, and the ratio of two times says little of it. The sets of cores
change hands after each round, so that a difference between cores cancels as well. Used by `benchmarks.copied_text`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from attrs import frozen

from benchmarks.worker import Worker, start_worker

Cores = tuple[int, ...]


def parse_cores(text: str, servers: int) -> list[Cores]:
    """Return the cores of each server. text: `0,1:2,3` and so on; empty: two of this process's for each.

    Raises ValueError if there are fewer sets than servers.
    """
    free = sorted(os.sched_getaffinity(0))
    sets: list[Cores] = [*zip(free[::2], free[1::2], strict=False)]
    if text:
        sets = [tuple(map(int, part.split(","))) for part in text.split(":")]
    if len(sets) < servers:
        raise ValueError(f"{servers} servers need as many sets of cores, and there are {len(sets)}")
    return sets[:servers]


def pin(process: int, cores: Cores) -> None:
    """Let all threads of a process run on these cores only. Threads that they start inherit it."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


@frozen
class PinnedServers:
    """Running servers by name, and the sets of cores that they take turns on."""

    workers: Mapping[str, Worker]
    sets: Sequence[Cores]
    threads: ThreadPoolExecutor

    def ask_all(self, request: Mapping[str, Any], turn: int) -> dict[str, dict[str, Any]]:
        """Ask all servers at once, and wait for all answers. turn: says which server has which cores."""
        for number, worker in enumerate(self.workers.values()):
            pin(worker.process.pid, self.sets[(number + turn) % len(self.sets)])
        found = self.threads.map(lambda worker: worker.ask(request), self.workers.values())
        return dict(zip(self.workers, found, strict=True))

    def load_all(self, make_request: Callable[[str], Mapping[str, Any]]) -> None:
        """Send each server what it has to load, all at once."""
        list(self.threads.map(lambda one: one[1].ask(make_request(one[0])), self.workers.items()))


@contextmanager
def start_servers(names: Sequence[str], module: str, sets: Sequence[Cores], home: Path) -> Iterator[PinnedServers]:
    """Start `python -m MODULE --worker` once for each name. home: folder for what each of them measures and keeps."""
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as threads:
        workers = dict[str, Worker]()
        for name, cores in zip(names, sets, strict=True):
            under = ["env", f"XDG_CACHE_HOME={home / name}", "taskset", "-c", ",".join(map(str, cores))]
            workers[name] = stack.enter_context(start_worker(Path(__file__).parents[1], module, under))
        yield PinnedServers(workers, sets, threads)


def describe_spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of at least two values, and their quartiles."""
    first, middle, third = quantiles(values, method="inclusive")
    return {"median": middle, "first quartile": first, "third quartile": third}
