"""Bodies that are made to cost, sent to the demo over HTTP: how long each takes, what memory the server needs for it,
and how long the requests of others take meanwhile.

    python -m benchmarks.hostile_bodies --mib 31

Each body is sent three times: the longest answer and the highest peak count, and what others waited all the while.

Goal: an answer within 2 s and ten times the body's size of memory, others' p99 at most 100 ms.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table
from tests.e2e.server import Running, serving

MIB = 1 << 20
SMALL = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello"}
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body."""

    def filled(unit: str, around: str = '{"prompt": [%s]}') -> bytes:
        return (around % (unit * (size // len(unit)))[:-1]).encode()

    def chat(content: str, role: str = "user") -> bytes:
        return json.dumps({"messages": [{"role": role, "content": content}]}).encode()

    text = "The quick brown fox jumps over the lazy dog. " * (size // 45)
    wide = json.dumps({"prompt": text[:-4] + "\U0001f600"}, ensure_ascii=False).encode()
    yield "one text", PLAIN, json.dumps({"prompt": text}).encode()
    yield "one word", PLAIN, json.dumps({"prompt": "a" * size}).encode()
    yield "text with control tokens parsed", PLAIN, json.dumps({"prompt": text, "parse_special": True}).encode()
    yield "wide characters", PLAIN, wide
    yield "escaped characters", PLAIN, json.dumps({"prompt": "\u6771" * (size // 6)}).encode()
    yield "a chat", CHAT, chat(text)
    yield "a chat of an assistant", CHAT, chat(text, "assistant")
    yield "a chat of thoughts", CHAT, chat(f"<think>{text}</think>", "assistant")
    yield "many messages", CHAT, filled('{"role":"user","content":"x"},', '{"messages": [%s]}')
    yield "/tokenize", "/tokenize", json.dumps({"content": text}).encode()
    yield "[[5], ...]", PLAIN, filled("[5],")
    yield "[{}, ...]", PLAIN, filled("{},")
    yield "[[], ...]", PLAIN, filled("[],")
    yield "[5, ...]", PLAIN, filled("5,")
    yield '["", ...]', PLAIN, filled('"",')
    yield "levels", PLAIN, b"[" * (size // 2) + b"]" * (size // 2)
    yield "NaN at the end", PLAIN, json.dumps({"prompt": text}).encode()[:-1] + b', "n": NaN}'
    yield "wide characters, NaN at the end", PLAIN, wide[:-1] + b', "n": NaN}'
    yield "half a surrogate at the end", PLAIN, json.dumps({"prompt": text}).encode()[:-2] + b'\\udfff"}'


class Others:
    """Small requests, one after another, and how long each took."""

    def __init__(self, url: str) -> None:
        self.url, self.took, self.stop = url, list[float](), threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.stop.is_set():
                start = time.perf_counter()
                client.post("/tokenize", json={"content": "a short text"}).raise_for_status()
                self.took.append(time.perf_counter() - start)
                time.sleep(0.002)

    def __enter__(self) -> Others:
        self.thread.start()
        time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def memory(server: Running, name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def several(server: Running, path: str, body: bytes, times: int) -> dict[str, Any]:
    runs = [once(server, path, body) for _ in range(times)]
    waited = sorted(took for run in runs for took in run["others"])
    worst = {name: max(run[name] for run in runs) for name in ("seconds", "peak_x")}
    ends = {"status": runs[-1]["status"], "kept_mib": runs[-1]["kept_mib"], "said": runs[-1]["said"]}
    others = {"others_p99_ms": 1e3 * waited[int(0.99 * len(waited))], "others_longest_ms": 1e3 * waited[-1]}
    each = [{**run, "others": len(run["others"])} for run in runs]
    return {**ends, **worst, **others, "others": len(waited), "runs": each}


def once(server: Running, path: str, body: bytes) -> dict[str, Any]:
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = memory(server, "VmRSS")
    with Others(server.url) as others:
        start = time.perf_counter()
        response = server.client.post(path, content=body, headers={"content-type": "application/json"}, timeout=300)
        seconds = time.perf_counter() - start
    return {
        "status": response.status_code,
        "seconds": seconds,
        "peak_x": (memory(server, "VmHWM") - before) / len(body),
        "kept_mib": (memory(server, "VmRSS") - before) / MIB,
        "others": others.took,
        "said": response.text[:200],
    }


def make_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Make figures of the worst of all bodies."""
    what, at = "bodies made to cost, worst of all", f"{len(rows)} bodies"
    seconds, size, others = (max(row[name] for row in rows) for name in ("seconds", "peak_x", "others_p99_ms"))
    return [
        Figure("service", f"{what}: until it is answered", at, "s", seconds, goal=Goal(at_most=2)),
        Figure("service", f"{what}: memory, times its size", at, "x", size, goal=Goal(at_most=10)),
        Figure("service", f"{what}: p99 of others' requests", at, "ms", others, goal=Goal(at_most=100)),
    ]


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--mib", type=int, default=31)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", default="", help="bodies with this in their name")
    asked = parser.parse_args()
    rows = []
    with serving("--draft", "none") as server:
        for path in (CHAT, PLAIN):
            server.client.post(path, json={**SMALL, "max_tokens": 1}).raise_for_status()  # everything is warm
        for name, path, body in bodies(asked.mib * MIB):
            if asked.only not in name:
                continue
            rows.append({"body": name, "mib": len(body) / MIB, **several(server, path, body, asked.times)})
    shown = [{name: value for name, value in row.items() if name not in ("said", "runs")} for row in rows]
    print_table("Bodies made to cost (goal: 2 s, 10x, others' p99 100 ms)", shown)
    publish(asked, "hostile_bodies", {"rows": rows}, make_figures(rows), "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
