"""Tests that a message is read as the same however it is written, and that different messages are not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.text.conversation import ChatMessage, ToolCall
from adapters.text.read_text import MAX_ARGUMENT_DEPTH, Reading, canonicalize_arguments, frame_texts, read_history

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def spelled(value: Any, draw: random.Random) -> str:
    """The same value as some other client may write it."""

    def gap() -> str:
        return draw.choice(["", "", " ", "\n\t"])

    match value:
        case dict():
            members = [f"{gap()}{spelled(key, draw)}{gap()}:{gap()}{spelled(one, draw)}" for key, one in value.items()]
            draw.shuffle(members)
            return "{" + ",".join(members) + gap() + "}"
        case list():
            return "[" + ",".join(gap() + spelled(one, draw) for one in value) + gap() + "]"
        case str():
            return json.dumps(value, ensure_ascii=draw.random() < 0.5).replace("/", draw.choice(["/", "\\/"]))
        case bool() | None:
            return json.dumps(value)
        case int():
            return draw.choice([f"{value}", f"{value}.0", f"{value}.000e0", f"{value}e+0", f"{value}.00E-0"])
        case _:
            return draw.choice([repr(value), repr(value).replace("e", "E")])


def typed(value: Any) -> Any:
    """So that what Python thinks equal is not: true is no number."""
    match value:
        case bool() | str() | None:
            return (type(value).__name__, value)
        case dict():
            return {key: typed(one) for key, one in value.items()}
        case list():
            return [typed(one) for one in value]
    return ("number", value)


@pytest.mark.parametrize("depth", [MAX_ARGUMENT_DEPTH, 500, 700, 900, 990, 3000])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_arguments_that_are_nested_beyond_measure_are_themselves(depth: int, opens: str, closes: str) -> None:
    inner = f"{opens * (MAX_ARGUMENT_DEPTH - 2)}1{closes * (MAX_ARGUMENT_DEPTH - 2)}"
    assert canonicalize_arguments(f'{{"b": {inner}}}') == canonicalize_arguments(f'{{"b":{inner} }}')
    deep = f'{{"b": {opens * depth}1{closes * depth}}}'
    assert canonicalize_arguments(f" {deep}\n") == f"not JSON: {deep}"


@given(VALUES, st.integers(0, 2**32))
def test_arguments_are_their_value(value: Any, seed: int) -> None:
    draw = random.Random(seed)
    assert (
        canonicalize_arguments(spelled(value, draw))
        == canonicalize_arguments(spelled(value, draw))
        == canonicalize_arguments(json.dumps(value))
    )


@given(VALUES, VALUES)
def test_other_values_are_other_arguments(one: Any, other: Any) -> None:
    assert (canonicalize_arguments(json.dumps(one)) == canonicalize_arguments(json.dumps(other))) == (
        typed(one) == typed(other)
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", "1.0", True),
        ("10e-1", "0.1E1", True),
        ("-0", "0.0", True),
        ("0e99999", "0", True),
        ("100", "1e2", True),
        ("1e400", "1e401", False),
        ("12345678901234567890", "12345678901234567891", False),
        ("0.1", "0.10000000000000000001", False),
        ("1", "true", False),
        ("1", '"1"', False),
        ("-1", "1", False),
        ("null", "{}", False),
        ("", "{}", True),
        ('{"a": 1, "b": [2, 3]}', '{"b":[2,3.0],"a":1}', True),
        ('{"a": [2, 3]}', '{"a": [3, 2]}', False),
        (r'"\u00e9\ud83d\ude00\/"', '"é😀/"', True),
        (r'"\ud800"', r'"\uD800"', True),
        (r'"\ud800"', r'"\ud801"', False),
        ('{"a": ', '{"a":', True),
        ('{"a": 1', '{"a": 2', False),
        ("NaN", "NaN", True),
        ("[" * 100_000, "[" * 100_000, True),
        ("1e" + "9" * 5000, "1e" + "8" * 5000, False),
    ],
)
def test_what_is_the_same(one: str, other: str, same: bool) -> None:
    assert (canonicalize_arguments(one) == canonicalize_arguments(other)) == same


@given(st.lists(TEXTS, max_size=4), st.lists(TEXTS, max_size=4))
def test_texts_in_a_row_are_not_mixed_up(one: list[str], other: list[str]) -> None:
    assert (frame_texts(*one) == frame_texts(*other)) == (one == other)


def test_a_reading_is_text_calls_and_reasoning() -> None:
    def reading(text: str = "Hm.", arguments: str = '{"a": 1, "b": 2}', reasoning: str = "So.") -> Reading:
        return Reading.from_parts(text, [ToolCall("x", "f", arguments)], reasoning)

    assert reading(" Hm.\n", '{"b":2.0,"a":1}', "\nSo. ") == reading()
    assert reading().matches(reading(reasoning=""))
    assert reading().matches(reading())
    assert not reading(reasoning="").matches(reading())
    assert not reading().matches(reading(reasoning="Else."))
    assert not reading().matches(reading("Hm..", reasoning=""))
    assert not reading().matches(reading(arguments='{"a": 1}', reasoning=""))


def test_keys_are_of_what_was_said_before_and_of_whose_it_is() -> None:
    ask, answer = ChatMessage("user", "Go."), ChatMessage("assistant", "Done.", calls=(ToolCall("call_1", "f", "{}"),))

    def key(*messages: ChatMessage, owner: str = "") -> str:
        said, _ = read_history(messages, owner)
        return said[-1].key

    assert key(ask, answer) == key(
        ChatMessage("user", " Go.\n"), ChatMessage("assistant", "Done.", "Hm.", answer.calls)
    )
    others = [
        key(ask, answer, owner="else"),
        key(ChatMessage("system", "x"), ask, answer),
        key(ask, answer, ask, answer),
        key(ask, ChatMessage("assistant", "Done.")),
        key(ChatMessage("system", "Go."), answer),
    ]
    assert len({key(ask, answer), *others}) == 1 + len(others)
    assert read_history([ask, answer], "")[1] != read_history([ask], "")[1]
    (said,), _ = read_history([ask, answer], "")
    assert (said.message_index, said.calls) == (1, ("call_1",))
