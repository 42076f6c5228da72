"""Write answers as OpenAI's chat completions have them: text, reasoning, and calls of functions and of custom tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from adapters.http.answer.job_stream import AnswerDelta, FinishedChoice, PickedToken
from adapters.http.answer.usage import make_pace_fields
from adapters.http.apis.openai_answer import OpenAiShape, finish_reason_of, make_token_logprob
from adapters.http.request.custom_tools import extract_custom_input
from adapters.http.request.tool_definitions import find_sent_name
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


def piece_delta(piece: AnswerPiece) -> dict[str, Any]:
    """Return a piece as it is in a stream. Calls name their tools as the client does."""
    match piece:
        case TextPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning_content": text}
        case CallBegun(call_index, id_, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": call_index, "id": id_, "type": "function", "function": function}]}
        case ArgumentsPiece(call_index, text):
            return {"tool_calls": [{"index": call_index, "function": {"arguments": text}}]}
        case CallEnded():
            return {}


def legacy_delta(piece: AnswerPiece) -> dict[str, Any]:
    """Return a piece as streams had it before there were tools."""
    match piece:
        case CallBegun(_, _, name):
            return {"function_call": {"name": name, "arguments": ""}}
        case ArgumentsPiece(_, text):
            return {"function_call": {"arguments": text}}
    return piece_delta(piece)


@frozen
class ChatDetails:
    """The details of a request that its answer depends on.

    custom_tools: the names of tools that are called with text. uses_functions: the request has the legacy `functions`.
    """

    custom_tools: frozenset[str]
    uses_functions: bool


@define(eq=False)
class ChatShape(OpenAiShape[ChatDetails]):
    """Writes chat completions.

    open_inputs: the JSON so far of calls of custom tools, by choice and index of the call. Inputs are generated as
    JSON, so their text is known when they are complete.
    """

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    open_inputs: dict[tuple[int, int], list[str]] = field(factory=dict)

    def stream_opening(self) -> Iterable[bytes]:
        for index in range(self.controls.choices):
            yield self.encode_chunk([{**self.make_empty_choice(index), "delta": {"role": "assistant", "content": ""}}])

    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]:
        deltas = [delta for piece in merge_pieces(said.pieces) if (delta := self.make_delta(said.index, piece))]
        for call_index, delta in enumerate(deltas or [{}]):
            picks = self.make_logprobs(said.picks) if call_index == 0 else {}
            if delta or picks:
                choice = {**self.make_empty_choice(said.index), "delta": delta, **picks}
                yield self.encode_chunk([choice], **make_pace_fields(said, self.controls))

    def make_empty_choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": None}

    def make_choice(self, said: AnswerDelta, ended: FinishedChoice) -> dict[str, Any]:
        reasoning = join_reasoning(said.pieces)
        calls = collect_calls(said.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = said.text or None
            message |= self.make_calls(calls)
        logprobs = self.make_logprobs(said.picks) or {"logprobs": None}
        return {"index": ended.index, "message": message, **logprobs, "finish_reason": self.find_finish_reason(ended)}

    def make_delta(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        """Return what a stream has of a piece; it may be nothing yet."""
        if isinstance(piece, CallBegun):
            return self.make_call_start(index, piece)
        if self.request.details.uses_functions:
            return legacy_delta(piece)
        match piece:
            case ArgumentsPiece(call_index, text) if (index, call_index) in self.open_inputs:
                self.open_inputs[index, call_index].append(text)
                return {}
            case CallEnded(call_index) if (index, call_index) in self.open_inputs:
                given = extract_custom_input("".join(self.open_inputs.pop((index, call_index))))
                return {"tool_calls": [{"index": call_index, "custom": {"input": given}}]}
        return piece_delta(piece)

    def make_call_start(self, index: int, piece: CallBegun) -> dict[str, Any]:
        """Return the beginning of a call, with the client's name of the tool."""
        named = evolve(piece, name=find_sent_name(self.request.reader.tools, piece.name))
        if self.request.details.uses_functions:
            return legacy_delta(named)
        if piece.name not in self.request.details.custom_tools:
            return piece_delta(named)
        self.open_inputs[index, piece.index] = []
        custom = {"name": named.name, "input": ""}
        return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "custom", "custom": custom}]}

    def make_calls(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the calls as a message has them."""
        if self.request.details.uses_functions:
            name = find_sent_name(self.request.reader.tools, calls[0].name)
            return {"function_call": {"name": name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self.make_call(call) for call in calls]}

    def make_call(self, call: ToolCall) -> dict[str, Any]:
        name = find_sent_name(self.request.reader.tools, call.name)
        if call.name in self.request.details.custom_tools:
            return {
                "id": call.id,
                "type": "custom",
                "custom": {"name": name, "input": extract_custom_input(call.arguments)},
            }
        return {"id": call.id, "type": "function", "function": {"name": name, "arguments": call.arguments}}

    def find_finish_reason(self, ended: FinishedChoice) -> str:
        reason = finish_reason_of(ended)
        return "function_call" if reason == "tool_calls" and self.request.details.uses_functions else reason

    def make_logprobs(self, picks: Sequence[PickedToken]) -> dict[str, Any]:
        if not picks:
            return {}
        content = [
            {
                **make_token_logprob(self.tokenizer, pick.token, pick.logprob[0]),
                "top_logprobs": [make_token_logprob(self.tokenizer, *alternative) for alternative in pick.logprob[1]],
            }
            for pick in picks
        ]
        return {"logprobs": {"content": content, "refusal": None}}
