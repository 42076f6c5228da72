"""Tasks over code, tables and random tokens: read code, look up, find, copy. Each call makes a new document.

A task gets a generator, the source of real text and the room in tokens, which it fills roughly: what turns out too long
is dropped by the caller. Answers follow from what stands before them, so that each can be marked exactly.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Sequence
from random import Random

from attrs import frozen

from training.chat_format import END_OF_TEXT, Document, Message, Passage, conversation, system, user
from training.chat_format import assistant as says
from training.words import ADJECTIVES, NAMES, NOUNS, Source, key, noun_phrase, value

Task = Callable[[Random, Source, int], Document]

CODE_WEIGHT, FILLER_WEIGHT, COPY_WEIGHT, ANSWER_WEIGHT = 1.0, 0.3, 2.0, 4.0
READ = "I have read it."
CODE_CHARS, TABLE_CHARS = 3.0, 1.9  # characters a token, on the short side

SEPARATORS = (
    *("\n", "\n\n", " ", ", ", "; ", " | ", "---", "\n---\n", "\n***\n", "\n###\n", " => ", " -> ", ": ", "\t", "//"),
    *(
        "\nCopy:\n",
        "\nAgain:\n",
        "\nRepeat:\n",
        " and again ",
        "\n>>> ",
        "\n# ",
        "<copy>",
        "\n```\n",
        " ~ ",
        "\nOutput: ",
    ),
)
HELD_OUT_SEPARATORS = ("\n=====\n", " :: ", "\nOnce more:\n", " ++ ", "\n%%\n", "<again>", " @ ", "\n\n\n")


def split_room(rng: Random, room: int, least: int) -> int:
    """A size in `[least, room]`, its logarithm uniform: as likely near 100 as near 1000."""
    return room if room <= least else round(math.exp(rng.uniform(math.log(least), math.log(room))))


def code(rng: Random, source: Source, room: int) -> Document:
    """Return real code, from the beginning of a line."""
    return [Passage(source.excerpt(rng, round(room * 3.6)), CODE_WEIGHT), Passage(END_OF_TEXT)]


# Tables


def _table(rng: Random, source: Source, chars: int) -> tuple[str, list[tuple[str, str]], Callable[[str, str], str]]:
    """A table of about `chars` characters, its rows, and how one row is written."""
    words = source.words(rng, 12)
    style = rng.randrange(9)
    row = ROWS[style]
    rows: dict[str, str] = {}
    length = 0
    while length < chars:
        name, text_value = key(rng, rng.choice(words)), value(rng, rng.choice(words))
        if name not in rows:
            rows[name] = text_value
            length += len(row(name, text_value)) + 1
        if rng.random() < 0.1:
            words = source.words(rng, 12)
    pairs = list(rows.items())
    if style == len(ROWS) - 1:
        return json.dumps(rows, indent=rng.choice((None, 1, 2))), pairs, row
    return "\n".join(row(*pair) for pair in pairs), pairs, row


ROWS: tuple[Callable[[str, str], str], ...] = (
    lambda k, v: f"{k}: {v}",
    lambda k, v: f"{k} = {v}",
    lambda k, v: f"{k} -> {v}",
    lambda k, v: f"{k},{v}",
    lambda k, v: f"| {k} | {v} |",
    lambda k, v: f"{k}\t{v}",
    lambda k, v: f"- {k}: {v}",
    lambda k, v: f"The value of {k} is {v}.",
    lambda k, v: f'"{k}": "{v}"',
)


def table_lookup(rng: Random, source: Source, room: int) -> Document:
    """Write a table, then some of its keys, each followed by its value as the answer."""
    table, pairs, row = _table(rng, source, round(room * TABLE_CHARS * 0.7))
    asked = rng.sample(pairs, min(len(pairs), rng.randint(4, max(4, room // 80))))
    lead, tail = rng.choice((("", ""), ("Q: ", "\nA:"), ("What is ", "?"), ("get ", " ="), ("\n[", "]")))
    document = [Passage(rng.choice(("", "Table\n", "Data:\n\n", "# values\n")) + table + "\n\n")]
    for name, text_value in asked:
        if lead or tail:
            document += [Passage(f"{lead}{name}{tail}"), Passage(f" {text_value}\n", ANSWER_WEIGHT)]
        else:
            head = row(name, "\0").split("\0")[0].rstrip()
            space = row(name, text_value)[len(head) : row(name, text_value).index(text_value, len(head))]
            document += [Passage(head), Passage(f"{space}{text_value}", ANSWER_WEIGHT), Passage("\n")]
    return [*document, Passage(END_OF_TEXT)]


def table_chat(rng: Random, source: Source, room: int) -> Document:
    """Write a table in a message, then questions about it."""
    count = rng.randint(1, max(2, min(12, room // 150), min(40, room // 800)))
    table, pairs, _ = _table(rng, source, round(max(room - 60 * count, 50) * TABLE_CHARS))
    lead = rng.choice(("Here is a table.\n", "", "Remember these values:\n", "Data:\n", "Use this table.\n\n"))
    asked = rng.sample(pairs, min(len(pairs), count))
    questions = [_table_question(rng, *pair) for pair in asked]
    return conversation(_context_first(rng, lead + table, questions), weight=ANSWER_WEIGHT)


def _table_question(rng: Random, name: str, text_value: str) -> tuple[str, str]:
    if rng.random() < 0.3:
        ask = rng.choice(("Answer with the value only: {}", "Only the value of {}, please.", "{} = ? Only the value."))
        return ask.format(name), text_value
    ask = rng.choice(("What is the value of {}?", "What is {}?", "Tell me the value of {}.", "Which value has {}?"))
    return ask.format(name), f"The value of {name} is {text_value}."


def _context_first(rng: Random, context: str, exchanges: Sequence[tuple[str, str]]) -> list[Message]:
    """The context in a system message, in a message of its own, or before or after the first question."""
    (first, answer), *rest = exchanges
    match rng.randrange(4):
        case 0:
            messages = [system(context), user(first)]
        case 1:
            messages = [user(context), says(READ), user(first)]
        case 2:
            messages = [user(f"{first}\n\n{context}")]
        case _:
            messages = [user(f"{context}\n\n{first}")]
    messages.append(says(answer))
    for question, reply in rest:
        messages += [user(question), says(reply)]
    return messages


# Needles

_WHATS = (
    *("secret number", "password", "access code", "secret", "magic word", "phone number", "locker", "code name"),
    *("favourite word", "ticket", "room number", "passphrase", "token", "key", "special number", "project"),
)
_NEEDLES = (
    *("The {what} of {who} is {told}.", "The {what} for {who} is {told}.", "Remember: the {what} of {who} is {told}."),
    *("{who} has the {what} {told}.", "Note that the {what} of {who} is {told}.", "The {who} {what} is {told}."),
)
Needle = tuple[str, str, str]


def _needles(rng: Random, source: Source, count: int) -> list[Needle]:
    words = source.words(rng, count)
    found: dict[tuple[str, str], str] = {}
    for word in words:
        what = rng.choice((*_WHATS, f"{rng.choice(ADJECTIVES)} number", f"{rng.choice(NOUNS)} code"))
        who = rng.choice((rng.choice(NAMES), rng.choice(NAMES), word, f"the {noun_phrase(rng)}", word.capitalize()))
        found[what, who] = value(rng, rng.choice(words))
    return [(what, who, text_value) for (what, who), text_value in found.items()]


def _hide(rng: Random, haystack: str, needles: Sequence[Needle], depths: Sequence[float] | None = None) -> str:
    """The haystack's lines with one more line for each needle, anywhere or at the given depths in 0..1."""
    lines = haystack.splitlines()
    line_indices = sorted(
        ((round(depth * len(lines)), index) for index, depth in enumerate(depths or [rng.random() for _ in needles])),
        reverse=True,
    )
    form = rng.choice(_NEEDLES)
    for line_index, index in line_indices:
        what, who, text_value = needles[index]
        if rng.random() < 0.3:
            form = rng.choice(_NEEDLES)
        line = form.format(what=what, who=who, told=text_value)
        lines.insert(line_index, rng.choice(("", "", "# ", "    # ", "// ")) + line)
    return "\n".join(lines)


