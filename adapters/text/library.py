"""A tokenizer of the `tokenizers` library, made of what a tokenizer.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

SETTINGS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
COMMENT = "#version"  # of a file of merges: the library passes such a line over


def made(described: Mapping[str, Any]) -> Tokenizer:
    """The library takes a large vocabulary from the interpreter, which waits meanwhile, in half the time that it needs
    to read one. The tokenizer is the same.
    """
    model, added = described["model"], described.get("added_tokens") or ()
    pairs = merges_of(model)
    if pairs is None or any(flag not in token for token in added for flag in FLAGS):
        return Tokenizer.from_buffer(msgspec.json.encode(described))
    rest = {**described, "added_tokens": (), "model": {"type": "BPE", "vocab": {}, "merges": ()}}
    tokenizer = Tokenizer.from_buffer(msgspec.json.encode(rest))
    given = {name: model[name] for name in SETTINGS if model.get(name) is not None}
    tokenizer.model = BPE(model["vocab"], pairs, **given)
    for special, tokens in groupby(added, itemgetter("special")):  # in their order, which numbers them
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(**{flag: token[flag] for flag in FLAGS}) for token in tokens])
    return tokenizer


def merges_of(model: Mapping[str, Any]) -> Sequence[tuple[str, str]] | None:
    """As pairs. None where there are none, or anything is not as it should be: what, the library says best."""
    merges = model.get("merges")
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict) or not isinstance(merges, list):
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
    plain = Tokenizer(full.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(full, part)) is not None:
            setattr(plain, part, found)
    return plain
