"""Tool loops: a request, a call, its result, a second call that needs the first one's result, and an answer made of it.

Functions, parameters and values are new in every document, so that schema and request are all there is to go by.
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
from training.tools import KNOWN, Tool, call, invented, request, result, spell
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
    """A function that gives the `keys` of a thing that it is asked for by `by`."""

    name: str
    thing: str
    by: str
    keys: tuple[str, ...]
    choices: tuple[str, ...] = ()
    """What one more parameter, `choice`, may be."""

    choice: str = "mode"

    def schema(self, rng: Random) -> Message:
        """Descriptions and `required` are there or not."""
        by = {"type": "string"}
        if rng.random() < 0.5:
            by["description"] = f"The {self.by.replace('_', ' ')} of the {self.thing}"
        properties: dict[str, Any] = {self.by: by}
        if self.choices:
            properties[self.choice] = {"type": "string", "enum": list(self.choices)}
        told = f"Give the {' and '.join(self.keys)} of a {self.thing}."
        parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
        if rng.random() < 0.3:
            parameters["additionalProperties"] = False
        function = {"name": self.name, "description": told, "parameters": parameters}
        return {"type": "function", "function": function}


@frozen
class ToolLoop:
    """The task, with what functions are named after. `steps`: a document is one request that
    takes so many calls, 1 or 2, after as much text as there is room for; 0: any number, with other turns and
    functions."""

    verbs: Sequence[str] = VERBS
    things: Sequence[str] = THINGS
    keys: Sequence[str] = KEYS
    steps: int = 0
    strange: float = 0.6
    """Odds of a name that is any word: a closed list would be learnt by heart, and no name copied."""

    def __call__(self, rng: Random, source: Source, room: int) -> Document:
        getters = self.pair(rng, source)
        if self.steps:
            messages = [system(source.code(rng, round(2.8 * (room - 1000))))] if room > 4000 else []
            messages += chained(rng, source, *getters) if self.steps == 2 else looked_up(rng, source, getters[0])
            return conversation(messages, [getter.schema(rng) for getter in getters], weight=2.0)
        files = FileTools.of(rng) if rng.random() < 0.5 else None
        others = [rng.choice(KNOWN) if rng.random() < 0.4 else invented(rng, source) for _ in range(rng.randrange(4))]
        offered = [*(getter.schema(rng) for getter in getters), *(tool.schema() for tool in others)]
        offered += files.schemas() if files else []
        offered += [invented(rng, source).schema() for _ in range(rng.choice((0, 0, 0, min(20, room // 250))))]
        tools = list({tool["function"]["name"]: tool for tool in offered}.values())
        rng.shuffle(tools)
        messages = around(rng, source, room * 2 // 3)
        for _ in range(rng.choice((1, 1, 2, 3))):
            dice = rng.random()
            if dice < 0.3:
                messages += chained(rng, source, *getters)
            elif dice < 0.5:
                messages += looked_up(rng, source, rng.choice(getters))
            elif dice < 0.65 and others:
                messages += once(rng, source, rng.choice(others))
            elif dice < 0.9 and files:
                messages += files.exchange(rng, source)
            else:
                question, answer = rng.choice((small_talk, about, arithmetic))(rng, source)
                messages += [user(question), says(answer)]
        return conversation(messages, tools, weight=2.0)

    def pair(self, rng: Random, source: Source) -> tuple[Getter, Getter]:
        """Two of them: the second is asked for by something that the first one gives."""
        one, other = self._names(rng, source, self.things, 2)
        link, by, *keys = self._names(rng, source, self.keys, 8)
        verb, second_verb = (self._names(rng, source, self.verbs, 1)[0] for _ in range(2))
        first = Getter(named(rng, verb, one), one, rng.choice(("name", by)), (link, *keys[:2]))
        second = Getter(named(rng, second_verb, other), other, link, tuple(keys[2 : rng.randint(3, 5)]))
        if rng.random() < 0.3:
            choice = rng.choice(("unit", "format", "mode", "source", "detail"))
            second = evolve(second, choices=tuple(rng.sample((*COLOURS, *NOUNS), rng.randint(2, 4))), choice=choice)
        return first, second

    def _names(self, rng: Random, source: Source, listed: Sequence[str], count: int) -> list[str]:
        """Different ones."""
        found = dict.fromkeys(
            strange_name(rng, word) if rng.random() < self.strange else rng.choice(listed)
            for word in source.words(rng, count)
        )
        rest = [name for name in dict.fromkeys(listed) if name not in found]
        return [*found, *rng.sample(rest, count - len(found))]


def strange_name(rng: Random, word: str) -> str:
    """A word, or what is none."""
    made = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
    return rng.choice((word.lower(), word.lower(), f"{word.lower()}_{rng.choice(NOUNS)}", rng.choice(NOUNS), made))


def named(rng: Random, verb: str, thing: str) -> str:
    words = [*verb.split("_"), thing]
    joined = words[0] + "".join(map(str.capitalize, words[1:]))
    return rng.choice(("_".join(words), "_".join(words), joined, "-".join(words)))


def around(rng: Random, source: Source, room: int) -> list[Message]:
    """Instructions as agents have them: none, short ones, or as long as there is room for."""
    if rng.random() < 0.3:
        lead = rng.choice(
            ("You are a coding agent.\n\n", "You are an agent. Use your tools.\n\n", "# Instructions\n", "")
        )
        return [system(lead + source.code(rng, split_room(rng, 3 * max(room, 40), 100)))]
    return opening(rng, source, room)


def told(rng: Random, source: Source) -> Any:
    """A value as functions return it."""
    (word,) = source.words(rng, 1)
    kinds = (value(rng, word), rng.choice(NAMES), rng.choice(CITIES), rng.randrange(10000), rng.randrange(1000) / 10)
    return rng.choice((*kinds, word, rng.random() < 0.5))


def record(rng: Random, source: Source, getter: Getter) -> dict[str, Any]:
    fields = {key: told(rng, source) for key in getter.keys}
    if rng.random() < 0.4:
        fields |= {word: told(rng, source) for word in source.words(rng, rng.randint(1, 3))}
    names = list(fields)
    rng.shuffle(names)
    return {name: fields[name] for name in names}


def subject(rng: Random, source: Source) -> str:
    """What somebody may ask for."""
    (word,) = source.words(rng, 1)
    return rng.choice((rng.choice(NAMES), rng.choice(CITIES), word, value(rng, word)))


def quoted(rng: Random, text: str) -> str:
    return rng.choice((text, text, f"'{text}'", f'"{text}"'))


def chosen(rng: Random, getter: Getter) -> tuple[dict[str, Any], str]:
    """The argument of the second parameter and how a request says it, if there is one."""
    if not getter.choices:
        return {}, ""
    pick = rng.choice(getter.choices)
    return {getter.choice: pick}, rng.choice((f" with {getter.choice} {pick}", f" ({getter.choice}: {pick})"))


def looked_up(rng: Random, source: Source, getter: Getter) -> list[Message]:
    """One call, and one of the fields that it gave."""
    asked, key = subject(rng, source), rng.choice(getter.keys)
    more, said = chosen(rng, getter)
    ask = rng.choice(
        (
            f"What is the {key} of the {getter.thing} with {getter.by} {quoted(rng, asked)}{said}?",
            f"Tell me the {key} of the {getter.thing} {quoted(rng, asked)}{said}.",
            f"Use {getter.name} to find the {key} of {quoted(rng, asked)}{said}.",
            f"{getter.thing.capitalize()} {quoted(rng, asked)}{said}: which {key}?",
        )
    )
    if rng.random() < 0.06:
        problem = rng.choice(("not found", "no such " + getter.thing, "permission denied", "timed out"))
        answered = [tool_says(f"Error: {problem}"), says(f"{getter.name} failed: {problem}.")]
    else:
        fields = record(rng, source, getter)
        answered = [tool_says(spelt(rng, fields)), says(f"The {key} of {asked} is {spell(fields[key])}.")]
    return [user(ask), call((getter.name, {getter.by: asked, **more})), *answered]


def chained(rng: Random, source: Source, first: Getter, second: Getter) -> list[Message]:
    """Two calls: what the second is asked for stands in the result of the first."""
    asked, key = subject(rng, source), rng.choice(second.keys)
    more, said = chosen(rng, second)
    thing, by, about_it = second.thing, second.by, quoted(rng, asked)
    ask = rng.choice(
        (
            f"Find the {by} of the {first.thing} {about_it}, then the {key} of the {thing} with that {by}{said}.",
            f"Look up the {by} of {about_it} with {first.name}. Then use {second.name} to get its {key}{said}.",
            f"What is the {key} of the {thing} that has the {by} of the {first.thing} {about_it}{said}?",
            f"Which {key} has the {thing} with the {by} of {first.thing} {about_it}{said}?",
        )
    )
    found = record(rng, source, first) | {second.by: subject(rng, source)}
    fields = record(rng, source, second)
    return [
        user(ask),
        call((first.name, {first.by: asked})),
        tool_says(spelt(rng, found)),
        call((second.name, {second.by: found[second.by], **more})),
        tool_says(spelt(rng, fields)),
        says(f"The {key} of {found[second.by]} is {spell(fields[key])}."),
    ]


def spelt(rng: Random, fields: dict[str, Any]) -> str:
    """A result: JSON, or lines."""
    if rng.random() < 0.7:
        return json.dumps(fields, indent=rng.choice((None, None, 2)), ensure_ascii=False)
    return "\n".join(f"{name}: {spell(field)}" for name, field in fields.items())


def once(rng: Random, source: Source, tool: Tool) -> list[Message]:
    """A call of a function whose results are of no known kind."""
    asked, given = request(rng, source, tool)
    returned, answer = result(rng, source)
    return [user(vary(rng, asked)), call((tool.name, given)), tool_says(returned), says(answer)]
