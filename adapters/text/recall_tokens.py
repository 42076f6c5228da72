"""The tokens that were generated, in the place of what a template writes of them when the conversation comes back.

A template writes an assistant's message from what its client sends: arguments as that client spells them, reasoning
only where the client has kept it, text cut into tokens as a tokenizer does and not as the model did. What stands there
is read like an answer; where it reads as what was generated, with the same control tokens in the same order, the
generated tokens stand there instead. So a prompt goes on exactly where the last answer ended, and what the model sees
never says anything else than what the client sent. Where a template leaves out what was thought, it reads otherwise,
and is left as it is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import anyio
from attrs import evolve, field, frozen

from adapters.text.answer.answer_parser import REASONING, AnswerReader
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool
from adapters.text.read_text import Reading, Utterance, heard, read
from adapters.text.template import Control, Rendered, Spliced, Verbatim
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MOST_LEAD = 64  # tokens that a template opens an answer with, the marker of a message not included


@frozen
class Turn:
    """tokens: of an assistant's message, between what opens it and what ends it.  lead: so many are the template's."""

    tokens: Tokens
    lead: int


class Recall(Protocol):
    """What one caller's answers were made of."""

    @property
    def owner(self) -> str: ...

    def find(self, said: Utterance) -> Turn | None: ...


@frozen
class Recognised:
    """A turn that is remembered, as it reads. lead: what the template has written of it.

    generated: how many of its tokens were.  controls: all control tokens in it, in their order.
    """

    verbatim: Verbatim
    generated: int
    controls: Tokens
    lead: str
    reading: Reading


@frozen
class AnswerOpening:
    """Where an answer begins: what was said before it, and the tokens that the template opens it with."""

    history: bytes
    lead: Tokens


@frozen
class Recalled:
    """A conversation with the reasoning that its client has left out, and what is known of its turns, by their places.

    history: a digest of all of it.
    """

    conversation: Conversation
    said: Sequence[Utterance]
    known: Mapping[int, Recognised]
    history: bytes


@frozen
class WrittenTurn:
    """What a template wrote of a message, `[start, stop)` of its pieces: as it reads, and the control tokens in it."""

    start: int
    stop: int
    text: str
    controls: Tokens
    reading: Reading

    def is_made_of(self, one: Recognised) -> bool:
        return self.text.startswith(one.lead) and (self.controls, self.reading) == (one.controls, one.reading)


