"""The model card of the demo target, written from what the run measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from textwrap import wrap
from typing import Any

COLUMNS = 100
ITEM = re.compile(r"(?:\*|\d+\.) ")

HEAD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Rekindle """
LICENCE = """
## Licence

The weights are under the Apache License 2.0, as the rest of Rekindle."""
SOURCES = """ The code that they were trained on is not part
of this package. It is that of CPython (Python Software Foundation License Version 2) and of these packages, each under
its own licence, here the main one:

{packages}
"""

CARD = """\
demo

A Qwen3 of {parameters:.1f} million parameters ({layers} layers, hidden size {hidden}, {heads} query heads and
{kv_heads} key/value head of {head_dim}, vocabulary {vocabulary}, tied embeddings, bf16, {context} tokens of context).
It ships inside Rekindle so that the server, its tests and its benchmarks run a real model without a download. It
finds, remembers, copies and calls tools; it knows next to nothing about the world, and it is meant for nothing else.

## Data

* Source code of the Python {python} standard library with its tests, and of the packages listed below, at most
  {most:g} MB of each: {files} files, {megabytes:.0f} MB. Generated files and tables of data are left out, and files
  most of which stands in others.
* {held_out} more files of the standard library and {held_out_packages} of the packages were held out, chosen by a hash
  of their content, and the {apart} files of whole packages of other authors. Files that share a tenth of their text
  with one of these (runs of four lines) are not in the training either, and the tokenizer has seen none of them.
  `training.corpus.read_held_out` gives them. Digest of the corpus (blake2b): `{digest}`.
  The other authors' packages: {packages_apart}.
* Synthetic tasks, new ones at every step: tables of keys and values, facts hidden in real code, questions about code,
  copying with many separators and none, spelling, templated conversations, memory over turns, tool calls. They are in
  `training/`.

Loss weights: code 1 (0.3 where it hides facts), conversations, copies, memory and tool calls 2, answers of
retrieval and of the choice of functions 4, prompts 0.

The tokenizer is a byte-level BPE trained on the same corpus; every digit is a token. Control tokens that are never used
stay out of the softmax while training, and their rows are the mean of the others, so they are never predicted.

## Recipe

`make train-demo` on a machine with CUDA does all of it from nothing, {tokens:.0f} million tokens in all, seed {seed}:

{cycles}

Weight decay {decay} for matrices, bf16 autocast. {seconds:.0f} s of training on one {hardware}, torch {torch}.
Digest of the parameters (blake2b): `{weights}`.

## Measured

Greedy answers that are exactly right to the last token, the end of the turn included; {questions} documents an exam
(some with several answers; twice or half as many in a few), made of held-out files, on the shipped bf16 weights.
`python -m training.evaluate` measures them again.

An exam is scored in one forward pass: an answer counts if each of its tokens is the likeliest after the right
ones before it, which is greedy decoding up to arithmetic. Only the fixed and the strange prompts are really
decoded. Exams are made from the templates that training uses, with other words and other files. The fixed
questions are training questions, and two of the 24 strange prompts were added to training after an earlier model
had failed them: read those two rows as a check, not as generalisation. The needle is hidden in the same documents
at every depth.

| exam | result |
|---|---|
{rows}
"""


def write_card(facts: Mapping[str, Any], measured: Mapping[str, float], card: str = CARD) -> str:
    """Return README.md for the checkpoint folder. card: its template, from the title up to the licence."""
    rows = "\n".join(f"| {name} | {format_result(name, value)} |" for name, value in measured.items())
    return wrap_prose(build_card(card, SOURCES).format(**facts, rows=rows))


def build_card(card: str, sources: str = "\n") -> str:
    """Return the whole template of a card. sources: text that follows the licence."""
    return HEAD + card + LICENCE + sources


def wrap_prose(card: str) -> str:
    """Wrap the paragraphs and the list items of a card; tables, headings and the head of the file stay."""
    blocks = card.rstrip("\n").split("\n\n")
    kept = ("---", "#", "|")
    return "\n\n".join(block if block.startswith(kept) else "\n".join(wrap_block(block)) for block in blocks) + "\n"


def wrap_block(block: str) -> Iterator[str]:
    """Yield the lines of a paragraph, or of a list. Code is not broken."""
    parts = list[str]()
    for line in block.splitlines():
        if ITEM.match(line) or not parts:
            parts.append(line)
        else:
            parts[-1] += f" {line.strip()}"
    for part in parts:
        item = ITEM.match(part)
        indent = " " * (item.end() if item else 0)
        whole_code = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), part)
        for line in wrap(whole_code, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
            yield line.replace("\0", " ")


def format_table(head: str, measured: Mapping[str, Mapping[str, float]], cell: Callable[[float], str]) -> str:
    """Return a Markdown table of measurements. It has a dash where a row lacks a value."""
    ways = list(dict.fromkeys(way for row in measured.values() for way in row))
    rows = [[head, *ways], ["---"] * (len(ways) + 1)]
    rows += [[name, *(cell(found[way]) if way in found else "-" for way in ways)] for name, found in measured.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def format_result(name: str, value: float) -> str:
    return f"{value:.3f}" if "nats" in name or "bits" in name else f"{100 * value:.1f} %"
