"""The commands `rekindle bench serve`, `rekindle bench needles` and `rekindle bench speculation`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from engine.tools.bench.bench_options import LoadOptions
from engine.tools.bench.needles_options import NeedleOptions
from engine.tools.bench.speculation_options import SpeculationBenchOptions

BENCH = """Measure a server over HTTP, or what drafts know of logged answers.

`rekindle bench serve --concurrency 1,4,16`

`rekindle bench needles --keep 0.1`

`rekindle bench speculation --log agents.jsonl`
"""
bench = App(name="bench", help=BENCH, sort_key=6)


@bench.command(name="serve")
def bench_serve(load: Annotated[LoadOptions, Parameter(name="*")] = LoadOptions()) -> int:  # noqa: B008 - a frozen value
    """Send requests to any OpenAI-compatible server and measure the answers. Ctrl-C shows the results so far.

    Prompts are new in every run, so that no cache helps the model. --shared-prefix and --log make them share parts.

    `rekindle bench serve --concurrency 1,4,16`

    `rekindle bench serve --url http://127.0.0.1:8080 --prompt-tokens 2048 --answer-tokens 64 --json > peer.json`

    `rekindle bench serve --rate 0.5,1,2 --prompt-tokens 200-4000 --shared-prefix 150 --plot load.svg`

    `rekindle bench serve --log today.jsonl.zst --concurrency 4 --requests 100`
    """
    from engine.tools.bench.measure_server import run_bench  # noqa: PLC0415

    return run_bench(load)


@bench.command(name="needles")
def bench_needles(wanted: Annotated[NeedleOptions, Parameter(name="*")] = NeedleOptions()) -> int:  # noqa: B008 - a frozen value
    """Hide facts in long texts and ask a Rekindle server for them, with whole, compressed and blindly shortened texts.

    `rekindle bench needles --lengths 2000,8000 --keep 0.1 --plot needles.svg`

    `rekindle bench needles --needles 1 --depths 0.1,0.5,0.9 --questions 10 --json > needles.json`
    """
    from engine.tools.bench.needles import run_needles  # noqa: PLC0415

    return run_needles(wanted)


@bench.command(name="speculation")
def bench_speculation(wanted: Annotated[SpeculationBenchOptions, Parameter(name="*")]) -> int:
    """Measure how many proposals of each kind of draft are right in the answers of agent logs. No server is needed.

    `rekindle bench speculation --log agents.jsonl --draft auto,suffix`

    `rekindle bench speculation --log day1.jsonl day2.jsonl --model ~/models/Qwen3-4B --draft suffix --width 15`
    """
    from engine.tools.bench.speculation_bench import run_speculation_bench  # noqa: PLC0415

    return run_speculation_bench(wanted)
