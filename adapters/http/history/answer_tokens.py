"""The tokens that answers were made of, for when their conversations come back: each caller's are their own.

A file of the folder has the digest of what follows it, and a line of JSON: whose turn it is, the ids of its calls, its
tokens, and which texts of the system prompt stood where (`stabilize.py`). What it says is nowhere but in the tokens,
and they are read before they are used (`recall.py`): a file that lies is a turn that is not found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from attrs import define, field, frozen

from adapters.http.history.persistent_lru import DIGEST, UNREADABLE, Limits, PersistentLru, is_signed
from adapters.text.answer.answer_pieces import AnswerPiece, CallBegun
from adapters.text.conversation import ChatMessage, MovedText
from adapters.text.model_text import ChatPrompt
from adapters.text.read_text import AssistantTurn, Reading, read_history, turn_key
from adapters.text.recall_tokens import AnswerOpening, GeneratedTurn
from effects.ids import Tokens
from effects.job import Job

MOST = 8192  # turns, each in a file: 80 conversations of a hundred
MOST_BYTES = 32 << 20  # in memory, and as much on disk: 4 KiB a turn, which are some 600 tokens written out
LARGEST = 2 << 20  # bytes of one: 300,000 tokens

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@frozen
class TurnRecord:
    """calls: their ids.  tokens, lead: as a `Turn` has them.  moved: as the conversation had it (`Conversation`)."""

    owner: str
    calls: tuple[str, ...]
    lead: Annotated[int, msgspec.Meta(ge=0)]
    tokens: tuple[TokenId, ...]
    moved: tuple[MovedText, ...] | None = None


@frozen
class CallsOfTurn:
    """Of a record, whose it is and which calls: all that is asked of each of thousands at a start."""

    owner: str
    calls: tuple[str, ...]


ENCODER, DECODER, CALLS = msgspec.json.Encoder(), msgspec.json.Decoder(TurnRecord), msgspec.json.Decoder(CallsOfTurn)


@define(eq=False)
class TurnMemory(PersistentLru):
    """prompts: so many had turns that were remembered.  remembered: how many tokens those were."""

    prompts: int = field(default=0, init=False)
    remembered: int = field(default=0, init=False)
    _named: dict[tuple[str, str], str] = field(factory=dict, init=False)  # (owner, id of a call) -> its turn

    what = "the tokens of answers"
    names = re.compile(r"turn_[0-9a-f]{32}")

    @property
    def limits(self) -> Limits:
        return Limits(MOST, MOST_BYTES, LARGEST)

    def is_whole(self, raw: bytes) -> bool:
        if not is_signed(raw):
            return False
        try:
            record_of(raw)
        except UNREADABLE:
            return False
        return True

    def turn(self, owner: str, said: AssistantTurn) -> GeneratedTurn | None:
        found = self.record(owner, said)
        if found is None:
            return None
        name, record = found
        self.used(name)
        return GeneratedTurn(record.tokens, record.lead)

    def record(self, owner: str, said: AssistantTurn) -> tuple[str, TurnRecord] | None:
        """By the id of a call, which is nobody else's, or by what it says behind what was said before it. On any
        thread.
        """
        for name in (*(self._named.get((owner, call), "") for call in said.calls), name_of(said.key)):
            raw = self.find(name)
            record = None if raw is None else record_of(raw)
            if record is not None and record.owner == owner:
                return name, record
        return None

    def drop(self, name: str) -> bool:
        self._forget(name)
        return super().drop(name)

    def _put(self, name: str, raw: bytes) -> None:
        self._forget(name)
        super()._put(name, raw)
        record = calls_of(raw)
        self._named.update(((record.owner, call), name) for call in record.calls)

    def _forget(self, name: str) -> None:
        if (raw := self.find(name)) is not None:
            record = calls_of(raw)
            for call in record.calls:
                if self._named.get((record.owner, call)) == name:
                    del self._named[record.owner, call]

    def count(self, tokens: int) -> None:
        self.prompts += tokens > 0
        self.remembered += tokens

    def figures(self) -> dict[str, int]:
        return {"turns": len(self), "bytes": self.size, "prompts": self.prompts, "tokens": self.remembered}


def record_of(raw: bytes) -> TurnRecord:
    """Raises msgspec.DecodeError for what was never written here."""
    return DECODER.decode(raw[DIGEST + 1 :])


def calls_of(raw: bytes) -> CallsOfTurn:
    """Of what is whole."""
    return CALLS.decode(raw[DIGEST + 1 :])


def name_of(key: str) -> str:
    return f"turn_{key}"


@frozen
class OwnTurns:
    """What one caller's answers were made of.

    owner: a name for its key, and its salt.
    """

    memory: TurnMemory
    owner: str = ""

    def find(self, said: AssistantTurn) -> GeneratedTurn | None:
        return self.memory.turn(self.owner, said)

    def moved(self, messages: Sequence[ChatMessage]) -> tuple[MovedText, ...] | None:
        """What stood where in the prompt of the last answer of these that is remembered. Takes its time."""
        said, _ = read_history(messages, self.owner)
        found = (self.memory.record(self.owner, one) for one in reversed(said))
        return next((one[1].moved for one in found if one is not None), None)


@frozen
class AskedTurn:
    """The answer that a prompt asks for. remembered: tokens of the prompt that were generated once.

    opening: None, and the answer is not remembered.  moved: as its conversation has it.
    """

    turns: OwnTurns
    remembered: int = 0
    opening: AnswerOpening | None = None
    moved: tuple[MovedText, ...] | None = None

    @staticmethod
    def of(turns: OwnTurns, prompt: ChatPrompt) -> AskedTurn:
        return AskedTurn(turns, prompt.reused_token_count, prompt.answer_opening, prompt.moved_texts)

    def keep(self, job: Job, tokens: Tokens, pieces: Sequence[AnswerPiece]) -> None:
        """It is complete: made of these tokens, told in these pieces."""
        if tokens and tokens[-1] in job.stop_tokens:
            tokens = tokens[:-1]
        if self.opening is None or not tokens:
            return
        lead = self.opening.lead
        calls = tuple(piece.id for piece in pieces if isinstance(piece, CallBegun))
        record = TurnRecord(self.turns.owner, calls, len(lead), (*lead, *tokens), self.moved)
        key = turn_key(self.opening.history, Reading.from_pieces(pieces))
        self.turns.memory.put(name_of(key), ENCODER.encode(record), lasting=job.scope.kind != "off")
