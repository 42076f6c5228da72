"""A GGUF file's text: its metadata as tokenizer.json and the other files of a folder would have it.

llama.cpp names a byte-level pre-tokenizer and has its expression in its code; here it is what the models' own
tokenizer.json say under that name, Unicode normalisation included. SentencePiece has none (`sentence_piece.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, shown
from adapters.checkpoint.gguf import sentence_piece
from adapters.checkpoint.gguf.header import GgufHeader, Items, read_header
from adapters.checkpoint.gguf.metadata import shortest
from adapters.checkpoint.split_patterns import LLAMA3, QWEN, QWEN35

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # kinds of tokens
# Ends of an answer that models have beside the one that the metadata name, as llama.cpp finds them: by their text
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
END_FIELDS = ("eos", "eot", "eom")
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@frozen
class WordCuts:
    """steps: of the pre-tokenizer. whole: a word that is a token is not merged. start: a text begins with the first
    token unless the metadata say otherwise.
    """

    steps: Sequence[Mapping[str, Any]]
    normalizer: Mapping[str, Any] | None = None
    whole: bool = False
    start: bool = False


def split(expression: str) -> tuple[Mapping[str, Any], ...]:
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return cut, {**BYTE_LEVEL, "use_regex": False}


NFC = {"type": "NFC"}
WORDS: Mapping[str, WordCuts] = {
    "qwen2": WordCuts(split(QWEN), NFC),
    "qwen35": WordCuts(split(QWEN35), NFC),
    "deepseek-r1-qwen": WordCuts(split(QWEN)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), WordCuts(split(LLAMA3), whole=True, start=True)),
    "gpt-2": WordCuts(({**BYTE_LEVEL, "use_regex": True},)),
    "smollm": WordCuts(({"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True})),
}
"""By what llama.cpp calls them."""


def described(path: Path, most_template: int) -> dict[str, Any]:
    """What `TextFiles` holds of a folder, by the same names. Raises CheckpointError, one line.

    most_template: bytes of it.
    """
    header = read_header(path)
    fields = header.fields
    model = fields.get("tokenizer.ggml.model")
    if model not in {"gpt2", "llama"}:
        what = "is missing" if model is None else f"{shown(model)} is not supported"
        accepted = "'gpt2', which is byte-level BPE, and 'llama', which is SentencePiece"
        raise CheckpointError(f"{path}: tokenizer.ggml.model {what}; accepted: {accepted}")
    tokens, ids = read_tokens(header)
    added = added_tokens(header, tokens)
    if model == "gpt2":
        words = word_cuts(header)
        parts, start = byte_level(header, words, ids), words.start
    else:
        parts, start = sentence_piece.parts(header, tokens, ids, [token["content"] for token in added]), True
    named = {name: tokens[id_] for name, key in SPECIAL.items() if (id_ := token_id(header, key, tokens)) is not None}
    ends = [id_ for key in END_FIELDS if (id_ := token_id(header, key, tokens)) is not None]
    ends += [token["id"] for token in added if token["content"] in ENDS]
    template = fields.get("tokenizer.chat_template")
    if template is not None and not (isinstance(template, str) and len(template.encode()) <= most_template):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no text, or larger than {most_template >> 20} MiB")
    return {
        "tokenizer": {
            "version": "1.0",
            "added_tokens": added,
            "post_processor": starting(header, start, named.get("bos_token"), ids),
            **parts,
        },
        "settings": named,
        "generation": {
            name: shortest(told) if isinstance(told, float) else told
            for name, key in SAMPLING.items()
            if (told := fields.get(f"general.sampling.{key}")) is not None and not isinstance(told, Items)
        },
        "end_tokens": tuple(dict.fromkeys(ends)),
        "template": template,
    }


def word_cuts(header: GgufHeader) -> WordCuts:
    pre = header.fields.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in WORDS:
        what = "is missing" if pre is None else f"{shown(pre)} is not supported"
        raise CheckpointError(f"{header.path}: tokenizer.ggml.pre {what}; accepted: {', '.join(map(repr, WORDS))}")
    return WORDS[pre]


def byte_level(header: GgufHeader, words: WordCuts, ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "normalizer": words.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(words.steps)},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": words.whole, "vocab": ids, "merges": read_merges(header, ids)},
    }


def kinds(header: GgufHeader, tokens: Sequence[str]) -> list[int]:
    name = "tokenizer.ggml.token_type"
    found = header.integers(name) if name in header.fields else [NORMAL] * len(tokens)
    if len(found) != len(tokens):
        raise CheckpointError(f"{header.path}: {name} has {len(found)} entries for {len(tokens)} tokens")
    return found


def read_tokens(header: GgufHeader) -> tuple[list[str], dict[str, int]]:
    """All, and the ids of those that are used. Files fill a vocabulary up with unused ones."""
    tokens = header.texts("tokenizer.ggml.tokens")
    ids = dict[str, int]()
    for id_, (token, kind) in enumerate(zip(tokens, kinds(header, tokens), strict=True)):
        if kind == UNUSED:
            continue
        if token in ids:
            raise CheckpointError(f"{header.path}: tokens {ids[token]} and {id_} are both {shown(token)}")
        ids[token] = id_
    return tokens, ids


def added_tokens(header: GgufHeader, tokens: Sequence[str]) -> list[dict[str, Any]]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": id_, "content": tokens[id_], **plain, "special": kind != USER_DEFINED}
        for id_, kind in enumerate(kinds(header, tokens))
        if kind in {UNKNOWN, CONTROL, USER_DEFINED}
    ]


def read_merges(header: GgufHeader, ids: Mapping[str, int]) -> list[list[str]]:
    """Two tokens each, which a space is between, and which together are one."""
    merges = []
    for number, merge in enumerate(header.texts("tokenizer.ggml.merges")):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not right or not (left in ids and right in ids and left + right in ids):
            raise CheckpointError(f"{header.path}: merge {number} {shown(merge)} is not of two tokens that make one")
        merges.append([left, right])
    return merges


def token_id(header: GgufHeader, key: str, tokens: Sequence[str]) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    found = header.fields.get(name)
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < len(tokens):
        raise CheckpointError(f"{header.path}: {name} {shown(found)} is not a token id in 0..{len(tokens) - 1}")
    return found


def starting(header: GgufHeader, start: bool, first: str | None, ids: Mapping[str, int]) -> dict[str, Any] | None:
    """What puts the first token before a text, if anything does. start: unless the metadata say otherwise."""
    if header.fields.get("tokenizer.ggml.add_eos_token") is True:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.add_eos_token true is not supported; accepted: false")
    if not header.fields.get("tokenizer.ggml.add_bos_token", start):
        return None
    if first is None or first not in ids:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.bos_token_id, with which texts begin, is no token")
    token, text = {"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [ids[first]], "tokens": [first]}},
    }
