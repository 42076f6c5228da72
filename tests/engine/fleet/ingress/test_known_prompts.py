"""Tests of the memory that an ingress has of conversations whose prompts it has read."""

from __future__ import annotations

from typing import Any

from engine.fleet.ingress.known_prompts import ConversationDigests, KnownPrompts
from engine.fleet.router.route_keys import RouteKeys

LONG = {"role": "system", "content": "You are an agent. " * 40}
TURNS = [{"role": "user", "content": "Do this."}, {"role": "assistant", "content": "Done."}]


def digest(*turns: dict[str, str], **more: Any) -> ConversationDigests:
    return ConversationDigests.from_body({"messages": [LONG, *turns], **more}, "/v1/chat/completions model")


def make_route(count: int, tokens: int = 100) -> RouteKeys:
    return RouteKeys(tuple(bytes([number % 256]) * 16 for number in range(count)), 8, tokens)


def test_a_prompt_is_known_when_it_comes_again() -> None:
    known = KnownPrompts()
    assert known.find(digest(TURNS[0])) is None
    known.note(digest(TURNS[0]), make_route(3))
    found = known.find(digest(TURNS[0], max_tokens=7, stream=True))
    assert found is not None
    assert (found.is_whole, found.route) == (True, make_route(3))


def test_a_longer_conversation_has_the_keys_of_the_part_that_was_read() -> None:
    known = KnownPrompts()
    known.note(digest(TURNS[0]), make_route(3))
    found = known.find(digest(*TURNS, TURNS[0]))
    assert found is not None
    assert (found.is_whole, found.route.keys) == (False, make_route(3).keys)
    assert 100 < found.route.tokens < 150  # estimated by the bytes of what is new


def test_what_shapes_the_prompt_is_compared() -> None:
    known = KnownPrompts()
    known.note(digest(TURNS[0]), make_route(3))
    assert known.find(digest(TURNS[0], tools=[{"type": "function"}])) is None
    assert known.find(digest(TURNS[0], cache_salt="other")) is None
    assert known.find(ConversationDigests.from_body({"messages": [LONG, TURNS[0]]}, "other model")) is None
    assert known.find(digest(TURNS[1])) is None


def test_a_conversation_of_which_too_little_is_known_is_read() -> None:
    known = KnownPrompts()
    known.note(digest(TURNS[0]), make_route(3))
    assert known.find(digest(TURNS[0], {"role": "user", "content": "Read this file. " * 40})) is None


def test_the_oldest_prompts_are_forgotten_and_a_longer_one_replaces_what_it_continues() -> None:
    known = KnownPrompts(most_keys=12)
    known.note(digest(TURNS[0]), make_route(3))
    known.note(digest(*TURNS), make_route(4))
    assert known.find(digest(TURNS[0])) is None
    other = ConversationDigests.from_body({"prompt": "Hello"}, "/v1/completions model")
    known.note(other, make_route(6))
    assert known.find(digest(*TURNS)) is not None
    known.note(digest(TURNS[1]), make_route(1))
    assert known.find(other) is None
    assert known.find(digest(TURNS[1])) is not None
