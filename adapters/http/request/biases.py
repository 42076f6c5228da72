"""Read `logit_bias`: numbers that are added to the logits of tokens, by token ids or by texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from adapters.http.edge_options import EdgeModel
from adapters.http.wire.errors import ApiError, invalid
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.tokenizer import Tokenizer

MAX_BIASES = 1024
MAX_TEXT_CHARACTERS = 1 << 14  # characters of all texts together: they are tokenized on the event loop, in some 5 ms
NEVER_BIAS = -100.0  # what llama.cpp's `false` asks for
ACCEPTED = "an object of token ids or texts, or an array of pairs of a token id or a text and a number"


@frozen
class Bias:
    """One bias: the token id or text, the number as it was sent, and its path in the body."""

    target: int | str
    bias: Any
    path: str


def read_biases(fields: Fields, model: EdgeModel, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return token ids with their biases. Every token of a text gets its bias, as in llama.cpp."""
    path = fields.path_of("logit_bias")
    listed = [*parse_biases(fields)]
    if len(listed) > MAX_BIASES:
        raise too_many(path, len(listed))
    texts = [entry.target for entry in listed if isinstance(entry.target, str)]
    if sum(map(len, texts)) > MAX_TEXT_CHARACTERS:
        raise invalid(path, f"must have texts of at most {MAX_TEXT_CHARACTERS} characters together")
    tokens = iter(tokenizer.encode_now(texts) if texts else ())
    read: dict[int, float] = {}
    for entry in listed:
        bias = check_bias(entry)
        if isinstance(entry.target, str):
            read |= dict.fromkeys(next(tokens), bias)
        elif 0 <= entry.target < model.vocab:
            read[entry.target] = bias
        else:
            raise invalid(path, f"the key {entry.target} is not a token id from 0 to {model.vocab - 1}")
    if len(read) > MAX_BIASES:
        raise too_many(path, len(read))
    return tuple(sorted(read.items()))


def parse_biases(fields: Fields) -> Iterator[Bias]:
    """Yield the biases as they were sent. Raises ApiError if the field has another shape."""
    path = fields.path_of("logit_bias")
    given = fields.read("logit_bias", lambda value: isinstance(value, dict | list), ACCEPTED)
    if isinstance(given, list):
        for pair in given:
            if not (isinstance(pair, list) and len(pair) == 2 and (type(pair[0]) is int or isinstance(pair[0], str))):
                raise invalid(path, f"must be {ACCEPTED}")
            yield Bias(pair[0], pair[1], f"{path}.{shorten_key(pair[0])}")
    elif given is not None:
        for name, bias in Fields.from_value(given, path).data.items():
            number = name.isascii() and name.isdecimal() and len(name) < 12
            yield Bias(int(name) if number else name, bias, f"{path}.{shorten_key(name)}")


def shorten_key(key: int | str) -> str:
    return str(key)[:60]


def check_bias(entry: Bias) -> float:
    if entry.bias is False:
        return NEVER_BIAS
    if type(entry.bias) not in (int, float) or not -100 <= entry.bias <= 100:
        raise invalid(entry.path, f"must be a number in [-100, 100], not {quote_value(entry.bias)}")
    return float(entry.bias)


def too_many(path: str, count: int) -> ApiError:
    return invalid(path, f"must have at most {MAX_BIASES} entries, not {count}")
