"""The next turn of a long conversation against the same tokens cold, over HTTP: what a prefix hit saves.

    python -m benchmarks.prefix_hit [MODEL] [--device cpu] [--dtype auto] [--tokens 8000] [--more 32] [--rounds 5]

MODEL is what `rekindle serve` takes; without one demo-hybrid. A prompt of random tokens that was never sent before is
answered by one token; the next turn is that prompt and `--more` other tokens: its rows are in the slot.
Another prompt then takes the only slot, and the first one's turn comes once more with other tokens: from host memory.
Seconds are the client's, of the whole request; medians, and the ratios of them.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import ask, listening, wait_until_written
from benchmarks.results import Figure, Goal, publish, slug
from benchmarks.tables import median, print_table

DRAFTLESS = ("--draft", "none")  # a draft reads the prompt, too; one token needs none


def get_cache_report(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what the server says about the source of a prompt's rows."""
    return {"usage": answer["usage"], "rekindle": answer["rekindle"]}


def one_round(client: httpx.Client, draw: random.Random, tokens: int, more: int) -> dict[str, Any]:
    def some(count: int) -> list[int]:
        return [draw.randrange(100, 4000) for _ in range(count)]

    entries = client.get("/props").json()["full_cache"]["entries"]
    prompt = some(tokens)
    first, cold = ask(client, prompt)
    wait_until_written(client, entries)
    again, slot = ask(client, [*prompt, *some(more)])
    ask(client, some(tokens // 2))
    wait_until_written(client, entries)
    restored, host = ask(client, [*prompt, *some(more)])
    answers = {"cold": get_cache_report(first), "slot": get_cache_report(again), "host": get_cache_report(restored)}
    return {"cold": cold, "slot": slot, "host": host, "answers": answers}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("model", nargs="?", default="demo-hybrid")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--more", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        words = ["serve", given.model, "--device", given.device, "--dtype", given.dtype, "--port", "0", "--slots", "1"]
        words += ["--kv-cache-dir", str(home / "kv"), *DRAFTLESS]
        with listening([sys.executable, "-m", "engine", *words], home) as (client, _, _):
            one_round(client, draw, given.tokens, given.more)  # what is done once in a process
            rounds = [one_round(client, draw, given.tokens, given.more) for _ in range(given.rounds)]
    times = {way: median(one[way] for one in rounds) for way in ("cold", "slot", "host")}
    shown = [{"way": way, "ms": 1e3 * took, "cold / this": times["cold"] / took} for way, took in times.items()]
    print_table(f"{given.model}, {given.tokens} tokens and {given.more} more", shown)
    subject, goal = f"{given.model}, {given.dtype}, cold over", Goal(at_least=20)
    at = {way: f"{way}, {given.tokens} tokens" for way in ("slot", "host")}
    figures = [Figure("continued", subject, at[way], "x", times["cold"] / times[way], goal=goal) for way in at]
    publish(given, f"prefix_hit-{slug(subject.partition(', cold')[0])}", {"rounds": rounds}, figures, given.device)


if __name__ == "__main__":
    main()
