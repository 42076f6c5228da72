"""Both tiers as one: leases, budgets, promotion, and any history against a model."""

from __future__ import annotations

import random
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapters.sequence_layout import RowSpec
from adapters.store import index_journal
from adapters.store.files.file_format import DraftLayout
from adapters.store.files.seekable import Damaged
from adapters.store.lease import Miss
from adapters.store.open_store import open_store
from effects.ids import Tokens
from effects.ports import MAX_DIVERGED_TOKENS, Divergence
from tests.examples import count_examples
from tests.store.kit import (
    BIG,
    EVERYTHING,
    FULL,
    LAYOUT,
    STATEFUL,
    buffer_of,
    checkpoint,
    disk_store,
    fetch,
    files,
    rows_of,
    save,
    settled,
)
from tests.store.test_recent import like

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
    assert store.collect_figures().build_json()["host"] == {
        "bytes": 2 * RUN,
        "budget": 2 * RUN,
        "entries": 2,
        "evictions": 2,
    }
    assert store.find_prefix((0, *ONE[1:], 0), 0) == Miss("diverged_at:0")
    name, lease = store.find_prefix((3, *ONE[1:], 0), 0)
    assert (lease.tier, fetch(store, (3, *ONE[1:]), name)) == ("host", 40)
    assert store.memory_tier.rows.keys() == store.memory_tier.index.entries.keys()


def test_a_miss_says_why() -> None:
    store = memory(2 * RUN)
    assert store.find_prefix((1, 2, 3, 4), 0) == Miss("too_short"), "the last token is always computed"
    assert store.find_prefix(ONE, 0) == Miss("empty_store")
    save(store, ONE)
    assert store.find_prefix((*ONE[:22], 0, 0, 0), 20) == Miss("diverged_at:20", 20)
    assert store.find_prefix((9, *ONE), 0) == Miss("diverged_at:0")
    assert store.collect_figures().build_json()["misses"] == {"too_short": 1, "empty_store": 1, "diverged_at": 2}


def where(store, prompt: Tokens, beyond: int = 0, salt: str = "") -> Divergence | None:
    found = store.find_prefix(prompt, beyond, salt=salt)
    if isinstance(found, Miss):
        return found.diverged
    store.release(found[0])
    return found[1].diverged


def test_a_lookup_says_where_a_prompt_leaves_what_is_kept() -> None:
    """Inside a run and behind one, hit or miss, by the token; nothing where it only goes on."""
    store = memory(BIG)
    assert where(store, ONE) is None, "nothing is kept"
    save(store, ONE)
    assert where(store, (*ONE[:22], 0, 0, 0)) == Divergence(22, ONE[22:40], "host")
    assert where(store, (*ONE[:22], 0, 0, 0), 20) == Divergence(22, ONE[22:40], "host"), "a miss, as 20 are there"
    assert where(store, (9, *ONE)) == Divergence(0, ONE, "host")
    assert where(store, (*ONE, 1, 2, 3, 4, 5)) is None, "the kept one ends there"
    assert where(store, (*ONE, 1)) is None, "all whole blocks are there"
    longer = (*ONE, *range(50, 150))
    save(store, longer)
    assert where(store, (*ONE, 50, 51, 7, 7, 7)) == Divergence(42, longer[42 : 42 + MAX_DIVERGED_TOKENS], "host")
    save(store, (*ONE[:30], 7, 7, 7))
    assert where(store, (*ONE[:30], 8, 8, 8)) == Divergence(30, (7, 7), "host"), "the last that came behind the block"
    assert where(store, (*ONE[:31], 8, 8)) == Divergence(31, ONE[31:40], "host"), "and the most similar of the two"
    assert where(store, (9, *ONE), salt="a") is None
    save(store, ONE, salt="a")
    assert where(store, (*ONE[:5], 9, 9, 9, 9), salt="a") == Divergence(5, ONE[5:], "host")


def test_what_left_is_not_told_any_more() -> None:
    store = memory(RUN)
    save(store, ONE)
    save(store, (5, *ONE[1:]))  # one only has room
    assert where(store, (9, *ONE)) == Divergence(0, (5, *ONE[1:]), "host")


def test_a_target_with_a_state_says_where_rows_differ(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "kv", layout=STATEFUL)
    save(store, ONE)
    checkpoint(store, ONE[:20])
    settled(store)
    assert where(store, (*ONE[:30], 0, 0, 0)) == Divergence(30, ONE[30:], "disk")
    store.close()
    store = disk_store(tmp_path / "kv", layout=STATEFUL)
    settled(store)
    assert where(store, (*ONE[:30], 0, 0, 0)) == Divergence(30, ONE[30:], "disk"), "after a restart, too"


