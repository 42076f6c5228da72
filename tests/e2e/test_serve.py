"""The command as a person runs it: the demo model, a real socket, signals, traces."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from adapters import demo
from engine.__main__ import main
from tests.e2e.prepared import refused, serving
from tests.e2e.server import Running, plainly
from tests.plain_http import NO_TLS

CODE = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving("--paranoid") as running:
        yield running


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_curl_line_that_is_printed_works(server: Running) -> None:
    words = shlex.split(server.lines[1])
    assert words[0] == "curl"
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    done = subprocess.run([*words, "--silent", "--max-time", "30"], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"].strip()
    assert answer["model"] == "demo"


def test_the_demo_knows_what_it_is(server: Running) -> None:
    """However it is drawn: its own sampling settings hold for a request that does not say."""
    settings = server.client.get("/props").json()["default_generation_settings"]
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (0.7, 20, 0.8)
    answer = server.chat("What is Rekindle?", n=3).json()
    for choice in answer["choices"]:
        assert "Rekindle" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


def test_several_choices_differ(server: Running) -> None:
    choices = server.complete(CODE, n=3, max_tokens=40, seed=1).json()["choices"]
    assert len({choice["text"] for choice in choices}) > 1
    greedy = server.complete(CODE, n=3, max_tokens=40, temperature=0).json()["choices"]
    assert len({choice["text"] for choice in greedy}) == 1


def test_progress_reaches_its_total(server: Running) -> None:
    body = {"prompt": CODE * 90, "max_tokens": 2, "return_progress": True, "stream": True}
    reports = [
        chunk["prompt_progress"]
        for chunk in events(server.client.post("/v1/completions", json=body))
        if "prompt_progress" in chunk
    ]
    assert len(reports) > 2
    assert reports[-1]["processed"] == reports[-1]["total"]


def test_streamed_and_whole_answers_are_the_same_text(server: Running) -> None:
    for more in ({"temperature": 0}, {"seed": 6}, {"temperature": 0.9, "seed": 7}):
        whole = server.complete(CODE, max_tokens=40, **more).json()["choices"][0]["text"]
        streamed = events(server.complete(CODE, max_tokens=40, stream=True, **more))
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed if chunk["choices"]) == whole


def test_a_repeated_prompt_is_restored_and_the_answer_is_the_same(server: Running) -> None:
    prompt = "# a module about numbers\n" + "\n".join(f"number_{n} = {n * n}" for n in range(60))
    cold = server.complete(prompt, max_tokens=24, seed=1).json()
    warm = server.complete(prompt, max_tokens=24, seed=1).json()
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= warm["usage"]["prompt_tokens"] - 65
    assert warm["rekindle"]["restored_tokens"] == cached
    assert warm["rekindle"]["tier"] == "device"


def test_four_at_once_give_what_each_gives_alone(server: Running) -> None:
    prompts = [f"def function_{n}(value):\n    return" for n in range(4)]
    settings = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "seed": 2, "top_p": 0.9},
        {"seed": 3},
    ]
    alone = [
        server.complete(p, max_tokens=30, **s).json()["choices"][0]["text"]
        for p, s in zip(prompts, settings, strict=True)
    ]
    together: dict[int, str] = {}

    def one(n: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60, verify=NO_TLS) as client:
            body = {"prompt": prompts[n], "max_tokens": 30, **settings[n]}
            together[n] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n] for n in range(4)] == alone


def test_a_client_that_leaves_stops_its_work(server: Running) -> None:
    with server.client.stream("POST", "/v1/completions", json=server.endless()) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 60
    while any(slot["request"] for slot in server.client.get("/slots").json()):
        assert time.monotonic() < deadline, "the request goes on without its client"
        time.sleep(0.02)


def test_a_long_prefill_does_not_starve_a_stream(server: Running) -> None:
    long = "\n".join(f"line_{n} = {n * 7919 % 1000}" for n in range(300))
    body = {"prompt": long, "max_tokens": 1, "return_progress": True, "stream": True}
    heard, chunks = 0, list[int]()  # of the stream; by how much of the prompt was computed

    def prefill() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            chunks.extend(heard for line in response.iter_lines() if "prompt_progress" in line)

    other = threading.Thread(target=prefill)
    with server.client.stream("POST", "/v1/completions", json=server.endless()) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        other.start()
        while other.is_alive():
            next(lines)
            heard += 1
    assert len(chunks) > 10
    assert chunks[-1] - chunks[0] > len(chunks) // 3, (
        "a decoding stream waited for the whole prefill of another request"
    )


def test_props_tell_how_numbers_come_about(server: Running) -> None:
    numerics = server.client.get("/props").json()["numerics"]
    assert numerics["mode"] == "exact"
    assert numerics["buckets"]
    assert server.client.get("/health").status_code == 200
    assert "rekindle_stage_seconds" in server.client.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": CODE, "temperature": -1}, 400, "temperature"),
        ({"prompt": CODE, "model": "gpt-5"}, 404, "gpt-5"),
        ({"prompt": "x " * 80_000}, 400, "context"),
        ({"prompt": [5000]}, 400, "prompt"),
        ({}, 400, "prompt"),
    ],
)
def test_mistakes_are_answered_and_the_server_goes_on(server: Running, body: dict, status: int, said: str) -> None:
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert said in (error["param"] or "") + error["message"]
    assert server.complete(CODE, max_tokens=2).status_code == 200


@pytest.mark.timeout(300)
def test_a_session_is_recorded_drained_replayed_and_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "session.jsonl.zst"
    with serving("--trace", str(trace), "--slots", "2", "--grace", "20") as running:
        first = running.complete(CODE * 30, max_tokens=12).json()
        running.complete(CODE * 30 + first["choices"][0]["text"], max_tokens=12, temperature=0.7, seed=3)
        finished: list[httpx.Response] = []
        long = threading.Thread(
            target=lambda: finished.append(
                httpx.post(f"{running.url}/v1/completions", json={"prompt": CODE, "max_tokens": 150}, timeout=60)
            )
        )
        long.start()
        while not any(slot["request"] for slot in running.client.get("/slots").json()):
            time.sleep(0.01)
        assert running.stop() == 0
        long.join()
        assert finished[0].status_code == 200, "a drain lets running requests finish"
    assert main(["replay", str(trace)]) == 0
    assert main(["replay", str(trace), "--execute"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("identical: ")
    assert " tokens executed" in shown[1]


def test_a_second_signal_stops_at_once() -> None:
    with (
        serving("--grace", "60") as running,
        running.client.stream("POST", "/v1/completions", json=running.endless()) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        asked = {"prompt": CODE, "max_tokens": 1}
        while httpx.post(f"{running.url}/v1/completions", json=asked, timeout=30).status_code != 503:
            time.sleep(0.02)
        assert running.process.poll() is None
        assert running.stop() == 128 + signal.SIGTERM  # within half a minute, and not when the stream ends
        with pytest.raises(httpx.TransportError):
            list(lines)


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", "--port", str(port), start=plainly)
    assert str(port) in said
    assert "in use" in said


def broken(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(demo.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def test_a_truncated_checkpoint_is_one_line(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert shard.name in refused("serve", str(folder))


def test_an_unknown_model_type_is_one_line(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mystery"}))
    said = refused("serve", str(folder))
    assert "mystery" in said
    assert "qwen3" in said


def test_a_missing_tokenizer_and_a_missing_folder_are_one_line(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused("serve", str(folder))
    assert "no such folder" in refused("serve", str(tmp_path / "nowhere"))


def test_a_device_that_is_not_there_is_one_line() -> None:
    assert "cuda:97" in refused("serve", "--device", "cuda:97")
