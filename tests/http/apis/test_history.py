"""Tests of histories that hold what a model cannot use: the session goes on, in every API, and a header says why.

Each case is written once for each API. Its tokens are counted and it is answered.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from adapters.http.apis import anthropic_messages as messages_api
from adapters.http.apis import openai_chat as chat
from adapters.http.apis.openai_responses import ItemReferences
from adapters.http.apis.openai_responses import read_conversation as read_response
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history.response_store import ResponseFolder, ResponseStore
from adapters.http.request.resent_history import LOST_RESULT, Speaker, find_newest_user_turn
from adapters.http.request.tool_definitions import SkippedTools, map_tool_name
from adapters.http.wire.fields import Fields
from adapters.http.wire.repair_json import flatten_deep_values, replace_surrogate_halves
from adapters.text.conversation import Conversation, build_template_variables
from adapters.text.model_text import Text
from tests.http.conftest import Site, served
from tests.http.request.test_fuzzed_requests import JUNK, WORDS_OF_OTHERS, changed, iterate_paths
from tests.http.sse import chunks
from tests.text import small

HEADER = "x-rekindle-request-changed"
PNG = base64.b64encode(b"\x89PNG" + bytes(296)).decode()  # 300 bytes
URL = f"data:image/png;base64,{PNG}"
NOTE = "[image left out: this model reads text only; image/png, 300 bytes]"
PDF = base64.b64encode(bytes(31)).decode()
PDF_NOTE = "[file left out: this model reads text only; a.pdf, application/pdf, 31 bytes]"
SOUND_NOTE = "[audio left out: this model reads text only; wav, 30 bytes]"
SOUND = base64.b64encode(bytes(30)).decode()
PLAIN = base64.b64encode(b"Words of a file.").decode()
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNTERS = {CHAT: f"{CHAT}/input_tokens", MESSAGES: f"{MESSAGES}/count_tokens", RESPONSES: f"{RESPONSES}/input_tokens"}
LISTS = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
LENGTHS = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


HI, AND = user("Hi"), user("And?")


# A call and its result, as each API has them.
def chat_call(id_: Any = "c1", name: Any = "look", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_calls(*calls: Any) -> dict[str, Any]:
    return assistant(None, tool_calls=list(calls or (chat_call(),)))


def chat_result(content: Any, id_: Any = "c1", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content, **more}


def use(id_: Any = "c1", name: Any = "look", given: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": {} if given is None else given}


def result(content: Any, id_: Any = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **more}


def item_call(id_: Any = "c1", name: Any = "look", arguments: Any = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}


def item_result(output: Any, id_: Any = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": output, **more}


def in_results(chat: Any, message: Any, item: Any) -> dict[str, list[Any]]:
    """The same content in the result of a tool, in each API."""
    return {
        CHAT: [HI, chat_calls(), chat_result(chat)],
        MESSAGES: [HI, assistant([use()]), user([result(message)])],
        RESPONSES: [HI, item_call(), item_result(item)],
    }


def in_history(chat: Any, message: Any, item: Any) -> dict[str, list[Any]]:
    """The same content in an earlier message of the user's, in each API."""
    return {
        api: [user(content), assistant("I see."), AND]
        for api, content in ((CHAT, chat), (MESSAGES, message), (RESPONSES, item))
    }


def everywhere(*messages: Any) -> dict[str, list[Any]]:
    """Messages that all APIs write alike."""
    return {api: list(messages) for api in COUNTERS}


@frozen
class HistoryCase:
    """bodies: the conversation, by API.  says: what the prompt holds.  changed: what the header says."""

    bodies: dict[str, list[Any]]
    says: tuple[str, ...] = ()
    changed: str | None = None
    unsaid: tuple[str, ...] = ()


