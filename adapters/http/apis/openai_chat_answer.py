"""Answers as OpenAI's chat completions give them: text, reasoning, and calls of functions and of custom tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, evolve, field

from adapters.http.answer.job_stream import Ended, PickedToken, Said
from adapters.http.apis.openai_answer import OpenAiShape, finish_of, named
from adapters.http.request.custom_tools import custom_input
from adapters.http.request.tool_definitions import sent_name
from adapters.text.answer.answer_pieces import (
    AnswerPiece,
    ArgumentsPiece,
    CallBegun,
    CallEnded,
    ReasoningPiece,
    TextPiece,
    collect_calls,
    join_reasoning,
    merge_pieces,
)
from adapters.text.conversation import ToolCall


def delta_of(piece: AnswerPiece) -> dict[str, Any]:
    """Return a piece as it is in a stream. Calls name their tools as the client does."""
    match piece:
        case TextPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning_content": text}
        case CallBegun(place, id_, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": place, "id": id_, "type": "function", "function": function}]}
        case ArgumentsPiece(place, text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
        case CallEnded():
            return {}


def legacy_delta(piece: AnswerPiece) -> dict[str, Any]:
    """Return a piece as it was before there were tools."""
    match piece:
        case CallBegun(_, _, name):
            return {"function_call": {"name": name, "arguments": ""}}
        case ArgumentsPiece(_, text):
            return {"function_call": {"arguments": text}}
    return delta_of(piece)


@define(eq=False)
class ChatShape(OpenAiShape):
    """inputs: of calls of custom tools, by choice and place. What they are is known when they are complete: they are
    generated as JSON.
    """

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    inputs: dict[tuple[int, int], list[str]] = field(factory=dict)

    def opening(self) -> Iterable[bytes]:
        for index in range(self.controls.choices):
            yield self.chunk([{**self.silence(index), "delta": {"role": "assistant", "content": ""}}])

    def said(self, said: Said) -> Iterable[bytes]:
        deltas = [delta for piece in merge_pieces(said.pieces) if (delta := self.delta(said.index, piece))]
        for place, delta in enumerate(deltas or [{}]):
            picks = self.logprobs(said.picks) if place == 0 else {}
            if delta or picks:
                yield self.chunk([{**self.silence(said.index), "delta": delta, **picks}])

    def silence(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": None}

    def choice(self, said: Said, ended: Ended) -> dict[str, Any]:
        reasoning, calls = join_reasoning(said.pieces), collect_calls(said.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = said.text or None
            message |= self.calls(calls)
        logprobs = self.logprobs(said.picks) or {"logprobs": None}
        return {"index": ended.index, "message": message, **logprobs, "finish_reason": self.finish(ended)}

    def delta(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        """Return what a piece is in a stream, if it is anything yet."""
        if isinstance(piece, CallBegun):
            return self.begun(index, piece)
        if self.asked.echo["legacy"]:
            return legacy_delta(piece)
        match piece:
            case ArgumentsPiece(place, text) if (index, place) in self.inputs:
                self.inputs[index, place].append(text)
                return {}
            case CallEnded(place) if (index, place) in self.inputs:
                given = custom_input("".join(self.inputs.pop((index, place))))
                return {"tool_calls": [{"index": place, "custom": {"input": given}}]}
        return delta_of(piece)

    def begun(self, index: int, piece: CallBegun) -> dict[str, Any]:
        """Return the beginning of a call, with the client's name of the tool."""
        named = evolve(piece, name=sent_name(self.asked.reader.tools, piece.name))
        if self.asked.echo["legacy"]:
            return legacy_delta(named)
        if piece.name not in self.asked.echo["customs"]:
            return delta_of(named)
        self.inputs[index, piece.place] = []
        custom = {"name": named.name, "input": ""}
        return {"tool_calls": [{"index": piece.place, "id": piece.id, "type": "custom", "custom": custom}]}

    def calls(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return them as a message has them."""
        if self.asked.echo["legacy"]:
            name = sent_name(self.asked.reader.tools, calls[0].name)
            return {"function_call": {"name": name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self.call(call) for call in calls]}

    def call(self, call: ToolCall) -> dict[str, Any]:
        name = sent_name(self.asked.reader.tools, call.name)
        if call.name in self.asked.echo["customs"]:
            return {
                "id": call.id,
                "type": "custom",
                "custom": {"name": name, "input": custom_input(call.arguments)},
            }
        return {"id": call.id, "type": "function", "function": {"name": name, "arguments": call.arguments}}

    def finish(self, ended: Ended) -> str:
        reason = finish_of(ended)
        return "function_call" if reason == "tool_calls" and self.asked.echo["legacy"] else reason

    def logprobs(self, picks: Sequence[PickedToken]) -> dict[str, Any]:
        if not picks:
            return {}
        content = [
            {
                **named(self.tokenizer, pick.token, pick.logprob[0]),
                "top_logprobs": [named(self.tokenizer, *alternative) for alternative in pick.logprob[1]],
            }
            for pick in picks
        ]
        return {"logprobs": {"content": content, "refusal": None}}
