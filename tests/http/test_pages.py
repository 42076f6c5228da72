"""Tests of the pages on which the server shows itself, and of endpoints for text that need no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from effects.job import Report
from effects.ports import Closed
from tests.http.conftest import Site, served


async def test_the_served_model_is_listed_as_three_kinds_of_client_expect_it(shared: Site) -> None:
    listed = (await shared.client.get("/v1/models")).json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert (model["id"], model["object"], model["owned_by"], model["type"]) == ("small", "model", "rekindle", "model")
    assert model["context_length"] == model["max_model_len"] == model["meta"]["n_ctx"] == 4096
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("small", "small", False)
    assert (await shared.client.get("/v1/models/small")).json() == model
    missing = await shared.client.get("/v1/models/a/b")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_health_is_503_while_the_server_shuts_down_and_nothing_is_generated_then(site: Site) -> None:
    site.door.state = "draining"
    for path in ("/health", "/v1/health"):
        response = await site.client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "draining")
        assert "retry-after" in response.headers
    refused = await site.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    site.door.state = "ready"
    assert (await site.client.get("/health")).json() == {"status": "ok"}
    assert (await site.chat(max_tokens=1)).status_code == 200


async def test_props_slots_and_root_tell_the_state(shared: Site) -> None:
    props = (await shared.client.get("/props")).json()
    assert props["numerics"] == {"mode": "exact"}
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] == 4
    assert "im_start" in props["chat_template"]
    assert (props["bos_token"], props["eos_token"]) == ("", "<|im_end|>")
    assert props["modalities"] == {"vision": False, "audio": False}, "llama.cpp's clients ask before they send an image"
    slots = (await shared.client.get("/slots")).json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert (await shared.client.get("/slots?fail_on_no_slot=1")).status_code == 200
    head = await shared.client.head("/")
    assert head.status_code == 200
    assert head.content == b""
    assert (await shared.client.get("/")).json()["status"] == "ok"


async def test_slots_can_say_that_none_is_free(site: Site) -> None:
    site.door.busy = site.door.slots
    assert (await site.client.get("/slots?fail_on_no_slot=1")).status_code == 503


async def test_metrics_are_prometheus_text(folder: Path) -> None:
    async with served(folder) as site:
        await check_metrics(site)


async def check_metrics(site: Site) -> None:
    site.metrics.observe_stage("Prefilling", 0.2)
    report = Report(10, 4, "host", "diverged_at:4", 3, decode_steps=2, proposed=4, accepted=1)
    site.metrics.count_closed(Closed("stop", report, "", {}))
    site.metrics.set_gauges(queue=2, slots_busy=1, slots=4)
    await site.client.get("/nothing%0a/such")
    response = await site.client.get("/metrics")
    lines = response.text.splitlines()
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        'rekindle_stage_seconds_count{state="Prefilling"} 1.0',
        'rekindle_requests_total{finish="stop"} 1.0',
        'rekindle_tokens_total{kind="cached"} 4.0',
        'rekindle_prefix_hits_total{tier="host"} 1.0',
        'rekindle_prefix_misses_total{reason="diverged_at"} 1.0',
        'rekindle_draft_tokens_total{outcome="rejected"} 3.0',
        "rekindle_queue_length 2.0",
        'rekindle_slots{use="free"} 3.0',
        'rekindle_http_responses_total{path="other",status="404"} 1.0',
    ):
        assert line in lines


@pytest.mark.parametrize("text", ["", "Hello 😀 <|im_start|>", "a\0b"])
async def test_tokenize_and_detokenize_are_inverse(shared: Site, text: str) -> None:
    tokens = (await shared.post("/tokenize", {"content": text})).json()["tokens"]
    assert 1 not in tokens
    assert (await shared.post("/detokenize", {"tokens": tokens})).json() == {"content": text}


async def test_tokenize_can_parse_control_tokens_and_show_pieces(shared: Site) -> None:
    body = {"content": "<|im_start|>😀", "parse_special": True, "with_pieces": True}
    tokens = (await shared.post("/tokenize", body)).json()["tokens"]
    assert tokens[0] == {"id": 1, "piece": "<|im_start|>"}
    assert all(isinstance(token["piece"], str | list) for token in tokens)
    shown = (await shared.post("/detokenize", {"tokens": [token["id"] for token in tokens]})).json()
    assert shown == {"content": "<|im_start|>😀"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "$.content"),
        ("/tokenize", {"content": 5}, "$.content"),
        ("/detokenize", {}, "$.tokens"),
        ("/detokenize", {"tokens": "x"}, "$.tokens"),
        ("/detokenize", {"tokens": [2**40]}, "$.tokens[0]"),
        ("/apply-template", {"messages": []}, "$.messages"),
    ],
)
async def test_wrong_bodies_are_named_here_too(shared: Site, path: str, body: dict, param: str) -> None:
    response = await shared.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
