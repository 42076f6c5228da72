"""From a conversation to a prompt, with every way that can go wrong told as an error of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import anyio

from adapters.http.edge_options import EdgeOptions
from adapters.http.history.answer_tokens import AskedTurn, OwnTurns
from adapters.http.request.asked import Asked
from adapters.http.request.controls import Controls
from adapters.http.wire.errors import ApiError, far_too_long, invalid, left, unavailable
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
UNPARSED = {"x-rekindle-tools": "unparsed; a call comes back as text, and ends no answer"}
STABILIZE = ("off", "known")
THOUGHTS = 8  # contexts of reasoning that a template may be given to leave out
# Values that the arguments of calls may have, in all. They are text in a body, so nobody has counted them, and are read
# as JSON here, at 3 us a number. Some 8 MiB of code have as many commas and brackets.
MOST_VALUES = 1 << 18


def unparsed(conversation: Conversation, text: Text) -> Mapping[str, str]:
    """Headers: that calls come back as text must not come as a surprise."""
    return UNPARSED if conversation.callable_tools and text.calls in (None, NONE) else {}


def template_headers(conversation: Conversation, text: Text) -> Mapping[str, str]:
    """Return headers that say what this checkpoint's template cannot do of what the request asks for."""
    effort = describe_replaced_effort(conversation, text.efforts)
    return {**unparsed(conversation, text), **({"x-rekindle-reasoning-effort": effort} if effort else {})}


def check_template(text: Text) -> None:
    """Raises ApiError where there is none."""
    if text.template is None:
        message = "This checkpoint has no chat template. Use /v1/completions, or serve a checkpoint that has one."
        raise ApiError(400, message, code="no_chat_template")


async def chat_prompt(
    conversation: Conversation,
    fields: Fields,
    text: Text,
    options: EdgeOptions,
    gone: DisconnectCheck,
    *,
    turns: OwnTurns,
    path: str = "$.messages",
) -> ChatPrompt:
    """Raises ApiError 400 where the conversation is too long, or the template refuses it or fails with it.

    turns: what the caller's answers were made of.  path: of the messages in the body.
    """
    most = options.counted
    refuse_values(conversation, path)
    conversation = await stable(conversation, fields, options, turns)
    refuse_unread(conversation, text, most, options, path)
    try:
        return await told(text.build_prompt(conversation, most, gone, turns), path)
    except TooManyTokens as error:
        raise far_too_long(error.tokens, options.max_ctx, path) from None
    except ClientLeft:
        raise left() from None


async def rendered(
    conversation: Conversation, fields: Fields, text: Text, options: EdgeOptions, turns: OwnTurns
) -> Rendered:
    """The same, not tokenized."""
    refuse_values(conversation, "$.messages")
    conversation = await stable(conversation, fields, options, turns)
    refuse_unread(conversation, text, options.counted, options, "$.messages")
    return await told(text.render_conversation(conversation), "$.messages")


async def stable(conversation: Conversation, fields: Fields, options: EdgeOptions, turns: OwnTurns) -> Conversation:
    """As the request wants it, or the server where it does not say."""
    if (fields.choice("stabilize", STABILIZE) or options.stabilize) == "off":
        return conversation
    return await anyio.to_thread.run_sync(stabilize, conversation, turns.moved)


def asked(
    controls: Controls,
    prompt: ChatPrompt,
    paths: Sequence[str],
    headers: Mapping[str, str],
    turns: OwnTurns,
    *,
    echo: Mapping[str, Any] | None = None,
) -> Asked:
    """A request that is one conversation."""
    names = prompt.applied_rules
    headers = {**headers, "x-rekindle-stabilized": " ".join(names)} if names else headers
    return Asked(
        controls,
        [prompt.tokens],
        paths,
        prompt.reader,
        headers,
        prompt.cuts,
        prompt.messages,
        echo or {},
        opens=prompt.is_opening,
        stabilized=names,
        tail=prompt.volatile_tail_start,
        tools=prompt.has_tools,
        turn=AskedTurn.of(turns, prompt),
    )


async def told(work: Awaitable[T], path: str) -> T:
    """What a template says against it, to the client."""
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


def refuse_values(conversation: Conversation, path: str) -> None:
    arguments = [call.arguments for message in conversation.messages for call in message.calls]
    if sum(one.count(mark) for one in arguments for mark in "[{,") > MOST_VALUES:
        raise invalid(path, f"the arguments of its tool calls have more than {MOST_VALUES} values in all")


def refuse_unread(conversation: Conversation, text: Text, most: int, options: EdgeOptions, path: str) -> None:
    """What cannot fit is not even rendered. Templates may leave out what an assistant thought; no more than that."""
    knowledge, said, thought = text.tokenizer.plain_bounds, 0, 0
    for message in conversation.messages:
        content = message.content
        answer = content.rpartition("</think>")[2] if message.role == "assistant" else content
        said += min_byte_length(answer)
        thought += min_byte_length(message.reasoning) + len(content) - len(answer)
    if said > knowledge.most_bytes(most):
        raise far_too_long(knowledge.min_tokens(said), options.max_ctx, path)
    if thought > THOUGHTS * knowledge.most_bytes(most):
        raise far_too_long(0, options.max_ctx, path)
