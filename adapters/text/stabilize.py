"""What agents write anew into the head of their prompts: left out, or moved to where it costs little.

A prompt is read again from the first token that is another than before. So a counter in the system prompt costs the
whole conversation at every turn, and a date costs what every session begins with. What is not for the model is dropped;
what is for it goes, word for word, behind the last message, or behind the user's first one if it stays as it is for a
whole session. Should it change all the same (a session is resumed the next day), the new text goes behind what is the
last message then and stays there, as the old one stays where it was: a prompt only grows. A rule knows one shape in one
place: whole lines of the system prompt, a tool's description or a whole system message, and never what a user wrote.

Some agents put a long system message that is the same in every session behind the user's first question. So a new
session would read it again. It goes in front of the question, to the system messages that open the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal, TypeAlias

from attrs import evolve, frozen

from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, MovedText

MOST_TEXT = 1 << 20  # characters of a system prompt that rules look at: agents' have a twentieth of it, 5 ms
MOST_TRIES = 4096  # places where a rule is tried: more turns than a conversation has
INDENT = 8  # spaces that a line may begin with
MOST_MOVED = 1 << 14  # characters that stay where they were moved to, of a conversation: eight statuses of 2,000

# What stood where when the last of its answers was made that is remembered; None where none is.
Before: TypeAlias = "Callable[[Sequence[ChatMessage]], tuple[MovedText, ...] | None]"


@frozen
class Rule:
    """One shape of one agent.

    where: the first line of a system message, any of its lines, a tool's description, or the beginning of a system
    message behind the user's first one and before any answer.
    mark: text that the shape begins with; nothing is tried without it.
    shape: whole lines, or what its group `part` has; every repetition in it is bounded and has one way to match.
    goes: nowhere, behind the last message, or behind the user's first one, to stay. Of several, the last one holds.
    A whole message goes to the front, in front of the user's first one.
    """

    name: str
    where: Literal["first line", "lines", "tool", "message"]
    mark: str
    shape: re.Pattern[str]
    goes: Literal["nowhere", "last", "first", "front"]
    tries: int = MOST_TRIES


def lines(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<part>{pattern})(?=\n|\Z)")


UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
POWERED = "- You are powered by the model named "
RULES = (
    # x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;
    Rule(
        "claude-billing-header",
        "first line",
        "x-anthropic-billing-header: ",
        lines(r"x-anthropic-billing-header: [a-z_]{1,32}=[^;\n]{0,128};(?: [a-z_]{1,32}=[^;\n]{0,128};){0,15} ?"),
        "nowhere",
    ),
    # one more with every request, the earlier ones still there
    Rule(
        "claude-total-tokens",
        "lines",
        "<total_tokens>",
        lines(r"<total_tokens>[0-9]{1,15} tokens left</total_tokens>"),
        "last",
    ),
    # to the second
    Rule(
        "pi-time",
        "lines",
        "Current date and time: ",
        lines(
            r"Current date and time: [A-Z][a-z]{5,8}, [A-Z][a-z]{2,8} [0-9]{1,2}, [0-9]{4} at "
            "[0-9]{1,2}:[0-9]{2}:[0-9]{2}[ \u202f][AP]M [A-Z0-9+:-]{1,9}"
        ),
        "last",
    ),
    Rule(
        "pi-date",
        "lines",
        "Current date: ",
        lines(r"Current date: [0-9]{4}-[0-9]{2}-[0-9]{2}(?=\nCurrent working directory: )"),
        "first",
    ),
    # Claude Code (2025-12-30) and OpenCode (Sat Nov 22 2026)
    Rule(
        "env-date",
        "lines",
        "Today's date: ",
        lines(
            r"Today's date: (?:[0-9]{4}-[0-9]{2}-[0-9]{2}|[A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9]{4})(?=\n</env>)"
        ),
        "first",
    ),
    # as it was when the session began; an agent cuts it off at 2,000 characters
    Rule(
        "claude-git-status",
        "lines",
        "gitStatus: ",
        lines(
            r"gitStatus: This is the git status at the start of the conversation\. [^\n]{1,200}\n\n?"
            r"Current branch: [^\n]{0,250}\n"
            r"(?:(?!Status:\n)[^\n]{0,250}\n){0,8}Status:\n"
            r"(?:(?!Recent commits:\n)[^\n]{0,500}\n){0,400}Recent commits:"
            r"(?:\n[0-9a-f]{7,40} [^\n]{0,500}){0,20}"
        ),
        "first",
        tries=1,
    ),
    # a variant of a model that is not served here; a session that is resumed leaves it out
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
    # of a file that only the agent opens: /tmp/claude-settings-20fc829c-5ec4-43a6-93f9-62663f5517b1.json
    Rule(
        "claude-settings-id",
        "tool",
        "claude-settings-",
        re.compile(rf"claude-settings(?P<part>-{UUID})(?=\.json)"),
        "nowhere",
    ),
    # 6 KB behind the first question, with the same agents and skills in every session of a project
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


def stabilized(conversation: Conversation, before: Before = lambda _: None) -> Conversation:
    """The same for the model, and as alike as can be to what the same agent sends before and after it.

    The conversation says which rules applied.
    """
    leading = list(takewhile(lambda message: message.role == "system", conversation.messages))
    front, rest, applied = without_constant(conversation.messages[len(leading) :])
    places = {"nowhere": 0, "first": first_of_user(rest), "last": last_answered(rest)}
    tools, said = conversation.tools, {"nowhere": dict[str, str](), "first": {}, "last": {}}
    readable = bool(rest) and sum(len(message.content) for message in leading) <= MOST_TEXT
    for rule in LINE_RULES:
        if rule.where == "tool":
            changed = [without_part(rule, tool) for tool in tools]
            if any(map(lambda one, other: one is not other, changed, tools)):
                tools, applied = changed, [*applied, rule.name]
        elif readable and places[rule.goes] is not None:
            leading, text = without_lines(rule, leading)
            if text:
                applied.append(rule.name)
                said[rule.goes][rule.name] = text
    if not applied:
        return conversation
    leading = [*(message for message in leading if message.content), *front]
    unmoved = [*leading, *rest]
    first, last, stay, tail = places["first"], places["last"], tuple[MovedText, ...](), False
    if said["first"] and first is not None and last is not None:
        stay = staying(said["first"], first, last, rest, before(unmoved))
    for place in sorted({one.place for one in stay}):
        rest[place] = behind(rest[place], "\n".join(one.text for one in stay if one.place == place), cut=False)
    if said["last"] and last is not None:
        rest[last] = behind(rest[last], "\n".join(said["last"].values()), cut=True)
        tail = bool(rest[last].cuts)
    return evolve(
        conversation,
        messages=[*leading, *rest],
        tools=tools,
        stabilized=tuple(applied),
        tail=tail,
        moved=stay if size_of(stay) <= MOST_MOVED else None,
        unmoved=unmoved,
    )


def without_constant(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage], list[str]]:
    """Return the messages that go to the front, the others, and the rules by which they do.

    messages: those behind the opening system messages.
    """
    front, rest, applied = list[ChatMessage](), list[ChatMessage](), list[str]()
    for place, message in enumerate(messages):
        if message.role == "assistant":
            rest += messages[place:]
            break
        rule = next((rule for rule in MESSAGE_RULES if is_constant(rule, message)), None)
        if rule is None:
            rest.append(message)
        else:
            front.append(message)
            applied += [rule.name] if rule.name not in applied else []
    return front, rest, applied


def is_constant(rule: Rule, message: ChatMessage) -> bool:
    return message.role == "system" and rule.shape.match(message.content) is not None


def staying(
    said: Mapping[str, str], first: int, last: int, rest: Sequence[ChatMessage], before: tuple[MovedText, ...] | None
) -> tuple[MovedText, ...]:
    """Where texts go that stay for a session: what is new behind the last message, if the conversation went on without.

    said: by rules.  first, last: the user's first message of the rest, which are those behind the system's, and the
    last one that the answer is to.
    """
    anew = tuple(MovedText(first, rule, text) for rule, text in said.items())
    if before is None:
        return anew
    there = tuple(
        one for one in before if one.rule in said and 0 <= one.place < len(rest) and rest[one.place].role != "assistant"
    )
    latest = {one.rule: one.text for one in there}
    more = tuple(MovedText(last, rule, text) for rule, text in said.items() if latest.get(rule) != text)
    return (*there, *more) if size_of((*there, *more)) <= MOST_MOVED else anew


def size_of(texts: Sequence[MovedText]) -> int:
    return sum(len(one.text) for one in texts)


def first_of_user(messages: Sequence[ChatMessage]) -> int | None:
    return next((place for place, message in enumerate(messages) if message.role == "user"), None)


def last_answered(messages: Sequence[ChatMessage]) -> int | None:
    """Where the last message is that the answer is to, though an answer may be begun already."""
    return next((place for place in reversed(range(len(messages))) if messages[place].role != "assistant"), None)


def found(rule: Rule, text: str) -> Iterator[tuple[int, int]]:
    """What the rule is about, the last first."""
    at = len(text)
    for _ in range(rule.tries):
        at = text.rfind(rule.mark, 0, at)
        if at < 0:
            return
        match = rule.shape.match(text, at)
        if match is None:
            continue
        start, stop = match.span("part")
        if rule.where == "tool":
            yield start, stop
            continue
        ahead = text[max(0, at - INDENT - 1) : at].rstrip(" ")
        if (at <= INDENT and not ahead) or (rule.where == "lines" and ahead.endswith("\n")):
            yield start, stop


def without_part(rule: Rule, tool: FunctionTool) -> FunctionTool:
    text = tool.description or ""
    spans = sorted(found(rule, text))
    return evolve(tool, description=left_of(text, spans)) if spans else tool


def without_lines(rule: Rule, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], str]:
    """And the text that holds: that of the last place."""
    changed, said = list[ChatMessage](), ""
    for message in messages:
        text = message.content
        spans = sorted(found(rule, text))
        if spans:
            said = text[slice(*spans[-1])]
            message = shortened(message, [(before(text, start), stop) for start, stop in spans])  # noqa: PLW2901
        changed.append(message)
    return changed, said


def before(text: str, start: int) -> int:
    """Where a line's indentation begins, and the line breaks before it."""
    while start and text[start - 1] == " ":
        start -= 1
    while start and text[start - 1] == "\n":
        start -= 1
    return start


def shortened(message: ChatMessage, spans: Sequence[tuple[int, int]]) -> ChatMessage:
    left = left_of(message.content, spans)
    ahead = len(left) - len(left.lstrip("\n")) if spans[0][0] == 0 else 0
    cuts = (cut - ahead - sum(max(0, min(stop, cut) - start) for start, stop in spans) for cut in message.cuts)
    left = left[ahead:]
    return evolve(message, content=left, cuts=tuple(sorted({cut for cut in cuts if 0 < cut < len(left)})))


def left_of(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """spans: ascending, and apart."""
    starts, stops = (0, *(stop for _, stop in spans)), (*(start for start, _ in spans), len(text))
    return "".join(text[start:stop] for start, stop in zip(starts, stops, strict=True))


def behind(message: ChatMessage, said: str, *, cut: bool) -> ChatMessage:
    """cut: it will be gone with the next request, so only what is before it will be met again."""
    if not message.content:
        return evolve(message, content=said)
    cuts = (*message.cuts, len(message.content)) if cut else message.cuts
    return evolve(message, content=f"{message.content}\n\n{said}", cuts=cuts)
