"""POST /v1/responses and its token counter: read requests strictly into the same conversation as all APIs do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from attrs import evolve

from adapters.http.apis.api import Api, TokenCounter
from adapters.http.apis.openai_compaction import (
    INSTRUCTION,
    CompactionShape,
    add_trigger,
    expect_summary,
    is_triggered,
    retain_user_messages,
)
from adapters.http.apis.openai_item_references import ItemReferences
from adapters.http.apis.openai_offered_tools import OfferedTools, read_tools
from adapters.http.apis.openai_response_answer import ResponseDetails, ResponseShape
from adapters.http.apis.openai_response_items import ConversationBuilder, guess_speaker
from adapters.http.edge_options import EdgeOptions, RequestLimits
from adapters.http.history.response_store import ENCODER, ResponseFolder
from adapters.http.history.response_store import decode_response as read_kept
from adapters.http.request.controls import ApiFieldNames, Controls, read_controls, read_model, read_salt
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.request.render_prompt import build_request, check_template, make_template_headers, render_chat_prompt
from adapters.http.request.resent_history import find_newest_user_turn
from adapters.http.request.tool_definitions import (
    MAX_TOOLS,
    SkippedTools,
    choose_function,
    read_allowed,
    read_name,
    read_plain_choice,
)
from adapters.http.request.unsupported import UNSUPPORTED, UnsupportedField
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.http.wire.fields import quote_value as shown_value
from adapters.http.wire.read_body import parser_limiter
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, ToolChoice, build_thinking_variables
from adapters.text.model_text import Text
from adapters.text.reasoning_efforts import EFFORTS
from effects.ids import Tokens

PATH = "/v1/responses"
MAX_ITEMS = 1 << 16
MAX_METADATA = 16
MAX_SHOWN = 4 << 20  # bytes of a request that its response and some events repeat: 10 ms for each
SUMMARIES = ("auto", "concise", "detailed", "none")
ECHOED_NAMES = ("user", "prompt_cache_key", "safety_identifier")  # OpenAI repeats them, and never as null
SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
MAX_LOGPROBS = 20
INCLUDE_VALUES = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources", SEALED_REASONING),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    LOGPROBS,
)
FIELD_NAMES = ApiFieldNames(
    {
        **UNSUPPORTED,
        "background": UnsupportedField("is not supported by this server: an answer ends with its connection"),
        "conversation": UnsupportedField("is not supported by this server; use `previous_response_id`"),
        "prompt": UnsupportedField("is not supported: this server keeps no prompts; send `input`"),
    },
    max_tokens=("max_output_tokens",),
    choices="",
    formats=(("text", "format"),),
)


async def read_request(
    folder: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient
) -> ParsedRequest[ResponseDetails]:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    included = read_include(fields)
    logprobs = top if top or LOGPROBS in included else -1
    controls = read_controls(fields, FIELD_NAMES, options, text.tokenizer, logprobs)
    skipped = SkippedTools()
    is_stored = fields.flag("store", True)
    echoed_fields = make_echo(fields, controls)
    conversation, offered = await read_with_history(folder, fields, options, text, skipped)
    details = ResponseDetails(echoed_fields, offered, SEALED_REASONING in included, is_stored)
    if is_stored:
        # These may be as large as a body. They are encoded one at a time, and now rather than on the event loop when
        # the answer ends.
        encoded = await anyio.to_thread.run_sync(ENCODER.encode, read_input(fields), limiter=parser_limiter())
        details = evolve(details, items=msgspec.Raw(encoded))
    turns = caller.find_turns(controls.salt)
    prompt = await render_chat_prompt(
        conversation, fields, text, options, caller.has_left, turns=turns, path=fields.path_of("input")
    )
    headers = {**skipped.headers, **make_template_headers(conversation, text)}
    found = build_request(controls, prompt, [fields.path_of("input")], headers, turns, details=details)
    return expect_summary(found, options.model) if is_triggered(read_input(fields)) else found


async def read_compaction(
    folder: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient
) -> ParsedRequest[ResponseDetails]:
    """Read a request for a summary. It has the same fields, without those about how an answer is given."""
    found = await read_request(folder, add_trigger(fields, read_input(fields)), options, text, caller)
    earlier = read_previous(fields, folder, options.limits)
    users = await anyio.to_thread.run_sync(list_user_messages, fields, earlier, options, limiter=parser_limiter())
    return evolve(found, details=evolve(found.details, user_messages=users))


def list_user_messages(fields: Fields, earlier: Sequence[bytes], options: EdgeOptions) -> list[Mapping[str, Any]]:
    """Return the user's messages, up to a quarter of the context at four bytes a token."""
    kept = [item for raw in earlier for item in read_kept(raw, options).items]
    return retain_user_messages([*kept, *read_input(fields)], options.model.max_ctx)