@frozen
class Recaller:
    """reader: of answers, whatever may be called in them.  markers: control tokens that open messages."""

    tokenizer: Tokenizer
    reader: AnswerReader
    markers: Collection[int]
    controls: frozenset[int] = field(init=False)
    hidden: frozenset[int] = field(init=False)  # those that have no text in an answer

    def __attrs_post_init__(self) -> None:
        controls = self.tokenizer.controls
        seen = {controls[name].id for name in self.reader.controls if name in controls}
        object.__setattr__(self, "controls", frozenset(control.id for control in controls.values()))
        object.__setattr__(self, "hidden", self.tokenizer.special - seen)

    async def recalled(self, conversation: Conversation, recall: Recall, most: int | None) -> Recalled:
        """most: tokens of what is recalled, the latest first: no prompt has room for more."""
        said, history = await anyio.to_thread.run_sync(heard, conversation.lasting, recall.owner)
        if conversation.continues:
            said = said[:-1]  # the answer goes on with it
        found, size = list[tuple[int, Turn]](), 0
        for at, one in reversed([*enumerate(said)]):
            generated = recall.find(one)
            size += 0 if generated is None else len(generated.tokens)
            if most is not None and size > most:
                break
            if generated is not None:
                found.append((at, generated))
        if not found:
            return Recalled(conversation, said, {}, history)
        said = await anyio.to_thread.run_sync(self.without_defaults, said, conversation.messages)
        known = await anyio.to_thread.run_sync(self.known, [(said[at], generated) for at, generated in found])
        messages = list(conversation.messages)
        for place, turn in known.items():
            messages[place] = evolve(messages[place], reasoning=turn.reading.reasoning)
        return Recalled(evolve(conversation, messages=messages), said, known, history)

    def without_defaults(self, said: Iterable[Utterance], messages: Sequence[ChatMessage]) -> list[Utterance]:
        """As answers are read: arguments that a client writes out where the model left them to their schema."""
        tools = self.reader.tools
        return [evolve(one, reading=Reading.of_message(messages[one.place], tools)) for one in said]

    def known(self, found: Iterable[tuple[Utterance, Turn]]) -> dict[int, Recognised]:
        """Those that say what their messages say. Takes its time."""
        known = {}
        for said, turn in found:
            if not all(map(self.tokenizer.piece, turn.tokens)):
                continue  # it is another tokenizer's
            lead, text = self.text(turn.tokens[: turn.lead]), self.text(turn.tokens)
            reading = self.read(lead, text)
            if reading.says(said.reading):
                controls = tuple(token for token in turn.tokens if token in self.controls)
                written = Verbatim(turn.tokens, self.text(turn.tokens, hidden=()))
                known[said.place] = Recognised(written, len(turn.tokens) - turn.lead, controls, lead, reading)
        return known

    def spliced(self, rendered: Rendered, recalled: Recalled) -> tuple[Spliced, int]:
        """With what was generated wherever it is what stands there, and how many tokens that were. Takes its time.

        Messages are found in their order, the unknown ones, too: several may say the same.
        """
        alike = defaultdict[object, deque[WrittenTurn]](deque)
        for one in self.shown(rendered, sorted({one.lead for one in recalled.known.values()}, key=len)):
            alike[one.reading.text, one.reading.calls].append(one)
        written, at, tokens = list[Control | str | Verbatim](), 0, 0
        for said in recalled.said:
            same = alike[said.reading.text, said.reading.calls]
            while same and same[0].start < at:
                same.popleft()
            if not same:
                continue
            shown, turn = same.popleft(), recalled.known.get(said.place)
            written += rendered[at : shown.start]
            if turn is not None and shown.is_made_of(turn):
                written.append(turn.verbatim)
                tokens += turn.generated
            else:
                written += rendered[shown.start : shown.stop]
            at = shown.stop
        return (*written, *rendered[at:]), tokens

    def shown(self, rendered: Rendered, leads: Sequence[str]) -> Iterator[WrittenTurn]:
        """The messages that begin as answers do. leads: the shortest first, since the others may begin with it."""
        for start, stop in self.segments(rendered):
            pieces = rendered[start:stop]
            text = "".join(self.seen(piece) for piece in pieces)
            lead = next((lead for lead in leads if text.startswith(lead)), None)
            if lead is not None:
                controls = tuple(piece.id for piece in pieces if isinstance(piece, Control))
                yield WrittenTurn(start, stop, text, controls, self.read(lead, text))

    def segments(self, rendered: Rendered) -> Iterator[tuple[int, int]]:
        """What stands between the opening of a message and what ends an answer."""
        start = None
        for place, piece in enumerate(rendered):
            if not isinstance(piece, Control):
                continue
            if start is not None and piece.id in self.tokenizer.end_tokens:
                yield start, place
                start = None
            if piece.id in self.markers:
                start = place + 1

    def lead(self, tokens: Tokens) -> Tokens | None:
        """What follows the last marker in a prompt; None where there is none nearby."""
        near = range(len(tokens), max(0, len(tokens) - MOST_LEAD - 1), -1)
        return next((tokens[at:] for at in near if tokens[at - 1] in self.markers), None)

    def read(self, lead: str, text: str) -> Reading:
        """What follows the lead."""
        tags = REASONING.get(self.reader.reasoning)
        thinking = tags is not None and lead.rstrip().endswith(tags.opening)
        return read(text.removeprefix(lead), evolve(self.reader, thinking=thinking))

    def text(self, tokens: Tokens, hidden: Collection[int] | None = None) -> str:
        """As its client has got it, unless something else is hidden."""
        unseen = self.hidden if hidden is None else hidden
        return self.tokenizer.read(token for token in tokens if token not in unseen)

    def seen(self, piece: Control | str) -> str:
        if isinstance(piece, str):
            return piece
        return "" if piece.id in self.hidden else piece.content


def recaller(
    conversation: Conversation, tokenizer: Tokenizer, markers: Iterable[Tokens], calls: str, reasoning: str
) -> Recaller:
    """calls, reasoning: names of their forms. What was called once may be forbidden now: it is read all the same."""
    called = {call.name: FunctionTool(call.name) for message in conversation.messages for call in message.calls}
    reader = AnswerReader(calls, {**called, **{tool.name: tool for tool in conversation.tools}}, reasoning=reasoning)
    controls = {control.id for control in tokenizer.controls.values()}
    return Recaller(tokenizer, reader, {one[0] for one in markers if len(one) == 1} & controls)
