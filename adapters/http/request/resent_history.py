"""Read conversations that clients send again, with parts that a model cannot use, and say what it gets in their place.

Agents send their whole history again with every request. A 400 for something in it would come again with every request,
so it would end the session for good. Therefore only the newest turn of the user is read strictly. Everything before it,
and every result of a tool, is read as far as possible. What is left out becomes a note in the text, and `Changes` names
it in a header. A note depends only on the part that it stands for, so the prompt stays the same in later requests.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import define, field

from adapters.http.request.changes import Changes
from adapters.http.request.tool_definitions import KIND_PATTERN, map_tool_name
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ChatMessage, ToolCall

Speaker: TypeAlias = Literal["system", "user", "assistant", "tool"]
# Parts that are text, in any API, and which of their fields has it.
TEXT_FIELDS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
NOUNS = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "container_upload"), "file"),
}
# The fields in which parts of different APIs have the same things.
DATA_FIELDS = ("data", "file_data", "image_url", "audio_url", "video_url", "file_url", "url", "file_id")
TYPE_FIELDS = ("media_type", "mime_type", "mimeType", "format")
NAME_FIELDS = ("filename", "title")
MOST_DETAIL = 200  # characters of a name or an address in a note
MOST_NAME = 128  # characters of a speaker's name
LOST_RESULT = "[result of a tool call that is no longer in the conversation]"
UNNAMED_CALL = "[tool call left out: it names no tool]"


def find_newest_user_turn(speakers: Sequence[Speaker], *, prefilled: bool = False) -> int | None:
    """Return the index of the message that a person has just sent. Return None if the last message is not a person's.

    System messages are skipped. A user's message after the results of tools is the agent's: several agents send the
    images that a tool has returned in a user's message of their own.

    prefilled: a last message of the assistant begins the answer.
    """
    index = len(speakers) - 1
    if prefilled and index >= 0 and speakers[index] == "assistant":
        index -= 1
    while index >= 0 and speakers[index] == "system":
        index -= 1
    if index < 0 or speakers[index] != "user":
        return None
    before = index - 1
    while before >= 0 and speakers[before] in ("system", "user"):
        before -= 1
    return None if before >= 0 and speakers[before] == "tool" else index


@define
class ResentHistory:
    """Reads one conversation, message after message, without refusing anything.

    It knows the ids of all calls so far. `_open` holds those of the latest calls that have no result yet, with the
    names of their tools.
    """

    changes: Changes = field(factory=Changes)
    _known: set[str] = field(factory=set)
    _open: dict[str, str] = field(factory=dict)

    def begin_message(self) -> None:
        """Begin a message that is not a tool's. Later results without an id belong to no call before this message."""
        self._open.clear()

    def read_call(self, id_: Any, name: Any, arguments: Any) -> ToolCall | None:
        """Return a call of an earlier answer; None where it names no tool."""
        if not isinstance(name, str) or not name:
            self.changes.note("call-left-out")
            return None
        if (ours := map_tool_name(name)) != name:
            self.changes.note("tool-name")
        if not isinstance(id_, str) or not id_:
            id_ = f"call_{len(self._known)}"
        self._known.add(id_)
        self._open[id_] = ours
        return ToolCall(id_, ours, encode_arguments(arguments))

    def read_result(self, id_: Any, text: str, name: Any = None) -> ChatMessage:
        """Return the result of a call. name: of the tool, if the message has it."""
        if not isinstance(id_, str) or not id_:
            id_ = self._only_open_call(name)
            if id_ is not None:
                self.changes.note("result-without-id")
        if id_ is None or id_ not in self._known:
            self.changes.note("result-without-call")
            return ChatMessage("user", f"{LOST_RESULT}\n{text}" if text else LOST_RESULT)
        self._open.pop(id_, None)
        return ChatMessage("tool", text, answered_call_id=id_, name=read_speaker_name(name))

    def _only_open_call(self, name: Any) -> str | None:
        named = [id_ for id_, tool in self._open.items() if isinstance(name, str) and tool == map_tool_name(name)]
        for found in (named, list(self._open)):
            if len(found) == 1:
                return found[0]
        return None

    def read_role(self, role: Any, accepted: Mapping[str, Speaker]) -> Speaker:
        """Return the speaker. A message with an unknown role becomes the user's."""
        if isinstance(role, str) and role in accepted:
            return accepted[role]
        self.changes.note("role")
        return "user"

    def read_text(self, content: Any, between: str) -> str:
        """Return all text of a content, whatever it is made of. between: the separator of two parts."""
        if isinstance(content, str):
            return content
        return between.join(map(self.read_part, self.split_parts(content)))

    def split_parts(self, content: Any) -> list[Mapping[str, Any]]:
        """Return a content as parts; values that are no part become text."""
        if content is None:
            self.changes.note("content")
            return []
        listed = content if isinstance(content, list) else [content]
        return [part if isinstance(part, dict) else {"type": "text", "text": self._as_text(part)} for part in listed]

    def read_part(self, part: Mapping[str, Any]) -> str:
        kind = part.get("type")
        if not isinstance(kind, str):
            kind = "text" if "text" in part else "unknown"
        if kind in TEXT_FIELDS:
            return self._as_text(part.get(TEXT_FIELDS[kind]))
        if (text := extract_document_text(part)) is not None:
            return text
        if kind not in NOUNS and isinstance(part.get("text"), str):
            self.changes.note("block")
            return str(part["text"])
        return self.leave_out(part)

    def leave_out(self, part: Mapping[str, Any]) -> str:
        """Return the note that stands for a part that is no text."""
        kind = part.get("type")
        noun = NOUNS.get(kind) if isinstance(kind, str) else None
        self.changes.note(noun or "block")
        if noun is None:
            noun = f"{kind} block" if isinstance(kind, str) and KIND_PATTERN.fullmatch(kind) else "unknown block"
        details = ", ".join(list_details(part))
        return f"[{noun} left out: this model reads text only{'; ' + details if details else ''}]"

    def _as_text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        self.changes.note("content")
        return "" if value is None else json.dumps(value, ensure_ascii=False)


