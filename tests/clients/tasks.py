"""Tasks for coding agents, and the model's answers: the agents' own commands, tools and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

PACKAGES = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0", "opencode-ai@1.18.33")
FIRST = "Write shapes.py with a function area(width, height), change it to take only a side, and try it."
SECOND = "What does area(5) give? Try it."
BEFORE = "def area(width, height):\n    return width * height\n"
AFTER = "def area(side):\n    return side * side\n"
TRY = "python3 -c 'from shapes import area; print(area({}))'"
TITLE = "Areas of squares"


@frozen
class Call:
    """Said before it, and the call."""

    text: str
    name: str
    arguments: Mapping[str, Any]


Answer = Call | str


@frozen
class CodingAgent:
    """answers: to its requests with tools, in their order.  runs: the command of each of its two processes."""

    name: str
    runs: Sequence[Sequence[str]]
    answers: Callable[[Path], Sequence[Answer]]
    environment: Mapping[str, str] = field(factory=dict)
    files: Mapping[str, str] = field(factory=dict)  # in its home, with the relay's address


Made = tuple[str, Mapping[str, Any]]  # a call: whose, and its arguments


def answers(write: Made, read: Made, edit: Made, run: Callable[[str], Made]) -> Sequence[Answer]:
    return (
        Call("I write it.", *write),
        Call("Let me look.", *read),
        Call("Only a side, then.", *edit),
        Call("And now I try it.", *run(TRY.format(3))),
        "It takes a side, and area(3) gives 9.",
        Call("I try it.", *run(TRY.format(5))),
        "area(5) gives 25.",
    )


def claude_answers(folder: Path) -> Sequence[Answer]:
    path = {"file_path": str(folder / "shapes.py")}
    return answers(
        ("Write", {**path, "content": BEFORE}),
        ("Read", path),
        ("Edit", {**path, "old_string": BEFORE, "new_string": AFTER}),
        lambda command: ("Bash", {"command": command, "description": "Tries it"}),
    )


def codex_answers(_: Path) -> Sequence[Answer]:
    def run(command: str) -> Made:
        return "exec_command", {"cmd": command}

    write = "cat > shapes.py <<'EOF'\n{}EOF"
    return answers(run(write.format(BEFORE)), run("cat shapes.py"), run(write.format(AFTER)), run)


def opencode_answers(folder: Path) -> Sequence[Answer]:
    path = {"filePath": str(folder / "shapes.py")}
    return answers(
        ("write", {**path, "content": BEFORE}),
        ("read", path),
        ("edit", {**path, "oldString": BEFORE, "newString": AFTER}),
        lambda command: ("bash", {"command": command, "description": "Tries it"}),
    )


CODEX = """\
model = "demo"
model_provider = "rekindle"
model_context_window = 32768

[model_providers.rekindle]
name = "rekindle"
base_url = "ADDRESS/v1"
wire_api = "responses"
"""
OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "model": "rekindle/demo",
    "small_model": "rekindle/demo",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "rekindle": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Rekindle",
            "options": {"baseURL": "ADDRESS/v1", "apiKey": "none"},
            "models": {"demo": {"name": "demo", "limit": {"context": 32768, "output": 1024}}},
        }
    },
}
ASK = ("claude", "--dangerously-skip-permissions", "-p")
EXEC = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
AGENTS = (
    CodingAgent(
        "Claude Code",
        ((*ASK, FIRST), (*ASK, "-c", SECOND)),
        claude_answers,
        {
            "ANTHROPIC_BASE_URL": "ADDRESS",
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # or it refuses to run tools as root
        },
    ),
    CodingAgent(
        "Codex",
        ((*EXEC, FIRST), (*EXEC, "resume", "--last", SECOND)),
        codex_answers,
        files={".codex/config.toml": CODEX},
    ),
    CodingAgent(
        "OpenCode",
        (("opencode", "run", FIRST), ("opencode", "run", "-c", SECOND)),
        opencode_answers,
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
)


def grammar(answer: Answer) -> str:
    """Lark's rules with room for this answer only."""
    if isinstance(answer, str):
        return f"start: {json.dumps(answer)}"
    call = json.dumps({"name": answer.name, "arguments": dict(answer.arguments)})
    return f'start: {json.dumps(answer.text)} "\\n" <tool_call> "\\n" {json.dumps(call)} "\\n" </tool_call>'
