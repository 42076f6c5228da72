"""Puts the tokens of earlier answers into the prompt when a conversation comes back, so that the cache matches.

The problem: a template writes an assistant's message from what the client sends. The client spells arguments in its
own way and may drop the reasoning, and the tokenizer cuts text into other tokens than the model did. So the prompt
diverges from the tokens that were generated, and from the cache.

The idea: the message that the template wrote is parsed like an answer. If its meaning is that of the generated answer,
with the same control tokens in the same order, the generated tokens replace it. So the prompt continues exactly where
the last answer ended.

The invariant: the prompt never means anything else than what the client sent. Where a template leaves out the
reasoning, the meaning differs, and the message stays as the template wrote it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import anyio
from attrs import evolve, field, frozen

from adapters.text.answer.answer_parser import REASONING, AnswerReader
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool
from adapters.text.read_text import AssistantTurn, Reading, read_answer, read_history
from adapters.text.template import ControlToken, Rendered, Spliced, VerbatimTokens
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MAX_LEAD_TOKENS = 64  # tokens with which a template opens an answer, without the marker of the message


@frozen
class GeneratedTurn:
    """The tokens of an assistant's message, without those that open and end a message.

    lead: the first tokens, of this number, were written by the template.
    """

    tokens: Tokens
    lead: int


class TurnLookup(Protocol):
    """Finds the generated tokens of one caller's answers."""

    @property
    def owner(self) -> str: ...

    def find(self, said: AssistantTurn) -> GeneratedTurn | None: ...


@frozen
class RecognisedTurn:
    """A remembered turn, parsed.

    generated: number of generated tokens.
    controls: all control tokens in it, in their order.
    lead: the text at its beginning that the template wrote.
    """

    verbatim: VerbatimTokens
    generated: int
    controls: Tokens
    lead: str
    reading: Reading


@frozen
class AnswerOpening:
    """The beginning of an answer: a digest of the messages before it, and the tokens that the template wrote."""

    history: bytes
    lead: Tokens


@frozen
class RecalledConversation:
    """A conversation with the reasoning that the client left out.

    turns: the assistant's messages. recognised: the remembered turns among them, by message index.
    history: a digest of all messages.
    """

    conversation: Conversation
    turns: Sequence[AssistantTurn]
    recognised: Mapping[int, RecognisedTurn]
    history: bytes


@frozen
class WrittenTurn:
    """A message as the template wrote it: the pieces `[start, stop)`, their meaning and their control tokens."""

    start: int
    stop: int
    text: str
    controls: Tokens
    reading: Reading

    def matches(self, token: RecognisedTurn) -> bool:
        return self.text.startswith(token.lead) and (self.controls, self.reading) == (token.controls, token.reading)


