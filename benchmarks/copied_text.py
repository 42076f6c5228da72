"""Copies of earlier text (`--draft suffix`) against plain decoding, in turn, in one process.

    python -m benchmarks.copied_text [--parts edits,new,streams] [--edits 8] [--streams 1,16] [--record]

edits: one stream whose answers are files of this repository as they are after a commit, and whose prompts are the files
before it. new: one stream whose answers repeat nothing. The model is made to give these answers in both ways: a grammar
allows one token at each position. It cuts no proposal, so wrong ones are verified as those of any other answer.
streams: so many clients at once, with prompts of code and the model's own answers.

Time is the processor's, of plain answers over that with copies, because other work at the machine disturbs wall time.
A second plain target says how much of a difference is noise.
"""

from __future__ import annotations

import json
import random
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
from attrs import evolve
from tokenizers import Tokenizer

from adapters import demo
from adapters.device.executor import DeviceExecutor
from benchmarks.arguments import options_of, server_parser
from benchmarks.never_slower import AGAIN, compared, row
from benchmarks.results import Figure, Goal, publish
from benchmarks.subjects import prompts
from benchmarks.tables import print_table
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


def make_new_text(count: int, vocab: int) -> list[tuple[Tokens, Tokens]]:
    """Return prompts and answers in which no three tokens come twice, but by chance."""
    rng = random.Random(0)
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
            took = await compared(ways, batches)
            rows += [row(what, took), row(f"{what}, {AGAIN}", took, AGAIN)]
            print(*map(json.dumps, rows[-2:]), sep="\n", flush=True)
        for count in counts:
            asked = prompts(["code"], count * given.repeats, 256)["code"]
            jobs = [Job(prompt, given.tokens, scope=OFF) for prompt in asked]
            batches = [jobs[at * count : (at + 1) * count] for at in range(given.repeats)]
            freeze_collected()
            took = await compared(ways, batches)
            rows += [row(f"{count} streams", took), row(f"{count} streams, {AGAIN}", took, AGAIN)]
            print(*map(json.dumps, rows[-2:]), sep="\n", flush=True)
    for target in targets.values():
        await target.close()
    return rows


def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--parts", default="edits,new,streams")
    parser.add_argument("--edits", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2, help="how often each answer is given")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--repeats", type=int, default=4, help="batches of streams")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream's answer")
    given = parser.parse_args()
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