IMAGES = (
    [{"type": "text", "text": "a.png:"}, {"type": "image_url", "image_url": {"url": URL}}],
    [
        {"type": "text", "text": "a.png:"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    ],
    [{"type": "input_text", "text": "a.png:"}, {"type": "input_image", "image_url": URL}],
)
FILES = (
    [{"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}}],
    [
        {
            "type": "document",
            "title": "a.pdf",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
        }
    ],
    [{"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}],
)
SOUNDS = (
    [{"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}],
    [{"type": "audio", "source": {"type": "base64", "media_type": "wav", "data": SOUND}}],
    [{"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}],
)
UNKNOWN = ([{"type": "hologram", "depth": 3}],) * 3
UNKNOWN_TEXT = ([{"type": "poem", "text": "Roses are red."}],) * 3
LINKS = (
    [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
    [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}],
    [{"type": "input_image", "image_url": "https://example.com/a.png"}],
)
DOCUMENTS = (
    [{"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{PLAIN}"}}],
    [
        {
            "type": "document",
            "title": "a.txt",
            "source": {"type": "text", "media_type": "text/plain", "data": "Words of a file."},
        }
    ],
    [{"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{PLAIN}"}],
)
FOUND = {
    "type": "search_result",
    "title": "Found",
    "source": "notes/1",
    "content": [{"type": "text", "text": "Words of a page."}],
}
CHUNKED = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Words in parts."}]}}
LOST = f"{LOST_RESULT}\nIt rains."
DEEP: Any = {}
for _ in range(80):
    DEEP = {"a": DEEP}
MANGLED = map_tool_name("fs/read file")

CASES = {
    "an image in a result": HistoryCase(in_results(*IMAGES), (f"a.png:\n{NOTE}",), "image"),
    "an image in an earlier message": HistoryCase(in_history(*IMAGES), (f"a.png:\n{NOTE}",), "image"),
    "a file in a result": HistoryCase(in_results(*FILES), (PDF_NOTE,), "file"),
    "a file in an earlier message": HistoryCase(in_history(*FILES), (PDF_NOTE,), "file"),
    "audio in a result": HistoryCase(in_results(*SOUNDS), (SOUND_NOTE,), "audio"),
    "audio in an earlier message": HistoryCase(in_history(*SOUNDS), (SOUND_NOTE,), "audio"),
    "an unknown block in a result": HistoryCase(in_results(*UNKNOWN), ("[hologram block left out: ",), "block"),
    "an unknown block in an earlier message": HistoryCase(
        in_history(*UNKNOWN), ("[hologram block left out: ",), "block"
    ),
    "an unknown block with text": HistoryCase(in_results(*UNKNOWN_TEXT), ("Roses are red.",), "block"),
    "an image by its address": HistoryCase(in_results(*LINKS), ("text only; https://example.com/a.png]",), "image"),
    "an image without anything": HistoryCase(
        in_results([{"type": "image_url"}], [{"type": "image"}], [{"type": "input_image"}]),
        ("[image left out: this model reads text only]",),
        "image",
    ),
    "an image in the assistant's message": HistoryCase(
        {
            CHAT: [HI, assistant(IMAGES[0]), AND],
            MESSAGES: [HI, assistant(IMAGES[1]), AND],
            RESPONSES: [HI, assistant(IMAGES[2]), AND],
        },
        (NOTE,),
        "image",
    ),
    "an image that an agent sends behind a result": HistoryCase(
        {
            CHAT: [HI, chat_calls(), chat_result("Seen."), user(IMAGES[0])],
            MESSAGES: [HI, assistant([use()]), user([result("Seen."), *IMAGES[1]])],
            RESPONSES: [HI, item_call(), item_result("Seen."), user(IMAGES[2])],
        },
        ("Seen.", NOTE),
        "image",
    ),
    "an image that was refused, and then a question": HistoryCase(
        {CHAT: [user(IMAGES[0]), AND], MESSAGES: [user(IMAGES[1]), AND], RESPONSES: [user(IMAGES[2]), AND]},
        (NOTE, "And?"),
        "image",
    ),
    "an image that was refused, joined with the next question": HistoryCase(
        {MESSAGES: [user([{"type": "text", "text": "Look."}, *IMAGES[1], {"type": "text", "text": "And?"}])]},
        ("Look.", NOTE, "And?"),
        "image",
    ),
    "a document that is text, in a result": HistoryCase(in_results(*DOCUMENTS), ("a.txt\nWords of a file.",)),
    "a document that is text, now": HistoryCase(
        {CHAT: [user(DOCUMENTS[0])], MESSAGES: [user(DOCUMENTS[1])], RESPONSES: [user(DOCUMENTS[2])]},
        ("a.txt\nWords of a file.",),
    ),
    "a search result": HistoryCase(in_results([FOUND], [FOUND], [FOUND]), ("Found\nnotes/1\nWords of a page.",)),
    "a document in parts": HistoryCase(in_results([CHUNKED], [CHUNKED], [CHUNKED]), ("Words in parts.",)),
    "a search result and a document, now": HistoryCase(
        {MESSAGES: [user([FOUND, CHUNKED])]}, ("Found\nnotes/1\nWords of a page.\nWords in parts.",)
    ),
    "a result whose call is gone": HistoryCase(
        {
            CHAT: [HI, chat_result("It rains.", "gone"), AND],
            MESSAGES: [HI, user([result("It rains.", "gone"), {"type": "text", "text": "And?"}])],
            RESPONSES: [HI, item_result("It rains.", "gone"), AND],
        },
        (LOST, "And?"),
        "result-without-call",
    ),
    "a result that is all there is": HistoryCase(
        {
            CHAT: [chat_result("It rains.", "gone")],
            MESSAGES: [user([result("It rains.", "gone")])],
            RESPONSES: [item_result("It rains.", "gone")],
        },
        (LOST,),
        "result-without-call",
    ),
    "a result before its call": HistoryCase(
        {
            CHAT: [HI, chat_result("It rains."), chat_calls(), AND],
            MESSAGES: [user([result("It rains.")]), assistant([use()]), AND],
            RESPONSES: [HI, item_result("It rains."), item_call(), AND],
        },
        (LOST,),
        "result-without-call",
    ),
    "a result without an id behind a single call": HistoryCase(
        {
            CHAT: [HI, chat_calls(), {"role": "tool", "content": "It rains."}],
            MESSAGES: [HI, assistant([use()]), user([{"type": "tool_result", "content": "It rains."}])],
            RESPONSES: [HI, item_call(), {"type": "function_call_output", "output": "It rains."}],
        },
        ("<tool_response>\nIt rains.\n</tool_response>",),
        "result-without-id",
    ),
    "results without an id behind two calls, one of them answered": HistoryCase(
        {
            CHAT: [
                HI,
                chat_calls(chat_call(), chat_call("c2")),
                chat_result("Sun.", "c2"),
                {"role": "tool", "content": "It rains."},
            ],
            MESSAGES: [
                HI,
                assistant([use(), use("c2")]),
                user([result("Sun.", "c2"), {"type": "tool_result", "content": "It rains."}]),
            ],
            RESPONSES: [
                HI,
                item_call(),
                item_call("c2"),
                item_result("Sun.", "c2"),
                {"type": "function_call_output", "output": "It rains."},
            ],
        },
        ("<tool_response>\nIt rains.\n</tool_response>",),
        "result-without-id",
    ),
    "a result without an id behind two calls": HistoryCase(
        {
            CHAT: [HI, chat_calls(chat_call(), chat_call("c2")), {"role": "tool", "content": "It rains."}],
            MESSAGES: [
                HI,
                assistant([use(), use("c2")]),
                user([{"type": "tool_result", "content": "It rains."}]),
            ],
            RESPONSES: [
                HI,
                item_call(),
                item_call("c2"),
                {"type": "function_call_output", "output": "It rains."},
            ],
        },
        (LOST,),
        "result-without-call",
    ),
    "a result that names its tool and no id": HistoryCase(
        {
            CHAT: [
                HI,
                chat_calls(chat_call(), chat_call("c2", "add")),
                {"role": "tool", "name": "add", "content": "It rains."},
            ],
        },
        ("<tool_response>\nIt rains.\n</tool_response>",),
        "result-without-id",
    ),
    "functions as they were once called": HistoryCase(
        {
            CHAT: [
                HI,
                assistant(None, function_call={"name": "look", "arguments": '{"a": 1}'}),
                {"role": "function", "name": "look", "content": "It rains."},
            ],
        },
        ('{"name": "look", "arguments": {"a": 1}}', "<tool_response>\nIt rains.\n</tool_response>"),
        "result-without-id",
    ),
    "a result of nothing": HistoryCase(
        {
            CHAT: [HI, chat_calls(), {"role": "tool", "tool_call_id": "c1"}],
            RESPONSES: [HI, item_call(), {"type": "function_call_output", "call_id": "c1"}],
        },
        ("<tool_response>\n\n</tool_response>",),
        "content",
    ),
    "a result that is an object": HistoryCase(
        {
            CHAT: [HI, chat_calls(), chat_result({"type": "text", "text": "It rains."})],
            MESSAGES: [HI, assistant([use()]), user([result({"type": "text", "text": "It rains."})])],
            RESPONSES: [HI, item_call(), item_result({"type": "text", "text": "It rains."})],
        },
        ("<tool_response>\nIt rains.\n</tool_response>",),
    ),
    "a result of bare values": HistoryCase(
        in_results(["It rains.", 5], ["It rains.", 5], ["It rains.", 5]),
        ("It rains.\n5",),
        "content",
    ),
    "calls of the same id": HistoryCase(
        {
            CHAT: [HI, chat_calls(), chat_result("Sun."), chat_calls(), chat_result("It rains."), AND],
            MESSAGES: [
                HI,
                *(assistant([use()]), user([result("Sun.")])),
                *(assistant([use()]), user([result("It rains.")])),
                AND,
            ],
            RESPONSES: [HI, item_call(), item_result("Sun."), item_call(), item_result("It rains."), AND],
        },
        ("<tool_response>\nIt rains.\n</tool_response>",),
    ),
    "arguments that are no JSON": HistoryCase(
        {
            CHAT: [HI, chat_calls(chat_call(arguments='{"a": ')), chat_result("Sun.")],
            MESSAGES: [HI, assistant([use(given='{"a": ')]), user([result("Sun.")])],
            RESPONSES: [HI, item_call(arguments='{"a": '), item_result("Sun.")],
        },
        ('"arguments": {"a": }', "<tool_response>\nSun.\n</tool_response>"),
    ),
    "arguments that are no text": HistoryCase(
        {
            CHAT: [HI, chat_calls(chat_call(arguments=[1])), chat_result("Sun.")],
            MESSAGES: [HI, assistant([use(given=[1])]), user([result("Sun.")])],
            RESPONSES: [HI, item_call(arguments=[1]), item_result("Sun.")],
        },
        ('"arguments": {"input": [1]}}',),
    ),
    "a call without an id": HistoryCase(
        {
            CHAT: [HI, chat_calls(chat_call(None)), {"role": "tool", "content": "Sun."}],
            MESSAGES: [HI, assistant([use(None)]), user([result("Sun.", None)])],
            RESPONSES: [HI, item_call(None), item_result("Sun.", None)],
        },
        ('{"name": "look"', "<tool_response>\nSun.\n</tool_response>"),
        "result-without-id",
    ),
    "a call without a name": HistoryCase(
        {
            CHAT: [HI, chat_calls(chat_call(name=None)), chat_result("Sun.")],
            MESSAGES: [HI, assistant([use(name=None)]), user([result("Sun.")])],
            RESPONSES: [HI, item_call(name=None), item_result("Sun.")],
        },
        ("[tool call left out: it names no tool]", f"{LOST_RESULT}\nSun."),
        "call-left-out result-without-call",
    ),
    "a call of a name that no form allows": HistoryCase(
        {
            CHAT: [HI, chat_calls(chat_call(name="fs/read file")), chat_result("Sun.")],
            MESSAGES: [HI, assistant([use(name="fs/read file")]), user([result("Sun.")])],
            RESPONSES: [HI, item_call(name="fs/read file"), item_result("Sun.")],
        },
        (f'{{"name": "{MANGLED}"',),
        "tool-name",
    ),
    "input that is nested beyond measure": HistoryCase(
        {MESSAGES: [HI, assistant([use(given=DEEP)]), user([result("Sun.")])]},
        (f'"arguments": {json.dumps(DEEP)}}}',),
        "deep-nesting",
    ),
    "an unknown item that is nested beyond measure": HistoryCase(
        {RESPONSES: [HI, {"type": "web_search_call", "action": DEEP}, AND]},
        ("And?",),
        "deep-nesting",
    ),
    "half a surrogate pair": HistoryCase(everywhere(user("a \ud83d b")), ("a \ufffd b",), "half-character"),
    "the other half in a result": HistoryCase(
        in_results(*("\ude00c \ud83d\ude00 \\ud83d" for _ in COUNTERS)),
        ("\ufffdc 😀 \\ud83d",),
        "half-character",
    ),
    "an unknown role": HistoryCase(
        everywhere({"role": "critic", "content": "Bad."}, assistant("Oh."), AND), ("Bad.",), "role"
    ),
    "an earlier message of nothing": HistoryCase(
        everywhere(user(None), assistant("Oh."), {"role": "system"}, AND), ("Oh.", "And?"), "content"
    ),
    "empty messages": HistoryCase(everywhere(user(""), assistant([]), user([]), assistant(""), AND), ("And?",)),
    "an earlier message that is no text": HistoryCase(
        everywhere(user(5), assistant("Oh."), AND), ("user\n5",), "content"
    ),
    "a part without its text": HistoryCase(
        everywhere(user([{"type": "text"}, {"text": "So."}]), assistant("Oh."), AND), ("\nSo.",), "content"
    ),
    "thinking without text, or encrypted": HistoryCase(
        {
            CHAT: [HI, assistant("Oh.", reasoning_content=["Hm."]), AND],
            MESSAGES: [HI, assistant([{"type": "redacted_thinking"}, {"type": "text", "text": "Oh."}]), AND],
            RESPONSES: [HI, {"type": "reasoning", "encrypted_content": 5}, assistant("Oh."), AND],
        },
        ("assistant\nOh.",),
    ),
    "a thinking block without thinking": HistoryCase(
        {MESSAGES: [HI, assistant([{"type": "thinking", "signature": 5}, {"type": "text", "text": "Oh."}]), AND]},
        ("assistant\nOh.",),
        "content",
    ),
    "reasoning that is a text": HistoryCase(
        {RESPONSES: [HI, {"type": "reasoning", "content": "Hm."}, assistant("Oh."), AND]}, ("assistant\nOh.",)
    ),
    "an image that was generated": HistoryCase(
        {RESPONSES: [HI, {"type": "image_generation_call", "result": PNG}, AND]},
        ("assistant\n[image_generation_call block left out: this model reads text only]",),
        "block",
    ),
    "cache_control of any kind": HistoryCase(
        {
            CHAT: [user([{"type": "text", "text": "Hi", "cache_control": 5}]), assistant("Oh."), AND],
            MESSAGES: [
                user([{"type": "text", "text": "Hi", "cache_control": 5}]),
                assistant([{"type": "text", "text": "Oh.", "cache_control": {"type": "ephemeral"}}]),
                AND,
            ],
        },
        ("Hi", "Oh."),
    ),
    "names of any kind": HistoryCase(
        {CHAT: [{**HI, "name": 5}, assistant("Oh.", name="x" * 500), {**AND, "name": "eve"}]}, ("Hi", "Oh.")
    ),
    "a tool of another type": HistoryCase(
        {
            CHAT: [
                HI,
                chat_calls({"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}),
                chat_result("a"),
            ]
        },
        ('{"name": "sh", "arguments": {"input": "ls"}}',),
    ),
}
PAIRS = [(name, api) for name, case in CASES.items() for api in case.bodies]


def written(body: Any) -> bytes:
    """Return the body as a client writes it that escapes everything outside ASCII: halves of surrogate pairs too."""
    return json.dumps(body).encode()


@pytest.mark.parametrize(("name", "api"), PAIRS, ids=lambda value: value.replace("/", "."))
async def test_a_session_goes_on_whatever_its_history_holds(site: Site, name: str, api: str) -> None:
    case, headers = CASES[name], {"content-type": "application/json"}
    body = {"model": "small", LISTS[api]: case.bodies[api]}
    response = await site.client.post(api, content=written({**body, LENGTHS[api]: 1}), headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers.get(HEADER) == case.changed
    prompt = site.door.tickets[-1].job.prompt
    text = site.text.tokenizer.decode(prompt, special=True)
    for part in case.says:
        assert part in text
    for part in case.unsaid:
        assert part not in text
    counted = await site.client.post(COUNTERS[api], content=written(body), headers=headers)
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == len(prompt)


NEWEST = {
    "an image": (IMAGES, "[1].type", "reads text only"),
    "a file": (FILES, "[0].type", "reads text only"),
    "audio": (SOUNDS, "[0].type", ""),
    "an unknown block": (UNKNOWN, "[0].type", "must be"),
}


@pytest.mark.parametrize("behind", [(), (assistant("Yes?"),)], ids=["first", "later"])
@pytest.mark.parametrize("what", NEWEST)
@pytest.mark.parametrize("api", COUNTERS)
async def test_the_newest_turn_of_the_user_is_refused_by_name(site: Site, api: str, what: str, behind: Any) -> None:
    contents, at, says = NEWEST[what]
    messages = [*([HI, *behind] if behind else []), user(contents[[*COUNTERS].index(api)])]
    for path in (api, COUNTERS[api]):
        response = await site.post(path, {"model": "small", LISTS[api]: messages})
        message = response.json()["error"]["message"]
        assert response.status_code == 400
        assert message.startswith(f"$.{LISTS[api]}[{len(messages) - 1}].content{at}: ")
        assert says in message
    assert not site.door.tickets


NEWEST_TURNS: list[tuple[list[Speaker], bool, int | None]] = [
    ([], False, None),
    (["user"], False, 0),
    (["system", "user"], False, 1),
    (["user", "assistant", "user"], False, 2),
    (["user", "assistant", "user", "system"], False, 2),
    (["user", "user"], False, 1),
    (["user", "assistant"], False, None),
    (["user", "assistant"], True, 0),
    (["user", "assistant", "tool"], False, None),
    (["user", "assistant", "tool", "user"], False, None),
    (["user", "assistant", "tool", "system", "user", "user"], False, None),
    (["user", "assistant", "tool", "assistant", "user"], False, 4),
    (["tool"], True, None),
]


@pytest.mark.parametrize(("speakers", "prefilled", "index"), NEWEST_TURNS)
def test_which_turn_is_the_users_newest(speakers: list[Speaker], prefilled: bool, index: int | None) -> None:
    assert find_newest_user_turn(speakers, prefilled=prefilled) == index


WHOLE: dict[str, list[Any]] = {
    CHAT: [
        user(IMAGES[0]),
        {**assistant([{"type": "text", "text": "So."}], tool_calls=[chat_call()]), "reasoning_content": "Hm."},
        chat_result([{"type": "text", "text": "Sun."}], name="look"),
        {"role": "system", "content": "Be brief.", "name": "rules"},
        assistant("Yes.", function_call={"name": "look", "arguments": "{}"}),
        AND,
    ],
    MESSAGES: [
        user([*IMAGES[1], {**FOUND, "cache_control": {"type": "ephemeral"}}]),
        assistant([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "So."}, use()]),
        user([result([{"type": "text", "text": "Sun."}, CHUNKED], is_error=True), {"type": "text", "text": "Well?"}]),
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        assistant([{"type": "server_tool_use", "id": "1"}, {"type": "redacted_thinking", "data": "x"}]),
        AND,
    ],
    RESPONSES: [
        {**user(IMAGES[2]), "type": "message"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "aGk="},
        {**assistant([{"type": "output_text", "text": "So."}]), "type": "message"},
        {**item_call(), "namespace": "n"},
        item_result([{"type": "input_text", "text": "Sun."}]),
        {"type": "custom_tool_call", "call_id": "2", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "a"},
        {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "3", "output": "a"},
        {"type": "shell_call", "call_id": "4", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "4", "output": [{"stdout": "a", "outcome": {"exit_code": 0}}]},
        {"type": "apply_patch_call", "call_id": "5", "operation": {"type": "update_file", "path": "a", "diff": "+b"}},
        {"type": "apply_patch_call_output", "call_id": "5", "status": "completed", "output": "a"},
        {"type": "compaction", "encrypted_content": "aGk="},
        AND,
    ],
}


def read_chat(messages: list[Any], text: Text) -> Conversation:
    return chat.read_conversation(Fields({"messages": messages}), text)


def read_messages(messages: list[Any], _: Text) -> Conversation:
    return messages_api.read_messages(Fields({"messages": messages}), SkippedTools())


def read_items(messages: list[Any], _: Text) -> Conversation:
    find = ItemReferences(ResponseFolder(ResponseStore()), EdgeOptions(EdgeModel("small", 4096, 500)))
    return read_response(Fields({"input": messages}), [], find, SkippedTools())[0]


READERS = {CHAT: read_chat, MESSAGES: read_messages, RESPONSES: read_items}


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text.load(folder)


@pytest.mark.parametrize("api", READERS)
@given(data=st.data())
def test_nothing_inside_of_earlier_messages_is_refused(text: Text, api: str, data: st.DataObject) -> None:
    """An item of the Responses API needs a type that says what it is: that is the one field left out."""
    found = [
        path for path in iterate_paths(WHOLE[api][:-1]) if len(path) > 1 and (api != RESPONSES or path[1:] != ("type",))
    ]
    path = data.draw(st.sampled_from(found))
    junk = data.draw(JUNK | WORDS_OF_OTHERS)
    conversation = READERS[api](changed({"all": WHOLE[api]}, ("all", *path), junk)["all"], text)
    assert conversation.messages[-1].content == "And?"
    json.dumps(build_template_variables(conversation, argument_text=False))


# -- names of tools

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
SENT = "fs/read file"
SAID = f'<tool_call>\n{{"name": "{MANGLED}", "arguments": {{"path": "a"}}}}\n</tool_call>'
TOOLS: dict[str, list[Any]] = {
    CHAT: [{"type": "function", "function": {"name": SENT, "parameters": SCHEMA}}],
    MESSAGES: [{"name": SENT, "input_schema": SCHEMA}],
    RESPONSES: [{"type": "function", "name": SENT, "parameters": SCHEMA}],
}
CHOICES: dict[str, Any] = {
    CHAT: {"type": "function", "function": {"name": SENT}},
    MESSAGES: {"type": "tool", "name": SENT},
    RESPONSES: {"type": "function", "name": SENT},
}


def called(api: str, body: dict[str, Any]) -> str:
    """The name of the only call in a whole answer."""
    if api == CHAT:
        return str(body["choices"][0]["message"]["tool_calls"][0]["function"]["name"])
    if api == MESSAGES:
        return str(next(block["name"] for block in body["content"] if block["type"] == "tool_use"))
    return str(next(item["name"] for item in body["output"] if item["type"] == "function_call"))


@pytest.mark.parametrize("chosen", [False, True], ids=["auto", "chosen"])
@pytest.mark.parametrize("api", TOOLS)
async def test_names_of_tools_are_mapped_and_mapped_back(site: Site, api: str, chosen: bool) -> None:
    site.say(SAID)
    body = {"model": "small", LISTS[api]: [HI], "tools": TOOLS[api], LENGTHS[api]: 200}
    if chosen:
        body["tool_choice"] = CHOICES[api]
    response = await site.post(api, body)
    assert response.status_code == 200, response.text
    assert called(api, response.json()) == SENT
    assert response.headers[HEADER] == "tool-name"
    prompt = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)
    assert f'"name": "{MANGLED}"' in prompt
    assert SENT not in prompt
    streamed = await site.post(api, {**body, "stream": True})
    assert f'"name":"{SENT}"' in streamed.text.replace('"name": "', '"name":"')
    assert f'"name":"{MANGLED}"' not in streamed.text


async def test_a_streamed_call_in_chat_has_the_clients_name(site: Site) -> None:
    site.say(SAID)
    found = await chunks(site, CHAT, {"messages": [HI], "tools": TOOLS[CHAT]})
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    names = [
        call["function"]["name"]
        for delta in deltas
        for call in delta.get("tool_calls", [])
        if "name" in call["function"]
    ]
    assert names == [SENT]


async def test_allowed_tools_and_namespaces_have_the_clients_names(site: Site) -> None:
    allowed = {"mode": "required", "tools": TOOLS[CHAT]}
    body = {"messages": [HI], "tools": TOOLS[CHAT], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    site.say(SAID)
    answer = (await site.post(CHAT, body)).json()
    assert called(CHAT, answer) == SENT
    assert answer["rekindle"]["tool_choice"] == "kept"
    inner = {"type": "function", "name": "read/all", "parameters": SCHEMA}
    custom = {"type": "custom", "name": "sh/run"}
    tools = [{"type": "namespace", "name": "my fs", "tools": [inner]}, custom]
    name = map_tool_name(f"{map_tool_name('my fs')}__{map_tool_name('read/all')}")
    site.say(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    (item,) = (await site.post(RESPONSES, {"input": "Hi", "tools": tools})).json()["output"]
    assert (item["namespace"], item["name"]) == ("my fs", "read/all")
    site.say(f'<tool_call>\n{{"name": "{map_tool_name("sh/run")}", "arguments": {{"input": "ls"}}}}\n</tool_call>')
    (item,) = (await site.post(RESPONSES, {"input": "Hi", "tools": tools})).json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "sh/run", "ls")


async def test_the_next_turn_with_a_mapped_name_goes_on_from_the_last(site: Site) -> None:
    (tokens,) = site.text.tokenizer.encode_now([SAID], controls=True)
    spoken = site.say_tokens([*tokens])
    asked = {"messages": [HI], "tools": TOOLS[CHAT]}
    message = (await site.post(CHAT, asked)).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    more = [HI, message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    await site.post(CHAT, {**asked, "messages": more, "max_tokens": 1})
    first, second = (ticket.job.prompt for ticket in site.door.tickets)
    assert second[: len(first) + len(spoken)] == (*first, *spoken)


NAMES = ["a/b", "a_b", "a b", "x" * 129, "é", "a\nb", "/", "a/" + "b" * 1000]


def test_mapped_names_are_allowed_and_differ() -> None:
    mapped = [map_tool_name(name) for name in NAMES]
    assert len(set(mapped)) == len(NAMES)
    assert all(0 < len(name) <= 128 and map_tool_name(name) == name for name in mapped)


# -- templates


ITEMS = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{{- '<|im_start|>assistant\\n' }}
"""


@pytest.mark.parametrize("api", COUNTERS)
async def test_a_template_that_wants_objects_gets_one_for_arguments_that_are_none(tmp_path: Path, api: str) -> None:
    bodies = CASES["arguments that are no JSON"].bodies
    async with served(small.write(tmp_path, ITEMS)) as site:
        response = await site.post(api, {"model": "small", LISTS[api]: bodies[api], LENGTHS[api]: 1})
        assert response.status_code == 200, response.text
        assert '<look input={"a": >' in site.text.tokenizer.decode(site.door.tickets[-1].job.prompt)


# -- bodies

HALVES = {
    rb'"a"': None,
    rb'"\ud83d\ude00"': None,
    rb'"\\ud83d"': None,
    rb'"\ud83d"': rb'"\ufffd"',
    rb'"\ud83d\ud83d\ude00"': rb'"\ufffd\ud83d\ude00"',
    rb'"\ude00\ud83d"': rb'"\ufffd\ufffd"',
    rb'"\\\ud83d\n\\\\ud83d\uDC00"': rb'"\\\ufffd\n\\\\ud83d\ufffd"',
    rb'{"\uD83d": "\ud83"}': rb'{"\ufffd": "\ud83"}',
}


@pytest.mark.parametrize("raw", HALVES, ids=repr)
def test_halves_of_surrogate_pairs_are_replaced_and_nothing_else(raw: bytes) -> None:
    assert replace_surrogate_halves(raw) == HALVES[raw]


def nested(depth: int, value: str = "1") -> str:
    return '{"a":' * depth + value + "}" * depth


def test_only_a_history_is_made_flat_and_only_where_it_is_too_deep() -> None:
    shallow = {"messages": [{"content": [{"input": json.loads(nested(50))}]}]}
    assert flatten_deep_values(json.dumps(shallow).encode(), 64) is None
    tools = '{"tools": [{"a": [{"b": ' + nested(90) + "}]}]}"
    assert flatten_deep_values(tools.encode(), 64) is None
    deep = nested(90, '"}]\\" ä"')
    raw = '{"x": {"messages": 1}, "messages": [{"content": [{"input": ' + deep + ', "b": {}}]}], "tools": []}'
    flat = flatten_deep_values(raw.encode(), 64)
    assert flat is not None
    assert json.loads(flat) == {
        "x": {"messages": 1},
        "messages": [{"content": [{"input": deep, "b": {}}]}],
        "tools": [],
    }


@pytest.mark.parametrize("size", [1000, 200_000], ids=["small", "large"])
async def test_large_bodies_are_mended_as_small_ones_are(site: Site, size: int) -> None:
    messages = [HI, assistant([use(given=DEEP)]), user([result("Sun. \ud83d")])]
    body = {"max_tokens": 1, "messages": messages, "metadata": {"note": "x" * size}}
    headers = {"content-type": "application/json"}
    response = await site.client.post(MESSAGES, content=written(body), headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "half-character deep-nesting"
