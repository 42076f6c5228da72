"""Tests that a miss explains itself, in the answer and in /debug/misses, to the client that sent the request."""

from __future__ import annotations

from pathlib import Path

from adapters.http.answer.cache_misses import MAX_MISSES
from tests.http.conftest import Site, served

SYSTEM = "It is Monday, and you help with words. Be brief."
TALK = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello, world!"}]
LATER = [{"role": "system", "content": SYSTEM.replace("Monday", "Friday")}, TALK[1]]
ASKED = {"max_tokens": 2}


async def miss(site: Site, messages: list[dict], key: str = "") -> dict | None:
    headers = {"x-api-key": key} if key else {}
    answer = await site.post("/v1/chat/completions", {"messages": messages, **ASKED}, headers=headers)
    return answer.json()["rekindle"]["prefix_cache"]["miss"]


async def kept(site: Site, key: str = "") -> list[dict]:
    return (await site.client.get("/debug/misses", headers={"x-api-key": key} if key else {})).json()["data"]


async def test_an_answer_says_where_its_prompt_left_the_likest_one(site: Site) -> None:
    assert await miss(site, TALK) == {"reason": "empty_store"}
    explained = await miss(site, LATER)
    assert explained is not None
    assert (explained["message"], explained["role"], explained["kept_in"]) == (0, "system", "device")
    assert "It is Friday" in explained["sent"]
    assert "It is Monday" in explained["kept"]
    assert explained["reason"] == f"diverged_at:{explained['diverged_at']}"
    assert await miss(site, TALK) is None, "all of it is there"
    assert [one["reason"] for one in await kept(site)] == [explained["reason"], "empty_store"]


async def test_misses_are_listed_the_newest_first_and_a_few_only(site: Site) -> None:
    for number in range(MAX_MISSES + 3):
        await miss(site, [{"role": "user", "content": f"{number} and more of that"}])
    found = await kept(site)
    assert len(found) == MAX_MISSES
    assert {"id", "at", "prompt_tokens", "restored_tokens", "reason", "sent", "kept"} <= found[0].keys()
    assert f"{MAX_MISSES + 2} and more" in found[0]["sent"]
    assert found[0]["at"] >= found[1]["at"]


async def test_every_api_tells_it_streams_too(site: Site) -> None:
    def bodies(text: str) -> dict[str, dict]:
        return {
            "/v1/completions": {"prompt": f"The quick {text}", **ASKED},
            "/v1/messages": {"messages": [{"role": "user", "content": f"The fox {text}"}], **ASKED},
            "/v1/responses": {"input": f"The dog {text}", "max_output_tokens": 2},
        }

    for path, body in bodies("jumps").items():
        await site.post(path, body)
        await site.post(path, {**bodies("sleeps")[path], "stream": True})
        newest = (await kept(site))[0]
        assert "sleeps" in newest["sent"], path
        assert "jumps" in newest["kept"], path
        assert newest["role"] == (None if path == "/v1/completions" else "user")


async def test_nobody_is_told_what_another_key_has_sent(folder: Path) -> None:
    async with served(folder, api_keys=("one", "two")) as site:
        assert await miss(site, TALK, "one") == {"reason": "empty_store"}
        assert await miss(site, LATER, "two") == {"reason": "empty_store"}
        explained = await miss(site, LATER, "one")
        assert explained is not None
        assert "Monday" in explained["kept"]
        assert [len(await kept(site, key)) for key in ("one", "two")] == [2, 1]
        assert "Monday" not in str(await kept(site, "two"))
        assert (await site.client.get("/debug/misses")).status_code == 401
