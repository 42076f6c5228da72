"""Small logs and small servers for them."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from effects.ids import RequestId, Tokens
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed
from effects.restore import RestoreBlocks
from effects.scope import Scope
from engine.tools.simulation.logs.logged_requests import Agent, Request, Session, make_tokens
from engine.tools.simulation.simulate_scope import Setup, Simulation, fit_settings
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_process import Process
from engine.tools.simulation.simulated_store import SimulatedStore
from states.events import Event
from states.invariants import check_world
from states.settings import Settings

SECOND = 1_000_000_000
BLOCK_SIZE = 4
COSTS = Costs(token_bytes=16, file=0)
ENDLESS = 1 << 40


def request(at_s: float, *pieces: Tokens, answer: int = 3, boundaries: Tokens = (), pause_s: float = 0) -> Request:
    said = make_tokens(f"{at_s} {pieces} answer", answer)
    return Request(round(at_s * SECOND), pieces, said, boundaries, round(pause_s * SECOND))


def agent(name: str, turns: int, *, first: int = 40, more: int = 24, every_s: float = 60) -> Agent:
    """Each prompt begins with the one before it."""
    pieces = [make_tokens(f"{name} {turn}", more if turn else first) for turn in range(turns)]
    return Agent(tuple(request(turn * every_s, *pieces[: turn + 1]) for turn in range(turns)))


def session(name: str, turns: int, **how: Any) -> Session:
    return Session(name, (agent(name, turns, **how),))


def setup(sessions: list[Session], **how: Any) -> Setup:
    """Small blocks, room for everything, one process."""
    costs = evolve(COSTS, state_bytes=how.pop("state_bytes", 0))
    settings = Settings(
        slots=how.pop("slots", 2),
        chunk=16,
        block_size=BLOCK_SIZE,
        store=True,
        stateful=costs.state_bytes > 0,
        state_checkpoints=how.pop("places", 0),
        state_tokens=costs.state_tokens,
        scorer_max_tokens=how.pop("drafter", 0),
        rates=costs.build_rates(),
    )
    chosen: dict[str, Any] = {"disk_budget": ENDLESS, "host_budget": 0} | how
    return Setup(fit_settings(settings, sessions), costs, **chosen)


def run(sessions: list[Session], scope: Scope | None = Scope(), **how: Any) -> Simulation:  # noqa: B008 - a frozen value
    one = Simulation(setup(sessions, **how), sessions, scope)
    one.run()
    return one


def watch(monkeypatch: Any) -> list[str]:
    """Check the world after every event, and that what is found and loaded are the very tokens that were asked for."""
    seen = list[str]()
    feed, find, load = Process.feed, SimulatedStore.find, SimulatedStore.start_load
    prompts: dict[int, Tokens] = {}

    def checked_feed(self: Process, request: RequestId, event: Event) -> None:
        feed(self, request, event)
        check_world(self.world)
        seen.append(type(event).__name__)

    def checked_find(self: SimulatedStore, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        outcome = find(self, effect)
        if isinstance(outcome, PrefixFound):
            prompts[outcome.lease] = effect.prompt
            assert effect.beyond < outcome.length < len(effect.prompt)
        return outcome

    def checked_load(self: SimulatedStore, effect: RestoreBlocks) -> int:
        lease, wanted = self.store.get_lease(effect.lease), prompts[effect.lease]
        assert effect.stop in lease.checkpoints if lease.states else effect.start < effect.stop <= lease.length
        at = effect.start if lease.states else 0  # a slot has the rows before it, where only their state was missing
        for part in lease.parts:
            assert part.start == at
            at = part.stop
            kept = memoryview(part.entry.tokens).cast("i").tolist()
            first = part.entry.start
            assert tuple(kept[part.start - first : part.stop - first]) == wanted[part.start : part.stop]
            index = next(tier for tier in self.store.tiers if tier.name == part.tier).index
            assert index.entries.get(part.entry.handle) is part.entry, "what is loaded is there"
        return load(self, effect)

    monkeypatch.setattr(Process, "feed", checked_feed)
    monkeypatch.setattr(SimulatedStore, "find", checked_find)
    monkeypatch.setattr(SimulatedStore, "start_load", checked_load)
    return seen