def encode_arguments(arguments: Any) -> str:
    """Return a call's arguments as JSON text. Text stays as it was sent, whether or not it is JSON."""
    if isinstance(arguments, str):
        return arguments or "{}"
    if arguments is None:
        return "{}"
    return json.dumps(arguments if isinstance(arguments, dict) else {"input": arguments}, ensure_ascii=False)


def read_speaker_name(name: Any) -> str | None:
    return name[:MOST_NAME] if isinstance(name, str) else None


def extract_document_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a document, a search result or a file that is text; None where it is something else."""
    kind = part.get("type")
    source = part.get("source")
    if kind == "search_result":
        head = [part.get("title"), source]
        text = join_text_blocks(part.get("content"))
    elif kind == "document" and isinstance(source, dict):
        head = [part.get("title"), part.get("context")]
        text = join_text_blocks(source.get("content")) if source.get("type") == "content" else extract_data_text(source)
    elif kind in ("file", "input_file"):
        inner = next((part[name] for name in ("file", "input_file") if isinstance(part.get(name), dict)), part)
        head = [inner.get("filename")]
        text = extract_data_text(inner)
    else:
        return None
    return None if text is None else "\n".join([*(part for part in head if isinstance(part, str) and part), text])


def join_text_blocks(content: Any) -> str | None:
    """Return the text of blocks, if all of them are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    return "\n".join(strings) if len(strings) == len(content) else None


def extract_data_text(source: Mapping[str, Any]) -> str | None:
    """Return the text of a source that is text, plain or in base 64."""
    data = source.get("data", source.get("file_data"))
    media = str(source.get("media_type", ""))
    if not isinstance(data, str):
        return None
    if source.get("type") == "text":
        return data
    if data.startswith("data:") and "," in data:
        media, data = data[len("data:") :].split(",", 1)
    if not media.startswith("text/"):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def list_details(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield name, type and size of a part's data, as far as it says them."""
    parts = [part, *(value for value in part.values() if isinstance(value, dict))]
    name = find_first_text(parts, NAME_FIELDS)
    data = find_first_text(parts, DATA_FIELDS)
    media = find_first_text(parts, TYPE_FIELDS)
    size = None
    if data is not None and data.startswith("data:"):
        head, _, data = data[len("data:") :].partition(",")
        media = head.partition(";")[0] or media
        size = count_base64_bytes(data)
    elif data is not None and any(data == index.get(key) for index in parts for key in ("data", "file_data")):
        size = count_base64_bytes(data)
    for text in (name, media):
        if text:
            yield shorten(text)
    if size is not None:
        yield f"{size:,} bytes"
    elif data:
        yield shorten(data)


def find_first_text(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    found = (index[name] for index in parts for name in names if isinstance(index.get(name), str))
    return next(found, None)


def count_base64_bytes(data: str) -> int:
    """Return how many bytes a text in base 64 stands for."""
    return 3 * (len(data) // 4) - data[-2:].count("=")


def shorten(text: str) -> str:
    return " ".join(text[:MOST_DETAIL].split())


def fields_of(parts: Sequence[Mapping[str, Any]], path: str) -> list[Fields]:
    return [Fields(part, f"{path}[{index}]") for index, part in enumerate(parts)]
