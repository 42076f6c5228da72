"""The steps that all runs of the family share: make batches, train, write the checkpoint and the progress."""

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
from training.train import Stage, TrainingProgress, by_parts, list_windows, train
from training.words import Source


@frozen
class DemoLimits:
    """The limits of a run.

    seconds: of training. first: the stage to begin with, from the checkpoint in the folder; the number of stages: only
    the exams are run.
    """

    seconds: float
    workers: int
    first: int
    attention: str = "flash"
    """The attention kernels: `cudnn` may be faster in long windows."""


@frozen
class Material:
    """The inputs and outputs of a run. notes: a file with the progress, from which a later run continues."""

    tokenizer: Tokenizer
    source: Source
    out: Path
    notes: Path


def in_turn(tokenizer: Tokenizer, source: Source, stage: Stage, seed: int) -> InTurn:
    """Return a stage's batches."""
    return InTurn(
        [
            Batches(tokenizer, source, each.mixture, each.shape, seed, each.whole, each.mingled)
            for each in list_windows(stage)
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
