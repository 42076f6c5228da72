"""A request that was read and understood, and the client that sent it. Every API makes one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from adapters.http.history.answer_tokens import AskedTurn, OwnTurns, TurnMemory
from adapters.http.request.controls import Controls
from adapters.text.answer.answer_parser import PLAIN, AnswerReader
from adapters.text.conversation import ChatMessage
from adapters.text.grammars.grammar import CompiledGrammar
from adapters.text.tokenizer import DisconnectCheck
from effects.ids import Tokens


@frozen
class Asker:
    """Who asks. name: of its key.  gone: has it left?"""

    gone: DisconnectCheck
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
    compiled: CompiledGrammar | None = None  # what its answers keep to, there until they are complete
    opens: bool = False  # its prompt is a conversation's first, of one that offers no tools
    turn: AskedTurn | None = None  # of a conversation
    stabilized: tuple[str, ...] = ()  # by which rules its prompt is another than was sent
    tail: int | None = None  # from here on no later prompt will be the same
    tools: bool = False  # its only prompt describes functions
