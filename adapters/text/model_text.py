"""Everything about text that a server needs from one checkpoint folder: begin reading the room of text here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.text_files import read_text_files
from adapters.text.answer.answer_parser import NONE, AnswerReader
from adapters.text.answer.detect_call_form import (
    detect_call_form,
    detect_reasoning,
    opens_reasoning,
    refuses_long_call_ids,
)
from adapters.text.boundaries import MessageOpenings, find_message_openings
from adapters.text.conversation import (
    ChatMessage,
    Conversation,
    MovedText,
    build_template_variables,
)
from adapters.text.grammars.grammar import Grammars
from adapters.text.reasoning_efforts import apply_accepted_effort, find_efforts
from adapters.text.recall_tokens import AnswerOpening, TurnLookup, build_recaller
from adapters.text.shared_cuts import find_cuts
from adapters.text.template import (
    ChatTemplate,
    ControlToken,
    Rendered,
    Spliced,
    TemplateFailed,
    TemplateRefused,
    join_rendered,
)
from adapters.text.tokenizer import DisconnectCheck, Tokenizer, TokenizerPanicked
from effects.ids import Tokens
from effects.job import Sampling


@frozen
class ChatPrompt:
    """The prompt of a conversation, and how its answer is to be read.

    cuts: token positions up to which the client says that prompts are shared. Message boundaries come in addition.
    messages, is_opening, applied_rules, moved_texts: the same as in the conversation.
    volatile_tail_start: later prompts will differ from this token position on.
    reused_token_count: this many tokens are those of earlier answers, instead of what the template wrote.
    answer_opening: what is needed to remember the tokens of the answer.
    has_tools: the prompt describes tools.
    """

    tokens: Tokens
    reader: AnswerReader
    cuts: Tokens = ()
    messages: Sequence[ChatMessage] = ()
    is_opening: bool = False
    applied_rules: tuple[str, ...] = ()
    volatile_tail_start: int | None = None
    reused_token_count: int = 0
    answer_opening: AnswerOpening | None = None
    has_tools: bool = False  # it describes some
    moved_texts: tuple[MovedText, ...] | None = None  # as the conversation has it


@define(eq=False)
class Text:
    """A tokenizer, a chat template if there is one, and the checkpoint's defaults for sampling.

    openings: how the template opens messages.
    calls, reasoning: the names of the forms in which answers have calls and reasoning.
    grammars: the grammars of this tokenizer.
    reads_content_parts: the template reads contents as lists of parts only.
    single_system: the template accepts no system message but the first.
    short_call_ids: the template refuses ids of calls that have more than nine characters.
    efforts: the value that the template gets for each level of reasoning effort.

    `check` finds all of these that were not given.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    grammars: Grammars = field(init=False)
    sampling: Sampling = field(factory=Sampling)
    openings: MessageOpenings = field(factory=MessageOpenings)
    calls: str | None = None
    reasoning: str | None = None
    reads_content_parts: bool = False  # the template reads contents as lists of parts only
    single_system: bool = False  # it knows no system message but the first
    short_call_ids: bool = False
    efforts: Mapping[str, str | None] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.grammars = Grammars(self.tokenizer)

    @staticmethod
    def load(folder: Path, calls: str | None = None, reasoning: str | None = None) -> Text:
        """Load the tokenizer and the template of a folder. Raises CheckpointError."""
        files = read_text_files(folder)
        tokenizer = Tokenizer.from_files(files)
        template = None
        if files.template is not None:
            template = ChatTemplate(files.template, tuple(tokenizer.controls.values()), tokenizer.variables)
        return Text(tokenizer, template, read_default_sampling(files.generation), calls=calls, reasoning=reasoning)

    async def check(self) -> tuple[str, ...]:
        """Try the template and find out what it does. Return warnings. Raises CheckpointError if it does not work.

        This finds how the template opens messages, and how it writes tool calls and reasoning. A warning is returned
        where the template puts control tokens together from parts, since such tokens are served as plain text.
        """
        if self.template is None:
            return ("the checkpoint has no chat template: only completions are served",)
        try:
            tokens = await self.tokenizer.encode_rendered(await self.template.check())
        except TokenizerPanicked as error:
            raise CheckpointError(f"what the chat template writes cannot be tokenized: {error}") from error
        if not tokens:
            raise CheckpointError("the chat template does not work: the tokenizer has no token for what it wrote")
        self.openings = await find_message_openings(self.template, self.tokenizer)
        self.reads_content_parts = await reads_only_parts(self.template)
        self.single_system = not await accepts_system_anywhere(self.template, self.reads_content_parts)
        self.efforts = await find_efforts(self.template, self.reads_content_parts)
        self.short_call_ids = await refuses_long_call_ids(self.template)
        self.calls = self.calls or await detect_call_form(self.template)
        self.reasoning = self.reasoning or detect_reasoning(self.template)
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
        try:
            rendered = await self.template.render([*messages, messages[0]])
        except (TemplateRefused, TemplateFailed) as error:
            return (f"the chat template does not render a conversation of several turns: {error}",)
        whole = (await self.tokenizer.encode([join_rendered(rendered)], controls=True))[0]
        if whole != await self.tokenizer.encode_rendered(rendered):
            return ("the chat template puts control tokens together from parts, which are served as plain text",)
        return ()

    async def build_prompt(
        self,
        conversation: Conversation,
        max_tokens: int | None = None,
        is_disconnected: DisconnectCheck | None = None,
        recall: TurnLookup | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation. Raises TemplateRefused or TemplateFailed.

        max_tokens, is_disconnected: see `Tokenizer.encode`.
        recall: finds the tokens of earlier answers.
        """
        again = build_recaller(
            conversation, self.tokenizer, self.openings.markers, self.calls or NONE, self.reasoning or NONE
        )
        recalled = None if recall is None else await again.recall(conversation, recall, max_tokens)
        rendered = await self.render_conversation(conversation if recalled is None else recalled.conversation)
        written: Spliced = rendered
        remembered = 0
        if recalled is not None and recalled.recognised:
            written, remembered = await anyio.to_thread.run_sync(again.splice, rendered, recalled)
        tokens = await self.tokenizer.encode_rendered(written, max_tokens, is_disconnected)
        if not tokens:
            raise TemplateFailed("the tokenizer has no token for what the chat template wrote")
        cuts, tail = await anyio.to_thread.run_sync(find_cuts, conversation, written, tokens, self.tokenizer)
        answered = recalled is not None and conversation.generate and not conversation.continues
        lead = again.find_lead(tokens) if answered else None
        opening = None if recalled is None or lead is None else AnswerOpening(recalled.history, lead)
        reader = self.build_reader(conversation, rendered)
        known = conversation
        served = known.messages, known.is_opening, known.applied_rules, tail
        return ChatPrompt(tokens, reader, cuts, *served, remembered, opening, bool(known.tools), known.moved_texts)

    async def render_conversation(self, conversation: Conversation) -> Rendered:
        """Render a conversation. Raises TemplateRefused or TemplateFailed."""
        assert self.template is not None
        conversation = apply_accepted_effort(conversation, self.efforts)
        variables = build_template_variables(
            conversation,
            self.template.wants_argument_text,
            self.reads_content_parts,
            self.single_system,
            self.short_call_ids,
        )
        generate = conversation.generate and not conversation.continues
        rendered = await self.template.render(**variables, generate=generate)
        if not conversation.continues:
            return rendered
        last = conversation.messages[-1]
        return cut_after(rendered, (last.content or last.reasoning).strip())

    def build_reader(self, conversation: Conversation, rendered: Rendered) -> AnswerReader:
        """Return how the answer to this prompt is to be read."""
        calls = self.calls or NONE
        reasoning = self.reasoning or NONE
        last = conversation.messages[-1]
        thinking = (
            reasoning != NONE and not last.content if conversation.continues else opens_reasoning(rendered, reasoning)
        )
        return AnswerReader(
            calls, conversation.callable_tools, conversation.parallel, reasoning, thinking, conversation.choice
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        is_disconnected: DisconnectCheck | None = None,
        **variables: Any,
    ) -> Tokens:
        """Return the tokens of messages, up to the opening of the answer. The checkpoint must have a template.

        max_tokens, is_disconnected: see `Tokenizer.encode`.
        """
        assert self.template is not None
        return await self.tokenizer.encode_rendered(
            await self.template.render(messages, **variables), max_tokens, is_disconnected
        )

    async def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        assert self.template is not None
        return await self.template.render(messages, **variables)

    async def aclose(self) -> None:
        await self.grammars.aclose()
        if self.template is not None:
            await self.template.aclose()


async def reads_only_parts(template: ChatTemplate) -> bool:
    """Does the template show contents that are lists of parts, but none that are text?"""
    word = "wordqz"
    shown = []
    for content in (word, [{"type": "text", "text": word}]):
        try:
            shown.append(word in join_rendered(await template.render([{"role": "user", "content": content}])))
        except (TemplateRefused, TemplateFailed):
            shown.append(False)
    return shown == [False, True]


async def accepts_system_anywhere(template: ChatTemplate, parts: bool) -> bool:
    """Does the template show several system messages, wherever they stand?"""
    word = "wordqz"
    system = ChatMessage("system", "First.")
    late = ChatMessage("system", word)
    user = ChatMessage("user", "Hello")
    for messages in ([system, late, user], [user, ChatMessage("assistant", "Hi."), late, user]):
        variables = build_template_variables(Conversation(messages), template.wants_argument_text, parts)
        try:
            if word not in join_rendered(await template.render(variables["messages"])):
                return False
        except (TemplateRefused, TemplateFailed):
            return False
    return True


def cut_after(rendered: Rendered, text: str) -> Rendered:
    """Remove all that follows the last occurrence of `text`. Raises TemplateRefused where it does not occur."""
    for index in range(len(rendered) - 1, -1, -1):
        piece = rendered[index]
        # Search the reversed text, since `rfind` may take time in proportion to the product of both lengths.
        at = -1 if isinstance(piece, ControlToken) else piece[::-1].find(text[::-1])
        if at >= 0 and text:
            assert isinstance(piece, str)
            return (*rendered[:index], piece[: len(piece) - at])
    raise TemplateRefused("it does not show the message that the answer is to continue as it was sent")


def read_default_sampling(settings: Mapping[str, Any]) -> Sampling:
    """Return the default sampling: the values of generation_config.json, or else OpenAI's (temperature 1, top-p 1).

    `do_sample: false` means greedy. Raises CheckpointError for a value out of range.
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
