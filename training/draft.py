"""Trains the demo's draft on the demo's target: generation by the target, training, export, exams, model card.

`python -m training.draft` needs a CUDA device; `--smoke` shows on any machine that every step works.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from tokenizers import Tokenizer

from adapters.demo import FOLDER
from training.arguments import build_parser, parse_arguments
from training.batches import Batches, BatchShape, InTurn, Mixture
from training.chat_format import MASK
from training.corpus import HeldOut
from training.demo import prepare
from training.dialogues import chat
from training.draft_card import write_draft_card
from training.draft_evaluate import SUBJECTS, TEMPERATURE, answer_all, evaluate_draft
from training.draft_export import export_draft, load_draft
from training.draft_model import DraftGeometry, DraftNetwork
from training.draft_train import (
    SPOKEN,
    DraftLoss,
    Pool,
    Speech,
    count_row_blocks,
    generate_pool,
    list_block_sizes,
    mix_with_pool,
)
from training.export import load
from training.model import Qwen3
from training.recipe import CHOICE, CHOICE_LONG, LONG, SHORT, tool_loop
from training.staging import in_turn
from training.tasks import code, continue_code, copy_chat
from training.tools import tool_chat
from training.train import LearningRates, Stage, TrainingProgress, Windows, digest, list_windows, train
from training.words import Source


def with_less_code(mixture: Mixture) -> Mixture:
    """Return a mixture with less real code, because most of each batch is code that the target generated."""
    calls: Mixture = {tool_chat: 0.08, tool_loop: 0.12, chat: 0.16} if tool_loop in mixture else {tool_chat: 0.12}
    return {**mixture, code: 0.06, continue_code: 0.04, copy_chat: 0.08, **calls}


@frozen
class DraftRecipe:
    """A training run of the draft. speeches: the text that the target generates first, by the length of the stages."""

    speeches: Mapping[int, Speech]
    stages: tuple[Stage, ...]
    geometry: DraftGeometry = field(factory=DraftGeometry)
    rates: LearningRates = field(factory=lambda: LearningRates(matrices=4e-3, others=2e-3, falling=0.7))
    blocks: int = 512
    """The most blocks of a row; there are fewer if an eighth of the row's tokens is less."""

    seed: int = 3
    speaking: float = 0.15
    """The time that the target may spend on each of the speeches: a share of the training time, in addition to it."""

    questions: int = 48
    """Prompts for each subject in the evaluation."""

    saving: int = 4
    """Prompts for each subject of code in the short evaluation after a stage; 0: there is none."""


BEGAN = "Layers began as the target's last ones."
WENT_ON = "It began as an earlier draft (`--again`)."

BLOCKS = (4, 8, 16)
"""Sizes of blocks in the exams: those that the server uses."""

SHORTER, LONGER = map(with_less_code, (SHORT, LONG))
CHOICE_SHORTER, CHOICE_LONGER = map(with_less_code, (CHOICE, CHOICE_LONG))

DRAFT = DraftRecipe(
    {
        1024: Speech(rows=3072, rounds=16, least=32, most=768, answer=256),
        8192: Speech(rows=256, rounds=4, least=1536, most=7900, answer=256),
    },
    (
        *(Stage(f"1k {part}", BatchShape(64, 1024), SHORTER, steps=1000, share=0.25, whole=0.3) for part in "abc"),
        Stage("8k", BatchShape(8, 8192), LONGER, steps=500, share=0.25, whole=0.6),
    ),
)
"""For the target after its first cycle, which is the demo as shipped."""

AGAIN = DraftRecipe(
    {
        1024: Speech(rows=3072, rounds=16, least=32, most=768, answer=256),
        8192: Speech(rows=256, rounds=1, least=1536, most=7900, answer=256),
    },
    (
        Stage(
            "1k and 8k",
            BatchShape(64, 1024),
            CHOICE_SHORTER,
            steps=6000,
            share=1.0,
            whole=0.3,
            more_windows=(
                *[Windows(BatchShape(64, 1024), CHOICE_SHORTER, 0.3)] * 3,
                Windows(BatchShape(8, 8192), CHOICE_LONGER, 0.6),
            ),
        ),
    ),
    rates=LearningRates(matrices=2.5e-3, others=1.25e-3, falling=1.0),
    blocks=256,
    seed=7,
    saving=0,
)
"""For the target as shipped: the draft goes on from what it is, with both lengths in turn."""


