"""An API for generating text, as data: where it is, how its requests are read, and how its answers look.

Running the jobs, streaming, keep-alives, disconnects and deadlines are the same for all of them (`reply.py`). A further
API is one more of these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import field, frozen

from adapters.http.answer.answer_shape import AnswerShape
from adapters.http.history.answer_tokens import AskedTurn, OwnTurns, TurnMemory
from adapters.http.request.controls import Controls
from adapters.http.wire.edge_options import EdgeOptions
from adapters.http.wire.error_format import OPENAI, Dialect
from adapters.http.wire.fields import Fields
from adapters.text.answer.answer_parser import PLAIN, AnswerReader
from adapters.text.conversation import ChatMessage
from adapters.text.grammars.grammar import Compiled
from adapters.text.model_text import Text
from adapters.text.tokenizer import Gone, Tokenizer
from effects.ids import Tokens


@frozen
class Asker:
    """Who asks. name: of its key.  gone: has it left?"""

    gone: Gone
    memory: TurnMemory
    name: str = ""

    def turns(self, salt: str = "") -> OwnTurns:
        """What its answers were made of."""
        return OwnTurns(self.memory, f"{self.name}.{salt}")


@frozen
class Asked:
    """A request that is understood. `paths`: where each prompt stands in the body.  reader: of all its answers."""

    controls: Controls
    prompts: Sequence[Tokens]
    paths: Sequence[str]
    reader: AnswerReader = PLAIN
    headers: Mapping[str, str] = field(factory=dict)  # that the answer is to carry, whatever it will be
    cuts: Tokens = ()  # safe boundaries of its only prompt, which the client named
    messages: Sequence[ChatMessage] = ()  # that its only prompt was made of
    echo: Mapping[str, Any] = field(factory=dict)  # what the answer says of the request again
    compiled: Compiled | None = None  # what its answers keep to, there until they are complete
    opens: bool = False  # its prompt is a conversation's first, of one that offers no tools
    turn: AskedTurn | None = None  # of a conversation
    stabilized: tuple[str, ...] = ()  # by which rules its prompt is another than was sent
    tail: int | None = None  # from here on no later prompt will be the same
    tools: bool = False  # its only prompt describes functions


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
