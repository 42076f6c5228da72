"""`rekindle bench needles`: measures what a server finds in texts that it compresses or that are shortened blindly."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

import anyio
import httpx2
from attrs import asdict, filters
from rich.console import Console
from rich.table import Table

from engine.settings.output import plot_style
from engine.settings.output.formatting import WIDTH
from engine.settings.output.progress import count_progress
from engine.settings.sse_client import describe_error
from engine.settings.user_error import UserError, find_innermost
from engine.tools.bench.bench_options import MeasuredServer, RequestOptions
from engine.tools.bench.haystack import Haystack, build_haystack, keep_last, keep_random
from engine.tools.bench.load_client import LoadClient
from engine.tools.bench.needles_cell import Cell
from engine.tools.bench.needles_options import NeedleOptions
from engine.tools.bench.needles_plot import draw_needles

METHODS = ("whole", "compressed", "last lines", "random lines")
# The most tokens of an answer, and for each further needle.
ANSWER = 32
EACH = 16
# The words of the text with which tokens per word are measured.
SAMPLE = 2000


def run_needles(wanted: NeedleOptions) -> int:
    """Ask all questions and report the answers. Raises UserError or OSError. The exit status is 1 if a question got no
    answer.
    """
    if wanted.plot is not None:
        plot_style.check_plot_path(wanted.plot)
    seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
    cells = list[Cell]()
    interrupted = False
    server = MeasuredServer(url=wanted.url, model=wanted.model, api_key=wanted.api_key, timeout=wanted.timeout)
    client = LoadClient.from_options(server, RequestOptions())
    try:
        anyio.run(measure_cells, client, wanted, seed, cells)
    except KeyboardInterrupt:
        interrupted = True
    except BaseExceptionGroup as group:
        raise find_innermost(group) from group
    if wanted.json:
        print(json.dumps(build_json(client, wanted, seed, cells), indent=2))
    else:
        print_table(Console(), client, wanted, seed, cells)
    if wanted.plot is not None and cells:
        draw_needles(wanted.plot, cells, METHODS, describe_run(client, wanted))
    return 130 if interrupted else int(any(cell.error for cell in cells))


async def measure_cells(client: LoadClient, wanted: NeedleOptions, seed: int, cells: list[Cell]) -> None:
    asked = list(list_questions(wanted))
    async with client:
        await client.find_model()
        tokens_per_word = await measure_tokens_per_word(client)
        with count_progress("questions asked", len(asked) * len(METHODS)) as step:
            for length, needles, depth, number in asked:
                draw_ = Random(f"{seed} {length} {needles} {depth} {number}")  # noqa: S311 - texts
                spread = [(at + 0.5) / needles for at in range(needles)]
                hay = build_haystack(draw_, round(length / tokens_per_word), spread if depth is None else [depth])
                share = wanted.keep
                for method in METHODS:
                    cell = Cell(method, length, needles, depth, number)
                    cells.append(await ask_question(client, hay, cell, share, draw_))
                    share = cells[-1].kept if method == "compressed" and not cells[-1].error else share
                    step()


def list_questions(wanted: NeedleOptions) -> Iterator[tuple[int, int, float | None, int]]:
    """Return the length, number of needles, depth and number of each question."""
    for length, needles in product(wanted.many_lengths, wanted.many_needles):
        depths: Sequence[float | None] = wanted.many_depths if needles == 1 else (None,)
        yield from ((length, needles, depth, number) for depth, number in product(depths, range(wanted.questions)))


async def measure_tokens_per_word(client: LoadClient) -> float:
    """Measure the tokens of a word in these texts. Raises UserError if the server is not Rekindle."""
    hay = build_haystack(Random(0), SAMPLE, [0.5])  # noqa: S311 - words
    try:
        answer = await client.http.post("/tokenize", json={"content": hay.text()})
        return len(answer.json()["tokens"]) / SAMPLE
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"--url {client.server.url}: it cannot count tokens (/tokenize); accepted: a Rekindle server"
        ) from error


async def ask_question(client: LoadClient, hay: Haystack, cell: Cell, share: float, draw_: Random) -> Cell:
    """Ask one question and return its cell with the result. share: of the text that is kept if it is shortened here."""
    lines = {"last lines": keep_last(hay, share), "random lines": keep_random(hay, share, draw_)}.get(cell.method)
    how = {"mode": "always", "keep_ratio": share} if cell.method == "compressed" else {"mode": "off"}
    body = {
        "model": client.model,
        "messages": [{"role": "user", "content": hay.text(lines)}],
        "max_tokens": ANSWER + EACH * (len(hay.needles) - 1),
        "temperature": 0,
        "cache_prompt": False,
        "one_off": True,
        "compression": how,
    }
    try:
        answer = await client.http.post("/v1/chat/completions", json=body)
        body = answer.json()
        if answer.status_code != 200:
            return mark_failed(cell, f"HTTP {answer.status_code}: {body['error']['message']}"[:200])
        return fill_cell(cell, hay, body, share)
    except httpx2.HTTPError as error:
        return mark_failed(cell, describe_error(error))
    except (ValueError, LookupError, TypeError) as error:
        return mark_failed(cell, f"no answer of a Rekindle server: {error!r}"[:200])


def fill_cell(cell: Cell, hay: Haystack, body: dict[str, Any], share: float) -> Cell:
    """Read an answer into its cell. Raises LookupError or TypeError for what Rekindle would not answer."""
    compression = body["rekindle"]["compression"]
    if cell.method == "compressed":
        why = "off" if compression is None else compression["why"]
        if why:
            return mark_failed(cell, f"it was not compressed: {why}")
        share = compression["kept_tokens"] / compression["original_tokens"]
    text = body["choices"][0]["message"]["content"] or ""
    kept = 1.0 if cell.method == "whole" else share
    tokens = body["usage"]["prompt_tokens"]
    took = body["timings"]["prompt_ms"]
    cell_fields = cell.method, cell.length, cell.needles, cell.depth, cell.number
    return Cell(*cell_fields, hay.score_answer(text), tokens, kept, took)


def mark_failed(cell: Cell, why: str) -> Cell:
    return Cell(cell.method, cell.length, cell.needles, cell.depth, cell.number, error=why)


def compute_average(cells: Sequence[Cell], name: str) -> float | None:
    values = [getattr(cell, name) for cell in cells if not cell.error]
    return sum(values) / len(values) if values else None


def describe_run(client: LoadClient, wanted: NeedleOptions) -> str:
    return f"Needles found by {client.model or 'a model'}, keep ratio {wanted.keep:g}"


def print_table(console: Console, client: LoadClient, wanted: NeedleOptions, seed: int, cells: Sequence[Cell]) -> None:
    """Print a table with a row for each kind of question and a column for each method."""
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(f"{describe_run(client, wanted)}, at {client.server.base}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("tokens", "needles", "depth", *METHODS):
        table.add_column(name, justify="right")
    kinds = dict.fromkeys((cell.length, cell.needles, cell.depth) for cell in cells)
    groups = [*kinds, *dict.fromkeys((length, needles, "all") for length, needles, _ in kinds)]
    for length, needles, depth in groups:
        rows = [cell for cell in cells if (cell.length, cell.needles) == (length, needles)]
        if depth != "all":
            rows = [cell for cell in rows if cell.depth == depth]
        shares = [compute_average([cell for cell in rows if cell.method == method], "found") for method in METHODS]
        where = "spread" if depth is None else depth if isinstance(depth, str) else f"{depth:g}"
        table.add_row(str(length), str(needles), where, *("-" if share is None else f"{share:.0%}" for share in shares))
    for what, name, form in (("text read", "kept", "{:.1%}"), ("prompt, ms", "prompt_ms", "{:,.0f}")):
        values = [compute_average([cell for cell in cells if cell.method == method], name) for method in METHODS]
        table.add_row(what, "", "", *("-" if value is None else form.format(value) for value in values))
    console.print(table)
    for why in dict.fromkeys(cell.error for cell in cells if cell.error):
        count = sum(cell.error == why for cell in cells)
        console.print(f"{count} without an answer: {why}", style="dim", highlight=False)
    console.print(f"To repeat these texts: --seed {seed}", style="dim", highlight=False)


def build_json(client: LoadClient, wanted: NeedleOptions, seed: int, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return what --json prints. The key of the server is left out."""
    options = asdict(wanted, filter=filters.exclude("api_key", "json", "plot"))
    found = {method: compute_average([cell for cell in cells if cell.method == method], "found") for method in METHODS}
    return {
        "url": client.server.base,
        "model": client.model,
        "seed": seed,
        "options": options,
        "found": found,
        "questions": [asdict(cell) for cell in cells],
    }
