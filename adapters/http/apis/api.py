"""An API for generating text, as data: where it is, how its requests are read, and how its answers look.

Running the jobs, streaming, keep-alives, disconnects and deadlines are the same for all of them (`reply.py`). A further
API is one more of these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from attrs import frozen

from adapters.http.answer.answer_shape import AnswerShape
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked, Asker
from adapters.http.wire.error_format import OPENAI, Dialect
from adapters.http.wire.fields import Fields
from adapters.text.model_text import Text
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens


@frozen
class Counter:
    """What tells how many tokens a prompt has. `read` raises ApiError, and `shape` is how the number is told."""

    path: str
    read: Callable[[Fields, EdgeOptions, Text, Asker], Awaitable[Tokens]]
    shape: Callable[[int], dict[str, Any]]
    dialect: Dialect = OPENAI


Read: TypeAlias = Callable[[Fields, EdgeOptions, Text, Asker], Awaitable[Asked]]
Draw: TypeAlias = Callable[[str, Asked, EdgeOptions, Tokenizer], AnswerShape]  # its first argument is the answer's id


@frozen
class Api:
    """`read` raises ApiError with the path of the first thing that is wrong."""

    path: str
    prefix: str  # of its answers' ids
    read: Read
    shape: Draw
    dialect: Dialect = OPENAI  # of its errors
