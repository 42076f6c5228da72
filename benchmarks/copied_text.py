"""Copies of earlier text (`--draft suffix`) against plain decoding, in turn, in one process.

    python -m benchmarks.copied_text [--parts edits,new,streams] [--edits 8] [--streams 1,16] [--record]
    python -m benchmarks.copied_text --side-by-side [--rounds 12] [--seconds 6] [--cores 0,1:2,3:4,5:6,7] [--record]

edits: one stream whose answers are files of this repository as they are after a commit, and whose prompts are the files
before it. new: one stream whose answers repeat nothing. The model is made to give these answers in both ways: a grammar
allows one token at each position. It cuts no proposal, so wrong ones are verified as those of any other answer.
streams: so many clients at once, with prompts of code and the model's own answers.

Time is the processor's, of plain answers over that with copies, because other work at the machine disturbs wall time.
A second plain target says how much of a difference is noise.

--side-by-side: four processes do the same work at the same moment, each on two cores of its own: two without proposals,
one that copies, and one with the draft of the demo. After each round they change cores. A ratio is that of the times of
one round, to the mean of both plain servers, so it says little of what disturbs the machine. Edits, new text and code
are answered for 1 and 16 streams. Each batch of edits and code has a salt of its own, so nothing is copied from earlier
answers. Without --side-by-side, an edit that is given again (--turns) is copied from the answer before.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from attrs import evolve
from tokenizers import Tokenizer

from adapters import demo
from adapters.device.executor import DeviceExecutor
from benchmarks.arguments import options_of, server_parser
from benchmarks.never_slower import AGAIN, row, time_batches
from benchmarks.results import Figure, Goal, publish, slug
from benchmarks.side_by_side import describe_spread, parse_cores, start_servers
from benchmarks.subjects import prompts
from benchmarks.tables import median, print_table
from effects.grammar import Grammar
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.serve import freeze_collected
from engine.serving.wiring import run_engine
from engine.settings.options import Options, evolve_options
from engine.tools.bench.forced_answer import force_answers

LONGEST = 1500  # tokens of a file
MOST_CHANGED = 40  # lines of an edit
COMMITS = 400  # that edits are looked for in
OFF = Scope("off")
CODE_PROMPTS = 64  # prompts that the model itself answers, side by side
# Side by side: servers by name, each with its draft, and the kinds of text.
SERVERS = {"plain": "none", "copies": "suffix", "demo's draft": "auto", AGAIN: "none"}
SUBJECTS = {"copies": "copies", "demo's draft": "the demo's draft"}
KINDS = {"new": "new text", "code": "own code", "edits": "edits"}
THREE_TIMES, NEAR_ONE = "edits, 1 streams", "new text, 1 streams"


def run_git(*words: str) -> str:
    """Return what git prints about this repository; nothing where there is none."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout


def find_edits(tokenizer: Tokenizer, count: int) -> list[tuple[Tokens, Tokens]]:
    """Return files before and after a commit that changed some of their lines, in the tokens of the model."""
    found: list[tuple[Tokens, Tokens]] = []
    for commit in run_git("log", "--no-merges", "--format=%H", f"-{COMMITS}").split():
        for line in run_git("diff", "--numstat", "--no-renames", f"{commit}~1", commit).splitlines():
            added, removed, name = line.split("\t")
            if not (name.endswith(".py") and added.isdigit() and 1 <= int(added) + int(removed) <= MOST_CHANGED):
                continue
            before, after = (run_git("show", f"{at}:./../{name}") for at in (f"{commit}~1", commit))
            if not (before and after):
                continue
            old, new = (tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (before, after))
            if min(len(old), len(new)) > LONGEST // 4 and max(len(old), len(new)) <= LONGEST:
                found.append((old, new))
                break
        if len(found) == count:
            break
    return found


def make_new_text(count: int, vocab: int, seed: int = 0) -> list[tuple[Tokens, Tokens]]:
    """Return prompts and answers in which no three tokens come twice, but by chance."""
    rng = random.Random(seed)
    return [
        (tuple(rng.randrange(vocab) for _ in range(256)), tuple(rng.randrange(vocab) for _ in range(512)))
        for _ in range(count)
    ]


