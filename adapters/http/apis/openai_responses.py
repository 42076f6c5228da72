"""POST /v1/responses and what counts its tokens: requests read strictly, into the same conversation as everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from attrs import define, evolve, field

from adapters.http.apis.api import Api, Counter
from adapters.http.apis.openai_compaction import (
    INSTRUCTION,
    CompactionShape,
    is_triggered,
    retained,
    summarizing,
    triggered,
)
from adapters.http.apis.openai_item_references import References
from adapters.http.apis.openai_response_answer import ResponseShape
from adapters.http.apis.openai_response_items import Turns, speaker_of, spelled
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ENCODER, ResponseFolder
from adapters.http.history.response_store import read as read_kept
from adapters.http.request.asked import Asked, Asker
from adapters.http.request.controls import Controls, Words, read_controls, read_model, read_salt
from adapters.http.request.custom_tools import read_custom
from adapters.http.request.render_prompt import asked, chat_prompt, check_template, template_headers
from adapters.http.request.resent_history import newest_user_turn
from adapters.http.request.tool_definitions import (
    MAX_TOOLS,
    Skipped,
    check_tools,
    named,
    plain_choice,
    read_allowed,
    read_function,
    read_name,
    tool_name,
)
from adapters.http.request.unsupported import MISSING, Missing
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.http.wire.fields import shown as shown_value
from adapters.http.wire.read_body import parsers
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, ToolChoice, build_thinking_variables
from adapters.text.model_text import Text
from adapters.text.reasoning_efforts import EFFORTS
from effects.ids import Tokens

PATH = "/v1/responses"
MAX_ITEMS = 1 << 16
MAX_METADATA = 16
MAX_SHOWN = 4 << 20  # bytes of a request that every response, and some events of its stream, say again: 10 ms for each
SUMMARIES = ("auto", "concise", "detailed", "none")
NAMES = ("user", "prompt_cache_key", "safety_identifier")  # OpenAI says them again, and never says null
SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
MAX_LOGPROBS = 20
INCLUDED = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources", SEALED),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    LOGPROBS,
)
WORDS = Words(
    {
        **MISSING,
        "background": Missing("is not supported by this server: an answer ends with its connection"),
        "conversation": Missing("is not supported by this server; use `previous_response_id`"),
        "prompt": Missing("is not supported: this server keeps no prompts; send `input`"),
    },
    max_tokens=("max_output_tokens",),
    choices="",
    formats=(("text", "format"),),
)


async def read(shelf: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Asked:
    top, included = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0, read_include(fields)
    logprobs = top if top or LOGPROBS in included else -1
    controls, skipped = read_controls(fields, WORDS, options, text.tokenizer, logprobs), Skipped()
    echo = {
        "shown": shown(fields, controls),
        "sealed": SEALED in included,
        "store": fields.flag("store", True),
    }
    conversation, echo["offered"] = await read_whole(shelf, fields, options, text, skipped)
    if echo["store"]:  # as much as a body may have, one at a time, and not on the event loop when the answer ends
        written = await anyio.to_thread.run_sync(ENCODER.encode, read_input(fields), limiter=parsers())
        echo["items"] = msgspec.Raw(written)
    turns = asker.turns(controls.salt)
    prompt = await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns, path=fields.at("input"))
    headers = {**skipped.headers, **template_headers(conversation, text)}
    found = asked(controls, prompt, [fields.at("input")], headers, turns, echo=echo)
    return summarizing(found, options) if is_triggered(read_input(fields)) else found


async def read_compaction(
    shelf: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, asker: Asker
) -> Asked:
    """Read a request for a summary: the same fields, less those that are about how an answer is given."""
    found = await read(shelf, triggered(fields, read_input(fields)), options, text, asker)
    earlier = read_previous(fields, shelf, options)
    users = await anyio.to_thread.run_sync(said_by_users, fields, earlier, options, limiter=parsers())
    return evolve(found, echo={**found.echo, "retained": users})


def said_by_users(fields: Fields, earlier: Sequence[bytes], options: EdgeOptions) -> list[Mapping[str, Any]]:
    """A quarter of the context at most, at four bytes a token."""
    kept = [item for raw in earlier for item in read_kept(raw, options).items]
    return retained([*kept, *read_input(fields)], options.max_ctx)


async def count(shelf: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Tokens:
    read_model(fields, options)
    conversation, _ = await read_whole(shelf, fields, options, text, Skipped())
    turns = asker.turns(read_salt(fields))
    return (
        await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns, path=fields.at("input"))
    ).tokens


async def read_whole(
    shelf: ResponseFolder, fields: Fields, options: EdgeOptions, text: Text, skipped: Skipped
) -> tuple[Conversation, Offered]:
    """What went before, and what is asked now."""
    check_template(text)
    earlier = read_previous(fields, shelf, options)
    find = References(shelf, options)
    # what was kept is parsed again, as much as a body may have: one such conversation at a time
    return await anyio.to_thread.run_sync(read_conversation, fields, earlier, find, skipped, limiter=parsers())


def read_previous(fields: Fields, shelf: ResponseFolder, options: EdgeOptions) -> list[bytes]:
    name = fields.text("previous_response_id")
    if name is None:
        return []
    where = fields.at("previous_response_id")
    try:
        found = shelf.conversation(name, options.max_body)
    except OverflowError:
        raise invalid(where, "the conversation is larger than this server takes; begin another one") from None
    if found is None:
        message = f"{shown_value(name)} or what it continues is not kept here (any more); send the whole conversation"
        raise invalid(where, message, "previous_response_not_found")
    return found


def read_input(fields: Fields) -> list[Any]:
    """The request's items, not looked into yet."""
    given = fields.data.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if given is None and fields.has("previous_response_id"):
        return []
    if not isinstance(given, list):
        raise fields.wrong("input", "a string or an array of items")
    return fields.items("input", MAX_ITEMS) or []


