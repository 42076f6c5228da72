"""Measures copies of earlier text over HTTP: a server that copies (`--draft suffix`) and one that does not are asked in
turn.

    python -m benchmarks.copies_served [--shape 8b] [--levels 1,16,64] [--rounds 6] [--draft auto] [--again] [--record]
    python -m benchmarks.copies_served --one-server [--shape 8b] [--levels 16] [--rounds 12] [--record]

All servers run at once, and only one of them is asked at a time. --draft auto: the copying one is started with its
defaults. --again: a second server that does not copy says how much of a difference is noise. --one-server: a single
server that copies takes the turns of all three, and in two of them the requests turn proposals off, because two servers
with the same work differ by more than copies cost. Prompts and answers are new text of a model with random weights,
drawn at temperature 1. There are two kinds of it:

* new: all tokens of the vocabulary are drawn, so no three tokens come twice.
* chance: 16 tokens are drawn only. So three tokens that come twice are frequent, and what follows them is seldom right:
  copying loses time. No real text is as bad.

A round asks each server once, and every order of them has its turn. The first round is dropped, because all servers
learn in it. A figure is the median over rounds of the tokens a second with copies over those without. With a second
turn without copies, these are the mean of both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, permutations
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import httpx

from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint
from benchmarks.peer_servers import listen, serve_ours
from benchmarks.results import Figure, Goal, name_shape, publish, slug
from benchmarks.tables import median, print_table
from benchmarks.texts_in_turn import find_interval
from engine.tools.bench.bench_prompts import draw_tokens, make_random

AGAIN = "plain again"
COPIES = "copies"
NOISE = f"{AGAIN}, median x"
KINDS = ("new", "chance")
FEW = range(1000, 1016)  # tokens of the text with chance matches
BIAS = 60  # of these tokens: no other one is drawn
MARGIN = 64  # rows beyond prompt and answer
GOALS = {1: 0.98}  # by streams; else 1
ANSWERS_OF_ONE = 2  # answers of a single stream, so that a turn takes as long as those of many streams


@contextmanager
def serve_all(ways: Mapping[str, str], model: Path, home: Path, slots: int, rows: int) -> Iterator[dict[str, str]]:
    """Start all servers at once, and yield their addresses. ways: the draft of each."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(way: str) -> str:
            own = home / way
            own.mkdir()
            server = serve_ours(
                model,
                Path(__file__).parents[1],
                ("--draft", ways[way], "--disk-prefix-cache", "off", "--host-cache-budget", "0"),
                sized=True,
            )
            url, ready = stack.enter_context(listen(server, slots, rows, own))
            print(f"{way}: ready after {ready:.1f} s", flush=True)
            return url

        yield dict(zip(ways, threads.map(start, ways), strict=True))


def make_bodies(
    kind: str, streams: int, given: argparse.Namespace, seed: str, own_fields: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Make the requests of one turn: of each stream one, or several of a single one. own_fields: of all of them."""
    draw = make_random(seed)
    bodies = list[dict[str, Any]]()
    for _ in range(streams):
        prompt = draw_tokens(draw, given.prompts) if kind == "new" else tuple(draw.choices(FEW, k=given.prompts))
        # Equal seeds would draw equal tokens, since the prompt changes the logits of such a model by little.
        own = {"seed": draw.randrange(1 << 31), "temperature": 1.0}
        body = {"prompt": list(prompt), "max_tokens": given.answers, **own, **own_fields}
        if kind == "chance":
            body["logit_bias"] = {str(token): BIAS for token in FEW}
        bodies.append(body)
    return bodies


async def ask_all(url: str, batches: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Send the requests of each batch at once, one batch after the other. Return the speed, and what was copied."""
    found: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=max(map(len, batches)))
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(body: Mapping[str, Any]) -> None:
            answer = await client.post("/v1/completions", json=dict(body))
            answer.raise_for_status()
            found.append(answer.json())

        started = time.perf_counter()
        for batch in batches:
            async with anyio.create_task_group() as tasks:
                for body in batch:
                    tasks.start_soon(ask, body)
        spent = time.perf_counter() - started
    tokens = sum(one["usage"]["completion_tokens"] for one in found)
    reports = [(one.get("rekindle") or {}).get("speculation") or {} for one in found]
    counts = {name: sum(one.get(name, 0) for one in reports) for name in ("proposed", "accepted")}
    return {"tokens": tokens, "tok/s": tokens / spent, **counts}


