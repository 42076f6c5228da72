"""Tests that the rows which a scope keeps come back after a kill, that no others do, and that answers do not depend on
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_restart import cache, kill, written

SYSTEM = "You help with a small project. " + " ".join(f"Rule {n}: keep file {n * 37 % 101} short." for n in range(40))
BLOCK_SIZE = 64


def ask(server: Running, content: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    asked = {"messages": messages, "max_tokens": 8, "temperature": 0.7, "seed": 3, **fields}
    body = server.client.post("/v1/chat/completions", json=asked).json()
    return body["choices"][0]["message"]["content"], body["rekindle"]


def list_report_lines(server: Running) -> list[str]:
    """The log's lines about scopes."""
    return [line.partition(": auto:4 ")[2] for line in server.errors if ": auto:4 " in line]


@pytest.mark.timeout(300)
def test_auto_keeps_what_sessions_of_one_agent_share(tmp_path: Path) -> None:
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64", "--paranoid", "--slots", "1")
    words = (*words, "--disk-prefix-cache", "auto:4")
    with serving(*words) as server:
        assert cache(server)["disk_policy"] == "auto:4"
        _, how = ask(server, "What is a grain?")
        assert how["prefix_cache"] == {
            "scope": "auto:4",
            "shared": 0,
            "selected": 0,
            "kept": 0,
            "reason": "nothing_shared",
            "followed": 0,
            "follow_compute_ms": 0.0,
            "follow_wait_ms": 0.0,
            "miss": {"reason": "empty_store"},
        }
        _, how = ask(server, "Name three colours.")
        decided = how["prefix_cache"]
        assert how["tier"] == "device"
        assert decided["reason"] == "boundary"
        assert decided["shared"] >= decided["selected"] > 300
        assert decided["kept"] == decided["selected"] // BLOCK_SIZE * BLOCK_SIZE
        now = written(server)
        kept = [line for line in list_report_lines(server) if f"kept={decided['kept']}" in line]
        assert len(kept) == 1
        assert " window=4 recent=2; " in kept[0]
        _, how = ask(server, "Name three colours.", prefix_cache={"scope": "off"})
        assert how["prefix_cache"] | {"scope": "off", "kept": 0, "reason": "scope_off"} == how["prefix_cache"]
        kill(server)
    with serving(*words, trusting=True) as server:
        assert cache(server)["entries"] == now["entries"]
        cold, how = ask(server, "Why is the sky blue?", prefix_cache={"scope": "off"})
        assert how["restored_tokens"] == 0
        ask(server, "x", messages=[{"role": "user", "content": "Something else in the only slot."}])
        warm, how = ask(server, "Why is the sky blue?")
        assert (warm, how["tier"], how["restored_tokens"]) == (cold, "disk", decided["kept"])
        assert how["prefix_cache"]["kept"] == decided["kept"], "the recent prompts outlive the process"


# What each scope keeps is in `tests/states/test_scope.py`; here one comes back after a kill.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_number_keeps_so_many_tokens_whatever_they_are(tmp_path: Path) -> None:
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64", "--paranoid")
    with serving(*words, "--disk-prefix-cache", "200") as server:
        assert cache(server)["disk_policy"] == "200"
        _, how = ask(server, "What is a grain?")
        assert (how["prefix_cache"]["selected"], how["prefix_cache"]["kept"]) == (200, 192)
        written(server)
        _, how = ask(server, "And now?", prefix_cache={"scope": 10_000})
        assert (how["prefix_cache"]["reason"], how["prefix_cache"]["kept"]) == ("longer_than_prompt", 0)
        kill(server)
    with serving(*words, "--disk-prefix-cache", "full", trusting=True) as server:
        _, how = ask(server, "And now?")
        assert (how["tier"], how["restored_tokens"]) == ("disk", 192)
        assert how["prefix_cache"]["scope"] == "full"
        assert how["prefix_cache"]["kept"] > 300