def read_conversation(
    fields: Fields, earlier: Sequence[bytes], find: References, skipped: Skipped
) -> tuple[Conversation, Offered]:
    """Raises ApiError naming the item and part that is wrong."""
    turns = Turns(find, skipped)
    skipped.changes.note(*fields.mended)
    if instructions := fields.text("instructions"):
        turns.instruct(instructions)
    where = fields.at("previous_response_id")
    for raw in earlier:
        try:
            kept = read_kept(raw, find.options)
        except ValueError:
            raise invalid(where, "what is kept of it is damaged; send the whole conversation") from None
        for value in (*kept.items, *kept.output):
            turns.add(Fields.of(value, where))
    listed = read_input(fields)
    newest = newest_user_turn([speaker_of(value) for value in listed])
    for place, value in enumerate(listed):
        turns.add(Fields.of(value, f"{fields.at('input')}[{place}]"), newest=place == newest)
    messages = turns.all()
    if not messages:
        raise invalid(fields.at("input"), "must have at least one message")
    if is_triggered(read_input(fields)):
        messages.append(ChatMessage("user", INSTRUCTION))
    if messages[-1].calls:
        raise invalid(fields.at("input"), "ends with a call: the output of each must follow")
    offered = read_tools(fields, skipped)
    skipped.changes.note_names(tool.client_name for tool in offered.tools)
    choice, parallel = read_choice(fields, offered.tools, skipped), fields.flag("parallel_tool_calls", True)
    return Conversation(messages, offered.tools, choice, parallel, read_reasoning(fields)), offered


@define
class Offered:
    """What can be called, as the model knows it. namespaces: the namespace and name of those that are in one.

    customs: names of those that are called with text.
    """

    tools: list[FunctionTool] = field(factory=list)
    namespaces: dict[str, tuple[str, str]] = field(factory=dict)
    customs: set[str] = field(factory=set)

    def add(self, tool: Fields, skipped: Skipped, namespace: str | None = None) -> None:
        kind = tool.text("type")
        if kind == "function":
            function = read_function(tool)
        elif kind == "custom":
            function = read_custom(tool)
        elif kind is None:
            raise tool.wrong("type", "a string, such as 'function'")
        else:
            skipped.note(kind, tool.text("name"))
            return
        if namespace is not None:
            name = tool_name(spelled(tool_name(namespace), function.name))
            self.namespaces[name] = (namespace, function.client_name or function.name)
            function = evolve(function, name=name)
        if kind == "custom":
            self.customs.add(function.name)
        self.tools.append(function)


def read_tools(fields: Fields, skipped: Skipped) -> Offered:
    """Tools that only other servers run are left out and told."""
    offered = Offered()
    for tool in each(fields, "tools"):
        if tool.text("type") != "namespace":
            offered.add(tool, skipped)
            continue
        read_name(tool)
        namespace = tool.data["name"]
        for inner in each(tool, "tools"):
            offered.add(inner, skipped, namespace)
    check_tools(offered.tools, fields.at("tools"))
    return offered


