"""A tokenizer of the `tokenizers` library, made of what a tokenizer.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Model

SETTINGS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
COMMENT = "#version"  # of a file of merges: the library passes such a line over


def made(described: Mapping[str, Any]) -> Tokenizer:
    """The library takes a large vocabulary from the interpreter, which waits meanwhile, in half the time that it needs
    to read one. The tokenizer is the same, but that it neither truncates nor pads.
    """
    model, pairs = described["model"], merges_of(described["model"])
    if pairs is None:
        return unbounded(Tokenizer.from_buffer(msgspec.json.encode(described)))
    small = {**described, "model": {**model, "vocab": {}, "merges": ()}}
    read = Tokenizer.from_buffer(msgspec.json.encode(small))  # says what is wrong with any of it
    given = {name: model[name] for name in SETTINGS if model.get(name) is not None}
    tokenizer = with_parts(read, BPE(model["vocab"], pairs, **given))
    added = described.get("added_tokens", ())
    tokenizer.add_tokens([AddedToken(**{flag: token[flag] for flag in FLAGS}) for token in added])
    return tokenizer


def unbounded(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def with_parts(other: Tokenizer, model: Model) -> Tokenizer:
    """With that model, and what another one has around its own: added tokens it has none."""
    tokenizer = Tokenizer(model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(other, part)) is not None:
            setattr(tokenizer, part, found)
    return tokenizer


def merges_of(model: Mapping[str, Any]) -> Sequence[tuple[str, str]] | None:
    """As pairs. None where there are none, or anything is not as it should be: what, the library says best."""
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not isinstance(merges, list):
        return None
    if not {*map(type, vocabulary.values())} <= {int}:
        return None
    kinds = {*map(type, merges)}
    if not kinds <= {list} and (not kinds <= {str} or any(one.startswith(COMMENT) for one in merges)):
        return None
    try:
        return [(left, right) for left, right in ((one.split(" ") for one in merges) if str in kinds else merges)]
    except ValueError:
        return None


def beside(full: Tokenizer) -> Tokenizer:
    """One that has the same model, not a copy of it, and no added tokens: a large vocabulary takes 0.3 s to read."""
    return with_parts(full, full.model)
