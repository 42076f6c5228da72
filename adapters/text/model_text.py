"""Everything about text that a server needs from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.text_files import TextFiles
from adapters.text.answer.answer_parser import NONE, AnswerReader
from adapters.text.answer.detect_call_form import detect_calls, detect_reasoning, opened
from adapters.text.boundaries import Openings, find_openings
from adapters.text.conversation import ChatMessage, Conversation, MovedText, templated, with_object_arguments
from adapters.text.grammars.grammar import Grammars
from adapters.text.reasoning_efforts import find_efforts, with_accepted_effort
from adapters.text.recall_tokens import AnswerOpening, Recall, recaller
from adapters.text.shared_cuts import cuts_of
from adapters.text.template import ChatTemplate, Control, Rendered, Spliced, TemplateFailed, TemplateRefused, text_of
from adapters.text.tokenizer import Gone, Tokenizer, TokenizerPanicked
from effects.ids import Tokens
from effects.job import Sampling


@frozen
class ChatPrompt:
    """A conversation, ready to be answered, and how the answer is to be read.

    cuts: places that the client marked in it, besides those where messages open.  messages, opens, stabilized: as the
    conversation has them.  tail: from here on no later prompt will be the same.
    remembered: so many of its tokens are those that were generated.  opening: for who remembers the answer.
    """

    tokens: Tokens
    reader: AnswerReader
    cuts: Tokens = ()
    messages: Sequence[ChatMessage] = ()
    opens: bool = False
    stabilized: tuple[str, ...] = ()
    tail: int | None = None
    remembered: int = 0
    opening: AnswerOpening | None = None
    tools: bool = False  # it describes some
    moved: tuple[MovedText, ...] | None = None  # as the conversation has it


@define(eq=False)
class Text:
    """A tokenizer, a chat template if there is one, and how the checkpoint wants to be sampled.

    openings: of messages, as the template writes them.  calls, reasoning: the names of the forms that answers are read
    by. What is not given of them is known from `check` on.  grammars: for answers that keep to one.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    grammars: Grammars = field(init=False)
    sampling: Sampling = field(factory=Sampling)
    openings: Openings = field(factory=Openings)
    calls: str | None = None
    reasoning: str | None = None
    parts: bool = False  # the template reads contents as lists of parts only
    one_system: bool = False  # it knows no system message but the first
    efforts: Mapping[str, str | None] = field(factory=dict)  # what it is told for each level of reasoning effort

    def __attrs_post_init__(self) -> None:
        self.grammars = Grammars(self.tokenizer)

    @staticmethod
    def load(folder: Path, calls: str | None = None, reasoning: str | None = None) -> Text:
        """Raises CheckpointError."""
        files = TextFiles.read(folder)
        tokenizer, template = Tokenizer.of(files), None
        if files.template is not None:
            template = ChatTemplate(files.template, tuple(tokenizer.controls.values()), tokenizer.variables)
        return Text(tokenizer, template, default_sampling(files.generation), calls=calls, reasoning=reasoning)

    async def check(self) -> tuple[str, ...]:
        """Try the template. Returns warnings; raises CheckpointError if it does not work at all.

        Warns where a template puts control tokens together from parts, which then are served as plain text. From now
        on it is known how the template opens messages, and what it makes of tool calls and reasoning.
        """
        if self.template is None:
            return ("the checkpoint has no chat template: only completions are served",)
        try:
            tokens = await self.tokenizer.encode_rendered(await self.template.check())
        except TokenizerPanicked as error:
            raise CheckpointError(f"what the chat template writes cannot be tokenized: {error}") from error
        if not tokens:
            raise CheckpointError("the chat template does not work: the tokenizer has no token for what it wrote")
        self.openings = await find_openings(self.template, self.tokenizer)
        self.parts = await reads_only_parts(self.template)
        self.one_system = not await takes_systems(self.template, self.parts)
        self.efforts = await find_efforts(self.template, self.parts)
        self.calls = self.calls or await detect_calls(self.template)
        self.reasoning = self.reasoning or detect_reasoning(self.template)
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
        try:
            rendered = await self.template.render([*messages, messages[0]])
        except (TemplateRefused, TemplateFailed) as error:
            return (f"the chat template does not render a conversation of several turns: {error}",)
        whole = (await self.tokenizer.encode([text_of(rendered)], controls=True))[0]
        if whole != await self.tokenizer.encode_rendered(rendered):
            return ("the chat template puts control tokens together from parts, which are served as plain text",)
        return ()

    async def prompt(
        self,
        conversation: Conversation,
        most: int | None = None,
        gone: Gone | None = None,
        recall: Recall | None = None,
    ) -> ChatPrompt:
        """Raises TemplateRefused or TemplateFailed.  most, gone: as `Tokenizer.encode` has them.

        recall: what earlier answers were made of.
        """
        again = recaller(
            conversation, self.tokenizer, self.openings.markers, self.calls or NONE, self.reasoning or NONE
        )
        recalled = None if recall is None else await again.recalled(conversation, recall, most)
        rendered = await self.rendered(conversation if recalled is None else recalled.conversation)
        written: Spliced = rendered
        remembered = 0
        if recalled is not None and recalled.known:
            written, remembered = await anyio.to_thread.run_sync(again.spliced, rendered, recalled)
        tokens = await self.tokenizer.encode_rendered(written, most, gone)
        if not tokens:
            raise TemplateFailed("the tokenizer has no token for what the chat template wrote")
        cuts, tail = await anyio.to_thread.run_sync(cuts_of, conversation, written, tokens, self.tokenizer)
        answered = recalled is not None and conversation.generate and not conversation.continues
        lead = again.lead(tokens) if answered else None
        opening = None if recalled is None or lead is None else AnswerOpening(recalled.history, lead)
        reader, known = self.reader(conversation, rendered), conversation
        served = known.messages, known.opens, known.stabilized, tail
        return ChatPrompt(tokens, reader, cuts, *served, remembered, opening, bool(known.tools), known.moved)

    async def rendered(self, conversation: Conversation) -> Rendered:
        assert self.template is not None
        conversation = with_accepted_effort(conversation, self.efforts)
        variables = templated(conversation, self.template.wants_argument_text, self.parts, self.one_system)
        generate = conversation.generate and not conversation.continues
        rendered = await self._written(variables.pop("messages"), generate, variables)
        if not conversation.continues:
            return rendered
        last = conversation.messages[-1]
        return cut_behind(rendered, (last.content or last.reasoning).strip())

    async def _written(
        self, messages: Sequence[Mapping[str, Any]], generate: bool, variables: Mapping[str, Any]
    ) -> Rendered:
        """Render the messages, and once more with objects for arguments that are none where the template fails."""
        assert self.template is not None
        try:
            return await self.template.render(messages, generate=generate, **variables)
        except (TemplateFailed, TemplateRefused):
            again = with_object_arguments(messages)
            if again is None:
                raise
        return await self.template.render(again, generate=generate, **variables)

    def reader(self, conversation: Conversation, rendered: Rendered) -> AnswerReader:
        """How to read what follows this prompt."""
        calls, reasoning = self.calls or NONE, self.reasoning or NONE
        last = conversation.messages[-1]
        thinking = reasoning != NONE and not last.content if conversation.continues else opened(rendered, reasoning)
        return AnswerReader(
            calls, conversation.callable, conversation.parallel, reasoning, thinking, conversation.choice
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None, gone: Gone | None = None, **variables: Any
    ) -> Tokens:
        """A conversation's prompt, ready for the assistant's answer. The checkpoint must have a template.

        most, gone: as `Tokenizer.encode` has them.
        """
        return await self.tokenizer.encode_rendered(await self.render(messages, **variables), most, gone)

    async def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        assert self.template is not None
        return await self.template.render(messages, **variables)

    async def aclose(self) -> None:
        await self.grammars.aclose()
        if self.template is not None:
            await self.template.aclose()


