"""What every run of the family does: batches for a stage, the checkpoint and how far it is after it, cycle by cycle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from attrs import frozen
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.batches import Batches, InTurn
from training.export import Trained, export
from training.recipe import G, Recipe
from training.train import Stage, TrainingProgress, by_parts, train, windows_of
from training.words import Source


@frozen
class DemoLimits:
    """`seconds`: of training.  `first`: the stage to begin with, from what is in the checkpoint folder; the number of
    stages, to sit the exams alone."""

    seconds: float
    workers: int
    first: int
    attention: str = "flash"
    """Whose kernels: `cudnn` may be faster in long windows."""


@frozen
class Material:
    """What a run learns from and where it writes. `notes`: a file that tells how far it is, to go on from."""

    tokenizer: Tokenizer
    source: Source
    out: Path
    notes: Path


def in_turn(tokenizer: Tokenizer, source: Source, stage: Stage, seed: int) -> InTurn:
    """A stage's batches."""
    return InTurn(
        [
            Batches(tokenizer, source, each.mixture, each.shape, seed, each.whole, each.mingled)
            for each in windows_of(stage)
        ]
    )


def run_cycles(
    model: Trained,
    recipe: Recipe[G],
    material: Material,
    limits: DemoLimits,
    compiled: Callable[[nn.Module], Callable[..., Tensor]] = by_parts,
) -> TrainingProgress:
    """Train in place, one cycle after the other, and write the checkpoint after every stage."""
    progress = TrainingProgress.load(material.notes) if limits.first else TrainingProgress()
    first = limits.first

    def save(progress: TrainingProgress) -> None:
        export(model, material.tokenizer, material.out)
        progress.save(material.notes)

    for number, cycle in enumerate(recipe.cycles):
        progress = train(
            model,
            partial(in_turn, material.tokenizer, material.source),
            cycle.stages,
            rates=cycle.rates,
            seed=recipe.seed + number,
            seconds=limits.seconds,
            workers=limits.workers,
            after=save,
            first=min(first, len(cycle.stages)),
            before=progress,
            compiled=compiled,
        )
        first = max(0, first - len(cycle.stages))
    return progress
