"""The index: what is found, what may be evicted, and that it agrees with a simple model after any history."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.store.block_index import BlockIndex, Entry
from adapters.store.block_keys import TOKEN_BYTES, chain_keys, compute_root, pack_tokens
from effects.ids import Tokens
from tests.examples import count_examples

BLOCK_SIZE = 2
ROOT = compute_root("model", BLOCK_SIZE)


def entry(index: BlockIndex, tokens: Tokens, start: int = 0, size: int = 10, origin: bytes = b"") -> Entry:
    keys = chain_keys(ROOT, pack_tokens(tokens), BLOCK_SIZE)
    block, handle = start // BLOCK_SIZE, index.allocate_handle()
    parent = keys[block - 1] if block else ROOT
    return Entry(handle, start, parent, keys[block:], pack_tokens(tokens[start:]), size, origin, last_turn=handle)


def test_a_key_stands_for_everything_before_it() -> None:
    one, other = (
        chain_keys(ROOT, pack_tokens((1, 2, 3, 4)), BLOCK_SIZE),
        chain_keys(ROOT, pack_tokens((9, 2, 3, 4)), BLOCK_SIZE),
    )
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert chain_keys(one[0], pack_tokens((3, 4)), BLOCK_SIZE) == one[1:]
    assert chain_keys(compute_root("other model", BLOCK_SIZE), pack_tokens((1, 2)), BLOCK_SIZE)[0] != one[0]
    assert chain_keys(ROOT, pack_tokens((1, 2, 3)), BLOCK_SIZE) == one[:1], "half a block has no key"


def test_token_ids_keep_every_bit() -> None:
    assert pack_tokens((0, 1, 2**31 - 1)) == bytes.fromhex("00000000 01000000 ffffff7f")


def test_a_hit_compares_the_tokens_and_not_only_the_key() -> None:
    index = BlockIndex(100, BLOCK_SIZE)
    kept = entry(index, (1, 2, 3, 4))
    assert index.add(kept)
    assert index.find_block(kept.keys[1], pack_tokens((3, 4))) is kept
    assert index.find_block(kept.keys[1], pack_tokens((3, 5))) is None
    assert index.find_block(kept.keys[1], pack_tokens((1, 2))) is None


def test_leaves_go_first_and_a_parent_only_after_its_children() -> None:
    index = BlockIndex(30, BLOCK_SIZE)
    trunk, leaf = entry(index, (1, 2)), entry(index, (1, 2, 3, 4), 2)
    assert index.add(trunk)
    assert index.add(leaf)
    assert index.make_room(20) == [leaf]
    assert index.make_room(30) == [trunk]


def test_what_is_leased_stays_and_so_does_what_it_continues() -> None:
    index = BlockIndex(20, BLOCK_SIZE)
    trunk, leaf = entry(index, (1, 2)), entry(index, (1, 2, 3, 4), 2)
    index.add(trunk)
    index.add(leaf)
    leaf.leases = 1
    assert index.make_room(1) == []
    assert not index.fits(1)


def test_the_run_that_is_continued_is_not_evicted_for_its_continuation() -> None:
    index = BlockIndex(20, BLOCK_SIZE)
    trunk, other = entry(index, (1, 2)), entry(index, (7, 8))
    index.add(trunk)
    index.add(other)
    assert index.make_room(10, trunk.keys[-1]) == [other]


def test_hits_outlive_newcomers_and_other_identities_go_first() -> None:
    index = BlockIndex(40, BLOCK_SIZE, origin=ROOT)
    foreign, cold, hot, young = (entry(index, (n, n), origin=b"other" if n == 1 else ROOT) for n in range(1, 5))
    for one in (foreign, cold, hot, young):
        assert index.add(one)
    for _ in range(20):
        index.touch(foreign)
        index.touch(hot)
    assert [index.make_room(size) for size in (10, 20, 30)] == [[foreign], [cold], [young]]


def test_a_run_that_saves_more_tokens_a_byte_is_worth_more() -> None:
    index = BlockIndex(100, BLOCK_SIZE)
    small, large = entry(index, (1, 2), size=10), entry(index, (3, 4), size=60)
    index.add(small)
    index.add(large)
    small.last_turn = large.last_turn
    assert index.make_room(50) == [large]


def test_an_entry_without_bytes_has_a_score_and_goes_last() -> None:
    """Such is the checkpoint of a model whose states take no bytes: that of a simulation without their size."""
    index = BlockIndex(100, BLOCK_SIZE)
    index.add(entry(index, (1, 2), size=0))
    index.add(entry(index, (3, 4), size=60))
    (gone,) = index.make_room(60)
    assert gone.size == 60


def test_a_block_is_kept_once() -> None:
    index = BlockIndex(100, BLOCK_SIZE)
    assert index.add(entry(index, (1, 2, 3, 4)))
    assert not index.add(entry(index, (1, 2)))
    assert (len(index), index.held_bytes) == (1, 10)


def copied(entries: Sequence[Entry]) -> list[Entry]:
    return [evolve(one, children=0) for one in entries]


def state(index: BlockIndex) -> tuple[object, ...]:
    entries = {handle: (one.keys, one.children) for handle, one in index.entries.items()}
    return (
        entries,
        index.held_bytes,
        index.turn,
        {key: index.get_holder(key).handle for one in entries.values() for key in one[0]},
    )


@pytest.mark.parametrize("odd", ["none", "a block twice", "a handle twice", "no blocks", "not the first"])
def test_many_at_once_are_as_one_by_one(odd: str) -> None:
    one_by_one, at_once, made = BlockIndex(1000, BLOCK_SIZE), BlockIndex(1000, BLOCK_SIZE), BlockIndex(1000, BLOCK_SIZE)
    entries = [entry(made, (1, 2, 3, 4)[:stop] + tail, start) for stop, start, tail in SHAPES]
    match odd:
        case "a block twice":
            entries.append(entry(made, (1, 2)))
        case "a handle twice":
            entries.append(evolve(entry(made, (9, 9)), handle=entries[0].handle))
        case "no blocks":
            entries.append(evolve(entry(made, (9, 9)), keys=()))
        case "not the first":
            for index in (one_by_one, at_once):
                assert index.add(evolve(entry(made, (7, 7)), handle=77))
    entries.reverse()
    first = [other.handle for other in copied(entries) if one_by_one.add(other)]
    assert [other.handle for other in at_once.add_all(copied(entries))] == first
    assert state(at_once) == state(one_by_one)
    assert at_once.remove(at_once.entries[first[-1]])


SHAPES = [(2, 0, ()), (4, 2, ()), (4, 4, (5, 6)), (4, 4, (7, 8)), (0, 0, (3, 3))]


@st.composite
def sequences(draw: st.DrawFn) -> Tokens:
    return tuple(
        draw(st.lists(st.integers(0, 1), min_size=BLOCK_SIZE, max_size=12).map(lambda t: t[: len(t) // 2 * 2]))
    )


class AgainstAModel(RuleBasedStateMachine):
    """The model: a list of runs, asked the slow way."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(100, BLOCK_SIZE, origin=b"")
        self.runs = list[Entry]()

    def has(self, key: bytes) -> bool:
        return any(key in run.keys for run in self.runs)

    def children(self, run: Entry) -> list[Entry]:
        return [other for other in self.runs if other.parent in run.keys]

    @rule(tokens=sequences(), blocks=st.integers(0, 5), size=st.integers(1, 30))
    def add(self, tokens: Tokens, blocks: int, size: int) -> None:
        start = min(blocks * BLOCK_SIZE, len(tokens) - BLOCK_SIZE)
        new = entry(self.index, tokens, start, size)
        gone = self.index.make_room(size, new.parent)
        self.left(gone)
        if not self.index.fits(size):
            assert all(run.leases or self.children(run) or new.parent in run.keys for run in self.runs)
            return
        expected = not any(map(self.has, new.keys))
        assert self.index.add(new) == expected
        if expected:
            self.runs.append(new)

    def left(self, gone: list[Entry]) -> None:
        for run in gone:
            self.runs.remove(run)
            assert not run.leases
            assert not self.children(run), "a parent left before its child"

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        match data.draw(st.sampled_from(["touch", "lease", "release", "remove"])):
            case "touch":
                self.index.touch(run)
            case "lease":
                run.leases += 1
            case "release":
                run.leases = max(0, run.leases - 1)
            case _:
                assert self.index.remove(run)
                assert not self.index.remove(run)
                self.runs.remove(run)

    @rule(tokens=sequences())
    def look(self, tokens: Tokens) -> None:
        packed = pack_tokens(tokens)
        for number, key in enumerate(chain_keys(ROOT, packed, BLOCK_SIZE)):
            block = packed[number * BLOCK_SIZE * TOKEN_BYTES : (number + 1) * BLOCK_SIZE * TOKEN_BYTES]
            assert (self.index.find_block(key, block) is not None) == self.has(key)

    @invariant()
    def agrees(self) -> None:
        assert self.index.held_bytes == sum(run.size for run in self.runs)
        assert self.index.held_bytes <= self.index.budget
        assert set(self.index.entries.values()) == set(self.runs)
        assert [run.children for run in self.runs] == [len(self.children(run)) for run in self.runs]


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(
    max_examples=count_examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgainstAModel.pytestmark = [pytest.mark.timeout(120)]
