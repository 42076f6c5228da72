"""Slots that share a pool of pages too small for all of them, over HTTP: everybody is answered, as if alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from effects.ids import PAGE
from tests.campaign.mixture import EDITS, LENGTHS, document
from tests.e2e.prepared import serving
from tests.e2e.server import Running

HEAD = [1000 + number % 700 for number in range(3 * PAGE - 80)]
SESSIONS, ANSWER = 5, 40  # a session ends in a page of its own, which its answer needs


def answer(server: Running, session: int) -> object:
    prompt = [*HEAD, *(2000 + session + number for number in range(60))]
    done = server.complete(prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True, logprobs=1)
    return done.raise_for_status().json()["choices"]


def settled(server: Running) -> dict[str, int]:
    """Return the counts of pages, once no request holds any."""
    end = time.monotonic() + 60
    while True:
        found: dict[str, int] = server.client.get("/props").json()["kv_pages"]
        if not found["busy"]:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.02)


# By default `tests/engine/loading/test_kv_memory.py` answers more sessions than a pool holds, and a row of
# `tests/campaign/test_covering.py` has a pool over HTTP.
@pytest.mark.long
def test_more_sessions_than_the_pool_has_room_for_get_their_answers_over_http() -> None:
    words = ("demo", "--draft", "none", "--slots", "4", "--max-ctx", "1024", "--host-cache-budget", "0")
    with serving(*words, "--kv-memory", "6", "--paranoid") as server:
        pool = settled(server)
        total = pool["total"]
        assert pool == {"rows": PAGE, "total": total, "busy": 0, "idle": 0, "free": total, "waiting": 0}
        assert 4 <= total < 4 * 3 + 2, "four requests of four pages, two of them shared, have room: nothing is tried"
        alone = [answer(server, session) for session in range(SESSIONS)]
        with ThreadPoolExecutor(SESSIONS) as together:
            assert list(together.map(lambda session: answer(server, session), range(SESSIONS))) == alone
        after = settled(server)
        assert after["idle"] + after["free"] == total
        assert after["idle"] >= 3, "a prompt stays warm in the pages that its request leaves"
        metrics = server.client.get("/metrics").text
        assert f'rekindle_kv_pages{{use="free"}} {float(after["free"])}' in metrics
        long = server.complete(HEAD * 2, max_tokens=1)
        assert long.status_code == 400
        assert f"{2 * len(HEAD)} tokens" in long.json()["error"]["message"]


def edited(random: Random) -> tuple[list[int], int]:
    """A prompt of few documents, perhaps with another token somewhere, and how long its answer is."""
    prompt = document(random.randrange(6))[: random.choice(LENGTHS)]
    if random.random() < 0.5:
        at = random.choice(EDITS)
        prompt[at : at + 1] = [random.choice((11, 500, 3000))] * (at < len(prompt))
    return prompt, random.choice((4, 12, 24))


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("count", [15, 1000])
def test_three_clients_share_two_slots_of_a_pool_and_each_gets_its_own_answer(count: int) -> None:
    """Slots change their pages all the time here: more clients than slots, and prompts that begin alike."""
    pool = [edited(Random(number)) for number in range(min(count, 150) // 2)]

    def said(server: Running, number: int) -> object:
        prompt, tokens = pool[number]
        done = server.complete(prompt, max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True)
        return done.raise_for_status().json()["choices"]

    with serving("demo", "--slots", "1", "--draft", "none", "--host-cache-budget", "0") as server:
        right = [said(server, number) for number in range(len(pool))]

    def client(number: int) -> list[int]:
        random = Random(number)
        asked = [random.randrange(len(pool)) for _ in range(-(-count // 3))]
        return [one for one in asked if said(server, one) != right[one]]

    with (
        serving("demo", "--slots", "2", "--kv-memory", "64", "--draft", "none") as server,
        ThreadPoolExecutor(3) as all_,
    ):
        assert list(all_.map(client, range(3))) == [[], [], []]