@frozen
class TurnRecaller:
    """Replaces what the template wrote by remembered tokens.

    reader: reads answers, with all functions that are called anywhere in the conversation.
    markers: control tokens that open messages.
    """

    tokenizer: Tokenizer
    reader: AnswerReader
    markers: Collection[int]
    controls: frozenset[int] = field(init=False)
    hidden: frozenset[int] = field(init=False)  # control tokens that have no text in an answer

    def __attrs_post_init__(self) -> None:
        controls = self.tokenizer.controls
        seen = {controls[name].id for name in self.reader.visible_controls if name in controls}
        object.__setattr__(self, "controls", frozenset(control.id for control in controls.values()))
        object.__setattr__(self, "hidden", self.tokenizer.special - seen)

    async def recall(
        self, conversation: Conversation, recall: TurnLookup, max_tokens: int | None
    ) -> RecalledConversation:
        """Find the remembered turns of a conversation.

        max_tokens: at most this many tokens are recalled, from the latest turn on. A prompt has room for no more.
        """
        said, history = await anyio.to_thread.run_sync(read_history, conversation.lasting_messages, recall.owner)
        if conversation.continues:
            said = said[:-1]  # the answer continues this message
        found = list[tuple[int, GeneratedTurn]]()
        size = 0
        for at, said_turn in reversed([*enumerate(said)]):
            generated = recall.find(said_turn)
            size += 0 if generated is None else len(generated.tokens)
            if max_tokens is not None and size > max_tokens:
                break
            if generated is not None:
                found.append((at, generated))
        if not found:
            return RecalledConversation(conversation, said, {}, history)
        said = await anyio.to_thread.run_sync(self.remove_defaults, said, conversation.messages)
        known = await anyio.to_thread.run_sync(self.recognise, [(said[at], generated) for at, generated in found])
        messages = list(conversation.messages)
        for index, turn in known.items():
            messages[index] = evolve(messages[index], reasoning=turn.reading.reasoning)
        return RecalledConversation(evolve(conversation, messages=messages), said, known, history)

    def remove_defaults(self, said: Iterable[AssistantTurn], messages: Sequence[ChatMessage]) -> list[AssistantTurn]:
        """Read turns again without arguments that are defaults: clients add them where the model left them out."""
        tools = self.reader.tools
        return [
            evolve(said_turn, reading=Reading.from_message(messages[said_turn.message_index], tools))
            for said_turn in said
        ]

    def recognise(self, found: Iterable[tuple[AssistantTurn, GeneratedTurn]]) -> dict[int, RecognisedTurn]:
        """Return the turns whose meaning is that of their messages. This is slow: call it in a thread."""
        known = {}
        for said, turn in found:
            if not all(map(self.tokenizer.token_bytes, turn.tokens)):
                continue  # these tokens are of another tokenizer
            lead = self.decode_visible(turn.tokens[: turn.lead])
            text = self.decode_visible(turn.tokens)
            reading = self.read_after_lead(lead, text)
            if reading.matches(said.reading):
                controls = tuple(token for token in turn.tokens if token in self.controls)
                written = VerbatimTokens(turn.tokens, self.decode_visible(turn.tokens, hidden=()))
                known[said.message_index] = RecognisedTurn(
                    written, len(turn.tokens) - turn.lead, controls, lead, reading
                )
        return known

    def splice(self, rendered: Rendered, recalled: RecalledConversation) -> tuple[Spliced, int]:
        """Return the prompt with the remembered tokens, and how many of them were generated.

        This is slow: call it in a thread. All messages are searched in their order, even those that are not
        remembered, since several messages may have the same meaning.
        """
        alike = defaultdict[object, deque[WrittenTurn]](deque)
        for written_turn in self.iterate_written_turns(
            rendered, sorted({turn.lead for turn in recalled.recognised.values()}, key=len)
        ):
            alike[written_turn.reading.text, written_turn.reading.calls].append(written_turn)
        written = list[ControlToken | str | VerbatimTokens]()
        at = 0
        tokens = 0
        for said in recalled.turns:
            same = alike[said.reading.text, said.reading.calls]
            while same and same[0].start < at:
                same.popleft()
            if not same:
                continue
            shown = same.popleft()
            turn = recalled.recognised.get(said.message_index)
            written += rendered[at : shown.start]
            if turn is not None and shown.matches(turn):
                written.append(turn.verbatim)
                tokens += turn.generated
            else:
                written += rendered[shown.start : shown.stop]
            at = shown.stop
        return (*written, *rendered[at:]), tokens

    def iterate_written_turns(self, rendered: Rendered, leads: Sequence[str]) -> Iterator[WrittenTurn]:
        """Yield the messages that begin like an answer. leads: shortest first, since a longer one may begin with it."""
        for start, stop in self.iterate_segments(rendered):
            pieces = rendered[start:stop]
            text = "".join(self.visible_text(piece) for piece in pieces)
            lead = next((lead for lead in leads if text.startswith(lead)), None)
            if lead is not None:
                controls = tuple(piece.id for piece in pieces if isinstance(piece, ControlToken))
                yield WrittenTurn(start, stop, text, controls, self.read_after_lead(lead, text))

    def iterate_segments(self, rendered: Rendered) -> Iterator[tuple[int, int]]:
        """Yield the ranges of pieces between the marker of a message and an end token."""
        start = None
        for index, piece in enumerate(rendered):
            if not isinstance(piece, ControlToken):
                continue
            if start is not None and piece.id in self.tokenizer.end_tokens:
                yield start, index
                start = None
            if piece.id in self.markers:
                start = index + 1

    def find_lead(self, tokens: Tokens) -> Tokens | None:
        """Return the tokens after the last marker of a prompt. None: there is none among the last 64 tokens."""
        near = range(len(tokens), max(0, len(tokens) - MAX_LEAD_TOKENS - 1), -1)
        return next((tokens[at:] for at in near if tokens[at - 1] in self.markers), None)

    def read_after_lead(self, lead: str, text: str) -> Reading:
        """Return the meaning of the text after the lead."""
        tags = REASONING.get(self.reader.reasoning)
        thinking = tags is not None and lead.rstrip().endswith(tags.opening)
        return read_answer(text.removeprefix(lead), evolve(self.reader, starts_in_reasoning=thinking))

    def decode_visible(self, tokens: Tokens, hidden: Collection[int] | None = None) -> str:
        """Return the text that the client got. hidden: other tokens to leave out than those that clients never get."""
        unseen = self.hidden if hidden is None else hidden
        return self.tokenizer.decode_bytes(token for token in tokens if token not in unseen)

    def visible_text(self, piece: ControlToken | str) -> str:
        if isinstance(piece, str):
            return piece
        return "" if piece.id in self.hidden else piece.content


def build_recaller(
    conversation: Conversation, tokenizer: Tokenizer, markers: Iterable[Tokens], calls: str, reasoning: str
) -> TurnRecaller:
    """Build the recaller of a conversation. calls, reasoning: the names of their forms.

    Functions that were called earlier and are no longer declared are still read as calls.
    """
    called = {call.name: FunctionTool(call.name) for message in conversation.messages for call in message.calls}
    reader = AnswerReader(calls, {**called, **{tool.name: tool for tool in conversation.tools}}, reasoning=reasoning)
    controls = {control.id for control in tokenizer.controls.values()}
    return TurnRecaller(tokenizer, reader, {marker[0] for marker in markers if len(marker) == 1} & controls)
