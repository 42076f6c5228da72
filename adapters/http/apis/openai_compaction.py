"""POST /v1/responses/compact, and responses whose last item is a `compaction_trigger`: a summary by the model.

Both are the conversation with one more message of the user, which asks for a summary. So the prompt begins with what
the cache has. The summary is one item, `compaction`, whose `encrypted_content` holds the text. Clients send it back in
place of the conversation, and `openai_response_items.py` reads it. It is encoded, not encrypted: a client that has the
item could have written its text into the conversation anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, evolve

from adapters.http.answer.job_stream import FinishedChoice
from adapters.http.apis.openai_items_as_text import TRIGGER
from adapters.http.apis.openai_response_answer import ResponseDetails, ResponseShape
from adapters.http.edge_options import EdgeModel
from adapters.http.history.response_store import ENCODER
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.wire.errors import context_exceeded
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ToolChoice

MOST_SUMMARY = 8192  # tokens, reasoning included, if the request does not say
LEAST_SUMMARY = 256  # tokens that the prompt must leave: a shorter summary is worth nothing
INSTRUCTION = """\
The conversation above is about to be replaced by a summary, which you write now. Whoever goes on from here sees your \
summary and the user's own messages, and nothing else of the conversation. Say what the user wants; what was done and \
found, with the names of files, commands, identifiers and values; what was decided, and why; what is unfinished, and \
the next step. Call no tools. Answer with the summary and nothing else."""


def is_triggered(items: Sequence[Any]) -> bool:
    """Return whether the request asks for a summary of its conversation."""
    return bool(items) and isinstance(items[-1], dict) and items[-1].get("type") == TRIGGER


def add_trigger(fields: Fields, items: Sequence[Any]) -> Fields:
    """Return a request to /compact as a request for a response, neither streamed nor stored."""
    again = {"input": [*items, {"type": TRIGGER}], "stream": False, "store": False}
    return Fields({**fields.data, **again}, fields.path)


def expect_summary(request: ParsedRequest[ResponseDetails], model: EdgeModel) -> ParsedRequest[ResponseDetails]:
    """Return the request with an answer that is text only. Raises ApiError where the prompt leaves no room for it.

    The prompt still describes the tools, as all prompts of the conversation do, so that the cache has its rows.
    """
    if len(request.prompts[0]) + min(LEAST_SUMMARY, model.max_ctx // 8) > model.max_ctx:
        raise context_exceeded(len(request.prompts[0]), model.max_ctx, request.paths[0])
    controls = evolve(request.controls, response_format=None, max_tokens=request.controls.max_tokens or MOST_SUMMARY)
    reader = evolve(request.reader, tools={}, choice=ToolChoice())
    details = evolve(request.details, is_compacting=True)
    return evolve(request, controls=controls, reader=reader, pending_turn=None, details=details)


def retain_user_messages(items: Sequence[Any], most: int) -> list[Mapping[str, Any]]:
    """Return the user's messages among the items, the newest ones of up to this many bytes in all."""
    found: list[Mapping[str, Any]] = []
    for item in reversed(items):
        if not isinstance(item, dict) or item.get("role") != "user" or item.get("type", "message") != "message":
            continue
        content = item.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        message = {"id": "", **item, "type": "message", "status": "completed", "content": parts}
        most -= len(ENCODER.encode(message))
        if most < 0:
            break
        found.append(message)
    return found[::-1]


def number_messages(items: Sequence[Mapping[str, Any]], response: str) -> Iterator[Mapping[str, Any]]:
    """Yield the messages, with an id for those that have none."""
    for index, item in enumerate(items):
        yield {**item, "id": item["id"] or f"msg_{response.removeprefix('resp_')}{index:04x}"}


@define(eq=False)
class CompactionShape(ResponseShape):
    """The answer of /compact: the user's messages, and the summary of the rest behind them."""

    def make_final(self, ended: FinishedChoice) -> dict[str, Any]:
        response = super().make_final(ended)
        users = number_messages(self.request.details.user_messages, self.id)
        summary = [item for item in response["output"] if item["type"] == "compaction"]
        figures = {name: response[name] for name in ("created_at", "model", "usage", "timings", "rekindle")}
        return {"id": self.id, "object": "response.compaction", **figures, "output": [*users, *summary]}