async def count_tokens(
    folder: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient
) -> Tokens:
    read_model(fields, options.model)
    conversation, _ = await read_with_history(folder, fields, options, text, SkippedTools())
    turns = caller.find_turns(read_salt(fields))
    return (
        await render_chat_prompt(
            conversation, fields, text, options, caller.has_left, turns=turns, path=fields.path_of("input")
        )
    ).tokens


async def read_with_history(
    folder: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, skipped: SkippedTools
) -> tuple[Conversation, OfferedTools]:
    """Return the whole conversation, with earlier responses and the new items, and the tools."""
    check_template(text)
    earlier = read_previous(fields, folder, options.limits)
    find = ItemReferences(folder, options)
    # What was stored may be as large as a body, and is parsed again: one such conversation at a time.
    return await anyio.to_thread.run_sync(read_conversation, fields, earlier, find, skipped, limiter=parser_limiter())


def read_previous(fields: Fields, folder: ResponseFolder, limits: RequestLimits) -> list[bytes]:
    name = fields.text("previous_response_id")
    if name is None:
        return []
    where = fields.path_of("previous_response_id")
    try:
        found = folder.find_conversation(name, limits.max_body)
    except OverflowError:
        raise invalid(where, "the conversation is larger than this server accepts; begin a new one") from None
    if found is None:
        message = f"{shown_value(name)} or what it continues is no longer kept here; send the whole conversation"
        raise invalid(where, message, "previous_response_not_found")
    return found


def read_input(fields: Fields) -> list[Any]:
    """Return the request's items, not read yet."""
    given = fields.data.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if given is None and fields.has("previous_response_id"):
        return []
    if not isinstance(given, list):
        raise fields.wrong_value("input", "a string or an array of items")
    return fields.items("input", MAX_ITEMS) or []


def read_conversation(
    fields: Fields, earlier: Sequence[bytes], find: ItemReferences, skipped: SkippedTools
) -> tuple[Conversation, OfferedTools]:
    """Read the conversation and its tools. Raises ApiError naming the item and part that is wrong."""
    turns = ConversationBuilder(find, skipped)
    skipped.changes.note(*fields.repairs)
    if instructions := fields.text("instructions"):
        turns.add_instructions(instructions)
    where = fields.path_of("previous_response_id")
    for raw in earlier:
        try:
            kept = read_kept(raw, find.options)
        except ValueError:
            raise invalid(where, "the stored response is damaged; send the whole conversation") from None
        for value in (*kept.items, *kept.output):
            turns.add(Fields.from_value(value, where))
    listed = read_input(fields)
    newest = find_newest_user_turn([guess_speaker(value) for value in listed])
    for index, value in enumerate(listed):
        turns.add(Fields.from_value(value, f"{fields.path_of('input')}[{index}]"), newest=index == newest)
    messages = turns.finish()
    if not messages:
        raise invalid(fields.path_of("input"), "must have at least one message")
    if is_triggered(read_input(fields)):
        messages.append(ChatMessage("user", INSTRUCTION))
    if messages[-1].calls:
        raise invalid(fields.path_of("input"), "ends with a call: the output of each must follow")
    offered = read_tools(fields, skipped)
    skipped.changes.note_names(tool.client_name for tool in offered.tools)
    choice = read_choice(fields, offered.tools, skipped)
    parallel = fields.flag("parallel_tool_calls", True)
    return Conversation(messages, offered.tools, choice, parallel, read_reasoning(fields)), offered


