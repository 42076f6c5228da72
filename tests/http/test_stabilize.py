"""Prompts that agents change at every request: what of it the model reads, in every API, and how it is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

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
    """Positional state that is kept behind it would be nobody's."""
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
