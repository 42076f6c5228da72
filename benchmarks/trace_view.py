"""Measures how soon a trace of many requests can be viewed: `rekindle trace view`, the size of its page, and opening
it.

`python -m benchmarks.trace_view [--requests 10000] [--keep FOLDER]`. The trace is of simulated agents: four slots, two
tiers of the store, batches of up to four. Opening is from the start of navigation until all is drawn, in a headless
Chromium, the quickest and the slowest of five.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import anyio
from attrs import define, field

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table
from effects.scope import Scope
from engine.core.event_loop import Envelope
from engine.core.trace import VERSION, Digest, Header, converter, digest, encode
from engine.settings.output.formatting import format_bytes
from engine.tools.simulation.logs.logged_requests import Agent, Request, Session, make_tokens
from engine.tools.simulation.simulate_scope import Setup, Simulation, fit_settings
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_process import Process
from engine.tools.timeline.timeline_page import write_page
from states.events import Happened
from states.settings import Settings
from states.world import advance
from tests import browser

GOAL_S = 2
SECOND = 1_000_000_000


@define(eq=False)
class RecordedProcess(Process):
    """Writes down what happens, as a server's recorder would."""

    file: IO[str] = field(kw_only=True)
    seq: int = 0

    def happen(self, happened: Happened) -> None:
        _, outs = advance(self.world, happened)
        lines = [encode(Envelope(self.seq, self.clock.now, happened)), *map(encode, outs)]
        self.file.write("\n".join(lines) + "\n")
        self.seq += 1
        super().happen(happened)


@define(eq=False)
class RecordedSimulation(Simulation):
    """A simulation of one process that records a trace."""

    file: IO[str] = field(kw_only=True)

    def _start_process(self) -> None:
        super()._start_process()
        plain = self.process
        self.process = RecordedProcess(plain.settings, plain.costs, plain.clock, plain.keeping, file=self.file)


def agents(requests: int, turns: int = 8) -> list[Session]:
    """Conversations of some turns, each beginning with all that was said before, a few at once."""
    sessions = list[Session]()
    for number in range(-(-requests // turns)):
        said = [make_tokens(f"{number} {turn}", 60 + 37 * (number + turn) % 200) for turn in range(turns)]
        pieces = [make_tokens("system", 128), *said]
        kept = min(turns, requests - number * turns)
        made = [
            Request(
                number * SECOND // 2 + turn * SECOND,
                tuple(pieces[: turn + 2]),
                make_tokens(f"{number} {turn} said", 3 + (number * 7 + turn) % 12),
                pause_ns=SECOND // 4,
            )
            for turn in range(kept)
        ]
        sessions.append(Session(f"session {number}", (Agent(tuple(made)),), absolute=True))
    return sessions


def record(path: Path, requests: int) -> None:
    sessions, costs = agents(requests), Costs()
    settings = Settings(slots=4, store=True, min_tokens=64, chunk=256, rates=costs.build_rates())
    setup = Setup(fit_settings(settings, sessions), costs, disk_budget=256 << 20, host_budget=4 << 20)
    with path.open("w", encoding="utf-8") as file:
        header = Header(VERSION, "simulated", setup.settings, "simulated", {"model": "simulated"})
        file.write(json.dumps(converter().unstructure(header), separators=(",", ":")) + "\n")
        run = RecordedSimulation(setup, sessions, Scope(), file=file)
        run.run()
        process: Any = run.process
        file.write(encode(Digest(process.seq - 1, digest(process.world), last=True)) + "\n")


async def time_opening(page: Path, times: int) -> list[float]:
    """Seconds."""
    program = browser.found()
    if program is None:
        raise SystemExit("there is no Chromium here")
    found = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        async with browser.Browser.opened(program, Path(folder)) as chromium:
            for _ in range(times):
                async with chromium.page(page.as_uri()) as tab:
                    found.append(float(await tab.until("document.documentElement.dataset.ready")) / 1000)
                    if tab.errors:
                        raise SystemExit(f"the page complains: {tab.errors}")
    return sorted(found)


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = (given.keep or Path(folder)) / "trace.jsonl"
        record(trace, given.requests)
        page, started = trace.with_suffix(".html"), time.process_time()
        print(write_page(trace, page).line)
        took = time.process_time() - started
        opening = anyio.run(time_opening, page, 5)
        row = {
            "requests": given.requests,
            "trace": format_bytes(trace.stat().st_size),
            "page": format_bytes(page.stat().st_size),
            "written_s_of_processor": took,
            "opened_s_quickest": opening[0],
            "opened_s_slowest": opening[-1],
        }
    print_table(f"a trace to look at (goal: open within {GOAL_S} s)", [row])
    what, goal = "a trace as a page, opened", Goal(at_most=GOAL_S)
    figures = [Figure("service", what, f"{given.requests:,} requests", "s", opening[-1], goal=goal)]
    publish(given, "trace_view", {"rows": [row], "opening_s": opening}, figures, "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
