"""Cuts in messages are found in the prompt's tokens, or not at all."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.text.conversation import ChatMessage, Conversation
from adapters.text.model_text import Text
from adapters.text.shared_cuts import MAX_CUTS, find_cut_positions
from adapters.text.template import join_rendered
from adapters.text.tokenizer import Tokenizer


async def places(text: Text, messages: list[ChatMessage]) -> list[str]:
    """Return the text before each cut of the prompt."""
    prompt = await text.build_prompt(Conversation(messages))
    return [text.tokenizer.decode(prompt.tokens[:cut], special=True) for cut in prompt.cuts]


async def test_cuts_of_several_messages_are_found_in_their_order(folder: Path) -> None:
    text = Text.load(folder)
    try:
        await text.check()
        twice = "Hello, world! "
        messages = [
            ChatMessage("system", "Be brief.\nHello, world!", cuts=(9,)),
            ChatMessage("user", twice + twice + "and more", cuts=(14, 28)),
            ChatMessage("assistant", "Well."),
            ChatMessage("user", "Ünd größer 😀 so", cuts=(12,)),
        ]
        found = await places(text, messages)
        ends = ("Be brief.", "user\nHello, world!", "Hello, world! Hello, world!", "Ünd größer 😀")
        assert len(found) == 4
        for before, end in zip(found, ends, strict=True):
            assert before.endswith(end), before
        assert await places(text, [ChatMessage("user", "e\u0301 and more", cuts=(3,))]) == [], "it is normalized"
        assert await places(text, [ChatMessage("user", "   and more", cuts=(2,))]) == []
        assert len(await places(text, [ChatMessage("user", "x " * 100, cuts=tuple(range(1, 199, 2)))])) <= MAX_CUTS
    finally:
        await text.aclose()


@given(
    contents=st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=30), max_size=4)
)
def test_a_cut_never_stands_behind_what_it_is_to_be_before(tokenizer: Tokenizer, contents: list[str]) -> None:
    messages = [ChatMessage("user", content, cuts=(len(content) // 2, len(content))) for content in contents]
    rendered = tuple(f"<{content}>" for content in contents)
    (tokens,) = tokenizer.encode_now([join_rendered(rendered)])
    found = find_cut_positions(messages, rendered, tuple(tokens), tokenizer)
    sizes = [0, *accumulate(len(tokenizer.token_bytes(token)) for token in tokens)]
    ends = {
        at + len(head)
        for content in contents
        for head in (content[: len(content) // 2].strip(), content.strip())
        for at in range(len(join_rendered(rendered)))
        if head and join_rendered(rendered).startswith(head, at)
    }
    for cut in found:
        assert any(sizes[cut] <= end and (cut == len(tokens) or end < sizes[cut + 1]) for end in ends)


@pytest.mark.parametrize("text", ["", "Hello"])
def test_without_cuts_there_are_none(tokenizer: Tokenizer, text: str) -> None:
    (tokens,) = tokenizer.encode_now([text])
    assert find_cut_positions([ChatMessage("user", text)], (text,), tuple(tokens), tokenizer) == ()
