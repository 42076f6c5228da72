"""Makes tool loops: a request, a call, its result, often a second call that needs this result, and an answer.

Functions, parameters and values are new in every document, so a model can only use the schema and the request.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from random import Random
from typing import Any

from attrs import evolve, frozen

from training.chat_format import Document, Message, conversation, system, user
from training.chat_format import assistant as says
from training.dialogues import about, arithmetic, opening, small_talk, vary
from training.file_tools import FileTools, tool_says
from training.tasks import split_room
from training.tools import KNOWN, Tool, call, invent_tool, request, result, spell
from training.words import CITIES, COLOURS, NAMES, NOUNS, Source, value

VERBS = ("get", "find", "look_up", "fetch", "query", "read", "show", "check", "describe", "load", "search", "list")
THINGS = (
    *("user", "order", "book", "city", "host", "server", "ticket", "flight", "device", "file", "package", "account"),
    *("song", "team", "project", "branch", "invoice", "product", "recipe", "room", "event", "customer", "job", "shop"),
)
KEYS = (
    *("id", "owner", "price", "status", "version", "colour", "address", "email", "size", "title", "author", "port"),
    *("temperature", "date", "score", "total", "language", "path", "region", "weight", "kind", "level", "count", "tag"),
)
HELD_OUT_VERBS = ("inspect", "resolve", "retrieve", "lookup", "pull", "identify")
HELD_OUT_THINGS = ("vessel", "patient", "satellite", "museum", "auction", "tenant", "lawyer", "glacier")
HELD_OUT_KEYS = ("altitude", "deadline", "sponsor", "wavelength", "rank", "currency", "operator", "depth_limit")


@frozen
class Getter:
    """A function of a made-up API: its argument `by` names a thing, and it returns the `keys` of that thing."""

    name: str
    thing: str
    by: str
    keys: tuple[str, ...]
    choices: tuple[str, ...] = ()
    """The values of one more parameter, whose name is `choice`; empty: there is none."""

    choice: str = "mode"

    def schema(self, rng: Random) -> Message:
        """Return the JSON schema of the function. Optional parts of it are left out at random."""
        by = {"type": "string"}
        if rng.random() < 0.5:
            by["description"] = f"The {self.by.replace('_', ' ')} of the {self.thing}"
        properties: dict[str, Any] = {self.by: by}
        if self.choices:
            properties[self.choice] = {"type": "string", "enum": list(self.choices)}
        description = f"Give the {' and '.join(self.keys)} of a {self.thing}."
        parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
        if rng.random() < 0.3:
            parameters["additionalProperties"] = False
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}


@frozen
class ToolLoop:
    """The task of tool loops, with the words that functions are named after.

    steps: 1 or 2: a document is one request that takes this many calls, after as much text as there is room for. 0: a
    document has any number of requests, other turns and other functions.
    """

    verbs: Sequence[str] = VERBS
    things: Sequence[str] = THINGS
    keys: Sequence[str] = KEYS
    steps: int = 0
    strange: float = 0.6
    """The odds that a name is not from these lists. With lists alone, the model would learn the names by heart."""

    def __call__(self, rng: Random, source: Source, room: int) -> Document:
        getters = self.pair(rng, source)
        if self.steps:
            messages = [system(source.code(rng, round(2.8 * (room - 1000))))] if room > 4000 else []
            messages += (
                make_chained_calls(rng, source, *getters) if self.steps == 2 else make_lookup(rng, source, getters[0])
            )
            return conversation(messages, [getter.schema(rng) for getter in getters], weight=2.0)
        files = FileTools.of(rng) if rng.random() < 0.5 else None
        others = [
            rng.choice(KNOWN) if rng.random() < 0.4 else invent_tool(rng, source) for _ in range(rng.randrange(4))
        ]
        offered = [*(getter.schema(rng) for getter in getters), *(tool.schema() for tool in others)]
        offered += files.schemas() if files else []
        offered += [invent_tool(rng, source).schema() for _ in range(rng.choice((0, 0, 0, min(20, room // 250))))]
        tools = list({tool["function"]["name"]: tool for tool in offered}.values())
        rng.shuffle(tools)
        messages = make_instructions(rng, source, room * 2 // 3)
        for _ in range(rng.choice((1, 1, 2, 3))):
            dice = rng.random()
            if dice < 0.3:
                messages += make_chained_calls(rng, source, *getters)
            elif dice < 0.5:
                messages += make_lookup(rng, source, rng.choice(getters))
            elif dice < 0.65 and others:
                messages += make_single_call(rng, source, rng.choice(others))
            elif dice < 0.9 and files:
                messages += files.exchange(rng, source)
            else:
                question, answer = rng.choice((small_talk, about, arithmetic))(rng, source)
                messages += [user(question), says(answer)]
        return conversation(messages, tools, weight=2.0)

    def pair(self, rng: Random, source: Source) -> tuple[Getter, Getter]:
        """Return two functions. The second one takes as its argument a value that the first one returns."""
        one, other = self._names(rng, source, self.things, 2)
        link, by, *keys = self._names(rng, source, self.keys, 8)
        verb, second_verb = (self._names(rng, source, self.verbs, 1)[0] for _ in range(2))
        first = Getter(join_function_name(rng, verb, one), one, rng.choice(("name", by)), (link, *keys[:2]))
        second = Getter(join_function_name(rng, second_verb, other), other, link, tuple(keys[2 : rng.randint(3, 5)]))
        if rng.random() < 0.3:
            choice = rng.choice(("unit", "format", "mode", "source", "detail"))
            second = evolve(second, choices=tuple(rng.sample((*COLOURS, *NOUNS), rng.randint(2, 4))), choice=choice)
        return first, second

    def _names(self, rng: Random, source: Source, listed: Sequence[str], count: int) -> list[str]:
        """Return `count` different names, some of the list and some made up."""
        found = dict.fromkeys(
            strange_name(rng, word) if rng.random() < self.strange else rng.choice(listed)
            for word in source.words(rng, count)
        )
        rest = [name for name in dict.fromkeys(listed) if name not in found]
        return [*found, *rng.sample(rest, count - len(found))]


def strange_name(rng: Random, word: str) -> str:
    """Return a word, a combination of words, or random letters."""
    made = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
    return rng.choice((word.lower(), word.lower(), f"{word.lower()}_{rng.choice(NOUNS)}", rng.choice(NOUNS), made))


def join_function_name(rng: Random, verb: str, thing: str) -> str:
    words = [*verb.split("_"), thing]
    joined = words[0] + "".join(map(str.capitalize, words[1:]))
    return rng.choice(("_".join(words), "_".join(words), joined, "-".join(words)))


def make_instructions(rng: Random, source: Source, room: int) -> list[Message]:
    """Return instructions as agents have them: none, short ones, or as long as there is room for."""
    if rng.random() < 0.3:
        lead = rng.choice(
            ("You are a coding agent.\n\n", "You are an agent. Use your tools.\n\n", "# Instructions\n", "")
        )
        return [system(lead + source.code(rng, split_room(rng, 3 * max(room, 40), 100)))]
    return opening(rng, source, room)


def draw_field_value(rng: Random, source: Source) -> Any:
    """Return a random value of a field in a result."""
    (word,) = source.words(rng, 1)
    kinds = (value(rng, word), rng.choice(NAMES), rng.choice(CITIES), rng.randrange(10000), rng.randrange(1000) / 10)
    return rng.choice((*kinds, word, rng.random() < 0.5))


def draw_record(rng: Random, source: Source, getter: Getter) -> dict[str, Any]:
    fields = {key: draw_field_value(rng, source) for key in getter.keys}
    if rng.random() < 0.4:
        fields |= {word: draw_field_value(rng, source) for word in source.words(rng, rng.randint(1, 3))}
    names = list(fields)
    rng.shuffle(names)
    return {name: fields[name] for name in names}


def draw_subject(rng: Random, source: Source) -> str:
    """Return the name of a thing that a request asks about."""
    (word,) = source.words(rng, 1)
    return rng.choice((rng.choice(NAMES), rng.choice(CITIES), word, value(rng, word)))


def quote_sometimes(rng: Random, text: str) -> str:
    return rng.choice((text, text, f"'{text}'", f'"{text}"'))


def choose_option(rng: Random, getter: Getter) -> tuple[dict[str, Any], str]:
    """Return an argument for the parameter `choice`, and the words for it in a request; empty if there is none."""
    if not getter.choices:
        return {}, ""
    pick = rng.choice(getter.choices)
    return {getter.choice: pick}, rng.choice((f" with {getter.choice} {pick}", f" ({getter.choice}: {pick})"))


def make_lookup(rng: Random, source: Source, getter: Getter) -> list[Message]:
    """Make a request that takes one call, and an answer with one field of its result."""
    asked, key = draw_subject(rng, source), rng.choice(getter.keys)
    more, said = choose_option(rng, getter)
    ask = rng.choice(
        (
            f"What is the {key} of the {getter.thing} with {getter.by} {quote_sometimes(rng, asked)}{said}?",
            f"Tell me the {key} of the {getter.thing} {quote_sometimes(rng, asked)}{said}.",
            f"Use {getter.name} to find the {key} of {quote_sometimes(rng, asked)}{said}.",
            f"{getter.thing.capitalize()} {quote_sometimes(rng, asked)}{said}: which {key}?",
        )
    )
    if rng.random() < 0.06:
        problem = rng.choice(("not found", "no such " + getter.thing, "permission denied", "timed out"))
        answered = [tool_says(f"Error: {problem}"), says(f"{getter.name} failed: {problem}.")]
    else:
        fields = draw_record(rng, source, getter)
        answered = [tool_says(write_result(rng, fields)), says(f"The {key} of {asked} is {spell(fields[key])}.")]
    return [user(ask), call((getter.name, {getter.by: asked, **more})), *answered]


def make_chained_calls(rng: Random, source: Source, first: Getter, second: Getter) -> list[Message]:
    """Make a request that takes two calls. The argument of the second one is in the result of the first."""
    asked, key = draw_subject(rng, source), rng.choice(second.keys)
    more, said = choose_option(rng, second)
    thing, by, about_it = second.thing, second.by, quote_sometimes(rng, asked)
    ask = rng.choice(
        (
            f"Find the {by} of the {first.thing} {about_it}, then the {key} of the {thing} with that {by}{said}.",
            f"Look up the {by} of {about_it} with {first.name}. Then use {second.name} to get its {key}{said}.",
            f"What is the {key} of the {thing} that has the {by} of the {first.thing} {about_it}{said}?",
            f"Which {key} has the {thing} with the {by} of {first.thing} {about_it}{said}?",
        )
    )
    found = draw_record(rng, source, first) | {second.by: draw_subject(rng, source)}
    fields = draw_record(rng, source, second)
    return [
        user(ask),
        call((first.name, {first.by: asked})),
        tool_says(write_result(rng, found)),
        call((second.name, {second.by: found[second.by], **more})),
        tool_says(write_result(rng, fields)),
        says(f"The {key} of {found[second.by]} is {spell(fields[key])}."),
    ]


def write_result(rng: Random, fields: dict[str, Any]) -> str:
    """Write a result as JSON, or as lines of text."""
    if rng.random() < 0.7:
        return json.dumps(fields, indent=rng.choice((None, None, 2)), ensure_ascii=False)
    return "\n".join(f"{name}: {spell(field)}" for name, field in fields.items())


def make_single_call(rng: Random, source: Source, tool: Tool) -> list[Message]:
    """Make a request that takes one call of another function, with a result of any kind."""
    asked, given = request(rng, source, tool)
    returned, answer = result(rng, source)
    return [user(vary(rng, asked)), call((tool.name, given)), tool_says(returned), says(answer)]
