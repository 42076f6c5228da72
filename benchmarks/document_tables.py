"""Writes tables of documents from the files of results: `python -m benchmarks.document_tables`.

* docs/MODELS.md: how fast published shapes decode, and what keys and values of fewer bits lose;
* docs/QUANTISED.md: what packed weights lose.

A table lies between two comments with its name. A figure that no file has is left out, and so is a column without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from adapters.models.kernels.formats.row_format import read_row_types
from benchmarks.results import ROOT, Result, read_results

MODELS, QUANTISED = ROOT / "docs" / "MODELS.md", ROOT / "docs" / "QUANTISED.md"
HEAD = 128  # numbers of a head
NEEDLES = (8192, 16384, 32000)  # tokens of the texts with a hidden number
Row = Sequence[str]

# Shapes of `benchmarks.family_speeds`: how a document calls each, and its weights.
SHAPES: Mapping[str, tuple[str, str]] = {
    "gemma4-31b": ("Gemma 4 31B", "bfloat16"),
    "gemma4-26b-a4b": ("Gemma 4 26B-A4B", "bfloat16"),
    "gpt-oss-20b": ("gpt-oss-20b", "experts in MXFP4"),
    "30b-a3b": ("Qwen3-30B-A3B", "bfloat16"),
    "30b-a3b-q4_k": ("Qwen3-30B-A3B", "Q4_K, head in Q6_K"),
}
# Packed weights of the widened demo that are called otherwise than their file.
FORMATS: Mapping[str, str] = {
    "int8": "`--quantize int8`, groups of 128",
    "int4": "`--quantize int4`, groups of 128",
    "fp8-static": "FP8, blocks of 128 x 128",
    "fp8-dynamic": "FP8, rows as well (Hopper)",
    "floatarow": "FP8, a scale for each row",
    "awq": "AWQ, groups of 32",
    "gptq": "GPTQ, groups of 32",
    "gptq8bits": "GPTQ, 8 bits, groups of 32",
    "w4a16": "w4a16, groups of 32",
    "w8a16": "w8a16, a scale for each row",
}
# Forms whose needles were measured under another name.
ALIKE: Mapping[str, str] = {"fp8-static": "fp8", "fp8-dynamic": "fp8dynamic", "gptq8bits": "gptq,8bits"}
ROWS = ("int8", "fp8", "k=int8,v=int4", "k=int8,v=int3.5", "int4", "int3.5")


@frozen
class DocumentTable:
    """A table of a document. name: that its comments have. rows: makes its lines, without the head."""

    page: Path
    name: str
    head: Row
    rows: Callable[[Mapping[str, Result]], Iterator[Row]]

    def write(self, page: str, results: Mapping[str, Result]) -> str:
        """Return the page with this table as the results have it. Raises ValueError if the page has no place for it."""
        begin, end = (f"<!-- {self.name}: {word} -->" for word in ("begin", "end"))
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{self.page.name} has no table {self.name}")
        rows = list(self.rows(results))
        shown = [at for at, _ in enumerate(self.head) if any(row[at] for row in rows) or not rows]
        lines = (self.head, ["---"] * len(self.head), *rows)
        table = "\n".join("| " + " | ".join(line[at] for at in shown) + " |" for line in lines)
        return f"{before}{begin}\n{table}\n{end}{after}"


def list_speeds(results: Mapping[str, Result]) -> Iterator[Row]:
    for shape, (name, weights) in SHAPES.items():
        if (found := results.get(f"family_speeds-{shape}")) is not None:
            share, first = found.raw["share, %"], found.raw["first token at 8k, s"]
            yield name, weights, f"{1e3 / found.raw['ms a token']:.0f}", f"{share:.0f} %", f"{first:.2f} s"


def list_row_losses(results: Mapping[str, Result]) -> Iterator[Row]:
    losses = {line["weights"].partition("@")[2]: line for line in read_lines(results, "held_out-rows")}
    needles = read_lines(results, "kv_needles")
    for name in ROWS:
        types = read_row_types(name, torch.bfloat16)
        sizes = [part.row_bytes(HEAD) for part in (types.keys, types.values)]
        loss = [f"{losses[name]['more, %']:.2f} %"] if name in losses else [""]
        found = [say_found(needles, "rows", name, length) for length in NEEDLES]
        yield f"`{name}`", " and ".join(map(str, sizes)), *loss, *found


def list_weight_losses(results: Mapping[str, Result]) -> Iterator[Row]:
    needles = read_lines(results, "kv_needles_packed")
    lines = read_lines(results, "held_out-formats") + read_lines(results, "held_out-wide-fp8-dynamic")[2:]
    for line in sorted(lines, key=lambda line: -line["bits a weight"]):
        name = name_packing(line["weights"])
        stored, loss = f"{line['bits a weight']:.1f}", f"{line['more, %']:.2f} %"
        found = [say_found(needles, "weights", f"wide-{ALIKE.get(name, name)}", length) for length in NEEDLES[::2]]
        yield FORMATS.get(name, name) or "bfloat16", stored, loss if name else "", *found


def name_packing(weights: str) -> str:
    """Return the name of a packing, from the path of a model and the bits of `--quantize`. Empty: it is not packed."""
    path, _, bits = weights.partition(":")
    return bits or Path(path).name.removesuffix(".gguf").removeprefix("wide").removeprefix("-")


def read_lines(results: Mapping[str, Result], benchmark: str) -> list[Mapping[str, Any]]:
    found = results.get(benchmark)
    return [] if found is None or found.raw is None else list(found.raw["rows"])


def say_found(needles: Sequence[Mapping[str, Any]], key: str, name: str, length: int) -> str:
    """Return how many texts' numbers were found. Empty: it was not measured."""
    lines = [line for line in needles if line[key] == name and line["tokens"] == length]
    return " ".join(f"{line['found']} of {line['texts']}" for line in lines[:1])


TABLES = (
    DocumentTable(
        MODELS, "speeds", ("shape", "weights", "tokens/s", "share", "first token of 8,192 tokens"), list_speeds
    ),
    DocumentTable(
        MODELS,
        "rows",
        ("`--kv-dtype`", "bytes for keys and for values", "loss", *(f"found in {one:,}" for one in NEEDLES)),
        list_row_losses,
    ),
    DocumentTable(
        QUANTISED,
        "losses",
        ("weights", "bits a weight", "loss", *(f"found in {one:,}" for one in NEEDLES[::2])),
        list_weight_losses,
    ),
)


def write_pages() -> dict[Path, str]:
    """Return the pages with the tables of now."""
    results = {result.benchmark: result for result in read_results()}
    pages = {table.page: table.page.read_text(encoding="utf-8") for table in TABLES}
    for table in TABLES:
        pages[table.page] = table.write(pages[table.page], results)
    return pages


if __name__ == "__main__":
    for path, text in write_pages().items():
        path.write_text(text, encoding="utf-8")
