"""How much text can be refused unread, and where a text may be cut without changing its tokens.

Both follow from tokenizer.json, and only from kinds that are known. A token of a byte-level vocabulary stands for no
more bytes than the longest one has, so a text has at least so many tokens. And between a letter and a sign that is
none, every known pre-tokenizer ends a word, whatever comes after: none of their expressions goes on from a letter to
anything but a letter or its mark, and none looks back. NFC composes nothing across such a place either. So the parts
have the tokens of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from adapters.checkpoint.split_patterns import GPT2, LLAMA3, QWEN, QWEN35
from adapters.text.token_spelling import BYTES, SPACE, Spelling

PIECE = 1 << 16  # characters: some 20 ms of encoding
CUT = re.compile("(?<=[A-Za-z\u4e00-\u9fa5])(?=[\\x00-@\\[-`{-\\x7f\u3001\u3002\uff0c])")
SHRINKS = 3  # NFC: three Hangul jamo of three bytes each become one syllable of three
LONG = 1 << 20  # characters
UNPROVEN = 64  # bytes a token, for the byte limit where nothing is known

KNOWN = (GPT2, QWEN, LLAMA3, QWEN35)
Added: TypeAlias = Mapping[str, Any]  # a token of tokenizer.json's `added_tokens`


@frozen
class Knowledge:
    """What is known of a tokenizer. `longest`: bytes that one token stands for at most; 0: not known."""

    longest: int = 0
    cuts: bool = False

    def least(self, size: int) -> int:
        """Tokens of a text of so many bytes, at least; 0 where that is not known."""
        return -(-size // self.longest) if self.longest else 0

    def most_bytes(self, tokens: int) -> int:
        """A longer text is refused unread where it may have no more than so many tokens."""
        return tokens * (self.longest or UNPROVEN)

    def pieces(self, text: str) -> Iterator[str]:
        """The text in parts of some 64 Ki characters each, whose tokens are those of the whole."""
        start = 0
        while self.cuts and len(text) - start > PIECE and (found := CUT.search(text, start + PIECE)):
            yield text[start : found.start()]
            start = found.start()
        yield text[start:] if start else text


def size_of(text: str) -> int:
    """Bytes of its UTF-8; of a long text at least: no more than characters are counted, which takes no time."""
    return len(text) if len(text) > LONG or text.isascii() else len(text.encode())


def runs(texts: Sequence[str], knowledge: Knowledge) -> Iterator[list[tuple[int, str]]]:
    """All pieces of all texts with the place of their text, in portions of some 64 Ki characters."""
    run, size = list[tuple[int, str]](), 0
    for place, text in enumerate(texts):
        for piece in knowledge.pieces(text):
            if run and size + len(piece) > PIECE:
                yield run
                run, size = [], 0
            run.append((place, piece))
            size += len(piece)
    if run:
        yield run


def known(described: Mapping[str, Any], spelling: Spelling) -> Knowledge:
    """From the content of a tokenizer.json."""
    return known_with(described, spelling, [described.get("added_tokens") or ()])[0]


def known_with(described: Mapping[str, Any], spelling: Spelling, lists: Sequence[Sequence[Added]]) -> list[Knowledge]:
    """With each of these lists in the place of its added tokens. A vocabulary is looked through once."""
    model = described.get("model") or {}
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, Mapping) or model.get("type", "BPE") != "BPE" or model.get("dropout"):
        return [Knowledge()] * len(lists)
    if spelling.sentence_piece:
        return [spaced(described, [*vocabulary, *(token["content"] for token in added)]) for added in lists]
    shrinks = shrinkage(described.get("normalizer"))
    if not (shrinks and splits_words(described.get("pre_tokenizer")) and BYTES.keys() <= vocabulary.keys()):
        return [Knowledge()] * len(lists)
    longest = longest_of(vocabulary)
    return [counted(added, longest, shrinks) for added in lists]


def counted(added: Sequence[Added], longest: int, shrinks: int) -> Knowledge:
    """Where the vocabulary's longest token stands for so many bytes, of a text that may have been longer."""
    if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
        return Knowledge()
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return Knowledge(shrinks * longest, not any(CUT.search(token["content"]) for token in added))


def longest_of(vocabulary: Collection[str]) -> int:
    """Bytes that a token of a byte-level vocabulary stands for at most: as many as its text has characters, or, where
    that is no spelling of bytes, as its UTF-8 has. Few texts have to be looked at for that.
    """
    least = max(map(len, vocabulary))
    short = least // 4  # characters, which are no more bytes than `least`
    long = [text for text in vocabulary if len(text) > short and len(text.encode()) > least]
    return max([least, *(len(text if BYTES.keys() >= set(text) else text.encode()) for text in long)])


def spaced(described: Mapping[str, Any], tokens: Sequence[str]) -> Knowledge:
    """A word of SentencePiece's goes on over spaces and signs, so nothing is cut. Rare bytes are a token each."""
    step, normalizer = described.get("pre_tokenizer"), described.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    shrinks = not all(one.get("type") == "Prepend" or replaces_spaces(one) for one in steps)
    if shrinks or (step is not None and step.get("type") != "Metaspace"):
        return Knowledge()
    return Knowledge(max(len(token.encode()) for token in tokens))


def replaces_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": " "}, SPACE)


def shrinkage(normalizer: Any) -> int:
    """How much shorter a normalised text may be; 0: not known."""
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
            return any(regular(part) for part in parts) and all(keeps(part) for part in parts)
        case _:
            return regular(step) and keeps(step)


def regular(step: Mapping[str, Any]) -> bool:
    """Does it cut by one of the expressions that are known?"""
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step.get("type") == "Split" and (step.get("pattern") or {}).get("Regex") in KNOWN


def keeps(step: Mapping[str, Any]) -> bool:
    """Does it hand on every byte, in words that the next step does not join?"""
    match step.get("type"):
        case "ByteLevel":
            return not step.get("add_prefix_space", True)
        case "Digits":
            return True
        case "Split":
            return step.get("behavior") == "Isolated" and not step.get("invert") and regular(step)
    return False
