"""Tool calls of random models of every family over HTTP: each form of calls, in each API, streamed, with a draft.

The grammar makes the calls, and the model chooses among all that it allows. The seed is the same in every API, so the
same call has to arrive.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from attrs import frozen

from benchmarks.family_checkpoints import save_family
from tests.e2e.prepared import serving
from tests.http.answer.test_constrained_calls import (
    ASKS,
    Call,
    ask_chat,
    make_folder,
    make_form_folder,
    schema_of,
)
from tests.plain_http import NO_TLS
from tests.text.answer.test_laguna import NAMES, make_template

# The form in which the family's published templates write calls. Families without one, or with Hermes' or Mistral's,
# get one of the forms that would not be tried otherwise.
FORMS = {
    "mistral": "llama3-json",
    "mimo": "hermes",
    "ministral3": "mistral",
    "seed_oss": "seed-xml",
    "glm4_moe": "glm-xml",
    "minimax_m2": "minimax-xml",
    "gpt_oss": "harmony",
    "gemma3": "pythonic",
    "gemma4": "gemma4",
    "gemma4_experts": "gemma4",
    "laguna": "glm-xml",
    "deepseek_v2": "qwen-xml",
    "deepseek_v3": "hermes",
    "glm4_moe_lite": "glm-xml",
    "mistral4": "mistral",
}

ANSWER = 1500  # tokens; the models have room for 2,048


@frozen
class Remote:
    """A server in another process."""

    client: httpx.AsyncClient


def save_with_template(family: str, folder: Path) -> tuple[Path, Path]:
    """Write a random model whose template writes calls in the family's form, and its draft."""
    model, draft = save_family(family, folder)
    if family == "laguna":
        make_folder(model, make_template("", "false").source, NAMES[:2])
    else:
        make_form_folder(model, FORMS[family])
    return model, draft


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FORMS)
async def test_calls_of_a_random_model_arrive_alike_in_every_api(family: str, tmp_path: Path) -> None:
    model, draft = save_with_template(family, tmp_path)
    schema = schema_of(FORMS[family])
    words = (str(model), "--draft", str(draft), "--max-ctx", "2048")
    with serving(*words) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, verify=NO_TLS) as client:
            site = Remote(client)
            how: dict[str, Any] = {"seed": 1, "temperature": 1}
            whole = {"max_tokens": ANSWER, "max_output_tokens": ANSWER}
            found: list[Call | None] = [
                await ask_chat(site, schema, speculation="off", **how, **whole),
                *[await ask(site, schema, **how, **whole) for ask in ASKS],
            ]
            arrived = [json.loads(call[2]) for call in found if call is not None]
            assert len(arrived) == len(found), "the grammar asks for a call"
            assert all(values == arrived[0] for values in arrived)
            jsonschema.validate(arrived[0], schema)
            for ask, call in zip(ASKS, found[1:], strict=True):
                await ask(site, schema, call, max_tokens=16, max_output_tokens=16, **how)
        assert server.stop() == 0
