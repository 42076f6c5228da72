"""Remember the tokens that answers were made of, until their conversations come back. Each caller has its own.

A file of the folder has the digest of the rest, and a line of JSON. The line has the owner of the turn, the ids of its
calls, its tokens, and which texts of the system prompt stood where (`adapters/text/stabilize.py`). The file's only
statement is its tokens, and these are detokenized before they are used (`adapters/text/recall_tokens.py`). So a forged
file is a turn that is not found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from attrs import define, field, frozen

from adapters.http.history.persistent_lru import DIGEST_CHARACTERS, UNREADABLE, Limits, PersistentLru, has_valid_digest
from adapters.text.answer.answer_pieces import AnswerPiece, CallBegun
from adapters.text.conversation import ChatMessage, MovedText
from adapters.text.model_text import ChatPrompt
from adapters.text.read_text import AssistantTurn, Reading, read_history, turn_key
from adapters.text.recall_tokens import AnswerOpening, GeneratedTurn
from effects.ids import Tokens
from effects.job import Job

MAX_TURNS = 8192  # turns, each in a file: 80 conversations of a hundred
MAX_BYTES = 32 << 20  # in memory, and as much on disk: 4 KiB a turn, which are some 600 tokens written out
MAX_TURN_BYTES = 2 << 20  # bytes of one turn: 300,000 tokens

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@frozen
class TurnRecord:
    """One turn as a file holds it.

    calls: their ids. tokens, lead: as `Turn` has them. moved: the moved texts of the conversation (`Conversation`).
    """

    owner: str
    calls: tuple[str, ...]
    lead: Annotated[int, msgspec.Meta(ge=0)]
    tokens: tuple[TokenId, ...]
    moved: tuple[MovedText, ...] | None = None


@frozen
class CallsOfTurn:
    """The owner and the calls of a record: all that is read of thousands of records at a start."""

    owner: str
    calls: tuple[str, ...]


ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(TurnRecord)
CALLS = msgspec.json.Decoder(CallsOfTurn)


@define(eq=False)
class TurnMemory(PersistentLru):
    """The turns of all callers.

    remembered_prompts: how many prompts had remembered turns. remembered_tokens: how many tokens those turns had.
    """

    remembered_prompts: int = field(default=0, init=False)
    remembered_tokens: int = field(default=0, init=False)
    _turn_names: dict[tuple[str, str], str] = field(factory=dict, init=False)  # (owner, id of a call) -> its turn

    description = "the tokens of answers"
    name_pattern = re.compile(r"turn_[0-9a-f]{32}")

    @property
    def limits(self) -> Limits:
        return Limits(MAX_TURNS, MAX_BYTES, MAX_TURN_BYTES)

    def is_whole(self, raw: bytes) -> bool:
        if not has_valid_digest(raw):
            return False
        try:
            decode_record(raw)
        except UNREADABLE:
            return False
        return True

    def find_turn(self, owner: str, said: AssistantTurn) -> GeneratedTurn | None:
        found = self.find_record(owner, said)
        if found is None:
            return None
        name, record = found
        self.mark_used(name)
        return GeneratedTurn(record.tokens, record.lead)

    def find_record(self, owner: str, said: AssistantTurn) -> tuple[str, TurnRecord] | None:
        """Find a turn by the id of a call, which is unique, or by its text and the history before it. Any thread may
        call this.
        """
        for name in (*(self._turn_names.get((owner, call), "") for call in said.calls), make_turn_name(said.key)):
            raw = self.find(name)
            record = None if raw is None else decode_record(raw)
            if record is not None and record.owner == owner:
                return name, record
        return None

    def remove(self, name: str) -> bool:
        self._forget(name)
        return super().remove(name)

    def _insert(self, name: str, raw: bytes) -> None:
        self._forget(name)
        super()._insert(name, raw)
        record = decode_calls(raw)
        self._turn_names.update(((record.owner, call), name) for call in record.calls)

    def _forget(self, name: str) -> None:
        if (raw := self.find(name)) is not None:
            record = decode_calls(raw)
            for call in record.calls:
                if self._turn_names.get((record.owner, call)) == name:
                    del self._turn_names[record.owner, call]

    def count_prompt(self, tokens: int) -> None:
        self.remembered_prompts += tokens > 0
        self.remembered_tokens += tokens

    def count_figures(self) -> dict[str, int]:
        return {
            "turns": len(self),
            "bytes": self.size,
            "prompts": self.remembered_prompts,
            "tokens": self.remembered_tokens,
        }


def decode_record(raw: bytes) -> TurnRecord:
    """Return the record in a file. Raises msgspec.DecodeError for bytes that were never written here."""
    return DECODER.decode(raw[DIGEST_CHARACTERS + 1 :])


def decode_calls(raw: bytes) -> CallsOfTurn:
    """Return the calls in a file that is whole."""
    return CALLS.decode(raw[DIGEST_CHARACTERS + 1 :])


def make_turn_name(key: str) -> str:
    return f"turn_{key}"


@frozen
class CallerTurns:
    """The turns of one caller. owner: a name for its key, and its salt."""

    memory: TurnMemory
    owner: str = ""

    def find(self, said: AssistantTurn) -> GeneratedTurn | None:
        return self.memory.find_turn(self.owner, said)

    def find_moved_texts(self, messages: Sequence[ChatMessage]) -> tuple[MovedText, ...] | None:
        """Return the moved texts in the prompt of the last remembered answer of a conversation. This takes time: call
        it on a worker thread.
        """
        said, _ = read_history(messages, self.owner)
        found = (self.memory.find_record(self.owner, said_turn) for said_turn in reversed(said))
        return next((record[1].moved for record in found if record is not None), None)


@frozen
class PendingTurn:
    """The turn that a prompt asks for.

    remembered_tokens: tokens of the prompt that were once generated. opening: None, and the answer is not remembered.
    moved: the moved texts of its conversation.
    """

    turns: CallerTurns
    remembered_tokens: int = 0
    opening: AnswerOpening | None = None
    moved: tuple[MovedText, ...] | None = None

    @staticmethod
    def from_prompt(turns: CallerTurns, prompt: ChatPrompt) -> PendingTurn:
        return PendingTurn(turns, prompt.reused_token_count, prompt.answer_opening, prompt.moved_texts)

    def store(self, job: Job, tokens: Tokens, pieces: Sequence[AnswerPiece]) -> None:
        """Remember the complete answer: its tokens, and the pieces that were sent of it."""
        if tokens and tokens[-1] in job.stop_tokens:
            tokens = tokens[:-1]
        if self.opening is None or not tokens:
            return
        lead = self.opening.lead
        calls = tuple(piece.id for piece in pieces if isinstance(piece, CallBegun))
        record = TurnRecord(self.turns.owner, calls, len(lead), (*lead, *tokens), self.moved)
        key = turn_key(self.opening.history, Reading.from_pieces(pieces))
        self.turns.memory.put(make_turn_name(key), ENCODER.encode(record), lasting=job.scope.kind != "off")