def read_choice(fields: Fields, tools: Sequence[FunctionTool], skipped: SkippedTools) -> ToolChoice:
    if (fallback := skipped.find_fallback(fields.data.get("tool_choice"), tools)) is not None:
        return fallback
    if (plain := read_plain_choice(fields, tools)) is not None:
        return plain
    asked = fields.data["tool_choice"]
    path = fields.path_of("tool_choice")
    match asked:
        case {"type": "function" | "custom"}:
            return choose_function(read_name(Fields(asked, path)), tools, f"{path}.name")
        case {"type": "allowed_tools"}:
            return read_allowed(Fields(asked, path), tools)
    accepted = "'none', 'auto', 'required' or an object of type 'function' or 'allowed_tools'"
    raise fields.wrong_value("tool_choice", accepted)


def read_reasoning(fields: Fields) -> dict[str, Any]:
    given = fields.read_object("reasoning")
    if given is None:
        return {}
    for name in ("summary", "generate_summary"):
        given.choice(name, SUMMARIES)
    return build_thinking_variables(given.choice("effort", EFFORTS))


def read_include(fields: Fields) -> Sequence[str]:
    """Return what an answer is to hold besides its text. Most values belong to tools that this server does not have."""
    listed = fields.items("include", len(INCLUDE_VALUES)) or []
    for index, value in enumerate(listed):
        if value not in INCLUDE_VALUES:
            accepted = ", ".join(map(repr, INCLUDE_VALUES))
            raise invalid(
                f"{fields.path_of('include')}[{index}]", f"must be one of {accepted}, not {shown_value(value)}"
            )
    return listed


def read_format(fields: Fields) -> dict[str, Any]:
    """Return how text is to look, as the response shows it. Its format was read with the controls."""
    text = fields.read_object("text")
    if text is None:
        return {"format": {"type": "text"}}
    text.choice("verbosity", ("low", "medium", "high"))
    return {"format": {"type": "text"}, **text.data}


def read_metadata(fields: Fields) -> Mapping[str, str]:
    metadata = fields.read_object("metadata")
    if metadata is None:
        return {}
    if len(metadata.data) > MAX_METADATA:
        raise invalid(metadata.path, f"must have at most {MAX_METADATA} keys, not {len(metadata.data)}")
    for name in metadata.data:
        if len(name) > 64 or metadata.text(name, 512) is None:
            raise invalid(metadata.path, f"{shown_value(name)} must be a key of up to 64 characters, with a string")
    return metadata.data


def make_echo(fields: Fields, controls: Controls) -> dict[str, Any]:
    """Return the fields of the request that its response repeats. Raises ApiError if they are too large."""
    reasoning = fields.read_object("reasoning")
    requested = {} if reasoning is None else reasoning.data
    said = {
        "instructions": fields.text("instructions"),
        "max_output_tokens": controls.max_tokens,
        "metadata": read_metadata(fields),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "previous_response_id": fields.text("previous_response_id"),
        "reasoning": {"effort": requested.get("effort"), "summary": requested.get("summary")},
        "store": fields.flag("store", True),
        "temperature": controls.sampling.temperature,
        "text": read_format(fields),
        "tool_choice": fields.data.get("tool_choice") or "auto",
        "tools": fields.items("tools", MAX_TOOLS) or [],
        "top_logprobs": max(0, controls.sampling.logprobs),
        "top_p": controls.sampling.top_p,
        "truncation": fields.choice("truncation", ("auto", "disabled")) or "disabled",
        **{name: value for name in ECHOED_NAMES if (value := fields.text(name)) is not None},
        "service_tier": "default",
        "background": False,
    }
    if len(ENCODER.encode(said)) > MAX_SHOWN:
        message = f"has more than {MAX_SHOWN} bytes besides its input, which every response would repeat"
        raise invalid("$", message)
    return said


def make_responses_api(folder: ResponseFolder) -> Api[ResponseDetails]:
    """Return the API for one caller."""
    return Api(PATH, "resp_", partial(read_request, folder), partial(ResponseShape, folder))


def make_compactions_api(folder: ResponseFolder) -> Api[ResponseDetails]:
    return Api(f"{PATH}/compact", "resp_", partial(read_compaction, folder), partial(CompactionShape, folder))


def make_token_counter(folder: ResponseFolder) -> TokenCounter:
    def make_body(tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    return TokenCounter(f"{PATH}/input_tokens", partial(count_tokens, folder), make_body)
