"""However a text is cut into tokens, its stream is the whole decode, up to the first complete stop string."""

from __future__ import annotations

import itertools
import time

import pytest
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.checkpoint.byte_alphabet import BYTES
from adapters.text.answer.answer_pieces import (
    ArgumentsPiece,
    CallBegun,
    CallEnded,
    ReasoningPiece,
    TextPiece,
    join_text,
)
from adapters.text.detokenize import TextStream
from adapters.text.stop_strings import StopStrings
from adapters.text.tokenizer import Tokenizer
from tests.examples import count_examples

LETTERS = {byte: char for char, byte in BYTES.items()}
UNFINISHED = [
    b"\xf0\x9f\x98",
    b"\xe6\x9d",
    b"\xc3",
    b"\x80",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    "\ufffd".encode(),
]
UTF8 = st.binary(max_size=12) | st.text(max_size=6).map(str.encode) | st.sampled_from(UNFINISHED)


@define
class StoppedText:
    """An answer that is nothing but text, up to a stop string."""

    text: TextStream
    stops: StopStrings

    @staticmethod
    def of(tokenizer: Tokenizer, stops: tuple[str, ...]) -> StoppedText:
        return StoppedText(TextStream(tokenizer), StopStrings(stops))

    def push(self, token: int) -> str:
        return join_text(self.stops.push([TextPiece(self.text.push(token))]))

    def finish(self) -> str:
        return join_text([*self.stops.push([TextPiece(self.text.finish())]), *self.stops.finish()])


def stream(tokenizer: Tokenizer, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    text = StoppedText.of(tokenizer, stops)
    return [text.push(token) for token in tokens] + [text.finish()]


def until_stop(text: str, stops: tuple[str, ...]) -> str:
    """The definition, by search: the stop that is complete first, the longest of those that are."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=count_examples(300), deadline=None)
@given(data=st.data())
def test_any_tokens_stream_as_one_whole_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.size + 5), max_size=40))
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)


@settings(max_examples=count_examples(300), deadline=None)
@given(parts=st.lists(UTF8, max_size=8))
def test_any_bytes_stream_as_one_whole_decode(tokenizer: Tokenizer, parts: list[bytes]) -> None:
    tokens = [tokenizer.full.token_to_id(LETTERS[byte]) for byte in b"".join(parts)]
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens) == b"".join(parts).decode(errors="replace")


@settings(max_examples=count_examples(100), deadline=None)
@given(text=st.text(max_size=60))
def test_valid_text_streams_without_a_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    (tokens,) = tokenizer.encode_now([text])
    joined = "".join(stream(tokenizer, list(tokens)))
    assert joined == tokenizer.decode(tokens)
    assert joined.count("\ufffd") == text.count("\ufffd")


@settings(max_examples=count_examples(500), deadline=None)
@given(
    text=st.text("ab<é", max_size=30),
    stops=st.lists(st.text("ab<é", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    cuts=st.sets(st.integers(1, 60)),
)
def test_a_stop_string_ends_the_text_wherever_the_tokens_are_cut(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], cuts: set[int]
) -> None:
    raw = text.encode()
    borders = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    tokens = [
        token for start, end in itertools.pairwise(borders) for token in bytes_to_tokens(tokenizer, raw[start:end])
    ]
    expected = until_stop(text, stops)
    shown = ""
    for piece in stream(tokenizer, tokens, stops):
        shown += piece
        assert expected.startswith(shown), "part of a stop string leaked"
    assert shown == expected


def bytes_to_tokens(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    return [tokenizer.full.token_to_id(LETTERS[byte]) for byte in raw]


@settings(max_examples=count_examples(200), deadline=None)
@given(text=st.text("ab<", max_size=20), stop=st.text("ab<", min_size=1, max_size=5))
def test_no_more_is_held_back_than_what_may_begin_a_stop_string(tokenizer: Tokenizer, text: str, stop: str) -> None:
    stream = StoppedText.of(tokenizer, (stop,))
    shown = ""
    for count, token in enumerate(bytes_to_tokens(tokenizer, text.encode()), 1):
        shown += stream.push(token)
        if stream.stops.found_stop:
            return
        held = text[len(shown) : count]
        assert held == max((stop[:n] for n in range(len(stop)) if text[:count].endswith(stop[:n])), key=len)


def test_the_token_that_completes_a_stop_string_is_known(tokenizer: Tokenizer) -> None:
    tokens = bytes_to_tokens(tokenizer, b"one END two")
    text = StoppedText.of(tokenizer, ("END",))
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stops.found_stop:
            break
    assert (len(pieces), "".join(pieces), text.stops.found_stop) == (len("one END"), "one ", "END")
    assert text.finish() == ""


def test_a_stop_string_inside_an_emoji_sequence_waits_for_whole_characters(tokenizer: Tokenizer) -> None:
    family = "👩‍👩‍👧"
    tokens = bytes_to_tokens(tokenizer, f"a{family}b".encode())
    assert "".join(stream(tokenizer, tokens, ("\u200d👧",))) == "a👩‍👩"


def test_a_replacement_at_the_very_end_can_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, bytes_to_tokens(tokenizer, b"ok\xf0\x9f"), ("k\ufffd",)) == ["o", "", "", "", ""]


def test_control_tokens_and_hidden_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    hidden = tokenizer.full.token_to_id("a")
    text = TextStream(tokenizer, hidden_tokens={hidden})
    tokens = [1, *bytes_to_tokens(tokenizer, b"ba"), 2, tokenizer.controls["<think>"].id]
    assert "".join(text.push(token) for token in tokens) == "b<think>"


@pytest.mark.parametrize("stops", [(), ("a" * 256, "a" * 255 + "b")])
def test_a_token_costs_the_same_however_long_the_text_is(tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
    tokens = bytes_to_tokens(tokenizer, (b"a" * 200 + b"c") * 20)

    def seconds(repeats: int) -> float:
        text = StoppedText.of(tokenizer, stops)
        start = time.thread_time()
        for token in tokens * repeats:
            text.push(token)
        return (time.thread_time() - start) / repeats

    seconds(1)
    assert min(seconds(8) for _ in range(3)) < 4 * min(seconds(1) for _ in range(3))


def test_stop_strings_are_looked_for_in_the_text_of_an_answer_alone() -> None:
    """Not in reasoning, not in arguments, and not across them."""
    call = [CallBegun(0, "call0", "get"), ArgumentsPiece(0, '{"a": "STOP"}'), CallEnded(0)]
    pieces = [ReasoningPiece("a STOP"), TextPiece("b ST"), *call, TextPiece("OP c STOP d"), ReasoningPiece("e")]
    stops = StopStrings(("STOP",))
    said = [*stops.push(pieces), *stops.finish()]
    assert said == [ReasoningPiece("a STOP"), TextPiece("b "), TextPiece("ST"), *call, TextPiece("OP c ")]
    assert stops.found_stop == "STOP"
