"""A tekken.json encodes as its format says: whole words first, then the pair whose token has the lowest rank."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.tekken import read_tekken
from adapters.text.tokenizer import Tokenizer

PATTERN = r" ?[a-z]+|\s+|."
SPECIAL = [
    {"rank": 0, "token_str": "<unk>", "is_control": True},
    {"rank": 1, "token_str": "<s>", "is_control": True},
    {"rank": 2, "token_str": "</s>", "is_control": True},
    {"rank": 3, "token_str": "[INST]", "is_control": True},
    {"rank": 5, "token_str": "[THINK]", "is_control": False},
]
COUNT = 8  # special tokens
# Not every token consists of two others ("whole" does not), and some do in several ways.
WORDS = [b"ab", b"bc", b"abc", b"aa", b"aaa", b" a", b" ab", "\u00e9".encode(), b"  ", b"bca", b"whole"]


def describe(**changes: object) -> dict:
    words = [bytes([one]) for one in range(256)] + WORDS
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    spare = {"rank": len(words), "token_bytes": base64.b64encode(b"beyond").decode()}
    config = {"pattern": PATTERN, "default_vocab_size": COUNT + len(words), "default_num_special_tokens": COUNT}
    return {"config": config | {"version": "v11"}, "vocab": [*vocab, spare], "special_tokens": SPECIAL, **changes}


def encode_plainly(text: str) -> list[int]:
    """The format's own algorithm, on bytes."""
    ranks = {word: rank for rank, word in enumerate([bytes([one]) for one in range(256)] + WORDS)}
    found = []
    for match in re.finditer(PATTERN, text, re.DOTALL):
        word = match[0].encode()
        parts = [word] if word in ranks else [bytes([one]) for one in word]
        while len(parts) > 1:
            joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
            at = joined.index(min(joined))
            if joined[at] == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [COUNT + ranks[part] for part in parts]
    return found


def save(folder: Path, described: dict) -> Path:
    (folder / "tekken.json").write_text(json.dumps(described))
    return folder


async def test_texts_become_the_tokens_of_the_format(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, describe()))
    draw = random.Random(1)
    texts = ["".join(draw.choice("aaabbc \u00e9w") for _ in range(60)) for _ in range(50)]
    texts += ["whole wholes", "abcabc  aaaa", "beyond"]
    found = await tokenizer.encode(texts)
    for text, tokens in zip(texts, found, strict=True):
        assert list(tokens) == encode_plainly(text), text
        assert tokenizer.decode(tokens) == text


async def test_special_tokens_come_first_and_are_found_in_prompts_alone(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, describe()))
    assert tokenizer.end_tokens == (2,)
    assert list(tokenizer.variables.values()) == ["<s>", "</s>"]
    assert {name: tokenizer.controls[name].id for name in ("[INST]", "<SPECIAL_4>", "[THINK]")} == {
        "[INST]": 3,
        "<SPECIAL_4>": 4,
        "[THINK]": 5,
    }
    (prompt,) = await tokenizer.encode(["[INST]ab"], controls=True, start=True)
    assert prompt == (1, 3, *encode_plainly("ab"))
    (text,) = await tokenizer.encode(["[INST]ab"])
    assert list(text) == encode_plainly("[INST]ab")
    assert tokenizer.decode((3, 5)) == "[THINK]", "a control token is not shown"
    assert tokenizer.size == COUNT + 256 + len(WORDS), "the file has more tokens than the model"


def test_files_without_a_list_have_the_tokens_of_early_models(tmp_path):
    described = describe(special_tokens=None)
    found = read_tekken(save(tmp_path, described) / "tekken.json")
    assert [one["content"] for one in found["added_tokens"]][:7] == [
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ]


def test_a_tokenizer_json_comes_first(tmp_path):
    save(tmp_path, describe())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": {}}, "config.pattern is not a text"),
        ({"vocab": []}, "vocab is not a list of at least"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}] * 267}, "entry 0 of vocab has no token_bytes at its own rank"),
        ({"vocab": [{"rank": at, "token_bytes": "YQ=="} for at in range(267)]}, "vocab has a token twice, or lacks"),
        ({"special_tokens": [{"rank": 8, "token_str": "x"}]}, "an entry that is not a text at a rank below 8"),
        ({"special_tokens": [{"rank": at, "token_str": "x"} for at in (0, 1)]}, "two of special_tokens have the same"),
        ({"special_tokens": [{"rank": 0, "token_str": "a"}]}, "a special token is spelt like a token of the"),
    ],
)
def test_files_that_are_not_made_so_are_refused_by_name(tmp_path, changes, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_tekken(save(tmp_path, describe(**changes)) / "tekken.json")
