"""Tests of compression on a real server: long prompts are answered, an answer says what was left out, and a trace
replays it.

The demo scores its own prompts. That is never quicker, so `auto` stops doing it for prompts that fit. A prompt that
does not fit is compressed all the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import demo
from engine.__main__ import main
from engine.core.replay import replay_file
from tests.e2e.prepared import refused, serving
from tests.e2e.server import Running

CONTEXT = 512
LINES = "\n".join(f"Line {at} says {at * 37 % 101}." for at in range(110))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(recorded: Path) -> Iterator[Running]:
    how = ("--prefill-drafter", "demo", "--prefill-compression", "auto", "--prefill-keep-ratio", "0.2")
    with serving(*how, "--max-ctx", str(CONTEXT), "--slots", "2", "--paranoid", "--trace", str(recorded)) as running:
        yield running


def asked(server: Running, content: str = LINES, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    response = server.chat(content, **{"max_tokens": 8, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    return body, body["rekindle"]["compression"]


def test_a_prompt_of_twice_the_context_is_answered(server: Running) -> None:
    body, shown = asked(server)
    sent = body["usage"]["prompt_tokens"]
    assert sent >= 2 * CONTEXT
    assert shown["original_tokens"] == sent
    assert shown["why"] is None
    assert shown["kept_tokens"] == sum(stop - start for start, stop in shown["spans"]) <= sent * 0.2
    assert shown["forced_spans"][-1][1] == sent, "the opening of the answer"
    assert shown["time_ms"] > 0
    assert body["choices"][0]["message"]["content"]
    assert body["rekindle"]["stages_ms"]["Compressing"] > 0


def test_the_same_prompt_keeps_the_same_and_gets_the_same_answer_while_others_decode(server: Running) -> None:
    (first, shown), (again, same) = asked(server), asked(server)
    for name in ("spans", "forced_spans", "kept_tokens"):
        assert shown[name] == same[name]
    said = [body["choices"][0]["message"]["content"] for body in (first, again)]
    assert said[0] == said[1]
    assert again["rekindle"]["restored_tokens"] > 0, "what was computed of it is found again"


def test_what_is_served_is_a_prompt_like_any_other(server: Running) -> None:
    """The kept tokens, sent as a prompt of their own, get the same answer."""
    words = "\n".join(f"{at} is {at * 7 % 13}." for at in range(100))
    fields = {"max_tokens": 8, "temperature": 0, "compression": {"mode": "always", "keep_ratio": 0.5}}
    (sent,) = [server.client.post("/tokenize", json={"content": words}).json()["tokens"]]
    assert len(sent) > CONTEXT
    body = server.complete(sent, **fields).json()
    shown = body["rekindle"]["compression"]
    kept = [token for start, stop in shown["spans"] for token in sent[start:stop]]
    assert len(kept) == shown["kept_tokens"] < len(sent)
    plain = server.complete(kept, max_tokens=8, temperature=0, compression={"mode": "off"}).json()
    assert plain["choices"][0]["text"] == body["choices"][0]["text"]


def test_what_may_not_be_touched_is_served_as_it_is_and_says_why(server: Running) -> None:
    always = {"compression": {"mode": "always"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert asked(server, "Hello", tools=[tool], **always)[1]["why"] == "tools"
    assert asked(server, "Hello", response_format={"type": "json_object"}, **always)[1]["why"] == "structured"
    assert asked(server, "Hello")[1]["why"] == "below_threshold"
    assert asked(server, "Hello", compression={"mode": "off"})[1] is None
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    body = server.client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1, **always}).json()
    assert body["rekindle"]["compression"]["why"] == "continues"


def test_what_does_not_fit_even_then_is_refused_with_its_counts(server: Running) -> None:
    response = server.chat(LINES, compression={"keep_ratio": 0.9})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["n_ctx"]) == (400, "context_length_exceeded", CONTEXT)
    assert error["n_kept_tokens"] > CONTEXT


def test_the_drafter_stays_between_requests(server: Running) -> None:
    asked(server)
    props = server.client.get("/props").json()
    assert props["pflash"]["drafter"] == "demo"
    assert (props["pflash"]["mode"], props["pflash"]["keep_ratio"]) == ("auto", 0.2)
    shown = props["runtime"]["draft_residency"]["drafter"]
    assert (shown["state"], shown["after_use"], shown["leases"]) == ("loaded", "keep", 0)
    assert shown["loads"] == shown["parks"] == 0, "it was loaded at the start, and nothing moved it since"
    held = props["memory"]["models"]["drafter"]["device"]
    assert held == shown["device_bytes"] > 0


def test_needles_are_looked_for_in_texts_whole_compressed_and_shortened_blindly(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--lengths", "300", "--depths", "0.5", "--needles", "1,2", "--questions", "1", "--keep", "0.3", "--json")
    assert main(["bench", "needles", "--url", server.url, *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["found"].keys() == {"whole", "compressed", "last lines", "random lines"}
    assert [one["error"] for one in shown["questions"]] == [""] * 8
    kept = {one["method"]: one for one in shown["questions"] if one["needles"] == 1}
    assert 0.1 < kept["compressed"]["kept"] <= 0.31
    assert kept["compressed"]["tokens"] == kept["whole"]["tokens"] > 2 * kept["last lines"]["tokens"]


def test_all_of_it_replays(server: Running, recorded: Path) -> None:
    asked(server)
    assert server.stop() == 0
    assert replay_file(recorded).is_complete


def test_a_drafter_with_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(demo.FOLDER, folder, ignore=shutil.ignore_patterns("hybrid", "draft", "__pycache__"))
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    vocab = described["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(described), encoding="utf-8")
    said = refused("serve", "--port", "0", "--prefill-drafter", str(folder))
    assert said.startswith(f"rekindle: --prefill-drafter {folder}: its tokenizer is another than the model's")


def test_a_drafter_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    said = refused("serve", "--port", "0", "--prefill-drafter", str(tmp_path / "none"))
    assert "--prefill-drafter" in said
    assert "no such folder" in said