def measure(urls: Mapping[str, str], given: argparse.Namespace) -> list[dict[str, Any]]:
    turns: dict[tuple[str, int], list[dict[str, dict[str, float]]]] = {}
    levels = [int(level) for level in given.levels.split(",")]
    for number, order in zip(range(given.rounds + 1), cycle(permutations(sorted(urls))), strict=False):
        for kind in given.kinds.split(","):
            for streams in levels:
                count = ANSWERS_OF_ONE if streams == 1 else 1
                took = dict[str, dict[str, float]]()
                for way in order:
                    own_fields = make_fields_of_turn(number, way) if given.one_server else {}
                    batches = [
                        make_bodies(kind, streams, given, f"{number} {kind} {streams} {at}", own_fields)
                        for at in range(count)
                    ]
                    took[way] = anyio.run(ask_all, urls[way], batches)
                print(json.dumps({"round": number, "kind": kind, "streams": streams, **took}), flush=True)
                turns.setdefault((kind, streams), []).append(took)
    return [describe(kind, streams, taken[1:]) for (kind, streams), taken in turns.items()]


def make_fields_of_turn(number: int, way: str) -> dict[str, str]:
    """Return what requests of a turn have if one server takes the turns of all. Nothing is shared between turns."""
    own = {"cache_salt": f"{number} {way}"}
    return own if way == COPIES else {**own, "speculation": "off"}


def describe(kind: str, streams: int, turns: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    plain = [mean(turn[way]["tok/s"] for way in turn if way != COPIES) for turn in turns]
    ratios = [turn[COPIES]["tok/s"] / speed for turn, speed in zip(turns, plain, strict=True)]
    noise = [turn[AGAIN]["tok/s"] / turn["plain"]["tok/s"] for turn in turns if AGAIN in turn]
    copied = [turn[COPIES] for turn in turns]
    first, last = find_interval(ratios)
    return {
        "text": kind,
        "streams": streams,
        "plain tok/s": median(turn["plain"]["tok/s"] for turn in turns),
        "copies tok/s": median(one["tok/s"] for one in copied),
        "median x": median(ratios),
        "least x": min(ratios),
        "most x": max(ratios),
        "median x, from": first,
        "median x, to": last,
        **({NOISE: median(noise)} if noise else {}),
        "tokens": sum(one["tokens"] for one in copied),
        "proposed": sum(one["proposed"] for one in copied),
        "accepted": sum(one["accepted"] for one in copied),
    }


def make_figures(rows: Sequence[Mapping[str, Any]], subject: str) -> list[Figure]:
    texts = {"new": "new text", "chance": "new text with chance matches"}
    return [
        Figure(
            "speculation",
            f"{subject}, {texts[row['text']]} with copies over without",
            f"{row['streams']} streams",
            "x",
            row["median x"],
            {"plain, tok/s": row["plain tok/s"], "from": row["median x, from"], "to": row["median x, to"]},
            note=f"two plain ones: {row[NOISE]:.3f}" if NOISE in row else None,
            goal=Goal(at_least=GOALS.get(row["streams"], 1.0)),
        )
        for row in rows
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], default="8b")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument("--folder", type=Path, help="where random weights are written, and kept")
    parser.add_argument("--levels", default="1,16,64")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--draft", default="suffix", help="of the server that copies")
    parser.add_argument("--again", action="store_true", help="ask a second server that does not copy as well")
    parser.add_argument("--one-server", action="store_true", help="whose requests turn proposals off and on")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, default=256, help="tokens of an answer")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (model := folder / "model").exists():
            checkpoint(model, argparse.Namespace(shape=given.shape, layers=given.layers))
        slots = max(int(level) for level in given.levels.split(","))
        ways = {"plain": "none", COPIES: given.draft, **({AGAIN: "none"} if given.again else {})}
        started = {COPIES: given.draft} if given.one_server else ways
        with serve_all(started, model, Path(scratch), slots, given.prompts + given.answers + MARGIN) as urls:
            turns = dict.fromkeys(("plain", COPIES, AGAIN), urls[COPIES]) if given.one_server else urls
            rows = measure(turns, given)
    print_table("with copies against without", rows)
    subject = name_shape(given.shape)
    name = f"copies_served-{slug(subject)}"
    if given.one_server:
        subject = f"{subject}, one server"
        name = f"{name}-one-server"
    publish(given, name, {"rows": rows}, make_figures(rows, subject))


if __name__ == "__main__":
    main()
