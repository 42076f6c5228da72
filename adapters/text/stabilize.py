"""Removes or moves the texts that agents change near the head of their prompts, so that the prefix cache matches.

The problem: a prompt is computed again from the first token that differs. So a counter in the system prompt costs the
whole conversation at every turn, and a date costs the beginning that all sessions share.

The idea: a rule knows one such text, by its shape and its place. The place is a whole line of the system prompt, a
tool's description or a whole system message. It is never something that a user wrote. Then:

* A text that is not meant for the model is removed.
* A text that changes within a session is appended, word for word, to the last message.
* A text that stays the same for a session is appended to the user's first message. It may change all the same, when a
  session is resumed the next day. Then the new text is appended to the last message of that request and stays there.
  The old text stays as well.
* Some agents put a long system message, the same in every session, after the user's first question. It moves to the
  system messages that open the conversation, so that a new session does not compute it again.

The invariant: the prompt of a conversation only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from attrs import evolve

from adapters.text.agent_rules import LINE_RULES, MESSAGE_RULES, Rule
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, MovedText

MAX_SYSTEM_CHARS = 1 << 20  # of a system prompt that rules look at; agents have a twentieth of it, which takes 5 ms
MAX_INDENT = 8  # spaces with which a line may begin
MAX_MOVED_CHARS = 1 << 14  # of the moved texts that stay in a conversation: eight git statuses of 2,000

# Returns the texts that were moved when the latest remembered answer to these messages was made. None: there is none.
MovedTextLookup: TypeAlias = "Callable[[Sequence[ChatMessage]], tuple[MovedText, ...] | None]"


def stabilize(conversation: Conversation, before: MovedTextLookup = lambda _: None) -> Conversation:
    """Return a conversation with the same meaning that shares as much as possible with the agent's other requests.

    `applied_rules` of the result names the rules that changed it.
    """
    leading = list(takewhile(lambda message: message.role == "system", conversation.messages))
    front, rest, applied = split_constant_messages(conversation.messages[len(leading) :])
    targets = {"nowhere": 0, "first": find_first_user(rest), "last": find_last_request(rest)}
    tools = conversation.tools
    said = {"nowhere": dict[str, str](), "first": {}, "last": {}}
    readable = bool(rest) and sum(len(message.content) for message in leading) <= MAX_SYSTEM_CHARS
    for rule in LINE_RULES:
        if rule.where == "tool":
            changed = [remove_from_tool(rule, tool) for tool in tools]
            if any(map(lambda tool, other: tool is not other, changed, tools)):
                tools = changed
                applied = [*applied, rule.name]
        elif readable and targets[rule.target] is not None:
            leading, text = remove_from_messages(rule, leading)
            if text:
                applied.append(rule.name)
                said[rule.target][rule.name] = text
    if not applied:
        return conversation
    leading = [*(message for message in leading if message.content), *front]
    unmoved = [*leading, *rest]
    first = targets["first"]
    last = targets["last"]
    stay = tuple[MovedText, ...]()
    tail = False
    if said["first"] and first is not None and last is not None:
        stay = place_lasting_texts(said["first"], first, last, rest, before(unmoved))
    for index in sorted({moved.message_index for moved in stay}):
        rest[index] = append_text(
            rest[index], "\n".join(moved.text for moved in stay if moved.message_index == index), cut=False
        )
    if said["last"] and last is not None:
        rest[last] = append_text(rest[last], "\n".join(said["last"].values()), cut=True)
        tail = bool(rest[last].cuts)
    return evolve(
        conversation,
        messages=[*leading, *rest],
        tools=tools,
        applied_rules=tuple(applied),
        has_volatile_tail=tail,
        moved_texts=stay if count_characters(stay) <= MAX_MOVED_CHARS else None,
        messages_without_moved=unmoved,
    )


def split_constant_messages(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage], list[str]]:
    """Return the messages that go to the front, the others, and the rules by which they do.

    messages: those after the opening system messages.
    """
    front = list[ChatMessage]()
    rest = list[ChatMessage]()
    applied = list[str]()
    for index, message in enumerate(messages):
        if message.role == "assistant":
            rest += messages[index:]
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


def place_lasting_texts(
    said: Mapping[str, str], first: int, last: int, rest: Sequence[ChatMessage], before: tuple[MovedText, ...] | None
) -> tuple[MovedText, ...]:
    """Return where to put the texts that stay for a session.

    A text that is new, or that changed, goes to the last message if the conversation already went on without it.

    said: the texts by their rules.
    first, last: indexes in `rest` of the user's first message, and of the last message that is not the assistant's.
    rest: the messages after the opening system messages.
    before: the texts that an earlier request moved. None: nothing is remembered of one.
    """
    anew = tuple(MovedText(first, rule, text) for rule, text in said.items())
    if before is None:
        return anew
    there = tuple(
        moved
        for moved in before
        if moved.rule in said and 0 <= moved.message_index < len(rest) and rest[moved.message_index].role != "assistant"
    )
    latest = {moved.rule: moved.text for moved in there}
    more = tuple(MovedText(last, rule, text) for rule, text in said.items() if latest.get(rule) != text)
    return (*there, *more) if count_characters((*there, *more)) <= MAX_MOVED_CHARS else anew


def count_characters(texts: Sequence[MovedText]) -> int:
    return sum(len(moved.text) for moved in texts)


def find_first_user(messages: Sequence[ChatMessage]) -> int | None:
    return next((index for index, message in enumerate(messages) if message.role == "user"), None)


def find_last_request(messages: Sequence[ChatMessage]) -> int | None:
    """Return the index of the last message that is not the assistant's: the answer may have been begun already."""
    return next((index for index in reversed(range(len(messages))) if messages[index].role != "assistant"), None)


