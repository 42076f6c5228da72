"""Copies of earlier text (`--draft suffix`) against plain servers, request by request on the same two cores.

    python -m benchmarks.texts_in_turn [--kinds new,edits,code] [--streams 1] [--rounds 60] [--starts 1] [--record]
    python -m benchmarks.texts_in_turn --one-server [--kinds new,edits] [--streams 16] [--rounds 60] [--record]

Three servers run in processes of their own, all on the same cores: two plain ones and one that copies. A round asks
each of them for the same answers, one server after the other, and every order of the servers has its turn. So what a
round shows does not depend on cores, on the order, or on what disturbs the machine for longer than a round. It gives
one ratio of wall times and one of processor times: the mean of both plain servers over the server that copies. The
control is the ratio of both plain servers. A median is given with the interval that holds it in 95 of 100 drawings of
as many rounds (bootstrap). Texts and salts are those of `benchmarks.copied_text --side-by-side`; one round before all
others is not counted. Each start of the servers is another sample of where their memory lies, so --starts adds up the
rounds of several.

--one-server: a single server that copies takes all three turns, and in two of them the requests turn proposals off. Two
servers with the same work differ by more than copies cost, for instance because their memory lies elsewhere. A server
does not differ from itself. Each turn has salts of its own, so nothing is copied from the answers of another turn.
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
from benchmarks.side_by_side import PinnedServers, parse_cores, start_servers
from benchmarks.subjects import prompts
from benchmarks.tables import print_table
from benchmarks.worker import Worker

NAMES = ("plain", "copies", AGAIN)
DRAWINGS = 2000
TIMES = ("wall", "cpu")  # what is compared, in seconds: the processor's time is that of all threads
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
    for time in TIMES:
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


def shorten(batches: Sequence[Any], tokens: int, prompt_tokens: int = 0) -> Sequence[Any]:
    """Cut the answers that servers are made to give, and their prompts if `prompt_tokens` is not 0."""
    for batch in batches:
        for job in batch["jobs"]:
            job["prompt"] = job["prompt"][-prompt_tokens:]
            job["answer"] = job["answer"][:tokens]
            job["tokens"] = len(job["answer"])
    return batches


def draw_texts(kind: str, streams: int, number: int, given: argparse.Namespace) -> Sequence[Any]:
    """Return the batch of a round. Whole files are answered only where a stream is alone."""
    batches = draw_batches(kind, streams, 1, number, given)
    if kind == "new":
        return shorten(batches, given.tokens, given.prompt_tokens)
    return shorten(batches, given.tokens) if kind == "edits" and streams > 1 else batches


def ask_in_turn(
    servers: PinnedServers, batches: Sequence[Any], order: Sequence[str], *, one_server: bool
) -> dict[str, TextTimes]:
    """Ask for the same answers once for each name of `order`: the server of this name, or all times a single one."""
    if not one_server:
        return {name: TextTimes.ask(servers.workers[name], batches) for name in order}
    (worker,) = servers.workers.values()
    return {name: TextTimes.ask(worker, [as_turn_of(name, batch) for batch in batches]) for name in order}


def as_turn_of(name: str, batch: Any) -> Any:
    """Return the batch as a server that copies gets it in this turn of a round. All turns but one propose nothing."""
    jobs = [{**job, "speculate": SERVERS[name] != "none"} for job in batch["jobs"]]
    return {"salt": f"{batch['salt']} {name}", "jobs": jobs}


def measure(given: argparse.Namespace) -> list[Row]:
    """Return a row for each kind and number of streams, from the rounds of all starts."""
    counts = [int(count) for count in given.streams.split(",")]
    given.found, given.vocab = load_edits(given.texts, given.edits), read_vocab()
    given.asked = prompts(["code"], CODE_PROMPTS, 256)["code"] if "code" in given.kinds else []
    rounds: dict[tuple[str, int], list[Round]] = {
        (kind, streams): [] for kind in given.kinds.split(",") for streams in counts
    }
    for start in range(given.starts):
        ask_started(given, rounds, start * (given.rounds + 1))
    return [
        {"kind": kind, "streams": streams, **compare(f"{KINDS[kind]}, {streams} streams", found)}
        for (kind, streams), found in rounds.items()
    ]


def ask_started(given: argparse.Namespace, rounds: Mapping[tuple[str, int], list[Round]], first: int) -> None:
    """Start the servers, and add the rounds that they answer. first: the number of the first round's texts."""
    cores = parse_cores(given.cores, 1)
    started = ("copies",) if given.one_server else NAMES
    sets = cores * len(started)
    with TemporaryDirectory() as home, start_servers(started, "benchmarks.text_server", sets, Path(home)) as servers:
        most = max(streams for _, streams in rounds)
        own = {"model": given.model, "threads": given.threads or len(cores[0]), "slots": max(given.slots, most)}
        for name in started:  # one after the other, so that each is alone when it measures what its steps cost
            servers.workers[name].ask({"draft": SERVERS[name], **own})
        for (kind, streams), kept in rounds.items():
            for number, order in zip(range(given.rounds + 1), cycle(permutations(NAMES)), strict=False):
                batches = draw_texts(kind, streams, first + number, given)
                found = ask_in_turn(servers, batches, order, one_server=given.one_server)
                shown = {name: asdict(one) for name, one in found.items()}
                print(json.dumps({"what": KINDS[kind], "streams": streams, **shown}), flush=True)
                if number:
                    kept.append(found)


def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--kinds", default="new,edits,code")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--rounds", type=int, default=60, help="of each start")
    parser.add_argument("--starts", type=int, default=1, help="how often the servers are started anew")
    parser.add_argument("--tokens", type=int, default=256, help="of answers, but edits of one stream are whole")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="of new text; 0: 256")
    parser.add_argument("--edits", type=int, default=24, help="edits that are looked for")
    parser.add_argument("--texts", type=Path, help="file with edits, for machines without this repository's history")
    parser.add_argument("--cores", default="", help="of all servers, which take turns on them")
    parser.add_argument("--one-server", action="store_true", help="whose requests turn proposals off and on")
    given = parser.parse_args()
    rows = measure(given)
    print_table("turns on the same cores", rows)
    subject = "copies, in turn with plain servers"
    name = f"texts_in_turn-{slug(given.kinds)}"
    figures = [make_figure(subject, row, "wall") for row in rows]
    if given.one_server:
        subject = "one server, copies on and off"
        name += "-one-server"
        figures = [make_figure(f"{subject}, {time} time", row, time) for row in rows for time in TIMES]
    publish(given, name, {"rows": rows}, figures, "cpu")


def make_figure(subject: str, row: Row, time: str) -> Figure:
    """Return the figure of a row. time: `wall` or `cpu`."""
    peers = {"from": f"x {time}, from", "to": f"x {time}, to", "two plain ones": f"control {time}"}
    return Figure(
        "speculation",
        subject,
        str(row["what"]),
        "x",
        float(row[f"x {time}"]),
        {name: float(row[of]) for name, of in peers.items()},
        goal=Goal(at_least=GOALS.get((str(row["kind"]), int(row["streams"])), 1.0)),
    )


if __name__ == "__main__":
    main()
