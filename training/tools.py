"""Tool calls: which function, with which arguments, and an answer from what it returned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from attrs import frozen

from training.chat_format import Document, Message, conversation, user
from training.chat_format import assistant as says
from training.dialogues import about, opening, small_talk, vary
from training.words import CITIES, COLOURS, NAMES, NOUNS, Source, noun_phrase

_VERBS = ("get", "set", "find", "create", "delete", "list", "send", "update", "search", "open", "start", "stop", "read")
_PARAMETERS = (
    *(
        "name",
        "city",
        "path",
        "query",
        "count",
        "limit",
        "user",
        "title",
        "date",
        "text",
        "colour",
        "id",
        "unit",
        "size",
    ),
    *("target", "source", "subject", "message", "priority", "verbose", "location", "language", "amount", "file_path"),
)


@frozen
class Tool:
    """A function a model may call. `kinds`: its parameters and their JSON types, in the order they are asked for."""

    name: str
    description: str
    kinds: Mapping[str, str]
    asks: tuple[str, ...]
    """Ways to ask for it, naming every parameter in braces."""

    def schema(self) -> Message:
        """Return the function's definition as the OpenAI API has it."""
        properties = {name: {"type": kind} for name, kind in self.kinds.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.kinds)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def _tool(name: str, description: str, kinds: str, *asks: str) -> Tool:
    types = {"s": "string", "i": "integer", "n": "number", "b": "boolean"}
    pairs = (kind.split(":") for kind in kinds.split())
    return Tool(name, description, {key: types[kind] for key, kind in pairs}, asks)


KNOWN = (
    _tool(
        "get_weather",
        "Get the current weather in a city.",
        "city:s",
        "What is the weather in {city}?",
        "What's the weather like in {city}?",
        "How is the weather in {city}?",
        "Is it raining in {city}?",
        "Weather in {city}",
    ),
    _tool(
        "get_forecast",
        "Weather forecast for a number of days.",
        "city:s days:i",
        "Give me the forecast for {city} for {days} days.",
    ),
    _tool("get_time", "Current time in a city.", "city:s", "What time is it in {city}?", "Tell me the time in {city}."),
    _tool(
        "add",
        "Add two numbers.",
        "a:i b:i",
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
        "Use the tool to add {a} and {b}.",
    ),
    _tool(
        "send_email",
        "Send an email.",
        "to:s subject:s",
        "Send an email to {to} about {subject}.",
        "Write to {to} about {subject}.",
    ),
    _tool(
        "read_file",
        "Read a file.",
        "path:s",
        "Read the file {path}.",
        "Open {path}.",
        "Show me {path}.",
        "What is in {path}?",
    ),
    _tool(
        "write_file",
        "Write text to a file.",
        "path:s text:s",
        "Write {text} to {path}.",
        "Write '{text}' into the file {path}.",
    ),
    _tool(
        "run_command",
        "Run a shell command.",
        "command:s",
        "Run {command}.",
        "Run the command {command}.",
        "Execute {command}",
    ),
    _tool(
        "search", "Search the web.", "query:s", "Search for {query}.", "Search the web for {query}.", "Look up {query}."
    ),
    _tool(
        "set_timer", "Set a timer.", "minutes:i", "Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."
    ),
    _tool(
        "get_stock_price", "Price of a stock.", "symbol:s", "What is the price of {symbol}?", "Stock price of {symbol}?"
    ),
    _tool("turn_on_light", "Turn on a light.", "room:s colour:s", "Turn on the {colour} light in the {room}."),
    _tool(
        "convert", "Convert an amount of money.", "amount:i source:s target:s", "Convert {amount} {source} to {target}."
    ),
    _tool(
        "translate",
        "Translate a text.",
        "text:s language:s",
        "Translate {text} into {language}.",
        "Say '{text}' in {language}.",
    ),
    _tool("create_user", "Create a user.", "name:s age:i admin:b", "Create a user {name}, age {age}, admin {admin}."),
)

_COMMANDS = ("ls", "pwd", "ls -l", "git status", "pytest -q", "make test", "python main.py", "cat README.md", "df -h")