async def measure(options: Options, given: Any) -> list[dict[str, Any]]:
    parts = given.parts.split(",")
    counts = [int(count) for count in given.streams.split(",")] if "streams" in parts else []
    slots = max([given.slots, *counts])
    options = evolve_options(options, slots=slots, disk_prefix_cache="off", host_cache_budget=0)
    targets: dict[str, LoadedModel] = {
        "plain": await load_target(evolve_options(options, draft="none")),
        "draft": await load_target(evolve_options(options, draft="suffix")),
        AGAIN: await load_target(evolve_options(options, draft="none")),
    }
    tokenizer = Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    vocab = targets["plain"].checkpoint.config.vocab_size
    replayed: dict[str, list[tuple[Tokens, Tokens]]] = {}
    if "edits" in parts:
        replayed["edits of files"] = find_edits(tokenizer, given.edits)
    if "new" in parts:
        replayed["text that repeats nothing"] = make_new_text(given.edits, vocab)
    names = {f"{what} {at}": said for what, texts in replayed.items() for at, (_, said) in enumerate(texts)}
    rows = list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        ways = {}
        for way, target in targets.items():
            executor = DeviceExecutor(evolve(target.executor.parts, match_grammar=force_answers(names, vocab)))
            ways[way] = await stack.enter_async_context(run_engine(target.settings, executor))
        for what, texts in replayed.items():
            batches = [
                [Job(asked, len(said), Sampling(grammar=Grammar("regex", f"{what} {at}")), scope=OFF)]
                for at, (asked, said) in enumerate(texts)
            ]
            batches = [batch for batch in batches for _ in range(given.turns)]
            freeze_collected()
            took = await time_batches(ways, batches)
            rows += [row(what, took), row(f"{what}, {AGAIN}", took, AGAIN)]
            print(*map(json.dumps, rows[-2:]), sep="\n", flush=True)
        for count in counts:
            asked = prompts(["code"], count * given.repeats, 256)["code"]
            jobs = [Job(prompt, given.tokens, scope=OFF) for prompt in asked]
            batches = [jobs[at * count : (at + 1) * count] for at in range(given.repeats)]
            freeze_collected()
            took = await time_batches(ways, batches)
            rows += [row(f"{count} streams", took), row(f"{count} streams, {AGAIN}", took, AGAIN)]
            print(*map(json.dumps, rows[-2:]), sep="\n", flush=True)
    for target in targets.values():
        await target.close()
    return rows


