"""Requests as several clients send them at once: shared prompts, edits, several answers, grammars, penalties, chats.

All are drawn from few prompts and few places, so that they meet each other's rows: in slots, in host memory, on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

from attrs import frozen

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LENGTHS = (70, 130, 200, 257, 300, 450, 513, 640, 700)
EDITS = (3, 64, 200, 255, 256, 333, 512)
LEAVES = 0.12  # of all requests: the client closes a stream after a while
SENTENCES = tuple(f"Line {at} says that {at * 37 % 101} is {'more' if at % 3 else 'less'}." for at in range(60))


@frozen
class MixedRequest:
    """A request of a client. leaves: it closes the stream after so many events; None: it reads the whole answer."""

    path: Literal["/v1/chat/completions", "/v1/completions"]
    body: str  # JSON
    leaves: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


def document(number: int) -> list[int]:
    return [10 + (37 + number) * at % 3900 for at in range(1, 720)]


def drawn(random: Random, *, compressing: bool) -> MixedRequest:
    """compressing: the server has a drafter, so some requests say what they want of it."""
    fields: dict[str, Any] = {"max_tokens": random.choice((1, 4, 12, 24, 40)), "ignore_eos": random.random() < 0.7}
    if random.random() < 0.5:
        fields |= {"temperature": 0.8, "seed": random.randrange(4)}
    else:
        fields["temperature"] = 0
    path, asked = chatting(random) if random.random() < 0.25 else (PLAIN, completing(random))
    fields |= asked | special(random, path)
    if random.random() < 0.3:
        fields["prefix_cache"] = {"scope": random.choice(("off", "full", "auto:4", 128))}
    if random.random() < 0.1:
        fields["cache_salt"] = random.choice("ab")
    if compressing and random.random() < 0.6:
        fields["compression"] = random.choice(({"mode": "off"}, {"mode": "always", "keep_ratio": 0.4}))
    leaves = None
    if random.random() < LEAVES:
        leaves = random.choice((1, 2, 9))
        fields |= {"stream": True, "max_tokens": 60}
    return MixedRequest("/v1/chat/completions" if path == CHAT else "/v1/completions", json.dumps(fields), leaves)


def completing(random: Random) -> dict[str, Any]:
    prompt = document(random.randrange(4))[: random.choice(LENGTHS)]
    for _ in range(random.choice((0, 0, 1, 2))):
        at = random.choice(EDITS)
        prompt[at : at + 1] = [random.choice((11, 500, 3000))] * (at < len(prompt))
    return {"prompt": prompt, "logprobs": 1}


def chatting(random: Random) -> tuple[str, dict[str, Any]]:
    """Turns that were said elsewhere, so that nothing depends on how an answer was written."""
    turns = random.randrange(1, 5)
    messages: list[Mapping[str, str]] = [{"role": "system", "content": "You are patient. " + SENTENCES[0]}]
    for turn in range(turns):
        lines = SENTENCES[turn * 7 : turn * 7 + 4]
        messages.append({"role": "user", "content": f"Part {turn}:\n" + "\n".join(lines)})
        messages.append({"role": "assistant", "content": f"That was part {turn}."})
    messages[-1] = {"role": "user", "content": random.choice(("Why?", "What is more than 50?"))}
    return CHAT, {"messages": messages, "logprobs": True}


def special(random: Random, path: str) -> dict[str, Any]:
    """At most one of what takes a way of its own through the engine."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yes"]}}, "required": ["a"]}
    form = {"name": "f", "schema": {**schema, "additionalProperties": False}, "strict": True}
    kinds: list[dict[str, Any]] = [
        {"n": 2, "temperature": 0.9, "seed": random.randrange(4)},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logit_bias": {"500": 4, "17": -100}},
        {"guided_regex": "[a-z]{3,9}( [0-9]{2,4}){1,3}", "ignore_eos": False},
        {"response_format": {"type": "json_schema", "json_schema": form}, "ignore_eos": False},
        {"echo": True, "max_tokens": 4} if path == PLAIN else {},
        {"speculation": "off"},
        {"one_off": True},
    ]
    return random.choice(kinds) if random.random() < 0.6 else {}
