"""Answers are remembered by the tokens that they were made of: over a socket, in every API, and over a restart."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from adapters.http.history import answer_tokens as limits
from adapters.http.history.answer_tokens import ENCODER, CallerTurns, TurnMemory, TurnRecord, make_turn_name
from adapters.http.history.persistent_lru import add_digest, digest_body
from adapters.store.files.private_folder import PrivateFolder
from adapters.text.read_text import AssistantTurn, Reading
from effects.ids import Tokens
from tests.http.conftest import Site, served
from tests.http.wire.test_lifecycle import until
from tests.text import small
from tests.text.test_recall import THINKING

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
ANSWER = (
    *("<think>", "\nHm", ", so.\n</think>\n\nLet me a", "dd.\n<tool_call>", '\n{"name": "add", "argu'),
    *('ments": {"a":   1.0, "b": "\\u00e9', ' x"}}\n', "</tool_call>"),
)
KEYS = ("a-key-of-one", "a-key-of-another")


def anew(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as clients write them again: in another order, and whole numbers without a point."""
    members = reversed(arguments.items())
    return {key: int(value) if isinstance(value, float) else value for key, value in members}


class ApiTalk(Protocol):
    """A conversation in one API, whose client drops reasoning and writes arguments anew."""

    path: str

    def body(self) -> dict[str, Any]: ...

    def answered(self, answer: Mapping[str, Any]) -> None:
        """The answer, and what the tool says, are part of what is asked next."""
        ...

    def says(self, text: str) -> None: ...


@define
class ChatTalk:
    path: str = "/v1/chat/completions"
    messages: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Go."}])

    def body(self) -> dict[str, Any]:
        return {"messages": self.messages, "tools": [{"type": "function", "function": FUNCTION}]}

    def answered(self, answer: Mapping[str, Any]) -> None:
        said = answer["choices"][0]["message"]
        calls = [
            {**call, "function": {"name": "add", "arguments": json.dumps(anew(json.loads(arguments)))}}
            for call in said["tool_calls"]
            for arguments in (call["function"]["arguments"],)
        ]
        self.messages.append({"role": "assistant", "content": said["content"] + "\n", "tool_calls": calls})
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls]

    def says(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


@define
class MessagesTalk:
    path: str = "/v1/messages"
    messages: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Go."}])

    def body(self) -> dict[str, Any]:
        tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
        return {"max_tokens": 200, "messages": self.messages, "tools": [tool]}

    def answered(self, answer: Mapping[str, Any]) -> None:
        blocks = [block for block in answer["content"] if block["type"] != "thinking"]
        called = [
            {**block, "input": anew(block["input"])} if block["type"] == "tool_use" else block for block in blocks
        ]
        result = [{"type": "tool_result", "tool_use_id": called[-1]["id"], "content": "2"}]
        self.messages += [{"role": "assistant", "content": called}, {"role": "user", "content": result}]

    def says(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


@define
class ResponsesTalk:
    path: str = "/v1/responses"
    items: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Go."}])

    def body(self) -> dict[str, Any]:
        return {"input": self.items, "tools": [{"type": "function", **FUNCTION}], "store": False}

    def answered(self, answer: Mapping[str, Any]) -> None:
        for item in answer["output"]:
            if item["type"] == "message":
                self.items.append({"role": "assistant", "content": item["content"][0]["text"]})
            elif item["type"] == "function_call":
                named = {"call_id": item["call_id"], "name": item["name"]}
                arguments = json.dumps(anew(json.loads(item["arguments"])), indent=1)
                self.items.append({"type": "function_call", **named, "arguments": arguments})
                self.items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "2"})

    def says(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})


