"""Measures what a model finds in long texts when its rows have 8 bits or fewer, or its weights are packed: numbers are
hidden in the texts, and the same texts are asked in each form.

`python -m benchmarks.kv_needles [--kv-dtypes auto,int8,fp8] [--lengths 8192,16384] [--questions 8] [--models demo]`.
Each text of random words has one number, the first at its beginning, the last at its end; all forms are asked the same.
`same` are answers with exactly the tokens of the first form. Several models must have the same tokenizer.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from random import Random
from typing import Any

import anyio
from attrs import frozen

from adapters.text.model_text import Text
from benchmarks.arguments import benchmark_parser
from benchmarks.exactness import OFF, collect_answer
from benchmarks.results import Figure, publish
from benchmarks.tables import print_table
from effects.ids import Tokens
from effects.job import Job, Sampling
from engine.loading.background_load import load_target
from engine.serving.wiring import run_engine
from engine.settings.options import Options, build_options
from engine.settings.paths import find_model_folder
from engine.tools.bench.haystack import Haystack, build_haystack

ANSWER = 24  # tokens
ROOM = 64  # tokens of the template, and of what is asked


@frozen
class HiddenNumber:
    length: int
    hay: Haystack
    prompt: Tokens


async def hide_numbers(text: Text, length: int, count: int) -> list[HiddenNumber]:
    """So many texts of about so many tokens, as chats."""
    draw, found = Random(length), list[HiddenNumber]()
    sample = build_haystack(Random(0), 1000, [0.5]).text()
    each = len((await text.tokenizer.encode([sample]))[0]) / 1000
    for number in range(count):
        hay = build_haystack(draw, round((length - ROOM - ANSWER) / each), [number / max(1, count - 1)])
        prompt = await text.encode_chat([{"role": "user", "content": hay.text()}])
        found.append(HiddenNumber(length, hay, prompt))
    return found


async def ask_numbers(options: Options, texts: list[HiddenNumber], text: Text) -> tuple[list[Tokens], list[bool]]:
    target = await load_target(options)
    answers, right = list[Tokens](), list[bool]()
    async with run_engine(target.settings, target.executor) as running:
        for one in texts:
            job = Job(one.prompt, ANSWER, Sampling(), tuple(text.tokenizer.end_tokens), OFF)
            found = (await collect_answer(running, job)).tokens
            answers.append(found)
            right.append(one.hay.score_answer(text.tokenizer.decode(found)) == 1)
    await target.close()
    return answers, right


async def measure(given: argparse.Namespace) -> None:
    base: dict[str, Any] = {"threads": given.threads, "device": given.device, "slots": 1}
    base |= {"disk_prefix_cache": "off", "draft": "none"}
    text = Text.load(find_model_folder(build_options(model=given.models[0]).model))
    texts = [
        one
        for length in map(int, given.lengths.split(","))
        for one in await hide_numbers(text, length, given.questions)
    ]
    rows, first = list[dict[str, Any]](), list[Tokens]()
    forms = [(model, name) for model in given.models for name in re.split(r",(?!v=)", given.kv_dtypes)]
    started = time.monotonic()
    for model, name in forms:
        if given.limit and time.monotonic() - started > given.limit:
            print(f"no time left for {Path(model).stem}, {name}", flush=True)
            continue
        answers, right = await ask_numbers(build_options(**base, model=model, kv_dtype=name), texts, text)
        first = first or answers
        for length in dict.fromkeys(one.length for one in texts):
            at = [number for number, one in enumerate(texts) if one.length == length]
            row = {"weights": Path(model).stem, "rows": name, "tokens": length, "texts": len(at)}
            row |= {"found": sum(right[number] for number in at)}
            rows.append({**row, "same": sum(answers[number] == first[number] for number in at)})
            print(rows[-1], flush=True)
    await text.aclose()
    print_table("Numbers found", rows)
    figures = [
        Figure(
            "packed",
            f"needles found, {row['weights']}, {row['rows']} rows",
            str(row["tokens"]),
            f"of {row['texts']}",
            row["found"],
        )
        for row in rows
    ]
    kind = "" if len(given.models) == 1 else "_packed"
    publish(given, f"kv_needles{kind}", {"rows": rows}, figures, given.device)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kv-dtypes", default="auto,int8,fp8")
    parser.add_argument("--lengths", default="8192,16384")
    parser.add_argument("--questions", type=int, default=8, help="of each length")
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0, help="seconds after which no further form begins; 0: none")
    anyio.run(measure, parser.parse_args())


if __name__ == "__main__":
    main()
