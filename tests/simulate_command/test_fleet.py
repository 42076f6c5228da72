"""Simulated fleets: the lean replica against the simulation of every launch, routers, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from attrs import evolve

from effects.scope import Scope
from engine.__main__ import main
from engine.settings.output import plot_style
from engine.tools.simulation.fleet.fleet_run import OTHER_ROUTERS, PREFIX, FleetRun, FleetSetup
from engine.tools.simulation.fleet.fluid_lane import FluidLane
from engine.tools.simulation.fleet.prompt_paths import chain_pieces, list_requests
from engine.tools.simulation.logs.logged_requests import Session
from engine.tools.simulation.simulate_scope import Simulation
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulation_options import ROUTER_NAMES
from engine.tools.simulation.tally import InfiniteCache, compute_quantile
from engine.tools.simulation.virtual_clock import Clock
from states.routing.choose_replica import RemotePrefill, RouteDecision
from states.routing.other_routers import LeastQueue
from states.routing.prefix_router import RouterEvent
from states.settings import Settings
from tests.simulate_command.kit import BLOCK_SIZE, ENDLESS, agent, session, setup
from tests.simulate_command.test_logs import counts, write
from tests.simulate_command.test_logs import session as count_log

SECOND = 1_000_000_000


def fleet_of(sessions: list[Session], router: str, **how: int) -> FleetRun:
    server = setup(sessions, slots=how.pop("slots", 2))
    chosen = {
        "replicas": 1,
        "conversations": len(sessions),
        "arrivals_ns": 0,
        "host_budget": ENDLESS,
        "disk_budget": ENDLESS,
    }
    fleet = FleetSetup(server.settings, server.costs, **(chosen | how))
    return FleetRun(fleet, sessions, chain_pieces(sessions, BLOCK_SIZE), router)


def many_sessions(count: int, turns: int = 6) -> list[Session]:
    """Sessions that begin alike and grow, with a turn each half minute."""
    return [session(f"s{number}", turns, first=400, more=200 + 40 * number, every_s=30) for number in range(count)]


def test_one_replica_finds_what_the_simulation_of_every_launch_finds():
    sessions = many_sessions(6)
    whole = Simulation(setup(sessions, slots=4, host_budget=ENDLESS), sessions, Scope("full"))
    whole.run()
    lean = fleet_of(sessions, "round-robin", slots=4)
    figures = lean.run()
    found = sum(count.found for count in whole.tally.counts.values())
    assert figures.requests == len(whole.tally.counts) == 36
    assert figures.infinite_hit_tokens == sum(count.infinite for count in whole.tally.counts.values())
    assert figures.hit_tokens == pytest.approx(found, rel=0.02)
    for share in (0.25, 0.5, 0.75, 0.9):
        expected = compute_quantile([count.first_ms for count in whole.tally.counts.values()], share)
        got = compute_quantile([(one.first - one.sent) / 1e6 for one in lean.requests], share)
        assert got == pytest.approx(expected, rel=0.35), share


def test_pieces_find_what_blocks_find():
    sessions = [*many_sessions(3), session("s1", 3, first=400, more=300)]
    chains = chain_pieces(sessions, BLOCK_SIZE)
    blocks = InfiniteCache(BLOCK_SIZE)
    kept = set[bytes]()
    for one in sessions:
        for request in list_requests(one.agents):
            path = chains[id(request)].build_path(0)
            whole = blocks.count_shared_tokens(request.prompt, request.answer)
            there = 0
            for key, stop in zip(path.keys[: path.usable], path.stops, strict=False):
                if key not in kept:
                    break
                there = stop
            kept.update(path.keys)
            assert there == whole
            assert len(path.keys) <= 20


def test_copies_of_a_session_share_only_what_sessions_share():
    first = make_headed("a")
    chains = chain_pieces([first, make_headed("b")], BLOCK_SIZE)
    request = list_requests(first.agents)[0]
    one = chains[id(request)].build_path(1)
    other = chains[id(request)].build_path(2)
    same = [stop for key, twin, stop in zip(one.keys, other.keys, one.stops, strict=True) if key == twin]
    assert max(same) == 80
    assert one.stops[-1] > 80


def make_headed(name: str) -> Session:
    """A session whose first 80 tokens all sessions have."""
    head = agent("head", 1, first=80).requests[0].pieces
    own = agent(name, 1, first=120).requests[0]
    return Session(name, (evolve(agent(name, 1), requests=(evolve(own, pieces=(*head, *own.pieces)),)),))


def test_prompts_and_answers_advance_as_their_costs_say():
    clock = Clock()
    costs = Costs(prefill=1000, prefill_slope=0, decode=50_000, decode_slope=0, decode_more=0, launch=0)
    lane = FluidLane(costs, Settings(chunk=64, block_size=64), clock)
    times = dict[str, int]()
    lane.compute_rows(0, 640, lambda: times.setdefault("prompt", clock.now))
    while clock.step():
        pass
    assert times["prompt"] == 640_000
    # A step of 50 us and a chunk of 64 us take turns until the prompt is read; then steps go on alone.
    first = lane.decode_answer(0, 20, lambda: times.setdefault("answer", clock.now))
    assert first == 50_000
    lane.compute_rows(0, 640, lambda: times.setdefault("next", clock.now))
    while clock.step():
        pass
    assert times["next"] == pytest.approx(640_000 + 10 * 114_000, rel=0.001)
    assert times["answer"] == pytest.approx(640_000 + 10 * 114_000 + 10 * 50_000, rel=0.001)


def test_the_router_by_prefix_finds_nearly_everything_with_short_queues():
    sessions = many_sessions(8, turns=8)
    runs = {
        name: fleet_of(sessions, name, replicas=4, conversations=48, arrivals_ns=20 * SECOND) for name in ROUTER_NAMES
    }
    figures = {name: run.run() for name, run in runs.items()}
    prefix = figures[PREFIX]
    least = figures["least-queue"]
    assert prefix.of_infinite >= 0.97
    assert prefix.of_infinite > least.of_infinite + 0.1
    assert prefix.longest_queue <= 1.3 * least.longest_queue
    assert prefix.first_token_ms[0] < least.first_token_ms[0]
    assert {run.decisions[0].reason for run in runs.values()} >= {"new_session", "least_wait"}


def test_a_shared_tier_is_read_less_by_the_router_by_prefix():
    sessions = many_sessions(4)
    figures = {
        name: fleet_of(
            sessions, name, replicas=4, conversations=24, arrivals_ns=30 * SECOND, shared_budget=ENDLESS
        ).run()
        for name in ("least-queue", PREFIX)
    }
    assert figures["least-queue"].of_infinite > 0.9
    assert figures[PREFIX].read_bytes < figures["least-queue"].read_bytes / 2
    assert figures[PREFIX].written_bytes > 0


class NextReads(LeastQueue):
    """A router that has every prompt read by the replica after the one that answers."""

    def advance(self, event: RouterEvent) -> RouteDecision | None:
        decision = super().advance(event)
        if decision is None:
            return None
        reader = str((int(decision.replica) + 1) % len(self.requests))
        return evolve(decision, prefill=RemotePrefill(reader, 0, 0, 0))


def test_a_prompt_that_is_read_elsewhere_comes_by_way_of_the_shared_tier():
    sessions = [session(f"s{number}", 2, first=400, more=400, every_s=60) for number in range(6)]
    run = fleet_of(sessions, "least-queue", replicas=3, shared_budget=ENDLESS)
    run.router = NextReads({str(number): 0 for number in range(3)})
    figures = run.run()
    assert figures.read_elsewhere == figures.requests == 12
    # Whoever answers computes nothing but the rest of the last block, and what loading would not make quicker.
    assert figures.of_infinite > 1
    assert figures.read_bytes > 0
    assert all(one.first > one.sent for one in run.requests)


def test_names_of_routers_are_those_that_there_are():
    assert {*ROUTER_NAMES} == {*OTHER_ROUTERS, PREFIX}


@pytest.fixture
def log(tmp_path: Path) -> str:
    turns = [counts(turn * 9, 400 + 80 * turn, list(range(100 + 20 * turn))) for turn in range(6)]
    return str(write(tmp_path / "s.json", count_log(*turns)))


def test_the_command_prints_json_and_a_table_and_draws(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["simulate", log, "--replicas", "3", "--conversations", "9", "--min-tokens", "64", "-q"]
    assert main([*words, "--json", "--shared-budget", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["router"] for one in found["routers"]] == ["least-queue", "ray-prefix", "prefix"]
    assert found["fleet"]["replicas"] == 3
    assert all(one["requests"] == 54 for one in found["routers"])
    picture = tmp_path / "fleet.svg"
    assert main([*words, "--router", "prefix,round-robin", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    for said in (
        "longest queue",
        "of an infinite cache",
        "prefix",
        "round-robin",
        "first token, median",
        "no shared tier",
    ):
        assert said in shown
    assert "read from the shared tier" not in shown
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314 - our own file
    assert plot_style.STYLE


def test_an_unknown_router_is_refused_with_the_accepted_names(log: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", log, "--replicas", "2", "--router", "prefix,random"]) == 2
    assert "'random' is none of round-robin" in " ".join(capsys.readouterr().err.split())
