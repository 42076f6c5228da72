"""Requests as coding agents resend them: an image in a tool's result, a compaction, and a tool turn behind it.

The shapes are those that Claude Code 2.1.197, Codex 0.171.0, OpenCode 1.18.33, pi 0.73.1 and qwen-code 0.15.10 sent in
a session with a picture. Every text, name and id is our own.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import field, frozen

Item: TypeAlias = dict[str, Any]

QUESTION, ANSWER, MORE = "Look at square.png.", "It is a square.", "And what is 2 plus 2?"
SHORTER = "Write down what was done so far."
SUMMARY = "A picture was looked at, and a sum was asked for."
SCHEMA: Item = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def png() -> bytes:
    """A square of 8 times 8 pixels, in one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\x20\x90\x40" * 8) * 8
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


IMAGE = base64.b64encode(png()).decode()
DATA_URL = f"data:image/png;base64,{IMAGE}"


@frozen
class ClientSession:
    """The requests of one client, in order. path: of the API. compaction: the number of the request that asks for the
    summary, from 0.
    """

    name: str
    path: str
    bodies: Sequence[Item]
    compaction: int
    headers: Mapping[str, str] = field(factory=dict)


# --- Claude Code: messages. A system message stands in the conversation, and results carry image blocks.


def claude_body(messages: Sequence[Item], **more: Any) -> Item:
    tools = [{"name": name, "description": f"{name} something.", "input_schema": SCHEMA} for name in ("Read", "Bash")]
    kept = {"type": "ephemeral"}
    return {
        "model": "claude-any-1",
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3.abc; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are a helper of ours.", "cache_control": kept},
            {"type": "text", "text": "Be brief, and say what you did.", "cache_control": kept},
        ],
        "tools": tools,
        "metadata": {"user_id": "someone"},
        "max_tokens": 64000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "messages": [*messages],
        **more,
    }


def text(said: str, **more: Any) -> Item:
    return {"type": "text", "text": said, **more}


def claude_use(number: int, name: str, **given: Any) -> Item:
    use = {"type": "tool_use", "id": f"toolu_{number:024}", "name": name, "input": given}
    return {"role": "assistant", "content": [text("I do it."), use]}


def claude_result(number: int, content: Any, **more: Any) -> Item:
    result = {"tool_use_id": f"toolu_{number:024}", "type": "tool_result", "content": content, **more}
    return {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]}


def claude() -> ClientSession:
    picture = [{"type": "image", "source": {"type": "base64", "data": IMAGE, "media_type": "image/png"}}]
    begun: list[Item] = [
        {"role": "user", "content": [text("<system-reminder>\nIt is a test.\n</system-reminder>"), text(QUESTION)]},
        {"role": "system", "content": "Use the tools that you have."},
        claude_use(1, "Read", path="square.png"),
        claude_result(1, picture),
    ]
    answered = {"role": "assistant", "content": [text(ANSWER, cache_control={"type": "ephemeral"})]}
    later: list[Item] = [
        {"role": "user", "content": [text("<system-reminder>\nGoes on.\n</system-reminder>"), text(SUMMARY)]},
        {"role": "assistant", "content": [text("I know.")]},
        {"role": "user", "content": [text("<command-name>/compact</command-name>"), text("Made shorter."), text(MORE)]},
        {"role": "system", "content": "Use the tools that you have."},
        claude_use(2, "Bash", path="sum.sh"),
        claude_result(2, "4", is_error=False),
    ]
    turn = {"role": "user", "content": [text(MORE)]}
    shorter = {"role": "user", "content": [text(MORE), text(SHORTER)]}
    # A failed stream is asked for again without one.
    again = claude_body(later)
    del again["stream"]
    bodies = (
        claude_body(begun),
        claude_body([*begun, answered, turn]),
        claude_body([*begun, answered, shorter]),
        again,
    )
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "mid-conversation-system-2026-04-07",
        "x-app": "cli",
    }
    return ClientSession("Claude Code", "/v1/messages?beta=true", (*bodies, claude_body(later)), 2, headers)


# --- Codex: responses. What it says itself is a developer message, and a result is a list of parts.


def codex_body(items: Sequence[Item], *, tools: bool = True) -> Item:
    function = {"type": "function", "strict": False, "parameters": SCHEMA, "description": "Does something."}
    offered: list[Item] = [
        {**function, "name": "exec_command"},
        {**function, "name": "view_image"},
        {
            "type": "namespace",
            "name": "helpers_v1",
            "description": "More of them.",
            "tools": [{**function, "name": "send"}],
        },
        {"type": "web_search", "external_web_access": True},
    ]
    return {
        "model": "demo",
        "stream": True,
        "input": [*items],
        "tools": offered if tools else [],
        "tool_choice": "auto",
        "parallel_tool_calls": tools,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "our-thread",
        "client_metadata": {"session_id": "our-session", "thread_id": "our-thread", "turn_id": "our-turn"},
    }


