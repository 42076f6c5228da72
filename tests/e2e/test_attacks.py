"""Tests of what a hostile checkpoint, client or trace has once done to the real command, and must not do again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from adapters import demo
from engine.__main__ import main
from tests.e2e.prepared import refused, serving
from tests.e2e.server import command
from tests.pairs import one_in


def checkpoint(folder: Path, **files: Any) -> Path:
    """The demo's, with values of its JSON files replaced: `tokenizer={"model": "x"}`."""
    shutil.copytree(demo.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name, changes in files.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


ADDED = json.loads((demo.FOLDER / "tokenizer.json").read_text())["added_tokens"]


@one_in(2, "files")
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config": {"chat_template": "{{ raise_exception('first\nsecond') }}"}}, "first second"),
        ({"tokenizer_config": {"chat_template": '{{ "" }}'}}, "wrote nothing"),
        ({"tokenizer_config": {"chat_template": ""}}, "wrote nothing"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "the chat template does not work"),
        ({"tokenizer": {"added_tokens": [5]}}, "tokenizer.json"),
        ({"tokenizer": {"added_tokens": [*ADDED, {**ADDED[0], "id": 9999, "content": "<|far|>"}]}}, "vocab_size"),
    ],
    ids=[
        "a template that fails",
        "a template that writes nothing",
        "an empty template",
        "a template that is none",
        "a tokenizer of the wrong shape",
        "ids that the model does not have",
    ],
)
def test_a_checkpoint_whose_text_cannot_be_served_is_one_line(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    folder = checkpoint(tmp_path / "broken", **files)
    assert said in refused("serve", "--port", "0", str(folder))


def test_a_configuration_that_is_a_folder_and_a_host_that_is_no_name_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert "cannot listen" in refused("serve", "--port", "0", "--host", "a" * 300)


def test_a_context_that_no_memory_holds_is_one_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "endless", config={"max_position_embeddings": 1 << 24})
    words = ("--port", "0", "--device", "cpu", "--slots", "64", "--max-ctx", str(1 << 24))
    assert "--max-ctx" in refused("serve", *words, str(folder))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "session.jsonl"
    with serving("--trace", str(file), "--slots", "2") as running:
        assert running.complete("def f(x):\n", max_tokens=5).status_code == 200
        assert running.stop() == 0
    return file


@pytest.mark.parametrize(
    "wanted",
    [{"slots": "x"}, {"device": "abc"}, {"dtype": "int8"}, {"chunk": 7}, {"threads": -4}, {"model": 5}],
    ids=lambda wanted: next(iter(wanted)),
)
def test_a_hostile_header_is_not_executed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: dict[str, Any]
) -> None:
    header, *records = trace.read_text().splitlines(keepends=True)
    raw = json.loads(header)
    file = tmp_path / "hostile.jsonl"
    file.write_text(json.dumps({**raw, "config": {**raw["config"], **wanted}}) + "\n" + "".join(records))
    assert main(["replay", str(file), "--execute"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(next(iter(wanted.values()))) in line


def test_an_executed_replay_also_stops_where_it_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--until", "0"]) == 0
    replayed = capsys.readouterr().out
    assert main(["replay", str(trace), "--until", "0", "--execute"]) == 0
    assert capsys.readouterr().out == replayed
    assert json.loads(replayed)["requests"]


def test_an_interrupt_ends_a_server_that_is_only_starting() -> None:
    process = subprocess.Popen(command("serve", "--port", "0"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"starting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in {130, -signal.SIGINT}
    assert b"Traceback" not in errors
