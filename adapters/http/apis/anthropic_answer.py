"""Write answers as Anthropic's Messages API has them: content blocks, whole or as events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from adapters.http.answer import usage as figures
from adapters.http.answer.answer_shape import encode_event
from adapters.http.answer.content_blocks import Block, BlockAssembler, BlockDelta, BlockEnd, BlockEvent, BlockStart
from adapters.http.answer.job_stream import AnswerDelta, FinishedChoice, PromptProgress
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.request.tool_definitions import find_sent_name
from adapters.http.wire.error_format import make_anthropic_error
from adapters.http.wire.errors import ApiError
from adapters.text.answer.answer_pieces import merge_pieces
from adapters.text.tokenizer import Tokenizer

PING = {"type": "ping"}
NOTHING_NEW = {
    "type": "message_delta",
    "delta": {"stop_reason": None, "stop_sequence": None},
    "usage": {"output_tokens": 0},
}
DELTAS = {  # by kind of block: the type of its delta, and the field with the text
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@define(eq=False)
class MessageShape:
    """Writes a message, which has one choice.

    Clients do not see pings, since Anthropic's SDK drops them. Claude Code ends a stream that has nothing else for 300
    s, and asks again. So after every `sign_of_life_s` of silence there is a `message_delta` that changes nothing.
    Anthropic's protocol allows it at any time.
    """

    id: str
    request: ParsedRequest[None]
    options: EdgeOptions
    tokenizer: Tokenizer
    blocks: BlockAssembler = field(factory=BlockAssembler, init=False)
    # When the last event was sent that clients count as life.
    _last_event_time: float = field(factory=time.monotonic, init=False)

    def stream_opening(self) -> Iterable[bytes]:
        """Write the start. It is not known yet what was cached: the last event but one says it."""
        usage = {**make_prompt_usage(len(self.request.prompts[0])), "output_tokens": 0}
        yield encode_message_event({"type": "message_start", "message": self.make_message([], None, None, usage)})
        yield encode_message_event(PING)
        self._last_event_time = time.monotonic()

    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]:
        self._last_event_time = time.monotonic()
        for piece in merge_pieces(said.pieces):
            for event in self.blocks.push(piece):
                yield from map(encode_message_event, self.make_block_events(event))

    def make_block_events(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        index = {"index": event.block.index}
        match event:
            case BlockStart(block):
                yield {"type": "content_block_start", **index, "content_block": self.make_empty_block(block)}
            case BlockDelta(block, text):
                kind, name = DELTAS[block.kind]
                yield {"type": "content_block_delta", **index, "delta": {"type": kind, name: text}}
            case BlockEnd(block):
                if block.kind == "reasoning":
                    signed = {"type": "signature_delta", "signature": self.id}
                    yield {"type": "content_block_delta", **index, "delta": signed}
                yield {"type": "content_block_stop", **index}

    def make_empty_block(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "reasoning":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                name = find_sent_name(self.request.reader.tools, block.name)
                return {"type": "tool_use", "id": block.call_id, "name": name, "input": {}}

    def stream_progress(self, progress: PromptProgress, elapsed_ms: float) -> Iterable[bytes]:
        yield encode_message_event({**PING, "prompt_progress": figures.make_progress(progress, elapsed_ms)})

    def stream_heartbeat(self) -> Iterable[bytes]:
        yield encode_message_event(PING)
        if time.monotonic() - self._last_event_time >= self.options.times.sign_of_life_s:
            self._last_event_time = time.monotonic()
            yield encode_message_event(NOTHING_NEW)

    def stream_choice_end(self, ended: FinishedChoice) -> Iterable[bytes]:
        for event in self.blocks.close_block():
            yield from map(encode_message_event, self.make_block_events(event))
        more = {"rekindle": figures.describe_choice(ended, self.options)}
        reason = self.find_stop_reason(ended)
        delta = {"stop_reason": reason, "stop_sequence": find_stop_sequence(ended, reason), "stop_details": None}
        yield encode_message_event({"type": "message_delta", "delta": delta, "usage": make_usage(ended), **more})

    def stream_closing(self, ended: Sequence[FinishedChoice]) -> Iterable[bytes]:  # noqa: ARG002 - it was one
        yield encode_message_event({"type": "message_stop"})

    def stream_error(self, error: ApiError) -> Iterable[bytes]:
        yield encode_event(make_anthropic_error(error, self.id), "error")

    def build_answer(self, said: Mapping[int, AnswerDelta], ended: Sequence[FinishedChoice]) -> dict[str, Any]:
        (choice,) = ended
        for pieces in said.values():
            for piece in pieces.pieces:
                list(self.blocks.push(piece))
        list(self.blocks.close_block())
        content = [self.make_block(block) for block in self.blocks.finished_blocks]
        reason = self.find_stop_reason(choice)
        message = self.make_message(content, reason, find_stop_sequence(choice, reason), make_usage(choice))
        return {**message, "rekindle": figures.describe_choice(choice, self.options)}

    def make_block(self, block: Block) -> dict[str, Any]:
        """Return a complete block. The arguments of a call are a JSON object, even if the answer was cut off in
        them.
        """
        opened = self.make_empty_block(block)
        match block.kind:
            case "text":
                return {**opened, "text": block.text}
            case "reasoning":
                return {**opened, "thinking": block.text, "signature": self.id}
            case "call":
                return {**opened, "input": json.loads(block.text)}

    def make_message(
        self, content: Sequence[Any], reason: str | None, stop: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.controls.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "usage": usage,
        }

    def find_stop_reason(self, ended: FinishedChoice) -> str:
        if ended.outcome.finish == "length":
            asked = self.request.controls.max_tokens
            cut = asked is None or asked > ended.planned_job.job.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if ended.called_functions:
            return "tool_use"
        return "end_turn" if ended.stop_string is None else "stop_sequence"


def find_stop_sequence(ended: FinishedChoice, reason: str) -> str | None:
    """Return the stop string, if it is the reason why the answer ended."""
    return ended.stop_string if reason == "stop_sequence" else None


def encode_message_event(data: Mapping[str, Any]) -> bytes:
    """Encode an event. Anthropic's events are named by their type."""
    return encode_event(data, data["type"])


def make_prompt_usage(prompt: int, restored: int = 0, written: int = 0) -> dict[str, Any]:
    """Return a prompt's tokens in three parts: computed, computed and kept in the cache, and read from the cache."""
    return {
        "input_tokens": prompt - restored - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": restored,
    }


def make_usage(ended: FinishedChoice) -> dict[str, Any]:
    return {
        **make_prompt_usage(
            len(ended.planned_job.job.prompt), ended.outcome.report.restored_tokens, figures.count_cache_writes(ended)
        ),
        "output_tokens": ended.tokens,
        "output_tokens_details": {"thinking_tokens": ended.reasoning_tokens},
    }
