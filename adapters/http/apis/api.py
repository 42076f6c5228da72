"""An API for generating text, as data: its path, how its requests are read, and how its answers look.

Running the jobs, streaming, keep-alives, disconnects and deadlines are the same for all APIs (`reply.py`). A new API is
one more `Api`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeAlias, TypeVar

from attrs import frozen

from adapters.http.answer.answer_shape import AnswerShape
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.wire.error_format import OPENAI, ErrorFormat
from adapters.http.wire.fields import Fields
from adapters.text.model_text import Text
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens


@frozen
class TokenCounter:
    """Counts the tokens of a prompt. `read` raises ApiError, and `make_body` makes the answer of the count."""

    path: str
    read: Callable[[Fields, EdgeOptions, Text, ApiClient], Awaitable[Tokens]]
    make_body: Callable[[int], dict[str, Any]]
    error_format: ErrorFormat = OPENAI


D = TypeVar("D")
ReadRequest: TypeAlias = Callable[[Fields, EdgeOptions, Text, ApiClient], Awaitable[ParsedRequest[D]]]
# The first argument is the answer's id.
MakeShape: TypeAlias = Callable[[str, ParsedRequest[D], EdgeOptions, Tokenizer], AnswerShape]


@frozen
class Api(Generic[D]):
    """One API. `read` raises ApiError with the path of the first thing that is wrong.

    id_prefix: of its answers' ids.
    """

    path: str
    id_prefix: str
    read: ReadRequest[D]
    make_shape: MakeShape[D]
    error_format: ErrorFormat = OPENAI
