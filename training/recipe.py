"""What the demo family is trained on, and for how long. The corpus, tokenizer and batches are shared by the family."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import evolve, frozen

from training.batches import BatchShape, Mixture
from training.chat_format import CONTROLS
from training.dialogues import chat, memory
from training.hybrid_model import HybridGeometry
from training.model import Geometry
from training.tasks import (
    CopyTokens,
    Task,
    code,
    code_questions,
    continue_code,
    copy_chat,
    copy_text,
    needle_chat,
    needle_plain,
    needle_terse,
    spelling,
    table_chat,
    table_lookup,
)
from training.tokenizer import VOCABULARY
from training.tools import tool_chat
from training.train import LearningRates, Stage

copy_tokens = CopyTokens(len(CONTROLS), VOCABULARY)

TOKENIZER_TASKS: tuple[Task, ...] = (
    *(table_lookup, table_chat, needle_chat, needle_plain, chat, chat, chat, memory, tool_chat),
)

SHORT: Mixture = {
    code: 0.36, continue_code: 0.02, code_questions: 0.05,
    table_lookup: 0.06, table_chat: 0.06, needle_plain: 0.03, needle_chat: 0.04, needle_terse: 0.04,
    copy_tokens: 0.05, copy_text: 0.02, copy_chat: 0.04, spelling: 0.04,
    chat: 0.09, memory: 0.04, tool_chat: 0.06,
}  # fmt: skip
LONG: Mixture = {
    code: 0.26, continue_code: 0.02, code_questions: 0.06,
    table_lookup: 0.05, table_chat: 0.09, needle_plain: 0.05, needle_chat: 0.08, needle_terse: 0.09,
    copy_tokens: 0.04, copy_text: 0.02, copy_chat: 0.04, spelling: 0.03,
    chat: 0.07, memory: 0.05, tool_chat: 0.05,
}  # fmt: skip


G = TypeVar("G", Geometry, HybridGeometry)


@frozen
class Recipe(Generic[G]):
    """A training run of a model of the family: stages under one rise and fall of the learning rate, with batches
    from `seed`."""

    geometry: G
    stages: tuple[Stage, ...]
    rates: LearningRates
    seed: int
    questions: int = 100
    """Documents an exam in the evaluation."""


TARGET = Recipe(
    Geometry(),
    (
        Stage("2k", BatchShape(128, 2048), SHORT, steps=3653, share=0.6, whole=0.3),
        Stage("8k", BatchShape(32, 8192), LONG, steps=1500, share=0.4, whole=0.6),
    ),
    LearningRates(matrices=5e-3, others=3e-3, falling=0.6),
    seed=1,
)


def smallest(recipe: Recipe[Geometry]) -> Recipe[Geometry]:
    """The same run, so small that it takes a CPU seconds: shows that every step of it works."""
    stages = tuple(evolve(stage, shape=BatchShape(2, 255), steps=3) for stage in recipe.stages)
    geometry = evolve(recipe.geometry, hidden=64, inner=96, heads=2, head_dim=32, context=1024)
    return evolve(recipe, geometry=geometry, stages=stages, questions=2)
