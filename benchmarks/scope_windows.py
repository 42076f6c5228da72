"""Measures how many recent prompts scope `auto` should compare with: 2, 8 and 30 on four shapes of traffic, as
Markdown.

`python -m benchmarks.scope_windows`. The real machine, policy, recent prompts and index on a virtual clock; the server
is restarted after every request, so only what was kept on disk is found. A hit is a request whose whole selected prefix
was there. *Selected* is the mean over the requests for which something was selected: for one and the same request a
wider window never selects less, but it selects for more requests, from prompts further back that share less.

A shape is written as its requests, a letter an agent. A prompt is its agent's head and then a tail of its own; with a
capital letter, the same agent has something at hand that stays between the two while letters are capital. Requests
before the bar are not counted: the log begins before the table does.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, publish
from effects.scope import Scope
from engine.tools.simulation.logs.logged_requests import Agent, Request, Session, make_tokens
from engine.tools.simulation.simulate_scope import Setup, Simulation, fit_settings
from engine.tools.simulation.simulated_costs import Costs
from states.settings import Settings

WINDOWS = (2, 8, 30)
TAIL = 300  # tokens of words that never come again
SECOND = 1_000_000_000


@frozen
class Traffic:
    """head: tokens that all prompts of an agent begin with. standing: of an agent's head and what it is at for long."""

    name: str
    requests: str
    head: int
    standing: dict[str, int]
    published: tuple[tuple[int, str], ...]  # what was published of such traffic, for each window

    @property
    def warm(self) -> int:
        return self.requests.replace(" ", "").find("|") if "|" in self.requests else 0

    def session(self) -> Session:
        letters = self.requests.replace(" ", "").replace("|", "")
        return Session(self.name, (Agent(tuple(self.request(at, letter) for at, letter in enumerate(letters))),))

    def request(self, at: int, letter: str) -> Request:
        pieces = [make_tokens(f"{self.name} {letter.lower()}", self.head)]
        if letter.isupper():
            pieces.append(make_tokens(f"{self.name} {letter} at", self.standing[letter] - self.head))
        starts = [sum(map(len, pieces[: end + 1])) for end in range(len(pieces))]
        pieces.append(make_tokens(f"{self.name} {at} tail", TAIL))
        length = starts[-1] + TAIL
        return Request(at * 60 * SECOND, tuple(pieces), make_tokens(f"{self.name} {at} answer", 8), (*starts, length))


SHAPES = (
    Traffic("one agent, stable", "a" * 30, 1432, {}, ((1432, "28/30"),) * 3),
    Traffic(
        "twelve agents in turn, one often, one three times in a row",
        "xyabcdefghij xyabcdefghij | aXYYYXbcdXefgXhijXabcXdefXghiX",
        1310,
        {"X": 1724, "Y": 1988},
        ((1988, "1/30"), (1783, "7/30"), (1452, "28/30")),
    ),
    Traffic(
        "one busy agent, eight others now and then",
        "vwabcdefyyy vwabcdefYYY | YVYWYVYWYVYWYaYbcdef",
        539,
        {"Y": 1776, "V": 615, "W": 615},
        ((1776, "8/20"), (1389, "10/20"), (1049, "18/20")),
    ),
    Traffic(
        "the same, the busy one with more at hand",
        "vwabcdefyyy vwabcdefYYY | YVYWYVYWYVYWYVabcdef",
        520,
        {"Y": 2204, "V": 640, "W": 640},
        ((2204, "7/20"), (1489, "10/20"), (869, "18/20")),
    ),
)


def count_hits(shape: Traffic, window: int) -> tuple[float, int, int]:
    """(selected, hits, requests), less those before the bar."""
    session, costs = shape.session(), Costs()
    settings = fit_settings(Settings(slots=1, store=True, min_tokens=512, rates=costs.build_rates()), [session])
    run = Simulation(Setup(settings, costs, 1 << 40, 0, restart_every=1), [session], Scope("auto", window))
    run.run()
    counts = list(run.tally.counts.values())[shape.warm :]
    selected = [count.selected for count in counts if count.selected]
    return sum(selected) / max(1, len(selected)), sum(count.is_whole_hit for count in counts), len(counts)


def main() -> int:
    given = benchmark_parser(__doc__).parse_args()
    rows = list[dict[str, Any]]()
    print(f"| traffic | {' | '.join(f'`auto:{window}`' for window in WINDOWS)} |")
    print("|---" * (len(WINDOWS) + 1) + "|")
    for shape in SHAPES:
        cells = []
        for window, (length, share) in zip(WINDOWS, shape.published, strict=True):
            selected, hits, of = count_hits(shape, window)
            cells.append(f"{selected:.0f} tokens, **{hits}/{of}** (published: {length}, {share})")
            rows.append({"shape": shape.name, "window": window, "selected": selected, "hits": hits, "requests": of})
        print(f"| {shape.name} | {' | '.join(cells)} |")
    figures = [
        Figure(
            "agents", f"whole prefix found, auto:{row['window']}", row["shape"], f"of {row['requests']}", row["hits"]
        )
        for row in rows
    ]
    publish(given, "scope_windows", {"rows": rows}, figures, "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