async def reads_only_parts(template: ChatTemplate) -> bool:
    """Is a content that is text not shown, but one that is a list of parts?"""
    word, shown = "wordqz", []
    for content in (word, [{"type": "text", "text": word}]):
        try:
            shown.append(word in text_of(await template.render([{"role": "user", "content": content}])))
        except (TemplateRefused, TemplateFailed):
            shown.append(False)
    return shown == [False, True]


async def takes_systems(template: ChatTemplate, parts: bool) -> bool:
    """Are system messages shown wherever they stand, and several of them?"""
    word = "wordqz"
    system, late, user = ChatMessage("system", "First."), ChatMessage("system", word), ChatMessage("user", "Hello")
    for messages in ([system, late, user], [user, ChatMessage("assistant", "Hi."), late, user]):
        told = templated(Conversation(messages), template.wants_argument_text, parts)
        try:
            if word not in text_of(await template.render(told["messages"])):
                return False
        except (TemplateRefused, TemplateFailed):
            return False
    return True


def cut_behind(rendered: Rendered, text: str) -> Rendered:
    """Without what closes the message that ends with this text. Raises TemplateRefused where it is not shown."""
    for place in range(len(rendered) - 1, -1, -1):
        piece = rendered[place]
        # backwards, as `rfind` may take the product of both lengths, and `find` does not
        at = -1 if isinstance(piece, Control) else piece[::-1].find(text[::-1])
        if at >= 0 and text:
            assert isinstance(piece, str)
            return (*rendered[:place], piece[: len(piece) - at])
    raise TemplateRefused("it does not show the message that the answer is to continue as it was sent")


def default_sampling(settings: Mapping[str, Any]) -> Sampling:
    """generation_config.json, then OpenAI's: temperature 1, top-p 1. With `do_sample: false` in it: greedy.

    Raises CheckpointError for a value out of range.
    """
    ranges = {
        "temperature": (0, 2),
        "top_p": (1e-6, 1),
        "min_p": (0, 1),
        "top_k": (-1, 1 << 31),
        "repetition_penalty": (1e-3, 10),
    }
    chosen: dict[str, Any] = {"temperature": 1.0}
    for name, (low, high) in ranges.items():
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise CheckpointError(f"generation_config.json: {name} is {value!r}, not a number in [{low:g}, {high:g}]")
        chosen[name] = max(0, int(value)) if name == "top_k" else value
    sample = settings.get("do_sample")
    if not isinstance(sample, bool | None):
        raise CheckpointError(f"generation_config.json: do_sample is {sample!r}, not true or false")
    if sample is False:
        chosen["temperature"] = 0.0
    return Sampling(**chosen)
