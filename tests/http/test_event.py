"""One server-sent event, as clients read it."""

from __future__ import annotations

import json

import pytest

from adapters.http.answer.answer_shape import encode_event


@pytest.mark.parametrize(
    "text", ["plain", "a\x85b", "\u2028\u2029", "né\u2028 \U0001f600\x85\x0b\x1c\n\r", "\\u2028 \\"]
)
@pytest.mark.parametrize("name", [None, "delta"])
def test_an_event_is_a_line_whoever_reads_it(text: str, name: str | None) -> None:
    """Many readers of lines, httpx's among them, end one wherever Unicode does."""
    seen = encode_event({"text": text, "more": [text]}, name).decode()
    *named, data, end = seen.splitlines()
    assert named == ([] if name is None else [f"event: {name}"])
    assert end == ""
    assert json.loads(data.removeprefix("data: ")) == {"text": text, "more": [text]}
