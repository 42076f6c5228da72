"""Answers as Anthropic's Messages API gives them: content blocks, whole or as events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from adapters.http.answer import usage as figures
from adapters.http.answer.answer_shape import event
from adapters.http.answer.content_blocks import Block, BlockBegun, BlockEnded, BlockEvent, BlockMore, Blocks
from adapters.http.answer.job_stream import Ended, Progress, Said
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked
from adapters.http.request.tool_definitions import sent_name
from adapters.http.wire.error_format import anthropic_error
from adapters.http.wire.errors import ApiError
from adapters.text.answer.answer_pieces import merge_pieces
from adapters.text.tokenizer import Tokenizer

PING = {"type": "ping"}
NOTHING_NEW = {
    "type": "message_delta",
    "delta": {"stop_reason": None, "stop_sequence": None},
    "usage": {"output_tokens": 0},
}
DELTAS = {  # of a kind of block: how its delta is called, and what in it is the text
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@define(eq=False)
class MessageShape:
    """A message has one choice.

    Clients do not see pings: Anthropic's SDK drops them. Claude Code ends a stream that says nothing else for 300 s and
    asks again. So every `sign_of_life_s` of silence there is a `message_delta` that changes nothing, which Anthropic's
    protocol allows at any time.
    """

    id: str
    asked: Asked
    options: EdgeOptions
    tokenizer: Tokenizer
    blocks: Blocks = field(factory=Blocks, init=False)
    _spoke: float = field(factory=time.monotonic, init=False)  # when the last event was sent that clients count

    def opening(self) -> Iterable[bytes]:
        """What was cached is not known yet: the last event but one says it."""
        usage = {**usage_of(len(self.asked.prompts[0])), "output_tokens": 0}
        yield named({"type": "message_start", "message": self.message([], None, None, usage)})
        yield named(PING)
        self._spoke = time.monotonic()

    def said(self, said: Said) -> Iterable[bytes]:
        self._spoke = time.monotonic()
        for piece in merge_pieces(said.pieces):
            for one in self.blocks.push(piece):
                yield from map(named, self.events(one))

    def events(self, one: BlockEvent) -> Iterator[dict[str, Any]]:
        place = {"index": one.block.place}
        match one:
            case BlockBegun(block):
                yield {"type": "content_block_start", **place, "content_block": self.opened(block)}
            case BlockMore(block, text):
                kind, name = DELTAS[block.kind]
                yield {"type": "content_block_delta", **place, "delta": {"type": kind, name: text}}
            case BlockEnded(block):
                if block.kind == "reasoning":
                    signed = {"type": "signature_delta", "signature": self.id}
                    yield {"type": "content_block_delta", **place, "delta": signed}
                yield {"type": "content_block_stop", **place}

    def opened(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "reasoning":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                name = sent_name(self.asked.reader.tools, block.name)
                return {"type": "tool_use", "id": block.call, "name": name, "input": {}}

    def progress(self, progress: Progress, elapsed_ms: float) -> Iterable[bytes]:
        yield named({**PING, "prompt_progress": figures.prompt_progress(progress, elapsed_ms)})

    def heartbeat(self) -> Iterable[bytes]:
        yield named(PING)
        if time.monotonic() - self._spoke >= self.options.sign_of_life_s:
            self._spoke = time.monotonic()
            yield named(NOTHING_NEW)

    def ended(self, ended: Ended) -> Iterable[bytes]:
        for one in self.blocks.close():
            yield from map(named, self.events(one))
        told = {"timings": figures.timings(ended), "rekindle": figures.rekindle(ended, self.options)}
        reason = self.reason(ended)
        delta = {"stop_reason": reason, "stop_sequence": stop_of(ended, reason), "stop_details": None}
        yield named({"type": "message_delta", "delta": delta, "usage": used(ended), **told})

    def closing(self, ended: Sequence[Ended]) -> Iterable[bytes]:  # noqa: ARG002 - it was one
        yield named({"type": "message_stop"})

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield event(anthropic_error(error, self.id), "error")

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> dict[str, Any]:
        (one,) = ended
        for pieces in said.values():
            for piece in pieces.pieces:
                list(self.blocks.push(piece))
        list(self.blocks.close())
        content = [self.block(block) for block in self.blocks.done]
        told = {"timings": figures.timings(one), "rekindle": figures.rekindle(one, self.options)}
        reason = self.reason(one)
        return {**self.message(content, reason, stop_of(one, reason), used(one)), **told}

    def block(self, block: Block) -> dict[str, Any]:
        """Complete. The arguments of a call are a JSON object, even where the answer was cut off in them."""
        opened = self.opened(block)
        match block.kind:
            case "text":
                return {**opened, "text": block.text}
            case "reasoning":
                return {**opened, "thinking": block.text, "signature": self.id}
            case "call":
                return {**opened, "input": json.loads(block.text)}

    def message(
        self, content: Sequence[Any], reason: str | None, stop: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.controls.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "usage": usage,
        }

    def reason(self, ended: Ended) -> str:
        if ended.closed.finish == "length":
            asked = self.asked.controls.max_tokens
            cut = asked is None or asked > ended.planned.job.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if ended.called:
            return "tool_use"
        return "end_turn" if ended.stop is None else "stop_sequence"


def stop_of(ended: Ended, reason: str) -> str | None:
    """The stop string that ended the answer, where that is why it ended."""
    return ended.stop if reason == "stop_sequence" else None


def named(data: Mapping[str, Any]) -> bytes:
    """Anthropic's events are named by their type."""
    return event(data, data["type"])


def usage_of(prompt: int, restored: int = 0, written: int = 0) -> dict[str, Any]:
    """A prompt's tokens, in three parts: computed, computed and kept for later, and found in the cache."""
    return {
        "input_tokens": prompt - restored - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": restored,
    }


def used(ended: Ended) -> dict[str, Any]:
    return {
        **usage_of(len(ended.planned.job.prompt), ended.closed.report.restored_tokens, figures.written(ended)),
        "output_tokens": ended.tokens,
        "output_tokens_details": {"thinking_tokens": ended.reasoning},
    }
