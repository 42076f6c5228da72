"""A tokenizer that is put together is the one that the library would have read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.tokenizer import build_tokenizer
from adapters.text.tokenizer_backend import COMMENT, build_backend, read_merges
from tests.text import small

SMALL: Mapping[str, Any] = json.loads(small.train().to_str())
DEMO: Mapping[str, Any] = json.loads((demo.FOLDER / "tokenizer.json").read_text())
TEXTS = [
    "Hello, world.",
    "  a\tb\n\nc 12345 d\u00e9j\u00e0 \u4e2d\U0001f600<|im_start|>user<|im_end|>",
    "<unk> </s> [x] ##a",
]


def read(described: Mapping[str, Any]) -> Tokenizer:
    found = Tokenizer.from_str(json.dumps(described))
    found.no_truncation()
    found.no_padding()
    return found


def legacy(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description as files were written before pairs were lists."""
    merges = [one if isinstance(one, str) else " ".join(one) for one in described["model"]["merges"]]
    return {**described, "model": {**described["model"], "merges": merges}}


def with_model(**settings: object) -> Mapping[str, Any]:
    return {**SMALL, "model": {**SMALL["model"], **settings}}


def token(content: str, number: int, **flags: bool) -> Mapping[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **plain, **flags}


def with_added(*tokens: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**SMALL, "added_tokens": [*SMALL["added_tokens"], *tokens]}


GAPS = {**SMALL["model"], "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 9}, "merges": [["a", "b"]]}  # ids leave some out
SIZE = len(SMALL["model"]["vocab"]) + len(SMALL["added_tokens"])


@pytest.mark.parametrize(
    "described",
    [
        SMALL,
        DEMO,
        legacy(SMALL),
        legacy(DEMO),
        with_model(dropout=0.5),
        with_model(unk_token="<unk>", fuse_unk=True),  # noqa: S106 - a tokenizer's
        with_model(continuing_subword_prefix="", end_of_word_suffix="", byte_fallback=True),
        with_model(ignore_merges=True),
        with_added(token("[x]", SIZE), token("<s>", SIZE + 1, special=True), token("[y]", SIZE + 2, normalized=True)),
        with_added(token("one", SIZE, single_word=True, lstrip=True), token("e", 0, rstrip=True)),
        {**SMALL, "model": GAPS, "added_tokens": [token("<s>", 9, special=True), token("x", 10)]},
        {**SMALL, "model": GAPS, "added_tokens": [token("x", 10), token("<s>", 9, special=True), token("y", 3)]},
        {name: part for name, part in SMALL.items() if name != "added_tokens"},
        {**SMALL, "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        {**SMALL, "added_tokens": []},
    ],
)
def test_it_is_the_one_that_would_have_been_read(described: Mapping[str, Any]) -> None:
    assert read_merges(described["model"]) is not None
    ours, theirs = build_backend(described), read(described)
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())
    if described["model"].get("dropout") is None:
        assert [ours.encode(text).ids for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize(
    "model",
    [
        {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        {**legacy(SMALL)["model"], "merges": [f"{COMMENT}: 0.2", *legacy(SMALL)["model"]["merges"]]},
    ],
)
def test_other_models_are_read(model: Mapping[str, Any]) -> None:
    assert read_merges(model) is None
    described = {**SMALL, "model": model}
    assert json.loads(build_backend(described).to_str()) == json.loads(read(described).to_str())


WRONG = (["a b c"], [["a"]], [["a", "b"], "a b"], [5], [["a", 5]], [["a", "never there"]], 5, None)


@pytest.mark.parametrize("merges", WRONG)
def test_what_is_wrong_with_merges_is_told(merges: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: .+"):
        build_tokenizer(with_model(merges=merges), {})


LACKING = {"id": SIZE, "content": "[x]", "lstrip": False, "rstrip": False, "special": False}
MISTAKEN = [{**token("[x]", SIZE), "id": one} for one in (-1, 2**32, "5", None, 5.0)]


@pytest.mark.parametrize("one", [LACKING, *MISTAKEN])
def test_what_is_wrong_with_a_token_is_told(one: Mapping[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Cannot instantiate Tokenizer"):
        build_tokenizer(with_added(one), {"eos_token": "[x]"})


@pytest.mark.parametrize(
    "described", [with_model(dropout=True), with_model(vocab={**SMALL["model"]["vocab"], "x": True})]
)
def test_what_is_wrong_with_a_model_is_told(described: Mapping[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Cannot instantiate Tokenizer"):
        build_tokenizer(described, {})
