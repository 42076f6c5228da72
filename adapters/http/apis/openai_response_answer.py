"""Write answers as OpenAI's Responses API has them: items in a response, whole or as numbered events."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from attrs import define, field, frozen

from adapters.http.answer import usage as figures
from adapters.http.answer.answer_shape import encode_event
from adapters.http.answer.content_blocks import Block, BlockAssembler, BlockDelta, BlockEnd, BlockEvent, BlockStart
from adapters.http.answer.job_stream import AnswerDelta, FinishedChoice, PromptProgress
from adapters.http.apis.openai_items_as_text import seal_summary
from adapters.http.apis.openai_offered_tools import OfferedTools
from adapters.http.apis.openai_response_items import seal_text
from adapters.http.apis.openai_text_logprobs import TextLogprobs
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ResponseFolder, StoredResponse
from adapters.http.request.custom_tools import extract_custom_input
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.request.tool_definitions import find_sent_name
from adapters.http.wire.errors import ApiError
from adapters.text.answer.answer_pieces import AnswerPiece, TextPiece, merge_pieces
from adapters.text.tokenizer import Tokenizer

ItemKind: TypeAlias = Literal["text", "reasoning", "call", "custom", "compaction"]
PREFIXES: Mapping[ItemKind, str] = {
    "text": "msg_",
    "reasoning": "rs_",
    "call": "fc_",
    "custom": "ctc_",
    "compaction": "cmp_",
}
STREAMS: Mapping[
    ItemKind, tuple[str, str]
] = {  # the type of its text's events, and the field of the last one with the whole text
    "text": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
    "custom": ("response.custom_tool_call_input", "input"),
}
ITEM = re.compile(r"(?:msg|rs|fc|ctc|cmp)_([0-9a-f]{24})([0-9a-f]{4})")
NO_SUMMARY = "(nothing was said)"
ERROR_CODES = {"queue_full": "rate_limit_exceeded", "context_length_exceeded": "context_length_exceeded"}


@frozen
class ResponseDetails:
    """The parts of a request that its response needs to know.

    echoed_fields: fields of the request that the response repeats. seals_reasoning: reasoning items have a sealed copy
    of their text. items: the encoded input items of a response that is stored. is_compacting: the answer is a summary.
    user_messages: those that the answer of /compact repeats.
    """

    echoed_fields: Mapping[str, Any]
    offered_tools: OfferedTools
    seals_reasoning: bool
    is_stored: bool
    items: msgspec.Raw | None = None
    is_compacting: bool = False
    user_messages: Sequence[Mapping[str, Any]] = ()


@define(eq=False)
class ResponseShape:
    """Writes a response, which is one answer. Every event has the next number."""

    folder: ResponseFolder
    id: str
    request: ParsedRequest[ResponseDetails]
    options: EdgeOptions
    tokenizer: Tokenizer
    created: int = field(factory=lambda: int(time.time()), init=False)
    blocks: BlockAssembler = field(factory=BlockAssembler, init=False)
    next_number: int = field(default=0, init=False)
    status: str = field(default="in_progress", init=False)
    # Of each block of text, by the block's index.
    logprobs_by_index: dict[int, list[dict[str, Any]]] = field(factory=dict, init=False)
    text_logprobs: TextLogprobs = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.text_logprobs = TextLogprobs(self.tokenizer)

    # -- a stream

    def stream_opening(self) -> Iterable[bytes]:
        yield self.number_event("response.created", response=self.make_response())
        yield self.number_event("response.in_progress", response=self.make_response())

    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]:
        for piece, logprobs in self.pair_with_logprobs(said):
            for event in self.blocks.push(piece):
                timings = figures.make_pace_fields(said, self.request.controls)
                yield from self.stream_block(event, logprobs=logprobs, timings=timings)

    def pair_with_logprobs(self, said: AnswerDelta) -> Iterator[tuple[AnswerPiece, list[dict[str, Any]]]]:
        """Yield each piece with the logprobs of its tokens, if these were requested."""
        pieces = merge_pieces(said.pieces)
        texts = [index for index, piece in enumerate(pieces) if isinstance(piece, TextPiece)]
        self.text_logprobs.add(said.picks)
        for index, piece in enumerate(pieces):
            logprobs = self.text_logprobs.take_for_piece(piece, last=texts[-1:] == [index])
            if logprobs:
                self.logprobs_by_index.setdefault(self.find_text_index(), []).extend(logprobs)
            yield piece, logprobs

    def find_text_index(self) -> int:
        """Return the index of the block that the next piece of text belongs to."""
        block = self.blocks.open_block
        if block is not None and block.kind == "text":
            return block.index
        return len(self.blocks.finished_blocks) + (block is not None)

    def stream_progress(self, progress: PromptProgress, elapsed_ms: float) -> Iterable[bytes]:
        """Write the progress, with the response but without its request. The request grows with the prompt, and so does
        the number of these events.
        """
        more = figures.make_progress_fields(progress, elapsed_ms, self.request.controls)
        yield self.number_event("response.in_progress", response=self.make_current(), **more)

    def stream_heartbeat(self) -> Iterable[bytes]:
        """Write an event: Codex counts events as life, and nothing else."""
        yield self.number_event("response.in_progress", response=self.make_response())

    def stream_choice_end(self, ended: FinishedChoice) -> Iterable[bytes]:
        for event in self.close_blocks():
            yield from self.stream_block(event, cut=self.is_cut(ended))

    def stream_closing(self, ended: Sequence[FinishedChoice]) -> Iterable[bytes]:
        final = self.make_final(ended[0])
        yield self.number_event(f"response.{final['status']}", response=final, timings=final["timings"])

    def stream_error(self, error: ApiError) -> Iterable[bytes]:
        for event in self.blocks.close_block():
            yield from self.stream_block(event, cut=True)
        self.status = "cancelled" if error.code == "cancelled" else "failed"
        described = None if self.status == "cancelled" else {"code": ERROR_CODES.get(error.code or "", "server_error")}
        final = {**self.make_response(), "error": described and {**described, "message": error.message}}
        self.store(final)
        yield self.number_event("response.failed", response=final)

    def stream_block(
        self,
        event: BlockEvent,
        cut: bool = False,
        logprobs: Sequence[Mapping[str, Any]] = (),
        timings: Mapping[str, Any] | None = None,
    ) -> Iterator[bytes]:
        """Write the events of a block. logprobs, timings: for its deltas."""
        block = event.block
        kind = self.kind_of(event.block)
        if kind == "compaction":
            yield from self.stream_summary(event)
            return
        item = {"item_id": self.make_item_id(block), "output_index": block.index}
        part = {**item, "content_index": 0}
        stream, whole = STREAMS[kind]
        where: dict[str, Any] = item if block.kind == "call" else part
        new_logprobs: dict[str, Any] = {"logprobs": logprobs} if kind == "text" else {}
        all_logprobs: dict[str, Any] = (
            {"logprobs": self.logprobs_by_index.get(block.index, [])} if kind == "text" else {}
        )
        match event:
            case BlockStart():
                yield self.number_event(
                    "response.output_item.added", output_index=block.index, item=self.make_item(block, None)
                )
                if block.kind != "call":
                    yield self.number_event("response.content_part.added", **part, part=self.make_part(block, ""))
            case BlockDelta(_, text) if kind != "custom":
                yield self.number_event(f"{stream}.delta", **where, **new_logprobs, **(timings or {}), delta=text)
            case BlockEnd():
                text = block.text
                if kind == "custom":  # its input is known only now, as it came as JSON
                    text = extract_custom_input(text)
                    yield self.number_event(f"{stream}.delta", **where, delta=text)
                called = {"name": self.make_call_names(block)["name"]} if kind == "call" else {}
                yield self.number_event(f"{stream}.done", **where, **all_logprobs, **{whole: text}, **called)
                if block.kind != "call":
                    yield self.number_event(
                        "response.content_part.done", **part, part=self.make_part(block, block.text)
                    )
                done = self.make_item(block, "incomplete" if cut else "completed")
                yield self.number_event("response.output_item.done", output_index=block.index, item=done)

    def stream_summary(self, event: BlockEvent) -> Iterator[bytes]:
        """Write the events of a summary. It has no parts: it begins and is done."""
        index = {"output_index": event.block.index}
        if isinstance(event, BlockStart):
            yield self.number_event("response.output_item.added", **index, item=self.make_item(event.block, None))
        elif isinstance(event, BlockEnd):
            yield self.number_event("response.output_item.done", **index, item=self.make_item(event.block, "completed"))

    def number_event(self, kind: str, **more: Any) -> bytes:
        number = self.next_number
        self.next_number = self.next_number + 1
        return encode_event({"type": kind, "sequence_number": number, **more}, kind)

    # -- the response

    def build_answer(self, said: Mapping[int, AnswerDelta], ended: Sequence[FinishedChoice]) -> dict[str, Any]:
        for delta in said.values():
            for piece, _ in self.pair_with_logprobs(delta):
                list(self.blocks.push(piece))
        list(self.close_blocks())
        return self.make_final(ended[0])

    def close_blocks(self) -> Iterator[BlockEvent]:
        """End the open block. A compaction always has a summary, as its client waits for one."""
        if self.is_compacting and not any(
            block.kind == "text" for block in (self.blocks.open_block, *self.blocks.finished_blocks) if block
        ):
            yield from self.blocks.close_block()
            thought = "\n".join(block.text for block in self.blocks.finished_blocks)
            yield from self.blocks.push(TextPiece(thought or NO_SUMMARY))
        yield from self.blocks.close_block()

    @property
    def is_compacting(self) -> bool:
        return self.request.details.is_compacting

    def is_cut(self, ended: FinishedChoice) -> bool:
        """Return whether the response is incomplete. A summary that was cut off counts as complete: agents accept no
        other end of it.
        """
        return ended.outcome.finish == "length" and not self.is_compacting

    def make_final(self, ended: FinishedChoice) -> dict[str, Any]:
        cut = self.is_cut(ended)
        self.status = "incomplete" if cut else "completed"
        usage = figures.count_usage([ended])
        final = {
            **self.make_response(),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    **usage["prompt_tokens_details"],
                    "cache_write_tokens": figures.count_cache_writes(ended),
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            "timings": figures.make_timings(ended),
            "rekindle": figures.describe_choice(ended, self.options),
        }
        self.store(final)
        return final

    def store(self, final: dict[str, Any]) -> None:
        """Store the response, if that was requested. A response that is too large says that it is not stored."""
        if self.request.details.is_stored:
            final["store"] = self.folder.store(self.id, StoredResponse(final, self.request.details.items))

    def make_response(self) -> dict[str, Any]:
        """Return the response as it is now, with the fields of its request."""
        return {**self.make_current(), **self.request.details.echoed_fields}

    def make_current(self) -> dict[str, Any]:
        """Return the response as it is now. While it is in progress, its output is empty."""
        over = self.status != "in_progress"
        cut = "completed" if self.status == "completed" else "incomplete"
        last = len(self.blocks.finished_blocks) - 1
        output = [
            self.make_item(finished_block, cut if finished_block.index == last else "completed")
            for finished_block in self.blocks.finished_blocks
            if over
        ]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": self.status,
            "error": None,
            "incomplete_details": None,
            "model": self.request.controls.model,
            "output": output,
            "usage": None,
        }

    def make_item(self, block: Block, status: str | None) -> dict[str, Any]:
        """Return a block as an item. status: None if it begins, and is still empty."""
        named = {"id": self.make_item_id(block), "status": status or "in_progress"}
        content = [] if status is None else [self.make_part(block, block.text)]
        match self.kind_of(block):
            case "text":
                return {"type": "message", **named, "role": "assistant", "content": content}
            case "reasoning":
                kept = (
                    {"encrypted_content": seal_text(block.text)}
                    if self.request.details.seals_reasoning and status
                    else {}
                )
                return {"type": "reasoning", **named, "summary": [], "content": content, **kept}
            case "call":
                arguments = "" if status is None else block.text
                return {"type": "function_call", **named, **self.make_call_names(block), "arguments": arguments}
            case "compaction":
                summary = "" if status is None else seal_summary(block.text)
                return {"type": "compaction", "id": named["id"], "encrypted_content": summary}
            case "custom":
                given = "" if status is None else extract_custom_input(block.text)
                return {"type": "custom_tool_call", **named, **self.make_call_names(block), "input": given}

    def make_part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "text":
            logprobs = self.logprobs_by_index.get(block.index, []) if text else []
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "reasoning_text", "text": text}

    def kind_of(self, block: Block) -> ItemKind:
        if self.is_compacting and block.kind == "text":
            return "compaction"
        return "custom" if block.name in self.request.details.offered_tools.customs else block.kind

    def make_call_names(self, block: Block) -> dict[str, Any]:
        namespace, name = self.request.details.offered_tools.namespaces.get(block.name, (None, self.sent_name(block)))
        return {"call_id": block.call_id, "name": name, **({} if namespace is None else {"namespace": namespace})}

    def sent_name(self, block: Block) -> str:
        return find_sent_name(self.request.reader.tools, block.name)

    def make_item_id(self, block: Block) -> str:
        """Return an id that names the response and the index in it, so an item can be found by its id alone."""
        return f"{PREFIXES[self.kind_of(block)]}{self.id.removeprefix('resp_')}{block.index:04x}"


def locate_item(item: str) -> tuple[str, int]:
    """Return the response of an item, and the item's index in it. An unknown id has an empty response."""
    found = ITEM.fullmatch(item)
    return ("", 0) if found is None else (f"resp_{found[1]}", int(found[2], 16))