def shrink_draft_recipe(recipe: DraftRecipe) -> DraftRecipe:
    """Return the same run, so small that a CPU needs a minute for it. It shows that every step works."""
    lengths = dict(zip(sorted(recipe.speeches), (128, 192, 256), strict=False))

    def few(shape: BatchShape) -> BatchShape:
        return BatchShape(2, lengths[shape.length])

    return evolve(
        recipe,
        speeches={
            lengths[length]: evolve(speech, rows=3, rounds=1, least=32, most=64, answer=32)
            for length, speech in recipe.speeches.items()
        },
        stages=tuple(
            evolve(
                stage,
                shape=few(stage.shape),
                steps=2,
                more_windows=tuple(evolve(each, shape=few(each.shape)) for each in stage.more_windows[-1:]),
            )
            for stage in recipe.stages
        ),
        questions=1,
        saving=1,
    )


@frozen
class Folders:
    """The folders of a run. target: its checkpoint. out: the draft's checkpoint, to be written. work: the corpus."""

    target: Path
    out: Path
    work: Path


@frozen
class DraftLimits:
    """The limits of a run.

    seconds: of training. workers: processes that make batches. first: the stage to begin with, from the checkpoint in
    the draft's folder; the number of stages: only the exams are run.
    """

    seconds: float
    workers: int
    first: int
    again: bool = False
    """True: training continues from the draft in the folder, which was trained for an earlier target."""


