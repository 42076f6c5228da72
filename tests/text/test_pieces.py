"""Cutting a text changes none of its tokens, and no text has fewer tokens than was said before reading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from adapters import demo
from adapters.checkpoint.split_patterns import GPT2, QWEN
from adapters.text import token_pieces
from adapters.text.token_pieces import KNOWN, TokenBounds, batch_pieces, derive_bounds, min_byte_length
from adapters.text.token_spelling import Spelling
from adapters.text.tokenizer import ClientLeft, TooManyTokens
from adapters.text.tokenizer import Tokenizer as Ours
from tests.examples import count_examples
from tests.text import small

# what pre-tokenizers and normalizers treat in ways of their own
ODD = "aZ\u4e00\u9fa5 \n\r\t'\u2019.,;:-_|<>[]{}0159\u00e4\u00df\u017f\u0130A\u030a\u0301\u0338\u1100\u1161\u11a8"
ODD += "\uac00\u3002\uff0c\u3099\u200d\u2028\u00a0\U0001f600"
WORDS = ["'s", "'LL", "don't ", "  ", "\n\n", "word", "<|im_end|>", " <tool_call>", "\u6771\u4eac\u3002"]
TEXTS = st.lists(st.sampled_from([*ODD, *WORDS]) | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)


def described(regex: str | None = None) -> dict[str, Any]:
    """The small tokenizer, byte-level with this expression, or with GPT-2's as ByteLevel has it."""
    tokenizer = small.train()
    if regex is not None:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return {**found, "added_tokens": []}


def demos() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((demo.FOLDER / "tokenizer.json").read_text())
    return {**found, "added_tokens": []}


CASES = {"gpt2": described(), "the demo": demos(), **{f"regex {n}": described(regex) for n, regex in enumerate(KNOWN)}}
BUILT = {name: Tokenizer.from_str(json.dumps(case)) for name, case in CASES.items()}


@settings(max_examples=count_examples(40), deadline=None)
@pytest.mark.parametrize("name", CASES)
@given(text=TEXTS)
def test_pieces_have_the_tokens_of_the_whole_and_no_fewer_than_was_said(name: str, text: str) -> None:
    knowledge, tokenizer = derive_bounds(CASES[name], Spelling()), BUILT[name]
    assert knowledge.can_cut
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_pieces, "PIECE_CHARS", 1)  # cut wherever it can be
        parts = list(knowledge.iterate_pieces(text))
    assert "".join(parts) == text
    assert [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids] == whole
    assert knowledge.min_tokens(min_byte_length(text)) <= len(whole)
    assert min_byte_length(text) <= knowledge.most_bytes(len(whole))


def test_a_long_text_is_cut_into_portions_of_one_size() -> None:
    knowledge = TokenBounds(22, can_cut=True)
    text = "word and another " * 20_000
    portions = [[piece for _, piece in run] for run in batch_pieces([text, "x", "y"], knowledge)]
    assert [len(portion) for portion in portions[:-1]] == [1] * (len(portions) - 1)
    assert all(token_pieces.PIECE_CHARS <= len(portion[0]) < token_pieces.PIECE_CHARS + 20 for portion in portions[:-1])
    assert "".join(piece for portion in portions for piece in portion) == text + "xy"
    assert list(batch_pieces(["ab"] * 3, knowledge)) == [[(0, "ab"), (1, "ab"), (2, "ab")]]
    assert list(TokenBounds(22).iterate_pieces(text)) == [text]


def changed(**more: Any) -> dict[str, Any]:
    return {**described(QWEN), **more}


UNKNOWN = {
    "another expression": described(r"\p{L}+ ?|\s+|[^\s\p{L}]+"),
    "a prefix space": changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
    "none": changed(pre_tokenizer=None),
    "bytes only": changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
    "removed": changed(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Removed", "invert": False}
    ),
    "stripped": changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "dropout": changed(model={**described()["model"], "dropout": 0.1}),
    "a byte without a token": changed(
        model={**described()["model"], "vocab": {k: v for k, v in described()["model"]["vocab"].items() if k != "a"}}
    ),
    "a token that swallows": changed(added_tokens=[{"content": "<x>", "lstrip": True}]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_for_certain_is_neither_cut_nor_counted(name: str) -> None:
    knowledge = derive_bounds(UNKNOWN[name], Spelling())
    assert (knowledge.max_token_bytes, knowledge.can_cut) == (0, False)
    assert knowledge.min_tokens(10**9) == 0
    assert knowledge.most_bytes(1000) == 64_000


def test_an_added_token_over_a_cut_keeps_the_text_whole() -> None:
    knowledge = derive_bounds(changed(added_tokens=[{"content": "<|im_end|>"}]), Spelling())
    assert (knowledge.max_token_bytes > 0, knowledge.can_cut) == (True, False)


async def test_encoding_ends_where_it_is_too_long_or_nobody_waits(tokenizer: Ours) -> None:
    text = "fox jumps, " * 40_000

    async def gone() -> bool:
        return True

    whole = tokenizer.encode_now([text])
    assert await tokenizer.encode([text], max_tokens=len(whole[0])) == whole
    with pytest.raises(TooManyTokens) as error:
        await tokenizer.encode([text], max_tokens=len(whole[0]) - 1)
    assert error.value.tokens == len(whole[0])
    with pytest.raises(ClientLeft):
        await tokenizer.encode([text], is_disconnected=gone)
    assert await tokenizer.encode(["short"], is_disconnected=gone) == tokenizer.encode_now(["short"])


async def test_what_goes_before_a_text_is_put_there_once(tmp_path: Path) -> None:
    described = json.loads((small.write(tmp_path) / "tokenizer.json").read_text())
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": special},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer, text = Ours.load(tmp_path), "fox jumps, " * 20_000
    assert await tokenizer.encode([text, "", "x"], start=True) == tokenizer.encode_now([text, "", "x"], start=True)
    assert (await tokenizer.encode(["x"], start=True))[0][0] == 0
