"""Trains the demo target from nothing: corpus, tokenizer, training, export, exams, model card.

`python -m adapters.training.demo` needs a CUDA device; `--smoke` shows on any machine that every step works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from attrs import frozen
from tokenizers import Tokenizer

from adapters.training.batches import Batches
from adapters.training.card import write_card
from adapters.training.corpus import PACKAGES, Corpus, read_corpus
from adapters.training.evaluate import evaluate
from adapters.training.export import export, load
from adapters.training.model import Qwen3
from adapters.training.recipe import TARGET, TOKENIZER_TASKS, Recipe, smallest
from adapters.training.tokenizer import train_tokenizer
from adapters.training.train import Progress, Stage, digest, train
from adapters.training.words import Source


def prepare(work: Path) -> tuple[Corpus, Tokenizer]:
    """The corpus and the tokenizer, made now or taken from `work` as an earlier call left them there."""
    work.mkdir(parents=True, exist_ok=True)
    corpus_file, tokenizer_file = work / "corpus.json.xz", work / "tokenizer.json"
    if not corpus_file.exists():
        read_corpus().save(corpus_file)
    corpus = Corpus.load(corpus_file)
    print(
        f"corpus: Python {corpus.python}, {len(corpus.train)} files, {len(corpus.held_out)} of the library and "
        f"{len(corpus.held_out_packages)} of packages held out, {corpus.digest}"
    )
    if not tokenizer_file.exists():
        train_tokenizer(corpus, TOKENIZER_TASKS).save(str(tokenizer_file), pretty=False)
    return corpus, Tokenizer.from_file(str(tokenizer_file))


@frozen
class Limits:
    """`seconds`: ends each cycle.  `first`: the cycle to begin with, from what is in the checkpoint folder."""

    seconds: float
    workers: int
    first: int


def run(recipe: Recipe, work: Path, out: Path, limits: Limits) -> dict[str, float]:
    """Train by the recipe and write the checkpoint to `out`."""
    corpus, tokenizer = prepare(work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    source = Source(corpus.train)

    def batches(stage: Stage, seed: int) -> Batches:
        return Batches(tokenizer, source, stage.mixture, stage.shape, seed, stage.whole)

    done: list[Progress] = []
    for number, cycle in enumerate(recipe.cycles[limits.first :], limits.first):
        torch.manual_seed(cycle.seed)
        model = (load(out, device, torch.float32) if number else Qwen3(recipe.geometry)).to(device)
        progress = train(
            model,
            batches,
            cycle.stages,
            rates=cycle.rates,
            seed=cycle.seed,
            seconds=limits.seconds,
            workers=limits.workers,
            after=partial(export, model, tokenizer, out),
        )
        done.append(progress)
        print(f"cycle {number}: {progress} {digest(model)}", flush=True)
    trained = describe(recipe, corpus, done, load(out, "cpu", torch.float32), device)
    print(json.dumps(trained), flush=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measured = evaluate(
        load(out, device, dtype), tokenizer, corpus.held_out, corpus.held_out_packages, recipe.questions
    )
    (out / "README.md").write_text(write_card(trained, measured), encoding="utf-8")
    return measured


def describe(
    recipe: Recipe, corpus: Corpus, done: Sequence[Progress], model: Qwen3, device: torch.device
) -> dict[str, Any]:
    """What the model card tells about a run."""
    geometry = recipe.geometry
    steps = {name: count for progress in done for name, count in progress.steps.items()}
    cycles = "\n".join(
        f"* cycle {number}, seed {cycle.seed}, peak rates {cycle.rates.matrices} (Muon, matrices) and "
        f"{cycle.rates.others} (AdamW, the rest), falling over the last {cycle.rates.falling:.0%}:\n  "
        + ", then ".join(
            f"{steps.get(stage.name, stage.steps)} steps of {stage.shape.rows} windows of {stage.shape.length} tokens"
            for stage in cycle.stages
        )
        for number, cycle in enumerate(recipe.cycles, 1)
    )
    tokens = sum(
        steps.get(stage.name, stage.steps) * stage.shape.tokens for cycle in recipe.cycles for stage in cycle.stages
    )
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "context")
    return {name: getattr(geometry, name) for name in sizes} | {
        "parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "python": corpus.python,
        "digest": corpus.digest,
        "files": len(corpus.train),
        "held_out": len(corpus.held_out),
        "held_out_packages": len(corpus.held_out_packages),
        "packages": fill(
            "; ".join(f"{package} ({PACKAGES[package.split()[0]]})" for package in corpus.packages),
            120,
            break_on_hyphens=False,
        ),
        "megabytes": sum(map(len, corpus.train)) / 1e6,
        "cycles": cycles,
        "tokens": tokens / 1e6,
        "seconds": sum(progress.seconds for progress in done),
        "decay": recipe.cycles[0].rates.decay,
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "weights": digest(model),
        "questions": recipe.questions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    demo = Path(__file__).parent.parent / "demo"
    parser.add_argument("--out", type=Path, default=demo, help="checkpoint folder to write (the package's own demo)")
    parser.add_argument("--work", type=Path, default=Path(".train"), help="keeps the corpus and the tokenizer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end each cycle after this time")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes for batches")
    parser.add_argument("--first", type=int, default=0, help="begin with this cycle (0, 1, ...), from what is in --out")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps of everything; give another --out")
    arguments = parser.parse_args()
    if arguments.smoke and arguments.out == demo:
        parser.error("--smoke would overwrite the demo: give another --out")
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("training needs a CUDA device; --smoke works without")
    recipe = smallest(TARGET) if arguments.smoke else TARGET
    run(recipe, arguments.work, arguments.out, Limits(arguments.seconds, arguments.workers, arguments.first))


if __name__ == "__main__":
    main()
