"""Trains the demo target from nothing: corpus, tokenizer, training, export, exams, model card.

`python -m training.demo` needs a CUDA device; `--smoke` shows on any machine that every step works.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from tokenizers import Tokenizer

from adapters.demo import FOLDER
from training.arguments import build_parser, parse_arguments
from training.card import write_card
from training.corpus import MOST, Corpus, HeldOut, read_corpus
from training.evaluate import evaluate
from training.export import Trained, load
from training.model import Geometry, Qwen3
from training.packages import MORE, PACKAGES
from training.recipe import TARGET, TOKENIZER_TASKS, Cycle, G, Recipe, shrink_recipe
from training.staging import DemoLimits, Material, run_cycles
from training.tokenizer import train_tokenizer
from training.train import TrainingProgress, digest, list_windows
from training.words import Source


def prepare(work: Path) -> tuple[Corpus, Tokenizer]:
    """Return the corpus and the tokenizer, built now or read from `work`, where an earlier call saved them.

    Packages that only the corpus needs may be installed in the folder `packages` of `work`.
    """
    work.mkdir(parents=True, exist_ok=True)
    corpus_file, tokenizer_file = work / "corpus.json.xz", work / "tokenizer.json"
    if not corpus_file.exists():
        sys.path.append(str(work / "packages"))
        read_corpus().save(corpus_file)
    corpus = Corpus.load(corpus_file)
    print(
        f"corpus: Python {corpus.python}, {len(corpus.train)} files, {len(corpus.held_out)} of the library and "
        f"{len(corpus.held_out_packages)} of packages held out, {len(corpus.apart)} of packages apart, {corpus.digest}"
    )
    if not tokenizer_file.exists():
        train_tokenizer(corpus, TOKENIZER_TASKS).save(str(tokenizer_file), pretty=False)
    return corpus, Tokenizer.from_file(str(tokenizer_file))


def run(recipe: Recipe[Geometry], work: Path, out: Path, limits: DemoLimits) -> dict[str, float]:
    """Train by the recipe and write the checkpoint to `out`, after every stage; then the exams and the model card."""
    corpus, tokenizer = prepare(work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    attend_with(limits.attention)
    source = Source(corpus.train)

    torch.manual_seed(recipe.seed)
    model = Qwen3(recipe.geometry)
    if limits.first:
        model.load_state_dict(load(out, "cpu", torch.float32).state_dict())
    model.to(device)

    progress = run_cycles(model, recipe, Material(tokenizer, source, out, work / "target.json"), limits)
    trained = describe(recipe, corpus, progress, load(out, "cpu", torch.float32), device)
    print(json.dumps(trained), flush=True)
    attend_with("flash")
    began = time.monotonic()
    shipped = load(out, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    measured = evaluate(shipped, tokenizer, HeldOut.of(corpus), recipe.questions, limits.workers)
    (out / "README.md").write_text(write_card(trained, measured), encoding="utf-8")
    print(f"training took {progress.seconds:.0f} s, the exams {time.monotonic() - began:.0f} s", flush=True)
    return measured


def attend_with(kernels: str) -> None:
    """Choose the attention kernels on CUDA: `flash` or `cudnn`."""
    torch.backends.cuda.enable_flash_sdp(kernels == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(kernels == "flash")
    torch.backends.cuda.enable_cudnn_sdp(kernels == "cudnn")


def describe(
    recipe: Recipe[G], corpus: Corpus, progress: TrainingProgress, model: Trained, device: torch.device
) -> dict[str, Any]:
    """Return the facts of a run that the model card shows."""
    cycles = "\n".join(f"{number}. {describe_cycle(cycle, progress)}" for number, cycle in enumerate(recipe.cycles, 1))
    licences = PACKAGES | MORE
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "context")
    return {name: getattr(recipe.geometry, name) for name in sizes} | {
        "parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "python": corpus.python,
        "digest": corpus.digest,
        "files": len(corpus.train),
        "held_out": len(corpus.held_out),
        "held_out_packages": len(corpus.held_out_packages),
        "apart": len(corpus.apart),
        "packages_apart": ", ".join(corpus.packages_apart),
        "packages": fill_lines("; ".join(f"{package} ({licences[package.split()[0]]})" for package in corpus.packages)),
        "most": MOST / 1e6,
        "megabytes": sum(map(len, corpus.train)) / 1e6,
        "seed": recipe.seed,
        "cycles": cycles,
        "tokens": progress.tokens / 1e6,
        "seconds": progress.seconds,
        "decay": recipe.cycles[-1].rates.decay,
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "weights": digest(model),
        "questions": recipe.questions,
    }


def describe_cycle(cycle: Cycle, progress: TrainingProgress) -> str:
    stages = ",\n   then ".join(
        f"{progress.steps.get(stage.name, 0)} steps of "
        + " or ".join(
            dict.fromkeys(f"{each.shape.rows} windows of {each.shape.length} tokens" for each in list_windows(stage))
        )
        for stage in cycle.stages
    )
    rates = cycle.rates
    return (
        f"peak rates {rates.matrices} (Muon, matrices) and {rates.others} (AdamW, the rest), falling over the last "
        f"{rates.falling:.0%}:\n   {stages};"
    )


def fill_lines(text: str) -> str:
    return fill(text, 120, break_on_hyphens=False)


def main() -> None:
    parser = build_parser(__doc__, FOLDER)
    parser.add_argument("--attention", choices=("flash", "cudnn"), default="flash", help="whose kernels attend")
    arguments = parse_arguments(parser)
    recipe = shrink_recipe(TARGET) if arguments.smoke else TARGET
    run(
        recipe,
        arguments.work,
        arguments.out,
        DemoLimits(arguments.seconds, arguments.workers, arguments.first, arguments.attention),
    )


if __name__ == "__main__":
    main()
