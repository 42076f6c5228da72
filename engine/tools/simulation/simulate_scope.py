"""Simulates one scope, from the first request to the last, across restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from adapters.store.open_store import create_index
from effects.compression import Compression
from effects.ids import RequestId
from effects.job import Job
from effects.scope import Scope
from engine.tools.simulation.logged_clients import Clients
from engine.tools.simulation.logs.logged_requests import Request, Session
from engine.tools.simulation.simulated_compression import SimulatedCompression
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_process import LiveRequest, Process
from engine.tools.simulation.simulated_store import SimulatedDisk, SimulatedStore, build_simulated_layout
from engine.tools.simulation.tally import (
    Figures,
    FinishedRun,
    InfiniteCache,
    RequestTally,
    Tally,
    compute_quantile,
    compute_share,
)
from engine.tools.simulation.virtual_clock import Clock
from states.sequences import round_down_to_block
from states.settings import Settings

NO_CACHE = "no cache"


@frozen
class Setup:
    """The part of a simulation that is the same for every scope.

    Budgets are bytes. restart_every: requests between two restarts, 0: none. interleave: sessions at once, 0: all.
    """

    settings: Settings
    costs: Costs
    disk_budget: int
    host_budget: int
    restart_every: int = 0
    interleave: int = 0
    compression: Compression = field(factory=Compression)  # what every request asks for


@define(eq=False)
class Simulation:
    """Sends every request of `sessions` under one scope.

    scope: None means that no prompt shares anything with another. All times are nanoseconds of `clock`.
    """

    setup: Setup
    sessions: Sequence[Session]
    scope: Scope | None
    on_answered: Callable[[], None] = lambda: None  # called when a request has been answered
    clock: Clock = field(factory=Clock)
    tally: Tally = field(init=False)
    disk: SimulatedDisk = field(init=False)
    process: Process = field(init=False)
    # Requests that came while the process stops.
    _waiting: deque[tuple[Request, Callable[[], None]]] = field(factory=deque)
    _since: int = 0  # requests since the process started
    _indices: dict[int, int] = field(init=False)  # index of each request among all
    _shortening: SimulatedCompression = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = self.setup.settings
        costs = self.setup.costs
        every = (request for session in self.sessions for agent in session.agents for request in agent.requests)
        self._indices = {id(request): index for index, request in enumerate(every)}
        self.tally = Tally(InfiniteCache(settings.block_size))
        kept = create_index(build_simulated_layout(costs, settings.block_size), self.setup.disk_budget)
        self.disk = SimulatedDisk(kept, costs, self.clock, self.tally)
        self._shortening = SimulatedCompression(self.setup.compression, settings.scorer_max_tokens)
        self._start_process()

    def run(self) -> None:
        Clients(self.sessions, self.clock, self.send, self.setup.interleave).start()
        while self.clock.step():
            if self._is_stopping and self.process.is_idle and self.process.keeping.is_idle:
                self._restart()
        assert self.process.is_idle, "a request that was never answered"

    def _start_process(self) -> None:
        setup = self.setup
        shape = build_simulated_layout(setup.costs, setup.settings.block_size)
        keeping = SimulatedStore(self.disk, setup.host_budget, shape, setup.costs, self.clock)
        settings = setup.settings if self.scope is not None else evolve(setup.settings, store=False)
        self.process = Process(settings, setup.costs, self.clock, keeping, self._shortening.frozen.store)
        self._since = 0

    @property
    def name(self) -> str:
        return NO_CACHE if self.scope is None else str(self.scope)

    @property
    def _is_stopping(self) -> bool:
        """Return whether no request is admitted until those that are live have ended."""
        return 0 < self.setup.restart_every <= self._since

    def _restart(self) -> None:
        """Restart the process. Slots and host memory are empty, and everything that was queued for the disk has been
        written.
        """
        if not self._waiting and not self._remaining:
            return
        self.tally.restarts.append(self.clock.now)
        self._start_process()
        waiting = list(self._waiting)
        self._waiting = deque()
        for request, answered in waiting:
            self.send(request, answered)

    @property
    def _remaining(self) -> int:
        return sum(session.count for session in self.sessions) - len(self.tally.counts)

    def send(self, request: Request, answered: Callable[[], None]) -> None:
        """Submit a request, or keep it until the process has started again. answered: called when it has its answer."""
        if self._is_stopping:
            self._waiting.append((request, answered))
            return
        self._since += 1
        number = RequestId(len(self.tally.counts))
        prompt = request.prompt
        count = RequestTally(
            self._indices[id(request)],
            len(prompt),
            self.clock.now,
            self.tally.infinite.count_shared_tokens(prompt, request.answer),
        )
        self.tally.counts[number] = count
        if self.scope is None:  # no other prompt has this first token, so none shares anything with it
            prompt = (-1 - number, *prompt[1:])

        def finish_request() -> None:
            self.on_answered()
            answered()

        scope = self.scope or Scope("off")
        compression = self._shortening.build_compression(prompt, request.boundaries)
        job = Job(prompt, len(request.answer), scope=scope, boundaries=request.boundaries, compression=compression)
        self.process.submit(number, job, LiveRequest(count, request.answer, finish_request))

    # --- the outcome ---

    def build_result(self) -> FinishedRun:
        tally = self.tally
        counts = tuple(tally.counts.values())
        return FinishedRun(
            self.name, self.scope, self.compute_figures(), counts, tuple(tally.written), tuple(tally.restarts)
        )

    def compute_figures(self) -> Figures:
        counts = list(self.tally.counts.values())
        block_size = self.setup.settings.block_size
        prompts = sum(count.prompt for count in counts)
        hits = sum(count.found for count in counts)
        infinite = sum(count.infinite for count in counts)
        selected = [count.selected for count in counts if count.selected]
        written = self.tally.written[-1][1] if self.tally.written else 0
        unique = len(self.tally.infinite.blocks) * block_size * self.setup.costs.token_bytes
        waits = [count.first_ms for count in counts]
        return Figures(
            scope=self.name,
            requests=len(counts),
            prompt_tokens=prompts,
            hit_tokens=hits,
            hit_share=compute_share(hits, prompts),
            infinite_hit_tokens=infinite,
            infinite_share=compute_share(infinite, prompts),
            of_infinite=compute_share(hits, infinite),
            restored_tokens=sum(count.restored for count in counts),
            followed_tokens=sum(count.followed for count in counts),
            served_tokens=sum(count.served for count in counts),
            whole_hits=sum(count.is_whole_hit for count in counts),
            selected_mean=compute_share(sum(selected), len(selected)),
            selected_last=next((count.selected for count in reversed(counts) if count.selected), 0),
            written_bytes=written,
            checkpoint_bytes=self.tally.checkpoints,
            unique_bytes=unique,
            written_of_unique=compute_share(written, unique),
            evictions=self.disk.index.evictions,
            dropped_writes=self.disk.dropped_writes,
            disk_bytes=self.disk.index.held_bytes,
            restarts=len(self.tally.restarts),
            first_token_ms=(compute_quantile(waits, 0.5), compute_quantile(waits, 0.9)),
        )


def fit_settings(settings: Settings, sessions: Sequence[Session]) -> Settings:
    """Return the settings with slots that the longest request fits into, and a queue that refuses no request."""
    longest = max(
        request.length + len(request.answer)
        for session in sessions
        for agent in session.agents
        for request in agent.requests
    )
    context = round_down_to_block(settings, longest) + settings.block_size
    requests = sum(session.count for session in sessions)
    return evolve(settings, max_context=max(context, settings.max_context), max_queue=requests)
