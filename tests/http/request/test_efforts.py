"""Reasoning effort: one list of levels in all APIs, and what an answer says of a level that its template refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from adapters.text.reasoning_efforts import EFFORTS
from tests.http.conftest import Site, served
from tests.text import small

TEMPLATE = """\
{%- if reasoning_effort in ['minimal', 'high', 'max'] %}{{ raise_exception('unknown effort') }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' ~ reasoning_effort }}{% endif %}"""
SERVED = {"minimal": "low", "high": "medium", "max": "xhigh"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
async def choosy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with served(small.write(tmp_path_factory.mktemp("choosy"), TEMPLATE)) as site:
        yield site


def asking(path: str, effort: str) -> dict[str, Any]:
    match path:
        case "/v1/messages":
            return {"messages": HELLO, "max_tokens": 2, "output_config": {"effort": effort}}
        case "/v1/responses":
            return {"input": "Hello", "max_output_tokens": 2, "reasoning": {"effort": effort}}
        case _:
            return {"messages": HELLO, "max_tokens": 2, "reasoning_effort": effort}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("effort", EFFORTS)
async def test_every_api_takes_every_level(choosy: Site, path: str, effort: str) -> None:
    answer = await choosy.post(path, asking(path, effort))
    assert answer.status_code == 200, answer.text
    prompt = choosy.text.tokenizer.decode(choosy.door.tickets[-1].job.prompt)
    assert prompt.endswith(f"assistant\n{SERVED.get(effort, effort)}")
    wanted = f"{SERVED[effort]}; the chat template does not accept {effort}" if effort in SERVED else None
    assert answer.headers.get("x-rekindle-reasoning-effort") == wanted


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/chat/completions/input_tokens",
        "/apply-template",
    ],
)
async def test_what_counts_and_shows_prompts_takes_every_level(choosy: Site, path: str) -> None:
    api = path.rpartition("/")[0]
    assert (await choosy.post(path, asking(api, "high"))).status_code == 200


async def test_props_show_what_a_level_is_served_as(choosy: Site) -> None:
    efforts = (await choosy.client.get("/props")).json()["reasoning_efforts"]
    assert efforts == {effort: SERVED.get(effort, effort) for effort in EFFORTS}
