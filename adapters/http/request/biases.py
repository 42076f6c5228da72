"""`logit_bias`: numbers that are added to the logits of tokens, by token ids or by texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from adapters.http.edge_options import EdgeOptions
from adapters.http.wire.errors import ApiError, invalid
from adapters.http.wire.fields import Fields, shown
from adapters.text.tokenizer import Tokenizer

MAX_BIASES = 1024
MAX_TEXTS = 1 << 14  # characters of all texts together: they are tokenized on the event loop, in some 5 ms
NEVER = -100.0  # what llama.cpp's `false` asks for
ACCEPTED = "an object of token ids or texts, or an array of pairs of a token id or a text and a number"


@frozen
class Bias:
    """What is biased, by how much, and where it stands in the body."""

    what: int | str
    bias: Any
    path: str


def read_biases(fields: Fields, options: EdgeOptions, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return token ids with their biases. Every token of a text gets its bias, as in llama.cpp."""
    path, listed = fields.at("logit_bias"), [*asked_biases(fields)]
    if len(listed) > MAX_BIASES:
        raise too_many(path, len(listed))
    texts = [one.what for one in listed if isinstance(one.what, str)]
    if sum(map(len, texts)) > MAX_TEXTS:
        raise invalid(path, f"must have texts of at most {MAX_TEXTS} characters together")
    tokens = iter(tokenizer.encode_now(texts) if texts else ())
    read: dict[int, float] = {}
    for one in listed:
        bias = checked(one)
        if isinstance(one.what, str):
            read |= dict.fromkeys(next(tokens), bias)
        elif 0 <= one.what < options.vocab:
            read[one.what] = bias
        else:
            raise invalid(path, f"the key {one.what} is not a token id from 0 to {options.vocab - 1}")
    if len(read) > MAX_BIASES:
        raise too_many(path, len(read))
    return tuple(sorted(read.items()))


def asked_biases(fields: Fields) -> Iterator[Bias]:
    """Raises ApiError where they have another shape."""
    path = fields.at("logit_bias")
    given = fields.read("logit_bias", lambda value: isinstance(value, dict | list), ACCEPTED)
    if isinstance(given, list):
        for pair in given:
            if not (isinstance(pair, list) and len(pair) == 2 and (type(pair[0]) is int or isinstance(pair[0], str))):
                raise invalid(path, f"must be {ACCEPTED}")
            yield Bias(pair[0], pair[1], f"{path}.{key_of(pair[0])}")
    elif given is not None:
        for name, bias in Fields.of(given, path).data.items():
            number = name.isascii() and name.isdecimal() and len(name) < 12
            yield Bias(int(name) if number else name, bias, f"{path}.{key_of(name)}")


def key_of(key: int | str) -> str:
    return str(key)[:60]


def checked(one: Bias) -> float:
    if one.bias is False:
        return NEVER
    if type(one.bias) not in (int, float) or not -100 <= one.bias <= 100:
        raise invalid(one.path, f"must be a number in [-100, 100], not {shown(one.bias)}")
    return float(one.bias)


def too_many(path: str, count: int) -> ApiError:
    return invalid(path, f"must have at most {MAX_BIASES} entries, not {count}")