def run(recipe: DraftRecipe, folders: Folders, limits: DraftLimits) -> dict[str, dict[str, float]]:
    """Train by the recipe and write the checkpoint. Return the tokens of a round by subject and way of decoding."""
    corpus, _ = prepare(folders.work)
    tokenizer = Tokenizer.from_file(str(folders.target / "tokenizer.json"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # attention under a mask: the kernels that have always had it
    torch.manual_seed(recipe.seed)
    target = load(folders.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    target.requires_grad_(requires_grad=False)
    draft = DraftNetwork(evolve(recipe.geometry, target=target.geometry)).to(device)
    if limits.first or limits.again:
        draft.load_state_dict(load_draft(folders.out, device, torch.float32).state_dict())
    else:
        draft.inherit(target)
    source, names = Source(corpus.train), [stage.name for stage in recipe.stages]
    pools = {
        length: generate_pool(
            target,
            Batches(
                tokenizer,
                source,
                {code: 1.0},
                BatchShape(min(speech.rows, 128), speech.most),
                seed=length + recipe.seed,
            ),
            speech,
            length + 1,
            seconds=limits.seconds * recipe.speaking,
            workers=limits.workers,
        )
        for length, speech in recipe.speeches.items()
        if limits.first < len(recipe.stages)
    }
    codes = [subject for subject in SUBJECTS if subject.name.startswith("code") and recipe.saving]
    few = answer_all(target, tokenizer, HeldOut.of(corpus), recipe.saving, (0.0, TEMPERATURE), subjects=codes)
    notes = folders.work / "draft.json"

    def batches(stage: Stage, seed: int) -> InTurn:
        own = 100 * seed + names.index(stage.name)  # no two stages see the same batches
        return InTurn(
            [mix_with_pool(part, pools[part.shape.length]) for part in in_turn(tokenizer, source, stage, own).parts]
        )

    def save(progress: TrainingProgress) -> None:
        export_draft(draft, folders.out)
        progress.save(notes)
        evaluate_draft(draft, target, few, (recipe.geometry.block,))

    progress = train(
        DraftLoss(draft, target, recipe.blocks),
        batches,
        recipe.stages,
        rates=recipe.rates,
        seed=recipe.seed,
        seconds=limits.seconds,
        workers=limits.workers,
        after=save,
        first=limits.first,
        before=TrainingProgress.load(notes) if limits.first else None,
    )
    start = WENT_ON if limits.again else BEGAN
    trained = describe(recipe, pools, progress, draft, target) | {
        "ended": describe_time_limit(limits.seconds, again=limits.again),
        "began": start,
    }
    print(json.dumps(trained), flush=True)
    shipped = load_draft(folders.out, device, next(target.parameters()).dtype)
    began = time.monotonic()
    measured: dict[str, dict[str, float]] = {}
    for subject in SUBJECTS:
        asked = answer_all(
            target, tokenizer, HeldOut.of(corpus), recipe.questions, (0.0, TEMPERATURE), subjects=[subject]
        )
        measured |= evaluate_draft(shipped, target, asked, BLOCKS)
        if measured:
            (folders.out / "README.md").write_text(write_draft_card(trained, measured, TEMPERATURE), encoding="utf-8")
    print(f"training took {progress.seconds:.0f} s, the exams {time.monotonic() - began:.0f} s", flush=True)
    return measured


def describe_time_limit(seconds: float, *, again: bool = False) -> str:
    """Return the sentence of the model card about a run that a time limit ended; empty: there was no limit."""
    words = f"{'--again ' if again else ''}--seconds {seconds:g}"
    return "" if math.isinf(seconds) else f' This one was ended by the clock, with `ARGS="{words}"`.'


def describe(
    recipe: DraftRecipe, pools: Mapping[int, Pool], progress: TrainingProgress, draft: DraftNetwork, target: Qwen3
) -> dict[str, Any]:
    """Return the facts of a run that the model card shows. pools: empty if only the exams were run."""
    planned = sum(speech.rows * speech.rounds * speech.answer for speech in recipe.speeches.values())
    said = sum(len(pool.tokens) * pool.answer for pool in pools.values()) or planned
    block = draft.geometry.block
    stages = "\n".join(
        f"* {progress.steps.get(stage.name, 0)} steps of "
        + " or ".join(
            f"{shape.rows} windows of {shape.length} tokens (each with {describe_blocks(block, recipe, shape)})"
            for shape in dict.fromkeys(each.shape for each in list_windows(stage))
        )
        for stage in recipe.stages
    )
    return {
        "parameters": sum(parameter.numel() for parameter in draft.parameters()) / 1e6,
        "layers": draft.geometry.layers,
        "taps": ", ".join(map(str, draft.geometry.aux_layers)),
        "target_layers": target.geometry.layers,
        "block": draft.geometry.block,
        "mask": MASK,
        "cache": 2 * draft.geometry.layers * target.geometry.kv_heads * target.geometry.head_dim * 2,
        "target_weights": digest(target),
        "weights": digest(draft),
        "spoken": f"{SPOKEN:.0%}",
        "said": said / 1e6,
        "stages": stages,
        "matrices": recipe.rates.matrices,
        "others": recipe.rates.others,
        "falling": recipe.rates.falling,
        "seconds": progress.seconds,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "questions": recipe.questions,
    }


def describe_blocks(block: int, recipe: DraftRecipe, shape: BatchShape) -> str:
    """Return the numbers and sizes of the blocks in a window, as text."""
    found = list_block_sizes(block, count_row_blocks(recipe.blocks, shape.length))
    return ", ".join(f"{count} blocks of {size}" for size, count in found)


def main() -> None:
    parser = build_parser(__doc__, FOLDER / "draft")
    parser.add_argument("--target", type=Path, default=FOLDER, help="checkpoint folder of the target")
    parser.add_argument("--again", action="store_true", help="go on from the draft in --out, with the target changed")
    arguments = parse_arguments(parser)
    recipe = AGAIN if arguments.again else DRAFT
    recipe = shrink_draft_recipe(recipe) if arguments.smoke else recipe
    folders = Folders(arguments.target, arguments.out, arguments.work)
    run(recipe, folders, DraftLimits(arguments.seconds, arguments.workers, arguments.first, arguments.again))


if __name__ == "__main__":
    main()
