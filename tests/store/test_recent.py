"""Tests of recent prompts: the most similar one is found token for token, shared tokens are held once, and a restart
changes nothing.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.store.recent_prompts import (
    MAX_PROMPTS,
    RecentPrompts,
    encode_prompt,
    encode_snapshot,
    restore_prompts,
)
from effects.ids import Tokens
from effects.ports import Divergence
from tests.examples import count_examples
from tests.store.kit import OTHER, disk_store, files, save, settled

ONE = tuple(range(1, 41))


def like(one: Tokens, other: Tokens) -> int:
    for at, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return at
    return min(len(one), len(other))


def test_the_likest_of_the_last_prompts_counts() -> None:
    recents = RecentPrompts()
    assert recents.longest_match(ONE, 30) == 0, "nothing is known"
    for prompt in ((*ONE[:20], 99), (*ONE[:30], 99), (*ONE[:10], 99)):
        recents.add(prompt)
    assert [recents.longest_match(ONE, window) for window in (0, 1, 2, 3, 1000)] == [0, 10, 30, 30, 30]
    assert recents.longest_match((), 30) == 0
    assert recents.add_and_compare(ONE, 1)[0] == 10
    assert recents.longest_match(ONE, 1) == 40, "it has joined them"


def test_tokens_are_compared_and_not_bytes() -> None:
    recents = RecentPrompts()
    recents.add((1, 2, 256 + 3))
    assert recents.longest_match((1, 2, 3), 1) == 2
    assert recents.longest_match((1, 2, 2**31 - 1), 1) == 2


def test_a_growing_conversation_is_held_once() -> None:
    recents, tokens = RecentPrompts(), tuple(range(50_000))
    for turn in range(1, 51):
        recents.add(tokens[: turn * 1000])
    assert recents.held_bytes == 4 * 50_000


prompts = st.lists(
    st.builds(
        lambda branch, length, own: ((7, 8, 9) * 4)[:length] + (branch,) * 3 + tuple(own),
        st.integers(0, 2),
        st.integers(0, 12),
        st.lists(st.integers(0, 1), max_size=6),
    ),
    max_size=25,
)


@settings(max_examples=count_examples(150), deadline=None)
@given(prompts, st.integers(1, 9), st.integers(40, 400), st.integers(0, 12))
def test_any_history_agrees_with_whole_prompts(said: list[Tokens], most: int, most_bytes: int, window: int) -> None:
    recents, model, raw = RecentPrompts(most, most_bytes), list[Tokens](), b"".join(encode_snapshot([]))
    for prompt in said:
        alike = [like(prompt, other) for other in model]
        assert recents.longest_match(prompt, window) == max(alike[len(model) - min(window, len(model)) :], default=0)
        raw += encode_prompt(recents.add(prompt))
        model.append(prompt)
        model = model[len(model) - len(recents) :]
        assert len(recents) <= most
        assert recents.held_bytes <= most_bytes
        assert recents.held_bytes == sum(len(recent.rest) for recent in recents.list_prompts())
    for again in (raw, b"".join(encode_snapshot(recents.list_prompts()))):
        restored = RecentPrompts(most, most_bytes)
        assert restore_prompts(again, restored)
        assert [restored.longest_match(prompt, most) for prompt in said] == [
            recents.longest_match(prompt, most) for prompt in said
        ]
        assert [one.serial for one in restored.list_prompts()] == [one.serial for one in recents.list_prompts()]


def test_any_damage_costs_what_follows_it_only() -> None:
    recents, draw = RecentPrompts(), random.Random(5)
    for number in range(6):
        recents.add((*ONE[: 6 * number], 100 + number))
    raw = b"".join(encode_snapshot(recents.list_prompts()))
    for at in range(len(raw)):
        spoiled = bytearray(raw)
        spoiled[at] ^= 1 << draw.randrange(8)
        for odd in (bytes(spoiled), raw[:at]):
            found = RecentPrompts()
            assert not restore_prompts(odd, found) or odd in (raw[:end] for end in ends(raw))
            assert [one.rest for one in found.list_prompts()] == [one.rest for one in recents.list_prompts()][
                : len(found)
            ]


def ends(raw: bytes) -> list[int]:
    """Return the lengths at which a file may end without a fault."""
    from adapters.store.files.append_log import parse_records  # noqa: PLC0415
    from adapters.store.recent_prompts import MAGIC  # noqa: PLC0415

    return [len(MAGIC), *(end for _, end in parse_records(raw, len(MAGIC)))]


def test_a_record_that_cannot_be_is_not_taken() -> None:
    recents = RecentPrompts()
    one = recents.add(ONE)
    two = recents.add((*ONE, 5))
    assert not RecentPrompts().restore(two), "what it begins with is not there"
    assert not recents.restore(one), "it is there already"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.mark.parametrize("salt", ["", "a"])
def test_where_a_prompt_leaves_the_likest_one(salt: str) -> None:
    recents = RecentPrompts()

    def find_divergence(prompt: Tokens) -> Divergence | None:
        return recents.add_and_compare(prompt, 0, salt)[2]

    recents.add_and_compare((70, 71, 72), 0, "other")
    assert find_divergence(ONE) is None or not salt
    assert find_divergence((*ONE[:20], 7, 7)) == Divergence(20, ONE[20:], "none")
    assert find_divergence((*ONE[:20], 7, 8)) == Divergence(21, (7,), "none"), (
        "of the second, of which the first has 20"
    )
    assert find_divergence((*ONE[:10], 5)) == Divergence(10, ONE[10:], "none"), (
        "of which the others hold nothing themselves"
    )
    assert find_divergence(ONE) is None, "it is all there"
    assert find_divergence((*ONE, 1)) is None, "it continues where the most similar one ends"


def test_prompts_of_another_salt_are_not_compared(path: Path) -> None:
    store = disk_store(path)
    salts = ("", "a", "b")
    assert [store.count_shared_tokens((*ONE, number), 30, salt) for number, salt in enumerate(salts)] == [0, 0, 0]
    assert [store.count_shared_tokens((*ONE, 9), 30, salt) for salt in salts] == [40, 40, 40]
    settled(store)
    store.close()
    store = disk_store(path)
    assert [store.count_shared_tokens((*ONE[:30], 9), 30, salt) for salt in (*salts, "c")] == [30, 30, 30, 0]


def test_they_survive_a_restart_for_their_identity_only(path: Path) -> None:
    store = disk_store(path)
    assert [store.count_shared_tokens(prompt, 30) for prompt in ((*ONE, 1), (*ONE, 2), (3, 3))] == [0, 40, 0]
    settled(store)
    store.close()
    store = disk_store(path, layout=OTHER)
    assert store.count_shared_tokens(ONE, 30) == 0
    store.close()
    store = disk_store(path)
    assert len(store.recent_prompts) == 3
    assert store.count_shared_tokens((*ONE, 3), 30) == 40
    settled(store)
    store.close()
    assert len(disk_store(path).recent_prompts) == 4


@pytest.mark.parametrize("spoil", ["remove", "empty", "tear", "flip", "other", "huge"])
def test_their_file_may_be_lost(path: Path, spoil: str) -> None:
    store = disk_store(path)
    for number in range(3):
        store.count_shared_tokens((*ONE[: 10 * number], 99), 30)
    save(store, ONE)
    settled(store)
    store.close()
    (file,) = path.glob("recent-*")
    raw = file.read_bytes()
    spoiled = {
        "empty": b"",
        "tear": raw[:-3],
        "flip": raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:],
        "other": bytes(range(256)) * 9,
        "huge": raw + bytes(140 << 20),
    }
    if spoil == "remove":
        file.unlink()
    else:
        file.write_bytes(spoiled[spoil])
    store = disk_store(path)
    assert len(store.recent_prompts) == (2 if spoil in ("tear", "flip") else 0)
    store.count_shared_tokens(ONE, 30)
    settled(store)
    assert len(files(path)) == 1
    store.close()
    assert len(disk_store(path).recent_prompts) == (3 if spoil in ("tear", "flip") else 1), "it is written again"


def test_their_file_is_written_anew_before_it_grows_beyond_measure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.store.recent_prompts.SLACK", 4000)
    store = disk_store(path)
    for number in range(3 * MAX_PROMPTS):
        store.count_shared_tokens((number, number, 5), 1)
    settled(store)
    (file,) = path.glob("recent-*")
    assert file.stat().st_size < 3 * MAX_PROMPTS * 40
    store.close()
    store = disk_store(path)
    assert len(store.recent_prompts) == MAX_PROMPTS
    assert store.recent_prompts.longest_match((3 * MAX_PROMPTS - 1,) * 2, 1) == 2
    store.close()


def test_those_of_other_identities_do_not_pile_up(path: Path) -> None:
    from attrs import evolve  # noqa: PLC0415

    for number in range(12):
        store = disk_store(path, layout=evolve(OTHER, identity=f"{number:032x}"))
        store.count_shared_tokens(ONE, 30)
        settled(store)
        store.close()
    assert len(list(path.glob("recent-*"))) <= 10
