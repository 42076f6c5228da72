"""Turns a GGUF file's metadata into the content of tokenizer.json and of the other text files of a folder.

A GGUF file names its byte-level pre-tokenizer, and llama.cpp's code has the expression. Here the expression is that of
the models' own tokenizer.json, with Unicode normalisation. SentencePiece has no pre-tokenizer (`sentence_piece.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.gguf import sentence_piece
from adapters.checkpoint.gguf.header import GgufHeader, ListField, read_header
from adapters.checkpoint.gguf.metadata import shorten_float
from adapters.checkpoint.split_patterns import LLAMA3, O200K, QWEN, QWEN35, SEED, TEKKEN
from adapters.checkpoint.text_content import TextContent

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
# Kinds of tokens.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# Further end tokens besides the one that the metadata name. llama.cpp also finds them by their text.
ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>"),
)
MODELS = ("gpt2", "llama", "gemma4")  # the accepted kinds of vocabularies
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
class PreTokenizer:
    """A byte-level pre-tokenizer and what belongs to it.

    steps: the steps of the pre-tokenizer, as in tokenizer.json.
    keeps_whole_tokens: a word that is a token is not merged from parts.
    adds_first_token: a text begins with the BOS token unless the metadata say otherwise.
    """

    steps: Sequence[Mapping[str, Any]]
    normalizer: Mapping[str, Any] | None = None
    keeps_whole_tokens: bool = False
    adds_first_token: bool = False


def make_split_steps(expression: str) -> tuple[Mapping[str, Any], ...]:
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return cut, {**BYTE_LEVEL, "use_regex": False}


NFC = {"type": "NFC"}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "qwen2": PreTokenizer(make_split_steps(QWEN), NFC),
    "qwen35": PreTokenizer(make_split_steps(QWEN35), NFC),
    "deepseek-r1-qwen": PreTokenizer(make_split_steps(QWEN)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        PreTokenizer(make_split_steps(LLAMA3), keeps_whole_tokens=True, adds_first_token=True),
    ),
    "tekken": PreTokenizer(make_split_steps(TEKKEN), keeps_whole_tokens=True, adds_first_token=True),
    "gpt-4o": PreTokenizer(make_split_steps(O200K), keeps_whole_tokens=True),
    "minimax-m2": PreTokenizer(make_split_steps(O200K)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), PreTokenizer(make_split_steps(LLAMA3))),
    "seed-coder": PreTokenizer(make_split_steps(SEED)),
    "gpt-2": PreTokenizer(({**BYTE_LEVEL, "use_regex": True},)),
    "smollm": PreTokenizer(({"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True})),
}
"""The known pre-tokenizers, by the names that llama.cpp gives them."""


def read_gguf_text(path: Path, most_template: int) -> TextContent:
    """Return the text of a GGUF file as files of a folder would have it. Raises CheckpointError, one line.

    most_template: the greatest size of the chat template in bytes.
    """
    header = read_header(path)
    fields = header.fields
    model = fields.get("tokenizer.ggml.model")
    if model not in MODELS:
        what = "is missing" if model is None else f"{describe_value(model)} is not supported"
        accepted = "'gpt2', which is byte-level BPE, and 'llama' and 'gemma4', which are SentencePiece"
        raise CheckpointError(f"{path}: tokenizer.ggml.model {what}; accepted: {accepted}")
    tokens, ids = read_tokens(header)
    added = list_added_tokens(header, tokens)
    if model == "gpt2":
        words = find_pre_tokenizer(header)
        parts = build_byte_level(header, words, ids)
        start = words.adds_first_token
    else:
        sentence_piece.check_bytes(header, ids)
        has_merges = model == "gemma4"
        whole = [token["content"] for token in added]
        merges = read_merges(header, ids) if has_merges else sentence_piece.build_merges(header, tokens, ids, whole)
        parts = sentence_piece.build_tokenizer_parts(header, ids, merges, adds_space=not has_merges)
        start = True
    named = {
        name: tokens[id_] for name, key in SPECIAL.items() if (id_ := read_token_id(header, key, tokens)) is not None
    }
    ends = [id_ for key in END_FIELDS if (id_ := read_token_id(header, key, tokens)) is not None]
    ends += [token["id"] for token in added if token["content"] in ENDS]
    template = fields.get("tokenizer.chat_template")
    if template is not None and not (isinstance(template, str) and len(template.encode()) <= most_template):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no text, or larger than {most_template >> 20} MiB")
    return TextContent(
        tokenizer={
            "version": "1.0",
            "added_tokens": added,
            "post_processor": build_post_processor(header, start, named.get("bos_token"), ids),
            **parts,
        },
        settings=named,
        generation={
            name: shorten_float(value) if isinstance(value, float) else value
            for name, key in SAMPLING.items()
            if (value := fields.get(f"general.sampling.{key}")) is not None and not isinstance(value, ListField)
        },
        end_tokens=tuple(dict.fromkeys(ends)),
        template=template,
    )


def find_pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    """Return the pre-tokenizer that the file names. Raises CheckpointError for an unknown name."""
    pre = header.fields.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        what = "is missing" if pre is None else f"{describe_value(pre)} is not supported"
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.pre {what}; accepted: {', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[pre]


def build_byte_level(header: GgufHeader, words: PreTokenizer, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of a tokenizer.json for byte-level BPE."""
    return {
        "normalizer": words.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(words.steps)},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": words.keeps_whole_tokens,
            "vocab": ids,
            "merges": read_merges(header, ids),
        },
    }


