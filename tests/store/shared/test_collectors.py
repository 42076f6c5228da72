"""Collectors under random schedules: clocks that are off by days, servers that stall, leases at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.store.block_index import Entry
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files import seekable
from adapters.store.files.file_format import Run, encode_run
from adapters.store.shared.availability import STALE_S
from adapters.store.shared.garbage_policy import SILENT_S
from adapters.store.shared.object_names import name_entry, name_run, parse_run_name
from adapters.store.shared.publish_policy import SharedLimits
from tests.examples import count_examples
from tests.store.kit import BLOCK_SIZE, LAYOUT, buffer_of, rows_of
from tests.store.shared.fake_store import ROOT, FakeServer, FakeStore

RUNS = 4
LIMITS = SharedLimits(1 << 30, 1, 1e9)  # a budget of one byte: everything is to go
UNLIMITED = SharedLimits(1 << 30, 0, 1e9)
SKEWS = (0.0, -86_400.0, 1e6, 300.0)


def file_of(number: int) -> tuple[str, bytes]:
    tokens = tuple(range(number * 100, number * 100 + BLOCK_SIZE))
    root, packed = LAYOUT.compute_root("rows"), pack_tokens(tokens)
    run = Run(0, root, chain_keys(root, packed, BLOCK_SIZE), packed)
    data = buffer_of(rows_of(tokens)).data.numpy().data
    return name_run(ROOT, run), b"".join(encode_run(run, LAYOUT, data, seekable.create_compressor(1)))


FILES = [file_of(number) for number in range(RUNS)]


@define(eq=False)
class CollectorWorld:
    """Servers on one store, the true time, and what each server has leased."""

    count: int
    now_s: float = 2e6
    store: FakeStore = field(factory=FakeStore)
    servers: list[FakeServer] = field(init=False)
    leased: dict[tuple[int, str], list[Entry]] = field(factory=dict)
    removed: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        for name, content in FILES:
            self.store.put(name, content, 1e6)
        self.store.removing = self.check_removal
        self.servers = [
            FakeServer(self.store, number, lambda: self.now_s, SKEWS[number], LIMITS) for number in range(self.count)
        ]

    def check_removal(self, name: str) -> None:
        """No server that can use the store may hold what is removed."""
        if parse_run_name(name) is None:
            return
        holders = [
            server.number
            for server in self.servers
            if server.is_usable and any(self.leased.get((server.number, name), []))
        ]
        assert not holders, f"{name[33:40]} is removed, and servers {holders} have leased it"
        self.removed.append(name)

    def lease(self, number: int, which: int) -> None:
        server = self.servers[number]
        entries = sorted(server.catalogue.index.entries.values(), key=lambda entry: entry.keys)
        if server.is_usable and entries:
            entry = entries[which % len(entries)]
            entry.leases += 1
            server.catalogue.touch(entry, server.read_clock())
            self.leased.setdefault((number, name_entry(ROOT, entry)), []).append(entry)

    def release(self, number: int) -> None:
        for (owner, _), entries in self.leased.items():
            if owner == number and entries:
                entries.pop().leases -= 1
                return

    def limit(self, limits: SharedLimits) -> None:
        """From now on."""
        for server in self.servers:
            server.collector.limits = limits

    def close(self) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture
def make_world() -> Iterator[Callable[[int], CollectorWorld]]:
    made = list[CollectorWorld]()

    def make(count: int) -> CollectorWorld:
        made.append(CollectorWorld(count))
        return made[-1]

    yield make
    for world in made:
        world.close()


def act(world: CollectorWorld, action: str, number: int, amount: int) -> None:
    match action:
        case "step":
            for _ in range(amount):
                world.servers[number].advance()
        case "refresh":
            while not world.servers[number].advance():
                pass
        case "lease":
            world.lease(number, amount)
        case "release":
            world.release(number)
        case "wait":
            world.now_s += 40 * amount


ACTIONS = st.tuples(
    st.sampled_from(("step", "step", "refresh", "refresh", "lease", "release", "wait")),
    st.integers(0, 2),
    st.integers(1, 9),
)


@settings(max_examples=count_examples(120), deadline=None)
@given(st.lists(ACTIONS, max_size=120), st.sets(st.integers(0, 2), min_size=1))
def test_no_order_of_events_removes_what_a_server_has_leased(
    actions: list[tuple[str, int, int]], collectors: set[int]
) -> None:
    world = CollectorWorld(3)
    for server in world.servers:
        server.collector.limits = LIMITS if server.number in collectors else UNLIMITED
    try:
        for action in actions:
            act(world, *action)
    finally:
        world.close()


def settle(world: CollectorWorld, rounds: int, step_s: float) -> None:
    for _ in range(rounds):
        for server in world.servers:
            while not server.advance():
                pass
        world.now_s += step_s


def test_two_collectors_with_skewed_clocks_remove_everything_that_nobody_uses(
    make_world: Callable[[int], CollectorWorld],
) -> None:
    world = make_world(2)
    settle(world, 40, 30)
    assert {name for name, _ in FILES} == set(world.removed)
    assert not [name for name in world.store.objects if parse_run_name(name) is not None]
    assert not [name for name in world.store.objects if name.startswith("marks/")]


def test_a_lease_in_between_keeps_its_run_and_it_is_found_again(make_world: Callable[[int], CollectorWorld]) -> None:
    world = make_world(2)
    world.limit(UNLIMITED)
    settle(world, 1, 1)
    world.limit(LIMITS)
    world.lease(1, 0)
    ((_, held),) = world.leased
    settle(world, 60, 30)
    assert {name for name, _ in FILES} - set(world.removed) == {held}
    assert held in world.store.objects
    world.release(1)
    settle(world, 60, 30)
    assert held in world.removed, "behind the lease, and behind its use, it goes"


def test_a_server_that_stalls_delays_removal_and_one_that_died_does_not_prevent_it(
    make_world: Callable[[int], CollectorWorld],
) -> None:
    world = make_world(2)
    world.limit(UNLIMITED)
    settle(world, 1, 1)
    world.limit(LIMITS)
    alive, stalled = world.servers
    world.servers = [alive]
    settle(world, int(SILENT_S / 30) - 4, 30)
    assert not world.removed, "it may still be about to lease something"
    settle(world, 30, 30)
    assert world.removed
    assert not stalled.is_usable, "it has found nothing for long: it has to list the store first"
    assert STALE_S < SILENT_S


def test_a_server_that_knows_nothing_of_a_mark_finds_its_runs_again_when_the_marker_is_dead(
    make_world: Callable[[int], CollectorWorld],
) -> None:
    world = make_world(2)
    first, second = world.servers
    for _ in range(60):  # until the mark is written; then it dies
        if any(name.startswith("marks/") for name in world.store.objects):
            break
        first.advance()
        world.now_s += 1
    first.stop()
    world.servers = [second]
    second.collector.limits = UNLIMITED  # it does not want to remove anything itself
    settle(world, 2, 1)
    assert not second.catalogue.index.entries, "what is marked is not found"
    settle(world, 60, 30)
    assert len(second.catalogue.index.entries) == RUNS
    assert not [name for name in world.store.objects if name.startswith("marks/")]


def test_a_collector_waits_for_a_server_that_has_not_seen_its_mark(make_world: Callable[[int], CollectorWorld]) -> None:
    world = make_world(2)
    collecting, reading = world.servers
    reading.collector.limits = UNLIMITED
    while not reading.advance():
        pass
    world.lease(1, 0)
    for _ in range(5):  # the reader does not refresh meanwhile, so it has the lease and has not reported it
        while not collecting.advance():
            pass
        world.now_s += 5
    assert [name for name in world.store.objects if name.startswith("marks/")]
    assert not world.removed
    settle(world, 4, 30)
    assert len(world.removed) == RUNS - 1, "it has reported, and keeps what it has leased"
