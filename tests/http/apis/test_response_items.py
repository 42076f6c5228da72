"""Tests of the items of the Responses API that other servers and agents leave in a conversation: they become text, or
are left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from adapters.http.apis.openai_items_as_text import SUMMARY, open_summary, seal_summary
from adapters.http.apis.openai_responses import ItemReferences, read_conversation
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history.response_store import ResponseFolder, ResponseStore
from adapters.http.request.tool_definitions import SkippedTools
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ChatMessage, ToolCall
from tests.http.conftest import Site

PATH = "/v1/responses"
HELLO = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SHELL = {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls -la", "pwd"]}, "status": "completed"}
LOCAL = {
    "type": "local_shell_call",
    "id": "lsh_1",
    "call_id": "2",
    "action": {"type": "exec", "command": ["cat", "a file"], "env": {}},
}
PATCH = {
    "type": "apply_patch_call",
    "call_id": "3",
    "operation": {"type": "update_file", "path": "a.py", "diff": "-x\n+y"},
}


def messages_of(*items: dict[str, Any]) -> tuple[list[ChatMessage], SkippedTools]:
    skipped = SkippedTools()
    find = ItemReferences(ResponseFolder(ResponseStore()), EdgeOptions(EdgeModel("small", 4096, 500)))
    found, _ = read_conversation(Fields({"input": [HELLO, *items]}), [], find, skipped)
    return list(found.messages)[1:], skipped


TOLD: list[tuple[dict[str, Any], ChatMessage]] = [
    (SHELL, ChatMessage("assistant", "[shell call]\nls -la\npwd\n")),
    (LOCAL, ChatMessage("assistant", "[shell call]\ncat 'a file'\n")),
    (PATCH, ChatMessage("assistant", "[apply_patch call: update_file a.py]\n-x\n+y\n")),
    ({"type": "apply_patch_call"}, ChatMessage("assistant", "[apply_patch_call]\n")),
    ({"type": "shell_call", "action": {"commands": [5]}}, ChatMessage("assistant", "[shell call]\n5\n")),
    (
        {
            "type": "shell_call_output",
            "call_id": "1",
            "output": [
                {"stdout": "a.py", "stderr": "warned", "outcome": {"type": "exit", "exit_code": 1}},
                {"stdout": "b", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
        ChatMessage("user", "[output of the shell call]\na.py\nwarned\n[exit code 1]\nb\n[timed out]"),
    ),
    (
        {"type": "local_shell_call_output", "id": "2", "output": '{"exit_code": 0}'},
        ChatMessage("user", '[output of the shell call]\n{"exit_code": 0}'),
    ),
    (
        {"type": "apply_patch_call_output", "call_id": "3", "status": "failed", "output": "no such line"},
        ChatMessage("user", "[output of the apply_patch call, failed]\nno such line"),
    ),
    (
        {"type": "apply_patch_call_output", "call_id": "3", "status": "completed"},
        ChatMessage("user", "[output of the apply_patch call, completed]"),
    ),
    (
        {"type": "compaction", "encrypted_content": seal_summary("They said hello.")},
        ChatMessage("user", f"{SUMMARY}They said hello."),
    ),
    (
        {"type": "compaction_summary", "encrypted_content": seal_summary("ä")},
        ChatMessage("user", f"{SUMMARY}ä"),
    ),
]


@pytest.mark.parametrize(("item", "message"), TOLD, ids=lambda value: value.get("type") if type(value) is dict else "")
def test_what_templates_have_no_form_for_is_told_as_text(item: dict[str, Any], message: ChatMessage) -> None:
    assert messages_of(item)[0] == [message]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "context_compaction"},
        {"type": "compaction_summary", "encrypted_content": "gAAAAA=="},
        {"type": "compaction", "encrypted_content": "bm90IG91cnM="},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "0"}},
        {"type": "agent_message", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "what comes next year", "content": 5},
    ],
    ids=lambda item: item["type"],
)
async def test_items_of_unknown_types_are_passed_over_with_a_header(site: Site, item: dict[str, Any]) -> None:
    answer = await site.post(PATH, {"input": [HELLO, item]})
    assert answer.status_code == 200, answer.text
    kind = "unknown" if " " in item["type"] else item["type"]
    assert answer.headers["x-rekindle-items-left-out"] == kind
    with_it = site.door.tickets[-1].job.prompt
    await site.post(PATH, {"input": [HELLO]})
    assert site.door.tickets[-1].job.prompt == with_it
    counted = await site.post(f"{PATH}/input_tokens", {"input": [HELLO, item]})
    assert counted.json()["input_tokens"] == len(with_it)


def test_the_header_names_only_so_many_kinds() -> None:
    _, skipped = messages_of(*({"type": f"kind{number}"} for number in range(1000)))
    assert len(skipped.headers["x-rekindle-items-left-out"].split()) == 32
    for number in range(500):
        skipped.note(f"kind{number}")
    assert len(skipped.headers["x-rekindle-tools-left-out"].split()) == 32


def test_what_a_text_call_gave_may_come_as_a_functions_output() -> None:
    """Codex sends it so."""
    output = {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "text"}]}
    found, _ = messages_of(LOCAL, output)
    assert found[1] == ChatMessage("user", "[output of the call]\ntext")


def test_calls_of_every_kind_stand_in_one_answer() -> None:
    said = {"role": "assistant", "content": "I look."}
    call = {"type": "function_call", "call_id": "9", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "9", "output": "3"}
    found, _ = messages_of(said, SHELL, LOCAL, call, result)
    assert found == [
        ChatMessage(
            "assistant",
            "I look.\n[shell call]\nls -la\npwd\n[shell call]\ncat 'a file'\n",
            "",
            (ToolCall("9", "add", "{}"),),
        ),
        ChatMessage("tool", "3", answered_call_id="9"),
    ]


def test_only_a_summary_of_this_server_is_opened() -> None:
    assert open_summary(seal_summary("ä\nb")) == "ä\nb"
    assert open_summary("") is None


CHOICES: list[tuple[list[dict[str, Any]], Any, str]] = [
    ([{"type": "web_search"}, ADD], {"type": "web_search"}, "web_search"),
    ([{"type": "web_search"}, ADD], {"type": "web_search_preview"}, "web_search_preview"),
    ([{"type": "shell"}], {"type": "shell"}, "shell"),
    ([{"type": "mcp", "server_label": "x"}], "required", "required"),
    ([{"type": "x_tool", "name": "look"}, ADD], {"type": "function", "name": "look"}, "look"),
    (
        [{"type": "web_search"}, ADD],
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        "allowed_tools",
    ),
    (
        [{"type": "mcp", "server_label": "x"}, ADD],
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x", "name": "look"}]},
        "allowed_tools",
    ),
]


@pytest.mark.parametrize(("tools", "choice", "named"), CHOICES)
async def test_a_choice_of_a_tool_that_was_left_out_is_left_to_the_model(
    site: Site, tools: list[dict[str, Any]], choice: Any, named: str
) -> None:
    site.say("Text.")
    answer = await site.post(PATH, {"input": "Hi", "tools": tools, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rekindle-tool-choice"] == f"auto; {named} is left out"
    assert answer.json()["rekindle"]["tool_choice"] is None


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}])
async def test_so_it_is_in_messages(site: Site, choice: dict[str, Any]) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    answer = await site.post(
        "/v1/messages", {"messages": [HELLO], "max_tokens": 2, "tools": tools, "tool_choice": choice}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rekindle-tool-choice"].startswith("auto; ")
