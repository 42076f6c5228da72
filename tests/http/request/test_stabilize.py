"""Tests of prompts that agents change at every request: which parts the model reads, in every API, and how an answer
says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from tests.http.conftest import Site, served
from tests.text import small

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};"
LEFT = "<total_tokens>{} tokens left</total_tokens>"
NAMES = ["claude-billing-header", "claude-total-tokens"]


def bodies(turn: int) -> dict[str, dict[str, Any]]:
    """The same conversation in three APIs."""
    billing, left = BILLING.format(f"{turn:05x}"), LEFT.format(1000 - turn)
    blocks = [{"type": "text", "text": text} for text in (billing, "You help.", left)]
    user = {"role": "user", "content": "Hello"}
    system = {"role": "system", "content": f"{billing}\nYou help.\n{left}"}
    return {
        "/v1/chat/completions": {"messages": [system, user], "max_tokens": 4},
        "/v1/messages": {"system": blocks, "messages": [user], "max_tokens": 4},
        "/v1/responses": {"instructions": system["content"], "input": "Hello", "max_output_tokens": 4},
    }


def read(site: Site) -> str:
    """The prompt of the last job."""
    return site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)


@pytest.mark.parametrize(
    ("path", "counter", "counted"),
    [
        ("/v1/chat/completions", "/v1/chat/completions/input_tokens", "input_tokens"),
        ("/v1/messages", "/v1/messages/count_tokens", "input_tokens"),
        ("/v1/responses", "/v1/responses/input_tokens", "input_tokens"),
    ],
)
async def test_every_api_reads_the_same_prompt_says_why_and_counts_it(
    site: Site, path: str, counter: str, counted: str
) -> None:
    site.say("Fox")
    whole = await site.post(path, bodies(1)[path])
    assert whole.headers["x-rekindle-stabilized"] == " ".join(NAMES)
    assert whole.json()["rekindle"]["stabilized"] == NAMES
    prompt = read(site)
    assert prompt.startswith("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello\n\n<total_tokens>999 ")
    count = await site.post(counter, bodies(1)[path])
    assert count.json()[counted] == len(site.door.tickets[-1].job.prompt)
    untouched = await site.post(path, {**bodies(1)[path], "stabilize": "off"})
    assert "x-rekindle-stabilized" not in untouched.headers
    assert untouched.json()["rekindle"]["stabilized"] == []
    assert BILLING.format("00001") in read(site)
    off = await site.post(counter, {**bodies(1)[path], "stabilize": "off"})
    assert off.json()[counted] == len(site.door.tickets[-1].job.prompt) != count.json()[counted]


async def test_a_server_may_leave_prompts_alone_and_a_request_have_it_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served(small.write(tmp_path), stabilize="off") as site:
        site.say("Fox")
        body = bodies(1)["/v1/chat/completions"]
        assert (await site.post("/v1/chat/completions", body)).json()["rekindle"]["stabilized"] == []
        assert not [record for record in caplog.records if "stabilized" in record.getMessage()]
        asked = {**body, "stabilize": "known"}
        assert (await site.post("/v1/chat/completions", asked)).json()["rekindle"]["stabilized"] == NAMES
        assert BILLING.format("00001") in (await site.post("/apply-template", body)).json()["prompt"]
        assert BILLING.format("00001") not in (await site.post("/apply-template", asked)).json()["prompt"]
    (line,) = [record.getMessage() for record in caplog.records if "stabilized" in record.getMessage()]
    assert f"x-rekindle-stabilized={' '.join(NAMES)}" in line


async def test_no_boundary_follows_where_the_next_prompt_will_be_another(site: Site) -> None:
    """Positional state that is kept behind it would never be used."""
    site.say("Fox")
    body = bodies(1)["/v1/messages"]
    await site.post("/v1/messages", body)
    job = site.door.tickets[-1].job
    (before, last) = job.boundaries[-2:]
    assert site.text.tokenizer.decode(job.prompt[before:last], special=True) in ("user\nHello", "\nHello", "Hello")
    assert "total_tokens" in site.text.tokenizer.decode(job.prompt[last:], special=True)
    await site.post("/v1/messages", {**body, "stabilize": "off"})
    off = site.door.tickets[-1].job
    assert site.text.tokenizer.decode(off.prompt[off.boundaries[-1] :], special=True).strip() in ("", "assistant")


STATUS = """\
gitStatus: This is the git status at the start of the conversation. Note that this status is a snapshot in time, and \
will not update during the conversation.