def iterate_matches(rule: Rule, text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans in `text` that the rule matches, the last one first."""
    at = len(text)
    for _ in range(rule.max_tries):
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
        ahead = text[max(0, at - MAX_INDENT - 1) : at].rstrip(" ")
        if (at <= MAX_INDENT and not ahead) or (rule.where == "lines" and ahead.endswith("\n")):
            yield start, stop


def remove_from_tool(rule: Rule, tool: FunctionTool) -> FunctionTool:
    text = tool.description or ""
    spans = sorted(iterate_matches(rule, text))
    return evolve(tool, description=cut_spans(text, spans)) if spans else tool


def remove_from_messages(rule: Rule, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], str]:
    """Return the messages without what the rule matches, and the text that counts: the last one that matched."""
    changed = list[ChatMessage]()
    said = ""
    for message in messages:
        text = message.content
        spans = sorted(iterate_matches(rule, text))
        if spans:
            said = text[slice(*spans[-1])]
            message = remove_spans(message, [(find_removal_start(text, start), stop) for start, stop in spans])  # noqa: PLW2901
        changed.append(message)
    return changed, said


def find_removal_start(text: str, start: int) -> int:
    """Return where a removed line begins: its indentation and the line breaks before it go, too."""
    while start and text[start - 1] == " ":
        start -= 1
    while start and text[start - 1] == "\n":
        start -= 1
    return start


def remove_spans(message: ChatMessage, spans: Sequence[tuple[int, int]]) -> ChatMessage:
    left = cut_spans(message.content, spans)
    ahead = len(left) - len(left.lstrip("\n")) if spans[0][0] == 0 else 0
    cuts = (cut - ahead - sum(max(0, min(stop, cut) - start) for start, stop in spans) for cut in message.cuts)
    left = left[ahead:]
    return evolve(message, content=left, cuts=tuple(sorted({cut for cut in cuts if 0 < cut < len(left)})))


def cut_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return the text without these spans, which must be ascending and must not overlap."""
    starts = (0, *(stop for _, stop in spans))
    stops = (*(start for start, _ in spans), len(text))
    return "".join(text[start:stop] for start, stop in zip(starts, stops, strict=True))


def append_text(message: ChatMessage, said: str, *, cut: bool) -> ChatMessage:
    """Append a text to a message. cut: later requests will not have this text, so a cut is added before it."""
    if not message.content:
        return evolve(message, content=said)
    cuts = (*message.cuts, len(message.content)) if cut else message.cuts
    return evolve(message, content=f"{message.content}\n\n{said}", cuts=cuts)
