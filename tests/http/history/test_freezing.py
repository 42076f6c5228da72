"""Tests of frozen messages: which messages have aged, what they were frozen to before, and that this survives a
restart, damage and other clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from adapters.http.edge_options import CompressionDefaults
from adapters.http.history.frozen_messages import (
    FRESH_MESSAGES,
    MIN_AGED_TOKENS,
    MIN_MESSAGE_TOKENS,
    FrozenMessages,
    find_aged_range,
)
from adapters.store.files.private_folder import PrivateFolder
from effects.compression import Compression, PromptPart, count_tokens
from effects.ids import RequestId
from effects.job import Job, find_aged_messages, freezes_messages
from effects.prompt_compression import KeepFrozen
from states.kept_rows import make_prompt
from tests.http.conftest import Site, served

DEFAULTS = CompressionDefaults("auto", 1000, 100, max_scored_tokens=8000, freeze=True)
LINES = "\n".join(f"Line {at} says that {at * 37 % 101} is a number." for at in range(40))
MESSAGE, SPANS = tuple(range(300)), ((0, 40), (290, 300))
REQUEST = RequestId(1)


@pytest.fixture(scope="module")
async def freezing(folder: Path) -> AsyncIterator[Site]:
    """A server that freezes, as far as it knows: its context holds 4,096 tokens."""
    async with served(folder, compression=DEFAULTS, frozen=FrozenMessages(scorer_identity="some")) as site:
        yield site


def talk(turns: int, about: str = "") -> list[dict[str, Any]]:
    said = [{"role": "system", "content": "Be brief."}]
    for number in range(turns):
        said += [
            {"role": "user", "content": f"{about}{number} {LINES}"},
            {"role": "assistant", "content": f"{about}{number} it is."},
        ]
    return [*said, {"role": "user", "content": f"{about} And now?"}]


async def asked(site: Site, messages: list[dict[str, Any]], **fields: Any) -> Job:
    before = len(site.door.tickets)
    response = await site.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    job: Job = site.door.tickets[before].job
    return job


def freeze(memory: FrozenMessages, job: Job) -> None:
    """Freeze all aged messages of the job, as the engine reports it."""
    kept = {
        part.name: ((0, 10), (part.stop - part.start - 10, part.stop - part.start)) for part in find_aged_messages(job)
    }
    memory.store(REQUEST, KeepFrozen(tuple(kept.items())))


async def test_a_job_says_which_of_its_messages_have_aged(freezing: Site) -> None:
    job = await asked(freezing, talk(3))
    reported = [(part.role, part.keep) for part in job.compression.parts]
    first = [("system", 0), ("user", 100), ("assistant", 0), ("user", 100), ("assistant", 0)]
    assert reported == [*first, ("user", 100), ("assistant", 0), ("user", 0), ("assistant", 0)], "short ones stay"
    assert freezes_messages(job)
    assert find_aged_messages(job) == tuple(part for part in job.compression.parts if part.keep)


async def test_the_next_turn_finds_what_they_were_frozen_to_and_nothing_else_is_new(freezing: Site) -> None:
    assert freezing.frozen is not None
    freeze(freezing.frozen, before := await asked(freezing, talk(3, "next ")))
    job = await asked(freezing, talk(4, "next "))
    known = [part for part in job.compression.parts if part.kept is not None]
    assert [part.name for part in known] == [part.name for part in find_aged_messages(before)]
    assert len([part for part in job.compression.parts if part.keep]) == len(known) + 1
    assert len(make_prompt(job).tokens) == len(job.prompt) - sum(part.stop - part.start - 20 for part in known)


@pytest.mark.parametrize(
    "fields",
    [
        {"compression": {"freeze": False}},
        {"compression": {"mode": "off"}},
        {"prefix_cache": {"scope": "off"}},
    ],
)
async def test_a_request_may_decline(freezing: Site, fields: dict[str, Any]) -> None:
    assert not freezes_messages(await asked(freezing, talk(3), **fields))


async def test_another_ratio_and_another_salt_find_nothing(freezing: Site) -> None:
    assert freezing.frozen is not None
    messages = talk(3, "other ")
    freeze(freezing.frozen, await asked(freezing, messages))
    assert len(find_aged_messages(await asked(freezing, messages))) == 0
    assert len(find_aged_messages(await asked(freezing, messages, compression={"keep_ratio": 0.2}))) == 3
    assert len(find_aged_messages(await asked(freezing, messages, cache_salt="mine"))) == 3
    assert len(find_aged_messages(await asked(freezing, messages, compression={"keep_ratio": 1}))) == 0


async def test_what_fits_the_context_once_it_is_frozen_is_taken_and_what_does_not_is_told(freezing: Site) -> None:
    job = await asked(freezing, talk(8, "long "))
    assert len(job.prompt) > freezing.options.model.max_ctx
    full = {"messages": talk(8, "long "), "compression": {"keep_ratio": 0.9}}
    error = (await freezing.post("/v1/chat/completions", full)).json()["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 4096)
    assert 4096 <= error["n_kept_tokens"] < error["n_prompt_tokens"]
    short = [
        {"role": "user", "content": LINES * 8},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    response = await freezing.post("/v1/chat/completions", {"messages": short})
    assert "It cannot be compressed: nothing_aged." in response.json()["error"]["message"]


async def test_a_server_that_freezes_nothing_says_so(shared: Site) -> None:
    response = await shared.chat("Hello", compression={"freeze": True})
    assert response.json()["error"]["param"] == "$.compression.freeze"
    assert "--disk-prefix-cache-compress" in response.json()["error"]["message"]
    assert not (await asked(shared, talk(3))).compression.freeze


def parts(*roles: str) -> list[PromptPart]:
    return [PromptPart(role, 10 * at, 10 * at + 10) for at, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "messages", "expected"),
    [
        (("system", "user", "assistant", "user", "assistant"), 4, [1]),
        (("system", "system", "user", "assistant", "user", "assistant"), 5, [2]),
        (("user", "assistant", "user", "assistant"), 3, []),
        (("user", "assistant", "tool", "assistant", "tool", "assistant"), 5, [1, 2]),
        (("user", "assistant", "tool", "assistant", "tool"), 5, [1, 2]),  # no answer is opened
        (("?", "?", "?", "?", "?", "?", "?"), 3, []),
        ((), 0, []),
    ],
)
def test_the_band_of_aged_messages(roles: tuple[str, ...], messages: int, expected: list[int]) -> None:
    assert list(find_aged_range(parts(*roles), messages)) == expected


def test_names_say_who_scored_and_how_much_was_kept() -> None:
    one, other = FrozenMessages(scorer_identity="one"), FrozenMessages(scorer_identity="other")
    names = {one.make_name(MESSAGE, 100, ""), one.make_name(MESSAGE, 50, ""), one.make_name(MESSAGE, 100, "salt")}
    names |= {other.make_name(MESSAGE, 100, ""), one.make_name(MESSAGE[1:], 100, "")}
    assert len(names) == 5


async def put_away(folder: Path, *names: str) -> None:
    memory = FrozenMessages(PrivateFolder.open(folder), scorer_identity="one")
    memory.store(REQUEST, KeepFrozen(tuple((name, SPANS) for name in names)))
    await memory.close()


async def test_it_survives_a_restart(tmp_path: Path) -> None:
    name = FrozenMessages(scorer_identity="one").make_name(MESSAGE, 100, "")
    await put_away(tmp_path / "frozen", name)
    again = FrozenMessages(PrivateFolder.open(tmp_path / "frozen"), scorer_identity="one")
    again.load()
    assert again.find_spans(name, 300) == SPANS
    assert again.find_spans(name, 299) is None, "of another message"
    assert again.count_figures() == {"messages": 1, "bytes": again.size, "found": 1, "missed": 1, "damaged": 0}
    await again.close()


@pytest.mark.parametrize("damage", [b"", b"[[9,3]]", b"[[0,40],[290,301]]", b"nothing of ours"])
async def test_damage_is_a_miss_and_counted(tmp_path: Path, damage: bytes) -> None:
    whole, torn = (FrozenMessages(scorer_identity="one").make_name(MESSAGE, keep, "") for keep in (100, 50))
    await put_away(tmp_path / "frozen", whole, torn)
    file = tmp_path / "frozen" / torn
    file.write_bytes(file.read_bytes()[:65] + damage if damage else b"")
    again = FrozenMessages(PrivateFolder.open(tmp_path / "frozen"), scorer_identity="one")
    again.load()
    assert (again.find_spans(torn, 300), again.find_spans(whole, 300), again.damaged_count) == (None, SPANS, 1)
    assert not file.exists()
    await again.close()


def test_spans_that_no_message_has_do_not_get_into_a_job() -> None:
    for kept in (((5, 3),), ((0, 11),), ((0, 4), (2, 6))):
        with pytest.raises(ValueError, match="cannot be"):
            PromptPart("user", 0, 10, kept=kept)
    with pytest.raises(ValueError, match="cannot be"):
        Compression("auto", least=-1)
    part = PromptPart("user", 0, 10, keep=100, kept=((0, 4), (6, 10)))
    assert count_tokens(part.kept or ()) == 8
    assert (FRESH_MESSAGES, MIN_MESSAGE_TOKENS, MIN_AGED_TOKENS) == (2, 64, 512)
    assert evolve(part, kept=()).kept == ()
