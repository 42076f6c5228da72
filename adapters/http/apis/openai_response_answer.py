"""Answers as OpenAI's Responses API gives them: items in a response, whole or as numbered events."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import define, field

from adapters.http.answer import usage as figures
from adapters.http.answer.answer_shape import event
from adapters.http.answer.content_blocks import Block, BlockBegun, BlockEnded, BlockEvent, BlockMore, Blocks
from adapters.http.answer.job_stream import Ended, Progress, Said
from adapters.http.apis.openai_response_items import sealed
from adapters.http.apis.openai_text_logprobs import TextLogprobs
from adapters.http.apis.openai_told_items import sealed_summary
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ArchivedResponse, ResponseFolder
from adapters.http.request.asked import Asked
from adapters.http.request.custom_tools import custom_input
from adapters.http.request.tool_definitions import sent_name
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
] = {  # how events of its text are called, and what in the last one is all of it
    "text": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
    "custom": ("response.custom_tool_call_input", "input"),
}
ITEM = re.compile(r"(?:msg|rs|fc|ctc|cmp)_([0-9a-f]{24})([0-9a-f]{4})")
NO_SUMMARY = "(nothing was said)"
CODES = {"queue_full": "rate_limit_exceeded", "context_length_exceeded": "context_length_exceeded"}


@define(eq=False)
class ResponseShape:
    """A response is one answer. Every event has the next number."""

    shelf: ResponseFolder
    id: str
    asked: Asked
    options: EdgeOptions
    tokenizer: Tokenizer
    created: int = field(factory=lambda: int(time.time()), init=False)
    blocks: Blocks = field(factory=Blocks, init=False)
    number: int = field(default=0, init=False)
    status: str = field(default="in_progress", init=False)
    logprobs: dict[int, list[dict[str, Any]]] = field(factory=dict, init=False)  # of each text, by its place
    picks: TextLogprobs = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.picks = TextLogprobs(self.tokenizer)

    # -- a stream

    def opening(self) -> Iterable[bytes]:
        yield self.event("response.created", response=self.response())
        yield self.event("response.in_progress", response=self.response())

    def said(self, said: Said) -> Iterable[bytes]:
        for piece, logprobs in self.with_logprobs(said):
            for one in self.blocks.push(piece):
                yield from self.events(one, logprobs=logprobs)

    def with_logprobs(self, said: Said) -> Iterator[tuple[AnswerPiece, list[dict[str, Any]]]]:
        """Give each piece with what is told of its tokens, where that was asked for."""
        pieces = merge_pieces(said.pieces)
        texts = [place for place, piece in enumerate(pieces) if isinstance(piece, TextPiece)]
        self.picks.hear(said.picks)
        for place, piece in enumerate(pieces):
            logprobs = self.picks.take(piece, last=texts[-1:] == [place])
            if logprobs:
                self.logprobs.setdefault(self.text_place(), []).extend(logprobs)
            yield piece, logprobs

    def text_place(self) -> int:
        """Where the block of text is that a piece of text goes to."""
        block = self.blocks.open
        if block is not None and block.kind == "text":
            return block.place
        return len(self.blocks.done) + (block is not None)

    def progress(self, progress: Progress, elapsed_ms: float) -> Iterable[bytes]:
        """Of the response only what it is: what was asked grows with the prompt, and so does the number of these."""
        told = figures.prompt_progress(progress, elapsed_ms)
        yield self.event("response.in_progress", response=self.now(), prompt_progress=told)

    def heartbeat(self) -> Iterable[bytes]:
        """Codex counts events as life, and nothing else."""
        yield self.event("response.in_progress", response=self.response())

    def ended(self, ended: Ended) -> Iterable[bytes]:
        for one in self.rest():
            yield from self.events(one, cut=self.is_cut(ended))

    def closing(self, ended: Sequence[Ended]) -> Iterable[bytes]:
        final = self.final(ended[0])
        yield self.event(f"response.{final['status']}", response=final)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        for one in self.blocks.close():
            yield from self.events(one, cut=True)
        self.status = "cancelled" if error.code == "cancelled" else "failed"
        told = None if self.status == "cancelled" else {"code": CODES.get(error.code or "", "server_error")}
        final = {**self.response(), "error": told and {**told, "message": error.message}}
        self.keep(final)
        yield self.event("response.failed", response=final)

    def events(self, one: BlockEvent, cut: bool = False, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[bytes]:
        block, kind = one.block, self.kind(one.block)
        if kind == "compaction":
            yield from self.summary_events(one)
            return
        item = {"item_id": self.item_id(block), "output_index": block.place}
        part = {**item, "content_index": 0}
        stream, whole = STREAMS[kind]
        where: dict[str, Any] = item if block.kind == "call" else part
        told: dict[str, Any] = {"logprobs": logprobs} if kind == "text" else {}
        every: dict[str, Any] = {"logprobs": self.logprobs.get(block.place, [])} if kind == "text" else {}
        match one:
            case BlockBegun():
                yield self.event("response.output_item.added", output_index=block.place, item=self.item(block, None))
                if block.kind != "call":
                    yield self.event("response.content_part.added", **part, part=self.part(block, ""))
            case BlockMore(_, text) if kind != "custom":
                yield self.event(f"{stream}.delta", **where, **told, delta=text)
            case BlockEnded():
                text = block.text
                if kind == "custom":  # what it is, is known only now: it came as JSON
                    text = custom_input(text)
                    yield self.event(f"{stream}.delta", **where, delta=text)
                called = {"name": self.called(block)["name"]} if kind == "call" else {}
                yield self.event(f"{stream}.done", **where, **every, **{whole: text}, **called)
                if block.kind != "call":
                    yield self.event("response.content_part.done", **part, part=self.part(block, block.text))
                done = self.item(block, "incomplete" if cut else "completed")
                yield self.event("response.output_item.done", output_index=block.place, item=done)

    def summary_events(self, one: BlockEvent) -> Iterator[bytes]:
        """A summary has no parts: it begins and is done."""
        place = {"output_index": one.block.place}
        if isinstance(one, BlockBegun):
            yield self.event("response.output_item.added", **place, item=self.item(one.block, None))
        elif isinstance(one, BlockEnded):
            yield self.event("response.output_item.done", **place, item=self.item(one.block, "completed"))

    def event(self, kind: str, **more: Any) -> bytes:
        number, self.number = self.number, self.number + 1
        return event({"type": kind, "sequence_number": number, **more}, kind)

    # -- the response

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> dict[str, Any]:
        for one in said.values():
            for piece, _ in self.with_logprobs(one):
                list(self.blocks.push(piece))
        list(self.rest())
        return self.final(ended[0])

    def rest(self) -> Iterator[BlockEvent]:
        """End what is open. A summary is there in any case: who asked for one waits for it."""
        if self.compacting and not any(
            block.kind == "text" for block in (self.blocks.open, *self.blocks.done) if block
        ):
            yield from self.blocks.close()
            thought = "\n".join(block.text for block in self.blocks.done)
            yield from self.blocks.push(TextPiece(thought or NO_SUMMARY))
        yield from self.blocks.close()

    @property
    def compacting(self) -> bool:
        return bool(self.asked.echo.get("compacting"))

    def is_cut(self, ended: Ended) -> bool:
        """A summary that was cut off is one all the same: agents take no other end of it."""
        return ended.closed.finish == "length" and not self.compacting

    def final(self, ended: Ended) -> dict[str, Any]:
        cut = self.is_cut(ended)
        self.status = "incomplete" if cut else "completed"
        usage = figures.usage([ended])
        final = {
            **self.response(),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    **usage["prompt_tokens_details"],
                    "cache_write_tokens": figures.written(ended),
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            "timings": figures.timings(ended),
            "rekindle": figures.rekindle(ended, self.options),
        }
        self.keep(final)
        return final

    def keep(self, final: dict[str, Any]) -> None:
        """One that is too large says that it is not kept."""
        if self.asked.echo["store"]:
            final["store"] = self.shelf.keep(self.id, ArchivedResponse(final, self.asked.echo["items"]))

    def response(self) -> dict[str, Any]:
        """As it is now, with what was asked."""
        return {**self.now(), **self.asked.echo["shown"]}

    def now(self) -> dict[str, Any]:
        """In progress, nothing is in it yet."""
        over = self.status != "in_progress"
        cut = "completed" if self.status == "completed" else "incomplete"
        last = len(self.blocks.done) - 1
        output = [self.item(one, cut if one.place == last else "completed") for one in self.blocks.done if over]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": self.status,
            "error": None,
            "incomplete_details": None,
            "model": self.asked.controls.model,
            "output": output,
            "usage": None,
        }

    def item(self, block: Block, status: str | None) -> dict[str, Any]:
        """status: None: it begins, and there is nothing in it yet."""
        named = {"id": self.item_id(block), "status": status or "in_progress"}
        content = [] if status is None else [self.part(block, block.text)]
        match self.kind(block):
            case "text":
                return {"type": "message", **named, "role": "assistant", "content": content}
            case "reasoning":
                kept = {"encrypted_content": sealed(block.text)} if self.asked.echo["sealed"] and status else {}
                return {"type": "reasoning", **named, "summary": [], "content": content, **kept}
            case "call":
                arguments = "" if status is None else block.text
                return {"type": "function_call", **named, **self.called(block), "arguments": arguments}
            case "compaction":
                summary = "" if status is None else sealed_summary(block.text)
                return {"type": "compaction", "id": named["id"], "encrypted_content": summary}
            case "custom":
                given = "" if status is None else custom_input(block.text)
                return {"type": "custom_tool_call", **named, **self.called(block), "input": given}

    def part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "text":
            logprobs = self.logprobs.get(block.place, []) if text else []
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "reasoning_text", "text": text}

    def kind(self, block: Block) -> ItemKind:
        if self.compacting and block.kind == "text":
            return "compaction"
        return "custom" if block.name in self.asked.echo["offered"].customs else block.kind

    def called(self, block: Block) -> dict[str, Any]:
        namespace, name = self.asked.echo["offered"].namespaces.get(block.name, (None, self.sent_name(block)))
        return {"call_id": block.call, "name": name, **({} if namespace is None else {"namespace": namespace})}

    def sent_name(self, block: Block) -> str:
        return sent_name(self.asked.reader.tools, block.name)

    def item_id(self, block: Block) -> str:
        """Names the response and the place in it, so that an item can be found by its id alone."""
        return f"{PREFIXES[self.kind(block)]}{self.id.removeprefix('resp_')}{block.place:04x}"


def place_of(item: str) -> tuple[str, int]:
    """The response that an item is of, and where in it; no response has no name."""
    found = ITEM.fullmatch(item)
    return ("", 0) if found is None else (f"resp_{found[1]}", int(found[2], 16))