def codex_says(role: str, *said: str, number: int = 0) -> Item:
    """A message of the user, or of the client itself."""
    parts = [{"type": "input_text", "text": one} for one in said]
    return {"type": "message", "id": f"msg_{number:036}", "role": role, "content": parts}


def codex_answer(said: str) -> Item:
    part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
    about = {"type": "message", "status": "completed", "id": "msg_0123456789abcdef01234567"}
    return {**about, "role": "assistant", "content": [part]}


def codex_call(number: int, name: str, arguments: str, output: Any) -> list[Item]:
    call = {"type": "function_call", "status": "completed", "id": f"fc_{number:028}", "name": name}
    return [
        {**call, "arguments": arguments, "call_id": f"call_{number:024}"},
        {"type": "function_call_output", "id": f"fco_{number:036}", "call_id": f"call_{number:024}", "output": output},
    ]


def codex() -> ClientSession:
    picture = [{"type": "input_image", "image_url": DATA_URL, "detail": "high"}]
    rules = codex_says("developer", "You are a helper of ours.")
    permissions = codex_says("developer", "Anything may be run.", "Skills: none.", number=1)
    where = codex_says("user", "<environment_context>\n  <cwd>/home/us</cwd>\n</environment_context>", number=2)
    question = codex_says("user", QUESTION, number=3)
    begun = [rules, permissions, where, question, codex_answer("I do it.")]
    begun += codex_call(1, "view_image", '{"path": "square.png"}', picture)
    answered = [codex_answer(ANSWER), codex_says("user", MORE, number=4)]
    shorter: Item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SHORTER}]}
    # Of what was said, the user's messages stay; the summary stands behind them as one more.
    later = [
        rules,
        question,
        permissions,
        where,
        codex_says("user", SUMMARY, number=5),
        codex_says("user", MORE, number=6),
    ]
    later += [
        codex_answer("I do it."),
        *codex_call(2, "exec_command", '{"path": "sum.sh"}', "Exit code: 0\nOutput:\n4"),
    ]
    bodies = (codex_body(begun), codex_body([*begun, *answered]), codex_body([*begun, *answered, shorter], tools=False))
    return ClientSession("Codex", "/v1/responses", (*bodies, codex_body(later)), 2, {"originator": "codex_exec"})


# --- OpenCode, pi and qwen-code: chat. The picture of a result comes as a user's message behind the tool's.


def chat_call(number: int, name: str, arguments: str, content: Any) -> list[Item]:
    call = {"id": f"call_{number:024}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "I do it.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": content},
    ]


def chat_tools(*names: str) -> list[Item]:
    about = {"description": "Does something.", "parameters": SCHEMA}
    return [{"type": "function", "function": {"name": name, **about}} for name in names]


def chat_session(
    name: str, picture: Sequence[Item], parts: Callable[[str], Any], common: Item, *, result: Any = "It was read."
) -> ClientSession:
    """picture: parts of a user's message that brings it; none: it is in `result`. parts: how a user's text is written.

    result: the content of the tool's message.
    """
    system = {"role": "system", "content": "You are a helper of ours."}
    begun = [system, {"role": "user", "content": parts(QUESTION)}]
    begun += chat_call(1, "read", '{"path": "square.png"}', result)
    begun += [{"role": "user", "content": [*picture]}] if picture else []
    answered = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": parts(MORE)}]
    later = [system, {"role": "user", "content": parts(SUMMARY)}, {"role": "assistant", "content": "I know."}]
    later += [{"role": "user", "content": parts(MORE)}, *chat_call(2, "bash", '{"path": "sum.sh"}', "4\n")]
    shorter = [*begun, answered[0], {"role": "user", "content": parts(SHORTER)}]
    offered = {"tools": chat_tools("read", "bash")}
    bodies: list[Item] = [{"model": "demo", "messages": begun, **common, **offered}]
    bodies.append({"model": "demo", "messages": [*begun, *answered], **common, **offered})
    bodies.append({"model": "demo", "messages": shorter, **common})
    bodies.append({"model": "demo", "messages": later, **common, **offered})
    return ClientSession(name, "/v1/chat/completions", bodies, 2)


STREAMED: Item = {"stream": True, "stream_options": {"include_usage": True}}
URL_PART: Item = {"type": "image_url", "image_url": {"url": DATA_URL}}


def opencode() -> ClientSession:
    common = {**STREAMED, "max_tokens": 4096, "tool_choice": "auto"}
    picture = [text("Attached image(s) of the tool:"), URL_PART]
    return chat_session("OpenCode", picture, lambda said: said, common)


def pi() -> ClientSession:
    common = {**STREAMED, "store": False, "max_completion_tokens": 8192}
    picture = [text("Image(s) of the tool's result:"), URL_PART]
    return chat_session("pi", picture, lambda said: [text(said)], common, result="Read image file [image/png]")


def qwen_code() -> ClientSession:
    common = {**STREAMED, "max_tokens": 8000}
    return chat_session("qwen-code", (), lambda said: [text(said)], common, result=[URL_PART])


SESSIONS = tuple(made() for made in (claude, codex, opencode, pi, qwen_code))
