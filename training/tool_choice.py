"""Makes many short requests over one list of functions, to teach which function a request needs.

A tool loop asks for that choice once in a few hundred tokens. The name of the function is the only hard token of its
answers, because it comes before everything else. From loops alone, a model learns to guess one of two functions.
"""

from __future__ import annotations

from random import Random

from attrs import frozen

from training.agents import Getter, ToolLoop, make_chained_calls, make_instructions, make_lookup
from training.chat_format import Document, Message, conversation, system, user
from training.chat_format import assistant as says
from training.tasks import ANSWER_WEIGHT, CODE_CHARS
from training.tools import KNOWN, Tool, invent_tool
from training.words import Source

SCHEMA, EXCHANGE = 110, 90  # tokens, about
FAR = 3000  # tokens, from which on text is put before


@frozen
class FunctionChoice:
    """The task. loop: what functions are named after."""

    loop: ToolLoop

    def __call__(self, rng: Random, source: Source, room: int) -> Document:
        messages = self._before(rng, source, room)
        left = room - sum(len(message["content"]) for message in messages) // 3
        pairs = self._pairs(rng, source, rng.choice((1, 1, 2, 2, 3, 4, 6)), left // 3)
        getters = [getter for pair in pairs for getter in pair]
        others = [
            rng.choice(KNOWN) if rng.random() < 0.4 else invent_tool(rng, source) for _ in range(rng.randrange(4))
        ]
        tools = shuffle_schemas(rng, getters, others if left > 1000 else ())
        asked = max(1, min(40, (left - SCHEMA * len(tools)) // EXCHANGE))
        for _ in range(rng.randint(max(1, asked // 2), asked)):
            pair = rng.choice(pairs)
            dice = rng.random()
            if dice < 0.4:
                messages += make_name_question(rng, rng.choice(pair))
            elif dice < 0.8:
                messages += make_lookup(rng, source, rng.choice(pair))
            else:
                messages += make_chained_calls(rng, source, *pair)
        return conversation(messages, tools, weight=ANSWER_WEIGHT)

    def _before(self, rng: Random, source: Source, room: int) -> list[Message]:
        """Nothing, what agents begin with, or as much text as leaves room for some requests."""
        dice = rng.random()
        if dice < 0.2 and room > FAR:
            return [system(source.code(rng, round(CODE_CHARS * (room - FAR))))]
        return make_instructions(rng, source, room * 2 // 3) if dice < 0.6 else []

    def _pairs(self, rng: Random, source: Source, count: int, room: int) -> list[tuple[Getter, Getter]]:
        """So many of them, or what there is room for. No two functions are of the same thing or have one name."""
        found = [self.loop.pair(rng, source)]
        taken = {word for getter in found[0] for word in (getter.thing, getter.name)}
        while len(found) < count and 2 * SCHEMA * (len(found) + 1) < room:
            pair = self.loop.pair(rng, source)
            words = {word for getter in pair for word in (getter.thing, getter.name)}
            if not words & taken:
                found.append(pair)
                taken |= words
        return found


def shuffle_schemas(rng: Random, getters: list[Getter], others: list[Tool] | tuple[()]) -> list[Message]:
    """Return the schemas in random order, each name once."""
    schemas = [*(tool.schema() for tool in others), *(getter.schema(rng) for getter in getters)]
    tools = list({schema["function"]["name"]: schema for schema in schemas}.values())
    rng.shuffle(tools)
    return tools


def make_name_question(rng: Random, getter: Getter) -> list[Message]:
    """Make a question that is answered with the name of a function, without a call."""
    key = rng.choice(getter.keys)
    ask = rng.choice(
        (
            f"Which function gives the {key} of a {getter.thing}?",
            f"What do I call for the {key} of the {getter.thing}?",
            f"Name the function for a {getter.thing}.",
            f"Which function is asked for by {getter.by} and gives {key} of {getter.thing}?",
        )
    )
    return [user(ask), says(getter.name)]
