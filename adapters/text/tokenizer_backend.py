"""Builds a tokenizer of the `tokenizers` library from the content of a tokenizer.json."""

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
COMMENT = "#version"  # the library skips such a line of a file of merges


def build_backend(described: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer that neither truncates nor pads.

    A large vocabulary is handed over as Python objects, which takes half as long as parsing it from JSON. The GIL is
    held meanwhile.
    """
    model = described["model"]
    pairs = read_merges(model)
    if pairs is None:
        return disable_truncation(Tokenizer.from_buffer(msgspec.json.encode(described)))
    small = {**described, "model": {**model, "vocab": {}, "merges": ()}}
    read = Tokenizer.from_buffer(msgspec.json.encode(small))  # raises an error that says what is wrong
    given = {name: model[name] for name in SETTINGS if model.get(name) is not None}
    tokenizer = copy_parts(read, BPE(model["vocab"], pairs, **given))
    added = described.get("added_tokens", ())
    tokenizer.add_tokens([AddedToken(**{flag: token[flag] for flag in FLAGS}) for token in added])
    return tokenizer


def disable_truncation(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def copy_parts(other: Tokenizer, model: Model) -> Tokenizer:
    """Return a tokenizer with `model` and the other parts of `other`, but without added tokens."""
    tokenizer = Tokenizer(model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(other, part)) is not None:
            setattr(tokenizer, part, found)
    return tokenizer


def read_merges(model: Mapping[str, Any]) -> Sequence[tuple[str, str]] | None:
    """Return the merges as pairs. None: there are none, or they are malformed and the library says how."""
    vocabulary = model.get("vocab")
    merges = model.get("merges")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not isinstance(merges, list):
        return None
    if not {*map(type, vocabulary.values())} <= {int}:
        return None
    kinds = {*map(type, merges)}
    if not kinds <= {list} and (not kinds <= {str} or any(merge.startswith(COMMENT) for merge in merges)):
        return None
    try:
        return [(left, right) for left, right in ((merge.split(" ") for merge in merges) if str in kinds else merges)]
    except ValueError:
        return None


def share_model(full: Tokenizer) -> Tokenizer:
    """Return a tokenizer without added tokens that shares the model. Reading a large vocabulary again takes 0.3 s."""
    return copy_parts(full, full.model)
