"""Tests of answers that are kept beside the blocks: a later server of the same identity gets them, salt by salt."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from adapters.store.kept_answers import ANSWER_SHARE, MAX_ANSWER_BYTES, MAX_ANSWERS, KeptAnswers
from adapters.store.recent_prompts import SLACK
from adapters.store.store import Store
from effects.ids import Tokens
from tests.store.kit import OTHER, disk_store, settled

ONE: Tokens = tuple(range(1, 41))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def answers_of(store: Store) -> KeptAnswers:
    assert store.answers is not None
    return store.answers


def restart(store: Store, path: Path) -> KeptAnswers:
    settled(store)
    store.close()
    return answers_of(disk_store(path))


def test_a_later_server_gets_the_answers_of_each_salt_once_and_in_order(path: Path) -> None:
    store = disk_store(path)
    for number, salt in enumerate(("", "a", "b", "a", "")):
        answers_of(store).keep_answer((*ONE, number), salt)
    assert answers_of(store).take_answers("a") == [], "this server has them already"
    found = restart(store, path)
    assert found.take_answers("a") == [(*ONE, 1), (*ONE, 3)]
    assert found.take_answers("c") == []
    assert found.take_answers("") == [(*ONE, 0), (*ONE, 4)]
    assert found.take_answers("b") == [(*ONE, 2)]
    assert [found.take_answers(salt) for salt in ("", "a", "b")] == [[]] * 3


@pytest.mark.parametrize(("most", "count"), [(39, 0), (40, 1), (79, 1), (80, 2), (1 << 20, 3)])
def test_the_newest_answers_are_given_where_all_are_too_many(path: Path, most: int, count: int) -> None:
    store = disk_store(path)
    answers = [tuple(range(number, number + 40)) for number in range(3)]
    for answer in answers:
        answers_of(store).keep_answer(answer, "")
    assert restart(store, path).take_answers("", most) == answers[3 - count :]


def test_no_salt_is_written(path: Path) -> None:
    store = disk_store(path)
    answers_of(store).keep_answer(ONE, "a very secret salt")
    settled(store)
    (file,) = path.glob("answers-*")
    assert b"secret" not in file.read_bytes()


def test_a_server_that_adds_answers_keeps_those_of_the_one_before(path: Path) -> None:
    store = disk_store(path)
    answers_of(store).keep_answer((*ONE, 1), "")
    settled(store)
    store.close()
    store = disk_store(path)
    answers_of(store).keep_answer((*ONE, 2), "")
    assert restart(store, path).take_answers("") == [(*ONE, 1), (*ONE, 2)]


def test_answers_of_another_identity_are_not_given(path: Path) -> None:
    store = disk_store(path)
    answers_of(store).keep_answer(ONE, "")
    settled(store)
    store.close()
    store = disk_store(path, layout=OTHER)
    assert answers_of(store).take_answers("") == []
    assert restart(store, path).take_answers("") == [ONE]


def test_what_is_kept_is_bounded_in_memory_and_on_disk(path: Path) -> None:
    budget = 1 << 20
    store = disk_store(path, disk=budget)
    kept = answers_of(store)
    for number in range(2000):
        kept.keep_answer((number,) * 100, "")
    assert kept.records.held_bytes <= budget // ANSWER_SHARE
    settled(store)
    (file,) = path.glob("answers-*")
    assert file.stat().st_size <= 2 * SLACK
    found = restart(store, path).take_answers("")
    assert 0 < len(found) <= MAX_ANSWERS
    assert found[-1] == (1999,) * 100


@pytest.mark.parametrize("spoil", ["tear", "flip", "other", "empty", "newer", "large"])
def test_a_file_that_cannot_be_read_is_noted(path: Path, spoil: str, caplog: pytest.LogCaptureFixture) -> None:
    store = disk_store(path)
    for number in range(3):
        answers_of(store).keep_answer((*ONE, number), "")
    settled(store)
    store.close()
    (file,) = path.glob("answers-*")
    raw = file.read_bytes()
    spoiled = {
        "tear": raw[:-3],
        "flip": raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:],
        "other": bytes(range(256)),
        "empty": b"",
        "newer": raw.replace(b"recent-1", b"recent-2", 1),
        "large": raw + bytes(2 * (MAX_ANSWER_BYTES + SLACK)),
    }[spoil]
    file.write_bytes(spoiled)
    caplog.set_level(logging.WARNING)
    store = disk_store(path)
    assert "answers to copy from" in caplog.text
    readable = [(*ONE, 0), (*ONE, 1)] if spoil in ("tear", "flip") else []
    assert list(answers_of(store).take_answers("")) == readable
    answers_of(store).keep_answer(ONE, "")
    found = restart(store, path)
    if spoil == "newer":
        assert file.read_bytes() == spoiled, "it stays for the newer version"
        assert found.take_answers("") == []
    else:
        assert found.take_answers("") == [*readable, ONE]