@pytest.mark.parametrize("salt", ["", "a", "b"])
def test_a_salt_finds_what_was_kept_with_it_and_nothing_else(tmp_path: Path, salt: str) -> None:
    """Rows, a draft's rows and checkpoints, in memory, and on disk after a restart."""

    def beyond(store, salt: str) -> int:
        found = store.find_prefix((*ONE, 0), 0, salt=salt)
        if isinstance(found, Miss):
            return 0
        name, lease = found
        assert len(lease.all_parts) >= 3, "rows, the draft's, a state"
        return fetch(store, ONE, name)

    path = tmp_path / "kv"
    store = disk_store(path, layout=EVERYTHING, host=BIG)
    save(store, ONE, salt=salt)
    save(store, ONE, "draft", salt=salt)
    checkpoint(store, ONE, salt)
    expected = [40 * (other == salt) for other in ("", "a", "b")]
    assert [beyond(store, other) for other in ("", "a", "b")] == expected
    settled(store)
    store.close()
    store = disk_store(path, layout=EVERYTHING)
    settled(store)
    assert [beyond(store, other) for other in ("", "a", "b")] == expected
    assert store.damaged_files == dict.fromkeys(store.damaged_files, 0)


def test_without_a_salt_keys_are_what_they_always_were() -> None:
    assert LAYOUT.compute_root("rows").hex() == "65a05a2367a761d28daa1b67126cf2e3"
    assert FULL.compute_root("draft").hex() == "0b32597be49d2ebec214804ca4d784da"
    assert (
        len(
            {
                LAYOUT.compute_root("rows"),
                LAYOUT.compute_root("rows", "a"),
                LAYOUT.compute_root("rows", "b"),
                FULL.compute_root("draft", "a"),
            }
        )
        == 4
    )


async def test_the_longest_prefix_is_found_even_inside_a_run() -> None:
    store = memory(2 * RUN)
    save(store, ONE)
    name, lease = store.find_prefix((*ONE[:22], 0, 0, 0), 0)
    assert fetch(store, ONE, name) == lease.length == 20


async def test_a_hit_may_span_both_tiers(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "kv")
    save(store, ONE[:20])
    settled(store)
    store.memory_tier.index.budget = 2 * RUN
    store.lower_tiers[0].index.budget = 0
    save(store, ONE)
    settled(store)
    name, lease = store.find_prefix((*ONE, 0), 0)
    assert [part.tier for part in lease.parts] == ["disk", "host"]
    assert fetch(store, ONE, name) == 40
    store.close()


async def test_what_came_from_disk_stays_in_memory_while_there_is_room(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "kv")
    for tokens in (ONE, (9, *ONE[1:])):
        save(store, tokens)
    settled(store)
    store.memory_tier.index.budget = RUN
    for tokens in (ONE, (9, *ONE[1:])):
        name, lease = store.find_prefix((*tokens, 0), 0)
        assert lease.tier == "disk"
        store.promote(lease.parts[0].entry, buffer_of(rows_of(tokens)))
        store.release(name)
        name, lease = store.find_prefix((*tokens, 0), 0)
        assert lease.tier == "host"
        assert fetch(store, tokens, name) == 40
    assert len(store.memory_tier.rows) == 1
    store.close()


def test_a_lease_is_released_once() -> None:
    store = memory(RUN)
    save(store, ONE)
    name, _ = store.find_prefix((*ONE, 0), 0)
    assert store.collect_figures().build_json()["leases"] == 1
    store.release(name)
    with pytest.raises(KeyError):
        store.release(name)
    assert all(entry.leases == 0 for entry in store.memory_tier.index.entries.values())


def kept_as(layout, budget: int = 1 << 20):
    store = open_store(layout, None, host_bytes=budget)
    assert store is not None
    return store


def spans(parts) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in parts]


def test_a_drafts_rows_come_with_the_targets() -> None:
    store = kept_as(FULL)
    save(store, ONE)
    save(store, ONE, "draft")
    name, lease = store.find_prefix((*ONE[:22], 0, 0), 0)
    assert (spans(lease.parts), spans(lease.draft)) == ([(0, 20)], [(0, 20)])
    fetch(store, ONE, name)


def test_a_drafts_rows_count_from_the_last_gap_on() -> None:
    store = kept_as(FULL)
    save(store, ONE)
    save(store, ONE[:8], "draft")
    save(store, ONE[:24], "draft", 13)
    name, lease = store.find_prefix((*ONE[:24], 0), 0)
    assert spans(lease.draft) == [(16, 24)]
    fetch(store, ONE, name)
    name, lease = store.find_prefix((*ONE, 0), 0)
    assert (lease.length, lease.draft) == (40, ()), "none right before the next token"
    fetch(store, ONE, name)
    gaps = [(run.start, run.stop) for run in store.find_missing_runs(ONE, "draft", 0)]
    assert gaps == [(8, 16), (24, 40)], "they may be added later"


