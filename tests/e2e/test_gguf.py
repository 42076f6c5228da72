"""The demo as a GGUF file, served: its folder's answers, and the same ones cold, warm, killed and started again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from adapters import demo
from tests.e2e.prepared import refused, serving
from tests.e2e.server import Running
from tests.e2e.test_families import PROMPT, answers
from tests.e2e.test_restart import kill, written
from tests.models.ggufs import write_gguf

QUESTION = "What is Rekindle?"


def chatted(server: Running) -> dict:
    return server.chat(QUESTION, temperature=0, max_tokens=24).json()["choices"][0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [pytest.param(Kind.F16, marks=pytest.mark.long), Kind.Q8_0])
def test_a_file_is_served_like_a_folder(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / f"demo-{kind.name}.gguf", demo.FOLDER, kind, tokenizer="smollm")
    dtype = "float16" if kind == Kind.F16 else "auto"
    plain = ("--dtype", dtype, "--paranoid", "--max-ctx", "1024", "--draft", "none")
    words = (str(path), "--kv-cache-dir", str(tmp_path / "kv"), *plain)
    with serving(*words) as server:
        assert server.client.get("/v1/models").json()["data"][0]["id"] == f"demo-{kind.name}"
        cold, how = answers(server)
        assert how[0]["restored_tokens"] == 0
        warm, how = answers(server)
        assert warm == cold
        assert (how[0]["tier"], how[0]["restored_tokens"] >= len(PROMPT) - 64) == ("device", True)
        said = chatted(server)
        written(server)
        kill(server)
    with serving(*words, trusting=True) as server:
        again, how = answers(server)
        assert again == cold
        assert (how[0]["tier"], how[0]["restored_tokens"] >= len(PROMPT) - 64) == ("disk", True)
        assert chatted(server) == said
    if kind == Kind.F16:  # which holds all that the demo's own weights say
        with serving("demo", *plain) as server:
            assert answers(server)[0] == cold
            assert chatted(server) == said


def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", demo.FOLDER, Kind.Q8_0)
    line = refused("serve", str(path))
    accepted = "'gpt2', which is byte-level BPE, and 'llama' and 'gemma4', which are SentencePiece"
    assert line.endswith(f"{path}: tokenizer.ggml.model is missing; accepted: {accepted}")
    short = tmp_path / "short.gguf"
    shutil.copy(path, short)
    with short.open("r+b") as file:
        file.truncate(1 << 20)
    assert "ends past the end of the file" in refused("serve", str(short))
