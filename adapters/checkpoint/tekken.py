"""Turns Mistral's tekken.json into the content of a tokenizer.json.

A tekken.json has a vocabulary of byte strings by rank and an expression that cuts text into words. A word is encoded
like this: if it is in the vocabulary, it is one token. Otherwise it begins as single bytes, and the two neighbours
whose concatenation has the lowest rank are joined again and again.

This is byte-level BPE. Its merges are all the ways in which a token consists of two others, sorted by the token's rank.
Ids of the vocabulary follow those of the special tokens. Special tokens that have no name are called `<SPECIAL_17>`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from adapters.checkpoint.byte_alphabet import CHARACTERS
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import TOKENIZER, read_json, read_size

TEKKEN_FILE = "tekken.json"
FIRST = "<s>"
LAST = "</s>"
PADDING = "<pad>"
# The special tokens of files that do not list them, by rank.
UNLISTED = (
    "<unk>",
    FIRST,
    LAST,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    PADDING,
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
LONGEST = 1 << 10  # bytes of a token; published ones have up to 128


@frozen
class SpecialToken:
    text: str
    is_control: bool


def read_tekken(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json that encodes as this tekken.json says. Raises CheckpointError."""
    raw = read_json(path, TOKENIZER)
    config = raw.get("config")
    if not isinstance(config, Mapping) or not isinstance(config.get("pattern"), str):
        raise CheckpointError(f"{path}: config.pattern is not a text")
    size = read_size({"vocab_size": config.get("default_vocab_size")}, "vocab_size")
    count = read_size({"vocab_size": config.get("default_num_special_tokens")}, "vocab_size")
    special = read_special_tokens(path, raw.get("special_tokens"), count)
    words = read_words(path, raw.get("vocab"), size - count)
    spelt = [spell_bytes(word) for word in words]
    ids = {control_token.text: rank for rank, control_token in enumerate(special)}
    ids |= {word: count + rank for rank, word in enumerate(spelt)}
    if len(ids) != count + len(spelt):
        raise CheckpointError(f"{path}: a special token is spelt like a token of the vocabulary")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": list_added_tokens(special),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, {**byte_level, "use_regex": False}]},
        "post_processor": build_post_processor(ids),
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": True, "vocab": ids, "merges": list(list_merges(words, spelt))},
    }


def name_special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that chat templates know by name, as tokenizer_config.json has them."""
    known = tokenizer["model"]["vocab"]
    named = {"bos_token": FIRST, "eos_token": LAST, "pad_token": PADDING}
    return {name: text for name, text in named.items() if text in known}


def read_special_tokens(path: Path, listed: object, count: int) -> list[SpecialToken]:
    """Return the special tokens by rank."""
    found = [SpecialToken(f"<SPECIAL_{rank}>", is_control=True) for rank in range(count)]
    if listed is None:
        known = [SpecialToken(text, is_control=True) for text in UNLISTED[:count]]
        return [*known, *found[len(known) :]]
    if not isinstance(listed, Sequence):
        raise CheckpointError(f"{path}: special_tokens is not a list")
    for entry in listed:
        rank = entry.get("rank") if isinstance(entry, Mapping) else None
        text = entry.get("token_str") if isinstance(entry, Mapping) else None
        if not isinstance(rank, int) or not 0 <= rank < count or not isinstance(text, str) or not text:
            raise CheckpointError(f"{path}: special_tokens has an entry that is not a text at a rank below {count}")
        found[rank] = SpecialToken(text, is_control=entry.get("is_control") is not False)
    if len({control_token.text for control_token in found}) != count:
        raise CheckpointError(f"{path}: two of special_tokens have the same text")
    return found


def read_words(path: Path, listed: object, count: int) -> list[bytes]:
    """Return the byte strings of the first `count` ranks."""
    if not isinstance(listed, Sequence) or not 256 <= count <= len(listed):
        raise CheckpointError(f"{path}: vocab is not a list of at least {max(count, 256)} tokens")
    words = list[bytes]()
    for rank, entry in enumerate(listed[:count]):
        written = entry.get("token_bytes") if isinstance(entry, Mapping) and entry.get("rank") == rank else None
        try:
            word = base64.b64decode(written, validate=True) if isinstance(written, str) else b""
        except binascii.Error:
            word = b""
        if not 1 <= len(word) <= LONGEST:
            raise CheckpointError(f"{path}: entry {rank} of vocab has no token_bytes at its own rank")
        words.append(word)
    if len(set(words)) != count or {word for word in words if len(word) == 1} != {bytes([byte]) for byte in range(256)}:
        raise CheckpointError(f"{path}: vocab has a token twice, or lacks a byte")
    return words


def spell_bytes(word: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in word)


def list_merges(words: Sequence[bytes], spelt: Sequence[str]) -> Iterator[list[str]]:
    """Yield every way in which a token consists of two others, by the token's rank and then by theirs."""
    ranks = {word: rank for rank, word in enumerate(words)}
    for word in words:
        ways = [
            (ranks[word[:cut]], ranks[word[cut:]])
            for cut in range(1, len(word))
            if word[:cut] in ranks and word[cut:] in ranks
        ]
        for left, right in sorted(ways):
            yield [spelt[left], spelt[right]]


def list_added_tokens(special: Sequence[SpecialToken]) -> list[dict[str, Any]]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": rank, "content": control_token.text, **plain, "special": control_token.is_control}
        for rank, control_token in enumerate(special)
    ]


def build_post_processor(ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the post-processor that puts the first token before a text; None: there is no such token."""
    if FIRST not in ids:
        return None
    token = {"SpecialToken": {"id": FIRST, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {FIRST: {"id": FIRST, "ids": [ids[FIRST]], "tokens": [FIRST]}},
    }
