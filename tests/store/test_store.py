"""Both tiers as one: leases, budgets, promotion, and any history against a model."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapters.store import journal
from adapters.store.opening import open_store
from adapters.store.seekable import Damaged
from adapters.store.store import Miss
from effects.ids import Tokens
from tests.store.kit import LAYOUT, buffer_of, disk_store, fetch, files, rows_of, save, settled

ONE = tuple(range(1, 41))
RUN = 40 * LAYOUT.token_bytes  # bytes of ONE's rows


def memory(budget: int):
    store = open_store(LAYOUT, None, host_bytes=budget)
    assert store is not None
    return store


def test_without_budget_and_folder_there_is_no_store() -> None:
    assert open_store(LAYOUT, None) is None


async def test_host_memory_alone_keeps_and_evicts() -> None:
    store = memory(2 * RUN)
    for number in range(4):
        save(store, (number, *ONE[1:]))
    assert store.figures()["host"] == {"bytes": 2 * RUN, "budget": 2 * RUN, "entries": 2, "evictions": 2}
    assert store.find((0, *ONE[1:], 0), 0) == Miss("diverged_at:0")
    name, lease = store.find((3, *ONE[1:], 0), 0)
    assert (lease.place, fetch(store, (3, *ONE[1:]), name)) == ("host", 40)
    assert store.rows.keys() == store.host.entries.keys()


def test_a_miss_says_why() -> None:
    store = memory(2 * RUN)
    assert store.find((1, 2, 3, 4), 0) == Miss("too_short"), "the last token is always computed"
    assert store.find(ONE, 0) == Miss("empty_store")
    save(store, ONE)
    assert store.find((*ONE[:22], 0, 0, 0), 20) == Miss("diverged_at:20", 20)
    assert store.find((9, *ONE), 0) == Miss("diverged_at:0")
    assert store.figures()["misses"] == {"too_short": 1, "empty_store": 1, "diverged_at": 2}


async def test_the_longest_prefix_is_found_even_inside_a_run() -> None:
    store = memory(2 * RUN)
    save(store, ONE)
    name, lease = store.find((*ONE[:22], 0, 0, 0), 0)
    assert fetch(store, ONE, name) == lease.length == 20


async def test_a_hit_may_span_both_tiers(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "kv")
    save(store, ONE[:20])
    settled(store)
    store.host.budget = 2 * RUN
    store.disk.index.budget = 0
    save(store, ONE)
    settled(store)
    name, lease = store.find((*ONE, 0), 0)
    assert [part.place for part in lease.parts] == ["disk", "host"]
    assert fetch(store, ONE, name) == 40
    store.close()


async def test_what_came_from_disk_stays_in_memory_while_there_is_room(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "kv")
    for tokens in (ONE, (9, *ONE[1:])):
        save(store, tokens)
    settled(store)
    store.host.budget = RUN
    for tokens in (ONE, (9, *ONE[1:])):
        name, lease = store.find((*tokens, 0), 0)
        assert lease.place == "disk"
        store.promote(lease.parts[0].entry, buffer_of(rows_of(tokens)))
        store.release(name)
        name, lease = store.find((*tokens, 0), 0)
        assert lease.place == "host"
        assert fetch(store, tokens, name) == 40
    assert len(store.rows) == 1
    store.close()


def test_a_lease_is_released_once() -> None:
    store = memory(RUN)
    save(store, ONE)
    name, _ = store.find((*ONE, 0), 0)
    assert store.figures()["leases"] == 1
    store.release(name)
    with pytest.raises(KeyError):
        store.release(name)
    assert all(entry.leases == 0 for entry in store.host.entries.values())


class History(RuleBasedStateMachine):
    """Saves, hits, leases, restarts, damage and lost journals. The model knows what was ever saved: nothing else may
    be found, what is found has the rows of its tokens, and budgets and leases hold.
    """

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp())
        self.saved = set[Tokens]()
        self.leases = list[tuple[int, Tokens]]()
        self.open(6000, 4000)

    def open(self, host: int, disk: int) -> None:
        self.store = disk_store(self.folder / "kv", host=host, disk=disk)
        settled(self.store)

    def tokens(self) -> Tokens:
        branch = self.random.choice([(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)])
        return branch * self.random.randint(1, 3) + (self.random.randint(4, 6),) * self.random.randint(0, 12)

    @rule()
    def save(self) -> None:
        tokens = self.tokens()
        save(self.store, tokens)
        self.saved |= {tokens[:stop] for stop in range(4, len(tokens) + 1, 4)}
        if self.random.random() < 0.5:
            settled(self.store)

    @rule()
    def hit(self) -> None:
        tokens = self.tokens()
        found = self.store.find((*tokens, 0), 0)
        if isinstance(found, Miss):
            return
        name, lease = found
        assert tokens[: lease.length] in self.saved
        if self.random.random() < 0.3:
            self.leases.append((name, tokens))
        else:
            self.read(name, tokens)

    def read(self, name: int, tokens: Tokens) -> None:
        try:
            fetch(self.store, tokens, name)
        except (Damaged, FileNotFoundError):
            assert self.harmed, "nobody touched the files"

    @rule()
    def use_a_lease(self) -> None:
        if self.leases:
            self.read(*self.leases.pop(self.random.randrange(len(self.leases))))

    harmed = False

    @rule(harm=st.sampled_from(["none", "none", "none", "journal", "flip", "cut", "remove", "swap"]))
    def restart(self, harm: str) -> None:
        self.leases.clear()
        self.store.close()
        there = files(self.folder / "kv")
        self.harmed = self.harmed or (harm not in ("none", "journal") and bool(there))
        if harm == "journal":
            (self.folder / "kv" / journal.NAME).unlink(missing_ok=True)
        elif harm != "none" and there:
            self.harm(harm, self.random.choice(there), self.random.choice(there))
        self.open(self.random.choice([0, 3000, 12_000]), self.random.choice([1500, 4000, 20_000]))

    def harm(self, how: str, file: Path, other: Path) -> None:
        raw = bytearray(file.read_bytes())
        match how:
            case "flip":
                raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
                file.write_bytes(raw)
            case "cut":
                file.write_bytes(raw[: self.random.randrange(len(raw))])
            case "remove":
                file.unlink()
            case _:
                file.write_bytes(other.read_bytes())
                other.write_bytes(raw)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        with self.store.lock:
            assert self.store.rows.keys() == self.store.host.entries.keys()
            assert self.store.disk.index.held <= self.store.disk.index.budget
            if not self.store.disk.queued and not self.leases:
                assert self.store.host.held <= self.store.host.budget
                assert not any(entry.leases for entry in self.store.host.entries.values())
                assert not any(entry.leases for entry in self.store.disk.index.entries.values())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            if not self.harmed:
                on_disk = sum(file.stat().st_size for file in files(self.folder / "kv"))
                assert on_disk == self.store.disk.index.held
            shutil.rmtree(self.folder)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistory.pytestmark = [pytest.mark.timeout(120)]
