"""Legacy completions: prompts of every kind, logprobs as lm_eval reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from effects.decode import Logprob
from effects.job import Job
from tests.http import fake_door
from tests.http.conftest import Site, served
from tests.http.sse import chunks, text_of

PATH = "/v1/completions"


async def test_a_prompt_may_be_text_texts_ids_or_lists_of_ids(site: Site) -> None:
    first, second = site.text.tokenizer.encode_now(["The quick", "brown fox"])
    kinds = {"one": ["The quick", list(first)], "two": [["The quick", "brown fox"], [list(first), list(second)]]}
    for many, prompt in [(many, prompt) for many, prompts in kinds.items() for prompt in prompts]:
        site.door.tickets.clear()
        body = (await site.complete(prompt, max_tokens=2)).json()
        expected = [first, second] if many == "two" else [first]
        assert [ticket.job.prompt for ticket in site.door.tickets] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert body["usage"]["completion_tokens"] == 2 * len(expected)


async def test_an_answer_has_16_tokens_unless_the_request_says_otherwise(site: Site) -> None:
    for fields in ({}, {"max_tokens": -1}, {"max_tokens": 20}):
        await site.complete([30] * 4000, **fields)
    assert [ticket.job.max_tokens for ticket in site.door.tickets] == [16, 96, 20]


async def test_choices_are_numbered_prompt_by_prompt(site: Site) -> None:
    body = (await site.complete(["a", "b"], n=2, seed=5, max_tokens=3)).json()
    assert [ticket.job.sampling.seed for ticket in site.door.tickets] == [5, 6, 5, 6]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] | {"prompt_tokens": 2, "completion_tokens": 12} == body["usage"]


async def test_a_whole_answer_and_a_stream_say_the_same(site: Site) -> None:
    site.say("über 東京 😀")
    body = (await site.complete("x")).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "über 東京 😀", "logprobs": None, "finish_reason": "stop"}]
    found = await chunks(site, PATH, {"prompt": "x", "stream_options": {"include_usage": True}})
    assert text_of(found) == "über 東京 😀"
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]


async def test_logprobs_are_lists_side_by_side(site: Site) -> None:
    tokens = site.say("ab 😀")
    body = (await site.complete("x", logprobs=2)).json()
    shown = body["choices"][0]["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == len(tokens)
    assert shown["text_offset"][:2] == [0, len(shown["tokens"][0])]
    assert shown["token_logprobs"][0] == -0.5
    assert all(1 <= len(alternatives) <= 2 for alternatives in shown["top_logprobs"])
    assert any(token.startswith("bytes:\\x") for token in shown["tokens"])
    streamed = await chunks(site, PATH, {"prompt": "x", "logprobs": 2})
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == shown["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == shown["text_offset"]
    none = (await site.complete("x", logprobs=0)).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{}] * len(tokens)


async def test_control_tokens_in_a_prompt_are_text_unless_asked_for(site: Site) -> None:
    for fields in ({}, {"parse_special": True}):
        assert (await site.complete("<|im_start|>user", max_tokens=1, **fields)).status_code == 200
    typed, parsed = (ticket.job.prompt for ticket in site.door.tickets)
    assert 1 not in typed
    assert parsed[0] == 1


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", ""], None, 5, ["a", 1], [["a"]], [1, -1], [1, 10**9], [True], {}]
)
async def test_a_prompt_that_is_none_of_these_is_refused(shared: Site, prompt: object) -> None:
    error = (await shared.complete(prompt)).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("$.prompt")


async def test_the_number_of_prompts_is_capped_before_they_are_encoded(shared: Site) -> None:
    response = await shared.complete(["x"] * 65)
    assert response.status_code == 400
    assert "at most 64 entries, not 65" in response.json()["error"]["message"]


async def test_the_context_is_exactly_as_long_as_it_is(shared: Site) -> None:
    for tokens, status in ((4095, 200), (4096, 400), (4097, 400)):
        response = await shared.complete([30] * tokens, max_tokens=5)
        assert response.status_code == status
        if status == 200:
            assert response.json()["usage"]["completion_tokens"] == 1
            assert response.json()["choices"][0]["finish_reason"] == "length"
        else:
            error = response.json()["error"]
            assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (
                "context_length_exceeded",
                tokens,
                4096,
            )
            assert f"{tokens} tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": 1}, "$.echo"),
        ({"max_tokens": -2}, "$.max_tokens"),
        ({"suffix": "end"}, "$.suffix"),
        ({"best_of": 2, "stream": True}, "$.best_of"),
        ({"best_of": 1, "n": 2}, "$.best_of"),
        ({"best_of": 1000}, "$.best_of"),
        ({"logprobs": 21}, "$.logprobs"),
        ({"logprobs": True}, "$.logprobs"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(shared: Site, fields: dict, param: str) -> None:
    response = await shared.complete("x", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    harmless = {"echo": False, "suffix": "", "best_of": 1, "max_tokens": 1}
    assert (await shared.complete("x", **harmless)).status_code == 200


async def test_a_prompt_comes_back_with_its_logprobs_as_evaluations_ask_for_them(site: Site) -> None:
    said = site.say(" jumps")
    response = await site.complete("The quick brown fox", echo=True, logprobs=1, max_tokens=1)
    (choice,) = response.json()["choices"]
    job = site.door.tickets[0].job
    assert (job.prompt_logprobs, job.max_tokens, job.scope.kind, job.speculate, job.compression.mode) == (
        1,
        1,
        "off",
        False,
        "off",
    )
    logprobs = choice["logprobs"]
    count = len(job.prompt)
    assert {len(each) for each in logprobs.values()} == {count + 1}
    assert logprobs["token_logprobs"] == [None, *[-0.25] * (count - 1), -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
    text = "".join(logprobs["tokens"])
    assert choice["text"] == text
    assert text.startswith("The quick brown fox")
    assert [text[at:].startswith(token) for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert job.prompt[-1] != said[0]


async def test_nothing_is_generated_where_no_tokens_are_asked_for(site: Site) -> None:
    site.say("never")
    body = (await site.complete(["Hello", "there"], echo=True, logprobs=0, max_tokens=0)).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello", "there"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    assert all(choice["logprobs"]["token_logprobs"][1:] for choice in body["choices"])
    silent = (await site.complete("Hello", max_tokens=0)).json()["choices"][0]
    assert (silent["text"], silent["logprobs"], silent["finish_reason"]) == ("", None, "length")


async def test_an_end_token_counts_where_logprobs_of_a_prompt_are_asked_for(site: Site) -> None:
    """Evaluations leave the last one out, which is the one that was generated."""
    site.say("")
    (choice,) = (await site.complete("Hello", echo=True, logprobs=0, max_tokens=1)).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(site.door.tickets[0].job.prompt) + 1
    assert choice["text"] == "Hello"


async def test_an_echo_without_logprobs_can_be_streamed(site: Site) -> None:
    site.say(" jumps")
    found = await chunks(site, "/v1/completions", {"prompt": ["The fox", "A dog"], "echo": True, "n": 2})
    assert [text_of(found, index) for index in range(4)] == ["The fox jumps"] * 2 + ["A dog jumps"] * 2
    assert site.door.tickets[0].job.prompt_logprobs == -1


@pytest.mark.parametrize("many", [False, True])
async def test_a_stream_with_the_prompts_logprobs_is_as_the_whole_answer(site: Site, many: bool) -> None:
    site.say(" jumps over")
    prompt = ["The fox", "A dog"] if many else "The fox"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "n": 2, "max_tokens": 4}
    whole = (await site.complete(**body)).json()["choices"]
    found = await chunks(site, PATH, body)
    for index, choice in enumerate(whole):
        assert text_of(found, index) == choice["text"]
        shown = [
            one["logprobs"] for chunk in found for one in chunk["choices"] if one["index"] == index and one["logprobs"]
        ]
        assert shown == [choice["logprobs"]]
        ends = [one["finish_reason"] for chunk in found for one in chunk["choices"] if one["index"] == index]
        assert ends[-1] == choice["finish_reason"]
        assert set(ends[:-1]) == {None}


async def test_the_likeliest_answers_are_chosen(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def likelier_with_its_seed(job: Job, tokens: list[int]) -> tuple[Logprob, ...]:
        return tuple((-1.0 / (1 + job.sampling.seed % 5), ()) for _ in tokens)

    monkeypatch.setattr(fake_door, "logprobs", likelier_with_its_seed)
    body = (await site.complete(["a", "b"], n=2, best_of=4, seed=10, max_tokens=3)).json()
    assert [ticket.job.sampling.seed for ticket in site.door.tickets] == [10, 11, 12, 13] * 2
    alone = (await site.complete(["a", "b"], seed=13, max_tokens=3)).json()["choices"]
    second = (await site.complete(["a", "b"], seed=12, max_tokens=3)).json()["choices"]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [alone[0]["text"], second[0]["text"], alone[1]["text"], second[1]["text"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in body["choices"]} == {None}
    assert body["usage"]["completion_tokens"] == 24
    shown = (await site.complete("a", best_of=2, logprobs=0, max_tokens=3)).json()["choices"]
    assert len(shown) == 1
    assert len(shown[0]["logprobs"]["tokens"]) == 3


async def test_a_salt_is_hashed_and_keeps_prompts_apart(site: Site) -> None:
    for salt in ("one", "two", "one", ""):
        await site.complete("Hello", max_tokens=1, cache_salt=salt)
    salts = [ticket.job.salt for ticket in site.door.tickets]
    assert salts[0] == salts[2] != salts[1]
    assert salts[3] == ""
    assert "one" not in salts[0]
    assert {ticket.job.scope.kind for ticket in site.door.tickets} == {"full"}


async def test_api_keys_keep_prompts_apart(folder: Path) -> None:
    async with served(folder, api_keys=("one", "two")) as site:
        for key, salt in (("one", ""), ("two", ""), ("one", "a"), ("two", "a"), ("one", "")):
            asked = {"prompt": "Hello", "max_tokens": 1, "cache_salt": salt}
            await site.post("/v1/completions", asked, headers={"x-api-key": key})
        salts = [ticket.job.salt for ticket in site.door.tickets]
        assert len(set(salts)) == 4
        assert salts[0] == salts[-1]
        assert all(len(salt) == 32 for salt in salts), "digests"


async def test_more_answers_than_slots_and_queue_hold_are_a_400_since_trying_again_cannot_help(folder: Path) -> None:
    async with served(folder, max_jobs=4) as site:
        for fields, param in (({"prompt": ["a"] * 5}, "$.prompt"), ({"prompt": ["a", "b"], "n": 3}, "$.n")):
            response = await site.post("/v1/completions", {**fields, "max_tokens": 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await site.post("/v1/completions", {"prompt": ["a"] * 4, "max_tokens": 1})).status_code == 200


async def test_token_ids_beyond_the_context_are_counted_before_they_are_looked_at(shared: Site) -> None:
    response = await shared.post("/v1/completions", {"prompt": [-1] * 4096})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
