"""The device of a simulated replica as a fluid: prompts and answers advance at rates that change at few events.

Problem. The simulation of one server puts every launch on the clock. Hundreds of replicas would need hours for that.

Idea. Between two events (a request comes, a prompt is read, an answer ends) nothing changes: the same prompts are read
and the same answers are decoded. So both advance at constant rates, which follow from the costs and from the rules of
`states/launch_choice.py`. A decode step of all answers and some rows of a prompt take turns or go through one forward.
Of several prompts the shortest is read in two of three turns and the oldest in the third.

`tests/simulate_command/test_fleet.py` compares it with the simulation of every launch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from math import ceil

from attrs import define, field

from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.virtual_clock import Clock
from states.mixed_launch import MIXED_ROWS_PER_STEP
from states.prompt_choice import MAX_OVERTAKES
from states.settings import Settings
from states.step_prices import round_up_to_bucket

ALMOST = 1e-6  # of a decode step, or of a nanosecond: rounding of sums


@define(eq=False)
class PromptWork:
    """Rows of a prompt that are to be computed. left_ns: what is left of their time on a device of their own."""

    rows: int
    left_ns: float
    row_ns: float
    on_done: Callable[[], None]


@define(eq=False)
class FluidLane:
    """One device. Everything else happens on the clock."""

    costs: Costs
    settings: Settings
    clock: Clock
    busy_ns: int = 0  # time in which it had anything to do
    _prompts: list[PromptWork] = field(factory=list[PromptWork])  # the oldest first
    # (the decode step at which it ends, order, position, what to call)
    _answers: list[tuple[float, int, int, Callable[[], None]]] = field(
        factory=list["tuple[float, int, int, Callable[[], None]]"]
    )
    _steps: float = 0.0  # decode steps so far
    _order: int = 0
    _advanced_at: int = 0
    _version: int = 0  # of the rates; a wake-up for earlier ones means nothing

    @property
    def queued_ns(self) -> int:
        """The time of all prompts that wait or are being read, without answers in between."""
        self._advance()
        return round(sum(work.left_ns for work in self._prompts))

    def compute_rows(self, start: int, stop: int, on_done: Callable[[], None]) -> None:
        """Compute rows `[start, stop)` of a prompt, and call `on_done` then. Without rows, call it at once."""
        rows = stop - start
        if rows <= 0:
            on_done()
            return
        self._advance()
        launches = -(-rows // self.settings.chunk)
        total = self.costs.chunk_ns(start, stop) + (launches - 1) * self.costs.launch
        self._prompts.append(PromptWork(rows, total, total / rows, on_done))
        self._schedule()

    def decode_answer(self, position: int, tokens: int, on_done: Callable[[], None]) -> int:
        """Decode an answer of so many tokens. Return the nanoseconds until its first token."""
        self._advance()
        self._order += 1
        heapq.heappush(self._answers, (self._steps + tokens, self._order, position + tokens // 2, on_done))
        self._schedule()
        _, interval_ns = self._compute_rates()
        return ceil(interval_ns)

    def _compute_rates(self) -> tuple[float, float]:
        """Return the share of time in which prompts are read, and the nanoseconds from one decode step to the next."""
        count = min(len(self._answers), self.settings.batch_rows)
        if not count:
            return 1.0, 0.0
        positions = [position for _, _, position, _ in self._answers]
        step_ns = self.costs.decode_ns(positions[:count])
        # Answers beyond the widest batch wait for the next step.
        turns = len(positions) / count
        if not self._prompts:
            return 0.0, step_ns * turns
        rows = self.settings.chunk
        if self.settings.mixed_rows and not self.settings.stateful:
            least = round_up_to_bucket(MIXED_ROWS_PER_STEP * count)
            rows = max(1, min(max(self.settings.mixed_rows, least), rows) - count)
        prompt_ns = rows * self._list_shares()[0][0].row_ns
        return prompt_ns / (prompt_ns + step_ns), (prompt_ns + step_ns) * turns

    def _list_shares(self) -> list[tuple[PromptWork, float]]:
        """Return the prompts that are being read, each with its share of the turns."""
        shortest = min(self._prompts, key=lambda work: work.left_ns)
        oldest = self._prompts[0]
        if shortest is oldest:
            return [(oldest, 1.0)]
        turns = MAX_OVERTAKES + 1
        return [(shortest, MAX_OVERTAKES / turns), (oldest, 1 / turns)]

    def _advance(self) -> None:
        """Let everything advance until now."""
        passed = self.clock.now - self._advanced_at
        self._advanced_at = self.clock.now
        if not passed or not (self._prompts or self._answers):
            return
        self.busy_ns += passed
        share, round_ns = self._compute_rates()
        if self._prompts:
            for work, turns in self._list_shares():
                work.left_ns -= passed * share * turns
        if round_ns:
            self._steps += passed / round_ns

    def _schedule(self) -> None:
        """Put the next event on the clock."""
        self._version += 1
        share, round_ns = self._compute_rates()
        times = list[float]()
        if self._prompts:
            times = [work.left_ns / (share * turns) for work, turns in self._list_shares()]
        if self._answers:
            times.append((self._answers[0][0] - self._steps) * round_ns)
        if times:
            self.clock.at(self.clock.now + max(0, ceil(min(times))), partial(self._wake, self._version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        done = [work.on_done for work in self._prompts if work.left_ns <= ALMOST]
        self._prompts = [work for work in self._prompts if work.left_ns > ALMOST]
        while self._answers and self._answers[0][0] <= self._steps + ALMOST:
            done.append(heapq.heappop(self._answers)[3])
        self._schedule()
        for action in done:
            action()
