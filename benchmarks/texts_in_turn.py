"""Copies of earlier text (`--draft suffix`) against plain servers, request by request on the same two cores.

    python -m benchmarks.texts_in_turn [--kinds new,edits,code] [--streams 1] [--rounds 60] [--cores 0,1] [--record]

Three servers run in processes of their own, all on the same cores: two plain ones and one that copies. A round asks
each of them for the same answers, one server after the other, and every order of the servers has its turn. So what a
round shows does not depend on cores, on the order, or on what disturbs the machine for longer than a round. It gives
one ratio of wall times and one of processor times: the mean of both plain servers over the server that copies. The
control is the ratio of both plain servers. A median is given with the interval that holds it in 95 of 100 drawings of
as many rounds (bootstrap). Texts and salts are those of `benchmarks.copied_text --side-by-side`; one round before all
others is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from itertools import cycle, permutations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self

from attrs import asdict, frozen

from benchmarks.arguments import server_parser
from benchmarks.copied_text import CODE_PROMPTS, KINDS, SERVERS, draw_batches, load_edits, read_vocab
from benchmarks.never_slower import AGAIN
from benchmarks.results import Figure, Goal, publish, slug
from benchmarks.side_by_side import parse_cores, start_servers
from benchmarks.subjects import prompts
from benchmarks.tables import print_table
from benchmarks.worker import Worker

NAMES = ("plain", "copies", AGAIN)
DRAWINGS = 2000
PEERS = {"from": "x wall, from", "to": "x wall, to", "two plain ones": "control wall"}
GOALS = {("edits", 1): 3.0, ("new", 1): 0.98}
Row = dict[str, float | str]


@frozen
class TextTimes:
    """What a server answered. wall, cpu: seconds. digest: of all tokens."""

    wall: float
    cpu: float
    tokens: int
    decode_steps: int
    digest: str

    @classmethod
    def ask(cls, worker: Worker, batches: Sequence[Any]) -> Self:
        """Ask a server (`benchmarks.text_server`) and wait for its answers."""
        return cls(**worker.ask({"batches": batches}))


Round = Mapping[str, TextTimes]  # by server


def find_interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return between what the medians of 95 % of the drawings lie, with as many ratios in each, put back when drawn."""
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(DRAWINGS))
    return medians[DRAWINGS // 40], medians[-1 - DRAWINGS // 40]


def compare(what: str, rounds: Sequence[Round]) -> Row:
    """Return a row: what the server that copies gains (x), and how two plain servers differ (control)."""
    row: Row = {"what": what, "rounds": len(rounds)}
    for time in ("wall", "cpu"):
        took = [{name: getattr(answer, time) for name, answer in one.items()} for one in rounds]
        gains = [(one["plain"] + one[AGAIN]) / 2 / one["copies"] for one in took]
        control = [one["plain"] / one[AGAIN] for one in took]
        for name, ratios in (("x", gains), ("control", control)):
            row[f"{name} {time}"] = median(ratios)
            row[f"{name} {time}, from"], row[f"{name} {time}, to"] = find_interval(ratios)
    for name in ("plain", "copies"):
        tokens = sum(one[name].tokens for one in rounds)
        row[f"{name} tok/s"] = tokens / sum(one[name].wall for one in rounds)
        row[f"{name} cpu, us a token"] = 1e6 * sum(one[name].cpu for one in rounds) / tokens
    copied = [one["copies"] for one in rounds]
    row["tok/step"] = sum(one.tokens for one in copied) / sum(one.decode_steps for one in copied)
    row["differing"] = sum(len({answer.digest for answer in one.values()}) > 1 for one in rounds)
    return row


def shorten(batches: Sequence[Any], tokens: int) -> Sequence[Any]:
    """Cut the answers that servers are made to give."""
    for batch in batches:
        for job in batch["jobs"]:
            job["answer"] = job["answer"][:tokens]
            job["tokens"] = len(job["answer"])
    return batches


def draw_texts(kind: str, streams: int, number: int, given: argparse.Namespace) -> Sequence[Any]:
    """Return the batch of a round. Whole files are answered only where a stream is alone."""
    batches = draw_batches(kind, streams, 1, number, given)
    return shorten(batches, given.tokens) if kind == "new" or (kind == "edits" and streams > 1) else batches


def measure(given: argparse.Namespace) -> list[Row]:
    counts = [int(count) for count in given.streams.split(",")]
    given.found, given.vocab = load_edits(given.texts, given.edits), read_vocab()
    given.asked = prompts(["code"], CODE_PROMPTS, 256)["code"] if "code" in given.kinds else []
    cores = parse_cores(given.cores, 1)
    rows = list[Row]()
    with TemporaryDirectory() as home, start_servers(NAMES, "benchmarks.text_server", cores * 3, Path(home)) as servers:
        own = {"model": given.model, "threads": given.threads or len(cores[0]), "slots": max(given.slots, *counts)}
        for name in NAMES:  # one after the other, so that each is alone when it measures what its steps cost
            servers.workers[name].ask({"draft": SERVERS[name], **own})
        for kind in given.kinds.split(","):
            for streams in counts:
                rounds = list[Round]()
                for number, order in zip(range(given.rounds + 1), cycle(permutations(NAMES)), strict=False):
                    batches = draw_texts(kind, streams, number, given)
                    found = {name: TextTimes.ask(servers.workers[name], batches) for name in order}
                    shown = {name: asdict(one) for name, one in found.items()}
                    print(json.dumps({"what": KINDS[kind], "streams": streams, **shown}), flush=True)
                    if number:
                        rounds.append(found)
                rows.append({"kind": kind, "streams": streams, **compare(f"{KINDS[kind]}, {streams} streams", rounds)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--kinds", default="new,edits,code")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=256, help="of answers, but edits of one stream are whole")
    parser.add_argument("--edits", type=int, default=24, help="edits that are looked for")
    parser.add_argument("--texts", type=Path, help="file with edits, for machines without this repository's history")
    parser.add_argument("--cores", default="", help="of all servers, which take turns on them")
    given = parser.parse_args()
    rows = measure(given)
    print_table("servers in turn on the same cores", rows)
    figures = [
        Figure(
            "speculation",
            "copies, in turn with plain servers",
            str(row["what"]),
            "x",
            float(row["x wall"]),
            {name: float(row[of]) for name, of in PEERS.items()},
            goal=Goal(at_least=GOALS.get((str(row["kind"]), int(row["streams"])), 1.0)),
        )
        for row in rows
    ]
    publish(given, f"texts_in_turn-{slug(given.kinds)}", {"rows": rows}, figures, "cpu")


if __name__ == "__main__":
    main()