def invent_tool(rng: Random, source: Source) -> Tool:
    """Make up a function."""
    words = source.words(rng, 10)
    name = f"{rng.choice(_VERBS)}_{rng.choice((rng.choice(NOUNS), words[0].lower()))}"
    parameters = rng.sample((*_PARAMETERS, words[1].lower()), rng.randint(0, 4))
    kinds = {key: rng.choice(("string", "string", "integer", "number", "boolean")) for key in parameters}
    listed = [f"{key} {{{key}}}" for key in kinds]
    joined = " and ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))
    spoken = name.replace("_", " ", 1)
    asks = tuple(
        ask.format(*((name,) if at % 2 else (spoken,))) + (f" with {joined}." if kinds else ".")
        for at, ask in enumerate(("Please {}", "Call {}", "I want to {}", "Use {}"))
    )
    description = rng.choice(
        (" ".join(words[2 : rng.randint(3, 9)]), f"{spoken.capitalize()}.", source.excerpt(rng, 60))
    )
    return Tool(name, description.strip(), kinds, asks)


def argument(rng: Random, source: Source, name: str, kind: str) -> Any:
    if kind == "integer":
        return rng.randrange(rng.choice((10, 100, 10000)))
    if kind == "number":
        return rng.choice((rng.randrange(100), rng.randrange(1000) / 10))
    if kind == "boolean":
        return rng.random() < 0.5
    word, other = source.words(rng, 2)
    path = f"{word.lower()}.{rng.choice(('py', 'txt', 'md', 'json'))}"
    choices = {
        "city": CITIES,
        "location": CITIES,
        "name": NAMES,
        "to": (*NAMES, f"{word.lower()}@example.com"),
        "user": NAMES,
        "colour": COLOURS,
        "command": _COMMANDS,
        "symbol": (word[:4].upper(),),
        "room": ("kitchen", "bedroom", "hall", "garden"),
        "language": ("German", "French", "Spanish", "Italian"),
        "source": ("EUR", "USD", "GBP", "JPY"),
        "target": ("EUR", "USD", "CHF"),
        "path": (path, f"src/{path}", f"/srv/{path}", f"{other.lower()}/{path}"),
        "file_path": (path, f"/home/{word.lower()}/{path}"),
    }.get(name, (word, f"{word} {other}", noun_phrase(rng), rng.choice(NOUNS)))
    return rng.choice(choices)


def spell(argument: Any) -> str:
    """Write an argument as people write it in a request."""
    return str(argument).lower() if isinstance(argument, bool) else str(argument)


def request(rng: Random, source: Source, tool: Tool) -> tuple[str, dict[str, Any]]:
    """Make a request for a function, and the arguments of the call."""
    arguments = {name: argument(rng, source, name, kind) for name, kind in tool.kinds.items()}
    return rng.choice(tool.asks).format(**{name: spell(given) for name, given in arguments.items()}), arguments


def call(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(rng: Random, source: Source) -> tuple[str, str]:
    """Make the result of a function, and the answer to the user."""
    words = source.words(rng, 4)
    if rng.random() < 0.6:
        keys = rng.sample(
            (*_PARAMETERS, "temperature", "status", "price", "total", "condition", words[0]), rng.randint(1, 3)
        )
        fields = {
            key: rng.choice((rng.randrange(1000), words[1], rng.choice(CITIES), rng.random() < 0.5)) for key in keys
        }
        return json.dumps(fields), "Result: " + ", ".join(
            f"{key} is {spell(field)}" for key, field in fields.items()
        ) + "."
    text = rng.choice(("ok", "done", str(rng.randrange(10000)), " ".join(words), f"error: {words[0]} not found"))
    return text, f"Result: {text}."


def tool_chat(rng: Random, source: Source, room: int) -> Document:
    """Some functions, requests for one or two of them at a time, their results, and talk that needs none."""
    offered: dict[str, Tool] = {}
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6))):
        tool = rng.choice(KNOWN) if rng.random() < 0.4 else invent_tool(rng, source)
        offered[tool.name] = tool
    tools = list(offered.values())
    messages = opening(rng, source, room // 2)
    for _ in range(rng.choice((1, 1, 2, 3))):
        dice = rng.random()
        if dice < 0.2:
            question, answer = rng.choice((small_talk, about))(rng, source)
            messages += [user(question), says(answer)]
            continue
        chosen = rng.sample(tools, 2) if dice < 0.3 and len(tools) > 1 else [rng.choice(tools)]
        asked = [request(rng, source, tool) for tool in chosen]
        text = " Then ".join(question for question, _ in asked)
        messages += [user(vary(rng, text) if len(chosen) == 1 else text)]
        messages.append(call(*((tool.name, given) for tool, (_, given) in zip(chosen, asked, strict=True))))
        returned = [result(rng, source) for _ in chosen]
        messages += [{"role": "tool", "content": content} for content, _ in returned]
        messages.append(says("\n".join(answer for _, answer in returned)))
    return conversation(messages, [tool.schema() for tool in tools], weight=2.0)
