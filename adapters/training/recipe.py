"""What the demo family is trained on, and for how long. The corpus, tokenizer and batches are shared by the family."""

from __future__ import annotations

from attrs import evolve, field, frozen

from adapters.training.batches import Mixture, Shape
from adapters.training.chat_format import CONTROLS
from adapters.training.dialogues import chat, memory
from adapters.training.model import Geometry
from adapters.training.tasks import (
    CopyTokens,
    Task,
    code,
    code_questions,
    continue_code,
    copy_chat,
    copy_text,
    needle_chat,
    needle_plain,
    table_chat,
    table_lookup,
)
from adapters.training.tokenizer import VOCABULARY
from adapters.training.tools import tool_chat
from adapters.training.train import Rates, Stage

copy_tokens = CopyTokens(len(CONTROLS), VOCABULARY)

TOKENIZER_TASKS: tuple[Task, ...] = (
    *(table_lookup, table_chat, needle_chat, needle_plain, chat, chat, chat, memory, tool_chat),
)

SHORT: Mixture = {
    code: 0.24, continue_code: 0.02, code_questions: 0.05,
    table_lookup: 0.10, table_chat: 0.08, needle_plain: 0.06, needle_chat: 0.08,
    copy_tokens: 0.07, copy_text: 0.03, copy_chat: 0.05,
    chat: 0.12, memory: 0.05, tool_chat: 0.09,
}  # fmt: skip
LONG: Mixture = {
    code: 0.18, continue_code: 0.02, code_questions: 0.08,
    table_lookup: 0.06, table_chat: 0.09, needle_plain: 0.08, needle_chat: 0.16,
    copy_tokens: 0.05, copy_text: 0.03, copy_chat: 0.05,
    chat: 0.10, memory: 0.07, tool_chat: 0.08,
}  # fmt: skip


@frozen
class Recipe:
    """One training run of a model of the family."""

    geometry: Geometry
    stages: tuple[Stage, ...]
    rates: Rates = field(factory=Rates)
    seed: int = 1
    questions: int = 100
    """Documents an exam in the evaluation."""


TARGET = Recipe(
    Geometry(),
    (
        Stage("2k", Shape(128, 2048), SHORT, steps=6000, share=0.62, whole=0.3),
        Stage("8k", Shape(32, 8192), LONG, steps=2000, share=0.38, whole=0.6),
    ),
)


def smallest(recipe: Recipe) -> Recipe:
    """The same run, so small that it takes a CPU seconds: shows that every step of it works."""
    return evolve(
        recipe,
        geometry=evolve(recipe.geometry, hidden=64, inner=96, layers=2, heads=2, head_dim=32, context=256),
        stages=tuple(evolve(stage, shape=Shape(2, 255), steps=3) for stage in recipe.stages),
        questions=2,
    )
