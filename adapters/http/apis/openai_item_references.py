"""Items of earlier responses, found by their ids. Used where a request names an item in the place of sending it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from adapters.http.apis.openai_response_answer import place_of
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ENCODER, ResponseFolder
from adapters.http.history.response_store import read as read_kept


@define
class References:
    """Items of earlier responses by their ids. left: bytes of such responses that one request may have read.

    Each time that an item is named counts: thousands of its ids fit into a small body.
    """

    shelf: ResponseFolder
    options: EdgeOptions
    left: int = field(init=False)
    outputs: dict[str, Sequence[Any]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.left = self.options.max_body

    def __call__(self, item: str) -> Mapping[str, Any] | None:
        response, place = place_of(item)
        if response not in self.outputs:
            raw = self.shelf.find(response) or b""
            self.left -= len(raw)
            try:
                self.outputs[response] = read_kept(raw, self.options).output if raw and self.left >= 0 else ()
            except ValueError:
                self.outputs[response] = ()
        output = self.outputs[response]
        if place >= len(output) or not isinstance(output[place], dict):
            return None
        self.left -= len(ENCODER.encode(output[place]))
        return output[place] if self.left >= 0 else None
