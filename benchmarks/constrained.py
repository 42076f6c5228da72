"""Measures what a required form costs: answers to random schemas, compared with answers of the same length without a
form.

    python -m benchmarks.constrained [--schemas 200] [--streams 1,4] [--model demo] [--device cpu] [--record]

Every schema is answered with the draft and without: all answers that ended must be valid (jsonschema), and the same
both ways; the exit status is 1 if one is not. Then the same number of tokens is generated from the same prompts without
a form, one batch right after the other. Wall time and processor time: on a machine with other work the second says
more. compile: milliseconds to admit a grammar, its trial in the confined process included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import anyio
import jsonschema
from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.text.grammars.grammar import Grammars, build_json_grammar
from adapters.text.tokenizer import Tokenizer
from benchmarks.arguments import options_of, server_parser
from benchmarks.never_slower import Took, together
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from effects.grammar import Grammar
from effects.job import Job, Sampling
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import Options, evolve_options
from tests.schemas import schema_of

MOST = 1024  # tokens of an answer
WAYS = {"plain": False, "draft": True}


async def waits() -> bool:
    """Say that no client leaves while its request waits."""
    return False


async def time_compilation(grammars: Grammars, made: Sequence[Grammar]) -> list[float]:
    """Milliseconds for each."""
    took = list[float]()
    for grammar in made:
        started = time.perf_counter()
        await grammars.admit(grammar, waits)
        took.append(1e3 * (time.perf_counter() - started))
    return took


def wrong(took: Took, schemas: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> tuple[int, int]:
    """(answers that are not valid, answers that were cut off)."""
    invalid = cut = 0
    for tokens, schema in zip(took.answers, schemas, strict=True):
        if tokens[-1] not in tokenizer.end_tokens:
            cut += 1
            continue
        try:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)
        except (ValueError, jsonschema.ValidationError):
            invalid += 1
    return invalid, cut


def rate(took: Sequence[Took], clock: str) -> float:
    return sum(one.tokens for one in took) / sum(getattr(one, clock) for one in took)


async def compare_ways(
    running: Engine, tokenizer: Tokenizer, schemas: Sequence[dict[str, Any]], streams: int
) -> list[dict[str, Any]]:
    """A row for each way."""
    held: dict[str, list[Took]] = {way: [] for way in WAYS}
    free: dict[str, list[Took]] = {way: [] for way in WAYS}
    counts = dict.fromkeys(("invalid", "cut", "differing"), 0)
    for first in range(0, len(schemas), streams):
        batch = schemas[first : first + streams]
        jobs = [
            Job(
                tokenizer.encode_now([f"Answer as JSON.\n{json.dumps(schema)}\n"])[0],
                MOST,
                Sampling(temperature=0.7, seed=first + at, grammar=build_json_grammar(schema)),
                tokenizer.end_tokens,
                Scope("off"),
            )
            for at, schema in enumerate(batch)
        ]
        await together(
            running, [evolve(job, max_tokens=1) for job in jobs]
        )  # so that all find the prompts in the slots
        for way, speculate in WAYS.items():
            took = await together(running, [evolve(job, speculate=speculate) for job in jobs])
            as_long = [
                evolve(
                    job,
                    speculate=speculate,
                    max_tokens=len(answer),
                    stop_tokens=(),
                    sampling=evolve(job.sampling, grammar=None),
                )
                for job, answer in zip(jobs, took.answers, strict=True)
            ]
            held[way].append(took)
            free[way].append(await together(running, as_long))
            invalid, cut = wrong(took, batch, tokenizer)
            counts["invalid"] += invalid
            counts["cut"] += cut
        pair = zip(held["plain"][-1].answers, held["draft"][-1].answers, strict=True)
        counts["differing"] += sum(one != other for one, other in pair)
    return [
        {
            "streams": streams,
            "way": way,
            "tokens": sum(one.tokens for one in held[way]),
            "tok/s": rate(held[way], "wall"),
            "free tok/s": rate(free[way], "wall"),
            "x wall": rate(held[way], "wall") / rate(free[way], "wall"),
            "x cpu": rate(held[way], "cpu") / rate(free[way], "cpu"),
            "tok/round": sum(one.tokens for one in held[way]) / sum(one.decode_steps for one in held[way]),
            "free tok/round": sum(one.tokens for one in free[way]) / sum(one.decode_steps for one in free[way]),
            **counts,
        }
        for way in WAYS
    ]


async def measure(options: Options, count: int, streams: Sequence[int]) -> dict[str, Any]:
    target = await load_target(evolve_options(options, disk_prefix_cache="off", host_cache_budget=0))
    tokenizer = Tokenizer.load(target.folder)
    grammars, schemas = Grammars(tokenizer), [schema_of(seed) for seed in range(count)]
    try:
        target.executor = DeviceExecutor(evolve(target.executor.parts, match_grammar=grammars.match))
        compile_ms = await time_compilation(grammars, [build_json_grammar(schema) for schema in schemas])
        rows = list[dict[str, Any]]()
        async with run_engine(target.settings, target.executor) as running:
            for together_ in streams:
                rows += await compare_ways(running, tokenizer, schemas, together_)
                print(json.dumps(rows[-2:]), flush=True)
    finally:
        await grammars.aclose()
        await target.close()
    ordered = sorted(compile_ms[1:])
    compile_times = {"first": compile_ms[0], "median": median(ordered), "p99": ordered[int(0.99 * len(ordered))]}
    return {"schemas": count, "compile_ms": compile_times, "rows": rows}


def make_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    what, goal = "answers of a given form, speed against free ones", Goal(at_least=0.8)
    return [
        Figure("service", what, f"{row['streams']} streams, {row['way']}", "x", row["x wall"], goal=goal)
        for row in rows
    ]


def main() -> int:
    parser = server_parser(__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--streams", default="1,4")
    given = parser.parse_args()
    found = anyio.run(measure, options_of(given), given.schemas, [int(one) for one in given.streams.split(",")])
    print_table("answers of a given form against free ones as long (goal: 0.8x on 2 cores)", found["rows"])
    publish(given, "constrained", found, make_figures(found["rows"]), given.device)
    return int(any(row["invalid"] or row["differing"] for row in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
