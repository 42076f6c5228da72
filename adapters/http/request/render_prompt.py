"""Make a prompt of a conversation. Everything that can go wrong becomes an error of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import anyio

from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history.answer_tokens import CallerTurns, PendingTurn
from adapters.http.request.controls import Controls
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.wire.errors import ApiError, client_gone, invalid, length_not_counted, unavailable
from adapters.http.wire.fields import Fields
from adapters.text.answer.answer_parser import NONE
from adapters.text.conversation import Conversation
from adapters.text.model_text import ChatPrompt, Text
from adapters.text.reasoning_efforts import describe_replaced_effort
from adapters.text.stabilize import stabilize
from adapters.text.template import Rendered, TemplateFailed, TemplateRefused, TemplateTimedOut
from adapters.text.token_pieces import min_byte_length
from adapters.text.tokenizer import ClientLeft, DisconnectCheck, TooManyTokens

T = TypeVar("T")
D = TypeVar("D")
UNPARSED_HEADERS = {"x-rekindle-tools": "unparsed; a call comes back as text, and ends no answer"}
STABILIZE = ("off", "known")
MAX_REASONING_CONTEXTS = 8  # contexts of reasoning that a template may be given to leave out
# Values that the arguments of calls may have, in all. They are text in a body, so they were not counted there. They are
# read as JSON here, at 3 us a number. Some 8 MiB of code have as many commas and brackets.
MAX_ARGUMENT_VALUES = 1 << 18


def make_unparsed_headers(conversation: Conversation, text: Text) -> Mapping[str, str]:
    """Return the header that warns of calls which will come back as text."""
    return UNPARSED_HEADERS if conversation.callable_tools and text.calls in (None, NONE) else {}


def make_template_headers(conversation: Conversation, text: Text) -> Mapping[str, str]:
    """Return the headers that say what this checkpoint's template cannot do of what the request asks for."""
    effort = describe_replaced_effort(conversation, text.efforts)
    return {**make_unparsed_headers(conversation, text), **({"x-rekindle-reasoning-effort": effort} if effort else {})}


def check_template(text: Text) -> None:
    """Raise ApiError if the checkpoint has no chat template."""
    if text.template is None:
        message = "This checkpoint has no chat template. Use /v1/completions, or serve a checkpoint that has one."
        raise ApiError(400, message, code="no_chat_template")


async def render_chat_prompt(
    conversation: Conversation,
    fields: Fields,
    text: Text,
    options: EdgeOptions,
    has_left: DisconnectCheck,
    *,
    turns: CallerTurns,
    path: str = "$.messages",
) -> ChatPrompt:
    """Return the tokens of a conversation. Raises ApiError 400 if it is too long, or if the template refuses it or
    fails.

    turns: what the caller's answers were made of. path: of the messages in the body.
    """
    most = options.max_counted_tokens
    check_value_count(conversation, path)
    conversation = await stabilize_conversation(conversation, fields, options, turns)
    check_text_length(conversation, text, most, options.model, path)
    try:
        return await translate_errors(text.build_prompt(conversation, most, has_left, turns), path)
    except TooManyTokens as error:
        raise length_not_counted(error.tokens, options.model.max_ctx, path) from None
    except ClientLeft:
        raise client_gone() from None


async def render_text(
    conversation: Conversation, fields: Fields, text: Text, options: EdgeOptions, turns: CallerTurns
) -> Rendered:
    """Return the text of a conversation, not tokenized, as `/apply-template` shows it. Raises ApiError."""
    check_value_count(conversation, "$.messages")
    conversation = await stabilize_conversation(conversation, fields, options, turns)
    check_text_length(conversation, text, options.max_counted_tokens, options.model, "$.messages")
    return await translate_errors(text.render_conversation(conversation), "$.messages")


async def stabilize_conversation(
    conversation: Conversation, fields: Fields, options: EdgeOptions, turns: CallerTurns
) -> Conversation:
    """Return the conversation without what agents change in every prompt, unless the request or the server says
    `off`.
    """
    if (fields.choice("stabilize", STABILIZE) or options.defaults.stabilize) == "off":
        return conversation
    return await anyio.to_thread.run_sync(stabilize, conversation, turns.find_moved_texts)


def build_request(
    controls: Controls,
    prompt: ChatPrompt,
    paths: Sequence[str],
    headers: Mapping[str, str],
    turns: CallerTurns,
    *,
    details: D,
) -> ParsedRequest[D]:
    """Return the request for one conversation. details: what the answers of its API need to know of it."""
    names = prompt.applied_rules
    headers = {**headers, "x-rekindle-stabilized": " ".join(names)} if names else headers
    return ParsedRequest(
        controls,
        [prompt.tokens],
        paths,
        details,
        prompt.reader,
        headers,
        prompt.cuts,
        prompt.messages,
        opens_conversation=prompt.is_opening,
        stabilize_rules=names,
        volatile_start=prompt.volatile_tail_start,
        describes_tools=prompt.has_tools,
        pending_turn=PendingTurn.from_prompt(turns, prompt),
    )


async def translate_errors(work: Awaitable[T], path: str) -> T:
    """Await the work of a template. Raises ApiError for what the template says against the conversation."""
    try:
        return await work
    except TemplateRefused as error:
        message = f"the model's chat template refuses them: {error}"[:500]
        raise invalid(path, message, "template_refused") from error
    except TemplateTimedOut as error:
        raise unavailable(f"The server is too busy: {error}"[:500], 1) from error
    except TemplateFailed as error:
        no_retry = {"x-should-retry": "false"}  # it would fail again
        message = f"{path}: the checkpoint's chat template failed with this conversation: {error}"[:500]
        raise ApiError(400, message, "template_error", path, "template_error", headers=no_retry) from error


def check_value_count(conversation: Conversation, path: str) -> None:
    """Raise ApiError if the arguments of calls hold too many JSON values."""
    arguments = [call.arguments for message in conversation.messages for call in message.calls]
    if sum(argument.count(mark) for argument in arguments for mark in "[{,") > MAX_ARGUMENT_VALUES:
        raise invalid(path, f"the arguments of its tool calls have more than {MAX_ARGUMENT_VALUES} values in all")


def check_text_length(conversation: Conversation, text: Text, most: int, model: EdgeModel, path: str) -> None:
    """Refuse, before rendering, a conversation that cannot fit. Templates may leave out an assistant's reasoning, but
    nothing else. Raises ApiError.
    """
    knowledge = text.tokenizer.plain_bounds
    said = 0
    thought = 0
    for message in conversation.messages:
        content = message.content
        answer = content.rpartition("</think>")[2] if message.role == "assistant" else content
        said += min_byte_length(answer)
        thought += min_byte_length(message.reasoning) + len(content) - len(answer)
    if said > knowledge.most_bytes(most):
        raise length_not_counted(knowledge.min_tokens(said), model.max_ctx, path)
    if thought > MAX_REASONING_CONTEXTS * knowledge.most_bytes(most):
        raise length_not_counted(0, model.max_ctx, path)
