"""Content blocks of the Messages API: how their text is read, and which of them are no text."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.http.request.resent_history import extract_document_text
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields

NOT_TEXT = ("image", "document", "container_upload", "search_result", "browser_state")


def split_blocks(fields: Fields, name: str) -> Sequence[Fields]:
    content = fields.data.get(name)
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, fields.path_of(name))]
    if not isinstance(content, list):
        raise fields.wrong_value(name, "a string or an array of blocks")
    return [Fields.from_value(block, f"{fields.path_of(name)}[{index}]") for index, block in enumerate(content)]


def read_block(block: Fields, accepted: Sequence[str]) -> str:
    """Return the text of a block. accepted: other types that may stand there. Raises ApiError."""
    kind = block.data.get("type")
    if (text := extract_document_text(block.data)) is not None:
        return text
    if kind in NOT_TEXT:
        raise invalid(block.path_of("type"), f"{kind!r} blocks are not supported: this server's model reads text only")
    if kind != "text":
        raise block.wrong_value("type", "one of " + ", ".join(map(repr, accepted)))
    return read_required(block, "text")


def read_required(block: Fields, name: str) -> str:
    value = block.text(name)
    if value is None:
        raise block.wrong_value(name, "a string")
    return value
