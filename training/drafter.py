"""Trains the demo's drafter, which scores prompts for compression: training, export, exams, model card.

`python -m training.drafter` needs a CUDA device; `--smoke` shows on any machine that every step works.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from attrs import evolve
from tokenizers import Tokenizer

from adapters.demo import FOLDER
from training.arguments import build_parser, parse_arguments
from training.batches import BatchShape, Mixture
from training.corpus import HeldOut
from training.demo import attend_with, describe, prepare
from training.dialogues import chat, memory
from training.draft import describe_time_limit
from training.drafter_card import write_drafter_card
from training.drafter_evaluate import evaluate_drafter
from training.drafter_model import GEOMETRY, SEARCHING, ScoringModel
from training.export import load, load_drafter
from training.model import Geometry
from training.recipe import Cycle, Recipe, copy_tokens, shorten_cycle, tool_choice, tool_loop
from training.staging import DemoLimits, Material, run_cycles
from training.tasks import (
    code,
    code_questions,
    copy_chat,
    needle_chat,
    needle_plain,
    needle_terse,
    spelling,
    table_chat,
    table_lookup,
)
from training.train import LearningRates, Stage, Windows, digest, list_windows
from training.words import Source

FINDING: Mixture = {
    code: 0.20, code_questions: 0.08,
    table_lookup: 0.06, table_chat: 0.14, needle_plain: 0.06, needle_chat: 0.16, needle_terse: 0.10,
    copy_tokens: 0.05, copy_chat: 0.03, spelling: 0.05,
    chat: 0.02, memory: 0.05, tool_loop: 0.05, tool_choice: 0.02,
}  # fmt: skip
ASKING: Mixture = {
    **FINDING, code: 0.12, code_questions: 0.06, table_chat: 0.16, needle_chat: 0.30, copy_tokens: 0.02, spelling: 0.02,
}  # fmt: skip


def longer(mixture: Mixture) -> tuple[Windows, Windows]:
    return (
        Windows(BatchShape(16, 8192), mixture, 0.6, mingled=True),
        Windows(BatchShape(8, 16384), mixture, 0.7, mingled=True),
    )


DRAFTER = Recipe(
    GEOMETRY,
    (
        Cycle(
            (
                Stage("2k", BatchShape(64, 2048), FINDING, steps=4000, share=0.2, whole=0.3),
                Stage(
                    "2k and more",
                    BatchShape(64, 2048),
                    FINDING,
                    steps=4000,
                    share=0.3,
                    whole=0.3,
                    more_windows=longer(FINDING),
                ),
            ),
            LearningRates(matrices=6e-3, others=4e-3, falling=0.7),
        ),
        Cycle(
            (
                Stage(
                    "8k and others",
                    BatchShape(16, 8192),
                    ASKING,
                    steps=8000,
                    share=0.5,
                    whole=0.6,
                    mingled=True,
                    more_windows=(Windows(BatchShape(64, 2048), ASKING, 0.3), longer(ASKING)[1]),
                ),
            ),
            LearningRates(matrices=3e-3, others=2e-3, falling=1.0),
        ),
    ),
    seed=7,
    questions=64,
)
"""To find things, then to find what is asked for among others like it."""


def smallest_drafter(recipe: Recipe[Geometry]) -> Recipe[Geometry]:
    """The same run, so small that it takes a CPU seconds: shows that every step of it works."""
    geometry = evolve(recipe.geometry, hidden=64, inner=96, head_dim=32, context=8192)
    return evolve(recipe, geometry=geometry, cycles=tuple(map(shorten_cycle, recipe.cycles)), questions=1)


def run(
    recipe: Recipe[Geometry], work: Path, target: Path, out: Path, limits: DemoLimits
) -> dict[str, dict[str, float]]:
    """Train by the recipe and write the checkpoint to `out`, after every stage; then the exams, with the `target` in
    its folder, and the model card."""
    corpus, _ = prepare(work)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    attend_with(limits.attention)

    torch.manual_seed(recipe.seed)
    model = ScoringModel(recipe.geometry)
    if limits.first:
        model.load_state_dict(load_drafter(out, "cpu", torch.float32).state_dict())
    model.to(device)

    progress = run_cycles(model, recipe, Material(tokenizer, Source(corpus.train), out, work / "drafter.json"), limits)
    attend_with("flash")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shipped, reader = load_drafter(out, device, dtype), load(target, device, dtype)
    facts = describe(recipe, corpus, progress, shipped, device) | {
        "target_weights": digest(reader),
        "questions": recipe.questions,
        "longest": max(windows.shape.length for stage in recipe.stages for windows in list_windows(stage)),
        "share": ScoringModel.share,
        "searching": SEARCHING,
        "ended": describe_time_limit(limits.seconds),
    }
    print(json.dumps(facts), flush=True)
    began = time.monotonic()
    measured = evaluate_drafter(shipped, reader, tokenizer, HeldOut.of(corpus), recipe.questions)
    (out / "README.md").write_text(write_drafter_card(facts, measured), encoding="utf-8")
    print(f"training took {progress.seconds:.0f} s, the exams {time.monotonic() - began:.0f} s", flush=True)
    return measured


def main() -> None:
    parser = build_parser(__doc__, FOLDER / "drafter")
    parser.add_argument("--target", type=Path, default=FOLDER, help="checkpoint folder of the model that answers")
    parser.add_argument("--attention", choices=("flash", "cudnn"), default="flash", help="whose kernels attend")
    given = parse_arguments(parser)
    recipe = smallest_drafter(DRAFTER) if given.smoke else DRAFTER
    limits = DemoLimits(given.seconds, given.workers, given.first, given.attention)
    run(recipe, given.work, given.target, given.out, limits)


if __name__ == "__main__":
    main()
