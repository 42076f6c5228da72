"""Shards in real processes: the same answers as without, also after one was killed; and none that is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from effects.job import Job
from engine.loading.background_load import load_target
from engine.settings.options import build_options
from engine.settings.shard_secret import VARIABLE
from engine.settings.user_error import UserError
from tests.e2e.prepared import listening, refused, serving
from tests.e2e.test_restart import kill, written
from tests.e2e.test_speculation import answers, words
from tests.e2e.test_split import compare

ONE, APART = {"device": "cpu"}, {"target_devices": "cpu:0,ipc+cpu:0"}
WORDS = "known to both of them"
CODE = "class Reader:\n    def __init__(self, path):\n        self.path = path\n" * 8


def gone(pid: int) -> bool:
    """Within a while that no test waits for unless something is wrong."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # its parent has died too, so no process has read its status yet
            return True
        time.sleep(0.05)
    return False


# By default the demo is split over processes below, and `test_split.py` splits the hybrid in one.
@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_process_answers_as_none_does_and_each_restores_what_the_other_has_kept(tmp_path: Path) -> None:
    """Rows have 8 bits here, so the process that serves layers keeps them as it is asked to."""
    plans = {"one": ONE | {"kv_dtype": "int8"}, "apart": APART | {"kv_dtype": "int8"}}
    pairs = await compare("demo-hybrid", tmp_path, 2, 8, ("one", "apart", "one"), plans=plans)
    assert pairs == {("one", "apart"), ("one", "one"), ("apart", "one")}


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
async def test_processes_restore_what_others_have_kept_over_hundreds_of_prompts(model: str, tmp_path: Path) -> None:
    three = {"target_devices": "cpu:0,ipc+cpu:0,cpu:0", "target_layer_split": "0.2,0.5,0.3"}
    plans = {"one": ONE, "apart": APART, "alone": {"target_devices": "ipc+cpu:0"}, "three": three}
    starts = ("one", "apart", "alone", "three", "alone", "apart", "one")
    pairs = await compare(model, tmp_path, 50, 32, starts, plans=plans)
    assert {(one, other) for one in plans for other in plans if one != other} <= pairs


@pytest.mark.timeout(300)
def test_a_killed_process_is_started_again_and_none_outlives_the_server(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": CODE, "max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 2}
    words = ("--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "64", "--max-ctx", "1024", "--draft", "none")
    with serving(
        "demo", *words, "--target-devices", "cpu:0,ipc+cpu:0", "--target-layer-split", "3,7", trusting=True
    ) as server:
        assert "  layers=0-2@cpu,3-9@ipc+cpu:0  " in server.lines[0]

        def shown() -> list[dict[str, Any]]:
            return server.client.get("/props").json()["memory"]["shards"]

        here, there = shown()
        assert (here["process"], here["device"], here["layers"]) == (server.process.pid, "cpu", [0, 3])
        assert (there["device"], there["layers"], there["error"]) == ("ipc+cpu:0", [3, 10], "")
        assert there["process"] != here["process"]
        assert there["bytes"]["weights"] > here["bytes"]["weights"] > 0
        assert there["bytes"]["kv"] * 3 == here["bytes"]["kv"] * 7
        cold = server.complete(**body).json()
        written(server)
        os.kill(there["process"], signal.SIGKILL)
        again = server.complete(**body).json()
        assert again["choices"] == cold["choices"]
        assert again["rekindle"]["tier"] in {"host", "disk"}, "idle slots are not believed, what is kept is"
        _, anew = shown()
        assert (anew["restarts"], anew["process"] != there["process"], anew["error"]) == (1, True, "")
        assert [line for line in server.errors if "its process was ended by SIGKILL" in line]
        figures = server.client.get("/metrics").text
        assert 'rekindle_shard_restarts_total{layers="3-9"} 1.0' in figures
        assert 'rekindle_shard_hop_seconds_count{layers="3-9"}' in figures
        kill(server)
        assert gone(there["process"])
        assert gone(anew["process"])
    assert not [line for line in server.errors if "Traceback" in line]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_drafters_process_scores_what_one_here_does_and_comes_again() -> None:
    how = ("--prefill-compression", "always", "--prefill-keep-ratio", "0.3", "--max-ctx", "1024", "--draft", "none")
    with serving("demo", *how, "--prefill-drafter-device", "ipc+cpu:0", trusting=True) as server:

        def shown() -> dict[str, Any]:
            found: dict[str, Any] = server.client.get("/props").json()["memory"]["drafter"]
            return found

        def read_compression(drafted: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = drafted["rekindle"]["compression"]
            return found

        first = shown()
        assert (first["device"], first["error"], first["process"] != server.process.pid) == ("ipc+cpu:0", "", True)
        once = server.chat(CODE, max_tokens=8, temperature=0).json()
        assert read_compression(once)["why"] is None
        assert read_compression(once)["kept_tokens"] < read_compression(once)["original_tokens"]
        os.kill(first["process"], signal.SIGKILL)
        answered = [server.chat(f"{CODE}#{at}", max_tokens=8, temperature=0).json() for at in range(2)]
        assert read_compression(answered[0])["why"] in {"drafter_io", None}, "its death is noticed by the next call"
        assert read_compression(answered[1])["why"] is None
        again = server.chat(CODE, max_tokens=8, temperature=0).json()
        assert again["choices"] == once["choices"]
        anew = shown()
        assert (anew["restarts"], anew["process"] != first["process"]) == (1, True)
        assert 'rekindle_shard_hop_seconds_count{layers="drafter"}' in server.client.get("/metrics").text
        assert server.stop() == 0
        assert gone(first["process"])
        assert gone(anew["process"])


@pytest.mark.timeout(300)
async def test_a_daemon_that_runs_already_serves_who_knows_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"max_ctx": 512, "draft": "none", "disk_prefix_cache": "off", "slots": 1, "quantize": "int8"}
    jobs = [Job(tuple(range(300, 420)), 6)]
    whole = await load_target(build_options(**ONE, **shape))
    plain = words(await answers(whole, jobs))
    await whole.close()
    file = tmp_path / "secret"
    with listening("demo", "--device", "cpu", secret=WORDS, address="tcp://127.0.0.1:0") as (_, address):
        plan = {"target_devices": f"cpu:0,{address}", "shard_secret_file": file}
        file.write_text("something else, just as long", encoding="utf-8")
        with pytest.raises(UserError, match="the secret is another one"):
            await load_target(build_options(**plan, **shape))
        file.write_text(f"{WORDS}\n", encoding="utf-8")
        with pytest.raises(UserError, match="another model: its weights"):
            await load_target(build_options(model="demo-hybrid", **plan, **shape))
        for _ in range(2):  # one server after the other
            target = await load_target(build_options(**plan, **shape))
            assert target.shard.parts[1].peer.dial.name == address
            assert words(await answers(target, jobs)) == plain
            await target.close()
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"set {VARIABLE} or --shard-secret-file"):
        await load_target(build_options(target_devices=f"cpu:0,{address}", **shape))
    with pytest.raises(UserError, match="Connection refused"):
        await load_target(build_options(**plan, **shape))


def test_a_shard_that_cannot_be_had_is_refused_in_a_line(tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    devices = ("serve", "--port", "0", "--target-devices", "cpu,ipc+cpu:0", "--target-shard-ipc-python", python)
    said = refused(*devices)
    assert f"--target-devices: a process for a shard could not be started: {python}: No such file or directory" in said
