"""Find items of earlier responses by their ids, for requests that name an item instead of sending it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from adapters.http.apis.openai_response_answer import locate_item
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ENCODER, ResponseFolder
from adapters.http.history.response_store import decode_response as read_kept


@define
class ItemReferences:
    """Items of earlier responses by their ids. bytes_left: bytes of such responses that the request may still have
    read.

    Each mention of an item counts, since thousands of ids fit into a small body.
    """

    folder: ResponseFolder
    options: EdgeOptions
    bytes_left: int = field(init=False)
    outputs: dict[str, Sequence[Any]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Let the request read as many bytes of earlier responses as its body may have."""
        self.bytes_left = self.options.limits.max_body

    def __call__(self, item: str) -> Mapping[str, Any] | None:
        response, index = locate_item(item)
        if response not in self.outputs:
            raw = self.folder.find(response) or b""
            self.bytes_left -= len(raw)
            try:
                self.outputs[response] = read_kept(raw, self.options).output if raw and self.bytes_left >= 0 else ()
            except ValueError:
                self.outputs[response] = ()
        output = self.outputs[response]
        if index >= len(output) or not isinstance(output[index], dict):
            return None
        self.bytes_left -= len(ENCODER.encode(output[index]))
        return output[index] if self.bytes_left >= 0 else None
