"""A simulated replica that is cheap enough for hundreds of them: slots, queue, restores and digests.

It does what the fold does with a request, in five steps: wait for a slot, keep the rows of the slot that has most,
look up the rest, load one part while computing another (`policy.choose_load_start`), decode. It leaves out what hardly
changes hits and times: prompts that follow one another, one-off requests, and copies on the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, field

from effects.ids import Tier
from engine.tools.simulation.fleet.fluid_lane import FluidLane
from engine.tools.simulation.fleet.prompt_paths import PromptPath
from engine.tools.simulation.fleet.replica_store import KeptRun, ReplicaStore
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.virtual_clock import Clock
from states.policy import choose_load_start
from states.rates import Rates
from states.routing.digests import LoadReport
from states.routing.route_prices import make_prices, round_rates
from states.settings import Settings


@define(eq=False)
class RoutedRequest:
    """A request at a replica, and what became of it. Times are nanoseconds of the clock; 0: not yet.

    reads_only: its rows are left in the shared tier, and nothing is decoded.
    """

    path: PromptPath
    sent: int
    on_first: Callable[[], None] = lambda: None
    on_closed: Callable[[], None] = lambda: None
    reads_only: bool = False
    found: int = 0  # usable prompt tokens that the replica or the shared tier had
    restored: int = 0  # tokens that were not computed
    first: int = 0
    expected_ns: int = 0  # to compute what is missing, as it looked when it came


@define(eq=False)
class LeanSlot:
    """A slot and the pieces of the sequence that it holds."""

    held: frozenset[bytes] = frozenset()
    keys: tuple[bytes, ...] = ()
    taken: bool = False
    last_turn: int = 0

    def count_pieces(self, path: PromptPath) -> int:
        """Count the usable pieces at the beginning of a prompt that the slot holds."""
        low = 0
        high = min(path.usable, len(self.keys))
        while low < high:
            middle = (low + high + 1) // 2
            if path.keys[middle - 1] in self.held:
                low = middle
            else:
                high = middle - 1
        return low


@define(eq=False)
class LeanReplica:
    """One replica. Requests come by `submit`; everything else happens on the clock."""

    settings: Settings
    rates: Rates
    costs: Costs
    clock: Clock
    store: ReplicaStore
    lane: FluidLane = field(init=False)
    slots: list[LeanSlot] = field(init=False)
    open_requests: int = 0
    _waiting: deque[RoutedRequest] = field(factory=deque)
    _copies: Counter[bytes] = field(factory=Counter[bytes])  # slots that hold a piece
    _turn: int = 0
    _answer_ns: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.lane = FluidLane(self.costs, self.settings, self.clock)
        self.slots = [LeanSlot() for _ in range(self.settings.serving_slots)]

    def submit(self, request: RoutedRequest) -> None:
        self.open_requests += 1
        runs = self.store.find_runs(request.path, 0)
        have = max((run.stop for run in runs), default=0)
        request.expected_ns = make_prices(self.rates).estimate_prefill_time(have, max(have, request.path.tokens))
        self._waiting.append(request)
        self._admit()

    def report_load(self) -> LoadReport:
        wait = self.lane.queued_ns + sum(request.expected_ns for request in self._waiting)
        return LoadReport(wait, self.settings.serving_slots, round(self._answer_ns), round_rates(self.rates))

    def _admit(self) -> None:
        while self._waiting and (free := [slot for slot in self.slots if not slot.taken]):
            self._start(self._waiting.popleft(), free)

    def _start(self, request: RoutedRequest, free: Sequence[LeanSlot]) -> None:
        """Give a request a slot, and begin to load and to compute its prompt."""
        path = request.path
        source = max(self.slots, key=lambda slot: (slot.count_pieces(path), slot in free, -slot.last_turn))
        kept = source.count_pieces(path)
        in_place = source in free and kept and kept == min(len(source.keys), path.usable)
        slot = source if in_place else min(free, key=lambda slot: slot.last_turn)
        slot.taken = True
        self._hold(slot, path.keys[:kept])
        runs = self.store.find_runs(path, kept)
        self.store.touch(runs)
        valid = path.stops[kept - 1] if kept else 0
        request.found = max([valid, *(run.stop for run in runs)])
        load_start = self._choose_load_start(valid, runs)
        load = [run for run in runs if run.stop > load_start]
        request.restored = valid + (request.found - load_start if load else 0)
        sides = 2 if load else 1

        def join_sides() -> None:
            nonlocal sides
            sides -= 1
            if not sides:
                after = request.found if load else load_start
                self.lane.compute_rows(after, path.tokens, partial(self._answer, request, slot))

        if load:
            self.clock.at(self.store.load_runs(load), partial(self._finish_load, load, join_sides))
        self.lane.compute_rows(valid, load_start, join_sides)

    def _hold(self, slot: LeanSlot, keys: Sequence[bytes]) -> None:
        """Let a slot hold this sequence, and tell what the device has got and lost. Other slots may hold the same."""
        before = slot.held
        slot.keys = tuple(keys)
        slot.held = frozenset(keys)
        self._copies.update(slot.held - before)
        self._copies.subtract(before - slot.held)
        lost = [key for key in before - slot.held if not self._copies[key]]
        for key in lost:
            del self._copies[key]
        self.store.on_change("device", [key for key in slot.held - before if self._copies[key] == 1], lost)

    def _choose_load_start(self, valid: int, runs: Sequence[KeptRun]) -> int:
        """Return the row from which on kept rows are loaded, as the planner does, by the tier that has most of them."""
        if not runs:
            return valid
        lengths = dict[Tier, int]()
        for run in runs:
            lengths[run.tier] = lengths.get(run.tier, 0) + run.stop - run.start
        tier = max(lengths, key=lambda name: lengths[name])
        return choose_load_start(self.settings, self.rates, valid, runs[-1].stop, tier)

    def _finish_load(self, runs: Sequence[KeptRun], join_sides: Callable[[], None]) -> None:
        self.store.promote_runs(runs)
        join_sides()

    def _answer(self, request: RoutedRequest, slot: LeanSlot) -> None:
        """Decode the answer, now that the whole prompt is there."""
        path = request.path
        self._hold(slot, path.keys[: path.usable])
        if request.reads_only:
            self._close(request, slot, self.clock.now)
            return
        began = self.clock.now
        wait = self.lane.decode_answer(path.tokens, path.answer, lambda: self._close(request, slot, began))
        request.first = began + wait
        request.on_first()

    def _close(self, request: RoutedRequest, slot: LeanSlot, began: int) -> None:
        path = request.path
        self._turn += 1
        slot.taken = False
        slot.last_turn = self._turn
        self.open_requests -= 1
        took = self.clock.now - began
        if request.reads_only:
            self._keep(path, request.on_closed)
        else:
            self._answer_ns = (7 * self._answer_ns + took) / 8 if self._answer_ns else took
            self._hold(slot, path.keys)
            self._keep(path)
            request.on_closed()
        self._admit()

    def _keep(self, path: PromptPath, on_shared: Callable[[], None] = lambda: None) -> None:
        if path.stops and path.stops[-1] >= self.settings.min_tokens:
            self.store.keep_path(path, on_shared)
        else:
            on_shared()
