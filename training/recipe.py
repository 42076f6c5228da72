"""The training recipes of the demo family: mixtures of tasks, stages and their lengths."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import evolve, frozen

from training.agents import ToolLoop
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
from training.tool_choice import FunctionChoice
from training.tools import tool_chat
from training.train import LearningRates, Stage, Windows

copy_tokens = CopyTokens(len(CONTROLS), VOCABULARY)
tool_loop = ToolLoop()
tool_choice = FunctionChoice(tool_loop)

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
AGENT: Mixture = {
    **SHORT, code: 0.36, code_questions: 0.07, copy_tokens: 0.06, tool_chat: 0.03, tool_loop: 0.08,
}  # fmt: skip
AGENT_LONG: Mixture = {**LONG, code: 0.24, code_questions: 0.08, table_chat: 0.10, tool_chat: 0.02, tool_loop: 0.10}
AGENT_LONGEST: Mixture = {
    code: 0.14, continue_code: 0.01, code_questions: 0.07,
    table_lookup: 0.06, table_chat: 0.14, needle_plain: 0.06, needle_chat: 0.12, needle_terse: 0.10,
    copy_tokens: 0.04, copy_text: 0.02, copy_chat: 0.02, spelling: 0.02,
    chat: 0.04, memory: 0.05, tool_chat: 0.01, tool_loop: 0.11,
}  # fmt: skip
CHOICE: Mixture = {
    code: 0.26, continue_code: 0.02, code_questions: 0.06,
    table_lookup: 0.03, table_chat: 0.05, needle_plain: 0.02, needle_chat: 0.03, needle_terse: 0.03,
    copy_tokens: 0.05, copy_text: 0.02, copy_chat: 0.06, spelling: 0.04,
    chat: 0.07, memory: 0.03, tool_chat: 0.04, tool_loop: 0.07, tool_choice: 0.12,
}  # fmt: skip
CHOICE_LONG: Mixture = {
    code: 0.10, continue_code: 0.01, code_questions: 0.08,
    table_lookup: 0.04, table_chat: 0.14, needle_plain: 0.05, needle_chat: 0.13, needle_terse: 0.08,
    copy_tokens: 0.03, copy_text: 0.02, copy_chat: 0.03, spelling: 0.02,
    chat: 0.03, memory: 0.05, tool_chat: 0.02, tool_loop: 0.07, tool_choice: 0.10,
}  # fmt: skip
CHOICE_LONGEST: Mixture = {
    **CHOICE_LONG, code: 0.06, code_questions: 0.06, table_chat: 0.16, needle_chat: 0.20, needle_terse: 0.12,
}  # fmt: skip


@frozen
class Cycle:
    """Stages that share one rise and fall of the learning rate."""

    stages: tuple[Stage, ...]
    rates: LearningRates


G = TypeVar("G", Geometry, HybridGeometry)


@frozen
class Recipe(Generic[G]):
    """A training run of a model of the family, with batches from `seed`."""

    geometry: G
    cycles: tuple[Cycle, ...]
    seed: int
    questions: int = 100
    """Documents of each exam in the evaluation."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for cycle in self.cycles for stage in cycle.stages)


def make_alternating_stage(name: str, mixture: Mixture, *longer: Windows, steps: int, share: float) -> Stage:
    """Return a stage whose batches alternate: windows of 2048 tokens, then one of the longer windows, and so on."""
    short = Windows(BatchShape(64, 2048), mixture, 0.3)
    more_windows = [each for long in longer for each in (long, short)][:-1]
    return Stage(name, short.shape, mixture, steps, share, short.whole, more_windows=tuple(more_windows))


FIRST = Cycle(
    (
        Stage("2k", BatchShape(128, 2048), SHORT, steps=3653, share=0.6, whole=0.3),
        Stage("8k", BatchShape(32, 8192), LONG, steps=1500, share=0.4, whole=0.6),
    ),
    LearningRates(matrices=5e-3, others=3e-3, falling=0.6),
)
"""Language and retrieval."""

SECOND = Cycle(
    (
        Stage("2k again", BatchShape(64, 2048), AGENT, steps=3000, share=0.24, whole=0.3),
        Stage("8k again", BatchShape(16, 8192), AGENT_LONG, steps=1500, share=0.2, whole=0.6),
        Stage("32k", BatchShape(4, 32768), AGENT_LONGEST, steps=800, share=0.19, whole=0.6),
    ),
    LearningRates(matrices=2.5e-3, others=1.5e-3, falling=1.0),
)
"""Tool loops and four times the context. Its last steps have four long windows of one task each. The model forgets by
them some of what short windows had taught.
"""

THIRD = Cycle(
    (
        Stage("2k at last", BatchShape(64, 2048), AGENT, steps=500, share=0.07, whole=0.3),
        make_alternating_stage(
            "every length",
            AGENT,
            Windows(BatchShape(16, 8192), AGENT_LONG, 0.5, mingled=True),
            Windows(BatchShape(4, 32768), AGENT_LONGEST, 0.4, mingled=True),
            steps=800,
            share=0.13,
        ),
    ),
    LearningRates(matrices=1.5e-3, others=1e-3, falling=1.0),
)
"""Every length in turn, so that none is forgotten, with documents of any tasks in a window."""

FOURTH = Cycle(
    (
        Stage("choices", BatchShape(64, 2048), CHOICE, steps=1000, share=0.12, whole=0.3),
        make_alternating_stage(
            "every length again",
            CHOICE,
            Windows(BatchShape(4, 32768), CHOICE_LONGEST, 0.6, mingled=True),
            Windows(BatchShape(8, 16384), CHOICE_LONG, 0.6, mingled=True),
            steps=2400,
            share=0.32,
        ),
    ),
    LearningRates(matrices=1.5e-3, others=9e-4, falling=1.0),
)
"""The choice of the function that a request needs: nearly all failures of tool loops after the third cycle."""

TARGET = Recipe(Geometry(context=32768), (FIRST, SECOND, THIRD, FOURTH), seed=1)


def narrow_windows(windows: Windows) -> Windows:
    return evolve(windows, shape=BatchShape(2, 191))


def shorten_cycle(cycle: Cycle) -> Cycle:
    """Return the same cycle with a few tiny steps."""
    return evolve(
        cycle,
        stages=tuple(
            evolve(
                stage, shape=BatchShape(2, 255), steps=3, more_windows=tuple(map(narrow_windows, stage.more_windows))
            )
            for stage in cycle.stages
        ),
    )


def shrink_recipe(recipe: Recipe[Geometry]) -> Recipe[Geometry]:
    """Return the same run, so small that a CPU needs seconds for it. It shows that every step works."""
    geometry = evolve(recipe.geometry, hidden=64, inner=96, heads=2, head_dim=32, context=1024)
    return evolve(recipe, geometry=geometry, cycles=tuple(map(shorten_cycle, recipe.cycles)), questions=2)
