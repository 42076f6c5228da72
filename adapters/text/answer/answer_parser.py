"""How the answers of a checkpoint are read: which form its tool calls have, and how it marks its reasoning.

Both are data, by name: found in what the chat template writes (`detect.py`), or chosen at start.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attrs import define, field, frozen

from adapters.text.answer.answer_pieces import AnswerPiece, ReasoningPiece, TextPiece
from adapters.text.answer.call_form import CallForm
from adapters.text.answer.json_calls import HermesCalls, LlamaJsonCalls
from adapters.text.answer.pythonic_calls import PythonicCalls
from adapters.text.answer.reasoning import ReasoningTags, Thinking
from adapters.text.answer.xml_calls import XmlCalls
from adapters.text.conversation import FunctionTool, ToolChoice

CALL_FORMS: Mapping[str, type[CallForm]] = {
    "hermes": HermesCalls,
    "qwen-xml": XmlCalls,
    "llama3-json": LlamaJsonCalls,
    "pythonic": PythonicCalls,
}
REASONING: Mapping[str, ReasoningTags] = {"think": ReasoningTags("<think>", "</think>")}
NONE = "none"  # chosen at start: calls or reasoning stay text
TOOL_PARSERS = (*CALL_FORMS, NONE)
REASONING_PARSERS = (*REASONING, NONE)


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


@frozen
class AnswerReader:
    """How the answers to one request are read.

    calls: the form of calls; none: there are none to be read.  tools: what may be called, by name.
    parallel: may there be several calls?  choice: what was asked for.  reasoning: how it is marked; none: it is text.
    thinking: the template has opened the reasoning already.
    """

    calls: str = NONE
    tools: Mapping[str, FunctionTool] = field(factory=dict)
    parallel: bool = True
    reasoning: str = NONE
    thinking: bool = False
    choice: ToolChoice = field(factory=ToolChoice)

    def kept(self, called: Sequence[str]) -> bool | None:
        """Does an answer with these calls keep to what was asked for? None: anything would."""
        choice = self.choice
        if choice.kind in {"auto", "none"} and not choice.allowed:
            return None
        return (bool(called) or choice.kind == "auto") and all(map(choice.allows, called))

    @property
    def controls(self) -> Sequence[str]:
        """Control tokens that have to be seen."""
        tags = REASONING.get(self.reasoning)
        form = CALL_FORMS.get(self.calls) if self.tools else None
        return (*((tags.opening, tags.closing) if tags else ()), *(form.controls if form else ()))

    def start(self, new_id: Callable[[], str] = call_id) -> AnswerParser:
        """For one answer."""
        form = CALL_FORMS.get(self.calls) if self.tools else None
        tags = REASONING.get(self.reasoning)
        if form is None:
            return AnswerParser(None, tags, self.thinking)
        new_form = partial(form, self.tools, new_id, self.parallel)
        probe = partial(form, self.tools, lambda: "")
        return AnswerParser(new_form(), tags, self.thinking, probe)


@define(eq=False)
class AnswerParser:
    """Text in, pieces out. The pieces of any two ways to cut a text add up to the same."""

    calls: CallForm | None = None
    tags: ReasoningTags | None = None
    opened: bool = False
    probe: Callable[[], CallForm] | None = None  # a reader of calls for what may be reasoning
    _thinking: Thinking | None = field(default=None, init=False)
    _said: list[AnswerPiece] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if self.tags is not None:
            self._thinking = Thinking(self.tags, self.opened, self._answer, self.probe)

    @property
    def thinking(self) -> bool:
        """Is it reasoning that comes?"""
        return self._thinking is not None and self._thinking.active

    @property
    def closed(self) -> bool:
        """Nothing that follows is looked at."""
        return self.calls is not None and self.calls.closed

    def push(self, text: str) -> list[AnswerPiece]:
        if not text:
            return []
        if self._thinking is None:
            self._answer(text)
        else:
            self._said[:0] = self._thinking.push(text)
        return self._taken()

    def finish(self) -> list[AnswerPiece]:
        if self._thinking is not None:
            self._said[:0] = self._thinking.finish()
        if self.calls is not None:
            self._said += self.calls.finish()
        if self._thinking is not None and self._thinking.unclosed:
            self._said = [ReasoningPiece(one.text) if isinstance(one, TextPiece) else one for one in self._said]
        return self._taken()

    def _answer(self, text: str) -> None:
        self._said += self.calls.push(text) if self.calls is not None else [TextPiece(text)]

    def _taken(self) -> list[AnswerPiece]:
        said, self._said = self._said, []
        return said


PLAIN = AnswerReader()  # all is text
