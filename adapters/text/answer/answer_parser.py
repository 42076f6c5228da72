"""Parses the answers of a checkpoint, by the form of its tool calls and the tags of its reasoning.

Both have names. They are detected in what the chat template writes (`detect_call_form.py`), or chosen at start.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attrs import define, field, frozen

from adapters.text.answer.answer_pieces import AnswerPiece, ReasoningPiece, TextPiece
from adapters.text.answer.forms.call_form import CallForm
from adapters.text.answer.forms.gemma_calls import GemmaCalls
from adapters.text.answer.forms.harmony_calls import HarmonyCalls
from adapters.text.answer.forms.json_calls import HermesCalls, LlamaJsonCalls
from adapters.text.answer.forms.mistral_calls import MistralCalls, MistralJsonCalls
from adapters.text.answer.forms.other_tagged_calls import GlmCalls, MiniMaxCalls, SeedCalls
from adapters.text.answer.forms.pythonic_calls import PythonicCalls
from adapters.text.answer.forms.xml_calls import XmlCalls
from adapters.text.answer.reasoning import ReasoningParser, ReasoningTags
from adapters.text.conversation import FunctionTool, ToolChoice

CALL_FORMS: Mapping[str, type[CallForm]] = {
    "hermes": HermesCalls,
    "qwen-xml": XmlCalls,
    "seed-xml": SeedCalls,
    "minimax-xml": MiniMaxCalls,
    "glm-xml": GlmCalls,
    "mistral-json": MistralJsonCalls,
    "mistral": MistralCalls,
    "harmony": HarmonyCalls,
    "llama3-json": LlamaJsonCalls,
    "pythonic": PythonicCalls,
    "gemma4": GemmaCalls,
}
REASONING: Mapping[str, ReasoningTags] = {
    "think": ReasoningTags("<think>", "</think>"),
    "seed": ReasoningTags("<seed:think>", "</seed:think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "gemma4": ReasoningTags("<|channel>", "<channel|>", "thought"),
}
NONE = "none"  # can be chosen at start: calls or reasoning stay text
TOOL_PARSERS = (*CALL_FORMS, NONE)
REASONING_PARSERS = (*REASONING, NONE)


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


@frozen
class AnswerReader:
    """The way in which the answers to one request are read.

    calls: the name of the form of calls. `none`: calls stay text.
    tools: the functions that may be called, by name.
    parallel: there may be several calls.
    reasoning: the name of the tags of reasoning. `none`: reasoning stays text.
    starts_in_reasoning: the template has already opened the reasoning.
    choice: which calls the client asks for.
    """

    calls: str = NONE
    tools: Mapping[str, FunctionTool] = field(factory=dict)
    parallel: bool = True
    reasoning: str = NONE
    starts_in_reasoning: bool = False
    choice: ToolChoice = field(factory=ToolChoice)

    def check_choice(self, called: Sequence[str]) -> bool | None:
        """Does an answer with these calls satisfy the client's choice? None: every answer does."""
        choice = self.choice
        if choice.kind in {"auto", "none"} and not choice.allowed_names:
            return None
        return (bool(called) or choice.kind == "auto") and all(map(choice.allows, called))

    def _find_form(self) -> type[CallForm] | None:
        form = CALL_FORMS.get(self.calls)
        return form if form is not None and (self.tools or form.reads_everything) else None

    @property
    def visible_controls(self) -> Sequence[str]:
        """The control tokens that the parser must see."""
        tags = REASONING.get(self.reasoning)
        form = self._find_form()
        return (*((tags.opening, tags.closing) if tags else ()), *(form.controls if form else ()))

    def start_parser(self, new_id: Callable[[], str] = new_call_id) -> AnswerParser:
        """Return a parser for one answer. new_id: makes the id of a call."""
        form = self._find_form()
        tags = REASONING.get(self.reasoning)
        if form is None:
            return AnswerParser(None, tags, self.starts_in_reasoning)
        new_form = partial(form, self.tools, new_id, self.parallel)
        probe = partial(form, self.tools, lambda: "")
        return AnswerParser(new_form(), tags, self.starts_in_reasoning, probe)


@define(eq=False)
class AnswerParser:
    """Turns the text of an answer into pieces. The joined pieces do not depend on how the text was cut.

    new_probe: makes a second parser of calls, for a call inside reasoning.
    """

    calls: CallForm | None = None
    tags: ReasoningTags | None = None
    starts_in_reasoning: bool = False
    new_probe: Callable[[], CallForm] | None = None
    _reasoning: ReasoningParser | None = field(default=None, init=False)
    _pieces: list[AnswerPiece] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if self.tags is not None:
            self._reasoning = ReasoningParser(self.tags, self.starts_in_reasoning, self._parse_answer, self.new_probe)

    @property
    def is_reasoning(self) -> bool:
        """Is the text that comes next reasoning?"""
        inside = self._reasoning is not None and self._reasoning.is_active
        return inside or (self.calls is not None and self.calls.is_reasoning)

    @property
    def is_closed(self) -> bool:
        """Is all text that follows ignored?"""
        return self.calls is not None and self.calls.is_closed

    def push(self, text: str) -> list[AnswerPiece]:
        """Take more text and return the pieces that are certain now."""
        if not text:
            return []
        if self._reasoning is None:
            self._parse_answer(text)
        else:
            self._pieces[:0] = self._reasoning.push(text)
        return self._take_pieces()

    def finish(self) -> list[AnswerPiece]:
        """End the text and return the remaining pieces."""
        if self._reasoning is not None:
            self._pieces[:0] = self._reasoning.finish()
        if self.calls is not None:
            self._pieces += self.calls.finish()
        if self._reasoning is not None and self._reasoning.unclosed:
            self._pieces = [
                ReasoningPiece(piece.text) if isinstance(piece, TextPiece) else piece for piece in self._pieces
            ]
        return self._take_pieces()

    def _parse_answer(self, text: str) -> None:
        self._pieces += self.calls.push(text) if self.calls is not None else [TextPiece(text)]

    def _take_pieces(self) -> list[AnswerPiece]:
        said = self._pieces
        self._pieces = []
        return said


PLAIN = AnswerReader()  # the whole answer is text
