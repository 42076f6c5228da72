"""Prompts survive the process: killed, restarted, and answered with the same tokens from what was kept."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
import zstandard

from tests.e2e.prepared import refused, serving
from tests.e2e.server import Running, plainly

LONG = [10 + 37 * n % 4000 for n in range(1500)]
PROMPT = LONG[:600]  # the default keeps prompts from 512 tokens on
ASKED = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "logprobs": 2}


def ask(server: Running, prompt: list[int] = PROMPT) -> tuple[dict, dict]:
    answer = server.complete(prompt, **ASKED).json()
    return answer["choices"][0], answer["rekindle"]


def get_fingerprint(server: Running) -> str:
    """Return the `system_fingerprint` of an answer to a prompt that is too short to be kept."""
    return server.complete(PROMPT[:8], max_tokens=1).json()["system_fingerprint"]


def cache(server: Running) -> dict:
    return server.client.get("/props").json()["full_cache"]


def written(server: Running, least: int = 1) -> dict:
    """Return the figures of the cache, once nothing is left to be written: a snapshot is taken after the answer."""
    deadline = time.monotonic() + 60
    while True:
        props = server.client.get("/props").json()
        now = props["full_cache"]
        if now["entries"] >= least and not now["queued_bytes"] and not props["requests"]:
            return now
        assert time.monotonic() < deadline, props
        time.sleep(0.02)


def first_rows(folder: Path) -> Path:
    """The file with the first rows of the prompt."""
    for file in folder.glob("*.safetensors.zst"):
        with zstandard.ZstdDecompressor().stream_reader(file.read_bytes()) as reader:
            head = reader.read(8)
            about = json.loads(reader.read(int.from_bytes(head, "little")))["__metadata__"]
        if (about["kind"], about["start"]) == ("rows", "0"):
            return file
    raise AssertionError("there is none")


def kill(server: Running) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(10)


@pytest.mark.timeout(300)
def test_a_conversation_goes_on_by_its_response_id_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    words = ("--kv-cache-dir", str(folder))
    asked = {"input": "What is Rekindle?", "max_output_tokens": 8, "temperature": 0}
    with serving(*words) as server:
        first = server.client.post("/v1/responses", json=asked).json()
        deadline = time.monotonic() + 60
        while not (folder / "responses" / first["id"]).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        kill(server)
    with serving(*words) as server:
        assert server.client.get(f"/v1/responses/{first['id']}").json() == first
        again = {**asked, "input": "And why?", "previous_response_id": first["id"]}
        second = server.client.post("/v1/responses", json=again).json()
        assert second["status"] == "incomplete"
        whole = [{"role": "user", "content": asked["input"]}, *first["output"], {"role": "user", "content": "And why?"}]
        sent = server.client.post("/v1/responses", json={**asked, "input": whole}).json()
        assert sent["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        assert sent["output"][0]["content"] == second["output"][0]["content"]


@pytest.mark.timeout(300)
def test_a_killed_server_starts_warm_and_says_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    words = ("--kv-cache-dir", str(folder), "--paranoid", "--threads", "2")  # whatever a worker has of the cores
    with serving(*words, start=plainly) as server:  # with a seed of hashes that the others do not have
        cold, how = ask(server)
        assert (how["restored_tokens"], how["tier"], how["miss"]) == (0, "none", "empty_store")
        written(server)
        fingerprint = get_fingerprint(server)
        kill(server)
    with serving(*words, trusting=True) as server:
        assert cache(server)["entries"] >= 2
        warm, how = ask(server)
        assert warm == cold, how
        assert how["restored_tokens"] >= len(PROMPT) - 64
        assert how["tier"] == "disk"
        assert cache(server)["hits"] == {"disk": 1}
        again, how = ask(server)
        assert (again, how["tier"]) == (cold, "device")
        assert get_fingerprint(server) == fingerprint
        file = first_rows(folder)
        assert server.stop() == 0
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with serving(*words, trusting=True) as server:
        damaged, how = ask(server)
        assert damaged == cold, how
        assert (how["restored_tokens"], how["miss"]) == (0, "restore_broken")
        assert cache(server)["quarantined"] == 1


@pytest.mark.timeout(300)
def test_a_salt_and_an_api_key_keep_prompts_apart_over_a_restart(tmp_path: Path) -> None:
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--paranoid")

    def restored(server: Running, key: str, **more: object) -> int:
        headers, asked = {"x-api-key": key}, {"prompt": PROMPT, **ASKED, **more}
        return server.client.post("/v1/completions", json=asked, headers=headers).json()["rekindle"]["restored_tokens"]

    with serving(*words) as server:
        assert restored(server, "", cache_salt="mine") == 0
        written(server)
        kill(server)
    with serving(*words, trusting=True) as server:
        assert restored(server, "") == 0
        assert restored(server, "", cache_salt="yours") == 0
        assert restored(server, "", cache_salt="mine") >= len(PROMPT) - 64
        kill(server)
    keys = ("--api-key", "one", "--api-key", "two")
    with serving(*words, *keys, trusting=True) as server:
        assert restored(server, "one") == 0, "what was kept before belongs to neither"
        assert restored(server, "two") == 0
        assert restored(server, "one", cache_salt="mine") == 0
        assert restored(server, "one") >= len(PROMPT) - 64


@pytest.mark.timeout(300)
def test_a_miss_explains_itself_in_a_slot_and_after_a_restart(tmp_path: Path) -> None:
    words = ("--kv-cache-dir", str(tmp_path / "kv"))
    rules = "".join(f"Rule {number}: a function has a name that says what it does. " for number in range(24))

    def missed(server: Running, day: str) -> dict:
        system = {"role": "system", "content": f"{rules}It is {day}. {rules}"}
        messages = [system, {"role": "user", "content": "Hello"}]
        asked = {"messages": messages, "max_tokens": 2, "temperature": 0}
        return server.client.post("/v1/chat/completions", json=asked).json()["rekindle"]["prefix_cache"]["miss"]

    with serving(*words) as server:
        assert missed(server, "Monday") == {"reason": "empty_store"}
        explained = missed(server, "Friday")
        assert (explained["message"], explained["role"], explained["kept_in"]) == (0, "system", "device")
        assert "It is Friday. Rule 0" in explained["sent"]
        assert "It is Monday. Rule 0" in explained["kept"]
        assert server.client.get("/debug/misses").json()["data"][0]["sent"] == explained["sent"]
        assert missed(server, "Friday") is None
        written(server)
        kill(server)
    with serving(*words) as server:
        explained = missed(server, "Sunday")
        assert (explained["message"], explained["role"], explained["kept_in"]) == (0, "system", "disk")
        assert "It is Sunday. Rule 0" in explained["sent"]
        assert "day. Rule 0" in explained["kept"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_whatever_a_start_finds_damaged_is_counted_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has a home of its own. Of the proofs only the draft's is damaged: another outcome of the target's
    would have other files.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-codec", "auto")
    with serving(*words, start=plainly) as server:
        ask(server)
        server.complete(PROMPT[::-1], **ASKED, prefix_cache={"scope": "auto"})  # recent prompts are compared, so kept
        assert set(damaged(server).values()) == {0}
        written(server)
        file = first_rows(tmp_path / "kv")
        assert server.stop() == 0
    harmed = {
        "numerics": [file for file in tmp_path.glob("rekindle/numerics/*") if "numerics_class" not in file.read_text()],
        "rates": list(tmp_path.glob("rekindle/rates/*.json")),
        "journal": [tmp_path / "kv" / "journal"],
        "recent": list(tmp_path.glob("kv/recent-*")),
        "codec": [tmp_path / "kv" / "auto-codec"],
        "run": [file],
    }
    for files in harmed.values():
        assert files
        for one in files:
            one.write_bytes(one.read_bytes()[:-9])
    with serving(*words, start=plainly) as server:
        end = time.monotonic() + 60  # the writer's thread looks at what the journal does not know
        while damaged(server)["run"] < 1 and time.monotonic() < end:
            time.sleep(0.1)
        assert damaged(server) == {kind: len(files) for kind, files in harmed.items()}
        assert server.client.get("/props").json()["damaged"] == damaged(server)
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.errors)


def damaged(server: Running) -> dict[str, int]:
    """Files, by kind, as /metrics tells."""
    text = server.client.get("/metrics").text
    found = re.findall(r'^rekindle_damaged_files_total\{what="(\w+)"\} (\d+)', text, re.MULTILINE)
    return {kind: int(count) for kind, count in found}


@pytest.mark.timeout(300)
def test_host_memory_gives_back_what_a_slot_lost(tmp_path: Path) -> None:
    with serving("--slots", "1", "--paranoid", trusting=True) as server:
        assert cache(server)["disk_policy"] == "off"
        cold, how = ask(server)
        assert how["prefix_cache"]["reason"] != "disk_off"
        how = server.complete(PROMPT, **ASKED, prefix_cache={"scope": "full"}).json()["rekindle"]
        assert how["prefix_cache"]["reason"] == "disk_off", "a request cannot turn it on"
        ask(server, PROMPT[::-1])
        warm, how = ask(server)
        assert warm == cold
        assert how["tier"] == "host"
        assert how["restored_tokens"] >= len(PROMPT) - 64
        assert cache(server)["hits"] == {"host": 1}


@pytest.mark.timeout(300)
def test_a_folder_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    with serving("--kv-cache-dir", str(tmp_path / "kv")):
        line = refused("serve", "--port", "0", "--kv-cache-dir", str(tmp_path / "kv"))
    assert "--kv-cache-dir" in line
    assert "another process" in line


# By default `tests/store/disk/test_disk.py` lets each step of a write fail.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_full_disk_costs_no_request(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: the server may write, but less than the smallest file of this
    prompt takes, 0.89 MB if `auto` chooses zstd."""
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        context = serving("--kv-cache-dir", str(tmp_path / "kv"), "--host-cache-budget", "0", start=plainly)
        server = context.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    try:
        cold, _ = ask(server, LONG)
        deadline = time.monotonic() + 60
        while not cache(server)["write_errors"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ask(server, LONG)[0] == cold
        assert written(server, 0)["entries"] == 0  # the second answer's file has failed as well by now
        assert not list((tmp_path / "kv").glob("*.zst"))
        assert sum("cannot write to disk" in line for line in server.errors) == 1
    finally:
        context.__exit__(None, None, None)
