"""`rekindle bench needles`: what a server still finds in texts that it compresses, beside shortening them blindly."""

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

from engine.settings import plot_style
from engine.settings.formatting import WIDTH
from engine.settings.progress import progress
from engine.settings.sse_client import said
from engine.settings.user_error import UserError, innermost
from engine.tools.bench.bench_options import Load
from engine.tools.bench.haystack import Haystack, haystack, last, some
from engine.tools.bench.load_client import LoadClient
from engine.tools.bench.needles_cell import Cell
from engine.tools.bench.needles_options import Needles
from engine.tools.bench.needles_plot import draw

METHODS = ("whole", "compressed", "last lines", "random lines")
ANSWER, EACH = 32, 16  # tokens of an answer, and for each further needle
SAMPLE = 2000  # words by which it is measured how many tokens they are


def run(wanted: Needles) -> int:
    """Raises Refusal or OSError. Exit status 1 if a question got no answer."""
    if wanted.plot is not None:
        plot_style.check(wanted.plot)
    seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
    cells, interrupted = list[Cell](), False
    load = Load(url=wanted.url, model=wanted.model, api_key=wanted.api_key, timeout=wanted.timeout)
    client = LoadClient.of(load)
    try:
        anyio.run(measure, client, wanted, seed, cells)
    except KeyboardInterrupt:
        interrupted = True
    except BaseExceptionGroup as group:
        raise innermost(group) from group
    if wanted.json:
        print(json.dumps(described(client, wanted, seed, cells), indent=2))
    else:
        show(Console(), client, wanted, seed, cells)
    if wanted.plot is not None and cells:
        draw(wanted.plot, cells, METHODS, headline(client, wanted))
    return 130 if interrupted else int(any(cell.error for cell in cells))


async def measure(client: LoadClient, wanted: Needles, seed: int, cells: list[Cell]) -> None:
    asked = list(questions(wanted))
    async with client.http:
        await client.meet()
        each = await tokens_a_word(client)
        with progress("questions asked", len(asked) * len(METHODS)) as step:
            for length, needles, depth, number in asked:
                draw_ = Random(f"{seed} {length} {needles} {depth} {number}")  # noqa: S311 - texts
                spread = [(at + 0.5) / needles for at in range(needles)]
                hay = haystack(draw_, round(length / each), spread if depth is None else [depth])
                share = wanted.keep
                for method in METHODS:
                    cell = Cell(method, length, needles, depth, number)
                    cells.append(await ask(client, hay, cell, share, draw_))
                    share = cells[-1].kept if method == "compressed" and not cells[-1].error else share
                    step()


def questions(wanted: Needles) -> Iterator[tuple[int, int, float | None, int]]:
    """Length, needles, depth and number of each."""
    for length, needles in product(wanted.many_lengths, wanted.many_needles):
        depths: Sequence[float | None] = wanted.many_depths if needles == 1 else (None,)
        yield from ((length, needles, depth, number) for depth, number in product(depths, range(wanted.questions)))


async def tokens_a_word(client: LoadClient) -> float:
    """Of the texts that are hidden in. Raises Refusal: it is a server of ours that is asked."""
    hay = haystack(Random(0), SAMPLE, [0.5])  # noqa: S311 - words
    try:
        answer = await client.http.post("/tokenize", json={"content": hay.text()})
        return len(answer.json()["tokens"]) / SAMPLE
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"--url {client.load.url}: it does not count tokens (/tokenize), as a Rekindle server does"
        ) from error


async def ask(client: LoadClient, hay: Haystack, cell: Cell, share: float, draw_: Random) -> Cell:
    """share: of the text, for who shortens it here."""
    lines = {"last lines": last(hay, share), "random lines": some(hay, share, draw_)}.get(cell.method)
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
        told = answer.json()
        if answer.status_code != 200:
            return failed(cell, f"HTTP {answer.status_code}: {told['error']['message']}"[:200])
        return read(cell, hay, told, share)
    except httpx2.HTTPError as error:
        return failed(cell, said(error))
    except (ValueError, LookupError, TypeError) as error:
        return failed(cell, f"no answer of a Rekindle server: {error!r}"[:200])


def read(cell: Cell, hay: Haystack, told: dict[str, Any], share: float) -> Cell:
    """Raises LookupError or TypeError for what no server of ours says."""
    compression = told["rekindle"]["compression"]
    if cell.method == "compressed":
        why = "off" if compression is None else compression["why"]
        if why:
            return failed(cell, f"it was not compressed: {why}")
        share = compression["kept_tokens"] / compression["original_tokens"]
    text = told["choices"][0]["message"]["content"] or ""
    kept = 1.0 if cell.method == "whole" else share
    tokens, took = told["usage"]["prompt_tokens"], told["timings"]["prompt_ms"]
    place = cell.method, cell.length, cell.needles, cell.depth, cell.number
    return Cell(*place, hay.found(text), tokens, kept, took)


def failed(cell: Cell, why: str) -> Cell:
    return Cell(cell.method, cell.length, cell.needles, cell.depth, cell.number, error=why)


def mean(cells: Sequence[Cell], name: str) -> float | None:
    values = [getattr(cell, name) for cell in cells if not cell.error]
    return sum(values) / len(values) if values else None


def headline(client: LoadClient, wanted: Needles) -> str:
    return f"Needles found by {client.model or 'a model'}, keep ratio {wanted.keep:g}"


def show(console: Console, client: LoadClient, wanted: Needles, seed: int, cells: Sequence[Cell]) -> None:
    """A row for each kind of question, a column for each method."""
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(f"{headline(client, wanted)}, at {client.load.base}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("tokens", "needles", "depth", *METHODS):
        table.add_column(name, justify="right")
    kinds = dict.fromkeys((cell.length, cell.needles, cell.depth) for cell in cells)
    groups = [*kinds, *dict.fromkeys((length, needles, "all") for length, needles, _ in kinds)]
    for length, needles, depth in groups:
        rows = [cell for cell in cells if (cell.length, cell.needles) == (length, needles)]
        if depth != "all":
            rows = [cell for cell in rows if cell.depth == depth]
        shares = [mean([cell for cell in rows if cell.method == method], "found") for method in METHODS]
        where = "spread" if depth is None else depth if isinstance(depth, str) else f"{depth:g}"
        table.add_row(str(length), str(needles), where, *("-" if one is None else f"{one:.0%}" for one in shares))
    for what, name, form in (("text read", "kept", "{:.1%}"), ("prompt, ms", "prompt_ms", "{:,.0f}")):
        values = [mean([cell for cell in cells if cell.method == method], name) for method in METHODS]
        table.add_row(what, "", "", *("-" if one is None else form.format(one) for one in values))
    console.print(table)
    for why in dict.fromkeys(cell.error for cell in cells if cell.error):
        count = sum(cell.error == why for cell in cells)
        console.print(f"{count} without an answer: {why}", style="dim", highlight=False)
    console.print(f"The same texts again: --seed {seed}", style="dim", highlight=False)


def described(client: LoadClient, wanted: Needles, seed: int, cells: Sequence[Cell]) -> dict[str, Any]:
    """What --json prints. The key of the server is nobody's business."""
    options = asdict(wanted, filter=filters.exclude("api_key", "json", "plot"))
    found = {method: mean([cell for cell in cells if cell.method == method], "found") for method in METHODS}
    return {
        "url": client.load.base,
        "model": client.model,
        "seed": seed,
        "options": options,
        "found": found,
        "questions": [asdict(cell) for cell in cells],
    }