def each(fields: Fields, name: str) -> Iterator[Fields]:
    for place, value in enumerate(fields.items(name, MAX_TOOLS) or []):
        yield Fields.of(value, f"{fields.at(name)}[{place}]")


def read_choice(fields: Fields, tools: Sequence[FunctionTool], skipped: Skipped) -> ToolChoice:
    if (fallback := skipped.fallback(fields.data.get("tool_choice"), tools)) is not None:
        return fallback
    if (plain := plain_choice(fields, tools)) is not None:
        return plain
    asked, path = fields.data["tool_choice"], fields.at("tool_choice")
    match asked:
        case {"type": "function" | "custom"}:
            return named(read_name(Fields(asked, path)), tools, f"{path}.name")
        case {"type": "allowed_tools"}:
            return read_allowed(Fields(asked, path), tools)
    accepted = "'none', 'auto', 'required' or an object of type 'function' or 'allowed_tools'"
    raise fields.wrong("tool_choice", accepted)


def read_reasoning(fields: Fields) -> dict[str, Any]:
    given = fields.within("reasoning")
    if given is None:
        return {}
    for name in ("summary", "generate_summary"):
        given.choice(name, SUMMARIES)
    return build_thinking_variables(given.choice("effort", EFFORTS))


def read_include(fields: Fields) -> Sequence[str]:
    """What an answer may hold besides. Most of it belongs to tools that are not here."""
    listed = fields.items("include", len(INCLUDED)) or []
    for place, value in enumerate(listed):
        if value not in INCLUDED:
            accepted = ", ".join(map(repr, INCLUDED))
            raise invalid(f"{fields.at('include')}[{place}]", f"must be one of {accepted}, not {shown_value(value)}")
    return listed


def read_format(fields: Fields) -> dict[str, Any]:
    """How text is to look, as the response shows it; its form was read with the controls."""
    text = fields.within("text")
    if text is None:
        return {"format": {"type": "text"}}
    text.choice("verbosity", ("low", "medium", "high"))
    return {"format": {"type": "text"}, **text.data}


def read_metadata(fields: Fields) -> Mapping[str, str]:
    metadata = fields.within("metadata")
    if metadata is None:
        return {}
    if len(metadata.data) > MAX_METADATA:
        raise invalid(metadata.path, f"must have at most {MAX_METADATA} keys, not {len(metadata.data)}")
    for name in metadata.data:
        if len(name) > 64 or metadata.text(name, 512) is None:
            raise invalid(metadata.path, f"{shown_value(name)} must be a key of up to 64 characters, with a string")
    return metadata.data


def shown(fields: Fields, controls: Controls) -> dict[str, Any]:
    """What a response says of its request again."""
    reasoning = fields.within("reasoning")
    told = {} if reasoning is None else reasoning.data
    said = {
        "instructions": fields.text("instructions"),
        "max_output_tokens": controls.max_tokens,
        "metadata": read_metadata(fields),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "previous_response_id": fields.text("previous_response_id"),
        "reasoning": {"effort": told.get("effort"), "summary": told.get("summary")},
        "store": fields.flag("store", True),
        "temperature": controls.sampling.temperature,
        "text": read_format(fields),
        "tool_choice": fields.data.get("tool_choice") or "auto",
        "tools": fields.items("tools", MAX_TOOLS) or [],
        "top_logprobs": max(0, controls.sampling.logprobs),
        "top_p": controls.sampling.top_p,
        "truncation": fields.choice("truncation", ("auto", "disabled")) or "disabled",
        **{name: value for name in NAMES if (value := fields.text(name)) is not None},
        "service_tier": "default",
        "background": False,
    }
    if len(ENCODER.encode(said)) > MAX_SHOWN:
        message = f"has more than {MAX_SHOWN} bytes besides its input, which every response would say again"
        raise invalid("$", message)
    return said


def responses(shelf: ResponseFolder) -> Api:
    """As one caller may use it."""
    return Api(PATH, "resp_", partial(read, shelf), partial(ResponseShape, shelf))


def compactions(shelf: ResponseFolder) -> Api:
    return Api(f"{PATH}/compact", "resp_", partial(read_compaction, shelf), partial(CompactionShape, shelf))


def response_tokens(shelf: ResponseFolder) -> Counter:
    def told(tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    return Counter(f"{PATH}/input_tokens", partial(count, shelf), told)
