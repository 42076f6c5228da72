"""Tests that the explanation of a miss names a place in a prompt by its message and by both texts around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, ToolCall
from adapters.text.explain_miss import CONTEXT_CHARS, MissExplanation, explain_miss
from adapters.text.model_text import Text
from effects.job import Job
from effects.ports import MAX_DIVERGED_TOKENS, Divergence

CALL = ToolCall("c1", "lookup", '{"city": "Rome"}')
TALK = [
    ChatMessage("system", "Be brief and kind."),
    ChatMessage("user", "Hello, world! How are you?"),
    ChatMessage("assistant", "", calls=(CALL,)),
    ChatMessage("tool", "Sunny, 東京 😀", answered_call_id="c1"),
    ChatMessage("user", "And in 1234 words, then?"),
]


async def explained(text: Text, sent: Conversation, kept: Conversation) -> MissExplanation:
    """Return the explanation if `kept` is there and `sent` comes."""
    one, other = (await text.build_prompt(sent)).tokens, (await text.build_prompt(kept)).tokens
    at = next(place for place, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)
    job = Job(one, 1, boundaries=text.openings.find_boundaries(one))
    return explain_miss(
        Divergence(at, other[at : at + MAX_DIVERGED_TOKENS], "device"), job, sent.messages, text.tokenizer
    )


def changed(place: int, **to: object) -> list[ChatMessage]:
    messages = [*TALK]
    messages[place] = ChatMessage(**{"role": TALK[place].role, "answered_call_id": TALK[place].answered_call_id, **to})  # type: ignore[arg-type]
    return messages


@pytest.mark.parametrize(
    ("kept", "message", "sent", "other"),
    [
        (changed(0, content="Be quick."), 0, "Be brief and", "Be quick."),
        (changed(1, content="Hello, world! Who"), 1, "Hello, world! How are", "Hello, world! Who<|im_end|>"),
        (changed(2, calls=(ToolCall("c1", "lookup", '{"city": "Bern"}'),)), 2, '"city": "Rome"', '"city": "Bern"'),
        (changed(3, content="Rain"), 3, "<tool_response>\nSunny, 東京 😀", "<tool_response>\nRain\n</tool"),
        (changed(4, role="assistant", content="And in"), 4, "<|im_start|>user\nAnd in", "<|im_start|>assistant\nAnd"),
    ],
    ids=["system", "user", "call", "tool", "role"],
)
async def test_the_message_and_both_texts(
    folder: Path, kept: list[ChatMessage], message: int, sent: str, other: str
) -> None:
    text = Text.load(folder)
    try:
        await text.check()
        explanation = await explained(text, Conversation(TALK), Conversation(kept))
        assert (explanation.message, explanation.role) == (message, TALK[message].role)
        assert sent in explanation.sent
        assert other in explanation.kept
        assert max(len(explanation.sent), len(explanation.kept)) <= 2 * CONTEXT_CHARS
    finally:
        await text.aclose()


async def test_a_change_in_tools_is_before_all_messages(folder: Path) -> None:
    text = Text.load(folder)
    try:
        await text.check()
        talk = [ChatMessage("user", "Hello")]
        one, other = (Conversation(talk, [FunctionTool(name)]) for name in ("read", "write"))
        explanation = await explained(text, one, other)
        assert (explanation.message, explanation.role) == (None, None)
        assert '"name": "read"' in explanation.sent
        assert '"name": "write"' in explanation.kept
    finally:
        await text.aclose()


def test_a_prompt_of_no_messages_has_texts_alone(folder: Path) -> None:
    tokenizer = Text.load(folder).tokenizer
    prompt, other = (tokenizer.encode_now([f"{'x' * 100} {word} {'y' * 100}"])[0] for word in ("one", "two"))
    at = next(place for place, (mine, its) in enumerate(zip(prompt, other, strict=False)) if mine != its)
    explanation = explain_miss(Divergence(at, other[at:][:MAX_DIVERGED_TOKENS], "disk"), Job(prompt, 1), (), tokenizer)
    assert (explanation.message, explanation.at, explanation.tier) == (None, at, "disk")
    assert len(explanation.sent) == len(explanation.kept) == 2 * CONTEXT_CHARS
    assert explanation.sent.startswith("x" * (CONTEXT_CHARS - 2))
    assert " two yyy" in explanation.kept


def test_a_character_that_is_cut_in_two_is_left_out(folder: Path) -> None:
    tokenizer = Text.load(folder).tokenizer
    prompt, other = (tokenizer.encode_now([text])[0] for text in ("a鿿b", "a鿾b"))
    at = next(place for place, (mine, its) in enumerate(zip(prompt, other, strict=False)) if mine != its)
    explanation = explain_miss(Divergence(at, other[at:], "host"), Job(prompt, 1), (), tokenizer)
    assert (explanation.sent, explanation.kept) == ("ab", "ab")