def _ask(rng: Random, needle: Needle, terse: float = 0.25) -> tuple[str, str]:
    """A question and its answer, with odds of `terse` the value alone."""
    what, who, text_value = needle
    if rng.random() < terse:
        ask = rng.choice(("What is the {} of {}? Answer with the value only.", "Only the value: the {} of {}."))
        return ask.format(what, who), text_value
    asks = ("What is the {} of {}?", "Tell me the {} of {}.", "What is the {} for {}?", "Find the {} of {}.")
    return rng.choice(asks).format(what, who), f"The {what} of {who} is {text_value}."


def needle_terse(rng: Random, source: Source, room: int) -> Document:
    """Ask for values alone. Without the space before it, a value begins with other tokens, which has to be learnt."""
    return needle_chat(rng, source, room, terse=0.75)


def needle_chat(rng: Random, source: Source, room: int, depth: float | None = None, *, terse: float = 0.25) -> Document:
    """Hide facts in real code and ask for them in a conversation. With `depth`, one fact is hidden at that depth."""
    count = 1 if depth is not None else rng.randint(1, max(2, min(10, room // 100), min(32, room // 900)))
    asked = count if count < 3 else rng.randint(2, count)
    hay = source.code(rng, round(max(room - 45 * asked - 25 * count - 40, 20) * CODE_CHARS))
    needles = _needles(rng, source, count)
    hidden = _hide(rng, hay, needles, None if depth is None else [depth])
    exchanges = [_ask(rng, needle, terse) for needle in rng.sample(needles, min(asked, len(needles)))]
    if len(needles) >= 2 and rng.random() < 0.2:
        one, two = rng.sample(needles, 2)
        question = f"What is the {one[0]} of {one[1]}, and what is the {two[0]} of {two[1]}?"
        exchanges.append(
            (question, " ".join(f"The {what} of {who} is {text_value}." for what, who, text_value in (one, two)))
        )
    lead = rng.choice(("", "", "Read this text.\n\n", "Here is a document:\n", "Context:\n"))
    return conversation(_context_first(rng, lead + hidden, exchanges), weight=ANSWER_WEIGHT)


def needle_plain(rng: Random, source: Source, room: int) -> Document:
    """Hide facts in real code and ask for them in plain text. The code is learnt as well."""
    count = rng.randint(1, max(2, min(12, room // 80), min(32, room // 900)))
    hay = source.code(rng, round(max(room - 55 * count, 20) * CODE_CHARS))
    needles = _needles(rng, source, count)
    rows = [
        (f"The {what} of {who} is", f" {text_value}.\n")
        if rng.random() < 0.5
        else (f"Q: {question}\nA:", f" {answer}\n")
        for what, who, text_value in rng.sample(needles, len(needles))
        for question, answer in [_ask(rng, (what, who, text_value))]
    ]
    document = [Passage(_hide(rng, hay, needles) + "\n\n", FILLER_WEIGHT)]
    for question, answer in rows:
        document += [Passage(question), Passage(answer, ANSWER_WEIGHT)]
    return [*document, Passage(END_OF_TEXT)]


_DEFINES = re.compile(r"^ *(?:def|class) (\w+).*$", re.MULTILINE)


def code_questions(rng: Random, source: Source, room: int) -> Document:
    """Ask about real code: which line defines a name, and which line follows another."""
    text = source.code(rng, round(room * 0.7 * CODE_CHARS))
    lines = [line for line in text.splitlines() if len(line.strip()) > 12]
    exchanges: list[tuple[str, str]] = []
    names = _DEFINES.findall(text)
    once = [name for name in names if names.count(name) == 1]
    for name in rng.sample(once, min(len(once), rng.randint(1, max(5, room // 2000)))):
        found = next(match[0].strip() for match in _DEFINES.finditer(text) if match[1] == name)
        ask = rng.choice(("Show the line that defines {}.", "Which line defines {}?", "Where is {} defined?"))
        exchanges.append((ask.format(name), found))
    line_indices = range(max(len(lines) - 1, 0))
    exchanges += [
        (f"Which line comes after this one?\n{lines[line_index].strip()}", lines[line_index + 1].strip())
        for line_index in rng.sample(line_indices, min(len(line_indices), rng.randint(1, max(3, room // 3000))))
        if lines.count(lines[line_index]) == 1
    ]
    if not exchanges:
        return code(rng, source, room)
    rng.shuffle(exchanges)
    return conversation(_context_first(rng, text, exchanges), weight=COPY_WEIGHT)


# Copying


@frozen
class CopyTokens:
    """The task for a vocabulary whose ordinary tokens are `[first, stop)`."""

    first: int
    stop: int

    def __call__(self, rng: Random, source: Source, room: int) -> Document:
        """Random tokens, then the same again, once or often, from anywhere in them, after any separator or none."""
        length = split_room(rng, max(room // 2 - 8, 4), 4)
        every = range(self.first, self.stop)
        span = tuple(
            rng.choices(every if rng.random() < 0.7 else rng.sample(every, rng.choice((8, 32, 128))), k=length)
        )
        separator = _separator(rng, every)
        document = [Passage(source.excerpt(rng, 200)) if rng.random() < 0.2 else Passage(""), Passage(span)]
        repeats = 1 if rng.random() < 0.6 else rng.randint(2, 6)
        for _ in range(min(repeats, max(1, room // length - 1))):
            start = 0 if rng.random() < 0.6 else rng.randrange(length)
            cue = start + 2
            document += [separator, Passage(span[start:cue]), Passage(span[cue:], COPY_WEIGHT)]
        return [*document, Passage(END_OF_TEXT)]


def _separator(rng: Random, every: range) -> Passage:
    match rng.randrange(3):
        case 0:
            return Passage("")
        case 1:
            return Passage(tuple(rng.choices(every, k=rng.randint(1, 4))))
        case _:
            return Passage(rng.choice(SEPARATORS))


def _something(rng: Random, source: Source, room: int) -> str:
    """Text to copy: code, words, numbers or a list, of at most about `room` tokens."""
    match rng.randrange(5):
        case 0 | 1:
            return source.excerpt(rng, round(room * 2.2)).strip("\n")
        case 2:
            return " ".join(source.words(rng, max(room // 3, 2)))
        case 3:
            return ", ".join(value(rng, word) for word in source.words(rng, max(room // 7, 2)))
        case _:
            return " ".join(f"{rng.getrandbits(32):08x}" for _ in range(max(room // 9, 1)))


def copy_text(rng: Random, source: Source, room: int) -> Document:
    """Text, a separator, the text again."""
    text = _something(rng, source, split_room(rng, max(room // 3, 17), 16))
    lead = rng.choice(("", "Text:\n", "Input: ", "Original\n"))
    cue = rng.choice((*SEPARATORS, "\n\nThe same text again:\n", "\nThe text is: "))
    return [Passage(lead + text + cue), Passage(text + "\n", COPY_WEIGHT), Passage(END_OF_TEXT, COPY_WEIGHT)]


_SPELLINGS = (
    *(("word: {}\n", "{}"), ("say {}\n", "{}"), ('with {}: ["', "{}"), ("name {} (", "{}"), ("{} / ", "{}")),
    *(('"{}" ->', " {}"), ("({}) is", " {}"), ("{},", " {}"), ("/{}:", " {}"), ("x={};", " {}")),
)


def spelling(rng: Random, source: Source, room: int) -> Document:
    """Words, each twice, once after a space and once not: other tokens, which the model must know for the same."""
    document: Document = []
    for word in source.words(rng, max(room // 11, 1)):
        ask, answer = rng.choice(_SPELLINGS)
        spelt = _misspelt(rng, word)
        document += [Passage(ask.format(spelt)), Passage(answer.format(spelt), COPY_WEIGHT), Passage("\n")]
    return [*document, Passage(END_OF_TEXT)]


def _misspelt(rng: Random, word: str) -> str:
    """The word, or something less usual."""
    kinds = (
        lambda: "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))),
        lambda: rng.choice((word.upper(), word.capitalize(), word.lower())),
        lambda: word + rng.choice(("_", "-", "", ".")) + rng.choice((*NOUNS, *NAMES, *ADJECTIVES)),
    )
    return rng.choice(kinds)() if rng.random() < 0.5 else word


_REPEAT = (
    *("Repeat the following text.\n\n{}", "Repeat this: {}", "Copy this text exactly:\n{}", "Say: {}", "Echo: {}"),
    *("Repeat after me: {}", "Write this again.\n```\n{}\n```", "{}\n\nRepeat the text above.", "Say this: {}"),
    *("Please copy:\n---\n{}\n---", "<text>\n{}\n</text>\nCopy the text.", "Print this text: {}", "Repeat: {}"),
)


def copy_chat(rng: Random, source: Source, room: int) -> Document:
    """Requests to repeat a text."""
    messages: list[Message] = []
    left = room
    while left > 60 or not messages:
        text = _something(rng, source, split_room(rng, max(left // 3, 17), 16))
        messages += [user(rng.choice(_REPEAT).format(text)), says(text)]
        left -= len(text)
    return conversation(messages, weight=COPY_WEIGHT)


def continue_code(rng: Random, source: Source, room: int) -> Document:
    """Real code in a message, and how it goes on."""
    lines = source.excerpt(rng, round(min(room, 1200) * CODE_CHARS)).rstrip("\n").split("\n")
    cut = max(1, len(lines) - rng.randint(1, 12))
    ask = rng.choice(("Continue this code:\n{}", "Complete the code.\n\n{}", "What comes next?\n{}", "Complete:\n{}"))
    return conversation([user(ask.format("\n".join(lines[:cut]))), says("\n".join(lines[cut:]) or "pass")])