Current branch: main

Git user: Somebody

Status:
{}

Recent commits:
5183890 Sides have lengths"""


@define
class Resumed:
    """An agent's session. whole: its last prompt, and what was answered."""

    path: str
    messages: list[dict[str, Any]] = field(factory=list)
    whole: str = ""

    async def turn(self, site: Site, status: str, said: str) -> None:
        """Send one more turn and check the prompt that the model reads. The conversation goes on from its answer."""
        self.messages.append({"role": "user", "content": said})
        system = f"You help.\n\n{STATUS.format(status)}"
        full_messages = [{"role": "system", "content": system}, *self.messages]
        body = (
            {"system": system, "messages": self.messages}
            if self.path == "/v1/messages"
            else {"messages": full_messages}
        )
        response = await site.post(self.path, {**body, "max_tokens": 9})
        assert response.headers["x-rekindle-stabilized"] == "claude-git-status"
        prompt, answer = read(site), response.json()
        assert prompt.startswith(self.whole)
        answered = answer["content"][0]["text"] if "content" in answer else answer["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answered})
        self.whole = prompt + answered


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_session_that_is_resumed_with_another_status_goes_on_from_where_it_was(
    tmp_path: Path, path: str
) -> None:
    """This holds over a restart, and while the session's first process goes on. Another session with the same status
    begins anew.
    """
    folder, session = small.write(tmp_path), Resumed(path)
    async with served(folder, turns=tmp_path / "turns") as site:
        site.say("Fox")
        for said in ("One", "Two"):
            await session.turn(site, "?? shapes.py", said)
    assert session.whole.count("gitStatus: ") == 1
    begun = deepcopy(session)
    async with served(folder, turns=tmp_path / "turns") as site:
        site.say("Fox")
        for said in ("Three", "Four"):
            await session.turn(site, "A  shapes.py", said)
        assert session.whole.count("gitStatus: ") == 2
        assert "Three\n\ngitStatus: " in session.whole
        await begun.turn(site, "?? shapes.py", "Three")
        assert begun.whole.count("gitStatus: ") == 1
        other = Resumed(path)
        await other.turn(site, "A  shapes.py", "Hello")
        assert other.whole.count("gitStatus: ") == 1


AGENTS = "Available agent types for the Agent tool:\n- mine: Finds things.\n\n" + "Rules of our own. " * 20


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both prompts begin with."""
    return next(place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])


async def test_a_new_session_reads_nothing_of_a_constant_message_again(site: Site) -> None:
    """It stands behind the first question, as the agent sends it, and the question is another one in each session."""
    prompts = {}
    for stabilize in ("known", "off"):
        found = []
        for question in ("Hello", "Why is it so?"):
            constant = {"role": "system", "content": AGENTS}
            messages = [{"role": "user", "content": question}, constant]
            body = {"system": "You help.", "messages": messages, "max_tokens": 1, "stabilize": stabilize}
            assert (await site.post("/v1/messages", body)).status_code == 200
            found.append(site.door.tickets[-1].job.prompt)
        prompts[stabilize] = found
    again = {name: len(second) - shared(first, second) for name, (first, second) in prompts.items()}
    (message,) = site.text.tokenizer.encode_now([AGENTS])
    assert again["known"] + len(message) <= again["off"]
    assert read(site).index("Why is it so?") < read(site).index("Rules of our own.")
