"""A request that was read and understood, and the client that sent it. Every API makes one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from attrs import field, frozen

from adapters.http.history.answer_tokens import CallerTurns, PendingTurn, TurnMemory
from adapters.http.request.controls import Controls
from adapters.text.answer.answer_parser import PLAIN, AnswerReader
from adapters.text.conversation import ChatMessage
from adapters.text.grammars.grammar import CompiledGrammar
from adapters.text.tokenizer import DisconnectCheck
from effects.ids import Tokens

D = TypeVar("D")


@frozen
class ApiClient:
    """The client that sent a request. has_left: returns whether it has disconnected. name: the digest of its API key
    in hex; empty where the server has no keys.
    """

    has_left: DisconnectCheck
    turn_memory: TurnMemory
    name: str = ""

    def find_turns(self, salt: str = "") -> CallerTurns:
        """Return what the answers of this caller were made of, under this salt."""
        return CallerTurns(self.turn_memory, f"{self.name}.{salt}")


@frozen
class ParsedRequest(Generic[D]):
    """A request that is understood.

    paths: of each prompt in the body. details: what only the answers of this API need to know of the request. reader:
    parses all its answers. headers: further ones of the answer, known before it. cuts: safe boundaries of its only
    prompt that the client named. messages: its only prompt was made of these. compiled_grammar: limits its answers, and
    is held until they are complete. opens_conversation: its prompt is the first of a conversation without tools.
    stabilize_rules: the rules by which its prompt differs from what was sent. volatile_start: from this token on, no
    later prompt will be the same. describes_tools: its only prompt describes functions.
    """

    controls: Controls
    prompts: Sequence[Tokens]
    paths: Sequence[str]
    details: D
    reader: AnswerReader = PLAIN
    headers: Mapping[str, str] = field(factory=dict)
    cuts: Tokens = ()
    messages: Sequence[ChatMessage] = ()
    compiled_grammar: CompiledGrammar | None = None
    opens_conversation: bool = False
    pending_turn: PendingTurn | None = None
    stabilize_rules: tuple[str, ...] = ()
    volatile_start: int | None = None
    describes_tools: bool = False