def read_token_kinds(header: GgufHeader, tokens: Sequence[str]) -> list[int]:
    name = "tokenizer.ggml.token_type"
    found = header.read_integers(name) if name in header.fields else [NORMAL] * len(tokens)
    if len(found) != len(tokens):
        raise CheckpointError(f"{header.path}: {name} has {len(found)} entries for {len(tokens)} tokens")
    return found


def read_tokens(header: GgufHeader) -> tuple[list[str], dict[str, int]]:
    """Return all tokens, and the ids of those that are used. Files fill up a vocabulary with unused tokens."""
    tokens = header.read_texts("tokenizer.ggml.tokens")
    ids = dict[str, int]()
    for id_, (token, kind) in enumerate(zip(tokens, read_token_kinds(header, tokens), strict=True)):
        if kind == UNUSED:
            continue
        if token in ids:
            raise CheckpointError(f"{header.path}: tokens {ids[token]} and {id_} are both {describe_value(token)}")
        ids[token] = id_
    return tokens, ids


def list_added_tokens(header: GgufHeader, tokens: Sequence[str]) -> list[dict[str, Any]]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": id_, "content": tokens[id_], **plain, "special": kind != USER_DEFINED}
        for id_, kind in enumerate(read_token_kinds(header, tokens))
        if kind in {UNKNOWN, CONTROL, USER_DEFINED}
    ]


def read_merges(header: GgufHeader, ids: Mapping[str, int]) -> list[list[str]]:
    """Return the merges: pairs of tokens that together are a token. Files write a space between the two."""
    merges = []
    for number, merge in enumerate(header.read_texts("tokenizer.ggml.merges")):
        at = merge.find(" ", 1)
        left = merge[:at]
        right = merge[at + 1 :]
        if at < 0 or not right or not (left in ids and right in ids and left + right in ids):
            raise CheckpointError(
                f"{header.path}: merge {number} {describe_value(merge)} is not of two tokens that make one"
            )
        merges.append([left, right])
    return merges


def read_token_id(header: GgufHeader, key: str, tokens: Sequence[str]) -> int | None:
    """Return the id of a special token, or None. Raises CheckpointError for an id out of range."""
    name = f"tokenizer.ggml.{key}_token_id"
    found = header.fields.get(name)
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < len(tokens):
        raise CheckpointError(
            f"{header.path}: {name} {describe_value(found)} is not a token id in 0..{len(tokens) - 1}"
        )
    return found


def build_post_processor(
    header: GgufHeader, start: bool, first: str | None, ids: Mapping[str, int]
) -> dict[str, Any] | None:
    """Return the post-processor that puts the first token before a text, or None.

    start: the default where the metadata do not say whether there is a first token.
    """
    if header.fields.get("tokenizer.ggml.add_eos_token") is True:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.add_eos_token true is not supported; accepted: false")
    if not header.fields.get("tokenizer.ggml.add_bos_token", start):
        return None
    if first is None or first not in ids:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.bos_token_id, with which texts begin, is no token")
    token = {"SpecialToken": {"id": first, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [ids[first]], "tokens": [first]}},
    }
