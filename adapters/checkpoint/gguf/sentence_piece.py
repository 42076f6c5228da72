"""Turns a SentencePiece vocabulary of a GGUF file into the form of tokenizer.json.

With `tokenizer.ggml.model` 'llama', the file has a score for each token and no merges. SentencePiece joins the two
neighbours whose joined text has the best score. So every way to make a token from two others is a merge, in the order
of scores. Hugging Face's converter of such models does the same. With 'gemma4', the file has the merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.gguf.header import GgufHeader

SPACE = "\u2581"  # how a vocabulary writes a space
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MAX_TOKEN_CHARS = 1024  # characters of a token; published vocabularies have up to 93
# Characters of all tokens. There are as many ways to cut a token in two, which takes a few seconds. The largest
# published vocabulary has 2 million.
MAX_VOCABULARY_CHARS = 1 << 23


def check_bytes(header: GgufHeader, ids: Mapping[str, int]) -> None:
    """Raise CheckpointError for a vocabulary that lacks a byte."""
    if missing := [byte for byte in BYTES if byte not in ids]:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens lacks {len(missing)} bytes, {missing[0]} for one")


def build_tokenizer_parts(
    header: GgufHeader, ids: Mapping[str, int], merges: Sequence[Sequence[str]], *, adds_space: bool
) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of a tokenizer.json.

    adds_space: a text gets a space before it unless the metadata say otherwise.
    """
    prefix = header.fields.get("tokenizer.ggml.add_space_prefix", adds_space)
    if not isinstance(prefix, bool):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.add_space_prefix {describe_value(prefix)} is neither true nor false"
        )
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    shows = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        shows.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": shows},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": ids,
            "merges": merges,
        },
    }


def build_merges(
    header: GgufHeader, tokens: Sequence[str], ids: Mapping[str, int], whole: Sequence[str]
) -> list[list[str]]:
    """Return the merges: best score first, and equal scores in the order of the vocabulary.

    whole: tokens that no merge makes.
    """
    name = "tokenizer.ggml.scores"
    scores = header.read_floats(name)
    if len(scores) != len(tokens) or not all(map(isfinite, scores)):
        raise CheckpointError(f"{header.path}: {name} is not a number for each of {len(tokens)} tokens")
    apart = {*whole, *BYTES}
    made = {token: id_ for token, id_ in ids.items() if token not in apart}
    longest = max(map(len, made), default=0)
    if longest > MAX_TOKEN_CHARS or sum(map(len, made)) > MAX_VOCABULARY_CHARS:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.tokens has a token of {longest} characters, {sum(map(len, made))} in all;"
            f" accepted: up to {MAX_TOKEN_CHARS} and {MAX_VOCABULARY_CHARS}"
        )
    found = list[list[str]]()
    for token in sorted(made, key=lambda token: (-scores[made[token]], made[token])):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        found += ([left, right] for left, right in cuts if left in made and right in made)
    return found
