"""The rules of `stabilize.py`: the texts that known agents change near the head of their prompts."""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen

MAX_TRIES = 4096  # positions where a rule is tried: more than the turns of a conversation


@frozen
class Rule:
    """One text of one agent, and what to do with it.

    where: the first line of a system message, any of its lines, a tool's description, or a whole system message that
    stands after the user's first message and before any answer.
    mark: the text with which the shape begins. The shape is tried only where the mark stands.
    shape: matches whole lines, or its group `part`. Every repetition in it is bounded and can match in one way only.
    target: `nowhere` removes the text; `last` appends it to the last message, `first` to the user's first message,
    where it stays; `front` moves a whole message before the user's first message. Of several texts the last one counts.
    max_tries: positions where the shape is tried.
    """

    name: str
    where: Literal["first line", "lines", "tool", "message"]
    mark: str
    shape: re.Pattern[str]
    target: Literal["nowhere", "last", "first", "front"]
    max_tries: int = MAX_TRIES


def compile_lines(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<part>{pattern})(?=\n|\Z)")


UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
POWERED = "- You are powered by the model named "
RULES = (
    # x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;
    Rule(
        "claude-billing-header",
        "first line",
        "x-anthropic-billing-header: ",
        compile_lines(
            r"x-anthropic-billing-header: [a-z_]{1,32}=[^;\n]{0,128};(?: [a-z_]{1,32}=[^;\n]{0,128};){0,15} ?"
        ),
        "nowhere",
    ),
    # Each request has one more, and the earlier ones are still there.
    Rule(
        "claude-total-tokens",
        "lines",
        "<total_tokens>",
        compile_lines(r"<total_tokens>[0-9]{1,15} tokens left</total_tokens>"),
        "last",
    ),
    # It changes every second.
    Rule(
        "pi-time",
        "lines",
        "Current date and time: ",
        compile_lines(
            r"Current date and time: [A-Z][a-z]{5,8}, [A-Z][a-z]{2,8} [0-9]{1,2}, [0-9]{4} at "
            "[0-9]{1,2}:[0-9]{2}:[0-9]{2}[ \u202f][AP]M [A-Z0-9+:-]{1,9}"
        ),
        "last",
    ),
    Rule(
        "pi-date",
        "lines",
        "Current date: ",
        compile_lines(r"Current date: [0-9]{4}-[0-9]{2}-[0-9]{2}(?=\nCurrent working directory: )"),
        "first",
    ),
    # Claude Code (2025-12-30) and OpenCode (Sat Nov 22 2026)
    Rule(
        "env-date",
        "lines",
        "Today's date: ",
        compile_lines(
            r"Today's date: (?:[0-9]{4}-[0-9]{2}-[0-9]{2}|[A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9]{4})(?=\n</env>)"
        ),
        "first",
    ),
    # The status when the session began. The agent cuts it off at 2,000 characters.
    Rule(
        "claude-git-status",
        "lines",
        "gitStatus: ",
        compile_lines(
            r"gitStatus: This is the git status at the start of the conversation\. [^\n]{1,200}\n\n?"
            r"Current branch: [^\n]{0,250}\n"
            r"(?:(?!Status:\n)[^\n]{0,250}\n){0,8}Status:\n"
            r"(?:(?!Recent commits:\n)[^\n]{0,500}\n){0,400}Recent commits:"
            r"(?:\n[0-9a-f]{7,40} [^\n]{0,500}){0,20}"
        ),
        "first",
        max_tries=1,
    ),
    # A variant of a model that is not served here. A resumed session leaves it out.
    Rule(
        "claude-model-name",
        "lines",
        POWERED,
        re.compile(rf"{POWERED}[^(\n]{{1,64}}(?P<part> \(1M context\))\. The exact model ID is "),
        "nowhere",
    ),
    Rule(
        "claude-model-id",
        "lines",
        POWERED,
        re.compile(rf"{POWERED}[^(\n]{{1,64}}\. The exact model ID is [a-z0-9.-]{{1,64}}(?P<part>\[1m\])\.(?=\n|\Z)"),
        "nowhere",
    ),
    Rule(
        "claude-model-author",
        "tool",
        "Co-Authored-By: Claude ",
        re.compile(r"Co-Authored-By: Claude [^(\n]{1,64}(?P<part> \(1M context\))(?= <noreply@anthropic\.com>)"),
        "nowhere",
    ),
    # The name of a file that only the agent opens: /tmp/claude-settings-20fc829c-5ec4-43a6-93f9-62663f5517b1.json
    Rule(
        "claude-settings-id",
        "tool",
        "claude-settings-",
        re.compile(rf"claude-settings(?P<part>-{UUID})(?=\.json)"),
        "nowhere",
    ),
    # 6 KB after the first question, with the same agents and skills in every session of a project.
    Rule(
        "claude-agent-types",
        "message",
        "Available agent types for the Agent tool:",
        re.compile(r"Available agent types for the Agent tool:\n- "),
        "front",
    ),
    Rule(
        "claude-skills",
        "message",
        "The following skills are available for use with the Skill tool:",
        re.compile(r"The following skills are available for use with the Skill tool:\n\n?- "),
        "front",
    ),
)
LINE_RULES = tuple(rule for rule in RULES if rule.where != "message")
MESSAGE_RULES = tuple(rule for rule in RULES if rule.where == "message")