def load_edits(file: Path | None, count: int) -> list[tuple[Tokens, Tokens]]:
    """Read edits from a file. If it does not exist, find them in this repository's history, and write them there."""
    if file is not None and file.exists():
        return [(tuple(old), tuple(new)) for old, new in json.loads(file.read_text())]
    found = find_edits(Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json")), count)
    if file is not None:
        file.write_text(json.dumps(found))
    return found


def make_job(asked: Tokens, said: Tokens = (), tokens: int = 0) -> dict[str, Any]:
    """Return a job of `benchmarks.text_server`. said: the answer; empty: the model's own, of so many tokens."""
    return {"prompt": asked, "answer": said, "tokens": tokens or len(said)}


def draw_batches(kind: str, streams: int, count: int, number: int, given: Any) -> list[dict[str, Any]]:
    """Return the batches of a round, of `streams` jobs each. number: of the round. given: the arguments of the run."""
    jobs = list[dict[str, Any]]()
    first, needed = number * count * streams, count * streams
    if kind == "new":
        jobs += [
            make_job(asked, said) for asked, said in make_new_text(needed, given.vocab, 1 + 1000 * number + streams)
        ]
    elif kind == "edits":
        jobs += [make_job(*given.found[at % len(given.found)]) for at in range(first, first + needed)]
    else:
        jobs += [make_job(given.asked[at % len(given.asked)], (), given.tokens) for at in range(first, first + needed)]
    return [
        # No new text comes twice, so its earlier answers may be searched.
        {"salt": "" if kind == "new" else f"{kind} {number} {at}", "jobs": jobs[at * streams : (at + 1) * streams]}
        for at in range(count)
    ]


def compare_rounds(what: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each server but the plain one. x: plain time over its time, of each round.

    The plain time is the mean of both plain servers. It is that of one where they are compared with each other.
    """
    return [
        {
            "what": what,
            "server": way,
            "rounds": len(rounds),
            **{f"x wall, {name}": value for name, value in spread_ratios(rounds, way, "wall").items()},
            **{f"x cpu, {name}": value for name, value in spread_ratios(rounds, way, "cpu").items()},
            "plain tok/s": median(one["plain"]["tokens"] / one["plain"]["wall"] for one in rounds),
            "plain cpu, us a token": 1e6 * median(one["plain"]["cpu"] / one["plain"]["tokens"] for one in rounds),
            "cpu, us a token": 1e6 * median(one[way]["cpu"] / one[way]["tokens"] for one in rounds),
            "tok/round": sum(one[way]["tokens"] for one in rounds) / sum(one[way]["decode_steps"] for one in rounds),
            "differing": sum(one["plain"]["digest"] != one[way]["digest"] for one in rounds),
        }
        for way in rounds[0]
        if way != "plain"
    ]


def spread_ratios(rounds: Sequence[Mapping[str, Mapping[str, Any]]], way: str, time: str) -> dict[str, float]:
    """Return the spread of the ratios of a time, `wall` or `cpu`."""
    ratios = list[float]()
    for one in rounds:
        plain = [one[name][time] for name, draft in SERVERS.items() if draft == "none" and name in one and way != AGAIN]
        ratios.append((mean(plain) if plain else one["plain"][time]) / one[way][time])
    return describe_spread(ratios)


def measure_side_by_side(given: Any) -> list[dict[str, Any]]:
    """Measure all kinds of text, each for all numbers of streams."""
    counts = [int(count) for count in given.streams.split(",")]
    given.found, given.vocab = load_edits(given.texts, given.edits), read_vocab()
    given.asked = prompts(["code"], CODE_PROMPTS, 256)["code"] if "code" in given.kinds else []
    rows = list[dict[str, Any]]()
    with TemporaryDirectory() as home:
        names = given.servers.split(",")
        sets = parse_cores(given.cores, len(names))
        with start_servers(names, "benchmarks.text_server", sets, Path(home)) as servers:
            own = {"model": given.model, "threads": given.threads or len(sets[0]), "slots": max(given.slots, *counts)}
            servers.load_all(lambda name: {"draft": SERVERS[name], **own})
            for kind in given.kinds.split(","):
                for streams in counts:
                    what = f"{KINDS[kind]}, {streams} streams"
                    first = servers.ask_all({"batches": draw_batches(kind, streams, 1, 0, given)}, 0)
                    count = max(1, round(given.seconds / first["plain"]["wall"]))
                    rounds = list[dict[str, dict[str, Any]]]()
                    for number in range(1, given.rounds + 1):
                        batches = draw_batches(kind, streams, count, number, given)
                        rounds.append(servers.ask_all({"batches": batches}, number))
                        print(json.dumps({"what": what, "batches": count, **rounds[-1]}), flush=True)
                    compared_rows = compare_rounds(what, rounds)
                    print(*map(json.dumps, compared_rows), sep="\n", flush=True)
                    rows += compared_rows
    return rows


def read_vocab() -> int:
    config: dict[str, Any] = json.loads((demo.FOLDER / "config.json").read_text())
    return int(config["vocab_size"])


def publish_side_by_side(given: Any) -> None:
    rows = measure_side_by_side(given)
    print_table("servers side by side, over the plain one", rows)
    plain = {row["what"]: row["x wall, median"] for row in rows if row["server"] == AGAIN}
    figures = [
        Figure(
            "speculation",
            f"{SUBJECTS[row['server']]} beside plain servers",
            row["what"],
            "x",
            row["x wall, median"],
            {"two plain ones": plain[row["what"]]} if plain else {},
            goal=Goal(at_least=3 if row["what"] == THREE_TIMES else 0.98 if row["what"] == NEAR_ONE else 1),
        )
        for row in rows
        if row["server"] in SUBJECTS
    ]
    publish(given, f"copied_text-{slug(given.kinds)}-side-by-side", {"rows": rows}, figures, "cpu")


def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--parts", default="edits,new,streams")
    parser.add_argument("--edits", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2, help="how often each answer is given")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--repeats", type=int, default=4, help="batches of streams")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream's answer")
    parser.add_argument("--side-by-side", action="store_true", help="measure processes at the same moment")
    parser.add_argument("--rounds", type=int, default=12, help="of each kind of text, side by side; at least 2")
    parser.add_argument("--seconds", type=float, default=6, help="that a round takes the plain server, side by side")
    parser.add_argument("--servers", default=",".join(SERVERS), help="that run side by side; `plain` is one of them")
    parser.add_argument("--cores", default="", help="of each server, side by side")
    parser.add_argument("--kinds", default="new,code,edits", help="texts that are answered side by side")
    parser.add_argument("--texts", type=Path, help="file with edits, for machines without this repository's history")
    given = parser.parse_args()
    if given.side_by_side:
        publish_side_by_side(given)
        return
    rows = anyio.run(measure, options_of(given), given)
    print_table("with copies against without", rows)
    goals = {"edits of files": Goal(at_least=3), "text that repeats nothing": Goal(at_least=0.98)}
    figures = [
        Figure(
            "speculation",
            "copies of earlier text, over plain",
            one["what"],
            "x",
            one["median x cpu"],
            goal=goals.get(one["what"], Goal(at_least=1.0)),
        )
        for one in rows
        if AGAIN not in one["what"]
    ]
    publish(given, "copied_text", {"rows": rows}, figures, given.device)


if __name__ == "__main__":
    main()