async def test_another_draft_finds_the_targets_rows_only(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "kv", layout=FULL)
    save(store, ONE)
    save(store, ONE, "draft")
    settled(store)
    store.close()
    other = evolve(FULL, draft=DraftLayout("ff" * 16, RowSpec(("draft.layers.0.k",), 3, 4, "F32")))
    for layout, drafted in ((other, 0), (LAYOUT, 0), (FULL, 1)):
        store = disk_store(tmp_path / "kv", layout=layout)
        name, lease = store.find_prefix((*ONE, 0), 0)
        assert (lease.length, len(lease.draft)) == (40, drafted)
        fetch(store, ONE, name)
        store.close()


def test_a_target_with_a_state_is_continued_from_checkpoints_only() -> None:
    store = kept_as(STATEFUL)
    save(store, ONE)
    assert store.find_prefix((*ONE, 0), 0) == Miss("no_checkpoint:0")
    for stop in (8, 24):
        checkpoint(store, ONE[:stop])
    assert store.find_prefix((*ONE, 0), 24) == Miss("no_checkpoint:24", 24)
    for prompt, length in (((*ONE, 0), 24), (ONE[:24], 8), (ONE[:25], 24)):
        name, lease = store.find_prefix(prompt, 0)
        assert (lease.length, lease.parts[-1].stop, lease.checkpoints[-1]) == (length, length, length)
        assert fetch(store, ONE, name) == length
    assert not store.lacks_checkpoint(ONE[:24])


def test_rows_that_a_slot_has_need_not_be_kept() -> None:
    store = kept_as(STATEFUL)
    save(store, ONE)
    for stop in (8, 24, 36):
        checkpoint(store, ONE[:stop])
    for beyond, rows, first, checkpoints in (
        (0, 0, 0, (8, 24, 36)),
        (8, 24, 24, (24, 36)),
        (12, 40, None, (24, 36)),  # a state without rows
        (24, 28, 28, (36,)),
    ):
        name, lease = store.find_prefix((*ONE, 0), beyond, rows)
        assert (lease.checkpoints, lease.length) == (checkpoints, 36)
        assert [part.start for part in lease.parts[:1]] == ([] if first is None else [first])
        held = [entry for entry in store.memory_tier.index.entries.values() if entry.leases]
        assert {entry.kind for entry in held} == ({"state"} if first is None else {"rows", "state"})
        store.release(name)
    assert store.find_prefix((*ONE, 0), 36, 40) == Miss("no_checkpoint:36", 36)


def test_a_lease_has_a_few_of_the_last_checkpoints() -> None:
    store = kept_as(STATEFUL)
    save(store, ONE)
    for stop in range(4, 40, 4):
        checkpoint(store, ONE[:stop])
    name, lease = store.find_prefix((*ONE, 0), 0)
    assert lease.checkpoints == (24, 28, 32, 36)
    store.release(name)
    name, lease = store.find_prefix((*ONE, 0), 30)
    assert lease.checkpoints == (32, 36)
    store.release(name)


def test_a_checkpoint_without_its_rows_is_no_hit() -> None:
    store = kept_as(STATEFUL)
    checkpoint(store, ONE[:24])
    save(store, ONE[:20])
    assert store.find_prefix((*ONE, 0), 0) == Miss("no_checkpoint:0")


def test_a_checkpoint_leaves_before_the_rows_that_it_stands_on() -> None:
    store = kept_as(STATEFUL)
    save(store, ONE)
    checkpoint(store, ONE)
    (state,) = (entry for entry in store.memory_tier.index.entries.values() if entry.kind == "state")
    assert (state.start, state.stop, state.since, state.saved_tokens) == (36, 40, 0, 40)
    assert [entry.kind for entry in store.memory_tier.index.make_room(store.memory_tier.index.budget)] == [
        "state",
        "rows",
    ]


def test_a_checkpoint_is_worth_the_tokens_since_the_one_before() -> None:
    store = kept_as(STATEFUL)
    for stop in (8, 24):
        checkpoint(store, ONE[:stop])
    assert sorted(entry.saved_tokens for entry in store.memory_tier.index.entries.values()) == [8, 16]


@pytest.mark.parametrize("with_journal", [True, False])
def test_checkpoints_and_drafts_survive_a_restart(tmp_path: Path, with_journal: bool) -> None:
    path = tmp_path / "kv"
    store = disk_store(path, layout=EVERYTHING)
    save(store, ONE)
    save(store, ONE, "draft", 8)
    checkpoint(store, ONE[:12])
    checkpoint(store, ONE[:32])
    settled(store)
    before = sorted((entry.kind, entry.start, entry.since) for entry in store.lower_tiers[0].index.entries.values())
    store.close()
    if not with_journal:
        (path / index_journal.NAME).unlink()
    store = disk_store(path, layout=EVERYTHING)
    settled(store)
    assert (
        sorted((entry.kind, entry.start, entry.since) for entry in store.lower_tiers[0].index.entries.values())
        == before
    )
    name, lease = store.find_prefix((*ONE, 0), 0)
    assert (lease.length, spans(lease.draft)) == (32, [(8, 32)])
    fetch(store, ONE, name)
    store.close()


