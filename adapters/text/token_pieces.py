"""Bounds on the tokens of a text: which text is too long without encoding it, and where a text may be cut.

Both follow from tokenizer.json, if its parts are of known kinds.

1. A token of a byte-level vocabulary stands for at most as many bytes as the longest one. So the length of a text in
   bytes gives the least number of its tokens.
2. Every known pre-tokenizer ends a word between a letter and a sign other than an apostrophe, whatever follows. None
   of their expressions continues from a letter to anything but a letter, its mark or an apostrophe, and none looks
   back. NFC composes nothing across such a position either. So a text may be cut there: the parts have the tokens of
   the whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from adapters.checkpoint.byte_alphabet import BYTES
from adapters.checkpoint.split_patterns import GPT2, LLAMA3, O200K, QWEN, QWEN35, SEED, TEKKEN
from adapters.text.token_spelling import SPACE, Spelling

PIECE_CHARS = 1 << 16  # encoding one piece takes some 20 ms
CUT = re.compile("(?<=[A-Za-z\u4e00-\u9fa5])(?=[\\x00-&(-@\\[-`{-\\x7f\u3001\u3002\uff0c])")
SHRINKS = 3  # NFC turns three Hangul jamo of three bytes each into one syllable of three bytes
LONG_TEXT_CHARS = 1 << 20
ASSUMED_TOKEN_BYTES = 64  # for the limit in bytes where nothing is known

KNOWN = (GPT2, QWEN, LLAMA3, QWEN35, SEED, TEKKEN, O200K)
Added: TypeAlias = Mapping[str, Any]  # a token of tokenizer.json's `added_tokens`


@frozen
class TokenBounds:
    """The bounds that are known of a tokenizer.

    max_token_bytes: one token stands for at most this many bytes. 0: this is not known.
    can_cut: a text may be cut where `CUT` matches.
    """

    max_token_bytes: int = 0
    can_cut: bool = False

    def min_tokens(self, size: int) -> int:
        """Return the least number of tokens of a text with `size` bytes. 0: this is not known."""
        return -(-size // self.max_token_bytes) if self.max_token_bytes else 0

    def most_bytes(self, tokens: int) -> int:
        """Return the greatest size in bytes of a text that may have at most `tokens` tokens."""
        return tokens * (self.max_token_bytes or ASSUMED_TOKEN_BYTES)

    def iterate_pieces(self, text: str) -> Iterator[str]:
        """Yield the text in parts of about 64 Ki characters, which have the tokens of the whole."""
        start = 0
        while self.can_cut and len(text) - start > PIECE_CHARS and (found := CUT.search(text, start + PIECE_CHARS)):
            yield text[start : found.start()]
            start = found.start()
        yield text[start:] if start else text


def min_byte_length(text: str) -> int:
    """Return the size of a text in UTF-8. For a long text this is a lower bound, since encoding it would take time."""
    return len(text) if len(text) > LONG_TEXT_CHARS or text.isascii() else len(text.encode())


def batch_pieces(texts: Sequence[str], knowledge: TokenBounds) -> Iterator[list[tuple[int, str]]]:
    """Yield the pieces of all texts, each with the index of its text, in batches of about 64 Ki characters."""
    run = list[tuple[int, str]]()
    size = 0
    for index, text in enumerate(texts):
        for piece in knowledge.iterate_pieces(text):
            if run and size + len(piece) > PIECE_CHARS:
                yield run
                run = []
                size = 0
            run.append((index, piece))
            size += len(piece)
    if run:
        yield run


def derive_bounds(described: Mapping[str, Any], spelling: Spelling) -> TokenBounds:
    """Return the bounds of a tokenizer, from the content of its tokenizer.json."""
    return derive_bounds_for(described, spelling, [described.get("added_tokens") or ()])[0]


def derive_bounds_for(
    described: Mapping[str, Any], spelling: Spelling, lists: Sequence[Sequence[Added]]
) -> list[TokenBounds]:
    """Return the bounds for each list of added tokens. This goes through the vocabulary only once."""
    model = described.get("model") or {}
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, Mapping) or model.get("type", "BPE") != "BPE" or model.get("dropout"):
        return [TokenBounds()] * len(lists)
    if spelling.sentence_piece:
        return [
            derive_sentence_piece_bounds(described, [*vocabulary, *(token["content"] for token in added)])
            for added in lists
        ]
    shrinks = find_shrinkage(described.get("normalizer"))
    if not (shrinks and splits_words(described.get("pre_tokenizer")) and BYTES.keys() <= vocabulary.keys()):
        return [TokenBounds()] * len(lists)
    longest = find_longest_token(vocabulary)
    return [count_added_tokens(added, longest, shrinks) for added in lists]


def count_added_tokens(added: Sequence[Added], longest: int, shrinks: int) -> TokenBounds:
    """Return the bounds with these added tokens.

    longest: bytes of the vocabulary's longest token. shrinks: how many times longer the text may be before NFC.
    """
    if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
        return TokenBounds()
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return TokenBounds(shrinks * longest, not any(CUT.search(token["content"]) for token in added))


def find_longest_token(vocabulary: Collection[str]) -> int:
    """Return the greatest number of bytes that a token of a byte-level vocabulary stands for.

    A token stands for one byte per character. If its text is not a spelling of bytes, it stands for its UTF-8. Only
    few tokens have to be examined.
    """
    least = max(map(len, vocabulary))
    short = least // 4  # this many characters have at most `least` bytes
    long = [text for text in vocabulary if len(text) > short and len(text.encode()) > least]
    return max([least, *(len(text if BYTES.keys() >= set(text) else text.encode()) for text in long)])


def derive_sentence_piece_bounds(described: Mapping[str, Any], tokens: Sequence[str]) -> TokenBounds:
    """Return the bounds of a SentencePiece tokenizer. Its words may contain spaces and signs, so nothing is cut."""
    step = described.get("pre_tokenizer")
    normalizer = described.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    shrinks = not all(step.get("type") == "Prepend" or replaces_spaces(step) for step in steps)
    if shrinks or (step is not None and step.get("type") != "Metaspace"):
        return TokenBounds()
    return TokenBounds(max(len(token.encode()) for token in tokens))


def replaces_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": " "}, SPACE)


def find_shrinkage(normalizer: Any) -> int:
    """Return how many times shorter normalisation may make a text. 0: this is not known."""
    if normalizer is None:
        return 1
    return SHRINKS if normalizer.get("type") == "NFC" else 0


def splits_words(step: Any) -> bool:
    """Does this pre-tokenizer keep every byte, and end a word wherever `CUT` says?"""
    if not isinstance(step, Mapping):
        return False
    match step.get("type"):
        case "Sequence":
            parts = step.get("pretokenizers") or []
            return any(uses_known_pattern(part) for part in parts) and all(keeps_every_byte(part) for part in parts)
        case _:
            return uses_known_pattern(step) and keeps_every_byte(step)


def uses_known_pattern(step: Mapping[str, Any]) -> bool:
    """Does this step cut by one of the known expressions?"""
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step.get("type") == "Split" and (step.get("pattern") or {}).get("Regex") in KNOWN


def keeps_every_byte(step: Mapping[str, Any]) -> bool:
    """Does this step pass on every byte, in words that the next step does not join?"""
    match step.get("type"):
        case "ByteLevel":
            return not step.get("add_prefix_space", True)
        case "Digits":
            return True
        case "Split":
            return step.get("behavior") == "Isolated" and not step.get("invert") and uses_known_pattern(step)
    return False
