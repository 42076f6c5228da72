"""One contract for every tier: host memory, the disk, and the disk that is only simulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

from adapters.store.block_index import Entry
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.file_description import make_entry
from adapters.store.files.file_format import Run
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.open_store import SharedStoreSettings, create_index, open_disk, open_shared
from adapters.store.slab_memory import Buffer
from adapters.store.store import Store
from adapters.store.tier import LowerTier, NotePrompt, StoreTier, WriteRun
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_store import SimulatedDisk
from engine.tools.simulation.tally import InfiniteCache, Tally
from engine.tools.simulation.virtual_clock import Clock
from tests.store.kit import BIG, BLOCK_SIZE, LAYOUT, buffer_of, rows_of, settled

TOKENS = tuple(range(10, 10 + 2 * BLOCK_SIZE))


@frozen
class Lower:
    """A lower tier, and how to wait until it has done what it was given."""

    tier: LowerTier
    done: Callable[[], object]


@pytest.fixture(params=["disk", "simulated", "shared"])
def lower(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Lower]]:
    opened = list[LowerTier]()

    def made(budget: int = BIG) -> Lower:
        lock = threading.RLock()
        if request.param == "disk":
            disk = open_disk(LAYOUT, PrivateFolder.open(tmp_path / "kv"), lock, budget=budget)
            opened.append(disk)
            store = Store(LAYOUT, (HostTier(create_index(LAYOUT, 0)), disk), lock)
            return Lower(disk, lambda: settled(store))
        if request.param == "shared":
            pytest.importorskip("obstore")
            shared = open_shared(LAYOUT, SharedStoreSettings(f"file://{tmp_path}/shared", budget), lock)
            opened.append(shared)
            return Lower(shared, lambda: wait_until(lambda: shared.is_complete))
        clock = Clock()
        simulated = SimulatedDisk(
            create_index(LAYOUT, budget), Costs(token_bytes=LAYOUT.token_bytes), clock, Tally(InfiniteCache(BLOCK_SIZE))
        )
        opened.append(simulated)
        return Lower(simulated, lambda: all(iter(clock.step, False)))

    yield made
    assert all(tier.close() for tier in opened)


def wait_until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def run_of(tokens: tuple[int, ...]) -> tuple[Run, Buffer]:
    root, packed = LAYOUT.compute_root("rows"), pack_tokens(tokens)
    return Run(0, root, chain_keys(root, packed, BLOCK_SIZE), packed), buffer_of(rows_of(tokens))


def contract(tier: StoreTier, entry: Entry) -> None:
    """Check the contract of a tier in which `entry` is the only one."""
    assert tier.index.find_block(entry.keys[0], entry.tokens[: 4 * BLOCK_SIZE]) is entry
    used = entry.last_turn
    tier.touch(entry)
    assert entry.last_turn > used, "what was found is young again"
    assert entry.hits == 1
    shown = {"bytes": entry.size, "budget": tier.index.budget, "entries": 1, "evictions": 0}
    assert tier.collect_figures().build_json().items() >= shown.items()


def test_host_memory_is_a_tier() -> None:
    run, rows = run_of(TOKENS)
    host = HostTier(create_index(LAYOUT, BIG))
    entry = make_entry(run, host.index.allocate_handle(), rows.data.nbytes, host.index.origin)
    assert host.add_run(entry, rows)
    assert not host.add_run(entry, rows), "it is there"
    contract(host, entry)
    assert host.rows == {entry.handle: rows}
    assert not host.make_room(BIG + 1)
    assert not host.rows, "what left the index is let go of"


def test_a_lower_tier_takes_what_it_is_given(lower: Callable[..., Lower]) -> None:
    one, reports = lower(), list[str]()
    run, rows = run_of(TOKENS)
    assert one.tier.submit(WriteRun(run, rows, lambda: reports.append("done")))
    assert one.tier.submit(NotePrompt(one.tier.recent_prompts.add(TOKENS), lambda: None))
    one.done()
    assert reports == ["done"]
    (entry,) = one.tier.index.entries.values()
    assert (entry.keys, entry.start, entry.stop) == (run.keys, 0, len(TOKENS))
    contract(one.tier, entry)
    assert not any(thread.trouble for thread in one.tier.threads)
    assert not any(one.tier.damaged_files.values())


def test_what_finds_no_room_is_given_up_and_counted(lower: Callable[..., Lower]) -> None:
    one, reports = lower(64), list[str]()
    assert one.tier.submit(WriteRun(*run_of(TOKENS), lambda: reports.append("done")))
    one.done()
    assert reports == ["done"], "a thread that waits for it is notified all the same"
    assert not one.tier.index.entries
    assert one.tier.collect_figures().build_json()["dropped_writes"] == 1