class History(RuleBasedStateMachine):
    """Saves, hits, leases, recent prompts, restarts, damage and lost journals; rows, drafts' rows and checkpoints.

    The model knows what was ever saved: nothing else may be found, what is found has the tensors of its tokens, and
    budgets and leases hold. Recent prompts are compared with whole ones.
    """

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp())
        self.saved = set[tuple[str, Tokens]]()
        self.recent = list[Tokens]()
        self.leases = list[tuple[int, Tokens]]()
        self.open(6000, 8000)

    def open(self, host: int, disk: int) -> None:
        self.store = disk_store(self.folder / "kv", host=host, disk=disk, layout=EVERYTHING)
        settled(self.store)

    def tokens(self) -> Tokens:
        branch = self.random.choice([(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)])
        return branch * self.random.randint(1, 3) + (self.random.randint(4, 6),) * self.random.randint(0, 12)

    @rule()
    def save(self) -> None:
        tokens = self.tokens()
        save(self.store, tokens)
        self.saved |= {("rows", tokens[:stop]) for stop in range(4, len(tokens) + 1, 4)}
        if self.random.random() < 0.5:
            settled(self.store)

    @rule()
    def save_a_drafts_rows(self) -> None:
        tokens = self.tokens()
        start = self.random.randrange(len(tokens))
        save(self.store, tokens, "draft", start)
        self.saved |= {("draft", tokens[:stop]) for stop in range(-(-start // 4) * 4 + 4, len(tokens) + 1, 4)}

    @rule()
    def save_a_checkpoint(self) -> None:
        tokens = self.tokens()
        tokens = tokens[: self.random.randint(1, len(tokens) // 4) * 4]
        checkpoint(self.store, tokens)
        self.saved.add(("state", tokens))

    @rule()
    def ask_for_recent_prompts(self) -> None:
        tokens, window = self.tokens(), self.random.randint(1, 5)
        kept = min(window, len(self.store.recent_prompts))
        most_similar = max((like(tokens, one) for one in self.recent[len(self.recent) - kept :]), default=0)
        assert self.store.count_shared_tokens(tokens, window) == most_similar
        self.recent.append(tokens)

    @rule()
    def hit(self) -> None:
        tokens = self.tokens()
        found = self.store.find_prefix((*tokens, 0), 0)
        if isinstance(found, Miss):
            return
        name, lease = found
        assert ("rows", tokens[: lease.length]) in self.saved
        assert ("state", tokens[: lease.length]) in self.saved
        assert all(("draft", tokens[: part.stop]) in self.saved for part in lease.draft)
        assert not lease.draft or lease.draft[-1].stop == lease.length
        assert all(one.stop == other.start for one, other in pairwise(lease.draft))
        if self.random.random() < 0.3:
            self.leases.append((name, tokens))
        else:
            self.read(name, tokens)

    def read(self, name: int, tokens: Tokens) -> None:
        try:
            fetch(self.store, tokens, name)
        except (Damaged, FileNotFoundError):
            assert self.harmed, "the files were not touched"

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
            (self.folder / "kv" / index_journal.NAME).unlink(missing_ok=True)
        elif harm != "none" and there:
            self.harm(harm, self.random.choice(there), self.random.choice(there))
        self.open(self.random.choice([0, 3000, 12_000]), self.random.choice([3000, 8000, 40_000]))

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
            assert self.store.memory_tier.rows.keys() == self.store.memory_tier.index.entries.keys()
            assert self.store.lower_tiers[0].index.held_bytes <= self.store.lower_tiers[0].index.budget
            if not self.store.lower_tiers[0].queued_bytes and not self.leases:
                assert self.store.memory_tier.index.held_bytes <= self.store.memory_tier.index.budget
                assert not any(entry.leases for entry in self.store.memory_tier.index.entries.values())
                assert not any(entry.leases for entry in self.store.lower_tiers[0].index.entries.values())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            if not self.harmed:
                on_disk = sum(file.stat().st_size for file in files(self.folder / "kv"))
                assert on_disk == self.store.lower_tiers[0].index.held_bytes
            shutil.rmtree(self.folder)


class TestHistory(History.TestCase):
    settings = settings(
        max_examples=count_examples(25), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    pytestmark = [pytest.mark.timeout(120)]  # noqa: RUF012 - pytest's own


class TestLongHistory(History.TestCase):
    settings = settings(
        max_examples=600, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
    pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # noqa: RUF012 - pytest's own
