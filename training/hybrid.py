"""Trains the hybrid demo and its prediction head from nothing: training, export, exams, model card.

`python -m training.hybrid` needs a CUDA device; `--smoke` shows on any machine that every step works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import evolve
from tokenizers import Tokenizer

from adapters.demo import FOLDER
from training.arguments import build_parser, parse_arguments
from training.batches import BatchShape
from training.card import write_card
from training.corpus import HeldOut
from training.demo import describe, prepare
from training.draft import describe_time_limit
from training.evaluate import evaluate
from training.export import load_hybrid
from training.hybrid_card import CARD
from training.hybrid_model import DEPTHS, Hybrid, HybridGeometry
from training.recipe import LONG, SHORT, Cycle, Recipe, shorten_cycle
from training.staging import DemoLimits, Material, run_cycles
from training.tokenizer import encode
from training.train import LearningRates, Stage
from training.words import Source

HYBRID = Recipe(
    HybridGeometry(),
    (
        Cycle(
            (
                Stage("2k", BatchShape(64, 2048), SHORT, steps=2000, share=0.5, whole=0.3),
                Stage("8k", BatchShape(16, 8192), LONG, steps=2000, share=0.5, whole=0.6),
            ),
            LearningRates(matrices=5e-3, others=3e-3, falling=0.6),
        ),
    ),
    seed=5,
    questions=50,
)


def shrink_hybrid_recipe(recipe: Recipe[HybridGeometry]) -> Recipe[HybridGeometry]:
    """Return the same run, so small that a CPU needs seconds for it. It shows that every step works."""
    cycles = tuple(map(shorten_cycle, recipe.cycles))
    geometry = evolve(recipe.geometry, hidden=64, inner=96, head_dim=32, context=1024)
    return evolve(recipe, geometry=geometry, cycles=cycles, questions=2)


def run(recipe: Recipe[HybridGeometry], work: Path, out: Path, limits: DemoLimits) -> dict[str, float]:
    """Train by the recipe and write the checkpoint to `out`, after every stage; then the exams and the model card."""
    corpus, tokenizer = prepare(work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(recipe.seed)
    model = (load_hybrid(out, device, torch.float32) if limits.first else Hybrid(recipe.geometry)).to(device)

    material = Material(tokenizer, Source(corpus.train), out, work / "hybrid.json")
    progress = run_cycles(model, recipe, material, limits, compiled=lambda _: model.compile_parts())
    geometry = {name: getattr(recipe.geometry, name) for name in ("key_heads", "value_heads", "linear_dim")}
    facts = geometry | {"depths": DEPTHS, "ended": describe_time_limit(limits.seconds)}
    trained = describe(recipe, corpus, progress, load_hybrid(out, "cpu", torch.float32), device) | facts
    print(json.dumps(trained), flush=True)
    began = time.monotonic()
    shipped = load_hybrid(out, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    held_out = HeldOut.of(corpus)
    agreements = agreement(shipped, tokenizer, held_out.stdlib, min(2048, recipe.geometry.context))
    measured = evaluate(shipped, tokenizer, held_out, recipe.questions, limits.workers)
    for depth, share in enumerate(agreements, 1):
        measured[f"head, token {depth} in a row"] = share
    (out / "README.md").write_text(write_card(trained, measured, CARD), encoding="utf-8")
    print(f"training took {progress.seconds:.0f} s, the exams {time.monotonic() - began:.0f} s", flush=True)
    return measured


@torch.inference_mode()
def agreement(model: Hybrid, tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[float]:
    """Return how often the head's likeliest token is the model's, for each of DEPTHS positions.

    A position counts where the head was right at all positions before it.
    """
    asked, hits = [0] * DEPTHS, [0] * DEPTHS
    for ids in encode(tokenizer, texts):
        for start in range(0, len(ids) - DEPTHS, length):
            tokens = torch.tensor([ids[start : start + length]], device=model.cos.device)
            ahead = hidden = model.compute_hidden(tokens)
            said = model.logits(hidden).argmax(-1)[0]
            agreed = torch.ones_like(said, dtype=torch.bool)
            for depth in range(DEPTHS):
                ahead = model.ahead(tokens, ahead, first=depth == 0)
                right = model.logits(ahead).argmax(-1)[0] == said
                before = torch.cat((agreed.new_zeros(1), agreed[:-1])) if depth else agreed
                asked[depth] += int(before.sum())
                agreed = right & before
                hits[depth] += int(agreed.sum())
    found = [hit / max(count, 1) for hit, count in zip(hits, asked, strict=True)]
    print("the head agrees: " + ", ".join(f"{share:.2%}" for share in found), flush=True)
    return found


def main() -> None:
    arguments = parse_arguments(build_parser(__doc__, FOLDER / "hybrid"))
    recipe = shrink_hybrid_recipe(HYBRID) if arguments.smoke else HYBRID
    run(recipe, arguments.work, arguments.out, DemoLimits(arguments.seconds, arguments.workers, arguments.first))


if __name__ == "__main__":
    main()