DIALECTS = [ChatTalk, MessagesTalk, ResponsesTalk]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose template shows what was thought since the last question."""
    return small.write(tmp_path_factory.mktemp("thinking"), THINKING)


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.is_file() and not file.is_symlink()}


def say(site: Site, *parts: str) -> Tokens:
    """From now on every answer is made of these tokens. With what ends it."""
    tokens = [token for one in site.text.tokenizer.encode_now(parts, controls=True) for token in one]
    end = site.text.tokenizer.end_tokens[0]
    site.say_tokens([*tokens, end])
    return (*tokens, end)


async def ask(site: Site, dialect: ApiTalk, **more: Any) -> tuple[dict[str, Any], Tokens]:
    """The answer, and the prompt that it is to."""
    response = await site.post(dialect.path, dialect.body(), **more)
    assert response.status_code == 200, response.text
    return response.json(), site.door.tickets[-1].job.prompt


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_next_prompt_goes_on_from_what_was_generated_also_after_a_restart(
    thinking: Path, tmp_path: Path, dialect: type[ApiTalk]
) -> None:
    whole: Tokens = ()
    talk = dialect()
    for _ in range(2):
        async with served(thinking, turns=tmp_path / "turns") as site:
            made = say(site, *ANSWER)
            for _ in range(2):
                answer, prompt = await ask(site, talk)
                assert prompt[: len(whole)] == whole
                assert (answer["rekindle"]["remembered"] > 0) == bool(whole)
                talk.answered(answer)
                whole = (*prompt, *made)
    written = b"".join(file.read_bytes() for file in (tmp_path / "turns").iterdir())
    assert b"Let me" not in written, "what was said is nowhere but in the tokens"


async def test_the_only_call_that_may_be_is_remembered_with_what_closes_it(thinking: Path) -> None:
    """The model goes on with another call, which the client does not get."""
    async with served(thinking) as site:
        made, only, talk = say(site, *ANSWER), {"parallel_tool_calls": False}, ChatTalk()
        say(site, *ANSWER, "\n", *ANSWER[3:])
        response = await site.post(talk.path, {**talk.body(), **only})
        talk.answered(response.json())
        first, (answer, prompt) = site.door.tickets[-1].job.prompt, await ask(site, talk)
        assert prompt[: len(first) + len(made)] == (*first, *made)
        assert answer["rekindle"]["remembered"] == len(made) - 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_counting_tokens_counts_those_and_the_metrics_tell(thinking: Path, dialect: type[ApiTalk]) -> None:
    counters = {"/v1/messages": "/v1/messages/count_tokens"}
    async with served(thinking) as site:
        made, talk = say(site, *ANSWER), dialect()
        talk.answered((await ask(site, talk))[0])
        counted = await site.post(counters.get(talk.path, f"{talk.path}/input_tokens"), talk.body())
        answer, prompt = await ask(site, talk)
        assert counted.json()["input_tokens"] == len(prompt)
        remembered = answer["rekindle"]["remembered"]
        assert remembered == len(made) - 1, "what ended it is the template's"
        metrics = (await site.client.get("/metrics")).text
        assert f"rekindle_remembered_tokens_total {remembered}.0" in metrics
        assert "rekindle_remembered_prompts_total 1.0" in metrics
        assert "rekindle_remembered_turns 2.0" in metrics


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_streamed_answer_is_remembered_too(thinking: Path, dialect: type[ApiTalk]) -> None:
    async with served(thinking) as site:
        made, talk = say(site, *ANSWER), dialect()
        answer, prompt = await ask(site, talk)
        talk.answered(answer)
        async with site.client.stream("POST", talk.path, json={**talk.body(), "stream": True}) as stream:
            async for _ in stream.aiter_lines():
                pass
        first = site.door.tickets[-1].job.prompt
        assert first[: len(prompt) + len(made)] == (*prompt, *made)
        assert len(site.memory) == 2


async def test_each_choice_of_several_is_remembered(thinking: Path) -> None:
    async with served(thinking) as site:
        made, talk = say(site, *ANSWER), ChatTalk()
        response = await site.post(talk.path, {**talk.body(), "n": 2})
        first, prompt = response.json(), site.door.tickets[-1].job.prompt
        for choice in first["choices"]:
            again = ChatTalk()
            again.answered({"choices": [choice]})
            _, after = await ask(site, again)
            assert after[: len(prompt) + len(made)] == (*prompt, *made)


async def test_callers_do_not_learn_of_each_others_answers(thinking: Path) -> None:
    async with served(thinking, api_keys=KEYS) as site:
        say(site, *ANSWER)
        heads = [{"authorization": f"Bearer {key}"} for key in KEYS]
        talk = ChatTalk()
        answer, _ = await ask(site, talk, headers=heads[0])
        talk.answered(answer)
        ours, one = await ask(site, talk, headers=heads[0])
        theirs, other = await ask(site, talk, headers=heads[1])
        assert ours["rekindle"]["remembered"] > 0 == theirs["rekindle"]["remembered"]
        assert len(other) < len(one), "the model is shown nothing of the reasoning"


async def test_a_salt_keeps_answers_apart(thinking: Path) -> None:
    async with served(thinking) as site:
        say(site, *ANSWER)
        found = []
        for salts in (("one", "one"), ("one", "other"), ("two", ""), ("", "three")):
            talk = ChatTalk()
            for salt in salts:
                response = await site.post(talk.path, {**talk.body(), "cache_salt": salt})
                talk.answered(response.json())
            found.append(response.json()["rekindle"]["remembered"] > 0)
        assert found == [True, False, False, False]


async def test_what_the_cache_is_not_to_keep_ends_with_the_process(thinking: Path, tmp_path: Path) -> None:
    off, talk = {"prefix_cache": {"scope": "off"}}, ChatTalk()
    async with served(thinking, turns=tmp_path) as site:
        say(site, *ANSWER)
        talk.answered((await site.post(talk.path, {**talk.body(), **off})).json())
        again = await site.post(talk.path, {**talk.body(), **off})
        assert again.json()["rekindle"]["remembered"] > 0
    assert files(tmp_path) == {"LOCK"}


@pytest.mark.parametrize("more", [{"stop": "add."}, {"max_tokens": 0}, {"continue_final_message": True}])
async def test_answers_that_do_not_come_back_as_they_are_are_not_remembered(
    thinking: Path, more: dict[str, Any]
) -> None:
    async with served(thinking) as site:
        say(site, "Let me add.")
        dialect: ApiTalk = MessagesTalk() if more.get("max_tokens") == 0 else ChatTalk()
        body = dialect.body()
        if more.get("continue_final_message"):
            body["messages"].append({"role": "assistant", "content": "Well"})
        assert (await site.post(dialect.path, {**body, **more})).status_code == 200
        assert len(site.memory) == 0


async def test_an_answer_whose_client_left_is_not_remembered(thinking: Path) -> None:
    async with served(thinking, door={"step_s": 0.05}) as site:
        say(site, *ANSWER)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(site.client.post, "/v1/chat/completions", json=ChatTalk().body()))
            await until(lambda: site.door.tickets and site.door.tickets[0].report.completion_tokens)
            tasks.cancel_scope.cancel()
        await until(lambda: site.door.tickets[0].closed)
        assert len(site.memory) == 0


# -- what is kept


def record(number: int, owner: str = "", calls: tuple[str, ...] = (), size: int = 3) -> bytes:
    return ENCODER.encode(TurnRecord(owner, calls, 1, (number,) * size))


def key(number: int) -> str:
    return f"{number:032x}"


def said(number: int, *calls: str) -> AssistantTurn:
    return AssistantTurn(0, key(number), calls, Reading())


def first(memory: TurnMemory, one: AssistantTurn, owner: str = "") -> int | None:
    turn = CallerTurns(memory, owner).find(one)
    return None if turn is None else turn.tokens[0]


def test_turns_are_found_by_their_calls_and_by_what_they_say() -> None:
    memory = TurnMemory()
    memory.put(make_turn_name(key(1)), record(1, calls=("call_a", "call_b")))
    memory.put(make_turn_name(key(2)), record(2, "else", ("call_c",)))
    assert [first(memory, one) for one in (said(1), said(9, "call_b"), said(9, "call_x", "call_a"))] == [1, 1, 1]
    assert [first(memory, one) for one in (said(9), said(9, "call_c"), said(2))] == [None] * 3
    assert first(memory, said(2), "else") == first(memory, said(9, "call_c"), "else") == 2
    memory.put(make_turn_name(key(1)), record(3, calls=("call_d",)))
    assert [first(memory, one) for one in (said(1), said(9, "call_a"), said(9, "call_d"))] == [3, None, 3]


def test_those_that_were_used_longest_ago_go_first_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TURNS", 3)
    memory = TurnMemory()
    for number in range(3):
        memory.put(make_turn_name(key(number)), record(number, calls=(f"call_{number}",)))
    assert first(memory, said(0)) == 0
    memory.put(make_turn_name(key(3)), record(3))
    assert [first(memory, said(9, f"call_{number}")) for number in range(3)] == [0, None, 2]
    for number in range(100):
        memory.put(make_turn_name(key(5)), record(number, calls=(f"again_{number}",)))
    assert len(memory._turn_names) <= 3  # noqa: SLF001 - calls of turns that are gone are gone


def test_bytes_of_turns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 3000)
    monkeypatch.setattr(limits, "MAX_TURN_BYTES", 1000)
    memory = TurnMemory()
    assert not memory.put(make_turn_name(key(0)), record(0, size=600))
    for number in range(1, 9):
        assert memory.put(make_turn_name(key(number)), record(number, size=300))
    assert 3 <= len(memory) < 8
    assert memory.size <= 3000


async def test_damaged_and_foreign_files_are_no_turns(tmp_path: Path) -> None:
    memory = TurnMemory(PrivateFolder.open(tmp_path))
    memory.load()
    memory.put(make_turn_name(key(1)), record(1, calls=("call_a",)))
    await memory.close()
    good = (tmp_path / make_turn_name(key(1))).read_bytes()
    for number, raw in enumerate((good[:-1], b"", good + b" ", good.replace(b"call_a", b"call_b")), 2):
        (tmp_path / make_turn_name(key(number))).write_bytes(raw)
    lies = [b"{}", b"[]", b'{"owner":"","calls":[],"lead":-1,"tokens":[]}', b"null", b"[" * 100_000]
    lies += [b'{"owner":"","calls":[],"lead":0,"tokens":[],"more":' + b"[" * 3000]
    lies += [b'{"owner":"","calls":[],"lead":0,"tokens":[%s]}' % one for one in (b"-1", b"1.5", b"1e99", b'"1"')]
    for number, body in enumerate(lies, 10):
        (tmp_path / make_turn_name(key(number))).write_bytes(add_digest(body))
    (tmp_path / make_turn_name(key(40))).symlink_to(tmp_path / make_turn_name(key(1)))
    os.mkfifo(tmp_path / make_turn_name(key(41)))
    (tmp_path / "notes").write_bytes(b"another program's")
    memory = TurnMemory(PrivateFolder.open(tmp_path))
    memory.load()
    assert (len(memory), first(memory, said(9, "call_a"))) == (1, 1)
    await memory.close()
    assert files(tmp_path) == {"LOCK", "notes", make_turn_name(key(1))}


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_harm(tail: bytes, right: bool) -> None:
    raw = (digest_body(tail) if right else b"0" * 64) + b"\n" + tail
    assert not TurnMemory().is_whole(raw)
