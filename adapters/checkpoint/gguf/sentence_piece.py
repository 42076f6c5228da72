"""A SentencePiece vocabulary of a GGUF file (`tokenizer.ggml.model` 'llama') as tokenizer.json would have it.

The file has a score for each token and no merges: SentencePiece joins the two neighbours whose text together has the
best one. So every way to make a token of two others is a merge, in the order of scores, as Hugging Face's converter of
such models has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from adapters.checkpoint.checkpoint_error import CheckpointError, shown
from adapters.checkpoint.gguf.header import GgufHeader

SPACE = "\u2581"  # how a vocabulary writes a space
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LONGEST = 1024  # characters of a token; published vocabularies have up to 93
MOST = 1 << 23  # of all tokens: as many ways to cut them in two, a few seconds; the largest published one has 2 million


def parts(header: GgufHeader, tokens: Sequence[str], ids: Mapping[str, int], whole: Sequence[str]) -> dict[str, Any]:
    """normalizer, pre_tokenizer, decoder and model of a tokenizer.json. whole: tokens that no text is merged to."""
    if missing := [byte for byte in BYTES if byte not in ids]:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens lacks {len(missing)} bytes, {missing[0]} for one")
    prefix = header.fields.get("tokenizer.ggml.add_space_prefix", True)
    if not isinstance(prefix, bool):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.add_space_prefix {shown(prefix)} is neither true nor false"
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
            "merges": merges(header, tokens, ids, {*whole, *BYTES}),
        },
    }


def merges(header: GgufHeader, tokens: Sequence[str], ids: Mapping[str, int], whole: set[str]) -> list[list[str]]:
    """Best score first; among equal ones in the order of the vocabulary."""
    name = "tokenizer.ggml.scores"
    scores = header.floats(name)
    if len(scores) != len(tokens) or not all(map(isfinite, scores)):
        raise CheckpointError(f"{header.path}: {name} is not a number for each of {len(tokens)} tokens")
    made = {token: id_ for token, id_ in ids.items() if token not in whole}
    longest = max(map(len, made), default=0)
    if longest > LONGEST or sum(map(len, made)) > MOST:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.tokens has a token of {longest} characters, {sum(map(len, made))} in all;"
            f" accepted: up to {LONGEST} and {MOST}"
        )
    found = list[list[str]]()
    for token in sorted(made, key=lambda token: (-scores[made[token]], made[token])):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        found += ([left, right] for left, right in cuts if left in made and right in made)
    return found
